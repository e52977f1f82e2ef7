"""Measured numbers find exactly their printed counterparts, and a verdict never takes one thing for
another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import handmade
import numpy as np
import pandas as pd
import pytest

from moe_lab import criteria
from moe_lab.analysis.__main__ import main
from moe_lab.analysis.outputs.published import (
    Facts,
    published_key,
    published_table,
    validation_table,
)
from moe_lab.analysis.published.numbers import (
    GATE_CRITERIA,
    PublishedNumber,
    counterparts,
    numbers,
    split,
)
from moe_lab.analysis.report import published_tables
from moe_lab.analysis.stats.comparison import Comparison

MODEL = "olmoe_1b_7b"
RUN = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "livecodebench", "openbookqa")
METRICS = {
    "humaneval": "base",
    "humaneval_plus": "plus",
    "mbpp": "base",
    "mbpp_plus": "plus",
    "openbookqa": "acc_norm",
}
NOVICES = "uniform, replacement=mean_output"
HARNESSES = {"livecodebench": "evalscope", "openbookqa": "lm_eval"}


def printed(criterion: str, table: str = "5") -> dict[str, PublishedNumber]:
    """Benchmark -> what Unified prints of OLMoE at 25 % (or unpruned)."""
    rows = [
        number
        for number in handmade.published_numbers("unified", table)
        if number.key[0] == MODEL and number.key[2] == criterion
    ]
    return {number.benchmark: number for number in rows}


def outcomes(number: PublishedNumber, *, off: int = 0) -> list[float]:
    """As many items as the split has, as many of them right as printed, or `off` more."""
    items = int(split(number, number.benchmark)["items"])
    right = round(handmade.share(number) * items) + off
    return [1.0] * right + [0.0] * (items - right)


CALIBRATED = {"calibration": "c4", "gate": "renormalized"}


def study_of(
    criteria: tuple[str, ...] = ("man", "reap"), *, off: int = 0, **changes: Any
) -> tuple[Any, Comparison]:
    """A study that measured what Unified's Table 5 prints, with some axes of its cells changed."""
    axes = [handmade.UNPRUNED | {"model": MODEL}]
    axes += [
        handmade.cell(name, ratio=0.25, **CALIBRATED | {"model": MODEL, **changes})
        for name in criteria
    ]
    rows = {
        name: [outcomes(printed(axis["criterion"])[name], off=off) for axis in axes] for name in RUN
    }
    model = axes[-1]["model"]
    comparison = replace(handmade.comparison_of(axes, rows), model=model)
    study = handmade.study_of(comparison)
    notes = [
        (cell, name, METRICS.get(name, "acc"), len(rows[name][0]))
        for cell in range(len(axes))
        for name in RUN
    ]
    results = pd.DataFrame(notes, columns=["cell", "benchmark", "metric", "n"])
    study.results = results.assign(
        folder=results["benchmark"], expected=results["n"], scale="score", unit=""
    )
    study.calibrations = {(model, "c4"): {"rows": 128, "length": 4096}}
    study.searches = pd.DataFrame()
    settings = {"shots": 0, "max_new_tokens": 2048}
    protocols = {
        name: {"harness": HARNESSES.get(name, "evalplus"), "chat": name != "openbookqa", **settings}
        for name in RUN
    }
    study.protocols = protocols
    study.origins = pd.DataFrame({"folder": protocols.keys(), "protocol": protocols.values()})
    return study, comparison


def verdicts(study: Any, comparison: Comparison, of: str = "unified.table5") -> pd.DataFrame:
    return published_table(Facts(study), [comparison], of).frame


def test_equal_scores_agree_in_every_cell() -> None:
    study, comparison = study_of()
    table = verdicts(study, comparison)
    assert len(table) == 3 * len(RUN)
    assert set(table["Verdict"]) == {"agrees"}
    assert table["Deviation"].abs().max() < 0.0006
    for criterion, name in (("none", "Unpruned"), ("man", "MAN"), ("reap", "REAP")):
        rows = table[table["Criterion"] == name]
        expected = [
            printed(criterion)[benchmark].value
            for benchmark in printed(criterion)
            if benchmark in RUN
        ]
        assert rows["Published"].tolist() == expected
    assert set(verdicts(*study_of(off=40))["Verdict"]) == {"differs"}, (
        "it lies outside of the interval"
    )


