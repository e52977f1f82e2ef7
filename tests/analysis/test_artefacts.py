from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic_plans
from synthetic import write_store

from analysis.load.study import Study, load

VARIED = {
    "criteria": ("reap", "random", "heapr"),
    "calibrations": ("pocket_code",),
    "ratios": (0.25, 0.5),
    "allocations": ("uniform", "global", "evolutionary"),
    "recoveries": ("none", "nf4"),
    "tasks": ("gsm8k", "math500", "rte", "livecodebench"),
    "items": 30,
    "overlap": False,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("varied") / "store", **VARIED)


@pytest.fixture(scope="module")
def study(store: Path) -> Study:
    return load(store, "made_up")


def test_cells_say_where_and_what_then(study: Study) -> None:
    assert set(study.cells["allocation"]) == {"none", "uniform", "global", "evolutionary"}
    assert set(study.cells["recovery"]) == {"none", "nf4"}
    assert study.cells.query("criterion == 'heapr'")["granularity"].unique().tolist() == ["channel"]


def test_what_plans_keep_is_counted_from_their_masks(study: Study) -> None:
    for cell, plan in study.kept.groupby("cell"):
        axes = study.cells.loc[cell].to_dict()
        if axes["criterion"] == "heapr":
            expected = synthetic_plans.channel_masks(axes).mean(axis=2).ravel()
            assert plan["share"].tolist() == pytest.approx(expected.tolist(), abs=1e-12)
            assert plan["null"].sum() == (0 if axes["allocation"] == "uniform" else 1)
        else:
            gone = plan.query("share == 0").groupby("layer").size()
            assert gone.tolist() == synthetic_plans.removed(axes)
            assert set(plan["share"]) == {0.0, 1.0} and not plan["null"].any()
    assert 0 not in set(study.kept["cell"]), "the unpruned model has no plan"


def test_costs_have_a_row_per_cell(study: Study) -> None:
    assert study.costs["cell"].tolist() == study.cells.index.tolist()
    full = study.costs.iloc[0]
    assert full["parameters_kept"] == full["flops_ratio"] == 1 and full["storage_bytes"] == 2 * 3_700_000
    quantised = study.cells.index[study.cells["recovery"] == "nf4"]
    rows = study.costs.set_index("cell").loc[quantised]
    assert (rows["bits"] == 4).all() and np.allclose(rows["storage_bytes"] * 4, rows["loading_bytes"], atol=8)


def test_loading_memory_is_that_of_the_costs(study: Study) -> None:
    counted = {round(bytes_after) for bytes_after in study.memory["bytes_after"]}
    pruned = study.costs[study.costs["cell"] > 0]
    assert counted == {round(loading) for loading in pruned["loading_bytes"]}


def test_searches_and_their_history_are_read(study: Study) -> None:
    searched = study.cells.query("allocation == 'evolutionary'")
    assert study.searches["cell"].tolist() == searched.index.tolist()
    row = study.searches.iloc[0]
    assert sum(row["best"]) == sum(row["uniform"]) == row["budget"] and row["fitness"] == "esap"
    history = study.history.query(f"cell == {row['cell']}")
    assert history["fitness"].max() == pytest.approx(row["best_fitness"])
    assert history["fitness"].isna().sum() == 12 and len(history["schedule"].iloc[0]) == len(row["layers"])


def test_a_damaged_plan_or_search_is_a_gap(tmp_path: Path) -> None:
    small = {**VARIED, "criteria": ("reap",), "ratios": (0.5,), "recoveries": ("none",)}
    store = write_store(tmp_path / "store", **small)
    study = load(store, "made_up")
    folders = study.cells["plan_folder"].tolist()
    (store / folders[1] / "plan.json").write_text('{"layers": {"0": {}}}')
    (store / folders[3] / "search.json").unlink()
    (store / study.cells["cost_folder"].iloc[2] / "cost.json").write_text("[]")
    assert set(study.kept["cell"]) == {2, 3} and study.searches.empty and len(study.history)
    assert study.costs["cell"].tolist() == [0, 1, 3]
    assert sorted(gap.what for gap in study.gaps) == [
        "cost.json is damaged",
        "plan.json is damaged",
        "search.json is missing",
    ]
