"""Allocations by a rule: the same share, one ranking over all layers, a U over the depth, or the
loss of each layer.

And all choices of the experts that a layer loses at the same share, among which
allocation=reconstruction (NAEE) searches. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations, product
from math import comb, prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy
from pydantic import Field, Strict

from moe_lab.allocation.problem import (
    Array,
    Budgets,
    Channels,
    Evidence,
    Experts,
    Limits,
    RatioTooLarge,
    RatioTooSmall,
    budget,
    check_ratio,
    highest,
    limits,
    measured,
    or_nearest,
    whole,
)
from moe_lab.errors import UserError
from moe_lab.json_files import fits

Smoothing: TypeAlias = Literal["sqrt", "log", "huber", "clip", "none"]
Floor: TypeAlias = Annotated[float, Strict(), Field(gt=0, lt=1)]
LayerLoss: TypeAlias = Literal["loss", "nll"]
LAYER_LOSSES: Mapping[str, tuple[str, str]] = {
    "loss": ("statistics", "layer_loss"),
    "nll": ("scaling", "scaling"),
}
"""Value of layer_prior -> the step that measures that loss of a layer, and its name among the
step's results."""
LIMIT = 10_000
"""Largest number of subsets per layer that are tried by default."""


def uniform_experts(problem: Experts) -> dict[int, int]:
    """Layer -> experts to remove: the same share of each layer."""
    return same_share(problem.limits, problem.ratio)


def same_share(layers: Mapping[int, Limits], ratio: float) -> dict[int, int]:
    """Layer -> experts to remove: int(n * ratio), the papers' rule, or the next smaller number that
    the limits allow. RatioTooLarge or RatioTooSmall when there is none."""
    check_ratio(ratio)
    remove = {}
    for layer, limit in layers.items():
        kept = limit.even(ratio)
        if kept < limit.fewest:
            raise RatioTooLarge(
                f"leaves {kept} of {limit.count} experts in layer {layer}, but its router "
                f"(top_k={limit.top_k}) and "
                f"allocation.protect need at least {limit.fewest}"
            )
        if kept > limit.count:
            raise RatioTooSmall(
                f"keeps {limit.count - int(limit.count * ratio)} of {limit.count} experts in "
                f"layer {layer}, and a "
                f"multiple of {limit.step} is at most {limit.largest}"
            )
        remove[layer] = limit.count - kept
    return remove


def uniform_channels(problem: Channels) -> Budgets:
    """Every expert keeps the same int(I * (1 - ratio)) channels, which rounds down once per
    expert."""
    budgets = {}
    for layer, scores in problem.scores.items():
        count, width = scores.shape
        kept = whole(width * (1 - problem.ratio))
        if not kept:
            raise RatioTooLarge(
                f"leaves no channel of {width} in the experts of layer {layer} with "
                "allocation=uniform"
            )
        budgets[layer] = numpy.full(count, kept, dtype=numpy.int64)
    return budgets


def u_shaped(
    problem: Experts | Channels, *, beta: float = 0.02, floor: Floor = 0.1
) -> dict[int, Any]:
    """The first and last layers keep more, in the shares of `u_shape`."""
    return problem.in_proportion(u_shape(len(problem.scores), 1 - problem.ratio, beta, floor))


def loss_based(
    problem: Experts | Channels, *, layer_prior: LayerLoss = "loss", smoothing: Smoothing = "sqrt"
) -> dict[int, Any]:
    """Layers keep in proportion to their smoothed loss."""
    return problem.in_proportion(
        smooth(layer_losses(problem.evidence, problem.scores, layer_prior), smoothing)
    )


def layerwise(problem: Channels) -> Budgets:
    """HEAPr-L: every layer loses the same share, its lowest channels whichever expert they belong
    to."""
    return problem.in_proportion(numpy.ones(len(problem.scores)))


