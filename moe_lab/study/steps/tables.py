"""Rows of small tables that figures need from large arrays, so that readers of a store need neither the arrays nor
their format.

Columns are sums as in moe_lab/statistics, so that tables of parts can be added like the sums themselves.
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

POINTS = 21
"""Maximum number of points of an expert's concentration curve."""


def _of_experts(layers: Layers, *names: str) -> list[Row]:
    """Rows of a layer's experts with a number of each of these arrays (E,)."""
    return [
        (layer, expert, *values)
        for layer, named in layers.items()
        for expert, values in enumerate(zip(*(_array(named[name]).tolist() for name in names), strict=True))
    ]


def coverage(layers: Layers) -> list[Row]:
    """Rows of COVERAGE, one per expert: how many valid tokens were routed to it."""
    return [(layer, expert, int(tokens)) for layer, expert, tokens in _of_experts(layers, "tokens")]


def experts(layers: Layers) -> list[Row]:
    """Rows of EXPERTS, one per expert: tokens; sums over them of the gate and of the output's norm; its attributions of
    first and second order; the sum of its squared channels, and the maximum over its channels; number of channels; and
    the sum over channels of their root mean squares, for the mean and the spread of channels."""
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
            roots = _root_sum(square[expert], values[0])
            rows.append((layer, expert, *values, square.shape[1], roots))
    return rows


def _root_sum(squares: Array, tokens: float) -> float:
    """The sum over channels of sqrt(sum_t x^2 / N) from their sums over N tokens; 0 for no tokens."""
    return float(np.sqrt(squares / tokens).sum()) if tokens > 0 else 0.0


def losses(layers: Layers) -> list[Row]:
    """Rows of LOSSES: the sum over all valid tokens of ||m||^2 / (||y||^2 + eps) in every layer."""
    return [(layer, float(named["layer_loss"])) for layer, named in layers.items()]


def entropies(layers: Layers) -> list[Row]:
    """Rows of ENTROPIES: how many tokens have a router entropy between `entropy` minus a bin's width and `entropy`.

    `entropy` is a share of the logarithm of the number of experts. Layers whose router gives no logits of all experts
    have no rows.
    """
    rows = []
    for layer, named in layers.items():
        counts = _array(named.get("router_entropy", ()))
        rows += [(layer, (at + 1) / len(counts), count) for at, count in enumerate(counts.tolist())]
    return rows


def gradients(layers: Layers) -> list[Row]:
    """Rows of GRADIENTS, one per expert: tokens; the sum over tokens and channels of the squared gradient at a channel;
    the sum over channels of the root mean square of that gradient; and number of channels."""
    rows = []
    for layer, named in layers.items():
        squares, tokens = _array(named["channel_gradient_square"]), _array(named["tokens"]).tolist()
        for expert, (square, count) in enumerate(zip(squares, tokens, strict=True)):
            rows.append((layer, expert, count, float(square.sum()), _root_sum(square, count), len(square)))
    return rows


def weights(layers: Layers) -> list[Row]:
    """Rows of WEIGHTS, one per expert: sum |w|, sum w^2 and the number of its weights."""
    return [
        (layer, *row, float(layers[layer]["count"])) for layer, *row in _of_experts(layers, "abs_sum", "square_sum")
    ]


def ablations(layers: Layers) -> list[Row]:
    """Rows of ABLATIONS, one per expert: the rise of the model's loss without it, in nats per token."""
    return _of_experts(layers, "ablation")


def concentration(scores: Mapping[int, Array]) -> list[Row]:
    """Rows of CONCENTRATION: the share of an expert's score (I,) that its highest channels hold, for at most POINTS
    shares of its channels between 0 and 1. Negative scores count as 0; NaN where no channel has a score."""
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
    """Rows of BUDGETS: the share of a layer's score (E, I) that a plan keeps, and the share of its channels.

    `kept` (E, I) is True for channels that stay. Negative scores count as 0; NaN where no channel has a score.
    """
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
