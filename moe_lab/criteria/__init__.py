"""Criteria by name: statistics or weights -> scores, higher always meaning keep. No torch.

Here: what they see of a layer, and how scores come from it. Every module in this folder is a place for criteria.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from moe_lab.config import GATES, CriterionConfig
from moe_lab.config.base import identity
from moe_lab.errors import UserError, check_known
from moe_lab.paths import check_name
from moe_lab.source_code import source_of

Array = NDArray[numpy.float64]
Granularity = Literal["expert", "channel"]
Function = Callable[..., Array]

FROM_TEXT = ("statistics", "damage", "gradients", "weight_gradients")
"""Needs that a model meets by reading a calibration set, as the kinds of steps of these names say too."""


_SOFTMAX = "; this needs a router that is a softmax over all experts: choose gate=model or renormalized"
LACKING = {
    "sums_full_softmax": _SOFTMAX,
    "sums_double_softmax": _SOFTMAX,
    "shift_weighted": "; this needs MoE blocks that read a norm of the residual stream",
}
"""Statistic that some models do not have -> why."""


@dataclass(frozen=True)
class Layer:
    """One layer of `n_experts` (E) experts with `width` (I) channels each, as `criterion` sees it. Arrays are fp64;
    names and shapes are those of moe_lab/statistics."""

    criterion: str
    """Name of the criterion, for messages."""
    index: int
    n_experts: int
    width: int
    """0 when a criterion of experts is not told."""
    arrays: Mapping[str, Any]
    gate: str
    random: numpy.random.Generator
    """Shared by the layers of one scoring, which are visited in layer order."""

    @property
    def tokens(self) -> Array:
        """N_j, tokens routed to expert j (E,)."""
        return self["tokens"]

    def sum(self, alpha: int, beta: int) -> Array:
        """sum_t g^alpha ||f||^beta over the tokens routed to each expert (E,), with the chosen gate."""
        gate = self.gate if alpha else "model"  # g^0 = 1, whatever the gate
        return self[f"sums_{gate}"][:, alpha, beta]

    def mean(self, alpha: int, beta: int) -> Array:
        """`sum(alpha, beta)` / N_j (E,); 0 for an expert that saw no token."""
        return self.sum(alpha, beta) / numpy.maximum(self.tokens, 1)

    def __getitem__(self, name: str) -> Array:
        """The statistic called `name`. UserError when this layer has none."""
        if name not in self.arrays:
            there = ", ".join(sorted(self.arrays)) or "nothing"
            lacking = f"layer {self.index} has no {name} for criterion={self.criterion}: it has {there}"
            raise UserError(lacking + LACKING.get(name, ""))
        return numpy.asarray(self.arrays[name], dtype=numpy.float64)


@dataclass(frozen=True)
class Criterion:
    """A named way to score the experts of a layer, or the channels of its experts; higher means keep."""

    name: str
    granularity: Granularity
    """What gets a score: every expert, or every channel of every expert."""
    needs: tuple[str, ...]
    """Which steps leave its inputs: passes over a calibration set (statistics, damage, gradients, weight_gradients) or
    over the weights (weights, channel_weights). Empty when it needs nothing."""
    reference: str
    """The paper it is from."""
    uses_gate: bool
    """Whether scores depend on which gate weighs expert outputs."""
    uses_seed: bool
    """Whether scores depend on the seed beyond the calibration text."""
    function: Function
    """Layer and the criterion's own parameters -> scores (E,) or (E, I) fp64."""
    source: str = ""
    """As `source_of` the function."""

    @property
    def needs_plain_weights(self) -> bool:
        """Whether it cannot score a quantised checkpoint, which can only be run."""
        return self.granularity == "channel" or "weights" in self.needs


CRITERIA: dict[str, Criterion] = {}


def criterion(
    name: str,
    *,
    needs: tuple[str, ...],
    reference: str,
    granularity: Granularity = "expert",
    uses_gate: bool = False,
    uses_seed: bool = False,
) -> Callable[[Function], Function]:
    """Register the decorated function under `name`."""

    def register(function: Function) -> Function:
        check_name(f"criterion of {function.__module__}", name)
        if name in CRITERIA:
            other = CRITERIA[name].function.__module__
            raise UserError(
                f"criterion {name} of {function.__module__} is there already, of {other}: expected a new name"
            )
        source = source_of(function)
        CRITERIA[name] = Criterion(name, granularity, needs, reference, uses_gate, uses_seed, function, source)
        return function

    return register


