"""Seeds as replicates: coverage of intervals and errors of verdicts in simulated studies whose
truth is known; also rankings, their status beside chance, and the sentences made of them."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from handmade import UNPRUNED, cell, comparison_of, first_solved, results_of, study_of
from scipy.stats import bartlett, studentized_range, t, ttest_1samp

from benchmarks import best_of_many
from moe_lab.analysis.registry import find
from moe_lab.analysis.stats import chance as chance_of_plans
from moe_lab.analysis.stats import ranking
from moe_lab.analysis.stats.comparison import Comparison, random_scores
from moe_lab.analysis.stats.quantity import Quantity
from moe_lab.analysis.stats.uncertainty import Estimate, Stratum, crossed_estimate, leads_of_best
from moe_lab.analysis.stats.winners import winner_map

STUDIES = 2000
ITEMS = 150
SETTINGS = {
    "normal": [
        (0.04, 0.15),
        (0.04, 0.4),
        (0.0, 0.3),
        (0.08, 0.05),
    ],
    "binary": [
        (0.15, 0.3),
        (0.1, 1.0),
        (0.0, 0.6),
        (0.4, 0.1),
    ],
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
    if kind == "normal":
        return effects(0.4)
    first_right = item + effects(1) > 0
    second_right = item + effects(1) > 0
    return first_right.astype(float) - second_right


CASES = [(kind, deviations) for kind, settings in SETTINGS.items() for deviations in settings]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "deviations"), CASES)
def test_intervals_over_seeds_and_items_cover_what_they_promise(
    kind: str, deviations: tuple[float, float]
) -> None:
    """Twice as wide as with known variances is all there is where three seeds differ by more than
    items do: t has two degrees of freedom then. From five seeds on at most 1.5 times."""
    rng = np.random.default_rng(1)
    for seeds, least_coverage, widest, most_errors in (
        (2, 0.88, np.inf, 0.12),
        (3, 0.92, 2.0, 0.08),
        (5, 0.92, 1.5, 0.08),
        (10, 0.92, 1.5, 0.08),
    ):
        samples = (drawn(rng, kind, seeds, *deviations) for _ in range(STUDIES))
        estimates = [of_equal_items(sample) for sample in samples]
        low, high = np.transpose([estimate.interval for estimate in estimates])
        known_width = 2 * 1.96 * np.std([estimate.value for estimate in estimates])
        coverage = np.mean((low <= 0) & (high >= 0))
        width = np.median(high - low) / known_width
        assert coverage >= least_coverage, (seeds, coverage)
        assert width <= widest, (seeds, width)
        assert np.mean([estimate.p < 0.05 for estimate in estimates]) <= most_errors


def of_equal_items(differences: np.ndarray) -> Estimate:
    """The mean of differences (seeds, items), in which items weigh alike."""
    items = differences.shape[1]
    return crossed_estimate([Stratum(differences / items, np.full(items, 1 / items))])


def test_differences_weigh_items() -> None:
    """As those of a group whose tasks count alike and have different numbers of items."""
    solved = {"gsm8k": [first_solved(20), first_solved(15), first_solved(10)]}
    alike = comparison_of([UNPRUNED, cell("reap"), cell("ean")], solved)
    assert alike.difference(("gsm8k",), 1, 2).value == pytest.approx(5 / 40)
    weighted = replace(alike, item_weights={"gsm8k": np.repeat([1.5, 0.5], 20)})
    assert weighted.difference(("gsm8k",), 1, 2).value == pytest.approx(1.5 * 5 / 40)


@pytest.mark.slow
def test_equal_methods_are_hardly_ever_separated_from_the_best() -> None:
    setting = best_of_many.Setting(14, "3", 0.4)
    errors = 0
    for study in best_of_many.simulated(setting, 200):
        rows = ranking.rankings([study])[0].rows
        errors += (rows["verdict"] == "separated").any()
    assert errors / 200 <= 0.10


@pytest.fixture(scope="module")
def models_of_one_seed() -> list[Comparison]:
    setting = best_of_many.Setting(14, "1", 1.0)
    studies = best_of_many.simulated(setting, 3)
    return [replace(study, model=f"m{number}") for number, study in enumerate(studies)]


def test_one_seed_separates_no_methods(models_of_one_seed: list[Comparison]) -> None:
    rankings = ranking.rankings(models_of_one_seed)
    assert len(rankings) == 3
    assert all(result.rows["verdict"].eq("").all() for result in rankings)
    text = ranking.ranking_text(rankings)
    assert not re.search("best|separated|beyond", text)
    assert "one seed" in text


def test_one_seed_proves_no_win(models_of_one_seed: list[Comparison]) -> None:
    columns = winner_map(models_of_one_seed)
    assert not columns["proved"].any()
    assert columns["p"].isna().all()


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
    weight = 1 / items / benchmarks**2
    freedom_of_items = (methods - 1) * (items - 1)
    freedom_of_residuals = methods * (seeds - 1) * (items - 1)
    for benchmark in range(benchmarks):
        of_benchmark = outcomes[:, :, benchmark]
        of_methods = of_benchmark.mean((1, 2), keepdims=True)
        of_items = of_benchmark.mean(1, keepdims=True)
        of_seeds = of_benchmark.mean(2, keepdims=True)
        effects = of_items - of_methods
        crossing = effects - effects.mean(0)
        residuals = of_benchmark - of_seeds - of_items + of_methods
        part = weight * (crossing**2).sum() / freedom_of_items
        by_item += part
        squares += part**2 / freedom_of_items
        residual += weight * (residuals**2).sum() / freedom_of_residuals / seeds
    variance = max(by_seed + by_item - residual, by_seed, by_item)
    return float(np.sqrt(2 * variance)), float(variance**2 / squares)


def test_best_of_many_is_tested_by_the_studentised_range() -> None:
    rng = np.random.default_rng(5)
    of_seeds = rng.normal(0, 0.3, (5, 3, 1, 1))
    of_items = rng.normal(0, 1, (5, 1, 2, 20))
    outcomes = of_seeds + of_items + rng.normal(size=(5, 3, 2, 20))
    equal = np.full(20, 1 / 20)
    strata = [Stratum(outcomes[:, :, number].reshape(15, 20) / 40, equal) for number in range(2)]
    error, freedom = analysis_of_variance(outcomes)
    errors = (error, 2 * error, error, error)  # the second is that of its pair
    pairs = [Estimate(0.0, error_of_pair) for error_of_pair in (0.0, 2 * error, 0.0, 0.0)]
    leads = leads_of_best(pairs, strata, np.repeat(np.arange(5), 3))
    best, *others = outcomes.mean((1, 2, 3))
    quantile = studentized_range.ppf(0.95, 5, freedom)
    for lead, expected, other in zip(leads, errors, others, strict=True):
        assert lead.error == pytest.approx(expected)
        assert lead.degrees_of_freedom == pytest.approx(freedom)
        ratio = abs(best - other) / lead.error * np.sqrt(2)
        assert lead.p == pytest.approx(studentized_range.sf(ratio, 5, freedom), abs=1e-6)
        reach = quantile / np.sqrt(2) * lead.error
        assert lead.interval == pytest.approx((lead.value - reach, lead.value + reach), abs=1e-6)


def test_one_seed_is_a_paired_t_test_over_items() -> None:
    """Equal items leave the variance of seeds alone."""
    rng = np.random.default_rng(3)
    items = rng.normal(0.1, 1, 30)
    one_seed = of_equal_items(items[None])
    assert one_seed.p == pytest.approx(ttest_1samp(items, 0).pvalue)
    seeds = rng.normal(0.1, 1, 6)
    alike = of_equal_items(np.repeat(seeds[:, None], 4, axis=1))
    assert alike.p == pytest.approx(ttest_1samp(seeds, 0).pvalue)


def test_crossed_interval_is_that_of_an_analysis_of_variance() -> None:
    rng = np.random.default_rng(4)
    d = rng.normal(0, 0.3, (4, 1)) + rng.normal(0, 0.5, 20) + rng.normal(size=(4, 20))
    residuals = d - d.mean(1)[:, None] - d.mean(0) + d.mean()
    seed = 20 * d.mean(1).var(ddof=1)
    item = 4 * d.mean(0).var(ddof=1)
    both = (residuals**2).sum() / (3 * 19)
    total = seed + item - both
    variance = max(total, seed, item) / d.size
    freedom = max(1.0, total**2 / (seed**2 / 3 + item**2 / 19 + both**2 / 57))
    estimate = of_equal_items(d)
    reach = t.ppf(0.975, freedom) * variance**0.5
    assert estimate.interval == pytest.approx((d.mean() - reach, d.mean() + reach))


def test_items_weigh_by_their_tokens() -> None:
    losses = np.array([2.0, 1.0, 1.5])
    tokens = np.array([10.0, 30.0, 20.0])
    shares = tokens / tokens.sum()
    estimate = crossed_estimate([Stratum((losses * shares)[None], shares)])
    mean = losses @ shares
    assert estimate.value == pytest.approx(mean)
    deviations = shares * (losses - mean)
    assert estimate.error == pytest.approx(np.sqrt(1.5 * (deviations**2).sum()))


CHANCE = (12, 16, 20, 14, 18)
RANDOM = [cell("random", calibration="none", seed=seed) for seed in range(5)]


@pytest.fixture
def several() -> Comparison:
    """REAP and EAN with two seeds, MAN with one, five random plans, of 60 items."""
    plans = (("reap", 1), ("reap", 2), ("ean", 2), ("ean", 1), ("man", 1))
    axes = [UNPRUNED, *(cell(name, seed=seed) for name, seed in plans), *RANDOM]
    counts = (60, 50, 48, 47, 51, 24, *CHANCE)
    return comparison_of(axes, {"gsm8k": [first_solved(count, 60) for count in counts]})


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
    counts = (60, 20, 20, 12, 12, *CHANCE)
    solved = {"gsm8k": [first_solved(count, 60) for count in counts]}
    compared = comparison_of([UNPRUNED, *plans, *RANDOM], solved)
    [result] = ranking.rankings([compared])
    verdicts = result.rows["verdict"].tolist()
    assert verdicts[0] == "best"
    assert "separated" in verdicts
    statuses = result.rows.set_index("method")["status"]
    assert statuses.drop("random").eq("within chance").all()
    main_finding, text = ranking.ranking_text([result]).split("\n\n")
    assert main_finding.startswith("No criterion is separated from random pruning")
    assert not re.search(r"\bbest\b.*EAN|EAN.*\bbest\b|separated", text)


def with_random_plans(
    model: str, counts: tuple[int, ...], ratio: float = 0.5, **axes: Any
) -> Comparison:
    """A model with random plans that solve so many of 100 items, and MAN, which solves 60."""
    random = [cell("random", ratio=ratio, seed=seed) for seed in range(len(counts))]
    man = cell("man", ratio=ratio, **axes)
    outcomes = [first_solved(count, 100) for count in (90, 60, *counts)]
    compared = comparison_of([UNPRUNED, man, *random], {"gsm8k": outcomes})
    return replace(compared, model=model)


def of_models(scores: dict[str, tuple[int, ...]], **axes: Any) -> list[ranking.Ranking]:
    """Rankings of `with_random_plans`."""
    models = [with_random_plans(model, counts, **axes) for model, counts in scores.items()]
    return ranking.rankings(models)


def test_random_plans_of_equal_scores_give_no_chance() -> None:
    [result] = of_models({"a": (30, 30, 30)})
    assert result.chance == {}
    assert result.rows["chance"].eq("").all()


def test_random_plans_alone_have_a_ranking() -> None:
    random = [cell("random", seed=seed) for seed in range(3)]
    outcomes = [first_solved(count, 100) for count in (90, 20, 30, 40)]
    [result] = ranking.rankings([comparison_of([UNPRUNED, *random], {"gsm8k": outcomes})])
    assert result.rows["status"].tolist() == ["random plans"]


def test_two_random_plans_of_a_kind_have_scores() -> None:
    compared = with_random_plans("a", (20, 40))
    [scores] = random_scores(compared, compared.cells, ("gsm8k",)).values()
    assert scores.tolist() == [0.2, 0.4]
    alone = with_random_plans("a", (20,))
    assert random_scores(alone, alone.cells, ("gsm8k",)) == {}


def test_models_whose_units_differ_are_not_pooled() -> None:
    models = []
    for model, unit in (("a", "nats per token"), ("b", "bits per byte")):
        quantities = {"gsm8k": Quantity("loss", unit)}
        models.append(replace(with_random_plans(model, (20, 30, 40)), quantities=quantities))
    rankings = ranking.rankings(models)
    assert [result.chance["expert", "none"].models for result in rankings] == [1, 1]


def test_equal_spreads_of_random_plans_are_pooled_over_models() -> None:
    alike = {"a": (20, 30, 40), "b": (42, 48, 60), "c": (20, 28, 42)}
    rankings = of_models(alike)
    samples = [np.array(counts) / 100 for counts in alike.values()]
    pooled = np.sqrt(np.mean([scores.var(ddof=1) for scores in samples]))
    assert bartlett(*samples).pvalue > 0.05
    for result, scores in zip(rankings, samples, strict=True):
        reach = t.ppf(0.95, 6) * pooled * np.sqrt(1 + 1 / 3)
        _, upper = result.chance["expert", "none"].limits(1)
        assert upper == pytest.approx(scores.mean() + reach)
    statuses = [result.rows["chance"].iloc[0] for result in rankings]
    assert statuses == ["above chance", "within chance", "above chance"]
    assert "2 of 3" in ranking.headline(rankings)


def test_unequal_spreads_of_random_plans_are_not_pooled() -> None:
    apart = {"a": (30, 30, 31), "b": (20, 48, 80)}
    samples = [np.array(counts) / 100 for counts in apart.values()]
    assert bartlett(*samples).pvalue < 0.05
    rankings = of_models(apart)
    for result, scores in zip(rankings, samples, strict=True):
        [chance] = result.chance.values()
        assert chance.spreads_differ
        assert chance.degrees_of_freedom == 2
        assert chance.spread == pytest.approx(scores.std(ddof=1))
        assert "differ between models" in " ".join(ranking.remarks(result))


def test_p_value_of_unequal_spreads_is_scipys() -> None:
    samples = [np.array(counts) / 100 for counts in ((30, 34, 29, 41), (20, 48, 80), (1, 9))]
    variances = np.array([sample.var(ddof=1) for sample in samples])
    freedoms = np.array([len(sample) - 1.0 for sample in samples])
    pooled = float(freedoms @ variances / freedoms.sum())
    p = chance_of_plans._bartlett(variances, freedoms, pooled)
    assert p == pytest.approx(bartlett(*samples).pvalue, rel=1e-12)


def test_recovered_plan_is_compared_with_recovered_random_plans() -> None:
    [result] = of_models({"a": (20, 30, 40)}, recovery="router_kd")
    assert result.rows["chance"].eq("").all()


def test_plans_are_matched_by_seed_or_single(several: Comparison) -> None:
    # REAP 50, 48 and EAN 51, 47, of which seed 2 comes first
    paired = several.difference(("gsm8k",), 1, 4)
    assert paired.value == pytest.approx(0)
    assert 0 < paired.error < 0.03
    against_one = several.difference(("gsm8k",), 1, 5)
    assert against_one.value == pytest.approx(25 / 60)
    plans = (("reap", 1), ("reap", 2), ("ean", 7), ("ean", 8), ("ean", 9))
    axes = [UNPRUNED, *(cell(name, seed=seed) for name, seed in plans)]
    counts = (60, 50, 48, 40, 38, 0)
    same_study = comparison_of(axes, {"gsm8k": [first_solved(count, 60) for count in counts]})
    in_order = same_study.difference(("gsm8k",), 1, 3)
    assert in_order.value == pytest.approx(10 / 60), "without common seeds"


def test_ranking_lists_all_plans_best_first(several: Comparison) -> None:
    results = results_of(study_of(several), [several])
    [figure, table] = find("ranking").items(results)
    text = ranking.ranking_text(results.rankings)
    listed = re.findall(r"^ +\d+  (\S+)", text, re.MULTILINE)
    assert listed == [name.split()[0] for name in table.frame["Criterion"]]
    is_average = figure.rows["Metric"] == ranking.AVERAGE
    assert figure.rows["is_open"][~is_average].all(), "only averages are compared with chance"
    assert set(figure.rows["status"][~is_average]) == {""}
    labels = figure.layers[-1]["encoding"]["y"]["sort"]
    assert labels[-1] == "Random"
    assert len(labels) == 4
    assert "one seed" in text and "one seed" in table.caption, "MAN has one"
