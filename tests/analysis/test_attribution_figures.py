"""Attributions, ablations, channel scores and what steps took: from files of a store, against naive computations."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from handmade import results_of
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from synthetic import record_path, write_store
from synthetic_plans import EXPERTS, LAYERS, WIDTH
from synthetic_sums import SILENT, ablations, add, scores, sums, weights

from analysis.load.study import Study, load
from analysis.outputs import (
    channel_scores,
    criteria,
    layer_budgets,
    profile,
    raw_statistics,
    score_rows,
    speed_and_memory,
)
from analysis.registry import Results, outputs
from analysis.render.style import Figure
from moe_lab.study.steps import tables

pytestmark = pytest.mark.slow

TOKENS = 65000
"""Of the synthetic calibration sets."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of channel scores under two budgets, of which one rests on an ablation; losses at three ratios."""
    root = write_store(
        tmp_path_factory.mktemp("attribution") / "store",
        criteria=("channel_activation", "snip"), allocations=("coverage", "coverage, prior loss"),
        ratios=(0.25, 0.5, 0.75), calibrations=("pocket_general",), tasks=("gsm8k", "rte"), items=6, overlap=False,
    )  # fmt: skip
    add(root, "made_up", "coverage, prior loss", reads=("snip",))
    document = json.loads(record_path(root).read_text())
    for entry in document["cells"]:
        path = root / entry["evaluate"]["rte"] / "result.json"
        found = json.loads(path.read_text())
        found["results"][0] |= {"metric": "perplexity", "score": 9.0 + 4 * entry["cell"]["ratio"], "stderr": 0.2}
        path.write_text(json.dumps(found))
    return root


@pytest.fixture(scope="module")
def study(store: Path) -> Study:
    return load(store, "made_up")


ATTRIBUTIONS = [name for name, output in outputs().items() if output.chapter == "attribution"]


def test_numbers_of_experts_are_those_of_the_sums(study: Study) -> None:
    found = study.experts.set_index(["layer", "expert"])
    assert len(found) == LAYERS * EXPERTS and set(found["calibration"]) == {"pocket_general"}
    for layer, expert in ((0, 0), (2, 31), (3, 5)):
        one, row = sums()[layer], found.loc[(layer, expert)]
        count = one["tokens"][expert]
        assert row["gate"] == pytest.approx(one["sums_model"][expert][1][0] / count)
        assert row["norm"] == pytest.approx(one["sums_model"][expert][0][1] / count)
        assert row["first"] == pytest.approx(one["ala_first"][expert] / TOKENS)
        assert row["second"] == pytest.approx(one["ala_second"][expert] / TOKENS)
        assert row["ablation"] == pytest.approx(ablations()[layer]["ablation"][expert])
        assert row["size"] == pytest.approx((sum(one["channel_square"][expert]) / count / WIDTH) ** 0.5)
        assert row["largest"] == max(one["channel_max"][expert])
    silent = found.xs(SILENT, level="expert")
    assert silent[["gate", "norm", "size", "largest"]].isna().all(axis=None) and (silent["first"] == 0).all()
    losses = study.layer_losses
    assert losses["loss"].tolist() == pytest.approx([(70 + layer) / TOKENS for layer in range(LAYERS)])


def test_concentration_and_coverage_against_loops() -> None:
    values = np.array([[8.0, 1, 1, 0], [3, 3, 2, 2]])
    curve = tables.concentration({4: values})
    assert [place[:2] for place in curve] == [(4, 0)] * 5 + [(4, 1)] * 5
    assert [share for _, _, share, _ in curve] == pytest.approx([0, 0.25, 0.5, 0.75, 1] * 2)
    assert [held for *_, held in curve] == pytest.approx([0, 0.8, 0.9, 1, 1, 0, 0.3, 0.6, 0.8, 1])
    kept = np.array([[True, False, False, False], [True, True, True, False]])
    assert tables.budgets({4: values}, {4: kept}) == [(4, pytest.approx((8 + 3 + 3 + 2) / 20), 0.5)]
    assert tables.budgets({4: values - 2}, {4: kept}) == [(4, 1.0, 0.5)], "negative scores count as 0"
    assert all(np.isnan(held) for *_, held in tables.concentration({0: np.zeros((1, 2))}))
    assert len(tables.concentration({0: np.ones((5, 1000))})) == 5 * tables.POINTS


