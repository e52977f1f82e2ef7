"""The methods beyond whole experts and equal layers, from the command line on the shipped model."""

import json
from pathlib import Path
from typing import Any

import numpy
import preloaded
import pytest
import torch
import yaml
from identities.plans import unaligned
from processes import read_alone
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from studies import on_boolq

from moe_lab import align
from moe_lab.config import ModelConfig
from moe_lab.models.load import load_model
from moe_lab.pruning.plan import Plan
from moe_lab.recovery.apply import recovered
from moe_lab.results import read_record

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


def cells(store: Path, *words: str) -> list[dict[str, Any]]:
    """The pruned cells of a study that must succeed."""
    done = on_boolq(store, *words)
    assert done.returncode == 0, done.stderr
    found = (read_record(store, "study") or {})["cells"]
    return [cell for cell in found if cell["plan"]]


def generated(store: Path, grade: str) -> list[str]:
    """The texts that a step graded."""
    folder = store / content(store, grade, "step.json")["inputs"]["generate"]
    return [
        json.loads(line)["replies"][0]["text"]
        for line in (folder / "answers.jsonl").read_text().splitlines()
    ]


def content(store: Path, folder: str, file: str) -> Any:
    return json.loads((store / folder / file).read_text())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("methods") / "store"


def test_channels_are_kept_to_the_number_and_what_they_cost_is_written(
    store: Path, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "listed.yaml").write_text(
        f"# @package _global_\n{yaml.safe_dump(CHANNELS)}"
    )
    words = [
        f"--config-dir={tmp_path}",
        "+experiment=listed",
        "ratio=0.5",
        "export=natural",
        "verify=true",
    ]
    found = cells(store, *words)
    assert len(found) == 4 and {cell["cell"]["granularity"] for cell in found} == {"channel"}
    for cell in found:
        plan = Plan.load(store / cell["plan"] / "plan.json")
        kept = sum(sum(layer.widths) for layer in plan.layers.values())
        cost = content(store, cell["cost"], "cost.json")
        assert cost["routed_kept"] == pytest.approx(kept / (4 * 32 * 64))
        if cell["cell"]["allocation"] == "coverage, aligned":
            assert {width % 8 for layer in plan.layers.values() for width in layer.widths} == {0}
        else:
            assert kept == 4 * 32 * 64 // 2
        assert 0.8 < cost["flops_ratio"] < 1 and cost["storage_bytes"] == 2 * cost["parameters"]
        assert content(store, cell["export"], "verified.json")["difference"] < 1e-4
    inputs = [content(store, cell["scores"], "step.json")["inputs"] for cell in found]
    shared = {
        kind: {folders[kind] for folders in inputs if kind in folders}
        for kind in ("statistics", "gradients")
    }
    assert {kind: len(folders) for kind, folders in shared.items()} == {
        "statistics": 1,
        "gradients": 1,
    }


def test_dropped_experts_are_replaced_by_their_mean_outputs(store: Path) -> None:
    words = [
        "allocation=uniform,novices",
        "criterion=mone",
        "ratio=0.5",
        "export=natural",
        "verify=true",
    ]
    removed, replaced = cells(store, *words)
    assert [cell["cell"]["replacement"] for cell in (removed, replaced)] == ["none", "mean_output"]
    dropping, plan = (Plan.load(store / cell["plan"] / "plan.json") for cell in (removed, replaced))
    inputs = content(store, replaced["plan"], "step.json")["inputs"]
    sums = load_arrays(store / inputs["statistics"] / "statistics.safetensors")
    for number, layer in plan.layers.items():
        dropped = dropping.layers[number].dropped
        assert layer.null_experts == dropped and layer.retained == tuple(range(32))
        means = sums[f"{number}/output_sum"] / sums[f"{number}/tokens"].clip(1)[:, None]
        numpy.testing.assert_allclose(layer.constants, means[dropped], rtol=1e-6)
    costs = [content(store, cell["cost"], "cost.json") for cell in (removed, replaced)]
    # constants and rows of the routers
    assert costs[1]["parameters"] == costs[0]["parameters"] + 4 * 16 * (128 + 128)
    assert costs[1]["flops_per_token"] < costs[0]["flops_per_token"]


@pytest.mark.parametrize(
    ("criterion", "merging"), [("frequency", "hc_smoe,merge_moe"), ("reap", "ream")]
)
def test_dropped_experts_are_merged(store: Path, criterion: str, merging: str) -> None:
    words = [
        f"criterion={criterion}",
        f"allocation={merging}",
        "ratio=0.75",
        "export=natural",
        "verify=true",
    ]
    for cell, name in zip(cells(store, *words), merging.split(","), strict=True):
        assert (cell["cell"]["allocation"], cell["cell"]["replacement"]) == ("uniform", name)
        plan = Plan.load(store / cell["plan"] / "plan.json")
        for layer in plan.layers.values():
            assert len(layer.retained) == (8 if name == "ream" else 32) and len(layer.merged) <= 8
            assert all(sum(group.values()) == pytest.approx(1) for group in layer.merged.values())
        cost = content(store, cell["cost"], "cost.json")
        assert cost["routed_kept"] == pytest.approx(0.25)
        assert cost["flops_ratio"] == pytest.approx(1, rel=0.02)  # of ream, rows of the router go


