"""Seeds as replicates: coverage of intervals and errors of verdicts in simulated studies whose truth is known; also
rankings, the band of chance, and the sentences made of them."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, cells_of, comparison_of, first, results_of, study_of
from matplotlib.figure import Figure
from scipy.stats import t, ttest_1samp

from analysis.outputs.score_rows import by_ratio, draw_chance
from analysis.registry import find
from analysis.stats import ranking, ranks
from analysis.stats.comparison import Comparison, chance_bands
from analysis.stats.uncertainty import Stratum, crossed

STUDIES, ITEMS = 2000, 150
SETTINGS = {
    "normal": [(0.04, 0.15), (0.04, 0.4), (0.0, 0.3), (0.08, 0.05)],
    "binary": [(0.15, 0.3), (0.1, 1.0), (0.0, 0.6), (0.4, 0.1)],
}
"""Standard deviations between seeds and of item x method. Of binary answers they are of a latent normal, above 0 where
an answer is right, in which items differ by 1 and the rest has 1; of normal differences the rest has 0.4."""


def drawn(rng: np.random.Generator, kind: str, seeds: int, of_seed: float, of_item: float) -> np.ndarray:
    """Differences (seeds, items) between two equally good methods."""

    def effects(rest: float) -> np.ndarray:
        of_plan = rng.normal(0, of_seed, (seeds, 1)) + rng.normal(0, rest, (seeds, ITEMS))
        return np.asarray(of_plan + rng.normal(0, of_item, ITEMS))

    item = rng.normal(0, 1, ITEMS)
    return effects(0.4) if kind == "normal" else (item + effects(1) > 0).astype(float) - (item + effects(1) > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "of"), [(kind, of) for kind, every in SETTINGS.items() for of in every])
def test_intervals_over_seeds_and_items_cover_what_they_promise(kind: str, of: tuple[float, float]) -> None:
    """Twice as wide as with known variances is all there is where three seeds differ by more than items do: t has two
    degrees of freedom then. From five seeds on at most 1.5 times."""
    rng = np.random.default_rng(1)
    for seeds, least in ((2, 0.88), (3, 0.92), (5, 0.92), (10, 0.92)):
        found = [
            crossed([Stratum(drawn(rng, kind, seeds, *of) / ITEMS, np.full(ITEMS, 1 / ITEMS))]) for _ in range(STUDIES)
        ]
        ends, values = np.array([estimate.interval for estimate in found]), [estimate.value for estimate in found]
        coverage = np.mean((ends[:, 0] <= 0) & (ends[:, 1] >= 0))
        width = np.median(ends[:, 1] - ends[:, 0]) / (2 * 1.96 * np.std(values))
        assert coverage >= least, (seeds, coverage)
        assert seeds == 2 or width <= (2.0 if seeds == 3 else 1.5), (seeds, width)
        assert np.mean([estimate.p < 0.05 for estimate in found]) <= (0.12 if seeds == 2 else 0.08)


def test_right_or_wrong_items_that_do_not_count_alike_have_no_exact_test() -> None:
    """As those of a group whose tasks count alike and have different numbers of items."""
    alike = comparison_of([UNPRUNED, cell("reap"), cell("ean")], {"gsm8k": [first(20), first(15), first(10)]})
    weighted = replace(alike, units={"gsm8k": np.repeat([1.5, 0.5], 20)})
    estimates = [comparison.difference(("gsm8k",), 1, 2) for comparison in (alike, weighted)]
    assert [estimate.value for estimate in estimates] == pytest.approx([5 / 40, 1.5 * 5 / 40])
    assert np.isnan([estimate.exact for estimate in estimates]).tolist() == [False, True]


def simulated(rng: np.random.Generator, criteria: int, seeds: int, items: int, lead: float) -> Comparison:
    """Methods with right-or-wrong answers, of which the first is better by `lead`. Standard deviations: 0.2 between
    items, 0.05 of item x method, 0.015 between seeds."""
    names = ("reap", "ean", "seer", "frequency", "man")[:criteria]
    cells = cells_of([UNPRUNED, *(cell(name, seed=seed) for name in names for seed in range(seeds))])
    share = np.clip(0.5 + rng.normal(0, 0.2, items), 0.05, 0.9)
    plans = [share + 0.1]
    for number in range(criteria):
        own = share + (lead if number == 0 else 0) + rng.normal(0, 0.05, items)
        plans += [own + rng.normal(0, 0.015) for _ in range(seeds)]
    outcomes = (rng.random((len(plans), items)) < np.array(plans)).astype(float)
    scores = pd.DataFrame({"gsm8k": outcomes.mean(axis=1)}, index=cells.index)
    return Comparison("m", cells, scores, ranks.displayed(["gsm8k"]), {}, {"gsm8k": outcomes}, scores * 0)


@pytest.mark.slow
def test_a_winner_is_named_where_there_is_one_and_hardly_ever_where_there_is_none() -> None:
    rng = np.random.default_rng(2)
    none = [ranking.rankings([simulated(rng, 4, 3, 100, 0.0)])[0].tied.empty for _ in range(400)]
    assert np.mean(none) <= 0.05
    found = [ranking.rankings([simulated(rng, 2, 5, 2000, 0.05)])[0] for _ in range(150)]
    assert np.mean([each.tied.empty and each.rows["method"].iloc[0] == "reap" for each in found]) >= 0.8


def test_one_seed_is_a_paired_t_test_over_items_and_equal_items_one_over_seeds() -> None:
    """Equal items leave the variance of seeds alone."""
    rng = np.random.default_rng(3)
    items = rng.normal(0.1, 1, 30)
    alone = crossed([Stratum(items[None] / 30, np.full(30, 1 / 30))])
    assert alone.p == pytest.approx(ttest_1samp(items, 0).pvalue)
    seeds = rng.normal(0.1, 1, 6)
    equal = crossed([Stratum(np.repeat(seeds[:, None], 4, axis=1) / 4, np.full(4, 1 / 4))])
    assert equal.p == pytest.approx(ttest_1samp(seeds, 0).pvalue)


def test_a_reference_adds_mean_squares_as_an_analysis_of_variance_does() -> None:
    rng = np.random.default_rng(4)
    d = rng.normal(0, 0.3, (4, 1)) + rng.normal(0, 0.5, 20) + rng.normal(size=(4, 20))
    rest = d - d.mean(1)[:, None] - d.mean(0) + d.mean()
    seed, item = 20 * d.mean(1).var(ddof=1), 4 * d.mean(0).var(ddof=1)
    both = (rest**2).sum() / (3 * 19)
    variance = max(seed + item - both, seed, item) / d.size
    freedom = max(1.0, (seed + item - both) ** 2 / (seed**2 / 3 + item**2 / 19 + both**2 / 57))
    found = crossed([Stratum(d / 20, np.full(20, 1 / 20))])
    reach = t.ppf(0.975, freedom) * variance**0.5
    assert found.interval == pytest.approx((d.mean() - reach, d.mean() + reach))


def test_items_weigh_by_their_tokens() -> None:
    losses, tokens = np.array([2.0, 1.0, 1.5]), np.array([10.0, 30.0, 20.0])
    shares = tokens / tokens.sum()
    found = crossed([Stratum((losses * shares)[None], shares)])
    assert found.value == pytest.approx(losses @ shares)
    assert found.error == pytest.approx(np.sqrt(1.5 * ((shares * (losses - losses @ shares)) ** 2).sum()))


CHANCE = (12, 16, 20, 14, 18)


@pytest.fixture
def several() -> Comparison:
    """REAP and EAN with two seeds, MAN with one, five random plans, of 60 items."""
    plans = (("reap", 1), ("reap", 2), ("ean", 2), ("ean", 1), ("man", 1))
    axes = [UNPRUNED, *(cell(name, seed=seed) for name, seed in plans)]
    axes += [cell("random", calibration="none", seed=seed) for seed in range(5)]
    return comparison_of(axes, {"gsm8k": [first(count, 60) for count in (60, 50, 48, 47, 51, 24, *CHANCE)]})


def test_seeds_are_one_row_and_the_band_of_chance_is_where_another_random_plan_would_be(several: Comparison) -> None:
    [found] = ranking.rankings([several])
    rows = found.rows.set_index("method")
    assert rows["seeds"].to_dict() == {"reap": 2, "ean": 2, "man": 1, "random": 5}
    assert rows["score"].to_dict() == pytest.approx({"reap": 49 / 60, "ean": 49 / 60, "man": 0.4, "random": 16 / 60})
    assert rows.loc["reap", "spread"] == pytest.approx(np.std([50, 48], ddof=1) / 60)
    assert rows["verdict"].tolist() == ["best", "not separated", "separated", "separated"]
    assert rows.loc["reap", "share"] == pytest.approx(49 / 60) and not found.of_methods
    assert [len(panel.cells) for panel in several.panels] == [4], "one panel, whatever the seeds"
    scores = np.array(CHANCE) / 60
    reach = t.ppf(0.975, 4) * scores.std(ddof=1) * np.sqrt(1.2)
    assert found.chance["expert"] == pytest.approx((scores.mean() - reach, scores.mean() + reach))
    assert found.places["Avg"].tolist() == ["above", "above", "within", ""], "of REAP, EAN, MAN and Random"


def test_the_band_of_chance_is_drawn_over_ratios_that_have_one(several: Comparison) -> None:
    cells = [UNPRUNED, *(cell("random", ratio=ratio, seed=seed) for ratio in (0.25, 0.5) for seed in range(5))]
    found = comparison_of(cells, {"gsm8k": [first(count, 60) for count in (60, *CHANCE, *range(8, 13))]})
    axes, of_ratio = Figure().subplots(), list(by_ratio(found.cells))[1:]
    [patch] = draw_chance(axes, found, ("gsm8k",))
    [path] = axes.collections[0].get_paths()
    bands = [(100 * ratio, end) for ratio, of in of_ratio for end in chance_bands(found, of, ("gsm8k",))["expert"]]
    assert set(bands) == set(map(tuple, path.vertices)) and patch.get_label()
    assert draw_chance(axes, several, ("gsm8k",)) == [], "one ratio"


def test_plans_are_matched_by_their_seed_and_a_single_one_goes_with_all(several: Comparison) -> None:
    paired = several.difference(("gsm8k",), 1, 4)  # REAP 50, 48 and EAN 51, 47, of which seed 2 comes first
    assert paired.value == pytest.approx(0) and 0 < paired.error < 0.03
    against_one = several.difference(("gsm8k",), 1, 5)
    assert against_one.value == pytest.approx(25 / 60)
    plans = (("reap", 1), ("reap", 2), ("ean", 7), ("ean", 8), ("ean", 9))
    axes = [UNPRUNED, *(cell(name, seed=seed) for name, seed in plans)]
    other = comparison_of(axes, {"gsm8k": [first(count, 60) for count in (60, 50, 48, 40, 38, 0)]})
    assert other.difference(("gsm8k",), 1, 3).value == pytest.approx(10 / 60), "without common seeds, in their order"


def test_models_are_random_effects(several: Comparison) -> None:
    scores = {"a": (30, 20), "b": (40, 31), "c": (36, 20)}
    axes = [UNPRUNED, cell("reap"), cell("ean")]
    outcomes = {model: {"gsm8k": [first(count, 60) for count in (60, *counts)]} for model, counts in scores.items()}
    made = [replace(comparison_of(axes, each), model=model) for model, each in outcomes.items()]
    *_, together = ranking.rankings(made)
    assert together.model == ranking.ALL_MODELS
    differences = np.array([10, 9, 16]) / 60
    row = together.rows.iloc[1]
    assert row["p"] == pytest.approx(ttest_1samp(differences, 0).pvalue) and row["behind"] == differences.mean()
    assert "three models cannot give p < 0.05" in ranking.headline(together)


def test_a_ranking_lists_and_draws_all_plans_with_the_best_at_the_top(several: Comparison) -> None:
    results = results_of(study_of(several), [several])
    [figure, table] = find("ranking").items(results)
    text = ranking.ranking_text(results.rankings)
    assert [line.split()[0] for line in text.splitlines()[1:]] == [name.split()[0] for name in table.frame["Criterion"]]
    labels = [label.get_text() for label in figure.drawing.axes[0].get_yticklabels()]
    assert labels[-1] == "Random" and len(labels) == 4
    assert "stand for themselves" in ranking.headline(results.rankings[0]), "MAN has one seed"
