"""Seeds as replicates: coverage of intervals and errors of verdicts in simulated studies whose
truth is known; also rankings, their status beside chance, and the sentences made of them."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, cells_of, comparison_of, first, results_of, study_of
from matplotlib.figure import Figure
from scipy.stats import bartlett, studentized_range, t, ttest_1samp

from analysis.outputs.score_rows import by_ratio, draw_chance
from analysis.registry import find
from analysis.stats import ranking, ranks
from analysis.stats.chance import chance_of
from analysis.stats.comparison import Comparison, random_scores
from analysis.stats.quantity import Quantity
from analysis.stats.rank_tests import rank_tests
from analysis.stats.uncertainty import Estimate, Stratum, crossed_estimate
from analysis.stats.uncertainty import best_of_many as best_of_many_leads
from analysis.stats.winners import winner_map
from benchmarks import best_of_many

STUDIES = 2000
ITEMS = 150
SETTINGS = {
    "normal": [(0.04, 0.15), (0.04, 0.4), (0.0, 0.3), (0.08, 0.05)],
    "binary": [(0.15, 0.3), (0.1, 1.0), (0.0, 0.6), (0.4, 0.1)],
}
"""Standard deviations between seeds and of item x method. Of binary answers they are of a latent
normal, above 0 where an answer is right, in which items differ by 1 and the rest has 1; of normal
differences the rest has 0.4."""


def drawn(
    rng: np.random.Generator, kind: str, seeds: int, of_seed: float, of_item: float
) -> np.ndarray:
    """Differences (seeds, items) between two equally good methods."""

    def effects(residual: float) -> np.ndarray:
        of_plan = rng.normal(0, of_seed, (seeds, 1)) + rng.normal(0, residual, (seeds, ITEMS))
        return np.asarray(of_plan + rng.normal(0, of_item, ITEMS))

    item = rng.normal(0, 1, ITEMS)
    return (
        effects(0.4)
        if kind == "normal"
        else (item + effects(1) > 0).astype(float) - (item + effects(1) > 0)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "of"), [(kind, of) for kind, every in SETTINGS.items() for of in every]
)
def test_intervals_over_seeds_and_items_cover_what_they_promise(
    kind: str, of: tuple[float, float]
) -> None:
    """Twice as wide as with known variances is all there is where three seeds differ by more than
    items do: t has two degrees of freedom then. From five seeds on at most 1.5 times."""
    rng = np.random.default_rng(1)
    for seeds, least in ((2, 0.88), (3, 0.92), (5, 0.92), (10, 0.92)):
        verdicts = [
            crossed_estimate(
                [Stratum(drawn(rng, kind, seeds, *of) / ITEMS, np.full(ITEMS, 1 / ITEMS))]
            )
            for _ in range(STUDIES)
        ]
        ends = np.array([estimate.interval for estimate in verdicts])
        values = [estimate.value for estimate in verdicts]
        coverage = np.mean((ends[:, 0] <= 0) & (ends[:, 1] >= 0))
        width = np.median(ends[:, 1] - ends[:, 0]) / (2 * 1.96 * np.std(values))
        assert coverage >= least, (seeds, coverage)
        assert seeds == 2 or width <= (2.0 if seeds == 3 else 1.5), (seeds, width)
        assert np.mean([estimate.p < 0.05 for estimate in verdicts]) <= (
            0.12 if seeds == 2 else 0.08
        )


def test_weighted_items_have_no_exact_test() -> None:
    """As those of a group whose tasks count alike and have different numbers of items."""
    alike = comparison_of(
        [UNPRUNED, cell("reap"), cell("ean")], {"gsm8k": [first(20), first(15), first(10)]}
    )
    weighted = replace(alike, units={"gsm8k": np.repeat([1.5, 0.5], 20)})
    estimates = [comparison.difference(("gsm8k",), 1, 2) for comparison in (alike, weighted)]
    assert [estimate.value for estimate in estimates] == pytest.approx([5 / 40, 1.5 * 5 / 40])
    assert np.isnan([estimate.exact for estimate in estimates]).tolist() == [False, True]


def simulated(
    rng: np.random.Generator, criteria: int, seeds: int, items: int, lead: float
) -> Comparison:
    """Methods with right-or-wrong answers, of which the first is better by `lead`. Standard
    deviations: 0.2 between items, 0.05 of item x method, 0.015 between seeds."""
    names = ("reap", "ean", "seer", "frequency", "man")[:criteria]
    cells = cells_of(
        [UNPRUNED, *(cell(name, seed=seed) for name in names for seed in range(seeds))]
    )
    share = np.clip(0.5 + rng.normal(0, 0.2, items), 0.05, 0.9)
    plans = [share + 0.1]
    for number in range(criteria):
        outcome = share + (lead if number == 0 else 0) + rng.normal(0, 0.05, items)
        plans += [outcome + rng.normal(0, 0.015) for _ in range(seeds)]
    outcomes = (rng.random((len(plans), items)) < np.array(plans)).astype(float)
    scores = pd.DataFrame({"gsm8k": outcomes.mean(axis=1)}, index=cells.index)
    return Comparison(
        "m", cells, scores, ranks.displayed_columns(["gsm8k"]), {}, {"gsm8k": outcomes}, scores * 0
    )


@pytest.mark.slow
def test_better_method_is_named() -> None:
    rng = np.random.default_rng(2)
    tables = [ranking.rankings([simulated(rng, 2, 5, 2000, 0.05)])[0].rows for _ in range(150)]
    best = [
        rows["verdict"].tolist() == ["best", "separated"] and rows["method"].iloc[0] == "reap"
        for rows in tables
    ]
    assert np.mean(best) >= 0.8


@pytest.mark.slow
def test_equal_methods_are_hardly_ever_separated_from_the_best() -> None:
    rankings = [
        ranking.rankings([study])[0]
        for study in best_of_many.simulated(best_of_many.Setting(14, "3", 0.4), 200)
    ]
    assert np.mean([(result.rows["verdict"] == "separated").any() for result in rankings]) <= 0.10


def test_one_seed_separates_no_methods() -> None:
    """Also over models, in the winner map and by ranks."""
    setting = best_of_many.Setting(14, "1", 1.0)
    models = [
        replace(study, model=f"m{number}")
        for number, study in enumerate(best_of_many.simulated(setting, 3))
    ]
    rankings = ranking.rankings(models)
    assert len(rankings) == 4 and all(result.rows["verdict"].eq("").all() for result in rankings)
    text = f"{ranking.ranking_text(rankings)} {' '.join(ranking.headlines(rankings))}"
    assert not re.search("best|separated|beyond", text) and "one seed" in text
    assert not winner_map(models)["proved"].any() and winner_map(models)["p"].isna().all()
    assert [rank_tests(study, over) for study in models for over in ("columns", "benchmarks")] == [
        []
    ] * 6


def analysis_of_variance(outcomes: np.ndarray) -> tuple[float, float]:
    """Error of a difference of two methods and its freedom, from (methods, seeds, benchmarks,
    items) outcomes.

    Variances of seeds and of method x item are of all methods together, each from its mean
    square."""
    methods, seeds, benchmarks, items = outcomes.shape
    by_seed = outcomes.mean((2, 3)).var(1, ddof=1).mean() / seeds
    by_item = 0.0
    residual = 0.0
    squares = by_seed**2 / methods / (seeds - 1)
    for benchmark in range(benchmarks):
        outcomes_of_benchmark = outcomes[:, :, benchmark]
        means = outcomes_of_benchmark.mean(1) - outcomes_of_benchmark.mean((1, 2))[:, None]
        crossing = means - means.mean(0)
        residuals = (
            outcomes_of_benchmark
            - outcomes_of_benchmark.mean(2)[..., None]
            - outcomes_of_benchmark.mean(1)[:, None]
            + outcomes_of_benchmark.mean((1, 2))[:, None, None]
        )
        part = (crossing**2).sum() / (methods - 1) / (items - 1) / items / benchmarks**2
        by_item = by_item + part
        squares = squares + part**2 / (methods - 1) / (items - 1)
        residual += (
            (residuals**2).sum()
            / methods
            / (seeds - 1)
            / (items - 1)
            / items
            / benchmarks**2
            / seeds
        )
    variance = max(by_seed + by_item - residual, by_seed, by_item)
    return float(np.sqrt(2 * variance)), float(variance**2 / squares)


def test_best_of_many_is_tested_by_the_studentised_range() -> None:
    rng = np.random.default_rng(5)
    outcomes = (
        rng.normal(0, 0.3, (5, 3, 1, 1))
        + rng.normal(0, 1, (5, 1, 2, 20))
        + rng.normal(size=(5, 3, 2, 20))
    )
    strata = [
        Stratum(outcomes[:, :, benchmark].reshape(15, 20) / 40, np.full(20, 1 / 20))
        for benchmark in range(2)
    ]
    error, freedom = analysis_of_variance(outcomes)
    pairs = [Estimate(0.0, 0.0), Estimate(0.0, 2 * error), Estimate(0.0, 0.0), Estimate(0.0, 0.0)]
    leads = best_of_many_leads(pairs, strata, np.repeat(np.arange(5), 3))
    means = outcomes.mean((1, 2, 3))
    for lead, wider, mean in zip(leads, (1, 2, 1, 1), means[1:], strict=True):
        assert lead.error == pytest.approx(wider * error) and lead.freedom == pytest.approx(freedom)
        ratio = abs(means[0] - mean) / lead.error * np.sqrt(2)
        assert lead.p == pytest.approx(studentized_range.sf(ratio, 5, freedom), abs=1e-6)
        reach = studentized_range.ppf(0.95, 5, freedom) / np.sqrt(2) * lead.error
        assert lead.interval == pytest.approx((lead.value - reach, lead.value + reach), abs=1e-6)


def test_one_seed_is_a_paired_t_test_over_items() -> None:
    """Equal items leave the variance of seeds alone."""
    rng = np.random.default_rng(3)
    items = rng.normal(0.1, 1, 30)
    alone = crossed_estimate([Stratum(items[None] / 30, np.full(30, 1 / 30))])
    assert alone.p == pytest.approx(ttest_1samp(items, 0).pvalue)
    seeds = rng.normal(0.1, 1, 6)
    equal = crossed_estimate([Stratum(np.repeat(seeds[:, None], 4, axis=1) / 4, np.full(4, 1 / 4))])
    assert equal.p == pytest.approx(ttest_1samp(seeds, 0).pvalue)


def test_crossed_interval_is_that_of_an_analysis_of_variance() -> None:
    rng = np.random.default_rng(4)
    d = rng.normal(0, 0.3, (4, 1)) + rng.normal(0, 0.5, 20) + rng.normal(size=(4, 20))
    residuals = d - d.mean(1)[:, None] - d.mean(0) + d.mean()
    seed = 20 * d.mean(1).var(ddof=1)
    item = 4 * d.mean(0).var(ddof=1)
    both = (residuals**2).sum() / (3 * 19)
    variance = max(seed + item - both, seed, item) / d.size
    freedom = max(1.0, (seed + item - both) ** 2 / (seed**2 / 3 + item**2 / 19 + both**2 / 57))
    estimate = crossed_estimate([Stratum(d / 20, np.full(20, 1 / 20))])
    reach = t.ppf(0.975, freedom) * variance**0.5
    assert estimate.interval == pytest.approx((d.mean() - reach, d.mean() + reach))


def test_items_weigh_by_their_tokens() -> None:
    losses = np.array([2.0, 1.0, 1.5])
    tokens = np.array([10.0, 30.0, 20.0])
    shares = tokens / tokens.sum()
    estimate = crossed_estimate([Stratum((losses * shares)[None], shares)])
    assert estimate.value == pytest.approx(losses @ shares)
    assert estimate.error == pytest.approx(
        np.sqrt(1.5 * ((shares * (losses - losses @ shares)) ** 2).sum())
    )


CHANCE = (12, 16, 20, 14, 18)


@pytest.fixture
def several() -> Comparison:
    """REAP and EAN with two seeds, MAN with one, five random plans, of 60 items."""
    plans = (("reap", 1), ("reap", 2), ("ean", 2), ("ean", 1), ("man", 1))
    axes = [UNPRUNED, *(cell(name, seed=seed) for name, seed in plans)]
    axes += [cell("random", calibration="none", seed=seed) for seed in range(5)]
    return comparison_of(
        axes, {"gsm8k": [first(count, 60) for count in (60, 50, 48, 47, 51, 24, *CHANCE)]}
    )


def test_seeds_of_a_method_are_one_row(several: Comparison) -> None:
    [result] = ranking.rankings([several])
    rows = result.rows.set_index("method")
    assert rows["seeds"].to_dict() == {"reap": 2, "ean": 2, "man": 1, "random": 5}
    scores = {"reap": 49 / 60, "ean": 49 / 60, "man": 0.4, "random": 16 / 60}
    assert rows["score"].to_dict() == pytest.approx(scores)
    assert rows.loc["reap", "spread"] == pytest.approx(np.std([50, 48], ddof=1) / 60)
    over = ["2 seeds and items", "2 seeds and items", "items", "5 seeds and items"]
    assert rows["over"].tolist() == over
    assert rows.loc["reap", "share"] == pytest.approx(49 / 60)
    assert [len(panel.cells) for panel in several.panels] == [4], "one panel, whatever the seeds"


def test_status_of_a_method_begins_with_chance(several: Comparison) -> None:
    [result] = ranking.rankings([several])
    rows = result.rows
    assert rows["status"].tolist() == ["above chance, best"] * 2 + ["within chance", "random plans"]
    assert rows["rank"].tolist() == [1, 1, 3, 4]


def test_limits_of_chance_are_corrected_for_the_number_of_plans(several: Comparison) -> None:
    [result] = ranking.rankings([several])
    scores = np.array(CHANCE) / 60
    reach = t.ppf(1 - 0.05 / 3, 4) * scores.std(ddof=1) * np.sqrt(1.2)
    chance = result.chance["expert", "none"]
    limits = chance.limits(result.plans_tested)
    assert limits == pytest.approx((scores.mean() - reach, scores.mean() + reach)), "of three plans"


def test_methods_within_chance_get_no_verdict() -> None:
    """Although each of EAN's items is lost by one of the seeds of SEER."""
    plans = [cell(name, seed=seed) for name in ("ean", "seer") for seed in (1, 2)]
    axes = [UNPRUNED, *plans, *(cell("random", calibration="none", seed=seed) for seed in range(5))]
    compared = comparison_of(
        axes, {"gsm8k": [first(count, 60) for count in (60, 20, 20, 12, 12, *CHANCE)]}
    )
    [result] = ranking.rankings([compared])
    assert (
        result.rows["verdict"].tolist()[0] == "best"
        and "separated" in result.rows["verdict"].tolist()
    )
    assert result.rows.set_index("method")["status"].drop("random").eq("within chance").all()
    assert not re.search(r"\bbest\b.*EAN|EAN.*\bbest\b|separated", ranking.ranking_text([result]))


