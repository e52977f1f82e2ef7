from __future__ import annotations

import numpy as np
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of

from analysis import names
from analysis.outputs.recovery import recovery_table, storage_figure, sweeps
from analysis.outputs.score_rows import MEBIBYTE, STORAGE, storage_points

AXES = [
    UNPRUNED,
    *(
        cell("channel_activation", "coverage", ratio=ratio, recovery=recovery)
        for ratio in (0.5, 0.0)
        for recovery in ("nf4", "none")
    ),
    cell("reap", "coverage"),
]
SOLVED = [40, 20, 22, 38, 40, 3]
COSTS = [
    {"routed_kept": kept, "flops_ratio": 1.0, "storage_bytes": mebibytes * MEBIBYTE}
    for kept, mebibytes in ((1, 8), (0.5, 2), (0.5, 5), (1, 3), (1, 8), (0.5, 5))
]


def made(solved: list[int | None]) -> object:
    return comparison_of(AXES, {"gsm8k": [None if n is None else [1] * n + [0] * (40 - n) for n in solved]})


SWEEP = made(SOLVED)


def test_a_sweep_has_all_ratios_and_starts_with_16_bits() -> None:
    [found] = sweeps(SWEEP)
    assert list(zip(found["ratio"], found["recovery"], strict=True)) == [
        (0.0, "none"),
        (0.0, "nf4"),
        (0.5, "none"),
        (0.5, "nf4"),
    ]


def test_every_ratio_meets_every_recovery() -> None:
    table = recovery_table(results_of(study_of(SWEEP, COSTS), [SWEEP]), "t")
    assert table.frame["Criterion"].tolist() == ["Unpruned", "16 bits", "NF4"] * 2
    assert table.frame["Pruned"].tolist() == ["0 %"] * 3 + ["50 %"] * 3
    assert table.frame[STORAGE].tolist() == pytest.approx([8, 8, 3, 8, 5, 2])
    assert table.frame["Difference"].tolist() == pytest.approx(
        [np.nan, np.nan, -2 / 40, np.nan, np.nan, -2 / 40], nan_ok=True
    )
    assert table.low is not None and table.low["Mean"].notna().all()


def test_points_have_bytes_and_intervals() -> None:
    points = storage_points(study_of(SWEEP, COSTS), SWEEP, sweeps(SWEEP)[0], names.ABLATION)
    assert points["recovery"].tolist() == ["none", "nf4", "none", "nf4"]
    assert points["storage"].tolist() == pytest.approx([8, 3, 5, 2])
    assert points["score"].tolist() == pytest.approx([1, 0.95, 0.55, 0.5])
    assert (points["low"] <= points["score"]).all() and (points["score"] <= points["high"]).all()


def test_a_recovery_of_several_methods_has_a_line_for_each() -> None:
    axes = [
        UNPRUNED,
        *(
            cell("reap", place, recovery=word)
            for place in ("uniform", "evolutionary")
            for word in ("none", "router_kd")
        ),
    ]
    comparison = comparison_of(axes, {"gsm8k": [[1] * count + [0] * (60 - count) for count in (60, 20, 50, 30, 10)]})
    sizes = [{"storage_bytes": size * 2**20, "routed_kept": size / 8} for size in (8, 4, 3, 4, 3)]
    [figure] = storage_figure(results_of(study_of(comparison, sizes), [comparison]), "coverage.fig8")
    assert len(figure.drawing.axes[0].get_lines()) == 4, "a line for each method with each recovery"
    same = [{"storage_bytes": 4 * 2**20, "routed_kept": 0.5}] * 5
    assert storage_figure(results_of(study_of(comparison, same), [comparison]), "coverage.fig8") == []


def test_missing_results_are_left_out() -> None:
    lost = made([40, None, 22, 38, 40, 3])
    points = storage_points(study_of(lost, COSTS), lost, sweeps(lost)[0], names.ABLATION)
    assert points["score"].isna().tolist() == [False, False, False, True]
    [figure] = storage_figure(results_of(study_of(lost, COSTS), [lost]), "f")
    assert len(figure.drawing.axes[0].texts) == 3
