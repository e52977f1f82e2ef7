"""Accuracy against cost: every cell's Avg against parameters, FLOPs and bytes, with Pareto fronts;
and a comparison of channels with whole experts (MoE-Slimming, Table 10 and Fig. 9)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import names
from analysis.load import settings
from analysis.load.plans import BYTES
from analysis.load.reader import records
from analysis.load.study import Study
from analysis.outputs.captions import MEBIBYTE, SLIMMING, score_setup
from analysis.outputs.score_rows import (
    STORAGE_COSTS,
    Block,
    cells_by_ratio,
    cells_without_recovery,
    draw_unpruned,
    ratio_block,
    score_table,
    storage_points,
)
from analysis.registry import Results, output, per_model
from analysis.render import marks, style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Columns, Table, frame_and_formats
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


def average_and_costs(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Avg and costs of one model. A row per cell that has costs, including the unpruned model.

    Columns:

    - cell, method, calibration, ratio, recovery
    - kind: a key of KINDS; NaN where the plan cannot be read
    - pruned: text with the removed share
    - avg, low, high: Avg and its 95 % interval; NaN if the cell lacks one of the averaged scores
    - merit: `avg`, negated if lower is better
    - bits, and each of `plans.COSTS`
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
    rows = cells.join(scores).join(study.costs, how="inner").rename_axis("cell").reset_index()
    # BYTES: bytes of one parameter in bfloat16
    rows["storage_share"] = rows["storage_bytes"] / (BYTES * rows["parameters_unpruned"])
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
def pareto_table(results: Results, name: str) -> Table | None:
    """All methods: accuracy against parameters, FLOPs and storage, with Pareto fronts."""
    if results.study.costs.empty or not results.comparisons:
        return None
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
    averages = list(mean_quantities(results.comparisons))  # names: Avg, the name of a mean loss
    # Each frame has a column for each name in `averages`. A row has a number only in the column of
    # its model's average.
    values, low, high = (
        pd.DataFrame(
            {average: rows[column].where(rows["average_name"] == average) for average in averages}
        )
        for column in ("avg", "low", "high")
    )
    columns: Columns = {
        "Model": "model",
        "Criterion": "method",
        "Calibration": "calibration",
        "Pruned": "pruned",
        "Removes": "kind",
        **{average: (average, SCORE) for average in averages},
        "Parameters kept": ("parameters_kept", "{:.1%}"),
        "Routed kept": ("routed_kept", "{:.1%}"),
        "FLOPs": ("flops_ratio", "{:.1%}"),
        "Storage (MiB)": ("storage_bytes", "{:,.2f}"),
        "Front": "front",
    }
    return Table(
        name=name,
        title="All methods: accuracy against what is kept",
        caption=f"{mean_definitions(results.comparisons)} Parameters kept, routed kept, FLOPs: "
        "shares of all parameters, of those of routed experts, and of the unpruned model's FLOPs "
        "per token. Front: the costs by which no cheaper pruned model is as good. "
        f"{score_setup(results.study)}",
        **frame_and_formats(rows.join(values), columns),
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


_FRONT_STYLE: Any = {"color": style.MUTED, "linewidth": 2.2, "alpha": 0.45}
"""Style of the steps of a Pareto front."""


def _draw_front(axes: Axes, points: pd.DataFrame) -> None:
    """Draw the steps of a Pareto front through `points`, with the columns "x" and "y"."""
    ordered = points.sort_values("x", kind="stable")
    axes.step(ordered["x"], ordered["y"], where="post", zorder=1, **_FRONT_STYLE)


@output("pareto.front", chapter="cost", needs="pruned models of several costs")
@per_model()
def pareto_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Accuracy against parameters, FLOPs and storage, with Pareto fronts.

    None if all pruned cells have the same costs, rounded to per cent.
    """
    cells = average_and_costs(results.study, comparison)
    pruned = cells[(cells["method"] != "none") & cells["avg"].notna() & cells["kind"].notna()]
    if (pruned[list(COST_SHARES)].round(2).nunique() < 2).all():
        return None
    recoveries = pruned["recovery"].map(names.recovery_name)
    labels = map(names.comma_joined, pruned["kind"].map(KINDS), recoveries)
    points = pruned.assign(
        label=list(labels),
        line=pruned["method"] + pruned["calibration"],
        y=pruned["avg"],
    )
    entries = style.legend_entries(sorted(points["label"]))
    for entry in entries.values():
        entry.set_linewidth(0.5)
    frames = [
        points.assign(panel=title, x=points[cost], is_on_front=points[f"front_{cost}"]).sort_values(
            "x", kind="stable"
        )
        for cost, title in COST_SHARES.items()
    ]
    quantity = comparison.quantity(comparison.all_average_columns)
    drawing = marks.lines(
        pd.concat(frames),
        entries,
        marks.Axis("share of the unpruned model's", style.format_percent, (0, 1.05)),
        marks.Axis(f"{quantity.mean_name} ({quantity.direction})"),
        sharey=True,
    )
    fronts = [frame[frame["is_on_front"]] for frame in frames]
    for axes, front in zip(drawing.axes, fronts, strict=True):
        unpruned_entry = draw_unpruned(axes, comparison, comparison.all_average_columns)
        _draw_front(axes, front)
    front_entry = style.legend_entry("front", **_FRONT_STYLE)
    style.legend(drawing, [*entries.values(), front_entry, unpruned_entry], max_columns=3)
    caption = (
        "Each mark is a pruned model; colour and shape say what was removed, what takes its place "
        "and how the model was recovered. Thin lines join the ratios of a method; bars are 95 % "
        "intervals. Steps: the Pareto front, models that no other model beats at their cost or "
        "less; the table names them. Dashed: the unpruned model."
    )
    return Figure(name, f"Accuracy against cost: {comparison.model}", caption, drawing)


