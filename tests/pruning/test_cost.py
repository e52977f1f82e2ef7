"""What a model costs under a plan: FLOPs, bytes, what its layers do, and seconds on a device that
is named."""

import copy
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pandas as pd
import pytest
import tiny
import torch
from example_steps import Example, cell_of
from identities.plans import random_plan
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from moe_lab.config import (
    CalibrationConfig,
    Config,
    LauncherConfig,
    ModelConfig,
    RecoveryConfig,
    TimingConfig,
)
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import timing as evaluation_timing
from moe_lab.evaluation.timing import measure
from moe_lab.models.discover import is_experts, moe_layers, routed_layers
from moe_lab.models.experts import run
from moe_lab.models.load import device_name
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
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.profile import profile
from moe_lab.pruning.prune import prune
from moe_lab.recovery.apply import quantize, storage
from moe_lab.results import TIMINGS
from moe_lab.study import estimates
from moe_lab.study.graph import build
from moe_lab.study.provenance import provenance
from moe_lab.study.step import Step
from moe_lab.study.steps.costs import Timing, wrong_timing
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import loaded_as
from moe_lab.study.steps.recovery import Pruned, Storage

CHANNELS = [
    "olmoe",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3:grouped",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
]


def batch(rows: int = 1, length: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tiny.tokens(rows, length)
    return ids, torch.ones_like(ids, dtype=torch.bool)


def counted(model: Any, ids: torch.Tensor) -> int:
    """What torch counts for an eager forward pass, vocabulary included."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation(before)
    return counter.get_total_flops()


def ragged(model: Any) -> Plan:
    return random_plan(model, "ragged", share=1.0)


def layers_of(model: Any, plan: Plan | None) -> Any:
    return routed_layers(prune(model, plan) if plan else model)


def measured(model: Any, plan: Plan | None, batches: Any) -> Routing:
    return measured_routing(model, plan, layers_of(model, plan), batches)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_flops_are_what_torch_counts_and_need_no_weights_for_experts_of_one_width(
    name: str,
) -> None:
    model, (ids, valid) = tiny.build(name), batch()
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny.config(name)).eval()
    layers = routed_layers(empty)
    row = row_flops(empty, ids.shape[1])
    plans = [None, tiny.plan(model, 0.5), random_plan(model, "uneven")]
    if name in CHANNELS:
        plans += [random_plan(model, "one width", width=[5, 6, 7]), ragged(model)]
    for plan in plans:
        pruned = layers_of(empty, plan)
        routing = even_routing(pruned)
        found_routing = measured(model, plan, [(ids, valid)])
        assert (routing is None) == (len(plans) == 5 and plan is plans[-1])
        found = flops_per_token(layers, pruned, row, routing or found_routing)
        total = sum(found.values()) * ids.numel()
        expected = counted(model if plan is None else prune(model, plan), ids)
        assert (round(total) if routing is None else total) == expected
        assert (
            all(value >= 0 for value in found.values())
            and found["experts"] > 0
            and found["router"] > 0
        )
        assert found["other"] < 1
        if routing is not None:
            used = {
                index: channels * found_routing.tokens
                for index, channels in routing.channels.items()
            }
            assert found_routing.channels == used
    assert not any("forward" in vars(layer.experts) for layer in moe_layers(model)), (
        "hooks are gone afterwards"
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_flops_by_hand() -> None:
    model = tiny.build("qwen2_moe", num_key_value_heads=2)
    length = 20
    layers = routed_layers(model)
    routing = measured(model, None, [batch(3, length)])
    found = flops_per_token(layers, layers, row_flops(model, length), routing)
    hidden = 32
    heads = 4
    groups = 2
    width = 8
    experts = 16
    top_k = 4
    depth = 3
    assert found == {
        "attention": depth * 2 * hidden * (2 * heads * width + 2 * groups * width),
        "attention_scores": depth * 2 * 2 * length * heads * width,
        "router": depth * 2 * hidden * experts,
        "shared_experts": depth * (6 * hidden * 40 + 2 * hidden),
        "experts": depth * top_k * 6 * hidden * 24,
        "dense": 0,
        "lm_head": 2 * hidden * tiny.VOCABULARY,
        "other": pytest.approx(0, abs=1),
    }


def test_batches_of_other_shapes_and_padding() -> None:
    """A plan in which experts cost differently: only valid tokens count, each at its own
    experts."""
    model = tiny.build("olmoe")
    plan = ragged(model)
    first = batch(2, 24)
    second = batch(1, 10)
    one, other = (measured(model, plan, [each]) for each in (first, second))
    both = measured(model, plan, [first, second, first])
    assert both == Routing(
        106, {index: 2 * one.channels[index] + other.channels[index] for index in one.channels}
    )
    padded = torch.cat((second[0], torch.zeros(1, 6, dtype=torch.int64)), 1)
    valid = (torch.arange(16) < 10)[None]
    assert measured(model, plan, [(padded, valid)]) == other


STREAMED = [("olmoe", "unpruned"), ("olmoe", "channels"), ("deepseek_v2", "channels")]
STREAMED += [
    (name, "experts")
    for name in ("deepseek_v3:grouped", "qwen3_next", "gpt_oss", "jamba", "minimax")
]


def planned(model: Any, what: str) -> Plan | None:
    return {"unpruned": None, "experts": tiny.plan(model, 0.5), "channels": ragged(model)}[what]


@pytest.mark.parametrize(("name", "what"), STREAMED)
def test_one_layer_in_memory_counts_the_same(name: str, what: str, tmp_path: Path) -> None:
    """Batches of two shapes, one padded."""
    model = tiny.save(name, tmp_path / "model")
    plan = planned(model, what)
    (ids, valid), short = batch(2, 24), batch(1, 10)
    valid[0, 15:] = False
    batches = [(ids, valid), short, (ids.flip(1), valid)]
    streamed = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    found = layered_routing(streamed, plan, layers_of(model, plan), batches, out=tmp_path)
    assert found == measured(model, plan, batches)
    assert all(weight.is_meta for weight in streamed.layers.parameters()), "no layer is left behind"


def test_cost_compares_with_the_unpruned_model() -> None:
    model = tiny.build("deepseek_v2")
    plan = random_plan(model, "one width", share=1.0)
    row = row_flops(model, 24)
    text = [batch()]
    pruned = prune(model, plan)
    unpruned = cost(model, model, row, measured(model, None, text))
    found = cost(model, pruned, row, measured(model, plan, text))
    assert found == cost(model, pruned, unpruned["flops_by_part"], measured(model, plan, text))
    assert (unpruned["flops_ratio"], unpruned["flops_saving"], unpruned["parameters_kept"]) == (
        1,
        0,
        1,
    )
    assert found["flops_per_token"] == pytest.approx(sum(found["flops_by_part"].values()))
    assert found["flops_per_token_unpruned"] == unpruned["flops_per_token"]
    assert found["flops_ratio"] == found["flops_per_token"] / unpruned["flops_per_token"] < 0.85
    assert found["flops_saving"] == 1 - found["flops_ratio"]
    assert found["routed_kept"] == pytest.approx(
        numpy.mean([layer.channels.mean() for layer in plan.layers.values()])
    )
    assert found["storage_bytes"] == found["loading_bytes"] == 2 * found["parameters"]
    assert size(model, prune(model, tiny.plan(model, 0.5)))["routed_kept"] == 0.5


def test_nf4_bytes() -> None:
    assert nf4_bytes(64) == 32 + 1 + 4 + 4
    assert nf4_bytes(65) == 64 + 2 + 4 + 4
    assert nf4_bytes(64 * 256) == 8192 + 256 + 4 + 4
    assert nf4_bytes(64 * 257) == 8224 + 257 + 8 + 4
    assert nf4_bytes(2048 * 1024) / (2048 * 1024) == pytest.approx(4.127 / 8, abs=1e-4)


@pytest.mark.parametrize(
    "name", ["olmoe", "qwen2_moe", "qwen3_next", "deepseek_v2", "hunyuan_v1_moe", "ernie4_5_moe"]
)
@pytest.mark.parametrize(
    "modules", [("experts",), ("experts", "shared_experts", "attention")], ids=len
)
@pytest.mark.parametrize("what", ["unpruned", "experts", "channels"])
def test_storage_is_what_quantised_tensors_take(
    name: str, modules: tuple[str, ...], what: str
) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny.build(name, dtype=torch.bfloat16)
    plan = planned(model, what)
    pruned = copy.deepcopy(model) if plan is None else prune(model, plan)
    found = size(model, pruned, bits=4, modules=modules)
    loading = size(model, pruned)["loading_bytes"]
    before = storage(pruned)["total"]
    quantize(pruned, modules)
    saved = found["loading_bytes"] - found["storage_bytes"]
    assert saved == before - storage(pruned)["total"] > 0
    assert found["loading_bytes"] == loading


# ---- profiles


def outputs(model: Any, *modules: Any) -> list[torch.Tensor]:
    """What each of some modules gives (its first result) for each valid token, in fp64 (T, H)."""
    seen: list[list[torch.Tensor]] = [[] for _ in modules]

    def keep(place: int, result: Any) -> None:
        seen[place].append(result[0] if isinstance(result, tuple) else result)

    hooks = [
        one.register_forward_hook(lambda *given, at=at: keep(at, given[2]))
        for at, one in enumerate(modules)
    ]
    for ids, valid in tiny.batches():
        run(model, ids, valid)
    for hook in hooks:
        hook.remove()
    valid = torch.cat([valid.flatten() for _, valid in tiny.batches()])
    return [torch.cat([part.flatten(0, -2) for part in parts])[valid].double() for parts in seen]


def entropy(shares: list[float]) -> float:
    return -sum(p * math.log(p) for p in shares if p > 0)


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_variance_is_that_of_the_stream_token_by_token(name: str) -> None:
    model = tiny.build(name)
    rows = profile(model, None, tiny.batches())
    routed = {layer.index for layer in moe_layers(model)}
    streams = outputs(model, *model.get_submodule(moe_layers(model)[0].stack))
    assert [row[0] for row in rows] == [0, 1, 2]
    for row, stream in zip(rows, streams, strict=True):
        vectors = list(stream)
        mean = sum(vectors) / len(vectors)
        expected = sum((vector - mean) ** 2 for vector in vectors).mean() / len(vectors)
        assert row[1] == pytest.approx(float(expected), rel=1e-9)
        assert (row[5] == 0) == math.isnan(row[2]) == (row[0] not in routed)


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_entropies_are_those_of_the_routers_decisions(ratio: float | None) -> None:
    model = tiny.build("qwen3_moe")
    layer = moe_layers(model)[1]
    calls: list = []
    hook = layer.router.register_forward_hook(lambda m, args, out: calls.append(out))
    row = profile(model, tiny.plan(model, ratio) if ratio else None, tiny.batches())[layer.index]
    hook.remove()
    valid = torch.cat([valid.flatten() for _, valid in tiny.batches()])
    logits, gates, chosen = (
        torch.cat([call[part] for call in calls[:3]])[valid].double() for part in range(3)
    )
    tokens = len(logits)
    kept = 8 if ratio else 16
    assert row[5] == kept == logits.shape[-1]
    softmax = [
        entropy([math.exp(z) / sum(map(math.exp, line)) for z in line]) for line in logits.tolist()
    ]
    assert row[2] == pytest.approx(sum(softmax) / tokens)
    assert row[3] == pytest.approx(
        sum(entropy([g / sum(line) for g in line]) for line in gates.tolist()) / tokens
    )
    flat = chosen.flatten().tolist()
    assert row[4] == pytest.approx(
        entropy([flat.count(expert) / len(flat) for expert in set(flat)])
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2", "gpt_oss"])
def test_the_loss_of_a_layer_is_that_of_pruning_it_alone(name: str) -> None:
    model = tiny.build(name)
    layers = moe_layers(model)
    counts = {layer.index: layer.n_experts for layer in layers}
    everything = {index: tuple(range(count)) for index, count in counts.items()}
    assert all(
        row[6] == 0 or math.isnan(row[6])
        for row in profile(model, Plan.of_experts(everything, counts), tiny.batches())
    )
    plan = tiny.plan(model, 0.5)
    found = {row[0]: row[6] for row in profile(model, plan, tiny.batches())}
    assert {layer for layer, loss in found.items() if not math.isnan(loss)} == set(plan.retained)
    last = layers[-1]
    whole, stream = outputs(model, last.experts, model.get_submodule(f"{last.stack}.{last.index}"))
    with mask(
        model, Plan.of_experts({**everything, last.index: plan.layers[last.index].retained}, counts)
    ):
        (pruned,) = outputs(model, last.experts)
    terms = (whole - pruned).square().sum(1) / (stream.square().sum(1) + 1e-6)
    assert (
        found[last.index] == pytest.approx(float(terms.mean()), rel=1e-4) and found[last.index] > 0
    )


# ---- seconds, as generating takes them

ASKED = TimingConfig(batch_sizes=[1, 3], prompt_lengths=[4, 10], new_tokens=5)


def test_requests_read_and_write_what_generate_does_and_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.build("olmoe")
    read: list[torch.Tensor] = []
    now = [0.0]
    forward = model.forward

    def slow(**given: Any) -> Any:
        """Takes seconds that are known, and, of the shortest prompt, bytes."""
        read.append(given["input_ids"])
        now[0] += 0.2 if given["input_ids"].shape[1] > 1 else 0.004
        model.held = torch.ones(32 << 20 if given["input_ids"].shape == (1, 4) else 1)
        return forward(**given)

    monkeypatch.setattr(model, "forward", slow)
    monkeypatch.setattr(evaluation_timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    text = tiny.tokens(rows=1)[0]
    rows = pd.DataFrame(measure(model, text, ASKED), columns=list(TIMINGS))
    assert rows.groupby(["batch_size", "prompt_length"]).size().tolist() == [7] * 4
    assert (rows["new_tokens"] == 5).all()
    assert rows["prefill_seconds"].tolist() == pytest.approx([0.2] * 28)
    assert rows["decode_seconds"].tolist() == pytest.approx([5 * 0.004] * 28)
    held = rows["working_bytes"][0]
    assert math.isnan(held) or held == pytest.approx(4 * (32 << 20), rel=0.1)
    requests = [read[at : at + 6] for at in range(0, len(read), 6)]
    shapes = [shape for shape in ((1, 4), (1, 10), (3, 4), (3, 10)) for _ in range(9)]
    assert [tuple(request[0].shape) for request in requests] == shapes
    assert torch.equal(requests[-1][0].flatten(), torch.cat([text, text])[:30])
    longest = model.config.max_position_embeddings
    said = f"timed.prompt_lengths={longest} with timed.new_tokens=5 makes {longest + 6} tokens"
    with pytest.raises(UserError, match=re.escape(said)):
        measure(model, text, replace(ASKED, prompt_lengths=[longest]))
    monkeypatch.undo()
    expected = model.generate(requests[-1][0], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(torch.cat(requests[-1], dim=1), expected)


TEXT = CalibrationConfig(
    name="text", path="pocket:calibration/general.jsonl", tokens=512, length=128, seed=1
)
MODEL = ModelConfig(name="m", path="pocket:olmoe", device="cpu", threads=1)


def step(device: str, plan: Step | None = None, storage: Storage | None = None) -> Timing:
    pruned = Pruned(loaded_as(MODEL), plan, None, storage, RecoveryConfig(), True)
    return Timing.of(pruned, TEXT, replace(ASKED, device=device))


def test_a_step_is_about_one_device_and_is_done_on_no_other(tmp_path: Path) -> None:
    here = device_name("cpu")
    assert step(here).id != step("another").id
    files = Files(tmp_path, tmp_path, {}, tmp_path / "log", tmp_path)
    with pytest.raises(
        Unavailable, match=f"timing is about another, and this machine has {re.escape(here)}"
    ):
        step("another").work(files)
    step(here).work(files)
    about = json.loads((tmp_path / "timing.json").read_text())
    assert about["device"] == here and about["threads"] == 1 and about["weight_bytes"] > 14e6
    assert len(pd.read_parquet(tmp_path / "timing.parquet")) == 4 * 7


def test_what_is_timed_is_without_what_the_plan_removes_and_in_its_bits(tmp_path: Path) -> None:
    model = tiny.build("olmoe")
    plan = Example()
    tiny.plan(model, 0.5).save(tmp_path / "plan.json")
    files = Files(tmp_path, tmp_path, {plan.id: tmp_path}, tmp_path / "log", tmp_path)

    def weights(*changes: Any) -> int:
        """Bytes of the experts that are timed."""
        experts = filter(is_experts, step("cpu", *changes).deployed(model, files).modules())
        return sum(
            tensor.nbytes
            for module in experts
            for tensor in (*module.parameters(), *module.buffers())
        )

    whole = weights()
    four = Storage(4, ("experts",))
    assert weights(plan) == whole / 2
    assert weights(None, four) < whole / 6 and weights(plan, four) < whole / 12


def test_the_device_is_asked_for_once_and_what_is_not_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def answer(words: list[str], **_: Any) -> SimpleNamespace:
        asked.append(words)
        error = "Traceback\nmoe_lab.errors.UserError: model.device=cuda:7: this machine has none"
        return SimpleNamespace(
            returncode=int("cuda:7" in words), stdout="a note\nA GPU\n", stderr=error
        )

    monkeypatch.setattr(estimates.subprocess, "run", answer)
    cells = [cell_of(MODEL, TEXT, ratio=ratio) for ratio in (0.25, 0.5)]
    graph = build(Config(timing=True, timed=ASKED), [(cells, [])])
    timed = [cell.timing for cell in graph.cells]
    assert len(timed) == 3 and {one.timed.device for one in timed if isinstance(one, Timing)} == {
        "A GPU"
    }
    assert len(asked) == 1 and asked[0][-1] == "cpu"
    with pytest.raises(UserError, match=r"^model\.device=cuda:7: this machine has none"):
        estimates.device_here("cuda:7")


def test_what_a_step_held_on_gpus_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance(time.time())["peak_gpu_memory_bytes"] is None or torch.cuda.is_available()
    held = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        max_memory_allocated=lambda number: 7 + number,
        get_device_name=lambda number: f"GPU {number}",
    )
    used = SimpleNamespace(
        cuda=held, get_num_threads=lambda: 3, version=SimpleNamespace(cuda="12.8")
    )
    monkeypatch.setitem(sys.modules, "torch", used)
    about = provenance(time.time())
    assert (
        about["peak_gpu_memory_bytes"] == 7 + 8
        and about["gpus"] == ["GPU 0", "GPU 1"]
        and about["driver"]
    )
    assert about["threads"] == 3 and about["processor"]


def test_what_cannot_be_timed_is_said_before() -> None:
    local, slurm = (
        list(wrong_timing(LauncherConfig(n, 1), TimingConfig(), MODEL)) for n in ("local", "slurm")
    )
    assert "timing=true beside other work" in local[0]
    assert "timing=true with launcher=slurm needs timed.device" in slurm[0]
    assert not list(wrong_timing(LauncherConfig(name="inline"), TimingConfig(), MODEL))
