"""Searched against uniform allocations, densities of layers, and what searches cost
(EvoESAP, Tables 1 to 10 and Figs. 1 and 3)."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.plans import BYTES
from moe_lab.analysis.load.reader import groups, time_and_memory
from moe_lab.analysis.load.settings import ALL_BUT_ALLOCATION, SEARCHED, method_labels
from moe_lab.analysis.outputs.captions import MEBIBYTE, PEAKS, SEARCHES, run_setup
from moe_lab.analysis.outputs.score_rows import (
    Block,
    Cost,
    cells_without_recovery,
    only_cell,
    score_table,
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
from moe_lab.analysis.stats.cell_scores import CODE_BENCHMARKS, WRITING_AND_MATH
from moe_lab.analysis.stats.comparison import Comparison

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
SECONDS = "Search (s)"
SETTINGS = ("samples", "generations", "population")
"""Columns of `Study.searches`, displayed with a capital letter."""
SEARCH_COSTS = {
    **{name.capitalize(): Cost(name, "{:,.0f}", frame="searches") for name in SETTINGS},
    SECONDS: Cost("seconds", "{:,.1f}", frame="searches"),
}


def _searches(
    results: Results, comparison: Comparison
) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Yield (uniform cells, searched cells) of cells that differ only in their allocation, if some
    are searched. They have the columns of `Study.searches`, and "label" (of the method)."""
    if results.study.searches.empty:
        return
    cells = comparison.pruned_cells.join(results.study.searches)
    cells = cells.assign(label=method_labels(cells))
    for _, group in groups(sort_cells(cells, "ratio", "criterion"), ALL_BUT_ALLOCATION):
        searched = group[group["allocation"].str.startswith(SEARCHED)]
        if len(searched):
            yield group[group["allocation"] == "uniform"], searched


_CODE_AND_MATH = "Code and Math are means of their two columns."
_AGAINST_UNIFORM = (
    f"{_CODE_AND_MATH} Difference: the last of the scores minus that of the uniform allocation, "
    "paired."
)
_SETTINGS_CAPTION = (
    f"{_CODE_AND_MATH} Samples: rows of the search set; search: seconds of the process that "
    "finished it."
)


@score_table(
    "evoesap.table1",
    "Searched allocation against uniform: group averages",
    COLUMNS,
    _AGAINST_UNIFORM,
    costs={},
    chapter="search",
    needs=SEARCHES,
    aliases=("evoesap.table2", "evoesap.table7"),
)
@score_table(
    "evoesap.table8",
    "Searched allocation against uniform: coding",
    CODE_BENCHMARKS,
    _AGAINST_UNIFORM,
    costs={},
    needs=f"{SEARCHES}, and coding benchmarks",
)
@score_table(
    "evoesap.table9",
    "Searched allocation against uniform: writing and mathematics",
    WRITING_AND_MATH,
    _AGAINST_UNIFORM,
    costs={},
    needs=f"{SEARCHES}, and WildBench, gsm8k or math500",
)
@score_table(
    "evoesap.table10",
    "Searched allocation against uniform: multiple choice",
    (*names.MULTIPLE_CHOICE, "MC Avg"),
    _AGAINST_UNIFORM,
    costs={},
    needs=f"{SEARCHES}, and multiple-choice benchmarks",
)
def searched_against_uniform(results: Results, comparison: Comparison) -> Iterator[Block]:
    """EvoESAP's Tables 1, 2 and 7 to 10: each searched allocation and the uniform one."""
    for uniform, searched in _searches(results, comparison):
        base = only_cell(uniform)
        if base is not None:
            yield Block(comparison, pd.concat([uniform, searched])["label"], base)


@score_table(
    "evoesap.table4",
    "Searched allocations",
    ("Code", "WildBench", "MC Avg"),
    _SETTINGS_CAPTION,
    costs=SEARCH_COSTS,
    chapter="search",
    needs=f"{SEARCHES}, and coding benchmarks, WildBench or multiple choice",
    aliases=("evoesap.table6",),
)
def searched_allocations(results: Results, comparison: Comparison) -> Iterator[Block]:
    """EvoESAP's Tables 4 and 6: all searched allocations of a ratio."""
    searches = [searched for _, searched in _searches(results, comparison)]
    for _, cells in groups(pd.concat([comparison.cells[:0], *searches]), ["ratio"]):
        yield Block(comparison, cells["label"])


@score_table(
    "evoesap.table5",
    "What the settings of a search change",
    COLUMNS,
    _SETTINGS_CAPTION,
    costs=SEARCH_COSTS,
    chapter="search",
    needs=f"{SEARCHES} and several settings of the search (evoesap_table5 of sweeps)",
)
def search_settings(results: Results, comparison: Comparison) -> Iterator[Block]:
    """EvoESAP's Table 5: searches with several settings, and uniform allocations."""
    for uniform, searched in _searches(results, comparison):
        if len(searched) > 1:
            yield Block(comparison, pd.concat([uniform, searched])["label"])


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
    # several cells can have the plan of one search
    rows = (
        study.searches.join(study.cells)
        .drop_duplicates("plan_folder")
        .join(steps[["peak", "gpu_peak"]], on="plan_folder")
    )
    rows = rows.assign(
        fitness=rows["fitness"].str.upper().str.replace("_", "-"),
        before=BYTES * study.costs["parameters_unpruned"] / MEBIBYTE,
        after=study.costs["loading_bytes"] / MEBIBYTE,
    )
    columns: Columns = {
        **CELL_COLUMNS,
        "Criterion": "criterion",
        "Fitness": "fitness",
        **{name.capitalize(): (name, "{:,.0f}") for name in SETTINGS},
        "Evaluated": ("candidates", "{:,.0f}"),
        SECONDS: ("seconds", "{:,.1f}"),
        **PEAKS,
        "Loading memory before (MiB)": ("before", "{:,.2f}"),
        "After (MiB)": ("after", "{:,.2f}"),
    }
    return Table(
        title="What searches cost, and what memory pruning saves",
        caption="Search: seconds of the process that finished it; peak memory: of that process, in "
        "main memory and, where some were used, on GPUs; loading memory: the model in bfloat16. "
        f"Based on {run_setup(study)}",
        **frame_and_formats(rows, columns),
        optional=("Samples", *PEAKS),
    )


@output(
    "evoesap.fig1",
    chapter="search",
    needs=f"{SEARCHES}, without recovery",
    aliases=("evoesap.fig3",),
)
@per_model
def density_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Share of experts retained in each layer, by criterion and allocation.

    EvoESAP's Figs. 1 and 3: a panel per ratio and calibration set of a searched allocation, with a
    line per cell that prunes experts and has no recovery.
    """
    cells = cells_without_recovery(comparison, "expert")
    columns = {"Pruned": "removed_text", "Calibration": "calibration", "Allocation": "allocation"}
    texts = display_frame(cells, {**columns, "label": "method"})
    texts["panel"] = texts["Pruned"] + " pruned, " + texts["Calibration"]
    panels_of_searches = texts["panel"][cells["allocation"].str.startswith(SEARCHED)]
    texts = texts[texts["panel"].isin(panels_of_searches)]
    # a row per expert, with share 0 or 1 here
    shares = results.study.retained.groupby(["cell", "layer"])["share"].mean().rename("y")
    rows = texts.join(shares.reset_index("layer"), how="inner").rename_axis("line").reset_index()
    caption = (
        "Share of the experts each layer keeps. All schedules of a panel remove the same number of "
        "experts."
    )
    y = charts.number("y", "experts kept", **charts.PERCENT)
    return charts.layer_figure("Density schedules", caption, rows, y)
