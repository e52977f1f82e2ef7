"""The table of scores, from blocks of cells that are compared with each other; selections of cells,
and drawing of scores. The tables themselves are in `score_tables`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import passes, settings
from moe_lab.analysis.load.settings import removed_share_texts
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import MEBIBYTE, score_setup
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import MENUS, Figure
from moe_lab.analysis.render.table import SCORE, UNPRUNED, Table, printed_columns
from moe_lab.analysis.stats import uncertainty
from moe_lab.analysis.stats.cell_scores import (
    MEAN,
    Numbers,
    column_targets,
    differences,
    notes_on_average,
    scores,
)
from moe_lab.analysis.stats.comparison import Comparison, mean_quantities
from moe_lab.analysis.stats.quantity import AVG


@dataclass(frozen=True)
class Cost:
    """A column of costs, whose numbers are scale x a number of a cell."""

    source: str
    """Column of the frame with the number."""
    form: str
    """Format of the column."""
    scale: float = 1.0
    frame: str = "costs"
    """Frame of `Study` with the number: costs, or searches, which not every cell has."""


RETAINED_SHARE = {"Kept": Cost("routed_kept", "{:.1%}")}
COSTS = {**RETAINED_SHARE, "FLOPs": Cost("flops_ratio", "{:.1%}")}
OF_MODEL = "Of the model"
"""Column with the retained share of all parameters, the axis of HEAPr's Figure 2."""
COSTS_OF_MODEL = {**COSTS, OF_MODEL: Cost("parameters_kept", "{:.1%}")}
STORAGE = "Storage (MiB)"
STORAGE_COSTS = {**RETAINED_SHARE, STORAGE: Cost("storage_bytes", "{:,.2f}", scale=1 / MEBIBYTE)}
"""RETAINED_SHARE to STORAGE_COSTS: displayed column -> its cost."""
DIFFERENCE = "Difference"
"""Displayed column of differences."""
P = "p (Holm)"
"""Displayed column of p-values."""
_MEANING_OF_P = f"{P}: two-sided, where both methods have several seeds, corrected over the table."
_MEANING_OF_JOINT_ROWS = (
    "A row of several calibration sets has each benchmark from the plan of the benchmark's domain, "
    "and costs from the first plan."
)
_MEANING_OF_MEAN = f"{MEAN}: of the paper's benchmarks that were run, which the table lists."
SMOOTHING = ("layer_smoothing", "smoothing")
"""Settings that choose the smoothing of layer losses, which MoE-Slimming's Table 7 varies."""
DEFAULT_SMOOTHING = "sqrt"
FEWEST_RATIOS = 3
"""Fewest ratios of a method for which a line over ratios is drawn."""
COVERAGE = "coverage"
"""The allocation with coverage budgets (MoE-Slimming)."""
FIGURE_RATIO = 0.25
"""The ratio of MoE-Slimming's figures of layers and experts."""
COVERAGE_PLANS = "cells of channels with allocation=coverage"
"""Data that outputs on coverage budgets need."""


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of a table that are compared with each other: cells of one model and ratio."""

    comparison: Comparison
    labels: pd.Series
    """Cell -> label, in the order of the rows."""
    base: int | None = None
    """The reference cell of differences; None for a block without differences."""
    detail: str = ""
    """Text with what else the cells have in common."""


BlockMaker = Callable[[Results, Comparison], Iterable[Block]]
"""Function (results, comparison of one model) that returns the blocks of this model."""


def score_table(
    name: str,
    title: str,
    columns: Sequence[str],
    caption: str,
    costs: Mapping[str, Cost] = COSTS,
    drawn: Sequence[str] = (),
    **fields: Any,
) -> Callable[[BlockMaker], BlockMaker]:
    """Decorator that registers a table of scores as an output. The decorated function yields the
    blocks of one model; the first line of its docstring describes the output in the help.

    Each block has a row for the unpruned model, if that model was run, and then a row per cell. A
    block whose cells were not evaluated on any of `columns` is left out. Columns of numbers:

    - scores on the benchmarks and averages in `columns` that were run, with 95 % intervals
    - DIFFERENCE, for blocks with a base: score of the cell minus score of the base on the last of
      `columns` that was run, with the 95 % interval
    - P: p-value of DIFFERENCE after Holm's correction over the table; NaN unless the cell and the
      base have several seeds
    - a column of costs for each entry of `costs` (displayed column -> its cost)

    name, fields: arguments of `output`; drawn: costs of a `cost_figure` of the mean.
    """

    def register(blocks_of: BlockMaker) -> BlockMaker:
        @wraps(blocks_of)
        def make(results: Results) -> list[Item | None]:
            study = results.study
            rows = concatenate_numbers(
                _rows(study, block, columns, costs)
                for comparison in results.comparisons
                for block in blocks_of(results, comparison)
            )
            if rows is None:
                return []
            means = [*mean_quantities(results.comparisons), MEAN]
            table = _block_table(study, rows, [*means, DIFFERENCE], costs, title, caption)
            if AVG in rows.frame:
                table = replace(table, footnotes=notes_on_average(results.comparisons))
            # models with another average, such as a mean loss, are in the table alone
            shown = next((name for name in means if name in rows.frame), MEAN)
            return [cost_figure(table, drawn, shown), table]

        output(name, **fields)(make)
        return blocks_of

    return register


def _block_table(
    study: Study,
    rows: Numbers,
    averages: Sequence[str],
    costs: Mapping[str, Cost],
    title: str,
    caption: str,
) -> Table:
    """The table of `score_table`. rows: with p-values that are not corrected; averages: columns
    that follow the benchmarks."""
    frame = rows.frame
    if P in frame:
        frame[P] = uncertainty.holm(frame[P].to_numpy(float))
    has_joint_cells = study.cells["calibration"].str.contains(names.JOINT, regex=False).any()
    sentences = [
        caption,
        _MEANING_OF_JOINT_ROWS if has_joint_cells else "",
        _MEANING_OF_MEAN if MEAN in frame else "",
        _MEANING_OF_P if P in frame else "",
        score_setup(study),
    ]
    return numbers_table(
        rows,
        {P: "{:.4f}", **{column: cost.form for column, cost in costs.items()}},
        last=(*averages, P, *costs),
        title=title,
        caption=" ".join(filter(None, sentences)),
        optional=(DIFFERENCE, P, *(name for name in costs if costs[name].frame == "searches")),
    )


def concatenate_numbers(parts: Iterable[Numbers | None]) -> Numbers | None:
    """Concatenate the rows of all parts, with a new index and without empty columns; None when all
    parts are None."""
    present_parts = [part for part in parts if part is not None]
    if not present_parts:
        return None
    frame = pd.concat([part.frame for part in present_parts], ignore_index=True)
    lower_is_better = set[str]().union(*(part.lower_is_better for part in present_parts))
    empty_columns = [name for name in printed_columns(frame) if frame[name].isna().all()]
    return Numbers(without_columns(frame, empty_columns), lower_is_better)


def without_columns(frame: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """`frame` without some columns and the ends of their intervals."""
    for column in columns:
        frame = frame.drop(columns=[column, f"{column} low", f"{column} high"], errors="ignore")
    return frame


def numbers_table(
    rows: Numbers,
    formats: Mapping[str, str] | None = None,
    last: Iterable[str] = (),
    **fields: Any,
) -> Table:
    """A `Table` of the columns of `rows.frame`, ends of intervals last.

    formats: column -> format. A column without an entry has the format SCORE if it has intervals;
    otherwise, it is text. last: columns that follow all others but the ends, those in
    `rows.frame`; fields: other fields of `Table`."""
    last = [column for column in last if column in rows.frame]
    first = [column for column in printed_columns(rows.frame) if column not in last]
    with_intervals = [column for column in (*first, *last) if f"{column} low" in rows.frame]
    ends = [f"{column} {end}" for end in ("low", "high") for column in with_intervals]
    return Table(
        frame=rows.frame[[*first, *last, *ends]],
        formats={**dict.fromkeys(with_intervals, SCORE), **(formats or {})},
        lower_is_better=rows.lower_is_better,
        **fields,
    )


def _rows(
    study: Study, block: Block, columns: Sequence[str], costs: Mapping[str, Cost]
) -> Numbers | None:
    """The rows of one block of a `score_table`; None if its cells were not evaluated on any of
    `columns`. The p-values in the column P are not corrected."""
    comparison = block.comparison
    cells = list(block.labels.index)
    targets = column_targets(comparison, cells, columns)
    if not targets:
        return None
    labels = block.labels
    if comparison.unpruned_cell is not None:
        labels = pd.concat([pd.Series({comparison.unpruned_cell: UNPRUNED}), labels])
    text = {"Model": comparison.model, "Pruned": _pruned_text(block), "Criterion": labels}
    numbers = scores(comparison, pd.DataFrame(text), targets)
    if block.base is not None:
        base_of_cell = {cell: block.base for cell in cells if cell != block.base}
        estimates = differences(comparison, list(targets.values())[-1], base_of_cell)
        difference_columns = [DIFFERENCE, f"{DIFFERENCE} low", f"{DIFFERENCE} high"]
        numbers.frame[difference_columns] = estimates[["difference", "low", "high"]]
        seeds = comparison.plans_by_seed
        is_tested = [min(len(seeds[cell]), len(seeds[block.base])) > 1 for cell in base_of_cell]
        numbers.frame[P] = estimates["p"][is_tested]
    for column, cost in costs.items():
        frame = getattr(study, cost.frame)
        if len(frame):
            numbers.frame[column] = cost.scale * frame[cost.source].astype(float)
    return numbers


def _pruned_text(block: Block) -> str:
    """Text with the removed share of a block, and with a calibration set and a gate that its cells
    have in common, if the model's other cells have others."""
    pruned = block.comparison.pruned_cells
    cells = pruned.loc[block.labels.index]
    texts = [cells["removed_text"].iloc[0], block.detail]
    for axis, display in (("calibration", names.calibration), ("gate", "gate {}".format)):
        if cells[axis].nunique() == 1 < pruned[axis].nunique():
            texts.append(display(cells[axis].iloc[0]))
    return names.comma_joined(*texts)