def test_channels_of_merged_experts_are_matched(store: Path) -> None:
    network = load_model(ModelConfig(name="pocket", path="pocket:olmoe", device="cpu"))[0]
    for cell in cells(store, "criterion=frequency", "allocation=m_smoe,ream", "ratio=0.75"):
        plan = Plan.load(store / cell["plan"] / "plan.json")
        unmatched = Plan.load(
            store / content(store, cell["plan"], "step.json")["inputs"]["plan"] / "plan.json"
        )
        assert plan.merged_layers and unaligned(plan) == unmatched != plan
        for number in plan.merged_layers:
            assert (plan.layers[number].alignment != numpy.arange(64)).any(1).all()
        by_weights = (cell["cell"]["allocation"], cell["cell"]["replacement"]) == (
            "global by frequency",
            "m_smoe",
        )
        assert (plan == align(network, unmatched)) == by_weights


def test_a_searched_plan_has_its_history_and_can_be_listed(store: Path) -> None:
    (searched,) = cells(store, "criterion=man", "ratio=0.25", *SHORT_SEARCH)
    assert searched["cell"]["allocation"] == "evolutionary"
    file = store / searched["plan"] / "plan.json"
    plan = Plan.load(file)
    assert sum(len(kept) for kept in plan.retained.values()) == 4 * 24
    assert file.with_name("history.parquet").exists() and content(
        store, searched["plan"], "search.json"
    )
    facts = content(store, searched["plan"], "step.json")["inputs"]["facts"]
    assert plan.provenance["model_sha256"] == content(store, facts, "facts.json")["sha256"]
    (listed,) = cells(
        store, "criterion=random", "ratio=0.25", "allocation=list", f"allocation.path={file}"
    )
    assert Plan.load(store / listed["plan"] / "plan.json") == plan


WITHOUT_MOE_LAB = """
with torch.no_grad():
    logits = load(folders[0], dtype=torch.float32)(tokens).logits
save_file({"logits": logits.contiguous()}, root / "found.safetensors")
"""


def exported_as_evaluated(
    store: Path, cell: dict[str, Any], folder: Path, bits: int = 16, *modules: str
) -> str:
    """The card of a cell's export, which gives the logits of the recovered model in a process
    without moe_lab."""
    network = load_model(ModelConfig(name="pocket", path="pocket:olmoe", device="cpu"))[0]
    plan = Plan.load(store / cell["plan"] / "plan.json")
    evaluated = recovered(network, plan, bits=bits, modules=modules, tuned=store / cell["finetune"])
    tokens = torch.arange(64)[None]
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    (folder / "export").symlink_to(store / cell["export"] / "checkpoint")
    read_alone(WITHOUT_MOE_LAB, folder)
    with torch.no_grad():
        assert torch.equal(
            load_file(folder / "found.safetensors")["logits"], evaluated(tokens).logits
        )
    return (folder / "export" / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            [
                "recovery=pocket_merge_fit",
                "recovery.fit=pocket_excerpt",
                "allocation.replacement=hc_smoe_routed",
            ],
            "(recovery=pocket_merge_fit), by least squares",
        ),
        (["recovery=pocket_router_kd", "recovery.epochs=0.2"], "its routers were trained"),
    ],
)
def test_a_recovered_model_is_exported_as_evaluated(
    store: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    (cell,) = cells(store, "criterion=man", "ratio=0.5", *words, "export=natural")
    assert content(store, cell["evaluate"]["pocket_boolq"], "result.json")["results"]
    assert says in exported_as_evaluated(store, cell, tmp_path)


def test_a_recovered_model_is_served_as_it_is_evaluated(store: Path, tmp_path: Path) -> None:
    words = [
        "criterion=man",
        "ratio=0.5",
        "recovery=pocket_dora_nf4",
        "recovery.epochs=0.1",
        "export=natural",
    ]
    words += ["suite.benchmarks=[pocket_humaneval]", "allow_code_execution=true"]
    transformers = f"{preloaded.python()} -m transformers.cli.transformers"
    server = (
        f"{transformers} serve {{checkpoint}} --host 127.0.0.1 --port {{port}} --device cpu "
        "--dtype float32"
    )
    (here,) = cells(store, *words)
    (served,) = cells(store, *words, "backend=server", f'backend.command="{server}"')
    texts = [generated(store, cell["evaluate"]["pocket_humaneval"]) for cell in (here, served)]
    assert texts[0] == texts[1] and any(texts[0])
    assert here["evaluate"] != served["evaluate"] and here["export"] == served["export"]

    card = exported_as_evaluated(store, here, tmp_path, 4, "experts", "shared_experts")
    assert (
        "recovery=pocket_dora_nf4" in card
        and "pocket_math_search" in card
        and "rounded to NF4" in card
    )