def with_random_plans(
    model: str, counts: tuple[int, ...], ratio: float = 0.5, **axes: Any
) -> Comparison:
    """A model with random plans that solve so many of 100 items, and MAN, which solves 60."""
    random = [cell("random", ratio=ratio, seed=seed) for seed in range(len(counts))]
    outcomes = [first(count, 100) for count in (90, 60, *counts)]
    compared = comparison_of(
        [UNPRUNED, cell("man", ratio=ratio, **axes), *random], {"gsm8k": outcomes}
    )
    return replace(compared, model=model)


def of_models(scores: dict[str, tuple[int, ...]], **axes: Any) -> list[ranking.Ranking]:
    """Rankings of `with_random_plans`."""
    return ranking.rankings(
        [with_random_plans(model, counts, **axes) for model, counts in scores.items()]
    )


def test_random_plans_of_equal_scores_give_no_chance() -> None:
    [result] = of_models({"a": (30, 30, 30)})
    assert result.chance == {} and result.rows["chance"].eq("").all()


def test_two_random_plans_of_a_kind_have_scores() -> None:
    compared = with_random_plans("a", (20, 40))
    [scores] = random_scores(compared, compared.cells, ("gsm8k",)).values()
    assert scores.tolist() == [0.2, 0.4]
    alone = with_random_plans("a", (20,))
    assert random_scores(alone, alone.cells, ("gsm8k",)) == {}


