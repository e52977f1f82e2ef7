from __future__ import annotations

import copy

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from identities.plans import random_plan

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.exported_code.ragged import RaggedExperts
from moe_lab.pruning.prune import prune

STOCK = moe_layers(tiny.build("olmoe", dtype=torch.float64))[0].experts


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
def test_forward_is_the_sum_over_channels(widths: list[int], tokens: int, top_k: int, seed: int) -> None:
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


def test_weights_are_views_of_the_packed_ones() -> None:
    experts = packed([3, 0, 5])
    assert experts.gate_up_packed.shape == (16, 32) and experts.down_packed.shape == (8, 32)
    gate_up, down = experts.weights(2)
    assert torch.equal(gate_up, experts.gate_up_packed[6:16]) and torch.equal(down, experts.down_packed[3:8])
    assert down.untyped_storage().data_ptr() == experts.down_packed.untyped_storage().data_ptr()
    assert [tuple(part.shape) for part in experts.weights(1)] == [(0, 32), (0, 32)]
    assert repr(experts) == "RaggedExperts(3 experts of 0 to 5 channels)"


def test_the_activation_is_the_family_s_own_and_holds_none_of_its_weights() -> None:
    class Clamped(type(STOCK)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, -1)
            return gate.clamp(max=self.limit) + up

    family = copy.deepcopy(STOCK)
    family.__class__, family.limit = Clamped, 0.5
    experts = RaggedExperts(family, [2])
    gate_up = torch.tensor([[3.0, 0.25, 1.0, 1.0]])
    assert experts._apply_gate(gate_up).tolist() == [[1.5, 1.25]]
    assert not list(experts._apply_gate.__self__.parameters()) and len(list(family.parameters())) == 2
    assert {name for name, _ in experts.named_parameters()} == {"gate_up_packed", "down_packed"}
    assert copy.deepcopy(experts)._apply_gate(gate_up).tolist() == [[1.5, 1.25]]


def test_it_is_built_without_memory_on_the_meta_device() -> None:
    with torch.device("meta"):
        experts = RaggedExperts(tiny_on_meta(), [3, 0, 5])
    assert experts.down_packed.is_meta and experts.down_packed.dtype is torch.float32


def tiny_on_meta() -> torch.nn.Module:
    return type(STOCK)(tiny.config("olmoe"))


def test_a_search_for_stacked_experts_refuses_it() -> None:
    model = tiny.build("olmoe")
    with pytest.raises(
        UserError, match=r"neither scored nor pruned: .*layers\.0\.mlp\.experts is not a stack of experts"
    ):
        moe_layers(prune(model, random_plan(model, "ragged")))
