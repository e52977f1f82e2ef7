from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from identities.plans import random_plan

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.exported_code.ragged import RaggedExperts
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune


@pytest.mark.parametrize("way", ["even", "ragged"])
def test_original_is_untouched_and_unchanged_weights_are_shared(way: str) -> None:
    model = tiny.build("deepseek_v3")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pruned = prune(model, random_plan(model, way, share=0.5))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.n_routed_experts == 16 and pruned.config.n_routed_experts == 8
    theirs = dict(pruned.named_parameters())
    shared = {key for key, value in model.named_parameters() if theirs.get(key) is value}
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


def test_a_model_pruned_differently_by_layer_can_be_pruned_again() -> None:
    model = tiny.build("olmoe")
    first = prune(
        model, Plan({0: tuple(range(8)), 1: tuple(range(16)), 2: tuple(range(5))}, dict.fromkeys(range(3), 16))
    )
    again = prune(first, Plan(dict.fromkeys(range(3), (0, 1, 2, 3)), {0: 8, 1: 16, 2: 5}))
    assert again.config.num_experts == 4
    once = prune(model, Plan(dict.fromkeys(range(3), (0, 1, 2, 3)), dict.fromkeys(range(3), 16)))
    with torch.no_grad():
        assert torch.equal(again(input_ids=tiny.tokens()).logits, once(input_ids=tiny.tokens()).logits)


def test_layers_of_one_width_stay_modules_of_the_family() -> None:
    model = tiny.build("deepseek_v3")
    pruned = prune(model, random_plan(model, "one width", share=1.0, width=12))
    for layer in moe_layers(pruned):
        assert type(layer.experts) is type(moe_layers(model)[0].experts) and layer.width == 12
        assert layer.experts.intermediate_dim == 12
    expected = pruned(input_ids=tiny.tokens()).logits
    pruned.set_experts_implementation("grouped_mm")
    assert (pruned(input_ids=tiny.tokens()).logits - expected).abs().max() <= 1e-5


def test_widths_that_kernels_cannot_align_are_packed() -> None:
    model = tiny.build("olmoe")
    pruned = prune(model, random_plan(model, "one width", width=13))
    assert all(isinstance(layer.mlp.experts, RaggedExperts) for layer in pruned.model.layers)
    pruned.set_experts_implementation("grouped_mm")
    assert torch.isfinite(pruned(input_ids=tiny.tokens()).logits).all()


def test_layers_that_keep_all_channels_stay_as_they_are_whatever_their_width() -> None:
    model = tiny.build("olmoe", intermediate_size=13)
    pruned = prune(model, random_plan(model, "one width", width=13))
    assert [layer.width for layer in moe_layers(pruned)] == [13, 13, 13]


def test_a_layer_of_null_experts_gives_nothing() -> None:
    model = tiny.build("olmoe")
    pruned = prune(model, random_plan(model, "one width", share=1.0, width=0))
    experts = pruned.model.layers[1].mlp.experts
    assert isinstance(experts, RaggedExperts) and experts.widths == (0,) * 16
    assert not experts(torch.ones(2, 32), torch.tensor([[0, 3], [5, 1]]), torch.ones(2, 2)).any()


@pytest.mark.parametrize("case", ["counts", "one width", "ragged"])
def test_models_of_another_shape_are_not_saved_as_if_stock_code_could_read_them(case: str, tmp_path: Path) -> None:
    model = tiny.build("olmoe")
    plans = {
        "one width": random_plan(model, "one width", share=1.0, width=16),
        "ragged": random_plan(model, "ragged", share=1.0),
    }
    kept = {0: tuple(range(8)), 1: tuple(range(16)), 2: tuple(range(5))}
    pruned = prune(model, plans.get(case) or Plan(kept, dict.fromkeys(range(3), 16)))
    with pytest.raises(UserError, match="save_pretrained: export its plan"):
        pruned.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    if case == "counts":
        again = prune(pruned, Plan(dict.fromkeys(range(3), (0, 1, 2, 3)), {0: 8, 1: 16, 2: 5}))
        again.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["num_experts"] == 4


def test_the_balancing_loss_counts_the_experts_that_are_left() -> None:
    model = tiny.build("mixtral")
    pruned = prune(model, tiny.plan(model, 0.5))
    assert pruned(input_ids=tiny.tokens(), output_router_logits=True).aux_loss > 0
    assert pruned.num_experts == 4 and model.num_experts == 8
