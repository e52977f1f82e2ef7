"""What figures show of large arrays, as rows of small tables: who reads a store needs neither the arrays nor their
format.

Columns are sums as in statistics/sums.py, so that tables of parts could be added like the sums themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = tuple[Any, ...]
Layers = Mapping[int, Mapping[str, Any]]
"""Layer -> arrays by name, of numpy or of torch on the CPU."""

EXPERTS = (
    "layer",
    "expert",
    "tokens",
    "gate_sum",
    "norm_sum",
    "ala_first",
    "ala_second",
    "channel_square",
    "channel_max",
    "channels",
)
LOSSES = ("layer", "layer_loss")
ABLATIONS = ("layer", "expert", "ablation")
CONCENTRATION = ("layer", "channels", "score")
BUDGETS = ("layer", "coverage", "kept")
POINTS = 101
"""Points of a layer's curve of concentration at most."""


def experts(layers: Layers) -> list[Row]:
    """EXPERTS of every expert: tokens; sums over them of the gate and of the output's norm; its attributions of first
    and second order; the sum of its squared channels, and the largest of any; and how many channels it has."""
    rows = []
    for layer, named in layers.items():
        sums, square, largest = (_array(named[name]) for name in ("sums_model", "channel_square", "channel_max"))
        columns = (
            _array(named["tokens"]),
            sums[:, 1, 0],
            sums[:, 0, 1],
            _array(named["ala_first"]),
            _array(named["ala_second"]),
            square.sum(axis=1),
            largest.max(axis=1),
        )
        for expert, values in enumerate(zip(*map(np.ndarray.tolist, columns), strict=True)):
            rows.append((layer, expert, *values, square.shape[1]))
    return rows


def losses(layers: Layers) -> list[Row]:
    """LOSSES: the sum over all valid tokens of ||m||^2 / (||y||^2 + eps) in every layer."""
    return [(layer, float(named["layer_loss"])) for layer, named in layers.items()]


def ablations(layers: Layers) -> list[Row]:
    """ABLATIONS: what the model's loss gains without each expert, nats per token."""
    return [
        (layer, expert, value)
        for layer, named in layers.items()
        for expert, value in enumerate(_array(named["ablation"]).tolist())
    ]


def concentration(scores: Mapping[int, Array]) -> list[Row]:
    """CONCENTRATION: which share of a layer's score (E, I) its highest channels hold, for at most POINTS shares of its
    channels between 0 and 1. Negative scores count as 0; NaN where no channel has a score."""
    return [(layer, *point) for layer, values in scores.items() for point in _curve(values)]


def _curve(values: Array) -> Iterator[tuple[float, float]]:
    ordered = np.sort(_positive(values), axis=None)[::-1]
    total = ordered.sum()
    held = np.concatenate([[0.0], np.cumsum(ordered)]) / (total if total > 0 else np.nan)
    places = np.unique(np.linspace(0, ordered.size, POINTS).round().astype(int))
    yield from zip((places / ordered.size).tolist(), held[places].tolist(), strict=True)


def budgets(scores: Mapping[int, Array], kept: Mapping[int, NDArray[np.bool_]]) -> list[Row]:
    """BUDGETS: which share of a layer's score (E, I) a plan keeps, negative scores as 0, and which share of its
    channels; `kept` (E, I) is True for channels that stay. NaN where no channel has a score."""
    rows = []
    for layer, mask in kept.items():
        values = _positive(scores[layer])
        total = float(values.sum())
        rows.append((layer, float(values[mask].sum()) / total if total > 0 else float("nan"), float(mask.mean())))
    return rows


def _array(values: Any) -> Array:
    return np.asarray(values, dtype=float)


def _positive(values: Array) -> Array:
    return np.maximum(_array(values), 0)
