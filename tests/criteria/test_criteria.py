from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import naive
import numpy
import pytest
import tiny
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moe_lab import criteria
from moe_lab.config import GATES, CriterionConfig
from moe_lab.criteria.experts import family
from moe_lab.errors import UserError
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import Observer


def s(b: int, alpha: int, beta: int) -> Callable[[naive.Served, str], torch.Tensor]:
    """S(b, alpha, beta), one token after the other."""

    def formula(e: naive.Served, gate: str) -> torch.Tensor:
        return (e.by(gate) ** alpha * e.f.norm(dim=-1) ** beta).sum() / len(e.token) ** b

    return formula


def spread(e: naive.Served) -> torch.Tensor:
    return e.f.var(0).sqrt().norm() if len(e.token) > 1 else torch.tensor(0.0)


NAIVE: dict[str, Callable[[naive.Served, str], torch.Tensor]] = {
    "frequency": s(0, 0, 0),
    "seer": s(0, 1, 0),
    "ean": s(0, 0, 1),
    "reap": s(1, 1, 1),
    "man": s(1, 0, 1),
    "msan": s(1, 0, 2),
    "gate_ean": s(0, 1, 1),
    "gate_energy": s(0, 2, 2),
    "easy_ep": lambda e, gate: (e.shift.clamp(min=0) * e.gate * e.f.norm(dim=-1)).sum(),
    "mone": lambda e, gate: e.by(gate).mean() * spread(e),
    "mone_freq": lambda e, gate: e.by(gate).sum() * spread(e),
}
"""Criterion -> its formula on the tokens one expert served. Scores of experts that served none are 0."""

PARAMETERS: dict[str, dict[str, Any]] = {"s_family": {"b": 1, "alpha": 1, "beta": 2}}


@cache
def statistics(name: str) -> dict[int, dict[str, numpy.ndarray]]:
    with Observer(naive.model(name), ForwardTap) as observer:
        observer.read(*naive.batch())
    return {layer: {key: part.numpy() for key, part in named.items()} for layer, named in observer.layers().items()}


def experts(inputs: Any) -> dict[int, int]:
    return {layer: len(named["tokens"]) for layer, named in inputs.items()}


def expected(name: str, layer: int, gate: str, formula: Any) -> torch.Tensor:
    served = naive.routed(name)[layer].experts
    return torch.stack([torch.as_tensor(formula(e, gate) if len(e.token) else 0.0).double() for e in served])


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_scores_are_those_of_each_expert_alone(name: str) -> None:
    inputs = statistics(name)
    for gate in GATES:
        if f"sums_{gate}" not in next(iter(inputs.values())):
            continue
        for criterion, formula in NAIVE.items():
            scores = criteria.score(criterion, inputs, experts=experts(inputs), gate=gate)
            for layer, values in scores.items():
                assert values.dtype == numpy.float64
                reference = expected(name, layer, gate, formula)
                assert naive.relative(torch.from_numpy(values), reference) < 1e-5, (criterion, gate, layer)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_the_family_is_17_scores_of_every_expert(name: str) -> None:
    inputs = statistics(name)
    rows = family(inputs, "renormalized")
    assert len(rows) == 17 * sum(experts(inputs).values())
    for b, alpha, beta in {row[2:5] for row in rows}:
        assert (b, alpha, beta) != (1, 0, 0)
        for layer in inputs:
            values = [row[5] for row in rows if (row[0], *row[2:5]) == (layer, b, alpha, beta)]
            reference = expected(name, layer, "renormalized", s(b, alpha, beta))
            assert naive.relative(torch.tensor(values), reference) < 1e-5


def test_every_criterion_has_a_reference_or_golden_values() -> None:
    experts = {name for name, criterion in criteria.CRITERIA.items() if criterion.granularity == "expert"}
    assert experts == {*NAIVE, "s_family", "exact_damage", "aimer", "magnitude", "random"}


def test_s_family_takes_any_exponent_of_the_count() -> None:
    inputs = statistics("olmoe")
    half = criteria.score("s_family", inputs, experts=experts(inputs), parameters={"b": 0.5, "alpha": 0, "beta": 1})
    for layer, values in half.items():
        tokens = inputs[layer]["tokens"]
        assert numpy.allclose(values, inputs[layer]["sums_model"][:, 0, 1] / numpy.maximum(tokens, 1) ** 0.5)


