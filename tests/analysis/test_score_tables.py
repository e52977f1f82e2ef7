"""Tables of scores and their figures, checked by hand where the golden store cannot, and how tables
are written."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from handmade import (
    UNPRUNED,
    cell,
    cells_of,
    comparison_of,
    first_solved,
    results_of,
    study_of,
)
from synthetic import write_frame, write_store

from moe_lab.analysis import names
from moe_lab.analysis.load.study import load
from moe_lab.analysis.outputs import (
    calibration,
    cost,
    criteria,
    score_rows,
)
from moe_lab.analysis.outputs.published import published_key
from moe_lab.analysis.outputs.score_rows import pareto_front
from moe_lab.analysis.published.numbers import counterparts
from moe_lab.analysis.registry import Results, find
from moe_lab.analysis.render import table as rendering
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.stats import uncertainty
from moe_lab.analysis.stats.cell_scores import CODE_BENCHMARKS, MEAN, column_targets
from moe_lab.analysis.stats.comparison import Comparison

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
            name: [None if n is None else first_solved(n, 20) for n in counts]
            for name, counts in solved.items()
        },
    )


HEAPR = made(AXES, SOLVED)


def table_named(name: str, results: Results) -> Table:
    """The table of an output, the last of its items."""
    table = find(name).items(results)[-1]
    assert isinstance(table, Table)
    return table


def rows(table: Table, pruned: str = "50 %") -> pd.DataFrame:
    return table.frame[table.frame["Pruned"] == pruned].set_index("Criterion")


def test_channel_choices_have_the_columns_of_the_paper() -> None:
    """Seven benchmarks, and their plain mean."""
    comparison = made(AXES, dict.fromkeys(names.HEAPR, SOLVED["arc_easy"]))
    table = table_named("heapr.table2", results_of(study_of(comparison, COSTS), [comparison]))
    columns = [names.benchmark(name) for name in names.HEAPR]
    assert list(table.frame.columns)[3:11] == [*columns, "Mean"]
    assert "Avg" not in table.frame
    assert rows(table).loc["HEAPr-G", "Mean"] == pytest.approx(16 / 20)


@pytest.fixture(scope="module")
def two_seeds() -> Comparison:
    """The cells of `AXES`, the pruned ones with two seeds."""
    axes = [*AXES, *({**plan, "seed": 43} for plan in AXES[1:])]
    return made(axes, {name: [*counts, *counts[1:]] for name, counts in SOLVED.items()})


@pytest.fixture(scope="module")
def channel_choices(two_seeds: Comparison) -> Table:
    study = study_of(two_seeds, [*COSTS, *COSTS[1:]])
    return table_named("heapr.table2", results_of(study, [two_seeds]))


def test_differences_are_paired_with_the_base(channel_choices: Table) -> None:
    table = rows(channel_choices)
    base = "CAMERA-P (one-shot)"
    assert table.index.tolist() == ["Unpruned", "HEAPr-G", "HEAPr-L", base]
    assert "25 %" not in set(channel_choices.frame["Pruned"])
    assert table.loc["HEAPr-G", "Difference"] == pytest.approx((6 + 4) / 20 / 2)
    assert table.loc["HEAPr-L", "Difference"] == pytest.approx((4 + 2) / 20 / 2)
    assert table.loc[["Unpruned", base], "Difference"].isna().all()


def test_differences_from_the_base_are_corrected_together(
    channel_choices: Table, two_seeds: Comparison
) -> None:
    target = ("arc_easy", "piqa")
    global_p, layerwise_p = (two_seeds.difference(target, number, 3).p for number in (1, 2))
    assert global_p < layerwise_p
    corrected = [min(1, 2 * global_p), min(1, max(2 * global_p, layerwise_p))]
    shown = rows(channel_choices).loc[["HEAPr-G", "HEAPr-L"], "p (Holm)"]
    assert shown.tolist() == pytest.approx(corrected)


def test_channel_choices_have_no_gaps(channel_choices: Table) -> None:
    assert rendering.GAP_NOTE not in rendering.markdown(channel_choices), (
        "the base has no difference to itself"
    )


def test_differences_of_plans_of_one_seed_are_not_tested() -> None:
    table_rows = rows(table_named("heapr.table2", results_of(study_of(HEAPR, COSTS), [HEAPR])))
    assert table_rows.loc["HEAPr-G", "Difference"] == pytest.approx((6 + 4) / 20 / 2)
    assert "p (Holm)" not in table_rows


def test_gap_stays_a_gap() -> None:
    lost = made(AXES, {**SOLVED, "piqa": [20, None, 10, 8, 2, 18, 11]})
    table = table_named("heapr.table2", results_of(study_of(lost, COSTS), [lost]))
    row = rows(table).loc["HEAPr-G"]
    assert np.isnan(row["Mean"])
    assert np.isnan(row["Difference"])
    assert row["ARC-E"] == pytest.approx(0.8)
    assert rendering.GAP_NOTE in rendering.markdown(table)
    assert rows(table).loc["HEAPr-L", "Difference"] == pytest.approx(0.15), (
        "others are compared all the same"
    )


def test_sequential_camera_is_the_base() -> None:
    both = made(
        [*AXES, cell("camera", "sequential")],
        {name: [*counts, 5] for name, counts in SOLVED.items()},
    )
    costs = [*COSTS, {"routed_kept": 0.5, "flops_ratio": 0.87, "storage_bytes": 100.0}]
    table_rows = rows(table_named("heapr.table2", results_of(study_of(both, costs), [both])))
    assert table_rows.index.tolist() == [
        "Unpruned",
        "HEAPr-G",
        "HEAPr-L",
        "CAMERA-P (one-shot)",
        "CAMERA-P",
    ]
    assert table_rows.loc["HEAPr-G", "Difference"] == pytest.approx((11 + 7) / 20 / 2)
    assert np.isnan(table_rows.loc["CAMERA-P", "Difference"])


@pytest.mark.parametrize(
    ("text", "name", "settings"),
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
def test_words_for_allocations_are_read(text: str, name: str, settings: dict[str, str]) -> None:
    assert names.name_and_settings(text) == (name, settings)


def naive_front(costs: np.ndarray, scores: np.ndarray) -> list[bool]:
    """Entry by entry, from the words of the definition: nothing else is at least as good in
    both."""
    points = list(zip(costs, scores, strict=True))
    beaten = [
        any(
            cost <= point[0] and score >= point[1] and (cost, score) != point
            for cost, score in points
        )
        for point in points
    ]
    return [not (np.isnan(score) or lost) for (_, score), lost in zip(points, beaten, strict=True)]


def test_the_front_is_what_nothing_beats() -> None:
    assert pareto_front([1, 1, 2], [0.5, 0.5, 0.5]).tolist() == [True, True, False], (
        "equals stand together"
    )
    drawn = np.random.default_rng(0)
    for _ in range(50):
        costs = drawn.integers(0, 6, 12).astype(float)
        scores = drawn.integers(0, 6, 12).astype(float)
        scores[drawn.random(12) < 0.1] = np.nan
        assert pareto_front(costs, scores).tolist() == naive_front(costs, scores)


def test_two_ratios_are_no_line() -> None:
    plans = [cell("heapr", "global", ratio=ratio) for ratio in (0.2, 0.6, 0.4)]
    assert score_rows.ratio_lines(cells_of(plans))["ratio"].tolist() == [0.2, 0.4, 0.6]
    assert score_rows.ratio_lines(cells_of(plans[:2])).empty


@pytest.fixture(scope="module")
def recovered() -> Comparison:
    """The unpruned model, and two allocations with and without a recovery."""
    methods = [
        (allocation, tuning)
        for allocation in ("uniform", "evolutionary")
        for tuning in ("none", "router_kd")
    ]
    plans = [cell("reap", allocation, recovery=tuning) for allocation, tuning in methods]
    outcomes = [first_solved(count, 60) for count in (60, 20, 50, 30, 10)]
    comparison = comparison_of([UNPRUNED, *plans], {"gsm8k": outcomes})
    # as in a study that was read, keys of methods have the recovery
    keys = [names.method_key("reap", *method) for method in methods]
    comparison.all_cells["method"] = ["none", *keys]
    return comparison


def storage_sizes(*sizes: int) -> list[dict[str, float]]:
    return [{"storage_bytes": size * 2**20, "routed_kept": size / 8} for size in sizes]


def test_storage_figure_has_a_line_for_each_method_with_each_recovery(
    recovered: Comparison,
) -> None:
    results = results_of(study_of(recovered, storage_sizes(8, 4, 3, 4, 3)), [recovered])
    figure, table = find("coverage.fig8").items(results)
    drawn = set(figure.rows[["x", "y"]].itertuples(index=False, name=None))
    frame = table.frame[["Storage (MiB)", "Mean"]]
    assert drawn == set(frame.itertuples(index=False, name=None))
    assert figure.rows["line"].nunique() == 5
    # 20 and 50 of 60 right with 4 and 3 MiB, 30 and 10 too: the smaller and better one alone
    assert figure.rows.loc[figure.rows["front"], ["x", "y"]].to_numpy().tolist() == [[3, 50 / 60]]


def test_costs_that_do_not_differ_are_not_drawn(recovered: Comparison) -> None:
    results = results_of(study_of(recovered, storage_sizes(8, 4, 4, 4, 4)), [recovered])
    assert not [item for item in find("coverage.fig8").items(results) if isinstance(item, Figure)]


def test_outputs_about_channels_need_channels(recovered: Comparison) -> None:
    results = results_of(study_of(recovered, storage_sizes(8, 4, 3, 4, 3)), [recovered])
    assert find("coverage.table10").items(results) == []


@pytest.fixture(scope="module")
def top_k_comparisons() -> list[Comparison]:
    """A model with four experts a token, then with one and two, and another model."""
    cells = [UNPRUNED, cell("channel_activation", "coverage", recovery="nf4"), cell("mone")]
    solved = {"m": (9, 8, 7), "m_top1": (5, 4, 3), "m_top2": (8, 7, 6), "n": (1, 1, 1)}
    return [
        replace(
            comparison_of(cells, {"arc_easy": [first_solved(count, 10) for count in counts]}),
            model=model,
        )
        for model, counts in solved.items()
    ]


def test_fewer_experts_a_token_are_rows_below_the_trained_number(
    top_k_comparisons: list[Comparison],
) -> None:
    study = study_of(top_k_comparisons[0])
    study.models = {"m": {"layers": {"0": {"top_k": 4}}}}
    frame = table_named("coverage.table9", results_of(study, top_k_comparisons)).frame
    assert frame["Model"].tolist() == ["m"] * 3 + ["m_top2"] * 3 + ["m_top1"] * 3
    criteria = ["Channel activation, coverage, top-4", "MoNE score, top-4"]
    assert frame["Criterion"].tolist()[1:3] == criteria
    assert frame[MEAN].tolist() == pytest.approx([0.9, 0.8, 0.7, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])


def test_models_with_their_trained_number_have_no_table_of_experts_a_token(
    top_k_comparisons: list[Comparison],
) -> None:
    study = study_of(top_k_comparisons[0])
    study.models = {}
    assert find("coverage.table9").items(results_of(study, top_k_comparisons[3:])) == []


def test_fewer_experts_a_token_have_published_numbers() -> None:
    axes = {
        **cell("none", "none", 0.0),
        "model": "qwen1_5_moe_top2",
        "calibration": "none",
        "recovery": "none",
    }
    row = counterparts("coverage.table9")[published_key(axes)]
    assert {number.benchmark for number in row} >= {"piqa", "Avg"}
    assert names.split_top_k("m") == ("m", None)


def test_columns_and_mean_are_those_of_the_view() -> None:
    columns = ("humaneval", "livecodebench", "wildbench", "arc_easy")
    comparison = comparison_of([UNPRUNED, cell("reap")], {name: [[1], [0]] for name in columns})
    assert list(column_targets(comparison, [0, 1], CODE_BENCHMARKS)) == [
        "HumanEval",
        "Eval+",
        "LiveCode",
        "Code",
    ]
    targets = column_targets(comparison, [0, 1], ("humaneval", "wildbench", "piqa", MEAN))
    assert targets[MEAN] == ("humaneval", "wildbench")
    assert list(targets) == [
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
        name: [first_solved(count, 60) for count in (60, *np.repeat(counts, len(seeds)))]
        for name, counts in solved.items()
    }
    axes = [UNPRUNED, *(cell(name, allocation, seed=seed) for name, allocation, seed in plans)]
    return comparison_of(axes, outcomes)


PAIRS = {5: 3, 11: 9}
"""Cell with a search -> the uniform cell that differs in nothing else."""


class Searches(NamedTuple):
    """Cells of two seeds with and without a search, and the table of them. Of each pair it has a
    row for the unpruned model, the uniform cell and the searched one."""

    comparison: Comparison
    table: Table


@pytest.fixture(scope="module")
def searches() -> Searches:
    comparison = searched(seeds=(1, 2))
    table = table_named("evoesap.table1", results_of(study_of(comparison), [comparison]))
    return Searches(comparison, table)


def test_searches_are_paired_with_uniform_cells(searches: Searches) -> None:
    """EvoESAP, Section 4.2, Tables 1 and 2: the full model, then each criterion twice."""
    table = searches.table
    methods = [[name, f"{name}, evolutionary"] for name in ("EAN", "REAP")]
    assert table.frame["Criterion"].tolist() == ["Unpruned", *methods[0], "Unpruned", *methods[1]]
    assert list(table.frame)[3:7] == ["GSM8K", "MATH-500", "Math", "MC Avg"]


def test_gains_of_searches_are_differences_of_pairs(searches: Searches) -> None:
    """Of the last column, corrected over all pairs."""
    comparison, table = searches
    estimates = [comparison.difference(("MC Avg",), *pair) for pair in PAIRS.items()]
    gains = table.frame["Difference"]
    assert gains[[2, 5]].tolist() == pytest.approx([estimate.value for estimate in estimates])
    assert gains[[1, 4]].isna().all()
    assert table.frame["Difference low"][[2, 5]].tolist() == [e.interval[0] for e in estimates]
    p_values = uncertainty.holm(np.array([estimate.p for estimate in estimates]))
    assert table.frame["p (Holm)"][[2, 5]].tolist() == pytest.approx(p_values)


def test_gains_of_searches_with_one_seed_are_not_tested() -> None:
    comparison = searched(seeds=(1,))
    table = table_named("evoesap.table1", results_of(study_of(comparison), [comparison]))
    assert table.frame["Difference"].notna().sum() == 2
    assert "p (Holm)" not in table.frame


def test_layer_without_differences_has_no_profile() -> None:
    frame = pd.DataFrame(
        {"model": "m", "criterion": "aimer", "layer": [0] * 3 + [1] * 3, "expert": [0, 1, 2] * 2}
    )
    profiles = criteria.profiles(frame.assign(score=[1.0, 1.0, 1.0, 0.0, 2.0, 1.0]))
    assert np.isnan(profiles["profile"][:3]).all()
    assert profiles["profile"][3:].tolist() == [
        0,
        1,
        0.5,
    ]


def test_speeds_are_medians_with_quartiles() -> None:
    seconds = np.arange(1.0, 6.0)
    timings = pd.DataFrame({"prefill_seconds": seconds, "decode_seconds": seconds})
    timings = timings.assign(cell=0, device="cpu", batch_size=2, prompt_length=30, new_tokens=10)
    study = SimpleNamespace(timings=timings.assign(weight_bytes=1, working_bytes=1))
    [row] = cost.requests(study).to_dict("records")
    assert [row[f"First token (ms){end}"] for end in (" low", "", " high")] == [2000, 3000, 4000]
    assert [row[f"Decode (tokens/s){end}"] for end in (" low", "", " high")] == [5, 20 / 3, 10]


def test_benchmarks_are_read_from_the_plan_of_their_domain(tmp_path: Path) -> None:
    """MoE-Slimming (arXiv 2606.18304), Section 5.1: plans from C4 for knowledge, from GSM8K for
    mathematics and from OpenCodeReasoning for code are one row, also beside printed numbers."""
    sets = {"arc_challenge": "c4", "gsm8k": "gsm8k", "humaneval": "opencodereasoning"}
    store = write_store(
        tmp_path,
        models=("qwen1_5_moe",),
        criteria=("channel_activation", "snip"),
        calibrations=tuple(sets.values()),
        allocations=("uniform", "coverage"),
        tasks=tuple(sets),
        items=40,
    )
    results = Results(load(store, "made_up"))
    [comparison] = results.comparisons
    cells = comparison.cells[comparison.cells["criterion"] == "channel_activation"]
    cell_of_plan = {
        (plan.allocation, plan.calibration): cell
        for cell, plan in zip(cells.index, cells.itertuples(), strict=True)
    }
    scores = {
        benchmark: comparison.score((benchmark,))[cell_of_plan["coverage", calibration]]
        for benchmark, calibration in sets.items()
    }
    table = table_named("coverage.table6", results).frame
    assert table["Criterion"].tolist() == ["Unpruned", "Uniform", "Coverage"] * 2
    row = table.iloc[2]
    assert [row["ARC-C"], row["GSM8K"], row["HumanEval"]] == list(scores.values())
    for name, benchmark in (("coverage.table6", "ARC-C"), ("coverage.table13", "GSM8K")):
        printed = table_named(f"{name}.published", results).frame
        of_plan = printed[printed["Criterion"] == "Channel activation, coverage"]
        assert of_plan["Benchmark"].tolist() == [benchmark]
        assert of_plan["Measured"].tolist() == [row[benchmark]]


@pytest.fixture
def table() -> Table:
    frame = pd.DataFrame(
        {
            "Criterion": ["Unpruned", "MAN", "REAP", "EAN"],
            "GSM8K": [0.9, 0.5, 0.5, np.nan],
            "GSM8K low": [0.8, 0.4, 0.4, np.nan],
            "GSM8K high": [1, 0.6, 0.6, np.nan],
        }
    )
    return Table("A 50 % table", "It_s caption.", frame, {"GSM8K": "{:.3f}"}, name="t")


def test_markdown_marks_what_is_separated_and_gaps(table: Table) -> None:
    text = rendering.markdown(table)
    assert "**" not in text, "the best number alone is no proof"
    assert "| EAN | – |" in text
    assert rendering.GAP_NOTE in text
    is_man = table.frame[["Criterion"]].eq("MAN").rename(columns={"Criterion": "GSM8K"})
    complete = replace(table, frame=table.frame.fillna(0.25), bold=is_man)
    text = rendering.markdown(complete)
    assert "| MAN | **0.500** |" in text and text.count("**") == 2
    assert rendering.GAP_NOTE not in text


def test_latex_escapes(table: Table) -> None:
    text = rendering.latex(table)
    for expected in (
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"It\_s",
        r"50 \%",
        r"\label{tab:t}",
    ):
        assert expected in text


def test_lines_of_calibration_tokens_are_told_apart_by_their_gate() -> None:
    rows = [(gate, name) for gate in ("raw", "renormalized") for name in ("large", "small")]
    cells = pd.DataFrame(rows, columns=["gate", "calibration"])
    cells = cells.assign(criterion="man", method="man", ratio=0.5, removed_text="50 %", model="m")
    reports = {
        ("m", name): {"valid_tokens": {"web": tokens}, "sha256": "text"}
        for name, tokens in (("small", 10), ("large", 20))
    }
    study: Any = SimpleNamespace(calibrations=reports)
    comparison: Any = SimpleNamespace(model="m", pruned_cells=cells)
    lines = calibration.lines_by_tokens(study, comparison)
    assert list(zip(lines["label"], lines["read"], strict=True)) == [
        (f"MAN, large, gate {gate}", tokens)
        for tokens in (10, 20)
        for gate in ("raw", "renormalized")
    ]


def test_a_study_whose_criteria_read_no_text_has_no_lines_of_tokens() -> None:
    cells = pd.DataFrame({"criterion": ["random"], "method": ["random"], "calibration": ["none"]})
    study: Any = SimpleNamespace(calibrations={})
    comparison: Any = SimpleNamespace(model="m", pruned_cells=cells.assign(ratio=0.5))
    assert calibration.calibrated_cells(study, comparison)["read"].tolist() == []


def test_degeneration_is_compared_with_the_unpruned_model(tmp_path: Path, results: Results) -> None:
    """The last item of the pruned model has no text."""
    few = {"criteria": ("reap",), "calibrations": ("pocket_code",), "ratios": (0.25,)}
    store = write_store(tmp_path, tasks=("gsm8k",), items=6, overlap=False, **few)
    for criterion, loop, characters in (
        ("none", [0, 0, 0, 1, 0, 0], [10] * 6),
        ("reap", [1, 1, 0, 1, 1, np.nan], [30] * 5 + [np.nan]),
    ):
        [file] = store.glob(f"evaluate/*-{criterion}-*/samples.parquet")
        texts = {"loop": loop, "characters": characters, "empty": 0}
        write_frame(file, pd.read_parquet(file).assign(**texts))
    figure, table = find("degeneration").items(Results(load(store, "made_up")))
    loops, differences = table.frame["Loops"].tolist(), table.frame["Δ Loops"].tolist()
    assert [*loops, differences[1]] == pytest.approx([1 / 6, 0.8, 0.6])
    # the standard error of 1, 1, 0, 0, 1, and Student's t with four degrees of freedom
    assert table.frame["Δ Loops low"][1] == pytest.approx(
        0.6 - 2.776 * np.sqrt(1.2 / 4 / 5), abs=1e-3
    )
    assert table.frame["Δ Characters"][1] == 20
    assert np.isnan(table.frame["Δ Characters low"][1]), "all pairs agree"
    assert "Empty" not in table.frame, "no text is empty"
    assert figure.rows["share"].tolist() == pytest.approx([1 / 6, 0.8])
    assert not find("degeneration").items(results), "the study has no texts"
