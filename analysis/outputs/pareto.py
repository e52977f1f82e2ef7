"""Accuracy against cost: every cell's Avg against parameters, FLOPs and bytes, with Pareto fronts; and a comparison of
channels with whole experts (MoE-Slimming, Table 10 and Fig. 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import names
from analysis.load import settings
from analysis.load.plans import BYTES
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import MEBIBYTE, SLIMMING, setting
from analysis.outputs.score_rows import STORED, Block, by_ratio, draw_unpruned, ratio_block, score_table, storage_points
from analysis.registry import Item, Results, output, per_model
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table, spelled
from analysis.stats.cell_scores import MEAN, averaged, mean_target, not_averaged
from analysis.stats.comparison import Comparison

AXES = {
    "parameters_kept": "Parameters",
    "flops_ratio": "FLOPs per token",
    "storage_share": "Storage",
}
"""Cost of a cell as a share of the unpruned model's cost -> its name."""

FAMILIES = {"expert": "whole experts", "channel": "channels", "none": "nothing removed"}
"""Granularity -> what is removed."""


def against_cost(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Avg and costs of each cell of a model whose cost was counted, including the unpruned model.

    Columns: cell, method, granularity, calibration, ratio, pruned (in words), bits, avg, low, high (95 %),
    parameters_kept, routed_kept, flops_ratio, storage_bytes, storage_share (of the unpruned model's bytes), and
    `front_<axis>` for each of AXES: whether no other pruned cell has at least its Avg at a lower cost, or a higher Avg
    at its cost or less. Avg is over all displayed columns in which more is better; a cell that lacks one has NaN and is
    on no front.
    """
    target = comparison.averaged(comparison.parts)
    low, high = comparison.interval(target)
    scores = pd.DataFrame({"avg": comparison.score(target), "low": low, "high": high})
    axes = comparison.cells[["criterion", "method", "granularity", "calibration", "ratio"]]
    axes = axes.assign(pruned=settings.pruned(comparison.cells))
    costs = study.costs.set_index("cell")[["bits", "parameters_kept", "routed_kept", "flops_ratio", "storage_bytes"]]
    rows = axes.join(scores).join(costs, how="inner").rename_axis("cell").reset_index()
    full = study.costs.set_index("cell")["parameters_unpruned"].reindex(rows["cell"]).to_numpy(float) * BYTES
    rows["storage_share"] = rows["storage_bytes"] / full
    pruned = rows["criterion"] != "none"
    for axis in AXES:
        rows[f"front_{axis}"] = False
        rows.loc[pruned, f"front_{axis}"] = front(rows.loc[pruned, axis], rows.loc[pruned, "avg"])
    return rows.drop(columns="criterion")


def front(costs: Sequence[float] | pd.Series, scores: Sequence[float] | pd.Series) -> np.ndarray:
    """Pareto front as booleans: the entries that no other beats.

    One entry beats another by a lower cost and at least its score, or by a higher score at its cost or less. Entries
    with NaN are not on the front."""
    cost, score = np.asarray(costs, float), np.asarray(scores, float)
    cheaper, better = cost[None, :] <= cost[:, None], score[None, :] >= score[:, None]
    strictly = (cost[None, :] < cost[:, None]) | (score[None, :] > score[:, None])
    return np.asarray(~(cheaper & better & strictly).any(axis=1) & ~np.isnan(cost + score))


@output("pareto", chapter="cost", filters="Model|Pruned|Removes")
def accuracy_and_cost(results: Results, name: str) -> list[Item]:
    """Accuracy against parameters, FLOPs and storage, with Pareto fronts."""
    if results.study.costs.empty or not results.comparisons:
        return []
    return [*pareto_figure(results, name), pareto_table(results, name)]


def pareto_table(results: Results, name: str) -> Table:
    """All methods in one table: Avg with its interval, kept parameters, FLOPs and bytes; most parameters first."""
    frames = [
        against_cost(results.study, comparison).assign(model=comparison.model) for comparison in results.comparisons
    ]
    rows = pd.concat(frames).sort_values(
        ["model", "parameters_kept", "avg"], ascending=[True, False, False], kind="stable", ignore_index=True
    )
    rows["storage_bytes"] /= MEBIBYTE
    rows["granularity"] = rows["granularity"].replace(FAMILIES)
    words = [word.split(" ")[0] for word in AXES.values()]
    marks = rows[[f"front_{axis}" for axis in AXES]].to_numpy(bool)
    rows["front"] = [
        "all" if row.all() else ", ".join(word for word, on in zip(words, row, strict=True) if on) for row in marks
    ]
    text = {
        "Model": "model",
        "Criterion": "method",
        "Calibration": "calibration",
        "Pruned": "pruned",
        "Removes": "granularity",
    }
    numbers = {
        "Avg": ("avg", SCORE),
        "Parameters kept": ("parameters_kept", "{:.1%}"),
        "Routed kept": ("routed_kept", "{:.1%}"),
        "FLOPs": ("flops_ratio", "{:.1%}"),
        "Storage (MiB)": ("storage_bytes", "{:,.2f}"),
    }
    shown = {**text, **{column: source for column, (source, _) in numbers.items()}, "Front": "front"}
    return Table(
        name=name,
        title="All methods: accuracy against what is kept",
        caption="Avg is the mean of all displayed columns. Parameters kept: share of all parameters; routed kept: of "
        "those of routed experts; FLOPs: per token, with the routing of the pruned model, of the unpruned model's. "
        f"Front: no pruned model here has at least this Avg at a lower cost of that kind. {setting(results.study)}",
        frame=spelled(rows, shown),
        formats={column: form for column, (_, form) in numbers.items()},
        blocks=("Model",),
        low=rows[["low"]].set_axis(["Avg"], axis=1),
        high=rows[["high"]].set_axis(["Avg"], axis=1),
        footnotes=not_averaged(results.comparisons),
    )


TELLABLE = 10
"""Largest number of methods with marks of their own; more methods are marked by what they remove."""

NARROWEST = 0.1
"""Smallest range of an axis, as a share of the unpruned model's cost."""

_FRONT: Any = {"color": style.MUTED, "linewidth": 2.2, "alpha": 0.45}

FAMILY_MARKS = {"expert": ("o", "#b35806"), "channel": ("^", "#2277bb"), "none": ("s", style.INK)}


@per_model()
def pareto_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """Draw `against_cost` of one model: a panel for each of AXES, with a shared axis of Avg."""
    cells = against_cost(results.study, comparison)
    pruned = cells[(cells["method"] != "none") & cells["avg"].notna()]
    if pruned.empty:
        return None
    marks = _marks(pruned)
    drawing = style.drawing(style.PAGE, 3.0 + 0.16 * -(-len(marks) // 3))
    grid = drawing.subplots(1, len(AXES), sharey=True, gridspec_kw={"wspace": 0.09})
    for axes, (axis, title) in zip(grid, AXES.items(), strict=True):
        unpruned = draw_unpruned(axes, comparison, comparison.averaged(comparison.parts))
        _cells(axes, pruned, axis, marks)
        front = pruned[pruned[f"front_{axis}"]].sort_values(axis, kind="stable")
        axes.step(front[axis], front["avg"], where="post", zorder=1, **_FRONT)
        axes.set_title(title, fontsize=8)
        axes.xaxis.set_major_formatter(lambda share, _: f"{share * 100:.4g} %")
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.margins(x=0.08)
        low, high = axes.get_xlim()
        # a narrow axis would exaggerate small differences
        lack = max(0.0, NARROWEST - (high - low)) / 2
        axes.set_xlim(low - lack, high + lack)
        axes.grid(axis="both")
    grid[0].set_ylabel("Avg")
    grid[len(AXES) // 2].set_xlabel("share of what the unpruned model has")
    style.legend(drawing, [*marks.values(), style.key("front", **_FRONT), unpruned], most=3)
    caption = (
        "Each mark is a pruned model: hollow where whole experts were removed, full where channels were, half-full "
        "where weights are stored in 4 bits; a thin line joins the ratios of one method, bars are 95 % intervals. The "
        "steps join the models that no other beats at their cost or less; dashed: the unpruned model."
    )
    return Figure(name, f"Accuracy against cost: {comparison.model}", caption, drawing)


def _marks(pruned: pd.DataFrame) -> dict[str, Line2D]:
    """Legend entries by label: one per method, or per family when there are more than TELLABLE methods."""
    methods = names.methods_in_order(pruned["method"])
    few = len(methods) <= TELLABLE
    marks: dict[str, Line2D] = {}
    for row in records(pruned.assign(label=_labels(pruned)).drop_duplicates("label")):
        granularity, label = row["granularity"], row["label"]
        shape, shade = FAMILY_MARKS.get(granularity, ("D", style.OTHER))
        if few:
            place = methods.index(row["method"])
            shape, shade = style.MARKERS[place % len(style.MARKERS)], style.colour(row["method"])
        # hollow marks for whole experts, half-full marks for 4 bits
        quantised = row["bits"] == 4
        marks[label] = style.key(
            label,
            linestyle="none",
            marker=shape,
            markersize=4.6,
            color=shade,
            markeredgewidth=1.0,
            fillstyle="left" if quantised else "full",
            markerfacecoloralt=style.SURFACE,
            markerfacecolor=style.SURFACE if granularity == "expert" and not quantised else shade,
        )
    order = {names.method(method): place for place, method in enumerate(methods)}
    return dict(sorted(marks.items(), key=lambda item: order.get(item[0], len(order))))


def _labels(pruned: pd.DataFrame) -> list[str]:
    """Label of each cell's mark: its method, or its family when there are more than TELLABLE methods."""
    if pruned["method"].nunique() <= TELLABLE:
        return [names.method(method) for method in pruned["method"]]
    families = [FAMILIES.get(kind, kind) for kind in pruned["granularity"]]
    return [f"{family}, 4 bits" if bits == 4 else family for family, bits in zip(families, pruned["bits"], strict=True)]


def _cells(axes: Axes, pruned: pd.DataFrame, axis: str, marks: Mapping[str, Line2D]) -> None:
    ordered = pruned.assign(label=_labels(pruned)).sort_values(axis, kind="stable")
    shades = [str(marks[label].get_color()) for label in ordered["label"]]
    bars = ordered[axis], ordered["low"], ordered["high"]
    axes.vlines(*bars, color=shades, linewidth=0.9, alpha=0.5, zorder=2)
    for _, cells in groups(ordered, ["method", "calibration"]):
        if len(cells) > 1:
            shade = marks[cells["label"].iloc[0]].get_color()
            axes.plot(cells[axis], cells["avg"], color=shade, linewidth=0.6, alpha=0.45, zorder=2)
    for key, cells in groups(ordered, ["label"]):
        style.draw(axes, marks[key["label"]], cells[axis], cells["avg"])


BOTH = f"cells of channels and of whole experts, without recovery, at several ratios, and {SLIMMING}"


def both_granularities(comparison: Comparison) -> pd.DataFrame:
    """The pruned cells without recovery, if these include both channels and whole experts; empty otherwise."""
    cells = comparison.cells[(comparison.cells["criterion"] != "none") & (comparison.cells["recovery"] == "none")]
    cells = cells[cells["ratio"] > 0].sort_values("ratio", kind="stable")
    return cells if cells["granularity"].nunique() > 1 else cells[:0]


@output("coverage.table10", chapter="cost", filters="Model|Pruned", needs=BOTH)
@score_table(
    "Channels and whole experts, benchmark by benchmark",
    (*names.COMMON_SENSE, MEAN),
    "Kept: share of the parameters of routed experts. Storage: weights on disk.",
    costs=STORED,
)
def channels_and_experts(results: Results, comparison: Comparison) -> Iterator[Block]:
    """MoE-Slimming's Table 10: channels and whole experts at each ratio, benchmark by benchmark."""
    for ratio, cells in by_ratio(both_granularities(comparison)):
        yield ratio_block(comparison, ratio, settings.method_labels(cells))


def storage_frontier(study: Study, comparison: Comparison) -> pd.DataFrame:
    """`storage_points` of `both_granularities` on `names.COMMON_SENSE`, with columns label (the method), granularity
    and front (whether the cell is on the Pareto front of storage and score)."""
    cells = both_granularities(comparison)
    points = storage_points(study, comparison, cells, names.COMMON_SENSE)
    points = points.assign(label=settings.method_labels(cells), granularity=cells["granularity"])
    return points.assign(front=front(points["storage"], points["score"]))


@output("coverage.fig9", chapter="cost", needs=BOTH)
@per_model()
def frontier_figure(results: Results, comparison: Comparison, name: str) -> Figure | None:
    """MoE-Slimming's Figure 9: accuracy against storage of channels and whole experts, with the Pareto front.

    A line per method over its ratios, hollow marks for whole experts.
    """
    points = storage_frontier(results.study, comparison).dropna(subset=["storage", "score"])
    if points["ratio"].nunique() < 2 or points["granularity"].nunique() < 2:
        return None
    drawing = style.drawing(style.PAGE, 3.0)
    axes = drawing.add_subplot()
    for at, (key, line) in enumerate(groups(points, ["label", "granularity"])):
        line = line.sort_values("storage", kind="stable")
        look = style.cycled(at)
        face = style.SURFACE if key["granularity"] == "expert" else look["color"]
        axes.vlines(line["storage"], line["low"], line["high"], color=look["color"], linewidth=1.0, alpha=0.5)
        look |= {"linewidth": 1.2, "markersize": 4.5, "markerfacecolor": face}
        axes.plot(line["storage"], line["score"], label=key["label"], **look)
    best = points[points["front"]].sort_values("storage", kind="stable")
    axes.step(best["storage"], best["score"], where="post", zorder=1, **_FRONT)
    axes.set(xlabel="storage (MiB)", ylabel="mean of six benchmarks")
    axes.grid()
    style.legend(drawing, axes.get_legend_handles_labels()[0], most=3)
    target = mean_target(comparison, list(points.index), names.COMMON_SENSE)
    caption = (
        f"{averaged(target, names.COMMON_SENSE)}, with 95 % intervals, against what the weights take on disk: a line "
        "per method over its ratios, hollow marks where whole experts were removed. The steps join the models that no "
        "other beats with as few bytes."
    )
    return Figure(name, f"Channels and whole experts, accuracy against storage: {comparison.model}", caption, drawing)
