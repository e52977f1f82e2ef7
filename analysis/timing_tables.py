"""How fast models read and write, and what memory they take (MoE-Slimming, Table 2): medians over requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis import methods, names
from analysis.comparison import Comparison
from analysis.frames import groups, records
from analysis.load import Study
from analysis.tables import Table, reading

MEBIBYTE = 2**20
PREFILL, DECODE, FIRST, EACH = "Prefill (tokens/s)", "Decode (tokens/s)", "First token (ms)", "Per token (ms)"
WEIGHTS, PEAK = "Weights (MiB)", "Peak memory (MiB)"
SPEEDS: Mapping[str, str] = {PREFILL: "{:,.1f}", DECODE: "{:,.1f}", FIRST: "{:,.2f}", EACH: "{:,.2f}"}
REQUEST = ["cell", "device", "batch_size", "prompt_length", "new_tokens"]
QUARTILES = {" low": 0.25, "": 0.5, " high": 0.75}
_TEXT = ["Model", "Pruned", "Criterion", "Device", "Prompts", "Tokens each"]


def requests(study: Study) -> pd.DataFrame:
    """A row per cell and sort of request: REQUEST, SPEEDS at their medians and, with ` low` and ` high` behind, their
    quartiles, WEIGHTS, PEAK."""
    rows = []
    for key, found in groups(study.timings, REQUEST) if len(study.timings) else ():
        speeds = _speeds(found)
        measured = {f"{name}{end}": speeds[name].quantile(at) for name in SPEEDS for end, at in QUARTILES.items()}
        weights = float(found["weight_bytes"].iloc[0])
        peak = weights + float(found["working_bytes"].iloc[0])
        rows.append({**key, **measured, WEIGHTS: weights / MEBIBYTE, PEAK: peak / MEBIBYTE})
    columns = [*REQUEST, *(f"{name}{end}" for name in SPEEDS for end in QUARTILES), WEIGHTS, PEAK]
    return pd.DataFrame(rows, columns=columns)


def _speeds(found: pd.DataFrame) -> pd.DataFrame:
    """SPEEDS of each request."""
    read, written = found["batch_size"] * found["prompt_length"], found["batch_size"] * found["new_tokens"]
    return pd.DataFrame(
        {
            PREFILL: read / found["prefill_seconds"],
            DECODE: written / found["decode_seconds"],
            FIRST: 1000 * found["prefill_seconds"],
            EACH: 1000 * found["decode_seconds"] / found["new_tokens"],
        }
    )


def labels(comparison: Comparison) -> dict[int, str]:
    """Cell -> what it is called among the cells of its model."""
    return {int(str(cell)): str(word) for cell, word in methods.labels(comparison.cells).items()}


def speed_table(study: Study, comparisons: Sequence[Comparison], *, name: str) -> Table:
    """MoE-Slimming's Table 2: throughput, latency and memory of every model that was timed."""
    found = requests(study)
    rows, low, high = [], [], []
    for comparison in comparisons:
        words = labels(comparison)
        for row in records(found[found["cell"].isin(words)]) if len(found) else []:
            ratio = float(comparison.cells.loc[row["cell"], "ratio"])
            places = [comparison.model, names.ratio(ratio), words[row["cell"]], row["device"]]
            texts = [*places, str(row["batch_size"]), str(row["prompt_length"])]
            rows.append(
                {**dict(zip(_TEXT, texts, strict=True)), **{word: row[word] for word in (*SPEEDS, WEIGHTS, PEAK)}}
            )
            low.append({word: row[f"{word} low"] for word in SPEEDS})
            high.append({word: row[f"{word} high"] for word in SPEEDS})
    sizes = {WEIGHTS: "{:,.2f}", PEAK: "{:,.1f}"}
    return Table(
        name=name,
        title="How fast models read and write, and what memory they take",
        caption=f"Medians, with the quartiles as ends. {conditions(study)} {reading(study)}",
        frame=pd.DataFrame(rows, columns=[*_TEXT, *SPEEDS, *sizes]),
        formats={**SPEEDS, **sizes},
        best={PREFILL: "max", DECODE: "max", FIRST: "min", EACH: "min"},
        blocks=("Model", "Device", "Prompts", "Tokens each"),
        low=pd.DataFrame(low) if rows else None,
        high=pd.DataFrame(high) if rows else None,
        optional=(PEAK,),
    )


def conditions(study: Study) -> str:
    """What a caption says of how requests were timed."""
    found = study.timings
    if found.empty:
        return ""
    several = {name: " / ".join(str(value) for value in found[name].dropna().unique()) for name in ("device", "dtype")}
    threads = " / ".join(f"{count:g}" for count in found["threads"].dropna().unique())
    repeats, written = found["repeat"].max() + 1, " / ".join(map(str, found["new_tokens"].unique()))
    return (
        f"{repeats} requests each, {written} tokens written after the first one, {several['dtype']} on "
        f"{several['device']}, {threads} threads, load of the machine up to {found['load'].max():.1f}; by "
        "transformers, the pruned model alone, prompts from a text. Peak memory: the weights, and what a request takes "
        "beyond them."
    )
