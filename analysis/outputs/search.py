"""Searched against uniform allocations, densities of layers, and what searches cost
(EvoESAP, Tables 1 to 10 and Figs. 1 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.plans import BYTES
from moe_lab.analysis.load.reader import groups, time_and_memory
from moe_lab.analysis.load.settings import ALL_BUT_ALLOCATION, is_searched
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import GPU_PEAK, MEBIBYTE, SEARCHES, run_setup, score_setup
from moe_lab.analysis.outputs.score_rows import (
    add_differences,
    concatenate_numbers,
    criterion_colours,
    listed_cells,
    numbers_table,
    scored_rows,
    sort_cells,
)
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import (
    CELL_COLUMNS,
    Columns,
    Table,
    display_frame,
    frame_and_formats,
)
from moe_lab.analysis.stats import uncertainty
from moe_lab.analysis.stats.cell_scores import (
    CODE_BENCHMARKS,
    WRITING_AND_MATH,
    Numbers,
    column_targets,
    differences,
    mean_definitions,
)
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.uncertainty import LEVEL

TEXT_COLUMNS = {**CELL_COLUMNS, "Criterion": "criterion"}
"""Displayed column -> column of cells."""
GAIN = "Δ {}"
"""Name of a column with differences, from the name of the column of scores."""
SIGNIFICANCE = "Significant"
COLUMNS = (
    "Eval+",
    "LiveCode",
    "Code",
    "WildBench",
    "GSM8K",
    "MATH-500",
    "Math",
    "MC Avg",
)
"""The columns of EvoESAP's Tables 1, 2, 5 and 7."""
COMPARED_AVERAGES = ("Code", "WildBench", "MC Avg")
"""The averages of EvoESAP's Tables 4 and 6."""
FITNESSES = ("esap", "spec_dec")
"""The fitnesses that EvoESAP's Table 6 compares."""
SECONDS = "Search (s)"
_SETTINGS = {
    "Samples": ("samples", "{:,.0f}"),
    "Generations": ("generations", "{:,.0f}"),
    "Population": ("population", "{:,.0f}"),
}
"""Displayed column -> (column of `Study.searches`, format)."""


def searched_pairs(comparison: Comparison, domain: str | None = None) -> dict[int, int]:
    """Cell with a searched allocation -> the cell with uniform allocation and the same values in
    ALL_BUT_ALLOCATION. A searched cell is left out if no uniform cell has these values, or if
    several have.

    domain: the only domain of calibration sets, see `names.domain`; None for all."""
    cells = sort_cells(comparison.pruned_cells, "ratio", "criterion")
    if domain is not None:
        cells = cells[cells["calibration"].map(names.domain) == domain]
    pairs: dict[int, int] = {}
    for _, group in groups(cells, ALL_BUT_ALLOCATION):
        uniform_cells = group.index[group["allocation"] == "uniform"]
        if len(uniform_cells) == 1:
            searched_cells = group.index[group["allocation"].map(is_searched)]
            pairs |= {int(cell): int(uniform_cells[0]) for cell in searched_cells}
    return pairs


_CODE_AND_MATH = "Code and Math are means of their two columns."
_MEANING_OF_SIGNIFICANT = (
    f"{SIGNIFICANCE}: the columns whose paired difference has a p-value below {LEVEL} after Holm's "
    "correction over all differences of a model, where both methods have several seeds."
)
_NO_TESTS = "Methods with one seed are not tested."


def allocation_table(
    results: Results,
    columns: Sequence[str] = COLUMNS,
    title_end: str = "group averages",
    domain: str | None = None,
) -> Table | None:
    """Group averages of searched and uniform allocations.

    The first row of a model is that of the unpruned one, "Full" in the paper. Each cell of a pair
    has a row with its scores. The row of a searched cell also has its paired differences (searched
    minus uniform) and the names of the columns with a significant difference.

    title_end: last words of the title; domain: see `searched_pairs`.
    """
    rows = concatenate_numbers(
        _pair_rows(comparison, searched_pairs(comparison, domain), columns)
        for comparison in results.comparisons
    )
    if rows is None:
        return None
    gains = [column for column in map(str, rows.low) if column.startswith(GAIN.format(""))]
    has_tests = (rows.frame[SIGNIFICANCE] != "").any()
    if not has_tests:
        del rows.frame[SIGNIFICANCE]
    return numbers_table(
        rows,
        dict.fromkeys(gains, "{:+.3f}"),
        last=(*gains, SIGNIFICANCE),
        title=f"Searched allocation against uniform: {title_end}",
        caption=f"{mean_definitions(results.comparisons)} {_CODE_AND_MATH} Δ: searched minus "
        f"uniform on the same items. {_MEANING_OF_SIGNIFICANT if has_tests else _NO_TESTS} "
        f"{score_setup(results.study)}",
        optional=gains,
    )


