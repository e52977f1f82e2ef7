"""Number of calibration tokens that reached each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from moe_lab.analysis.outputs.captions import pass_setup
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render.table import Columns, Table, frame_and_formats

RARE_SHARE = 0.1
"""An expert with less than this share of an even load is called rare."""


def coverage_summary(coverage: pd.DataFrame) -> pd.DataFrame:
    """Summarize tokens per expert over all layers; a row per model and calibration set.

    Columns: "model", "calibration", "experts" (number of experts), "unseen" (number of experts
    without a token), "rare" (number of experts with less than RARE_SHARE times the mean tokens of
    their layer), and "least", "median" and "most" (tokens of an expert).

    Columns of `coverage`: "model", "calibration", "layer", "expert" and "tokens"."""
    tokens = coverage["tokens"]
    even_load = coverage.groupby(["model", "calibration", "layer"])["tokens"].transform("mean")
    experts = coverage.assign(unseen=tokens == 0, rare=tokens < RARE_SHARE * even_load)
    return experts.groupby(["model", "calibration"], sort=False, as_index=False).agg(
        experts=("tokens", "size"),
        unseen=("unseen", "sum"),
        rare=("rare", "sum"),
        least=("tokens", "min"),
        median=("tokens", "median"),
        most=("tokens", "max"),
    )


@output("tokens_per_expert", chapter="coverage")
def coverage_table(results: Results) -> Table | None:
    """Calibration tokens per expert, and items of benchmarks that the calibration text contains."""
    study = results.study
    if study.coverage.empty:
        return None
    counts = {
        "Experts": "experts",
        "Unseen": "unseen",
        "Rare": "rare",
        "Least tokens": "least",
        "Median tokens": "median",
        "Most tokens": "most",
    }
    columns: Columns = {
        "Model": "model",
        "Calibration": "calibration",
        **{name: (source, "{:,.0f}") for name, source in counts.items()},
        "Items in the text": "items",
    }
    summary = coverage_summary(study.coverage)
    keys = summary["calibration"] + "@" + summary["model"]
    summary["items"] = [_items_in_words(study.contaminations.get(key, {})) for key in keys]
    return Table(
        title="Tokens per expert",
        caption="Unseen: experts without calibration tokens; they are scored 0 and pruned first. "
        "Rare: less than a tenth of an even load. "
        "Items in the text: items of benchmarks of which 13 consecutive words are in the "
        "calibration text, out of the items that were looked for; shorter items and words that "
        f"more than ten items share are not. Based on {pass_setup(study)}",
        **frame_and_formats(summary, columns),
    )


def _items_in_words(counts: Mapping[str, Any]) -> str:
    """Text with the number of items in a calibration text, and of those looked for: `3 / 155`.

    counts: benchmark -> {"found": items that the text contains, "comparable": items looked for}."""
    if not counts:
        return ""
    found = sum(count["found"] for count in counts.values())
    comparable = sum(count["comparable"] for count in counts.values())
    return f"{found:,} / {comparable:,}"
