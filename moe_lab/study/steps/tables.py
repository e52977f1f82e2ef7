"""Rows of small tables that figures need from large arrays, so that readers of a store need neither
the arrays nor their format. The columns of each are described in moe_lab/results.py.

Columns are sums as in moe_lab/statistics, so that tables of parts can be added like the sums
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = tuple[Any, ...]
Layers = Mapping[int, Mapping[str, Any]]
"""Layer -> arrays by name, of numpy or of torch on the CPU."""

POINTS = 21
"""Maximum number of points of an expert's concentration curve."""


def _of_experts(layer: int, *columns: Sequence[Any]) -> list[Row]:
    """Rows of a layer's experts, with a number of each of these columns (E,)."""
    return [(layer, expert, *values) for expert, values in enumerate(zip(*columns, strict=True))]


def coverage(layers: Layers) -> list[Row]:
    """Rows of COVERAGE, one per expert."""
    return [
        row
        for layer, named in layers.items()
        for row in _of_experts(layer, list(map(int, named["tokens"])))
    ]


def experts(layers: Layers) -> list[Row]:
    """Rows of EXPERTS, one per expert."""
    rows = []
    for layer, named in layers.items():
        sums, square, largest = (
            _array(named[name]) for name in ("sums_model", "channel_square", "channel_max")
        )
        tokens, first, second = (
            _array(named[name]) for name in ("tokens", "ala_first", "ala_second")
        )
        columns = (
            tokens,
            sums[:, 1, 0],
            sums[:, 0, 1],
            first,
            second,
            square.sum(axis=1),
            largest.max(axis=1),
        )
        widths = [square.shape[1]] * len(square)
        rows += _of_experts(
            layer, *map(np.ndarray.tolist, columns), widths, _root_sums(square, tokens)
        )
    return rows


def _root_sums(squares: Array, tokens: Array) -> list[float]:
    """The sum over channels of sqrt(sum_t x^2 / N) of each expert, from sums over its N tokens; 0
    for no tokens."""
    return [
        float(np.sqrt(square / count).sum()) if count > 0 else 0.0
        for square, count in zip(squares, tokens.tolist(), strict=True)
    ]


def losses(layers: Layers) -> list[Row]:
    """Rows of LOSSES, one per layer."""
    return [(layer, float(named["layer_loss"])) for layer, named in layers.items()]


def entropies(layers: Layers) -> list[Row]:
    """Rows of ENTROPIES. Layers whose router gives no logits of all experts have none."""
    rows = []
    for layer, named in layers.items():
        counts = _array(named.get("router_entropy", ()))
        rows += [(layer, (at + 1) / len(counts), count) for at, count in enumerate(counts.tolist())]
    return rows


def gradients(layers: Layers) -> list[Row]:
    """Rows of GRADIENTS, one per expert."""
    rows = []
    for layer, named in layers.items():
        squares = _array(named["channel_gradient_square"])
        tokens = _array(named["tokens"])
        totals = [float(square.sum()) for square in squares]
        widths = [squares.shape[1]] * len(squares)
        rows += _of_experts(layer, tokens.tolist(), totals, _root_sums(squares, tokens), widths)
    return rows


def weights(layers: Layers) -> list[Row]:
    """Rows of WEIGHTS, one per expert."""
    rows = []
    for layer, named in layers.items():
        sums = [_array(named[name]).tolist() for name in ("abs_sum", "square_sum")]
        rows += _of_experts(layer, *sums, [float(named["count"])] * len(sums[0]))
    return rows


def ablations(layers: Layers) -> list[Row]:
    """Rows of ABLATIONS, one per expert."""
    return [
        row
        for layer, named in layers.items()
        for row in _of_experts(layer, _array(named["ablation"]).tolist())
    ]


def concentration(scores: Mapping[int, Array]) -> list[Row]:
    """Rows of CONCENTRATION: of each expert's scores (I,), for at most POINTS shares of its
    channels between 0 and 1. Negative scores count as 0; NaN where no channel has a score."""
    return [
        (layer, expert, *point)
        for layer, values in scores.items()
        for expert, one in enumerate(values)
        for point in _curve(one)
    ]


def _curve(values: Array) -> Iterator[tuple[float, float]]:
    ordered = np.sort(_positive(values))[::-1]
    total = ordered.sum()
    held = np.concatenate([[0.0], np.cumsum(ordered)]) / (total if total > 0 else np.nan)
    places = np.unique(np.linspace(0, ordered.size, POINTS).round().astype(int))
    yield from zip((places / ordered.size).tolist(), held[places].tolist(), strict=True)


def budgets(scores: Mapping[int, Array], kept: Mapping[int, NDArray[np.bool_]]) -> list[Row]:
    """Rows of BUDGETS, one per layer, from scores (E, I) and which channels a plan keeps (E, I).
    Negative scores count as 0; NaN where no channel has a score."""
    rows = []
    for layer, mask in kept.items():
        values = _positive(scores[layer])
        total = float(values.sum())
        rows.append(
            (
                layer,
                float(values[mask].sum()) / total if total > 0 else float("nan"),
                float(mask.mean()),
            )
        )
    return rows


def _array(values: Any) -> Array:
    return np.asarray(values, dtype=float)


def _positive(values: Array) -> Array:
    return np.maximum(_array(values), 0)
