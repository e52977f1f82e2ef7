"""False positive rate of the comparison with the best method, in simulated studies:
`python -m benchmarks.best_of_many [--studies 1000]`.

All methods of a simulated study have the same true score and several seeds. A false positive is a
study in which some method is called separated from the best one. Bars: at most 7 % of studies if
all methods have the same spread between seeds, and 10 % if a quarter of them has twice this spread,
or none. The power is printed too: the share of studies in which some method is separated when one
method is truly better.

`--plans STORE STUDY` measures the same rate on real answers: in each simulated study, random plans
of one model are assigned at random to methods.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.measure import misses, parser
from moe_lab.analysis.load.study import load
from moe_lab.analysis.registry import Results
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.quantity import Quantity
from moe_lab.analysis.stats.uncertainty import LEVEL
from moe_lab.result_files import OWN

BAR_EQUAL = 0.07
BAR_UNEQUAL = 0.10
ITEMS = {"equal": [40] * 11, "unequal": [10, 10, 20, 20, 20, 40, 40, 80, 80, 160, 160]}
"""Numbers of items of the benchmarks."""
SEEDS = {"1": [1], "2": [2], "3": [3], "5": [5], "2 to 5": [2, 3, 5]}
"""Numbers of seeds of the methods, repeated in this order."""
ITEM_METHOD_SPREAD = 0.4
"""Standard deviation of the effects of item x method; those of items and the residuals have 1."""


@dataclass(frozen=True)
class Setting:
    """Parameters of a simulated study."""

    methods: int
    seeds: str
    """Key of SEEDS."""
    seed_spread: float
    """Standard deviation between seeds."""
    kind: str = "answers"
    """answers: right or wrong, by the sign of a normal variable; losses: exp of the variable."""
    benchmarks: str = "equal"
    """Key of ITEMS."""
    unequal: float = 1.0
    """Factor of `seed_spread` for a quarter of the methods."""
    better: float = 0.0
    """True lead of the first method."""

    @property
    def bar(self) -> float:
        """Largest share of studies that may separate equal methods."""
        return BAR_EQUAL if self.unequal == 1 else BAR_UNEQUAL


SPREADS = (0.0, 0.15, 0.4, 1.0)
SETTINGS = [
    *(
        Setting(methods, seeds, spread)
        for methods in (2, 14, 35)
        for seeds in ("2", "3", "5")
        for spread in SPREADS
    ),
    *(
        Setting(14, seeds, 0.4, unequal=times)
        for seeds in ("2", "3", "5", "2 to 5")
        for times in (0.0, 2.0)
    ),
    *(Setting(14, "2 to 5", spread) for spread in SPREADS),
    *(Setting(14, "3", spread, kind, items) for spread in (0.15, 0.4) for kind, items in
      (("answers", "unequal"), ("losses", "equal"), ("losses", "unequal"))),
]  # fmt: skip
POWER = [Setting(14, seeds, spread, better=better)
         for seeds in ("3", "5") for spread, better in ((0.15, 0.5), (0.4, 1.0))]  # fmt: skip


def main() -> int:
    """Simulate, print, compare with the bars; returns 1 when a bar fails."""
    arguments = _arguments()
    if arguments.plans:
        store, study = arguments.plans
        return int(_real_answers_fail(Path(store), study, arguments.studies))
    failed = False
    for setting in SETTINGS:
        studies = simulated(setting, arguments.studies)
        share = float(np.mean([separated(study) > 0 for study in studies]))
        failed |= misses(str(setting), share, "<=", setting.bar)
    for setting in POWER:
        studies = simulated(setting, arguments.studies)
        share = float(np.mean([separated(study) > 0 for study in studies]))
        print(f"{setting}: some method is separated from the best in {share:.2f}", flush=True)
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("best_of_many", __doc__)
    options.add_argument("--studies", type=int, default=1000, help="studies of a setting")
    options.add_argument(
        "--plans", nargs=2, metavar=("STORE", "STUDY"), help="random plans of one model"
    )
    return options.parse_args()


def simulated(setting: Setting, studies: int, seed: int = 1) -> Iterator[Comparison]:
    """Yield simulated studies as comparisons. `setting.better` is the lead of the first method."""
    rng = np.random.default_rng(seed)
    seeds = list(itertools.islice(itertools.cycle(SEEDS[setting.seeds]), setting.methods))
    methods = np.repeat(np.arange(setting.methods), seeds)  # (plans,)
    for _ in range(studies):
        seed_effects = rng.normal(0, setting.seed_spread, len(methods))
        seed_effects[methods < setting.methods // 4] *= setting.unequal
        effects = seed_effects + setting.better * (methods == 0)
        outcomes = {}
        for number, items in enumerate(ITEMS[setting.benchmarks]):
            item_effects = rng.normal(0, 1, items)
            interactions = rng.normal(0, ITEM_METHOD_SPREAD, (setting.methods, items))[methods]
            residuals = rng.normal(0, 1, (len(methods), items))
            latent = item_effects + interactions + effects[:, None] + residuals
            outcomes[f"b{number}"] = (
                (latent > 0).astype(float) if setting.kind == "answers" else np.exp(-latent / 2)
            )
        yield comparison(methods, outcomes, losses=setting.kind == "losses")


def comparison(
    methods: np.ndarray, outcomes: dict[str, np.ndarray], losses: bool = False
) -> Comparison:
    """A comparison of plans with the given outcomes: benchmark -> (plans, items); methods (plans,):
    the number of each plan's method."""
    labels = [f"method {number}" for number in methods]
    cells = pd.DataFrame({"criterion": labels, "method": labels}).rename_axis("cell")
    cells["seed"] = cells.groupby("criterion").cumcount()
    axes = {
        "model": "m",
        "granularity": "expert",
        "allocation": "uniform",
        "gate": "model",
        "calibration": "text",
        "source": OWN,
    }
    cells = cells.assign(
        **axes, ratio=0.25, removed=0.25, removed_text="25 %", recovery="none", protocol=None
    )
    scores = pd.DataFrame({name: values.mean(axis=1) for name, values in outcomes.items()})
    quantities = dict.fromkeys(outcomes, Quantity("loss")) if losses else {}
    parts: dict[str, tuple[str, ...]] = {name: (name,) for name in outcomes}
    return Comparison("m", cells, scores, parts, quantities, outcomes, scores * 0)