def global_channels(problem: Channels) -> Budgets:
    """One threshold over the channels of all experts of all layers (HEAPr-G); an expert may keep
    none."""
    flags = highest(
        numpy.concatenate([scores.ravel() for scores in problem.scores.values()]), problem.keep
    )
    parts = numpy.split(flags, numpy.cumsum(problem.sizes)[:-1])
    kept = {}
    for (layer, scores), part in zip(problem.scores.items(), parts, strict=True):
        kept[layer] = part.reshape(scores.shape).sum(axis=1)
    return kept


def global_experts(problem: Experts) -> dict[int, int]:
    """One threshold over the experts of all layers (EvoESAP, Fig. 1): layer -> experts to remove.

    Experts are ranked by the scores of another criterion in evidence["by"], if given, otherwise by
    their own. If they can only be removed in steps (`multiple_of`, groups that lose equally), steps
    are ranked by their mean score. When the steps of layers differ, the sum may be below the budget
    by less than the largest step.
    """
    by = problem.evidence.get("by", problem.scores)
    remove = {layer: limit.count - limit.largest for layer, limit in problem.limits.items()}
    left = budget(problem.limits, problem.ratio) - sum(remove.values())
    for _, layer, _ in sorted(_steps(problem, by)):
        limit = problem.limits[layer]
        if limit.step <= left and limit.count - remove[layer] - limit.step >= limit.smallest:
            remove[layer] += limit.step
            left -= limit.step
    return remove


