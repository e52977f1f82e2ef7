"""Searched against uniform allocations, and densities of layers
(EvoESAP, Tables 1, 2 and 7 to 10 and Figs. 1 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.load.settings import ALL_BUT_ALLOCATION, is_searched
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import SEARCHES, score_setup
from moe_lab.analysis.outputs.score_rows import (
    concatenate_numbers,
    criterion_colours,
    listed_cells,
    numbers_table,
    sort_cells,
)
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Table, display_frame
from moe_lab.analysis.stats import uncertainty
from moe_lab.analysis.stats.cell_scores import (
    CODE_BENCHMARKS,
    GROUPS,
    WRITING_AND_MATH,
    Numbers,
    column_targets,
    differences,
    mean_definitions,
    scores,
)
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.uncertainty import LEVEL

TEXT_COLUMNS = ["Model", "Pruned", "Calibration", "Criterion", "Allocation"]
GAIN = "Δ {}"
"""Name of a column with differences, from the name of the column of scores."""
SIGNIFICANCE = "Significant"


def searched_pairs(comparison: Comparison) -> dict[int, int]:
    """Cell with a searched allocation -> the cell with uniform allocation and the same values in
    ALL_BUT_ALLOCATION. A searched cell is left out if no uniform cell has these values, or if
    several have."""
    cells = comparison.pruned_cells
    if not cells["allocation"].map(is_searched).any():
        return {}
    pairs: dict[int, int] = {}
    for _, group in groups(sort_cells(cells, "ratio", "criterion"), ALL_BUT_ALLOCATION):
        uniform_cells = group.index[group["allocation"] == "uniform"]
        searched_cells = group.index[group["allocation"].map(is_searched)]
        if len(uniform_cells) == 1:
            pairs |= {int(cell): int(uniform_cells[0]) for cell in searched_cells}
    return pairs


def general_pairs(comparison: Comparison) -> dict[int, int]:
    """The pairs of `searched_pairs` whose cells were calibrated on general text."""
    # both cells of a pair have the same calibration set
    domains = comparison.cells["calibration"].map(names.domain)
    return {
        cell: uniform
        for cell, uniform in searched_pairs(comparison).items()
        if domains[cell] == "general"
    }


_CODE_AND_MATH = "Code and Math are means of their two columns."
_MEANING_OF_SIGNIFICANT = (
    f"{SIGNIFICANCE}: the columns whose paired difference has a p-value below {LEVEL} after Holm's "
    "correction over all differences of a model, where both methods have several seeds."
)
_NO_TESTS = "Methods with one seed are not tested."


def allocation_table(
    results: Results,
    columns: Sequence[str] = GROUPS,
    title_end: str = "group averages",
    pairs: Callable[[Comparison], dict[int, int]] = searched_pairs,
) -> Table | None:
    """Group averages of searched and uniform allocations.

    Each cell of a pair has a row with its scores. The row of a searched cell also has its paired
    differences (searched minus uniform) and the names of the columns with a significant difference.

    title_end: last words of the title; pairs: function that returns the pairs of a model (searched
    cell -> uniform cell).
    """
    rows = concatenate_numbers(
        _rows(comparison, pairs(comparison), columns) for comparison in results.comparisons
    )
    if rows is None:
        return None
    number_columns = list(map(str, rows.low))
    gain_columns = [column for column in number_columns if column.startswith(GAIN.format(""))]
    score_columns = [column for column in number_columns if column not in gain_columns]
    has_tests = (rows.frame[SIGNIFICANCE] != "").any()
    last_column = [SIGNIFICANCE] if has_tests else []
    return numbers_table(
        rows,
        [*TEXT_COLUMNS, *score_columns, *gain_columns, *last_column],
        dict.fromkeys(gain_columns, "{:+.3f}"),
        title=f"Searched allocation against uniform: {title_end}",
        caption=f"{mean_definitions(results.comparisons)} {_CODE_AND_MATH} Δ: searched minus "
        f"uniform on the same items. {_MEANING_OF_SIGNIFICANT if has_tests else _NO_TESTS} "
        f"{score_setup(results.study)}",
        optional=gain_columns,
    )


def _rows(comparison: Comparison, pairs: dict[int, int], columns: Sequence[str]) -> Numbers | None:
    """Rows of `allocation_table` for one model: each uniform cell, followed by its searched cells.

    pairs: searched cell -> uniform cell."""
    cells_of_pairs = [cell for searched, uniform in pairs.items() for cell in (uniform, searched)]
    cells = list(dict.fromkeys(cells_of_pairs))
    targets = column_targets(comparison, cells, columns) if cells else {}
    if not targets:
        return None
    rows_of_cells = listed_cells(comparison).loc[cells]
    numbers = scores(comparison, cells, targets)
    gains = {column: differences(comparison, target, pairs) for column, target in targets.items()}
    # differences are NaN in the rows of uniform cells
    for column, gain in gains.items():
        numbers.frame[GAIN.format(column)] = gain["difference"]
        numbers.low[GAIN.format(column)] = gain["low"]
        numbers.high[GAIN.format(column)] = gain["high"]
    # "" for uniform cells and for pairs that were not tested
    significance = dict.fromkeys(cells, "") | _significant_columns(comparison, pairs, gains)
    text = display_frame(rows_of_cells, {column: column.lower() for column in TEXT_COLUMNS})
    recoveries = rows_of_cells["recovery"].map(names.recovery_name)
    text["Allocation"] = list(map(names.comma_joined, text["Allocation"], recoveries))
    frame = pd.concat([text, numbers.frame], axis=1)
    frame[SIGNIFICANCE] = pd.Series(significance)
    return Numbers(frame, numbers.low, numbers.high, numbers.best)


def _significant_columns(
    comparison: Comparison, pairs: Mapping[int, int], gains: Mapping[str, pd.DataFrame]
) -> dict[int, str]:
    """Searched cell -> text that lists the columns with a significant difference, or `none`. A pair
    is left out if one of the two cells has only one seed.

    pairs: searched cell -> uniform cell; gains: column -> `differences` of this column."""
    cells = [
        cell
        for cell, uniform in pairs.items()
        if comparison.all_have_several_seeds((cell, uniform))
    ]
    p_values = pd.DataFrame({column: gain["p"][cells] for column, gain in gains.items()})
    p_holm = uncertainty.holm(p_values.to_numpy(float).ravel()).reshape(p_values.shape)
    texts = {}
    for cell, cell_p_values in zip(cells, p_holm, strict=True):
        columns = [column for column, p in zip(gains, cell_p_values, strict=True) if p < LEVEL]
        texts[cell] = names.enumeration(columns) or "none"
    return texts


def _register(name: str, *arguments: Any, **fields: Any) -> None:
    """Register an `allocation_table` with these `arguments` as an output. fields: of `Output`."""

    def make(results: Results) -> Table | None:
        return allocation_table(results, *arguments)

    make.__doc__ = f"Searched and uniform allocations: {arguments[1]}."
    output(name, **fields)(make)


_register(
    "evoesap.table1",
    GROUPS,
    "group averages",
    chapter="search",
    needs=SEARCHES,
    aliases=("evoesap.table2",),
)
_register(
    "evoesap.table7",
    GROUPS,
    "calibrated on general text",
    general_pairs,
    needs=f"{SEARCHES}, calibrated on general text (evoesap_table7 of sweeps)",
)
_register("evoesap.table8", CODE_BENCHMARKS, "coding", needs=f"{SEARCHES}, and coding benchmarks")
_register(
    "evoesap.table9",
    WRITING_AND_MATH,
    "writing and mathematics",
    needs=f"{SEARCHES}, and WildBench, gsm8k or math500",
)
_register(
    "evoesap.table10",
    (*names.MULTIPLE_CHOICE, "MC Avg"),
    "multiple choice",
    needs=f"{SEARCHES}, and multiple-choice benchmarks",
)


def densities(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Retained share of the experts in each layer, a row per layer and cell that prunes experts.

    Columns: "line" (the cell), "layer", "y" (the share, 0..1), "criterion", "allocation", and
    "panel" (ratio and calibration set)."""
    cells = comparison.cells[comparison.cells["granularity"] == "expert"]
    panels = cells["removed_text"] + " pruned, " + cells["calibration"].map(names.calibration)
    columns = cells[["criterion", "allocation", "ratio"]].assign(
        panel=panels,
        Pruned=cells["removed_text"],
        Calibration=cells["calibration"].map(names.calibration),
        Allocation=cells["allocation"].map(names.allocation_name),
    )
    # a row per expert, with share 0 or 1 here
    shares = study.retained.groupby(["cell", "layer"])["share"].mean().rename("y").reset_index()
    rows = shares.join(columns, on="cell", how="inner").sort_values("ratio", kind="stable")
    return rows.rename(columns={"cell": "line"})


