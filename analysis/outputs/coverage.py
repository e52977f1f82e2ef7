"""Number of calibration tokens that reached each expert."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.outputs.captions import pass_setup
from analysis.registry import Results, output
from analysis.render.table import Columns, Table, frame_and_formats

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
def coverage_table(results: Results, name: str) -> Table | None:
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
        name=name,
        title="Tokens per expert",
        caption="Unseen: experts without calibration tokens; they are scored 0 and pruned first. "
        "Rare: less than a tenth of an even load. "
        f"{_explanation_of_items(study)}Based on {pass_setup(study)}",
        **frame_and_formats(summary, columns),
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
