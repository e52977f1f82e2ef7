"""Criteria of experts.

||.|| is the Euclidean norm over the hidden dimension. An expert that saw no token scores 0, the
lowest possible score. w is the concatenation of an expert's gate, up and down weights (biases and
router left out), P its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy

from moe_lab.criteria import Array, Layer, criterion, score
from moe_lab.errors import UserError

UNIFIED = "How to Score Experts for One-Shot MoE Expert Pruning, arXiv 2606.15716"
EXPONENTS = (0, 1, 2)
AIMER = "AIMER, arXiv 2603.18492"


@criterion("frequency", needs=("statistics",), reference=UNIFIED)
def frequency(layer: Layer) -> Array:
    """S(0,0,0) = N.

    N is the number of tokens routed to the expert. `s_family` defines S."""
    return layer.tokens


@criterion("seer", needs=("statistics",), reference="SEER-MoE, arXiv 2404.05089", uses_gate=True)
def seer(layer: Layer) -> Array:
    """S(0,1,0) = sum_t g: the soft count.

    g is the gate of the token; t runs over the tokens routed to the expert. `s_family` defines
    S."""
    return layer.sum(alpha=1, beta=0)


@criterion(
    "ean", needs=("statistics",), reference="Finding Fantastic Experts in MoEs, arXiv 2504.05586"
)
def ean(layer: Layer) -> Array:
    """S(0,0,1) = sum_t ||f||.

    f is the expert's output before the gate; t runs over the tokens routed to the expert.
    `s_family` defines S."""
    return layer.sum(alpha=0, beta=1)


@criterion("reap", needs=("statistics",), reference="REAP, arXiv 2510.13999", uses_gate=True)
def reap(layer: Layer) -> Array:
    """S(1,1,1) = 1/N sum_t g ||f||.

    N is the number of tokens routed to the expert, and t runs over them. g is the gate of the
    token, f the expert's output before the gate. `s_family` defines S."""
    return layer.mean(alpha=1, beta=1)


@criterion("man", needs=("statistics",), reference=UNIFIED)
def man(layer: Layer) -> Array:
    """S(1,0,1) = 1/N sum_t ||f||: the mean activation norm.

    N is the number of tokens routed to the expert, and t runs over them. f is the expert's
    output before the gate. `s_family` defines S."""
    return layer.mean(alpha=0, beta=1)


@criterion("msan", needs=("statistics",), reference=UNIFIED)
def msan(layer: Layer) -> Array:
    """S(1,0,2) = 1/N sum_t ||f||^2: the mean squared activation norm.

    N is the number of tokens routed to the expert, and t runs over them. f is the expert's
    output before the gate. `s_family` defines S."""
    return layer.mean(alpha=0, beta=2)


@criterion("gate_ean", needs=("statistics",), reference=UNIFIED, uses_gate=True)
def gate_ean(layer: Layer) -> Array:
    """S(0,1,1) = sum_t g ||f||: the proxy of the damage done by removing one expert.

    g is the gate of the token, f the expert's output before the gate; t runs over the tokens
    routed to the expert. `s_family` defines S."""
    return layer.sum(alpha=1, beta=1)


@criterion("gate_energy", needs=("statistics",), reference=UNIFIED, uses_gate=True)
def gate_energy(layer: Layer) -> Array:
    """S(0,2,2) = sum_t g^2 ||f||^2.

    g is the gate of the token, f the expert's output before the gate; t runs over the tokens
    routed to the expert. `s_family` defines S."""
    return layer.sum(alpha=2, beta=2)


@criterion("easy_ep", needs=("statistics",), reference="EASY-EP, arXiv 2504.06792")
def easy_ep(layer: Layer) -> Array:
    """sum_t s g ||f|| with s = max(0, 1 - cos(x, x + m)), x the residual stream before the MoE
    block, m the routed output: s weights a token by how much the routed experts turn the stream.
    g is the gate that the model multiplies with.

    f is the expert's output before the gate; t runs over the tokens routed to the expert."""
    return layer["shift_weighted"]


@criterion("mone", needs=("statistics",), reference="MoNE, arXiv 2507.00390", uses_gate=True)
def mone(layer: Layer) -> Array:
    """(1/N sum_t g) * V with V = || sqrt(1/(N-1) sum_t (f - mean f)^2) ||; 0 for N <= 1.

    N is the number of tokens routed to the expert, and t runs over them. g is the gate of the
    token, f the expert's output before the gate. Square and root are taken in each of the H
    components of f, the norm over all of them."""
    return layer.mean(alpha=1, beta=0) * _spread(layer)


@criterion(
    "mone_freq",
    needs=("statistics",),
    reference=UNIFIED,
    uses_gate=True,
)
def mone_freq(layer: Layer) -> Array:
    """(sum_t g) * V: MoNE without the division by N, as in the paper's prose; the paper's Table 6
    divides.

    g is the gate of the token; t runs over the tokens routed to the expert. `mone` defines V."""
    return layer.sum(alpha=1, beta=0) * _spread(layer)


