from __future__ import annotations

from typing import Any

import numpy
import pytest

from moe_lab.allocation.coverage import expert_prior
from moe_lab.errors import UserError

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
    "gradients": {7: {"channel_product": numpy.array([[-1.0, -2.0], [3.0, 4.0], [-5.0, 1.0]])}},
}


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        ("ala1", [3, 0, 2]),
        ("ala2", [4, 5, 6]),
        ("true_ablation", [4, 5, 6]),
        ("loss", [0.1, 0, 0.3]),
        ("usage", [10, 0, 30]),
        ("router_weight", [0.5, 1.5, 2.5]),
        ("ala_lm", [3, 0, 4]),
        ("none", [1, 1, 1]),
    ],
)
def test_values(prior: Any, expected: list[float]) -> None:
    assert expert_prior(prior, EVIDENCE, 7, 3) == pytest.approx(expected)


def test_second_order_is_ablation_for_ala() -> None:
    """The loss ||(1 - a) g z||^2 / (||y||^2 + eps) of one expert scaled by a is quadratic: -L'(1) + L''(1) / 2, with
    L'(1) = 0, is L(0) - L(1), and that is ala_second."""
    random = numpy.random.default_rng(0)
    gate, output, stream = random.random(20), random.normal(size=(20, 8)), random.normal(size=(20, 8))
    scale = (stream**2).sum(1) + 1e-6

    def loss(factor: float) -> float:
        return float(((((1 - factor) * gate[:, None] * output) ** 2).sum(1) / scale).sum())

    step = 1e-3
    first, second = (loss(1 + step) - loss(1 - step)) / (2 * step), (loss(1 + step) + loss(1 - step)) / step**2
    ala_second = (gate**2 * (output**2).sum(1) / scale).sum()
    assert loss(0) - loss(1) == pytest.approx(ala_second, rel=1e-12)
    assert -first + second / 2 == pytest.approx(ala_second, rel=1e-6)


def test_missing_evidence() -> None:
    with pytest.raises(UserError, match=r"channel_product of layer 8.* gradients"):
        expert_prior("ala_lm", EVIDENCE, 8, 3)
