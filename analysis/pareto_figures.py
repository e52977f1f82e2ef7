"""Accuracy against parameters, FLOPs and storage: a mark per cell, and the front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import names, style
from analysis.frames import groups, records
from analysis.pareto import AXES, FAMILIES
from analysis.style import Figure

TELLABLE = 10
"""Methods that get a mark of their own; more are told apart by what they remove."""

NARROWEST = 0.1
"""Share of the unpruned model's cost that an axis spans at least."""

_FRONT: Any = {"color": style.MUTED, "linewidth": 2.2, "alpha": 0.45}
_UNPRUNED: Any = {"color": style.INK, "linestyle": (0, (4, 2)), "linewidth": 0.9}

FAMILY_MARKS = {"expert": ("o", "#b35806"), "channel": ("^", "#2277bb"), "none": ("s", style.INK)}


def pareto_figure(found: pd.DataFrame, *, model: str, name: str) -> Figure:
    """Three panels from `against_cost` of one model, which share the axis of Avg."""
    pruned = found[(found["method"] != "none") & found["avg"].notna()]
    marks = _marks(pruned)
    with style.look():
        drawing = style.drawing(style.PAGE, 3.0 + 0.16 * -(-len(marks) // 3))
        grid = drawing.subplots(1, len(AXES), sharey=True, gridspec_kw={"wspace": 0.09})
        for axes, (axis, title) in zip(grid, AXES.items(), strict=True):
            _unpruned(axes, found)
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
    by_label: dict[str, Line2D] = {}
    for row in records(pruned):
        by_label.setdefault(_label(row, pruned), _mark(row, pruned))
    methods = [names.method(key) for key in names.methods_in_order(pruned["method"])]
    order = {label: place for place, label in enumerate(methods)}
    return dict(sorted(by_label.items(), key=lambda item: order.get(item[0], len(order))))


def _few(pruned: pd.DataFrame) -> bool:
    return bool(pruned["method"].nunique() <= TELLABLE)


def _label(row: Mapping[str, object], pruned: pd.DataFrame) -> str:
    if _few(pruned):
        return names.method(str(row["method"]))
    family = FAMILIES.get(str(row["granularity"]), str(row["granularity"]))
    return f"{family}, 4 bits" if row["bits"] == 4 else family


def _mark(row: Mapping[str, object], pruned: pd.DataFrame) -> Line2D:
    """Colour and shape by method or family; hollow for whole experts, half-full for four bits."""
    shape, shade = FAMILY_MARKS.get(str(row["granularity"]), ("D", style.OTHER))
    if _few(pruned):
        place = names.methods_in_order(pruned["method"]).index(str(row["method"]))
        shape, shade = style.MARKERS[place % len(style.MARKERS)], style.colour(str(row["method"]))
    fill = "left" if row["bits"] == 4 else "full"
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=shape,
        markersize=4.6,
        color=shade,
        fillstyle=fill,  # type: ignore[arg-type]
        markerfacecolor=style.SURFACE if row["granularity"] == "expert" and fill == "full" else shade,
        markerfacecoloralt=style.SURFACE,
        markeredgewidth=1.0,
        label=_label(row, pruned),
    )


def _cells(axes: Axes, pruned: pd.DataFrame, axis: str, marks: Mapping[str, Line2D]) -> None:
    ordered = pruned.sort_values(axis, kind="stable")
    shades = [str(marks[_label(row, pruned)].get_color()) for row in records(ordered)]
    bars = ordered[axis], ordered["low"], ordered["high"]
    axes.vlines(*bars, color=shades, linewidth=0.9, alpha=0.5, zorder=2)
    for _, cells in groups(ordered, ["method", "calibration"]):
        mark = marks[_label(records(cells)[0], pruned)]
        axes.plot(cells[axis], cells["avg"], color=mark.get_color(), linewidth=0.6, alpha=0.45, zorder=2)
        drawn = Line2D(cells[axis].to_numpy(), cells["avg"].to_numpy(), zorder=3)
        drawn.update_from(mark)
        axes.add_line(drawn)


def _front(axes: Axes, pruned: pd.DataFrame, axis: str) -> None:
    on = pruned[pruned[f"front_{axis}"]].sort_values(axis, kind="stable")
    axes.step(on[axis], on["avg"], where="post", zorder=1, **_FRONT)


def _unpruned(axes: Axes, found: pd.DataFrame) -> None:
    for row in records(found[found["method"] == "none"]):
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
