"""What is missing or wrong in a store: tables are made all the same, gaps are gaps, and the exit
code tells."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from golden_store import add_timings
from handmade import table_of
from synthetic import edited_document, record_path, write_store

from moe_lab.analysis import __main__, registry
from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.outputs.scores import rank_table
from moe_lab.analysis.registry import Results, find, outputs
from moe_lab.analysis.render.table import Table

Change = Callable[[dict[str, Any], Path], None]
TABLES = (
    "winners",
    "ranks",
    "unified.table1",
    "unified.table5",
    "pareto",
    "gaps",
)
CELL = "pocket_olmoe reap pocket_code 0.5"
"""The cell that the changes below damage."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    criteria = ("frequency", "reap", "man")
    return write_store(tmp_path / "store", criteria=criteria, tasks=("gsm8k", "mmlu", "rte"))


def entry(document: dict[str, Any]) -> dict[str, Any]:
    return next(
        cell_entry for cell_entry in document["cells"] if cell_entry["cell"]["criterion"] == "reap"
    )


def fail(cell_entry: dict[str, Any], why: str) -> None:
    """No evaluation of a cell was made, and its cost neither."""
    cell_entry["errors"] = dict.fromkeys([*cell_entry["evaluate"], "cost"], why)
    cell_entry |= {"evaluate": dict.fromkeys(cell_entry["evaluate"]), "cost": None}


def nothing_ran(document: dict[str, Any], root: Path) -> None:
    for cell_entry in document["cells"]:
        fail(cell_entry, "the node is gone")
        cell_entry |= dict.fromkeys(("plan", "scores", "statistics", "profile", "model"))


def of_cell(damage: Callable[[dict[str, Any]], object]) -> Change:
    """A change of what the record says of the damaged cell."""
    return lambda document, root: damage(entry(document))


def other_versions(document: dict[str, Any], root: Path) -> None:
    """An evaluation was made by another version of lm-eval."""
    with edited_document(root / entry(document)["evaluate"]["gsm8k"] / "step.json") as step:
        step["provenance"].setdefault("versions", {})["lm_eval"] = "9.9"


def result(first: Any = (), again: Any = None, **content: Any) -> Change:
    """A change of a result's content, of its `first` entry, or one that lists this entry `again`
    with other values."""

    def change(document: dict[str, Any], root: Path) -> None:
        with edited_document(root / entry(document)["evaluate"]["gsm8k"] / "result.json") as record:
            record["results"][0] |= dict(first)
            record["results"] += [record["results"][0] | again] if again else []
            record |= content

    return change


LOST: dict[str, Change] = {
    "nothing ran": nothing_ran,
    "cell failed": of_cell(lambda cell: fail(cell, "out of memory")),
    "benchmark missing": of_cell(lambda cell: cell["evaluate"].update(gsm8k=None)),
    "other suite": of_cell(lambda cell: cell["evaluate"].pop("gsm8k")),
    "score is nan": result(first={"score": float("nan")}),
    "newer": result(schema=99),
}
OTHERS = {
    "other metric": result(first={"metric": "f1"}),
    "other versions": other_versions,
}


def changed(store: Path, change: Change) -> Path:
    with edited_document(record_path(store)) as document:
        change(document, store)
    return store


def tables_of(study: Study, names: Iterable[str]) -> dict[str, Table]:
    results = Results(study)
    items = [item for name in names for item in find(name).items(results)]
    return {item.name: item for item in items if isinstance(item, Table)}


@pytest.mark.parametrize("what", LOST)
def test_missing_result_is_a_gap_in_every_table(store: Path, what: str) -> None:
    study = load(changed(store, LOST[what]), "made_up")
    tables = tables_of(study, outputs() if what == "nothing ran" else TABLES)
    for table in tables.values():
        for column in {"GSM8K", "Avg"} & set(table.frame):
            rows = table.frame[table.frame["Criterion"] == "REAP"]
            assert rows[column].isna().all() or column == "Avg", (table.name, column)
            assert not (rows[column] == 0).any()
    assert study.gaps
    assert "gaps" in tables
    assert what != "nothing ran" or not {"ranks", "unified.table5", "winners"} & set(tables)


@pytest.mark.parametrize("what", sorted(LOST.keys() - {"nothing ran"}))
def test_missing_result_of_a_cell_leaves_the_others(store: Path, what: str) -> None:
    tables = tables_of(load(changed(store, LOST[what]), "made_up"), TABLES)
    others = tables["unified.table5"].frame.query("Criterion == 'MAN'")
    assert others["GSM8K"].notna().all()
    assert tables["winners"].frame["Winner"].notna().all()


def test_cell_without_cost_is_a_gap_in_the_table_of_costs(store: Path) -> None:
    tables = tables_of(load(changed(store, LOST["cell failed"]), "made_up"), TABLES)
    assert tables["pareto"].frame.query("Criterion == 'REAP'")["Kept"].isna().all()


def test_cell_of_another_suite_is_a_gap_and_a_note(store: Path) -> None:
    study = load(changed(store, LOST["other suite"]), "made_up")
    assert "different sets of benchmarks" in " ".join(study.notes)
    assert [(gap.reason, gap.location) for gap in study.gaps] == [
        ("not evaluated on gsm8k, unlike other cells of the study", CELL)
    ]


