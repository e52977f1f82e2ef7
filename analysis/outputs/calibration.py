"""Calibration sets: their size (HEAPr, Fig. 3; AIMER, Fig. 1), tokens per expert, and overlap of
the experts to prune (Unified Expert Pruning, Figs. 3 to 5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import settings
from moe_lab.analysis.load.passes import PASS
from moe_lab.analysis.load.reader import groups, stacked
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import HEAPR, pass_setup
from moe_lab.analysis.outputs.score_rows import calibrated_cells, criterion_colours
from moe_lab.analysis.registry import Item, Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import SCORE, Columns, Table, display_frame, frame_and_formats
from moe_lab.analysis.stats import overlap
from moe_lab.analysis.stats.cell_scores import differences, mean_target, mean_text
from moe_lab.analysis.stats.comparison import Comparison

EQUAL_COLUMNS = ["ratio", "method", "gate"]
"""Cells with equal values in these columns are compared across calibration sets."""


def lines_by_tokens(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Those of `calibrated_cells` for which there is another number of tokens with equal ratio,
    method, gate and text.

    Added columns: "label" (of the method and text) and "panel" (removed share)."""
    cells = calibrated_cells(study, comparison).dropna(subset=["read"])
    by_line = cells.groupby([*EQUAL_COLUMNS, "source"], sort=False)
    # the set with most tokens names the text
    texts = by_line["calibration"].transform("last").map(names.calibration)
    # "" if the model has one gate; without seeds, as these cells have no column "seed"
    gates = settings.gate_and_seed(cells)
    labels = map(names.comma_joined, cells["method"].map(names.method), texts, gates)
    lines = cells.assign(label=list(labels), panel=cells["removed_text"] + " pruned")
    return lines[by_line["read"].transform("nunique") > 1]


def _token_axis(counts: Iterable[int]) -> dict[str, Any]:
    """The axis of numbers of calibration tokens, with a tick at each of `counts`."""
    axis = {"values": sorted(set(counts)), "format": ".3s"}
    scale = {"type": "log", "base": 2}
    return charts.number("read", "calibration tokens read", axis=axis, scale=scale)


@output(
    "heapr.fig3",
    chapter="task",
    needs=f"calibration sets that read different numbers of tokens of one text, and {HEAPR}",
)
@per_model
def size_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Scores against the number of calibration tokens.

    A panel per ratio, a line per text and method."""
    cells = lines_by_tokens(results.study, comparison)
    target = mean_target(comparison, list(cells.index), names.HEAPR)
    if not target:
        return None
    rows = cells.join(comparison.displayed_scores(target)).rename(columns={"score": "y"})
    rows = rows[["panel", "label", "method", "read", "y", "low", "high"]]
    y = charts.number("y", "mean of HEAPr's benchmarks", scale={"zero": False})
    layers = charts.lines(rows, _token_axis(rows["read"]), y, criterion_colours(rows))
    caption = (
        f"{mean_text(target, names.HEAPR)} after calibration on more and more of the same text, "
        "with 95 % intervals. Lines are texts and methods; points of one line answered the same "
        "items."
    )
    title = "How much calibration text is enough"
    return Figure(title, caption, rows, layers)


POINTS = 100
"""Points of a score of 1."""


def changes(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Change of each benchmark's score with more calibration text: the score of each cell of
    `lines_by_tokens` minus the score of the cell with the fewest tokens in its line.

    Columns: "panel" (method, text and removed share), "benchmark", "read" (number of tokens), and
    "difference", "low" and "high" (95 %) in points."""
    score_benchmarks = [
        name
        for name in map(str, comparison.results)
        if not comparison.quantity((name,)).lower_is_better
    ]
    frames = []
    for key, line in groups(lines_by_tokens(study, comparison), ["label", "panel"]):
        base_cell, *other_cells = line.index.astype(int)
        for benchmark in comparison.evaluated(score_benchmarks, [base_cell, *other_cells]):
            base_of_cell = dict.fromkeys(other_cells, base_cell)
            points = POINTS * differences(comparison, (benchmark,), base_of_cell)
            points.loc[base_cell] = 0.0
            panel = f"{key['label']}, {key['panel']}"
            frames.append(line[["read"]].join(points).assign(panel=panel, benchmark=benchmark))
    return stacked(frames, ["panel", "benchmark", "read", "difference", "low", "high"])


