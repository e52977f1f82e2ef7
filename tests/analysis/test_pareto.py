from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of
from synthetic import write_store

from analysis.load import plans
from analysis.load.study import load
from analysis.outputs import pareto
from analysis.outputs.pareto import against_cost, front, pareto_table
from analysis.registry import Results, find
from analysis.render import style

TASKS = ("gsm8k", "math500", "rte", "livecodebench")
VARIED = {"calibrations": ("pocket_code",), "ratios": (0.25, 0.5), "tasks": TASKS, "items": 30, "overlap": False}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    store = write_store(
        tmp_path_factory.mktemp("pareto") / "store",
        criteria=("reap", "random", "heapr"),
        allocations=("uniform", "global"),
        recoveries=("none", "nf4"),
        **VARIED,
    )
    return Results(load(store, "made_up"))


def naive_front(costs: list[float], scores: list[float]) -> list[bool]:
    """Entry by entry, from the words of the definition."""
    found = []
    for cost, score in zip(costs, scores, strict=True):
        beaten = np.isnan(score)
        for other_cost, other_score in zip(costs, scores, strict=True):
            beaten |= other_cost < cost and other_score >= score
            beaten |= other_cost <= cost and other_score > score
        found.append(not beaten)
    return found


def test_the_front_is_what_nothing_beats() -> None:
    assert front([1, 2, 3, 3], [0.1, 0.3, 0.2, 0.3]).tolist() == [True, True, False, False]
    assert front([1, 1, 2], [0.5, 0.5, 0.5]).tolist() == [True, True, False], "equals stand together"
    assert front([1, 2], [np.nan, 0.1]).tolist() == [False, True]
    drawn = np.random.default_rng(0)
    for _ in range(50):
        costs, scores = drawn.integers(0, 6, 12).astype(float), drawn.integers(0, 6, 12).astype(float)
        scores[drawn.random(12) < 0.1] = np.nan
        assert front(costs, scores).tolist() == naive_front(costs.tolist(), scores.tolist())


def test_every_cell_stands_with_its_cost(results: Results) -> None:
    [comparison] = results.comparisons
    found = against_cost(results.study, comparison)
    assert found["cell"].tolist() == results.study.cells.index.tolist()
    full = found.iloc[0]
    assert full["storage_share"] == full["parameters_kept"] == 1 and not any(full[f"front_{a}"] for a in pareto.AXES)
    quantised = found[found["bits"] == 4]
    assert np.allclose(quantised["storage_share"] * 4, quantised["parameters_kept"], atol=1e-5)
    expected = comparison.columns.mean(axis=1)
    assert np.allclose(found.set_index("cell")["avg"], expected)
    assert ((found["low"] <= found["avg"]) & (found["avg"] <= found["high"])).all()


def test_all_methods_meet_in_one_table(results: Results) -> None:
    table = pareto_table(results, "pareto")
    assert len(table.frame) == len(results.study.cells) and table.low is not None
    for words in ("REAP", "REAP, global", "HEAPr-G", "HEAPr-G, NF4", "HEAPr, uniform", "Random, global, NF4"):
        assert (table.frame["Criterion"] == words).sum() == 2, words
    assert set(table.frame["Removes"]) == {"nothing removed", "whole experts", "channels"}
    assert table.frame["Parameters kept"].is_monotonic_decreasing


