"""EvoESAP's tables: searched allocations against uniform ones (EvoESAP Table 1), and what the searches did and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import names
from analysis.load.reader import groups, records
from analysis.load.settings import is_searched, pruned
from analysis.load.study import Study
from analysis.outputs.captions import SEARCHES, reading, setting
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table
from analysis.stats import uncertainty
from analysis.stats.cell_scores import CODING, GROUPS, WRITING_AND_MATH, column_targets, differences, scores
from analysis.stats.comparison import Comparison
from analysis.stats.winners import LEVEL

TEXT = ["Model", "Pruned", "Calibration", "Criterion", "Allocation"]
GAIN = "Δ {}"
BEYOND = "Beyond noise"
_PAIRED = ["ratio", "criterion", "calibration", "recovery", "gate", "seed"]
"""Cells that agree in these differ in their allocation only."""


def searched_pairs(comparison: Comparison) -> dict[int, int]:
    """Cell of a searched allocation -> the cell that differs from it in being uniform only, in the order of tables."""
    cells = comparison.cells[comparison.cells["criterion"] != "none"]
    if not cells["allocation"].map(is_searched).any():
        return {}
    order = names.in_order(cells["criterion"], names.CRITERIA)
    cells = cells.assign(place=cells["criterion"].map(order.index)).sort_values(["ratio", "place"], kind="stable")
    pairs: dict[int, int] = {}
    for _, group in groups(cells, _PAIRED):
        uniform = group.index[group["allocation"] == "uniform"]
        searched = group.index[group["allocation"].map(is_searched)]
        if len(uniform) == 1:
            pairs |= {int(cell): int(uniform[0]) for cell in searched}
    return pairs


def general_pairs(comparison: Comparison) -> dict[int, int]:
    """Those of `searched_pairs` that were calibrated on general text, whatever they were searched on."""
    sets = comparison.cells["calibration"].map(names.domain)
    return {cell: uniform for cell, uniform in searched_pairs(comparison).items() if sets[cell] == "general"}


@output(
    "evoesap.table1",
    chapter="search",
    filters="Model|Pruned|Calibration|Criterion",
    needs=SEARCHES,
    also=("evoesap.table2",),
)
def allocation_table(
    results: Results,
    name: str,
    columns: Sequence[str] = GROUPS,
    what: str = "group averages",
    pairs: Callable[[Comparison], dict[int, int]] = searched_pairs,
) -> Table:
    """Group averages of searched and uniform allocations.

    Each criterion with uniform and searched allocation: those of `columns` that were run, and their paired
    differences, with intervals; Holm's correction covers all differences of one model.
    """
    parts = [_rows(comparison, pairs(comparison), columns) for comparison in results.comparisons]
    frames, lows, highs = ([part[at] for part in parts if part is not None] for at in range(3))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*TEXT, BEYOND])
    numbers = [str(column) for column in frame if column not in (*TEXT, BEYOND)]
    gains = [column for column in numbers if column.startswith(GAIN.format(""))]
    averages = [column for column in numbers if column not in gains]
    return Table(
        name=name,
        title=f"Searched allocation against uniform: {what}",
        caption="Code and Math are means of their two columns, Avg is the mean of the displayed "
        "columns in which more is better. Δ: searched "
        "minus uniform on the same items; beyond noise: the columns whose difference has a paired p-value below "
        f"{LEVEL} after Holm's correction over all differences of a model. {setting(results.study)}",
        frame=frame[[*TEXT, *averages, *gains, BEYOND]],
        formats={**dict.fromkeys(averages, SCORE), **dict.fromkeys(gains, "{:+.3f}")},
        best=dict.fromkeys(averages, "max"),
        blocks=TEXT[:4],
        low=pd.concat(lows, ignore_index=True) if lows else None,
        high=pd.concat(highs, ignore_index=True) if highs else None,
        optional=gains,
    )


def _rows(
    comparison: Comparison, pairs: dict[int, int], columns: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame] | None:
    """Frame, lower and upper ends: for each criterion the uniform cell and under it the searched ones."""
    cells = list(dict.fromkeys(cell for searched, uniform in pairs.items() for cell in (uniform, searched)))
    targets = column_targets(comparison, cells, columns) if cells else {}
    if not targets:
        return None
    about = comparison.cells.loc[cells]
    text = pd.DataFrame(
        {
            "Model": comparison.model,
            "Pruned": pruned(comparison.cells)[cells],
            "Calibration": about["calibration"].map(names.calibration),
            "Criterion": about["criterion"].map(names.criterion),
            "Allocation": about["allocation"].map(names.allocated),
        }
    )
    numbers = scores(comparison, cells, targets)
    gains = {column: differences(comparison, target, pairs) for column, target in targets.items()}
    sure = _beyond_noise(list(gains.values()))
    marks = pd.DataFrame(sure, index=list(gains), columns=list(pairs))
    beyond = {cell: names.listing(marks.index[marks[cell]]) or "none" for cell in marks}
    frame, low, high = (
        pd.concat([part, _gains(gains, end, cells)], axis=1)
        for part, end in ((numbers.frame, "difference"), (numbers.low, "low"), (numbers.high, "high"))
    )
    return pd.concat([text, frame], axis=1).assign(**{BEYOND: [beyond.get(cell, "") for cell in cells]}), low, high


def _gains(gains: dict[str, pd.DataFrame], end: str, cells: Sequence[int]) -> pd.DataFrame:
    return pd.DataFrame({GAIN.format(column): found[end].reindex(list(cells)) for column, found in gains.items()})


def _beyond_noise(gains: Sequence[pd.DataFrame]) -> np.ndarray:
    """Booleans (targets, pairs): significant after Holm's correction over all of them."""
    p_values = np.array([frame["p"].to_numpy(float) for frame in gains])
    return np.asarray(uncertainty.holm(p_values.ravel()).reshape(p_values.shape) < LEVEL)


