"""Observe the routed experts of a model: every forward statistic of one batch, at about the cost of a plain forward pass.

The experts compute exactly what the eager forward computes, in the same order: logits are bit-identical to it on the CPU.
Gates are those the model's own router gave, so no routing rule is known here.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.statistics.accumulate import Call, LayerSums
from moe_lab.statistics.dispatch import not_called, replaced, run
from moe_lab.statistics.experts import intermediate, output, sort_by_expert
from moe_lab.statistics.sums import Layers


class Observer:
    """Sums of all MoE layers of a model over the batches it reads while open.

        with Observer(model) as observer:
            observer.read(input_ids, valid)
        observer.layers()   # layer -> name -> fp64 tensor on the CPU

    Whatever else runs the model meanwhile is observed too, under the `valid` mask set last; a forward pass that autograd
    repeats inside a backward pass (gradient checkpointing) is not counted again.
    """

    def __init__(self, model: PreTrainedModel, start: Layers | None = None) -> None:
        self.model = model
        self.taps = [_Tap(self, layer, (start or {}).get(layer.index, {})) for layer in moe_layers(model)]
        self.valid: torch.Tensor | None = None
        """(B, S) bool: which tokens of the batch count; None for all of them."""
        self._open = ExitStack()

    def __enter__(self) -> Observer:
        with ExitStack() as stack:
            functions = {tap.layer.index: tap.experts for tap in self.taps}
            stack.enter_context(replaced(self.model, [tap.layer for tap in self.taps], functions))
            for tap in self.taps:
                decoder_layer = self.model.get_submodule(_decoder_layer(tap.layer))
                stack.callback(tap.layer.router.register_forward_hook(tap.after_router).remove)
                stack.callback(decoder_layer.register_forward_hook(tap.after_layer).remove)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, input_ids: torch.Tensor, valid: torch.Tensor) -> None:
        """Add one batch: `input_ids` (B, S) int64, `valid` (B, S) bool, which is the attention mask too.

        UserError when an experts module was not called through the registry.
        """
        self.valid = valid
        for tap in self.taps:
            tap.calls = 0
        with torch.no_grad():
            run(self.model, input_ids, valid)
        for tap in self.taps:
            if tap.calls == 0:
                raise not_called(tap.layer)

    def layers(self) -> Layers:
        """The sums so far: layer -> name -> fp64 tensor on the CPU."""
        return {tap.layer.index: {name: tensor.cpu() for name, tensor in tap.sums.tensors.items()} for tap in self.taps}


class _Tap:
    """One layer under observation: its sums, and what is known of the call in progress."""

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        self.observer = observer
        self.layer = layer
        self.sums = LayerSums(layer.n_experts)
        self.sums.tensors.update(start)
        self.softmax_router = "sums_double_softmax" in start if start else None
        self.calls = 0
        self.logits: torch.Tensor | None = None
        self.call: Call | None = None

    def after_router(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Keep the router's logits (T, E) for the call of the experts that follows."""
        first = result[0] if isinstance(result, tuple) else None
        fits = isinstance(first, torch.Tensor) and first.shape[-1] == self.layer.n_experts
        self.logits = first.detach().reshape(-1, self.layer.n_experts) if fits else None

    def experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed output m (T, H), observed on the way."""
        self.calls += 1
        module = self.layer.experts
        rows = sort_by_expert(index, self.layer.n_experts)
        call = None if inside_backward() else self._begin(rows, hidden, index, weights.detach())
        mixed = torch.zeros_like(hidden)
        for expert, part in rows.parts():
            token = rows.token[part]
            phi = intermediate(module, hidden[token], expert)
            f = output(module, phi, expert)
            if call is not None:
                call.add(expert, part, phi.detach(), f.detach())
            mixed.index_add_(0, token, (f * weights[token, rows.column[part], None]).to(mixed.dtype))
        if call is not None:
            call.finish(mixed.detach())
        self.call = call
        return mixed

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """The decoder layer is done: its output is the denominator of what the call left open."""
        if self.call is not None:
            stream = result[0] if isinstance(result, tuple) else result
            self.call.normalize(stream.detach().flatten(0, -2))
            self.call = None

    def _begin(self, rows: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Call:
        if self.softmax_router is None:
            self.softmax_router = self.logits is not None and is_softmax(self.logits, index, weights)
        gates = None
        if self.softmax_router and self.logits is not None:
            gates = self.logits.double().softmax(-1).softmax(-1).gather(-1, index)
        return Call(self.sums, rows, weights, gates, self._valid(hidden))

    def _valid(self, hidden: torch.Tensor) -> torch.Tensor | None:
        valid = self.observer.valid
        if valid is None or bool(valid.all()):
            return None
        if valid.numel() != len(hidden):
            raise UserError(f"{self.layer.name} saw {len(hidden)} tokens, expected the batch's {valid.numel()}")
        return valid.flatten().to(hidden.device)


def is_softmax(logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether a router's gates are proportional to exp(logits), i.e. softmax probabilities, renormalised or not.

    `logits` (T, E), `index` and `weights` (T, K). Told from what the router does, not from its name: log g - z is then the
    same for all experts of a token. With K = 1 that says nothing, and g must be the probability times a constant.
    """
    tolerance = 1e-3 if weights.dtype in (torch.float32, torch.float64) else 0.05
    chosen = logits.double().log_softmax(-1).gather(-1, index)
    gap = weights.double().clamp(min=torch.finfo(torch.float64).tiny).log() - chosen
    axis = 1 if index.shape[1] > 1 else 0
    return bool(((gap.amax(axis) - gap.amin(axis)) <= tolerance).all())


def inside_backward() -> bool:
    """Whether autograd is running a backward pass, within which gradient checkpointing repeats forward passes."""
    return torch._C._current_graph_task_id() != -1


def _decoder_layer(layer: MoELayer) -> str:
    """Module path of the decoder layer that holds the experts: up to its number, such as model.layers.3."""
    path = layer.name.split(".")
    return ".".join(path[: path.index(str(layer.index)) + 1])
