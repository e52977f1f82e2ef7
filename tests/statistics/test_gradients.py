from typing import Any

import naive
import pytest
import tiny
import torch
from torch.nn.functional import cross_entropy

from moe_lab import criteria
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.papers.moe_slimming_passes import ActivationHook, MovingAverageHook, WeightHook
from moe_lab.statistics import gradients
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.gradients import (
    LOSS_SCALE,
    GradientHook,
    WeightGradientHook,
    collect_gradient_statistics,
    differentiable,
    head,
    loss_gradient,
)
from moe_lab.statistics.observe import collect_statistics


def expert_sums(phi: Any, gradient: Any, gate: Any) -> dict[str, torch.Tensor]:
    """Statistics of an expert from activations and their gradients (T, I), and gates (T)."""
    none = torch.zeros(1, phi.shape[1])
    gated = gate[:, None] * phi
    product = phi * gradient
    return {
        "tokens": torch.tensor(len(phi)),
        "channel_square": phi.square().sum(0),
        "channel_max": torch.cat((phi.abs(), none)).amax(0),
        "gate_channel_square": gated.square().sum(0),
        "gate_channel_max": torch.cat((gated.abs(), none)).amax(0),
        "channel_gradient_square": gradient.square().sum(0),
        "channel_product": product.sum(0),
        "channel_product_abs": product.abs().sum(0),
    }


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_sums_are_those_of_autograd_on_each_expert_alone(name: str) -> None:
    model = naive.model(name, torch.float64)
    layers = collect_gradient_statistics(model, GradientHook, [naive.batch()]).layers
    assert "forward" not in vars(model.base_model)
    reference = naive.backward(name)
    assert layers.keys() == reference.keys()
    for layer, experts in reference.items():
        assert all(part.dtype == torch.float64 for part in layers[layer].values())
        for expert, (phi, gradient, _, gate) in enumerate(experts):
            expected = expert_sums(phi, gradient, gate)
            assert layers[layer].keys() == expected.keys()
            for key, value in expected.items():
                error = (layers[layer][key][expert] - value).abs().max()
                # deepseek_v2 computes its gates in fp32 whatever its weights are
                assert error <= 1e-6 * (value.abs().max() + 1e-30), (layer, expert, key)


@pytest.mark.parametrize(
    "name",
    [
        "olmoe",
        "qwen3_moe",
        "mixtral",
        "deepseek_v3:grouped",
        "ernie4_5_moe",
        "gpt_oss",
    ],
)
def test_heapr_is_the_papers_d_by_d_computation(name: str) -> None:
    """G = mean g g^T per expert, then mean over the same tokens of 1/2 e^T G e for each channel's
    output e."""
    model = naive.model(name, torch.float64)
    layers = {layer.index: layer for layer in moe_layers(model)}
    inputs = collect_gradient_statistics(model, GradientHook, [naive.batch()]).layers
    facts = {
        index: {"n_experts": layer.n_experts, "width": layer.width}
        for index, layer in layers.items()
    }
    scores = criteria.score("heapr", inputs, facts)
    for index, experts in naive.backward(name).items():
        for expert, (phi, _, g, _) in enumerate(experts):
            if len(phi) == 0:
                assert (scores[index][expert] == -1).all()
                continue
            fisher = torch.stack([torch.outer(row, row) for row in g]).mean(0)
            down = naive.down_projection(layers[index], expert)
            expected = []
            for channel, weight in zip(phi.T, down.T, strict=True):
                outputs = torch.outer(channel, weight)
                losses = torch.stack([output @ fisher @ output / 2 for output in outputs])
                expected.append(losses.mean())
            actual = torch.from_numpy(scores[index][expert])
            assert naive.relative_error(actual, torch.stack(expected)) < 1e-9


def test_rows_without_a_next_token_have_no_loss() -> None:
    model = naive.model("olmoe")
    valid = torch.tensor([[True, False, True, False]] * 2)
    with pytest.raises(UserError, match="no token that follows another one"):
        collect_gradient_statistics(model, GradientHook, [(tiny.tokens(2, 4), valid)])


def test_no_gradients_of_weights_are_computed() -> None:
    """They would need as much memory as the weights."""
    model = tiny.build("olmoe")
    model.requires_grad_(True)
    collect_gradient_statistics(model, GradientHook, [naive.batch()])
    for name, weight in model.named_parameters():
        assert weight.requires_grad, name
        assert weight.grad is None, name


