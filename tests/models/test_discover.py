from __future__ import annotations

import re

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}


def skeleton(kind: str, **settings: object) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **settings}))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_layers_of_every_architecture(name: str) -> None:
    model = tiny.build(name)
    layers = moe_layers(model)
    assert len(layers) in (2, 3)
    for layer in layers:
        assert model.get_submodule(layer.name) is layer.experts
        assert (layer.hidden, layer.width) == (32, 24)
        assert (layer.n_experts, layer.top_k) in ((16, 4), (16, 2), (8, 2))
        assert (layer.n_group, layer.topk_group) == ((4, 2) if "grouped" in name else (1, 1))
        assert all(part.tensor.shape[part.axis] == layer.n_experts for part in layer.routing)


def test_experts_are_those_the_model_calls() -> None:
    model = tiny.build("jamba")
    called = []
    for layer in moe_layers(model):
        layer.experts.register_forward_pre_hook(lambda module, inputs, index=layer.index: called.append(index))
    model(input_ids=tiny.tokens())
    assert called == [0, 1, 2]


def test_layers_are_found_without_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.config("deepseek_v3"))
    assert [layer.index for layer in moe_layers(model)] == [1, 2]


def test_axis_of_experts_when_there_are_as_many_as_hidden_units() -> None:
    layer = moe_layers(tiny.build("ernie4_5_moe", moe_num_experts=32))[0]
    assert [(part.name, part.axis) for part in layer.routing] == [("weight", 0), ("e_score_correction_bias", 1)]


def test_dense_model_is_refused() -> None:
    with pytest.raises(UserError, match="model_type=llama is not supported: it has no routed experts"):
        moe_layers(skeleton("llama"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 16, "head_dim": 8}),
        ("jetmoe", {"num_local_experts": 4, "kv_channels": 8}),
    ],
)
def test_families_outside_the_registry_are_refused_by_name(kind: str, settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=rf"model_type={re.escape(kind)} is not supported: .*experts registry"):
        moe_layers(skeleton(kind, **settings))


def test_unlisted_family_outside_the_registry_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lab.models.discover.UNSUPPORTED", {})
    with pytest.raises(UserError, match=r"jetmoe.*experts registry"):
        moe_layers(skeleton("jetmoe", num_local_experts=4, kv_channels=8))


def test_unknown_routing_tensor_is_refused() -> None:
    model = tiny.build("olmoe")
    model.model.layers[1].mlp.gate.register_buffer("scale", torch.ones(16))
    with pytest.raises(UserError, match=r"layers.1.mlp.experts is routed by scale \(16,\)"):
        moe_layers(model)
