"""Rows of small tables for figures, computed from large arrays. Readers of a store need only the
tables. moe_lab/result_files.py describes the columns of each table.

Columns of passes are sums over tokens, as in moe_lab/statistics, so that tables of several parts of
a text can be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = tuple[Any, ...]
Arrays = Mapping[str, Any]
"""Arrays of a layer by name, of numpy or of torch on the CPU."""
Layers = Mapping[int, Arrays]
"""Layer -> its arrays."""

POINTS = 21
"""Maximum number of points of an expert's concentration curve."""


def of_experts(columns_of: Callable[[Any], Iterable[Sequence[Any]]]) -> Callable[[Any], list[Row]]:
    """Decorator of a function that returns the columns of a layer's experts, each with one value
    per expert. The decorated function takes layer -> argument of the function, and returns rows
    (layer, expert, value of each column)."""

    @wraps(columns_of)
    def rows(layers: Mapping[int, Any]) -> list[Row]:
        return [
            (layer, expert, *values)
            for layer, layer_values in layers.items()
            for expert, values in enumerate(zip(*columns_of(layer_values), strict=True))
        ]

    return rows


@of_experts
def scores(values: Array) -> Iterable[Sequence[Any]]:
    """SCORES of experts, from their scores (E,)."""
    return [values.tolist()]


@of_experts
def experts(arrays: Arrays) -> Iterable[Sequence[Any]]:
    """EXPERTS: sums over the tokens that are routed to each expert."""
    tokens = _array(arrays["tokens"])
    # (E, 3, 3): the number [e, alpha, beta] is the sum over the tokens of expert e of
    # gate^alpha |output|^beta
    sums = _array(arrays["sums_model"])
    # (E, I): sums over tokens of the squared activation of each channel
    squares = _array(arrays["channel_square"])
    columns = (
        tokens,
        sums[:, 1, 0],  # gates
        sums[:, 0, 1],  # norms of outputs
        _array(arrays["ala_first"]),
        _array(arrays["ala_second"]),
        squares.sum(axis=1),
        _widths(squares),
        _root_sums(squares, tokens),
    )
    return map(np.ndarray.tolist, columns)


def _widths(squares: Array) -> NDArray[np.int64]:
    """The number of channels I of each expert (E,). `squares`: (E, I)."""
    return np.full(len(squares), squares.shape[1])


def _root_sums(squares: Array, tokens: Array) -> Array:
    """For each expert, the sum over channels of sqrt(squares / tokens), or 0 without tokens.
    `squares` (E, I): for each channel, the sum over tokens of its squared values. `tokens` (E,):
    number of tokens of each expert."""
    counts = np.where(tokens > 0, tokens, np.inf)
    return _array(np.sqrt(squares / counts[:, None]).sum(axis=1))


def losses(layers: Layers) -> list[Row]:
    """One row of LOSSES per layer: (layer, sum over tokens of the layer's loss, see LOSSES)."""
    return [(layer, float(arrays["layer_loss"])) for layer, arrays in layers.items()]


def entropies(layers: Layers) -> list[Row]:
    """Rows of ENTROPIES: (layer, upper end of a bin, number of tokens in the bin). The bins are
    equal parts of the range from 0 to 1, where 1 stands for the largest possible entropy of the
    router. A layer has no rows if its router does not return the logits of all experts."""
    rows = []
    for layer, arrays in layers.items():
        counts = _array(arrays.get("router_entropy", ()))
        for bin_number, count in enumerate(counts.tolist(), start=1):
            rows.append((layer, bin_number / len(counts), count))
    return rows


@of_experts
def gradients(arrays: Arrays) -> Iterable[Sequence[Any]]:
    """GRADIENTS: sums over the tokens that are routed to each expert."""
    # (E, I): sums over tokens of the squared gradient at the activation of each channel
    squares = _array(arrays["channel_gradient_square"])
    tokens = _array(arrays["tokens"])
    columns = (tokens, squares.sum(axis=1), _root_sums(squares, tokens), _widths(squares))
    return map(np.ndarray.tolist, columns)


@of_experts
def weights(arrays: Arrays) -> Iterable[Sequence[Any]]:
    """WEIGHTS: the sum of |w|, the sum of w^2, and the number of weights of each expert."""
    # all experts of a layer have the same number of weights
    sums = np.broadcast_arrays(arrays["abs_sum"], arrays["square_sum"], arrays["count"])
    return [_array(values).tolist() for values in sums]


@of_experts
def ablations(arrays: Arrays) -> Iterable[Sequence[Any]]:
    """ABLATIONS: the rise of the model's loss without each expert."""
    return [_array(arrays["ablation"]).tolist()]


def concentration(scores: Mapping[int, Array]) -> list[Row]:
    """Rows of CONCENTRATION: (layer, expert, share of the channels, share of the score). The two
    shares are a point of `_curve`. `scores`: layer -> scores (E, I) of channels."""
    rows = []
    for layer, layer_scores in scores.items():
        for expert, channel_scores in enumerate(layer_scores):
            rows += [(layer, expert, *point) for point in _curve(channel_scores)]
    return rows


def _curve(scores: Array) -> Iterator[tuple[float, float]]:
    """Points (x, y) of the concentration curve of an expert. x is a share of the expert's channels,
    those with the highest scores. y is the share that these channels have of the sum of all scores.
    y is NaN if no score is positive. `scores` (I,): scores of the expert's channels."""
    ordered = np.sort(_positive(scores))[::-1]
    total = ordered.sum()
    score_shares = np.concatenate([[0.0], np.cumsum(ordered)]) / (total if total > 0 else np.nan)
    # numbers of channels from 0 to I, one for each point
    counts = np.unique(np.linspace(0, ordered.size, POINTS).round().astype(int))
    yield from zip((counts / ordered.size).tolist(), score_shares[counts].tolist(), strict=True)


def budgets(scores: Mapping[int, Array], retained: Mapping[int, NDArray[np.bool_]]) -> list[Row]:
    """One row of BUDGETS per layer: (layer, share of the layer's score that the retained channels
    have, share of the layer's channels that is retained). `scores`: layer -> scores (E, I) of
    channels. `retained`: layer -> mask (E, I) of the channels that a plan retains. Negative scores
    count as 0."""
    rows = []
    for layer, mask in retained.items():
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
