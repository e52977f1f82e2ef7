"""Criteria by name: statistics or weights -> scores, higher always meaning keep. No torch.

The other modules of this folder register criteria.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from moe_lab.config import GATES, CriterionConfig
from moe_lab.errors import Registry, UserError, check_known, reason_in
from moe_lab.models.files import sha256_of
from moe_lab.paths import check_name, local_path
from moe_lab.source_code import function_digest
from moe_lab.statistics import FROM_TEXT

Array = NDArray[numpy.float64]
Granularity = Literal["expert", "channel"]
Function = Callable[..., Array]

FROM_FILE = ("file", "file_channels")
"""Criteria whose scores are read from a file."""


_SOFTMAX = (
    "; this needs a router that is a softmax over all experts: choose gate=model or renormalized"
)
MISSING_REASONS = {
    "sums_full_softmax": _SOFTMAX,
    "sums_double_softmax": _SOFTMAX,
    "shift_weighted": "; this needs MoE blocks that read a norm of the residual stream",
}
"""Statistic that some models lack -> end of the error message."""


@dataclass(frozen=True)
class Layer:
    """One MoE layer that `criterion` scores, with `n_experts` (E) experts of `width` (I) channels
    each. layer["tokens"] is the statistic "tokens". Names and shapes of all statistics:
    docs/new_criterion.md."""

    criterion: Criterion
    index: int
    n_experts: int
    width: int
    _arrays: Mapping[str, Any]
    _gate: str
    _random: numpy.random.Generator

    @property
    def gate(self) -> str:
        """Name of the gate that the user chose. UserError unless the criterion declares
        uses_gate."""
        self._check_declared("uses_gate", "the gate, as layer.gate or in sums with alpha > 0")
        return self._gate

    @property
    def random(self) -> numpy.random.Generator:
        """Random generator, shared by all layers of one call of `score`. UserError unless the
        criterion declares uses_seed."""
        self._check_declared("uses_seed", "layer.random")
        return self._random

    def _check_declared(self, declaration: str, value: str) -> None:
        """Raise UserError unless the criterion declares the flag `declaration`. `value`: what the
        criterion reads, for the message."""
        if not getattr(self.criterion, declaration):
            name = self.criterion.name
            raise UserError(
                f"criterion={name} reads {value}: expected @criterion({name!r}, ..., "
                f"{declaration}=True)"
            )

    @property
    def tokens(self) -> Array:
        """N_j, the number of tokens routed to expert j; shape (E,)."""
        return self["tokens"]

    def sum(self, alpha: int, beta: int) -> Array:
        """sum_t g^alpha ||f||^beta over the tokens t routed to each expert, shape (E,). g: gate
        value of the token and expert, for the chosen gate. f: output of the expert. alpha, beta: 0,
        1 or 2."""
        gate = self.gate if alpha else "model"  # g^0 = 1, whatever the gate
        return self[f"sums_{gate}"][:, alpha, beta]

    def mean(self, alpha: int, beta: int) -> Array:
        """`sum(alpha, beta)` / N_j, shape (E,); 0 for an expert without tokens."""
        return self.sum(alpha, beta) / numpy.maximum(self.tokens, 1)

    def __getitem__(self, name: str) -> Array:
        """The statistic called `name`, a read-only fp64 array. UserError when this layer has no
        such statistic."""
        if name not in self._arrays:
            available = ", ".join(sorted(self._arrays)) or "nothing"
            raise UserError(
                f"layer {self.index} has no {name} for criterion={self.criterion.name}: it has "
                f"{available}{MISSING_REASONS.get(name, '')}"
            )
        # a copy, because a criterion that uses torch can write even into a read-only array
        array = numpy.array(self._arrays[name], dtype=numpy.float64)
        array.flags.writeable = False
        return array


@dataclass(frozen=True)
class Criterion:
    """A named way to score the experts of a layer, or the channels of its experts."""

    name: str
    granularity: Granularity
    needs: tuple[str, ...]
    """Steps whose results the criterion reads, such as "statistics" or "weights"."""
    reference: str
    """The paper that introduces the criterion."""
    uses_gate: bool
    """Whether scores depend on which gate weighs expert outputs."""
    uses_seed: bool
    """Whether scores depend on the seed beyond the calibration text."""
    function: Function
    """Layer and the criterion's own parameters -> scores (E,) or (E, I) fp64."""
    source: str = ""
    """`function_digest(function)`."""

    @property
    def needs_plain_weights(self) -> bool:
        """Whether the criterion is refused for a quantised checkpoint."""
        return self.granularity == "channel" or "weights" in self.needs