def test_models_whose_units_differ_are_not_pooled() -> None:
    units = {"a": "nats per token", "b": "bits per byte"}
    models = [
        replace(
            with_random_plans(model, (20, 30, 40)), quantities={"gsm8k": Quantity("loss", unit)}
        )
        for model, unit in units.items()
    ]
    rankings = ranking.rankings(models)
    assert [result.model for result in rankings] == ["a", "b"], "there is none over both"
    assert [result.chance["expert", "none"].models for result in rankings] == [1, 1]


def test_ranking_over_exactly_two_models() -> None:
    *_, both = of_models({"a": (20, 30, 40), "b": (20, 32, 44)})
    assert both.model == ranking.ALL_MODELS and both.rows["over"].eq("two models").all()
    assert both.rows.set_index("method")["score"].to_dict() == pytest.approx(
        {"man": 0.6, "random": 0.31}
    )


def test_ranking_over_some_models_names_them() -> None:
    ratios = {"a": 0.5, "b": 0.5, "c": 0.25}
    rankings = ranking.rankings(
        [with_random_plans(model, (20, 30, 40), ratio) for model, ratio in ratios.items()]
    )
    assert [result.model for result in rankings] == ["a", "b", "c", "a and b"]


def test_equal_spreads_of_random_plans_are_pooled_over_models() -> None:
    alike = {"a": (20, 30, 40), "b": (42, 48, 60), "c": (20, 28, 42)}
    rankings = of_models(alike)[:3]
    samples = [np.array(counts) / 100 for counts in alike.values()]
    pooled = np.sqrt(np.mean([scores.var(ddof=1) for scores in samples]))
    assert bartlett(*samples).pvalue > 0.05
    for result, scores in zip(rankings, samples, strict=True):
        reach = t.ppf(0.95, 6) * pooled * np.sqrt(1 + 1 / 3)
        assert result.chance["expert", "none"].limits(1)[1] == pytest.approx(scores.mean() + reach)
    statuses = [result.rows["chance"].iloc[0] for result in rankings]
    assert statuses == ["above chance", "within chance", "above chance"]
    assert ranking.headlines(rankings)[0].startswith("On 2 of 3 models")


