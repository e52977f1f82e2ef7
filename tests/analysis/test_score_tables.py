"""Tables of scores and their figures, checked by hand where the golden store cannot, and how tables
are written."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import SCORES, UNPRUNED, cell, cells_of, comparison_of, first, results_of, study_of

from analysis import names
from analysis.load import settings as cell_settings
from analysis.outputs import channels, layer_budgets, recovery, score_rows, search, weights
from analysis.outputs.pareto import front
from analysis.outputs.scores import radar_figure, radar_methods
from analysis.published.numbers import counterparts
from analysis.published.tables import key_of
from analysis.registry import find
from analysis.render import table as rendering
from analysis.render.table import Table
from analysis.stats import uncertainty
from analysis.stats.cell_scores import CODING, MEAN, column_targets
from analysis.stats.comparison import Comparison
from analysis.stats.quantity import Quantity

AXES = [
    UNPRUNED,
    cell("heapr", "global"),
    cell("heapr", "layerwise"),
    cell("camera", "layerwise"),
    cell("reap"),
    cell("heapr", "global", ratio=0.25),
    cell("heapr", "global", recovery="nf4"),
]
SOLVED = {"arc_easy": [20, 16, 14, 10, 6, 18, 15], "piqa": [20, 12, 10, 8, 2, 18, 11]}
COSTS = [
    {"routed_kept": kept, "flops_ratio": flops, "storage_bytes": 100.0}
    for kept, flops in (
        (1, 1),
        (0.5, 0.85),
        (0.5, 0.86),
        (0.5, 0.87),
        (0.52, 0.99),
        (0.75, 0.9),
        (0.5, 0.85),
    )
]


def made(axes: list[dict[str, Any]], solved: dict[str, list[int | None]]) -> Comparison:
    return comparison_of(
        axes,
        {
            name: [None if n is None else first(n, 20) for n in counts]
            for name, counts in solved.items()
        },
    )


HEAPR = made(AXES, SOLVED)


def rows(table: Table, pruned: str = "50 %") -> pd.DataFrame:
    return table.frame[table.frame["Pruned"] == pruned].set_index("Criterion")


def test_models_asked_by_protocols_of_their_own_have_the_columns_of_the_paper() -> None:
    """Seven benchmarks, their plain mean, and no word about metrics that differ from model to
    model."""
    one, other = (made(AXES, dict.fromkeys(names.HEAPR, SOLVED["arc_easy"])) for _ in range(2))
    other = replace(other, model="n", all_cells=other.all_cells.assign(model="n"))
    study = study_of(one, COSTS)
    asked = {"m": ("acc", "heapr"), "n": ("acc_norm", "heapr_norm")}
    study.cells = pd.concat(
        [found.all_cells.assign(protocol=asked[found.model][1]) for found in (one, other)],
        ignore_index=True,
    )
    study.results = pd.DataFrame(
        [
            {"cell": cell, "n": 20, "benchmark": name, **SCORES, "metric": asked[model][0]}
            for cell, model in study.cells["model"].items()
            for name in names.HEAPR
        ]
    )
    table = channels.channel_choice_table(results_of(study, [one]), "t")
    shown = [names.benchmark(name) for name in names.HEAPR]
    assert list(table.frame.columns)[3:11] == [*shown, "Mean"] and "Avg" not in table.frame
    assert rows(table).loc["HEAPr-G", "Mean"] == pytest.approx(16 / 20)
    assert (
        "m by heapr and n by heapr_norm" in table.caption and "not comparable" not in table.caption
    )


def test_differences_are_paired_with_the_base() -> None:
    axes = [*AXES, *({**plan, "seed": 43} for plan in AXES[1:])]
    twice = made(axes, {name: [*counts, *counts[1:]] for name, counts in SOLVED.items()})
    table = channels.channel_choice_table(
        results_of(study_of(twice, [*COSTS, *COSTS[1:]]), [twice]), "t"
    )
    found = rows(table)
    assert found.index.tolist() == [
        "Unpruned",
        "HEAPr-G",
        "HEAPr-L",
        "CAMERA-P (one-shot)",
    ] and "25 %" not in set(table.frame["Pruned"])
    assert found.loc["HEAPr-G", "Difference"] == pytest.approx((6 + 4) / 20 / 2)
    assert found.loc["HEAPr-L", "Difference"] == pytest.approx((4 + 2) / 20 / 2)
    assert found.loc[["Unpruned", "CAMERA-P (one-shot)"], "Difference"].isna().all()
    raw = np.array(
        [twice.difference(("arc_easy", "piqa"), cell_number, 3).p for cell_number in (1, 2)]
    )
    corrected = [min(1, 2 * raw[0]), min(1, max(2 * raw[0], raw[1]))]
    assert raw[0] < raw[1] and found.loc[
        ["HEAPr-G", "HEAPr-L"], "p (Holm)"
    ].tolist() == pytest.approx(corrected)
    assert rendering.GAP_NOTE not in rendering.markdown(table), (
        "the base has no difference to itself"
    )
    lacking = (
        "Mean is over 2 of the paper's 7 benchmarks: OBQA, WinoGrande, HellaSwag, ARC-C and "
        "MathQA were not run."
    )
    assert lacking in table.footnotes


def test_differences_of_plans_of_one_seed_are_not_tested() -> None:
    found = rows(channels.channel_choice_table(results_of(study_of(HEAPR, COSTS), [HEAPR]), "t"))
    assert (
        found.loc["HEAPr-G", "Difference"] == pytest.approx((6 + 4) / 20 / 2)
        and "p (Holm)" not in found
    )


def test_a_gap_stays_a_gap() -> None:
    lost = made(AXES, {**SOLVED, "piqa": [20, None, 10, 8, 2, 18, 11]})
    table = channels.channel_choice_table(results_of(study_of(lost, COSTS), [lost]), "t")
    found = rows(table).loc["HEAPr-G"]
    assert (
        np.isnan(found["Mean"])
        and np.isnan(found["Difference"])
        and found["ARC-E"] == pytest.approx(0.8)
    )
    assert rendering.GAP_NOTE in rendering.markdown(table)
    assert rows(table).loc["HEAPr-L", "Difference"] == pytest.approx(0.15), (
        "others are compared all the same"
    )


def test_the_sequential_form_of_camera_is_the_base_where_both_were_run() -> None:
    both = made(
        [*AXES, cell("camera", "sequential")],
        {name: [*counts, 5] for name, counts in SOLVED.items()},
    )
    costs = [*COSTS, {"routed_kept": 0.5, "flops_ratio": 0.87, "storage_bytes": 100.0}]
    found = rows(channels.channel_choice_table(results_of(study_of(both, costs), [both]), "t"))
    assert found.index.tolist() == [
        "Unpruned",
        "HEAPr-G",
        "HEAPr-L",
        "CAMERA-P (one-shot)",
        "CAMERA-P",
    ]
    assert found.loc["HEAPr-G", "Difference"] == pytest.approx((11 + 7) / 20 / 2)
    assert np.isnan(found.loc["CAMERA-P", "Difference"])


@pytest.mark.parametrize(
    ("word", "name", "settings"),
    [
        ("uniform", "uniform", {}),
        (
            "coverage(prior=usage,layer_smoothing=log)",
            "coverage",
            {"prior": "usage", "layer_smoothing": "log"},
        ),
        ("global by frequency", "global by frequency", {}),
        (
            "uniform, replacement=m_smoe, protect=a.json",
            "uniform",
            {"replacement": "m_smoe", "protect": "a.json"},
        ),
        ("(odd) one", "(odd) one", {}),
    ],
)
def test_words_for_allocations_are_read(word: str, name: str, settings: dict[str, str]) -> None:
    assert cell_settings.allocation(word) == (name, settings)


def naive_front(costs: np.ndarray, scores: np.ndarray) -> list[bool]:
    """Entry by entry, from the words of the definition: nothing else is at least as good in
    both."""
    points = list(zip(costs, scores, strict=True))
    beaten = [
        any(cost <= own[0] and score >= own[1] and (cost, score) != own for cost, score in points)
        for own in points
    ]
    return [not (np.isnan(score) or lost) for (_, score), lost in zip(points, beaten, strict=True)]


def test_the_front_is_what_nothing_beats() -> None:
    assert front([1, 1, 2], [0.5, 0.5, 0.5]).tolist() == [True, True, False], (
        "equals stand together"
    )
    drawn = np.random.default_rng(0)
    for _ in range(50):
        costs = drawn.integers(0, 6, 12).astype(float)
        scores = drawn.integers(0, 6, 12).astype(float)
        scores[drawn.random(12) < 0.1] = np.nan
        assert front(costs, scores).tolist() == naive_front(costs, scores)


def test_layers_keep_the_mean_of_their_experts_and_equal_lines_are_one() -> None:
    plans = {
        1: [[0.5, 0.5], [0.5, 0.5]],
        2: [[0.7502, 0.25], [0.5, 0.5]],
        3: [[1.0, 0.5], [0.5, 0.0]],
    }
    kept = pd.DataFrame(
        [
            {"cell": number, "layer": layer, "expert": expert, "share": share}
            for number, shares in plans.items()
            for layer, values in enumerate(shares)
            for expert, share in enumerate(values)
        ]
    )
    cells = cells_of(
        [UNPRUNED, *(cell("snip", word) for word in ("uniform", "layerwise", "coverage"))]
    )
    shares = layer_budgets.layer_shares(cells, kept)
    assert shares.index.tolist() == ["uniform\nlayerwise", "coverage"]
    assert shares.to_numpy().tolist() == [[0.5, 0.5], [0.75, 0.25]]


def test_perplexity_is_drawn_against_the_ratio() -> None:
    axes = [UNPRUNED, *(cell("heapr", "global", ratio=ratio) for ratio in (0.2, 0.6, 0.4))]
    comparison = comparison_of(
        axes, {"wikitext": np.log([[10, 10], [16, 25], [9, 9], [9, 16]]).tolist()}
    )
    study = study_of(comparison)
    perplexities = np.array([10, 20, 9, 12])
    for scale, shown in (("perplexity", perplexities), ("loss", np.log(perplexities))):
        measured = replace(comparison, quantities={"wikitext": Quantity(scale, "nats per token")})
        [figure] = channels.loss_figure(results_of(study, [measured]), "loss_by_ratio")
        [panel] = figure.drawing.axes
        [points] = [line for line in panel.lines if len(line.get_xdata()) == 3]
        assert (
            np.asarray(points.get_ydata()) == pytest.approx(shown[[1, 3, 2]])
            and scale in panel.get_ylabel()
        )
        assert np.asarray(panel.lines[0].get_ydata()) == pytest.approx(shown[[0, 0]])
    assert channels.loss_figure(results_of(study, [comparison]), "loss_by_ratio") == []
    assert score_rows.ratio_lines(cells_of(axes[:3]).iloc[1:]) == {}, "two ratios are no line"


def test_a_recovery_of_several_methods_has_a_line_for_each() -> None:
    methods = [
        (place, word) for place in ("uniform", "evolutionary") for word in ("none", "router_kd")
    ]
    axes = [UNPRUNED, *(cell("reap", place, recovery=word) for place, word in methods)]
    comparison = comparison_of(
        axes, {"gsm8k": [first(count, 60) for count in (60, 20, 50, 30, 10)]}
    )
    sizes = [{"storage_bytes": size * 2**20, "routed_kept": size / 8} for size in (8, 4, 3, 4, 3)]
    [figure] = recovery.storage_figure(
        results_of(study_of(comparison, sizes), [comparison]), "coverage.fig8"
    )
    assert len(figure.drawing.axes[0].get_lines()) == 4, "a line for each method with each recovery"
    same = [{"storage_bytes": 4 * 2**20, "routed_kept": 0.5}] * 5
    assert (
        recovery.storage_figure(
            results_of(study_of(comparison, same), [comparison]), "coverage.fig8"
        )
        == []
    )
    sized = results_of(study_of(comparison, sizes), [comparison])
    assert find("coverage.table10").items(sized) == [] == find("coverage.fig9").items(sized), (
        "no channels"
    )


def test_fewer_experts_a_token_stand_under_the_model_as_it_was_trained() -> None:
    cells = [UNPRUNED, cell("channel_activation", "coverage", recovery="nf4"), cell("mone")]
    solved = {"m": (9, 8, 7), "m_top1": (5, 4, 3), "m_top2": (8, 7, 6), "n": (1, 1, 1)}
    models = [
        replace(
            comparison_of(cells, {"arc_easy": [first(count, 10) for count in counts]}), model=model
        )
        for model, counts in solved.items()
    ]
    study = study_of(models[0])
    study.models = {"m": {"layers": {"0": {"top_k": 4}}}}
    table = recovery.top_k_table(results_of(study, models), "coverage.table9")
    assert table.frame["Model"].tolist() == ["m"] * 3 + ["m_top2"] * 3 + ["m_top1"] * 3
    assert table.frame["Criterion"].tolist()[1:3] == [
        "Channel activation, coverage, top-4",
        "MoNE score, top-4",
    ]
    assert table.frame[MEAN].tolist() == pytest.approx(
        [0.9, 0.8, 0.7, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    )
    assert recovery.top_k_table(results_of(study, models[3:]), "t") is None
    found = {
        **cell("none", "none", 0.0),
        "model": "qwen1_5_moe_top2",
        "calibration": "none",
        "recovery": "none",
    }
    row = counterparts("coverage.table9")[key_of(found)]
    assert {number.benchmark for number in row} >= {"piqa", "Avg"} and names.routed("m") == (
        "m",
        None,
    )


def test_columns_are_those_of_the_view_and_the_mean_is_of_the_benchmarks_in_it() -> None:
    asked = ("humaneval", "livecodebench", "wildbench", "arc_easy")
    comparison = comparison_of([UNPRUNED, cell("reap")], {name: [[1], [0]] for name in asked})
    assert list(column_targets(comparison, [0, 1], CODING)) == [
        "HumanEval",
        "Eval+",
        "LiveCode",
        "Code",
    ]
    found = column_targets(comparison, [0, 1], ("humaneval", "wildbench", "piqa", MEAN))
    assert found[MEAN] == ("humaneval", "wildbench") and list(found) == [
        "HumanEval",
        "WildBench",
        MEAN,
    ]


def searched(seeds: tuple[int, ...]) -> Comparison:
    """EAN and REAP with three allocations each, all with these seeds, of 60 items."""
    allocations = ("global by frequency", "uniform", "evolutionary")
    plans = [
        (name, allocation, seed)
        for name in ("ean", "reap")
        for allocation in allocations
        for seed in seeds
    ]
    solved = {
        "gsm8k": (9, 30, 38, 9, 20, 40),
        "math500": (9, 30, 20, 9, 20, 22),
        "rte": (9, 9, 9, 9, 9, 13),
    }
    outcomes = {
        name: [first(count, 60) for count in (60, *np.repeat(counts, len(seeds)))]
        for name, counts in solved.items()
    }
    axes = [UNPRUNED, *(cell(name, allocation, seed=seed) for name, allocation, seed in plans)]
    return comparison_of(axes, outcomes)


def test_gains_of_searches_are_paired_and_corrected_together() -> None:
    """All differences of a model are one family; a search is paired with the uniform cell that
    differs in nothing."""
    comparison = searched(seeds=(1, 2))
    pairs = {5: 3, 11: 9}
    assert search.searched_pairs(comparison) == pairs
    table = search.allocation_table(results_of(study_of(comparison), [comparison]), "t")
    assert (
        table.frame["Allocation"].tolist() == ["uniform", "evolutionary"] * 2
        and table.low is not None
    )
    targets = {
        "MC Avg": ("MC Avg",),
        "Math": ("GSM8K", "MATH-500"),
        "Avg": tuple(comparison.benchmarks_of),
    }
    p_values = [
        [comparison.difference(target, *pair).p for target in targets.values()]
        for pair in pairs.items()
    ]
    below = uncertainty.holm(np.ravel(p_values)).reshape(2, -1) < 0.05
    assert 0 < below.sum() < (np.array(p_values) < 0.05).sum(), (
        "some are below the level without correction"
    )
    for row, pair in enumerate(pairs.items()):
        for name, target in targets.items():
            low, _ = comparison.difference(target, *pair).interval
            gain = comparison.score(target)[pair[0]] - comparison.score(target)[pair[1]]
            assert table.frame[f"Δ {name}"].iloc[2 * row + 1] == pytest.approx(gain)
            assert table.low[f"Δ {name}"].iloc[2 * row + 1] == low and np.isnan(
                table.frame[f"Δ {name}"].iloc[2 * row]
            )
        significant = {
            name for name, is_below in zip(targets, below[row], strict=True) if is_below
        } or {"none"}
        shown = table.frame[search.SIGNIFICANT].iloc[2 * row + 1]
        assert set(shown.replace(" and ", ", ").split(", ")) == significant


def test_gains_of_searches_with_one_seed_are_not_tested() -> None:
    comparison = searched(seeds=(1,))
    table = search.allocation_table(results_of(study_of(comparison), [comparison]), "t")
    assert table.frame["Δ Avg"].notna().sum() == 2
    assert search.SIGNIFICANT not in table.frame and "p-value" not in table.caption


def test_a_layer_without_differences_has_no_profile() -> None:
    frame = pd.DataFrame(
        {"model": "m", "criterion": "aimer", "layer": [0] * 3 + [1] * 3, "expert": [0, 1, 2] * 2}
    )
    found = weights.profiles(frame.assign(score=[1.0, 1.0, 1.0, 0.0, 2.0, 1.0]))
    assert np.isnan(found["profile"][:3]).all() and found["profile"][3:].tolist() == [0, 1, 0.5]


def test_a_radar_has_the_best_two_and_the_methods_of_the_paper() -> None:
    others = {"man": 3, "msan": 4, "mone": 1}
    solved = {
        "none": 5,
        **dict.fromkeys(("reap", "aimer", "ean", "seer", "magnitude"), 2),
        **others,
    }
    outcomes = [first(count, 5) for count in solved.values()]
    axes = [UNPRUNED, *(cell(name) for name in solved if name != "none")]
    comparison = comparison_of(axes, dict.fromkeys(("rte", "gsm8k", "mmlu"), outcomes))
    [panel] = comparison.panels
    assert radar_methods(comparison, panel) == [
        "msan",
        "man",
        "aimer",
        "magnitude",
        "seer",
        "ean",
        "reap",
    ]
    two = comparison_of(axes, dict.fromkeys(("rte", "gsm8k"), outcomes))
    assert radar_figure(results_of(study_of(two), [two]), "aimer.fig3") == [], (
        "two spokes are no radar"
    )


def test_tables_are_written_as_markdown_latex_and_html() -> None:
    frame = pd.DataFrame(
        {"Criterion": ["Unpruned", "MAN", "REAP", "EAN"], "GSM8K": [0.9, 0.5, 0.5, np.nan]}
    )
    low = pd.DataFrame({"GSM8K": [0.8, 0.4, 0.4, np.nan]})
    about = ("t", "A 50 % table", "It_s caption.")
    table = Table(
        *about, frame, {"GSM8K": "{:.3f}"}, best={"GSM8K": "max"}, low=low, high=low + 0.2
    )
    made = rendering.markdown(table)
    assert "| MAN | **0.500** |" in made and "| REAP | **0.500** |" in made, "ties are all best"
    assert "| Unpruned | 0.900 |" in made, "the unpruned model does not compete"
    assert "| EAN | – |" in made and rendering.GAP_NOTE in made
    assert rendering.GAP_NOTE not in rendering.markdown(replace(table, frame=frame.fillna(0.25)))
    made = rendering.latex(table)
    for words in (
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\textbf{0.500}",
        r"It\_s",
        r"50 \%",
        r"\label{tab:t}",
    ):
        assert words in made
    assert "textbf{0.900}" not in made
    made = rendering.html(table)
    assert 'data-key="0.9"' in made and 'data-key=""' in made
    assert "<small>0.40 to 0.60</small>" in made
    nasty = replace(
        table, frame=pd.DataFrame({"Criterion": ["<script>"], "GSM8K": [0.5]}), low=None
    )
    assert "<script>" not in rendering.html(nasty)
