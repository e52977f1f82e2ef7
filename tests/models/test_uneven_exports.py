"""Our own exports whose layers differ in shape are models like others, as far as they can be."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from identities.plans import random_plan
from safetensors.torch import load_file, save_file
from tiny import logits

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import is_ragged, routed_layers
from moe_lab.models.facts import facts
from moe_lab.models.load import load_model, skeleton
from moe_lab.pruning.cost import cost, measured_routing, row_flops
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.serving import vllm_plugin

NAMES = ("olmoe", "deepseek_v3", "deepseek")
KINDS = ("uneven", "ragged")


@dataclass(frozen=True)
class Case:
    """An export of one architecture."""

    name: str
    kind: str
    folder: Path
    plan: Plan


@pytest.fixture(scope="module", params=[(name, kind) for name in NAMES for kind in KINDS], ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, kind = request.param
    root = tmp_path_factory.mktemp(f"{name}-{kind}")
    plan = random_plan(tiny.save(name, root / "source"), kind, share=0.8 if kind == "ragged" else None)
    return Case(name, kind, export(root / "source", plan, root / f"{name}_{kind}"), plan)


def settings(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(name="m", path=str(folder), **{"trust_remote_code": True, "device": "cpu", **changes})


def test_its_facts_are_its_own(case: Case) -> None:
    found = facts(settings(case.folder))
    pruned = prune(tiny.build(case.name), case.plan)
    assert found["parameters"] == sum(weight.numel() for weight in pruned.parameters())
    for layer in routed_layers(pruned):
        about = found["layers"][layer.index]
        assert about["n_experts"] == len(case.plan.experts[layer.index])
        assert about.get("widths", [layer.width] * layer.n_experts) == list(layer.widths)
        assert about["width"] == round(sum(layer.widths) / layer.n_experts)
        assert about["expert_parameters"] == round(3 * layer.hidden * sum(layer.widths) / layer.n_experts)
    json.dumps(found)


def test_its_cost_is_that_of_the_plan_on_the_original(case: Case) -> None:
    model, _ = load_model(settings(case.folder))
    ids = tiny.tokens()
    batches = [(ids, torch.ones_like(ids, dtype=torch.bool))]
    whole = tiny.build(case.name)
    about = {"parameters": sum(weight.numel() for weight in whole.parameters()), "bytes_per_parameter": 2}
    row = row_flops(skeleton(case.folder, trust_remote_code=True).eval(), ids.shape[1])
    for bits in (16, 4):
        routing = measured_routing(whole, case.plan, batches)
        expected = cost(whole, case.plan, row_flops(whole, ids.shape[1]), routing, facts=about, bits=bits)
        routing = measured_routing(model, None, batches)
        found = cost(model, None, row, routing, facts=facts(settings(case.folder)), bits=bits)
        for key in ("parameters", "storage_bytes", "loading_bytes", "flops_per_token"):
            assert found[key] == expected[key], key
        assert found["flops_by_part"] == expected["flops_by_part"]
        assert (found["parameters_kept"], found["routed_kept"], found["flops_ratio"]) == (1, 1, 1)


def test_only_stacks_can_be_pruned_again(case: Case) -> None:
    model, _ = load_model(settings(case.folder))
    again = Plan(
        {layer.index: tuple(range(layer.n_experts - 1)) for layer in routed_layers(model)},
        {layer.index: layer.n_experts for layer in routed_layers(model)},
        {},
    )
    if case.kind == "uneven":
        with mask(model, again):
            masked = logits(model)
        assert torch.equal(masked, logits(prune(model, again)))
        return
    refused = r"model_type=pruned_\w+ can be evaluated, but neither scored nor pruned: .*experts is not a stack"
    for attempt in (lambda: prune(model, again), lambda: mask(model, again).__enter__()):
        with pytest.raises(UserError, match=refused):
            attempt()


def test_without_trust_one_sentence_says_what_to_set(case: Case) -> None:
    folder = case.folder
    for attempt in (load_model, facts):
        with pytest.raises(UserError, match=r"model_type=pruned_.*model\.trust_remote_code=true") as caught:
            attempt(settings(folder, trust_remote_code=False))
        assert "\n" not in str(caught.value)


def test_native_layers_with_an_auto_map_need_no_trust(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "x.Y"}}))
    load_model(settings(tmp_path, trust_remote_code=False))


@pytest.mark.parametrize("tensor", ["gate_up_packed", "down_packed"])
def test_a_bad_weight_is_named(tensor: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = tiny.save("olmoe", source)
    plan = random_plan(model, "ragged", share=0.8)
    folder = export(source, plan, tmp_path / "broken")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (layer, *_) = [layer for layer in routed_layers(prune(model, plan)) if is_ragged(layer.experts)]
    assert 0 in layer.widths[:5] and layer.widths[5]
    first = sum(layer.widths[:5])  # the first channel of expert 5, which is behind one without channels
    row = first * (2 if tensor == "gate_up_packed" else 1)
    tensors[f"{layer.name}.{tensor}"][row, 3] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=re.escape(f"{layer.name}.{tensor} holds inf at [{row}, 3]")):
        load_model(settings(folder))


def test_the_plugin_of_vllm_reads_exports_as_models_of_their_family(tmp_path: Path) -> None:
    """And refuses those that vLLM would serve wrong. vLLM's own classes are none of its business."""
    tiny.save("olmoe", tmp_path / "model")
    counts = {0: 8, 1: 9, 2: 10}
    plan = Plan({layer: tuple(range(count)) for layer, count in counts.items()}, dict.fromkeys(range(3), 16))
    out = export(tmp_path / "model", plan, tmp_path / "out")
    stock, config = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "model", out))
    assert vllm_plugin.family_config("x", stock) == stock
    assert vllm_plugin.family_config("x", config) == {
        **stock,
        "architectures": ["PrunedOlmoeForCausalLM"],
        "num_experts": 10,
        vllm_plugin.LAYERS: {str(layer): {"num_experts": count} for layer, count in counts.items()},
    }
    about = config["pruned"]
    ragged = {"0": {"experts": 2, "widths": [1, 2]}}
    for changed, word in (({"format": 3}, "pruned.format=3"), ({"layers": ragged}, "export=padded")):
        with pytest.raises(ValueError, match="export") as caught:
            vllm_plugin.family_config(str(out), {**config, "pruned": {**about, **changed}})
        assert word in str(caught.value) and str(out) in str(caught.value) and "\n" not in str(caught.value)
