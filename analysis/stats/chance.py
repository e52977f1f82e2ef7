"""The distribution of the scores of a model's random plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import chdtrc, stdtrit

from moe_lab.analysis.stats.uncertainty import LEVEL


@dataclass(frozen=True)
class Chance:
    """Scores of the random plans of a model, described by a normal distribution."""

    mean: float
    spread: float
    """Standard deviation of the scores, or pooled over `models`."""
    plans: int
    """Number of random plans."""
    degrees_of_freedom: float
    """Degrees of freedom of `spread`."""
    models: int = 1
    """Number of models over which `spread` is pooled."""
    spreads_differ: bool = False
    """Whether Bartlett's test finds that the spreads of models differ."""

    def margin(self, further_plans: int) -> float:
        """Distance d such that, of `further_plans` further random plans, the best is above mean + d
        with at most 5 % probability, and the worst is below mean - d with at most 5 % probability.

        d = t(1 - .05 / further_plans) spread sqrt(1 + 1 / plans), where t is the quantile of
        Student's distribution. The division by `further_plans` is Bonferroni's correction."""
        quantile = stdtrit(self.degrees_of_freedom, 1 - LEVEL / further_plans)
        return float(quantile * self.spread * np.sqrt(1 + 1 / self.plans))

    def limits(self, further_plans: int) -> tuple[float, float]:
        """The mean minus and plus `margin(further_plans)`."""
        return self.mean - self.margin(further_plans), self.mean + self.margin(further_plans)


def chance_by_model(scores: Mapping[str, np.ndarray]) -> dict[str, Chance]:
    """Model -> its `Chance`. If Bartlett's test finds no difference between the spreads of models,
    all models have the pooled spread.

    scores: model -> scores (plans,) of the model's random plans, at least two.
    """
    chance_of_model = {
        model: Chance(
            float(plan_scores.mean()),
            float(plan_scores.std(ddof=1)),
            plans=len(plan_scores),
            degrees_of_freedom=len(plan_scores) - 1,
        )
        for model, plan_scores in scores.items()
    }
    if len(chance_of_model) < 2:
        return chance_of_model
    variances = np.array([chance.spread**2 for chance in chance_of_model.values()])
    freedoms = np.array([chance.degrees_of_freedom for chance in chance_of_model.values()])
    pooled = float(freedoms @ variances / freedoms.sum())
    changes: dict[str, Any] = {"spreads_differ": True}
    if _bartlett(variances, freedoms, pooled) >= LEVEL:
        changes = {
            "spread": pooled**0.5,
            "degrees_of_freedom": float(freedoms.sum()),
            "models": len(chance_of_model),
        }
    return {model: replace(chance, **changes) for model, chance in chance_of_model.items()}


def _bartlett(variances: np.ndarray, freedoms: np.ndarray, pooled: float) -> float:
    """p-value of Bartlett's test that samples of normal distributions have one variance. The result
    equals that of scipy.stats.bartlett, whose import takes half a second.

    variances, freedoms: variance (samples,) of each sample, and its degrees of freedom. pooled: the
    mean of the variances, weighted by the degrees of freedom.
    """
    ratio = freedoms.sum() * np.log(pooled) - freedoms @ np.log(variances)
    correction = (np.sum(1 / freedoms) - 1 / freedoms.sum()) / (3 * (len(variances) - 1))
    return float(chdtrc(len(variances) - 1, ratio / (1 + correction)))
