"""Allocations of channels: examples by hand, CBA against a naive search, whole blocks against the
paper's rule."""

import functools
from typing import Any

import numpy
import pytest
from example_facts import layer, settings
from hypothesis import assume, given
from hypothesis import settings as how
from hypothesis import strategies as st

from moe_lab.allocation import allocate
from moe_lab.allocation.coverage import Alignment, align, cover, expert_prior
from moe_lab.allocation.problem import RatioTooLarge
from moe_lab.allocation.shapes import SMOOTHINGS, smooth
from moe_lab.errors import UserError


def kept(chosen: Any, layers: Any, scores: Any, evidence: Any = None) -> dict[int, list[int]]:
    """Layer -> channels that each expert keeps."""
    retained = allocate(chosen, layers, scores, evidence)
    return {index: row.tolist() for index, row in retained.items()}


@given(st.integers(0, 500), st.floats(0, 0.99))
def test_global_keeps_the_best_of_all(seed: int, ratio: float) -> None:
    random = numpy.random.default_rng(seed)
    layers = {0: layer(2, width=4), 3: layer(3, width=5)}
    scores = {0: random.integers(0, 5, size=(2, 4)), 3: random.integers(0, 5, size=(3, 5))}
    channels = []
    for index, values in scores.items():
        for (expert, channel), score in numpy.ndenumerate(values):
            channels.append((score, index, expert, channel))
    budget = int(23 * (1 - ratio) + 1e-6)
    best = sorted(channels)[len(channels) - budget :]
    expected = {0: [0] * 2, 3: [0] * 3}
    for _, index, expert, _ in best:
        expected[index][expert] += 1
    assert kept(settings("global", ratio), layers, scores) == expected


def test_layerwise_compares_experts_of_a_layer() -> None:
    layers = {index: layer(2, width=4) for index in (0, 1)}
    scores = {
        0: numpy.array([[8, 7, 6, 5], [4, 3, 2, 1.0]]),
        1: numpy.array([[80, 10, 10, 10], [70, 60, 50, 20.0]]),
    }
    assert kept(settings("layerwise", 0.5), layers, scores) == {0: [4, 0], 1: [1, 3]}


def test_uniform_keeps_a_share_of_every_expert() -> None:
    layers = {0: layer(3, width=10), 1: layer(2, width=7)}
    equal = {0: numpy.ones((3, 10)), 1: numpy.ones((2, 7))}
    assert kept(settings("uniform", 0.25), layers, equal) == {0: [7, 7, 7], 1: [5, 5]}
    message = r"no channel of 7 in .* layer 1\b.* 0.857 is the largest feasible ratio"
    with pytest.raises(UserError, match=message):
        allocate(settings("uniform", 0.89), layers, equal)
    assert kept(settings("uniform", 0.857), layers, equal)[1] == [1, 1]


# ---- allocation=coverage


def test_coverage_by_hand() -> None:
    """One layer of three experts; sqrt makes their targets (.5, 1, .8)."""
    layers = {4: layer(3, width=4)}
    scores = {4: numpy.array([[1, 8, 0, 1], [3, 2, 3, 2], [2, 3, 4, 5.0]])}
    sums = {
        "layer_loss": 3.0,
        "ala_first": numpy.array([0.25, 1.0, 0.64]),
        "ala_second": numpy.array([1.0, 0.01, 0.01]),
    }
    for parameters, expected in (
        ({}, [1, 3, 2]),
        ({"intra": "uniform"}, [2, 2, 2]),
        ({"intra": "ranking"}, [1, 2, 3]),
        ({"intra": "proportional", "expert_smoothing": "none"}, [1, 3, 2]),  # .25 : 1 : .64
        ({"prior": "true_ablation"}, [3, 2, 1]),  # targets (1, .1, .1)
    ):
        chosen = settings("coverage", 0.5, **parameters)
        assert kept(chosen, layers, scores, {"statistics": {4: sums}})[4] == expected


