"""What is missing or wrong in a store: tables are made all the same, gaps are gaps, and the exit code tells."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic import record_path, write_store

from analysis import __main__, registry
from analysis.load.study import load
from analysis.registry import Results, find, make, outputs
from analysis.render.table import Table

Change = Callable[[dict[str, Any], Path], None]
TABLES = ("winners", "ranks", "ranks.cd", "unified.table1", "unified.table5", "pareto", "claims", "gaps")
CELL = "pocket_olmoe reap pocket_code 0.5"
"""The cell that the changes below damage."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    few = {"items": 20, "tasks": ("gsm8k", "mmlu", "rte"), "ratios": (0.5,), "overlap": False}
    return write_store(tmp_path / "store", criteria=("frequency", "reap", "man"), calibrations=("pocket_code",), **few)


def entry(document: dict[str, Any]) -> dict[str, Any]:
    return next(found for found in document["cells"] if found["cell"]["criterion"] == "reap")


def result(document: dict[str, Any], root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = root / entry(document)["evaluate"]["gsm8k"] / "result.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def nothing_ran(document: dict[str, Any], root: Path) -> None:
    for found in document["cells"]:
        found["errors"] = dict.fromkeys(found["evaluate"], "the node is gone")
        found["evaluate"] = dict.fromkeys(found["evaluate"])
        found |= dict.fromkeys(("plan", "scores", "statistics", "cost", "profile", "model"))


def cell_failed(document: dict[str, Any], root: Path) -> None:
    entry(document)["errors"] = dict.fromkeys(entry(document)["evaluate"], "out of memory")
    entry(document)["evaluate"] = dict.fromkeys(entry(document)["evaluate"])


def benchmark_missing(document: dict[str, Any], root: Path) -> None:
    entry(document)["evaluate"]["gsm8k"] = None


def score_is_nan(document: dict[str, Any], root: Path) -> None:
    result(document, root, lambda content: content["results"][0].update(score=float("nan")))


def other_suite(document: dict[str, Any], root: Path) -> None:
    del entry(document)["evaluate"]["gsm8k"]


def reported_twice(document: dict[str, Any], root: Path) -> None:
    result(document, root, lambda content: content["results"].append({**content["results"][0], "score": 0.0}))


def other_versions(document: dict[str, Any], root: Path) -> None:
    result(document, root, lambda content: content["versions"].update(lm_eval="9.9"))


def newer(document: dict[str, Any], root: Path) -> None:
    result(document, root, lambda content: content.update(schema=99))


def results_are_no_list(document: dict[str, Any], root: Path) -> None:
    result(document, root, lambda content: content.update(results={"gsm8k": 1}))


def axis_unsaid(document: dict[str, Any], root: Path) -> None:
    del entry(document)["cell"]["gate"]


def other_metric(document: dict[str, Any], root: Path) -> None:
    result(document, root, lambda content: content["results"][0].update(metric="f1"))


LOST = (nothing_ran, cell_failed, benchmark_missing, score_is_nan, other_suite, newer, results_are_no_list, axis_unsaid)
KEPT = (reported_twice, other_versions, other_metric)


def changed(store: Path, change: Change) -> Path:
    file = record_path(store)
    document = json.loads(file.read_text())
    change(document, store)
    file.write_text(json.dumps(document))
    return store


@pytest.mark.parametrize("change", LOST, ids=lambda change: change.__name__)
def test_a_lost_result_is_a_gap_everywhere_and_never_zero(store: Path, change: Change) -> None:
    study = load(changed(store, change), "made_up")
    made = make(outputs() if change is nothing_ran else TABLES, Results(study))
    tables = {output.name: output for outputs in made.values() for output in outputs if isinstance(output, Table)}
    for table in tables.values():
        for column in {"GSM8K", "Avg"} & set(table.frame):
            rows = table.frame[table.frame["Criterion"] == "REAP"]
            assert rows[column].isna().all() or column == "Avg", (table.name, column)
            assert not (rows[column] == 0).any()
    if change is nothing_ran:
        assert "gaps" in tables and not {"ranks", "unified.table5", "winners"} & set(tables)
    else:
        others = tables["unified.table5"].frame.query("Criterion == 'MAN'")
        assert others["GSM8K"].notna().all() and tables["winners"].frame["Winner"].notna().all()
    assert study.gaps and "gaps" in tables
    if change is other_suite:
        assert "different sets of benchmarks" in " ".join(study.notes)
        assert [(gap.what, gap.where) for gap in study.gaps] == [
            ("never asked for gsm8k, unlike other cells of the study", CELL)
        ]


@pytest.mark.parametrize("change", KEPT, ids=lambda change: change.__name__)
def test_what_is_only_odd_keeps_its_number_and_is_told(store: Path, change: Change) -> None:
    before = load(store, "made_up").results.query("benchmark == 'gsm8k'")["score"].tolist()
    study = load(changed(store, change), "made_up")
    assert study.results.query("benchmark == 'gsm8k'")["score"].tolist() == before
    told = " ".join([*study.notes, *(gap.what for gap in study.gaps)])
    said = {"reported_twice": "the first counts", "other_versions": "lm_eval"}
    assert said.get(change.__name__, "gsm8k was measured by different metrics (acc, f1)") in told


@pytest.mark.parametrize(
    ("change", "code"),
    [(nothing_ran, 1), (cell_failed, 1), (other_suite, 1), (axis_unsaid, 1), (other_metric, 0), (other_versions, 0)],
)
def test_the_exit_code_says_whether_something_is_missing(
    store: Path, change: Change, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = store / "out"
    assert (
        __main__.main(["gaps" if code else "ranks", "unified.table5", f"store={changed(store, change)}", f"out={out}"])
        == code
    )
    said = capsys.readouterr().err
    if change is other_metric:
        assert "not comparable" in said and "not comparable" in (out / "tables" / "ranks.md").read_text()
    if change is nothing_ran:
        assert "has no results yet" in said and "the node is gone" in (out / "tables" / "gaps.csv").read_text()
    if change is cell_failed:
        assert f"gsm8k of {CELL}: failed: out of memory" in said
        row = next(line for line in (out / "tables" / "unified.table5.md").read_text().splitlines() if "REAP" in line)
        assert re.findall(r"\| – ", row) and "0.000" not in row
        frame = pd.read_csv(out / "tables" / "unified.table5.csv")
        assert frame.loc[frame["Criterion"] == "REAP", "GSM8K"].isna().all()


def test_an_unpruned_model_alone_has_its_benchmarks_and_nothing_to_rank(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(document: dict[str, Any], root: Path) -> None:
        document["cells"] = document["cells"][:1]

    words = ["ranks", "unified.table5", f"store={changed(store, alone)}", f"out={store / 'out'}"]
    assert __main__.main(words) == 1
    assert "ranks needs results of pruned models" in capsys.readouterr().err
    frame = pd.read_csv(store / "out" / "tables" / "unified.table5.csv")
    assert frame["Criterion"].tolist() == ["Unpruned"] and frame["GSM8K"].notna().all()
    assert __main__.main(["report", *words[2:]]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rnaks"], "did you mean ranks"),
        (["router_entrop"], "did you mean router_entropy"),
        (["ranks", "stor=x"], "did you mean store"),
        (["ranks", "study=made_pu"], "did you mean made_up"),
        (["ranks", "store=nowhere"], "does not exist"),
        (["ranks", "out="], "has no value"),
        (["report", "format=pfd"], "did you mean pdf"),
    ],
)
def test_wrong_words_get_the_nearest(
    store: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words if any("store=" in word for word in words) else [*words, f"store={store}"]
    assert __main__.main(given) == 2
    assert sentence in capsys.readouterr().err


def test_all_lists_what_it_could_make_nothing_of_and_a_wrong_name_gets_no_list(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(["ranks"], Results(load(store, "made_up")))
    out = f"out={store / 'out'}"
    assert __main__.main(["unified.tabl5", f"store={store}"]) == 2
    said = capsys.readouterr().err
    assert "did you mean unified.table5" in said and "analysis help" in said and len(said) < 150
    with pytest.MonkeyPatch.context() as patched:
        ranks, nothing = replace(find("ranks"), make=lambda *_: made["ranks"]), lambda *_: []
        patched.setattr(registry, "REGISTERED", {"ranks": ranks, "gaps": replace(find("gaps"), make=nothing)})
        assert __main__.main(["all", f"store={store}", out]) == 0
        assert "no data for these" not in capsys.readouterr().err
        coverage = replace(registry.REGISTERED["gaps"], name="coverage")
        patched.setattr(registry, "REGISTERED", {"ranks": ranks, "coverage": coverage})
        assert __main__.main(["all", f"store={store}", out]) == 0
        assert capsys.readouterr().err.strip().endswith("to see what it needs): coverage")
