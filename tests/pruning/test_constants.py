"""Plans whose dropped experts put out constants: a naive computation, and mask = rows of a batch = prune = export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan
from tiny import logits
from transformers import AutoModelForCausalLM

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.cost import size
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan, replace_by_constants
from moe_lab.pruning.prune import prune


def test_each_routed_pair_adds_its_expert_or_its_constant() -> None:
    """m = sum_j g_j f_j over kept experts + sum_j g_j c_j over the others, with the router of the original."""
    model = tiny.build("qwen3_moe", dtype=torch.float64)
    plan = random_plan(model, "constants", share=0.5)
    layer = moe_layers(model)[1]
    seen: list[Any] = []
    hook = layer.experts.register_forward_hook(lambda module, given, result: seen.append((*given, result)))
    with mask(model, plan):
        logits(model, tiny.tokens())
    hook.remove()
    (hidden, index, gates, result) = seen[0]
    unmasked = layer.router(hidden)
    assert torch.equal(unmasked[2], index) and torch.equal(unmasked[1], gates)
    constants = dict(zip(plan.null_experts(layer.index), plan.constants[layer.index], strict=True))
    assert 0 < len(constants) < layer.n_experts
    expected = torch.zeros_like(hidden)
    for token, (experts, weights) in enumerate(zip(index.tolist(), gates.tolist(), strict=True)):
        for expert, gate in zip(experts, weights, strict=True):
            if expert in constants:
                f = torch.from_numpy(constants[expert]).double()
            else:
                f = layer.expert_output(hidden[token : token + 1], expert)[0]
            expected[token] += gate * f
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_grouped_matrix_products_add_the_same_constants() -> None:
    model, ids = tiny.build("olmoe"), tiny.tokens()
    plan = random_plan(model, "constants", share=0.5)
    with mask(model, plan):
        expected = logits(model, ids)
    model.set_experts_implementation("grouped_mm")
    with mask(model, plan):
        assert (logits(model, ids) - expected).abs().max() <= 1e-5


def test_an_export_states_and_has_the_constants(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    plan = random_plan(model, "constants", share=0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "out")
    pruned = logits(prune(model, plan), tiny.tokens())
    before, after = sum(plan.n_experts.values()), sum(int(mask.any(1).sum()) for mask in plan.channels.values())
    assert f"{after} of {before} routed experts" in (folder / "README.md").read_text()
    with_zeros = AutoModelForCausalLM.from_pretrained(
        export(tmp_path / "model", Plan(plan.experts, plan.n_experts, {}, plan.channels), tmp_path / "zeros"),
        trust_remote_code=True,
        experts_implementation="eager",
    )
    assert (logits(with_zeros, tiny.tokens()) - pruned).abs().max() > 1e-2


@pytest.mark.parametrize("shape", ["masked", "padded"])
def test_shapes_without_a_place_for_constants_are_refused(shape: str, tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    with pytest.raises(UserError, match=f"export={re.escape(shape)}.*export=natural"):
        export(tmp_path / "model", random_plan(model, "constants", share=0.5), tmp_path / "out", shape=shape)
    assert not (tmp_path / "out").exists()


def test_a_constant_costs_one_number_for_each_hidden_unit() -> None:
    model = tiny.build("olmoe")
    plan, dropping = random_plan(model, "constants", share=0.5), tiny.plan(model, 0.5)
    facts = {"parameters": sum(weight.numel() for weight in model.parameters()), "bytes_per_parameter": 2}
    constants = sum(array.size for array in plan.constants.values())
    routers = sum(layer.hidden * layer.n_experts // 2 for layer in moe_layers(model))
    less = size(model, dropping, facts=facts)["parameters"]
    assert size(model, plan, facts=facts)["parameters"] == less + constants + routers
    assert sum(weight.numel() for weight in prune(model, plan).parameters()) == less + constants + routers


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "constants", share=0.5)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert all(numpy.array_equal(again.constants[layer], plan.constants[layer]) for layer in plan.constants)
    changed = {layer: array.copy() for layer, array in plan.constants.items()}
    changed[1][0, 0] += 1
    other = Plan(plan.experts, plan.n_experts, {}, plan.channels, changed)
    assert other != plan
    other.save(tmp_path / "other.json")
    (tmp_path / "other.npz").replace(tmp_path / "plan.npz")
    with pytest.raises(UserError, match="other constants in layer 1"):
        Plan.load(tmp_path / "plan.json")
    numpy.save(tmp_path / "array.npy", changed[1])
    for damaged in (b"PK", b"", (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "plan.npz").write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.npz").unlink()
    with pytest.raises(UserError, match="does not exist"):
        Plan.load(tmp_path / "plan.json")


def test_constants_that_do_not_fit_are_refused() -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "constants", share=0.5)

    def refused(constants: Any, **changes: Any) -> pytest.ExceptionInfo[UserError]:
        with pytest.raises(UserError, match=r"layer 1|expert") as caught:
            Plan(plan.experts, plan.n_experts, {}, changes.get("channels", plan.channels), {1: constants})
        return caught

    first = plan.constants[1]
    refused(first[1:])
    refused(first.astype(numpy.float64))
    refused(first, channels={})
    broken = first.copy()
    broken[2, 3] = numpy.nan
    assert f"expert {plan.null_experts(1)[2]}" in str(refused(broken).value)
    narrow = Plan(plan.experts, plan.n_experts, {}, plan.channels, {1: first[:, :5]})
    with pytest.raises(UserError, match="5"):
        prune(model, narrow)


def test_the_mean_output_of_a_novice() -> None:
    """Outputs (1,0), (3,0), (2,3) of three tokens: the novice is (2,1), and a gate of .35 adds (.70,.35)."""
    outputs = numpy.array([[1, 0], [3, 0], [2, 3]], dtype=float)
    plan = replace_by_constants(Plan({0: (1,)}, {0: 2}), {0: numpy.stack([outputs.mean(0), outputs[0]])}, {0: 4})
    assert plan.experts[0] == (0, 1) and plan.null_experts(0) == [0]
    assert (0.35 * plan.constants[0][0]).tolist() == pytest.approx([0.70, 0.35])
