from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic_plans
from matplotlib.colors import to_hex
from scipy.stats import binomtest, norm
from synthetic import write_store

from analysis import __main__
from analysis.diff import figures, plans
from analysis.diff.report import diff
from analysis.diff.sides import beside, side
from analysis.diff.tables import kept_table, plan_table, score_table
from analysis.load.study import load
from analysis.render.table import Table
from analysis.stats.uncertainty import holm
from moe_lab.errors import UserError

AXES = {"calibration": "pocket_code", "ratio": 0.5, "allocation": "global"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Studies: both (two criteria, two sets), code (one of the sets, one criterion more), man, seer, short."""
    root = tmp_path_factory.mktemp("diff") / "store"
    few = {"items": 40, "ratios": (0.5,), "overlap": False, "tasks": ("gsm8k", "wildbench", "mmlu")}
    write_store(root, name="both", criteria=("frequency", "heapr"), calibrations=("pocket_code", "pocket_math"), **few)
    write_store(root, name="code", criteria=("frequency", "heapr", "man"), calibrations=("pocket_code",), **few)
    for name in ("man", "seer"):
        write_store(root, name=name, criteria=(name,), calibrations=("pocket_code",), allocations=("global",), **few)
    return root


def masks(axes: dict) -> np.ndarray:
    return synthetic_plans.channel_masks(axes)


def test_experts_and_channels_in_and_out_are_those_of_a_naive_count() -> None:
    both = [{**AXES, "criterion": name} for name in ("heapr", "camera")]
    found = plans.changes(*(plans.layers(synthetic_plans.plan(axes)) for axes in both))
    one, other = map(masks, both)
    assert found["channels_both"].tolist() == (one & other).sum(axis=(1, 2)).tolist()
    assert found["channels_out"].tolist() == (one & ~other).sum(axis=(1, 2)).tolist()
    assert found["channels_in"].tolist() == (~one & other).sum(axis=(1, 2)).tolist()
    whole = {**AXES, "criterion": "man"}
    mixed = plans.changes(plans.layers(synthetic_plans.plan(both[0])), plans.layers(synthetic_plans.plan(whole)))
    for row, (layer, removed) in zip(mixed.to_dict("records"), enumerate(synthetic_plans.removed(whole)), strict=True):
        assert row["layer"] == layer and row["out"] == tuple(range(removed)) and row["in"] == ()
        full = np.zeros((32, 64), bool)
        full[removed:] = True
        assert row["channels_in"] == (full & ~one[layer]).sum() and row["channels_both"] == (full & one[layer]).sum()
        assert row["jaccard"] == pytest.approx((32 - removed) / 32) == pytest.approx(row["chance"])


def test_plans_that_replace_other_experts_or_by_others_differ() -> None:
    def layers(*masks: str, **replaced: Any) -> plans.Layers:
        about = {"experts": 4, "keep": [0, 1, 2, 3], "width": 4, "channels": list(masks), **replaced}
        return plans.layers({"layers": {"0": about}})

    first = layers("0f", "0f", "00", "00", merged={"0": {"0": 0.5, "2": 0.25, "3": 0.25}})
    other = layers("00", "00", "0f", "0f", merged={"2": {"0": 0.5, "1": 0.25, "2": 0.25}})
    [row] = plans.changes(first, other).to_dict("records")
    assert (row["out"], row["in"], row["jaccard"]) == ((0, 1), (2, 3), 0)
    regrouped = layers("0f", "0f", "00", "00", merged={"1": {"1": 0.5, "2": 0.25, "3": 0.25}})
    [row] = plans.changes(first, regrouped).to_dict("records")
    assert (row["jaccard"], row["channels_out"], row["replaced"]) == (1, 0, False)
    assert plans.changes(first, first)["replaced"].tolist() == [True]
    assert plan_table(first, regrouped).frame["Replaced alike"].tolist() == ["no"]


def test_chance_is_what_random_plans_come_to() -> None:
    first = {0: plans.LayerPlan(1000, dict.fromkeys(range(500)), None)}
    kept = np.random.default_rng(0).choice(1000, 250, replace=False).tolist()
    [row] = plans.changes(first, {0: plans.LayerPlan(1000, dict.fromkeys(kept), None)}).to_dict("records")
    assert row["jaccard"] == pytest.approx(row["chance"], abs=0.03) and row["chance"] == pytest.approx(125 / 625)


def test_scores_are_paired_and_corrected(store: Path) -> None:
    sides = beside(side("man", store), side("seer", store))
    assert sides.differing == {"criterion": ("man", "seer")} and len(sides.pairs) == 2 and sides.alone == ((), ())
    table = score_table(sides, benchmarks=True, name="t").frame
    assert set(table["Criterion"]) == {"Unpruned", "MAN → SEER"}
    assert set(table.loc[table["Criterion"] == "Unpruned", "Verdict"]) == {"same"}
    row = table[(table["Criterion"] != "Unpruned") & (table["Of"] == "GSM8K")].iloc[0]
    outcomes = []
    for study in (sides.first, sides.second):
        pruned = study.cells.index[study.cells["criterion"] != "none"][0]
        samples = study.samples[(study.samples["cell"] == pruned) & (study.samples["benchmark"] == "gsm8k")]
        outcomes.append(samples.sort_values("item")["outcome"].to_numpy())
    lost, won = ((outcomes[at] > outcomes[1 - at]).sum() for at in (0, 1))
    assert row["Test"] == "paired" and row["B − A"] == pytest.approx(outcomes[1].mean() - outcomes[0].mean())
    assert row["p"] == pytest.approx(binomtest(int(min(lost, won)), int(lost + won)).pvalue)
    assert np.allclose(table["p (Holm)"], holm(table["p"].to_numpy(float)), equal_nan=True)
    assert table["p"].notna().sum() == 3  # answers that are the same are not tested


def test_other_items_are_compared_by_their_standard_errors(store: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(store, tmp_path / "store"))
    for file in (other / "evaluate").glob("*gsm8k*/samples.parquet"):
        pd.read_parquet(file).assign(item=lambda frame: "other/" + frame["item"]).to_parquet(file, index=False)
    sides = beside(side("man", store), side(f"{other}:seer", store))
    table = score_table(sides, benchmarks=True, name="t")
    position = table.frame.index[(table.frame["Criterion"] != "Unpruned") & (table.frame["Of"] == "GSM8K")][0]
    row = table.frame.loc[position]
    study = sides.first
    errors = [
        found.results.query("benchmark == 'gsm8k'").set_index("cell")["stderr"].iloc[-1]
        for found in (study, sides.second)
    ]
    z = row["B − A"] / np.hypot(*errors)
    assert row["Test"] == "unpaired" and row["p"] == pytest.approx(2 * norm.sf(abs(z)))
    assert table.high.loc[position, "B − A"] == pytest.approx(row["B − A"] + 1.96 * np.hypot(*errors), abs=1e-4)


def test_cells_without_a_counterpart_are_named(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["diff", "both", "code", f"store={store}", f"out={store / 'out'}"]) == 1
    said = capsys.readouterr().out
    assert "3 cells are on both sides." in said and "0 of 2 plans differ." in said
    assert "2 cells are in A only: pocket_olmoe frequency pocket_math 0.5" in said
    assert "1 cells" not in said and "One cell is in B only: pocket_olmoe man pocket_code 0.5" in said
    tables = store / "out" / "tables"
    assert (tables / "diff.averages.csv").exists() and (tables / "diff.settings.html").exists()
    assert "One cell is in B only" in (store / "out" / "diff.html").read_text(encoding="utf-8")


def test_the_page_shows_scores_plans_and_settings(store: Path) -> None:
    """One pair of plans: its experts one by one, its average with an interval; nothing is fetched from elsewhere."""
    out = store / "page"
    assert __main__.main(["diff", "man", "seer", f"store={store}", f"out={out}", "format=pdf"]) == 0
    page = html.unescape((out / "diff.html").read_text(encoding="utf-8"))
    linked = set(re.findall(r'href="figures/([^"]+)"', page))
    assert {path.name for path in (out / "figures").iterdir()} == linked
    assert linked == {f"diff.{name}.pdf" for name in ("averages", "experts")}
    assert set(re.findall(r'<section id="(\w+)"', page)) == {"averages", "kept", "benchmarks", "settings"}
    assert page.count("data:text/csv") == 4 and "They are compared across criterion: man in A, seer in B." in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|@import""", page)


