"""Number of calibration tokens that reached each expert."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.patches import Patch

from analysis import names
from analysis.load.reader import groups
from analysis.load.study import Study
from analysis.outputs.captions import pass_setup
from analysis.outputs.score_rows import sorted_in_order
from analysis.registry import Item, Results, output
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table, display_frame

RARE_SHARE = 0.1
"""An expert with less than this share of an even load is called rare."""


def coverage_summary(coverage: pd.DataFrame) -> pd.DataFrame:
    """Summarize tokens per expert over all layers; a row per model and calibration set.

    Columns: "model", "calibration", "experts" (number of experts), "unseen" (number of experts
    without a token), "rare" (number of experts with less than RARE_SHARE times the mean tokens of
    their layer), and "least", "median" and "most" (tokens of an expert).

    Columns of `coverage`: "model", "calibration", "layer", "expert" and "tokens"."""
    rows = []
    for key, experts in groups(coverage, ["model", "calibration"]):
        even_load = experts.groupby("layer")["tokens"].transform("mean")
        tokens = experts["tokens"]
        rows.append(
            {
                **key,
                "experts": len(experts),
                "unseen": int((tokens == 0).sum()),
                "rare": int((tokens < RARE_SHARE * even_load).sum()),
                "least": int(tokens.min()),
                "median": float(tokens.median()),
                "most": int(tokens.max()),
            }
        )
    return pd.DataFrame(rows)


@output("tokens_per_expert", chapter="coverage")
def tokens_per_expert(results: Results, name: str) -> list[Item]:
    """Calibration tokens per expert."""
    if results.study.coverage.empty:
        return []
    return [coverage_figure(results.study, name), coverage_table(results.study, name)]


def coverage_table(study: Study, name: str) -> Table:
    """Table of `coverage_summary`, with the numbers of benchmark items that the calibration text
    contains."""
    text_columns = {"Model": "model", "Calibration": "calibration"}
    number_columns = {
        "Experts": "experts",
        "Unseen": "unseen",
        "Rare": "rare",
        "Least tokens": "least",
        "Median tokens": "median",
        "Most tokens": "most",
    }
    summary = coverage_summary(study.coverage)
    keys = summary["calibration"] + "@" + summary["model"]
    summary["items"] = [_items_in_words(study.contaminations.get(key, {})) for key in keys]
    return Table(
        name=name,
        title="Tokens per expert",
        caption="Unseen: experts without calibration tokens; they are scored 0 and pruned first. "
        "Rare: less than a tenth of an even load. "
        f"{_explanation_of_items(study)}Based on {pass_setup(study)}",
        frame=display_frame(
            summary, text_columns | number_columns | {"Items in the text": "items"}
        ),
        formats=dict.fromkeys(number_columns, "{:,.0f}"),
    )


def _items_in_words(counts: Mapping[str, Any]) -> str:
    """Text with the numbers of items in a calibration text: `3 / 155: GSM8K 3 / 75`.

    counts: benchmark -> {"found": items that the text contains, "comparable": items looked for}."""
    if not counts:
        return ""
    total = _found_of_comparable(counts.values())
    parts = [
        f"{names.benchmark(name)} {_found_of_comparable([count])}"
        for name, count in counts.items()
        if count["found"]
    ]
    return f"{total}: {names.enumeration(parts)}" if parts else total


def _found_of_comparable(counts: Collection[Any]) -> str:
    """Sums over `counts` as text, "found" / "comparable": `3 / 155`."""
    found = sum(count["found"] for count in counts)
    comparable = sum(count["comparable"] for count in counts)
    return f"{found:,} / {comparable:,}"


def _explanation_of_items(study: Study) -> str:
    """Sentences for the caption that explain the column "Items in the text"."""
    searched_texts = [counts for counts in study.contaminations.values() if counts]
    if not searched_texts:
        return ""
    # benchmark -> its counts in one of the texts; "comparable" is equal for all texts
    counts = {name: count for text in searched_texts for name, count in text.items()}
    tasks_by_reason = {
        "Not looked up": [task for task in study.results["task"].unique() if task not in counts],
        "All items are shorter": [
            name for name, count in counts.items() if not count["comparable"]
        ],
    }
    sentences = [
        f"{reason}: {names.enumeration(map(names.benchmark, tasks))}. "
        for reason, tasks in tasks_by_reason.items()
        if tasks
    ]
    return (
        "Items in the text: items of benchmarks of which 13 consecutive words are in the "
        "calibration text, out of the items with 13 words (words that more than ten items share do "
        f"not count). {''.join(sentences)}"
    )


def coverage_figure(study: Study, name: str) -> Figure:
    """A panel per model and calibration set, with a row per layer and a square per expert."""
    coverage = study.coverage
    order = names.calibrations_in_order(coverage["calibration"])
    ordered = sorted_in_order(coverage, "calibration", order, "model")
    panels = list(groups(ordered, ["model", "calibration"]))
    layer_count = max(experts["layer"].nunique() for _, experts in panels)
    # height in inches
    drawing = style.drawing(style.PAGE, len(panels) * (0.2 * min(layer_count, 24) + 0.5) + 0.5)
    for axes, (key, experts) in zip(
        np.atleast_1d(drawing.subplots(len(panels), 1)), panels, strict=True
    ):
        style.draw_expert_rows(axes, experts.set_index("layer")["tokens"], _colour_positions)
        axes.set_title(f"{key['model']}, {names.calibration(key['calibration'])}")
    axes.set_xlabel("experts of a layer, from the least to the most used")
    handles = [
        Patch(facecolor=colormaps[style.SEQUENTIAL](level), label=label)
        for level, label in (  # positions in the colour map, see `_colour_positions`
            (0.15, "a tenth of an even load"),
            (0.5, "even load"),
            (0.85, "ten times"),
        )
    ]
    style.legend(drawing, [Patch(**style.NO_TOKENS, label="no token"), *handles])
    caption = (
        "Each square is an expert; its shade is its share of tokens on a logarithmic scale. "
        f"Crossed: no tokens. Based on {pass_setup(study)}"
    )
    return Figure(name, "Tokens per expert", caption, drawing)


def _colour_positions(tokens: np.ndarray) -> np.ndarray:
    """Positions (experts,) in the colour map for the experts of one layer: 0.5 for the mean of the
    layer, 0.85 for ten times the mean, and 0.15 for a tenth of the mean.

    tokens (experts,): number of tokens of each expert."""
    # 1e-9 stands for 0, which has no logarithm
    even_load = max(tokens.mean(), 1e-9)
    decades = np.log10(np.maximum(tokens, 1e-9) / even_load)
    return np.asarray(0.5 + 0.35 * np.clip(decades, -1.4, 1.4))