@identity.register
def _(settings: CriterionConfig) -> Any:
    """Its name, its parameters, and the source of a plugin."""
    return {"name": settings.name, "parameters": dict(settings.parameters), "source": get(settings.name).source}


def get(name: str) -> Criterion:
    """The criterion called `name`. UserError with the nearest name when there is none."""
    check_known("criterion", name, CRITERIA)
    return CRITERIA[name]


def reads_text(name: str) -> bool:
    """Whether the criterion needs a calibration set."""
    return any(need in FROM_TEXT for need in get(name).needs)


def check(name: str, parameters: Mapping[str, Any]) -> None:
    """UserError unless the criterion exists and `parameters` are its own, none of the required ones left out, with
    values that it takes when it is tried on a layer of one expert with one channel."""
    accepted = dict(list(inspect.signature(get(name).function).parameters.items())[1:])
    for given in parameters:
        check_known(f"criterion.parameters of {name}", given, accepted)
    for word, parameter in accepted.items():
        if parameter.default is parameter.empty and word not in parameters:
            raise UserError(f"criterion={name} needs the parameter {word}: set criterion.parameters.{word}")
    get(name).function(Layer(name, 0, 1, 1, _Ones(), "model", numpy.random.default_rng(0)), **parameters)


def score(
    name: str,
    inputs: Mapping[int, Mapping[str, Any]],
    *,
    experts: Mapping[int, int],
    widths: Mapping[int, int] | None = None,
    gate: str | None = None,
    seed: int | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> dict[int, Array]:
    """Scores of every layer, fp64, higher meaning keep: layer -> (E,), or (E, I) from a criterion of channels.

    `inputs`: layer -> statistics of that layer, all those that `get(name).needs` says, by the names of
    moe_lab/statistics (numpy arrays or CPU tensors). `experts`: layer -> E; `widths`: layer -> I, which criteria of
    channels need. `gate` weighs expert outputs (None: model); `seed` is for random choices. UserError for an unknown
    name, gate or parameter, missing or ill-fitting statistics, and scores that are NaN or infinite.
    """
    chosen, parameters = get(name), dict(parameters or {})
    check(name, parameters)
    gate = gate or "model"
    check_known("gate", gate, GATES)
    if chosen.uses_seed and seed is None:
        raise UserError(f"criterion={name} needs a seed")
    if chosen.granularity == "channel" and widths is None:
        raise UserError(f"criterion={name} scores channels, expected the width of every layer's experts")
    random = numpy.random.Generator(numpy.random.PCG64(seed or 0))
    scores = {}
    for index in sorted(experts):
        width = (widths or {}).get(index, 0)
        layer = Layer(name, index, experts[index], width, inputs.get(index, {}), gate, random)
        scores[index] = chosen.function(layer, **parameters)
        _check_scores(chosen, layer, scores[index])
    return scores


def _check_scores(criterion: Criterion, layer: Layer, scores: Array) -> None:
    one_each = criterion.granularity == "expert"
    expected = (layer.n_experts,) if one_each else (layer.n_experts, layer.width)
    if scores.shape != expected:
        what = "experts" if one_each else f"experts' {layer.width} channels"
        raise UserError(
            f"criterion={criterion.name} gives {scores.shape} scores in layer {layer.index}, expected one for each of "
            f"its {layer.n_experts} {what}: the statistics are of another model"
        )
    if len(bad := numpy.argwhere(~numpy.isfinite(scores))):
        place = ", channel ".join(map(str, bad[0]))
        raise UserError(f"criterion={criterion.name} gives NaN or Inf in layer {layer.index}, expert {place}")


class _Ones(dict[str, Any]):
    """The statistics of one expert with one channel, all one: enough to call any criterion."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Array:
        if name.startswith("sums_"):
            return numpy.ones((1, 3, 3))
        if name in ("layer_loss", "count"):
            return numpy.ones(())
        return numpy.ones((1, 1) if name == "output_sum" or "channel" in name or "snip" in name else 1)


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