def weights(rows: list[list[float]]) -> dict[int, dict[str, numpy.ndarray]]:
    w = numpy.array(rows)
    return {0: {"abs_sum": abs(w).sum(1), "square_sum": (w**2).sum(1), "count": numpy.array(float(w.shape[1]))}}


def test_golden_values_of_aimer_and_magnitude() -> None:
    rows = [[1, -1, 2, 0, 3, 1], [2, -2, 2, 2, -2, 2], [0, 0, 5, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    scores = criteria.score("aimer", weights(rows), experts={0: 4})[0]
    assert -scores[:3] == pytest.approx([0.816497, 1, 1 / math.sqrt(6)], abs=1e-6)
    assert criteria.ranking(scores).tolist() == [1, 0, 2, 3]  # the flattest first, the empty one last
    magnitudes = criteria.score("magnitude", weights(rows), experts={0: 4})[0]
    assert magnitudes == pytest.approx([8 / 6, 2, 5 / 6, 0])
    normal = numpy.random.default_rng(0).normal(size=(1, 100_000))
    assert -criteria.score("aimer", weights(normal.tolist()), experts={0: 1})[0][0] == pytest.approx(0.7979, abs=2e-3)


@pytest.mark.parametrize(("name", "more"), [("random", ()), ("channel_random", (6,))])
def test_random_is_one_generator_over_the_layers_in_order(name: str, more: tuple[int, ...]) -> None:
    shapes: dict[str, Any] = {"experts": {3: 4, 1: 5}, "widths": {3: 6, 1: 6}}
    scores = criteria.score(name, {}, **shapes, seed=42)
    generator = numpy.random.Generator(numpy.random.PCG64(42))
    assert numpy.array_equal(scores[1], generator.random((5, *more)))
    assert numpy.array_equal(scores[3], generator.random((4, *more)))
    assert not numpy.array_equal(criteria.score(name, {}, **shapes, seed=43)[1], scores[1])
    with pytest.raises(UserError, match="needs a seed"):
        criteria.score(name, {}, **shapes)


def edge() -> dict[int, dict[str, numpy.ndarray]]:
    """Three experts: one that saw no token, one that saw a single one, one whose outputs are all alike."""
    g, norm, n = numpy.array([0, 0.5, 0.25]), numpy.array([0, 3.0, 2.0]), numpy.array([0, 1.0, 4.0])
    sums = numpy.stack([[n * g**a * norm**b for b in range(3)] for a in range(3)]).transpose(2, 0, 1)
    f = numpy.zeros((3, 2))
    f[:, 0] = n * norm
    return {0: {"tokens": n, "sums_model": sums, "output_sum": f}}


@pytest.mark.parametrize("name", NAIVE)
def test_an_expert_without_tokens_is_pruned_first(name: str) -> None:
    inputs = statistics("olmoe")
    number = experts(inputs)
    silent = {layer: {word: silenced(part, number[layer]) for word, part in inputs[layer].items()} for layer in inputs}
    for scores in criteria.score(name, silent, experts=number).values():
        assert scores[0] == 0
        assert scores.min() == 0
        assert criteria.ranking(scores)[0] == 0


def silenced(sums: numpy.ndarray, number: int) -> numpy.ndarray:
    """Sums of one layer as if its first expert had seen no token."""
    if sums.ndim == 0 or len(sums) != number:
        return sums
    return numpy.concatenate([numpy.zeros_like(sums[:1]), sums[1:]])


def test_mone_needs_two_different_outputs() -> None:
    for name in ("mone", "mone_freq"):
        assert criteria.score(name, edge(), experts={0: 3})[0].tolist() == [0, 0, 0]
    rounded = edge()
    rounded[0]["sums_model"][2, 0, 2] -= 1e-9  # cancellation may leave less than nothing
    assert criteria.score("mone", rounded, experts={0: 3})[0].tolist() == [0, 0, 0]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=8))
def test_ranking_is_ascending_and_stable(scores: list[float]) -> None:
    assert criteria.ranking(scores).tolist() == sorted(range(len(scores)), key=lambda e: (scores[e], e))