def test_few_logits_at_a_time_are_as_good_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = naive.model("granitemoe", torch.float64)  # divides its logits
    expected = collect_gradient_statistics(model, GradientHook, [naive.batch()]).layers
    sizes: list[int] = []

    def recorded_head(model: Any, states: torch.Tensor, output: Any) -> torch.Tensor:
        sizes.append(states.shape[1])
        return head(model, states, output)

    monkeypatch.setattr(gradients, "LOGITS", 7 * tiny.VOCABULARY)
    monkeypatch.setattr(gradients, "head", recorded_head)
    parts = collect_gradient_statistics(model, GradientHook, [naive.batch()]).layers
    assert max(sizes) == 7
    for layer, tensors in expected.items():
        for key, part in tensors.items():
            assert torch.allclose(parts[layer][key], part, rtol=1e-9, atol=1e-18), key


VALID = torch.tensor(
    [
        [True, True, False, True, True, True],
        [False, True, True, True, False, False],
    ]
)


def test_only_pairs_of_valid_neighbours_have_a_loss() -> None:
    model = naive.model("olmoe", torch.float64)
    ids = tiny.tokens(rows=2, length=6)
    with differentiable(model):
        output = model.base_model(input_ids=ids, attention_mask=VALID.long(), use_cache=False)
        gradient = loss_gradient(model, output, ids, VALID) / LOSS_SCALE
        states = output.last_hidden_state.detach().requires_grad_()
        logits = model.lm_head(states)
        pairs = [(0, 0), (0, 3), (0, 4), (1, 1), (1, 2)]
        sum(cross_entropy(logits[row, t], ids[row, t + 1]) for row, t in pairs).backward()
    assert torch.allclose(gradient, states.grad, rtol=1e-12, atol=1e-18)
    positions = gradient.abs().sum(-1).nonzero().tolist()
    assert {tuple(position) for position in positions} == set(pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_summed_in_full(dtype: torch.dtype) -> None:
    half = tiny.build("olmoe", dtype=dtype)
    full = naive.model("olmoe")
    data = [naive.batch()] * 3
    for hook, key, most in (
        (GradientHook, "channel_gradient_square", 0.2),
        (WeightGradientHook, "snip_down", 0.1),
    ):
        actual = collect_gradient_statistics(half, hook, data).layers
        expected = collect_gradient_statistics(full, hook, data).layers
        for layer, tensors in expected.items():
            ratio = float(actual[layer][key].sum() / tensors[key].sum())
            assert abs(ratio - 1) < most, key


def by_hand(
    model: Any, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[int, dict[str, torch.Tensor]]:
    """Layer -> sum -> (E, I): transformers' own eager experts, and .grad of their parameters."""
    layers = moe_layers(model)
    for layer in layers:
        layer.experts.requires_grad_(True)
    for ids, valid in data:
        naive.loss(model, ids, valid).backward()
    return {
        layer.index: {f"snip_{role}": sums for role, sums in weight_products(layer).items()}
        for layer in layers
    }


def weight_products(layer: Any) -> dict[str, torch.Tensor]:
    """Projection -> sums (E, I) of |w dL/dw|. The parameters are overwritten."""
    for weight in layer.experts.parameters():
        weight.data = (weight * weight.grad).abs()
    products = [layer.projections(expert) for expert in range(layer.n_experts)]
    return {
        role: torch.stack([product[role].sum(1) for product in products]).detach()
        for role in ("gate", "up", "down")
    }


@pytest.mark.parametrize(
    "name",
    [
        "olmoe",
        "qwen3_moe",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "minimax_m2",
    ],
)
def test_snip_is_that_of_autograd_by_hand(name: str) -> None:
    ids, valid = naive.batch()
    data = [(ids[:2], valid[:2]), (ids[2:], valid[2:])]
    model = naive.model(name, torch.float64)
    result = collect_gradient_statistics(model, WeightGradientHook, data)
    assert result.header["kind"] == "weight_gradients"
    for weight in model.parameters():
        assert not weight.requires_grad, "as it was"
        assert weight.grad is None, "as it was"
    expected = by_hand(tiny.build(name, dtype=torch.float64), data)
    for layer, sums in expected.items():
        assert result.layers[layer].keys() == sums.keys()
        for part, scores in sums.items():
            actual = result.layers[layer][part]
            assert actual.dtype == torch.float64
            assert (actual - scores).abs().max() < 1e-9 * scores.max()


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "qwen2_moe"])
def test_gradients_of_the_relative_error_of_a_layer(name: str) -> None:
    """MoE-Slimming's Table 13 (Appendix C.3.1) in its released code: autograd through a second run
    of each decoder layer, whose routed experts are scaled by 0.9."""
    data = [naive.batch()]
    model = naive.model(name, torch.float64)
    activations = collect_statistics(model, ActivationHook, data).layers
    weights = collect_statistics(model, WeightHook, data).layers
    network = tiny.build(name, dtype=torch.float64)
    # the last layer first, because `weight_products` overwrites weights
    for layer in reversed(moe_layers(network)):
        network.requires_grad_(False)
        layer.experts.requires_grad_(True)
        gradient = scaled_layer_gradient(network, layer)
        seen = naive.forward(name, torch.float64)[layer.index]
        for number, expert in enumerate(seen.experts):
            down = naive.down_projection(layer, number).detach()
            of_phi = (expert.gate[:, None] * gradient[expert.token]) @ down
            expected = expert_sums(expert.phi, of_phi, expert.gate)
            for key, value in expected.items():
                error = (activations[layer.index][key][number] - value).abs().max()
                assert error <= 1e-6 * (value.abs().max() + 1e-30), (layer.index, number, key)
        for role, sums in weight_products(layer).items():
            actual = weights[layer.index][f"snip_{role}"]
            assert (actual - sums).abs().max() < 1e-6 * sums.max()


