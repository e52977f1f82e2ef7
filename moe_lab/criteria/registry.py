"""The criteria by name, and how scores come from statistics: the same few lines for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy
from numpy.typing import ArrayLike, NDArray

from moe_lab.config import GATES
from moe_lab.criteria.layer import Array, Layer
from moe_lab.errors import UserError, unknown

Needs = Literal["statistics", "damage", "weights", "nothing"]
Function = Callable[..., Array]


@dataclass(frozen=True)
class Criterion:
    """A named way to score the experts of a layer; higher means keep."""

    name: str
    needs: Needs
    """Which step leaves its inputs: a calibration pass, the damage pass, the weight pass, or none."""
    reference: str
    """The paper it is from."""
    uses_gate: bool
    """Whether scores depend on which gate weighs expert outputs."""
    uses_seed: bool
    """Whether scores depend on the seed beyond the calibration text."""
    function: Function
    """Layer and the criterion's own parameters -> scores (E,) fp64."""


CRITERIA: dict[str, Criterion] = {}


def criterion(
    name: str, *, needs: Needs, reference: str, uses_gate: bool = False, uses_seed: bool = False
) -> Callable[[Function], Function]:
    """Register the decorated function under `name`."""

    def register(function: Function) -> Function:
        if name in CRITERIA:
            raise ValueError(f"criterion {name} is registered twice")
        CRITERIA[name] = Criterion(name, needs, reference, uses_gate, uses_seed, function)
        return function

    return register


def get(name: str) -> Criterion:
    """The criterion called `name`. UserError with the nearest name when there is none."""
    if name not in CRITERIA:
        raise unknown("criterion", name, CRITERIA)
    return CRITERIA[name]


def reads_text(name: str) -> bool:
    """Whether the criterion needs a calibration set."""
    return get(name).needs in ("statistics", "damage")


def check(name: str, parameters: Mapping[str, Any]) -> None:
    """UserError unless the criterion exists and `parameters` are its own, none of the required ones left out.

    The criterion is tried on a layer of one expert that saw one token, so that it can refuse values too.
    """
    accepted = dict(list(inspect.signature(get(name).function).parameters.items())[1:])
    for given in parameters:
        if given not in accepted:
            raise unknown(f"criterion.parameters of {name}", given, accepted)
    for word, parameter in accepted.items():
        if parameter.default is parameter.empty and word not in parameters:
            raise UserError(f"criterion={name} needs the parameter {word}: set criterion.parameters.{word}")
    get(name).function(Layer(0, 1, _Ones(), "model", numpy.random.default_rng(0)), **parameters)


def score(
    name: str,
    inputs: Mapping[int, Mapping[str, Any]],
    *,
    experts: Mapping[int, int],
    gate: str | None = None,
    seed: int | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> dict[int, Array]:
    """Scores of every layer: layer -> (E,) fp64, higher meaning keep.

    `inputs`: layer -> statistics of that layer, those that `get(name).needs` says, by the names of statistics/sums.py
    (numpy arrays or CPU tensors). `experts`: layer -> E. `gate` weighs expert outputs (None: model); `seed` is for
    random choices. UserError for an unknown name, gate or parameter, missing or ill-fitting statistics, and scores
    that are NaN or infinite.
    """
    chosen = get(name)
    parameters = dict(parameters or {})
    check(name, parameters)
    if gate is not None and gate not in GATES:
        raise unknown("gate", gate, GATES)
    if chosen.uses_seed and seed is None:
        raise UserError(f"criterion={name} needs a seed")
    random = numpy.random.Generator(numpy.random.PCG64(seed or 0))
    scores = {}
    for index in sorted(experts):
        layer = Layer(index, experts[index], inputs.get(index, {}), gate or "model", random)
        scores[index] = chosen.function(layer, **parameters)
        _check_scores(name, layer, scores[index])
    return scores


def ranking(scores: ArrayLike) -> NDArray[numpy.int64]:
    """Expert ids in ascending order of score (E,): the first is pruned first; ties by expert index."""
    return numpy.argsort(numpy.asarray(scores), kind="stable")


def _check_scores(name: str, layer: Layer, scores: Array) -> None:
    if scores.shape != (layer.n_experts,):
        raise UserError(
            f"criterion={name} gives {scores.shape} scores in layer {layer.index}, expected one for each of its "
            f"{layer.n_experts} experts: the statistics are of another model"
        )
    bad = numpy.flatnonzero(~numpy.isfinite(scores))
    if len(bad):
        raise UserError(f"criterion={name} gives NaN or Inf in layer {layer.index}, expert {bad[0]}")


class _Ones(dict[str, Any]):
    """The statistics of one expert, all one: enough to call any criterion."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Array:
        if name.startswith("sums_"):
            return numpy.ones((1, 3, 3))
        if name in ("layer_loss", "count"):
            return numpy.ones(())
        return numpy.ones((1, 1) if name == "output_sum" or "channel" in name else 1)
