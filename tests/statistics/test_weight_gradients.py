from __future__ import annotations

from typing import Any

import naive
import naive_gradients
import pytest
import tiny
import torch

from moe_lab.models.discover import moe_layers
from moe_lab.statistics.gradients import WeightGradientTap, gather_gradients


def by_hand(model: Any, data: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
    """Layer -> sum -> (E, I): transformers' own eager experts, .grad of their parameters, channel by channel."""
    layers = moe_layers(model)
    for layer in layers:
        layer.experts.requires_grad_(True)
    for ids, valid in data:
        naive_gradients.loss(model, ids, valid).backward()
    scores = {}
    for layer in layers:
        module: Any = layer.experts
        products = {name: (weight * weight.grad).abs() for name, weight in module.named_parameters()}
        if module.is_transposed:
            products = {name: part.transpose(1, 2) for name, part in products.items() if part.dim() == 3}
        up, down = products["gate_up_proj"], products["down_proj"]
        sums: dict[str, list[torch.Tensor]] = {"snip_gate": [], "snip_up": [], "snip_down": []}
        for c in range(layer.width):
            gate, other = (c, layer.width + c) if module.is_concatenated else (2 * c, 2 * c + 1)
            sums["snip_gate"].append(up[:, gate].sum(-1))
            sums["snip_up"].append(up[:, other].sum(-1))
            sums["snip_down"].append(down[:, :, c].sum(-1))
        scores[layer.index] = {name: torch.stack(channels, 1).detach() for name, channels in sums.items()}
    return scores


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "minimax_m2"])
def test_snip_is_that_of_autograd_by_hand(name: str) -> None:
    ids, valid = naive.batch()
    data = [(ids[:2], valid[:2]), (ids[2:], valid[2:])]
    model = naive_gradients.model(name)
    found = gather_gradients(model, WeightGradientTap, data, fingerprint={"a": 1})
    assert found.header["kind"] == "weight_gradients"
    assert not any(weight.requires_grad or weight.grad is not None for weight in model.parameters())
    expected = by_hand(tiny.build(name, dtype=torch.float64), data)
    for layer, sums in expected.items():
        assert found.layers[layer].keys() == sums.keys()
        for part, scores in sums.items():
            assert found.layers[layer][part].dtype == torch.float64
            assert (found.layers[layer][part] - scores).abs().max() < 1e-9 * scores.max()


def test_an_expert_without_tokens_has_no_gradient() -> None:
    ids = tiny.tokens(rows=1, length=3)
    model = naive.model("olmoe")
    found = gather_gradients(model, WeightGradientTap, [(ids, torch.ones_like(ids, dtype=torch.bool))], fingerprint={})
    for named in found.layers.values():
        assert (named["snip_down"].amax(1) == 0).any()
        assert (named["snip_down"].amin(1) > 0).any()


def test_half_precision_gradients_add_up_in_fp32() -> None:
    data = [naive.batch()] * 3
    half = gather_gradients(tiny.build("olmoe", dtype=torch.bfloat16), WeightGradientTap, data, fingerprint={})
    full = gather_gradients(naive.model("olmoe"), WeightGradientTap, data, fingerprint={})
    for layer, named in full.layers.items():
        assert abs(float(half.layers[layer]["snip_down"].sum() / named["snip_down"].sum()) - 1) < 0.1