CRITERIA: Registry[Criterion] = Registry()


def criterion(
    name: str,
    *,
    needs: tuple[str, ...],
    reference: str,
    granularity: Granularity = "expert",
    uses_gate: bool = False,
    uses_seed: bool = False,
) -> Callable[[Function], Function]:
    """Decorator that registers a function as the criterion `name`. The other arguments are fields
    of `Criterion`. UserError for a name that is not valid or is registered already."""

    def register(function: Function) -> Function:
        check_name(f"criterion of {function.__module__}", name)
        if name in CRITERIA:
            owner = CRITERIA[name].function.__module__
            raise UserError(
                f"criterion {name} of {function.__module__} is registered already, by {owner}: "
                "expected a new name"
            )
        digest = function_digest(function)
        CRITERIA[name] = Criterion(
            name, granularity, needs, reference, uses_gate, uses_seed, function, digest
        )
        return function

    return register


class IdentifiedCriterion(CriterionConfig):
    """Settings of a criterion. A file that the parameter "path" names is identified by its
    content."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that tell apart criteria with different scores. "source" is a digest of a
        plugin's code, and "" for a criterion of moe_lab."""
        parameters = dict(self.parameters)
        if self.name in FROM_FILE:
            parameters["path"] = sha256_of(local_path(parameters["path"]))
        return {
            "name": self.name,
            "parameters": parameters,
            "source": get(self.name).source,
        }


def get(name: str) -> Criterion:
    """The criterion called `name`. UserError when there is none."""
    check_known("criterion", name, CRITERIA)
    return CRITERIA[name]


def reads_text(name: str) -> bool:
    """Whether the criterion needs a calibration set."""
    return any(need in FROM_TEXT for need in get(name).needs)


