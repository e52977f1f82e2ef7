"""Claims of papers on pairs of plans, the overlap of experts, the winner map, and criteria that are
told apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, family, first, results_of, study_of
from scipy.stats import t
from synthetic import write_store

from analysis import names
from analysis.load.study import load
from analysis.outputs import claims
from analysis.outputs.winners import proved_wins, verdict
from analysis.registry import Results, find
from analysis.stats import overlap
from analysis.stats.cell_scores import pooled_difference
from analysis.stats.comparison import Comparison
from analysis.stats.overlap import scores_by_variant
from analysis.stats.winners import label, winner_map

NO_COSTS = pd.DataFrame(columns=["cell", "routed_kept"])
NO_FAMILY = pd.DataFrame()


def two_seeds(plans: list[dict[str, Any]], solved: list[Any]) -> Comparison:
    """The unpruned model and each plan with two seeds, which solve the same items."""
    axes = [UNPRUNED, *({**plan, "seed": seed} for seed in (1, 2) for plan in plans)]
    return comparison_of(axes, {"gsm8k": [*solved, *solved[1:]]})


def searched(last: list[int] | None) -> pd.DataFrame:
    methods = [("reap",), ("reap", "evolutionary"), ("ean",), ("ean", "evolutionary"), ("seer",)]
    methods += [("reap", "uniform", 0.25), ("reap", "evolutionary", 0.25)]
    solved = [first(40), first(10), first(20), first(8), last, first(30), first(20), first(19)]
    return claims.claims(
        [two_seeds([cell(*parts) for parts in methods], solved)], NO_COSTS, NO_FAMILY
    )


def test_searched_allocations_are_paired_with_uniform_ones() -> None:
    """At 50 %: +10 and +12 of 40 items, mean 0.275; at 25 %: -1 of 40."""
    rows = searched(first(20)).set_index("ratio")
    assert rows["difference"].to_dict() == pytest.approx({0.25: -1 / 40, 0.5: 11 / 40})
    assert rows["compared"].to_dict() == {0.25: 1, 0.5: 2}
    assert rows.loc[0.5, "verdict"] == "holds" and rows.loc[0.25, "verdict"] == "undecided"


def test_plans_of_one_seed_prove_no_claim() -> None:
    axes = [UNPRUNED, cell("reap"), cell("reap", "evolutionary")]
    result = claims.claims(
        [comparison_of(axes, {"gsm8k": [first(40), first(10), first(30)]})], NO_COSTS, NO_FAMILY
    )
    assert result["verdict"].tolist() == ["not tested"] and result["difference"].tolist() == [
        20 / 40
    ]


def test_missing_result_removes_its_pair_only() -> None:
    row = searched(None).set_index("ratio").loc[0.5]
    assert row["compared"] == 1 and row["difference"] == pytest.approx(10 / 40)
    only_uniform = comparison_of([UNPRUNED, cell("reap")], {"gsm8k": [first(40), first(10)]})
    assert claims.claims([only_uniform], NO_COSTS, NO_FAMILY).empty, (
        "nothing is claimed where nothing can be asked"
    )
    assert claims.verdict(np.nan, 0.1, 0.01) == claims.verdict(0.1, 0.2, np.nan) == "not tested"
    assert claims.verdict(0.1, 0.2, 0.06) == "undecided", "the interval alone decides nothing"


PLACES = {"heapr": "global", "camera": "layerwise", "reap": "uniform", "man": "uniform"}
PLACES |= {"channel_random": "layerwise", "random": "uniform"}
CHANNELS = [
    UNPRUNED,
    *(cell(*words) for words in PLACES.items()),
    cell("heapr", "global", recovery="nf4"),
]


def test_channels_are_compared_with_experts_of_equal_size() -> None:
    """HEAPr +20 and CAMERA +10 over REAP; MAN keeps a tenth more and is left out, and so is what
    was quantised."""
    solved = [first(40), first(30), first(20), first(10), first(40), first(16), first(20), first(2)]
    costs = pd.DataFrame({"cell": range(8), "routed_kept": [1, 0.5, 0.5, 0.52, 0.6, 0.5, 0.5, 0.5]})
    result = claims.claims([two_seeds(CHANNELS[1:], solved)], costs, NO_FAMILY)
    rows = result.set_index(["claim", "ratio"])
    row = rows.loc[(claims.CHANNELS, 0.5)]
    assert (
        row["compared"] == 2
        and row["difference"] == pytest.approx(15 / 40)
        and row["verdict"] == "holds"
    )
    assert claims.ALL not in rows.index.get_level_values("ratio"), (
        "of one ratio, its row says it all"
    )
    row = rows.loc[(claims.BY_CHANCE, 0.5)]
    assert row["compared"] == 1 and row["difference"] == pytest.approx(-4 / 40)
    assert row["p"] < 0.05 and row["verdict"] == "does not hold"
    # Holm over all rows: the smallest p times 2, the next times 1, never falling
    result = result.sort_values("p", kind="stable")
    naive = np.maximum.accumulate(result["p"].to_numpy() * [2, 1])
    assert result["p_holm"].tolist() == pytest.approx(naive.tolist())


def test_experts_that_are_replaced_are_not_removed() -> None:
    axes = [
        UNPRUNED,
        cell("heapr", "global"),
        cell("reap"),
        cell("reap", "uniform, replacement=mean_output"),
    ]
    costs = pd.DataFrame({"cell": range(4), "routed_kept": [1.0, 0.5, 0.5, 0.5]})
    solved = {"gsm8k": [first(40), first(30), first(10), first(20)]}
    rows = claims.claims([comparison_of(axes, solved)], costs, NO_FAMILY).set_index(
        ["claim", "ratio"]
    )
    row = rows.loc[(claims.CHANNELS, 0.5)]
    assert row["compared"] == 1 and row["difference"] == pytest.approx(20 / 40)


def test_claim_table_has_rows_for_each_and_all_ratios() -> None:
    plans = [
        cell(*words, ratio=ratio)
        for ratio in (0.25, 0.5)
        for words in (("heapr", "global"), ["man"])
    ]
    solved = {"gsm8k": [first(count) for count in (40, 30, 25, 20, 10)]}
    comparison = comparison_of([UNPRUNED, *plans], solved)
    costs = [{"routed_kept": 1 - ratio} for ratio in comparison.cells["ratio"]]
    [table] = find("claims").items(results_of(study_of(comparison, costs), [comparison]))
    assert table.frame["Pruned"].tolist() == ["25 %", "50 %", claims.ALL]


UP = [1.0, 2, 3, 4]
DOWN = [4.0, 3, 2, 1]
FAMILY = pd.concat(
    [
        family({"a": [UP, UP], "b": [UP, UP]}, (1, 1, 1)),
        family({"a": [UP, UP], "b": [DOWN, UP]}, (0, 1, 1)),
    ]
)


def test_invariance_is_compared_layer_by_layer() -> None:
    """Divided by counts, both layers agree wholly; sums agree in none of layer 0 and all of layer
    1."""
    layers = [scores_by_variant(layer) for _, layer in FAMILY.groupby("layer")]
    assert claims.layer_differences(layers, 0.5).tolist() == [1.0, 0.0]
    result = claims.claims([], NO_COSTS, FAMILY)
    assert result["claim"].unique().tolist() == [claims.INVARIANT]
    assert result["difference"].tolist() == [0.5, 0.5, 0.5] and set(result["verdict"]) == {
        "undecided"
    }
    one_set = claims.claims([], NO_COSTS, FAMILY[FAMILY["calibration"] == "a"])
    assert one_set.empty


def test_groups_of_pairs_weigh_alike() -> None:
    """(30 - 10) in one group, the mean of (20 - 10) and (10 - 10) in the other: (20 + 5) / 2 of
    40."""
    axes = [UNPRUNED, cell("reap"), cell("ean"), cell("seer"), cell("man")]
    solved = [first(40), first(30), first(20), first(10), first(10)]
    comparison = comparison_of(axes, {"gsm8k": solved})
    compared, difference = pooled_difference(comparison, ("GSM8K",), [[(1, 3)], [(2, 3), (4, 3)]])
    assert difference.value == pytest.approx(12.5 / 40) and compared == 3
    assert np.isnan(pooled_difference(comparison, ("GSM8K",), [])[1].value)


def test_bottom_sets_are_made_as_plans_are() -> None:
    assert overlap.bottom_sets(np.array([3.0, 1, 1, 1, 0]), 0.5).tolist() == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert overlap.bottom_sets(np.arange(7.0), 0.25).sum() == 1
    assert overlap.bottom_sets(np.arange(7.0), 0.1).sum() == 0


def test_three_readings_of_overlap_by_hand() -> None:
    """Bottom sets {0,1}, {0,1}, {0,2} of four experts."""
    frame = family({"a": [[1, 2, 3, 4]], "b": [[1, 2, 3, 4]], "c": [[1, 3, 2, 4]]})
    row = overlap.calibration_overlap(frame, [0.5]).iloc[0]
    assert row["triple"] == 0.5
    assert row["pairwise"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert row["jaccard"] == pytest.approx(1 / 3)
    assert (row["chance_triple"], row["chance_pairwise"]) == (0.25, 0.5)
    of_any_size = family({"a": [[1, 2, 3, 4], [1, 2]], "b": [[1, 2, 3, 4], [2, 1]]})
    assert overlap.calibration_overlap(of_any_size, [0.5]).iloc[0]["triple"] == 0.5, (
        "the mean of two layers"
    )


def test_chance_levels_are_what_random_scores_reach() -> None:
    scores = np.random.default_rng(0).random((3, 4000, 32))
    for ratio in overlap.RATIOS:
        result = overlap.agreement(overlap.bottom_sets(scores, ratio))
        for measure in ("triple", "pairwise"):
            assert result[measure] == pytest.approx(result[f"chance_{measure}"], abs=0.01)
        assert result["jaccard"] == pytest.approx(result["chance_jaccard"], abs=0.03)


def test_the_constant_score_is_not_available() -> None:
    frame = pd.concat(
        [
            family({"a": [[1, 1]], "b": [[1, 1]]}, overlap.DEGENERATE),
            family({"a": [[1, 2]], "b": [[1, 2]]}, (1, 0, 1)),
        ]
    )
    triples = overlap.calibration_overlap(frame, [0.5]).set_index("beta")["triple"]
    assert np.isnan(triples[0]) and triples[1] == 1.0
    effects = overlap.component_effects(
        overlap.mean_over_models(overlap.calibration_overlap(frame, [0.5]))
    )
    assert set(effects["level"][effects["component"] == "beta"]) == {1}


def test_proxy_against_exact_damage_by_hand() -> None:
    proxy = family({"a": [[1, 2, 3, 4], [1, 2, 3, 4]]}, (0, 1, 1))
    exact = family({"a": [[1, 2, 3, 4], [4, 3, 2, 1]]}).drop(columns=overlap.VARIANT)
    row = overlap.proxy_overlap(proxy, exact, [0.5]).iloc[0]
    assert (row["overlap"], row["lowest"], row["chance"]) == (0.5, 0.0, 0.5)
    for variant in ((0, 1, 2), (0, 2, 1), (1, 1, 1)):
        other = family({"a": [[1, 2, 3, 4], [4, 3, 2, 1]]}, variant)
        assert (
            overlap.proxy_overlap(pd.concat([other, proxy]), exact, [0.5]).iloc[0]["overlap"] == 0.5
        ), "another score"


# ---- winners, by scores and by losses on right answers


def comparison(outcomes: dict[str, dict[str, np.ndarray]]) -> Comparison:
    """Cells of one panel, with two equal seeds, from criterion -> benchmark -> outcomes; a
    benchmark that a criterion lacks is a gap."""
    benchmarks = dict.fromkeys(name for by_name in outcomes.values() for name in by_name)
    rows = {
        name: [by_name.get(name) for by_name in outcomes.values() for _ in range(2)]
        for name in benchmarks
    }
    return comparison_of(
        [cell(criterion, seed=seed) for criterion in outcomes for seed in (1, 2)], rows
    )


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


def test_win_must_hold_against_every_other_criterion() -> None:
    """Far ahead of the runners-up on the same items, yet not surely ahead of another that errs
    elsewhere."""
    rng = np.random.default_rng(0)
    best = rng.permutation(right(100))
    others = {}
    for name in ("ean", "seer", "frequency", "reap", "msan"):
        others[name] = best.copy()
        others[name][rng.permutation(np.flatnonzero(best))[:16]] = 0
    last = {"gate_ean": rng.permutation(right(83))}
    study_comparison = comparison(
        {name: {"gsm8k": answers} for name, answers in ({"man": best} | others | last).items()}
    )
    row = winner_map([study_comparison]).iloc[0]
    leads = study_comparison.leads(("GSM8K",), range(0, 14, 2))
    alone = [2 * t.sf(lead.value / lead.error, lead.freedom) for lead in leads]
    assert max(alone[:5]) < 0.05 < alone[5], (
        "ahead of the runners-up beyond noise, but not of the last"
    )
    assert row["runner_up"] in others and row["p"] == pytest.approx(alone[5])


def test_holm_covers_the_whole_map() -> None:
    columns = {name: right(100) for name in ("gsm8k", "math500", "livecodebench", "wildbench")}
    behind = {name: right(95) for name in columns}
    wins = winner_map([comparison({"man": columns, "ean": behind})])
    assert wins["p"].between(0.0125, 0.05).all() and wins["p"].nunique() == 1
    assert wins["p_holm"].tolist() == pytest.approx((4 * wins["p"]).tolist())
    assert not wins["proved"].any()


def test_winner_map_counts_significant_wins() -> None:
    outcomes = {
        "man": {"gsm8k": right(190), "rte": right(50)},
        "ean": {"gsm8k": right(10), "rte": right(50)},
    }
    columns = winner_map([comparison(outcomes)])
    assert [verdict(row) for row in columns.to_dict("records")] == ["proved win", "tie"]
    assert proved_wins(columns).startswith("Proved wins: 1 of 2 cells (1 tied")
    rows = {name: [by_name[name] for by_name in outcomes.values()] for name in ("gsm8k", "rte")}
    single = winner_map([comparison_of([cell(criterion) for criterion in outcomes], rows)])
    assert [verdict(row) for row in single.to_dict("records")] == ["not tested", "tie"]
    assert proved_wins(single).startswith("Proved wins: 0 of 2 cells")


def test_random_plans_can_be_ahead_in_a_map_but_prove_nothing() -> None:
    study_comparison = comparison(
        {"random": {"gsm8k": right(190)}, "man": {"gsm8k": right(50)}, "ean": {"gsm8k": right(10)}}
    )
    row = winner_map([study_comparison]).iloc[0]
    assert row["winners"] == ("random",) and np.isnan(row["p"])


def test_ties_zeros_and_gaps_are_nobodys_win() -> None:
    zero = right(0)
    some = right(50)
    study_comparison = comparison(
        {"reap": {"gsm8k": some, "math500": zero}, "man": {"gsm8k": some[::-1], "math500": zero}}
    )
    columns = winner_map([study_comparison]).set_index("column")
    assert columns["winners"].to_dict() == {"GSM8K": ("reap", "man"), "MATH-500": ("reap", "man")}
    assert label(("reap", "man"), 0.25) == "REAP = MAN" and label(("reap", "man"), 0.0) == "all 0"
    study_comparison = comparison(
        {"reap": {"gsm8k": right(50)}, "man": {"math500": right(50)}, "ean": {"gsm8k": right(20)}}
    )
    columns = winner_map([study_comparison]).set_index("column")
    assert (
        columns.loc["MATH-500", "winners"] == ("man",)
        and columns.loc["MATH-500", "runner_up"] == ""
    )
    assert np.isnan(columns.loc["MATH-500", "p"]) and not columns.loc["MATH-500", "proved"]
    assert (
        columns.loc["GSM8K", "winners"] == ("reap",) and columns.loc["GSM8K", "runner_up"] == "ean"
    )


def test_averaged_columns_resample_shared_answers_together() -> None:
    """HumanEval+ grades HumanEval's answers again: the interval is that of 200 items, not of
    400."""
    same = right(100)
    study_comparison = comparison(
        {"reap": {"humaneval": same, "humaneval_plus": same}, "man": {"mbpp": same}}
    )
    twice = study_comparison.interval(("humaneval", "humaneval_plus"))
    once = study_comparison.interval(("humaneval",))
    assert twice[1][0] - twice[0][0] == pytest.approx(once[1][0] - once[0][0], abs=0.01)


def table(results: Results, name: str) -> pd.DataFrame:
    return find(name).items(results)[-1].frame


def test_loss_column_is_a_mean_and_the_lowest_ranks_first(
    results: Results,
) -> None:
    (comparison,) = results.by_answer_loss.comparisons
    number = int(comparison.cells.index[5])
    folders = results.study.document["cells"][number]["evaluate"]
    for column, tasks in (("MC Avg", names.COLUMNS["MC Avg"]), ("Eval+", ("humaneval", "mbpp"))):
        files = [results.study.store / folders[task] / "samples.parquet" for task in tasks]
        expected = np.mean([pd.read_parquet(file)["answer_loss"].mean() for file in files])
        assert comparison.columns[column][number] == pytest.approx(expected)
    rows = table(results, "ranks.loss").query("Criterion != 'Unpruned'")
    for _, block in rows.groupby(["Pruned", "Calibration"]):
        ranked = block.set_index("Criterion")["Avg Rank"].to_dict()
        assert ranked == {"Frequency": 3.0, "REAP": 2.0, "MAN": 1.0, "Random": 4.0}
    won = table(results, "winners.loss")
    assert set(won["Winner"]) == {"MAN"} and (won["Lead"] < 0).all()
    assert not results.comparisons[0].lower_is_better, "scores beside losses are still scores"


def test_store_without_losses_has_scores_only(tmp_path: Path) -> None:
    few = {"calibrations": ("pocket_code",), "ratios": (0.5,), "tasks": ("rte",), "overlap": False}
    store = write_store(tmp_path, criteria=("random", "man"), **few)
    for path in (store / "evaluate").glob("*/samples.parquet"):
        pd.read_parquet(path).drop(columns="answer_loss").to_parquet(path, index=False)
    results = Results(load(store, "made_up"))
    assert [
        find(name).items(results) for name in ("winners.loss", "ranks.loss", "ranking.loss")
    ] == [[], [], []]
    assert len(table(results, "ranking")) and results.study.gaps == []