def search_table(study: Study, *, name: str) -> Table:
    """What each search found and cost."""
    rows = study.searches
    cells = study.cells.loc[rows["cell"]].reset_index(drop=True)
    numbers = {
        "Uniform": (rows["uniform_fitness"], "{:.4f}"),
        "Best": (rows["best_fitness"], "{:.4f}"),
        "Gain": (rows["best_fitness"] - rows["uniform_fitness"], "{:+.4f}"),
        "Evaluated": (rows["candidates"], "{:,.0f}"),
        "Full forwards": (rows["forwards"] + rows["screening"], "{:,.1f}"),
        "Layers run": (rows["per_candidate"], "{:.0%}"),
        "Seconds": (rows["seconds"], "{:,.1f}"),
    }
    text = {
        "Model": cells["model"],
        "Pruned": pruned(study.cells)[rows["cell"]].to_numpy(),
        "Calibration": cells["calibration"].map(names.calibration),
        "Criterion": cells["criterion"].map(names.criterion),
        "Fitness": rows["fitness"].astype(object).map(lambda fitness: str(fitness).upper()),
        "Removed per layer": rows["best"].map(lambda schedule: " ".join(map(str, schedule))),
    }
    return Table(
        name=name,
        title="Results and cost of the searches",
        caption="Fitness of the uniform allocation and of the best one found, higher is better. Evaluated: schedules "
        "whose fitness was measured; full forwards: what they and the screening of proposals cost, counted in passes "
        "over the search set; layers run: share of the layers a schedule needed on average, the others were reused. "
        f"Based on {reading(study)}",
        frame=pd.DataFrame({**text, **{column: values for column, (values, _) in numbers.items()}}),
        formats={column: form for column, (_, form) in numbers.items()},
    )


_DASHED: Any = (0, (4, 2))
_UNIFORM: Any = {"color": style.INK, "linestyle": _DASHED, "linewidth": 0.9}


def densities(study: Study, model: str) -> pd.DataFrame:
    """Share of the experts each layer keeps: one row per cell of whole experts and layer, with the cell's axes."""
    cells = study.cells[(study.cells["model"] == model) & (study.cells["granularity"] == "expert")]
    kept = study.kept[study.kept["cell"].isin(cells.index)]
    shares = kept.groupby(["cell", "layer"], as_index=False)["share"].mean()
    axes = ["criterion", "allocation", "ratio", "calibration", "recovery", "seed"]
    return pd.DataFrame(shares.join(cells[axes], on="cell"))


def allocations_figure(densities_of: pd.DataFrame, *, model: str, name: str) -> Figure | None:
    """EvoESAP Fig. 1: uniform, global by frequency and searched allocations of one criterion, a panel per ratio.

    The criterion is the one that was used with most allocations. None where none was used with two.
    """
    compared = densities_of.groupby(["criterion", "ratio", "calibration"])["allocation"].transform("nunique") > 1
    densities_of = densities_of[compared]
    if densities_of.empty:
        return None
    per_criterion = densities_of.groupby("criterion")["allocation"].nunique()
    most = names.in_order(per_criterion.index[per_criterion == per_criterion.max()], names.CRITERIA)
    criterion = "reap" if "reap" in most else most[0]
    shown = densities_of[densities_of["criterion"] == criterion]
    lines = names.in_order(shown["allocation"], ["uniform", "global by frequency", "global"])
    styles = {word: _allocation_line(word, place) for place, word in enumerate(lines)}
    drawing = _panels(shown, "allocation", styles)
    caption = f"Share of the experts each layer keeps when {names.criterion(criterion)} chooses which. {_SAME}"
    return Figure(name, f"Density schedules: {model}", caption, drawing)


