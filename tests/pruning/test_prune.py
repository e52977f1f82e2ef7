"""Pruning in memory, and packed experts. `identities` compares the pruned models of all families with their masks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from identities.plans import random_plan
from tiny import logits
from transformers import AutoModelForCausalLM

from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import RaggedExperts
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune

STOCK = moe_layers(tiny.build("olmoe", dtype=torch.float64))[0].experts


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
    layer = moe_layers(prune(model, tiny.plan(model, 0.5)))[0]
    assert layer.router.weight.shape == (16, 32) and layer.router.bias.shape == (16,)
    assert layer.experts.gate_up_proj.shape == (16, 32, 48) and layer.experts.down_proj_bias.shape == (16, 32)


@pytest.mark.parametrize("case", ["counts", "one width", "ragged"])
def test_models_of_another_shape_are_not_saved_as_if_stock_code_could_read_them(case: str, tmp_path: Path) -> None:
    model = tiny.build("olmoe")
    kept = {0: tuple(range(8)), 1: tuple(range(16)), 2: tuple(range(5))}
    counts = Plan(kept, dict.fromkeys(range(3), 16))
    pruned = prune(model, counts if case == "counts" else random_plan(model, case, share=1.0, width=16))
    with pytest.raises(UserError, match="save_pretrained"):
        pruned.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    if case == "counts":  # pruned again, all layers are alike
        first = dict.fromkeys(range(3), (0, 1, 2, 3))
        again = prune(pruned, Plan(first, {layer: len(ids) for layer, ids in kept.items()}))
        again.save_pretrained(tmp_path)
        assert again.config.num_experts == 4
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
        for other in (prune(model, Plan(first, counts.n_experts)), reloaded):
            assert torch.equal(logits(again), logits(other))


def test_layers_of_one_width_stay_modules_of_the_family_if_kernels_can_align_their_rows() -> None:
    model = tiny.build("deepseek_v3")
    pruned = prune(model, random_plan(model, "one width", share=1.0, width=12))
    for layer in moe_layers(pruned):
        assert type(layer.experts) is type(moe_layers(model)[0].experts) and layer.width == 12
        assert layer.experts.intermediate_dim == 12
    expected = logits(pruned)
    pruned.set_experts_implementation("grouped_mm")
    assert (logits(pruned) - expected).abs().max() <= 1e-5
    narrow = prune(tiny.build("olmoe"), random_plan(tiny.build("olmoe"), "one width", width=13))
    assert all(isinstance(layer.mlp.experts, RaggedExperts) for layer in narrow.model.layers)
    narrow.set_experts_implementation("grouped_mm")
    assert torch.isfinite(logits(narrow)).all()
    whole = tiny.build("olmoe", intermediate_size=13)
    assert {layer.width for layer in moe_layers(prune(whole, random_plan(whole, "one width", width=13)))} == {13}


def test_a_layer_of_null_experts_gives_nothing() -> None:
    model = tiny.build("olmoe")
    pruned = prune(model, random_plan(model, "one width", share=1.0, width=0))
    experts = pruned.model.layers[1].mlp.experts
    assert isinstance(experts, RaggedExperts) and experts.widths == (0,) * 16
    assert not experts(torch.ones(2, 32), torch.tensor([[0, 3], [5, 1]]), torch.ones(2, 2)).any()


def test_the_balancing_loss_counts_the_experts_that_are_left() -> None:
    model = tiny.build("mixtral")
    pruned = prune(model, tiny.plan(model, 0.5))
    assert pruned(input_ids=tiny.tokens(), output_router_logits=True).aux_loss > 0
    assert pruned.num_experts == 4 and model.num_experts == 8


def packed(widths: list[int]) -> RaggedExperts:
    experts = RaggedExperts(STOCK, widths).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.normal_(generator=generator)
    return experts


def naive(experts: RaggedExperts, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert, channel by channel."""
    output = torch.zeros_like(hidden)
    starts = [sum(experts.widths[:expert]) for expert in range(len(experts.widths))]
    for token, row in enumerate(index.tolist()):
        for place, expert in enumerate(row):
            width, start = experts.widths[expert], starts[expert]
            for channel in range(width):
                gate = experts.gate_up_packed[2 * start + channel] @ hidden[token]
                up = experts.gate_up_packed[2 * start + width + channel] @ hidden[token]
                phi = gate / (1 + torch.exp(-gate)) * up
                output[token] += gates[token, place] * phi * experts.down_packed[start + channel]
    return output


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=6), st.integers(0, 6), st.integers(1, 4), st.integers(0, 99))
def test_forward_of_packed_experts_is_the_sum_over_channels(
    widths: list[int], tokens: int, top_k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 32, dtype=torch.float64, generator=generator)
    index = torch.rand(tokens, len(widths), generator=generator).topk(top_k).indices
    gates = torch.rand(tokens, top_k, dtype=torch.float64, generator=generator)
    experts = packed(widths)
    assert torch.allclose(experts(hidden, index, gates), naive(experts, hidden, index, gates), atol=1e-12, rtol=1e-10)


def test_gradients_flow_to_weights_hidden_states_and_gates() -> None:
    experts = packed([3, 0, 5, 2]).requires_grad_(True)
    hidden = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3]])
    assert torch.autograd.gradcheck(lambda hidden, gates: experts(hidden, index, gates), (hidden, gates))
    experts(hidden, index, gates).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in experts.parameters())


def test_packed_experts_have_the_activation_of_the_family_without_its_weights() -> None:
    class Clamped(type(STOCK)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, -1)
            return gate.clamp(max=self.limit) + up

    family = copy.deepcopy(STOCK)
    family.__class__, family.limit = Clamped, 0.5
    experts = RaggedExperts(family, [2])
    gate_up = torch.tensor([[3.0, 0.25, 1.0, 1.0]])
    for each in (experts, copy.deepcopy(experts)):
        assert each._apply_gate(gate_up).tolist() == [[1.5, 1.25]]
    assert not list(experts._apply_gate.__self__.parameters()) and len(list(family.parameters())) == 2
    assert {name for name, _ in experts.named_parameters()} == {"gate_up_packed", "down_packed"}


def test_packed_experts_need_no_memory_on_the_meta_device_and_are_not_taken_for_stacks() -> None:
    with torch.device("meta"):
        experts = RaggedExperts(type(STOCK)(tiny.config("olmoe")), [3, 0, 5])
    assert experts.down_packed.is_meta and experts.down_packed.dtype is torch.float32
    model = tiny.build("olmoe")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts\b"):
        moe_layers(prune(model, random_plan(model, "ragged")))
