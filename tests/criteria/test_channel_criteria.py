from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from moe_lab import criteria
from moe_lab.errors import UserError

GENERATOR = numpy.random.default_rng(0)
TOKENS = 7
PHI = GENERATOR.normal(size=(TOKENS, 3))
GRADIENT = GENERATOR.normal(size=(TOKENS, 3))
GATE = GENERATOR.uniform(size=TOKENS)
RENORMALIZED = GATE / (GATE + numpy.linspace(0.1, 1, TOKENS))
DOWN, GATES, UPS = (GENERATOR.normal(size=(5, 3)) for _ in range(3))
"""What one expert of three channels did on seven tokens, and its weights, a column for each channel."""


def layer() -> dict[str, numpy.ndarray]:
    """Sums of that expert, and a second one that saw no token and has the same weights."""
    gated = GATE[:, None] * PHI
    sums = {
        "channel_square": (PHI**2).sum(0),
        "channel_max": abs(PHI).max(0),
        "gate_channel_square": (gated**2).sum(0),
        "gate_channel_max": abs(gated).max(0),
        "renormalized_channel_square": ((RENORMALIZED[:, None] * PHI) ** 2).sum(0),
        "renormalized_channel_max": abs(RENORMALIZED[:, None] * PHI).max(0),
        "channel_gradient_square": (GRADIENT**2).sum(0),
        "channel_product": (PHI * GRADIENT).sum(0),
        "channel_product_abs": abs(PHI * GRADIENT).sum(0),
        **{f"snip_{name}": abs(part).sum(0) for name, part in (("down", DOWN), ("gate", GATES), ("up", UPS))},
    }
    weights = {
        "channel_down_square": (DOWN**2).sum(0),
        "channel_down_abs": abs(DOWN).sum(0),
        "channel_gate_square": (GATES**2).sum(0),
        "channel_up_square": (UPS**2).sum(0),
    }
    return {
        "tokens": numpy.array([TOKENS, 0]),
        **{name: numpy.stack([values, 0 * values]) for name, values in sums.items()},
        **{name: numpy.stack([values, values]) for name, values in weights.items()},
    }


def camera(alpha: float) -> Callable[[int], float]:
    def formula(c: int) -> float:
        weighed = (GATE * PHI[:, c]) ** 2
        return numpy.linalg.norm(DOWN[:, c]) ** 2 * ((1 - alpha) * weighed.sum() + alpha * weighed.max())

    return formula


NAIVE: list[tuple[str, dict[str, Any], Callable[[int], Any], float | None]] = [
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
    ("channel_weight", {"projection": "gate"}, lambda c: numpy.linalg.norm(GATES[:, c]), None),
    ("channel_weight", {"projection": "up"}, lambda c: numpy.linalg.norm(UPS[:, c]), None),
    (
        "channel_weight",
        {"projection": "mean"},
        lambda c: numpy.mean([numpy.linalg.norm(part[:, c]) for part in (DOWN, GATES, UPS)]),
        None,
    ),
    ("snip", {}, lambda c: abs(DOWN[:, c]).sum(), 0),
    ("snip", {"projection": "up"}, lambda c: abs(UPS[:, c]).sum(), 0),
    (
        "snip",
        {"projection": "mean"},
        lambda c: numpy.mean([abs(part[:, c]).sum() for part in (DOWN, GATES, UPS)]),
        0,
    ),
]
"""Criterion, its parameters, its formula for one channel, and its score where no token was seen (None: the same)."""


def score(name: str, inputs: Any, **settings: Any) -> Any:
    return criteria.score(name, inputs, experts={4: 2}, widths={4: 3}, **settings)[4]