def _pair_rows(
    comparison: Comparison, pairs: dict[int, int], columns: Sequence[str]
) -> Numbers | None:
    """Rows of `allocation_table` for one model: the unpruned model, then each uniform cell with its
    searched cells.

    pairs: searched cell -> uniform cell."""
    cells_of_pairs = [cell for searched, uniform in pairs.items() for cell in (uniform, searched)]
    if pairs and comparison.unpruned_cell is not None:
        cells_of_pairs.insert(0, comparison.unpruned_cell)
    cells = listed_cells(comparison).loc[list(dict.fromkeys(cells_of_pairs))]
    targets = column_targets(comparison, list(cells.index), columns) if len(cells) else {}
    if not targets:
        return None
    text = display_frame(cells, {**TEXT_COLUMNS, "Allocation": "allocation"})
    recoveries = cells["recovery"].map(names.recovery_name)
    text["Allocation"] = list(map(names.comma_joined, text["Allocation"], recoveries))
    numbers = scored_rows(comparison, text, targets)
    gains = {column: differences(comparison, target, pairs) for column, target in targets.items()}
    for column, gain in gains.items():
        add_differences(numbers, GAIN.format(column), gain)
    # "" for uniform cells and for pairs that were not tested
    significance = dict.fromkeys(cells.index, "") | _significant_columns(comparison, pairs, gains)
    numbers.frame[SIGNIFICANCE] = pd.Series(significance)
    return numbers


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
    return {
        cell: names.enumeration(p_values.columns[is_significant]) or "none"
        for cell, is_significant in zip(cells, p_holm < LEVEL, strict=True)
    }


Select = Callable[[pd.DataFrame], pd.DataFrame]
"""Function that chooses cells from those that differ only in their allocation. They have the
columns of `Study.searches`, NaN for cells with other allocations."""


def search_table(
    results: Results, columns: Sequence[str], title: str, select: Select
) -> Table | None:
    """The settings, the scores and the seconds of searches, a row per cell without recovery.

    columns: averages to list, if they were run."""
    if results.study.searches.empty:
        return None
    rows = concatenate_numbers(
        _search_rows(results.study, comparison, columns, select)
        for comparison in results.comparisons
    )
    if rows is None:
        return None
    formats = {column: form for column, (_, form) in _SETTINGS.items()} | {SECONDS: "{:,.1f}"}
    return numbers_table(
        rows,
        formats,
        title=title,
        caption=f"{mean_definitions(results.comparisons)} {_CODE_AND_MATH} Samples: rows of the "
        "search set; search: seconds of the process that finished it. "
        f"{score_setup(results.study)}",
        optional=tuple(formats),
    )


def _search_rows(
    study: Study, comparison: Comparison, columns: Sequence[str], select: Select
) -> Numbers | None:
    """Rows of `search_table` for one model."""
    cells = comparison.pruned_cells.join(study.searches)
    cells = cells[cells["recovery"] == "none"]
    # cells[:0] has no rows; concat fails without a frame
    rows = pd.concat(
        [cells[:0], *(select(group) for _, group in groups(cells, ALL_BUT_ALLOCATION))]
    )
    targets = column_targets(comparison, list(rows.index), columns) if len(rows) else {}
    if not targets:
        return None
    text = display_frame(rows, {**TEXT_COLUMNS, "Allocation": "allocation"})
    text["Fitness"] = rows["fitness"].map(_fitness_in_words)
    for column, (source, _) in _SETTINGS.items():
        text[column] = rows[source].astype(float)
    numbers = scored_rows(comparison, text, targets)
    numbers.frame[SECONDS] = rows["seconds"].astype(float)
    return numbers


def _fitness_in_words(fitness: object) -> str:
    """A fitness in the paper's spelling, such as SPEC-DEC; "" for NaN."""
    return fitness.upper().replace("_", "-") if isinstance(fitness, str) else ""


def _searched(cells: pd.DataFrame) -> pd.DataFrame:
    """The searched cells."""
    return cells[cells["allocation"].map(is_searched).astype(bool)]


def _searched_and_uniform(cells: pd.DataFrame) -> pd.DataFrame:
    """The searched and the uniform cells; none without two searched cells."""
    searched = _searched(cells).index
    is_listed = cells.index.isin(searched) | (cells["allocation"] == "uniform")
    return cells[is_listed & (len(searched) > 1)]


