from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, cells_of, comparison_of, results_of, study_of

from analysis.outputs import channels, layer_budgets, score_rows

AXES = [
    UNPRUNED,
    *(cell("heapr", "global", ratio=ratio) for ratio in (0.2, 0.6, 0.4)),
    *(cell("reap", ratio=ratio) for ratio in (0.2, 0.4, 0.6)),
    *(cell("camera", "layerwise", ratio=ratio) for ratio in (0.2, 0.4)),
]
FLOPS = [1, 0.95, 0.85, 0.9, 0.99, 0.98, 0.97, 0.96, 0.92]


def test_lines_are_methods_with_enough_ratios() -> None:
    lines = score_rows.ratio_lines(cells_of(AXES).iloc[1:])
    assert {label: cells["ratio"].tolist() for label, cells in lines.items()} == {
        "HEAPr-G": [0.2, 0.4, 0.6],
        "REAP": [0.2, 0.4, 0.6],
    }
    assert score_rows.ratio_lines(cells_of(AXES[:3]).iloc[1:]) == {}


def test_accuracy_and_flops_are_drawn_against_the_ratio() -> None:
    solved = [10, 9, 5, 7, 6, 4, 2, 8, 6]
    comparison = comparison_of(AXES, {"arc_challenge": [[1] * n + [0] * (10 - n) for n in solved]})
    costs = [{"routed_kept": 1.0, "flops_ratio": ratio, "storage_bytes": 1.0} for ratio in FLOPS]
    [figure] = channels.ratio_figure(results_of(study_of(comparison, costs), [comparison]), "heapr.fig2")
    left, right = figure.drawing.axes
    scores = [np.asarray(line.get_ydata(), float).tolist() for line in left.lines if len(line.get_xdata()) == 3]
    assert sorted(scores) == [pytest.approx([0.6, 0.4, 0.2]), pytest.approx([0.9, 0.7, 0.5])]
    saved = [np.asarray(line.get_ydata(), float).tolist() for line in right.lines]
    assert sorted(saved) == [pytest.approx([1, 2, 3]), pytest.approx([5, 10, 15])]
    [legend] = figure.drawing.legends
    assert {text.get_text() for text in legend.get_texts()} == {"REAP", "HEAPr-G", "Unpruned"}


def plan(cell_number: int, shares: list[list[float]]) -> pd.DataFrame:
    """What a plan keeps, from shares (layers, experts)."""
    rows = [
        {"cell": cell_number, "layer": layer, "expert": expert, "share": share, "null": False}
        for layer, values in enumerate(shares)
        for expert, share in enumerate(values)
    ]
    return pd.DataFrame(rows)


BUDGETS = [UNPRUNED, *(cell("snip", word) for word in ("uniform", "layerwise", "coverage", "coverage, prior usage"))]
KEPT = pd.concat(
    [
        plan(1, [[0.5, 0.5], [0.5, 0.5]]),
        plan(2, [[0.7502, 0.25], [0.5, 0.5]]),
        plan(3, [[1.0, 0.5], [0.5, 0.0]]),
        plan(4, [[0.75, 0.75], [0.25, 0.25]]),
    ]
)


def test_layers_keep_the_mean_of_their_experts_and_equal_lines_are_one() -> None:
    shares = layer_budgets.layer_shares(cells_of(BUDGETS), KEPT)
    assert shares.index.tolist() == ["uniform\nlayerwise", "coverage\ncoverage, prior usage"]
    assert shares.to_numpy().tolist() == [[0.5, 0.5], [0.75, 0.25]]


def test_perplexity_is_drawn_against_the_ratio() -> None:
    comparison = comparison_of(AXES[:4], {"wikitext": [[1.0]] * 4})
    study = study_of(comparison)
    scores = {
        "cell": range(4),
        "benchmark": "wikitext",
        "metric": "perplexity",
        "score": [9.0, 10, 14, 12],
        "stderr": 0.1,
    }
    study.results = pd.DataFrame(scores)
    results = results_of(study, [comparison])
    [figure] = channels.loss_figure(results, "loss_by_ratio")
    [points] = [line for line in figure.drawing.axes[0].lines if len(line.get_xdata()) == 3]
    assert np.asarray(points.get_xydata()).tolist() == [[20, 10], [40, 12], [60, 14]]
    study.results["metric"] = "acc"
    assert channels.loss_figure(results, "loss_by_ratio") == []
