"""The papers' numbers: one schema, no number twice, misprints, memory; averages and ranks follow
from scores."""

import csv
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from itertools import takewhile
from pathlib import Path

import pandas as pd
import pytest
from handmade import cell, cells_of, published_numbers, results_of, share, study_of, table_of
from omegaconf import OmegaConf

from moe_lab.analysis import names
from moe_lab.analysis.load import plans
from moe_lab.analysis.outputs.scores import rank_table, task_specific_table
from moe_lab.analysis.published.numbers import (
    AVERAGE,
    FOLDER,
    NOT_COMPARABLE,
    PAPERS,
    RANK,
    SCORES,
    TABLES,
    TRUNCATED,
    Key,
    PublishedNumber,
    counterparts,
    numbers,
    protocol,
    split,
)
from moe_lab.analysis.registry import outputs
from moe_lab.analysis.stats.cell_scores import MEAN, column_targets, scores
from moe_lab.analysis.stats.comparison import Comparison, displayed_columns
from moe_lab.paths import conf

ROOT = Path(__file__).parents[2]
COLUMNS = "paper,table,model,ratio,criterion,allocation,recovery,calibration,benchmark,value,note"
OTHERS = {
    "DiEP",
    "NAEE",
    "D2-MoE",
    "MoE-I²",
    "HC-SMoE",
    "MC-SMoE",
    "Sub-MoE",
    "He et al.",
    "C-Prune",
    "Wanda",
}
"""Methods in the papers' tables that are not built here."""
WORDS = {
    "criterion": {"any", "na", *OTHERS, "best calibration-based"}
    | {"AIMER minus best baseline", "AIMER minus best calibration-based"},
    "allocation": {
        "none",
        "na",
        "uniform",
        "DiEP",
        "coverage aligned 256",
        "coverage aligned 256 scores",
    }
    | {
        "coverage true attribution",
        *(f"{start}top-k {k}" for start in ("", "coverage ") for k in (1, 2, 4, 6)),
    },
    "recovery": {"none", "nf4", "q8", "dora", "dora_nf4"},
    "calibration": {"none", "na", "matched"},
}
"""Words that no setting of this project is called by."""
ROWS = {
    "unified": 1310,
    "evoesap": 1670,
    "heapr": 371,
    "aimer": 19,
    "coverage": 794,
}


def stems(*folders: str) -> set[str]:
    return {file.stem for folder in folders for file in (ROOT / folder).glob("*.yaml")}


def labels(*folders: str) -> set[str]:
    """What a study's record calls the settings in these folders."""
    names_of = set()
    for file in (file for folder in folders for file in (ROOT / folder).glob("*.yaml")):
        settings = OmegaConf.load(file)
        replacement = f", replacement={settings.replacement}" if "replacement" in settings else ""
        label = settings.get("label", settings.name if replacement else file.stem)
        names_of.add(f"{label}{replacement}")
    return names_of


def field(name: str) -> set[str]:
    position = ("model", "ratio", "criterion", "allocation", "recovery", "calibration").index(name)
    return {str(number.key[position]) for number in numbers()}


