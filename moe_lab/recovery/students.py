"""Pruned models that are trained: DoRA adapters on the MoE blocks of a copy, or the routers of a masked model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from moe_lab.config import RecoveryConfig
from moe_lab.models.discover import routed_layers
from moe_lab.models.experts import wide
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import share_copy
from moe_lab.recovery.apply import pruned
from moe_lab.recovery.dora import attach, merge, router_weight, trainable

Groups = dict[str, dict[str, nn.Parameter]]
"""Part of the model (experts, routers, shared_experts) -> name -> parameter to train; names are the same in every
run."""


@dataclass(frozen=True)
class Student:
    """A pruned model, and what of it is trained."""

    model: Any
    parameters: Groups
    changed: Callable[[], dict[str, torch.Tensor]]
    """Ends the training and returns the tensors it changed, by their names in the pruned model's state dict."""


@contextmanager
def student(model: Any, plan: Plan | None, settings: RecoveryConfig, seed: int) -> Iterator[Student]:
    """`model`, pruned by `plan` (None: not pruned), ready for what `settings` train. `model` itself is not changed."""
    if settings.train == "routers":
        with trained_routers(model, plan) as trained:
            yield trained
    else:
        copy = pruned(model, plan)
        layers = attach(copy, settings, seed)
        yield Student(copy, trainable(layers), partial(merge, copy, layers))


@contextmanager
def trained_routers(model: Any, plan: Plan | None) -> Iterator[Student]:
    """`model` under the mask of `plan`, with the routers' weights as parameters and everything else frozen.

    The student shares all other tensors with `model`, so that a teacher costs no memory. Only the rows of kept experts
    are trained; correction biases, and biases of routers, stay. Weights of 16 bits are trained as fp32 copies, since
    rounding would lose small steps, and are rounded in each forward pass as they will be when evaluated.
    """
    masked = share_copy(model)
    masked.requires_grad_(False)
    owners = {layer.index: router_weight(layer) for layer in routed_layers(masked)}
    paths = {module: path for path, module in masked.named_modules()}
    with ExitStack() as undo:
        if plan is not None:
            undo.enter_context(mask(masked, plan))
        weights = {}
        for layer, owner in owners.items():
            weights[layer] = PreciseWeight(owner.weight)  # type: ignore[arg-type]
            parametrize.register_parametrization(owner, "weight", weights[layer], unsafe=True)
            # before the mask closes, which puts the whole weight back in place of the slice
            undo.callback(parametrize.remove_parametrizations, owner, "weight", leave_parametrized=False)

        def changed() -> dict[str, torch.Tensor]:
            return {f"{paths[owner]}.weight": owner.weight.detach() for owner in owners.values()}  # type: ignore[operator]

        parameters = {f"routers.{layer}.weight": weight.precise for layer, weight in weights.items()}
        yield Student(masked, {"routers": parameters}, changed)


class PreciseWeight(nn.Module):
    """Parametrises a weight by a trained copy in at least fp32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.precise = nn.Parameter(wide(weight.detach()).clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The trained copy, rounded to the dtype of `weight`."""
        return self.precise.to(weight.dtype)