EXPERTS_KEPT = charts.number("y", "experts kept", **charts.PERCENT)


@output("evoesap.fig1", chapter="search", needs=SEARCHES)
@per_model
def allocations_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Share of experts retained in each layer, by allocation.

    EvoESAP Fig. 1: a panel per ratio and calibration set, with a line per cell. Panels with a
    single allocation are left out. Only the criterion with the most allocations is drawn.
    """
    shares = densities(results.study, comparison)
    by_panel = shares.groupby(["criterion", "panel"])
    shares = shares[by_panel["allocation"].transform("nunique") > 1]
    if not shares["allocation"].map(is_searched).any():
        return None
    counts = shares.groupby("criterion")["allocation"].nunique()
    candidates = names.in_order(counts.index[counts == counts.max()], names.CRITERIA)
    criterion = "reap" if "reap" in candidates else candidates[0]
    shares = shares[shares["criterion"] == criterion]
    caption = (
        f"Share of the experts each layer keeps when {names.criterion(criterion)} chooses which. "
        "All schedules of a panel remove the same number of experts."
    )
    labels = shares["allocation"].map(names.allocation_name)
    title = "Density schedules"
    return charts.layer_figure(title, caption, shares.assign(label=labels), EXPERTS_KEPT)


@output("evoesap.fig3", chapter="search", needs=SEARCHES)
@per_model
def criteria_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Share of experts retained in each layer by searched allocations, by criterion.

    EvoESAP Fig. 3: a panel per ratio and calibration set, a line per cell.
    """
    shares = densities(results.study, comparison)
    shares = shares[shares["allocation"].map(is_searched).astype(bool)]
    if shares.empty:
        return None
    shares = shares.assign(
        label=shares["criterion"].map(names.criterion), method=shares["criterion"]
    )
    caption = (
        "Share of the experts each layer keeps under the searched allocation of each criterion. "
        "All schedules of a panel remove the same number of experts."
    )
    title = "Searched densities"
    shown = criterion_colours(shares)
    return charts.layer_figure(title, caption, shares, EXPERTS_KEPT, shown)
