from __future__ import annotations

import math
from typing import Any

import naive
import numpy
import pytest
import tiny
import torch

from moe_lab import criteria
from moe_lab.config import GATES
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import are_replaced, parts, sort_by_expert
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.statistics.forward import ENTROPY_BINS, Call, ForwardTap, is_softmax, shifts
from moe_lab.statistics.observe import Observer

SOFTMAX_ROUTERS = {
    *("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek", "deepseek_v2"),
    *("deepseek_v2:grouped", "ernie4_5_moe", "gpt_oss", "granitemoe", "minimax", "hunyuan_v1_moe", "jamba"),
}


def observed(model: Any, ids: torch.Tensor, valid: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    with Observer(model, ForwardTap) as observer:
        observer.read(ids, valid)
    return observer.layers()


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_statistics_are_those_of_each_expert_alone(name: str) -> None:
    """And the model computes the same, to the bit, while it is observed and afterwards."""
    model, (ids, valid) = naive.model(name), naive.batch()
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=valid.long()).logits
        with Observer(model, ForwardTap) as observer:
            observer.valid = valid
            watched = model(input_ids=ids, attention_mask=valid.long()).logits
        after = model(input_ids=ids, attention_mask=valid.long()).logits
    assert torch.equal(plain, watched) and torch.equal(plain, after)
    assert not any(are_replaced(layer) for layer in moe_layers(model))
    layers = observer.layers()
    assert layers.keys() == naive.routed(name).keys()
    for index, seen in naive.routed(name).items():
        named = layers[index]
        assert all(tensor.dtype == torch.float64 for tensor in named.values())
        assert named["tokens"].tolist() == [len(expert.token) for expert in seen.experts]
        softmax = {gate for gate in ("full_softmax", "double_softmax") if f"sums_{gate}" in named}
        assert softmax == ({"full_softmax", "double_softmax"} if name in SOFTMAX_ROUTERS else set())
        for gate in GATES:
            if f"sums_{gate}" in named:
                expected = torch.stack([moments(expert, gate) for expert in seen.experts])
                assert naive.relative(named[f"sums_{gate}"], expected) < 1e-5
        check_columns(named, seen)
        check_ala(named, seen)


def moments(expert: naive.Served, gate: str) -> torch.Tensor:
    g, norm = expert.by(gate), expert.f.norm(dim=-1)
    return torch.stack([torch.stack([(g**a * norm**b).sum() for b in range(3)]) for a in range(3)])


def check_columns(named: dict[str, torch.Tensor], seen: naive.Seen) -> None:
    for j, expert in enumerate(seen.experts):
        if len(expert.token) == 0:
            assert named["output_abs_max"][j] == 0
            continue
        gated = expert.phi * expert.gate[:, None]
        renormalized = expert.phi * expert.by("renormalized")[:, None]
        assert (named["output_sum"][j] - expert.f.sum(0)).abs().max() < 1e-6 * expert.f.norm(dim=-1).sum()
        assert naive.relative(named["output_abs_max"][j], expert.f.abs().max()) < 1e-5
        for name, expected in (
            ("channel_square", expert.phi.square().sum(0)),
            ("channel_max", expert.phi.abs().amax(0)),
            ("gate_channel_square", gated.square().sum(0)),
            ("gate_channel_max", gated.abs().amax(0)),
            ("renormalized_channel_square", renormalized.square().sum(0)),
            ("renormalized_channel_max", renormalized.abs().amax(0)),
        ):
            # one channel may be a difference of large numbers: held against the largest of the expert
            assert (named[name][j] - expected).abs().max() < 1e-5 * expected.max(), name


def check_ala(named: dict[str, torch.Tensor], seen: naive.Seen) -> None:
    energy = seen.stream.square().sum(-1) + 1e-6
    loss = (seen.mixed.square().sum(-1) / energy)[seen.valid].sum()
    assert naive.relative(named["layer_loss"], loss) < 1e-5
    for j, expert in enumerate(seen.experts):
        terms = expert.gate * (expert.f * seen.mixed[expert.token]).sum(-1) / energy[expert.token]
        second = expert.gate.square() * expert.f.square().sum(-1) / energy[expert.token]
        assert abs(named["ala_first"][j] - terms.sum()) <= 1e-5 * terms.abs().sum()
        assert naive.relative(named["ala_second"][j], second.sum()) < 1e-5


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_router_entropies_are_counted_token_by_token(name: str) -> None:
    model, (ids, valid) = naive.model(name), naive.batch()
    layer = moe_layers(model)[0]
    calls: list[torch.Tensor] = []
    hook = layer.router.register_forward_hook(lambda m, args, out: calls.append(out[0]))
    counts = observed(model, ids, valid)[layer.index]["router_entropy"]
    hook.remove()
    expected = [0.0] * ENTROPY_BINS
    for line in calls[0].reshape(-1, layer.n_experts)[valid.flatten()].double().tolist():
        shares = [math.exp(z - max(line)) for z in line]
        shares = [share / sum(shares) for share in shares]
        entropy = -sum(share * math.log(share) for share in shares if share) / math.log(len(shares))
        expected[min(int(entropy * ENTROPY_BINS), ENTROPY_BINS - 1)] += 1
    assert counts.tolist() == expected and sum(expected) == int(valid.sum())


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_sums_of_a_bf16_model_are_those_of_fp64_within_its_rounding(name: str) -> None:
    """bf16 rounds by up to 2^-9 of a number. Of the same inputs, norms of outputs are within 4 and squares of channels
    within 8 units in the last place (2^-8); what the model computes does not change."""
    model, (ids, valid) = naive.model(name, torch.bfloat16), naive.batch()
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=valid.long()).logits
        with Observer(model, ForwardTap) as observer:
            observer.valid = valid
            assert torch.equal(plain, model(input_ids=ids, attention_mask=valid.long()).logits)
    for index, seen in naive.routed(name, torch.bfloat16).items():
        named = observer.layers()[index]
        assert named["tokens"].tolist() == [len(expert.token) for expert in seen.experts]
        expected = torch.stack([moments(expert, "model") for expert in seen.experts])
        assert naive.relative(named["sums_model"], expected) < 4 * 2**-8
        for j, expert in enumerate(seen.experts):
            squares = (expert.phi * expert.gate[:, None]).square().sum(0)
            assert ((named["gate_channel_square"][j] - squares).abs() <= 8 * 2**-8 * squares.max()).all()


