"""Every forward statistic of routed experts, at about the cost of a plain forward pass.

Experts compute what the eager forward computes, in the same order: logits are bit-identical to it on the CPU. Gates are
those the model's own router gave, so no routing rule is known here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import intermediate, output, sort_by_expert
from moe_lab.statistics.accumulate import Call
from moe_lab.statistics.observe import Observer, Tap

ENTROPY_BINS = 50
"""Bins of the histogram of router entropies, from 0 to the logarithm of the number of experts."""


class ForwardTap(Tap):
    """Adds all statistics of a forward pass; see sums.py.

    A forward pass that autograd repeats inside a backward pass (gradient checkpointing) is not counted again.
    """

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        super().__init__(observer, layer, start)
        self.softmax_router = "sums_double_softmax" in start if start else None
        # a pass that goes on from sums without the histogram would count only the rest of the tokens
        self.counts_entropies = not start or "router_entropy" in start
        self.logits: torch.Tensor | None = None
        self.call: Call | None = None

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Keep the router's logits (T, E) for the call of the experts that follows."""
        first = result[0] if isinstance(result, tuple) else None
        self.logits = None
        if isinstance(first, torch.Tensor) and first.shape[-1] == self.layer.n_experts:
            self.logits = first.detach().reshape(-1, self.layer.n_experts)

    def experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed output m (T, H), observed on the way."""
        module = self.layer.experts
        rows = sort_by_expert(index, self.layer.n_experts)
        call = None
        if not inside_backward():
            gates = weights.detach()
            call = Call(self.layer.n_experts, rows, gates, self._softmax_gates(index, gates), self.valid(hidden))
        mixed = torch.zeros_like(hidden)
        for expert, part in rows.parts():
            token = rows.token[part]
            phi = intermediate(module, hidden[token], expert)
            f = output(module, phi, expert)
            if call is not None:
                call.add(expert, part, phi.detach(), f.detach())
            mixed.index_add_(0, token, (f * weights[token, rows.column[part], None]).to(mixed.dtype))
        if call is not None:
            for name, sums in call.finish(mixed.detach()).items():
                self.add(name, sums)
            if self.logits is not None and self.counts_entropies:
                self.add("router_entropy", entropy_histogram(self.logits, call.valid))
        self.call = call
        return mixed

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """The decoder layer is done: its output is the denominator of what the call left open."""
        if self.call is not None:
            stream = result[0] if isinstance(result, tuple) else result
            for name, sums in self.call.normalize(stream.detach().flatten(0, -2)).items():
                self.add(name, sums)
            self.call = None

    def _softmax_gates(self, index: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gates full_softmax and double_softmax (T, K), if the router is a softmax over all experts; its first call
        tells."""
        if self.softmax_router is None:
            self.softmax_router = self.logits is not None and is_softmax(self.logits, index, weights)
        if not self.softmax_router or self.logits is None:
            return {}
        full = self.logits.double().softmax(-1)
        return {"full_softmax": full.gather(-1, index), "double_softmax": full.softmax(-1).gather(-1, index)}


def entropy_histogram(logits: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """How many tokens have a router entropy in each of ENTROPY_BINS equal bins between 0 and ln E; `logits` (T, E)."""
    logits = logits if valid is None else logits[valid]
    entropies = torch.special.entr(logits.double().softmax(-1)).sum(-1) / math.log(max(2, logits.shape[-1]))
    bins = (entropies * ENTROPY_BINS).long().clamp(0, ENTROPY_BINS - 1)
    return torch.bincount(bins, minlength=ENTROPY_BINS)


def is_softmax(logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether a router's gates are proportional to exp(logits), i.e. softmax probabilities, renormalised or not.

    `logits` (T, E), `index` and `weights` (T, K). Told from what the router does, not from its name: log g - z is then
    the same for all experts of a token. With K = 1 that says nothing, and g must be the probability times a constant.
    """
    tolerance = 1e-3 if weights.dtype in (torch.float32, torch.float64) else 0.05
    chosen = logits.double().log_softmax(-1).gather(-1, index)
    gap = weights.double().clamp(min=torch.finfo(torch.float64).tiny).log() - chosen
    axis = 1 if index.shape[1] > 1 else 0
    return bool(((gap.amax(axis) - gap.amin(axis)) <= tolerance).all())


def inside_backward() -> bool:
    """Whether autograd is running a backward pass, within which gradient checkpointing repeats forward passes."""
    return bool(torch._C._current_graph_task_id() != -1)
