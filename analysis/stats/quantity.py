"""The kind of a benchmark's numbers, or of a mean over benchmarks: score, loss or perplexity, with
name, unit and direction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.stats.uncertainty import Estimate
from moe_lab.result_files import Scale

AVG = "Avg"
"""Name of a mean of scores."""
PRINTED_DECIMALS = 3
"""Number of decimals of published scores, to which scores are rounded before they are ranked."""


@dataclass(frozen=True)
class Quantity:
    """Kind of a number: a score, a mean loss in some unit, or a perplexity, exp(mean loss).

    Perplexities are averaged and tested as losses, because a perplexity is not a mean over items.
    """

    scale: Scale = "score"
    unit: str = ""
    """Unit of the loss."""

    @property
    def lower_is_better(self) -> bool:
        """Whether less is better."""
        return self.scale != "score"

    @property
    def sign(self) -> int:
        """1 if more is better, -1 if less is better."""
        return -1 if self.lower_is_better else 1

    def sort_best_first(self, numbers: pd.Series) -> pd.Series:
        """Sort numbers from the best to the worst, NaN last."""
        return numbers.sort_values(ascending=self.lower_is_better, kind="stable")

    @property
    def direction(self) -> str:
        """`less is better` or `more is better`."""
        return "less is better" if self.lower_is_better else "more is better"

    @property
    def mean_name(self) -> str:
        """Name of a mean of such numbers: `Avg`, `Mean perplexity`, or `Loss (nats per token)`."""
        if self.scale == "loss":
            return f"Loss ({self.unit})" if self.unit else "Loss"
        return AVG if self.scale == "score" else "Mean perplexity"

    def metric_text(self, metric: str) -> str:
        """Text for a metric: its name, such as `acc`. If less is better, the unit and the direction
        follow: `loss (nats per token, less is better)`."""
        if not self.lower_is_better:
            return metric
        unit = f"of the loss in {self.unit}" if self.scale == "perplexity" else self.unit
        return f"{metric} ({names.comma_joined(unit, self.direction)})"

    def to_computed(self, displayed_numbers: Any) -> Any:
        """Convert displayed numbers to the numbers that are averaged and tested: perplexities
        become losses. The argument is a number, an array, a series or a frame."""
        return np.log(displayed_numbers) if self.scale == "perplexity" else displayed_numbers

    def to_displayed(self, computed_numbers: Any) -> Any:
        """Convert numbers that are averaged and tested to the numbers in tables and figures; the
        inverse of `to_computed`."""
        return np.exp(computed_numbers) if self.scale == "perplexity" else computed_numbers

    def displayed_estimate(self, reference: float, difference: Estimate) -> list[float]:
        """Value and ends of the interval of a difference from `reference`, each as the displayed
        value of `reference + difference` minus the displayed value of `reference`. Both arguments
        are computed numbers: for perplexities, losses."""
        numbers = np.array([difference.value, *difference.interval])
        if self.scale != "perplexity":
            return list(numbers)
        return list(self.to_displayed(reference + numbers) - self.to_displayed(reference))


def common_quantity(quantities: Iterable[Quantity]) -> Quantity:
    """Kind of a mean over numbers of several kinds.

    If all kinds are equal, the mean has this kind. If they differ, and less is better in all of
    them, the mean is a loss without a unit. Otherwise it is a score.
    """
    distinct_quantities = set(quantities)
    if len(distinct_quantities) == 1:
        return distinct_quantities.pop()
    if distinct_quantities and all(quantity.lower_is_better for quantity in distinct_quantities):
        return Quantity("loss")
    return Quantity()