def test_a_cell_without_scores_is_a_gap_and_on_no_front(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", criteria=("reap",), **VARIED)
    study = load(store, "made_up")
    damaged = study.results[~((study.results["cell"] == 2) & (study.results["benchmark"] == "rte"))]
    object.__setattr__(study, "results", damaged)
    results = Results(study)
    found = against_cost(study, results.comparisons[0]).set_index("cell")
    assert np.isnan(found.loc[2, "avg"]) and not found.loc[2, "front_parameters_kept"]
    table = pareto_table(results, "pareto")
    assert table.frame["Avg"].isna().sum() == 1


REPLACED = ("uniform", "uniform, replacement=mean_output", "uniform, replacement=hc_smoe")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """One ratio, a criterion of experts with every kind of replacement and one of channels, recovered and not."""
    root = tmp_path_factory.mktemp("kinds") / "store"
    varied = {**VARIED, "ratios": (0.5,), "recoveries": ("none", "router_kd")}
    write_store(root, name="experts", criteria=("reap",), allocations=REPLACED, **varied)
    write_store(root, name="channels", criteria=("heapr",), allocations=("global",), **varied)
    return Results(load(root, "experts,channels"))


def test_the_table_says_what_takes_the_place_of_experts(kinds: Results) -> None:
    frame = pareto_table(kinds, "pareto").frame
    removes = frame.set_index("Criterion")["Removes"].to_dict()
    assert removes == {
        "Unpruned": "nothing removed",
        **dict.fromkeys(("REAP", "REAP, Router-KD"), "whole experts"),
        **dict.fromkeys(("REAP, novices", "REAP, novices, Router-KD"), "experts, replaced by constants"),
        **dict.fromkeys(("REAP, HC-SMoE", "REAP, HC-SMoE, Router-KD"), "experts, merged into others"),
        **dict.fromkeys(("HEAPr-G", "HEAPr-G, Router-KD"), "channels"),
    }


def test_a_plan_that_cannot_be_read_leaves_a_gap_in_what_is_removed(tmp_path: Path) -> None:
    """Its experts may be dropped, replaced or merged."""
    root = write_store(tmp_path / "store", criteria=("reap",), allocations=REPLACED, **{**VARIED, "ratios": (0.5,)})
    folder = load(root, "made_up").cells.set_index("allocation").loc[REPLACED[1], "plan_folder"]
    (root / folder / "plan.json").write_text("{")
    results = Results(load(root, "made_up"))
    removes = pareto_table(results, "pareto").frame.set_index("Criterion")["Removes"]
    assert removes.isna().to_dict() == {"Unpruned": False, "REAP": False, "REAP, novices": True, "REAP, HC-SMoE": False}
    figure, _ = find("pareto").items(results)
    marks = [line for line in figure.drawing.axes[0].get_lines() if line.get_linestyle() == "None"]
    assert sum(len(line.get_xdata()) for line in marks) == 2


@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 1]])
def test_merged_experts_count_as_merged_with_and_without_their_router_row(tmp_path: Path, kept: list[int]) -> None:
    """Experts 1 and 2 are merged; 2 loses its row of the router, or shares expert 1 with its own."""
    masks = {0: "ff", 1: "ff", 2: "00"}
    layer = {"experts": 4, "width": 8, "keep": kept, "channels": [masks[expert] for expert in kept]}
    layer["merged"] = {"1": {"1": 0.5, "2": 0.5}}
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(json.dumps({"layers": {"0": layer}}))
    reader = SimpleNamespace(
        folder=lambda name: tmp_path / name, json=lambda at, file: json.loads((at / file).read_text())
    )
    plan = plans.kept(pd.DataFrame({"plan_folder": ["plan"]}), reader)
    assert plan["merged"].tolist() == [False, False, True, False] and not plan["constant"].any()
    assert plan["share"].tolist() == [1, 1, 0, 0] and plan["null"].tolist() == [False, False, len(kept) == 3, False]


AXES = [
    UNPRUNED,
    *(cell(name, place, ratio) for ratio in (0.5, 0.25) for name, place in (("reap", "uniform"), ("heapr", "global"))),
]
"""reap and heapr at one half, then at a quarter."""


def granular(axes: list[dict]) -> Results:
    solved = {"arc_easy": (9, 4, 6, 6, 7), "piqa": (9, 2, 6, 8, 7)}
    outcomes = {
        name: [[1] * count + [0] * (10 - count) for count in counts[: len(axes)]] for name, counts in solved.items()
    }
    comparison = comparison_of(axes, outcomes)
    sizes = [8, 4, 4.5, 6, 6.5]
    costs = [{"storage_bytes": size * 2**20, "routed_kept": size / 8} for size in sizes[: len(axes)]]
    return results_of(study_of(comparison, costs), [comparison])


def test_channels_stand_beside_whole_experts_at_each_ratio() -> None:
    [table] = find("coverage.table10").items(granular(AXES))
    frame = table.frame
    assert frame["Pruned"].tolist() == ["25 %"] * 3 + ["50 %"] * 3
    assert frame["Criterion"].tolist() == ["Unpruned", "REAP", "HEAPr-G"] * 2
    assert frame["Mean"].tolist() == pytest.approx([0.9, 0.7, 0.7, 0.9, 0.3, 0.6])
    assert frame["Storage (MiB)"].tolist() == [8, 6, 6.5, 8, 4, 4.5] and "PIQA" in frame
    one = granular(AXES[:2])
    assert find("coverage.table10").items(one) == [] == find("coverage.fig9").items(one), "no channels"


def test_the_front_of_storage_joins_what_nothing_beats_with_as_few_bytes() -> None:
    results = granular(AXES)
    [comparison] = results.comparisons
    found = pareto.storage_frontier(results.study, comparison).set_index("storage")
    assert found["score"].to_dict() == pytest.approx({6.0: 0.7, 6.5: 0.7, 4.0: 0.3, 4.5: 0.6})
    assert found["front"].to_dict() == {6.0: True, 6.5: False, 4.0: True, 4.5: True}
    assert (found["low"] <= found["score"]).all() and (found["score"] <= found["high"]).all()
    [figure] = find("coverage.fig9").items(results)
    [axes] = figure.drawing.axes
    lines = {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    assert lines["REAP"].get_xdata().tolist() == [4, 6] and lines["HEAPr-G"].get_xdata().tolist() == [4.5, 6.5]
    assert lines["REAP"].get_markerfacecolor() == style.SURFACE != lines["HEAPr-G"].get_markerfacecolor()
