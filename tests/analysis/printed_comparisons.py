"""Comparisons whose scores are what a paper printed, so that the report's own tables can be fed with them."""

from __future__ import annotations

from collections.abc import Iterable

import handmade
import pandas as pd

from analysis import names
from analysis.published.numbers import Printed, numbers, split
from analysis.stats import ranks
from analysis.stats.comparison import Comparison

DISPLAYED = {"livecodebench": "LiveCode", "wildbench": "WildBench", "gsm8k": "GSM8K", "math500": "MATH-500"}
"""Benchmarks that are a displayed column of their own."""


def of_tables(paper: str, *tables: str) -> list[Printed]:
    return [number for number in numbers() if number.paper == paper and number.table in tables]


def share(number: Printed) -> float:
    """The share of right answers behind a printed benchmark: the only one with that many items, if there is one.

    Means of numbers that were rounded to three decimals are off by up to 0.0005, which is enough to tie two methods or
    part them; 0.354 of 164 items can only be 58/164.
    """
    items = split(number, number.benchmark).items
    low, high = number.ends
    fitting = [] if items is None or items > 500 else [k / items for k in range(items + 1) if low <= k / items <= high]
    return fitting[0] if len(fitting) == 1 else number.value


def comparison(printed: Iterable[Printed], *, columns: bool = False) -> Comparison:
    """One model's cells with their scores per benchmark, or (`columns`) per displayed column as printed."""
    rows: dict[tuple[object, ...], dict[str, float]] = {}
    for number in printed:
        row = rows.setdefault(number.key, {})
        if columns and number.benchmark in (*names.COLUMNS, *DISPLAYED):
            row[DISPLAYED.get(number.benchmark, number.benchmark)] = number.value
        elif not columns and number.benchmark in names.BENCHMARKS:
            row[number.benchmark] = share(number)
    words = ("model", "ratio", "criterion", "allocation", "recovery", "calibration")
    cells = handmade.cells_of([handmade.cell(**dict(zip(words, key, strict=True))) for key in rows])
    scores = pd.DataFrame(list(rows.values()), index=cells.index)
    order = [*names.BENCHMARKS, *names.COLUMNS]
    scores = scores[sorted(scores, key=order.index)]
    parts = {name: (name,) for name in scores} if columns else ranks.displayed(list(scores))
    return Comparison(str(cells["model"].iloc[0]), cells, scores, parts, (), {}, scores * float("nan"))


def models(printed: Iterable[Printed]) -> dict[str, list[Printed]]:
    """Model -> its numbers."""
    found: dict[str, list[Printed]] = {}
    for number in printed:
        found.setdefault(number.key[0], []).append(number)
    return found
