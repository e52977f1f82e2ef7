from __future__ import annotations

import numpy
import pytest
from facts_of import layer, settings
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.allocation import budgets, check, needs
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError


def test_ten_percent_of_a_thousand_is_a_hundred() -> None:
    layers, scores = {0: layer(10, width=100)}, {0: numpy.arange(1000.0).reshape(10, 100)}
    assert budgets(settings("global", 0.9), layers, scores)[0].tolist() == [0] * 9 + [100]


@given(st.integers(0, 500), st.floats(0, 0.99))
def test_global_keeps_the_best_of_all(seed: int, ratio: float) -> None:
    random = numpy.random.default_rng(seed)
    layers = {0: layer(2, width=4), 3: layer(3, width=5)}
    scores = {
        i: random.integers(0, 5, size=(facts["n_experts"], facts["width"])).astype(float) for i, facts in layers.items()
    }
    everything = sorted((score, i, e, c) for i, values in scores.items() for (e, c), score in numpy.ndenumerate(values))
    expected = {i: [0] * facts["n_experts"] for i, facts in layers.items()}
    for _, i, expert, _ in everything[len(everything) - int(23 * (1 - ratio) + 1e-6) :]:
        expected[i][expert] += 1
    assert {i: row.tolist() for i, row in budgets(settings("global", ratio), layers, scores).items()} == expected


def test_layerwise_keeps_the_best_of_each_layer() -> None:
    layers = {0: layer(2, width=4), 1: layer(2, width=4)}
    scores = {0: numpy.array([[8, 7, 6, 5], [4, 3, 2, 1.0]]), 1: numpy.array([[80, 10, 10, 10], [70, 60, 50, 20.0]])}
    kept = budgets(settings("layerwise", 0.5), layers, scores)
    assert {index: row.tolist() for index, row in kept.items()} == {0: [4, 0], 1: [1, 3]}


def test_uniform_keeps_widths_equal() -> None:
    layers, scores = {0: layer(3, width=10), 1: layer(2, width=7)}, {0: numpy.ones((3, 10)), 1: numpy.ones((2, 7))}
    kept = budgets(settings("uniform", 0.25), layers, scores)
    assert {index: row.tolist() for index, row in kept.items()} == {0: [7, 7, 7], 1: [5, 5]}
    with pytest.raises(UserError, match=r"no channel of 7 in .* layer 1\b.* 0.857 is the largest feasible ratio"):
        budgets(settings("uniform", 0.89), layers, scores)
    assert budgets(settings("uniform", 0.857), layers, scores)[1].tolist() == [1, 1]


def test_coverage_by_hand() -> None:
    """One layer with the golden groups of algorithm CBA as experts; sqrt makes their targets (.5, 1, .8)."""
    layers = {4: layer(3, width=4)}
    scores = {4: numpy.array([[1, 8, 0, 1], [3, 2, 3, 2], [2, 3, 4, 5.0]])}
    attribution = numpy.array([0.25, 1.0, 0.64])
    evidence = {
        "statistics": {4: {"layer_loss": 3.0, "ala_first": attribution, "ala_second": numpy.array([1.0, 0.01, 0.01])}}
    }
    assert budgets(settings("coverage", 0.5), layers, scores, evidence)[4].tolist() == [1, 3, 2]
    assert budgets(settings("coverage", 0.5, intra="uniform"), layers, scores, evidence)[4].tolist() == [2, 2, 2]
    assert budgets(settings("coverage", 0.5, intra="ranking"), layers, scores, evidence)[4].tolist() == [1, 2, 3]
    plain = settings("coverage", 0.5, intra="proportional", expert_smoothing="none")  # 6 of .25 : 1 : .64, at most 4
    assert budgets(plain, layers, scores, evidence)[4].tolist() == [1, 3, 2]
    second = settings("coverage", 0.5, intra="proportional", prior="ala2", expert_smoothing="none")  # 1 : .01 : .01
    assert budgets(second, layers, scores, evidence)[4].tolist() == [4, 1, 1]
    ablated = settings("coverage", 0.5, prior="true_ablation")  # targets (1, .1, .1)
    assert budgets(ablated, layers, scores, evidence)[4].tolist() == [3, 2, 1]


