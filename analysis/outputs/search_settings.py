"""What searches cost and what their settings change (EvoESAP, Tables 3 to 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.plans import BYTES
from analysis.load.reader import groups, time_and_memory
from analysis.load.settings import is_searched
from analysis.load.study import Study
from analysis.outputs.captions import GPU_PEAK, MEBIBYTE, SEARCHES, reading, setting
from analysis.published.numbers import Printed, numbers
from analysis.registry import Results, output
from analysis.render.table import SCORE, Table
from analysis.stats.cell_scores import GROUPS, column_targets, scores
from analysis.stats.comparison import Comparison

HOUR = 3600
SAME = ["ratio", "criterion", "calibration", "recovery", "gate", "seed"]
"""Cells that agree in these differ in the settings of their search only."""
COMPARED = ("Code", "WildBench", "MC Avg")
"""The averages of EvoESAP's Tables 4 and 6."""
FITNESSES = ("esap", "spec_dec")
"""What its Table 6 compares."""
COMPETITOR = "DiEP"
NOT_BUILT = "published; not built: EvoESAP gives its settings, but neither its objective nor code"
TEXT = ["Model", "Pruned", "Calibration", "Criterion"]
SECONDS = "Search (s)"
_SETTINGS = {"Samples": "samples", "Generations": "generations", "Population": "population", SECONDS: "seconds"}


@output("evoesap.table3", chapter="search", needs=SEARCHES)
def cost_table(results: Results, name: str) -> Table:
    """EvoESAP's Table 3: the time of each search, and what its plan leaves of the loading memory."""
    study = results.study
    searches = study.searches
    cells = study.cells.loc[searches["cell"]]
    peaks = time_and_memory(cells["plan_folder"].drop_duplicates(), study.reader).set_index("folder")
    costs = study.costs.set_index("cell").reindex(searches["cell"])
    whole = cells["model"].map(lambda model: study.models.get(model, {}).get("parameters", np.nan)).astype(float)
    values = {
        **{shown: (searches[column], "{:,.0f}") for shown, column in _SETTINGS.items() if shown != SECONDS},
        "Evaluated": (searches["candidates"], "{:,.0f}"),
        SECONDS: (searches["seconds"], "{:,.1f}"),
        "Peak memory (MiB)": (cells["plan_folder"].map(peaks["peak"]).astype(float) / MEBIBYTE, "{:,.0f}"),
        GPU_PEAK: (cells["plan_folder"].map(peaks["gpu_peak"]).astype(float) / MEBIBYTE, "{:,.0f}"),
        "Loading memory before (MiB)": (BYTES * whole / MEBIBYTE, "{:,.2f}"),
        "After (MiB)": (costs["loading_bytes"] / MEBIBYTE, "{:,.2f}"),
    }
    if values[GPU_PEAK][0].isna().all():
        del values[GPU_PEAK]
    text = {**_words(cells), "Fitness": searches["fitness"].map(_spelled)}
    every = {**text, **{shown: column for shown, (column, _) in values.items()}}
    return Table(
        name=name,
        title="What searches cost, and what memory pruning saves",
        caption="Search: seconds of the process that finished it; peak memory: main memory of that process at most, "
        "beside it that on GPUs, where some were used; loading memory: the model in bfloat16. Based on "
        f"{reading(study)}",
        frame=pd.DataFrame({shown: list(column) for shown, column in every.items()}),
        formats={shown: form for shown, (_, form) in values.items()},
        blocks=TEXT[:1],
        optional=("Samples", "Peak memory (MiB)", GPU_PEAK),
    )


@output(
    "evoesap.table5",
    chapter="search",
    needs=f"{SEARCHES} and several settings of the search (evoesap_table5 of sweeps)",
)
def settings_table(results: Results, name: str) -> Table:
    """EvoESAP's Table 5: searches that differ in fitness, samples, generations or candidates, beside uniform."""
    study, comparisons = results.study, results.comparisons

    def chosen(cells: pd.DataFrame) -> pd.DataFrame:
        searched = cells["allocation"].map(is_searched)
        return cells[searched | (cells["allocation"] == "uniform")] if searched.sum() > 1 else cells[:0]

    return _table(study, comparisons, chosen, GROUPS, name, "What the settings of a search change")


@output(
    "evoesap.table6",
    chapter="search",
    needs=f"{SEARCHES}, fitness=esap and fitness=spec_dec (evoesap_table6 of sweeps)",
)
def fitness_table(results: Results, name: str) -> Table:
    """EvoESAP's Table 6: searches by speculative decoding and by ESAP."""
    study, comparisons = results.study, results.comparisons
    fitness = study.searches.set_index("cell")["fitness"]

    def chosen(cells: pd.DataFrame) -> pd.DataFrame:
        fitnesses = fitness.reindex(cells.index)
        return cells[fitnesses.isin(FITNESSES)] if set(FITNESSES) <= set(fitnesses) else cells[:0]

    return _table(study, comparisons, chosen, COMPARED, name, "Searched by ESAP and by speculative decoding")