def test_moving_averages_are_those_of_the_batches_that_an_expert_has() -> None:
    """MoE-Slimming, Section 4.1, with the weight .9 of its released code."""
    ids, valid = tiny.tokens(rows=3, length=5), torch.ones(3, 5, dtype=torch.bool)
    valid[1, 2:] = False
    data = [(ids[row : row + 1], valid[row : row + 1]) for row in range(3)]
    model = naive.model("olmoe")
    averages = collect_statistics(model, MovingAverageHook, data).layers
    of_batches = [collect_statistics(model, ForwardHook, [batch]).layers for batch in data]
    unused = 0
    for layer, sums in averages.items():
        for expert, average in enumerate(sums["moving_average"][0].tolist()):
            values = [
                float(of_batch[layer]["ala_first"][expert] / batch[1].sum())
                for of_batch, batch in zip(of_batches, data, strict=True)
                if of_batch[layer]["tokens"][expert]
            ]
            expected = values[0] if values else 0.0
            for value in values[1:]:
                expected = 0.9 * expected + 0.1 * value
            assert average == pytest.approx(expected, rel=1e-6, abs=1e-12)
            unused += len(values) < len(data)
    assert unused


def scaled_layer_gradient(network: Any, layer: Any) -> torch.Tensor:
    """The gradient (T, H) of the relative error with respect to the routed output before it is
    scaled by 0.9. The gradients of the experts' weights are in .grad."""
    ids, valid = naive.batch()
    decoder_layer = network.get_submodule(f"{layer.stack}.{layer.index}")
    calls: list[Any] = []
    routed: list[torch.Tensor] = []

    def keep_call(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        calls.append((args, kwargs, result))

    def scale(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        result.retain_grad()
        routed.append(result)
        return 0.9 * result

    handle = decoder_layer.register_forward_hook(keep_call, with_kwargs=True)
    network(input_ids=ids, attention_mask=valid.long(), use_cache=False)
    handle.remove()
    args, kwargs, teacher = calls[0]
    handle = layer.experts.register_forward_hook(scale)
    student = decoder_layer(*args, **kwargs)
    handle.remove()
    teacher, student = (y[0] if isinstance(y, tuple) else y for y in (teacher, student))
    teacher = teacher.detach()
    errors = (student - teacher).square().sum(-1) / (teacher.square().sum(-1) + 1e-6)
    (errors * valid).sum().backward()
    assert routed[0].grad is not None
    return routed[0].grad.flatten(0, -2)