def _steps(problem: Experts, by: Mapping[int, Array]) -> list[tuple[float, int, int]]:
    """(mean score, layer, number) of every step of experts that a layer can lose, beyond those that
    it must lose."""
    steps = []
    for layer, limit in problem.limits.items():
        scores = numpy.array(by[layer], dtype=numpy.float64)
        scores[list(problem.protected.get(layer, ()))] = numpy.inf
        gone = (limit.count - limit.largest) // limit.n_group
        rows = numpy.sort(scores.reshape(limit.n_group, -1), axis=1)[:, gone:]
        means = rows.reshape(limit.n_group, -1, limit.step // limit.n_group).mean(axis=(0, 2))
        steps += [(float(mean), layer, number) for number, mean in enumerate(means)]
    return steps


def u_shape(layers: int, keep: float, beta: float, floor: float) -> Array:
    """Relative kept share of each MoE layer (L,): max(floor, keep (1 + beta z)), z the standardised
    (x - 1/2)^2 at depth x = i / (L - 1). Equal shares for L < 3, where (x - 1/2)^2 is the same in
    all layers."""
    bend = (numpy.linspace(0, 1, layers) - 0.5) ** 2
    spread = bend.std()
    standardised = (bend - bend.mean()) / spread if spread > 1e-12 else numpy.zeros(layers)
    shares: Array = numpy.maximum(floor, keep * (1 + beta * standardised))
    return shares


def layer_losses(evidence: Evidence, layers: Iterable[int], prior: LayerLoss) -> Array:
    """The loss of each layer (L,), >= 0. UserError when one is negative or all are 0.

    loss  sum_t ||m||^2 / (||y||^2 + eps), m the routed output and y the residual stream after the
          layer: MoE-Slimming's released code, up to a factor
    nll   rise of the language model's loss when m is scaled in that layer alone, a fall counting as
    0 (Appendix A.1)
    """
    need, name = LAYER_LOSSES[prior]
    losses: Array = numpy.array([float(measured(evidence, need, layer, name)) for layer in layers])
    if prior == "nll":
        losses = numpy.maximum(losses, 0)
    if (losses < 0).any() or not losses.any():
        raise UserError(
            f"{name} is {losses.tolist()}: expected numbers of which none is below and one above 0"
        )
    return losses


def loss_needs(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """The step that measures the layer losses of loss_based."""
    return (LAYER_LOSSES[parameters.get("layer_prior", "loss")][0],)


def smooth(values: Array, name: Smoothing) -> Array:
    """Smooth `values` >= 0 (n,): g(x) for x = values / mean(values), then at least 1e-6 of the sum,
    so none is zero. sqrt: x^(1/2), as in MoE-Slimming's paper; its code takes four roots, with
    clipping. log: ln(1 + 5x). huber: x up to d = mean + std/2, above it d + (d (x - d))^(1/2).
    clip: x within mean +- std/2. none: x. std is that of the population. All-zero values give equal
    targets."""
    total = values.sum()
    if total <= 0:
        return numpy.ones_like(values)
    smoothed = FUNCTIONS[name](values * (len(values) / total))
    clamped: Array = numpy.maximum(smoothed, 1e-6 * smoothed.sum())
    return clamped


def _huber(x: Array) -> Array:
    delta = x.mean() + 0.5 * x.std()
    return numpy.where(x <= delta, x, delta + numpy.sqrt(delta * numpy.maximum(x - delta, 0)))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sqrt": numpy.sqrt,
    "log": lambda x: numpy.log1p(5 * x),
    "huber": _huber,
    "clip": lambda x: numpy.clip(x, x.mean() - 0.5 * x.std(), x.mean() + 0.5 * x.std()),
    "none": numpy.asarray,
}


def check_removals(
    layers: Mapping[int, Mapping[str, Any]],
    ratio: float,
    *,
    limit: int = LIMIT,
    multiple_of: int = 1,
) -> dict[int, int]:
    """Number of experts that each layer loses, the same share in all, checked to leave at most
    `limit` choices a layer. `layers`: layer -> facts. UserError, with the nearest feasible ratio,
    for others and for a layer with more choices."""
    by_layer = limits(layers, multiple_of)

    def decide(ratio: float) -> dict[int, int]:
        removed = same_share(by_layer, ratio)
        for layer, about in layers.items():
            choices = count_subsets(
                about["n_experts"], removed[layer], about["n_group"], about.get("protected", ())
            )
            if choices > limit:
                raise RatioTooLarge(
                    f"allocation=reconstruction tries {choices:.4g} choices of {removed[layer]} "
                    "out of "
                    f"{about['n_experts']} experts in layer {layer}, more than "
                    f"allocation.parameters.limit={limit}"
                )
        return removed

    return or_nearest(decide, ratio)


def count_subsets(
    n_experts: int, removed: int, n_group: int = 1, protected: Collection[int] = ()
) -> int:
    """Number of ways to remove `removed` of `n_experts`, equally many from each group of adjacent
    experts and none of the `protected`."""
    return prod(
        comb(len(group), removed // n_group) for group in _groups(n_experts, n_group, protected)
    )


def _groups(n_experts: int, n_group: int, protected: Collection[int]) -> list[list[int]]:
    """The experts of each group that can be removed."""
    size = n_experts // n_group
    groups = [range(first, first + size) for first in range(0, n_experts, size)]
    return [[expert for expert in group if expert not in protected] for group in groups]


def kept_subsets(
    n_experts: int, removed: int, n_group: int = 1, protected: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """The kept ids, ascending, of all choices that `count_subsets` counts; first the one that loses
    the lowest ids."""
    groups = _groups(n_experts, n_group, protected)
    lost = product(*(combinations(group, removed // n_group) for group in groups))
    subsets = []
    for choice in lost:
        gone = {expert for group in choice for expert in group}
        subsets.append(tuple(expert for expert in range(n_experts) if expert not in gone))
    return subsets


CLOSE = 0.005
"""Largest difference between the ratio and what a list removes: tables show two digits."""


def read(path: str) -> dict[str, Any]:
    """Read the file. UserError when it is missing, damaged, or neither a schedule nor a plan."""
    try:
        content: dict[str, Any] = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"allocation.path={path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"allocation.path={path} is damaged: expected JSON, {error}") from None
    is_schedule = bool(content) and fits(content, {str: int}) and all(map(str.isdecimal, content))
    if not is_schedule and not (isinstance(content, dict) and is_plan(content)):
        raise UserError(
            f'allocation.path={path}: expected a schedule such as {{"0": 16, "1": 20}} (layer: '
            "experts to remove) or "
            "a plan.json"
        )
    return content


def is_plan(content: Mapping[str, Any]) -> bool:
    """Whether the file is a plan: then exactly that plan is used, without a criterion."""
    return "schema" in content and fits(
        content, {"layers": {str: {"experts": int, "retained": list}}}
    )


def listed(path: str | None, granularity: str) -> dict[str, Any]:
    """The content of the file. UserError unless it lists what the criterion scores: "expert" or
    "channel"."""
    if path is None:
        raise UserError("allocation=list needs allocation.path: a schedule or a plan.json")
    content = read(path)
    of_channels = is_plan(content) and any(
        "channels" in layer for layer in content["layers"].values()
    )
    if of_channels != (granularity == "channel"):
        lists = "channels" if of_channels else "experts"
        raise UserError(
            f"allocation.path={path} lists {lists}, but the criterion scores {granularity}s: "
            "choose a criterion that "
            f"scores {lists}"
        )
    return content


def experts(problem: Experts) -> dict[int, int]:
    """Layer -> experts to remove, from the file. UserError when it does not fit the layers, their
    routers and ratio."""
    content = listed(problem.path, "expert")
    if is_plan(content):
        content = {
            layer: about["experts"] - len(about["retained"])
            for layer, about in content["layers"].items()
        }
    remove = _of_layers(content, problem.limits)
    for layer, limit in problem.limits.items():
        kept = limit.count - remove[layer]
        if not limit.smallest <= kept <= limit.largest or kept % limit.step:
            nearest = min(
                range(limit.smallest, limit.largest + 1, limit.step),
                key=lambda count: abs(count - kept),
            )
            raise UserError(
                f"allocation.path: removes {remove[layer]} of {limit.count} experts in layer "
                f"{layer}, "
                f"{limit.count - nearest} is the nearest feasible"
            )
    _agree(
        sum(remove.values()) / sum(limit.count for limit in problem.limits.values()), problem.ratio
    )
    return remove


def channels(problem: Channels) -> Budgets:
    """Layer -> channels each expert keeps, from the plan. UserError when it does not fit the layers
    and the ratio."""
    layers = _of_layers(listed(problem.path, "channel")["layers"], problem.scores)
    budgets: Budgets = {}
    for layer, scores in problem.scores.items():
        about = layers[layer]
        if (about["experts"], about.get("width")) != scores.shape:
            raise UserError(
                f"allocation.path: layer {layer} has {about['experts']} experts of width "
                f"{about.get('width')}, "
                f"expected {scores.shape[0]} of {scores.shape[1]}: the plan is of another model"
            )
        budgets[layer] = numpy.zeros(len(scores), dtype=numpy.int64)
        budgets[layer][about["retained"]] = [
            int(mask, 16).bit_count() for mask in about["channels"]
        ]
    _agree(
        1 - sum(int(kept.sum()) for kept in budgets.values()) / int(problem.sizes.sum()),
        problem.ratio,
    )
    return budgets


def _of_layers(content: Mapping[str, Any], expected: Mapping[int, Any]) -> dict[int, Any]:
    """What is listed of each of the `expected` layers, in their order."""
    numbered = {int(layer): value for layer, value in content.items()}
    if set(numbered) != set(expected):
        raise UserError(
            f"allocation.path: is about layers {sorted(numbered)}, expected {sorted(expected)}"
        )
    return {layer: numbered[layer] for layer in expected}


def _agree(removed: float, ratio: float) -> None:
    if abs(removed - ratio) > CLOSE:
        raise UserError(
            f"ratio={ratio}, but allocation.path removes {removed:.4g} of all: set "
            f"ratio={removed:.2g}, so that tables "
            "do not mislead"
        )