def separated(study: Comparison) -> int:
    """Number of methods that are separated from the best method of a study, by the mean over all
    benchmarks."""
    target = tuple(study.benchmarks_of)
    order = study.quantity(target).sort_best_first(study.score(target)).index
    return sum(
        lead.p < LEVEL for lead in study.leads_of_best(target, [int(cell) for cell in order])
    )


def _real_answers_fail(store: Path, name: str, studies: int) -> bool:
    """Print the false positive rate for random plans of a real study that are assigned at random to
    methods; True when a bar fails."""
    [plans] = Results(load(store, name)).comparisons
    rows = np.flatnonzero(plans.all_cells["criterion"] == "random")
    rng = np.random.default_rng(1)
    failed = False
    for seeds in (2, 3, 5):
        methods = np.repeat(np.arange(len(rows) // seeds), seeds)
        false_positives = []
        for _ in range(studies):
            drawn = rng.permutation(rows)[: len(methods)]
            outcomes = {benchmark: values[drawn] for benchmark, values in plans.outcomes.items()}
            false_positives.append(separated(comparison(methods, outcomes)) > 0)
        what = (
            f"{len(rows)} random plans of {plans.model} as {methods[-1] + 1} methods of {seeds} "
            "seeds"
        )
        failed |= misses(what, float(np.mean(false_positives)), "<=", BAR_EQUAL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
