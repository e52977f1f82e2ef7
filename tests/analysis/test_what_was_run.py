"""What the page says of studies that vary allocations, granularity and bits."""

from __future__ import annotations

from typing import Any

import pytest
from handmade import UNPRUNED, cell, comparison_of, study_of

from analysis import report


def study(axes: list[dict[str, Any]], solved: list[int]) -> Any:
    return study_of(comparison_of(axes, {"gsm8k": [[1] * n + [0] * (40 - n) for n in solved]}))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ([cell("reap", ratio=0.25), cell("man", ratio=0.25)], ("Two criteria", "experts of m", "25 % of each layer")),
        (
            [cell("heapr", "global"), cell("heapr", "layerwise"), cell("camera", "layerwise")],
            ("Two criteria and two allocations", "channels of m", "50 % in all", "three pruned models"),
        ),
        ([cell("heapr", "global"), cell("reap")], ("experts or channels of m",)),
        (  # a ratio of zero is no pruning
            [cell("snip", "coverage", ratio=ratio, recovery=bits) for ratio in (0.0, 0.5) for bits in ("none", "nf4")],
            ("50 % in all", "NF4", "four models"),
        ),
    ],
)
def test_what_varies_is_counted_and_named(axes: list[dict[str, Any]], words: tuple[str, ...]) -> None:
    said = report.what_was_run(study([UNPRUNED, *axes], list(range(40, 40 - len(axes) - 1, -1))))
    assert all(word in said for word in (*words, "code calibration", "40 items")), said