def test_layers_are_weighed_by_the_loss_that_is_chosen() -> None:
    """Equal scores and sqrt: targets 1 and 2 by the relative loss, 3 and 2 by what the model's loss gains."""
    layers, scores = {i: layer(2, width=10) for i in (0, 1)}, {i: numpy.ones((2, 10)) for i in (0, 1)}
    evidence = {
        "statistics": {0: {"layer_loss": 1.0}, 1: {"layer_loss": 4.0}},
        "scaling": {0: {"scaling": 0.09}, 1: {"scaling": 0.04}},
    }

    def kept(inter: str, layer_prior: str) -> list[int]:
        chosen = settings("coverage", 0.25, inter=inter, layer_prior=layer_prior, intra="uniform")
        assert needs({**chosen, "by": None}) == (("scaling",) if layer_prior == "nll" else ("statistics",))
        return [int(row.sum()) for row in budgets(chosen, layers, scores, evidence).values()]

    for inter in ("coverage", "loss_based"):
        assert kept(inter, "loss") == [10, 20]
        assert kept(inter, "nll") == [18, 12]
    alone = settings("loss_based", 0.25, layer_prior="nll")
    assert [int(row.sum()) for row in budgets(alone, layers, scores, evidence).values()] == [18, 12]
    evidence["scaling"][0]["scaling"] = -0.01  # a layer without which the model is better
    lower = settings("coverage", 0.5, layer_prior="nll", intra="uniform", zero_expert="keep_null")
    assert [int(row.sum()) for row in budgets(lower, layers, scores, evidence).values()] == [1, 19]
    evidence["scaling"][1]["scaling"] = -0.01
    with pytest.raises(UserError, match=r"scaling is .*: expected numbers"):
        budgets(lower, layers, scores, evidence)


def test_layer_losses_and_expert_priors_are_smoothed_apart() -> None:
    """Equal scores: coverage targets are kept shares. Losses 1 and 4, priors 1 and 9 in each layer of 2 x 12."""
    layers, scores = {0: layer(2, width=12), 1: layer(2, width=12)}, {i: numpy.ones((2, 12)) for i in (0, 1)}
    prior = numpy.array([1.0, 9.0])
    evidence = {"statistics": {i: {"layer_loss": loss, "ala_first": prior} for i, loss in ((0, 1.0), (1, 4.0))}}

    def kept(**parameters: str) -> dict[int, list[int]]:
        found = budgets(settings("coverage", 0.5, **parameters), layers, scores, evidence)
        return {index: row.tolist() for index, row in found.items()}

    assert kept() == {0: [2, 6], 1: [4, 12]}  # layers 1 : 2, experts 1 : 3
    assert [sum(row) for row in kept(layer_smoothing="none").values()] == [5, 19]  # 1 : 4
    assert [row[1] / sum(row) for row in kept(layer_smoothing="none").values()] == pytest.approx([0.8, 12 / 19])
    assert [sum(row) for row in kept(expert_smoothing="none").values()] == [8, 16]
    assert kept(expert_smoothing="none")[0] == [1, 7]  # 1 : 9
    with pytest.raises(UserError, match="smoothing"):
        check(AllocationConfig(name="coverage", parameters={"smoothing": "log"}), "channel")


def test_blocks_that_do_not_divide_the_width() -> None:
    layers, scores = (
        {i: layer(6, width=32) for i in (0, 2)},
        {i: numpy.random.default_rng(i).random((6, 32)) for i in (0, 2)},
    )
    kept = budgets(settings("global", 0.5, align={"block": 12}), layers, scores)
    assert {int(count) for row in kept.values() for count in row} <= {0, 12, 24}, "two blocks and 8 channels more"
    with pytest.raises(UserError, match=r"align\.block=12\b.* 288; 0.248 is the smallest feasible ratio"):
        budgets(settings("global", 0.2, align={"block": 12}), layers, scores)


def test_a_block_too_large_for_the_ratio_names_the_largest_ratio() -> None:
    layers, scores = {0: layer(4, width=16)}, {0: numpy.ones((4, 16)) + numpy.arange(16) / 100}
    chosen = settings("coverage", 0.9, intra="uniform", layer_prior="none", align={"block": 8})
    with pytest.raises(UserError, match=r"layer 0\b.* 2\b.*; 0.546 is the largest feasible ratio"):
        budgets(chosen, layers, scores)
    assert budgets({**chosen, "ratio": 0.546}, layers, scores)[0].sum() > 0


@pytest.mark.parametrize("prior", ["usage", "router_weight", "loss"])
def test_plain_shares_are_proportional_to_the_prior(prior: str) -> None:
    """The naive way: share e of the layer is budget * prior_e / sum(prior), in whole channels."""
    random = numpy.random.default_rng(5)
    measured = random.uniform(1, 2, 6)
    layers, scores = {0: layer(6, width=50)}, {0: random.random((6, 50))}
    sums = numpy.zeros((6, 3, 3))
    sums[:, 1, 0] = measured
    evidence = {
        "statistics": {0: {"layer_loss": 1.0, "tokens": measured, "sums_model": sums}},
        "ablation": {0: {"ablation": measured}},
    }
    plain = settings("coverage", 0.5, intra="proportional", prior=prior, expert_smoothing="none")
    kept = budgets(plain, layers, scores, evidence)[0]
    assert kept.sum() == 150 and abs(kept - 150 * measured / measured.sum()).max() < 1
    assert needs({**plain, "by": None}) == (("ablation", "statistics") if prior == "loss" else ("statistics",))
