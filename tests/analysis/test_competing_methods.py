from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from handmade import table_of
from synthetic import record_path, write_store

from analysis import names, report
from analysis.load.study import load
from analysis.outputs.ranks import rank_table
from analysis.outputs.scores import benchmark_table
from analysis.registry import Results, make, outputs

pytestmark = pytest.mark.slow

TASKS = ("gsm8k", "math500", "rte", "livecodebench")
SMALL = {"calibrations": ("pocket_code",), "ratios": (0.25,), "tasks": TASKS, "items": 20, "overlap": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(
        tmp_path_factory.mktemp("methods") / "store",
        criteria=("reap", "random", "heapr"),
        allocations=("uniform", "global"),
        recoveries=("none", "nf4"),
        **SMALL,
    )


def failing(store: Path, cells: list[int], message: str = "out of memory") -> None:
    """Let all evaluations and the cost of `cells` have failed."""
    path = record_path(store)
    document = json.loads(path.read_text())
    for cell in cells:
        entry = document["cells"][cell]
        entry["errors"] = dict.fromkeys([*entry["evaluate"], "cost"], message)
        entry["evaluate"] = dict.fromkeys(entry["evaluate"])
        entry["cost"] = None
    path.write_text(json.dumps(document))


def test_methods_stand_in_their_usual_order() -> None:
    keys = [("mine",), ("heapr", "global"), ("reap", "evolutionary"), ("reap", "", "nf4"), ("reap",), ("heapr",)]
    ordered = names.methods_in_order(names.key(*parts) for parts in keys)
    assert [names.parts(key)[0] for key in ordered] == ["reap", "reap", "reap", "heapr", "heapr", "mine"]
    assert ordered[:3] == [names.key("reap"), names.key("reap", "", "nf4"), names.key("reap", "evolutionary")]
    allocations = ["evolutionary", "global, replacement=ream", "uniform, replacement=m_smoe", "uniform", "mine"]
    ordered = names.methods_in_order(names.key("reap", allocation) for allocation in allocations)
    assert [names.parts(key)[1] for key in ordered] == ["uniform", "evolutionary", "mine", *allocations[2:0:-1]]


def test_methods_compete_in_one_block(store: Path) -> None:
    results = Results(load(store, "made_up"))
    [comparison] = results.comparisons
    [panel] = comparison.panels
    assert len(panel.cells) == 12 and set(comparison.cells["calibration"]) == {"none", "pocket_code"}
    table = table_of(rank_table, results)
    assert len(table.frame) == 13 and table.frame["Avg Rank"].notna().sum() == 12
    assert table.frame["Avg Rank"].iloc[1:].mean() == pytest.approx(6.5)
    assert set(table_of(benchmark_table, results).frame["Criterion"]) >= {"Random, global, NF4"}
    assert set(results.winners["calibration"]) == {"pocket_code"} and len(results.winners) == 4
    best = results.winners.set_index("column").loc["GSM8K", "winners"]
    scores = comparison.score(("GSM8K",))
    assert {panel.cells[key] for key in best} == set(scores.index[1:][scores.iloc[1:] == scores.iloc[1:].max()])


def test_a_method_that_failed_is_a_gap_everywhere(store: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    failing(copy, [3])
    results = Results(load(copy, "made_up"))
    assert "cost of pocket_olmoe reap pocket_code 0.25 global" in {gap.where for gap in results.study.gaps}
    made = make(outputs(), results)
    label = names.method(results.study.cells.loc[3, "method"])
    for name in ("ranks", "unified.table5"):
        [table] = made[name]
        row = table.frame[table.frame["Criterion"] == label].iloc[0]
        numbers = row[list(table.formats)].astype(float)
        assert numbers.isna().all(), name
    assert label not in set(made["pareto"][-1].frame["Criterion"]), "without its cost it has no place there"
    assert made["gaps"]


@pytest.mark.parametrize("failed", [[1, 2], [1], [0]])
def test_panels_and_studies_without_scores_still_have_a_report(tmp_path: Path, failed: list[int]) -> None:
    """Every method of a ratio failed; one of two did; the unpruned model did."""
    store = write_store(tmp_path / "store", criteria=("reap", "man"), **{**SMALL, "ratios": (0.25, 0.5)})
    failing(store, failed)
    page = report.write(store, "made_up", tmp_path / "out")
    ranks = (tmp_path / "out" / "tables" / "ranks.csv").read_text()
    assert page.exists() and len(ranks.splitlines()) == 7
    assert "0.000" not in ranks.splitlines()[2] if 1 in failed else True
    table = table_of(rank_table, Results(load(store, "made_up")))
    scores = table.frame["Avg"].astype(float).to_numpy()
    rows = {0: [0, 3], 1: [1], 2: [2]}
    gone = sorted(row for cell in failed for row in rows[cell])
    assert np.flatnonzero(np.isnan(scores)).tolist() == gone
