"""Watch the routed experts of a model while it reads: one tap per MoE layer, opened and closed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.partial_forward import run
from moe_lab.statistics.dispatch import not_called, replaced
from moe_lab.statistics.sums import Layers, combine

Reading = Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], None]
"""A pass over one batch: model, input_ids (B, S), valid (B, S)."""


def forward(model: PreTrainedModel, input_ids: torch.Tensor, valid: torch.Tensor) -> None:
    """The usual reading: one forward pass without gradients."""
    with torch.no_grad():
        run(model, input_ids, valid)


class Tap:
    """One layer under observation: its sums so far, and what stands in for its experts.

    Subclasses say in `experts` what to compute and what to sum. `sums`: name -> fp64 tensor, as in sums.py, on the
    device of the activations they came from.
    """

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        self.observer = observer
        self.layer = layer
        self.sums = dict(start)
        self.calls = 0

    def experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed output (T, H) from hidden states (T, H), expert ids (T, K) and gates (T, K)."""
        raise NotImplementedError

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """The layer's router has run; its experts are next."""

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """The decoder layer around the experts has run."""

    def result(self) -> dict[str, torch.Tensor]:
        """What the layer's statistics are after the batches read so far; while the layer has its weights."""
        return self.sums

    def add(self, name: str, part: torch.Tensor) -> None:
        """Add `part` to the statistic `name` (or take the maximum), in fp64."""
        known = self.sums.get(name)
        self.sums[name] = part.double() if known is None else combine(name, known.to(part.device), part.double())

    def valid(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """(T,) bool: which of the tokens in `hidden` (T, H) count; None when all of them do."""
        valid = self.observer.valid
        if valid is None or bool(valid.all()):
            return None
        if valid.numel() != len(hidden):
            raise UserError(f"{self.layer.name} saw {len(hidden)} tokens, expected the batch's {valid.numel()}")
        return valid.flatten().to(hidden.device)


class Observer:
    """Taps on all MoE layers of a model, or on some `layers`, over the batches it reads while open.

        with Observer(model, ForwardTap) as observer:
            observer.read(input_ids, valid)
        observer.layers()   # layer -> name -> fp64 tensor on the CPU

    Whatever else runs the model meanwhile is observed too, under the `valid` mask set last. `start` are sums to go on
    from; `reading` is what `read` does with the model, which may be more than a forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tap: Callable[[Observer, MoELayer, dict[str, torch.Tensor]], Tap],
        start: Layers | None = None,
        reading: Reading = forward,
        layers: Sequence[MoELayer] | None = None,
    ) -> None:
        self.model = model
        self.reading = reading
        observed = moe_layers(model) if layers is None else layers
        self.taps = [tap(self, layer, (start or {}).get(layer.index, {})) for layer in observed]
        self.valid: torch.Tensor | None = None
        """(B, S) bool: which tokens of the batch count; None for all of them."""
        self._open = ExitStack()

    def __enter__(self) -> Observer:
        with ExitStack() as stack:
            functions = {tap.layer.index: self._counted(tap) for tap in self.taps}
            stack.enter_context(replaced(self.model, [tap.layer for tap in self.taps], functions))
            for tap in self.taps:
                around = self.model.get_submodule(f"{tap.layer.stack}.{tap.layer.index}")
                stack.callback(tap.layer.router.register_forward_hook(tap.after_router, with_kwargs=True).remove)
                stack.callback(around.register_forward_hook(tap.after_layer).remove)
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
        self.reading(self.model, input_ids, valid)
        for tap in self.taps:
            if tap.calls == 0:
                raise not_called(tap.layer)

    def layers(self) -> Layers:
        """The sums so far: layer -> name -> fp64 tensor on the CPU."""
        return {tap.layer.index: {name: part.cpu() for name, part in tap.result().items()} for tap in self.taps}

    @staticmethod
    def _counted(tap: Tap) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            tap.calls += 1
            return tap.experts(hidden, index, weights)

        return experts
