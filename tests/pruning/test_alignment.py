"""Orders of channels of merged experts: the best of all orders, naive distances in fp64, both engines."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import naive
import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan
from tiny import logits

import moe_lab
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.alignment import align_by_activations, align_by_weights, alignment_tap
from moe_lab.pruning.mask import mask
from moe_lab.pruning.replace import merge_experts
from moe_lab.statistics.observe import gather
from moe_lab.statistics.streaming import stream


def weights_of(layer: Any, expert: int) -> list[Any]:
    """The gate row, up row and down column of each channel of an expert."""
    gate, up = layer.experts.gate_up_proj[expert].detach().double().chunk(2)
    down = layer.experts.down_proj[expert].detach().double()
    return [torch.cat((gate[i], up[i], down[:, i])).numpy() for i in range(layer.width)]


def test_of_all_orders_the_one_of_the_largest_products_of_weights_is_chosen() -> None:
    """M-SMoE: argmax over p of sum_i <gate_o[i], gate_m[p_i]> + <up_o[i], up_m[p_i]> + <down_o[i], down_m[p_i]>."""
    model = tiny.build("olmoe", intermediate_size=5)
    plan = align_by_weights(random_plan(model, "merged", share=0.5), moe_layers(model))
    compared = 0
    for layer in moe_layers(model):
        owners = plan.owners(layer.index)
        for row, member in enumerate(plan.merged_away(layer.index)):
            of_owner, of_member = weights_of(layer, owners[member]), weights_of(layer, member)
            best = max(
                permutations(range(5)),
                key=lambda order: sum(a @ of_member[j] for a, j in zip(of_owner, order, strict=True)),
            )
            assert plan.alignments[layer.index][row].tolist() == list(best)
            compared += 1
    assert compared >= 16


@pytest.mark.parametrize("by_activations", [False, True])
def test_experts_that_differ_in_the_order_of_their_channels_are_merged_without_loss(by_activations: bool) -> None:
    model, random = tiny.build("qwen3_moe"), numpy.random.default_rng(0)
    layers = moe_layers(model)
    for layer in layers:
        experts: Any = layer.experts
        with torch.no_grad():
            for member in (3, 9):
                order = torch.from_numpy(random.permutation(layer.width))
                experts.gate_up_proj[member] = experts.gate_up_proj[6][torch.cat((order, order + layer.width))]
                experts.down_proj[member] = experts.down_proj[6][:, order]
    groups = {one: {one: 1.0} for one in range(layers[0].n_experts) if one not in (3, 6, 9)} | {
        6: {3: 0.2, 6: 0.5, 9: 0.3}
    }
    widths = {layer.index: layer.width for layer in layers}
    plan = merge_experts({layer.index: groups for layer in layers}, widths, provenance={})
    if by_activations:
        aligned = align_by_activations(plan, gather(model, alignment_tap(plan), tiny.batches(), fingerprint={}).layers)
    else:
        aligned = align_by_weights(plan, layers)
    before = logits(model, tiny.tokens())
    with mask(model, aligned):
        assert (logits(model, tiny.tokens()) - before).abs().max() < 1e-5
    with mask(model, plan):
        assert (logits(model, tiny.tokens()) - before).abs().max() > 1e-3


def naive_cost(of_owner: Any, of_member: Any) -> Any:
    """(I, I) Euclidean distances of rows, each divided by its norm."""
    first, second = (rows / numpy.linalg.norm(rows, axis=1)[:, None] for rows in (of_owner, of_member))
    return numpy.array([[numpy.linalg.norm(a - b) for b in second] for a in first])


def test_ream_adds_distances_of_activations_and_of_principal_components_of_weights() -> None:
    from scipy.optimize import linear_sum_assignment

    model, (ids, valid) = tiny.build("olmoe", dtype=torch.float64, hidden_size=16), naive.batch()
    plan = replace(random_plan(model, "merged", share=0.5), alignments={})
    given: dict[int, torch.Tensor] = {}
    hooks = [
        layer.experts.register_forward_pre_hook(
            lambda module, inputs, index=layer.index: given.__setitem__(index, inputs[0].detach())
        )
        for layer in moe_layers(model)
    ]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=valid.long())
    for hook in hooks:
        hook.remove()
    sums = gather(model, alignment_tap(plan), [(ids[:2], valid[:2]), (ids[2:], valid[2:])], fingerprint={})
    aligned = align_by_activations(plan, sums.layers)
    assert not valid.all() and plan.merged
    for layer in moe_layers(model):
        states = given[layer.index][valid.flatten()]
        rows = numpy.stack([weights_of(layer, expert) for expert in range(layer.n_experts)])
        rows = rows / numpy.linalg.norm(rows, axis=2)[:, :, None]
        flat = rows.reshape(-1, rows.shape[2])
        _, singular, directions = numpy.linalg.svd(flat - flat.mean(0), full_matrices=False)
        components = ((rows - flat.mean(0)) @ directions.T) * singular
        owners = plan.owners(layer.index)
        for row, member in enumerate(plan.merged_away(layer.index)):
            phi = [layer.phi(states, layer.weights(expert)).detach().numpy().T for expert in (owners[member], member)]
            cost = naive_cost(*phi) + naive_cost(components[owners[member]], components[member])
            order = aligned.alignments[layer.index][row]
            best = cost[linear_sum_assignment(cost)].sum()
            assert cost[numpy.arange(layer.width), order].sum() == pytest.approx(best, rel=1e-6)


def test_both_engines_find_the_same_orders(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    plan = replace(random_plan(model, "merged", share=0.5), alignments={})
    streamed = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    by_weights = align_by_weights(plan, streamed.each_layer())
    assert by_weights == align_by_weights(plan, moe_layers(model)) == moe_lab.align(model, plan) != plan
    tap, batches = alignment_tap(plan), tiny.batches()
    sums = stream(streamed, tap, batches, out=tmp_path / "out", fingerprint={}, budget=0)
    by_activations = align_by_activations(plan, sums.layers)
    assert by_activations == align_by_activations(plan, gather(model, tap, batches, fingerprint={}).layers)
    assert by_activations not in (plan, by_weights)


def test_what_cannot_be_aligned_is_said(tmp_path: Path) -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "merged", share=0.5)
    for words, field in (
        ({"plan": tiny.plan(model, 0.5)}, "plan merges no experts"),
        ({"plan": plan, "length": 3}, "length"),
        ({"plan": plan, "text": ["a text"]}, "tokenizer"),
    ):
        with pytest.raises(UserError, match=field):
            moe_lab.align(model, **words)
