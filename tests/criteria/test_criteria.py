"""Every criterion against a naive formula, of each expert or channel alone; and what a criterion
says of itself."""

import json
import math
import os
import re
import struct
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import naive
import numpy
import pandas as pd
import pytest
import tiny
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab import criteria
from moe_lab.config import GATES, CriterionConfig
from moe_lab.criteria.experts import s_family_scores
from moe_lab.errors import UserError
from moe_lab.statistics.forward import ForwardHook


def s(b: float, alpha: int, beta: int) -> Callable[[naive.ExpertTokens, str], torch.Tensor]:
    """S(b, alpha, beta), one token after the other."""

    def formula(e: naive.ExpertTokens, gate: str) -> torch.Tensor:
        terms = e.gate_of_kind(gate) ** alpha * e.f.norm(dim=-1) ** beta
        return terms.sum() / len(e.token) ** b

    return formula


def spread(e: naive.ExpertTokens) -> torch.Tensor:
    return e.f.var(0).sqrt().norm() if len(e.token) > 1 else torch.tensor(0.0)


NAIVE: dict[str, Callable[[naive.ExpertTokens, str], torch.Tensor]] = {
    "frequency": s(0, 0, 0),
    "seer": s(0, 1, 0),
    "ean": s(0, 0, 1),
    "reap": s(1, 1, 1),
    "man": s(1, 0, 1),
    "msan": s(1, 0, 2),
    "gate_ean": s(0, 1, 1),
    "gate_energy": s(0, 2, 2),
    "easy_ep": lambda e, gate: (e.shift.clamp(min=0) * e.gate * e.f.norm(dim=-1)).sum(),
    "mone": lambda e, gate: e.gate_of_kind(gate).mean() * spread(e),
    "mone_freq": lambda e, gate: e.gate_of_kind(gate).sum() * spread(e),
}
"""Criterion -> its formula on the tokens one expert served. Scores of experts that served none are
0."""


@cache
def statistics(name: str) -> dict[int, dict[str, numpy.ndarray]]:
    layers = naive.hook_sums(naive.model(name), ForwardHook)
    return {
        layer: {key: part.numpy() for key, part in tensors.items()}
        for layer, tensors in layers.items()
    }


def facts(inputs: Any) -> dict[int, dict[str, int]]:
    return {layer: {"n_experts": len(tensors["tokens"])} for layer, tensors in inputs.items()}


THREE = {"n_experts": 3}
CHANNEL_FACTS = {4: {"n_experts": 2, "width": 3}}
"""Facts of `channel_layer`."""


def expected(name: str, layer: int, gate: str, formula: Any) -> torch.Tensor:
    """Scores of the experts of a layer by a formula; 0 where no token was served."""
    served = naive.forward(name)[layer].experts
    scores = torch.zeros(len(served), dtype=torch.float64)
    for number, expert in enumerate(served):
        if len(expert.token):
            scores[number] = formula(expert, gate)
    return scores


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_scores_are_those_of_each_expert_alone(name: str) -> None:
    inputs = statistics(name)
    for gate in GATES:
        if f"sums_{gate}" not in next(iter(inputs.values())):
            continue
        for criterion, formula in NAIVE.items():
            scores = criteria.score(criterion, inputs, facts(inputs), gate=gate)
            for layer, values in scores.items():
                assert values.dtype == numpy.float64
                reference = expected(name, layer, gate, formula)
                error = naive.relative_error(torch.from_numpy(values), reference)
                assert error < 1e-5, (criterion, gate, layer)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_the_family_is_17_scores_of_every_expert(name: str) -> None:
    inputs = statistics(name)
    rows = s_family_scores(inputs, "renormalized")
    assert len(rows) == 17 * sum(len(tensors["tokens"]) for tensors in inputs.values())
    for b, alpha, beta in {row[2:5] for row in rows}:
        assert (b, alpha, beta) != (1, 0, 0)
        for layer in inputs:
            values = [row[5] for row in rows if (row[0], *row[2:5]) == (layer, b, alpha, beta)]
            reference = expected(name, layer, "renormalized", s(b, alpha, beta))
            assert naive.relative_error(torch.tensor(values), reference) < 1e-5


def test_the_family_has_fractions_of_counts() -> None:
    inputs = statistics("olmoe")
    parameters = {"b": 0.5, "alpha": 0, "beta": 1}
    half = criteria.score("s_family", inputs, facts(inputs), parameters=parameters)
    for layer, scores in half.items():
        reference = expected("olmoe", layer, "model", s(0.5, 0, 1))
        assert naive.relative_error(torch.tensor(scores), reference) < 1e-5


