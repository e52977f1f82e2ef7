"""The methods beyond whole experts and equal layers, from the command line on the shipped model."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy
import pandas as pd
import preloaded
import pytest
import torch
import yaml
from identities.plans import plan_without_alignment
from processes import run_without_moe_lab
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from studies import run_on_boolq

from moe_lab import align
from moe_lab.analysis.__main__ import main
from moe_lab.config import ModelConfig
from moe_lab.models.load import load_model
from moe_lab.pruning.plan import Plan
from moe_lab.recovery.apply import recovered
from moe_lab.result_files import read_record

SHORT_SEARCH = ["allocation=pocket_evolutionary"]
SHORT_SEARCH += [
    f"allocation.parameters.{setting}" for setting in ("population=4", "elites=2", "generations=2")
]
CHANNELS = {
    "grid": {"criterion": ["channel_activation"], "allocation": ["coverage"]},
    "more": [
        {"allocation": ["coverage_aligned"]},
        {"criterion": ["heapr"], "allocation": ["global"]},
        {"criterion": ["snip"]},
    ],
}
pytestmark = pytest.mark.slow


def cells(store: Path, *settings: str) -> list[dict[str, Any]]:
    """The pruned cells of a study that must succeed."""
    result = run_on_boolq(store, "suite.limit=2", *settings)
    assert result.returncode == 0, result.stderr
    record = read_record(store, "study") or {}
    return [cell for cell in record["cells"] if cell["plan"]]


def generated(store: Path, grade: str) -> list[str]:
    """The texts that a step graded."""
    folder = store / content(store, grade, "step.json")["inputs"]["generate"]
    (file,) = folder.glob("answers-*.jsonl.gz")
    lines = gzip.decompress(file.read_bytes()).splitlines()
    return [json.loads(line)["replies"][0]["text"] for line in lines]


def content(store: Path, folder: str, file: str) -> Any:
    return json.loads((store / folder / file).read_text())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("methods") / "store"


def plan_of(store: Path, cell: dict[str, Any]) -> Plan:
    return Plan.load(store / cell["plan"] / "plan.json")


EXPORTED = ["export=natural", "verify=true"]


def test_half_of_the_channels_are_retained_counted_and_exported(
    store: Path, tmp_path: Path
) -> None:
    """A file of four methods gives a cell for each; they share calibration passes. Half is exact,
    or in multiples of 8."""
    (tmp_path / "experiment").mkdir()
    experiment = f"# @package _global_\n{yaml.safe_dump(CHANNELS)}"
    (tmp_path / "experiment" / "listed.yaml").write_text(experiment)
    settings = [f"--config-dir={tmp_path}", "+experiment=listed", "ratio=0.5", *EXPORTED]
    channel_cells = cells(store, *settings)
    assert len(channel_cells) == 4
    assert {cell["cell"]["granularity"] for cell in channel_cells} == {"channel"}
    inputs = [content(store, cell["scores"], "step.json")["inputs"] for cell in channel_cells]
    for kind in ("statistics", "gradients"):
        assert len({folders[kind] for folders in inputs if kind in folders}) == 1
    for cell in channel_cells:
        layers = plan_of(store, cell).layers.values()
        retained = sum(sum(layer.widths) for layer in layers)
        cost = content(store, cell["cost"], "cost.json")
        assert cost["routed_kept"] == pytest.approx(retained / (4 * 32 * 64))
        if cell["cell"]["allocation"] == "coverage, aligned":
            assert {width % 8 for layer in layers for width in layer.widths} == {0}
        else:
            assert retained == 4 * 32 * 64 // 2
        assert 0.8 < cost["flops_ratio"] < 1
        assert cost["storage_bytes"] == 2 * cost["parameters"]
        assert content(store, cell["export"], "verified.json")["difference"] < 1e-4


def test_dropped_experts_are_replaced_by_their_mean_outputs(store: Path) -> None:
    """Each of 4 x 16 null experts has a constant and a row of the router, of 128 numbers each."""
    settings = ["allocation=uniform,novices", "criterion=mone", "ratio=0.5"]
    mone_cells = cells(store, *settings, *EXPORTED)
    assert [cell["cell"]["replacement"] for cell in mone_cells] == ["none", "mean_output"]
    dropping, replacing = (plan_of(store, cell) for cell in mone_cells)
    inputs = content(store, mone_cells[1]["plan"], "step.json")["inputs"]
    sums = load_arrays(store / inputs["statistics"] / "statistics.safetensors")
    for number, layer in replacing.layers.items():
        dropped = sorted({*range(32)} - {*dropping.layers[number].retained})
        assert layer.null_experts == dropped
        assert layer.retained == tuple(range(32))
        means = sums[f"{number}/output_sum"] / sums[f"{number}/tokens"].clip(1)[:, None]
        numpy.testing.assert_allclose(layer.constants, means[dropped], rtol=1e-6)

    cost, replacing_cost = (content(store, cell["cost"], "cost.json") for cell in mone_cells)
    assert replacing_cost["parameters"] == cost["parameters"] + 4 * 16 * (128 + 128)
    assert replacing_cost["flops_per_token"] < cost["flops_per_token"]


@pytest.mark.parametrize(
    ("criterion", "merging"), [("frequency", "hc_smoe,merge_moe"), ("reap", "ream")]
)
def test_dropped_experts_are_merged(store: Path, criterion: str, merging: str) -> None:
    settings = [f"criterion={criterion}", f"allocation={merging}", "ratio=0.75", *EXPORTED]
    for cell, name in zip(cells(store, *settings), merging.split(","), strict=True):
        assert (cell["cell"]["allocation"], cell["cell"]["replacement"]) == ("uniform", name)
        for layer in plan_of(store, cell).layers.values():
            assert len(layer.retained) == (8 if name == "ream" else 32)
            assert len(layer.merged) <= 8
            assert all(sum(group.values()) == pytest.approx(1) for group in layer.merged.values())
        cost = content(store, cell["cost"], "cost.json")
        assert cost["routed_kept"] == pytest.approx(0.25)
        # ream also drops rows of the router
        assert cost["flops_ratio"] == pytest.approx(1, rel=0.02)


def test_channels_of_merged_experts_are_matched(store: Path) -> None:
    network = load_model(ModelConfig(name="pocket", path="pocket:olmoe", device="cpu"))[0]
    for cell in cells(store, "criterion=frequency", "allocation=m_smoe,ream", "ratio=0.75"):
        plan = plan_of(store, cell)
        inputs = content(store, cell["plan"], "step.json")["inputs"]
        unmatched = Plan.load(store / inputs["plan"] / "plan.json")
        assert plan.merged_layers
        assert plan_without_alignment(plan) == unmatched != plan
        for number in plan.merged_layers:
            assert (plan.layers[number].alignment != numpy.arange(64)).any(1).all()
        method = (cell["cell"]["allocation"], cell["cell"]["replacement"])
        matched_by_weights = method == ("global by frequency", "m_smoe")
        assert (plan == align(network, unmatched)) == matched_by_weights


def test_a_searched_plan_has_its_history_and_can_be_listed(store: Path) -> None:
    """It names its model."""
    (searched,) = cells(store, "criterion=man", "ratio=0.25", *SHORT_SEARCH)
    assert searched["cell"]["allocation"] == "evolutionary"
    plan = plan_of(store, searched)
    assert sum(len(experts) for experts in plan.retained.values()) == 4 * 24
    assert (store / searched["plan"] / "history.parquet").exists()
    assert content(store, searched["plan"], "search.json")
    facts = content(store, searched["plan"], "step.json")["inputs"]["facts"]
    assert plan.provenance["model_sha256"] == content(store, facts, "facts.json")["sha256"]
    file = store / searched["plan"] / "plan.json"
    settings = ["criterion=random", "ratio=0.25", "allocation=list", f"allocation.path={file}"]
    (listed,) = cells(store, *settings)
    assert plan_of(store, listed) == plan


def test_scores_in_a_file_reach_the_report_under_its_name(store: Path, tmp_path: Path) -> None:
    """Scores of channels in a file: test_criteria.py."""
    scores = numpy.random.default_rng(0).random((4, 32))
    layers, experts = numpy.indices(scores.shape).reshape(2, -1)
    frame = pd.DataFrame({"layer": layers, "expert": experts, "score": scores.ravel()})
    frame.to_csv(tmp_path / "my (1).csv", index=False)
    path = f"criterion.parameters.path='{tmp_path}/my (1).csv'"
    settings = ["criterion=file", path, "ratio=0.5"]
    (cell,) = cells(store, *settings)
    best = numpy.sort(scores[0].argsort()[16:])
    assert plan_of(store, cell).layers[0].retained == (*best,)
    assert main(["report", f"store={store}", "study=study", f"out={tmp_path}/report"]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert f"file({tmp_path.name}/my (1).csv)" in page

    frame.query("layer > 0").to_csv(tmp_path / "my (1).csv", index=False)
    result = run_on_boolq(store, *settings, "dry_run=true")
    assert result.returncode == 2 and "layers 1, 2, 3, expected [0, 1, 2, 3]" in result.stderr


def test_experts_that_other_tools_retain_are_a_plan(store: Path, tmp_path: Path) -> None:
    """It is checked before the study starts."""
    retained = {layer: [5, 9, 30, 2, *range(10, 10 + layer)] for layer in range(12, 16)}
    file = tmp_path / "keep.jsonl"
    settings = ["criterion=random", "allocation=list", f"allocation.path={file}", "ratio=0.453"]

    def write(first_layer: int) -> None:
        numbered = enumerate(retained.values(), first_layer)
        file.write_text("\n".join(json.dumps({number: ids}) for number, ids in numbered))

    write(first_layer=1)
    assert run_on_boolq(store, *settings, "dry_run=true").returncode == 2
    write(first_layer=0)
    (cell,) = cells(store, *settings)
    plan = plan_of(store, cell)
    assert list(plan.retained.values()) == [tuple(sorted(ids)) for ids in retained.values()]
    assert plan.provenance["model_sha256"]


WITHOUT_MOE_LAB = """
with torch.no_grad():
    logits = load(folders[0], dtype=torch.float32)(tokens).logits
