"""Overlap of the experts to prune across calibration sets, and of a proxy with exact damage
(Unified Expert Pruning, Figs. 3 to 5)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.outputs.captions import pass_setup
from moe_lab.analysis.registry import Item, Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import SCORE, Columns, Table, frame_and_formats
from moe_lab.analysis.stats import overlap
from moe_lab.analysis.stats.ranking import ALL_MODELS


def overlap_table(results: Results) -> Table:
    """Overlap of the experts with the lowest scores S(b, alpha, beta) across calibration sets. A
    row per model, ratio and (b, alpha, beta)."""
    overlaps = results.overlaps
    variants = [
        overlap.variant_name(*variant) for variant in overlaps[overlap.VARIANT].to_numpy(int)
    ]
    columns: Columns = {
        "Model": "model",
        "Pruned": "ratio",
        "Variant": "variant",
        "b": ("b", "{:.0f}"),
        "α": ("alpha", "{:.0f}"),
        "β": ("beta", "{:.0f}"),
        "Overlap": ("overlap", SCORE),
        "By chance": ("chance", SCORE),
    }
    return Table(
        title="Overlap of the experts to prune across calibration sets",
        caption="Share of the lowest experts that is the same under all calibration sets, mean "
        "over layers, and its expectation for random sets. (1,0,0) scores all experts alike. "
        f"Based on {pass_setup(results.study)}",
        **frame_and_formats(overlaps.assign(variant=variants), columns),
    )


OVERLAP = "a run with overlap=true and two calibration sets"
"""Data that Figs. 4 and 5 need."""


@output("unified.fig3", chapter="overlap", needs="a run with overlap=true")
def proxy_and_damage(results: Results) -> list[Item]:
    """Overlap of the proxy S(0,1,1) and exact damage.

    Unified Expert Pruning, Fig. 3: a panel per ratio, a row per model and calibration set."""
    overlaps = results.proxy_overlaps
    if overlaps.empty:
        return []
    rows = overlaps.sort_values("ratio", kind="stable")
    rows = rows.assign(
        panel=rows["ratio"].map(names.ratio) + " pruned",
        label=rows["model"] + ", " + rows["calibration"].map(names.calibration),
        Model=rows["model"],
        Calibration=rows["calibration"].map(names.calibration),
        Pruned=rows["ratio"].map(names.ratio),
    )
    x = charts.number("overlap", "share of the same experts", **charts.SHARE)
    y = charts.label("label")
    layers = [
        charts.layer("rule", x=x, x2="lowest", y=y),
        charts.layer("circle", {"size": 60, "opacity": 1}, x=x, y=y),
        charts.layer("tick", x={**x, "field": "chance"}, y=y),
    ]
    caption = (
        "Share of the experts with the lowest exact damage that also have the lowest proxy "
        "S(0,1,1): mean over layers (point), the lowest layer (end of the line), and expectation "
        f"for random sets (tick). Based on {pass_setup(results.study)}"
    )
    columns: Columns = {
        "Model": "model",
        "Calibration": "calibration",
        "Pruned": "ratio",
        "Overlap": ("overlap", SCORE),
        "Lowest layer": ("lowest", SCORE),
        "By chance": ("chance", SCORE),
    }
    title = "Overlap of proxy and exact damage"
    table = Table(title, caption, **frame_and_formats(overlaps, columns))
    figure = Figure(title, caption, rows, layers, size=(260, {"step": 18}))
    return [figure, table]


@output("unified.fig4", chapter="overlap", needs=OVERLAP, aliases=("unified.fig5",))
def overlap_maps(results: Results) -> list[Item]:
    """Overlap of the experts to prune across calibration sets, mean over models and model by model.

    Unified Expert Pruning, Figs. 4 and 5: the overlap of the experts with the lowest scores
    S(b, alpha, beta), a map per model and ratio."""
    overlaps = results.overlaps
    if overlaps.empty:
        return []
    means = overlap.mean_over_models(overlaps)
    frames = [overlaps]
    if overlaps["model"].nunique() > 1:
        frames.insert(0, means.assign(model=ALL_MODELS))
    squares = [
        _squares(rows).assign(
            panel=f"{key['model']}, {names.ratio(key['ratio'])} pruned",
            Model=key["model"],
            Pruned=names.ratio(key["ratio"]),
        )
        for key, rows in groups(pd.concat(frames), ["model", "ratio"])
    ]
    layers = charts.heat_map(charts.label("x"), charts.label("y"))
    caption = (
        "Share of the lowest-scored experts of a layer that is the same under all calibration "
        "sets, mean over layers. (1,0,0) scores all experts alike. Based on "
        f"{pass_setup(results.study)}"
    )
    title = "Which scores depend least on the calibration set"
    size = ({"step": 85}, {"step": 22})
    figure = Figure(title, caption, pd.concat(squares), layers, size=size)
    return [figure, overlap_table(results), effect_table(means)]


def effect_table(overlaps: pd.DataFrame) -> Table:
    """Mean overlap of all scores S(b, alpha, beta) with one value of b, of alpha or of beta (left
    part of Fig. 4). overlaps: see `overlap.mean_over_models`."""
    effects = overlap.component_effects(overlaps)
    effects["level"] = effects["level"].astype(str)
    columns: Columns = {
        "Pruned": "ratio",
        "Parameter": "component",
        "Value": "level",
        "Overlap": ("overlap", SCORE),
    }
    return Table(
        name=".effects",
        title="Overlap by the parameters of the scores",
        caption="Mean overlap over models and all usable variants with this b, α or β.",
        **frame_and_formats(effects, columns),
    )


def _squares(overlaps: pd.DataFrame) -> pd.DataFrame:
    """A square for each variant (b, alpha, beta), shaded by the variant's overlap: the columns of
    `charts.heat_map`.

    overlaps: a row per variant, with the columns b, alpha, beta and overlap."""
    by_variant = overlaps.set_index(list(overlap.VARIANT))["overlap"]
    rows = []
    for b, alpha, beta in product((0, 1), (0, 1, 2), (0, 1, 2)):
        share = by_variant.get((b, alpha, beta), np.nan)
        is_missing = (b, alpha, beta) == overlap.DEGENERATE_VARIANT or np.isnan(share)
        rows.append(
            {
                "x": f"β={beta}",
                "y": f"b={b}, α={alpha}",
                "share": np.nan if is_missing else share,
                "text": "N/A"
                if is_missing
                else f"{share:.2f} {overlap.variant_name(b, alpha, beta)}",
            }
        )
    return pd.DataFrame(rows)
