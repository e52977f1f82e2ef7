"""Plans whose dropped experts are merged into kept ones: naive computation, and mask = rows = prune = export."""

from __future__ import annotations

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
from moe_lab.pruning.export import export
from moe_lab.pruning.export.verify import verify
from moe_lab.pruning.flops import even_routing
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan, merge_experts
from moe_lab.pruning.prune import prune


def test_routed_pairs_are_computed_with_the_weighted_sum_of_their_group() -> None:
    """m = sum_j g_j f_G(j) with W_G = sum_i w_i W_i: gates of members of one group add up."""
    model = tiny.build("qwen3_moe", dtype=torch.float64)
    plan, layer = replace(random_plan(model, "merged", share=0.5), alignments={}), moe_layers(model)[1]
    seen: list[Any] = []
    hook = layer.experts.register_forward_hook(lambda module, given, result: seen.append((*given, result)))
    with mask(model, plan):
        logits(model, tiny.tokens())
    hook.remove()
    hidden, index, gates, result = seen[0]
    unmasked = layer.router(hidden)
    assert torch.equal(unmasked[2], index) and torch.equal(unmasked[1], gates)
    experts: Any = layer.experts
    group_of = {one: group for group in plan.merged[layer.index].values() for one in group}
    assert max(map(len, plan.merged[layer.index].values())) > 2 and len(group_of) < layer.n_experts
    expected, shared = torch.zeros_like(hidden), 0
    for token, (chosen, weights) in enumerate(zip(index.tolist(), gates.tolist(), strict=True)):
        of_group: dict[tuple[tuple[int, float], ...], float] = {}
        for expert, gate in zip(chosen, weights, strict=True):
            key = tuple(group_of.get(expert, {expert: 1.0}).items())
            of_group[key] = of_group.get(key, 0) + gate
        shared += len(of_group) < len(chosen)
        for group, gate in of_group.items():
            gate_up = sum(share * experts.gate_up_proj[one] for one, share in group)
            down = sum(share * experts.down_proj[one] for one, share in group)
            expected[token] += gate * (down @ activation(experts)(hidden[token : token + 1] @ gate_up.T)[0])
    assert shared
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
def test_shapes_of_the_original_hold_experts_without_router_rows(shape: str, tmp_path: Path) -> None:
    model = tiny.save("deepseek_v3", tmp_path / "model")
    plan = random_plan(model, "merged rows", share=0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape=shape)
    loaded = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    with mask(model, plan):
        expected = logits(model, tiny.tokens())
    torch.testing.assert_close(logits(loaded, tiny.tokens()), expected, rtol=0, atol=1e-5)
    assert verify(tmp_path / "model", plan, folder) < 1e-4
    with pytest.raises(UserError, match=shape):
        export(tmp_path / "model", random_plan(model, "merged", share=0.5), tmp_path / "other", shape=shape)


def test_merging_saves_no_operations() -> None:
    model = tiny.build("olmoe")
    plan, whole = random_plan(model, "merged"), even_routing(moe_layers(model), None)
    assert even_routing(moe_layers(model), plan) == even_routing(routed_layers(prune(model, plan)), None) == whole


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = random_plan(tiny.build("olmoe"), "merged", share=0.5)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.merged == plan.merged
    assert {layer: orders.tolist() for layer, orders in again.alignments.items()} == {
        layer: orders.tolist() for layer, orders in plan.alignments.items()
    }
    assert replace(plan, alignments={}) != plan
    changed = {**plan.merged, 1: {owner: dict.fromkeys(group, 0.5) for owner, group in plan.merged[1].items()}}
    assert Plan(plan.experts, plan.n_experts, {}, plan.channels, {}, changed) != plan


@pytest.mark.parametrize(
    "merged",
    [
        {0: {1: 1.0}},  # not among those it stands for
        {0: {0: 0.5, 2: 0.5}, 1: {1: 0.5, 2: 0.5}},  # in two groups
        {0: {0: 0.5, 1: 0.5}},  # a member with channels
        {0: {0: 0.5, 2: float("nan")}},
        {0: {0: 0.5, 9: 0.5}},
        {2: {2: 0.5, 3: 0.5}},  # an owner without channels
        {4: {4: 0.5, 2: 0.5}},  # an owner that is not kept
    ],
)
def test_groups_that_cannot_be_are_refused(merged: dict[int, dict[int, float]]) -> None:
    channels = numpy.array([[True] * 4, [True] * 4, [False] * 4, [False] * 4, [False] * 4])
    Plan({0: (0, 1, 2, 3)}, {0: 5}, {}, {0: channels}, {}, {0: {0: {0: 0.5, 2: 0.5, 4: 0.0}}})
    with pytest.raises(UserError, match="layer 0 merges"):
        Plan({0: (0, 1, 2, 3)}, {0: 5}, {}, {0: channels}, {}, {0: merged})


def test_nothing_is_merged_into_a_protected_expert() -> None:
    groups = {0: {0: {0: 0.5, 1: 0.5}, 2: {2: 1.0}, 3: {3: 1.0}}}
    plan = merge_experts(groups, {0: 4}, provenance={})
    plan.check(tiny.routers([0], 2))
    routers = tiny.routers([0], 2)
    plan.check({0: {**routers[0], "protected": (2,)}})
    with pytest.raises(UserError, match="into expert 0"):
        plan.check({0: {**routers[0], "protected": (0,)}})


@pytest.mark.parametrize(
    "alignments",
    [
        numpy.array([[0, 1, 2, 3]], dtype=numpy.int64),
        numpy.array([[0, 1, 2]], dtype=numpy.int32),
        numpy.array([[0, 1, 2, 2]], dtype=numpy.int32),
        numpy.array([[0, 1, 2, 3]] * 2, dtype=numpy.int32),  # one of them of an expert that stays as it is
    ],
)
def test_orders_that_are_no_permutations_are_refused(alignments: Any) -> None:
    channels = {0: numpy.array([[True] * 4, [True] * 4, [False] * 4])}
    merged = {0: {0: {0: 0.5, 2: 0.5}}}
    fitting = numpy.array([[3, 1, 2, 0]], dtype=numpy.int32)
    assert Plan({0: (0, 1, 2)}, {0: 3}, {}, channels, {}, merged, {0: fitting}).channel_order(0, 0) is None
    with pytest.raises(UserError, match="alignment"):
        Plan({0: (0, 1, 2)}, {0: 3}, {}, channels, {}, merged, {0: alignments})