@criterion("s_family", needs=("statistics",), reference=UNIFIED, uses_gate=True)
def s_family(layer: Layer, b: float, alpha: int, beta: int) -> Array:
    """S(b, alpha, beta) = N^-b sum_t g^alpha ||f||^beta, alpha and beta in {0, 1, 2}; 0 for N = 0.

    N is the number of tokens routed to the expert, and t runs over them. g is the gate of the
    token, f the expert's output before the gate. b is any number >= 0; the paper uses 0 and 1.
    UserError for S(1,0,0), which is 1 for every expert that saw a token."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value not in EXPONENTS:
            raise UserError(f"criterion.parameters.{name}={value} of s_family: expected 0, 1 or 2")
    if not (isinstance(b, (int, float)) and 0 <= b < float("inf")):
        raise UserError(
            f"criterion.parameters.b={b} of s_family: expected a number >= 0, such as 0 or 1"
        )
    if (b, alpha, beta) == (1, 0, 0):
        raise UserError(
            "criterion.parameters b=1, alpha=0, beta=0 of s_family score every expert alike: "
            "choose others"
        )
    return layer.sum(int(alpha), int(beta)) / numpy.maximum(layer.tokens, 1) ** b


@criterion("exact_damage", needs=("damage",), reference=UNIFIED)
def exact_damage(layer: Layer) -> Array:
    """sum_t ||y - y without j||: change of the layer's output when expert j alone is removed.

    y is the layer's output for the token t."""
    return layer["damage"]


@criterion("aimer", needs=("weights",), reference=AIMER)
def aimer(layer: Layer) -> Array:
    """-(||w||_1 / P) / sqrt(||w||_2^2 / P), in [-1, -1/sqrt(P)]; the ratio is negated because
    experts with the flattest weights are pruned first.

    w are the P weights of the expert. An expert whose weights are all 0 scores 0, as in the
    released code, so it is pruned last.
    """
    absolute = layer["abs_sum"]
    square = layer["square_sum"]
    count = layer["count"]
    # (||w||_1 / P) / sqrt(||w||_2^2 / P) = ||w||_1 / sqrt(P ||w||_2^2); the 1 avoids 0 / 0
    return -absolute / numpy.where(square > 0, numpy.sqrt(count * square), 1)


@criterion("magnitude", needs=("weights",), reference=AIMER)
def magnitude(layer: Layer) -> Array:
    """||w||_1 / P: the mean absolute weight.

    w are the P weights of the expert."""
    return layer["abs_sum"] / layer["count"]


@criterion("random", needs=(), reference=AIMER, uses_seed=True)
def random(layer: Layer) -> Array:
    """Uniform on [0, 1): numpy's PCG64(seed), one draw of E numbers per layer, in layer order."""
    return layer.random.random(layer.n_experts)


@criterion("file", needs=(), reference="docs/usage.md")
def file(layer: Layer, path: str, column: str | None = None) -> Array:
    """The scores in the file `path`: a table with layer, expert and score, or what another tool
    wrote. `column`: name of the scores in the file; None: the usual one."""
    return layer["file"]


def s_family_scores(
    statistics: Mapping[int, Mapping[str, Any]], gate: str
) -> list[tuple[int, int, int, int, int, float]]:
    """The scores by the 17 criteria S(b, alpha, beta) of `s_family` with b = 0 or 1, as rows
    (layer, expert, b, alpha, beta, score). `statistics`: layer -> name of the statistic -> array.
    `gate`: name of the gate g."""
    facts = {layer: {"n_experts": len(arrays["tokens"])} for layer, arrays in statistics.items()}
    rows = []
    for b, alpha, beta in product((0, 1), EXPONENTS, EXPONENTS):
        if (b, alpha, beta) == (1, 0, 0):  # 1 for every expert that saw a token
            continue
        exponents = {"b": b, "alpha": alpha, "beta": beta}
        scores = score("s_family", statistics, facts, gate=gate, parameters=exponents)
        rows += [
            (layer, expert, b, alpha, beta, float(value))
            for layer, values in scores.items()
            for expert, value in enumerate(values)
        ]
    return rows


def _spread(layer: Layer) -> Array:
    """The V that `mone` defines, shape (E,). Computed from sums over the tokens as
    sqrt((sum ||f||^2 - ||sum f||^2 / N) / (N - 1))."""
    tokens = layer.tokens
    square_sum = layer.sum(alpha=0, beta=2)
    scatter = square_sum - numpy.square(layer["output_sum"]).sum(-1) / numpy.maximum(tokens, 1)
    # rounding can make the scatter negative
    variance = numpy.maximum(scatter, 0) / numpy.maximum(tokens - 1, 1)
    return numpy.where(tokens > 1, numpy.sqrt(variance), 0)
