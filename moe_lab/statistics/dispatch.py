"""Put a function of ours in the place of every experts module of a model, through transformers' registry of experts
functions.

The registry hands it exactly the routed tokens and the weights the router gave them, for every family that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer
from moe_lab.models.transformers_private import experts_implementation, is_expert_parallel

NAME = "moe_lab"
SLOT = "_moe_lab_experts_function"

ExpertsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""hidden states (T, H), expert ids (T, K), gates (T, K) -> gated sum of expert outputs (T, H)."""


def _dispatch(
    module: torch.nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What the registry calls: the function that stands for this very module."""
    function: ExpertsFunction = module.__dict__[SLOT]
    return function(hidden, index, weights)


ExpertsInterface.register(NAME, _dispatch)


@contextmanager
def replaced(
    model: PreTrainedModel, layers: Sequence[MoELayer], functions: Mapping[int, ExpertsFunction]
) -> Iterator[None]:
    """While open, layer i of `layers` computes its experts with `functions[i]`; afterwards the model is as before.

    UserError when a layer's experts ignore the registry (transformers then silently keeps their own forward) or are
    sharded over devices by expert.
    """
    before = model.get_experts_implementation()
    for layer in layers:
        if is_expert_parallel(layer.experts):
            raise UserError(
                f"{layer.name} is split over devices by expert, expected whole layers: load without ep_plan"
            )
        # Not setattr: a plain entry is neither a submodule nor in the state dict, and survives any call order.
        layer.experts.__dict__[SLOT] = functions[layer.index]
    try:
        model.set_experts_implementation(NAME)
        for layer in layers:
            if experts_implementation(layer.experts) != NAME:
                raise not_called(layer)
        yield
    finally:
        model.set_experts_implementation(before)
        for layer in layers:
            layer.experts.__dict__.pop(SLOT, None)


def not_called(layer: MoELayer) -> UserError:
    """The error for experts that the registry does not reach."""
    return UserError(
        f"{layer.name} ({type(layer.experts).__name__}) does not compute its experts through transformers' registry "
        "of experts functions, so what it does cannot be observed: this architecture is not supported"
    )
