"""Figures: charts declared from data frames in Vega-Lite, and their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.render.vega import VEGA_LITE

INK, MUTED, RULE, SURFACE = "#15181e", "#667080", "#d4d9e0", "#fdfdfe"
"""Colours of text, references, grid lines and the background. The page replaces them by those of
its theme, so marks with colours of their own use others."""
CRITERIA = {
    "none": INK,
    "frequency": "#b39a25",
    "seer": "#cc6677",
    "ean": "#117733",
    "reap": "#2277bb",
    "mone": "#aa4499",
    "mone_freq": "#882255",
    "man": "#ee7733",
    "msan": "#bb3311",
    "gate_ean": "#44aa99",
    "gate_energy": "#66aadd",
    "easy_ep": "#997700",
    "exact_damage": "#4b3fa0",
    "aimer": "#8a8a2b",
    "magnitude": "#7a7a7a",
    "random": "#a9a9a9",
    "heapr": "#d1495b",
    "camera": "#00798c",
    "channel_weight": "#8d6b94",
    "channel_activation": "#1f5fa8",
    "channel_weight_activation": "#5aa9e6",
    "channel_gradient": "#c98a1b",
    "channel_activation_gradient": "#6a994e",
    "snip": "#9c6644",
    "channel_random": "#a0a7ab",
}
"""Colours of criteria (after Paul Tol's schemes)."""
OTHER = "#5b8c9c"
"""Colour of criteria and benchmarks without a colour of their own."""
SHADES = ("#2277bb", "#ee7733", "#117733", "#aa4499", "#b39a25", "#cc6677", "#44aa99", "#4b3fa0")
"""Colours of lines that do not stand for criteria."""
SEQUENTIAL = "yellowgreenblue"
"""Colour scheme from light to dark, also when printed in grey."""
SHADE = {"scheme": SEQUENTIAL, "domain": [0, 1], "clamp": True}
"""Scale of shades from 0 for light to 1 for dark."""
CONFIG: dict[str, Any] = {
    "background": SURFACE,
    "font": "system-ui, sans-serif",
    "axis": {"labelColor": INK, "titleColor": INK, "gridColor": RULE, "domainColor": RULE}
    | {"tickColor": RULE, "titleFontWeight": "normal", "labelLimit": 260},
    "header": {"labelColor": INK, "labelFontWeight": "bold", "labelAnchor": "start"}
    | {"labelLimit": 420},
    "legend": {"labelColor": INK, "titleColor": INK, "symbolFillColor": MUTED, "labelLimit": 400}
    | {"orient": "bottom", "columns": 4, "title": None, "symbolLimit": 60},
    "text": {"color": INK},
    "view": {"stroke": None},
}
"""Look of all figures."""

MENUS = ("Model", "Calibration", "Pruned", "Allocation", "Recovery", "Metric")
"""Columns of figures and tables by which the page's menus filter them."""
Layer = dict[str, Any]
"""A layer of marks in Vega-Lite."""


@dataclass(frozen=True, eq=False)
class Figure:
    """A chart of the rows of a data frame, with a panel for each value of a column."""

    title: str
    caption: str
    rows: pd.DataFrame
    """The data behind the figure, a row per mark. The page's menus filter the rows by the columns
    that have a menu's name, such as Model."""
    layers: Sequence[Layer]
    """Layers of each panel, see `layer`."""
    columns: int = 3
    """Most panels side by side."""
    size: tuple[Any, Any] = (260, 170)
    """Width and height of a panel in pixels; {"step": 20} gives each label 20 pixels."""
    independent: Sequence[str] = ()
    """Channels with a scale of their own in each panel, such as x."""
    panel: str = "panel"
    """Column with the titles of panels."""
    initial: Mapping[str, str] = field(default_factory=dict)
    """Menu -> its value that the figure shows while the menu is on "all"."""
    name: str = ""
    """Stem of the figure's files, such as unified.fig2; see `Output.items`."""


def layer(
    mark: str, look: Mapping[str, Any] | None = None, where: str = "", **encoding: Any
) -> Layer:
    """A layer of marks, one for each row.

    look: properties of the marks; where: expression that selects rows, such as "datum.front";
    encoding: channel -> a column's name, or one of `number`, `label`, `value`.
    """
    channels = {
        channel: {"field": source} if isinstance(source, str) else source
        for channel, source in encoding.items()
    }
    marks = {"type": mark, "tooltip": True, **(look or {})}
    layer: Layer = {"mark": marks, "encoding": channels}
    if where:
        layer["transform"] = [{"filter": where}]
    return layer


def number(column: str, title: str | None = None, **options: Any) -> dict[str, Any]:
    """A channel that shows the numbers of a column."""
    return {"field": column, "type": "quantitative", "title": title, **options}


def label(column: str, title: str | None = None, **options: Any) -> dict[str, Any]:
    """A channel that shows the labels of a column, in the order of the rows."""
    return {"field": column, "type": "nominal", "sort": None, "title": title, **options}


SHARE = {"scale": {"domain": [0, 1]}}
"""Options of an axis from 0 to 1."""
TOP = {"orient": "top", "labelAngle": 0}
"""Axis with labels above a map."""
PERCENT = {"axis": {"format": ".0%"}}
"""Options of an axis in per cent."""


def colour(method: str) -> str:
    """The colour of the method's criterion."""
    return CRITERIA.get(names.method_parts(method)[0], OTHER)


def colours(
    labels: Iterable[str], colour_of_label: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Channels of lines and points with a colour and a shape for each label.

    colour_of_label: label -> colour, OTHER for labels without an entry; without it, SHADES.
    """
    domain = list(dict.fromkeys(labels))
    shades = [
        colour_of_label.get(label, OTHER) if colour_of_label else SHADES[number % len(SHADES)]
        for number, label in enumerate(domain)
    ]
    return {
        "color": label("label", scale={"domain": domain, "range": shades}),
        "shape": label("label", scale={"domain": domain}),
    }


def lines(
    rows: pd.DataFrame, x: Mapping[str, Any], y: Mapping[str, Any], shown: Mapping[str, Any]
) -> list[Layer]:
    """Lines with markers.

    rows: columns "label", the columns of x and y, and optional ones: "line" (value that differs
    between lines of one label), "low" and "high" (interval of a point), "is_open" (whether the
    marker is not filled). x, y: see `number`; shown: see `colours`.
    """
    color = shown["color"]
    layers = [layer("line", {"strokeWidth": 1.4}, x=x, y=y, color=color, detail="line")]
    if "low" in rows:
        interval: dict[str, Any] = {"y": {**y, "field": "low"}, "y2": "high"}
        layers.append(layer("rule", {"opacity": 0.5}, x=x, color=color, **interval))
    return [*layers, *points(rows, x=x, y=y, detail="line", **shown)]


def points(rows: pd.DataFrame, **encoding: Any) -> list[Layer]:
    """Points, hollow where the optional column "is_open" of the rows is true. encoding: see
    `layer`."""
    solid, hollow = {"filled": True, "size": 40, "opacity": 1}, {"size": 34, "opacity": 1}
    if "is_open" not in rows:
        return [layer("point", solid, **encoding)]
    return [
        layer("point", solid, "!datum.is_open", **encoding),
        layer("point", hollow, "datum.is_open", **encoding),
    ]


def heat_map(x: Mapping[str, Any], y: Mapping[str, Any]) -> list[Layer]:
    """Labelled squares. Rows have columns "share" (from 0 for light to 1 for dark, NaN for a square
    without colour) and "text".

    x, y: see `label`.
    """
    x = {"axis": TOP, **x}
    ink = _ink("share")
    has_colour = "isValid(datum.share)"
    place: dict[str, Any] = {"x": x, "y": y, "tooltip": [x, y, {"field": "text"}]}
    return [
        layer("rect", {}, has_colour, color=number("share", scale=SHADE, legend=None), **place),
        layer("text", {"fontSize": 10}, has_colour, text="text", color=ink, **place),
        layer("text", {"fontSize": 10}, f"!{has_colour}", text="text", **place),
    ]


def _ink(shade: str) -> dict[str, Any]:
    """The colour of text on squares: white where their shade, a column, is dark."""
    return {"condition": {"test": f"datum.{shade} > 0.55", "value": "white"}, "value": "black"}


def mean_map(x: Mapping[str, Any], y: Mapping[str, Any], shade: str, text: str) -> list[Layer]:
    """Squares with the mean of the numbers in the column `text` over the rows that menus leave, and
    shades from 0 to 1 by the mean of the column `shade`.

    x, y: see `label`."""
    shown = number(text, text, aggregate="mean", format=".2f")
    mean = number(shade, f"{shade}, mean", aggregate="mean")
    axis = {**TOP, "labelAngle": -30}
    place: dict[str, Any] = {"x": {**x, "axis": axis}, "y": y, "tooltip": [x, y, shown, mean]}
    return [
        layer("rect", color={**mean, "scale": SHADE, "legend": {"format": ".0%"}}, **place),
        layer(
            "text", {"fontSize": 10}, text=shown, color=_ink(f"mean_{shade}"), detail=mean, **place
        ),
    ]


def reference(channel: str, value: float | str) -> Layer:
    """A dashed line across the panel at a number, or at the mean of a column."""
    place = number(value, aggregate="mean") if isinstance(value, str) else {"datum": value}
    return layer("rule", {"color": MUTED, "strokeDash": [4, 3]}, "", **{channel: place})


def shares_of_range(rows: pd.DataFrame, by: str | list[str], column: str) -> pd.Series:
    """The numbers in `column`, scaled from 0 for the least to 1 for the greatest of the rows with
    equal values in `by`; NaN if all of them are equal."""
    values = rows.groupby(by)[column]
    low, high = values.transform("min"), values.transform("max")
    return (rows[column] - low) / (high - low)


FEWEST_LAYERS = 3
"""Fewest layers over which lines are drawn: a line of two points says less than its numbers."""


def layer_figure(
    title: str,
    caption: str,
    rows: pd.DataFrame,
    y: Mapping[str, Any],
    shown: Mapping[str, Any] | None = None,
) -> Figure | None:
    """Lines over the layers of a model; None with fewer than FEWEST_LAYERS layers.

    rows: the column "layer", and those of `lines`; shown: see `colours`.
    """
    if rows["layer"].nunique() < FEWEST_LAYERS:
        return None
    rows = rows.sort_values("layer", kind="stable")
    x = number("layer", "decoder layer", axis={"tickMinStep": 1})
    layers = lines(rows, x, y, shown or colours(rows["label"]))
    return Figure(title, caption, rows, layers)


def by_calibration(points: pd.DataFrame) -> pd.DataFrame:
    """Rows of a figure with a panel per model and a line per calibration set.

    points: columns "model", "calibration", "layer" and "y"."""
    sets = points["calibration"].map(names.calibration)
    return points.assign(panel=points["model"], Model=points["model"], label=sets, Calibration=sets)


def document(figure: Figure) -> dict[str, Any]:
    """The figure in Vega-Lite, with its data. `usermeta` tells the page's script which values the
    figure shows while menus are on "all"."""
    schema = f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE.partition('.')[0]}.json"
    values = json.loads(figure.rows.to_json(orient="records", double_precision=6))
    panels = list(dict.fromkeys(figure.rows[figure.panel]))
    width, height = figure.size
    return {
        "$schema": schema,
        "usermeta": dict(figure.initial),
        "data": {"values": values},
        "transform": [
            {"filter": f"datum.{menu} == {json.dumps(value)}"}
            for menu, value in figure.initial.items()
        ],
        "facet": {"field": figure.panel, "title": None, "sort": panels},
        "columns": min(figure.columns, len(panels)),
        "spec": {"width": width, "height": height, "layer": list(figure.layers)},
        "resolve": {
            "scale": dict.fromkeys(figure.independent, "independent"),
            # each map has labels above its columns
            "axis": {"x": "independent"} if isinstance(width, dict) else {},
        },
        "config": CONFIG,
    }


def write(figure: Figure, path: Path) -> None:
    """Write the figure in Vega-Lite to `path`, which ends in .json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(figure)), encoding="utf-8")
