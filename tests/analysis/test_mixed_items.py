"""Cells that were not asked the same: other items, a perplexity among accuracies, a score its items
do not explain."""

from pathlib import Path
from typing import Any, NamedTuple

import handmade
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, ttest_1samp

from moe_lab.analysis.load.reader import Reader
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.ranking import verdict
from moe_lab.analysis.outputs.scores import rank_table
from moe_lab.analysis.registry import Results, find
from moe_lab.analysis.render import table as rendering
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.stats.cell_scores import differences
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.winners import winner_map

Answers = dict[int, float]
"""Item -> outcome."""
CRITERIA = ("frequency", "reap", "man")
PERPLEXITIES = {"metric": "word_perplexity", "scale": "perplexity", "unit": "nats per word"}


def study_of(
    answers: dict[str, list[Answers]], scores: dict[tuple[int, str], float] | None = None
) -> Study:
    """A study of the unpruned model and CRITERIA from benchmark -> answers of each of these cells.
    `scores` stand in place of the mean; benchmarks without answers have these alone, and are
    perplexities."""
    rows: list[dict[str, Any]] = []
    samples = []
    for name, of_cells in answers.items():
        for cell, outcomes in enumerate(of_cells):
            values = list(outcomes.values())
            mean = float(np.mean(values)) if values else np.nan
            row = {
                "cell": cell,
                "task": name,
                "benchmark": name,
                "folder": f"{name}/{cell}",
                "expected": None,
                "n": len(values) or 10,
                "stderr": 0.01,
                "score": (scores or {}).get((cell, name), mean),
            }
            rows.append(row | (handmade.SCORES if values else PERPLEXITIES))
            samples += [(cell, name, f"{item:03}", outcome) for item, outcome in outcomes.items()]
    columns = ["cell", "benchmark", "item", "outcome"]
    return Study(
        name="made",
        store=Path("store"),
        results=pd.DataFrame(rows),
        calibrations={},
        models={},
        document={},
        libraries={},
        reader=Reader(Path("store")),
        origins=pd.DataFrame(columns=["folder", "commit"]),
        family=pd.DataFrame(),
        damage=pd.DataFrame(),
        cells=handmade.cells_of([handmade.UNPRUNED, *map(handmade.cell, CRITERIA)]),
        samples=pd.DataFrame(samples, columns=columns).assign(units=np.nan),
    )


def right(count: int, items: int = 40) -> Answers:
    return {item: float(item < count) for item in range(items)}


def ranked(study: Study) -> pd.DataFrame:
    return handmade.table_of(rank_table, Results(study)).frame.set_index("Criterion")


@pytest.fixture
def perplexed() -> Study:
    """MAN is best in both columns, of which one is a perplexity: the lowest."""
    answers = {"gsm8k": [right(38), right(10), right(18), right(30)], "wikitext2": [{}] * 4}
    perplexity = {(cell, "wikitext2"): value for cell, value in enumerate((9.0, 14.0, 12.0, 10.0))}
    return study_of(answers, perplexity)


def test_average_leaves_out_perplexities(perplexed: Study) -> None:
    table = handmade.table_of(rank_table, Results(perplexed))
    rows = table.frame.set_index("Criterion")
    assert rows["Avg"].tolist() == rows["GSM8K"].tolist() == [0.95, 0.25, 0.45, 0.75]
    assert rows["wikitext2"].tolist() == pytest.approx([9.0, 14.0, 12.0, 10.0])
    assert rows.loc[["Frequency", "REAP", "MAN"], "Avg Rank"].tolist() == [3, 2, 1]
    assert "Avg is without wikitext2: there, less is better." in table.footnotes


def test_table_of_ranks_has_a_benchmark_that_is_no_column_of_the_papers() -> None:
    table = handmade.table_of(rank_table, Results(study_of({"piqa": [right(9)] * 4})))
    assert "| PIQA |" in rendering.markdown(table)


def test_ranking_leaves_out_perplexities(perplexed: Study) -> None:
    [figure, table] = find("ranking").items(Results(perplexed))
    assert "Avg is without wikitext2" in figure.caption
    assert table.frame["Avg"].tolist() == [0.75, 0.45, 0.25]


