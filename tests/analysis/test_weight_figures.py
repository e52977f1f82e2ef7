from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of
from synthetic import write_store

from analysis import names
from analysis.load.study import load
from analysis.outputs import weights
from analysis.outputs.scores import radar_figure, radar_methods
from analysis.outputs.weights import profiles, weight_scores
from analysis.registry import find
from analysis.stats.comparison import Comparison


def scores(layers: list[list[float]], criterion: str = "aimer", model: str = "m") -> pd.DataFrame:
    rows = [
        {"model": model, "criterion": criterion, "layer": layer, "expert": expert, "score": score}
        for layer, values in enumerate(layers)
        for expert, score in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_each_layer_is_scaled_by_itself() -> None:
    found = profiles(scores([[2.0, 4.0, 3.0], [-1.0, -3.0, -2.0]]))
    assert found["profile"].tolist() == [0, 1, 0.5, 1, 0, 0.5]
    assert found["place"].tolist() == [0, 2, 1, 2, 0, 1]


def test_a_layer_without_differences_has_no_profile() -> None:
    found = profiles(scores([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]))
    assert np.isnan(found["profile"][:3]).all() and found["profile"][3:].tolist() == [0, 0.5, 1]


def test_a_map_per_model_and_criterion_with_experts_by_rank_and_layers_upwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = {
        ("magnitude", "m"): [[3.0, 1.0, 2.0], [0.0, 8.0, 2.0]],
        ("magnitude", "n"): [[5.0, 5.0, 5.0], [9.0, 0.0, 6.0]],
        ("aimer", "m"): [[0.5, 0.75, 0.7], [0.1, 0.2, 0.9]],
        ("aimer", "n"): [[0.5, 0.6, 0.7], [0.3, 0.2, 0.1]],
    }
    frame = pd.concat([scores(layers, *key) for key, layers in drawn.items()], ignore_index=True)
    monkeypatch.setattr(weights, "weight_scores", lambda study: frame)
    [item] = find("aimer.fig2").items(results_of(None))
    figure = item.drawing
    maps = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_images()}
    assert list(maps) == ["m\nMagnitude", "n\nMagnitude", "m\nAIMER", "n\nAIMER"]  # models across, Magnitude above
    for (criterion, model), layers in drawn.items():
        axes = maps[f"{model}\n{names.criterion(criterion)}"]
        [image] = axes.get_images()
        for layer, values in enumerate(layers):
            spread = max(values) - min(values)
            expected = [(value - min(values)) / spread for value in sorted(values)] if spread else [np.nan] * 3
            assert image.get_array()[layer].filled(np.nan).tolist() == pytest.approx(expected, nan_ok=True)
        assert image.origin == "lower" and image.get_clim() == (0, 1)


def radar(lines: dict[str, list[list[int]]], benchmarks: tuple[str, ...]) -> Comparison:
    """Criterion -> its outcomes on each of the benchmarks."""
    axes = [UNPRUNED, *(cell(name) for name in lines if name != "none")]
    return comparison_of(axes, {name: [rows[at] for rows in lines.values()] for at, name in enumerate(benchmarks)})


def radar_figures(comparison: Comparison) -> list[Any]:
    return radar_figure(results_of(study_of(comparison), [comparison]), "aimer.fig3")


def test_a_radar_has_every_benchmark_in_the_order_of_the_tables() -> None:
    benchmarks = ("winogrande", "humaneval_plus", "gsm8k", "humaneval", "mine")
    right = {"none": [4, 3, 4, 3, 2], "reap": [1, 0, 2, 3, 4], "aimer": [2, 2, 0, 1, 3]}
    lines = {name: [[1] * count + [0] * (4 - count) for count in counts] for name, counts in right.items()}
    [figure] = radar_figures(radar(lines, benchmarks))
    [axes] = figure.drawing.axes
    spokes = [tick.get_text() for tick in axes.get_xticklabels()]
    assert spokes == ["HumanEval", "HumanEval+", "GSM8K", "WinoGrande", "mine"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    order = [3, 1, 2, 0, 4]
    for name, counts in right.items():
        shares = [counts[at] / 4 for at in order]
        assert drawn[names.method(name)] == [*shares, shares[0]], "each line is closed"


def test_a_radar_has_the_methods_of_the_paper_and_then_the_best_others() -> None:
    others = {"man": 3, "msan": 4, "mone": 1}
    counts = {"none": 5, **dict.fromkeys(("reap", "aimer", "ean", "seer", "magnitude"), 2), **others}
    lines = {name: [[1] * count + [0] * (5 - count)] * 3 for name, count in counts.items()}
    comparison = radar(lines, ("rte", "gsm8k", "mmlu"))
    [panel] = comparison.panels
    assert radar_methods(comparison, panel) == ["aimer", "magnitude", "seer", "ean", "reap", "msan", "man"]
    [figure] = radar_figures(comparison)
    assert len(figure.drawing.axes[0].get_lines()) == 1 + 7
    assert radar_figures(radar(lines, ("rte", "gsm8k"))) == [], "two spokes are no radar"


def test_scores_are_read_once_per_criterion_and_gaps_are_noted(tmp_path: Path) -> None:
    settings = {"calibrations": ("pocket_code",), "tasks": ("rte",), "items": 5, "overlap": False}
    store = write_store(tmp_path / "store", criteria=("aimer", "magnitude", "reap"), **settings)
    study = load(store, "made_up")
    folder = study.cells.query("criterion == 'aimer'")["scores_folder"].iloc[0]
    (store / folder).mkdir(parents=True)
    pd.DataFrame({"layer": [0, 0], "expert": [0, 1], "score": [-0.5, -0.75]}).to_parquet(
        store / folder / "scores.parquet"
    )
    found = weight_scores(study)
    # the store has the negated ratio, so that a higher score is kept; the figure has the paper's
    assert found["criterion"].tolist() == ["aimer", "aimer"] and found["score"].tolist() == pytest.approx([0.5, 0.75])
    assert any("magnitude" in gap.where for gap in study.gaps), "what is gone is said"