def kept_of_equal_layers(
    ratio: float, scaling: tuple[float, float], name: str, **parameters: str
) -> list[int]:
    """Channels that two layers of equal scores keep, whose relative losses are 1 and 4."""
    layers = {index: layer(2, width=10) for index in (0, 1)}
    scores = {index: numpy.ones((2, 10)) for index in (0, 1)}
    evidence = {
        "statistics": {0: {"layer_loss": 1.0}, 1: {"layer_loss": 4.0}},
        "scaling": {0: {"scaling": scaling[0]}, 1: {"scaling": scaling[1]}},
    }
    chosen = settings(name, ratio, zero_expert="keep_null", **parameters)
    return [sum(row) for row in kept(chosen, layers, scores, evidence).values()]


def test_layers_are_weighed_by_the_loss_that_is_chosen() -> None:
    """MoE-Slimming, step 3 of Appendix A.1. Equal scores and sqrt: targets 1 and 2 by the relative
    loss, 3 and 2 by what the model's loss gains."""
    equal_layers = functools.partial(kept_of_equal_layers, 0.25, (0.09, 0.04))
    for inter in ("coverage", "loss_based"):
        parameters = {"inter": inter, "intra": "uniform"}
        assert equal_layers("coverage", **parameters) == [10, 20]
        assert equal_layers("coverage", **parameters, layer_prior="nll") == [18, 12]
    assert equal_layers("loss_based", layer_prior="nll") == [18, 12]


def test_layers_without_which_the_model_is_better_keep_the_least() -> None:
    parameters = {"intra": "uniform", "layer_prior": "nll"}
    assert kept_of_equal_layers(0.5, (-0.01, 0.04), "coverage", **parameters) == [1, 19]
    with pytest.raises(UserError, match=r"scaling is .*: expected numbers"):
        kept_of_equal_layers(0.5, (-0.01, -0.01), "coverage", **parameters)


def test_layer_losses_and_expert_priors_are_smoothed_apart() -> None:
    """Equal scores: coverage targets are kept shares. Losses 1 and 4, priors 1 and 9 in each layer
    of 2 x 12."""
    layers = {0: layer(2, width=12), 1: layer(2, width=12)}
    scores = {i: numpy.ones((2, 12)) for i in (0, 1)}
    prior = numpy.array([1.0, 9.0])
    sums = {
        0: {"layer_loss": 1.0, "ala_first": prior},
        1: {"layer_loss": 4.0, "ala_first": prior},
    }
    for parameters, expected in (
        ({}, {0: [2, 6], 1: [4, 12]}),  # layers 1 : 2, experts 1 : 3
        ({"layer_smoothing": "none"}, {0: [1, 4], 1: [7, 12]}),  # layers 1 : 4
        ({"expert_smoothing": "none"}, {0: [1, 7], 1: [4, 12]}),  # experts 1 : 9
    ):
        chosen = settings("coverage", 0.5, **parameters)
        assert kept(chosen, layers, scores, {"statistics": sums}) == expected


def covered(groups: list[numpy.ndarray], prior: numpy.ndarray, alpha: float) -> list[int]:
    """N_g(min(alpha phi_g, 1)) as defined: the smallest n whose prefix sum reaches the share."""
    result = []
    for scores, phi in zip(groups, prior, strict=True):
        descending = sorted(scores, reverse=True)
        target = min(alpha * phi, 1) * sum(descending)
        lengths = range(len(scores) + 1)
        result.append(next(n for n in lengths if sum(descending[:n]) >= target))
    return result


def naive(groups: list[numpy.ndarray], prior: numpy.ndarray, budget: int) -> list[int]:
    """The specification word by word: bisect alpha until floats meet, then one channel at a time to
    the group with the smallest achieved / target coverage."""
    low = 0.0
    high = 1 / min(prior)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(covered(groups, prior, middle)) <= budget:
            low = middle
        else:
            high = middle
    result = covered(groups, prior, low)

    def reached(g: int) -> float:
        best = sorted(groups[g], reverse=True)[: result[g]]
        return float(sum(best) / sum(groups[g]) / prior[g])

    while sum(result) < budget:
        open_groups = [g for g in range(len(groups)) if result[g] < len(groups[g])]
        result[min(open_groups, key=reached)] += 1
    return result


ROWS = st.lists(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), min_size=1, max_size=4)


