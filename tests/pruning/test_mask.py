"""A mask computes what the pruned model does, and leaves nothing behind. `identities` compares all families."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

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
from moe_lab.exported_code.ragged import RaggedExperts
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune

MODELS = {name: tiny.build(name) for name in ("olmoe", "deepseek_v3:grouped", "ernie4_5_moe", "minimax_m2")}


def under(model: nn.Module, plan: Plan) -> torch.Tensor:
    with mask(model, plan):  # type: ignore[arg-type]
        return logits(model)


def full(plan: Plan) -> Plan:
    """The same experts with all channels."""
    channels = {layer: numpy.zeros_like(rows) for layer, rows in plan.channels.items()}
    for layer, rows in channels.items():
        rows[list(plan.experts[layer])] = True
    return replace(plan, channels=channels)


def check(model: nn.Module, plan: Plan, tolerance: float) -> None:
    """Channels are as good as gone when their columns of down_proj are 0."""
    before, reference = logits(model), copy.deepcopy(model)
    for layer in moe_layers(reference):
        layer.experts.down_proj.data *= torch.from_numpy(plan.channels[layer.index])[:, None, :]
    masked = under(model, plan)
    assert (masked - under(reference, replace(plan, channels={}))).abs().max() <= tolerance
    assert (logits(prune(model, plan)) - masked).abs().max() <= tolerance
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "qwen3_next"])
def test_they_are_the_same_function_in_double_precision(name: str) -> None:
    model = tiny.build(name, dtype=torch.float64)
    check(model, random_plan(model, "ragged"), 1e-12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 2**32), st.sampled_from([None, 1, 8, 24]), st.booleans())
def test_any_plan(name: str, seed: int, width: int | None, drop: bool) -> None:
    way, share = "ragged" if width is None else "one width", None if drop else 1.0
    check(MODELS[name], random_plan(MODELS[name], way, seed, share, width or 0), 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_all_channels_is_bit_for_bit_the_plan_of_whole_experts(name: str) -> None:
    model = MODELS[name]
    plan = full(random_plan(model, "ragged"))
    whole = replace(plan, channels={})
    pruned = prune(model, plan)
    assert torch.equal(under(model, plan), under(model, whole))
    assert torch.equal(logits(pruned), under(model, whole))
    assert pruned.config.to_dict() == prune(model, whole).config.to_dict()
    assert not any(isinstance(module, RaggedExperts) for module in pruned.modules())


@pytest.mark.parametrize("way", ["ragged", "constants"])
def test_grouped_matrix_products_stay(way: str) -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, way, share=0.5)
    expected = under(model, plan)
    with mask(model, plan):  # in force, whatever computes the experts meanwhile
        model.set_experts_implementation("grouped_mm")
        assert torch.equal(logits(model), expected)
    before, grouped = logits(model), under(model, plan)
    assert (grouped - expected).abs().max() <= 1e-5 and not torch.equal(grouped, expected)
    if way == "ragged":
        assert torch.equal(under(model, full(plan)), under(model, replace(plan, channels={})))
    assert torch.equal(logits(model), before) and model.config._experts_implementation == "grouped_mm"
    assert "_apply_gate" not in vars(moe_layers(model)[0].experts)


def test_infinite_values_of_dropped_channels_do_not_come_through() -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "ragged")
    gate_up, dropped = moe_layers(model)[0].experts.gate_up_proj.data, torch.from_numpy(~plan.channels[0])
    gate_up[torch.cat((dropped, dropped), 1)] *= 1e30
    assert torch.isfinite(under(model, plan)).all()
    assert not torch.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    ("name", "way"), [("minimax_m2", "even"), ("phimoe", "even"), ("ernie4_5_moe", "even"), ("minimax_m2", "ragged")]
)
def test_model_is_restored_after_an_error(name: str, way: str) -> None:
    model = tiny.build(name)
    plan = random_plan(model, way)
    before = dict([*model.named_parameters(), *model.named_buffers()])
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    with pytest.raises(ZeroDivisionError), mask(model, plan):
        logits(model)
        raise ZeroDivisionError
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[key] is before[key] for key in before)
    for path, module in model.named_modules():
        assert vars(module).keys() == attributes[path].keys()
        for key in ("num_experts", "out_features", "top_k"):
            assert vars(module).get(key) == attributes[path].get(key)
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_experts_called_past_the_mask_are_noticed() -> None:
    model = tiny.build("olmoe")
    layer = moe_layers(model)[1]
    hidden = torch.zeros(2, layer.hidden)
    with mask(model, tiny.plan(model, 0.5)):
        logits(model)
        _, gates, chosen = layer.router.forward(hidden)  # type: ignore[operator]
        with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp\.experts"):
            layer.experts(hidden, chosen, gates)


def test_hooks_see_original_ids() -> None:
    model = tiny.build("olmoe")
    plan, seen = tiny.plan(model, 0.5), []
    for layer in moe_layers(model):
        layer.router.register_forward_hook(lambda module, inputs, output, at=layer.index: seen.append((at, output[2])))
    under(model, plan)
    assert [at for at, _ in seen] == [0, 1, 2]
    assert all(set(chosen.unique().tolist()) <= set(plan.experts[at]) for at, chosen in seen)


@contextmanager
def pruned(model: Any, plan: Plan) -> Iterator[None]:
    prune(model, plan)
    yield


@pytest.mark.parametrize("way", [mask, pruned])
def test_plans_of_other_models_are_refused(way: Any) -> None:
    model = tiny.build("olmoe")
    channels, constants = random_plan(model, "ragged"), random_plan(model, "constants", share=0.5)
    for plan, field in (
        (tiny.plan(tiny.build("mixtral"), 0.5), "another model"),
        (tiny.plan(tiny.build("deepseek_v3"), 0.5), "another model"),
        (replace(channels, channels={at: rows[:, :20] for at, rows in channels.channels.items()}), "another model"),
        (replace(constants, constants={1: constants.constants[1][:, :5]}), "another model"),
        (Plan(dict.fromkeys(range(3), (0, 1)), dict.fromkeys(range(3), 16)), "top_k=4"),
    ):
        with pytest.raises(UserError, match=field), way(model, plan):
            pass
        assert not any(module._forward_hooks for module in model.modules())