_SAME = "All schedules of a panel remove the same number of experts."


def criteria_figure(densities_of: pd.DataFrame, *, model: str, name: str) -> Figure | None:
    """EvoESAP Fig. 3: the searched densities of every criterion, a panel per ratio. None without a search."""
    shown = densities_of[densities_of["allocation"].map(is_searched)]
    if shown.empty:
        return None
    lines = names.in_order(shown["criterion"], names.CRITERIA)
    styles = {criterion: _criterion_line(criterion, place) for place, criterion in enumerate(lines)}
    drawing = _panels(shown, "criterion", styles)
    caption = f"Share of the experts each layer keeps under the searched allocation of each criterion. {_SAME}"
    return Figure(name, f"Searched densities: {model}", caption, drawing)


def _panels(shown: pd.DataFrame, by: str, styles: Mapping[str, Line2D]) -> Drawing:
    """A panel per ratio and calibration set with a line per value of `by`, and the uniform density if it is none."""
    panels = list(groups(shown.sort_values("ratio", kind="stable"), ["ratio", "calibration"]))
    several = shown["calibration"].nunique() > 1
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    with style.look():
        drawing = style.drawing(style.PAGE * (1 if across > 1 else 0.6), 2.0 * down + 0.5)
        grid = drawing.subplots(down, across, sharey="row", squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (key, cells) in zip(grid.flat, panels, strict=False):
            _density_axes(axes, cells, by, styles)
            data = f", {names.calibration(key['calibration'])}" if several else ""
            axes.set_title(f"{names.ratio(key['ratio'])} pruned{data}", fontsize=8)
        for row in grid:
            row[0].set_ylabel("experts kept")
        uniform = [] if "uniform" in styles else [Line2D([], [], label="uniform", **_UNIFORM)]
        handles = [*styles.values(), *uniform]
        drawing.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=7)
    return drawing


def _density_axes(axes: Axes, cells: pd.DataFrame, by: str, styles: Mapping[str, Line2D]) -> None:
    layers = sorted(cells["layer"].unique())
    if "uniform" not in styles:
        axes.axhline(cells["share"].mean(), **_UNIFORM)
    for value, line in styles.items():
        for _, cell in groups(cells[cells[by] == value].sort_values("layer"), ["cell"]):
            axes.plot(
                [layers.index(layer) for layer in cell["layer"]],
                cell["share"],
                color=line.get_color(),
                linestyle=line.get_linestyle(),
                linewidth=1.3,
                marker=line.get_marker(),
                markersize=3.8,
                markerfacecolor=line.get_markerfacecolor(),
            )
    step = max(1, len(layers) // 8)
    axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_xlabel("layer")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:.4g} %"))
    axes.grid(axis="y")


def _allocation_line(word: str, place: int) -> Line2D:
    shades = [style.INK, "#ee7733", "#2277bb", "#117733", "#aa4499", "#7a7a7a"]
    return _line(names.allocated(word), shades[place % len(shades)], "sD^ov"[place % 5], _DASHED if not place else "-")


def _criterion_line(criterion: str, place: int) -> Line2D:
    return _line(names.criterion(criterion), style.colour(criterion), style.MARKERS[place % len(style.MARKERS)], "-")


def _line(label: str, shade: str, marker: str, pattern: Any) -> Line2D:
    return Line2D([], [], color=shade, marker=marker, markersize=3.8, linestyle=pattern, linewidth=1.3, label=label)