@given(ROWS, st.lists(st.floats(0.05, 1), min_size=4, max_size=4), st.floats(0, 1))
@how(max_examples=50)
def test_exact_is_the_search_run_to_the_end(
    rows: list[list[float]], targets: list[float], fill: float
) -> None:
    groups = [numpy.array(row) for row in rows]
    prior = numpy.array(targets[: len(rows)])
    channels = sum(map(len, groups))
    # below, alpha is 0 and all groups are tied
    budget = max(len(groups), round(fill * channels))
    shares = set()
    for row, target in zip(rows, prior, strict=True):
        covered_shares = numpy.cumsum(sorted(row, reverse=True)) / sum(row)
        shares |= {round(share / target, 6) for share in covered_shares}
    assume(len(shares) == channels)  # ties may fall either way
    assert cover(groups, prior, budget).tolist() == naive(groups, prior, budget)


def test_groups_without_score_or_target_come_last() -> None:
    groups = [
        numpy.zeros(3),
        numpy.array([2.0, 1.0, 0.0]),
        numpy.array([5.0, 4.0, 3.0]),
        -numpy.ones(3),
    ]
    prior = numpy.array([1, 1, 0, 1.0])
    assert cover(groups, prior, 2).tolist() == [0, 2, 0, 0]
    assert cover(groups, prior, 5).tolist() == [0, 2, 3, 0]
    assert cover(groups, prior, 12).tolist() == [3, 3, 3, 3]
    assert cover(groups, numpy.zeros(4), 4).sum() == 4


def test_of_equal_groups_the_larger_target_comes_first() -> None:
    equal = [numpy.ones(2), numpy.ones(2)]
    targets = numpy.array([0.5, 1])
    assert cover(equal, targets, 1).tolist() == [0, 1]


SUMS = numpy.zeros((3, 3, 3))
SUMS[:, 1, 0] = [0.5, 1.5, 2.5]
EVIDENCE: dict[str, Any] = {
    "statistics": {
        7: {
            "ala_first": numpy.array([3.0, -1.0, 2.0]),
            "ala_second": numpy.array([4.0, 5.0, 6.0]),
            "tokens": numpy.array([10.0, 0.0, 30.0]),
            "sums_model": SUMS,
        }
    },
    "ablation": {7: {"ablation": numpy.array([0.1, -0.2, 0.3])}},
    # means of 1, 1 and 1 + ln 3 over ten tokens
    "similarity": {7: {"router_absolute": 10 * numpy.array([[1, 1, 1 + numpy.log(3)], [1] * 3])}},
    "gradients": {
        7: {
            "channel_product": numpy.array(
                [
                    [-1.0, -2.0],
                    [3.0, 4.0],
                    [-5.0, 1.0],
                ]
            )
        }
    },
}
PRIORS: dict[Any, list[float]] = {
    "ala1": [3, 0, 2],
    "ala2": [4, 5, 6],
    "true_ablation": [4, 5, 6],
    "loss": [0.1, 0, 0.3],
    "usage": [10, 0, 30],
    "router_weight": [0.5, 1.5, 2.5],
    "ala_lm": [3, 0, 4],
    "moe_slimming.router": [0.2, 0.2, 0.6],
    "none": [1, 1, 1],
}


def test_values_of_priors() -> None:
    """MoE-Slimming, Table 6, whose router rows are `moe_slimming.router` by its released code."""
    for prior, expected in PRIORS.items():
        assert expert_prior(prior, EVIDENCE, 7, 3) == pytest.approx(expected), prior
    with pytest.raises(UserError, match=r"channel_product of layer 8.* gradients"):
        expert_prior("ala_lm", EVIDENCE, 8, 3)


SMOOTHED = numpy.array([0.25, 0.75, 1.0, 2.0])
HALF_DEVIATION = 0.5 * 0.40625**0.5
"""Their mean is 1, their population deviation sqrt(0.40625)."""
DELTA = 1 + HALF_DEVIATION


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sqrt", [0.5, 0.75**0.5, 1, 2**0.5]),
        ("log", [numpy.log(2.25), numpy.log(4.75), numpy.log(6), numpy.log(11)]),
        ("huber", [0.25, 0.75, 1, DELTA + (DELTA * (2 - DELTA)) ** 0.5]),
        ("clip", [1 - HALF_DEVIATION, 0.75, 1, 1 + HALF_DEVIATION]),
        ("none", SMOOTHED.tolist()),
    ],
)
def test_formulas_of_smoothing(name: str, expected: list[float]) -> None:
    assert smooth(SMOOTHED, name) == pytest.approx(expected)


