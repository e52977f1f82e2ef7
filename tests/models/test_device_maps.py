"""A model whose layers live in several places gives the sums of one that lives in one, each where its layer is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

import moe_lab
from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.load import load_model
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.replace import merge_experts
from moe_lab.statistics import Layers
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.gradients import GradientTap, gather_gradients
from moe_lab.statistics.observe import Observer

ARCHITECTURES = ["qwen3_moe", "deepseek_v3:grouped", "gpt_oss"]


def forward(model: Any, out: Path) -> Layers:
    ids = tiny.tokens()
    with Observer(model, ForwardTap) as observer:
        observer.read(ids, ids != 5)
    for tap in observer.taps:  # nothing was carried to another device while it was summed
        home = tap.layer.router.weight.device
        assert all(part.device == home for part in tap.sums.values()) or home.type == "meta"
    return observer.layers()


def backward(model: Any, out: Path) -> Layers:
    ids = tiny.tokens()
    return gather_gradients(model, GradientTap, [(ids, ids != 5)], out=out, fingerprint={}, groups=1).layers


def split(model: Any) -> dict[str, str]:
    """One MoE layer on the disk, all else in memory."""
    last = moe_layers(model)[-1].index
    parts = [name for name, _ in model.model.named_children() if name != "layers"]
    places = {f"model.{name}": "cpu" for name in parts} | {"lm_head": "cpu"}
    return places | {f"model.layers.{n}": "disk" if n == last else "cpu" for n in range(len(model.model.layers))}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_layer_on_the_disk_is_observed_like_any_other_and_not_masked(name: str, tmp_path: Path) -> None:
    plain = tiny.save(name, tmp_path / "model", shard="60KB")
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map=split(plain),
        offload_folder=tmp_path / "offload",
        experts_implementation="eager",
    )
    spread.eval().requires_grad_(False)
    last = moe_layers(spread)[-1]
    assert last.experts.down_proj.is_meta and "disk" in set(spread.hf_device_map.values())
    for gather in (forward, backward):
        expected, found = gather(plain, tmp_path / "a"), gather(spread, tmp_path / "b")
        assert expected.keys() == found.keys()
        for layer, named in expected.items():
            assert all(torch.equal(found[layer][statistic], sums) for statistic, sums in named.items()), layer
    with pytest.raises(UserError, match=r"are offloaded.*load the model without"), mask(spread, tiny.plan(plain, 0.5)):
        pass


def test_plans_do_not_change_experts_that_are_offloaded() -> None:
    """Their weights are there only while they run, so what is made of them before would be made of nothing."""
    plain, spread = tiny.build("olmoe"), tiny.build("olmoe")
    for layer in moe_layers(spread):
        cpu_offload(layer.experts)
    layers = moe_layers(plain)
    random = numpy.random.default_rng(0)
    channels = {layer.index: random.random((layer.n_experts, layer.width)) < 0.5 for layer in layers}
    everything = {layer.index: tuple(range(layer.n_experts)) for layer in layers}
    counts = {layer.index: layer.n_experts for layer in layers}
    pairs = {layer: {one: {one: 0.5, one + 1: 0.5} for one in range(0, counts[layer], 2)} for layer in counts}
    narrow = Plan(everything, counts, {}, channels)
    merged = merge_experts(pairs, {layer.index: layer.width for layer in layers}, provenance={})
    attempts = [partial(prune, plan=plan) for plan in (tiny.plan(plain, 0.5), narrow, merged)]
    attempts += [lambda model, plan=plan: mask(model, plan).__enter__() for plan in (tiny.plan(plain, 0.5), merged)]
    for attempt in (*attempts, partial(moe_lab.align, plan=merged)):
        with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts.*offloaded"):
            attempt(spread)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_devices_sum_what_one_does(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path / "model")
    about = {"name": "m", "path": str(tmp_path / "model"), "dtype": "float32"}
    one, two = (load_model(ModelConfig(**about, device=device))[0] for device in ("cuda:0", "balanced"))  # type: ignore[arg-type]
    assert len({layer.router.weight.device for layer in moe_layers(two)}) == 2
    for gather in (forward, backward):
        expected, found = gather(one, tmp_path / "a"), gather(two, tmp_path / "b")
        for layer, named in expected.items():
            for statistic, sums in named.items():
                assert torch.allclose(found[layer][statistic], sums, rtol=1e-5, atol=1e-6), (layer, statistic)