BOTH_GRANULARITIES = (
    f"cells of channels and of whole experts, without recovery, at several ratios, and {SLIMMING}"
)
"""Data that the comparisons of channels with whole experts need."""


def cells_of_both_granularities(comparison: Comparison) -> pd.DataFrame:
    """`cells_without_recovery` in the order of the study; a frame without rows if all of these
    cells have the same granularity."""
    cells = cells_without_recovery(comparison).sort_index()
    return cells if cells["granularity"].nunique() > 1 else cells[:0]


@score_table(
    "coverage.table10",
    "Channels and whole experts, benchmark by benchmark",
    (*names.COMMON_SENSE, MEAN),
    "Kept: share of the parameters of routed experts. Storage: weights on disk.",
    costs=STORAGE_COSTS,
    chapter="cost",
    filters="Model|Pruned",
    needs=BOTH_GRANULARITIES,
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
    cells = cells.assign(label=settings.method_labels(cells))
    points = storage_points(study, comparison, cells, names.COMMON_SENSE)
    target = mean_target(comparison, list(points.index), names.COMMON_SENSE)
    merit = comparison.quantity(target).sign * points["y"]
    return points.assign(front=pareto_front(points["x"], merit)).sort_values("x", kind="stable")


@output("coverage.fig9", chapter="cost", needs=BOTH_GRANULARITIES)
@per_model()
def frontier_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """MoE-Slimming's Figure 9: accuracy against storage, with the Pareto front.

    None unless the cells with a score and a storage have at least two ratios and both
    granularities.
    """
    points = storage_frontier(results.study, comparison)
    if points["ratio"].nunique() < 2 or points["granularity"].nunique() < 2:
        return None
    ordered = points.sort_values("label", kind="stable")
    entries = style.legend_entries(ordered["label"])
    for label in ordered.loc[ordered["granularity"] == "expert", "label"]:
        entries[label].set_markerfacecolor(style.SURFACE)
    y = marks.Axis("mean of six benchmarks", limits=marks.SCORES)
    drawing = marks.lines(ordered, entries, marks.Axis("storage (MiB)"), y, columns=1, height=3)
    _draw_front(drawing.axes[0], points[points["front"]])
    style.legend(drawing, entries.values(), max_columns=3)
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