def history_figure(study: Study, model: str, *, name: str) -> Figure | None:
    """Best and mean fitness by generation, a panel per ratio and criterion; None without a search of this model."""
    cells = study.cells[study.cells["model"] == model]
    searches = study.searches[study.searches["cell"].isin(cells.index)]
    if searches.empty:
        return None
    about = cells.loc[searches["cell"]]
    rows = list(groups(about.sort_values("ratio", kind="stable"), ["ratio", "calibration"]))
    columns = names.in_order(about["criterion"], names.CRITERIA)
    with style.look():
        width = style.PAGE if len(columns) > 2 else style.PAGE * 0.7
        drawing = style.drawing(width, 1.6 * len(rows) + 0.6)
        grid = drawing.subplots(len(rows), len(columns), sharex=True, sharey="row", squeeze=False)
        for row, (key, at_ratio) in zip(grid, rows, strict=True):
            for axes, criterion in zip(row, columns, strict=True):
                chosen = at_ratio.index[at_ratio["criterion"] == criterion]
                _history_axes(axes, study, [int(cell) for cell in chosen])
                axes.set_title(f"{names.criterion(criterion)}, {names.ratio(key['ratio'])}", fontsize=7.5)
            row[0].set_ylabel("fitness")
        for axes in grid[-1]:
            axes.set_xlabel("generation")
        handles = [_line("best so far", _BEST, "o", "-"), _line("mean of the evaluated", _MEAN, "s", "-")]
        uniform = Line2D([], [], label="uniform", **_UNIFORM)
        drawing.legend(handles=[*handles, uniform], loc="outside lower center", ncols=3, fontsize=7)
    caption = (
        "Fitness, higher is better: the best schedule found until a generation, the mean of the schedules evaluated in "
        "it, and the uniform schedule."
    )
    return Figure(name, f"Searches by generation: {model}", caption, drawing)


_BEST, _MEAN = "#2277bb", "#ee7733"


def _history_axes(axes: Axes, study: Study, cells: Sequence[int]) -> None:
    for cell in cells:
        history = study.history[(study.history["cell"] == cell) & study.history["fitness"].notna()]
        by_generation = history.groupby("generation")["fitness"].agg(["max", "mean"])
        for values, shade, marker in (
            (np.maximum.accumulate(by_generation["max"].to_numpy(float)), _BEST, "o"),
            (by_generation["mean"].to_numpy(float), _MEAN, "s"),
        ):
            axes.plot(by_generation.index, values, color=shade, marker=marker, markersize=3, linewidth=1.2)
        for row in records(study.searches[study.searches["cell"] == cell]):
            if not pd.isna(row["uniform_fitness"]):
                axes.axhline(row["uniform_fitness"], **_UNIFORM)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(axis="y")


@output("evoesap.table7", needs=f"{SEARCHES}, calibrated on general text (evoesap_table7 of sweeps)")
def searched_after_general_text(results: Results, name: str) -> Table:
    """Group averages of searched and uniform allocations that were calibrated on general text."""
    return allocation_table(results, name, GROUPS, "calibrated on general text", general_pairs)


@output("evoesap.table8", needs=f"{SEARCHES}, and coding benchmarks")
def searched_coding(results: Results, name: str) -> Table:
    """Searched and uniform allocations: coding benchmarks."""
    return allocation_table(results, name, CODING, "coding")


@output("evoesap.table9", needs=f"{SEARCHES}, and WildBench, gsm8k or math500")
def searched_writing_and_mathematics(results: Results, name: str) -> Table:
    """Searched and uniform allocations: writing and mathematics."""
    return allocation_table(results, name, WRITING_AND_MATH, "writing and mathematics")


@output("evoesap.table10", needs=f"{SEARCHES}, and multiple-choice benchmarks")
def searched_multiple_choice(results: Results, name: str) -> Table:
    """Searched and uniform allocations: multiple choice."""
    return allocation_table(results, name, (*names.MULTIPLE_CHOICE, "MC Avg"), "multiple choice")


@output("evoesap.fig1", chapter="search", needs=SEARCHES)
def searched_allocations(results: Results, name: str) -> list[Item | None]:
    """How densely layers are kept by each allocation."""
    return [
        allocations_figure(densities(results.study, comparison.model), model=comparison.model, name=own)
        for comparison, own in results.per_model(name)
    ]


@output("evoesap.fig3", chapter="search", needs=SEARCHES)
def searched_densities(results: Results, name: str) -> list[Item | None]:
    """How densely layers are kept for each criterion."""
    return [
        criteria_figure(densities(results.study, comparison.model), model=comparison.model, name=own)
        for comparison, own in results.per_model(name)
    ]


@output("evoesap.search", chapter="search", needs=SEARCHES)
def searches(results: Results, name: str) -> list[Item | None]:
    """How fitness rises in each search, and what each found and cost."""
    figures = [history_figure(results.study, comparison.model, name=own) for comparison, own in results.per_model(name)]
    return [*figures, search_table(results.study, name=name)]
