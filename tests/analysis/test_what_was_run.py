"""What the page says of studies that vary allocations, granularity and bits."""

from __future__ import annotations

from typing import Any

from handmade import UNPRUNED, cell, comparison_of, study_of

from analysis import report


def study(axes: list[dict[str, Any]], solved: list[int]) -> Any:
    return study_of(comparison_of(axes, {"gsm8k": [[1] * n + [0] * (40 - n) for n in solved]}))


def test_experts_under_one_allocation_are_said_as_ever() -> None:
    found = study([UNPRUNED, cell("reap", ratio=0.25), cell("man", ratio=0.25)], [40, 20, 10])
    assert report.what_was_run(found) == (
        "Two criteria chose which experts of m to remove (25 % of each layer, with code calibration). That gave two "
        "pruned models, each evaluated like the unpruned one on one benchmark of 40 items."
    )


def test_channels_and_allocations_are_counted() -> None:
    axes = [UNPRUNED, cell("heapr", "global"), cell("heapr", "layerwise"), cell("camera", "layerwise")]
    found = study(axes, [40, 20, 10, 5])
    assert report.what_was_run(found).startswith(
        "Two criteria and two allocations chose which channels of m to remove (50 % in all, with code calibration). "
        "That gave three pruned models"
    )
    both = study([*axes, cell("reap")], [40, 20, 10, 5, 4])
    assert "which experts or channels of m" in report.what_was_run(both)


def test_bits_are_said_and_ratio_zero_is_no_pruning() -> None:
    axes = [cell("snip", "coverage", ratio=ratio, recovery=bits) for ratio in (0.0, 0.5) for bits in ("none", "nf4")]
    found = study([UNPRUNED, *axes], [40, 40, 39, 20, 18])
    said = report.what_was_run(found)
    assert "(50 % in all, with code calibration). Pruned models were evaluated as they are and with NF4. That" in said
    assert "That gave four models, each" in said
