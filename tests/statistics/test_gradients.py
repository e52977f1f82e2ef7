from __future__ import annotations

from typing import Any

import naive
import naive_gradients
import pytest
import tiny
import torch
from test_gather import FINGERPRINT, equal
from torch.nn.functional import cross_entropy

from moe_lab import criteria
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.statistics import Layers, gradients
from moe_lab.statistics.gradients import (
    LOSS_SCALE,
    GradientTap,
    differentiable,
    forward_and_backward,
    gather_gradients,
    head,
    loss_gradient,
)
from moe_lab.statistics.observe import Observer

NAMES = {
    *("tokens", "channel_square", "channel_max", "gate_channel_square", "gate_channel_max"),
    *("channel_gradient_square", "channel_product", "channel_product_abs"),
}


def gathered(model: Any, data: Any, *, checkpointing: bool = False) -> Layers:
    with differentiable(model, checkpointing=checkpointing), Observer(model, GradientTap) as observer:
        for ids, valid in data:
            observer.read(ids, valid, forward_and_backward)
    return observer.layers()


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_sums_are_those_of_autograd_on_each_expert_alone(name: str) -> None:
    layers = gathered(naive_gradients.model(name), [naive.batch()])
    reference = naive_gradients.backward(name)
    assert layers.keys() == reference.keys()
    for layer, experts in reference.items():
        assert layers[layer].keys() == NAMES
        assert all(part.dtype == torch.float64 for part in layers[layer].values())
        for expert, seen in experts.items():
            phi, gradient, _, gate = seen.counted
            gated = gate[:, None] * phi
            largest = torch.zeros(phi.shape[1]) if len(phi) == 0 else phi.abs().amax(0)
            expected = {
                "tokens": torch.tensor(len(phi)),
                "channel_square": phi.square().sum(0),
                "channel_max": largest,
                "gate_channel_square": gated.square().sum(0),
                "gate_channel_max": torch.zeros(phi.shape[1]) if len(phi) == 0 else gated.abs().amax(0),
                "channel_gradient_square": gradient.square().sum(0),
                "channel_product": (phi * gradient).sum(0),
                "channel_product_abs": (phi * gradient).abs().sum(0),
            }
            for key, value in expected.items():
                error = (layers[layer][key][expert] - value).abs().max()
                # deepseek_v2 computes its gates in fp32 whatever its weights are
                assert error <= 1e-6 * (value.abs().max() + 1e-30), (layer, expert, key)


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3:grouped", "ernie4_5_moe", "gpt_oss"])
def test_heapr_is_the_papers_d_by_d_computation(name: str) -> None:
    """G = mean g g^T per expert, then mean over the same tokens of 1/2 e^T G e for each channel's output e."""
    model = naive_gradients.model(name)
    layers = {layer.index: layer for layer in moe_layers(model)}
    inputs = gathered(model, [naive.batch()])
    sizes = {index: layer.n_experts for index, layer in layers.items()}
    widths = {index: layer.width for index, layer in layers.items()}
    scores = criteria.score("heapr", inputs, experts=sizes, widths=widths)
    for index, experts in naive_gradients.backward(name).items():
        for expert, seen in experts.items():
            phi, _, g, _ = seen.counted
            if len(phi) == 0:
                assert (scores[index][expert] == -1).all()
                continue
            fisher = torch.stack([torch.outer(row, row) for row in g]).mean(0)
            weight = naive_gradients.down(layers[index], expert).detach()
            expected = [
                torch.stack(
                    [(value * weight[:, c]) @ fisher @ (value * weight[:, c]) / 2 for value in phi[:, c]]
                ).mean()
                for c in range(phi.shape[1])
            ]
            assert naive.relative(torch.from_numpy(scores[index][expert]), torch.stack(expected)) < 1e-9


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_logits_are_those_of_eager(name: str) -> None:
    model, (ids, valid) = naive.model(name), naive.batch()
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=valid.long()).logits
    with differentiable(model), Observer(model, GradientTap) as observer:
        observer.valid = valid
        watched = model(input_ids=ids, attention_mask=valid.long()).logits
        assert watched.requires_grad
        output = model.base_model(input_ids=ids, attention_mask=valid.long(), use_cache=False)
        assert torch.equal(plain, head(model, output.last_hidden_state, output))
    assert torch.equal(plain, watched)
    with torch.no_grad():
        assert torch.equal(plain, model(input_ids=ids, attention_mask=valid.long()).logits)
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2", "qwen3_next", "gpt_oss", "jamba", "granitemoe"])
def test_checkpointing_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = naive.model(name)
    plain = gathered(model, [naive.batch()])
    before = [(module.training, dict(vars(module))) for module in model.modules()]
    calls = tiny.count_calls(monkeypatch, GradientTap, "experts")
    again = gathered(model, [naive.batch()], checkpointing=True)
    assert len(calls) == 2 * len(again) and equal(again, plain), "it was computed again"
    assert [(module.training, dict(vars(module))) for module in model.modules()] == before


