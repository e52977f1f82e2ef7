"""Another number of experts per token: what a model built with that number computes, in every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from moe_lab.config import ExpectedConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import config_json
from moe_lab.models.discover import routed_layers
from moe_lab.models.facts import facts
from moe_lab.models.families import TOP_K_FIELDS
from moe_lab.models.load import load_model, set_top_k
from moe_lab.models.streamed import open_streamed
from moe_lab.pruning.mask import mask
from moe_lab.pruning.prune import prune

FIXED = "phimoe"
"""Its routers mix the best two by a formula for two."""


def lower(settings: Mapping[str, Any], top_k: int) -> dict[str, Any]:
    return {name: top_k if name in TOP_K_FIELDS else value for name, value in settings.items()}


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_router_chooses_as_one_that_was_built_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build(name)
    trained = routed_layers(model)[0].top_k
    monkeypatch.setitem(tiny.ARCHITECTURES, name, lower(tiny.ARCHITECTURES[name], trained - 1))
    built = tiny.build(name)
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
    expected = ExpectedConfig(
        parameters=sum(weight.numel() for weight in tiny.build("olmoe").parameters()),
        layers=3,
        moe_layers=3,
        experts=16,
        top_k=4,
        hidden=32,
        width=24,
    )
    asked = ModelConfig(name="m", path=str(tmp_path), device="cpu", top_k=2, expected=expected)
    assert asked.name == "m_top2" and ModelConfig(**vars(asked)) == asked
    assert {about["top_k"] for about in facts(asked)["layers"].values()} == {2}
    assert config_json.expert_shape(asked) == {"n_experts": 16, "top_k": 2, "width": 24}
    loaded, streamed = load_model(asked)[0], open_streamed(asked)[0]
    assert {layer.top_k for layer in [*routed_layers(loaded), *streamed.moe.values()]} == {2}
    with pytest.raises(UserError, match=r"model\.top_k=17: layer 0 gives a token 1 to 16 experts"):
        load_model(ModelConfig(name="m", path=str(tmp_path), device="cpu", top_k=17))
