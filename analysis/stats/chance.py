"""Chance: the scores that random plans of a model reach, and whether other plans are above them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import chdtrc, stdtrit

from analysis.stats.uncertainty import LEVEL

MOST = 1000
"""Largest number of random plans that `Chance.needed` considers."""


@dataclass(frozen=True)
class Chance:
    """Scores of the random plans of a model, as of a normal distribution."""

    mean: float
    spread: float
    """Standard deviation: of the random plans of this model, or pooled over `models`."""
    plans: int
    """Number of this model's random plans."""
    freedom: float
    """Degrees of freedom of `spread`."""
    models: int = 1
    """Number of models over which `spread` is pooled."""
    differs: bool = False
    """Whether it is not pooled because the spreads of models differ."""

    def limits(self, compared: int) -> tuple[float, float]:
        """The lower end and the upper end, beyond each of which some of `compared` further random plans lies with at
        most 5 % probability (Bonferroni). With 2, one plan lies between both with 95 % probability."""
        reach = self._reach(LEVEL / compared, self.plans, self.freedom)
        return self.mean - reach, self.mean + reach

    def needed(self, score: float, compared: int) -> int | None:
        """Number of random plans of each model with which `score` would be beyond the limits, if mean and spread stay
        as they are; None if more than MOST."""
        for plans in range(2, MOST + 1):
            if self._reach(LEVEL / compared, plans, self.models * (plans - 1)) < abs(score - self.mean):
                return plans
        return None

    def _reach(self, tail: float, plans: int, freedom: float) -> float:
        return float(stdtrit(freedom, 1 - tail) * self.spread * np.sqrt(1 + 1 / plans))


def chance_of(scores: np.ndarray) -> Chance:
    """The chance of one model, from the scores of its random plans (at least two)."""
    return Chance(float(scores.mean()), float(scores.std(ddof=1)), len(scores), len(scores) - 1)


def chances(samples: Mapping[str, np.ndarray]) -> dict[str, Chance]:
    """The chance of each model, with a spread that is pooled over models if Bartlett's test finds no difference."""
    found = {model: chance_of(scores) for model, scores in samples.items()}
    if len(found) < 2:
        return found
    variances = np.array([chance.spread**2 for chance in found.values()])
    freedoms = np.array([chance.freedom for chance in found.values()])
    pooled = float(freedoms @ variances / freedoms.sum())
    if not _equal(variances, freedoms, pooled):
        return {model: replace(chance, differs=True) for model, chance in found.items()}
    together = {"spread": pooled**0.5, "freedom": float(freedoms.sum()), "models": len(found)}
    return {model: replace(chance, **together) for model, chance in found.items()}


def _equal(variances: np.ndarray, freedoms: np.ndarray, pooled: float) -> bool:
    """Whether Bartlett's test finds no difference between variances. Equal to scipy's `bartlett`."""
    ratio = freedoms.sum() * np.log(pooled) - freedoms @ np.log(variances)
    correction = 1 + ((1 / freedoms).sum() - 1 / freedoms.sum()) / 3 / (len(variances) - 1)
    return bool(chdtrc(len(variances) - 1, ratio / correction) >= LEVEL)
