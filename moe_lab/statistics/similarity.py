"""Sums from which the similarity of experts follows: every expert reads every token, and what the router says."""

from __future__ import annotations

from typing import Any

import torch

from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import wide
from moe_lab.statistics.observe import Observer, Tap


class SimilarityTap(Tap):
    """Adds `dense_output_sum` and, for routers that give logits, `router_gram` and `dense_gated_output_sum` (sums.py).

    All E experts run on all tokens, so the experts' share of a forward pass costs about E / K times as much as with K
    experts per token.
    """

    kind = "similarity"

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        super().__init__(observer, layer, start)
        self.probabilities: torch.Tensor | None = None
        """(T, E) fp64 of the valid tokens, from the router's call to that of the experts; None without logits."""

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Add the products of the logits (T, E) of valid tokens, and record their softmax."""
        self.probabilities = None
        logits = result[0] if isinstance(result, tuple) else None
        if not isinstance(logits, torch.Tensor) or logits.shape[-1] != self.layer.n_experts:
            return
        logits = logits.detach().reshape(-1, self.layer.n_experts)
        valid = self.valid(logits)
        logits = (logits if valid is None else logits[valid]).double()
        self.probabilities = logits.softmax(-1)
        self.add("router_gram", logits.T @ logits)

    def experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed output (T, H); adds the outputs of all experts for all valid tokens."""
        valid = self.valid(hidden)
        states = hidden if valid is None else hidden[valid]
        plain, gated = [], []
        for expert in range(self.layer.n_experts):
            outputs = wide(self.layer.expert_output(states, expert)).double()
            plain.append(outputs.sum(0))
            if self.probabilities is not None:
                gated.append(self.probabilities[:, expert].to(outputs.device) @ outputs)
        self.add("dense_output_sum", torch.stack(plain))
        if gated:
            self.add("dense_gated_output_sum", torch.stack(gated))
        return self.before(hidden, index, weights)
