"""MoE-Slimming's Table 14 against naive computations: how measures of experts agree, in themselves and in the plans
made by them, what measuring takes, and what these plans score."""

from __future__ import annotations

import json
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from synthetic import record_path, write_store
from synthetic_plans import EXPERTS, LAYERS, WIDTH, channel_masks
from synthetic_sums import add

from analysis.load.study import Study, load
from analysis.outputs import attributions
from analysis.registry import Results, make
from analysis.render.table import Table
from analysis.stats import ranks
from moe_lab.allocation.coverage import Prior

PARAMETERS = {
    "coverage": {},
    "coverage, prior ala2": {"prior": "ala2"},
    "coverage, prior loss": {"prior": "loss"},
    "coverage aligned 128": {"align": {"block": 128}},
    "coverage, prior none": {"prior": "none", "intra": "uniform"},
}
"""Allocation -> its parameters, in the plans; the last two have no other plan to be compared with."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    root = write_store(
        tmp_path_factory.mktemp("agreement") / "store",
        criteria=("channel_activation",), allocations=tuple(PARAMETERS), ratios=(0.25, 0.5),
        recoveries=("none", "nf4"), calibrations=("pocket_general",), tasks=("gsm8k", "boolq"), items=20, overlap=False,
    )  # fmt: skip
    add(root, "made_up", "coverage, prior loss")
    for entry in json.loads(record_path(root).read_text())["cells"]:
        if entry["plan"]:
            parameters = PARAMETERS[entry["cell"]["allocation"]]
            plan = root / entry["plan"] / "plan.json"
            content = json.loads(plan.read_text())
            content["provenance"] = {"allocation": {"name": "coverage", "parameters": parameters}}
            plan.write_text(json.dumps(content))
    return load(root, "made_up")


@pytest.fixture(scope="module")
def tables(study: Study) -> dict[str, Table]:
    made = make(["coverage.table14"], Results(study))["coverage.table14"]
    return {table.name: table for table in made if isinstance(table, Table)}


def naive_correlation(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    both = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return both / (sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)) ** 0.5


def naive_ranks(values: list[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def test_agreement_is_counted_over_all_experts_and_inside_layers(study: Study) -> None:
    table = attributions.agreement_table(Results(study), "t").frame.set_index("Estimate")
    seen = study.experts.dropna(subset=["gate", "ablation"])
    inside = []
    for _, layer in seen.groupby("layer"):
        inside.append(naive_correlation(naive_ranks(list(layer["gate"])), naive_ranks(list(layer["ablation"]))))
    row = table.loc["Mean router weight"]
    assert row["Pearson, model loss"] == pytest.approx(naive_correlation(list(seen["gate"]), list(seen["ablation"])))
    pooled = naive_correlation(naive_ranks(list(seen["gate"])), naive_ranks(list(seen["ablation"])))
    assert row["Rank, model loss"] == pytest.approx(pooled)
    assert row["Rank in a layer, model loss"] == pytest.approx(sum(inside) / LAYERS)
    assert table.loc["Attribution, second order", "Pearson, layer loss"] == 1
    alike = pd.DataFrame({"gate": [1.0, 1.0, 1.0], "ablation": [1.0, 2.0, 3.0]})
    assert np.isnan(ranks.correlations(alike, "gate", "ablation")["rank"]), "no order, no agreement"


def shares(study: Study, allocation: str, ratio: float) -> list[float]:
    """Share of its channels that every expert keeps, layer by layer."""
    cells = study.cells.query(f"allocation == '{allocation}' and ratio == {ratio} and recovery == 'none'")
    [cell] = [dict(row) for _, row in cells.iterrows()]
    masks = channel_masks(cell)
    return [float(masks[layer][expert].sum()) / WIDTH for layer in range(LAYERS) for expert in range(EXPERTS)]


def test_plans_by_two_measures_are_compared_where_nothing_else_differs(study: Study, tables: dict[str, Table]) -> None:
    frame = tables["coverage.table14"].frame.set_index("Estimate")
    allocations = {"first": "coverage", "second": "coverage, prior ala2", "ablation": "coverage, prior loss"}
    words = {
        "first": "Attribution, first order",
        "second": "Attribution, second order",
        "ablation": "Rise of the loss without it",
    }
    for measure, truth in (("first", "second"), ("first", "ablation"), ("second", "ablation"), ("ablation", "second")):
        pairs = [
            naive_correlation(shares(study, allocations[measure], ratio), shares(study, allocations[truth], ratio))
            for ratio in (0.25, 0.5)
        ]
        column = f"Pearson of channels kept, {attributions.TRUTHS[truth]}"
        assert frame.loc[words[measure], column] == pytest.approx(sum(pairs) / 2), (measure, truth)
    columns = [f"Pearson of channels kept, {truth}" for truth in attributions.TRUTHS.values()]
    assert frame.loc[["Tokens routed to the expert", "Mean router weight"], columns].isna().all(axis=None)


def test_time_is_that_of_the_step_that_measures(study: Study, tables: dict[str, Table]) -> None:
    frame = tables["coverage.table14"].frame.set_index("Estimate")
    assert frame[attributions.SECONDS].tolist() == [2.5] * 5 + [40.0]
    assert "imagined, 2 cores" in tables["coverage.table14"].caption
    cells = study.cells[study.cells["allocation"] == "coverage"]  # no plan of these rests on the ablation
    seconds, _ = attributions.measure_seconds(study, cells)
    assert seconds["pass"] == 2.5 and np.isnan(seconds["ablation"])
    seconds, machines = attributions.measure_seconds(study, study.cells[study.cells["criterion"] == "none"])
    assert all(map(np.isnan, seconds.values())) and machines == []


def test_scores_of_plans_by_each_prior(study: Study, tables: dict[str, Table]) -> None:
    frame = tables["coverage.table14.scores"].frame
    assert list(frame["Pruned"].unique()) == [
        f"{ratio} %, {recovery}coverage" for ratio in (25, 50) for recovery in ("", "NF4, ")
    ]
    block = frame[frame["Pruned"] == "50 %, NF4, coverage"].set_index("Criterion")
    assert list(block.index) == ["Unpruned", *(attributions.PRIOR_LABELS[prior] for prior in ("ala1", "ala2", "loss"))]
    scores = {}
    for prior, allocation in (("ala1", "coverage"), ("ala2", "coverage, prior ala2"), ("loss", "coverage, prior loss")):
        cells = study.cells.query(f"allocation == '{allocation}' and ratio == 0.5 and recovery == 'nf4'")
        found = study.results[study.results["cell"] == cells.index[0]].set_index("benchmark")["score"]
        row = block.loc[attributions.PRIOR_LABELS[prior]]
        assert row["GSM8K"] == pytest.approx(found["gsm8k"]) and row["BoolQ"] == pytest.approx(found["boolq"])
        scores[prior] = (found["gsm8k"] + found["boolq"]) / 2
        assert row["Mean"] == pytest.approx(scores[prior])
    assert block["Difference"].iloc[2] == pytest.approx(scores["ala2"] - scores["ala1"])


def test_every_prior_has_a_label() -> None:
    assert set(attributions.PRIOR_LABELS) == set(get_args(Prior))
