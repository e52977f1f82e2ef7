"""SNIP's sums of every channel: what the loss says about expert weights, over the whole calibration set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import intermediate, output, sort_by_expert
from moe_lab.statistics.accumulate import wide
from moe_lab.statistics.backward import SCALE, differentiable, forward_and_backward
from moe_lab.statistics.gather import Batch, description
from moe_lab.statistics.observe import Observer, Tap
from moe_lab.statistics.sums import Statistics, check_finite


def gather_weight_gradients(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    fingerprint: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """`snip_down`, `snip_up` and, where experts have one, `snip_gate` (E, I) of every layer: sum over the channel's
    weights in that projection of |w dL/dw|.

    L is the loss of `gather_gradients` over all `batches`; the absolute value is taken of the whole set's gradient, so
    parts of a set cannot be merged and a stopped pass starts again. Memory: the gradients of all routed experts'
    weights are held in fp32, 4 bytes each, beside the model. `progress` is called with (batches done, of how many).

    UserError for no batches and for NaN or infinite sums, naming layer and expert.
    """
    about = description(batches, "weight_gradients", fingerprint)
    with differentiable(model), Observer(model, WeightGradientTap, reading=forward_and_backward) as observer:
        for number, (ids, valid) in enumerate(batches, 1):
            observer.read(ids, valid)
            if progress is not None:
                progress(number, len(batches))
        layers = observer.layers()
    check_finite(layers, "all batches")
    return Statistics(layers, about)


class WeightGradientTap(Tap):
    """Collects SCALE * dL/dw of the layer's routed experts over all passes, at least in fp32."""

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        super().__init__(observer, layer, start)
        self.gradients: dict[tuple[str, int], torch.Tensor] = {}

    def experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed output (T, H), each used expert's weights taking part in gradients."""
        rows = sort_by_expert(index, self.layer.n_experts)
        mixed = torch.zeros_like(hidden)
        for expert, part in rows.parts():
            token = rows.token[part]
            module: Any = _OneExpert(self.layer.experts, expert, self._add)
            f = output(module, intermediate(module, hidden[token], expert), expert)
            mixed.index_add_(0, token, (f * weights[token, rows.column[part], None]).to(mixed.dtype))
        return mixed

    def result(self) -> dict[str, torch.Tensor]:
        """`snip_*` (E, I) fp64: sum of |w dL/dw| over the weights of each channel; 0 where no gradient came."""
        experts: Any = self.layer.experts
        projections = ("gate", "up", "down") if experts.has_gate else ("up", "down")
        shape = (self.layer.n_experts, self.layer.width)
        sums = {f"snip_{projection}": torch.zeros(shape, dtype=torch.float64) for projection in projections}
        for (name, expert), gradient in self.gradients.items():
            products = (wide(getattr(experts, name)[expert].to(gradient.device)) * gradient).abs_()
            for projection, part in by_channel(self.layer, name, products).items():
                sums[f"snip_{projection}"][expert] = part.double().cpu() / SCALE
        return sums

    def _add(self, name: str, expert: int, gradient: torch.Tensor) -> None:
        known = self.gradients.get((name, expert))
        if known is None:
            self.gradients[name, expert] = wide(gradient)
        else:
            known += gradient


class _OneExpert:
    """An experts module whose weights, for one expert, are leaves that give their gradients away at once."""

    def __init__(self, module: torch.nn.Module, expert: int, take: Callable[[str, int, torch.Tensor], None]) -> None:
        self.module = module
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            leaf = getattr(module, name)[expert].detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_hand_over, name, expert, take))
            setattr(self, name, {expert: leaf})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _hand_over(name: str, expert: int, take: Callable[[str, int, torch.Tensor], None], leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    take(name, expert, leaf.grad)
    leaf.grad = None


def by_channel(layer: MoELayer, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Projection -> sums (I,) over each channel's entries of one expert's weight `name`, as the experts module of
    `layer` lays it out."""
    module: Any = layer.experts
    channels_last = module.is_transposed != (name == "down_proj")
    sums = values.sum(0 if channels_last else 1)
    if name != "gate_up_proj":
        return {name.removesuffix("_proj"): sums}
    gate, up = sums.view(2, -1) if module.is_concatenated else sums.view(-1, 2).t()
    return {"gate": gate, "up": up}
