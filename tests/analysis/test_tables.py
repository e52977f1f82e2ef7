from __future__ import annotations

import dataclasses
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
from handmade import table_of

from analysis import names
from analysis.load import plans
from analysis.load.study import load
from analysis.outputs import coverage, speed_and_memory
from analysis.outputs.ranks import rank_table
from analysis.outputs.scores import task_specific_table
from analysis.registry import Results
from analysis.render import table as rendering
from analysis.render.table import Table
from moe_lab.models.discover import moe_layers
from moe_lab.models.facts import model_facts
from moe_lab.pruning.cost import size
from moe_lab.pruning.replace import merge_experts, replace_by_constants


@pytest.fixture(scope="module")
def results(small: Path) -> Results:
    return Results(load(small, "made_up"))


def made_up_table() -> Table:
    frame = pd.DataFrame({"Criterion": ["Unpruned", "MAN", "REAP", "EAN"], "GSM8K": [0.9, 0.5, 0.5, np.nan]})
    low = pd.DataFrame({"GSM8K": [0.8, 0.4, 0.4, np.nan]})
    return Table(
        name="t",
        title="A 50 % table",
        caption="It_s caption.",
        frame=frame,
        formats={"GSM8K": "{:.3f}"},
        best={"GSM8K": "max"},
        low=low,
        high=low + 0.2,
    )


def test_csv_has_full_precision_intervals_and_empty_gaps() -> None:
    back = pd.read_csv(StringIO(rendering.csv(made_up_table())))
    assert list(back) == ["Criterion", "GSM8K", "GSM8K low", "GSM8K high"]
    assert np.isnan(back["GSM8K"][3]) and back["GSM8K high"][1] == pytest.approx(0.6)


def test_markdown_marks_the_best_and_explains_the_gap() -> None:
    made = rendering.markdown(made_up_table())
    assert "| MAN | **0.500** |" in made and "| REAP | **0.500** |" in made, "ties are all best"
    assert "| Unpruned | 0.900 |" in made, "the unpruned model does not compete"
    assert "| EAN | – |" in made and rendering.GAP_NOTE in made
    whole = dataclasses.replace(made_up_table(), frame=made_up_table().frame.fillna(0.25))
    assert rendering.GAP_NOTE not in rendering.markdown(whole)


def test_latex_is_booktabs_with_special_characters_escaped() -> None:
    made = rendering.latex(made_up_table())
    for words in (r"\toprule", r"\midrule", r"\bottomrule", r"\textbf{0.500}", r"It\_s", r"50 \%", r"\label{tab:t}"):
        assert words in made
    assert "textbf{0.900}" not in made


def test_html_has_sort_keys_and_intervals() -> None:
    made = rendering.html(made_up_table())
    assert 'data-key="0.9"' in made and 'data-key=""' in made
    assert "<small>0.40 to 0.60</small>" in made
    nasty = dataclasses.replace(
        made_up_table(), frame=pd.DataFrame({"Criterion": ["<script>"], "GSM8K": [0.5]}), low=None
    )
    assert "<script>" not in rendering.html(nasty)


def test_rank_table_has_a_block_per_panel_and_ranks_the_pruned(results: Results) -> None:
    table = table_of(rank_table, results)
    blocks = table.frame.groupby(["Pruned", "Calibration"])
    assert len(blocks) == 6
    for _, block in blocks:
        assert block["Criterion"].tolist() == ["Unpruned", "Frequency", "REAP", "MAN", "Random"]
        assert np.isnan(block["Avg Rank"].iloc[0])
        assert block["Avg Rank"].iloc[1:].mean() == pytest.approx(2.5)
        assert block["First"].iloc[1:].sum() == pytest.approx(1)
    assert table.low is not None and table.high is not None
    for column in ("Eval+", "MC Avg", "Avg", "Avg Rank"):
        inside = (table.low[column] <= table.frame[column] + 1e-9) & (table.frame[column] <= table.high[column] + 1e-9)
        assert inside[table.frame["Criterion"] != "Unpruned"].mean() > 0.9
    for words in ("n = 30 items", "seed 42", "gate model", "65,000 calibration tokens", "lm_eval 0.0-synthetic"):
        assert words in table.caption


