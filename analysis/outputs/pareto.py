"""Accuracy against cost: every cell's Avg against parameters, FLOPs and bytes, with Pareto fronts;
and a comparison of channels with whole experts (MoE-Slimming, Table 10 and Fig. 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis import names
from analysis.load import settings
from analysis.load.plans import BYTES
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import MEBIBYTE, SLIMMING, score_setup
from analysis.outputs.score_rows import (
    STORAGE_COSTS,
    Block,
    cells_by_ratio,
    draw_storage,
    draw_unpruned,
    ratio_block,
    score_table,
    storage_points,
)
from analysis.registry import Item, Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table, display_frame
from analysis.stats.cell_scores import (
    MEAN,
    mean_definitions,
    mean_target,
    mean_text,
    notes_on_average,
)
from analysis.stats.comparison import Comparison, mean_quantities

COST_SHARES = {
    "parameters_kept": "Parameters",
    "flops_ratio": "FLOPs per token",
    "storage_share": "Storage",
}
"""Column with a cost, as a share of the unpruned model's cost -> its display name."""

KINDS = {
    "expert": "whole experts",
    "constant": "experts, replaced by constants",
    "merged": "experts, merged into others",
    "channel": "channels",
    "none": "nothing removed",
}
"""Kind of a pruned cell -> description of what is removed, and of what replaces it."""

SHAPES = {"expert": "o", "constant": "D", "merged": "s", "channel": "^", "none": "*"}
"""Kind of a pruned cell -> its marker."""