def test_budgets_hold_what_plans_keep(study: Study) -> None:
    [comparison] = Results(study).comparisons
    found = layer_budgets.layer_budgets(study, comparison)
    assert found["cell"].nunique() == 4 and len(found) == 4 * LAYERS
    for row in found.itertuples():
        kept = study.kept[(study.kept["cell"] == row.cell) & (study.kept["layer"] == row.layer)]["share"] * WIDTH
        layer = scores()[row.layer]
        best = sum(sum(sorted(layer[at], reverse=True)[: round(count)]) for at, count in enumerate(kept))
        assert row.coverage == pytest.approx(best / layer.sum()) and row.kept == pytest.approx(kept.mean() / WIDTH)


def test_time_is_that_of_all_steps_behind(study: Study) -> None:
    results = Results(study)
    [scoring] = outputs()["aimer.table4"].items(results)
    row = scoring.frame.iloc[0]
    assert (
        len(scoring.frame) == 2
        and row["Criterion"] == "Channel activation"
        and row["Reads"] == "statistics"
        and "imagined" in scoring.caption
    )
    assert (
        row["Scoring time (s)"] == 2.75 and row["Of these, the scores (s)"] == 0.25 and row["Peak memory (MiB)"] == 300
    )
    [table] = outputs()["coverage.table1"].items(results)
    frame = table.frame[table.frame["Criterion"] == "Channel activation"].set_index("Allocation")
    assert frame["Total (s)"].tolist() == [3.25, 43.25]
    assert frame["Ablation (s)"].tolist() == pytest.approx([np.nan, 40], nan_ok=True)


def test_every_output_of_the_chapter_is_made_once_and_says_what_it_rests_on(study: Study) -> None:
    made = [output for name in ATTRIBUTIONS for output in outputs()[name].items(Results(study))]
    figures = {figure.name: figure for figure in made if isinstance(figure, Figure)}
    numbered = {f"coverage.fig{number}" for number in (2, 3, 4, 7, *range(11, 17))}
    named = {"attributions_and_ablation", "attributions_by_depth", "activations_by_depth", "attribution_by_layer"}
    assert set(figures) == {*numbered, *named, "coverage.fig4.loss"}
    assert all("seed 42" in figure.caption and "65,000 " in figure.caption for figure in figures.values())
    points = figures["attributions_and_ablation"].drawing.axes[1].get_lines()
    assert sum(len(line.get_xdata()) for line in points if line.get_marker() == "o") == LAYERS * EXPERTS
    lines = {line.get_label(): line.get_ydata() for line in figures["coverage.fig12"].drawing.axes[0].get_lines()}
    roots = [(70 + layer) ** 0.5 for layer in range(LAYERS)]
    assert list(lines["sqrt"]) == pytest.approx([root / sum(roots) * LAYERS for root in roots])
    by_score = figures["coverage.fig16"].drawing.axes
    assert [axes.get_title(loc="left") for axes in by_score] == ["(a) Channel activation", "(b) SNIP"]
    bars = figures["attribution_by_layer"].drawing.axes[0].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(LAYERS)


def test_experts_that_routers_rank_highest(study: Study) -> None:
    """Fig. 2: as many as it shows, highest first, each with its own bar; orange where the loss falls."""
    places = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    for measure in ("gate", "tokens"):
        values = {}
        for layer, expert in places:
            one = sums()[layer]
            count = one["tokens"][expert]
            if count:
                values[layer, expert] = one["sums_model"][expert][1][0] / count if measure == "gate" else count
        expected = sorted(values, key=values.__getitem__, reverse=True)[:50]
        top = raw_statistics.top_experts(study.experts, measure)
        assert top[measure].tolist() == pytest.approx([values[place] for place in expected])
        assert top["ablation"].tolist() == [ablations()[row.layer]["ablation"][row.expert] for row in top.itertuples()]
    [figure] = outputs()["coverage.fig2"].items(Results(study))
    bars = figure.drawing.axes[0].patches
    top = raw_statistics.top_experts(study.experts, "gate")
    assert [bar.get_height() for bar in bars] == pytest.approx(top["ablation"].tolist())
    fallen = [bar for bar, loss in zip(bars, top["ablation"], strict=True) if loss < 0]
    assert fallen and {to_hex(bar.get_facecolor()) for bar in fallen} == {raw_statistics.HARM}


