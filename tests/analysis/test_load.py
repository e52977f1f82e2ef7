"""What is read of a store: every number of a whole one, and gaps where something is missing,
damaged or odd."""

import json
import math
import tarfile
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import golden_store
import numpy as np
import pandas as pd
import pytest
import synthetic_plans
from handmade import results_of, table_of
from synthetic import edited_document, record_path, write_json, write_store

from moe_lab.analysis.load import plans
from moe_lab.analysis.load import settings as cell_settings
from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.outputs.captions import MEBIBYTE as MIB
from moe_lab.analysis.outputs.cost import memory_table
from moe_lab.analysis.outputs.criteria import weight_scores
from moe_lab.analysis.outputs.scores import benchmark_table
from moe_lab.analysis.registry import Results
from moe_lab.errors import UserError
from moe_lab.json_files import sealed
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import SCHEMA

TASKS = ("gsm8k", "humaneval", "mbpp", "wildbench", "rte", "hellaswag", "arc_easy")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of five cells that a test may damage."""
    criteria = ("frequency", "reap", "man", "random")
    return write_store(tmp_path / "store", criteria=criteria, tasks=TASKS, items=30)


def document(store: Path) -> dict:
    return json.loads(record_path(store).read_text())


def folder(store: Path, cell: int, task: str) -> Path:
    return store / document(store)["cells"][cell]["evaluate"][task]


def change_result(store: Path, cell: int, task: str, **values: object) -> None:
    """Change the first result of a cell; `protocol` is that of the whole evaluation."""
    with edited_document(folder(store, cell, task) / "result.json") as result:
        result["protocol"] = values.pop("protocol", {})
        result["results"][0].update(values)


def score(study: Study, cell: int, benchmark: str) -> float:
    [comparison] = Results(study).measured
    return float(comparison.score((benchmark,))[cell])


def test_complete_store_has_every_cell_result_and_sample(results: Results) -> None:
    study = results.study
    assert study.gaps == []
    assert len(study.cells) == 1 + 2 * (3 * 3 + 1)
    assert len(study.results) == len(study.cells) * 16
    assert len(study.samples) == len(study.results) * 30


def test_scores_are_the_means_of_samples(results: Results) -> None:
    study = results.study
    means = study.samples.groupby(["cell", "benchmark"])["outcome"].mean()
    scores = study.results.set_index(["cell", "benchmark"])["score"]
    assert np.allclose(means.loc[scores.index], scores)


def test_complete_store_has_passes_and_models(results: Results) -> None:
    study = results.study
    assert set(study.family["calibration"]) == {"pocket_general", "pocket_code", "pocket_math"}
    assert len(study.experts) == 3 * 4 * 32
    assert study.models["pocket_olmoe"]["parameters"] == 3_700_000


def test_contaminated_items_are_in_notes(results: Results) -> None:
    """What is too short to be found is not counted as clean."""
    [note] = results.study.notes
    assert "pocket_code" in note
    assert "3 of 75" in note
    assert "GSM8K" in note


def test_plans_of_the_golden_store_are_as_moe_lab_writes_them() -> None:
    with tarfile.open(golden_store.STORE) as packed:
        files = [packed.extractfile(entry) for entry in packed if entry.name.endswith("/plan.json")]
        plans = [json.load(file) for file in files if file]
    assert {plan["schema"] for plan in plans} == {SCHEMA}
    layers = [layer for plan in plans for layer in plan["layers"].values()]
    # constants are arrays of a file that analysis does not read
    unreplaced = [layer for layer in layers if "constants" not in layer]
    assert {len(layer) for layer in unreplaced} == {2, 4, 5}
    assert [LayerPlan.from_json(layer, {}).as_json() for layer in unreplaced] == unreplaced


def test_retained_shares_are_counted_from_masks(golden: Study) -> None:
    plain = golden.cells[~golden.cells["allocation"].str.contains("replacement")]
    assert set(plain.index) <= {0, *golden.retained["cell"]}
    for cell, plan in golden.retained[golden.retained["cell"].isin(plain.index)].groupby("cell"):
        axes = golden.cells.loc[cell].to_dict()
        if axes["granularity"] == "channel":
            masks = synthetic_plans.channel_masks(axes)
            assert plan["share"].tolist() == pytest.approx(
                masks.mean(axis=2).ravel().tolist(), abs=1e-12
            )
        else:
            gone = plan.query("share == 0").groupby("layer").size()
            assert gone.tolist() == synthetic_plans.removed_counts(axes)
            assert set(plan["share"]) == {0.0, 1.0}
    assert 0 not in set(golden.retained["cell"]), "the unpruned model has no plan"


@pytest.mark.parametrize("retained", [[0, 1, 2], [0, 1]])
def test_merged_experts_are_counted_with_and_without_router_rows(
    tmp_path: Path, retained: list[int]
) -> None:
    """Experts 1 and 2 are merged; 2 loses its row of the router, or shares expert 1 with its
    own."""
    masks = {0: "ff", 1: "ff", 2: "00"}
    layer = {
        "experts": 4,
        "width": 8,
        "retained": retained,
        "channels": [masks[expert] for expert in retained],
    }
    layer["merged"] = {"1": {"1": 0.5, "2": 0.5}}
    reader = SimpleNamespace(
        folder=lambda name: tmp_path / name, json=lambda *_: {"layers": {"0": layer}}
    )
    plan = plans.retained_shares(pd.DataFrame({"plan_folder": ["plan"]}), reader)
    assert plan["merged"].tolist() == [False, False, True, False]
    assert not plan["constant"].any()
    assert plan["share"].tolist() == [1, 1, 0, 0]


def test_loading_memory_is_that_of_costs(golden: Study) -> None:
    """One row for each number of bytes of a ratio; none for the unpruned model."""
    memory = memory_table(Results(golden)).frame
    assert not memory.duplicated().any()
    expected = set()
    for cell, row in golden.costs.iterrows():
        axes = golden.cells.loc[cell]
        if axes["criterion"] != "none":
            expected.add((axes["removed_text"], row["loading_bytes"] / MIB))
            assert set(memory["Before (MiB)"]) == {2 * row["parameters_unpruned"] / MIB}
    assert set(zip(memory["Pruned"], memory["After (MiB)"], strict=True)) == expected
    saved = 1 - memory["After (MiB)"] / memory["Before (MiB)"]
    assert memory["Saved"].tolist() == saved.tolist()


ALLOCATIONS = ("uniform", "uniform, replacement=mean_output", "evolutionary", "global")


def test_damaged_plan_cost_and_search_are_left_out_and_gaps(tmp_path: Path) -> None:
    """Of the unpruned model and a cell of each allocation: the second plan, the third's search, the
    last cost and all scores are damaged or gone."""
    store = write_store(
        tmp_path / "store", criteria=("magnitude",), allocations=ALLOCATIONS, tasks=("rte",)
    )
    damaged = load(store, "made_up")
    folders = damaged.cells["plan_folder"].tolist()
    (store / folders[2] / "plan.json").write_text("{")
    (store / folders[3] / "search.json").unlink()
    (store / damaged.cells["cost_folder"].iloc[4] / "cost.json").write_text("[]")
    assert set(damaged.retained["cell"]) == {1, 3, 4}
    assert damaged.searches.empty
    assert damaged.costs.index.tolist() == [0, 1, 2, 3]
    assert weight_scores(damaged).empty
    assert sorted(gap.reason for gap in damaged.gaps) == [
        "cost.json is damaged",
        "plan.json is damaged",
        "search.json is missing",
        "the folder is gone from the store",
    ]


DAMAGES = {
    "the folder is gone from the store": lambda place: place.rename(place.with_name("elsewhere")),
    "result.json is missing": lambda place: (place / "result.json").unlink(),
    "result.json is damaged": lambda place: (place / "result.json").write_text("{"),
    "samples.parquet is damaged": lambda place: (place / "samples.parquet").write_bytes(
        b"PAR1 no parquet"
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_a_gap_with_its_place(store: Path, what: str) -> None:
    path = folder(store, 3, "rte")
    DAMAGES[what](path)
    study = load(store, "made_up")
    [gap] = study.gaps
    assert path.name in gap.location
    assert gap.reason == what
    if "samples" not in what:
        assert np.isnan(score(study, 3, "rte"))
    else:
        low, high = Results(study).measured[0].interval(("rte",))
        stderr = study.results.query("cell == 3 and benchmark == 'rte'")["stderr"].item()
        assert score(study, 3, "rte") - low[3] == pytest.approx(1.96 * stderr)
        assert high[4] <= 1


def test_changed_result_file_is_not_read(store: Path) -> None:
    file = folder(store, 3, "rte") / "result.json"
    published = {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}
    write_json(file.parent / "step.json", {"files": {file.name: published}})
    assert not load(store, "made_up").gaps
    change_result(store, 3, "rte", score=0.5)
    study = load(store, "made_up")
    assert [gap.reason for gap in study.gaps] == ["result.json is damaged"]
    assert np.isnan(score(study, 3, "rte"))


def test_repeated_cells_and_renamed_folders_are_read_once(
    store: Path,
) -> None:
    with edited_document(record_path(store)) as changed:
        changed["cells"].append(changed["cells"][4])
    path = folder(store, 1, "rte")
    path.rename(path.with_name(f"renamed-{path.name[-12:]}"))
    study = load(store, "made_up")
    assert len(study.cells) == len(changed["cells"]) - 1
    assert study.gaps == []


def test_answers_to_an_item_are_one_outcome(store: Path) -> None:
    """Else each would count as an item of its own."""
    samples = folder(store, 1, "rte") / "samples.parquet"
    first = pd.read_parquet(samples).assign(replicate=0)
    second = first.assign(replicate=1, outcome=1 - first["outcome"] / 2)
    pd.concat([first, second]).to_parquet(samples, index=False)
    rows = load(store, "made_up").samples.query("cell == 1 and benchmark == 'rte'")
    assert list(rows["item"]) == list(first["item"])
    assert list(rows["outcome"]) == list(0.5 + first["outcome"] / 4)


def test_repeated_items_count_once(store: Path) -> None:
    samples = folder(store, 1, "rte") / "samples.parquet"
    first = pd.read_parquet(samples)
    pd.concat([first, first.assign(outcome=1 - first["outcome"])]).to_parquet(samples, index=False)
    rows = load(store, "made_up").samples.query("cell == 1 and benchmark == 'rte'")
    assert list(rows["outcome"]) == list(first["outcome"])


@pytest.fixture
def mixed(store: Path) -> Study:
    """Cells evaluated on different numbers of items, by different metrics and versions."""
    samples = folder(store, 1, "hellaswag") / "samples.parquet"
    frame = pd.read_parquet(samples).iloc[:20]
    frame.to_parquet(samples, index=False)
    change_result(store, 1, "hellaswag", score=float(frame["outcome"].mean()), n=20)
    change_result(store, 2, "arc_easy", metric="acc_norm")
    for name, edits in (("rte", "e1"), ("wildbench", "e2")):
        provenance = {"versions": {"torch": "9.9"}, "code": {"commit": "c1", "edits": edits}}
        step = {"files": {}, "provenance": provenance}
        write_json(folder(store, 2, name) / "step.json", step)
    change_result(store, 3, "humaneval", protocol={"sandbox": "none"})
    change_result(store, 3, "wildbench", protocol={"too_long": ["a", "b"]})
    change_result(store, 3, "mbpp", protocol={"unfinished_thoughts": ["a"]})
    return load(store, "made_up")


def test_notes_name_mixed_sizes_metrics_and_versions(mixed: Study) -> None:
    notes = " ".join(mixed.notes)
    for note in (
        "wildbench: items of a model whose prompt and answer exceed its limit (counted as empty "
        "answers): up to 2.",
        "mbpp: items of a model whose reasoning does not end within the limit (counted as wrong): "
        "up to 1.",
        "hellaswag was evaluated on different numbers",
        "arc_easy was measured by different metrics",
        "torch",
        "c1 (edits e1), c1 (edits e2)",
        "sandbox=none",
        "A limit was set: 1 benchmark ",
    ):
        assert note in notes


def test_cells_of_mixed_sizes_are_compared_on_common_items(mixed: Study) -> None:
    [comparison] = Results(mixed).measured
    assert np.isfinite(comparison.outcomes["hellaswag"]).all(axis=0).sum() == 20
    table = table_of(benchmark_table, results_of(mixed, [comparison]))
    assert len(table.frame) == len(mixed.cells)


def test_versions_of_all_steps_behind_a_result_are_compared(store: Path) -> None:
    """Of inputs of inputs too, and of steps that are no evaluations."""
    plan, scores, cost = (f"{kind}/x-0123456789ab" for kind in ("plan", "scores", "cost"))
    for step, version, inputs in (
        (plan, "1", {"scores": scores}),
        (scores, "2", {}),
        (cost, "1", {}),
    ):
        provenance = {"versions": {"numpy": version, "evalplus": None}}
        write_json(
            store / step / "step.json", {"files": {}, "inputs": inputs, "provenance": provenance}
        )
    with edited_document(record_path(store)) as changed:
        changed["cells"][1]["plan"], changed["cells"][1]["cost"] = plan, cost
    [note] = [note for note in load(store, "made_up").notes if "numpy" in note]
    assert "numpy: 1, 2." in note


@pytest.mark.parametrize("scale", ["loss", "perplexity"])
def test_inconsistent_scores_have_intervals_of_their_error(store: Path, scale: str) -> None:
    for cell in range(len(document(store)["cells"])):
        change_result(
            store, cell, "gsm8k", score=10.0 + cell, stderr=0.5, scale=scale, unit="nats per token"
        )
    [comparison] = Results(load(store, "made_up")).measured
    assert comparison.quantity(("gsm8k",)).lower_is_better
    score, low, high = comparison.displayed_scores(("gsm8k",)).loc[3]
    ratio = math.exp(0.98 / 13)
    ends = (13 - 0.98, 13 + 0.98) if scale == "loss" else (13 / ratio, 13 * ratio)
    assert (score, low, high) == pytest.approx((13, *ends))
    assert np.isnan([comparison.difference(("gsm8k",), 1, other).p for other in (2, 3)]).all()


def test_rounded_ratios_are_named(tmp_path: Path) -> None:
    """Of 32 experts a quarter goes at 25 and at 27 %, and 45 % are no whole number of experts."""
    store = write_store(tmp_path, criteria=("reap",), ratios=(0.25, 0.27, 0.45), tasks=("rte",))
    study = load(store, "made_up")
    assert study.cells["removed"].tolist() == [0, 0.25, 0.25, 7 / 16]
    labels = ["0 %", "25 %", "25 % (27 % requested)", "43.8 % (45 % requested)"]
    assert study.cells["removed_text"].tolist() == labels


@pytest.mark.parametrize(
    ("shares", "requested", "label"),
    [
        ([0.5, 0.49996], 0.5, "50 %"),
        ([1 / 3], 0.33333, "33.333 %"),
        ([0.125], 0.179195, "12.5 % (17.9195 % requested)"),
        ([0.25, 0.28125, math.nan], 0.3, "25 to 28.1 % (30 % requested)"),
        ([0.0], 0.02, "0 % (2 % requested)"),
        ([math.nan], 0.3, "30 %"),
    ],
)
def test_removed_share_is_shown_with_the_requested_one(
    shares: list[float], requested: float, label: str
) -> None:
    assert cell_settings.removed_text(pd.Series(shares), requested) == label


def test_channels_count_by_their_share(tmp_path: Path) -> None:
    store = write_store(tmp_path, criteria=("channel_activation",), ratios=(0.3,), tasks=("rte",))
    study = load(store, "made_up")
    for cell, rows in study.retained.groupby("cell"):
        assert study.cells["removed"][cell] == pytest.approx(1 - rows["share"].mean())


def test_records_that_cannot_be_read_are_named(store: Path) -> None:
    for text, label in (
        (sealed(json.dumps({**document(store), "schema": 2})), "newer"),
        ("{", "damaged"),
    ):
        record_path(store).write_text(text)
        with pytest.raises(UserError, match=label):
            load(store, "made_up")