def criterion_colours(rows: pd.DataFrame) -> dict[str, Any]:
    """`charts.colours` of the criteria, in the order of methods. rows: columns "label" and
    "method"."""
    ordered = sort_cells(rows, "method")
    colour_of_label = dict(zip(ordered["label"], ordered["method"].map(charts.colour), strict=True))
    return charts.colours(colour_of_label, colour_of_label)


LEAST_RANGE = 0.01
"""Costs are drawn if they differ by more than this share of the highest."""


def cost_figure(table: Table, costs: Sequence[str], score: str) -> Figure | None:
    """A table's scores against its costs, with intervals and Pareto fronts of low costs.

    A panel for each model and cost, a line for each criterion and calibration set. Costs that
    hardly differ between the pruned models are left out; None if all are.

    score, costs: columns of numbers.
    """
    if f"{score} low" not in table.frame:
        return None
    rows = table.frame.assign(
        label=table.frame["Criterion"],
        line=table.frame.filter(["Criterion", "Calibration"]).agg(" ".join, axis=1),
        is_pruned=table.frame["Criterion"] != UNPRUNED,
        y=table.frame[score],
        low=table.frame[f"{score} low"],
        high=table.frame[f"{score} high"],
    )
    sign = -1 if score in table.lower_is_better else 1
    frames = []
    for model, model_rows in rows.groupby("Model", sort=False):
        for cost in rows.columns.intersection(list(costs)):
            points = model_rows.assign(panel=f"{model}: {cost}", x=model_rows[cost], cost=cost)
            # each block of a table has a row for the unpruned model
            points = points.dropna(subset=["x", "y"]).drop_duplicates(["line", "x", "y"])
            costs_of_pruned = points["x"].where(points["is_pruned"])
            if np.ptp(costs_of_pruned.dropna()) > LEAST_RANGE * costs_of_pruned.max():
                points["front"] = pareto_front(costs_of_pruned, sign * points["y"])
                frames.append(points.sort_values("x", kind="stable"))
    if not frames:
        return None
    points = pd.concat(frames)
    shown = charts.colours(sorted(points["label"]))
    x = charts.number("x", scale={"zero": False})
    y = charts.number("y", score, scale={"zero": False})
    front = {"interpolate": "step-after", "color": charts.MUTED, "strokeWidth": 3, "opacity": 0.4}
    layers = [
        charts.layer("line", front, "datum.front", x=x, y=y),
        *charts.lines(points, x, y, shown),
    ]
    caption = (
        f"{score} of each model with its 95 % interval; a line joins the ratios of a method. "
        "Steps: the Pareto front, pruned models that no other beats at their cost or less."
    )
    title = f"{score} against {names.enumeration(dict.fromkeys(points['cost']))}"
    columns = ["panel", "label", "line", "x", "y", "low", "high", "front"]
    columns += table.frame.columns.intersection(list(MENUS)).tolist()
    return Figure(title, caption, points[columns], layers, independent=("x",))


