"""Sums of the forward pass, and of what is lost without an expert, are those of each expert alone
in fp64."""

import copy
import math
import signal
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import naive
import pytest
import tiny
import torch
from identities.plans import random_plan

from moe_lab import criteria
from moe_lab.config import GATES
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import are_replaced
from moe_lab.models.rows import Rows, inner_products
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import Layers
from moe_lab.statistics.damage import DamageHook, SimilarityHook
from moe_lab.statistics.forward import ENTROPY_BINS, ExpertsCall, ForwardHook, is_softmax, shifts
from moe_lab.statistics.observe import Observer, SaveTimer, collect_statistics

SOFTMAX_ROUTERS = {
    "deepseek",
    "deepseek_v2",
    "deepseek_v2:grouped",
    "ernie4_5_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "jamba",
    "minimax",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
}
SOFTMAX_GATES = {"full_softmax", "double_softmax"}


WAYS = [
    *(("one expert after the other", name) for name in tiny.ARCHITECTURES),
    *(("grouped", name) for name in tiny.ARCHITECTURES),
    # whose interpreter takes seconds for a model, and whose kernels see outputs and gates alone
    *(
        pytest.param("Triton", name, marks=pytest.mark.slow)
        for name in tiny.one_of_each(lambda name: tiny.last_moe_layer(name).family.kind)
    ),
]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_statistics_are_those_of_each_expert_alone(way: str, name: str) -> None:
    """The observed model is left as it was, and computes the same, to the bit, meanwhile."""
    model = naive.model(name)
    if way != "one expert after the other":
        model = copy.deepcopy(model)
        model.set_experts_implementation("grouped_mm")
    devices = ("cpu",) if way == "Triton" else ()
    # Triton's interpreter is faster with few blocks of rows; an expert of olmoe has two
    rows = 32 if name == "olmoe" else 128
    with (
        patch("moe_lab.models.rows.TRITON_DEVICES", devices),
        patch("moe_lab.models.kernels.ROWS", rows),
    ):
        layers = naive.hook_sums(model, ForwardHook)
    assert not any(are_replaced(layer) for layer in moe_layers(model))
    assert layers.keys() == naive.forward(name).keys()
    for index, seen in naive.forward(name).items():
        tensors = layers[index]
        assert all(tensor.dtype == torch.float64 for tensor in tensors.values())
        assert tensors["tokens"].tolist() == [len(expert.token) for expert in seen.experts]
        check_columns(tensors, seen)
        check_ala(tensors, seen)
        check_entropies(tensors, seen)
        softmax = {gate for gate in SOFTMAX_GATES if f"sums_{gate}" in tensors}
        assert softmax == (SOFTMAX_GATES if name in SOFTMAX_ROUTERS else set())
        for gate in GATES:
            if f"sums_{gate}" in tensors:
                expected = torch.stack([moments(expert, gate) for expert in seen.experts])
                assert naive.relative_error(tensors[f"sums_{gate}"], expected) < 1e-5


def check_entropies(tensors: dict[str, torch.Tensor], seen: naive.LayerTokens) -> None:
    """Entropies of routers are counted in bins."""
    shares = seen.logits[seen.valid].softmax(-1)
    entropies = -shares.xlogy(shares).sum(-1) / math.log(shares.shape[1])
    bins = (entropies * ENTROPY_BINS).long().clamp(max=ENTROPY_BINS - 1)
    assert tensors["router_entropy"].tolist() == bins.bincount(minlength=ENTROPY_BINS).tolist()


def moments(expert: naive.ExpertTokens, gate: str) -> torch.Tensor:
    """(3, 3) sums of powers of the gates times powers of the norms of outputs."""
    gates = expert.gate_of_kind(gate)
    norms = expert.f.norm(dim=-1)
    sums = torch.empty(3, 3, dtype=norms.dtype)
    for a, b in product(range(3), repeat=2):
        sums[a, b] = (gates**a * norms**b).sum()
    return sums


