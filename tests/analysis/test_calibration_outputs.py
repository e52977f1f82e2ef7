from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of
from synthetic import write_store

from analysis.load.study import load
from analysis.outputs import calibration, channels
from analysis.registry import Results, make

SIZES = {"text_8k": 8000, "text_65k": 65000, "pocket_math": 65000}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two sizes of one text, and another text."""
    few = {"items": 20, "tasks": ("gsm8k", "winogrande"), "ratios": (0.25, 0.5), "overlap": False}
    root = tmp_path_factory.mktemp("sizes") / "store"
    write_store(root, criteria=("reap", "man", "random"), calibrations=tuple(SIZES), **few)
    for name, tokens in SIZES.items():
        for file in (root / "statistics").glob(f"*{name}*/calibration.json"):
            text = "one" if name.startswith("text") else "other"
            file.write_text(
                json.dumps({**json.loads(file.read_text()), "valid_tokens": {name: tokens}, "sha256": text})
            )
    return Results(load(root, "made_up"))


def test_sets_are_measured_against_the_one_of_most_tokens(results: Results) -> None:
    [table] = make(["coverage.table18"], results)["coverage.table18"]
    block = table.frame[table.frame["Pruned"] == "50 %, REAP"]
    assert list(block["Criterion"]) == [
        "Unpruned",
        "text_8k, 8,000 tokens",
        "text_65k, 65,000 tokens",
        "Math, 65,000 tokens",
    ]
    last = block["Mean"].iloc[-1]
    assert np.allclose(block["Difference"].iloc[1:3], block["Mean"].iloc[1:3] - last)
    assert not table.frame["Pruned"].str.contains("Random").any()  # it reads no text


def test_sizes_of_one_text_are_one_line(results: Results) -> None:
    [figure] = make(["heapr.fig3"], results)["heapr.fig3"]
    assert [axes.get_title(loc="left") for axes in figure.drawing.axes] == ["25 % pruned", "50 % pruned"]
    [comparison] = results.comparisons
    for axes, ratio in zip(figure.drawing.axes, (0.25, 0.5), strict=True):
        drawn = axes.get_lines()
        assert len(drawn) == 2 and all(list(line.get_xdata()) == [8000, 65000] for line in drawn)
        cells = results.study.cells.query(f"criterion == 'reap' and ratio == {ratio} and calibration == 'text_8k'")
        average = comparison.score(("winogrande",))[cells.index[0]]
        assert average in [pytest.approx(line.get_ydata()[0]) for line in drawn]


def test_every_benchmark_changes_against_the_least_tokens(results: Results) -> None:
    [figure] = make(["aimer.fig1"], results)["aimer.fig1"]
    panels = {axes.get_title(loc="left"): axes for axes in figure.drawing.axes if axes.get_lines()}
    assert sorted(panels) == sorted(f"{one}, text_65k, {r} % pruned" for one in ("REAP", "MAN") for r in (25, 50))
    [comparison] = results.comparisons
    for (method, word), ratio in product((("reap", "REAP"), ("man", "MAN")), (0.25, 0.5)):
        cells = results.study.cells.query(f"criterion == '{method}' and ratio == {ratio}")
        small, large = (cells.index[cells["calibration"] == name][0] for name in ("text_8k", "text_65k"))
        lines = panels[f"{word}, text_65k, {100 * ratio:g} % pruned"].get_lines()
        drawn = [list(line.get_ydata()) for line in lines if list(line.get_xdata()) == [8000, 65000]]
        scores = [comparison.benchmarks.loc[[small, large], name] for name in ("gsm8k", "winogrande")]
        assert all([0, pytest.approx(100 * (score[large] - score[small]))] in drawn for score in scores)
    moved = calibration.changes(results.study, comparison)
    assert set(moved["benchmark"]) == {"gsm8k", "winogrande"} and len(moved) == 2 * 2 * 2 * 2
    assert moved[moved["read"] == 8000][["difference", "low", "high"]].eq(0).all(axis=None)
    more = moved[moved["read"] > 8000]
    assert more["difference"].between(more["low"] - 1e-9, more["high"] + 1e-9).all()
    beyond = sum(row.low > 0 or row.high < 0 for row in more.itertuples())
    assert f"in {beyond} of {len(more)} lines" in figure.caption


def test_without_two_sizes_there_is_nothing_to_draw(small: Path) -> None:
    results = Results(load(small, "made_up"))
    # its sets say nothing of their text, so that each counts as one of its own
    assert make(["heapr.fig3", "coverage.table16"], results) == {"heapr.fig3": [], "coverage.table16": []}


def test_blocks_are_measured_against_the_published_ones() -> None:
    words = ("coverage aligned 64", "coverage aligned 128", "coverage min 256", "coverage", "uniform")
    axes = [UNPRUNED, *(cell("channel_activation", word) for word in words)]
    rows = [[1.0] * (10 - place) + [0.0] * place for place in range(6)]
    comparison = comparison_of(axes, {"gsm8k": rows})
    results = results_of(study_of(comparison, [{}] * 6), [comparison])
    table = channels.aligned_blocks(results, "t")
    assert list(table.frame["Criterion"]) == ["Unpruned", "Coverage aligned 64", "Coverage aligned 128"]
    assert table.frame["Difference"].tolist()[1] == pytest.approx(0.1) and np.isnan(table.frame["Difference"].iloc[2])
    table = channels.smallest_experts(results, "t")
    assert list(table.frame["Criterion"]) == ["Unpruned", "Coverage aligned 128", "Coverage min 256"]
