from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.cost import (
    Routing,
    cost,
    even_routing,
    flops_per_token,
    layered_routing,
    measured_routing,
    nf4_bytes,
    row_flops,
    size,
)
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.recovery.apply import quantize, storage

CHANNELS = ["olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3:grouped", "ernie4_5_moe", "hunyuan_v1_moe"]


def batch(rows: int = 1, length: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tiny.tokens(rows, length)
    return ids, torch.ones_like(ids, dtype=torch.bool)


def facts(model: Any) -> dict[str, Any]:
    """The entries of facts.json that matter here."""
    return {"parameters": sum(weight.numel() for weight in model.parameters()), "bytes_per_parameter": 2}


def counted(model: Any, ids: torch.Tensor) -> int:
    """What torch counts for an eager forward pass, vocabulary included."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation(before)
    return counter.get_total_flops()


def channel_plan(model: Any) -> Plan:
    return random_plan(model, "ragged", share=1.0)


def empty(name: str) -> Any:
    """A tiny model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny.config(name)).eval()


def flops(model: Any, plan: Plan | None, *batches: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """FLOPs of a token with measured routing."""
    row = row_flops(model, batches[0][0].shape[1])
    return flops_per_token(routed_layers(model), plan, row, measured_routing(model, plan, batches))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_flops_are_what_torch_counts_and_need_no_weights_for_experts_of_one_width(name: str) -> None:
    model, without_weights = tiny.build(name), empty(name)
    ids, valid = batch()
    layers, row = routed_layers(without_weights), row_flops(without_weights, ids.shape[1])
    plans = [None, tiny.plan(model, 0.5), random_plan(model, "uneven")]
    if name in CHANNELS:
        plans.append(random_plan(model, "one width", width=[5, 6, 7]))
    for plan in plans:
        routing = even_routing(layers, plan)
        assert routing is not None
        found = flops_per_token(layers, plan, row, routing)
        assert sum(found.values()) * ids.numel() == counted(model if plan is None else prune(model, plan), ids)
        assert all(value >= 0 for value in found.values()) and found["experts"] > 0 and found["router"] > 0
        assert found["other"] < 1
        measured = measured_routing(model, plan, [(ids, valid)])
        assert measured.channels == {index: routing.channels[index] * measured.tokens for index in routing.channels}


@pytest.mark.parametrize("name", CHANNELS)
def test_flops_of_pruned_channels_are_what_torch_counts(name: str) -> None:
    model = tiny.build(name)
    plan = channel_plan(model)
    ids, valid = batch()
    found = flops(model, plan, (ids, valid))
    assert round(sum(found.values()) * ids.numel()) == counted(prune(model, plan), ids)
    assert found["experts"] < flops(model, None, (ids, valid))["experts"]
    assert even_routing(moe_layers(model), plan) is None
    assert not any("forward" in vars(layer.experts) for layer in moe_layers(model)), "hooks are gone afterwards"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_flops_by_hand() -> None:
    model = tiny.build("qwen2_moe", num_key_value_heads=2)
    length = 20
    found = flops(model, None, batch(3, length))
    hidden, heads, groups, width, experts, top_k, layers = 32, 4, 2, 8, 16, 4, 3
    assert found == {
        "attention": layers * 2 * hidden * (2 * heads * width + 2 * groups * width),
        "attention_scores": layers * 2 * 2 * length * heads * width,
        "router": layers * 2 * hidden * experts,
        "shared_experts": layers * (6 * hidden * 40 + 2 * hidden),
        "experts": layers * top_k * 6 * hidden * 24,
        "dense": 0,
        "lm_head": 2 * hidden * tiny.VOCABULARY,
        "other": pytest.approx(0, abs=1),
    }


def test_batches_of_other_shapes_and_padding() -> None:
    """A plan in which experts cost differently: only valid tokens count, each at its own experts."""
    model = tiny.build("olmoe")
    plan = channel_plan(model)
    first, second = batch(2, 24), batch(1, 10)
    one, other = (measured_routing(model, plan, [each]) for each in (first, second))
    both = measured_routing(model, plan, [first, second, first])
    assert both == Routing(106, {index: 2 * one.channels[index] + other.channels[index] for index in one.channels})
    padded = torch.cat((second[0], torch.zeros(1, 6, dtype=torch.int64)), 1)
    valid = (torch.arange(16) < 10)[None]
    assert measured_routing(model, plan, [(padded, valid)]) == other


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("olmoe", "unpruned"),
        ("olmoe", "channels"),
        ("deepseek_v2", "channels"),
        ("deepseek_v3:grouped", "experts"),
        ("qwen3_next", "experts"),
        ("gpt_oss", "experts"),
        ("jamba", "experts"),
        ("minimax", "experts"),
    ],
)
def test_one_layer_in_memory_counts_the_same(name: str, what: str, tmp_path: Path) -> None:
    """Batches of two shapes, one padded."""
    model = tiny.save(name, tmp_path / "model")
    plan = {"unpruned": None, "experts": tiny.plan(model, 0.5), "channels": channel_plan(model)}[what]
    (ids, valid), short = batch(2, 24), batch(1, 10)
    valid[0, 15:] = False
    batches = [(ids, valid), short, (ids.flip(1), valid)]
    streamed = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    found = layered_routing(streamed, plan, batches, out=tmp_path, budget=2000)
    assert found == measured_routing(model, plan, batches)
    assert size(streamed.model, plan, facts=facts(model)) == size(model, plan, facts=facts(model))
    assert all(weight.is_meta for weight in streamed.layers.parameters()), "no layer is left behind"


