"""Sums for groupings of similar experts, against every expert run by hand on every token in fp64."""

from __future__ import annotations

import naive
import pytest
import tiny
import torch

from moe_lab.models.discover import moe_layers
from moe_lab.statistics.damage import SimilarityTap
from moe_lab.statistics.observe import Observer


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_expert_reads_every_valid_token(name: str) -> None:
    model, (ids, valid) = tiny.build(name, dtype=torch.float64), naive.batch()
    given: dict[int, torch.Tensor] = {}
    logits: dict[int, torch.Tensor] = {}
    hooks = []
    for layer in moe_layers(model):

        def before(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], index: int = layer.index) -> None:
            given[index] = inputs[0].detach()

        def after(
            module: torch.nn.Module, inputs: object, result: tuple[torch.Tensor], index: int = layer.index
        ) -> None:
            logits[index] = result[0].detach().reshape(-1, result[0].shape[-1])

        hooks += [layer.experts.register_forward_pre_hook(before), layer.router.register_forward_hook(after)]
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=valid.long()).logits
    for hook in hooks:
        hook.remove()
    with Observer(model, SimilarityTap) as observer:
        observer.valid = valid
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids, attention_mask=valid.long()).logits, plain)
    assert not valid.all()
    for layer in moe_layers(model):
        states = given[layer.index][valid.flatten()]
        sums = observer.layers()[layer.index]
        expected = torch.stack([layer.expert_output(states, one).sum(0) for one in range(layer.n_experts)])
        assert naive.relative(sums["dense_output_sum"], expected) < 1e-9
        z = logits[layer.index][valid.flatten()].double()
        gated = [p[:, None] * layer.expert_output(states, one) for one, p in enumerate(z.softmax(-1).T)]
        assert naive.relative(sums["dense_gated_output_sum"], torch.stack([part.sum(0) for part in gated])) < 1e-9
        by_token = sum(torch.outer(one, one) for one in z)
        assert naive.relative(sums["router_gram"], by_token) < 1e-9