def _by_fitness(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells searched by one of FITNESSES; none unless both occur."""
    return cells[cells["fitness"].isin(FITNESSES) & (set(FITNESSES) <= set(cells["fitness"]))]


def _register(
    name: str, make_table: Callable[..., Table | None], *arguments: Any, **fields: Any
) -> None:
    """Register a table of this function with these arguments after `results` as an output. The
    second of them describes the output in the help.

    fields: of `Output`."""

    def make(results: Results) -> Table | None:
        return make_table(results, *arguments)

    number = name.removeprefix("evoesap.table")
    make.__doc__ = f"EvoESAP's Table {number}: {names.capitalised(arguments[1])}."
    output(name, **fields)(make)


_register(
    "evoesap.table1",
    allocation_table,
    COLUMNS,
    "group averages",
    chapter="search",
    needs=SEARCHES,
    aliases=("evoesap.table2",),
)
_register(
    "evoesap.table4",
    search_table,
    COMPARED_AVERAGES,
    "Searched allocations",
    _searched,
    chapter="search",
    needs=f"{SEARCHES}, and coding benchmarks, WildBench or multiple choice",
)
_register(
    "evoesap.table5",
    search_table,
    COLUMNS,
    "What the settings of a search change",
    _searched_and_uniform,
    chapter="search",
    needs=f"{SEARCHES} and several settings of the search (evoesap_table5 of sweeps)",
)
_register(
    "evoesap.table6",
    search_table,
    COMPARED_AVERAGES,
    "Searched by ESAP and by speculative decoding",
    _by_fitness,
    chapter="search",
    needs=f"{SEARCHES}, fitness=esap and fitness=spec_dec (evoesap_table6 of sweeps)",
)
_register(
    "evoesap.table7",
    allocation_table,
    COLUMNS,
    "calibrated on general text",
    "general",
    needs=f"{SEARCHES}, calibrated on general text (evoesap_table7 of sweeps)",
)
_register(
    "evoesap.table8",
    allocation_table,
    CODE_BENCHMARKS,
    "coding",
    needs=f"{SEARCHES}, and coding benchmarks",
)
_register(
    "evoesap.table9",
    allocation_table,
    WRITING_AND_MATH,
    "writing and mathematics",
    needs=f"{SEARCHES}, and WildBench, gsm8k or math500",
)
_register(
    "evoesap.table10",
    allocation_table,
    (*names.MULTIPLE_CHOICE, "MC Avg"),
    "multiple choice",
    needs=f"{SEARCHES}, and multiple-choice benchmarks",
)


@output("evoesap.table3", chapter="search", needs=SEARCHES)
def cost_table(results: Results) -> Table | None:
    """EvoESAP's Table 3: settings, time and memory of each search, and loading memory of models.

    A row per plan with a searched allocation.
    """
    study = results.study
    if study.searches.empty:
        return None
    folders = study.cells["plan_folder"][study.searches.index].drop_duplicates()
    steps = time_and_memory(folders, study.reader).set_index("folder")
    peaks = steps[["peak", "gpu_peak"]] / MEBIBYTE
    # several cells can have the plan of one search
    rows = (
        study.searches.join(study.cells)
        .drop_duplicates("plan_folder")
        .join(peaks, on="plan_folder")
    )
    rows = rows.assign(
        fitness=rows["fitness"].map(_fitness_in_words),
        before=BYTES * study.costs["parameters_unpruned"] / MEBIBYTE,
        after=study.costs["loading_bytes"] / MEBIBYTE,
    )
    columns: Columns = {
        **TEXT_COLUMNS,
        "Fitness": "fitness",
        **_SETTINGS,
        "Evaluated": ("candidates", "{:,.0f}"),
        SECONDS: ("seconds", "{:,.1f}"),
        "Peak memory (MiB)": ("peak", "{:,.0f}"),
        GPU_PEAK: ("gpu_peak", "{:,.0f}"),
        "Loading memory before (MiB)": ("before", "{:,.2f}"),
        "After (MiB)": ("after", "{:,.2f}"),
    }
    return Table(
        title="What searches cost, and what memory pruning saves",
        caption="Search: seconds of the process that finished it; peak memory: of that process, in "
        "main memory and, where some were used, on GPUs; loading memory: the model in bfloat16. "
        f"Based on {run_setup(study)}",
        **frame_and_formats(rows, columns),
        optional=("Samples", "Peak memory (MiB)", GPU_PEAK),
    )


def densities(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Retained share of the experts in each layer, a row per layer and cell that prunes experts.

    Columns: "line" (the cell), "layer", "y" (the share, 0..1), "criterion", "allocation", and
    "panel" (ratio and calibration set)."""
    cells = comparison.cells[comparison.cells["granularity"] == "expert"]
    columns = cells[["criterion", "allocation", "ratio"]].join(
        display_frame(
            cells,
            {"Pruned": "removed_text", "Calibration": "calibration", "Allocation": "allocation"},
        )
    )
    columns["panel"] = columns["Pruned"] + " pruned, " + columns["Calibration"]
    # a row per expert, with share 0 or 1 here
    shares = study.retained.groupby(["cell", "layer"])["share"].mean().rename("y").reset_index()
    rows = shares.join(columns, on="cell", how="inner").sort_values("ratio", kind="stable")
    return rows.rename(columns={"cell": "line"})


EXPERTS_KEPT = charts.number("y", "experts kept", **charts.PERCENT)
_DENSITIES = "Share of the experts each layer keeps"
_EQUAL_NUMBERS = "All schedules of a panel remove the same number of experts."


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
    caption = f"{_DENSITIES} when {names.criterion(criterion)} chooses which. {_EQUAL_NUMBERS}"
    rows = shares.assign(label=shares["allocation"].map(names.allocation_name))
    return charts.layer_figure("Density schedules", caption, rows, EXPERTS_KEPT)


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
    labels = shares["criterion"].map(names.criterion)
    rows = shares.assign(label=labels, method=shares["criterion"])
    caption = f"{_DENSITIES} under the searched allocation of each criterion. {_EQUAL_NUMBERS}"
    shown = criterion_colours(rows)
    return charts.layer_figure("Searched densities", caption, rows, EXPERTS_KEPT, shown)
