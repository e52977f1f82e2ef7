"""Texts that captions share (seeds, gates, calibration tokens), and names of data that
several outputs need."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.evaluations import mixed_metrics
from moe_lab.analysis.load.passes import shown_passes, valid_tokens
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.render.table import Columns
from moe_lab.analysis.stats import uncertainty
from moe_lab.analysis.stats.quantity import Quantity

HEAPR = "some of HEAPr's seven benchmarks"
SLIMMING = "some of MoE-Slimming's benchmarks"
SEARCHES = "cells with allocation=evolutionary"
SUMS = "the sums of a pass over a text in the store"
ABLATIONS = (
    "cells with allocation=coverage and allocation.parameters.prior=loss, which reads the ablation"
)
TIMINGS = "a run with timing=true"
LOSSES = "samples with answer_loss: benchmarks with reference answers, evaluated with likelihoods"
"""HEAPR to LOSSES: names of data that several outputs need; printed when a study lacks the data."""
GPU_PEAK = "Peak GPU memory (MiB)"
PEAKS: Columns = {
    "Peak memory (MiB)": ("peak", "{:,.0f}"),
    GPU_PEAK: ("gpu_peak", "{:,.0f}"),
}
"""Columns of tables of steps, with numbers of `time_and_memory`."""
MEBIBYTE = 2**20


@lru_cache(maxsize=8)
def score_setup(study: Study) -> str:
    """Text for captions of scores: items per benchmark, metrics, level of intervals, and
    `run_setup`."""
    sizes = study.results["n"]
    if not len(sizes):
        return f"No results; {run_setup(study)}"
    items = names.limits(sizes, "{:g}")
    metrics = sorted(set(metrics_in_words(study.results)))
    noun = "metric" if len(metrics) == 1 else "metrics"
    level = f"{names.ratio(uncertainty.CONFIDENCE)} intervals"
    text = (
        f"{items} items per benchmark; {noun} {names.enumeration(metrics)}; {level}; "
        f"{run_setup(study)}"
    )
    return " ".join([text, *mixed_metrics(study.results, study.cells)])


def metrics_in_words(results: pd.DataFrame) -> list[str]:
    """Text for the metric of each row of `results`, such as `acc` or
    `loss (nats per token, less is better)`."""
    columns = (results[name] for name in ("metric", "scale", "unit"))
    return [
        Quantity(scale, unit).metric_text(str(metric))
        for metric, scale, unit in zip(*columns, strict=True)
    ]


@lru_cache(maxsize=8)
def run_setup(study: Study) -> str:
    """Text for captions of numbers that describe cells: the seeds and gates of all pruned cells,
    and calibration tokens."""
    cells = study.pruned_cells
    return _sentence([_values(cells, "seed"), _values(cells, "gate"), _tokens(study)])


@lru_cache(maxsize=8)
def pass_setup(study: Study) -> str:
    """Text for captions of numbers from calibration passes: the seeds and gates of the passes that
    `shown_passes` selects, and calibration tokens.

    If these passes lack a seed of the pruned cells, all seeds follow: `seed 1 (of 1 and 2)`."""
    cells = study.pruned_cells[study.pruned_cells["statistics_folder"].notna()]
    passes = shown_passes(cells)
    parts = []
    for column in ("seed", "gate"):
        text = _values(passes, column)
        if set(cells[column]) > set(passes[column]):
            text += f" (of {_values(cells, column).partition('=')[2]})"
        parts.append(text)
    return _sentence([*parts, _tokens(study)])


def _sentence(parts: Iterable[str]) -> str:
    """One sentence: the parts that are not empty, separated by semicolons."""
    return "; ".join(filter(None, parts)) + "."


def _values(cells: pd.DataFrame, column: str) -> str:
    """Text with the distinct values of these cells: `seed=1 and 2`; "" without cells."""
    values = names.enumeration(map(str, cells[column].drop_duplicates()))
    return f"{column}={values}" if values else ""


def _tokens(study: Study) -> str:
    """Text with the numbers of calibration tokens of the study's passes."""
    counts = sorted({valid_tokens(report) for report in study.calibrations.values()})
    tokens = " / ".join(f"{count:,}" for count in counts)
    return f"{tokens} calibration tokens" if counts else ""


def timing_note(machines: Iterable[str]) -> str:
    """Sentences for captions on the seconds of steps, and their machines."""
    note = (
        "Seconds are those of the process that finished a step, without the work of interrupted "
        "ones before it. "
    )
    recorded_machines = names.enumeration(filter(None, dict.fromkeys(machines)))
    if recorded_machines:
        note += f"Measured on {recorded_machines}. "
    return note