def average_and_costs(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Avg and costs of one model. A row per cell that has costs, including the unpruned model.

    Columns:

    - cell, method, calibration, ratio, recovery
    - kind: a key of KINDS; NaN where the plan cannot be read
    - pruned: text with the removed share
    - avg, low, high: Avg and its 95 % interval; NaN if the cell lacks one of the averaged scores
    - merit: `avg`, negated if lower is better
    - bits, parameters_kept, routed_kept, flops_ratio, storage_bytes: see `plans.COSTS`
    - storage_share: `storage_bytes` as a share of the unpruned model's bytes in bfloat16
    - front_<cost>, for each column <cost> in COST_SHARES: whether the cell is on the Pareto front
      of low <cost> and high `merit` among the pruned cells
    """
    target = comparison.all_average_columns
    average, low, high = comparison.displayed_scores(target)
    scores = pd.DataFrame({"avg": average, "low": low, "high": high})
    cells = comparison.cells[["criterion", "method", "calibration", "ratio", "recovery"]]
    cells = cells.assign(
        pruned=settings.removed_share_texts(comparison.cells), kind=_kinds(study, comparison.cells)
    )
    costs = study.costs.set_index("cell")[
        ["bits", "parameters_kept", "routed_kept", "flops_ratio", "storage_bytes"]
    ]
    rows = cells.join(scores).join(costs, how="inner").rename_axis("cell").reset_index()
    unpruned_parameters = study.costs.set_index("cell")["parameters_unpruned"].reindex(rows["cell"])
    # BYTES: bytes of one parameter in bfloat16
    rows["storage_share"] = rows["storage_bytes"] / (BYTES * unpruned_parameters.to_numpy(float))
    rows["merit"] = comparison.quantity(target).sign * rows["avg"]
    is_pruned = rows["criterion"] != "none"
    pruned = rows[is_pruned]
    for cost in COST_SHARES:
        rows[f"front_{cost}"] = False
        rows.loc[is_pruned, f"front_{cost}"] = pareto_front(pruned[cost], pruned["merit"])
    return rows.drop(columns="criterion")


def _kinds(study: Study, cells: pd.DataFrame) -> pd.Series:
    """The kind of each cell, a key of KINDS; NaN where the plan cannot be read."""
    # an unpruned model has no plan
    is_known = (cells["granularity"] == "none") | cells.index.isin(study.retained["cell"])
    kinds = cells["granularity"].where(is_known)
    for kind in ("constant", "merged"):
        cells_of_kind = study.retained.loc[study.retained[kind].astype(bool), "cell"]
        kinds[kinds.index.isin(cells_of_kind)] = kind
    return kinds


def pareto_front(
    costs: Sequence[float] | pd.Series, merits: Sequence[float] | pd.Series
) -> np.ndarray:
    """Booleans (entries,): whether an entry is on the Pareto front of low cost and high merit.

    A dominates B if A is at least as cheap and at least as good as B, and is cheaper or better. An
    entry is on the front if no entry dominates it. Entries with NaN are not on the front."""
    cost_values = np.asarray(costs, float)
    merit_values = np.asarray(merits, float)
    # element [b, a] of the next three arrays says how entry a compares with entry b
    is_as_cheap = cost_values[None, :] <= cost_values[:, None]
    is_as_good = merit_values[None, :] >= merit_values[:, None]
    is_cheaper_or_better = (cost_values[None, :] < cost_values[:, None]) | (
        merit_values[None, :] > merit_values[:, None]
    )
    is_dominated = (is_as_cheap & is_as_good & is_cheaper_or_better).any(axis=1)
    return np.asarray(~is_dominated & ~np.isnan(cost_values + merit_values))


@output("pareto", chapter="cost", filters="Model|Pruned|Removes")
def accuracy_and_cost(results: Results, name: str) -> list[Item]:
    """All methods: accuracy against parameters, FLOPs and storage, with Pareto fronts."""
    if results.study.costs.empty or not results.comparisons:
        return []
    return [pareto_table(results, name)]


@output("pareto.front", chapter="cost", needs="pruned models of several costs")
@per_model()
def fronts(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Accuracy against parameters, FLOPs and storage, with Pareto fronts."""
    return None if results.study.costs.empty else pareto_figure(results.study, comparison, name)


def pareto_table(results: Results, name: str) -> Table:
    """`average_and_costs` of all models as a table."""
    frames = []
    for comparison in results.comparisons:
        average_name = comparison.quantity(comparison.all_average_columns).mean_name
        model_rows = average_and_costs(results.study, comparison)
        frames.append(model_rows.assign(model=comparison.model, average_name=average_name))
    rows = pd.concat(frames).sort_values(
        ["model", "parameters_kept", "merit"],
        ascending=[True, False, False],
        kind="stable",
        ignore_index=True,
    )
    rows["storage_bytes"] /= MEBIBYTE
    rows["kind"] = rows["kind"].replace(KINDS)
    rows["front"] = _fronts_in_words(rows)
    text_columns = {
        "Model": "model",
        "Criterion": "method",
        "Calibration": "calibration",
        "Pruned": "pruned",
        "Removes": "kind",
    }
    averages = list(mean_quantities(results.comparisons))  # names: Avg, the name of a mean loss
    # Each frame has a column for each name in `averages`. A row has a number only in the column of
    # its model's average.
    values, low, high = (
        pd.DataFrame(
            {average: rows[column].where(rows["average_name"] == average) for average in averages}
        )
        for column in ("avg", "low", "high")
    )
    # displayed column -> (column of `rows` or `values`, format)
    number_columns = {
        **{average: (average, SCORE) for average in averages},
        "Parameters kept": ("parameters_kept", "{:.1%}"),
        "Routed kept": ("routed_kept", "{:.1%}"),
        "FLOPs": ("flops_ratio", "{:.1%}"),
        "Storage (MiB)": ("storage_bytes", "{:,.2f}"),
    }
    columns = {
        **text_columns,
        **{column: source for column, (source, _) in number_columns.items()},
        "Front": "front",
    }
    return Table(
        name=name,
        title="All methods: accuracy against what is kept",
        caption=f"{mean_definitions(results.comparisons)} Parameters kept, routed kept, FLOPs: "
        "shares of all parameters, of those of routed experts, and of the unpruned model's FLOPs "
        "per token. Front: the costs by which no cheaper pruned model is as good. "
        f"{score_setup(results.study)}",
        frame=display_frame(rows.join(values), columns),
        formats={column: form for column, (_, form) in number_columns.items()},
        blocks=("Model",),
        low=low,
        high=high,
        footnotes=notes_on_average(results.comparisons),
    )


def _fronts_in_words(rows: pd.DataFrame) -> list[str]:
    """For each row of `average_and_costs`, the costs by which the cell is on a Pareto front: "all"
    or a text such as "Parameters, Storage"."""
    texts = []
    for row in records(rows):
        costs = [name.split(" ")[0] for cost, name in COST_SHARES.items() if row[f"front_{cost}"]]
        texts.append("all" if len(costs) == len(COST_SHARES) else ", ".join(costs))
    return texts


NARROWEST_RANGE = 0.1
"""Smallest range of an axis, as a share of the unpruned model's cost."""

_FRONT_STYLE: Any = {"color": style.MUTED, "linewidth": 2.2, "alpha": 0.45}
"""Style of the steps of a Pareto front."""
_NUMBER_STYLE: Any = {"color": style.INK, "markeredgewidth": 0.3}
"""Style of the numbers of models in the legend."""


def pareto_figure(study: Study, comparison: Comparison, name: str) -> Figure | None:
    """Avg of one model's cells against each cost in COST_SHARES, a panel per cost.

    None if all pruned cells have the same costs, rounded to per cent.
    """
    cells = average_and_costs(study, comparison)
    pruned = cells[(cells["method"] != "none") & cells["avg"].notna() & cells["kind"].notna()]
    if (pruned[list(COST_SHARES)].round(2).nunique() < 2).all():
        return None
    quantity = comparison.quantity(comparison.all_average_columns)
    display_name = partial(names.recovery_name, none="not recovered")
    pruned = pruned.assign(recovery=pruned["recovery"].map(display_name))
    recoveries = names.in_order(pruned["recovery"], map(display_name, names.RECOVERIES))
    shades = {
        recovery: style.SHADES[number % len(style.SHADES)]
        for number, recovery in enumerate(recoveries)
    }
    is_on_front = pruned[[f"front_{cost}" for cost in COST_SHARES]].any(axis=1)
    cells_on_fronts = pruned[is_on_front].sort_values("merit", kind="stable")
    number_of_cell = {cell: number for number, cell in enumerate(cells_on_fronts["cell"], start=1)}
    drawing = style.drawing(style.PAGE, 3.2)
    grid = drawing.subplots(1, len(COST_SHARES), sharey=True, gridspec_kw={"wspace": 0.09})
    for axes, (cost, title) in zip(grid, COST_SHARES.items(), strict=True):
        unpruned_entry = draw_unpruned(axes, comparison, comparison.all_average_columns)
        _draw_marks(axes, pruned, cost, shades)
        front_cells = pruned[pruned[f"front_{cost}"]].sort_values(cost, kind="stable")
        axes.step(front_cells[cost], front_cells["avg"], where="post", zorder=1, **_FRONT_STYLE)
        _draw_numbers(axes, front_cells, cost, number_of_cell)
        axes.set_title(title, fontsize=8)
        _format_share_axis(axes)
    grid[0].set_ylabel(f"{quantity.mean_name} ({quantity.direction})")
    grid[len(COST_SHARES) // 2].set_xlabel("share of what the unpruned model has")
    kinds = [kind for kind in KINDS if kind in set(pruned["kind"])]
    legend_entries = [
        style.legend_entry(KINDS[kind], **_mark_style(kind, style.MUTED)) for kind in kinds
    ]
    if len(shades) > 1:
        legend_entries += [
            style.legend_entry(recovery, color=shade, linewidth=5)
            for recovery, shade in shades.items()
        ]
    legend_entries += [style.legend_entry("front", **_FRONT_STYLE), unpruned_entry]
    labels = settings.method_labels(comparison.cells)
    for row in records(cells_on_fronts):
        number = number_of_cell[row["cell"]]
        label = f"{labels[row['cell']]}, {row['pruned']}"
        look = {"linestyle": "none", "marker": f"${number}$", "markersize": 5, **_NUMBER_STYLE}
        legend_entries.append(style.legend_entry(label, **look))
    style.legend(drawing, legend_entries, most=3)
    colour_sentence = " Its colour says how the model was recovered." if len(shades) > 1 else ""
    caption = (
        "Each mark is a pruned model. Its shape says what was removed and what takes its place."
        f"{colour_sentence} Thin lines join the ratios of a method; bars are 95 % intervals. Steps "
        "and numbers: the Pareto front, models that no other model beats at their cost or less. "
        "Dashed: the unpruned model."
    )
    return Figure(name, f"Accuracy against cost: {comparison.model}", caption, drawing)


def _format_share_axis(axes: Axes) -> None:
    """Label the horizontal axis in per cent, and widen its range to at least NARROWEST_RANGE,
    because a narrower range would exaggerate small differences."""
    axes.xaxis.set_major_formatter(lambda share, _: f"{share * 100:.4g} %")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.margins(x=0.08)
    low, high = axes.get_xlim()
    margin = max(0.0, NARROWEST_RANGE - (high - low)) / 2
    axes.set_xlim(low - margin, high + margin)
    axes.grid(axis="both")


def _mark_style(kind: str, shade: str) -> dict[str, Any]:
    """Style of the marks of cells of the kind `kind`, a key of KINDS, in the colour `shade`."""
    face = style.SURFACE if kind == "expert" else shade
    look = {"linestyle": "none", "markersize": 4.6, "markeredgewidth": 1.0}
    return {**look, "marker": SHAPES[kind], "color": shade, "markerfacecolor": face}


def _draw_marks(axes: Axes, pruned: pd.DataFrame, cost: str, shades: Mapping[str, str]) -> None:
    """Draw Avg against one cost: a mark and an interval for each row of `pruned`, and thin lines
    between the rows of one method and calibration set.

    pruned: rows of `average_and_costs`, with display names in the column `recovery`; cost: a key of
    COST_SHARES; shades: display name of a recovery -> colour."""
    ordered = pruned.sort_values(cost, kind="stable")
    colours = list(ordered["recovery"].map(shades))
    axes.vlines(
        ordered[cost],
        ordered["low"],
        ordered["high"],
        color=colours,
        linewidth=0.9,
        alpha=0.35,
        zorder=2,
    )
    for _, cells in groups(ordered, ["method", "calibration"]):
        if len(cells) > 1:
            # all cells of a method have the same recovery
            shade = shades[cells["recovery"].iloc[0]]
            axes.plot(cells[cost], cells["avg"], color=shade, linewidth=0.6, alpha=0.45, zorder=2)
    for key, cells in groups(ordered, ["kind", "recovery"]):
        mark = style.legend_entry("", **_mark_style(key["kind"], shades[key["recovery"]]))
        style.draw_line(axes, mark, cells[cost], cells["avg"])


def _draw_numbers(
    axes: Axes, front_cells: pd.DataFrame, cost: str, number_of_cell: Mapping[int, int]
) -> None:
    """Write the numbers of the cells on a front next to the cells' marks.

    front_cells: rows of `average_and_costs`; cost: a key of COST_SHARES."""
    for _, point_cells in groups(front_cells, [cost, "avg"]):
        text = ", ".join(str(number_of_cell[cell]) for cell in point_cells["cell"])
        point = point_cells[cost].iloc[0], point_cells["avg"].iloc[0]
        # at the upper left of a mark, where the steps of the front do not pass
        offset: Any = {
            "textcoords": "offset points",
            "xytext": (-3, 2),
            "ha": "right",
            "va": "bottom",
        }
        axes.annotate(text, point, fontsize=6.5, fontweight="bold", **offset)


BOTH_GRANULARITIES = (
    f"cells of channels and of whole experts, without recovery, at several ratios, and {SLIMMING}"
)
"""Data that the comparisons of channels with whole experts need."""


def cells_of_both_granularities(comparison: Comparison) -> pd.DataFrame:
    """The pruned cells with a ratio above 0 and without recovery, sorted by ratio. A frame without
    rows if all of these cells have the same granularity."""
    cells = comparison.cells[
        (comparison.cells["criterion"] != "none") & (comparison.cells["recovery"] == "none")
    ]
    cells = cells[cells["ratio"] > 0].sort_values("ratio", kind="stable")
    return cells if cells["granularity"].nunique() > 1 else cells[:0]


@output("coverage.table10", chapter="cost", filters="Model|Pruned", needs=BOTH_GRANULARITIES)
@score_table(
    "Channels and whole experts, benchmark by benchmark",
    (*names.COMMON_SENSE, MEAN),
    "Kept: share of the parameters of routed experts. Storage: weights on disk.",
    costs=STORAGE_COSTS,
)
def channels_and_experts(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 10: channels and whole experts at each ratio, benchmark by benchmark."""
    for ratio, cells in cells_by_ratio(cells_of_both_granularities(comparison)):
        yield ratio_block(comparison, ratio, settings.method_labels(cells))


def storage_frontier(study: Study, comparison: Comparison) -> pd.DataFrame:
    """`storage_points` of `cells_of_both_granularities`, with scores on `names.COMMON_SENSE`.

    Three more columns:

    - label: label of the method
    - granularity: granularity of the cell
    - front: whether the cell is on the Pareto front of low storage and high merit
    """
    cells = cells_of_both_granularities(comparison)
    points = storage_points(study, comparison, cells, names.COMMON_SENSE)
    points = points.assign(label=settings.method_labels(cells), granularity=cells["granularity"])
    return points.assign(front=pareto_front(points["storage"], points["merit"]))


@output("coverage.fig9", chapter="cost", needs=BOTH_GRANULARITIES)
@per_model()
def frontier_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """MoE-Slimming's Figure 9: accuracy against storage, with the Pareto front.

    None unless the cells with a score and a storage have at least two ratios and both
    granularities.
    """
    points = storage_frontier(results.study, comparison).dropna(subset=["storage", "score"])
    if points["ratio"].nunique() < 2 or points["granularity"].nunique() < 2:
        return None
    drawing = style.drawing(style.PAGE, 3.0)
    axes = drawing.add_subplot()
    for number, (key, line) in enumerate(groups(points, ["label", "granularity"])):
        ordered = line.sort_values("storage", kind="stable")
        look = style.line_look(number)
        face = style.SURFACE if key["granularity"] == "expert" else look["color"]
        draw_storage(axes, ordered, label=key["label"], markerfacecolor=face, **look)
    front_points = points[points["front"]].sort_values("storage", kind="stable")
    axes.step(
        front_points["storage"], front_points["score"], where="post", zorder=1, **_FRONT_STYLE
    )
    axes.set_ylabel("mean of six benchmarks")
    axes.grid()
    style.legend(drawing, axes.get_legend_handles_labels()[0], most=3)
    target = mean_target(comparison, list(points.index), names.COMMON_SENSE)
    caption = (
        f"{mean_text(target, names.COMMON_SENSE)}, with 95 % intervals, against the size of the "
        "weights on disk: a line per method over its ratios, hollow marks where whole experts were "
        "removed. Steps: the Pareto front, models that no other beats with as few bytes."
    )
    return Figure(
        name,
        f"Channels and whole experts, accuracy against storage: {comparison.model}",
        caption,
        drawing,
    )