@pytest.mark.parametrize("name", SMOOTHINGS)
def test_smoothing_is_monotone_and_positive_in_any_unit(name: str) -> None:
    """Targets are equal without any values, and none is zero."""
    values = smooth(numpy.array([0.0, 1e-9, 3.0]), name)
    assert smooth(numpy.zeros(2), name).tolist() == [1, 1]
    assert 0 < values[0] <= values[1] <= values[2]
    assert smooth(1000 * SMOOTHED, name) == pytest.approx(smooth(SMOOTHED, name))


# ---- whole blocks


def aligned(
    counts: Any, width: int, block: int, *, least: int | None = None, order: str = "remainder"
) -> list[int]:
    scores = numpy.tile(numpy.arange(width, 0.0, -1), (len(counts), 1))
    min_channels = block if least is None else least
    rules = Alignment(block, min_channels, order)
    return align({0: numpy.array(counts)}, {0: scores}, rules)[0].tolist()


def test_blocks_that_are_left_over_go_by_channels_or_by_scores() -> None:
    rows = [
        [9, 8, 1, 1],
        [9, 8, 7, 1],
        [9, 8, 1, 0],
    ]
    scores = {0: numpy.array(rows, dtype=float)}
    counts = {0: numpy.array([3, 3, 2])}
    for order, expected in (("remainder", [4, 2, 2]), ("scores", [2, 4, 2])):
        assert align(counts, scores, Alignment(2, 2, order))[0].tolist() == expected


def reference(
    counts: list[int], lost: list[float], width: int, block: int, least: int
) -> list[int]:
    """The paper's rule, one block at a time, with a second pass for what is left."""
    active = [i for i, n in enumerate(counts) if n >= least and n > 0]
    result = [0] * len(counts)
    for i in active:
        result[i] = counts[i] // block * block
    blocks = (sum(counts) - sum(result)) // block
    while blocks and any(result[i] + block <= width for i in active):
        for i in sorted(active, key=lambda i: -lost[i]):
            if blocks and result[i] + block <= width:
                result[i] += block
                blocks -= 1
    return result


@given(
    st.lists(st.integers(0, 24), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4, 5, 7, 8]),
    st.integers(0, 10),
    st.sampled_from(["remainder", "scores"]),
)
def test_aligned_budgets_are_multiples_of_a_block(
    counts: list[int], block: int, least: int, order: str
) -> None:
    try:
        result = aligned(counts, 24, block, least=least, order=order)
    except RatioTooLarge:
        assert max(counts) < least or max(counts) < block
        return
    assert all(n % block == 0 and 0 <= n <= 24 for n in result)
    assert all(n == 0 for n, count in zip(result, counts, strict=True) if count < least)
    whole_width = 24 // block * block
    full = set(result) <= {0, whole_width}
    assert sum(counts) - block < sum(result) <= sum(counts) or full
    if order == "remainder":
        remainders = [n % block for n in counts]
        assert result == reference(counts, remainders, 24, block, least)


def test_blocks_that_do_not_fit_are_refused() -> None:
    layers = {i: layer(6, width=32) for i in (0, 2)}
    scores = {i: numpy.ones((6, 32)) for i in layers}
    for blocks, ratio, message in (
        ({"block": 12}, 0.2, r"align\.block=12\b.* 288; 0.248 is the smallest feasible ratio"),
        ({"block": 33, "min_channels": 1}, 0.5, r"align\.block=33\b.*\b32\b"),
        ({"block": 4, "min_channels": 33}, 0.5, r"align\.min_channels=33\b.*\b32\b"),
    ):
        with pytest.raises(UserError, match=message):
            allocate(settings("global", ratio, align=blocks), layers, scores)


def test_ratios_that_leave_a_layer_no_block_are_refused() -> None:
    layers = {0: layer(4, width=16)}
    scores = {0: numpy.ones((4, 16)) + numpy.arange(16) / 100}
    chosen = settings("coverage", 0.9, intra="uniform", layer_prior="none", align={"block": 8})
    with pytest.raises(UserError, match=r"layer 0\b.* 2\b.*; 0.546 is the largest feasible ratio"):
        allocate(chosen, layers, scores)
    chosen["ratio"] = 0.546
    assert allocate(chosen, layers, scores)[0].sum() > 0
