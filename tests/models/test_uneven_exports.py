"""Our own exports whose layers differ in shape are models like others, as far as they can be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch
from identities.plans import random_plan
from tiny import logits, settings

from moe_lab.errors import UserError
from moe_lab.models.discover import routed_layers
from moe_lab.models.facts import facts
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.serving import vllm_plugin
from tests.campaign.models import reconfigure

CASES = [(name, kind) for name in ("olmoe", "deepseek_v3", "deepseek") for kind in ("uneven", "ragged")]


@dataclass(frozen=True)
class Case:
    """An export of one architecture."""

    name: str
    kind: str
    folder: Path
    plan: Plan


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, kind = request.param
    root = tmp_path_factory.mktemp(f"{name}-{kind}")
    plan = random_plan(tiny.save(name, root / "source"), kind, share=0.8 if kind == "ragged" else None)
    return Case(name, kind, export(root / "source", plan, root / f"{name}_{kind}"), plan)


def test_its_facts_are_its_own(case: Case) -> None:
    found = facts(settings(case.folder, trust_remote_code=True))
    pruned = prune(tiny.build(case.name), case.plan)
    assert found["parameters"] == sum(weight.numel() for weight in pruned.parameters())
    for layer in routed_layers(pruned):
        about = found["layers"][layer.index]
        assert about["n_experts"] == len(case.plan.experts[layer.index])
        assert about.get("widths", [layer.width] * layer.n_experts) == list(layer.widths)
        assert about["width"] == round(sum(layer.widths) / layer.n_experts)
        assert about["expert_parameters"] == round(3 * layer.hidden * sum(layer.widths) / layer.n_experts)
    json.dumps(found)


def test_only_stacks_can_be_pruned_again(case: Case) -> None:
    model, _ = load_model(settings(case.folder, trust_remote_code=True))
    counts = {layer.index: layer.n_experts for layer in routed_layers(model)}
    again = Plan({index: tuple(range(count - 1)) for index, count in counts.items()}, counts, {})
    if case.kind == "uneven":
        with mask(model, again):
            masked = logits(model)
        assert torch.equal(masked, logits(prune(model, again)))
        return
    refused = r"model_type=pruned_\w+ can be evaluated, but neither scored nor pruned: .*experts is not a stack"
    for attempt in (lambda: prune(model, again), lambda: mask(model, again).__enter__()):
        with pytest.raises(UserError, match=refused):
            attempt()


def test_without_trust_one_sentence_says_what_to_set(case: Case, tmp_path: Path) -> None:
    """Layers that transformers has need none, whatever the configuration maps."""
    for attempt in (load_model, facts):
        with pytest.raises(UserError, match=r"model_type=pruned_.*model\.trust_remote_code=true") as caught:
            attempt(settings(case.folder))
        assert "\n" not in str(caught.value)
    tiny.save("olmoe", tmp_path)
    reconfigure(tmp_path, auto_map={"AutoConfig": "x.Y"})
    load_model(settings(tmp_path))


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