@pytest.mark.parametrize(("name", "parameters", "formula", "unseen"), NAIVE)
def test_scores_are_those_of_each_channel_alone(
    name: str, parameters: dict[str, Any], formula: Callable[[int], Any], unseen: float | None
) -> None:
    scores = score(name, {4: layer()}, parameters=parameters)
    assert scores.dtype == numpy.float64
    expected = [formula(c) for c in range(3)]
    assert scores[0] == pytest.approx(expected, rel=1e-12)
    assert scores[1] == pytest.approx(expected if unseen is None else [unseen] * 3, rel=1e-12)
    assert unseen is None or scores[1].max() < scores[0].min()


def test_camera_takes_renormalized_gates() -> None:
    scores = score("camera", {4: layer()}, gate="renormalized")[0]
    for c in range(3):
        weighed = (RENORMALIZED * PHI[:, c]) ** 2
        expected = numpy.linalg.norm(DOWN[:, c]) ** 2 * (0.1 * weighed.sum() + 0.9 * weighed.max())
        assert scores[c] == pytest.approx(expected, rel=1e-12)
    with pytest.raises(UserError, match="gate of camera=double_softmax is unknown"):
        score("camera", {4: layer()}, gate="double_softmax")


def test_every_channel_criterion_has_a_formula_here() -> None:
    channels = {name for name, criterion in criteria.CRITERIA.items() if criterion.granularity == "channel"}
    assert channels == {name for name, *_ in NAIVE} | {"channel_random"}


EVIDENCE = {
    "statistics": {"tokens", "channel_square", "gate_channel_square", "gate_channel_max"},
    "channel_weights": {"channel_down_square", "channel_down_abs", "channel_gate_square", "channel_up_square"},
    "gradients": {"tokens", "channel_square", "channel_gradient_square", "channel_product_abs"},
    "weight_gradients": {"snip_down", "snip_gate", "snip_up"},
}


@pytest.mark.parametrize("name", sorted({name for name, *_ in NAIVE}))
def test_what_a_criterion_says_it_needs_is_what_it_needs(name: str) -> None:
    needs = criteria.get(name).needs
    enough = {key for need in needs for key in EVIDENCE[need]}
    assert score(name, {4: {key: values for key, values in layer().items() if key in enough}}).shape == (2, 3)
    for need in needs:
        others = {key for other in needs if other != need for key in EVIDENCE[other]}
        with pytest.raises(UserError, match=rf"layer 4 has no \w+ for criterion={re.escape(name)}"):
            score(name, {4: {key: values for key, values in layer().items() if key in others}})
    assert criteria.reads_text(name) == (name != "channel_weight")
    assert not criteria.reads_text("channel_random")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("camera", {"alpha": 1.5}, "alpha=1.5 of camera: expected a number from 0 to 1"),
        ("camera", {"alpha": "x"}, "alpha=x of camera"),
        ("channel_weight", {"projection": "dwn"}, "projection of channel_weight=dwn is unknown: did you mean down"),
        ("snip", {"projection": "men"}, "projection of snip=men is unknown: did you mean mean"),
        ("channel_weight", {"projection": 3}, "projection of channel_weight=3 is unknown"),
        ("heapr", {"alpha": 1}, "criterion.parameters of heapr=alpha is unknown"),
        ("haepr", {}, "criterion=haepr is unknown: did you mean heapr"),
    ],
)
def test_bad_parameters(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        criteria.check(name, parameters)


def test_bad_shapes_and_numbers() -> None:
    with pytest.raises(UserError, match="scores channels, expected the width of every layer"):
        criteria.score("heapr", {4: layer()}, experts={4: 2})
    with pytest.raises(UserError, match=r"gives \(2, 3\) scores in layer 4, expected one for each of its 2 experts' 8"):
        criteria.score("heapr", {4: layer()}, experts={4: 2}, widths={4: 8})
    broken = layer()
    broken["channel_square"][1, 2] = numpy.nan
    with pytest.raises(
        UserError, match="criterion=channel_activation gives NaN or Inf in layer 4, expert 1, channel 2"
    ):
        score("channel_activation", {4: broken})