def test_null_experts_cost_nothing() -> None:
    model = tiny.build("olmoe")
    plan = channel_plan(model)
    for mask in plan.channels.values():
        mask[:] = False
    assert flops(model, plan, batch())["experts"] == 0


def test_cost_compares_with_the_unpruned_model() -> None:
    model = tiny.build("deepseek_v2")
    plan, about = random_plan(model, "one width", share=1.0), facts(model)
    row, text = row_flops(model, 24), [batch()]
    unpruned = cost(model, None, row, measured_routing(model, None, text), facts=about)
    found = cost(model, plan, row, measured_routing(model, plan, text), facts=about)
    assert found == cost(model, plan, unpruned["flops_by_part"], measured_routing(model, plan, text), facts=about)
    assert (unpruned["flops_ratio"], unpruned["flops_saving"], unpruned["parameters_kept"]) == (1, 0, 1)
    assert found["flops_per_token"] == pytest.approx(sum(found["flops_by_part"].values()))
    assert found["flops_per_token_unpruned"] == unpruned["flops_per_token"]
    assert found["flops_ratio"] == found["flops_per_token"] / unpruned["flops_per_token"] < 0.85
    assert found["flops_saving"] == 1 - found["flops_ratio"]
    assert found["routed_kept"] == pytest.approx(numpy.mean([mask.mean() for mask in plan.channels.values()]))
    assert found["storage_bytes"] == found["loading_bytes"] == 2 * found["parameters"]
    assert size(model, tiny.plan(model, 0.5), facts=about)["routed_kept"] == 0.5


def test_published_loading_memory() -> None:
    """OLMoE-1B-7B in GiB of bf16, whole and without half of its experts."""
    changes = {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 50304}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.config("olmoe", **changes, **heads))
    plan = Plan(dict.fromkeys(range(16), tuple(range(32))), dict.fromkeys(range(16), 64))
    whole, half = (size(model, each, facts=facts(model))["loading_bytes"] / 2**30 for each in (None, plan))
    assert (round(whole, 2), round(half, 2)) == (12.89, 6.89)


def test_nf4_bytes() -> None:
    assert nf4_bytes(64) == 32 + 1 + 4 + 4
    assert nf4_bytes(65) == 64 + 2 + 4 + 4
    assert nf4_bytes(64 * 256) == 8192 + 256 + 4 + 4
    assert nf4_bytes(64 * 257) == 8224 + 257 + 8 + 4
    assert nf4_bytes(2048 * 1024) / (2048 * 1024) == pytest.approx(4.127 / 8, abs=1e-4)


@pytest.mark.parametrize("name", ["olmoe", "qwen2_moe", "qwen3_next", "deepseek_v2", "hunyuan_v1_moe", "ernie4_5_moe"])
@pytest.mark.parametrize("modules", [("experts",), ("experts", "shared_experts", "attention")], ids=len)
@pytest.mark.parametrize("what", ["unpruned", "experts", "channels"])
def test_storage_is_what_quantised_tensors_take(name: str, modules: tuple[str, ...], what: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny.build(name, dtype=torch.bfloat16)
    plan = {"unpruned": None, "experts": tiny.plan(model, 0.5), "channels": channel_plan(model)}[what]
    found = size(model, plan, facts=facts(model), bits=4, modules=modules)
    pruned = copy.deepcopy(model) if plan is None else prune(model, plan)
    before = storage(pruned)["total"]
    quantize(pruned, modules)
    saved = found["loading_bytes"] - found["storage_bytes"]
    assert saved == before - storage(pruned)["total"] > 0
    assert found["loading_bytes"] == size(model, plan, facts=facts(model))["loading_bytes"]
