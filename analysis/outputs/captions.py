"""Texts that captions share (seeds, gates, calibration tokens, versions), and names of data that
several outputs need."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import pandas as pd

from analysis import names
from analysis.load.evaluations import mixed_metrics, versions
from analysis.load.passes import shown_passes
from analysis.load.settings import protocols
from analysis.load.study import Study
from analysis.stats import uncertainty
from analysis.stats.quantity import Quantity

HEAPR = "some of HEAPr's seven benchmarks"
SLIMMING = "some of MoE-Slimming's benchmarks"
SEARCHES = "cells with allocation=evolutionary"
SUMS = "the sums of a pass over a text in the store"
ABLATED = (
    "cells with allocation=coverage and allocation.parameters.prior=loss, which reads the ablation"
)
TIMED = "a run with timing=true"
LOSSES = "samples with answer_loss: benchmarks with reference answers, evaluated with likelihoods"
"""HEAPR to LOSSES: data that several outputs need, printed when a study lacks them."""
GPU_PEAK = "Peak GPU memory (MiB)"
"""Column of several tables."""
SECONDS_NOTE = (
    "Seconds are those of the process that finished a step, without the work of interrupted ones "
    "before it. "
)
MEBIBYTE = 2**20


@lru_cache(maxsize=8)
def score_setup(study: Study) -> str:
    """Text for captions of scores: items, metrics, confidence level of intervals, and
    `run_setup`."""
    sizes = study.results["n"]
    if not len(sizes):
        return f"No results; {run_setup(study)}"
    items = " to ".join(dict.fromkeys(f"{size:g}" for size in (sizes.min(), sizes.max())))
    metrics = sorted(set(metrics_in_words(study.results)))
    noun = "metric" if len(metrics) == 1 else "metrics"
    protocol = f" ({protocols(study.cells)})" if protocols(study.cells) else ""
    level = f"{names.share(uncertainty.CONFIDENCE)} intervals"
    measured = (
        f"{items} items per benchmark; {noun} {names.listing(metrics)}{protocol}; {level}; "
        f"{run_setup(study)}"
    )
    return " ".join([measured, *mixed_metrics(study.results, study.cells)])


def metrics_in_words(results: pd.DataFrame) -> list[str]:
    """The metric of each result, with unit and direction where less is better."""
    columns = (results[name] for name in ("metric", "scale", "unit"))
    return [
        Quantity(scale, unit).described(str(metric))
        for metric, scale, unit in zip(*columns, strict=True)
    ]


@lru_cache(maxsize=8)
def run_setup(study: Study) -> str:
    """Text for captions of numbers of cells: seeds, gates, calibration tokens, library versions."""
    cells = study.cells[study.cells["criterion"] != "none"]
    return _joined([_seeds(cells), _gates(cells), *_texts(study)])


@lru_cache(maxsize=8)
def pass_setup(study: Study) -> str:
    """Text for captions of numbers of the shown calibration passes: as `run_setup`, with the seeds
    and gates of these passes, followed by all seeds and gates of the study if there are more."""
    cells = study.cells[
        (study.cells["criterion"] != "none") & study.cells["statistics_folder"].notna()
    ]
    passes = shown_passes(cells)
    parts = []
    for describe, axis in ((_seeds, "seed"), (_gates, "gate")):
        text = describe(passes)
        if set(cells[axis]) > set(passes[axis]):
            text += f" (of {_values(cells[axis])})"
        parts.append(text)
    return _joined([*parts, *_texts(study)])


def _joined(parts: Iterable[str]) -> str:
    """The parts that are not empty as one sentence, separated by semicolons."""
    return "; ".join(filter(None, parts)) + "."


MOST_METHODS = 3
"""Most methods that a caption names together with their seeds; of more, it gives the number."""


def _seeds(cells: pd.DataFrame) -> str:
    """Text with the seeds of these cells: `seed 42`, `seeds 1 and 2`, or, where methods have
    different seeds, `seed 42 (Random: seeds 1, 2 and 3)`."""
    methods_by_seeds: dict[str, list[str]] = {}
    for method, values in cells.groupby("method", sort=False)["seed"]:
        noun = "seeds" if values.nunique() > 1 else "seed"
        methods_by_seeds.setdefault(f"{noun} {_values(values)}", []).append(
            names.method(str(method))
        )
    most_common = max(methods_by_seeds, key=lambda seeds: len(methods_by_seeds[seeds]), default="")
    exceptions = []
    for seeds, methods in methods_by_seeds.items():
        if seeds != most_common:
            subject = names.listing(methods)
            if len(methods) > MOST_METHODS:
                subject = names.count(len(methods), "method")
            exceptions.append(f"{subject}: {seeds}")
    return f"{most_common} ({'; '.join(exceptions)})" if exceptions else most_common


def _gates(cells: pd.DataFrame) -> str:
    """Text with the gates of these cells, as `gate=raw`; "" without cells."""
    return f"gate={_values(cells['gate'])}" if len(cells) else ""


def _values(values: pd.Series) -> str:
    """Text that lists the different values."""
    return names.listing(map(str, values.drop_duplicates()))


def _texts(study: Study) -> list[str]:
    """Texts with the calibration tokens and the library versions; "" for unknown ones."""
    tokens = sorted(
        {sum(report.get("valid_tokens", {}).values()) for report in study.calibrations.values()}
    )
    counts = " / ".join(f"{count:,}" for count in tokens)
    libraries = [
        f"{library} {'/'.join(library_versions)}"
        for library, library_versions in versions(study.origins).items()
    ]
    return [f"{counts} calibration tokens" if tokens else "", ", ".join(libraries)]


def machines_sentence(machines: Iterable[str]) -> str:
    """A sentence for captions with the machines of steps; "" when no step recorded its machine."""
    recorded = [machine for machine in dict.fromkeys(machines) if machine]
    return f"Measured on {names.listing(recorded)}. " if recorded else ""


PANEL = ["Model", "Pruned", "Calibration"]
"""Columns that identify the panels of a table."""
