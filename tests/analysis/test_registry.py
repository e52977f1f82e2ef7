"""Every published table and figure has its name, tables of scores their rows and columns; adding one is one file."""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of

from analysis import names
from analysis.load.reader import Reader
from analysis.load.study import load
from analysis.outputs import recovery, search, search_settings
from analysis.published.numbers import FOLDER, counterparts
from analysis.published.tables import key_of
from analysis.registry import DEFAULT, REGISTERED, also, find, make, outputs
from analysis.render.table import Table
from analysis.report import CHAPTERS
from analysis.stats.cell_scores import CODING, MEAN, column_targets

LAST = {"unified": (6, 5), "evoesap": (10, 3), "heapr": (2, 3), "aimer": (7, 6), "coverage": (19, 16)}
"""The papers in the order of the table in the documentation, and their numbers of tables and figures."""
PUBLISHED = re.compile(rf"({'|'.join(LAST)})\.(table|fig)(\d+)")


def documented() -> dict[str, str | None]:
    """Published table or figure -> what makes it, or None, from the table in the documentation."""
    lines = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| published | output |"))
    found: dict[str, str | None] = {}
    papers = iter(LAST)
    paper = ""
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]):
        published, output, reason = (cell.strip() for cell in line.strip("|").split("|"))
        if published.startswith("**"):
            paper = next(papers)
            continue
        kind, number = published.split()
        name = f"{paper}.{'fig' if kind == 'Figure' else 'table'}{number}"
        outputs = re.findall(r"`([^`]+)`", output)
        assert name not in found and (outputs[:1] == [name] if outputs else reason), line
        found[name] = outputs[-1] if outputs else None
    return found


def test_every_published_table_and_figure_is_documented_with_its_output_or_a_reason() -> None:
    wanted = [f"{paper}.table{n + 1}" for paper, (tables, _) in LAST.items() for n in range(tables)]
    wanted += [f"{paper}.fig{n + 1}" for paper, (_, figures) in LAST.items() for n in range(figures)]
    assert sorted(documented()) == sorted(wanted)


def test_documented_outputs_are_those_that_there_are() -> None:
    registered = {name: find(name).name for name in (*outputs(), *also()) if PUBLISHED.fullmatch(name)}
    assert {name: output for name, output in documented().items() if output} == registered
    assert not set(also()) & set(outputs())


def test_what_lacks_data_says_what_makes_it() -> None:
    general = {name for name, output in outputs().items() if output.needs == DEFAULT}
    assert general <= {
        "average_scores",
        "pareto",
        "ranks",
        "artefacts",
        "gaps",
        "claims",
        "tokens_per_expert",
        "winners",
        "pairs",
    } | {name for name in outputs() if name.startswith(("unified.", "coverage.fig"))}
    assert find("coverage.table19").needs == find("coverage.table9").needs != DEFAULT


def test_every_output_stands_in_a_chapter_of_the_page_or_has_files_alone() -> None:
    """Those without a chapter are tables of a paper whose rows stand in another one, too."""
    chapters = {chapter.anchor for chapter in CHAPTERS} | {"provenance", "gaps"}
    shown = {output.chapter for output in outputs().values()} - {""}
    assert shown == chapters
    assert all(PUBLISHED.fullmatch(name) for name, output in outputs().items() if not output.chapter)


def test_the_first_place_in_code_that_spells_a_name_is_what_makes_it() -> None:
    root = Path(__file__).parents[2]
    files = sorted((root / "analysis").rglob("*.py"), key=str)
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    for name in outputs():
        spelled = re.compile(rf'(?<!chapter=)"{re.escape(name)}"')
        path, place = next((path, found) for path, text in texts.items() if (found := spelled.search(text)))
        make = inspect.unwrap(outputs()[name].make)
        assert path == root / f"{make.__module__.replace('.', '/')}.py", f"{name} is spelled in {path} before"
        assert texts[path][: place.start()].rstrip().endswith("@output("), name
        made = re.search(r"^def (\w+)", texts[path][place.end() :], re.MULTILINE)
        assert made and made[1] == make.__name__, name


def test_one_output_under_two_names_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    counted = replace(find("aimer.table2"), make=lambda results, name: asked.append(name))
    monkeypatch.setitem(REGISTERED, "aimer.table2", counted)
    assert make(["aimer.table3", "aimer.table2"], SimpleNamespace()) == {"aimer.table2": []}  # type: ignore
    assert len(asked) == 1


