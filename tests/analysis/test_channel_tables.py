from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of

from analysis import names
from analysis.load import settings as cell_settings
from analysis.outputs import channels, weights
from analysis.render import table as rendering
from analysis.render.table import Table
from analysis.stats.comparison import Comparison


def first(count: int, items: int = 20) -> list[int]:
    """Outcomes of a plan that solves the first `count` items."""
    return [1] * count + [0] * (items - count)


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
    for kept, flops in ((1, 1), (0.5, 0.85), (0.5, 0.86), (0.5, 0.87), (0.52, 0.99), (0.75, 0.9), (0.5, 0.85))
]


def made(axes: list[dict[str, Any]], solved: dict[str, list[int | None]]) -> Comparison:
    return comparison_of(
        axes, {name: [None if n is None else first(n) for n in counts] for name, counts in solved.items()}
    )


HEAPR = made(AXES, SOLVED)


def rows(table: Table, pruned: str = "50 %") -> pd.DataFrame:
    return table.frame[table.frame["Pruned"] == pruned].set_index("Criterion")


def test_models_asked_by_protocols_of_their_own_have_the_columns_of_the_paper() -> None:
    """Seven benchmarks, their plain mean, and no word about metrics that differ from model to model."""
    one, other = (made(AXES, dict.fromkeys(names.HEAPR, SOLVED["arc_easy"])) for _ in range(2))
    other = replace(other, model="n", cells=other.cells.assign(model="n"))
    study = study_of(one, COSTS)
    asked = {"m": ("acc", "heapr"), "n": ("acc_norm", "heapr_norm")}
    study.cells = pd.concat(
        [found.cells.assign(protocol=asked[found.model][1]).add_suffix("") for found in (one, other)], ignore_index=True
    )
    study.results = pd.DataFrame(
        [
            {"cell": cell, "n": 20, "benchmark": name, "metric": asked[model][0]}
            for cell, model in study.cells["model"].items()
            for name in names.HEAPR
        ]
    )
    table = channels.channel_choice_table(results_of(study, [one]), "t")
    shown = [names.benchmark(name) for name in names.HEAPR]
    assert list(table.frame.columns)[3:11] == [*shown, "Mean"] and "Avg" not in table.frame
    assert rows(table).loc["HEAPr-G", "Mean"] == pytest.approx(16 / 20)
    assert "m by heapr and n by heapr_norm" in table.caption and "not comparable" not in table.caption


def test_every_method_stands_at_every_ratio_with_its_cost() -> None:
    """Mean is that of the benchmarks: (16 / 20 + 12 / 20) / 2 for HEAPr over all layers."""
    table = channels.method_table(results_of(study_of(HEAPR, COSTS), [HEAPR]), "t")
    found = rows(table)
    assert found.index.tolist() == ["Unpruned", "REAP", "HEAPr-G", "HEAPr-L", "CAMERA-P (one-shot)"]
    assert rows(table, "25 %").index.tolist() == ["Unpruned", "HEAPr-G"]
    assert found.loc["HEAPr-G", ["ARC-E", "Mean", "Kept"]].tolist() == pytest.approx([0.8, 0.7, 0.5])
    assert found["FLOPs saved"].tolist() == pytest.approx([0, 0.01, 0.15, 0.14, 0.13])
    assert table.low is not None and table.high is not None
    assert (table.low["Mean"] <= table.frame["Mean"]).all() and (table.frame["Mean"] <= table.high["Mean"]).all()
    assert "| HEAPr-G | **0.800** |" in rendering.markdown(table)
    lacking = "Mean: of 2 of the paper's 7; OBQA, WinoGrande, HellaSwag, ARC-C and MathQA were not run."
    assert lacking in table.footnotes