@output("evoesap.table4", chapter="search", needs=f"{SEARCHES}, and coding benchmarks, WildBench or multiple choice")
def competitor_table(results: Results, name: str) -> Table:
    """EvoESAP's Table 4: searched allocations beside the printed row of DiEP, which is not built here."""
    study, comparisons = results.study, results.comparisons

    def chosen(cells: pd.DataFrame) -> pd.DataFrame:
        return cells[cells["allocation"].map(is_searched)]

    measured = _table(study, comparisons, chosen, COMPARED, name, "Searched allocations beside DiEP")
    if measured.low is None or measured.high is None:
        return measured
    shown = [column for column in (*COMPARED, SECONDS) if column in measured.frame]
    frame = measured.frame[[*TEXT, "Allocation", *shown]].assign(Source="measured")
    rows = pd.concat([frame, pd.DataFrame([_printed()]).reindex(columns=frame.columns)], ignore_index=True)
    return Table(
        name=name,
        title=measured.title,
        caption=f"DiEP: {NOT_BUILT}; its row is of two L40S. {measured.caption}",
        frame=rows[[*TEXT, "Allocation", "Source", *shown]],
        formats={column: measured.formats[column] for column in shown},
        blocks=("Model", "Pruned"),
        optional=tuple(shown),
        low=measured.low.reindex(rows.index),
        high=measured.high.reindex(rows.index),
    )


def _printed() -> dict[str, object]:
    """The printed row of what is not built."""
    by_benchmark = {number.benchmark: number for number in numbers() if _is_competitor(number)}
    model, ratio, criterion, _, _, calibration = next(iter(by_benchmark.values())).key
    return {
        "Model": model,
        "Pruned": names.ratio(ratio),
        "Calibration": names.calibration(calibration),
        "Criterion": criterion,
        "Allocation": COMPETITOR,
        "Source": NOT_BUILT,
        "Code": by_benchmark["Code"].value,
        "WildBench": by_benchmark["wildbench"].value,
        "MC Avg": by_benchmark["MC Avg"].value,
        SECONDS: by_benchmark["time_h"].value * HOUR,
    }


def _is_competitor(number: Printed) -> bool:
    return (number.paper, number.table, number.key[2]) == ("evoesap", "4", COMPETITOR)


def _table(
    study: Study,
    comparisons: Sequence[Comparison],
    chosen: Callable[[pd.DataFrame], pd.DataFrame],
    columns: Sequence[str],
    name: str,
    title: str,
) -> Table:
    """A row per cell that `chosen` leaves of those that differ in their search only: settings, scores, seconds."""
    parts = [_rows(study, comparison, chosen, columns) for comparison in comparisons]
    frames, lows, highs = ([part[at] for part in parts if len(part[0])] for at in range(3))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=TEXT)
    averages = [column for column in columns if column in frame]
    settings = {column: "{:,.0f}" for column in _SETTINGS if column in frame}
    return Table(
        name=name,
        title=title,
        caption="Code and Math are means of their two columns, Avg is the mean of the displayed "
        "columns in which more is better; samples: rows "
        f"of the search set; search: seconds of the process that finished it. {setting(study)}",
        frame=frame,
        formats={**dict.fromkeys(averages, SCORE), **settings, **({SECONDS: "{:,.1f}"} if SECONDS in settings else {})},
        best=dict.fromkeys(averages, "max"),
        blocks=TEXT,
        low=pd.concat(lows, ignore_index=True) if lows else None,
        high=pd.concat(highs, ignore_index=True) if highs else None,
        optional=tuple(settings),
    )


def _rows(
    study: Study,
    comparison: Comparison,
    chosen: Callable[[pd.DataFrame], pd.DataFrame],
    columns: Sequence[str],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Frame, lower and upper ends; empty where nothing is chosen or none of `columns` was run."""
    pruned = comparison.cells[comparison.cells["criterion"] != "none"]
    kept = [chosen(cells) for _, cells in groups(pruned, SAME)] if len(pruned) else []
    cells = pd.concat(kept) if kept else pruned
    targets = column_targets(comparison, list(cells.index), columns) if len(cells) else {}
    if not targets:
        return pd.DataFrame(), pd.DataFrame(), pd.DataFrame()
    searches = study.searches.set_index("cell").reindex(cells.index)
    text = {
        **_words(cells),
        "Allocation": cells["allocation"].map(names.allocated),
        "Fitness": searches["fitness"].map(_spelled),
    }
    measured = scores(comparison, list(cells.index), targets)
    settings = {shown: searches[column].astype(float) for shown, column in _SETTINGS.items()}
    frame = pd.concat([pd.DataFrame({**text, **settings}), measured.frame], axis=1)
    last = [column for column in frame if column != SECONDS]
    return frame[[*last, SECONDS]], measured.low, measured.high


def _words(cells: pd.DataFrame) -> dict[str, pd.Series]:
    spelled: Mapping[str, Callable[..., str]] = {
        "ratio": names.ratio,
        "calibration": names.calibration,
        "criterion": names.criterion,
    }
    return {
        "Model": cells["model"],
        **{shown: cells[axis].map(spelled[axis]) for shown, axis in zip(TEXT[1:], spelled, strict=True)},
    }


def _spelled(fitness: object) -> str:
    """A fitness as the paper writes it; nothing for an allocation that was not searched."""
    return fitness.upper().replace("_", "-") if isinstance(fitness, str) else ""