def right(count: int) -> list[int]:
    return [1] * count + [0] * (10 - count)


SEARCHED = [
    UNPRUNED,
    cell("reap"),
    cell("reap", "evolutionary"),
    cell("reap", "evolutionary spec dec"),
    cell("reap", calibration="pocket_general"),
    cell("reap", "evolutionary", calibration="pocket_general"),
]
SOLVED = {
    "humaneval": [9, 5, 6, 7, 3, 4],
    "livecodebench": [8, 4, 5, 6, 2, 3],
    "wildbench": [9, 6, 6, 6, 6, 7],
    "arc_easy": [10, 7, 8, 9, 6, 7],
}
BOTH = comparison_of(SEARCHED, {name: [right(count) for count in counts] for name, counts in SOLVED.items()})


def searched() -> Any:
    """A study of `BOTH`: two fitnesses on one calibration set."""
    found = pd.DataFrame(
        {
            "cell": [2, 3, 5],
            "fitness": ["esap", "spec_dec", "esap"],
            "samples": [64.0, 32.0, 64.0],
            "generations": [50, 30, 50],
            "population": [32, 32, 32],
            "seconds": [10.0, 180.0, 11.0],
        }
    )
    study = study_of(BOTH)
    study.searches = found
    return study


def column(table: Table, name: str) -> list[Any]:
    return list(table.frame[name])


def test_settings_of_searches_stand_beside_uniform_and_what_they_change() -> None:
    table = search_settings.settings_table(results_of(searched(), [BOTH]), "t")
    assert column(table, "Allocation") == ["uniform", "evolutionary", "evolutionary spec dec"]
    assert column(table, "Fitness") == ["", "ESAP", "SPEC-DEC"]
    np.testing.assert_equal(column(table, "Samples"), [np.nan, 64, 32])
    np.testing.assert_equal(column(table, "Search (s)"), [np.nan, 10, 180])
    assert column(table, "Code") == pytest.approx([0.45, 0.55, 0.65])
    assert table.low is not None and (table.low["Code"] < table.frame["Code"]).all()


def test_a_search_costs_what_its_step_says(tmp_path: Path) -> None:
    study, mebibyte = searched(), 2**20
    study.searches = study.searches[:1].assign(candidates=9)
    study.cells["plan_folder"] = [None, None, "search/a", None, None, None]
    study.costs = pd.DataFrame({"cell": [2], "loading_bytes": [float(6 * mebibyte)]})
    study.models, study.reader = {"m": {"parameters": 4 * mebibyte}}, Reader(tmp_path)
    (tmp_path / "search/a").mkdir(parents=True)
    found = []
    for gpu in (None, 30 * mebibyte):
        about = {"seconds": 12.0, "peak_memory_bytes": 50 * mebibyte, "peak_gpu_memory_bytes": gpu}
        (tmp_path / "search/a/step.json").write_text(json.dumps({"files": {}, "provenance": about}))
        found.append(search_settings.cost_table(results_of(study, [BOTH]), "t").frame)
    assert "Peak GPU memory (MiB)" not in found[0] and found[1]["Peak GPU memory (MiB)"].tolist() == [30]
    row = found[0].iloc[0]
    assert (row["Search (s)"], row["Evaluated"], row["Peak memory (MiB)"]) == (10, 9, 50)
    assert (row["Loading memory before (MiB)"], row["After (MiB)"]) == (8, 6)


def test_fitnesses_are_compared_where_both_were_searched_by() -> None:
    table = search_settings.fitness_table(results_of(searched(), [BOTH]), "t")
    assert column(table, "Fitness") == ["ESAP", "SPEC-DEC"] and column(table, "Calibration") == ["Code", "Code"]
    assert list(table.frame)[-4:] == ["Code", "WildBench", "MC Avg", "Search (s)"]
    one = searched()
    one.searches = one.searches.assign(fitness="esap")
    assert search_settings.fitness_table(results_of(one, [BOTH]), "t").frame.empty


def test_what_is_not_built_stands_with_its_printed_numbers_and_says_so() -> None:
    table = search_settings.competitor_table(results_of(searched(), [BOTH]), "t")
    with (FOLDER / "evoesap.csv").open(encoding="utf-8") as lines:
        printed = {row["benchmark"]: row["value"] for row in csv.DictReader(lines) if row["criterion"] == "DiEP"}
    *measured, last = table.frame.to_dict("records")
    assert [row["Source"] for row in measured] == ["measured"] * 3 and "not built" in last["Source"]
    assert last["Code"] == float(printed["Code"]) and last["Search (s)"] == 3600 * float(printed["time_h"])
    assert table.low is not None and len(table.low) == 4


