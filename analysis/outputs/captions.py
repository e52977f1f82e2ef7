"""Texts shared by captions (seeds, gates, calibration tokens, versions), and data that several outputs need."""

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
ABLATED = "cells with allocation=coverage and allocation.parameters.prior=loss, which reads the ablation"
TIMED = "a run with timing=true"
LOSSES = "samples with answer_loss: benchmarks with reference answers, evaluated with likelihoods"
"""HEAPR to LOSSES: data that several outputs need, shown when a study lacks it."""
GPU_PEAK = "Peak GPU memory (MiB)"
MEASURED = "Seconds are of the process that finished a step: what an interrupted one had done before is not in them. "
MEBIBYTE = 2**20


@lru_cache(maxsize=8)
def setting(study: Study) -> str:
    """Text for captions of scores: items, metrics, level of intervals, and the text of `reading`."""
    sizes = study.results["n"]
    if not len(sizes):
        return f"No results; {reading(study)}"
    items = f"{sizes.min():g}" if sizes.nunique() == 1 else f"{sizes.min():g} to {sizes.max():g}"
    metrics = names.listing(sorted(set(metrics_in_words(study.results))))
    level = f"{names.share(uncertainty.CONFIDENCE)} intervals"
    mixed = "".join(f" {remark}" for remark in mixed_metrics(study.results, study.cells))
    if protocol_words := protocols(study.cells):
        metrics = f"{metrics}, as asked of {protocol_words}"
    return f"n = {items} items a benchmark; metric {metrics}; {level}; {reading(study)}{mixed}"


def metrics_in_words(results: pd.DataFrame) -> list[str]:
    """The metric of each result, with unit and direction where less is better."""
    columns = (results[name] for name in ("metric", "scale", "unit"))
    return [Quantity(scale, unit).described(str(metric)) for metric, scale, unit in zip(*columns, strict=True)]


@lru_cache(maxsize=8)
def reading(study: Study) -> str:
    """Text for captions of numbers from calibration passes: seeds, gates, calibration tokens, library versions."""
    cells = study.cells[study.cells["criterion"] != "none"]
    parts = [f"seed {_several(cells['seed'])}", f"gate {_several(cells['gate'])}"]
    return "; ".join([*parts, *_texts(study)]) + "."


def _texts(study: Study) -> list[str]:
    """Calibration tokens and library versions, as far as they are known."""
    tokens = sorted({sum(report.get("valid_tokens", {}).values()) for report in study.calibrations.values()})
    parts = [
        f"{' / '.join(f'{count:,}' for count in tokens)} calibration tokens" if tokens else "",
        ", ".join(f"{name} {'/'.join(found)}" for name, found in versions(study.origins).items()),
    ]
    return [part for part in parts if part]


@lru_cache(maxsize=8)
def of_pass(study: Study) -> str:
    """The text of `reading` for numbers that are shown for one gate and seed of several."""
    cells = study.cells[study.cells["criterion"] != "none"]
    one = shown_passes(cells) if cells["statistics_folder"].notna().any() else cells
    parts = [_chosen("seed", one["seed"], cells["seed"]), _chosen("gate", one["gate"], cells["gate"])]
    return "; ".join([*parts, *_texts(study)]) + "."


def _chosen(axis: str, shown: pd.Series, run: pd.Series) -> str:
    """`seed 42`, or `seed 42 (of 42, 43)`."""
    values, every = _several(shown), _several(run)
    return f"{axis} {values}" if values == every else f"{axis} {values} (of {every})"


def _several(values: pd.Series) -> str:
    return ", ".join(str(value) for value in values.drop_duplicates()) or "none"


def measured_on(machines: Iterable[str]) -> str:
    """A sentence for captions; "" when no step has recorded its machine."""
    named = [machine for machine in dict.fromkeys(machines) if machine]
    return f"Measured on {names.listing(named)}. " if named else ""


PANEL = ["Model", "Pruned", "Calibration"]
"""Columns that identify the panels of a table."""