def test_checkpointing_needs_layers_that_can_be_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lab.models.transformers_private.GradientCheckpointingLayer", int)
    with pytest.raises(UserError, match="checkpointing=true: the layers of OlmoeForCausalLM cannot be computed again"):
        gathered(naive.model("olmoe"), [naive.batch()], checkpointing=True)


def test_few_logits_at_a_time_are_as_good_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = naive_gradients.model("granitemoe")  # divides its logits
    whole = gathered(model, [naive.batch()])
    sizes: list[int] = []
    monkeypatch.setattr(gradients, "LOGITS", 7 * tiny.VOCABULARY)
    monkeypatch.setattr(
        gradients, "head", lambda model, states, output: sizes.append(states.shape[1]) or head(model, states, output)
    )
    parts = gathered(model, [naive.batch()])
    assert max(sizes) == 7
    for layer, named in whole.items():
        for key, part in named.items():
            assert torch.allclose(parts[layer][key], part, rtol=1e-9, atol=1e-18), key


def test_only_pairs_of_valid_neighbours_have_a_loss() -> None:
    model, ids = naive_gradients.model("olmoe"), tiny.tokens(rows=2, length=6)
    valid = torch.tensor([[True, True, False, True, True, True], [False, True, True, True, False, False]])
    with differentiable(model):
        output = model.base_model(input_ids=ids, attention_mask=valid.long(), use_cache=False)
        found = loss_gradient(model, output, ids, valid) / LOSS_SCALE
        states = output.last_hidden_state.detach().requires_grad_()
        logits = model.lm_head(states)
        pairs = [(0, 0), (0, 3), (0, 4), (1, 1), (1, 2)]
        sum(cross_entropy(logits[row, t], ids[row, t + 1]) for row, t in pairs).backward()
    assert torch.allclose(found, states.grad, rtol=1e-12, atol=1e-18)
    assert {tuple(pair) for pair in found.abs().sum(-1).nonzero().tolist()} == set(pairs)


def test_weights_stay_as_frozen_as_they_were() -> None:
    model = tiny.build("olmoe")
    model.model.norm.weight.requires_grad_(True)
    gathered(model, [naive.batch()])
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == ["model.norm.weight"]
    assert all(weight.grad is None for weight in model.parameters())
    with torch.no_grad():
        assert not model.get_input_embeddings()(torch.tensor([3])).requires_grad


def test_how_rows_are_cut_into_batches_does_not_matter() -> None:
    """Sums of a summed loss: a mean loss would give other gradients for other batches."""
    model, (ids, valid) = naive_gradients.model("olmoe"), naive.batch()
    whole = gathered(model, [(ids, valid)])
    rows = gathered(model, [(ids[row, None], valid[row, None]) for row in range(len(ids))])
    for layer, named in whole.items():
        for key, part in named.items():
            assert torch.allclose(rows[layer][key], part, rtol=1e-6, atol=1e-12), key


def test_rows_without_a_next_token_have_no_loss() -> None:
    ids = tiny.tokens(rows=2, length=4)
    valid = torch.tensor([[True, False, True, False]] * 2)
    with pytest.raises(UserError, match="no token that follows another one"):
        gather_gradients(naive.model("olmoe"), GradientTap, [(ids, valid)], fingerprint=FINGERPRINT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_summed_in_full(dtype: torch.dtype) -> None:
    layers = gathered(tiny.build("olmoe", dtype=dtype), [naive.batch()])
    full = gathered(naive.model("olmoe"), [naive.batch()])
    for layer, named in layers.items():
        ratio = named["channel_gradient_square"].sum() / full[layer]["channel_gradient_square"].sum()
        assert abs(float(ratio) - 1) < 0.2
