"""Accuracy against cost: every cell's Avg against parameters, FLOPs and bytes, and the cells that no other beats; and
channels beside whole experts (MoE-Slimming, Table 10 and Fig. 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import names
from analysis.load import settings
from analysis.load.plans import BYTES
from analysis.load.reader import groups, records
from analysis.load.study import Study
from analysis.outputs.captions import MEBIBYTE, SLIMMING, setting
from analysis.outputs.score_rows import STORED, block_table, ratio_block
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import SCORE, Table
from analysis.stats.cell_scores import MEAN, averaged, cost, mean_target, not_averaged
from analysis.stats.comparison import Comparison

AXES = {
    "parameters_kept": "Parameters",
    "flops_ratio": "FLOPs per token",
    "storage_share": "Storage",
}
"""What a cell costs, each a share of what the unpruned model costs -> its name."""

FAMILIES = {"expert": "whole experts", "channel": "channels", "none": "nothing removed"}
"""Granularity -> what is removed."""


def against_cost(study: Study, comparison: Comparison) -> pd.DataFrame:
    """One row per cell of the model whose cost was counted, the unpruned model included.

    Columns: cell, method, granularity, calibration, ratio, pruned (in words), bits, avg, low, high (95 %),
    parameters_kept, routed_kept, flops_ratio, storage_bytes, storage_share (of the unpruned model's bytes), and
    `front_<axis>` for each of AXES: no other pruned cell has at least its Avg at a lower cost, or a higher Avg at its
    cost. Avg is over all displayed columns in which more is better; a cell that lacks one has NaN and is on no front.
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
    """Booleans: entries that no other beats. One beats another with a lower cost and at least its score, or with a
    higher score at its cost or less. NaN is never on the front."""
    cost, score = np.asarray(costs, float), np.asarray(scores, float)
    cheaper, better = cost[None, :] <= cost[:, None], score[None, :] >= score[:, None]
    strictly = (cost[None, :] < cost[:, None]) | (score[None, :] > score[:, None])
    return np.asarray(~(cheaper & better & strictly).any(axis=1) & ~np.isnan(cost + score))


def pareto_table(study: Study, comparisons: Sequence[Comparison], *, name: str = "pareto") -> Table:
    """All methods in one table: Avg with its interval beside what is kept, FLOPs and bytes, dearest first."""
    frames = [against_cost(study, comparison).assign(model=comparison.model) for comparison in comparisons]
    columns = ["Model", "Criterion", "Calibration", "Pruned", "Removes"]
    numbers = {
        "Avg": ("avg", SCORE),
        "Parameters kept": ("parameters_kept", "{:.1%}"),
        "Routed kept": ("routed_kept", "{:.1%}"),
        "FLOPs": ("flops_ratio", "{:.1%}"),
        "Storage (MiB)": ("storage_bytes", "{:,.2f}"),
    }
    shown = [*columns, *numbers, "Front"]
    frame = pd.DataFrame(columns=shown)
    ends = pd.DataFrame(columns=["low", "high"], dtype=float)
    if frames:
        rows = pd.concat(frames, ignore_index=True)
        order = ["model", "parameters_kept", "avg"]
        rows = rows.sort_values(order, ascending=[True, False, False], kind="stable", ignore_index=True)
        ends = rows[["low", "high"]]
        rows["storage_bytes"] /= MEBIBYTE
        frame = rows[[column for column, _ in numbers.values()]].set_axis(list(numbers), axis=1)
        frame = frame.assign(
            Model=rows["model"],
            Criterion=rows["method"].map(names.method),
            Calibration=rows["calibration"].map(names.calibration),
            Pruned=rows["pruned"],
            Removes=rows["granularity"].map(lambda kind: FAMILIES.get(kind, kind)),
            Front=_fronts(rows),
        )[shown]
    return Table(
        name=name,
        title="All methods: accuracy against what is kept",
        caption="Avg is the mean of all displayed columns. Parameters kept: share of all parameters; routed kept: of "
        "those of routed experts; FLOPs: per token, with the routing of the pruned model, of the unpruned model's. "
        f"Front: no pruned model here has at least this Avg at a lower cost of that kind. {setting(study)}",
        frame=frame,
        formats={shown_name: form for shown_name, (_, form) in numbers.items()},
        blocks=("Model",),
        low=ends[["low"]].set_axis(["Avg"], axis=1),
        high=ends[["high"]].set_axis(["Avg"], axis=1),
        footnotes=not_averaged(comparisons),
    )


def _fronts(rows: pd.DataFrame) -> list[str]:
    """For each row the costs at which nothing beats it, in words."""
    marks = rows[[f"front_{axis}" for axis in AXES]].to_numpy(bool)
    words = [word.split(" ")[0] for word in AXES.values()]
    return ["all" if row.all() else ", ".join(word for word, on in zip(words, row, strict=True) if on) for row in marks]


TELLABLE = 10
"""Methods that get a mark of their own; more are told apart by what they remove."""

NARROWEST = 0.1
"""Share of the unpruned model's cost that an axis spans at least."""

_FRONT: Any = {"color": style.MUTED, "linewidth": 2.2, "alpha": 0.45}
_UNPRUNED: Any = {"color": style.INK, "linestyle": (0, (4, 2)), "linewidth": 0.9}

FAMILY_MARKS = {"expert": ("o", "#b35806"), "channel": ("^", "#2277bb"), "none": ("s", style.INK)}


def pareto_figure(cells: pd.DataFrame, *, model: str, name: str) -> Figure:
    """Three panels from `against_cost` of one model, which share the axis of Avg."""
    pruned = cells[(cells["method"] != "none") & cells["avg"].notna()]
    marks = _marks(pruned)
    with style.look():
        drawing = style.drawing(style.PAGE, 3.0 + 0.16 * -(-len(marks) // 3))
        grid = drawing.subplots(1, len(AXES), sharey=True, gridspec_kw={"wspace": 0.09})
        for axes, (axis, title) in zip(grid, AXES.items(), strict=True):
            _unpruned(axes, cells)
            _cells(axes, pruned, axis, marks)
            _front(axes, pruned, axis)
            axes.set_title(title, fontsize=8)
            axes.xaxis.set_major_formatter(FuncFormatter(_share))
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axes.margins(x=0.08)
            _widen(axes)
            axes.grid(axis="both")
        grid[0].set_ylabel("Avg")
        grid[len(AXES) // 2].set_xlabel("share of what the unpruned model has")
        handles = [*marks.values(), _front_line(), _unpruned_line()]
        drawing.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7, handlelength=2.2)
    caption = (
        "Each mark is a pruned model: hollow where whole experts were removed, full where channels were, half-full "
        "where weights are stored in 4 bits; a thin line joins the ratios of one method, bars are 95 % intervals. The "
        "steps join the models that no other beats at their cost or less; dashed: the unpruned model."
    )
    return Figure(name, f"Accuracy against cost: {model}", caption, drawing)


def _marks(pruned: pd.DataFrame) -> dict[str, Line2D]:
    """Legend entries by label: one per method, or per family where there are too many to tell apart."""
    methods = names.methods_in_order(pruned["method"])
    few = len(methods) <= TELLABLE
    marks: dict[str, Line2D] = {}
    for row in records(pruned.assign(label=_labels(pruned)).drop_duplicates("label")):
        granularity, label = row["granularity"], row["label"]
        shape, shade = FAMILY_MARKS.get(granularity, ("D", style.OTHER))
        if few:
            place = methods.index(row["method"])
            shape, shade = style.MARKERS[place % len(style.MARKERS)], style.colour(row["method"])
        marks[label] = _mark(label, shape, shade, whole=granularity == "expert", quantised=row["bits"] == 4)
    order = {names.method(method): place for place, method in enumerate(methods)}
    return dict(sorted(marks.items(), key=lambda item: order.get(item[0], len(order))))


def _labels(pruned: pd.DataFrame) -> list[str]:
    """For each cell what its mark is called: its method, or its family where there are too many methods."""
    if pruned["method"].nunique() <= TELLABLE:
        return [names.method(method) for method in pruned["method"]]
    families = [FAMILIES.get(kind, kind) for kind in pruned["granularity"]]
    return [f"{family}, 4 bits" if bits == 4 else family for family, bits in zip(families, pruned["bits"], strict=True)]


def _mark(label: str, shape: str, shade: str, *, whole: bool, quantised: bool) -> Line2D:
    """Hollow for whole experts, half-full for four bits."""
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=shape,
        markersize=4.6,
        color=shade,
        fillstyle="left" if quantised else "full",
        markerfacecolor=style.SURFACE if whole and not quantised else shade,
        markerfacecoloralt=style.SURFACE,
        markeredgewidth=1.0,
        label=label,
    )


def _cells(axes: Axes, pruned: pd.DataFrame, axis: str, marks: Mapping[str, Line2D]) -> None:
    ordered = pruned.assign(label=_labels(pruned)).sort_values(axis, kind="stable")
    shades = [str(marks[label].get_color()) for label in ordered["label"]]
    bars = ordered[axis], ordered["low"], ordered["high"]
    axes.vlines(*bars, color=shades, linewidth=0.9, alpha=0.5, zorder=2)
    for _, cells in groups(ordered, ["method", "calibration"]):
        mark = marks[cells["label"].iloc[0]]
        axes.plot(cells[axis], cells["avg"], color=mark.get_color(), linewidth=0.6, alpha=0.45, zorder=2)
        drawn = Line2D(cells[axis].to_numpy(), cells["avg"].to_numpy(), zorder=3)
        drawn.update_from(mark)
        axes.add_line(drawn)


def _front(axes: Axes, pruned: pd.DataFrame, axis: str) -> None:
    on = pruned[pruned[f"front_{axis}"]].sort_values(axis, kind="stable")
    axes.step(on[axis], on["avg"], where="post", zorder=1, **_FRONT)


def _unpruned(axes: Axes, cells: pd.DataFrame) -> None:
    for row in records(cells[cells["method"] == "none"]):
        axes.axhspan(row["low"], row["high"], color=style.RULE, alpha=0.5, linewidth=0)
        axes.axhline(row["avg"], **_UNPRUNED)


def _front_line() -> Line2D:
    return Line2D([], [], label="front", **_FRONT)


def _unpruned_line() -> Line2D:
    return Line2D([], [], label=names.method("none"), **_UNPRUNED)


def _widen(axes: Axes) -> None:
    """At least NARROWEST from end to end, so that differences that hardly matter do not look like much."""
    low, high = axes.get_xlim()
    lack = max(0.0, NARROWEST - (high - low)) / 2
    axes.set_xlim(low - lack, high + lack)


def _share(value: float, _: int) -> str:
    return f"{value * 100:.4g} %"


@output("pareto", chapter="cost", filters="Model|Pruned|Removes")
def accuracy_and_cost(results: Results, name: str) -> list[Item]:
    """Accuracy against parameters, FLOPs and storage, and the plans that no other beats."""
    if results.study.costs.empty or not results.comparisons:
        return []
    figures = []
    for comparison, own in results.per_model(name):
        cells = against_cost(results.study, comparison)
        if cells.loc[cells["method"] != "none", "avg"].notna().any():
            figures.append(pareto_figure(cells, model=comparison.model, name=own))
    return [*figures, pareto_table(results.study, results.comparisons, name=name)]


BOTH = f"cells of channels and of whole experts, without recovery, at several ratios, and {SLIMMING}"


def both_granularities(comparison: Comparison) -> pd.DataFrame:
    """The pruned cells that were not recovered, where some lost channels and some whole experts; empty elsewhere."""
    cells = comparison.cells[(comparison.cells["criterion"] != "none") & (comparison.cells["recovery"] == "none")]
    cells = cells[cells["ratio"] > 0].sort_values("ratio", kind="stable")
    return cells if cells["granularity"].nunique() > 1 else cells[:0]


@output("coverage.table10", chapter="cost", filters="Model|Pruned", needs=BOTH)
def channels_and_experts(results: Results, name: str) -> Table:
    """MoE-Slimming's Table 10: channels beside whole experts, benchmark by benchmark, at each ratio."""
    blocks = []
    for comparison in results.comparisons:
        cells = both_granularities(comparison)
        for key, at_ratio in groups(cells, ["ratio"]):
            blocks.append(ratio_block(comparison, key["ratio"], settings.method_labels(at_ratio)))
    return block_table(
        results.study,
        blocks,
        columns=(*names.COMMON_SENSE, MEAN),
        name=name,
        title="Channels and whole experts, benchmark by benchmark",
        caption="Kept: share of the parameters of routed experts. Storage: weights on disk.",
        costs=STORED,
    )


def storage_frontier(study: Study, comparison: Comparison) -> pd.DataFrame:
    """One row per cell of `both_granularities`: label (its method), granularity, ratio, storage (MiB), score (mean of
    `names.COMMON_SENSE`), low, high (95 %), and front: no other has at least its score with fewer bytes."""
    cells = both_granularities(comparison)
    columns = ["label", "granularity", "ratio", "storage", "score", "low", "high", "front"]
    target = mean_target(comparison, list(cells.index), names.COMMON_SENSE)
    if not target:
        return pd.DataFrame(columns=columns)
    low, high = comparison.interval(target)
    points = pd.DataFrame(
        {
            "label": settings.method_labels(cells),
            "granularity": cells["granularity"],
            "ratio": cells["ratio"],
            "storage": cost(study, list(cells.index), "storage_bytes") / MEBIBYTE,
            "score": comparison.score(target)[cells.index],
            "low": low[cells.index],
            "high": high[cells.index],
        }
    )
    return points.assign(front=front(points["storage"], points["score"]))[columns]


def frontier_figure(study: Study, comparison: Comparison, *, name: str) -> Figure | None:
    """Fig. 9 from `storage_frontier`: a line per method over its ratios, hollow marks for whole experts."""
    points = storage_frontier(study, comparison).dropna(subset=["storage", "score"])
    if points["ratio"].nunique() < FEWEST_RATIOS or points["granularity"].nunique() < 2:
        return None
    with style.look():
        drawing = style.drawing(style.PAGE * 0.75, 3.0)
        axes = drawing.add_subplot()
        for at, (key, line) in enumerate(groups(points, ["label", "granularity"])):
            line = line.sort_values("storage", kind="stable")
            shade, marker = _LINES[at % len(_LINES)], style.MARKERS[at % len(style.MARKERS)]
            face = style.SURFACE if key["granularity"] == "expert" else shade
            axes.vlines(line["storage"], line["low"], line["high"], color=shade, linewidth=1.0, alpha=0.5)
            axes.plot(
                line["storage"],
                line["score"],
                marker,
                linestyle="-",
                linewidth=1.2,
                markersize=4.5,
                color=shade,
                markerfacecolor=face,
                label=key["label"],
            )
        best = points[points["front"]].sort_values("storage", kind="stable")
        axes.step(best["storage"], best["score"], where="post", zorder=1, **_FRONT)
        axes.set(xlabel="storage (MiB)", ylabel="mean of six benchmarks")
        axes.grid()
        drawing.legend(loc="outside lower center", ncols=3, fontsize=7)
    target = mean_target(comparison, list(points.index), names.COMMON_SENSE)
    caption = (
        f"{averaged(target, names.COMMON_SENSE)}, with 95 % intervals, against what the weights take on disk: a line "
        "per method over its ratios, hollow marks where whole experts were removed. The steps join the models that no "
        "other beats with as few bytes."
    )
    return Figure(name, f"Channels and whole experts, accuracy against storage: {comparison.model}", caption, drawing)


FEWEST_RATIOS = 2
"""Ratios from which on there is a line to draw."""
_LINES = ("#2277bb", "#ee7733", "#117733", "#aa4499", "#15181e", "#b39a25", "#cc6677", "#44aa99")


@output("coverage.fig9", chapter="cost", needs=BOTH)
def accuracy_by_granularity(results: Results, name: str) -> list[Item | None]:
    """MoE-Slimming's Figure 9: the front of accuracy and storage of channels and of whole experts."""
    return [frontier_figure(results.study, comparison, name=own) for comparison, own in results.per_model(name)]
