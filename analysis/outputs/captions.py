"""Texts shared by captions (seeds, gates, calibration tokens, versions), and data that several
outputs need."""

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
"""HEAPR to LOSSES: data that several outputs need, shown when a study lacks it."""
GPU_PEAK = "Peak GPU memory (MiB)"
MEASURED = (
    "Seconds are those of the process that finished a step, without the work of interrupted ones "
    "before it. "
)
MEBIBYTE = 2**20


@lru_cache(maxsize=8)
def setting(study: Study) -> str:
    """Text for captions of scores: items, metrics, level of intervals, and the text of
    `reading`."""
    sizes = study.results["n"]
    if not len(sizes):
        return f"No results; {reading(study)}"
    items = " to ".join(dict.fromkeys(f"{size:g}" for size in (sizes.min(), sizes.max())))
    metrics = sorted(set(metrics_in_words(study.results)))
    noun = "metric" if len(metrics) == 1 else "metrics"
    protocol = f" ({protocols(study.cells)})" if protocols(study.cells) else ""
    level = f"{names.share(uncertainty.CONFIDENCE)} intervals"
    measured = (
        f"{items} items per benchmark; {noun} {names.listing(metrics)}{protocol}; {level}; "
        f"{reading(study)}"
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
def reading(study: Study) -> str:
    """Text for captions of numbers of cells: seeds, gates, calibration tokens, library versions."""
    cells = study.cells[study.cells["criterion"] != "none"]
    return _joined([_seeds(cells), _gates(cells), *_texts(study)])


@lru_cache(maxsize=8)
def of_pass(study: Study) -> str:
    """The text of `reading` for numbers that are shown for one gate and seed of several."""
    cells = study.cells[
        (study.cells["criterion"] != "none") & study.cells["statistics_folder"].notna()
    ]
    passes = shown_passes(cells)
    parts = []
    for describe, axis in ((_seeds, "seed"), (_gates, "gate")):
        left_out = set(cells[axis]) - set(passes[axis])
        parts.append(f"{describe(passes)}{f' (of {_values(cells[axis])})' if left_out else ''}")
    return _joined([*parts, *_texts(study)])


def _joined(parts: Iterable[str]) -> str:
    return "; ".join(filter(None, parts)) + "."


MOST_NAMED = 3
"""Most methods that are named beside their seeds."""


def _seeds(cells: pd.DataFrame) -> str:
    """`seed 42`; `seeds 1 and 2`; `seed 42 (Random: seeds 1, 2 and 3)` where methods have different
    seeds."""
    methods_by_seeds: dict[str, list[str]] = {}
    for method, values in cells.groupby("method", sort=False)["seed"]:
        noun = "seeds" if values.nunique() > 1 else "seed"
        methods_by_seeds.setdefault(f"{noun} {_values(values)}", []).append(
            names.method(str(method))
        )
    usual = max(methods_by_seeds, key=lambda seeds: len(methods_by_seeds[seeds]), default="")
    others = []
    for seeds, methods in methods_by_seeds.items():
        if seeds != usual:
            few = len(methods) <= MOST_NAMED
            others.append(
                f"{names.listing(methods) if few else names.count(len(methods), 'method')}: {seeds}"
            )
    return f"{usual} ({'; '.join(others)})" if others else usual


def _gates(cells: pd.DataFrame) -> str:
    return f"gate={_values(cells['gate'])}" if len(cells) else ""


def _values(values: pd.Series) -> str:
    return names.listing(map(str, values.drop_duplicates()))


def _texts(study: Study) -> list[str]:
    """Calibration tokens and library versions, as far as they are known."""
    tokens = sorted(
        {sum(report.get("valid_tokens", {}).values()) for report in study.calibrations.values()}
    )
    return [
        f"{' / '.join(f'{count:,}' for count in tokens)} calibration tokens" if tokens else "",
        ", ".join(
            f"{library} {'/'.join(versions_of)}"
            for library, versions_of in versions(study.origins).items()
        ),
    ]


def measured_on(machines: Iterable[str]) -> str:
    """A sentence for captions; "" when no step has recorded its machine."""
    named = [machine for machine in dict.fromkeys(machines) if machine]
    return f"Measured on {names.listing(named)}. " if named else ""


PANEL = ["Model", "Pruned", "Calibration"]
"""Columns that identify the panels of a table."""
