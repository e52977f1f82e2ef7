"""Set the channels a plan does not keep to 0 while a model computes, without touching its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import intermediate, output, sort_by_expert
from moe_lab.models.transformers_private import activation, experts_implementation, with_activation
from moe_lab.pruning.layer import Mask
from moe_lab.pruning.plan import Plan
from moe_lab.statistics.dispatch import ExpertsFunction, replaced


@contextmanager
def channel_masks(model: PreTrainedModel, layers: list[MoELayer], plan: Plan) -> Iterator[None]:
    """While open, channels of `layers` that `plan` does not keep are 0 before the down projection; ids are the
    original ones.

    Models that run grouped_mm stay with it; others compute expert after expert, sorted once: what experts with all
    channels give is bit for bit that of the eager forward. RuntimeError when experts are called past the mask.
    """
    calls = {layer.index: _Call(layer, plan.channels[layer.index]) for layer in layers}
    with ExitStack() as undo:
        undo.enter_context(replaced(model, layers, {index: call.compute for index, call in calls.items()}))
        for call in calls.values():
            undo.callback(call.layer.experts.register_forward_hook(call.check).remove)
        yield


class _Call:
    """One layer's experts function, which remembers that it ran."""

    def __init__(self, layer: MoELayer, mask: Mask) -> None:
        self.layer = layer
        grouped = experts_implementation(layer.experts) == "grouped_mm"
        self.function = (grouped_function if grouped else sorted_function)(layer, mask)
        self.ran = False

    def compute(self, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        self.ran = True
        return self.function(hidden, index, gates)

    def check(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        if not self.ran:
            raise RuntimeError(f"the mask is not in force: {self.layer.name} did not run the masked experts")
        self.ran = False


def sorted_function(layer: MoELayer, mask: Mask) -> ExpertsFunction:
    """The routed output (T, H) of experts whose channels outside `mask` (E, I) are 0, one expert after the other."""
    dropped = torch.from_numpy(~mask).to(layer.routing[0].tensor.device)
    kept = mask.sum(1).tolist()

    def compute(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = sort_by_expert(index, layer.n_experts)
        gates = weights[rows.token, rows.column, None]
        mixed = torch.zeros_like(hidden)
        for expert, part in rows.parts():
            if kept[expert]:
                token = rows.token[part]
                phi = intermediate(layer.experts, hidden[token], expert)
                if kept[expert] < layer.width:
                    phi = phi.masked_fill(dropped[expert], 0)  # not a product: Inf x 0 is NaN
                gated = output(layer.experts, phi, expert) * gates[part]
                mixed.index_add_(0, token, gated.to(mixed.dtype))
        return mixed

    return compute


def grouped_function(layer: MoELayer, mask: Mask) -> ExpertsFunction:
    """The same by transformers' grouped matrix products, which know no single expert: the activation is followed by
    the mask of each row's expert."""
    dropped = torch.from_numpy(~mask).to(layer.routing[0].tensor.device)
    experts: Any = layer.experts

    def compute(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        activate = activation(experts)
        expert = index.reshape(-1).sort().values  # its order of rows

        def masked(gate_up: torch.Tensor) -> torch.Tensor:
            return activate(gate_up).masked_fill(dropped[expert], 0)

        with with_activation(experts, masked):
            mixed: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, index, weights)
            return mixed

    return compute
