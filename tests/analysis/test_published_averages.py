"""Fed with published scores, the report's own tables print the published averages and ranks."""

from __future__ import annotations

import math

import pytest
from printed_comparisons import comparison, models, of_tables, study

from analysis import names, score_tables
from analysis.chosen import group_targets, scores
from analysis.comparison import Comparison
from analysis.published_numbers import target

WITHIN = 0.005
NOT_PRINTED = {
    ("deepseek_v2_lite_chat", 0.25, "frequency", "evolutionary", "none", "evol_codealpaca"): "Table 10 lacks the row",
}
"""Rows of EvoESAP whose MC Avg cannot be recomputed, and why."""


def averages(found: Comparison) -> dict[tuple[object, ...], dict[str, float]]:
    """Row -> the averages that tables of allocations print."""
    cells = list(found.cells.index)
    frame = scores(found, cells, group_targets(found, cells)).frame
    words = ["model", "ratio", "criterion", "allocation", "recovery", "calibration"]
    keys = [tuple(row) for row in found.cells[words].itertuples(index=False)]
    return dict(zip(keys, frame.to_dict("records"), strict=True))


@pytest.mark.parametrize("model", ["olmoe_1b_7b", "deepseek_v2_lite_chat", "ernie_21b_a3b", "qwen3_30b_a3b_instruct"])
def test_averages_and_ranks_of_unified_table_1_follow_from_the_sixteen_benchmarks(model: str) -> None:
    benchmarks = [number for number in of_tables("000", "5") if number.key[0] == model and number.key[1] in (0, 0.25)]
    found = comparison(benchmarks)
    table = score_tables.rank_table(study(found), [found], name="t", criteria=names.RANKED)
    rows = table.frame.set_index("Criterion")
    checked = 0
    for number in models(of_tables("000", "1"))[model]:
        if number.benchmark in ("Avg", "Avg Rank"):
            ours = rows.loc[names.criterion(number.key[2]), number.benchmark]
            assert ours == pytest.approx(number.value, abs=WITHIN), number
            checked += 1
    assert checked == 15


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_ranks_of_unified_table_2_are_over_the_columns_of_two_models(ratio: float) -> None:
    printed = models(number for number in of_tables("000", "2") if number.key[1] in (0, ratio))
    printed = {model: rows for model, rows in printed.items() if any(number.key[1] for number in rows)}
    assert len(printed) == (4 if ratio == 0.25 else 2)
    for rows in printed.values():
        found = comparison([number for number in rows if number.benchmark != "Avg Rank"], columns=True)
        table = score_tables.task_specific_table(study(found), [found], criteria=names.TASK_SPECIFIC)
        ours = table.frame.set_index("Criterion")["Avg Rank"]
        ranked = [number for number in rows if number.benchmark == "Avg Rank"]
        assert len(ranked) == 9 == ours.notna().sum()
        for number in ranked:
            assert ours[names.criterion(number.key[2])] == pytest.approx(number.value, abs=WITHIN + 1e-9), number


def test_averages_of_evoesap_follow_from_the_sixteen_benchmarks() -> None:
    benchmarks = models(of_tables("001", "8", "9", "10"))
    checked, lacking = 0, set()
    for model, printed in models(of_tables("001", "1", "2", "8", "9", "10")).items():
        ours = averages(comparison(benchmarks[model]))
        for number in printed:
            if number.benchmark in ("Code", "Math", "MC Avg"):
                value = ours[number.key][number.benchmark]
                if math.isnan(value):
                    lacking.add(number.key)
                    continue
                assert value == pytest.approx(number.value, abs=WITHIN), number
                checked += 1
    assert lacking == set(NOT_PRINTED)
    missing = 1 + 1  # the row that lacks, and MC Avg of ERNIE unpruned, which Table 1 does not print
    assert checked == 3 * 52 - missing + 52 + 52 + 51  # Tables 1 and 2, 8 (Code), 9 (Math), 10 (MC Avg)


@pytest.mark.parametrize(("table", "rows"), [("5", 14), ("7", 9)])
def test_averages_of_evoesap_follow_from_displayed_columns_where_no_more_is_printed(table: str, rows: int) -> None:
    printed = of_tables("001", table)
    ours = averages(comparison(printed, columns=True))
    assert len(ours) == rows
    for number in printed:
        if number.benchmark in ("Code", "Math"):
            assert ours[number.key][number.benchmark] == pytest.approx(number.value, abs=WITHIN), number


def test_what_a_printed_average_is_taken_over() -> None:
    row = [number for number in of_tables("000", "1") if number.key[2] == "man" and number.key[0] == "olmoe_1b_7b"]
    average = next(number for number in row if number.benchmark == "Avg")
    assert target(average, row) == ("Eval+", "livecodebench", "wildbench", "gsm8k", "math500", "MC Avg")
    code = next(number for number in of_tables("001", "1") if number.benchmark == "Code")
    assert target(code, [code]) == ("Eval+", "LiveCode")