def naive_spread(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def test_raw_statistics_are_means_and_deviations_over_channels(study: Study) -> None:
    """Fig. 3: of an expert (b), and over all experts of a layer (a)."""
    found = study.raw_statistics
    assert set(found["statistic"]) == {"weight", "activation", "gradient"}
    for statistic, name in (("activation", "channel_square"), ("gradient", "channel_gradient_square")):
        layer, everything = 2, []
        own = found[(found["statistic"] == statistic) & (found["layer"] == layer)].set_index("expert")
        assert SILENT not in own.index and len(own) == EXPERTS - 1
        for expert in own.index:
            count = sums()[layer]["tokens"][expert]
            channels = [(square / count) ** 0.5 for square in sums()[layer][name][expert]]
            assert (own["mean"][expert], own["std"][expert]) == pytest.approx(naive_spread(channels))
            assert own["ablation"][expert] == ablations()[layer]["ablation"][expert]
            everything += channels
        row = raw_statistics.by_layer(found[found["statistic"] == statistic]).set_index("layer").loc[layer]
        assert (row["mean"], row["std"]) == pytest.approx(naive_spread(everything))
        assert row["ablation"] == pytest.approx(own["ablation"].mean())
    one = found[(found["statistic"] == "weight") & (found["layer"] == 1) & (found["expert"] == 4)].iloc[0]
    mean, square = (weights()[1][name][4] / 64 for name in ("abs_sum", "square_sum"))
    assert (one["mean"], one["std"], one["count"]) == pytest.approx((mean, (square - mean**2) ** 0.5, 64))


def test_losses_of_outputs_are_drawn_against_what_layers_keep(study: Study) -> None:
    """Fig. 4 (b), of the profiles: ratio^2 (layer + 1) / 8 in this store."""
    [comparison] = Results(study).comparisons
    found = channel_scores.output_losses(study, comparison)
    assert found["label"].nunique() == 4 and set(found["layer"]) == {1, 2, 3}
    for row in found.itertuples():
        ratio = study.cells.loc[row.cell, "ratio"]
        kept = study.kept[(study.kept["cell"] == row.cell) & (study.kept["layer"] == row.layer)]["share"]
        assert row.loss == ratio**2 * (row.layer + 1) / 8 and row.kept == pytest.approx(sum(kept) / EXPERTS)


def test_losses_smoothed_and_raw_stand_over_what_is_kept(study: Study) -> None:
    """Figs. 7 and 11; the plans of this store smooth by the square root."""
    [comparison] = Results(study).comparisons
    budgets = layer_budgets.layer_budgets(study, comparison)
    strips = layer_budgets.budget_strips(budgets, study.layer_losses)
    mean = sum(70 + layer for layer in range(LAYERS)) / LAYERS
    roots = [(70 + layer) ** 0.5 for layer in range(LAYERS)]
    for row in strips.itertuples():
        assert row.loss == pytest.approx((70 + row.layer) / mean)
        assert row.smoothed == pytest.approx(roots[row.layer] / sum(roots) * LAYERS)
    clipped = layer_budgets.budget_strips(budgets.assign(smoothing="none"), study.layer_losses)
    assert clipped["smoothed"].tolist() == pytest.approx(clipped["loss"].tolist())
    [figure] = outputs()["coverage.fig11"].items(Results(study))
    words = [text.get_text() for text in figure.drawing.axes[0].texts]
    first = strips[strips["cell"] == strips["cell"].iloc[0]]
    assert words[-LAYERS:] == [f"{share * 100:.0f} %" for share in first["kept"]]
    assert figure.drawing.axes[0].get_yticklabels()[1].get_text() == "smoothed loss"


def test_quantiles_of_router_entropies_are_those_of_their_histogram(study: Study) -> None:
    """Fig. 13: an eighth of the tokens in each of eight bins has its quartiles at a quarter, a half and so on."""
    even = pd.DataFrame({"entropy": [at / 8 for at in range(1, 9)], "tokens": 5, "layer": 0})
    row = profile.quantiles(even.assign(model="m", calibration="c")).iloc[0]
    assert [row[share] for share in profile.QUANTILES] == pytest.approx(profile.QUANTILES)
    found = study.router_entropies
    counts = found[found["layer"] == 2].sort_values("entropy")["tokens"].tolist()
    assert counts == sums()[2]["router_entropy"].tolist()
    tokens = [(at + 0.5) / 50 for at, count in enumerate(counts) for _ in range(int(count))]
    median = profile.quantiles(found).set_index("layer").loc[2, 0.5]
    assert median == pytest.approx(tokens[len(tokens) // 2], abs=0.02)


def test_activations_are_told_apart_by_layer_and_text(study: Study) -> None:
    """Fig. 14."""
    known = study.experts.dropna(subset=["size"])
    twice = pd.concat([known, known.assign(calibration="pocket_code", size=1.0)])
    first, second = raw_statistics.activations_of(twice, 2, ["pocket_general", "pocket_code"])
    one = sums()[2]
    expected = [
        (sum(one["channel_square"][at]) / one["tokens"][at] / WIDTH) ** 0.5 for at in range(EXPERTS) if at != SILENT
    ]
    assert first == pytest.approx(expected) and second == [1.0] * (EXPERTS - 1)
    assert score_rows.shallow_middle_deep([5, 1, 3, 4, 1]) == [1, 3, 5]
    assert score_rows.shallow_middle_deep([2]) == [2]


def test_bars_of_experts_hold_their_scores_what_is_kept_and_their_attribution(study: Study) -> None:
    """Figs. 15 and 16, against the scores themselves, ten channels of a hundred at a time."""
    values = np.square(np.random.default_rng(1).integers(0, 9, (2, 100)).astype(float))
    columns = ["layer", "expert", "channels", "score"]
    curves = pd.DataFrame(tables.concentration({3: values}), columns=columns)
    kept = pd.DataFrame({"layer": [3, 3, 4], "expert": [0, 1, 0], "share": [0.25, 0.75, 1.0]})
    experts = pd.DataFrame({"layer": [3, 3, 4], "expert": [0, 1, 0], "first": [2.0, -1.0, 9.0]})
    stacks = channel_scores.expert_stacks(curves, kept, experts, 3)
    for expert in (0, 1):
        ordered = sorted(values[expert], reverse=True)
        pieces = [sum(ordered[10 * at : 10 * at + 10]) / sum(ordered) for at in range(10)]
        assert stacks.loc[expert, list(range(10))].tolist() == pytest.approx(pieces)
    assert stacks["kept"].tolist() == [0.25, 0.75] and stacks["attribution"].tolist() == [1.0, -0.5]
    [figure] = outputs()["coverage.fig15"].items(Results(study))
    axes = figure.drawing.axes[0]
    assert [one.get_title(loc="left") for one in figure.drawing.axes] == ["Layer 0", "Layer 1", "Layer 3"]
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)][-EXPERTS:]
    assert tops == pytest.approx([1.0] * EXPERTS), "highest scores are on top"


def test_a_store_of_results_alone_lacks_these_without_a_gap(small: Path, store: Path, tmp_path: Path) -> None:
    results = Results(load(small, "made_up"))
    others = ("aimer.table4", "coverage.table1", *ATTRIBUTIONS)
    assert [outputs()[name].items(results) for name in others] == [[]] * len(others) and not results.study.gaps
    damaged = Path(shutil.copytree(store, tmp_path / "store"))
    for path in damaged.glob("statistics/*/experts.parquet"):
        path.write_bytes(b"not a table")
    study = load(damaged, "made_up")
    assert study.experts.empty and [gap.what for gap in study.gaps] == ["experts.parquet is damaged"]


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("frequency", {"Text", "Routing"}),
        ("seer", {"Text", "Routing"}),
        ("ean", {"Text", "Activations"}),
        ("reap", {"Text", "Activations", "Routing"}),
        ("s_family(alpha=0,b=0,beta=2)", {"Text", "Activations"}),
        ("aimer", {"Weights"}),
        ("random", set()),
        ("camera", {"Text", "Activations", "Routing", "Weights"}),
        ("heapr", {"Text", "Activations", "Routing", "Gradients"}),
        ("snip", {"Text", "Gradients", "Weights"}),
    ],
)
def test_what_criteria_read_is_found_out(word: str, read: set[str]) -> None:
    assert {signal for signal, found in criteria.signals(word).items() if found} == read


def test_architectures_and_formulas_follow_from_facts_and_the_registry(study: Study) -> None:
    facts = {**study.models["pocket_olmoe"], "decoder_layers": LAYERS + 1, "shared_width": 2 * WIDTH}
    study = replace(study, models={"m": facts})
    row = speed_and_memory.architecture_table(results_of(study), "a").frame.iloc[0]
    one = facts["layers"]["0"]["expert_parameters"]
    assert row["Active (M)"] == pytest.approx((facts["parameters"] - LAYERS * (EXPERTS - 4) * one) / 1e6)
    assert (row["Dense layers"], row["Shared experts"], row["Experts"], row["Top-k"]) == (1, 2, EXPERTS, 4)
    formula = criteria.formula_table(results_of(study), "f").frame.iloc[0]
    assert formula["Formula"] == "sqrt(sum_t phi^2)." and formula["Scores"] == "channel"