def test_differences_are_paired_with_the_base() -> None:
    table = channels.channel_choice_table(results_of(study_of(HEAPR, COSTS), [HEAPR]), "t")
    found = rows(table)
    assert found.index.tolist() == ["Unpruned", "HEAPr-G", "HEAPr-L", "CAMERA-P (one-shot)"] and "25 %" not in set(
        table.frame["Pruned"]
    )
    assert found.loc["HEAPr-G", "Difference"] == pytest.approx((6 + 4) / 20 / 2)
    assert found.loc["HEAPr-L", "Difference"] == pytest.approx((4 + 2) / 20 / 2)
    assert found.loc[["Unpruned", "CAMERA-P (one-shot)"], "Difference"].isna().all()
    raw = np.array([HEAPR.p_values(("arc_easy", "piqa"), cell_number, [3])[0] for cell_number in (1, 2)])
    corrected = [min(1, 2 * raw[0]), min(1, max(2 * raw[0], raw[1]))]
    assert raw[0] < raw[1] and found.loc[["HEAPr-G", "HEAPr-L"], "p (Holm)"].tolist() == pytest.approx(corrected)
    assert rendering.GAP_NOTE not in rendering.markdown(table), "the base has no difference to itself"


def test_a_gap_stays_a_gap() -> None:
    lost = made(AXES, {**SOLVED, "piqa": [20, None, 10, 8, 2, 18, 11]})
    table = channels.channel_choice_table(results_of(study_of(lost, COSTS), [lost]), "t")
    found = rows(table).loc["HEAPr-G"]
    assert np.isnan(found["Mean"]) and np.isnan(found["Difference"]) and found["ARC-E"] == pytest.approx(0.8)
    assert rendering.GAP_NOTE in rendering.markdown(table)
    assert rows(table).loc["HEAPr-L", "Difference"] == pytest.approx(0.15), "others are compared all the same"


def test_group_averages_are_measured_against_aimer() -> None:
    axes = [UNPRUNED, cell("reap"), cell("aimer", calibration="none"), cell("random", calibration="none")]
    comparison = made(axes, {"arc_easy": [20, 10, 12, 4], "gsm8k": [20, 6, 4, 2], "math500": [20, 2, 2, 2]})
    found = rows(weights.group_table(results_of(study_of(comparison), [comparison]), "t"))
    assert found.loc["REAP", ["MC Avg", "Math", "Avg"]].tolist() == pytest.approx([0.5, 0.2, 0.3])
    assert found.loc["REAP", "Difference"] == pytest.approx(0.0) and "Code" not in found
    assert found["Difference"].isna().tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("word", "name", "settings"),
    [
        ("uniform", "uniform", {}),
        ("coverage, prior usage", "coverage", {"prior": "usage"}),
        ("coverage, aligned", "coverage", {"aligned": ""}),
        ("coverage(prior=usage,layer_smoothing=log)", "coverage", {"prior": "usage", "layer_smoothing": "log"}),
        ("global by frequency", "global by frequency", {}),
        ("coverage(prior=usage), protect=super", "coverage", {"prior": "usage", "protect": "super"}),
        ("uniform, replacement=m_smoe, protect=a.json", "uniform", {"replacement": "m_smoe", "protect": "a.json"}),
        ("(odd) one", "(odd) one", {}),
    ],
)
def test_words_for_allocations_are_read(word: str, name: str, settings: dict[str, str]) -> None:
    assert cell_settings.allocation(word) == (name, settings)


def test_the_sequential_form_of_camera_is_the_base_where_both_were_run() -> None:
    both = made([*AXES, cell("camera", "sequential")], {name: [*counts, 5] for name, counts in SOLVED.items()})
    costs = [*COSTS, {"routed_kept": 0.5, "flops_ratio": 0.87, "storage_bytes": 100.0}]
    found = rows(channels.channel_choice_table(results_of(study_of(both, costs), [both]), "t"))
    assert found.index.tolist() == ["Unpruned", "HEAPr-G", "HEAPr-L", "CAMERA-P (one-shot)", "CAMERA-P"]
    assert found.loc["HEAPr-G", "Difference"] == pytest.approx((11 + 7) / 20 / 2)
    assert np.isnan(found.loc["CAMERA-P", "Difference"])