def test_unequal_spreads_of_random_plans_are_not_pooled() -> None:
    apart = {"a": (30, 30, 31), "b": (20, 48, 80)}
    assert bartlett(*(np.array(counts) / 100 for counts in apart.values())).pvalue < 0.05
    for result, scores in zip(of_models(apart), apart.values(), strict=False):
        [chance] = result.chance.values()
        assert (
            chance.spreads_differ
            and chance.degrees_of_freedom == 2
            and chance.spread == pytest.approx(np.std(scores, ddof=1) / 100)
        )
        assert "differ between models" in ranking.headline(result)


def test_recovered_plan_is_compared_with_recovered_random_plans() -> None:
    [result] = of_models({"a": (20, 30, 40)}, recovery="router_kd")
    assert result.rows["chance"].eq("").all()


def test_needed_random_plans_are_the_smallest_number() -> None:
    scores = np.array([0.2, 0.3, 0.4])
    plans = chance_of(scores).plans_needed(0.65, 10)
    assert plans is not None
    limits = [
        0.3 + t.ppf(1 - 0.05 / 10, count - 1) * 0.1 * np.sqrt(1 + 1 / count)
        for count in (plans - 1, plans)
    ]
    assert limits[0] >= 0.65 > limits[1]
    assert chance_of(scores).plans_needed(0.31, 10) is None