def check_columns(tensors: dict[str, torch.Tensor], seen: naive.LayerTokens) -> None:
    """Sums and maxima of outputs and of channels, with each gate."""
    for j, expert in enumerate(seen.experts):
        if len(expert.token) == 0:
            assert tensors["output_abs_max"][j] == 0
            continue
        error = (tensors["output_sum"][j] - expert.f.sum(0)).abs().max()
        assert error < 1e-6 * expert.f.norm(dim=-1).sum()
        assert naive.relative_error(tensors["output_abs_max"][j], expert.f.abs().max()) < 1e-5
        gates = {
            "": torch.ones_like(expert.gate),
            "gate_": expert.gate,
            "renormalized_": expert.gate_of_kind("renormalized"),
        }
        for prefix, gate in gates.items():
            phi = expert.phi * gate[:, None]
            squares = tensors[f"{prefix}channel_square"][j]
            maxima = tensors[f"{prefix}channel_max"][j]
            assert relative_to_largest(squares, phi.square().sum(0)) < 1e-5, prefix
            assert relative_to_largest(maxima, phi.abs().amax(0)) < 1e-5, prefix


def relative_to_largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of channels, each of which may be a difference of large numbers."""
    return float((actual - expected).abs().max() / expected.max())


def check_ala(tensors: dict[str, torch.Tensor], seen: naive.LayerTokens) -> None:
    energy = seen.stream.square().sum(-1) + 1e-6
    loss = (seen.routed_output.square().sum(-1) / energy)[seen.valid].sum()
    assert naive.relative_error(tensors["layer_loss"], loss) < 1e-5
    for j, expert in enumerate(seen.experts):
        energies = energy[expert.token]
        products = (expert.f * seen.routed_output[expert.token]).sum(-1)
        first = expert.gate * products / energies
        second = expert.gate.square() * expert.f.square().sum(-1) / energies
        assert abs(tensors["ala_first"][j] - first.sum()) <= 1e-5 * first.abs().sum()
        assert naive.relative_error(tensors["ala_second"][j], second.sum()) < 1e-5


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_sums_of_a_bf16_model_are_those_of_fp64_within_its_rounding(name: str) -> None:
    """bf16 rounds by up to 2^-9 of a number. Of the same inputs, norms of outputs are within 4 and
    squares of channels within 8 units in the last place (2^-8); what the model computes does not
    change."""
    layers = naive.hook_sums(naive.model(name, torch.bfloat16), ForwardHook)
    for index, seen in naive.forward(name, torch.bfloat16).items():
        tensors = layers[index]
        assert tensors["tokens"].tolist() == [len(expert.token) for expert in seen.experts]
        expected = torch.stack([moments(expert, "model") for expert in seen.experts])
        assert naive.relative_error(tensors["sums_model"], expected) < 4 * 2**-8
        for j, expert in enumerate(seen.experts):
            squares = (expert.phi * expert.gate[:, None]).square().sum(0)
            errors = (tensors["gate_channel_square"][j] - squares).abs()
            assert (errors <= 8 * 2**-8 * squares.max()).all()


def test_softmax_routers_are_recognised_by_gates() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    for k in (1, 3):
        shares, index = logits.softmax(-1).topk(k)
        assert is_softmax(logits, index, 16 * shares)
        sigmoids = logits.sigmoid().gather(1, index)
        assert not is_softmax(logits, index, sigmoids)
        missing = torch.full_like(shares, torch.nan)
        assert not is_softmax(logits, index, missing)


@pytest.mark.parametrize("mask_first", [True, False])
def test_masked_channels_are_not_observed(mask_first: bool) -> None:
    """A hook computes the experts of the whole model."""
    model = naive.model("olmoe")
    plan = random_plan(model, "one width", share=1)
    contexts = [mask(model, plan), Observer(model, ForwardHook)]
    first, second = contexts if mask_first else reversed(contexts)
    with first, pytest.raises(RuntimeError, match=r"model\.layers\.0"), second:
        pass
    assert not any(are_replaced(layer) for layer in moe_layers(model))


def test_observer_refuses_the_mask_of_another_batch() -> None:
    model = naive.model("olmoe")
    ids, valid = naive.batch()
    with (
        Observer(model, ForwardHook) as observer,
        pytest.raises(UserError, match="96 tokens, expected the batch's 24"),
    ):
        observer.valid = valid[:1]
        tiny.logits(model, ids)


def test_not_even_a_nan_in_padding_is_counted() -> None:
    index = torch.tensor([[0, 1], [1, 0], [0, 1]])
    valid = torch.tensor([True, False, True])
    rows = Rows(index, 2)
    call = ExpertsCall(rows, torch.full((3, 2), 0.5), {}, ~valid)
    values = torch.where(valid[:, None], torch.ones(3, 4), torch.nan)
    for part in rows.parts:
        call.add(part, values[rows.token[part.rows]], values[rows.token[part.rows]])
    sums = {**call.finish(values), **call.normalize(values)}
    assert sums["tokens"].tolist() == [2, 2]
    for name, tensor in sums.items():
        assert torch.isfinite(tensor).all(), name


def test_sums_of_half_precision_numbers_are_not_rounded_to_it() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Rows(torch.zeros(300, 1, dtype=torch.int64), 1)
    gates = torch.rand(300, 1, generator=generator).bfloat16()
    outputs = torch.rand(300, 4, generator=generator).bfloat16()
    call = ExpertsCall(rows, gates, {}, None)
    for part in rows.parts:
        call.add(part, outputs, outputs)
    sums = call.finish(gates * outputs)
    exact = outputs.double()
    gated = gates.double() * exact
    assert naive.relative_error(sums["output_sum"][0], exact.sum(0)) < 1e-6
    assert naive.relative_error(sums["channel_square"][0], exact.square().sum(0)) < 1e-6
    assert naive.relative_error(sums["gate_channel_square"][0], gated.square().sum(0)) < 1e-6
    assert naive.relative_error(sums["sums_model"][0, 1, 1], gated.norm(dim=-1).sum()) < 1e-6


def test_sums_of_two_batches_are_those_of_one() -> None:
    """Of maxima, the larger one."""
    model = naive.model("olmoe")
    ids, valid = naive.batch()

    def sums(size: int) -> Layers:
        with Observer(model, ForwardHook) as observer:
            for batch in zip(ids.split(size), valid.split(size), strict=True):
                observer.run_batch(*batch)
            return observer.layers()

    naive.assert_sums_close(sums(2), sums(len(ids)), 1e-6)


def test_sums_of_few_tokens_are_computed_at_once() -> None:
    """Of fewer rows than a piece of a sum has."""
    model = naive.model("olmoe")
    ids, valid = naive.batch()
    layers = []
    for implementation in ("eager", "grouped_mm"):
        copied = copy.deepcopy(model)
        copied.set_experts_implementation(implementation)
        with Observer(copied, ForwardHook) as observer:
            observer.run_batch(ids[-1:, :3], torch.ones_like(valid[:1, :3]))
            layers.append(observer.layers())
    naive.assert_sums_close(*layers, 1e-6)


def test_exact_damage_keeps_the_output_of_a_router_with_equal_logits() -> None:
    """Without an expert, each of the others with its logit can be chosen, so a token may use many
    more than top-k + 1."""
    model = tiny.build("olmoe")
    for layer in moe_layers(model):
        router = layer.routing[0].tensor.data
        router[4:] = router[4]
    expected = tiny.logits(model)
    with Observer(model, DamageHook):
        assert (tiny.logits(model) - expected).abs().max() < 1e-5


STREAM = torch.tensor([3.0, 4.0])


def shift_of(stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    pairs = ((stream, stream), (stream, added), (added, added))
    return shifts(*(inner_products(*pair) for pair in pairs))


@pytest.mark.parametrize(
    ("stream", "added", "expected"),
    [
        (STREAM, [4.0, -3.0], 0.292893),  # cos .707107
        (STREAM, [0.0, 0.0], 0),
        (STREAM, [-3.0, -4.0], 1),  # nothing left
        (STREAM, [-6.0, -8.0], 2),  # turned around
        (0 * STREAM, [1.0, 0.0], 1),  # no stream to compare with
    ],
)
def test_shifts_of_the_stream(stream: torch.Tensor, added: list[float], expected: float) -> None:
    shift = shift_of(stream[None], torch.tensor([added]))
    assert shift.tolist() == pytest.approx([expected], abs=1e-6)


def test_small_shifts_are_not_lost_in_fp32() -> None:
    """Of an angle of 1e-4, cos would be 1 - 5e-9, which is 1 in fp32."""
    small = torch.tensor([[-4e-4, 3e-4]])
    assert float(shift_of(STREAM[None], small)) == pytest.approx(5e-9, rel=1e-4)


def test_without_a_norm_before_the_block_no_shift_is_claimed() -> None:
    model = tiny.build("olmoe")
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layers = naive.hook_sums(model, ForwardHook)
    assert ["shift_weighted" in tensors for tensors in layers.values()] == [True, False, True]
    with pytest.raises(UserError, match=r"layer 1 has no shift_weighted for criterion=easy_ep"):
        criteria.score("easy_ep", layers, {layer: {"n_experts": 16} for layer in layers})


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_similarity_statistics_read_every_valid_token(name: str) -> None:
    """Against every expert run by hand on every token in fp64."""
    model = naive.model(name, torch.float64)
    layers = naive.hook_sums(model, SimilarityHook)
    for layer in moe_layers(model):
        seen = naive.forward(name, torch.float64)[layer.index]
        assert not seen.valid.all()
        hidden = seen.hidden[seen.valid]
        logits = seen.logits[seen.valid]
        experts = range(layer.n_experts)
        outputs = torch.stack([layer.expert_output(hidden, expert) for expert in experts])
        gates = logits.softmax(-1).T[:, :, None]
        expected = {
            "dense_output_sum": outputs.sum(1),
            "dense_gated_output_sum": (gates * outputs).sum(1),
            "router_gram": sum(torch.outer(row, row) for row in logits),
            "router_absolute": torch.stack([logits.abs().sum(0), 0 * logits[0] + len(logits)]),
        }
        for key, value in expected.items():
            assert naive.relative_error(layers[layer.index][key], value) < 1e-9, key


GROUPED = [name for name in tiny.ARCHITECTURES if name.endswith(":grouped")]
UNGROUPED = [name for name in tiny.ARCHITECTURES if name not in GROUPED]


@pytest.mark.parametrize("name", UNGROUPED)
def test_damage_is_that_of_really_removing_the_expert(name: str) -> None:
    """Reference: in fp64, the block run again on the rows of a router that has lost the expert's
    row."""
    model = naive.model(name)
    measured = collect_statistics(model, DamageHook, [naive.batch()]).layers
    wide = copy.deepcopy(model).double()
    layers = moe_layers(wide)
    layer = layers[-1]
    seen = naive.forward(name)[layer.index]
    hidden = seen.block_input.double()
    counts = {moe_layer.index: moe_layer.n_experts for moe_layer in layers}
    every_expert = {index: tuple(range(count)) for index, count in counts.items()}
    with torch.no_grad():
        unpruned = naive.block_output(layer, hidden)
        for expert in range(layer.n_experts):
            retained = tuple(index for index in range(layer.n_experts) if index != expert)
            plan = Plan.of_experts({**every_expert, layer.index: retained}, counts, {})
            with mask(wide, plan):
                difference = unpruned - naive.block_output(layer, hidden)
            expected = difference[seen.experts[expert].token].norm(dim=-1).sum()
            assert naive.relative_error(measured[layer.index]["damage"][expert], expected) < 1e-5, (
                expert
            )


def every_output(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """(T, N, H) outputs of all experts for all tokens, in fp64."""
    experts = copy.deepcopy(layer.experts).double()
    gates = torch.ones(len(hidden), 1, dtype=torch.float64)
    outputs = []
    with torch.no_grad():
        for expert in range(layer.n_experts):
            index = torch.full_like(gates, expert, dtype=torch.long)
            outputs.append(experts(hidden, index, gates))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("name", GROUPED)
def test_damage_of_group_limited_routers(name: str) -> None:
    """Reference: the routing rule by hand, token by token, with sets of experts."""
    model = naive.model(name)
    measured = collect_statistics(model, DamageHook, [naive.batch()]).layers
    layer = moe_layers(model)[-1]
    seen = naive.forward(name)[layer.index]
    router: Any = layer.router
    hidden = seen.block_input.double().flatten(0, -2)
    logits = hidden @ router.weight.double().T
    outputs = every_output(layer, hidden)
    expected = torch.zeros(layer.n_experts, dtype=torch.float64)
    for token in seen.valid.nonzero().flatten().tolist():
        chosen, gates = routed_by_hand(name, router, logits[token], set(), layer.top_k)
        assert chosen == set(seen.index[token].tolist())
        for expert in chosen:
            _, without = routed_by_hand(name, router, logits[token], {expert}, layer.top_k)
            expected[expert] += ((gates - without) @ outputs[token]).norm()
    assert naive.relative_error(measured[layer.index]["damage"], expected) < 1e-5


def routed_by_hand(
    name: str, router: Any, logits: torch.Tensor, removed: set[int], k: int
) -> tuple[set[int], torch.Tensor]:
    """Experts of one token, and gates (E,), by the papers of DeepSeek-V2 and V3."""
    size = len(logits) // router.num_group
    remaining = [expert for expert in range(len(logits)) if expert not in removed]
    if sigmoid := name.startswith("deepseek_v3"):
        scores = logits.sigmoid()
        choice = scores + router.e_score_correction_bias.double()
        best = 2
    else:
        scores = torch.zeros_like(logits)
        scores[remaining] = logits[remaining].softmax(-1)
        choice = scores
        best = 1

    def choice_of(expert: int) -> float:
        return float(choice[expert])

    def choice_of_group(group: list[int]) -> float:
        return sum(sorted(map(choice_of, group), reverse=True)[:best])

    groups = [[e for e in remaining if e // size == g] for g in range(router.num_group)]
    reached = sorted(groups, key=choice_of_group, reverse=True)[: router.topk_group]
    chosen = sorted(chain(*reached), key=choice_of, reverse=True)[:k]
    gates = torch.zeros_like(logits)
    gates[chosen] = scores[chosen]
    if sigmoid:
        gates /= gates.sum()
    return set(chosen), gates * router.routed_scaling_factor


@pytest.mark.parametrize("name", ["olmoe", "ernie4_5_moe", "gpt_oss"])
def test_the_model_computes_what_it_always_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = naive.model(name)
    ids, _ = naive.batch()
    plain = tiny.logits(model, ids)
    sums = []
    for tokens in (40, 2048):  # 96 tokens: three parts, the last one shorter; or one
        monkeypatch.setattr("moe_lab.statistics.damage.TOKENS", tokens)
        with Observer(model, DamageHook) as observer:
            assert torch.allclose(tiny.logits(model, ids), plain, atol=1e-4)
        sums.append(observer.layers())
    for layer, tensors in sums[0].items():
        assert torch.allclose(tensors["damage"], sums[1][layer]["damage"], rtol=1e-5)


def test_a_signal_to_end_waits_until_sums_are_saved(tmp_path: Path) -> None:
    signals: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        with SaveTimer(tmp_path) as timer:
            signal.raise_signal(signal.SIGTERM)
            assert timer.is_due()
            assert signals == []
            with timer.saving():
                assert signals == []
            assert signals == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)
