from __future__ import annotations

import numpy as np
import pytest
import synthetic_plans
from synthetic import write_store

from analysis.load.study import load
from analysis.outputs import search
from analysis.outputs.search import BEYOND, allocation_table, search_table, searched_pairs
from analysis.registry import Results
from analysis.stats import uncertainty

TASKS = ("gsm8k", "math500", "rte", "livecodebench", "humaneval", "wildbench")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    store = write_store(
        tmp_path_factory.mktemp("search") / "store",
        criteria=("reap", "ean", "heapr"),
        calibrations=("pocket_code",),
        allocations=("global by frequency", "uniform", "evolutionary"),
        tasks=TASKS,
        items=60,
        overlap=False,
    )
    return Results(load(store, "made_up"))


def test_searched_cells_are_paired_with_the_uniform_cell_of_their_criterion(results: Results) -> None:
    [comparison] = results.comparisons
    pairs = searched_pairs(comparison)
    assert len(pairs) == 4
    for searched, uniform in pairs.items():
        one, other = comparison.cells.loc[searched], comparison.cells.loc[uniform]
        assert (one["allocation"], other["allocation"]) == ("evolutionary", "uniform")
        assert (one["criterion"], one["ratio"]) == (other["criterion"], other["ratio"])


def test_differences_are_paired_and_corrected_together(results: Results) -> None:
    [comparison] = results.comparisons
    table = allocation_table(results, "t")
    assert table.low is not None and table.high is not None
    assert table.frame["Allocation"].tolist() == ["uniform", "evolutionary"] * 4
    p_values, columns = [], {"Code": ("Eval+", "LiveCode"), "Math": ("GSM8K", "MATH-500"), "MC Avg": ("MC Avg",)}
    columns |= {"WildBench": ("WildBench",), "Avg": tuple(comparison.parts)}
    pairs = list(searched_pairs(comparison).items())
    for name, target in columns.items():
        scores = comparison.score(target)
        found = table.frame[name].to_numpy(float).reshape(-1, 2)
        gains = table.frame[f"Δ {name}"].to_numpy(float).reshape(-1, 2)
        assert np.isnan(gains[:, 0]).all(), "the uniform row has no difference"
        for row, (searched, uniform) in enumerate(pairs):
            assert found[row].tolist() == [scores[uniform], scores[searched]]
            assert gains[row, 1] == pytest.approx(scores[searched] - scores[uniform])
            low, high = comparison.lead(target, searched, uniform)
            assert table.low[f"Δ {name}"].iloc[2 * row + 1] == low and table.high[f"Δ {name}"].iloc[2 * row + 1] == high
            p_values.append(float(comparison.p_values(target, searched, [uniform])[0]))
    sure = uncertainty.holm(np.array(p_values)).reshape(len(columns), -1) < 0.05
    assert 0 < sure.sum() < sure.size, "the store has differences of both kinds"
    for row in range(len(pairs)):
        expected = {name for name, marks in zip(columns, sure, strict=True) if marks[row]} or {"none"}
        said = table.frame[BEYOND].iloc[2 * row + 1].replace(" and ", ", ").split(", ")
        assert set(said) == expected
    assert "Math" in table.frame and "Δ Avg" in table.optional


def test_the_table_of_searches_has_gains_and_costs(results: Results) -> None:
    table = search_table(results, "t")
    assert len(table.frame) == 4
    row = table.frame.query("Criterion == 'REAP' and Pruned == '50 %'").iloc[0]
    axes = {"criterion": "reap", "calibration": "pocket_code", "ratio": 0.5, "allocation": "evolutionary"}
    document = synthetic_plans.search(axes)
    assert row["Gain"] == pytest.approx(document["best"]["fitness"] - 0.5)
    assert row["Removed per layer"] == " ".join(map(str, document["best"]["schedule"]))
    assert row["Layers run"] == pytest.approx(24.5 / 36) and row["Seconds"] == 12.5


def test_densities_are_the_kept_shares_of_whole_experts(results: Results) -> None:
    found = search.densities(results.study, "pocket_olmoe")
    assert set(found["criterion"]) == {"reap", "ean"}, "channels have no density of experts"
    for cell, layers in found.groupby("cell"):
        axes = results.study.cells.loc[cell].to_dict()
        expected = 1 - np.array(synthetic_plans.removed(axes)) / synthetic_plans.EXPERTS
        assert layers["share"].tolist() == pytest.approx(expected.tolist())
