from __future__ import annotations

import pytest
import tiny
import torch

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.surgery import prune


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_pruned_model_is_what_its_configuration_says(name: str) -> None:
    model = tiny.build(name)
    plan = tiny.plan(model, 0.5)
    pruned = prune(model, plan)
    again = type(model)(pruned.config)
    assert {key: value.shape for key, value in again.state_dict().items()} == {
        key: value.shape for key, value in pruned.state_dict().items()
    }
    for layer in moe_layers(pruned):
        assert layer.n_experts == len(plan.experts[layer.index])


def test_original_is_untouched_and_unchanged_weights_are_shared() -> None:
    model = tiny.build("deepseek_v3")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pruned = prune(model, tiny.plan(model, 0.5))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.n_routed_experts == 16 and pruned.config.n_routed_experts == 8
    theirs = dict(pruned.named_parameters())
    shared = {key for key, value in model.named_parameters() if theirs[key] is value}
    assert {key for key, _ in model.named_parameters()} - shared == {
        f"model.layers.{layer}.mlp.{part}"
        for layer in (1, 2)
        for part in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    }
    assert not any(parameter.requires_grad for parameter in pruned.parameters())


def test_axis_when_there_are_as_many_experts_as_hidden_units() -> None:
    model = tiny.build("gpt_oss", num_local_experts=32)
    plan = tiny.plan(model, 0.5)
    layer = moe_layers(prune(model, plan))[0]
    assert layer.router.weight.shape == (16, 32) and layer.router.bias.shape == (16,)
    assert layer.experts.gate_up_proj.shape == (16, 32, 48) and layer.experts.down_proj_bias.shape == (16, 32)


def test_one_number_for_all_layers_is_asked_for() -> None:
    model = tiny.build("olmoe")
    plan = Plan({0: tuple(range(8)), 1: tuple(range(8)), 2: tuple(range(5))}, dict.fromkeys(range(3), 16))
    with pytest.raises(
        UserError, match=r"keeps 5 to 8 experts a layer.*evaluate it with a mask, or use allocation=uniform"
    ):
        prune(model, plan)