def pareto_front(
    costs: Sequence[float] | pd.Series, merits: Sequence[float] | pd.Series
) -> np.ndarray:
    """Booleans (entries,): whether an entry is on the Pareto front of low cost and high merit.

    A dominates B if A is at least as cheap and at least as good as B, and is cheaper or better. An
    entry is on the front if no entry dominates it. Entries with NaN are not on the front."""
    entries = pd.DataFrame({"cost": np.asarray(costs, float), "merit": np.asarray(merits, float)})
    highest = entries.dropna().groupby("cost")["merit"].max()  # lowest cost first
    front = highest[highest > highest.cummax().shift(fill_value=-np.inf)]
    return (entries["merit"] == entries["cost"].map(front)).to_numpy()


_ORDERS: Mapping[Any, Callable[[Iterable[str]], list[str]]] = {
    "criterion": partial(names.in_order, order=names.CRITERIA),
    "recovery": partial(names.in_order, order=names.RECOVERIES),
    "calibration": names.calibrations_in_order,
    "method": names.methods_in_order,
}
"""Column -> function that returns the column's values in the order of tables."""


def sort_cells(cells: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Sort cells by these columns; the values of columns in _ORDERS are in the order of tables."""

    def positions(values: pd.Series) -> pd.Series:
        order = _ORDERS.get(values.name)
        return values.map(order(values).index) if order else values

    return cells.sort_values(list(columns), key=positions, kind="stable")


def listed_cells(comparison: Comparison) -> pd.DataFrame:
    """All cells, sorted by ratio, gate, calibration set and method. The column "removed_text" has
    the gate, too, if the model's cells have several."""
    cells = comparison.cells.assign(removed_text=removed_share_texts(comparison.cells))
    return sort_cells(cells, "ratio", "gate", "calibration", "method")


def cells_without_recovery(comparison: Comparison, granularity: str = "") -> pd.DataFrame:
    """Pruned cells without recovery, sorted by ratio and criterion.

    Added columns: "allocation_name" and "parameters", which together spell the allocation.

    granularity: `channel` or `expert`; "" for all cells."""
    cells = comparison.pruned_cells
    cells = cells[(cells["recovery"] == "none") & (cells["ratio"] > 0)]
    if granularity:
        cells = cells[cells["granularity"] == granularity]
    parts = cells["allocation"].map(names.name_and_settings)
    cells = cells.assign(allocation_name=parts.str[0], parameters=parts.str[1])
    return sort_cells(cells, "ratio", "criterion")


def only_cell(cells: pd.DataFrame | pd.Series) -> int | None:
    """The only cell in the index of `cells`; None if there is none, or several."""
    return int(cells.index[0]) if len(cells) == 1 else None


def ratio_lines(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of methods that were run at FEWEST_RATIOS ratios or more, sorted by ratio, with the
    column "label" (of the method)."""
    ratio_counts = cells.groupby(settings.METHOD)["ratio"].transform("nunique")
    lines = cells[ratio_counts >= FEWEST_RATIOS]
    return lines.assign(label=settings.method_labels(lines)).sort_values("ratio", kind="stable")


def coverage_cells(comparison: Comparison) -> pd.DataFrame:
    """Cells without recovery that prune channels with the allocation COVERAGE, at the ratio closest
    to FIGURE_RATIO, with the columns "cell" and "label" (of the method)."""
    cells = cells_without_recovery(comparison, "channel")
    cells = cells[cells["allocation_name"] == COVERAGE]
    distances = (cells["ratio"] - FIGURE_RATIO).abs()
    nearest: pd.DataFrame = cells[distances == distances.min()]
    return nearest.assign(cell=nearest.index, label=settings.method_labels(nearest))


def calibrated_cells(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Pruned cells with a calibration set, sorted by ratio, method and number of tokens.

    Added columns: "read" (number of valid tokens that the model's pass read of the set; NaN if it
    is unknown) and "source" (identifier of the text: sets that read different numbers of tokens of
    one text have equal identifiers)."""
    reads = {}
    sources = {}
    for (model, calibration), report in study.calibrations.items():
        if model == comparison.model:
            reads[calibration] = passes.valid_tokens(report)
            sources[calibration] = str(report.get("sha256") or calibration)
    cells = comparison.pruned_cells
    cells = cells[cells["calibration"] != "none"]
    calibrations = cells["calibration"]
    cells = cells.assign(read=calibrations.map(reads), source=calibrations.map(sources))
    return sort_cells(cells, "ratio", "method", "read")