def test_damage_is_passed_on() -> None:
    assert criteria.score("exact_damage", {0: {"damage": numpy.array([2.0, 1.0])}}, experts={0: 2})[0].tolist() == [
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("maan", {}, "criterion=maan is unknown: did you mean man"),
        ("man", {"b": 1}, "criterion.parameters of man=b is unknown"),
        ("s_family", {"b": 1, "alpha": 0}, "needs the parameter beta"),
        ("s_family", {"b": 1, "alpha": 3, "beta": 1}, "alpha=3 of s_family: expected 0, 1 or 2"),
        ("s_family", {"b": 1, "alpha": 1, "beta": 0.5}, "beta=0.5 of s_family"),
        ("s_family", {"b": -1, "alpha": 1, "beta": 1}, "b=-1 of s_family"),
        ("s_family", {"b": "x", "alpha": 1, "beta": 1}, "b=x of s_family"),
        ("s_family", {"b": 1, "alpha": 0, "beta": 0}, "every expert alike"),
    ],
)
def test_bad_names_and_parameters(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        criteria.check(name, parameters)
    with pytest.raises(UserError, match=message):
        criteria.score(name, edge(), experts={0: 3}, parameters=parameters)


def test_bad_statistics_and_gates() -> None:
    inputs = statistics("deepseek_v3")
    with pytest.raises(UserError, match=r"gate=modal is unknown: did you mean model"):
        criteria.score("reap", inputs, experts=experts(inputs), gate="modal")
    for gate in ("double_softmax", "full_softmax"):
        with pytest.raises(UserError, match=rf"layer 1 has no sums_{re.escape(gate)}.*gate=model or renormalized"):
            criteria.score("reap", inputs, experts=experts(inputs), gate=gate)
    assert criteria.score("man", inputs, experts=experts(inputs), gate="double_softmax")  # it has no gate
    with pytest.raises(UserError, match="layer 0 has no damage"):
        criteria.score("exact_damage", edge(), experts={0: 3})
    with pytest.raises(UserError, match="layer 7 has no tokens"):
        criteria.score("frequency", edge(), experts={0: 3, 7: 3})
    with pytest.raises(UserError, match="the statistics are of another model"):
        criteria.score("frequency", edge(), experts={0: 4})
    broken = edge()
    broken[0]["sums_model"][1, 0, 1] = numpy.nan
    with pytest.raises(UserError, match="criterion=ean gives NaN or Inf in layer 0, expert 1"):
        criteria.score("ean", broken, experts={0: 3})


def test_what_a_criterion_says_it_uses_is_what_it_uses() -> None:
    inputs = statistics("olmoe")
    for name, criterion in criteria.CRITERIA.items():
        if criterion.needs != ("statistics",) or criterion.granularity == "channel":
            assert criterion.uses_gate == (name == "camera")  # of channels: test_channel_criteria.py shows what it does
            continue
        parameters = PARAMETERS.get(name, {})
        one, two = (
            criteria.score(name, inputs, experts=experts(inputs), gate=gate, parameters=parameters)
            for gate in ("model", "renormalized")
        )
        assert criterion.uses_gate == any(not numpy.array_equal(one[layer], two[layer]) for layer in one), name
        assert criteria.reads_text(name)
    seeded = {name for name, criterion in criteria.CRITERIA.items() if criterion.uses_seed}
    assert seeded == {"random", "channel_random"}


def test_scoring_needs_no_torch() -> None:
    code = "import sys, moe_lab.criteria, moe_lab.statistics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


PAGE = Path(__file__).parents[2] / "docs" / "new_criterion.md"
BLOCK = re.compile(r"`((?:moe_lab|conf|tests)/[\w/.]+)`[^`]*?:\n\n```\w+\n(.*?)```", re.DOTALL)


def test_the_page_on_new_criteria_works_as_it_is_written() -> None:
    """Its function is a criterion, its row of the test is the formula, and its file names a choice of parameters."""
    (module, function), (file, chosen), (_, row) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert module == "moe_lab/criteria/peak.py" and file == "conf/criterion/peak_half.yaml"
    inputs = statistics("olmoe")
    try:
        exec(function, {"__name__": "moe_lab.criteria.peak"})
        settings = CriterionConfig(**yaml.safe_load(chosen))
        criteria.check(settings.name, settings.parameters)
        exec(row, {"NAIVE": NAIVE})
        for power, name in ((1.0, "peak"), (0.5, settings.name)):
            parameters = settings.parameters if power == 0.5 else {}
            for layer, values in criteria.score(name, inputs, experts=experts(inputs), parameters=parameters).items():
                reference = expected("olmoe", layer, "model", NAIVE["peak"]) ** power
                assert naive.relative(torch.from_numpy(values), reference) < 1e-5
    finally:
        criteria.CRITERIA.pop("peak", None)
        NAIVE.pop("peak", None)
