"""Attributions, ablations, channel scores and what experts keep: from files of a store, against
naive computations."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr, spearmanr
from synthetic import write_store
from synthetic_plans import EXPERTS, LAYERS, WIDTH
from synthetic_sums import UNUSED_EXPERT, ablations, add_statistics, scores, sums

from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.outputs import (
    attributions,
    layers,
)
from moe_lab.analysis.registry import Results, outputs
from moe_lab.study.steps import tables

TOKENS = 65000
"""Of the synthetic calibration sets."""


@pytest.fixture(scope="module")
def experts(golden: Study) -> pd.DataFrame:
    """Experts of the one pass with sums, in the layer and place of their number."""
    return golden.experts[golden.experts["calibration"] == "pocket_general"]


@pytest.fixture(scope="module")
def budgets(golden_results: Results) -> pd.DataFrame:
    [comparison] = golden_results.comparisons
    return layers.layer_budgets(golden_results.study, comparison)


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (2, 31), (3, 5)])
def test_numbers_of_experts_are_those_of_the_sums(
    layer: int, expert: int, experts: pd.DataFrame
) -> None:
    row = experts.set_index(["layer", "expert"]).loc[(layer, expert)]
    of_layer = sums()[layer]
    count = of_layer["tokens"][expert]
    of_expert = of_layer["sums_model"][expert]
    assert row["gate"] == pytest.approx(of_expert[1][0] / count)
    assert row["norm"] == pytest.approx(of_expert[0][1] / count)
    assert row["first"] == pytest.approx(of_layer["ala_first"][expert] / TOKENS)
    assert row["second"] == pytest.approx(of_layer["ala_second"][expert] / TOKENS)
    assert row["ablation"] == pytest.approx(ablations()[layer]["ablation"][expert])
    square = sum(of_layer["channel_square"][expert]) / count / WIDTH
    assert row["size"] == pytest.approx(square**0.5)


def test_experts_without_tokens_have_no_means(experts: pd.DataFrame) -> None:
    assert len(experts) == LAYERS * EXPERTS
    silent = experts[experts["expert"] == UNUSED_EXPERT]
    assert silent[["gate", "norm", "size"]].isna().all(axis=None)
    assert (silent["first"] == 0).all()


def test_layer_losses_are_means_over_tokens(golden: Study) -> None:
    losses = [(70 + layer) / TOKENS for layer in range(LAYERS)]
    assert golden.layer_losses["loss"].tolist() == pytest.approx(losses)


def test_agreement_is_counted_over_all_and_inside_layers(
    golden_results: Results, experts: pd.DataFrame
) -> None:
    table = attributions.agreement_table(golden_results)
    row = table.frame.set_index("Estimate").loc["Mean router weight"]
    seen = experts.dropna(subset=["gate", "ablation"])
    gates = list(seen["gate"])
    losses = list(seen["ablation"])
    assert row["Pearson, model loss"] == pytest.approx(pearsonr(gates, losses).statistic)
    assert row["Rank, model loss"] == pytest.approx(spearmanr(gates, losses).statistic)
    inside = 0.0
    for _, layer in seen.groupby("layer"):
        inside += spearmanr(layer["gate"], layer["ablation"]).statistic
    assert row["Rank in a layer, model loss"] == pytest.approx(inside / LAYERS)


SCORES = np.array(
    [
        [8.0, 1, 1, 0],
        [3, 3, 2, 2],
    ]
)


def test_concentration_is_the_share_of_the_best_channels() -> None:
    curve = tables.concentration({4: SCORES})
    assert [row[:2] for row in curve] == [(4, 0)] * 5 + [(4, 1)] * 5
    assert [share for _, _, share, _ in curve] == pytest.approx([0, 0.25, 0.5, 0.75, 1] * 2)
    of_first = [0, 0.8, 0.9, 1, 1]
    of_second = [0, 0.3, 0.6, 0.8, 1]
    assert [held for *_, held in curve] == pytest.approx(of_first + of_second)


def test_concentration_of_zeros_is_missing() -> None:
    curve = tables.concentration({0: np.zeros((1, 2))})
    assert all(np.isnan(held) for *_, held in curve)


def test_concentration_of_many_channels_is_at_some_points() -> None:
    curve = tables.concentration({0: np.ones((5, 1000))})
    assert len(curve) == 5 * tables.POINTS


def test_coverage_is_the_share_of_retained_scores() -> None:
    retained = np.array(
        [
            [True, False, False, False],
            [True, True, True, False],
        ]
    )
    covered = pytest.approx((8 + 3 + 3 + 2) / 20)
    assert tables.budgets({4: SCORES}, {4: retained}) == [(4, covered, 0.5)]
    some_negative = {4: SCORES - 2}
    assert tables.budgets(some_negative, {4: retained}) == [(4, 1.0, 0.5)], "they count as 0"


def test_budgets_hold_what_plans_keep(golden: Study, budgets: pd.DataFrame) -> None:
    assert len(budgets) == budgets["cell"].nunique() * LAYERS > 0
    shares = golden.retained.set_index(["cell", "layer"])["share"].sort_index()
    for row in budgets.itertuples():
        counts = shares.loc[(row.cell, row.layer)] * WIDTH
        layer = scores()[row.layer]
        retained = 0.0
        for channels, count in zip(layer, counts, strict=True):
            retained += sum(sorted(channels, reverse=True)[: round(count)])
        assert row.coverage == pytest.approx(retained / layer.sum())
        assert row.kept == pytest.approx(counts.mean() / WIDTH)


def test_losses_are_smoothed_as_the_plan_smooths_them(golden: Study, budgets: pd.DataFrame) -> None:
    """By the square root, or not at all."""
    losses = np.arange(70, 70 + LAYERS)
    roots = losses**0.5
    by_root = budgets.assign(smoothing="sqrt")
    for row in layers.budget_strips(by_root, golden.layer_losses).itertuples():
        assert row.loss == pytest.approx(losses[row.layer] / losses.mean())
        assert row.smoothed == pytest.approx(roots[row.layer] / roots.mean())
    unsmoothed = budgets.assign(smoothing="none")
    plain = layers.budget_strips(unsmoothed, golden.layer_losses)
    assert plain["smoothed"].tolist() == pytest.approx(plain["loss"].tolist())


def test_quartiles_of_router_entropies_are_those_of_their_histogram(golden: Study) -> None:
    """An eighth of the tokens in each of eight bins has its quartiles at a quarter, a half and so
    on."""
    even = pd.DataFrame({"entropy": [step / 8 for step in range(1, 9)], "tokens": 5, "layer": 0})
    row = layers.quartiles(even.assign(model="m", calibration="c")).iloc[0]
    assert row[["low", "y", "high"]].tolist() == pytest.approx([0.25, 0.5, 0.75])
    histogram = golden.router_entropies.query("layer == 2").sort_values("entropy")
    assert histogram["tokens"].tolist() == sums()[2]["router_entropy"].tolist()


def test_bars_of_experts_have_scores_and_attributions() -> None:
    """Against the scores themselves, ten channels of a hundred at a time."""
    values = np.square(np.random.default_rng(1).integers(0, 9, (2, 100)).astype(float))
    columns = ["layer", "expert", "channels", "score"]
    curves = pd.DataFrame(tables.concentration({3: values}), columns=columns)
    numbers = pd.DataFrame({"layer": [3, 3, 4], "expert": [0, 1, 0]})
    shares = numbers.assign(share=[0.25, 0.75, 1.0])
    experts = numbers.assign(first=[2.0, -1.0, 9.0])
    bars = attributions.expert_bars(curves, shares, experts)
    for expert in (0, 1):
        tenths = np.sort(values[expert])[::-1].reshape(10, 10).sum(axis=1)
        expected = tenths / tenths.sum()
        rows = bars[bars["expert"] == expert]
        assert rows["piece"].tolist() == list(range(10))
        assert rows["score"].tolist() == pytest.approx(expected)
    once = bars[bars["piece"] == 0]
    assert once["kept"].tolist() == [0.25, 0.75]
    assert once["attribution"].tolist() == [1.0, 0.0], "negative ones are drawn at 0"
    assert bars[["kept", "attribution"]].notna().sum().tolist() == [2, 2]


def test_missing_sums_are_no_gap(results: Results) -> None:
    chapter = [name for name, output in outputs().items() if output.chapter == "attribution"]
    for name in ("aimer.table4", "coverage.table1", *chapter):
        assert outputs()[name].items(results) == []
    assert not results.study.gaps


def test_damaged_sums_are_a_gap(tmp_path: Path) -> None:
    store = write_store(
        tmp_path / "store",
        criteria=("snip",),
        allocations=("coverage",),
        calibrations=("pocket_general",),
        tasks=(),
    )
    add_statistics(store, "made_up", "coverage")
    for path in store.glob("statistics/*/experts.parquet"):
        path.write_bytes(b"not a table")
    study = load(store, "made_up")
    assert study.experts.empty
    assert [gap.reason for gap in study.gaps] == ["experts.parquet is damaged"]