def test_lowest_perplexity_wins_without_a_test(perplexed: Study) -> None:
    columns = winner_map(Results(perplexed).measured)
    assert columns["column"].tolist() == ["GSM8K", "wikitext2"]
    accuracy, perplexity = columns.to_dict("records")
    assert accuracy["lead"] == pytest.approx(0.3)
    assert accuracy["lead_low"] < 0.3 < accuracy["lead_high"]
    assert perplexity["winners"] == ("man",)
    assert perplexity["runner_up"] == "reap"
    assert perplexity["lead"] == pytest.approx(-2)
    assert verdict(perplexity) == "not tested"


def with_costs(study: Study, shares: list[float]) -> Study:
    """The study, with all costs of each cell at this share of the unpruned model's."""
    columns = ("parameters_kept", "routed_kept", "flops_ratio", "storage_bytes")
    costs = pd.DataFrame({column: shares for column in columns})
    study.__dict__["costs"] = costs.assign(bits=16, parameters_unpruned=1.0)
    retained = pd.DataFrame({"cell": range(4)})
    study.__dict__["retained"] = retained.assign(constant=False, merged=False)
    return study


def test_costs_are_beside_averages_without_perplexities(perplexed: Study) -> None:
    with_costs(perplexed, [1.0, 0.5, 0.5, 0.5])
    [table] = find("pareto").items(Results(perplexed))
    assert isinstance(table, Table)
    averages = {"Unpruned": 0.95, "Frequency": 0.25, "REAP": 0.45, "MAN": 0.75}
    assert table.frame.set_index("Criterion")["Avg"].to_dict() == averages
    assert table.footnotes == ["Avg is without wikitext2: there, less is better."]


@pytest.fixture
def perplexities() -> Study:
    scores = {(cell, "wikitext2"): 9.0 - cell for cell in range(4)}
    return study_of({"wikitext2": [{}] * 4}, scores)


def test_suite_of_perplexities_is_ranked_by_mean_loss(perplexities: Study) -> None:
    rows = ranked(perplexities)
    for column in ("wikitext2", "Mean perplexity"):
        assert rows[column].tolist() == pytest.approx([9, 8, 7, 6])
    assert rows["Avg Rank"].tolist()[1:] == [3, 2, 1]


def test_mean_perplexity_is_the_geometric_mean() -> None:
    scores = {}
    for cell in range(4):
        scores[cell, "a"] = 2.0 + cell
        scores[cell, "b"] = 8.0
    means = ranked(study_of({"a": [{}] * 4, "b": [{}] * 4}, scores))["Mean perplexity"]
    assert means.iloc[0] == pytest.approx(4)


def test_ranking_of_perplexities_has_the_lowest_first(perplexities: Study) -> None:
    [figure, table] = find("ranking").items(Results(perplexities))
    frame = table.frame
    assert figure.name == "ranking"
    assert frame["Criterion"].tolist() == ["MAN", "REAP", "Frequency"]
    assert frame["Rank"].tolist() == [1, 2, 3]
    assert "Mean perplexity" in table.lower_is_better
    assert frame["Of unpruned"].tolist() == pytest.approx([6 / 9, 7 / 9, 8 / 9])
    assert frame["Status"].eq("").all(), "of one seed"


def test_front_ends_with_the_lowest_perplexity(perplexities: Study) -> None:
    figure, _ = find("pareto").items(Results(with_costs(perplexities, [1.0, 0.5, 0.5, 0.4])))
    front = figure.rows[figure.rows["front"]]
    assert set(front["label"]) == {"MAN"}


@pytest.mark.parametrize(("costs", "is_drawn"), [((0.3, 0.4), True), ((0.301, 0.302), False)])
def test_front_is_drawn_if_costs_differ_in_per_cent(
    costs: tuple[float, float], is_drawn: bool, perplexities: Study
) -> None:
    results = Results(with_costs(perplexities, [1.0, costs[0], costs[1], costs[1]]))
    *figures, _ = find("pareto").items(results)
    assert bool(figures) == is_drawn


class ItemSets(NamedTuple):
    """A study of four cells that were asked different items of GSM8K, which are right or wrong, and
    of WildBench, which have grades; and the answers to the first."""

    comparison: Comparison
    exact: list[Answers]


def item_sets(first: list[set[int]], second: list[set[int]], seed: int) -> ItemSets:
    rng = np.random.default_rng(seed)
    outcomes = (rng.random((2, 30)) < 0.5).astype(float)
    grades = rng.random((4, 30)).round(2)
    exact = []
    graded = []
    for cell in range(4):
        exact.append({item: outcomes[cell % 2, item] for item in sorted(first[cell])})
        graded.append({item: grades[cell, item] for item in sorted(second[cell])})
    study = study_of({"gsm8k": exact, "wildbench": graded})
    [comparison] = Results(study).measured
    return ItemSets(comparison, exact)