def test_softmax_routers_are_told_by_what_they_do() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    for k in (1, 3):
        p, index = logits.softmax(-1).topk(k)
        assert is_softmax(logits, index, p)
        assert is_softmax(logits, index, 16 * p)
        assert not is_softmax(logits, index, logits.sigmoid().gather(1, index))
    assert is_softmax(logits, index, p / p.sum(-1, keepdim=True))
    assert not is_softmax(logits, index, torch.full_like(p, float("nan")))


def test_experts_under_a_plan_of_channels_are_not_observed() -> None:
    """Nor masked while they are observed: a tap computes the experts of the whole model."""
    model = naive.model("olmoe")
    counts = {layer.index: layer.n_experts for layer in moe_layers(model)}
    halves = {index: numpy.arange(24) < numpy.full((count, 1), 12) for index, count in counts.items()}
    plan = Plan({index: tuple(range(count)) for index, count in counts.items()}, counts, channels=halves)
    with mask(model, plan), pytest.raises(RuntimeError, match=r"model\.layers\.0"), Observer(model, ForwardTap):
        pass
    with Observer(model, ForwardTap), pytest.raises(RuntimeError, match=r"model\.layers\.0"), mask(model, plan):
        pass
    assert not any(are_replaced(layer) for layer in moe_layers(model))


def test_a_mask_of_another_size_is_refused() -> None:
    model, (ids, valid) = naive.model("olmoe"), naive.batch()
    with Observer(model, ForwardTap) as observer:
        observer.valid = valid[:1]
        with torch.no_grad(), pytest.raises(UserError, match="saw 96 tokens, expected the batch's 24"):
            model(input_ids=ids)


def test_not_even_a_nan_in_padding_is_counted() -> None:
    index = torch.tensor([[0, 1], [1, 0], [0, 1]])
    valid = torch.tensor([True, False, True])
    rows = sort_by_expert(index, 2)
    call = Call(2, rows, torch.full((3, 2), 0.5), {}, valid)
    values = torch.where(valid[:, None], torch.ones(3, 4), torch.nan)
    for expert, part in parts(rows.ends):
        call.add(expert, part, values[rows.token[part]], values[rows.token[part]])
    sums = {**call.finish(values), **call.normalize(values)}
    assert sums["tokens"].tolist() == [2, 2]
    for name, tensor in sums.items():
        assert torch.isfinite(tensor).all(), name


def test_sums_of_half_precision_numbers_are_not_rounded_to_it() -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.zeros(300, 1, dtype=torch.int64)
    gates, f = (torch.rand(300, n, generator=generator).bfloat16() for n in (1, 4))
    rows = sort_by_expert(index, 1)
    call = Call(1, rows, gates, {}, None)
    call.add(0, slice(0, 300), f, f)
    sums = call.finish(gates * f)
    g, exact = gates.double(), f.double()
    assert naive.relative(sums["output_sum"][0], exact.sum(0)) < 1e-6
    assert naive.relative(sums["channel_square"][0], exact.square().sum(0)) < 1e-6
    assert naive.relative(sums["gate_channel_square"][0], (g * exact).square().sum(0)) < 1e-6
    assert naive.relative(sums["sums_model"][0, 1, 1], (g[:, 0] * exact.norm(dim=-1)).sum()) < 1e-6


def test_shifts_of_the_stream() -> None:
    x = torch.tensor([[3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    added = torch.tensor([[4.0, -3.0], [0.0, 0.0], [-3.0, -4.0], [-6.0, -8.0], [1.0, 0.0]])
    # cos .707107; no change; nothing left; turned around; no stream to compare with
    assert shifts(x, added).tolist() == pytest.approx([0.292893, 0, 1, 2, 1], abs=1e-6)
    assert float(0.6 * 5 * shifts(x, added)[0]) == pytest.approx(0.878680, abs=1e-6)
    small = torch.tensor([[-4e-4, 3e-4]])  # an angle of 1e-4: cos would be 1 - 5e-9, which is 1 in fp32
    assert float(shifts(x[:1], small)) == pytest.approx(5e-9, rel=1e-4)


def test_without_a_norm_before_the_block_no_shift_is_claimed() -> None:
    model = tiny.build("olmoe")
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layers = observed(model, *naive.batch())
    assert ["shift_weighted" in named for named in layers.values()] == [True, False, True]
    with pytest.raises(UserError, match=r"layer 1 has no shift_weighted for criterion=easy_ep"):
        criteria.score("easy_ep", layers, experts=dict.fromkeys(layers, 16))