@output(
    "aimer.fig1",
    chapter="task",
    needs="calibration sets that read different numbers of tokens of one text",
)
@per_model
def change_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Effect of more calibration text in each benchmark, in points (AIMER, Fig. 1).

    A panel per text, method and ratio, a line per benchmark."""
    points = changes(results.study, comparison)
    if points.empty:
        return None
    # also without an interval (NaN)
    points["is_open"] = ~((points["low"] > 0) | (points["high"] < 0))
    benchmarks = names.in_order(points["benchmark"], names.BENCHMARKS)
    # without intervals, which would hide the lines
    rows = points[["panel", "read", "difference", "is_open"]].assign(
        label=points["benchmark"].map(names.benchmark)
    )
    y = charts.number("difference", "change of the score (points)")
    layers = [
        charts.reference("y", 0),
        *charts.lines(
            rows, _token_axis(rows["read"]), y, charts.colours(map(names.benchmark, benchmarks))
        ),
    ]
    caption = (
        "Change of each benchmark's score, in points, against calibration on the least tokens of "
        "the same text. Filled markers: the 95 % interval of the paired "
        "difference, not corrected for the number of benchmarks, excludes zero; with one seed it "
        "is over items, for these plans."
    )
    title = "Effect of more calibration text"
    return Figure(title, caption, rows, layers)


RARE_SHARE = 0.1
"""An expert with less than this share of an even load is called rare."""


COUNTS: dict[str, Any] = {
    "Experts": ("tokens", "size"),
    "Unseen": ("is_unseen", "sum"),
    "Rare": ("is_rare", "sum"),
    "Least tokens": ("tokens", "min"),
    "Median tokens": ("tokens", "median"),
    "Most tokens": ("tokens", "max"),
}
"""Displayed column -> what is counted over the experts of all layers, and how."""


@output("tokens_per_expert", chapter="coverage")
def coverage_table(results: Results) -> Table | None:
    """Calibration tokens per expert."""
    study = results.study
    experts = study.experts
    if experts.empty:
        return None
    tokens = experts["tokens"]
    even_load = experts.groupby([*PASS, "layer"])["tokens"].transform("mean")
    experts = experts.assign(is_unseen=tokens == 0, is_rare=tokens < RARE_SHARE * even_load)
    columns: Columns = {
        "Model": "model",
        "Calibration": "calibration",
        **{name: (name, "{:,.0f}") for name in COUNTS},
    }
    summary = experts.groupby(PASS, sort=False, as_index=False).agg(**COUNTS)
    return Table(
        title="Tokens per expert",
        caption="Unseen: experts without calibration tokens; they are scored 0 and pruned first. "
        f"Rare: less than a tenth of an even load. Based on {pass_setup(study)}",
        **frame_and_formats(summary, columns),
    )


def overlap_table(results: Results) -> Table:
    """Overlap of the experts with the lowest scores S(b, alpha, beta) across calibration sets. A
    row per model, ratio and (b, alpha, beta)."""
    overlaps = results.overlaps
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
        **frame_and_formats(overlaps.assign(variant=overlap.variant_names(overlaps)), columns),
    )


OVERLAP = "a run with overlap=true and two calibration sets"
"""Data that Figs. 4 and 5 need."""


@output("unified.fig3", chapter="overlap", needs="a run with overlap=true")
def proxy_and_damage(results: Results) -> Figure | None:
    """Overlap of the proxy S(0,1,1) and exact damage.

    Unified Expert Pruning, Fig. 3: a panel per ratio, a row per model and calibration set."""
    overlaps = overlap.proxy_overlap(results.study.family, results.study.damage)
    if overlaps.empty:
        return None
    rows = overlaps.sort_values("ratio", kind="stable")
    texts = display_frame(rows, {"Model": "model", "Calibration": "calibration", "Pruned": "ratio"})
    rows = rows.assign(
        panel=texts["Pruned"] + " pruned",
        label=texts["Model"] + ", " + texts["Calibration"],
        **texts,
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
    title = "Overlap of proxy and exact damage"
    return Figure(title, caption, rows, layers, size=(260, {"step": 18}))


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
        frames.insert(0, means.assign(model="all models"))
    rows = pd.concat(frames).sort_values("ratio", kind="stable")
    pruned = rows["ratio"].map(names.ratio)
    b, alpha, beta = (rows[name].astype(int).astype(str) for name in overlap.VARIANT)
    texts = rows["overlap"].map("{:.2f} ".format) + overlap.variant_names(rows)
    squares = pd.DataFrame(
        {
            "x": "β=" + beta,
            "y": "b=" + b + ", α=" + alpha,
            "share": rows["overlap"],
            "text": texts.where(rows["overlap"].notna(), "N/A"),
            "panel": rows["model"] + ", " + pruned + " pruned",
            "Model": rows["model"],
            "Pruned": pruned,
        }
    )
    layers = charts.heat_map(charts.label("x"), charts.label("y"))
    caption = (
        "Share of the lowest-scored experts of a layer that is the same under all calibration "
        "sets, mean over layers. (1,0,0) scores all experts alike. Based on "
        f"{pass_setup(results.study)}"
    )
    title = "Which scores depend least on the calibration set"
    size = ({"step": 85}, {"step": 22})
    figure = Figure(title, caption, squares, layers, size=size)
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
