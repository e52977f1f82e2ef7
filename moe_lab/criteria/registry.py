"""The criteria by name, and how scores come from statistics: the same few lines for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch

from moe_lab.config import GATES
from moe_lab.criteria.layer import Layer
from moe_lab.errors import UserError, unknown

Needs = Literal["statistics", "damage", "weights", "nothing"]
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Criterion:
    """A named way to score the experts of a layer; higher means keep."""

    name: str
    needs: Needs
    """Which step leaves its inputs: a calibration pass, the damage pass, the weight pass, or none."""
    reference: str
    """The paper it is from."""
    function: Function
    """Layer and the criterion's own parameters -> scores (E,) fp64."""


CRITERIA: dict[str, Criterion] = {}


def criterion(name: str, *, needs: Needs, reference: str) -> Callable[[Function], Function]:
    """Register the decorated function under `name`."""

    def register(function: Function) -> Function:
        if name in CRITERIA:
            raise ValueError(f"criterion {name} is registered twice")
        CRITERIA[name] = Criterion(name, needs, reference, function)
        return function

    return register


def get(name: str) -> Criterion:
    """The criterion called `name`. UserError with the nearest name when there is none."""
    if name not in CRITERIA:
        raise unknown("criterion", name, CRITERIA)
    return CRITERIA[name]


def score(
    name: str, inputs: Mapping[int, Mapping[str, torch.Tensor]], *, gate: str, seed: int, **parameters: Any
) -> dict[int, torch.Tensor]:
    """Scores of every layer: layer -> (E,) fp64, higher meaning keep.

    `inputs`: layer -> tensors of statistics/sums.py, those that `get(name).needs` says (for "nothing", any tensor with a row
    per expert). `gate` weighs expert outputs where the criterion uses a gate; `seed` is for the random criterion.
    UserError for an unknown name, gate or parameter, a missing statistic, and scores that are NaN or infinite.
    """
    chosen = get(name)
    if gate not in GATES:
        raise unknown("gate", gate, GATES)
    _check_parameters(chosen, parameters)
    random = numpy.random.Generator(numpy.random.PCG64(seed))
    scores = {}
    for index in sorted(inputs):
        scores[index] = chosen.function(Layer(index, inputs[index], gate, random), **parameters)
        bad = (~torch.isfinite(scores[index])).nonzero().flatten().tolist()
        if bad:
            raise UserError(f"criterion={name} gives NaN or Inf in layer {index}, expert {bad[0]}")
    return scores


def ranking(scores: torch.Tensor) -> torch.Tensor:
    """Expert ids in ascending order of score (E,) int64: the first is pruned first; ties by expert index."""
    return torch.argsort(scores, stable=True)


def _check_parameters(chosen: Criterion, parameters: Mapping[str, Any]) -> None:
    """UserError unless `parameters` are the function's own, with none of the required ones left out."""
    accepted = dict(list(inspect.signature(chosen.function).parameters.items())[1:])
    for name in parameters:
        if name not in accepted:
            raise unknown(f"parameter of criterion {chosen.name}", name, accepted)
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in parameters:
            raise UserError(f"criterion={chosen.name} needs the parameter {name}: set criterion.parameters.{name}")
