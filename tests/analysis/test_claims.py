"""Claims of papers on pairs of plans, the overlap of experts, the winner map, and criteria that are
told apart."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, family, first_solved, results_of, study_of
from scipy.stats import binomtest, t
from synthetic import write_store

from analysis import names
from analysis.load.study import load
from analysis.outputs import claims
from analysis.outputs.winners import proved_wins_sentence, verdict
from analysis.registry import Results, find
from analysis.stats import overlap
from analysis.stats.cell_scores import pooled_difference
from analysis.stats.comparison import Comparison
from analysis.stats.overlap import scores_by_variant
from analysis.stats.uncertainty import Estimate
from analysis.stats.winners import label, winner_map

NO_COSTS = pd.DataFrame(columns=["cell", "routed_kept"])
NO_FAMILY = pd.DataFrame()


def two_seeds(plans: list[dict[str, Any]], solved: list[Any]) -> Comparison:
    """The unpruned model and each plan with two seeds, which solve the same items."""
    axes = [UNPRUNED, *({**plan, "seed": seed} for seed in (1, 2) for plan in plans)]
    return comparison_of(axes, {"gsm8k": [*solved, *solved[1:]]})


def searched(last: list[int] | None) -> pd.DataFrame:
    """Claims on searched and uniform plans of two criteria; the searched one of EAN solves the
    `last` items."""
    solved = {
        ("reap",): first_solved(10),
        ("reap", "evolutionary"): first_solved(20),
        ("ean",): first_solved(8),
        ("ean", "evolutionary"): last,
        ("seer",): first_solved(30),
        ("reap", "uniform", 0.25): first_solved(20),
        ("reap", "evolutionary", 0.25): first_solved(19),
    }
    plans = [cell(*method) for method in solved]
    comparison = two_seeds(plans, [first_solved(40), *solved.values()])
    return claims.claims([comparison], NO_COSTS, NO_FAMILY)


def test_searched_allocations_are_paired_with_uniform_ones() -> None:
    """At 50 %: +10 and +12 of 40 items, mean 0.275; at 25 %: -1 of 40."""
    rows = searched(first_solved(20)).set_index("ratio")
    assert rows["difference"].to_dict() == pytest.approx({0.25: -1 / 40, 0.5: 11 / 40})
    assert rows["compared"].to_dict() == {0.25: 1, 0.5: 2}
    assert rows.loc[0.5, "verdict"] == "holds"
    assert rows.loc[0.25, "verdict"] == "undecided"


def test_plans_of_one_seed_prove_no_claim() -> None:
    axes = [UNPRUNED, cell("reap"), cell("reap", "evolutionary")]
    solved = {"gsm8k": [first_solved(40), first_solved(10), first_solved(30)]}
    result = claims.claims([comparison_of(axes, solved)], NO_COSTS, NO_FAMILY)
    assert result["verdict"].tolist() == ["not tested"]
    assert result["difference"].tolist() == [20 / 40]


def test_missing_result_removes_its_pair_only() -> None:
    row = searched(None).set_index("ratio").loc[0.5]
    assert row["compared"] == 1
    assert row["difference"] == pytest.approx(10 / 40)


def test_nothing_is_claimed_of_uniform_plans_alone() -> None:
    solved = {"gsm8k": [first_solved(40), first_solved(10)]}
    only_uniform = comparison_of([UNPRUNED, cell("reap")], solved)
    assert claims.claims([only_uniform], NO_COSTS, NO_FAMILY).empty


def test_verdicts_need_an_interval_and_a_p_value() -> None:
    assert claims.verdict(np.nan, 0.1, 0.01) == "not tested"
    assert claims.verdict(0.1, 0.2, np.nan) == "not tested"
    assert claims.verdict(0.1, 0.2, 0.06) == "undecided", "the interval alone decides nothing"


CHANNELS = [
    cell("heapr", "global"),
    cell("camera", "layerwise"),
    cell("reap", "uniform"),
    cell("man", "uniform"),
    cell("channel_random", "layerwise"),
    cell("random", "uniform"),
    cell("heapr", "global", recovery="nf4"),
]


def claims_on_channels() -> pd.DataFrame:
    """Claims on `CHANNELS`, of which MAN keeps a tenth more than the others."""
    solved = [first_solved(count) for count in (40, 30, 20, 10, 40, 16, 20, 2)]
    routed_kept = [1, 0.5, 0.5, 0.52, 0.6, 0.5, 0.5, 0.5]
    costs = pd.DataFrame({"cell": range(8), "routed_kept": routed_kept})
    return claims.claims([two_seeds(CHANNELS, solved)], costs, NO_FAMILY)


def test_channels_are_compared_with_experts_of_equal_size() -> None:
    """HEAPr +20 and CAMERA +10 over REAP; MAN keeps a tenth more and is left out, and so is what
    was quantised."""
    rows = claims_on_channels().set_index(["claim", "ratio"])
    row = rows.loc[(claims.CHANNELS, 0.5)]
    assert row["compared"] == 2
    assert row["difference"] == pytest.approx(15 / 40)
    assert row["verdict"] == "holds"
    ratios = rows.index.get_level_values("ratio")
    assert claims.ALL_RATIOS not in ratios, "of one ratio, its row says it all"


def test_scored_channels_are_compared_with_those_by_chance() -> None:
    rows = claims_on_channels().set_index(["claim", "ratio"])
    row = rows.loc[(claims.CHANNELS_BY_CHANCE, 0.5)]
    assert row["compared"] == 1
    assert row["difference"] == pytest.approx(-4 / 40)
    assert row["p"] < 0.05
    assert row["verdict"] == "does not hold"


def test_claims_are_corrected_together() -> None:
    """Holm over all rows: the smallest p times 2, the next times 1, never falling."""
    rows = claims_on_channels().sort_values("p", kind="stable")
    naive = np.maximum.accumulate(rows["p"].to_numpy() * [2, 1])
    assert rows["p_holm"].tolist() == pytest.approx(naive.tolist())


def test_experts_that_are_replaced_are_not_removed() -> None:
    axes = [
        UNPRUNED,
        cell("heapr", "global"),
        cell("reap"),
        cell("reap", "uniform, replacement=mean_output"),
    ]
    costs = pd.DataFrame({"cell": range(4), "routed_kept": [1.0, 0.5, 0.5, 0.5]})
    solved = {"gsm8k": [first_solved(40), first_solved(30), first_solved(10), first_solved(20)]}
    result = claims.claims([comparison_of(axes, solved)], costs, NO_FAMILY)
    row = result.set_index(["claim", "ratio"]).loc[(claims.CHANNELS, 0.5)]
    assert row["compared"] == 1
    assert row["difference"] == pytest.approx(20 / 40)


def test_claim_table_has_rows_for_each_and_all_ratios() -> None:
    axes = [
        UNPRUNED,
        cell("heapr", "global", ratio=0.25),
        cell("man", ratio=0.25),
        cell("heapr", "global", ratio=0.5),
        cell("man", ratio=0.5),
    ]
    solved = {"gsm8k": [first_solved(count) for count in (40, 30, 25, 20, 10)]}
    comparison = comparison_of(axes, solved)
    costs = [{"routed_kept": 1 - ratio} for ratio in comparison.cells["ratio"]]
    study = study_of(comparison, costs)
    [table] = find("claims").items(results_of(study, [comparison]))
    assert table.frame["Pruned"].tolist() == ["25 %", "50 %", claims.ALL_RATIOS]


UP = [1.0, 2, 3, 4]
DOWN = [4.0, 3, 2, 1]
BY_COUNTS = family({"a": [UP, UP], "b": [UP, UP]}, (1, 1, 1))
BY_SUMS = family({"a": [UP, UP], "b": [DOWN, UP]}, (0, 1, 1))
FAMILY = pd.concat([BY_COUNTS, BY_SUMS])


def test_invariance_is_compared_layer_by_layer() -> None:
    """Divided by counts, both layers agree wholly; sums agree in none of layer 0 and all of layer
    1."""
    layers = [scores_by_variant(layer) for _, layer in FAMILY.groupby("layer")]
    assert claims.layer_differences(layers, 0.5).tolist() == [1.0, 0.0]
    result = claims.claims([], NO_COSTS, FAMILY)
    assert result["claim"].unique().tolist() == [claims.INVARIANT_SCORES]
    assert result["difference"].tolist() == [0.5, 0.5, 0.5]
    assert set(result["verdict"]) == {"undecided"}
    one_set = FAMILY[FAMILY["calibration"] == "a"]
    assert claims.claims([], NO_COSTS, one_set).empty


def test_groups_of_pairs_weigh_alike() -> None:
    """(30 - 10) in one group, the mean of (20 - 10) and (10 - 10) in the other: (20 + 5) / 2 of
    40."""
    axes = [UNPRUNED, cell("reap"), cell("ean"), cell("seer"), cell("man")]
    solved = [
        first_solved(40),
        first_solved(30),
        first_solved(20),
        first_solved(10),
        first_solved(10),
    ]
    comparison = comparison_of(axes, {"gsm8k": solved})
    groups = [[(1, 3)], [(2, 3), (4, 3)]]
    compared, difference = pooled_difference(comparison, ("GSM8K",), groups)
    assert difference.value == pytest.approx(12.5 / 40)
    assert compared == 3
    _, of_no_groups = pooled_difference(comparison, ("GSM8K",), [])
    assert np.isnan(of_no_groups.value)


def test_bottom_sets_are_made_as_plans_are() -> None:
    tied = np.array([3.0, 1, 1, 1, 0])
    bottom = overlap.bottom_sets(tied, 0.5)
    assert bottom.tolist() == [False, True, False, False, True]
    seven = np.arange(7.0)
    assert overlap.bottom_sets(seven, 0.25).sum() == 1
    assert overlap.bottom_sets(seven, 0.1).sum() == 0


def test_three_readings_of_overlap_by_hand() -> None:
    """Bottom sets {0,1}, {0,1}, {0,2} of four experts."""
    frame = family({"a": [[1, 2, 3, 4]], "b": [[1, 2, 3, 4]], "c": [[1, 3, 2, 4]]})
    row = overlap.calibration_overlap(frame, [0.5]).iloc[0]
    assert row["triple"] == 0.5
    assert row["pairwise"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert row["jaccard"] == pytest.approx(1 / 3)
    assert row["chance_triple"] == 0.25
    assert row["chance_pairwise"] == 0.5


def test_overlap_is_the_mean_of_layers_of_any_size() -> None:
    scores = {
        "a": [[1, 2, 3, 4], [1, 2]],
        "b": [[1, 2, 3, 4], [2, 1]],
    }
    row = overlap.calibration_overlap(family(scores), [0.5]).iloc[0]
    assert row["triple"] == 0.5


def test_chance_levels_are_what_random_scores_reach() -> None:
    scores = np.random.default_rng(0).random((3, 4000, 32))
    for ratio in overlap.RATIOS:
        result = overlap.agreement(overlap.bottom_sets(scores, ratio))
        for measure, precision in (("triple", 0.01), ("pairwise", 0.01), ("jaccard", 0.03)):
            by_chance = result[f"chance_{measure}"]
            assert result[measure] == pytest.approx(by_chance, abs=precision)


def test_the_constant_score_is_not_available() -> None:
    constant = family({"a": [[1, 1]], "b": [[1, 1]]}, overlap.DEGENERATE_VARIANT)
    other = family({"a": [[1, 2]], "b": [[1, 2]]}, (1, 0, 1))
    agreements = overlap.calibration_overlap(pd.concat([constant, other]), [0.5])
    triples = agreements.set_index("beta")["triple"]
    assert np.isnan(triples[0])
    assert triples[1] == 1.0
    effects = overlap.component_effects(overlap.mean_over_models(agreements))
    levels = effects["level"][effects["component"] == "beta"]
    assert set(levels) == {1}


def test_proxy_against_exact_damage_by_hand() -> None:
    proxy = family({"a": [UP, UP]}, (0, 1, 1))
    exact = family({"a": [UP, DOWN]}).drop(columns=overlap.VARIANT)
    row = overlap.proxy_overlap(proxy, exact, [0.5]).iloc[0]
    assert row["overlap"] == 0.5
    assert row["lowest"] == 0.0
    assert row["chance"] == 0.5
    for variant in ((0, 1, 2), (0, 2, 1), (1, 1, 1)):
        other = family({"a": [UP, DOWN]}, variant)
        of_both = overlap.proxy_overlap(pd.concat([other, proxy]), exact, [0.5])
        assert of_both.iloc[0]["overlap"] == 0.5, "another score"


# ---- winners, by scores and by losses on right answers


def comparison(outcomes: dict[str, dict[str, np.ndarray]]) -> Comparison:
    """Cells of one panel, with two equal seeds, from criterion -> benchmark -> outcomes; a
    benchmark that a criterion lacks is a gap."""
    axes = [cell(criterion, seed=seed) for criterion in outcomes for seed in (1, 2)]
    rows: dict[str, list[Any]] = {}
    for benchmark in dict.fromkeys(chain(*outcomes.values())):
        of_criteria = [by_name.get(benchmark) for by_name in outcomes.values()]
        rows[benchmark] = [row for row in of_criteria for _ in range(2)]
    return comparison_of(axes, rows)


def right(count: int) -> np.ndarray:
    return (np.arange(200) < count).astype(float)


def test_clear_win_is_significant_and_a_narrow_one_is_not() -> None:
    study_comparison = comparison(
        {
            "reap": {"gsm8k": right(180), "math500": right(100)},
            "ean": {"gsm8k": right(90), "math500": right(98)},
            "seer": {"gsm8k": right(60), "math500": right(40)},
        }
    )
    columns = winner_map([study_comparison]).set_index("column")
    assert columns["winners"].to_dict() == {"GSM8K": ("reap",), "MATH-500": ("reap",)}
    assert columns["runner_up"].to_dict() == {"GSM8K": "ean", "MATH-500": "ean"}
    assert columns["proved"].to_dict() == {"GSM8K": True, "MATH-500": False}
    assert columns.loc["MATH-500", "lead"] == pytest.approx(0.01)
    assert columns.loc["GSM8K", "lead_low"] > 0.3


def t_test(lead: Estimate) -> float:
    """The p-value of a lead alone, of both sides."""
    return float(2 * t.sf(lead.value / lead.error, lead.degrees_of_freedom))


def test_win_must_hold_against_every_other_criterion() -> None:
    """Far ahead of the runners-up on the same items, yet not surely ahead of another that errs
    elsewhere."""
    runners_up = ("ean", "seer", "frequency", "reap", "msan")
    rng = np.random.default_rng(0)
    best = rng.permutation(right(100))
    answers = {"man": best}
    for name in runners_up:
        answers[name] = best.copy()
        answers[name][rng.permutation(np.flatnonzero(best))[:16]] = 0
    answers["gate_ean"] = rng.permutation(right(83))
    study_comparison = comparison({name: {"gsm8k": row} for name, row in answers.items()})
    leads = study_comparison.leads_of_best(("GSM8K",), range(0, 14, 2))
    *behind_runners_up, behind_last = (t_test(lead) for lead in leads)
    assert max(behind_runners_up) < 0.05 < behind_last
    row = winner_map([study_comparison]).iloc[0]
    assert row["runner_up"] in runners_up
    assert row["p"] == pytest.approx(behind_last)


def test_holm_covers_the_whole_map() -> None:
    columns = {name: right(100) for name in ("gsm8k", "math500", "livecodebench", "wildbench")}
    behind = {name: right(95) for name in columns}
    wins = winner_map([comparison({"man": columns, "ean": behind})])
    assert wins["p"].between(0.0125, 0.05).all()
    assert wins["p"].nunique() == 1
    assert wins["p_holm"].tolist() == pytest.approx((4 * wins["p"]).tolist())
    assert not wins["proved"].any()


def test_winner_map_counts_significant_wins() -> None:
    outcomes = {
        "man": {"gsm8k": right(190), "rte": right(50)},
        "ean": {"gsm8k": right(10), "rte": right(50)},
    }
    columns = winner_map([comparison(outcomes)])
    assert [verdict(row) for row in columns.to_dict("records")] == ["proved win", "tie"]
    assert proved_wins_sentence(columns).startswith("Proved wins: 1 of 2 cells (1 tied")


def test_random_plans_can_be_ahead_in_a_map_but_prove_nothing() -> None:
    outcomes = {
        "random": {"gsm8k": right(190)},
        "man": {"gsm8k": right(50)},
        "ean": {"gsm8k": right(10)},
    }
    row = winner_map([comparison(outcomes)]).iloc[0]
    assert row["winners"] == ("random",)
    assert np.isnan(row["p"])


def test_ties_and_zeros_are_nobodys_win() -> None:
    zero = right(0)
    some = right(50)
    outcomes = {
        "reap": {"gsm8k": some, "math500": zero},
        "man": {"gsm8k": some[::-1], "math500": zero},
    }
    columns = winner_map([comparison(outcomes)]).set_index("column")
    both = ("reap", "man")
    assert columns["winners"].to_dict() == {"GSM8K": both, "MATH-500": both}
    assert label(both, 0.25) == "REAP = MAN"
    assert label(both, 0.0) == "all 0"


def test_gaps_are_nobodys_win() -> None:
    outcomes = {
        "reap": {"gsm8k": right(50)},
        "man": {"math500": right(50)},
        "ean": {"gsm8k": right(20)},
    }
    columns = winner_map([comparison(outcomes)]).set_index("column")
    alone = columns.loc["MATH-500"]
    assert alone["winners"] == ("man",)
    assert alone["runner_up"] == ""
    assert np.isnan(alone["p"])
    assert not alone["proved"]
    assert columns.loc["GSM8K", "winners"] == ("reap",)
    assert columns.loc["GSM8K", "runner_up"] == "ean"


def test_averaged_columns_resample_shared_answers_together() -> None:
    """HumanEval+ grades HumanEval's answers again: the interval is that of 200 items, not of
    400."""
    same = right(100)
    outcomes = {
        "reap": {"humaneval": same, "humaneval_plus": same},
        "man": {"mbpp": same},
    }
    study_comparison = comparison(outcomes)
    low, high = study_comparison.interval(("humaneval",))
    low_of_both, high_of_both = study_comparison.interval(("humaneval", "humaneval_plus"))
    width = high[0] - low[0]
    assert high_of_both[0] - low_of_both[0] == pytest.approx(width, abs=0.01)


def test_interval_of_equal_plans_is_that_of_an_evaluated_one() -> None:
    """The first of three seeds was not evaluated, the other two solve all items."""
    axes = [UNPRUNED, *(cell("reap", seed=seed) for seed in (1, 2, 3))]
    outcomes = {"gsm8k": [first_solved(40), None, first_solved(40), first_solved(40)]}
    low, high = comparison_of(axes, outcomes).interval(("gsm8k",))
    expected = binomtest(40, 40).proportion_ci(method="wilson")
    assert (low[1], high[1]) == pytest.approx((expected.low, expected.high))


def table(results: Results, name: str) -> pd.DataFrame:
    return find(name).items(results)[-1].frame


def test_loss_column_is_a_mean(results: Results) -> None:
    (comparison,) = results.by_answer_loss.comparisons
    number = int(comparison.cells.index[5])
    folders = results.study.document["cells"][number]["evaluate"]
    for column, tasks in (("MC Avg", names.COLUMNS["MC Avg"]), ("Eval+", ("humaneval", "mbpp"))):
        files = [results.study.store / folders[task] / "samples.parquet" for task in tasks]
        losses = [pd.read_parquet(file)["answer_loss"].mean() for file in files]
        assert comparison.column_scores[column][number] == pytest.approx(np.mean(losses))
    assert not results.comparisons[0].lower_is_better, "scores beside losses are still scores"


def test_the_lowest_loss_ranks_first(results: Results) -> None:
    rows = table(results, "ranks.loss").query("Criterion != 'Unpruned'")
    for _, block in rows.groupby(["Pruned", "Calibration"]):
        ranked = block.set_index("Criterion")["Avg Rank"].to_dict()
        assert ranked == {"Frequency": 3.0, "REAP": 2.0, "MAN": 1.0, "Random": 4.0}
    won = table(results, "winners.loss")
    assert set(won["Winner"]) == {"MAN"}
    assert (won["Lead"] < 0).all()


def test_store_without_losses_has_scores_only(tmp_path: Path) -> None:
    store = write_store(tmp_path, criteria=("random", "man"), tasks=("rte",))
    for path in (store / "evaluate").glob("*/samples.parquet"):
        pd.read_parquet(path).drop(columns="answer_loss").to_parquet(path, index=False)
    results = Results(load(store, "made_up"))
    for name in ("winners.loss", "ranks.loss", "ranking.loss"):
        assert find(name).items(results) == []
    assert len(table(results, "ranking"))
    assert results.study.gaps == []
