"""How often equal methods are told apart, in simulated studies:
`python -m benchmarks.best_of_many [--studies 1000]`.

Methods have the same true score, and several seeds; some are called separated from the best by
mistake. Bars: at most 7 % of studies with such a method where all methods vary alike between seeds,
and 10 % where a quarter of them varies twice as much, or not at all. The share of studies in which
one truly better method is named is printed too.

`--plans STORE STUDY` asks the same of real answers: random plans of one model are given out anew as
plans of methods, as often as there are studies.
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

from analysis.load.study import load
from analysis.registry import Results
from analysis.stats.comparison import Comparison
from analysis.stats.quantity import Quantity
from analysis.stats.uncertainty import LEVEL
from benchmarks.measure import misses, parser

BAR_EQUAL = 0.07
BAR_UNEQUAL = 0.10
ITEMS = {"equal": [40] * 11, "unequal": [10, 10, 20, 20, 20, 40, 40, 80, 80, 160, 160]}
"""Items of the benchmarks."""
SEEDS = {"1": [1], "2": [2], "3": [3], "5": [5], "2 to 5": [2, 3, 5]}
"""Seeds of the methods, in turn."""
OF_ITEM = 0.4
"""Standard deviation of item x method; items differ by 1, and so does the rest."""


@dataclass(frozen=True)
class Setting:
    """What is simulated."""

    methods: int
    seeds: str
    of_seed: float
    """Standard deviation between seeds."""
    kind: str = "answers"
    """answers: right or wrong, by the sign of a normal variable; losses: its exponential."""
    benchmarks: str = "equal"
    unequal: float = 1.0
    """A quarter of the methods vary by so many times `of_seed`."""
    better: float = 0.0
    """How much better one method truly is."""

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
    """Simulate, print, compare with the bars."""
    arguments = _arguments()
    if arguments.plans:
        store, study = arguments.plans
        return int(_relabelled(Path(store), study, arguments.studies))
    failed = False
    for setting in SETTINGS:
        studies = simulated(setting, arguments.studies)
        share = float(np.mean([separated(study) > 0 for study in studies]))
        failed |= misses(str(setting), share, "<=", setting.bar)
    for setting in POWER:
        studies = simulated(setting, arguments.studies)
        named = [separated(study) > 0 for study in studies]
        print(
            f"{setting}: some method is separated from the best in {np.mean(named):.2f}", flush=True
        )
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("best_of_many", __doc__)
    options.add_argument("--studies", type=int, default=1000, help="studies of a setting")
    options.add_argument(
        "--plans", nargs=2, metavar=("STORE", "STUDY"), help="random plans of one model"
    )
    return options.parse_args()


def simulated(setting: Setting, studies: int, seed: int = 1) -> Iterator[Comparison]:
    """Studies of `setting` as comparisons, whose first method may be better."""
    rng = np.random.default_rng(seed)
    seeds = list(itertools.islice(itertools.cycle(SEEDS[setting.seeds]), setting.methods))
    methods = np.repeat(np.arange(setting.methods), seeds)
    for _ in range(studies):
        of_seed = rng.normal(0, setting.of_seed, len(methods))
        of_seed[methods < setting.methods // 4] *= setting.unequal
        effects = of_seed + setting.better * (methods == 0)
        outcomes = {}
        for number, items in enumerate(ITEMS[setting.benchmarks]):
            of_item = (
                rng.normal(0, 1, items) + rng.normal(0, OF_ITEM, (setting.methods, items))[methods]
            )
            latent = of_item + effects[:, None] + rng.normal(0, 1, (len(methods), items))
            outcomes[f"b{number}"] = (
                (latent > 0).astype(float) if setting.kind == "answers" else np.exp(-latent / 2)
            )
        yield comparison(methods, outcomes, losses=setting.kind == "losses")


def comparison(
    methods: np.ndarray, outcomes: dict[str, np.ndarray], losses: bool = False
) -> Comparison:
    """Plans with these outcomes (plans, items) by benchmark as plans of numbered methods."""
    labels = [f"method {number}" for number in methods]
    cells = pd.DataFrame({"criterion": labels, "method": labels}).rename_axis("cell")
    cells["seed"] = cells.groupby("criterion").cumcount()
    axes = {
        "model": "m",
        "granularity": "expert",
        "allocation": "uniform",
        "gate": "model",
        "calibration": "text",
    }
    cells = cells.assign(
        **axes, ratio=0.25, removed=0.25, removed_words="25 %", recovery="none", protocol=None
    )
    scores = pd.DataFrame({name: values.mean(axis=1) for name, values in outcomes.items()})
    quantities = dict.fromkeys(outcomes, Quantity("loss")) if losses else {}
    parts: dict[str, tuple[str, ...]] = {name: (name,) for name in outcomes}
    return Comparison("m", cells, scores, parts, quantities, outcomes, scores * 0)


def separated(study: Comparison) -> int:
    """How many methods are separated from the best one of a study by their mean over all
    benchmarks."""
    target = tuple(study.benchmarks_of)
    order = study.quantity(target).best_first(study.score(target)).index
    return sum(lead.p < LEVEL for lead in study.leads(target, [int(cell) for cell in order]))


def _relabelled(store: Path, name: str, studies: int) -> bool:
    """Print how often random plans are told apart when they are given out as plans of methods;
    whether a bar fails."""
    [plans] = Results(load(store, name)).comparisons
    rows = np.flatnonzero(plans.all_cells["criterion"] == "random")
    rng = np.random.default_rng(1)
    failed = False
    for seeds in (2, 3, 5):
        methods = np.repeat(np.arange(len(rows) // seeds), seeds)
        found = []
        for _ in range(studies):
            drawn = rng.permutation(rows)[: len(methods)]
            outcomes = {benchmark: values[drawn] for benchmark, values in plans.outcomes.items()}
            found.append(separated(comparison(methods, outcomes)) > 0)
        about = (
            f"{len(rows)} random plans of {plans.model} as {methods[-1] + 1} methods of {seeds} "
            "seeds"
        )
        failed |= misses(about, float(np.mean(found)), "<=", BAR_EQUAL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