def test_task_specific_rows_join_two_models(results: Results) -> None:
    table = task_specific_table(results, "t")
    [comparison] = results.comparisons
    cells = comparison.cells.query("criterion == 'man' and ratio == 0.5").reset_index().set_index("calibration")["cell"]
    row = table.frame.query("Criterion == 'MAN' and Pruned == '50 %'").iloc[0]
    for column in names.CODE_COLUMNS:
        assert row[column] == comparison.columns.loc[cells["pocket_code"], column]
    for column in names.MATH_COLUMNS:
        assert row[column] == comparison.columns.loc[cells["pocket_math"], column]
    assert comparison.columns.loc[cells["pocket_code"], "GSM8K"] != row["GSM8K"]


@pytest.mark.parametrize(
    ("parameters", "experts", "hidden", "width", "layers", "before", "after"),
    [(6_919_161_856, 64, 2048, 1024, 16, 12.89, 6.89), (30_532_122_624, 128, 2048, 768, 48, 56.87, 29.87)],
)
def test_loading_memory_of_published_models(
    parameters: int, experts: int, hidden: int, width: int, layers: int, before: float, after: float
) -> None:
    """Unified Expert Pruning Table 3: OLMoE 12.89 to 6.89; the half of Qwen3's experts is 27.00 GiB."""
    sizes = {str(i): {"expert_parameters": 3 * hidden * width} for i in range(layers)}
    half = {str(i): experts // 2 for i in range(layers)}
    removed = plans.removed_parameters(sizes, half, half, {})
    assert parameters * plans.BYTES / 2**30 == pytest.approx(before, abs=0.01)
    assert (parameters - removed) * plans.BYTES / 2**30 == pytest.approx(after, abs=0.01)


def test_loading_memory_counts_constants_and_leaves_out_merged_experts() -> None:
    model = tiny.build("olmoe")
    layers, dropping = moe_layers(model), tiny.plan(model, 0.5)
    widths = {layer.index: layer.width for layer in layers}
    outputs = {layer.index: np.ones((layer.n_experts, layer.hidden)) for layer in layers}
    groups = {
        layer: {kept[0]: {one: 1.0 for one in sorted({kept[0], *(set(range(16)) - set(kept))})}}
        | {one: {one: 1.0} for one in kept[1:]}
        for layer, kept in dropping.experts.items()
    }
    about = facts_of(model)
    for plan in (replace_by_constants(dropping, outputs, widths), merge_experts(groups, widths, provenance={})):
        kept = plans._shares({"layers": plan._layers()}).assign(cell=0)
        cells = pd.DataFrame([{"model": "m", "ratio": 0.5, "granularity": "expert", "allocation": "a"}])
        [row] = plans.loading_memory(cells, kept, {"m": about}).to_dict("records")
        assert row["parameters_after"] == size(model, plan, facts=about)["parameters"]


def facts_of(model: Any) -> dict[str, Any]:
    about = model_facts(model)
    return {**about, "layers": {str(layer): facts for layer, facts in about["layers"].items()}}


def test_memory_of_a_study_is_exact(results: Results) -> None:
    table = speed_and_memory.memory_table(results, "t")
    after = dict(zip(table.frame["Pruned"], table.frame["After (bytes)"], strict=True))
    assert after["25 %"] == 2 * (3_700_000 - 4 * 8 * (3 * 128 * 64 + 128))


def test_coverage_counts_experts_without_a_token(results: Results) -> None:
    table = coverage.coverage_table(results.study, "coverage")
    silent = results.study.coverage.query("tokens == 0").groupby("calibration").size()
    assert table.frame["Unseen"].tolist() == silent[["pocket_general", "pocket_code", "pocket_math"]].tolist()
    assert (table.frame["Unseen"] >= 4).all()
