from __future__ import annotations

import copy
from dataclasses import replace

import numpy
import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from identities.plans import random_plan
from tiny import logits
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.exported_code.ragged import RaggedExperts
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune

MODELS = {name: tiny.build(name) for name in ("olmoe", "deepseek_v3:grouped", "ernie4_5_moe", "minimax_m2")}


def zeroed(model: nn.Module, plan: Plan) -> nn.Module:
    """The reference: a copy of the model whose dropped channels have no way out, their columns of down_proj are 0."""
    reference = copy.deepcopy(model)
    for layer in moe_layers(reference):
        kept = torch.from_numpy(plan.channels[layer.index])
        layer.experts.down_proj.data *= kept[:, None, :]
    return reference


def full(plan: Plan) -> Plan:
    """The same experts with all channels."""
    channels = {layer: numpy.zeros_like(rows) for layer, rows in plan.channels.items()}
    for layer, rows in channels.items():
        rows[list(plan.experts[layer])] = True
    return replace(plan, channels=channels)


def check(model: nn.Module, plan: Plan, tolerance: float) -> None:
    before = logits(model)
    with mask(model, plan):
        masked = logits(model)
    with mask(reference := zeroed(model, plan), replace(plan, channels={})):
        expected = logits(reference)
    pruned = logits(prune(model, plan))
    assert (masked - expected).abs().max() <= tolerance
    assert (pruned - masked).abs().max() <= tolerance
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "qwen3_next"])
def test_they_are_the_same_function_in_double_precision(name: str) -> None:
    model = tiny.build(name, dtype=torch.float64)
    check(model, random_plan(model, "ragged"), 1e-12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(0, 2**32),
    st.sampled_from([None, 1, 8, 24]),
    st.booleans(),
)
def test_any_plan(name: str, seed: int, width: int | None, drop: bool) -> None:
    way, share = "ragged" if width is None else "one width", None if drop else 1.0
    check(MODELS[name], random_plan(MODELS[name], way, seed, share, width or 0), 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_all_channels_is_bit_for_bit_the_plan_of_whole_experts(name: str) -> None:
    model = tiny.build(name)
    plan = full(random_plan(model, "ragged"))
    with mask(model, replace(plan, channels={})):
        expected = logits(model)
    with mask(model, plan):
        assert torch.equal(logits(model), expected)
    pruned = prune(model, plan)
    assert torch.equal(logits(pruned), expected)
    assert pruned.config.to_dict() == prune(model, replace(plan, channels={})).config.to_dict()
    assert not any(isinstance(module, RaggedExperts) for module in pruned.modules())


def test_grouped_matrix_products_stay() -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "ragged")
    with mask(model, plan):
        expected = logits(model)
    model.set_experts_implementation("grouped_mm")
    before = logits(model)
    with mask(model, plan):
        grouped = logits(model)
    with mask(model, full(plan)):
        all_channels = logits(model)
    with mask(model, replace(plan, channels={})):
        assert torch.equal(logits(model), all_channels)
    assert (grouped - expected).abs().max() <= 1e-5 and not torch.equal(grouped, expected)
    assert torch.equal(logits(model), before) and model.config._experts_implementation == "grouped_mm"
    assert "_apply_gate" not in vars(moe_layers(model)[0].experts)


def test_infinite_values_of_dropped_channels_do_not_come_through() -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "ragged")
    experts = moe_layers(model)[0].experts
    dropped = torch.from_numpy(~plan.channels[0])
    experts.gate_up_proj.data[:, :24][dropped] *= 1e30
    experts.gate_up_proj.data[:, 24:][dropped] *= 1e30
    with mask(model, plan):
        assert torch.isfinite(logits(model)).all()
    assert not torch.isfinite(logits(model)).all()


def test_the_mask_is_in_force_whatever_computes_the_experts_of_the_model() -> None:
    model = tiny.build("olmoe")
    with mask(model, random_plan(model, "ragged")):
        expected = logits(model)
        model.set_experts_implementation("grouped_mm")
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("way", [mask, prune])
def test_what_cannot_be_pruned_is_refused_first(way: object) -> None:
    def refused(model: nn.Module, plan: Plan, message: str) -> None:
        with pytest.raises(UserError, match=message):
            result = way(model, plan)  # type: ignore[operator]
            result.__enter__()
        assert not any(module._forward_hooks for module in model.modules())

    model = tiny.build("olmoe")
    plan = random_plan(model, "ragged")
    narrow = {layer: rows[:, :20] for layer, rows in plan.channels.items()}
    refused(model, replace(plan, channels=narrow), "about 20 channels per expert in layer 0, this model has 24")