def test_columns_are_compared_as_the_papers_average_them() -> None:
    study, comparison = study_of()
    table = verdicts(study, comparison, "unified.table1").set_index(["Criterion", "Benchmark"])
    assert table.loc[("MAN", "Eval+"), "Verdict"] == "agrees"
    assert table.loc[("MAN", "Eval+"), "Published"] == printed("man", "1")["Eval+"].value
    assert (
        "without ARC-C, ARC-E, BoolQ, HellaSwag, MMLU, RTE"
        in table.loc[("MAN", "MC Avg"), "Verdict"]
    )
    assert "measured without WildBench, GSM8K, MATH-500" in table.loc[("MAN", "Avg"), "Verdict"]


def test_the_page_has_the_tables_in_which_a_number_can_be_compared() -> None:
    study, comparison = study_of()
    tables = published_tables(handmade.results_of(study, [comparison]))
    assert "unified.table5.published" in {table.name for table in tables}
    study, comparison = study_of(("man",), model="pocket_olmoe")
    comparison.all_cells["model"] = "pocket_olmoe"
    assert not published_tables(handmade.results_of(study, [comparison]))


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 0.3},
        {"allocation": "global"},
        {"recovery": "nf4"},
        {"calibration": "c4_math"},
        {"model": "olmoe"},
    ],
)
def test_other_rows_have_no_published_number(changes: dict[str, Any]) -> None:
    axes = {"criterion": "man", **changes}
    study, comparison = study_of(("man",))
    comparison.all_cells.loc[1, list(axes)] = list(axes.values())
    table = verdicts(study, comparison)
    assert set(table["Criterion"]) == {"Unpruned"}


def protocol(benchmark: str, **fields: Any) -> Callable[[Any], None]:
    return lambda study: study.protocols[benchmark].update(fields)


