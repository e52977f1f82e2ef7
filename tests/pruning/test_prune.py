"""Masks, which leave nothing behind; pruning in memory; packed experts. `identities` compares all
families."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from identities.plans import random_plan, whole_expert_plan
from tiny import logits
from torch import nn

from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import RaggedExperts
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune

NAMES = ("olmoe", "deepseek_v3:grouped", "ernie4_5_moe", "minimax_m2")
MODELS = {name: tiny.build(name, dtype=torch.float64) for name in NAMES}


def under(model: nn.Module, plan: Plan) -> torch.Tensor:
    with mask(model, plan):  # type: ignore[arg-type]
        return logits(model)


def full(plan: Plan) -> Plan:
    """The same experts with all channels."""
    layers = {}
    for number, layer in plan.layers.items():
        channels = numpy.zeros((layer.n_experts, layer.width), dtype=bool)
        channels[list(layer.retained)] = True
        layers[number] = replace(layer, channels=channels)
    return Plan(layers)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 2**32),
    st.sampled_from([None, 0, 1, 8, 24]),
    st.booleans(),
)
def test_channels_with_columns_of_0_are_as_good_as_gone(
    name: str, seed: int, width: int | None, drop: bool
) -> None:
    model = MODELS[name]
    plan = random_plan(
        model, "ragged" if width is None else "one width", seed, None if drop else 1.0, width or 0
    )
    original = logits(model)
    reference = copy.deepcopy(model)
    for layer in moe_layers(reference):
        layer.experts.down_proj.data *= torch.from_numpy(plan.layers[layer.index].channels)[
            :, None, :
        ]
    masked = under(model, plan)
    assert (masked - under(reference, whole_expert_plan(plan))).abs().max() <= 1e-12
    assert (logits(prune(model, plan)) - masked).abs().max() <= 1e-12
    assert torch.equal(logits(model), original)


@pytest.mark.parametrize("name", MODELS)
def test_mask_of_all_channels_is_the_plan_of_whole_experts(name: str) -> None:
    model = MODELS[name]
    plan = full(random_plan(model, "ragged"))
    dropping = whole_expert_plan(plan)
    pruned = prune(model, plan)
    assert torch.equal(under(model, plan), under(model, dropping))
    assert torch.equal(logits(pruned), under(model, dropping))
    assert pruned.config.to_dict() == prune(model, dropping).config.to_dict()
    assert not any(isinstance(module, RaggedExperts) for module in pruned.modules())


@pytest.mark.parametrize("way", ["ragged", "constants", "merged"])
def test_grouped_matrix_products_stay(way: str) -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, way, share=0.5)
    expected = under(model, plan)
    with mask(model, plan):  # in force, whatever computes the experts meanwhile
        model.set_experts_implementation("grouped_mm")
        assert torch.equal(logits(model), expected)
    original = logits(model)
    grouped = under(model, plan)
    assert (grouped - expected).abs().max() <= 1e-5
    assert not torch.equal(grouped, expected)
    if way == "ragged":
        assert torch.equal(under(model, full(plan)), under(model, whole_expert_plan(plan)))
    assert torch.equal(logits(model), original)
    assert model.config._experts_implementation == "grouped_mm"


def test_infinite_values_of_dropped_channels_do_not_come_through() -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "ragged")
    gate_up = moe_layers(model)[0].experts.gate_up_proj.data
    dropped = torch.from_numpy(~plan.layers[0].channels)
    gate_up[torch.cat((dropped, dropped), 1)] *= 1e30
    assert torch.isfinite(under(model, plan)).all()
    assert not torch.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("minimax_m2", "even"),
        ("phimoe", "even"),
        ("ernie4_5_moe", "even"),
        ("minimax_m2", "ragged"),
    ],
)
def test_model_is_restored_after_an_error(name: str, way: str) -> None:
    model = tiny.build(name)
    plan = random_plan(model, way)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    with pytest.raises(ZeroDivisionError), mask(model, plan):
        logits(model)
        raise ZeroDivisionError
    restored = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(restored[key] is tensors[key] for key in tensors)
    for path, module in model.named_modules():
        assert vars(module).keys() == attributes[path].keys()
        for key in ("num_experts", "out_features", "top_k"):
            assert vars(module).get(key) == attributes[path].get(key)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_mask_shows_hooks_original_ids_and_notices_direct_calls() -> None:
    model = tiny.build("olmoe")
    seen = {}
    plan = tiny.plan(model, 0.5)
    layers = moe_layers(model)
    for layer in layers:
        layer.router.register_forward_hook(
            lambda _, args, output, index=layer.index: seen.update({index: output[2]})
        )
    with mask(model, plan):
        logits(model)
        assert list(seen) == [0, 1, 2]
        assert all(
            set(chosen.unique().tolist()) <= set(plan.layers[index].retained)
            for index, chosen in seen.items()
        )
        layer = layers[1]
        hidden = torch.zeros(2, 32)
        _, gates, chosen = layer.router.forward(hidden)  # type: ignore[operator]
        with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp\.experts"):
            layer.experts(hidden, chosen, gates)


@pytest.mark.parametrize(
    "way", [mask, lambda model, plan: nullcontext(prune(model, plan))], ids=["mask", "prune"]
)
def test_plans_of_other_models_are_refused(way: Any) -> None:
    model = tiny.build("olmoe")
    channels = random_plan(model, "ragged")
    constants = random_plan(model, "constants", share=0.5)
    narrow = {
        index: replace(layer, channels=layer.channels[:, :20])
        for index, layer in channels.layers.items()
    }
    short = replace(constants.layers[1], constants=constants.layers[1].constants[:, :5])
    for plan, field in (
        (tiny.plan(tiny.build("mixtral"), 0.5), "another model"),
        (tiny.plan(tiny.build("deepseek_v3"), 0.5), "another model"),
        (Plan(narrow), "another model"),
        (replace(constants, layers={**constants.layers, 1: short}), "another model"),
        (Plan.of_experts(dict.fromkeys(range(3), (0, 1)), dict.fromkeys(range(3), 16)), "top_k=4"),
    ):
        with pytest.raises(UserError, match=field), way(model, plan):
            pass
        assert not any(module._forward_hooks for module in model.modules())


# ---- pruning in memory


@pytest.mark.parametrize("way", ["even", "ragged"])
def test_original_is_untouched_and_unchanged_weights_are_shared(way: str) -> None:
    model = tiny.build("deepseek_v3")
    original = tiny.cloned_state(model)
    pruned = prune(model, random_plan(model, way, share=0.5))
    assert not tiny.differing(model.state_dict(), original)
    assert model.config.n_routed_experts == 16
    assert pruned.config.n_routed_experts == 8
    theirs = dict(pruned.named_parameters())
    shared = {key for key, value in model.named_parameters() if theirs.get(key) is value}
    assert {key for key, _ in model.named_parameters()} - shared == {
        f"model.layers.{layer}.mlp.{part}"
        for layer in (1, 2)
        for part in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    }
    assert not any(parameter.requires_grad for parameter in pruned.parameters())


def test_counts_and_axes_of_the_experts_that_are_left() -> None:
    model = tiny.build("gpt_oss", num_local_experts=32)  # as many experts as hidden units
    layer = moe_layers(prune(model, tiny.plan(model, 0.5)))[0]
    assert layer.router.weight.shape == (16, 32)
    assert layer.router.bias.shape == (16,)
    assert layer.experts.gate_up_proj.shape == (
        16,
        32,
        48,
    )
    assert layer.experts.down_proj_bias.shape == (16, 32)
    model = tiny.build("mixtral")
    pruned = prune(model, tiny.plan(model, 0.5))
    assert pruned(input_ids=tiny.tokens(), output_router_logits=True).aux_loss > 0
    assert pruned.num_experts == 4
    assert model.num_experts == 8


@pytest.mark.parametrize("way", ["uneven", "one width", "ragged"])
def test_save_refuses_models_that_stock_code_cannot_read(way: str, tmp_path: Path) -> None:
    model = tiny.build("olmoe")
    pruned = prune(model, random_plan(model, way, width=16))
    with pytest.raises(UserError, match="save_pretrained"):
        pruned.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    if way == "uneven":  # pruned again, all layers are alike
        layers = moe_layers(pruned)
        four = {layer.index: LayerPlan(layer.n_experts, (0, 1, 2, 3)) for layer in layers}
        again = prune(pruned, Plan(four))
        again.save_pretrained(tmp_path)
        reloaded = tiny.load(tmp_path)
        assert torch.equal(logits(again), logits(reloaded))
        assert reloaded.config.num_experts == 4


def test_layers_of_one_width_keep_the_modules_of_the_family() -> None:
    model = tiny.build("deepseek_v3")
    pruned = prune(model, random_plan(model, "one width", share=1.0, width=16))
    for layer in moe_layers(pruned):
        assert type(layer.experts) is type(moe_layers(model)[0].experts)
        assert layer.width == 16
        assert layer.experts.intermediate_dim == 16
    expected = logits(pruned)
    pruned.set_experts_implementation("grouped_mm")
    assert (logits(pruned) - expected).abs().max() <= 1e-5
    narrow = prune(tiny.build("olmoe"), random_plan(tiny.build("olmoe"), "one width", width=12))
    assert all(isinstance(layer.mlp.experts, RaggedExperts) for layer in narrow.model.layers)
    narrow.set_experts_implementation("grouped_mm")
    assert torch.isfinite(logits(narrow)).all()
    wider = tiny.build("olmoe", intermediate_size=13)
    assert {
        layer.width for layer in moe_layers(prune(wider, random_plan(wider, "one width", width=13)))
    } == {13}


# ---- packed experts

STOCK = moe_layers(MODELS["olmoe"])[0].experts


def test_gradients_flow_to_weights_hidden_states_and_gates() -> None:
    experts = RaggedExperts(STOCK, [3, 0, 5, 2])
    for parameter in experts.parameters():
        nn.init.normal_(parameter.requires_grad_(True))
    hidden = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3]])
    assert torch.autograd.gradcheck(
        lambda hidden, gates: experts(hidden, index, gates), (hidden, gates)
    )
    experts(hidden, index, gates).sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in experts.parameters()
    )


def test_packed_experts_on_the_meta_device_need_no_memory() -> None:
    with torch.device("meta"):
        experts = RaggedExperts(type(STOCK)(tiny.config("olmoe")), [3, 0, 5])
    assert experts.down_packed.is_meta
    assert experts.down_packed.dtype is torch.float32
    model = tiny.build("olmoe")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\b"):
        moe_layers(prune(model, random_plan(model, "ragged")))
