"""Cost of searches and effects of their settings (EvoESAP, Tables 3 to 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from moe_lab.analysis.load.plans import BYTES
from moe_lab.analysis.load.reader import groups, time_and_memory
from moe_lab.analysis.load.settings import ALL_BUT_ALLOCATION, is_searched
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import GPU_PEAK, MEBIBYTE, SEARCHES, run_setup, score_setup
from moe_lab.analysis.outputs.score_rows import concatenate_numbers, numbers_table
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render.table import Table, display_frame, frame_and_formats
from moe_lab.analysis.stats.cell_scores import (
    GROUPS,
    Numbers,
    column_targets,
    mean_definitions,
    scores,
)
from moe_lab.analysis.stats.comparison import Comparison

COMPARED_AVERAGES = ("Code", "WildBench", "MC Avg")
"""The averages of EvoESAP's Tables 4 and 6."""
FITNESSES = ("esap", "spec_dec")
"""The fitnesses that EvoESAP's Table 6 compares."""
TEXT_COLUMNS = {
    "Model": "model",
    "Pruned": "removed_text",
    "Calibration": "calibration",
    "Criterion": "criterion",
}
"""Displayed column -> column of `Study.cells`."""
SECONDS = "Search (s)"
_SETTINGS = {
    "Samples": ("samples", "{:,.0f}"),
    "Generations": ("generations", "{:,.0f}"),
    "Population": ("population", "{:,.0f}"),
}
"""Displayed column -> (column of `Study.searches`, format)."""


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
    columns: dict[str, str | tuple[str, str]] = {
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


@output(
    "evoesap.table5",
    chapter="search",
    needs=f"{SEARCHES} and several settings of the search (evoesap_table5 of sweeps)",
)
def settings_table(results: Results) -> Table | None:
    """EvoESAP's Table 5: uniform allocation and searches with different settings.

    The table lists searched plans without recovery that differ only in the settings of their
    search, and the uniform plans that are otherwise equal.
    """

    def select(cells: pd.DataFrame) -> pd.DataFrame:
        """The searched and the uniform cells without recovery; none without two searched cells."""
        cells = cells[cells["recovery"] == "none"]
        is_search = cells["allocation"].map(is_searched).astype(bool)
        if is_search.sum() < 2:
            return cells[:0]
        return cells[is_search | (cells["allocation"] == "uniform")]

    return _table(results, select, GROUPS, "What the settings of a search change")


@output(
    "evoesap.table6",
    chapter="search",
    needs=f"{SEARCHES}, fitness=esap and fitness=spec_dec (evoesap_table6 of sweeps)",
)
def fitness_table(results: Results) -> Table | None:
    """EvoESAP's Table 6: searches by speculative decoding and by ESAP.

    The table lists plans that differ only in the settings of their search, if both FITNESSES occur.
    """
    fitness_of_cell = results.study.searches["fitness"]

    def select(cells: pd.DataFrame) -> pd.DataFrame:
        fitnesses = fitness_of_cell.reindex(cells.index)
        return cells[fitnesses.isin(FITNESSES)] if set(FITNESSES) <= set(fitnesses) else cells[:0]

    return _table(
        results, select, COMPARED_AVERAGES, "Searched by ESAP and by speculative decoding"
    )


@output(
    "evoesap.table4",
    chapter="search",
    needs=f"{SEARCHES}, and coding benchmarks, WildBench or multiple choice",
)
def searches_table(results: Results) -> Table | None:
    """EvoESAP's Table 4: searched allocations, with the time of their search."""

    def select(cells: pd.DataFrame) -> pd.DataFrame:
        is_search = cells["allocation"].map(is_searched).astype(bool)
        return cells[is_search & (cells["recovery"] == "none")]

    return _table(results, select, COMPARED_AVERAGES, "Searched allocations")


def _table(
    results: Results,
    select: Callable[[pd.DataFrame], pd.DataFrame],
    columns: Sequence[str],
    title: str,
) -> Table | None:
    """A table with the settings, the scores and the seconds of searches, a row per cell.

    select, columns: see `_rows`."""
    if results.study.searches.empty:
        return None
    rows = concatenate_numbers(
        _rows(results.study, comparison, select, columns) for comparison in results.comparisons
    )
    if rows is None:
        return None
    formats = {column: form for column, (_, form) in _SETTINGS.items()}
    formats[SECONDS] = "{:,.1f}"
    return numbers_table(
        rows,
        list(map(str, rows.frame)),
        formats,
        title=title,
        caption=f"{mean_definitions(results.comparisons)} Code and Math are means of their two "
        "columns. Samples: rows of the search set; search: seconds of the process that finished "
        f"it. {score_setup(results.study)}",
        optional=tuple(formats),
    )


def _rows(
    study: Study,
    comparison: Comparison,
    select: Callable[[pd.DataFrame], pd.DataFrame],
    columns: Sequence[str],
) -> Numbers | None:
    """Rows of `_table` for one model.

    - select: function that chooses the listed cells from a group of cells that differ only in their
      allocation
    - columns: averages to list, if they were run"""
    pruned = comparison.pruned_cells
    selections = [select(cells) for _, cells in groups(pruned, ALL_BUT_ALLOCATION)]
    # pruned[:0] has no rows; concat fails without a frame
    cells = pd.concat([pruned[:0], *selections])
    targets = column_targets(comparison, list(cells.index), columns) if len(cells) else {}
    if not targets:
        return None
    rows = cells.join(study.searches)
    rows = rows.assign(fitness=rows["fitness"].map(_fitness_in_words))
    averages = scores(comparison, list(cells.index), targets)
    settings = {name: rows[column].astype(float) for name, (column, _) in _SETTINGS.items()}
    text = display_frame(rows, {**TEXT_COLUMNS, "Allocation": "allocation", "Fitness": "fitness"})
    frame = pd.concat([text.assign(**settings), averages.frame], axis=1)
    frame[SECONDS] = rows["seconds"].astype(float)
    return Numbers(frame, averages.low, averages.high, averages.best)


def _fitness_in_words(fitness: object) -> str:
    """A fitness in the paper's spelling, such as SPEC-DEC; "" for NaN."""
    return fitness.upper().replace("_", "-") if isinstance(fitness, str) else ""
