"""Attributions, ablations, channel scores and what steps took: from files of a store, against naive computations."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade import results_of
from PIL import Image
from synthetic import write_store
from synthetic_plans import EXPERTS, LAYERS, WIDTH
from synthetic_sums import SILENT, ablations, add, scores, sums

from analysis.load import attributions as expert_frames
from analysis.load.attributions import layer_losses
from analysis.load.study import Study, load
from analysis.outputs import criteria, layer_budgets, models
from analysis.registry import outputs
from analysis.render.style import Figure
from analysis.results import Results
from moe_lab.study.kinds import tables

TOKENS = 65000
"""Of the synthetic calibration sets."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One set of channel scores under two budgets, of which one rests on an ablation; losses at three ratios."""
    root = write_store(
        tmp_path_factory.mktemp("attribution") / "store",
        criteria=("channel_activation",), allocations=("coverage", "coverage, prior loss"), ratios=(0.25, 0.5, 0.75),
        calibrations=("pocket_general",), tasks=("gsm8k", "rte"), items=6, overlap=False,
    )  # fmt: skip
    add(root, "made_up", "coverage, prior loss")
    document = json.loads((root / "studies" / "made_up.json").read_text())
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
    losses = layer_losses(study)
    assert losses["loss"].tolist() == pytest.approx([(70 + layer) / TOKENS for layer in range(LAYERS)])


def test_concentration_and_coverage_against_loops() -> None:
    values = np.array([[8.0, 1, 1, 0], [3, 3, 2, 2]])
    curve = tables.concentration({4: values})
    assert [layer for layer, _, _ in curve] == [4] * 9
    assert [share for _, share, _ in curve] == pytest.approx([at / 8 for at in range(9)])
    assert [held for _, _, held in curve] == pytest.approx([0, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 1, 1])
    kept = np.array([[True, False, False, False], [True, True, True, False]])
    assert tables.budgets({4: values}, {4: kept}) == [(4, pytest.approx((8 + 3 + 3 + 2) / 20), 0.5)]
    assert tables.budgets({4: values - 2}, {4: kept}) == [(4, 1.0, 0.5)], "negative scores count as 0"
    assert all(np.isnan(held) for _, _, held in tables.concentration({0: np.zeros((1, 2))}))
    assert len(tables.concentration({0: np.ones((5, 1000))})) == tables.POINTS


def test_budgets_hold_what_plans_keep(study: Study) -> None:
    [comparison] = Results(study).comparisons
    found = layer_budgets.layer_budgets(study, comparison)
    assert found["cell"].nunique() == 2 and len(found) == 2 * LAYERS
    for row in found.itertuples():
        kept = study.kept[(study.kept["cell"] == row.cell) & (study.kept["layer"] == row.layer)]["share"] * WIDTH
        layer = scores()[row.layer]
        best = sum(sum(sorted(layer[at], reverse=True)[: round(count)]) for at, count in enumerate(kept))
        assert row.coverage == pytest.approx(best / layer.sum()) and row.kept == pytest.approx(kept.mean() / WIDTH)


def test_time_is_that_of_all_steps_behind(study: Study) -> None:
    results = Results(study)
    [scoring] = outputs()["aimer.table4"].items(results)
    row = scoring.frame.iloc[0]
    assert len(scoring.frame) == 1 and row["Reads"] == "statistics" and "imagined" in scoring.caption
    assert (
        row["Scoring time (s)"] == 2.75 and row["Of these, the scores (s)"] == 0.25 and row["Peak memory (MiB)"] == 300
    )
    [table] = outputs()["coverage.table1"].items(results)
    frame = table.frame.set_index("Allocation")
    assert frame["Total (s)"].tolist() == [3.25, 43.25]
    assert frame["Ablation (s)"].tolist() == pytest.approx([np.nan, 40], nan_ok=True)


@pytest.mark.filterwarnings("error:constrained_layout")
def test_every_figure_is_drawn(study: Study, tmp_path: Path) -> None:
    results = Results(study)
    made = [output for name in ATTRIBUTIONS for output in outputs()[name].items(results)]
    figures = {figure.name: figure for figure in made if isinstance(figure, Figure)}
    numbered = {f"coverage.fig{number}" for number in (2, 3, 4, 7, 12, 13, 14)}
    assert set(figures) == numbered | {"coverage.fig4.loss"}
    for figure in figures.values():
        figure.drawing.savefig(tmp_path / "drawn.png", dpi=100)
        picture = Image.open(tmp_path / "drawn.png").convert("RGB")
        assert picture.width > 300 and len(picture.getcolors(2**24) or []) > 20, figure.name
        assert "seed 42" in figure.caption and "65,000 calibration tokens" in figure.caption
    points = figures["coverage.fig2"].drawing.axes[1].get_lines()
    assert sum(len(line.get_xdata()) for line in points if line.get_marker() == "o") == LAYERS * EXPERTS
    lines = {line.get_label(): line.get_ydata() for line in figures["coverage.fig12"].drawing.axes[0].get_lines()}
    roots = [(70 + layer) ** 0.5 for layer in range(LAYERS)]
    assert list(lines["sqrt"]) == pytest.approx([root / sum(roots) * LAYERS for root in roots])
    bars = figures["coverage.fig14"].drawing.axes[0].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(LAYERS)


def test_a_store_of_results_alone_lacks_these_without_a_gap(small: Path, store: Path, tmp_path: Path) -> None:
    results = Results(load(small, "made_up"))
    others = ("aimer.table4", "coverage.table1", *ATTRIBUTIONS)
    assert [outputs()[name].items(results) for name in others] == [[]] * len(others) and not results.study.gaps
    damaged = Path(shutil.copytree(store, tmp_path / "store"))
    for path in damaged.glob("statistics/*/experts.parquet"):
        path.write_bytes(b"not a table")
    study = load(damaged, "made_up")
    assert study.experts.empty and [gap.what for gap in study.gaps] == ["experts.parquet is damaged"]


def test_arrays_without_their_tables_are_a_gap_that_says_what_to_do(store: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(store, tmp_path / "store"))
    for name in expert_frames.TABLES:
        for path in old.glob(f"*/*/{name}"):
            path.unlink()
    study = load(old, "made_up")
    assert [outputs()[name].items(Results(study)) for name in ("coverage.fig3", "coverage.fig7", "coverage.fig12")] == [
        []
    ] * 3
    assert [output.name for output in outputs()["coverage.fig4"].items(Results(study))] == ["coverage.fig4.loss"]
    said = {gap.what for gap in study.gaps}
    assert {sentence.split(" ", 1)[0] for sentence in said} == set(expert_frames.TABLES) - {"ablation.parquet"}
    assert all(sentence.endswith("remove this folder and run again") for sentence in said)


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
    row = models.architecture_table(results_of(study), "a").frame.iloc[0]
    one = facts["layers"]["0"]["expert_parameters"]
    assert row["Active (M)"] == pytest.approx((facts["parameters"] - LAYERS * (EXPERTS - 4) * one) / 1e6)
    assert (row["Dense layers"], row["Shared experts"], row["Experts"], row["Top-k"]) == (1, 2, EXPERTS, 4)
    formula = criteria.formula_table(results_of(study), "f").frame.iloc[0]
    assert formula["Formula"] == "sqrt(sum_t phi^2)." and formula["Scores"] == "channel"
