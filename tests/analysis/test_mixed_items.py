"""Cells that were not asked the same: other items, a perplexity among accuracies, a score its items
do not explain."""

from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from analysis.load.reader import Reader
from analysis.load.study import Study
from analysis.outputs import winners
from analysis.outputs.pareto import against_cost, pareto_figure, pareto_table
from analysis.outputs.ranks import rank_table
from analysis.registry import Results, find
from analysis.stats import uncertainty
from analysis.stats.cell_scores import differences, pooled_difference
from analysis.stats.winners import winner_map

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
    for name, found in answers.items():
        for cell, outcomes in enumerate(found):
            values = list(outcomes.values())
            mean = float(np.mean(values)) if values else np.nan
            about = {
                "cell": cell,
                "task": name,
                "benchmark": name,
                "folder": f"{name}/{cell}",
                "expected": None,
            }
            n = {
                "n": len(values) or 10,
                "stderr": 0.01,
                **(handmade.SCORES if values else PERPLEXITIES),
            }
            rows.append({**about, **n, "score": (scores or {}).get((cell, name), mean)})
            samples += [(cell, name, f"{item:03}", outcome) for item, outcome in outcomes.items()]
    parts: dict[str, Any] = {
        key: {} for key in ("calibrations", "contaminations", "models", "document")
    }
    parts["reader"] = Reader(Path("store"))
    parts |= {"origins": pd.DataFrame({"folder": [], "seconds": [], "commit": [], "versions": []})}
    parts |= dict.fromkeys(("family", "damage", "coverage"), pd.DataFrame())
    parts["cells"] = handmade.cells_of([handmade.UNPRUNED, *map(handmade.cell, CRITERIA)])
    parts["samples"] = pd.DataFrame(
        samples, columns=["cell", "benchmark", "item", "outcome"]
    ).assign(units=np.nan)
    return Study(name="made", store=Path("store"), results=pd.DataFrame(rows), **parts)


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


def test_where_less_is_better_an_average_leaves_it_out_and_the_lowest_leads_without_a_test(
    perplexed: Study,
) -> None:
    results = Results(perplexed)
    table = handmade.table_of(rank_table, results)
    rows = table.frame.set_index("Criterion")
    assert rows["Avg"].tolist() == rows["GSM8K"].tolist() == [0.95, 0.25, 0.45, 0.75]
    assert rows["wikitext2"].tolist() == pytest.approx([9.0, 14.0, 12.0, 10.0])
    assert rows.loc[["Frequency", "REAP", "MAN"], "Avg Rank"].tolist() == [3, 2, 1]
    assert "Avg is without wikitext2: there, less is better." in table.footnotes
    [figure, ranked_table] = find("ranking").items(results)
    assert "Avg is without wikitext2" in figure.caption and ranked_table.frame["Avg"].tolist() == [
        0.75,
        0.45,
        0.25,
    ]
    found = winner_map(results.measured)
    assert found["column"].tolist() == ["GSM8K", "wikitext2"]
    accuracy, perplexity = found.to_dict("records")
    assert (
        accuracy["lead"] == pytest.approx(0.3)
        and accuracy["lead_low"] < 0.3 < accuracy["lead_high"]
    )
    assert perplexity["winners"] == ("man",) and perplexity["runner_up"] == "reap"
    assert perplexity["lead"] == pytest.approx(-2) and winners.verdict(perplexity) == "not tested"


def with_costs(study: Study, shares: list[float]) -> Study:
    """The study, with all costs of each cell at this share of the unpruned model's."""
    columns = ("parameters_kept", "routed_kept", "flops_ratio", "storage_bytes")
    costs = pd.DataFrame({column: shares for column in columns})
    study.__dict__["costs"] = costs.assign(cell=range(4), bits=16, parameters_unpruned=1.0)
    study.__dict__["retained"] = pd.DataFrame(
        {"cell": range(4), "constant": False, "merged": False}
    )
    return study


def test_the_best_plan_is_on_the_front_in_spite_of_a_perplexity(perplexed: Study) -> None:
    with_costs(perplexed, [1.0, 0.5, 0.5, 0.5])
    [comparison] = Results(perplexed).measured
    found = against_cost(perplexed, comparison).set_index("method")
    assert found["front_parameters_kept"].to_dict() == {
        "none": False,
        "frequency": False,
        "reap": False,
        "man": True,
    }
    assert found["avg"].to_dict() == {"none": 0.95, "frequency": 0.25, "reap": 0.45, "man": 0.75}
    assert pareto_table(Results(perplexed), "pareto").footnotes == [
        "Avg is without wikitext2: there, less is better."
    ]


def test_a_suite_of_perplexities_alone_is_ranked_by_their_mean_loss_and_shown_as_perplexities() -> (
    None
):
    alone = study_of(
        {"wikitext2": [{}] * 4}, {(cell, "wikitext2"): 9.0 - cell for cell in range(4)}
    )
    rows = ranked(alone)
    for column in ("wikitext2", "Mean perplexity"):
        assert rows[column].tolist() == pytest.approx([9, 8, 7, 6])
    assert rows["Avg Rank"].tolist()[1:] == [3, 2, 1]
    [figure, table] = find("ranking").items(Results(alone))
    assert figure.name == "ranking" and table.frame["Criterion"].tolist() == [
        "MAN",
        "REAP",
        "Frequency",
    ]
    assert table.frame["Rank"].tolist() == [1, 2, 3] and table.best["Mean perplexity"] == "min"
    assert table.frame["Of unpruned"].tolist() == pytest.approx([6 / 9, 7 / 9, 8 / 9])
    assert table.frame["Status"].eq("").all(), "of one seed"
    two = {
        (cell, name): value for cell in range(4) for name, value in (("a", 2.0 + cell), ("b", 8.0))
    }
    assert ranked(study_of({"a": [{}] * 4, "b": [{}] * 4}, two))["Mean perplexity"].iloc[
        0
    ] == pytest.approx(4)


