"""The layers with routed experts of every architecture, also with another number of experts per token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import config_json
from moe_lab.models.discover import UNSUPPORTED, moe_layers, routed_layers
from moe_lab.models.facts import architecture, facts
from moe_lab.models.families import PORTS, TOP_K_FIELDS, has_causal_model
from moe_lab.models.load import load_model, set_top_k
from moe_lab.models.streamed import open_streamed
from moe_lab.pruning.mask import mask
from moe_lab.pruning.prune import prune


def skeleton(kind: str, **settings: object) -> torch.nn.Module:
    """A model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{**tiny.COMMON, "intermediate_size": 16, **settings})
        )


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


def test_axis_of_experts_when_there_are_as_many_as_hidden_units() -> None:
    layer = moe_layers(tiny.build("ernie4_5_moe", moe_num_experts=32))[0]
    assert [(part.name, part.axis) for part in layer.routing] == [("weight", 0), ("e_score_correction_bias", 1)]


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("llama", {}, "no routed experts"),
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 16, "head_dim": 8}, "experts registry"),
        ("jetmoe", {"num_local_experts": 4, "kv_channels": 8}, "experts registry"),
    ],
)
def test_families_outside_the_registry_are_refused_by_name(
    kind: str, settings: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that nobody has listed."""
    for listed in (UNSUPPORTED, {}):
        monkeypatch.setattr("moe_lab.models.discover.UNSUPPORTED", listed)
        with pytest.raises(UserError, match=rf"model_type={re.escape(kind)} .*{re.escape(says)}"):
            moe_layers(skeleton(kind, **settings))


def test_experts_and_routers_that_are_built_otherwise_are_refused() -> None:
    model = tiny.build("olmoe")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.flatten(0, 1))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts is not a stack of experts"):
        moe_layers(model)
    model = tiny.build("olmoe")
    model.model.layers[1].mlp.gate.register_buffer("scale", torch.ones(16))
    with pytest.raises(UserError, match=r"layers.1.mlp.experts is routed by scale \(16,\)"):
        moe_layers(model)


def test_what_is_read_of_the_source_of_transformers_is_what_it_says_when_it_is_imported() -> None:
    kinds = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *PORTS]
    assert len(kinds) > 100 and all(map(has_causal_model, kinds))
    assert not any(map(has_causal_model, ("homemade", "vit", "PreTrainedModel", "")))


FIXED = "phimoe"
"""Its routers mix the best two by a formula for two."""


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_router_chooses_as_one_that_was_built_so(name: str) -> None:
    model = tiny.build(name)
    trained = routed_layers(model)[0].top_k
    lowered = {field: trained - 1 for field in TOP_K_FIELDS if field in tiny.ARCHITECTURES[name]}
    built = tiny.build(name, **lowered)
    if routed_layers(built)[0].top_k == trained:
        pytest.skip("its number is not among the settings of the tiny model")
    built.load_state_dict(model.state_dict())
    if name == FIXED:
        with pytest.raises(UserError, match=r"model\.top_k=1: .* made for 2"):
            set_top_k(model, trained - 1)
        return
    ids = tiny.tokens()
    with torch.no_grad():
        before = model(ids).logits
        set_top_k(model, trained - 1)
        assert torch.equal(model(ids).logits, built(ids).logits)
        assert not torch.allclose(before, model(ids).logits), "another number is another function"
        plan = tiny.plan(model, 0.25)
        with mask(model, plan):
            masked = model(ids).logits
        assert torch.equal(masked, prune(model, plan)(ids).logits)
        set_top_k(meta := tiny.build(name).to("meta"), trained - 2 or 1)
        assert {layer.top_k for layer in routed_layers(meta)} == {trained - 2 or 1}


def test_a_checkpoint_is_read_with_it_and_is_another_model(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    asked = ModelConfig(name="m", path=str(tmp_path), device="cpu", top_k=2, expected=architecture(tiny.build("olmoe")))
    assert asked.name == "m_top2" and ModelConfig(**vars(asked)) == asked
    assert {about["top_k"] for about in facts(asked)["layers"].values()} == {2}
    assert config_json.expert_shape(asked) == {"n_experts": 16, "top_k": 2, "width": 24}
    loaded, streamed = load_model(asked)[0], open_streamed(asked)[0]
    assert {layer.top_k for layer in [*routed_layers(loaded), *streamed.moe.values()]} == {2}
    with pytest.raises(UserError, match=r"model\.top_k=17: layer 0 gives a token 1 to 16 experts"):
        load_model(ModelConfig(name="m", path=str(tmp_path), device="cpu", top_k=17))