def check(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise UserError unless the criterion `name` exists, accepts all `parameters`, gets all
    parameters that it requires, and can score a trial layer of random numbers."""
    # the first argument is the layer
    accepted = dict(list(inspect.signature(get(name).function).parameters.items())[1:])
    for key in parameters:
        check_known(f"criterion.parameters of {name}", key, accepted)
    for key, parameter in accepted.items():
        if parameter.default is parameter.empty and key not in parameters:
            raise UserError(
                f"criterion={name} needs the parameter {key}: set criterion.parameters.{key}"
            )
    if name in FROM_FILE:
        from moe_lab.statistics.score_files import read_table

        read_table(**parameters)  # called only for its errors
        return
    layer = trial_layer(name, TrialArrays())
    # a criterion that reads a statistic of unknown shape is accepted without a trial
    with contextlib.suppress(_UnknownStatistic), numpy.errstate(all="ignore"):
        _repeatable_scores(layer, parameters, "on a trial layer", hint="return one number for each")


def trial_layer(name: str, statistics: Mapping[str, Array]) -> Layer:
    """A layer with these statistics for a trial of the criterion `name`, see `TrialArrays`."""
    random = numpy.random.default_rng(0)
    return Layer(get(name), 0, EXPERTS, WIDTH, statistics, "model", random)


def score(
    name: str,
    inputs: Mapping[int, Mapping[str, Any]],
    layers: Mapping[int, Mapping[str, Any]],
    *,
    gate: str | None = None,
    seed: int | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> dict[int, Array]:
    """Scores by the criterion `name`, fp64, higher meaning keep: layer -> array of shape (E,), or
    (E, I) from a criterion of channels.

    `inputs`: layer -> name of a statistic -> the statistic, a numpy array or CPU tensor. The steps
    in `get(name).needs` compute these statistics. `layers`: layer -> facts, among them n_experts
    (E) and, for criteria of channels, width (I). `gate`: name of the gate that weighs expert
    outputs; None means "model". `seed`: only for criteria that use a seed. UserError for an unknown
    name, gate or parameter, a missing seed, statistics that are missing or have a wrong shape, and
    scores that are NaN or infinite.
    """
    definition = get(name)
    parameters = dict(parameters or {})
    check(name, parameters)
    gate = gate or "model"
    check_known("gate", gate, GATES)
    if definition.uses_seed and seed is None:
        raise UserError(f"criterion={name} needs a seed")
    if name in FROM_FILE:
        from moe_lab.statistics.score_files import read_scores

        inputs = read_scores(layers, name, **parameters)
    # without a seed the criterion does not read layer.random
    random = numpy.random.Generator(numpy.random.PCG64(seed or 0))
    scores = {}
    for index in sorted(layers):
        n_experts, width = layers[index]["n_experts"], layers[index].get("width", 0)
        arrays = inputs.get(index, {})
        layer = Layer(definition, index, n_experts, width, arrays, gate, random)
        location = f"in layer {index}"
        scores[index] = _repeatable_scores(
            layer, parameters, location, hint="the statistics are of another model"
        )
        indices = numpy.argwhere(~numpy.isfinite(scores[index]))
        if len(indices):
            # such as "3" for an expert or "3, channel 7" for a channel
            position = ", channel ".join(map(str, indices[0]))
            raise UserError(f"criterion={name} gives NaN or Inf {location}, expert {position}")
    return scores


def _repeatable_scores(
    layer: Layer, parameters: Mapping[str, Any], location: str, hint: str
) -> Array:
    """The scores of a layer, shape (E,) or (E, I). UserError if a second call of the criterion
    gives other scores. Arguments as in `_call_criterion`."""
    layer_copy = replace(layer, _random=deepcopy(layer._random))
    scores = _call_criterion(layer, parameters, location, hint)
    second_scores = _call_criterion(layer_copy, parameters, location, hint)
    if not numpy.array_equal(scores, second_scores, equal_nan=True):
        raise UserError(
            f"criterion={layer.criterion.name} gives other scores when it is called again "
            f"{location}: expected that chance comes from layer.random alone, with "
            "@criterion(..., uses_seed=True)"
        )
    return scores


def _call_criterion(layer: Layer, parameters: Mapping[str, Any], location: str, hint: str) -> Array:
    """The scores of a layer, shape (E,) or (E, I). UserError if the criterion fails, or if the
    result is not one real number for each expert or channel.

    `location`: where the criterion is called, for messages, such as "in layer 3". `hint`: the end
    of the message about a wrong shape.
    """
    name = layer.criterion.name
    try:
        result = numpy.asarray(layer.criterion.function(layer, **parameters))
        if numpy.iscomplexobj(result):
            raise UserError(
                f"criterion={name} gives complex scores {location}: expected real numbers"
            )
        scores: Array = numpy.array(result, dtype=numpy.float64)
    except (UserError, MemoryError, _UnknownStatistic):
        raise
    except Exception as error:
        # frame 0 is this function; frame 1, if any, is the criterion
        frame = traceback.extract_tb(error.__traceback__)[:2][-1]
        raise UserError(
            f"criterion={name} fails {location} of {layer.n_experts} experts with {layer.width} "
            f"channels each: {reason_in(error)} ({frame.filename}, line {frame.lineno})"
        ) from error
    shape: tuple[int, ...] = (layer.n_experts,)
    units = "experts"
    if layer.criterion.granularity == "channel":
        shape = (layer.n_experts, layer.width)
        units = f"experts' {layer.width} channels"
    if scores.shape != shape:
        raise UserError(
            f"criterion={name} gives {scores.shape} scores {location}, expected one for each of "
            f"its {layer.n_experts} {units}: {hint}"
        )
    return scores


EXPERTS, WIDTH, HIDDEN = 16, 12, 10
"""E, I and H of the trial layer; they differ, so that a criterion that confuses them fails."""
_SHAPES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            "tokens",
            "output_abs_max",
            "shift_weighted",
            "damage",
            "ablation",
            "ala_first",
            "ala_second",
            "abs_sum",
            "square_sum",
        ),
        (EXPERTS,),
    ),
    **dict.fromkeys((f"sums_{gate}" for gate in GATES), (EXPERTS, 3, 3)),
    **dict.fromkeys(
        ("output_sum", "dense_output_sum", "dense_gated_output_sum"), (EXPERTS, HIDDEN)
    ),
    **dict.fromkeys(("router_gram", "weight_distance_square"), (EXPERTS, EXPERTS)),
    "router_absolute": (2, EXPERTS),
    **dict.fromkeys(("layer_loss", "scaling", "count"), ()),
    "router_entropy": (HIDDEN,),
}
"""Statistic -> its shape in the trial layer."""


class _UnknownStatistic(Exception):
    """A criterion reads a statistic from the trial layer that is not in `_SHAPES`."""


class TrialArrays(dict[str, Array]):
    """The statistics of the trial layer: name -> random numbers, made when the statistic is
    read."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Array:
        """Random numbers for the statistic `name`, the same in each call."""
        is_of_channels = "channel_" in name or name.startswith("snip_")
        if not is_of_channels and name not in _SHAPES:
            raise _UnknownStatistic
        shape = (EXPERTS, WIDTH) if is_of_channels else _SHAPES[name]
        return numpy.random.default_rng(list(name.encode())).uniform(0.5, 1.5, shape)


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