save_file({"logits": logits.contiguous()}, root / "logits.safetensors")
"""


def exported_as_evaluated(store: Path, cell: dict[str, Any], folder: Path, *modules: str) -> str:
    """The card of a cell's export, which gives the logits of the recovered model in a process
    without moe_lab."""
    network = load_model(ModelConfig(name="pocket", path="pocket:olmoe", device="cpu"))[0]
    plan = plan_of(store, cell)
    evaluated = recovered(network, plan, modules=modules, tuned=store / cell["finetune"])
    tokens = torch.arange(64)[None]
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    (folder / "export").symlink_to(store / cell["export"] / "checkpoint")
    run_without_moe_lab(WITHOUT_MOE_LAB, folder)
    with torch.no_grad():
        assert torch.equal(
            load_file(folder / "logits.safetensors")["logits"], evaluated(tokens).logits
        )
    return (folder / "export" / "README.md").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [
                "recovery=pocket_merge_fit",
                "recovery.fit=pocket_excerpt",
                "allocation.replacement=hc_smoe",
            ],
            "(recovery=pocket_merge_fit), by least squares",
        ),
        (["recovery=pocket_router_kd", "recovery.epochs=0.2"], "its routers were trained"),
    ],
)
def test_a_recovered_model_is_exported_as_evaluated(
    store: Path, tmp_path: Path, settings: list[str], message: str
) -> None:
    (cell,) = cells(store, "criterion=man", "ratio=0.5", *settings, "export=natural")
    assert content(store, cell["evaluate"]["pocket_boolq"], "result.json")["results"]
    assert message in exported_as_evaluated(store, cell, tmp_path)


def test_a_quantised_fine_tuned_model_is_served_and_exported_as_evaluated(
    store: Path, tmp_path: Path
) -> None:
    """In this process and behind a server."""
    settings = [
        "criterion=man",
        "ratio=0.5",
        "recovery=pocket_dora_nf4",
        "recovery.epochs=0.1",
        "export=natural",
        "suite.benchmarks=[pocket_humaneval]",
        "allow_code_execution=true",
    ]
    server = (
        f"{preloaded.python()} -m transformers.cli.transformers serve {{checkpoint}} "
        "--host 127.0.0.1 --port {port} --device cpu --dtype float32"
    )
    (in_process,) = cells(store, *settings)
    (served,) = cells(store, *settings, "backend=server", f'backend.command="{server}"')
    texts, served_texts = (
        generated(store, cell["evaluate"]["pocket_humaneval"]) for cell in (in_process, served)
    )
    assert texts == served_texts
    assert any(texts)
    assert in_process["evaluate"] != served["evaluate"]
    assert in_process["export"] == served["export"]
    card = exported_as_evaluated(store, in_process, tmp_path, "experts", "shared_experts")
    assert "recovery=pocket_dora_nf4" in card
    assert "pocket_math_search" in card
    assert "rounded to NF4" in card
