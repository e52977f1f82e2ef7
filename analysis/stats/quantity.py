"""What the numbers of a benchmark, or of a mean over benchmarks, are: their name, unit and
direction, and the scale on which they are averaged and tested, as opposed to the one on which they
are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis import names
from moe_lab.results import Scale

AVG = "Avg"
"""Name of a mean of scores."""


@dataclass(frozen=True)
class Quantity:
    """A score, a loss in some unit, or the perplexity of a loss.

    Means, intervals and differences of perplexities are computed on their losses, which are means
    over items."""

    scale: Scale = "score"
    unit: str = ""
    """Unit of the loss."""

    @property
    def lower_is_better(self) -> bool:
        return self.scale != "score"

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is: times a number, it is higher for a better
        one."""
        return -1 if self.lower_is_better else 1

    @property
    def best(self) -> str:
        """Whether the best of several numbers is their smallest or their largest."""
        return "min" if self.lower_is_better else "max"

    def best_first(self, numbers: pd.Series) -> pd.Series:
        """The numbers from the best to the worst; equal ones stay in their order, NaN is last."""
        return numbers.sort_values(
            ascending=self.lower_is_better, na_position="last", kind="stable"
        )

    @property
    def direction(self) -> str:
        """`less is better` or `more is better`."""
        return "less is better" if self.lower_is_better else "more is better"

    @property
    def name(self) -> str:
        """`score`, `perplexity`, or `loss (nats per token)`."""
        return f"loss ({self.unit})" if self.scale == "loss" and self.unit else self.scale

    @property
    def mean(self) -> str:
        """Name of a mean: `Avg`, `Mean perplexity`, or `Loss (nats per token)`."""
        if self.scale == "perplexity":
            return "Mean perplexity"
        return AVG if self.scale == "score" else names.capitalised(self.name)

    def described(self, metric: str) -> str:
        """A metric with unit and direction: `acc`, `loss (nats per token, less is better)`."""
        unit = {"score": "", "loss": self.unit, "perplexity": f"of the loss in {self.unit}"}[
            self.scale
        ]
        words = ", ".join(filter(None, (unit, self.direction)))
        return f"{metric} ({words})" if self.lower_is_better else metric

    def computed(self, shown: Any) -> Any:
        """Numbers as they are averaged and tested: the losses of perplexities."""
        return np.log(shown) if self.scale == "perplexity" else shown

    def shown(self, computed: Any) -> Any:
        """Numbers as they are shown: the inverse of `computed`."""
        return np.exp(computed) if self.scale == "perplexity" else computed

    def shown_difference(self, reference: Any, difference: Any) -> Any:
        """A difference to `reference`, both as computed, in the unit of what is shown."""
        return (
            self.shown(reference + difference) - self.shown(reference)
            if self.scale == "perplexity"
            else difference
        )


def common(quantities: Iterable[Quantity]) -> Quantity:
    """What a mean over these is: the same if all are the same, a loss if less is better of all,
    else a score."""
    distinct = list(dict.fromkeys(quantities))
    if len(distinct) == 1:
        return distinct[0]
    if not distinct or not all(each.lower_is_better for each in distinct):
        return Quantity()
    units = dict.fromkeys(each.unit for each in distinct if each.unit)
    return Quantity("loss", " and ".join(units))