def test_columns_are_those_of_the_view_and_the_mean_is_of_the_benchmarks_in_it() -> None:
    assert list(column_targets(BOTH, [1, 2], CODING)) == ["HumanEval", "Eval+", "LiveCode", "Code"]
    found = column_targets(BOTH, [1, 2], ("humaneval", "wildbench", "piqa", MEAN))
    assert found[MEAN] == ("humaneval", "wildbench") and list(found) == ["HumanEval", "WildBench", MEAN]
    table = search.allocation_table(results_of(study_of(BOTH), [BOTH]), "t", CODING)
    assert [name for name in table.frame if name.startswith("Δ")] == [
        f"Δ {name}" for name in ("HumanEval", "Eval+", "LiveCode", "Code")
    ]


def test_searches_after_calibration_on_general_text_are_told_apart() -> None:
    assert search.searched_pairs(BOTH) == {2: 1, 3: 1, 5: 4} and search.general_pairs(BOTH) == {5: 4}
    table = search.searched_after_general_text(results_of(searched(), [BOTH]), "t")
    assert column(table, "Calibration") == ["General", "General"]


def routed(model: str, solved: Sequence[int]) -> Any:
    cells = [UNPRUNED, cell("channel_activation", "coverage", recovery="nf4"), cell("mone")]
    found = comparison_of(cells, {"arc_easy": [right(count) for count in solved]})
    return type(found)(**{**vars(found), "model": model})


def test_fewer_experts_a_token_stand_under_the_model_as_it_was_trained() -> None:
    models = [routed("m", (9, 8, 7)), routed("m_top1", (5, 4, 3)), routed("m_top2", (8, 7, 6)), routed("n", (1, 1, 1))]
    study = study_of(models[0])
    study.models = {"m": {"layers": {"0": {"top_k": 4}}}}
    table = recovery.top_k_table(results_of(study, models), "t")
    assert column(table, "Model") == ["m"] * 3 + ["m_top2"] * 3 + ["m_top1"] * 3
    assert column(table, "Criterion")[1:3] == ["Channel activation, coverage, top-4", "MoNE score, top-4"]
    assert column(table, MEAN) == pytest.approx([0.9, 0.8, 0.7, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    assert recovery.top_k_table(results_of(study, models[3:]), "t").frame.empty


def test_a_model_with_fewer_experts_a_token_has_the_printed_rows_of_it() -> None:
    found = {**cell("none", "none", 0.0), "model": "qwen1_5_moe_top2", "calibration": "none", "recovery": "none"}
    row = counterparts("coverage.table9")[key_of(found)]
    assert {number.benchmark for number in row} >= {"piqa", "Avg"} and names.routed("m") == ("m", None)


def test_recovered_models_stand_beside_pruned_ones_of_the_same_ratio() -> None:
    cells = [UNPRUNED, cell("mone", ratio=0.25), cell("mone"), cell("mone", recovery="nf4")]
    comparison = comparison_of(cells, {"arc_easy": [right(count) for count in (9, 8, 7, 6)]})
    costs = [{"storage_bytes": size * 2**20, "routed_kept": 1.0} for size in (8, 6, 4, 1)]
    table = recovery.recovered_table(results_of(study_of(comparison, costs), [comparison]), "t")
    assert column(table, "Pruned") == ["50 %"] * 3 and column(table, "Storage (MiB)") == [8, 4, 1]


def test_a_table_is_added_by_writing_the_file_that_the_documentation_shows(small: Path, tmp_path: Path) -> None:
    """In a copy of the package; the command and its help then have it."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "analysis", tmp_path / "analysis", ignore=shutil.ignore_patterns("__pycache__"))
    [example] = re.findall(r"```python\n(.*?@output.*?)```", (root / "docs/analysis.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "analysis/outputs/experts_kept.py").write_text(example)
    store, out = f"store={small}", f"out={tmp_path / 'out'}"
    for wanted in ("help", "experts_kept"):
        command = [sys.executable, "-m", "analysis", wanted, store, out]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert wanted != "help" or "experts_kept" in done.stdout
    found = pd.read_csv(tmp_path / "out/tables/experts_kept.csv")
    kept = load(small, "made_up").kept
    assert found["Experts kept"].tolist() == kept.groupby("cell").size().tolist()