def test_squares_of_experts_say_who_keeps_them() -> None:
    whole = plans.LayerPlan(4, {0: None, 1: None}, None)
    other = plans.LayerPlan(4, {1: None, 2: None}, None)
    shares = [figures._shares(plan) for plan in (whole, other)]
    drawn = figures._shades(*shares)
    wanted = [figures.ONLY_A, figures.BOTH, figures.ONLY_B]
    assert [to_hex(shade) for shade in drawn[:3]] == wanted and drawn[3, 3] == 0
    channels = plans.LayerPlan(4, {0: 0b0011, 3: 0b1111}, 4)
    assert figures._shares(channels).tolist() == [0.5, 0, 0, 1]
    [(_, by_layer)] = figures._changed([("x", {0: whole, 5: whole}, {0: other, 5: whole})])
    assert by_layer == {0: 2 / 3, 5: 0}


def test_plans_that_differ_are_listed_layer_by_layer(store: Path, tmp_path: Path) -> None:
    files = []
    for name in ("man", "seer"):
        study = load(store, name)
        folder = study.cells["plan_folder"].dropna().iloc[0]
        files.append(store / folder)
    found = diff([str(files[0]), str(files[1] / "plan.json")], store)
    [table] = [item for item in found.outputs if isinstance(item, Table)]
    assert list(table.frame["Layer"]) == ["0", "1", "2", "3"] and "channels" not in " ".join(table.frame)
    kept = kept_table(beside(side("man", store), side("seer", store)))
    out = [len(words.split()) for words in kept.frame["Experts only in A"]]
    assert out == list(kept.frame["Only in A"]) and kept.frame["Only in A"].sum() + kept.frame["Only in B"].sum() > 0
    changed = table.frame[table.frame["Only in A"] + table.frame["Only in B"] > 0]
    assert list(kept.frame["Experts only in B"]) == list(changed["Experts only in B"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["man"], "1 given"),
        (["man", "sear"], "did you mean seer"),
        (["man", "PLAN"], "the other is none"),
        (["BROKEN", "PLAN"], "cannot be read as a plan"),
        (["NARROW", "PLAN"], "layer 0 has 8 experts in one and 32 in the other"),
        (["SHALLOW", "PLAN"], "layer 1 is in one of them only"),
        (["man", "nowhere:seer"], "no study of store"),
    ],
)
def test_mistakes_are_sentences(
    store: Path, tmp_path: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made: dict[str, Callable[[], object]] = {
        "PLAN": lambda: synthetic_plans.plan({**AXES, "criterion": "man"}),
        "BROKEN": lambda: {"layers": 3},
        "NARROW": lambda: {"layers": {str(i): {"experts": 8, "keep": [0]} for i in range(4)}},
        "SHALLOW": lambda: {"layers": {"0": {"experts": 32, "keep": [0]}}},
    }
    for name, make in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(make()))
    given = [str(tmp_path / f"{word}.json") if word in made else word for word in words]
    assert __main__.main(["diff", *given, f"store={store}"]) == 2
    assert sentence in capsys.readouterr().err
    with pytest.raises(UserError):
        diff(given, store)