def test_every_file_has_the_one_schema_and_no_number_twice() -> None:
    for name in PAPERS:
        lines = (FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        assert lines[0] == COLUMNS
        assert {len(row) for row in csv.reader(lines)} == {len(COLUMNS.split(","))}
    assert Counter(number.paper for number in numbers()) == ROWS
    keys = Counter(
        (number.paper, number.table, number.key, number.benchmark) for number in numbers()
    )
    assert [key for key, times in keys.items() if times > 1] == []


def test_models_and_methods_are_called_as_they_are_here() -> None:
    assert field("model") - stems("conf/model") == {"all"}
    assert field("criterion") - set(names.CRITERIA) == WORDS["criterion"]
    assert (
        field("allocation") - labels("conf/allocation", "sweeps/allocation") <= WORDS["allocation"]
    )
    assert field("recovery") <= WORDS["recovery"]
    sets = {name for joint in field("calibration") for name in joint.split(names.JOINT)}
    assert sets - stems("conf/calibration") == WORDS["calibration"]


def test_scores_are_shares_of_known_items() -> None:
    sets = stems("conf/calibration")
    for number in numbers():
        assert math.isfinite(number.value)
        assert math.isnan(number.key[1]) or 0 <= number.key[1] < 1
        if number.benchmark in (*SCORES, *names.AVERAGES, AVERAGE):
            assert 0 <= number.value <= 1, number
        elif number.benchmark == RANK:
            assert 1 <= number.value <= 9
        if number.benchmark in names.BENCHMARKS:
            assert split(number, number.benchmark).get("items"), number
        # from another paper, that does not say it
        quoted = number.paper == "coverage" and number.key[2] == "mone"
        has_set = set(number.key[5].split(names.JOINT)) <= sets
        if number.benchmark in SCORES and number.key[2] in names.CRITERIA and has_set:
            assert bool(protocol(number).get("tokens")) != quoted, number


def test_tables_here_have_counterparts() -> None:
    assert set(TABLES) <= set(outputs())
    assert all(counterparts(name) for name in TABLES)


def test_full_splits_print_shares_of_their_items() -> None:
    """A score of a benchmark with few items is k/n; every one that is not is noted."""
    odd = []
    for number in numbers():
        items = int(split(number, number.benchmark).get("items") or 0)
        is_score = number.benchmark in names.BENCHMARKS
        if not items or not is_score or number.note.startswith(NOT_COMPARABLE):
            continue
        if number.benchmark != "wildbench" and items <= 10 ** (len(number.text) - 2):
            low, high = number.rounding_range
            nearest = round(number.value * items)
            if not any(low <= k / items <= high for k in (nearest - 1, nearest, nearest + 1)):
                odd.append((number.paper, number.table, number.benchmark, number.text))
    assert odd == []


@pytest.mark.parametrize(
    ("text", "note", "ends"),
    [
        ("0.341", "", (0.3405, 0.3415)),
        ("0.50", "truncated, the mean of the row is .5057", (0.50, 0.51)),
        ("0.820", "off the 1/277 grid by one unit: rounded twice", (0.819, 0.821)),
        ("29", "", (28.5, 29.5)),
    ],
)
def test_the_ends_of_a_printed_number(text: str, note: str, ends: tuple[float, float]) -> None:
    printed = PublishedNumber(
        "unified", "1", ("m", 0.25, "man", "uniform", "none", "c4"), "Avg", text, note
    ).rounding_range
    assert printed == pytest.approx(ends)


MEMORY_BEFORE, MEMORY_AFTER = "loading_memory_before_gb", "loading_memory_after_gb"
GIB = 2**30
WITHIN = 0.01
TOTALS = [
    number
    for number in (*published_numbers("unified", "3"), *published_numbers("evoesap", "3"))
    if number.benchmark in (MEMORY_BEFORE, MEMORY_AFTER)
]
"""Printed sizes of models in GiB."""


def parameters_size(model: str, share: float) -> float:
    """GiB of the parameters of a model in bfloat16 that has lost a share of its experts."""
    known = OmegaConf.load(ROOT / "conf" / "model" / f"{model}.yaml").expected
    expert = known.hidden * (3 * known.width + 1)  # three matrices, and a row of the router
    removed = known.moe_layers * int(known.experts * share) * expert
    return float((int(known.parameters) - removed) * plans.BYTES / GIB)


@pytest.mark.parametrize("number", TOTALS)
def test_printed_totals_hold_the_parameters(number: PublishedNumber) -> None:
    share = number.key[1] if number.benchmark == MEMORY_AFTER else 0.0
    low, high = number.rounding_range
    size = parameters_size(number.key[0], share)
    assert low - WITHIN <= size <= high + WITHIN or number.note.startswith(NOT_COMPARABLE)


# ---- fed with published scores, the report's own tables print the published averages and ranks

NEAR = 0.005
KEY = ["model", "ratio", "criterion", "allocation", "recovery", "calibration"]
DISPLAYED = {
    "livecodebench": "LiveCode",
    "wildbench": "WildBench",
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
}
"""Benchmarks that are a displayed column of their own."""


def comparison(printed: Iterable[PublishedNumber], *, columns: bool = False) -> Comparison:
    """One model's cells with their scores per benchmark, or (`columns`) per displayed column as
    printed."""
    rows: dict[tuple[object, ...], dict[str, float]] = {}
    for number in printed:
        row = rows.setdefault(number.key, {})
        if columns and number.benchmark in (*names.COLUMNS, *DISPLAYED):
            row[DISPLAYED.get(number.benchmark, number.benchmark)] = number.value
        elif not columns and number.benchmark in names.BENCHMARKS:
            row[number.benchmark] = share(number)
    cells = cells_of([cell(**dict(zip(KEY, key, strict=True))) for key in rows])
    frame = pd.DataFrame(list(rows.values()), index=cells.index)
    frame = frame[sorted(frame, key=[*names.BENCHMARKS, *names.COLUMNS].index)]
    parts = {name: (name,) for name in frame} if columns else displayed_columns(list(frame))
    return Comparison(
        str(cells["model"].iloc[0]), cells, frame, parts, {}, {}, frame * float("nan")
    )


def of_joint_cell(number: PublishedNumber) -> PublishedNumber:
    """The number as one of the cell that joins both domains."""
    *axes, calibration = number.key
    joint = "none" if calibration == "none" else "evol_codealpaca+tulu_math"
    return replace(number, key=(*axes, joint))


def models(printed: Iterable[PublishedNumber]) -> dict[str, list[PublishedNumber]]:
    """Model -> its numbers."""
    groups: dict[str, list[PublishedNumber]] = {}
    for number in printed:
        groups.setdefault(number.key[0], []).append(number)
    return groups


@pytest.mark.parametrize(
    "model", ["olmoe_1b_7b", "deepseek_v2_lite_chat", "ernie_21b_a3b", "qwen3_30b_a3b_instruct"]
)
def test_averages_and_ranks_of_unified_table_1_are_reproduced(
    model: str,
) -> None:
    printed = published_numbers("unified", "5")
    benchmarks = [
        number for number in printed if number.key[0] == model and number.key[1] in (0, 0.25)
    ]
    result = comparison(benchmarks)
    table = table_of(rank_table, results_of(study_of(result), [result]), names.RANKED)
    rows = table.frame.set_index("Criterion")
    checked = 0
    for number in models(published_numbers("unified", "1"))[model]:
        if number.benchmark in ("Avg", "Avg Rank"):
            ours = rows.loc[names.criterion(number.key[2]), number.benchmark]
            assert ours == pytest.approx(number.value, abs=NEAR), number
            checked += 1
    assert checked == 15


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_ranks_of_unified_table_2_are_reproduced(ratio: float) -> None:
    printed = models(
        number for number in published_numbers("unified", "2") if number.key[1] in (0, ratio)
    )
    printed = {
        model: rows for model, rows in printed.items() if any(number.key[1] for number in rows)
    }
    assert len(printed) == (4 if ratio == 0.25 else 2)
    for rows in printed.values():
        scores = [number for number in rows if number.benchmark != "Avg Rank"]
        result = comparison(map(of_joint_cell, scores), columns=True)
        table = task_specific_table(results_of(study_of(result), [result]), names.TASK_SPECIFIC)
        ours = table.frame.set_index("Criterion")["Avg Rank"]
        ranked = [number for number in rows if number.benchmark == "Avg Rank"]
        assert len(ranked) == 9 == ours.notna().sum()
        for number in ranked:
            assert ours[names.criterion(number.key[2])] == pytest.approx(
                number.value, abs=NEAR + 1e-9
            ), number


LISTS = {
    **dict.fromkeys([("heapr", "1"), ("heapr", "2"), ("heapr", "readme")], names.HEAPR),
    **dict.fromkeys(
        [("coverage", f"reply {table}") for table in ("3", "5", "quantised")], names.GENERAL
    ),
    ("coverage", "reply 10"): names.COMMON_SENSE,
    ("coverage", "reply 14"): (*names.GENERAL, "gsm8k"),
    **dict.fromkeys(
        [("coverage", f"reply {table}") for table in ("7", "8", "9", "11", "16")], names.ABLATION
    ),
    ("coverage", "9"): names.ABLATION,
}
"""Table -> what its average is the mean of, for the papers whose tables list benchmarks one by
one."""
PARTS = {
    "Eval+": names.COLUMNS["Eval+"],
    "MC Avg": names.MULTIPLE_CHOICE,
    "Code": ("Eval+", "livecodebench"),
    "Math": ("gsm8k", "math500"),
    AVERAGE: ("Eval+", "livecodebench", "wildbench", "gsm8k", "math500", "MC Avg"),
}
"""Average -> what it is the mean of in the tables of the other three."""


@cache
def printed_scores() -> dict[tuple[str, Key], list[PublishedNumber]]:
    """Paper and row -> its numbers, of all tables."""
    groups: dict[tuple[str, Key], list[PublishedNumber]] = {}
    for number in numbers():
        groups.setdefault((number.paper, number.key), []).append(number)
    return groups


def parts_of(average: PublishedNumber) -> list[PublishedNumber]:
    """The printed numbers that the average is the mean of, those of its own table first; empty
    where one lacks."""
    part_names = LISTS.get((average.paper, average.table), PARTS[average.benchmark])
    row = sorted(
        printed_scores()[average.paper, average.key], key=lambda other: other.table != average.table
    )
    values = {
        name: next((other for other in row if other.benchmark == name), None) for name in part_names
    }
    return [number for number in values.values() if number] if None not in values.values() else []


def mean(values: Iterable[float]) -> Decimal:
    """Of the decimals that are printed, so that a mean which ends in 5 is rounded as by hand."""
    return statistics.mean(Decimal(str(value)) for value in values)


def listed() -> set[tuple[str, ...]]:
    """The rows of the table of averages in the documentation, without their remarks."""
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| paper | table | row | average | printed | mean of its scores | |")
    table = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    rows = [tuple(cell.strip() for cell in line.split("|")[1:7]) for line in table]
    assert len(set(rows)) == len(rows)
    return set(rows)


def test_printed_averages_are_means_or_listed_exceptions() -> None:
    checked = 0
    without = 0
    differing = set()
    for number in numbers():
        if number.benchmark not in PARTS:
            continue
        parts = parts_of(number)
        if not parts:
            without += 1
            continue
        # by rounding of the scores
        low, high = (mean(part.rounding_range[end] for part in parts) for end in (0, 1))
        within = low <= number.rounding_range[1] + 1e-9 and high >= number.rounding_range[0] - 1e-9
        if number.note.startswith(TRUNCATED) or not within:
            row = ", ".join(str(word) for word in number.key[:5])
            recomputed = mean(part.value for part in parts).quantize(
                Decimal("0.0001"), ROUND_HALF_UP
            )
            differing.add(
                (number.paper, number.table, row, number.benchmark, number.text, str(recomputed))
            )
        else:
            checked += 1
    assert differing == listed()
    assert (checked, without) == (676, 115), "of these, some scores are not printed"


@pytest.mark.parametrize("table", LISTS, ids=".".join)
def test_mean_of_a_table_is_over_the_benchmarks_of_its_paper(table: tuple[str, str]) -> None:
    for printed in models(published_numbers(*table)).values():
        if table == ("coverage", "9"):
            continue  # it prints averages alone, those of the reply
        result = comparison(printed)
        targets = column_targets(result, list(result.cells.index), (*LISTS[table], MEAN))
        assert list(targets) == [*(names.benchmark(name) for name in LISTS[table]), MEAN]
        ours = scores(result, result.cells, targets).frame
        by_key = {number.key: number for number in printed if number.benchmark == AVERAGE}
        for (_, key), value in zip(result.cells[KEY].iterrows(), ours[MEAN], strict=True):
            average = by_key.get(tuple(key))
            if average is not None:
                parts = [part.value for part in parts_of(average)]
                assert value == pytest.approx(statistics.fmean(parts), abs=0.0005), average


SUITES = {
    "heapr7": names.HEAPR,
    "mc8": names.MULTIPLE_CHOICE,
    "coverage": {*names.GENERAL, *names.REASONING, *names.ABLATION},
}


@pytest.mark.parametrize("suite", SUITES)
def test_suite_has_the_benchmarks_that_its_paper_averages(suite: str) -> None:
    benchmarks = OmegaConf.load(conf() / "suite" / f"{suite}.yaml").benchmarks
    names = [name.removesuffix("_8shot").removesuffix("_v6") for name in benchmarks]
    assert sorted(names) == sorted(SUITES[suite])
