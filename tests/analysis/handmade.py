"""Comparisons and studies of a few cells, made by hand so that every number can be checked by
eye."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from synthetic_plans import granularity

from moe_lab.analysis import names
from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.published.numbers import PublishedNumber, numbers, split
from moe_lab.analysis.registry import Results
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.report import Publisher, write_report
from moe_lab.analysis.stats.comparison import Comparison, displayed_columns
from moe_lab.result_files import OWN

UNPRUNED = {
    "criterion": "none",
    "granularity": "none",
    "allocation": "none",
    "calibration": "none",
    "ratio": 0.0,
}
SCORES = {"metric": "acc", "scale": "score", "unit": ""}
"""Fields of a result whose score is a share of right answers."""
COSTS = ("routed_kept", "flops_ratio", "storage_bytes")


def report_of(store: Path, out: Path) -> Path:
    """Write the report of a synthetic store into `out`; returns the path of its page."""
    return write_report(Publisher(Results(load(store, "made_up")), out))


def cell(
    criterion: str, allocation: str = "uniform", ratio: float = 0.5, **other_axes: Any
) -> dict[str, Any]:
    """The axes of a pruned cell."""
    axes = {"criterion": criterion, "allocation": allocation, "ratio": ratio}
    return {**axes, "granularity": granularity(criterion), **other_axes}


def first_solved(count: int, items: int = 40) -> list[int]:
    """Outcomes of a plan that solves the first `count` items."""
    return [1] * count + [0] * (items - count)


def cells_of(axes: list[dict[str, Any]]) -> pd.DataFrame:
    """A frame of cells, a row for each of `axes`. Axes that are left out have default values."""
    defaults = {"model": "m", "calibration": "pocket_code", "recovery": "none"}
    defaults |= {"gate": "model", "seed": 42, "source": OWN}
    frame = pd.DataFrame([{**defaults, **row} for row in axes]).rename_axis("cell")
    is_pruned = frame["criterion"] != "none"
    is_unusual = (frame["allocation"] != "uniform") | (frame["granularity"] == "channel")
    has_several = frame.loc[is_pruned, "allocation"].nunique() > 1
    is_replacing = frame["allocation"].str.contains("replacement=")
    names_allocation = (has_several & is_pruned & is_unusual) | is_replacing
    frame = frame.assign(removed=frame["ratio"], removed_text=frame["ratio"].map(names.ratio))
    keys = zip(frame["criterion"], frame["allocation"].where(names_allocation, ""), strict=True)
    return frame.assign(
        method=[names.method_key(criterion, allocation) for criterion, allocation in keys]
    )


def comparison_of(axes: list[dict[str, Any]], outcomes: dict[str, list[Any]]) -> Comparison:
    """A comparison from cells and benchmark -> outcomes (a list of items per cell; None: not
    evaluated)."""
    cells = cells_of(axes)
    item_counts = {
        name: len(next(row for row in rows if row is not None)) for name, rows in outcomes.items()
    }
    matrices = {
        name: np.array(
            [[np.nan] * item_counts[name] if row is None else row for row in rows], float
        )
        for name, rows in outcomes.items()
    }
    benchmarks = pd.DataFrame(
        {name: matrix.mean(axis=1) for name, matrix in matrices.items()}, index=cells.index
    )
    return Comparison(
        "m",
        cells,
        benchmarks,
        displayed_columns(list(outcomes)),
        {},
        matrices,
        benchmarks * 0,
    )


class HandmadeStudy(SimpleNamespace):
    """The parts of a study that outputs read. Studies are compared by identity, because captions
    are cached by study."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    pruned_cells = Study.pruned_cells


def study_of(comparison: Comparison, costs: list[dict[str, float]] | None = None) -> Any:
    """A study with the parts that tables read; `costs` has one row per cell."""
    outcomes = comparison.outcomes
    benchmarks = comparison.results.columns
    items = [outcomes[name].shape[1] if name in outcomes else 1 for name in benchmarks]
    results = pd.DataFrame({"n": items, "benchmark": benchmarks, **SCORES})
    return HandmadeStudy(
        cells=comparison.all_cells,
        results=results.assign(cell=comparison.cells.index[0]),
        calibrations={},
        origins=pd.DataFrame(columns=["folder", "protocol"]),
        costs=pd.DataFrame(costs, columns=COSTS).rename_axis("cell"),
        searches=pd.DataFrame({"samples": [1]}, [0]),
        family=pd.DataFrame(),
        gaps=[],
    )


def table_of(make: Callable[..., Table | None], results: Results, *arguments: Any) -> Table:
    """The table that `make` returns, which must not be None."""
    table = make(results, *arguments)
    assert table is not None
    return table


def results_of(study: Any, comparisons: list[Comparison] | None = None) -> Results:
    """Results of a study with these comparisons, which cannot be computed from a handmade study."""
    results = Results(study)
    if comparisons is not None:
        results.comparisons = results.pruned = comparisons
    return results


def published_numbers(paper: str, *tables: str) -> list[PublishedNumber]:
    """The published numbers of these tables of a paper."""
    return [number for number in numbers() if number.paper == paper and number.table in tables]


def share(number: PublishedNumber) -> float:
    """The share of right answers behind a printed benchmark: the only one with that many items, if
    there is one.

    Means of numbers that were rounded to three decimals are off by up to 0.0005, which is enough to
    tie two methods or part them; 0.354 of 164 items can only be 58/164.
    """
    items = int(split(number, number.benchmark).get("items") or 0)
    low, high = number.rounding_range
    shares = (
        []
        if items == 0 or items > 500
        else [k / items for k in range(items + 1) if low <= k / items <= high]
    )
    return shares[0] if len(shares) == 1 else number.value
