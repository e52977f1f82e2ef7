"""allocation=list: a file with numbers of experts, retained experts or a plan. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_lab.allocation.problem import Experts
from moe_lab.errors import UserError
from moe_lab.json_files import fits

TOLERANCE = 0.005
"""Largest difference between the ratio and the share that a list removes; tables show two
digits."""


def read(path: str) -> dict[str, Any]:
    """The content of the JSON file at `path`: a plan, see `is_plan`; a schedule, see `is_schedule`;
    or layer -> ids of retained experts. UserError for any other file."""
    from moe_lab.statistics.score_files import parse_json, retained_experts

    try:
        content = parse_json(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"allocation.path={path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:  # not JSON, or not UTF-8
        raise UserError(
            f"allocation.path={path} is no JSON: expected a schedule or a plan.json; scores of "
            f"other tools are read by criterion=file ({error})"
        ) from None
    if not is_plan(content) and not is_schedule(content):
        content = retained_experts(content)
    if not content:
        raise UserError(
            f'allocation.path={path}: expected a schedule such as {{"0": 16, "1": 20}} (layer: '
            'experts to remove), retained experts such as {"0": [3, 1], "1": [0, 2]}, or a '
            "plan.json"
        )
    return dict(content)


def is_plan(content: Any) -> bool:
    """Whether `content` is a plan."""
    return fits(content, {"layers": {str: {"experts": int, "retained": list}}})


def is_schedule(content: Any) -> bool:
    """Whether `content` is a schedule: number of a layer as text -> number of experts to
    remove."""
    return fits(content, {str: int}) and all(map(str.isdecimal, content))


def read_for_granularity(path: str | None, granularity: str) -> dict[str, Any]:
    """The content of the JSON file at `path`, as in `read`. UserError unless the file lists
    `granularity`, "expert" or "channel"."""
    if path is None:
        raise UserError("allocation=list needs allocation.path: a schedule or a plan")
    content = read(path)
    lists_channels = is_plan(content) and any(
        "channels" in layer for layer in content["layers"].values()
    )
    if lists_channels != (granularity == "channel"):
        units = "channels" if lists_channels else "experts"
        raise UserError(
            f"allocation.path={path} lists {units}, but the criterion scores {granularity}s: "
            f"choose a criterion that scores {units}"
        )
    return content


def removals(problem: Experts) -> dict[int, int]:
    """Layer -> number of experts to remove, from the schedule in the file problem.path. UserError
    when the numbers do not fit the model or the ratio."""
    content = read_for_granularity(problem.path, "expert")
    numbered = {int(layer): count for layer, count in content.items()}
    if set(numbered) != set(problem.limits):
        raise UserError(
            f"allocation.path: has layers {sorted(numbered)}, expected {sorted(problem.limits)}"
        )
    removed_counts = {layer: numbered[layer] for layer in problem.limits}
    for layer, limit in problem.limits.items():
        retained = limit.n_experts - removed_counts[layer]
        if not limit.smallest <= retained <= limit.largest or retained % limit.step:
            nearest = min(
                range(limit.smallest, limit.largest + 1, limit.step),
                key=lambda count: abs(count - retained),
            )
            raise UserError(
                f"allocation.path: removes {removed_counts[layer]} of {limit.n_experts} experts in "
                f"layer {layer}, {limit.n_experts - nearest} is the nearest feasible"
            )
    total = sum(limit.n_experts for limit in problem.limits.values())
    check_ratio(sum(removed_counts.values()) / total, problem.ratio)
    return removed_counts


def check_ratio(share: float, ratio: float) -> None:
    """Raise UserError when `share`, which the file removes, differs from `ratio`."""
    if abs(share - ratio) > TOLERANCE:
        raise UserError(
            f"ratio={ratio}, but allocation.path removes {share:.4g} of all: set "
            f"ratio={share:.2g}, so that tables do not mislead"
        )