def test_lowest_perplexity_is_first_of_equal_costs_and_last_of_a_front() -> None:
    alone = study_of(
        {"wikitext2": [{}] * 4}, {(cell, "wikitext2"): 9.0 - cell for cell in range(4)}
    )
    table = pareto_table(Results(with_costs(alone, [1.0, 0.5, 0.5, 0.5])), "pareto")
    assert table.frame["Criterion"].tolist() == ["Unpruned", "MAN", "REAP", "Frequency"]
    assert table.frame["Front"].tolist() == ["", "all", "", ""]
    results = Results(with_costs(alone, [1.0, 0.3, 0.4, 0.5]))
    figure = pareto_figure(results.study, results.comparisons[0], "front")
    assert figure is not None
    labels = [text.get_text() for text in figure.drawing.legends[0].get_texts()]
    assert [label.split(",")[0] for label in labels if "50 %" in label] == [
        "Frequency",
        "REAP",
        "MAN",
    ]


def test_a_radar_of_losses_alone_is_not_drawn() -> None:
    losses = {(cell, name): 9.0 - cell for cell in range(4) for name in ("a", "b", "c")}
    results = Results(study_of({name: [{}] * 4 for name in ("a", "b", "c")}, losses))
    assert find("aimer.fig3").items(results) == []


asked = st.lists(st.sets(st.integers(0, 29), min_size=2), min_size=4, max_size=4)


@settings(max_examples=15, deadline=None)
@given(asked, asked, st.integers(0, 2**32 - 1))
def test_intervals_are_of_a_cells_own_items_and_tests_of_common_ones(
    first: list[set[int]], second: list[set[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sure = (rng.random((2, 30)) < 0.5).astype(float), rng.random((4, 30)).round(2)
    exact = [
        {item: sure[0][cell % 2, item] for item in sorted(items)}
        for cell, items in enumerate(first)
    ]
    graded = [
        {item: sure[1][cell, item] for item in sorted(items)} for cell, items in enumerate(second)
    ]
    study = study_of({"gsm8k": exact, "wildbench": graded})
    [comparison] = Results(study).measured
    for target in (("GSM8K",), ("WildBench",), ("GSM8K", "WildBench")):
        score, (low, high) = comparison.score(target), comparison.interval(target)
        assert ((low <= score + 1e-6) & (score <= high + 1e-6)).all()
    for cell, answers in enumerate(exact):
        ends = binomtest(int(sum(answers.values())), len(answers)).proportion_ci(method="wilson")
        low, high = comparison.interval(("GSM8K",))
        assert (low[cell], high[cell]) == pytest.approx((ends.low, ends.high))
    common = sorted(first[0] & first[1])
    p = comparison.difference(("GSM8K",), 0, 1).p
    if len(common) < 2:
        assert np.isnan(p)
        return
    one, other = (np.array([exact[cell][item] for item in common]) for cell in (0, 1))
    assert p == pytest.approx(uncertainty.mcnemar(one[None], other[None])[0])
    found = differences(comparison, ("GSM8K",), {1: 0}).loc[1]
    assert found["difference"] == pytest.approx((other - one).mean())
    assert found["low"] - 1e-6 <= found["difference"] <= found["high"] + 1e-6


@pytest.mark.parametrize("harm", ["score", "item"])
def test_a_score_that_is_no_mean_of_its_items_costs_nobody_else_an_interval(harm: str) -> None:
    answers = {
        "gsm8k": [right(38), right(10), right(18), right(30)],
        "mmlu": [right(40), right(20), right(24), right(36)],
    }
    whole = study_of(answers)
    if harm == "score":
        harmed = study_of(answers, {(2, "gsm8k"): 0.99})
    else:
        harmed = study_of({**answers, "gsm8k": [*answers["gsm8k"][:2], {**right(18), 0: np.nan},
        right(30)]},
                          {(2, "gsm8k"): 18 / 40})  # fmt: skip
    before, after = (Results(study).measured[0] for study in (whole, harmed))
    assert not whole.gaps
    [gap] = harmed.gaps
    assert (
        gap.where == "m reap pocket_code 0.5" and "gsm8k is not the mean of its items" in gap.reason
    )
    others = [0, 1, 3]
    for target in (("GSM8K",), ("GSM8K", "MC Avg")):
        for ends in zip(before.interval(target), after.interval(target), strict=True):
            assert ends[0][others].tolist() == pytest.approx(ends[1][others].tolist())
        for other in (0, 1):
            assert after.difference(target, 3, other).p == pytest.approx(
                before.difference(target, 3, other).p
            )
        low, high = after.interval(target)
        assert 0 < high[2] - low[2] < 0.05, "from the reported standard error"
        assert np.isnan(after.difference(target, 2, 1).p)
        assert np.isnan(pooled_difference(after, target, [[(2, 1)]])[1].p)
    assert ranked(harmed)["Avg"].notna().all()


def test_most_scores_decide_whether_a_benchmark_is_a_mean() -> None:
    corpus = {(cell, "gsm8k"): 0.3 + 0.1 * cell for cell in range(3)}
    study = study_of({"gsm8k": [right(38), right(10), right(18), right(30)]}, corpus)
    [comparison] = Results(study).measured
    assert not study.gaps and not comparison.outcomes
    low, high = comparison.interval(("GSM8K",))
    assert (high - low).tolist() == pytest.approx([2 * 1.96 * 0.01] * 4)
