from __future__ import annotations

import math

import pytest
import tiny
import torch

from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import run
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.profile import profile


def batches(rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = tiny.tokens(rows=rows, length=16)
    valid = torch.ones(ids.shape, dtype=torch.bool)
    valid[1, 10:] = False
    return [(ids[:2], valid[:2]), (ids[2:], valid[2:])]


def naive_variance(model, layer: int) -> float:
    """Of the stream that the decoder layer after it, or the last norm, is given; token by token."""
    seen = []
    after = model.get_submodule(f"model.layers.{layer + 1}") if layer < 2 else model.get_submodule("model.norm")
    hook = after.register_forward_pre_hook(
        lambda m, args, kw: seen.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
    )
    vectors = []
    for ids, valid in batches():
        seen.clear()
        run(model, ids, valid)
        stream = seen[0].double()
        vectors += [stream[row, at] for row in range(2) for at in range(16) if valid[row, at]]
    hook.remove()
    mean = sum(vectors) / len(vectors)
    return float(sum((vector - mean) ** 2 for vector in vectors).mean() / len(vectors))


def entropy(shares: list[float]) -> float:
    return -sum(p * math.log(p) for p in shares if p > 0)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2", "qwen3_moe", "mixtral"])
def test_variance_is_that_of_the_stream_token_by_token(name: str) -> None:
    model = tiny.build(name)
    with torch.no_grad():
        rows = profile(model, None, batches())
        assert [row[0] for row in rows] == [0, 1, 2]
        for row in rows:
            assert row[1] == pytest.approx(naive_variance(model, row[0]), rel=1e-9)
    routed = {layer.index for layer in moe_layers(model)}
    for row in rows:
        assert (row[5] == 0) == math.isnan(row[2]) == (row[0] not in routed)


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_entropies_are_those_of_the_routers_decisions(ratio: float | None) -> None:
    model = tiny.build("qwen3_moe")
    layer = moe_layers(model)[1]
    calls: list = []
    hook = layer.router.register_forward_hook(lambda m, args, out: calls.append(out))
    row = profile(model, tiny.plan(model, ratio) if ratio else None, batches())[layer.index]
    hook.remove()
    valid = torch.cat([valid.flatten() for _, valid in batches()])
    logits, gates, chosen = (torch.cat([call[part] for call in calls[:2]])[valid].double() for part in range(3))
    tokens = len(logits)
    kept = 8 if ratio else 16
    assert row[5] == kept == logits.shape[-1]
    softmax = [entropy([math.exp(z) / sum(map(math.exp, line)) for z in line]) for line in logits.tolist()]
    assert row[2] == pytest.approx(sum(softmax) / tokens)
    assert row[3] == pytest.approx(sum(entropy([g / sum(line) for g in line]) for line in gates.tolist()) / tokens)
    flat = chosen.flatten().tolist()
    assert row[4] == pytest.approx(entropy([flat.count(expert) / len(flat) for expert in set(flat)]))


def test_every_architecture_has_a_profile() -> None:
    for name in tiny.ARCHITECTURES:
        rows = profile(tiny.build(name), None, batches(2)[:1])
        assert all(row[1] > 0 for row in rows) and any(row[5] > 0 and row[4] > 0 for row in rows), name


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2", "gpt_oss"])
def test_the_loss_of_a_layer_is_that_of_pruning_it_alone(name: str) -> None:
    model = tiny.build(name)
    layers = moe_layers(model)
    none = Plan({layer.index: tuple(range(layer.n_experts)) for layer in layers}, counts(layers), {})
    assert all(row[6] == 0 or math.isnan(row[6]) for row in profile(model, none, batches()))
    plan = tiny.plan(model, 0.5)
    found = {row[0]: row[6] for row in profile(model, plan, batches())}
    assert {layer for layer, loss in found.items() if not math.isnan(loss)} == set(plan.experts)
    last = layers[-1]
    whole, stream = outputs_of(model, last)
    alone = Plan({**none.experts, last.index: plan.experts[last.index]}, counts(layers), {})
    with mask(model, alone):
        pruned, _ = outputs_of(model, last)
    terms = [
        float((m - other).square().sum() / (y.square().sum() + 1e-6))
        for m, other, y in zip(whole, pruned, stream, strict=True)
    ]
    assert found[last.index] == pytest.approx(sum(terms) / len(terms), rel=1e-4) and found[last.index] > 0


def counts(layers) -> dict[int, int]:
    return {layer.index: layer.n_experts for layer in layers}


def outputs_of(model, layer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The routed outputs of a layer and the residual stream after it, valid token by token."""
    calls: list = []
    streams: list = []
    around = model.get_submodule(f"{layer.stack}.{layer.index}")
    hooks = [
        layer.experts.register_forward_hook(lambda m, args, out: calls.append(out)),
        around.register_forward_hook(lambda m, args, out: streams.append(out[0] if isinstance(out, tuple) else out)),
    ]
    with torch.no_grad():
        for ids, valid in batches():
            run(model, ids, valid)
    for hook in hooks:
        hook.remove()
    valid = torch.cat([valid.flatten() for _, valid in batches()])
    routed, stream = (torch.cat([part.flatten(0, -2) for part in parts])[valid].double() for parts in (calls, streams))
    return list(routed), list(stream)