def of_weights(name: str, weights: numpy.ndarray) -> numpy.ndarray:
    """Scores of experts with these weights (E, n)."""
    count, size = weights.shape
    sums = {
        "abs_sum": abs(weights).sum(1),
        "square_sum": (weights**2).sum(1),
        "count": numpy.array(float(size)),
    }
    return criteria.score(name, {0: sums}, {0: {"n_experts": count}})[0]


WEIGHTS = numpy.array(
    [
        [1, -1, 2, 0, 3, 1],
        [2, -2, 2, 2, -2, 2],
        [0, 0, 5, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
)


def test_golden_values_of_aimer() -> None:
    scores = of_weights("aimer", WEIGHTS)
    assert -scores[:3] == pytest.approx([0.816497, 1, 1 / math.sqrt(6)], abs=1e-6)
    assert scores.argsort().tolist() == [1, 0, 2, 3]  # the flattest first, the empty one last
    normal = numpy.random.default_rng(0).normal(size=(1, 100_000))
    assert -of_weights("aimer", normal)[0] == pytest.approx(0.7979, abs=2e-3)


def test_golden_values_of_magnitude() -> None:
    assert of_weights("magnitude", WEIGHTS) == pytest.approx([8 / 6, 2, 5 / 6, 0])


def test_exact_damage_is_that_of_the_statistics() -> None:
    inputs = {0: {"damage": numpy.array([2.0, 1.0])}}
    assert criteria.score("exact_damage", inputs, {0: {"n_experts": 2}})[0].tolist() == [2, 1]


@pytest.mark.parametrize(("name", "more"), [("random", ()), ("channel_random", (6,))])
def test_random_is_one_generator_over_the_layers_in_order(name: str, more: tuple[int, ...]) -> None:
    shapes = {3: {"n_experts": 4, "width": 6}, 1: {"n_experts": 5, "width": 6}}
    scores = criteria.score(name, {}, shapes, seed=42)
    generator = numpy.random.Generator(numpy.random.PCG64(42))
    assert numpy.array_equal(scores[1], generator.random((5, *more)))
    assert numpy.array_equal(scores[3], generator.random((4, *more)))
    assert not numpy.array_equal(criteria.score(name, {}, shapes, seed=43)[1], scores[1])
    with pytest.raises(UserError, match="needs a seed"):
        criteria.score(name, {}, shapes)


def edge() -> dict[int, dict[str, numpy.ndarray]]:
    """Three experts: one that saw no token, one that saw a single one, one whose outputs are all
    alike."""
    gates = numpy.array([0, 0.5, 0.25])
    norms = numpy.array([0, 3.0, 2.0])
    tokens = numpy.array([0, 1.0, 4.0])
    sums = numpy.empty((3, 3, 3))
    for a, b in product(range(3), repeat=2):
        sums[:, a, b] = tokens * gates**a * norms**b
    outputs = numpy.zeros((3, 2))
    outputs[:, 0] = tokens * norms
    return {0: {"tokens": tokens, "sums_model": sums, "output_sum": outputs}}


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("maan", {}, "criterion=maan is unknown: did you mean man"),
        ("man", {"b": 1}, "criterion.parameters of man=b is unknown"),
        ("s_family", {"b": 1, "alpha": 0}, "needs the parameter beta"),
        ("s_family", {"b": 1, "alpha": 3, "beta": 1}, "alpha=3 of s_family: expected 0, 1 or 2"),
        ("s_family", {"b": -1, "alpha": 1, "beta": 1}, "b=-1 of s_family"),
        ("s_family", {"b": "x", "alpha": 1, "beta": 1}, "b=x of s_family"),
        ("s_family", {"b": 1, "alpha": 0, "beta": 0}, "every expert alike"),
        ("camera", {"alpha": 1.5}, "alpha=1.5 of camera: expected a number from 0 to 1"),
        (
            "channel_weight",
            {"projection": "dwn"},
            "projection of channel_weight=dwn is unknown: did you mean down",
        ),
    ],
)
def test_bad_names_and_parameters(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        criteria.check(name, parameters)
    with pytest.raises(UserError, match=message):
        criteria.score(name, {}, {}, parameters=parameters)


def test_unknown_gates_are_refused() -> None:
    inputs = statistics("deepseek_v3")
    # it has no gate
    assert criteria.score("man", inputs, facts(inputs), gate="double_softmax")
    with pytest.raises(UserError, match=r"gate=modal is unknown: did you mean model"):
        criteria.score("reap", inputs, facts(inputs), gate="modal")
    with pytest.raises(UserError, match="gate of camera=double_softmax is unknown"):
        channel_scores("camera", {4: channel_layer()}, gate="double_softmax")


@pytest.mark.parametrize("gate", ["double_softmax", "full_softmax"])
def test_gates_that_the_statistics_lack_are_refused(gate: str) -> None:
    inputs = statistics("deepseek_v3")
    message = rf"layer 1 has no sums_{gate}.*gate=model or renormalized"
    with pytest.raises(UserError, match=message):
        criteria.score("reap", inputs, facts(inputs), gate=gate)


def test_statistics_of_another_model_are_refused() -> None:
    for layers, message in (
        ({0: THREE, 7: THREE}, "layer 7 has no tokens"),
        ({0: {"n_experts": 4}}, "the statistics are of another model"),
    ):
        with pytest.raises(UserError, match=message):
            criteria.score("frequency", edge(), layers)
    with pytest.raises(UserError, match=r"gives \(2, 3\) scores in layer 4, .* its 2 experts' 8"):
        criteria.score("heapr", {4: channel_layer()}, {4: {"n_experts": 2, "width": 8}})


def test_statistics_that_are_not_finite_are_named() -> None:
    layers = edge()
    channels = channel_layer()
    layers[0]["sums_model"][1, 0, 1] = channels["channel_square"][1, 2] = numpy.nan
    with pytest.raises(UserError, match="criterion=ean gives NaN or Inf in layer 0, expert 1"):
        criteria.score("ean", layers, {0: THREE})
    with pytest.raises(UserError, match="NaN or Inf in layer 4, expert 1, channel 2"):
        criteria.score("channel_activation", {4: channels}, CHANNEL_FACTS)


def test_variances_below_zero_count_as_zero() -> None:
    layers = edge()
    layers[0]["sums_model"][2, 0, 2] -= 1e-9  # cancellation may leave less than nothing
    assert criteria.score("mone", layers, {0: THREE})[0].tolist() == [0, 0, 0]


def test_criteria_use_the_declared_arguments() -> None:
    inputs = statistics("olmoe")
    for name, criterion in criteria.CRITERIA.items():
        if criterion.needs != ("statistics",) or criterion.granularity == "channel":
            assert criterion.uses_gate == (name == "camera")
            continue
        arguments: dict[str, Any] = {"layers": facts(inputs)}
        if name == "s_family":
            arguments["parameters"] = {"b": 1, "alpha": 1, "beta": 2}
        plain = criteria.score(name, inputs, **arguments, gate="model")
        renormalized = criteria.score(name, inputs, **arguments, gate="renormalized")
        differ = any(not numpy.array_equal(plain[layer], renormalized[layer]) for layer in plain)
        assert criterion.uses_gate == differ, name
        assert criteria.reads_text(name)


def test_random_criteria_alone_use_a_seed() -> None:
    seeded = {name for name, criterion in criteria.CRITERIA.items() if criterion.uses_seed}
    assert seeded == {"random", "channel_random"}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers a function as the criterion `mine` of experts, which reads forward statistics,
    until the test ends."""
    known = dict(criteria.CRITERIA)

    def register(function: Callable[..., Any], **declared: Any) -> None:
        monkeypatch.setattr(criteria, "CRITERIA", dict(known))
        criteria.criterion("mine", **{"needs": ("statistics",), "reference": "mine", **declared})(
            function
        )

    return register


def score_mine(**settings: Any) -> Any:
    layer = {**edge()[0], "sums_renormalized": numpy.ones((3, 3, 3))}
    return criteria.score("mine", {0: layer}, {0: THREE}, **settings)


@pytest.mark.parametrize(
    ("function", "declaration"),
    [
        (lambda layer: layer.sum(2, 0), "uses_gate"),
        (lambda layer: layer[f"sums_{layer.gate}"][:, 0, 1], "uses_gate"),
        (lambda layer: layer.random.random(layer.n_experts), "uses_seed"),
    ],
)
def test_undeclared_reads_of_a_criterion_are_refused(
    function: Callable[..., Any], declaration: str, registered: Callable[..., None]
) -> None:
    """Gate and seed are in the identity of scores only then."""
    registered(function)
    with pytest.raises(UserError, match=f"criterion=mine .*{declaration}=True"):
        criteria.check("mine", {})
    registered(function, **{declaration: True})
    assert len(score_mine(gate="renormalized", seed=1)[0]) == 3
    # neither reads the chosen gate
    registered(lambda layer: layer.sum(0, 1) + layer["sums_renormalized"][:, 1, 1])
    assert numpy.array_equal(score_mine(gate="model")[0], score_mine(gate="renormalized")[0])


def in_place(layer: criteria.Layer) -> Any:
    tokens = layer["tokens"]
    tokens *= 0
    return tokens


def through_torch(layer: criteria.Layer) -> Any:
    return torch.from_numpy(layer["tokens"]).mul_(0)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("function", [in_place, through_torch])
def test_statistics_stay_as_they_are(
    function: Callable[..., Any], as_tensors: bool, registered: Callable[..., None]
) -> None:
    """And scores are arrays of their own, also where they are a statistic."""
    registered(function)
    inputs: Any = {
        name: torch.from_numpy(part.copy()) if as_tensors else part
        for name, part in edge()[0].items()
    }
    copies = {name: numpy.array(part) for name, part in inputs.items()}
    if function is in_place:
        with pytest.raises(UserError, match=r"criterion=mine .*read-only.*test_criteria.py"):
            criteria.score("mine", {0: inputs}, {0: THREE})
    else:
        criteria.score("mine", {0: inputs}, {0: THREE})
    criteria.score("frequency", {0: inputs}, {0: THREE})[0][:] = -1
    assert all(numpy.array_equal(numpy.array(part), copies[name]) for name, part in inputs.items())


@pytest.mark.parametrize(
    "function",
    [
        lambda layer: numpy.random.random(layer.n_experts),
        lambda layer: None,
        lambda layer: layer["channel_square"],
        lambda layer: layer["channel_square"].sum(axis=0),
        lambda layer: [layer.tokens, [1.0]],
        lambda layer: ["high"] * layer.n_experts,
        lambda layer: layer.tokens + 0j,
        lambda layer: layer.nothing,
        lambda layer: vars(layer)["a\nb"],
        lambda: 1,
    ],
)
def test_impossible_criterion_is_refused_before_loading(
    function: Callable[..., Any], registered: Callable[..., None]
) -> None:
    registered(function)
    with pytest.raises(UserError, match="criterion=mine ") as error:
        criteria.check("mine", {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda layer: torch.from_numpy(numpy.array(layer.tokens)),
        lambda layer: layer.tokens > 1,
        lambda layer: (
            numpy.log(layer.sum(0, 2) - layer.sum(0, 2)) * 0 + 1
            if layer.n_experts > 3
            else layer.tokens
        ),
        lambda layer: (
            layer["of_a_step_from_elsewhere"].sum(axis=1) if layer.n_experts > 3 else layer.tokens
        ),
    ],
)
def test_criteria_may_fail_on_trial_statistics(
    function: Callable[..., Any], registered: Callable[..., None]
) -> None:
    """As with NaN, which trial values may lead to, and statistics whose shape only their own step
    knows."""
    registered(function)
    scores = score_mine()[0]
    assert scores.dtype == numpy.float64
    assert scores.shape == (3,)


@pytest.mark.parametrize(
    "function",
    [
        lambda layer: layer.tokens + (numpy.random.random(3) if layer.n_experts < 16 else 0),
        lambda layer: layer["of_a_step_from_elsewhere"] + numpy.random.random(3),
        lambda layer: layer["of_a_step_from_elsewhere"] + 0j,
    ],
)
def test_scores_of_a_real_layer_are_real_numbers_and_repeat(
    function: Callable[..., Any], registered: Callable[..., None]
) -> None:
    """Also where the trial layer shows nothing: in another branch, or by statistics of a step from
    elsewhere."""
    registered(function)
    criteria.check("mine", {})
    layer = {**edge()[0], "of_a_step_from_elsewhere": numpy.ones(3)}
    with pytest.raises(UserError, match=r"criterion=mine .*in layer"):
        criteria.score("mine", {0: layer, 5: layer}, {0: THREE, 5: THREE})


def test_failure_in_a_layer_names_it(registered: Callable[..., None]) -> None:
    inputs = {layer: edge()[0] for layer in (0, 5)}
    for function in (
        lambda layer: layer.tokens / (0 if layer.index == 5 else 1),
        lambda layer: layer.tokens[: 2 if layer.index == 5 else None],
        lambda layer: vars(layer)["x"] if layer.index == 5 else layer.tokens,
    ):
        registered(function)
        with (
            numpy.errstate(all="ignore"),
            pytest.raises(UserError, match=r"criterion=mine .*in layer 5"),
        ):
            criteria.score("mine", inputs, {0: THREE, 5: THREE})


GENERATOR = numpy.random.default_rng(0)
TOKENS = 7
PHI = GENERATOR.normal(size=(TOKENS, 3))
GRADIENT = GENERATOR.normal(size=(TOKENS, 3))
GATE = GENERATOR.uniform(size=TOKENS)
RENORMALIZED = GATE / (GATE + numpy.linspace(0.1, 1, TOKENS))
DOWN, GATE_PARTS, UPS = (GENERATOR.normal(size=(5, 3)) for _ in range(3))
"""What one expert of three channels did on seven tokens, and its weights, a column for each
channel."""


def channel_layer() -> dict[str, numpy.ndarray]:
    """Sums of that expert, and a second one that saw no token and has the same weights."""
    sums = {
        "channel_gradient_square": (GRADIENT**2).sum(0),
        "channel_product": (PHI * GRADIENT).sum(0),
        "channel_product_abs": abs(PHI * GRADIENT).sum(0),
        "snip_down": abs(DOWN).sum(0),
        "snip_gate": abs(GATE_PARTS).sum(0),
        "snip_up": abs(UPS).sum(0),
    }
    for prefix, gate in (
        ("", numpy.ones(TOKENS)),
        ("gate_", GATE),
        ("renormalized_", RENORMALIZED),
    ):
        gated = gate[:, None] * PHI
        sums[f"{prefix}channel_square"] = (gated**2).sum(0)
        sums[f"{prefix}channel_max"] = abs(gated).max(0)
    weights = {
        "channel_down_square": (DOWN**2).sum(0),
        "channel_down_abs": abs(DOWN).sum(0),
        "channel_gate_square": (GATE_PARTS**2).sum(0),
        "channel_up_square": (UPS**2).sum(0),
    }
    return {
        "tokens": numpy.array([TOKENS, 0]),
        **{name: numpy.stack([values, 0 * values]) for name, values in sums.items()},
        **{name: numpy.stack([values, values]) for name, values in weights.items()},
    }


def camera(alpha: float, gate: numpy.ndarray = GATE) -> Callable[[int], float]:
    def formula(c: int) -> float:
        weighed = (gate * PHI[:, c]) ** 2
        activation = (1 - alpha) * weighed.sum() + alpha * weighed.max()
        return numpy.linalg.norm(DOWN[:, c]) ** 2 * activation

    return formula


def mean(norm: Callable[[Any], Any]) -> Callable[[int], Any]:
    """The mean over the three projections."""
    return lambda c: numpy.mean([norm(part[:, c]) for part in (DOWN, GATE_PARTS, UPS)])


CHANNELS: list[tuple[str, dict[str, Any], Callable[[int], Any], float | None]] = [
    ("heapr", {}, lambda c: numpy.mean(PHI[:, c] ** 2) * numpy.mean(GRADIENT[:, c] ** 2) / 2, -1),
    ("camera", {}, camera(0.9), 0),
    ("camera", {"alpha": 1}, camera(1), 0),
    ("channel_activation", {}, lambda c: numpy.linalg.norm(PHI[:, c]), 0),
    ("channel_gradient", {}, lambda c: numpy.linalg.norm(GRADIENT[:, c]), 0),
    ("channel_activation_gradient", {}, lambda c: numpy.mean(abs(PHI[:, c] * GRADIENT[:, c])), 0),
    (
        "channel_weight_activation",
        {},
        lambda c: sum(abs(w) * numpy.linalg.norm(PHI[:, c]) for w in DOWN[:, c]),
        0,
    ),
    ("channel_weight", {}, lambda c: numpy.linalg.norm(DOWN[:, c]), None),
    ("channel_weight", {"projection": "gate"}, lambda c: numpy.linalg.norm(GATE_PARTS[:, c]), None),
    ("channel_weight", {"projection": "mean"}, mean(numpy.linalg.norm), None),
    ("snip", {}, lambda c: abs(DOWN[:, c]).sum(), 0),
    ("snip", {"projection": "up"}, lambda c: abs(UPS[:, c]).sum(), 0),
    ("snip", {"projection": "mean"}, mean(lambda column: abs(column).sum()), 0),
]
"""Criterion, its parameters, its formula for one channel, and its score where no token was seen
(None: the same)."""


def channel_scores(name: str, inputs: Any, **settings: Any) -> Any:
    return criteria.score(name, inputs, CHANNEL_FACTS, **settings)[4]


@pytest.mark.parametrize(("name", "parameters", "formula", "unseen"), CHANNELS)
def test_scores_are_those_of_each_channel_alone(
    name: str, parameters: dict[str, Any], formula: Callable[[int], Any], unseen: float | None
) -> None:
    scores = channel_scores(name, {4: channel_layer()}, parameters=parameters)
    assert scores.dtype == numpy.float64
    expected = [formula(c) for c in range(3)]
    assert scores[0] == pytest.approx(expected, rel=1e-12)
    assert scores[1] == pytest.approx(expected if unseen is None else [unseen] * 3, rel=1e-12)
    assert unseen is None or scores[1].max() < scores[0].min()


def test_camera_weighs_by_the_chosen_gate() -> None:
    scores = channel_scores("camera", {4: channel_layer()}, gate="renormalized")
    formula = camera(0.9, RENORMALIZED)
    assert scores[0] == pytest.approx([formula(c) for c in range(3)], rel=1e-12)


def test_every_criterion_has_a_reference_or_golden_values() -> None:
    names: dict[str, set[str]] = {"expert": set(), "channel": set()}
    for name, criterion in criteria.CRITERIA.items():
        if "." not in name:  # variants of papers, where one is imported: tests/test_papers.py
            names[criterion.granularity].add(name)
    golden = {"s_family", "exact_damage", "aimer", "magnitude", "random"}
    assert names["expert"] == {*NAIVE, *golden, "file"}
    assert names["channel"] == {name for name, *_ in CHANNELS} | {"channel_random", "file_channels"}


def channel_statistics(names: set[str]) -> dict[int, Any]:
    """Statistics of these names alone."""
    return {4: {name: values for name, values in channel_layer().items() if name in names}}


EVIDENCE = {
    "statistics": {"tokens", "channel_square", "gate_channel_square", "gate_channel_max"},
    "channel_weights": {
        "channel_down_square",
        "channel_down_abs",
        "channel_gate_square",
        "channel_up_square",
    },
    "gradients": {"tokens", "channel_square", "channel_gradient_square", "channel_product_abs"},
    "weight_gradients": {"snip_down", "snip_gate", "snip_up"},
}


@pytest.mark.parametrize("name", sorted({name for name, *_ in CHANNELS}))
def test_criteria_need_the_declared_statistics(name: str) -> None:
    needs = criteria.get(name).needs
    enough = channel_statistics({key for need in needs for key in EVIDENCE[need]})
    assert channel_scores(name, enough).shape == (2, 3)
    for need in needs:
        others = {key for other in needs if other != need for key in EVIDENCE[other]}
        with pytest.raises(UserError, match=rf"layer 4 has no \w+ for criterion={name}"):
            channel_scores(name, channel_statistics(others))
    assert criteria.reads_text(name) == (name != "channel_weight")
    assert not criteria.reads_text("channel_random")


PAGE = Path(__file__).parents[2] / "docs" / "new_criterion.md"
BLOCK = re.compile(r"`((?:moe_lab|conf|tests)/[\w/.]+)`[^`]*?:\n\n```\w+\n(.*?)```", re.DOTALL)


def test_the_page_on_new_criteria_works_as_it_is_written() -> None:
    """Its function is a criterion, its row of the test is the formula, and its file names a choice
    of parameters."""
    (module, function), (file, chosen), (_, row) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert module == "moe_lab/criteria/peak.py"
    assert file == "conf/criterion/peak_half.yaml"
    inputs = statistics("olmoe")
    try:
        exec(function, {"__name__": "moe_lab.criteria.peak"})
        settings = CriterionConfig(**yaml.safe_load(chosen))
        criteria.check(settings.name, settings.parameters)
        exec(row, {"NAIVE": NAIVE})
        for power, name in ((1.0, "peak"), (0.5, settings.name)):
            parameters = settings.parameters if power == 0.5 else {}
            scores = criteria.score(name, inputs, facts(inputs), parameters=parameters)
            for layer, values in scores.items():
                reference = expected("olmoe", layer, "model", NAIVE["peak"]) ** power
                assert naive.relative_error(torch.from_numpy(values), reference) < 1e-5
    finally:
        criteria.CRITERIA.pop("peak", None)
        NAIVE.pop("peak", None)


# ---- scores in files

SCORES = {0: [3.0, 1.0, 4.0, 1.5], 2: [9.0, 2.0, 6.0, 5.0]}
ROWS = [(layer, e, score) for layer, row in SCORES.items() for e, score in enumerate(row)]
FRAME = pd.DataFrame(ROWS, columns=["layer", "expert", "score"])
RETAINED = {"0": [2, 0], "2": [0]}
LINES = '{"0": [2, 0]}\n\n{"2": [0]}\n'
RANKS = {0: [1, 0, 2, 0], 2: [1, 0, 0, 0]}
"""Scores of the experts in RETAINED."""


def imatrix(folder: Path) -> None:
    """An importance matrix of llama.cpp, with a tensor of no expert."""
    counts = {"blk.1.attn_q.weight.counts": [7.0]}
    counts |= {f"blk.{layer}.ffn_down_exps.weight.counts": row for layer, row in SCORES.items()}
    sums = {
        f"blk.{layer}.ffn_down_exps.weight.in_sum2": numpy.outer(row, [1, 2])
        for layer, row in SCORES.items()
    }
    key = b"imatrix.datasets"
    content = b"GGUF" + struct.pack("<IQQ", 3, 5, 1) + struct.pack("<Q", len(key)) + key
    content += struct.pack("<IQ", 8, 5) + b"a.txt"
    data = b""
    for name, values in {**counts, **sums}.items():
        array = numpy.asarray(values, "<f4").reshape(len(values), -1)
        content += struct.pack("<Q", len(name)) + name.encode()
        content += struct.pack("<IQQIQ", 2, *array.shape[::-1], 0, len(data))
        data += array.tobytes().ljust(32, b"\0")
    (folder / "scores.gguf").write_bytes(content + b"\0" * (-len(content) % 32) + data)


def as_json(document: Any, name: str = "scores.json") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(document))


def as_csv(*names: str) -> Callable[[Path], object]:
    return lambda folder: FRAME.set_axis(names, axis=1).to_csv(folder / "scores.csv", index=False)


def observations(folder: Path) -> None:
    """As REAP saves them."""
    content = {
        layer: {"expert_frequency": torch.ones(4), "reap": torch.tensor(row)}
        for layer, row in SCORES.items()
    }
    torch.save(content, folder / "scores.pt")


FILES: list[tuple[Callable[[Path], object], dict[int, list[float]]]] = [
    (as_csv("layer", "expert", "score"), SCORES),
    (as_csv("layer_id", "expert_id", "count"), SCORES),
    (lambda folder: FRAME.sample(frac=1).to_parquet(folder / "scores.Parquet"), SCORES),
    (as_json(FRAME.to_dict("records")), SCORES),
    (as_json({f"model.layers.{layer}.mlp": row for layer, row in SCORES.items()}), SCORES),
    (as_json({layer: {"reap": row} for layer, row in SCORES.items()}), SCORES),
    (as_json(RETAINED), RANKS),
    (as_json({"ratio": 0.5, "retained": RETAINED}), RANKS),
    (as_json({"layers": {layer: {"kept_experts": ids} for layer, ids in RETAINED.items()}}), RANKS),
    (lambda folder: (folder / "scores.jsonl").write_text(LINES), RANKS),
    (as_json({"topk_weights": [[0.0] * 4] * 2, "saliency": [*SCORES.values()]}), SCORES),
    (observations, SCORES),
    (imatrix, SCORES),
]


def scores_in(folder: Path, experts: int = 4, name: str = "file", **parameters: Any) -> Any:
    """The scores in the file of `folder`, for a model with `experts` experts of two channels."""
    (path,) = folder.iterdir()
    return criteria.score(
        name,
        {},
        {layer: {"n_experts": experts, "width": 2} for layer in SCORES},
        parameters={"path": str(path), **parameters},
    )


@pytest.mark.parametrize(("write", "expected"), FILES)
def test_scores_of_other_tools(
    write: Callable[[Path], object], expected: dict[int, list[float]], tmp_path: Path
) -> None:
    """Of another model, they are refused. A list of retained experts fits larger models too."""
    write(tmp_path)
    scores = scores_in(tmp_path)
    assert {layer: row.tolist() for layer, row in scores.items()} == expected
    for experts in (1, 3) if expected is SCORES else (1,):
        with pytest.raises(UserError, match=r"path=.*layer 0 .*each expert from 0 to"):
            scores_in(tmp_path, experts)
    if write is not imatrix:
        with pytest.raises(UserError, match="criterion=file"):
            scores_in(tmp_path, name="file_channels")
        return
    channels = scores_in(tmp_path, name="file_channels", column="in_sum2")
    assert numpy.array_equal(channels[2], numpy.outer(SCORES[2], [1, 2]))


def test_scores_of_channels_in_a_table(tmp_path: Path) -> None:
    rows = numpy.argwhere(numpy.ones((3, 4, 2)))
    frame = pd.DataFrame(rows, columns=["layer", "expert", "channel"]).assign(score=range(24))
    frame.query("layer != 1").to_csv(tmp_path / "scores.csv", index=False)
    channels = scores_in(tmp_path, name="file_channels")
    assert channels[2].tolist() == [[16, 17], [18, 19], [20, 21], [22, 23]]


def test_experts_without_a_count_have_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("layer_id,expert_id,count\n0,3,5\n2,0,1\n2,1,2\n")
    assert scores_in(tmp_path)[0].tolist() == [0, 0, 0, 5]
    identities = []
    for text in ("layer,expert,score\n0,0,1\n", "layer,expert,score\n0,0,2\n"):
        (tmp_path / "scores.csv").write_text(text)
        settings = {"name": "file", "parameters": {"path": str(tmp_path / "scores.csv")}}
        identities.append(criteria.IdentifiedCriterion(**settings).identity)
        with pytest.raises(UserError, match=r"another model: layers 0, expected \[0, 2\]"):
            scores_in(tmp_path)
    assert identities[0] != identities[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.dat", b"", "suffix of .*=.dat"),
        ("a.gguf", b"GGUF\3\0\0\0" + b"\0" * 40, "a.gguf holds no scores .* importance matrix"),
        ("a.csv", b"layer,expert,weight\n0,0,1\n", "without score.*parameters.column"),
        ("a.json", b'{"0": [1, 2], "2": [1.5]}', "some layers have ids"),
        ("a.json", b'{"saliency": [[1.5]]}', r"layers 0, expected \[0, 2\]"),
        ("a.jsonl", b'{"0": [2]}\n{', "a.jsonl holds no scores"),
        ("a.json", b'{"0": [3, 1, 0, 2], "2": [0]}', "layer 0 have 4 rows"),
        ("a.json", b'{"0": [1, 1], "2": [0]}', "layer 0 have 2 rows"),
        ("a.json", b'{"0": [-1], "2": [0]}', "layer 0 have 1 rows"),
        ("a.json", b'{"0": [1.5], "1": [1.5], "2": [1.5]}', r"layers 0, 1, 2, expected \[0, 2\]"),
        ("a.parquet", b"", "a.parquet holds no scores"),
    ],
)
def test_other_files_are_refused_by_name(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        scores_in(tmp_path)
    assert "\n" not in str(caught.value)


class Code:
    """Unpickling it runs a function."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_observations_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({0: {"reap": Code()}}, "scores.pt")
    with pytest.raises(UserError, match=r"scores\.pt holds no scores"):
        scores_in(tmp_path)
    assert not Path("ran").exists()


VALUES = st.one_of(st.integers(-1, 4), st.floats(width=16), st.text(max_size=2), st.none())
KEYS = st.sampled_from(["layer", "expert", "score", "0", "layers.2"])
TABLE = FRAME.to_dict("records")
DOCUMENTS = st.one_of(
    st.dictionaries(KEYS, st.one_of(VALUES, st.lists(VALUES, max_size=5)), max_size=3),
    st.lists(st.dictionaries(KEYS, st.one_of(VALUES, st.lists(VALUES)), max_size=4), max_size=9),
    st.lists(st.sampled_from(TABLE), max_size=10),
    st.permutations(TABLE),
)


@given(DOCUMENTS)
@settings(max_examples=300, deadline=None)
def test_files_are_read_whole_or_refused(document: Any) -> None:
    with TemporaryDirectory() as folder:
        as_json(document)(Path(folder))
        try:
            scores = scores_in(Path(folder))
        except UserError as error:
            assert folder in str(error) or "NaN or Inf" in str(error)
            return
    assert {layer: len(row) for layer, row in scores.items()} == {0: 4, 2: 4}
    if isinstance(document, list):
        assert sorted((r["layer"], r["expert"], r["score"]) for r in document) == sorted(
            (layer, e, score) for layer, row in scores.items() for e, score in enumerate(row)
        )
    else:
        assert len(document) == 2