def band(scores: np.ndarray) -> tuple[float, float]:
    reach = t.ppf(0.975, len(scores) - 1) * scores.std(ddof=1) * np.sqrt(1 + 1 / len(scores))
    return scores.mean() - reach, scores.mean() + reach


def test_the_band_of_chance_is_drawn_over_ratios_that_have_one(several: Comparison) -> None:
    cells = [
        UNPRUNED,
        *(cell("random", ratio=ratio, seed=seed) for ratio in (0.25, 0.5) for seed in range(5)),
    ]
    compared = comparison_of(
        cells, {"gsm8k": [first(count, 60) for count in (60, *CHANCE, *range(8, 13))]}
    )
    axes = Figure().subplots()
    of_ratio = list(by_ratio(compared.cells))[1:]
    [patch] = draw_chance(axes, compared, ("gsm8k",))
    [path] = axes.collections[0].get_paths()
    scores = [random_scores(compared, of, ("gsm8k",))["expert", "none"] for _, of in of_ratio]
    bands = [
        (100 * ratio, end)
        for (ratio, _), score in zip(of_ratio, scores, strict=True)
        for end in band(score)
    ]
    assert set(bands) == set(map(tuple, path.vertices)) and patch.get_label()
    assert draw_chance(axes, several, ("gsm8k",)) == [], "one ratio"


