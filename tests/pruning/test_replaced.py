"""Plans whose dropped experts are merged into kept ones, or put out constants."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan
from tiny import logits
from transformers import AutoModelForCausalLM

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.experts import activation
from moe_lab.pruning.cost import even_routing, size
from moe_lab.pruning.export import export
from moe_lab.pruning.export.verify import verify
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.replace import merge_experts, replace_by_constants


@pytest.mark.parametrize("way", ["merged", "constants"])
def test_each_routed_pair_adds_what_stands_for_its_expert(way: str) -> None:
    """m = sum_j g_j f_G(j) with W_G = sum_i w_i W_i, or sum_j g_j c_j, with the router of the original."""
    model = tiny.build("qwen3_moe", dtype=torch.float64)
    plan, layer = replace(random_plan(model, way, share=0.5), alignments={}), moe_layers(model)[1]
    seen: list[Any] = []
    hook = layer.experts.register_forward_hook(lambda module, given, result: seen.append((*given, result)))
    with mask(model, plan):
        logits(model)
    hook.remove()
    hidden, index, gates, result = seen[0]
    unmasked = layer.router(hidden)
    assert torch.equal(unmasked[2], index) and torch.equal(unmasked[1], gates)
    experts: Any = layer.experts
    group_of = {one: group for group in plan.merged.get(layer.index, {}).values() for one in group}
    null = zip(plan.null_experts(layer.index), plan.constants.get(layer.index, ()), strict=True)
    constants = {expert: torch.from_numpy(constant).double() for expert, constant in null}
    assert 0 < len({**group_of, **constants}) < layer.n_experts
    expected = torch.zeros_like(hidden)
    for token, (chosen, weights) in enumerate(zip(index.tolist(), gates.tolist(), strict=True)):
        for expert, gate in zip(chosen, weights, strict=True):
            group = group_of.get(expert, {expert: 1.0}).items()
            gate_up = sum(share * experts.gate_up_proj[one] for one, share in group)
            down = sum(share * experts.down_proj[one] for one, share in group)
            computed = down @ activation(experts)(hidden[token : token + 1] @ gate_up.T)[0]
            expected[token] += gate * constants.get(expert, computed)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_experts_without_a_router_row_lend_their_weights_only() -> None:
    """The router chooses among the experts that stand for a group; their weights are those of the merging plan."""
    model = tiny.build("qwen3_moe")
    whole, plan = random_plan(model, "merged", share=0.5), random_plan(model, "merged rows", share=0.5)
    assert plan.merged == whole.merged and not plan.shares_experts and whole.shares_experts
    pruned, unmerged = prune(model, plan), prune(model, Plan(plan.experts, plan.n_experts))
    for merged, dropped in zip(moe_layers(pruned), moe_layers(unmerged), strict=True):
        assert torch.equal(merged.router.weight, dropped.router.weight)
        changed = set(plan.merged[merged.index])
        for place, expert in enumerate(plan.experts[merged.index]):
            same = torch.equal(merged.experts.down_proj[place], dropped.experts.down_proj[place])
            assert same == (expert not in changed)


@pytest.mark.parametrize("shape", ["masked", "padded"])
def test_shapes_of_the_original_hold_experts_without_router_rows_alone(shape: str, tmp_path: Path) -> None:
    model = tiny.save("deepseek_v3", tmp_path / "model")
    plan = random_plan(model, "merged rows", share=0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape=shape)
    loaded = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    with mask(model, plan):
        expected = logits(model)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    assert verify(tmp_path / "model", plan, folder) < 1e-4
    for way in ("merged", "constants"):
        with pytest.raises(UserError, match=f"export={re.escape(shape)}.*export=natural"):
            export(tmp_path / "model", random_plan(model, way, share=0.5), tmp_path / "other", shape=shape)
        assert not (tmp_path / "other").exists()


def test_an_export_states_and_has_the_constants(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    plan = random_plan(model, "constants", share=0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "out")
    before, after = sum(plan.n_experts.values()), sum(int(mask.any(1).sum()) for mask in plan.channels.values())
    assert f"{after} of {before} routed experts" in (folder / "README.md").read_text()
    zeros = export(tmp_path / "model", replace(plan, constants={}), tmp_path / "zeros")
    with_zeros = AutoModelForCausalLM.from_pretrained(zeros, trust_remote_code=True, experts_implementation="eager")
    assert (logits(with_zeros) - logits(prune(model, plan))).abs().max() > 1e-2


def test_merging_saves_no_operations() -> None:
    model = tiny.build("olmoe")
    plan, whole = random_plan(model, "merged"), even_routing(moe_layers(model), None)
    assert even_routing(moe_layers(model), plan) == even_routing(routed_layers(prune(model, plan)), None) == whole


def test_a_constant_costs_one_number_for_each_hidden_unit() -> None:
    model = tiny.build("olmoe")
    plan, dropping = random_plan(model, "constants", share=0.5), tiny.plan(model, 0.5)
    facts = {"parameters": sum(weight.numel() for weight in model.parameters()), "bytes_per_parameter": 2}
    constants = sum(array.size for array in plan.constants.values())
    routers = sum(layer.hidden * layer.n_experts // 2 for layer in moe_layers(model))
    less = size(model, dropping, facts=facts)["parameters"]
    assert size(model, plan, facts=facts)["parameters"] == less + constants + routers


@pytest.mark.parametrize(("way", "field"), [("merged", "alignments"), ("constants", "constants")])
def test_a_plan_is_read_as_it_was_written(way: str, field: str, tmp_path: Path) -> None:
    plan = random_plan(tiny.build("olmoe"), way, share=0.5)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.merged == plan.merged
    arrays = getattr(plan, field)
    assert all(numpy.array_equal(getattr(again, field)[layer], arrays[layer]) for layer in arrays)
    other = replace(plan, **{field: {layer: array[:, ::-1].copy() for layer, array in arrays.items()}})
    assert other != plan != replace(plan, **{field: {}})
    other.save(tmp_path / "other.json")
    numpy.save(tmp_path / "array.npy", arrays[1])
    for file in ("other.npz", "array.npy"):
        (tmp_path / "plan.npz").write_bytes((tmp_path / file).read_bytes())
        with pytest.raises(UserError, match=r"plan\.json is damaged"):
            Plan.load(tmp_path / "plan.json")
    for damaged in (b"PK", b""):
        (tmp_path / "plan.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"plan\.json is damaged"):
            Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.npz").unlink()
    with pytest.raises(UserError, match=r"plan\.npz"):
        Plan.load(tmp_path / "plan.json")


def test_groups_belong_to_a_plan() -> None:
    plan = random_plan(tiny.build("olmoe"), "merged", share=0.5)
    halves = {**plan.merged, 1: {owner: dict.fromkeys(group, 0.5) for owner, group in plan.merged[1].items()}}
    assert replace(plan, merged=halves) != plan


def test_nothing_is_merged_into_a_protected_expert() -> None:
    groups = {0: {0: {0: 0.5, 1: 0.5}, 2: {2: 1.0}, 3: {3: 1.0}}}
    plan, routers = merge_experts(groups, {0: 4}, provenance={}), tiny.routers([0], 2)
    plan.check({0: {**routers[0], "protected": (2,)}})
    with pytest.raises(UserError, match=r"expert 0\b"):
        plan.check({0: {**routers[0], "protected": (0,)}})


def test_the_mean_output_of_a_novice() -> None:
    """Outputs (1,0), (3,0), (2,3) of three tokens: the novice is (2,1), and a gate of .35 adds (.70,.35)."""
    outputs = numpy.array([[1, 0], [3, 0], [2, 3]], dtype=float)
    plan = replace_by_constants(Plan({0: (1,)}, {0: 2}), {0: numpy.stack([outputs.mean(0), outputs[0]])}, {0: 4})
    assert plan.experts[0] == (0, 1) and plan.null_experts(0) == [0]
    assert (0.35 * plan.constants[0][0]).tolist() == pytest.approx([0.70, 0.35])
