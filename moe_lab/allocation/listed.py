"""allocation=list: read how much to remove from a file, a schedule {"layer": experts to remove} or a plan.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from moe_lab.allocation.problem import Budgets, Channels, Experts, read_setting
from moe_lab.errors import UserError
from moe_lab.json_files import fits

CLOSE = 0.005
"""Largest difference between the ratio and what a list removes: tables show two digits."""


def read(path: str) -> dict[str, Any]:
    """Read the file. UserError when it is missing, damaged, or neither a schedule nor a plan."""
    content: dict[str, Any] = read_setting("allocation.path", path)
    is_schedule = bool(content) and fits(content, {str: int}) and all(map(str.isdecimal, content))
    if not is_schedule and not (isinstance(content, dict) and is_plan(content)):
        raise UserError(
            f'allocation.path={path}: expected a schedule such as {{"0": 16, "1": 20}} (layer: experts to remove) or '
            "a plan.json"
        )
    return content


def is_plan(content: Mapping[str, Any]) -> bool:
    """Whether the file is a plan: then exactly that plan is used, without a criterion."""
    return "schema" in content and fits(content, {"layers": {str: {"experts": int, "keep": list}}})


def check(path: str | None, granularity: str) -> None:
    """Raise UserError unless the file can be read and lists what the criterion scores: "expert" or "channel"."""
    _listed(path, granularity)


def _listed(path: str | None, granularity: str) -> dict[str, Any]:
    if path is None:
        raise UserError("allocation=list needs allocation.path: a schedule or a plan.json")
    content = read(path)
    of_channels = is_plan(content) and any("channels" in layer for layer in content["layers"].values())
    if of_channels != (granularity == "channel"):
        lists = "channels" if of_channels else "experts"
        raise UserError(
            f"allocation.path={path} lists {lists}, but the criterion scores {granularity}s: choose a criterion that "
            f"scores {lists}"
        )
    return content


def experts(problem: Experts) -> dict[int, int]:
    """Layer -> experts to remove, from the file. UserError when it does not fit the layers, their routers and ratio."""
    content = _listed(problem.path, "expert")
    if is_plan(content):
        content = {layer: about["experts"] - len(about["keep"]) for layer, about in content["layers"].items()}
    remove = _of_layers(content, problem.limits)
    for layer, limit in problem.limits.items():
        kept = limit.count - remove[layer]
        if not limit.smallest <= kept <= limit.largest or kept % limit.step:
            nearest = min(range(limit.smallest, limit.largest + 1, limit.step), key=lambda count: abs(count - kept))
            raise UserError(
                f"allocation.path: removes {remove[layer]} of {limit.count} experts in layer {layer}, "
                f"{limit.count - nearest} is the nearest feasible"
            )
    _agree(sum(remove.values()) / sum(limit.count for limit in problem.limits.values()), problem.ratio)
    return remove


def channels(problem: Channels) -> Budgets:
    """Layer -> channels each expert keeps, from the plan. UserError when it does not fit the layers and the ratio."""
    layers = _of_layers(_listed(problem.path, "channel")["layers"], problem.scores)
    budgets: Budgets = {}
    for layer, scores in problem.scores.items():
        about = layers[layer]
        if (about["experts"], about.get("width")) != scores.shape:
            raise UserError(
                f"allocation.path: layer {layer} has {about['experts']} experts of width {about.get('width')}, "
                f"expected {scores.shape[0]} of {scores.shape[1]}: the plan is of another model"
            )
        budgets[layer] = numpy.zeros(len(scores), dtype=numpy.int64)
        budgets[layer][about["keep"]] = [int(mask, 16).bit_count() for mask in about["channels"]]
    _agree(1 - sum(int(kept.sum()) for kept in budgets.values()) / int(problem.sizes.sum()), problem.ratio)
    return budgets


def _of_layers(listed: Mapping[str, Any], expected: Mapping[int, Any]) -> dict[int, Any]:
    """What is listed of each of the `expected` layers, in their order."""
    numbered = {int(layer): value for layer, value in listed.items()}
    if set(numbered) != set(expected):
        raise UserError(f"allocation.path: is about layers {sorted(numbered)}, expected {sorted(expected)}")
    return {layer: numbered[layer] for layer in expected}


def _agree(removed: float, ratio: float) -> None:
    if abs(removed - ratio) > CLOSE:
        raise UserError(
            f"ratio={ratio}, but allocation.path removes {removed:.4g} of all: set ratio={removed:.2g}, so that tables "
            "do not mislead"
        )
