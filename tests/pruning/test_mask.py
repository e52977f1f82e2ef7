from __future__ import annotations

import pytest
import tiny
import torch
from identities.plans import random_plan
from tiny import logits

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan


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
        assert {key: value for key, value in vars(module).items() if key != "_parameters"}.keys() == {
            key for key in attributes[path] if key != "_parameters"
        }
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
        with pytest.raises(RuntimeError, match=r"not in force: model\.layers\.1\.mlp\.experts got a routing"):
            layer.experts(hidden, chosen, gates)


def test_hooks_see_original_ids() -> None:
    model = tiny.build("olmoe")
    plan = tiny.plan(model, 0.5)
    seen = []
    for layer in moe_layers(model):
        layer.router.register_forward_hook(lambda module, inputs, output, at=layer.index: seen.append((at, output[2])))
    with mask(model, plan):
        logits(model)
    assert [at for at, _ in seen] == [0, 1, 2]
    assert all(set(chosen.unique().tolist()) <= set(plan.experts[at]) for at, chosen in seen)


def test_plans_of_other_models_are_refused() -> None:
    model = tiny.build("olmoe")
    with (
        pytest.raises(UserError, match=r"about 3 MoE layers \(0 to 2\) of 8 experts, this model has 3 .* of 16"),
        mask(model, tiny.plan(tiny.build("mixtral"), 0.5)),
    ):
        pass
    with (
        pytest.raises(UserError, match="layer 0 keeps 2 of 16 experts, but its router needs at least 4"),
        mask(model, Plan(dict.fromkeys(range(3), (0, 1)), dict.fromkeys(range(3), 16))),
    ):
        pass