def test_a_band_of_chance_is_at_the_removed_shares_of_its_own_kind() -> None:
    cells = [
        cell(criterion, ratio=ratio, seed=seed)
        for criterion in ("random", "channel_random")
        for ratio in (0.25, 0.5)
        for seed in range(2)
    ]
    compared = comparison_of(cells, {"gsm8k": [first(count) for count in range(len(cells))]})
    all_cells = compared.all_cells
    removed = all_cells["removed"] + 0.125 * (all_cells["granularity"] == "channel")
    axes = Figure().subplots()
    draw_chance(axes, replace(compared, all_cells=all_cells.assign(removed=removed)), ("gsm8k",))
    paths = [path for bands in axes.collections for path in bands.get_paths()]
    assert [set(np.asarray(path.vertices)[:, 0]) for path in paths] == [{37.5, 62.5}, {25.0, 50.0}]


def test_plans_are_matched_by_seed_or_single(
    several: Comparison,
) -> None:
    # REAP 50, 48 and EAN 51, 47, of which seed 2 comes first
    paired = several.difference(("gsm8k",), 1, 4)
    assert paired.value == pytest.approx(0) and 0 < paired.error < 0.03
    against_one = several.difference(("gsm8k",), 1, 5)
    assert against_one.value == pytest.approx(25 / 60)
    plans = (("reap", 1), ("reap", 2), ("ean", 7), ("ean", 8), ("ean", 9))
    axes = [UNPRUNED, *(cell(name, seed=seed) for name, seed in plans)]
    same_study = comparison_of(
        axes, {"gsm8k": [first(count, 60) for count in (60, 50, 48, 40, 38, 0)]}
    )
    assert same_study.difference(("gsm8k",), 1, 3).value == pytest.approx(10 / 60), (
        "without common seeds, in their order"
    )


def test_models_are_random_effects() -> None:
    """Two methods: the studentised range is a t-test of differences, with the freedom of models."""
    scores = {"a": (30, 20), "b": (40, 31), "c": (36, 20)}
    axes = [UNPRUNED, *(cell(name, seed=seed) for name in ("reap", "ean") for seed in (1, 2))]
    compared = []
    for model, (reap, ean) in scores.items():
        outcomes = [first(count, 60) for count in (60, reap, reap, ean, ean)]
        compared.append(replace(comparison_of(axes, {"gsm8k": outcomes}), model=model))
    rounded = compared[0].all_cells["removed_words"].replace("50 %", "46.9 % (50 % requested)")
    compared[0] = replace(
        compared[0], all_cells=compared[0].all_cells.assign(removed_words=rounded)
    )
    *_, together = ranking.rankings(compared)
    assert (together.model, together.pruned) == (
        ranking.ALL_MODELS,
        "46.9 % (50 % requested) / 50 %",
    )
    differences = np.array([10, 9, 16]) / 60
    row = together.rows.iloc[1]
    assert row["p"] == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert row["behind"] == pytest.approx(differences.mean()) and row["verdict"] == "separated"


def test_ranking_lists_all_plans_best_first(several: Comparison) -> None:
    results = results_of(study_of(several), [several])
    [figure, table] = find("ranking").items(results)
    text = ranking.ranking_text(results.rankings)
    listed = re.findall(r"^ +\d+  (\S+)", text, re.MULTILINE)
    assert listed == [name.split()[0] for name in table.frame["Criterion"]]
    labels = [label.get_text() for label in figure.drawing.axes[0].get_yticklabels()]
    assert labels[-1] == "Random" and len(labels) == 4
    assert "one seed" in text and "one seed" in table.caption, "MAN has one"
