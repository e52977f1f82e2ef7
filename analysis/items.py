"""The papers' tables of scores as views of a study: what stands in the rows and in the columns of each. Data, no code.

What is made elsewhere has its name in the catalogue; here are the tables that differ from others in rows or columns
alone, and the names of those that differ in nothing but the models they were printed for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.names import ABLATION, COMMON_SENSE, GENERAL, MULTIPLE_CHOICE, REASONING
from analysis.stats.cell_scores import COMMON, GROUPS, MEAN

CODING = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "Eval+", "LiveCode", "Code")
WRITING_AND_MATH = ("WildBench", "GSM8K", "MATH-500", "Math")


@dataclass(frozen=True)
class View:
    """One table of scores."""

    rows: str
    """A word of `view_outputs.ROWS`."""
    columns: tuple[str, ...]
    """Benchmarks, displayed columns, group averages; the last one is what differences are of."""
    title: str


VIEWS: Mapping[str, View] = {
    "evoesap.table1": View("searched", GROUPS, "Where to prune: searched allocation against uniform"),
    "evoesap.table7": View("searched, general", GROUPS, "Searched on one text, calibrated on general text"),
    "evoesap.table8": View("searched", CODING, "Searched allocation against uniform: coding"),
    "evoesap.table9": View(
        "searched", WRITING_AND_MATH, "Searched allocation against uniform: writing and mathematics"
    ),
    "evoesap.table10": View(
        "searched", (*MULTIPLE_CHOICE, "MC Avg"), "Searched allocation against uniform: multiple choice"
    ),
    "aimer.table2": View("weights", GROUPS, "Scores from weights alone and from text: group averages"),
    "aimer.table5": View(
        "weights", WRITING_AND_MATH, "Scores from weights alone and from text: writing and mathematics"
    ),
    "aimer.table6": View("weights", CODING, "Scores from weights alone and from text: coding"),
    "aimer.table7": View(
        "weights", (*MULTIPLE_CHOICE, "MC Avg"), "Scores from weights alone and from text: multiple choice"
    ),
    "coverage.table3": View("recovered", (*GENERAL, MEAN), "Pruned and recovered: general benchmarks"),
    "coverage.table4": View("recovered", (*REASONING, MEAN), "Pruned and recovered: reasoning"),
    "coverage.table8": View(
        "blocks",
        (*COMMON_SENSE, COMMON, "gsm8k", "humaneval", MEAN),
        "Channel budgets in blocks: who gets what rounding leaves over",
    ),
    "coverage.table9": View("top-k", (*ABLATION, MEAN), "Fewer experts a token"),
    "coverage.table16": View(
        "smallest", (*ABLATION, MEAN), "Channel budgets in blocks: with how few channels an expert loses all"
    ),
}
"""Name of a table -> how it is made."""

ALSO: Mapping[str, str] = {
    "evoesap.table2": "evoesap.table1",
    "aimer.fig4": "aimer.fig3",
    "aimer.fig5": "aimer.fig3",
    "aimer.table3": "aimer.table2",
    "coverage.table5": "coverage.table3",
    "coverage.table10": "pareto",
    "coverage.table12": "coverage.table1",
    "coverage.table15": "coverage.table7",
    "coverage.table17": "coverage.table8",
    "coverage.table19": "coverage.table9",
    "coverage.fig9": "pareto",
    "coverage.fig15": "coverage.fig14",
    "coverage.fig16": "coverage.fig14",
}
"""Published table or figure -> the one that has its numbers too: all models of a study stand in one table."""