def test_repeated_result_counts_once_with_a_note(store: Path) -> None:
    results = load(store, "made_up").results
    study = load(changed(store, result(again={"score": 0.0})), "made_up")
    assert study.results["score"].tolist() == results["score"].tolist()
    assert "the first counts" in " ".join([*study.notes, *(gap.reason for gap in study.gaps)])


def analyse(store: Path, what: str, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """The folder of the tables that the command line writes of a changed store, and what it prints
    on stderr. Asserts that its exit code is 1 with gaps alone."""
    arguments = [
        "ranks" if what in OTHERS else "gaps",
        "unified.table5",
        f"store={changed(store, {**LOST, **OTHERS}[what])}",
        f"out={store / 'out'}",
    ]
    assert __main__.main(arguments) == (what in LOST)
    return store / "out" / "tables", capsys.readouterr().err


def test_exit_code_is_1_with_gaps(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analyse(store, "other suite", capsys)


def test_different_metrics_are_reported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, errors = analyse(store, "other metric", capsys)
    assert "not comparable" in (tables / "ranks.md").read_text()
    assert "gsm8k was measured by different metrics (acc, f1)" in errors
    assert "not comparable" in errors


def test_different_versions_are_reported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "lm_eval" in analyse(store, "other versions", capsys)[1]


def test_missing_results_are_reported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, errors = analyse(store, "nothing ran", capsys)
    assert "has no results yet" in errors
    assert "the node is gone" in (tables / "gaps.csv").read_text()


def test_failed_cell_is_reported_and_has_no_score(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, errors = analyse(store, "cell failed", capsys)
    assert f"gsm8k of {CELL}: failed: out of memory" in errors
    lines = (tables / "unified.table5.md").read_text().splitlines()
    row = next(line for line in lines if "REAP" in line)
    assert re.findall(r"\| – ", row)
    assert "0.000" not in row
    frame = pd.read_csv(tables / "unified.table5.csv")
    assert frame.loc[frame["Criterion"] == "REAP", "GSM8K"].isna().all()


@pytest.mark.parametrize("failed", [["reap", "man", "frequency"], ["none"]])
def test_ranks_need_no_scores_of_the_unpruned_model(store: Path, failed: list[str]) -> None:
    def change(document: dict[str, Any], root: Path) -> None:
        for cell_entry in document["cells"]:
            if cell_entry["cell"]["criterion"] in failed:
                fail(cell_entry, "out of memory")

    results = Results(load(changed(store, change), "made_up"))
    average = table_of(rank_table, results).frame.set_index("Criterion")["Avg"]
    assert average.isna().sum() == len(failed)
    assert average.isna()["Unpruned"] == (failed == ["none"])
    items = {name: find(name).items(results) for name in TABLES}
    assert items["ranks"]
    assert items["unified.table5"]
    assert items["gaps"]


def test_unpruned_model_has_benchmarks_and_no_ranks(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(document: dict[str, Any], root: Path) -> None:
        document["cells"] = document["cells"][:1]

    arguments = [
        "ranks",
        "unified.table5",
        "coverage.fig10",
        f"store={changed(store, alone)}",
        f"out={store / 'out'}",
    ]
    assert __main__.main(arguments) == 1
    errors = capsys.readouterr().err
    assert "ranks needs results of pruned models" in errors
    assert "coverage.fig10 needs a run with timing=true" in errors
    frame = pd.read_csv(store / "out" / "tables" / "unified.table5.csv")
    assert frame["Criterion"].tolist() == ["Unpruned"]
    assert frame["GSM8K"].notna().all()
    assert __main__.main(["report", *arguments[3:]]) == 0


def test_study_without_benchmarks_has_outputs_without_scores(tmp_path: Path) -> None:
    """As sweeps with suite=none are: coverage_fig6, coverage_fig10 and aimer_fig6."""
    blocks = ("coverage aligned 64", "coverage aligned 128")
    root = write_store(tmp_path, criteria=("channel_activation",), allocations=blocks, tasks=())
    add_timings(root, "made_up")
    results = Results(load(root, "made_up"))
    assert results.comparisons == []
    assert results.study.results.empty
    tables = [
        find(name).items(results) for name in ("coverage.table2", "coverage.fig10", "aimer.fig6")
    ]
    assert all(tables)
    assert len(tables[0][0].frame) == 3 * 2


def test_all_lists_what_it_could_make_nothing_of(
    results: Results,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    items = find("ranks").items(results)
    nothing = replace(find("gaps"), make=lambda *_: [])
    ranks = replace(find("ranks"), make=lambda *_: items)
    arguments = ["all", f"store={small}", f"out={tmp_path}"]
    monkeypatch.setattr(registry, "REGISTERED", {"ranks": ranks, "gaps": nothing})
    assert __main__.main(arguments) == 0
    assert "no data for these" not in capsys.readouterr().err
    monkeypatch.setattr(
        registry, "REGISTERED", {"ranks": ranks, "coverage": replace(nothing, name="coverage")}
    )
    assert __main__.main(arguments) == 0
    assert "to see what it needs): coverage\n" in capsys.readouterr().err