ITEMS = st.lists(st.sets(st.integers(0, 29), min_size=2), min_size=4, max_size=4)
ITEM_SETS = st.builds(item_sets, ITEMS, ITEMS, st.integers(0, 2**32 - 1))


@settings(max_examples=15, deadline=None)
@given(ITEM_SETS)
def test_intervals_are_of_the_items_of_a_cell(sets: ItemSets) -> None:
    comparison = sets.comparison
    for target in (("GSM8K",), ("WildBench",), ("GSM8K", "WildBench")):
        score = comparison.score(target)
        low, high = comparison.interval(target)
        assert (low <= score + 1e-6).all()
        assert (score <= high + 1e-6).all()
    low, high = comparison.interval(("GSM8K",))
    for cell, answers in enumerate(sets.exact):
        test = binomtest(int(sum(answers.values())), len(answers))
        expected = test.proportion_ci(method="wilson")
        assert low[cell] == pytest.approx(expected.low)
        assert high[cell] == pytest.approx(expected.high)


@settings(max_examples=15, deadline=None)
@given(ITEM_SETS)
def test_tests_are_of_the_common_items_of_cells(sets: ItemSets) -> None:
    common = sorted(sets.exact[0].keys() & sets.exact[1].keys())
    p = sets.comparison.difference(("GSM8K",), 0, 1).p
    if len(common) < 2:
        assert np.isnan(p)
        return
    base = np.array([sets.exact[0][item] for item in common])
    other = np.array([sets.exact[1][item] for item in common])
    unequal = other - base
    # without any spread, the difference is certain
    certain = float(unequal[0] == 0)
    expected = ttest_1samp(unequal, 0).pvalue if np.ptp(unequal) else certain
    assert p == pytest.approx(expected)
    row = differences(sets.comparison, ("GSM8K",), {1: 0}).loc[1]
    assert row["difference"] == pytest.approx((other - base).mean())
    assert row["low"] - 1e-6 <= row["difference"] <= row["high"] + 1e-6


CONSISTENT = {
    "gsm8k": [right(38), right(10), right(18), right(30)],
    "mmlu": [right(40), right(20), right(24), right(36)],
}
TARGETS = (("GSM8K",), ("GSM8K", "MC Avg"))


@pytest.mark.parametrize("what", ["score", "item"])
def test_score_that_is_not_the_mean_of_its_items_has_its_reported_error(what: str) -> None:
    """That of REAP (cell 2), which is a gap. Other intervals and tests stay."""
    consistent = study_of(CONSISTENT)
    if what == "score":
        study = study_of(CONSISTENT, {(2, "gsm8k"): 0.99})
    else:
        answers = [right(38), right(10), {**right(18), 0: np.nan}, right(30)]
        study = study_of({**CONSISTENT, "gsm8k": answers}, {(2, "gsm8k"): 18 / 40})
    [comparison] = Results(study).measured
    [expected] = Results(consistent).measured
    assert not consistent.gaps
    [gap] = study.gaps
    assert gap.location == "m reap pocket_code 0.5"
    assert "gsm8k is not the mean of its items" in gap.reason
    assert ranked(study)["Avg"].notna().all()
    others = [0, 1, 3]
    for target in TARGETS:
        low, high = bounds = comparison.interval(target)
        assert 0 < high[2] - low[2] < 0.05
        assert np.isnan(comparison.difference(target, 2, 1).p)
        for right_bound, bound in zip(expected.interval(target), bounds, strict=True):
            assert right_bound[others].tolist() == pytest.approx(bound[others].tolist())
        for other in (0, 1):
            p = expected.difference(target, 3, other).p
            assert comparison.difference(target, 3, other).p == pytest.approx(p)


def test_most_scores_decide_whether_a_benchmark_is_a_mean() -> None:
    corpus = {(cell, "gsm8k"): 0.3 + 0.1 * cell for cell in range(3)}
    study = study_of({"gsm8k": [right(38), right(10), right(18), right(30)]}, corpus)
    [comparison] = Results(study).measured
    assert not study.gaps
    assert not comparison.outcomes
    low, high = comparison.interval(("GSM8K",))
    assert (high - low).tolist() == pytest.approx([2 * 1.96 * 0.01] * 4)