OTHERWISE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "calibrated on 262,144 tokens, published on 524,288": (
        "OBQA", lambda study: study.calibrations[(MODEL, "c4")].update(rows=64),
    ),
    "other items: HumanEval (16 of 164, published on 164)": (
        "HumanEval", lambda study: study.results.update(study.results.assign(n=16)),
    ),
    "other items: HumanEval (60, published on 164)": (
        "HumanEval", lambda study: study.results.update(study.results.assign(n=60, expected=60)),
    ),
    "other metric: OBQA (acc, published acc_norm)": (
        "OBQA", lambda study: study.results.replace({"metric": {"acc_norm": "acc"}}, inplace=True),
    ),
    "other harness: HumanEval (opencompass, published evalplus)": (
        "HumanEval", protocol("humaneval", harness="opencompass"),
    ),
    "other use of the chat template: MBPP (false, published true)": (
        "MBPP",
        protocol("mbpp", chat=False),
    ),
    "other number of examples in the prompt: OBQA (5, published 0)": (
        "OBQA",
        protocol("openbookqa", shots=5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", OTHERWISE)
def test_other_protocols_are_not_comparable(reason: str) -> None:
    study, comparison = study_of(("man",))
    benchmark, change = OTHERWISE[reason]
    change(study)
    table = verdicts(study, comparison).set_index(["Criterion", "Benchmark"])
    assert table.loc[("MAN", benchmark), "Verdict"] == f"not comparable because {reason}"


def test_stated_gates_and_seeds_are_compared() -> None:
    """EvoESAP's code: 4,194,304 tokens, seed 42, softmax twice; criteria without gates do not
    care."""
    changes = {"calibration": "evol_codealpaca", "seed": 43, "gate": "model"}
    study, comparison = study_of(("reap", "ean"), **changes)
    study.calibrations[(MODEL, "evol_codealpaca")] = {"rows": 1024, "length": 4096}
    table = verdicts(study, comparison, "evoesap.table8").set_index(["Criterion", "Benchmark"])[
        "Verdict"
    ]
    seed = "seed 43, published with 42"
    assert table["EAN", "HumanEval"] == f"not comparable because {seed}"
    assert table["REAP", "HumanEval"] == (
        f"not comparable because gate model, published with double_softmax; {seed}"
    )


def test_gates_matter_to_the_criteria_that_read_them() -> None:
    reading = {name for name, criterion in criteria.CRITERIA.items() if criterion.uses_gate}
    assert reading - {"s_family"} == set(GATE_CRITERIA)


def test_searches_are_compared_by_their_set_and_generations() -> None:
    axes = {
        "calibration": "evol_codealpaca",
        "allocation": "evolutionary",
        "gate": "double_softmax",
    }
    study, comparison = study_of(("reap",), **axes)
    study.calibrations[(MODEL, "evol_codealpaca")] = {"rows": 1024, "length": 4096}
    study.searches = pd.DataFrame({"search_set": "evol_search", "generations": [30]}, index=[1])
    table = verdicts(study, comparison, "evoesap.table8")
    reasons = set(
        table.loc[(table["Criterion"] == "REAP") & (table["Benchmark"] == "HumanEval"), "Verdict"]
    )
    assert reasons == {
        "not comparable because search set evol_search, published with tulu_math_search; "
        "generations 30, published with 50"
    }


def test_stand_in_for_the_published_model_is_not_comparable() -> None:
    study, comparison = study_of(("man",), model="pocket_olmoe", calibration="pocket_general")
    comparison.all_cells["model"] = "pocket_olmoe"
    table = verdicts(study, comparison)
    assert len(table) == 2 * len(RUN)
    assert set(table["Verdict"]) == {
        "not comparable because pocket_olmoe stands in for olmoe_1b_7b"
    }


def test_misprints_missing_results_and_remarks_are_told() -> None:
    study, comparison = study_of(("man",))
    comparison.results.loc[1, "humaneval"] = np.nan
    table = verdicts(study, comparison).set_index(["Criterion", "Benchmark"])["Verdict"]
    assert table["MAN", "HumanEval"] == "missing"
    assert table["MAN", "MBPP"] == "agrees"
    study, comparison = study_of(("mone",))
    table = verdicts(study, comparison).set_index(["Criterion", "Benchmark"])["Verdict"]
    assert table["MoNE score", "MBPP"] == "agrees (probably with summed gates (mone_freq))"
    noted = {
        number.note
        for number in numbers()
        if number.note.startswith("not comparable: it is a misprint")
    }
    assert len(noted) >= 10


@pytest.mark.parametrize(
    ("off", "outside"), [(0, set()), (30, {"LiveCodeBench"}), (45, {"LiveCodeBench", "OBQA"})]
)
def test_validation_allows_two_joint_standard_errors_and_a_point(
    off: int, outside: set[str]
) -> None:
    """Of 500 items of OBQA with a score of .44, these are 36 items."""
    study, comparison = study_of(("man",), off=off)
    results: Any = SimpleNamespace(study=study, comparisons=[comparison])
    table = validation_table(results).frame
    of_man = table[table["Criterion"] == "MAN"].set_index("Benchmark")["Verdict"]
    verdicts = of_man[["OBQA", "LiveCodeBench"]]
    assert {name for name, verdict in verdicts.items() if verdict == "outside"} == outside
    assert set(verdicts) <= {"within", "outside"}


def test_mone_with_replacement_is_compared_with_the_complete_method() -> None:
    """MoE-Slimming quotes MoNE, which replaces experts by constants."""
    axes = handmade.cell("mone", NOVICES, calibration="c4", model="deepseek_moe_16b")
    axes["recovery"] = "none"
    rows = counterparts("coverage.table3")
    assert "boolq" in {number.benchmark for number in rows[published_key(axes)]}
    assert published_key({**axes, "allocation": "uniform"}) not in rows


def test_comparison_is_made_by_name(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("unified.table2.published", "heapr.table1.published")
    assert main([*names, f"store={small}", f"out={tmp_path}"]) == 1
    table = pd.read_csv(tmp_path / "tables" / "unified.table2.published.csv")
    columns = {"Measured", "Published", "Deviation", "Verdict", "Measured low", "Measured high"}
    assert columns <= set(table)
    assert table["Verdict"].str.startswith("not comparable because").all()
    assert table["Deviation"].isna().all()
    assert "heapr.table1.published needs cells whose numbers" in capsys.readouterr().err
