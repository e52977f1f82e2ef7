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

from moe_lab.calibration import IdentifiedText
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
from moe_lab.models.discover import is_experts, linear_modules, moe_layers, routed_layers
from moe_lab.models.experts import run
from moe_lab.models.load import device_name
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.cost import (
    LoadHook,
    Routing,
    cost,
    even_routing,
    measured_routing,
    model_flops,
    nf4_bytes,
    parameters_and_bytes,
)
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.profile import profile
from moe_lab.pruning.prune import prune
from moe_lab.recovery.apply import quantize, storage_bytes
from moe_lab.result_files import PROFILES, TIMINGS
from moe_lab.statistics.observe import collect_statistics
from moe_lab.study import estimates
from moe_lab.study.graph import build
from moe_lab.study.provenance import provenance
from moe_lab.study.step import Step
from moe_lab.study.steps.costs import Timing, timing_mistakes
from moe_lab.study.steps.files import Files, Streamed
from moe_lab.study.steps.passes import loaded_field
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


def counted_flops(model: Any, ids: torch.Tensor) -> int:
    """What torch counts for an eager forward pass, vocabulary included."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation(implementation)
    return counter.get_total_flops()


def test_attention_with_the_name_of_the_moe_block_is_attention() -> None:
    """The four decoder layers of a hybrid call their only module `mixer`."""
    model = AutoModelForCausalLM.from_config(tiny.registry_config("nemotron_h"))
    *_, attention, _ = (layer.mixer for layer in model.model.layers)
    assert {*dict(linear_modules(model, "attention")).values()} == {*attention.children()}


FLOPS_CASES = [
    *((name, way) for name in tiny.ARCHITECTURES for way in ("unpruned", "experts", "uneven")),
    *((name, way) for name in CHANNELS for way in ("one width", "channels")),
]


@pytest.mark.parametrize(("name", "way"), FLOPS_CASES)
def test_flops_are_those_that_torch_counts(name: str, way: str) -> None:
    """Of a model without weights, unless the routing has to be counted, which leaves no hooks."""
    model = tiny.build(name)
    plan = planned(model, way)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny.config(name)).eval()
    pruned = prune(empty, plan) if plan else empty
    even = even_routing(routed_layers(pruned))
    routing = measured(model, plan, [batch()])
    assert not any("forward" in vars(layer.experts) for layer in moe_layers(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert (even is None) == (way == "channels")
    assert even in (None, routing)
    ids, _ = batch()
    flops = of_pruned(empty, pruned, even or routing, ids.shape[1]) * ids.numel()
    expected = counted_flops(model if plan is None else prune(model, plan), ids)
    assert (round(flops) if even is None else flops) == expected


def of_pruned(model: Any, pruned: Any, routing: Routing, length: int) -> float:
    """FLOPs per token of `pruned`, a copy of `model` without weights."""
    whole = even_routing(routed_layers(model))
    assert whole is not None
    flops: float = cost(model, pruned, model_flops(model, length, whole), routing)[
        "flops_per_token"
    ]
    return flops


def planned(model: Any, way: str) -> Plan | None:
    if way == "unpruned":
        return None
    if way == "experts":
        return tiny.plan(model, 0.5)
    if way == "channels":
        return random_plan(model, "ragged", share=1.0)
    return random_plan(model, way, width=[5, 6, 7])


def layers_of(model: Any, plan: Plan | None) -> Any:
    return routed_layers(prune(model, plan) if plan else model)


def measured(model: Any, plan: Plan | None, batches: Any) -> Routing:
    load = collect_statistics(model, LoadHook, batches, context=mask(model, plan)).layers
    return measured_routing(load, plan, layers_of(model, plan))


def test_flops_equal_a_computation_by_hand() -> None:
    model = tiny.build("qwen2_moe", num_key_value_heads=2)
    length, depth, hidden = 20, 3, 32
    heads, groups, width = 4, 2, 8
    experts, top_k = 16, 4
    routing = measured(model, None, [batch(3, length)])
    parts = {
        "attention": depth * 2 * hidden * (2 * heads * width + 2 * groups * width),
        "attention scores": depth * 2 * 2 * length * heads * width,
        "routers": depth * 2 * hidden * experts,
        "shared experts": depth * (6 * hidden * 40 + 2 * hidden),
        "experts": depth * top_k * 6 * hidden * 24,
        "vocabulary head": 2 * hidden * tiny.VOCABULARY,
    }
    flops = model_flops(copy.deepcopy(model).to("meta"), length, routing)
    assert flops == pytest.approx(sum(parts.values()), abs=1)


@pytest.fixture(scope="module")
def ragged_olmoe() -> tuple[Any, Plan]:
    """A model, and a plan in which experts cost differently."""
    model = tiny.build("olmoe")
    return model, random_plan(model, "ragged", share=1.0)


def test_routing_adds_up_over_batches(ragged_olmoe: tuple[Any, Plan]) -> None:
    first = batch(2, 24)
    second = batch(1, 10)
    of_first = measured(*ragged_olmoe, [first])
    of_second = measured(*ragged_olmoe, [second])
    of_all = measured(*ragged_olmoe, [first, second, first])  # 48, 10 and 48 tokens
    for layer, channels in of_all.items():
        assert round(106 * channels) == round(96 * of_first[layer] + 10 * of_second[layer])
        assert 106 * channels == pytest.approx(round(106 * channels))


def test_routing_leaves_out_padding(ragged_olmoe: tuple[Any, Plan]) -> None:
    ids, valid = batch(1, 10)
    padded = torch.cat((ids, torch.zeros(1, 6, dtype=torch.int64)), 1)
    padding = (torch.arange(16) < 10)[None]
    assert measured(*ragged_olmoe, [(padded, padding)]) == measured(*ragged_olmoe, [(ids, valid)])


STREAMED = [
    ("olmoe", "unpruned"),
    ("olmoe", "channels"),
    ("deepseek_v2", "channels"),
]
STREAMED += [
    (name, "experts")
    for name in ("deepseek_v3:grouped", "qwen3_next", "gpt_oss", "jamba", "minimax")
]


@pytest.mark.parametrize(("name", "way"), STREAMED)
def test_streamed_routing_is_that_of_the_loaded_model(name: str, way: str, tmp_path: Path) -> None:
    """Batches of two shapes, one padded."""
    model = tiny.save(name, tmp_path / "model")
    plan = planned(model, way)
    ids, valid = batch(2, 24)
    valid[0, 15:] = False
    batches = [(ids, valid), batch(1, 10), (ids.flip(1), valid)]
    streamed = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    load = Streamed(streamed, batches, tmp_path).collect_statistics(LoadHook, plan=plan).layers
    assert measured_routing(load, plan, layers_of(model, plan)) == measured(model, plan, batches)
    assert all(weight.is_meta for weight in streamed.layers.parameters()), "no layer is left behind"


def test_cost_is_compared_with_that_of_the_unpruned_model() -> None:
    model = tiny.build("deepseek_v2")
    plan = random_plan(model, "one width", share=1.0)
    whole = measured(model, None, [batch()])
    flops = model_flops(copy.deepcopy(model).to("meta"), batch()[0].shape[1], whole)
    unpruned = cost(model, model, flops, whole)
    assert unpruned["flops_ratio"] == unpruned["parameters_kept"] == 1
    pruned = cost(model, prune(model, plan), flops, measured(model, plan, [batch()]))
    assert pruned["flops_per_token_unpruned"] == unpruned["flops_per_token"]
    assert pruned["flops_ratio"] == pruned["flops_per_token"] / unpruned["flops_per_token"] < 0.85
    assert pruned["storage_bytes"] == pruned["loading_bytes"] == 2 * pruned["parameters"]
    masks = [layer.channels.mean() for layer in plan.layers.values()]
    assert pruned["routed_kept"] == pytest.approx(numpy.mean(masks))
    assert parameters_and_bytes(model, prune(model, tiny.plan(model, 0.5)))["routed_kept"] == 0.5


def test_nf4_bytes() -> None:
    assert nf4_bytes(64) == 32 + 1 + 4 + 4
    assert nf4_bytes(65) == 64 + 2 + 4 + 4
    assert nf4_bytes(64 * 256) == 8192 + 256 + 4 + 4
    assert nf4_bytes(64 * 257) == 8224 + 257 + 8 + 4
    assert nf4_bytes(2048 * 1024) / (2048 * 1024) == pytest.approx(4.127 / 8, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "olmoe",
        "qwen2_moe",
        "qwen3_next",
        "deepseek_v2",
        "hunyuan_v1_moe",
        "ernie4_5_moe",
    ],
)
@pytest.mark.parametrize(
    "modules", [("experts",), ("experts", "shared_experts", "attention")], ids=len
)
@pytest.mark.parametrize("way", ["unpruned", "experts", "channels"])
def test_storage_bytes_are_those_of_quantised_tensors(
    name: str, modules: tuple[str, ...], way: str
) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny.build(name, dtype=torch.bfloat16)
    plan = planned(model, way)
    pruned = copy.deepcopy(model) if plan is None else prune(model, plan)
    sizes = parameters_and_bytes(model, pruned, bits=4, modules=modules)
    loading_bytes = parameters_and_bytes(model, pruned)["loading_bytes"]
    unquantised_bytes = storage_bytes(pruned)
    quantize(pruned, modules)
    saved_bytes = sizes["loading_bytes"] - sizes["storage_bytes"]
    assert saved_bytes == unquantised_bytes - storage_bytes(pruned) > 0
    assert sizes["loading_bytes"] == loading_bytes


# ---- profiles


def layer_profiles(model: Any, plan: Plan | None) -> dict[int, dict[str, Any]]:
    """Decoder layer -> its row of `PROFILES`."""
    rows = [dict(zip(PROFILES, row, strict=True)) for row in profile(model, plan, tiny.batches())]
    return {row["layer"]: row for row in rows}


def outputs(model: Any, *modules: Any) -> list[torch.Tensor]:
    """The outputs (first result) of some modules for each valid token, in fp64 (T, H)."""
    parts: list[list[torch.Tensor]] = [[] for _ in modules]

    def record(position: int, result: Any) -> None:
        parts[position].append(result[0] if isinstance(result, tuple) else result)

    hooks = [
        module.register_forward_hook(
            lambda _, args, result, position=position: record(position, result)
        )
        for position, module in enumerate(modules)
    ]
    for ids, valid in tiny.batches():
        run(model, ids, valid)
    for hook in hooks:
        hook.remove()
    valid = torch.cat([valid.flatten() for _, valid in tiny.batches()])
    return [
        torch.cat([tensor.flatten(0, -2) for tensor in tensors])[valid].double()
        for tensors in parts
    ]


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_variance_of_each_token_is_averaged_as_in_aimers_appendix_c(name: str) -> None:
    """AIMER, Figure 6 and Appendix C."""
    model = tiny.build(name)
    rows = layer_profiles(model, None)
    streams = outputs(model, *model.get_submodule(moe_layers(model)[0].stack))
    assert list(rows) == [0, 1, 2]
    for row, stream in zip(rows.values(), streams, strict=True):
        variances = [((vector - vector.mean()) ** 2).mean() for vector in stream]
        expected = sum(variances) / len(variances)
        assert row["variance"] == pytest.approx(float(expected), rel=1e-9)


def every_expert(model: Any) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """MoE layer -> all its experts, and their number."""
    counts = {layer.index: layer.n_experts for layer in moe_layers(model)}
    return {index: tuple(range(count)) for index, count in counts.items()}, counts


LOSS_MODELS = pytest.mark.parametrize("name", ["olmoe", "deepseek_v2", "gpt_oss"])


@torch.no_grad()
@LOSS_MODELS
def test_complete_plan_has_no_output_loss(name: str) -> None:
    model = tiny.build(name)
    rows = layer_profiles(model, Plan.of_experts(*every_expert(model)))
    assert all(row["output_loss"] == 0 or math.isnan(row["output_loss"]) for row in rows.values())


@torch.no_grad()
@LOSS_MODELS
def test_output_loss_of_a_layer_is_that_of_pruning_it_alone(name: str) -> None:
    model = tiny.build(name)
    plan = tiny.plan(model, 0.5)
    losses = {index: row["output_loss"] for index, row in layer_profiles(model, plan).items()}
    assert {index for index, loss in losses.items() if not math.isnan(loss)} == set(plan.retained)
    last = moe_layers(model)[-1]
    around = model.get_submodule(f"{last.stack}.{last.index}")
    unpruned, stream = outputs(model, last.experts, around)
    experts, counts = every_expert(model)
    alone = Plan.of_experts({**experts, last.index: plan.layers[last.index].retained}, counts)
    with mask(model, alone):
        (pruned,) = outputs(model, last.experts)
    terms = (unpruned - pruned).square().sum(1) / (stream.square().sum(1) + 1e-6)
    loss = losses[last.index]
    assert loss == pytest.approx(float(terms.mean()), rel=1e-4)
    assert loss > 0


# ---- seconds, as generating takes them

TIMED = TimingConfig(batch_sizes=[1, 3], prompt_lengths=[4, 10], new_tokens=5)


def test_prefill_and_decoding_are_timed_apart() -> None:
    """In requests of each batch size and prompt length, which write what `generate` does; working
    bytes are the peak of a request."""
    model = tiny.build("olmoe")
    read: list[torch.Tensor] = []
    now = [0.0]
    forward = model.forward

    def slow(**arguments: Any) -> Any:
        """Takes seconds that are known, and, of the shortest prompt, bytes."""
        ids = arguments["input_ids"]
        read.append(ids)
        now[0] += 0.2 if ids.shape[1] > 1 else 0.004
        model.held = torch.ones(32 << 20 if ids.shape == (1, 4) else 1)
        return forward(**arguments)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    text = tiny.tokens(rows=1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", slow)
        patch.setattr(evaluation_timing, "time", clock)
        rows = pd.DataFrame(measure(model, text, TIMED), columns=list(TIMINGS))
    assert rows.groupby(["batch_size", "prompt_length"]).size().tolist() == [7] * 4
    assert (rows["new_tokens"] == 5).all()
    assert rows["prefill_seconds"].tolist() == pytest.approx([0.2] * 28)
    assert rows["decode_seconds"].tolist() == pytest.approx([5 * 0.004] * 28)
    held = rows["working_bytes"][0]
    assert math.isnan(held) or held == pytest.approx(4 * (32 << 20), rel=0.1)
    # a prompt, then five tokens
    requests = [read[start : start + 6] for start in range(0, len(read), 6)]
    shapes = [shape for shape in ((1, 4), (1, 10), (3, 4), (3, 10)) for _ in range(9)]
    assert [tuple(request[0].shape) for request in requests] == shapes
    last_prompt = requests[-1][0]
    assert torch.equal(last_prompt.flatten(), torch.cat([text, text])[:30])
    written = model.generate(last_prompt, do_sample=False, max_new_tokens=5, min_new_tokens=5)
    assert torch.equal(torch.cat(requests[-1], dim=1), written)


def test_prompts_that_do_not_fit_a_model_are_not_timed() -> None:
    model = tiny.build("olmoe")
    longest = model.config.max_position_embeddings
    message = f"timed.prompt_lengths={longest} with timed.new_tokens=5 makes {longest + 6} tokens"
    with pytest.raises(UserError, match=re.escape(message)):
        measure(model, tiny.tokens()[0], replace(TIMED, prompt_lengths=[longest]))


TEXT = CalibrationConfig(
    name="text",
    path="pocket:calibration/general.jsonl",
    tokens=512,
    length=128,
    batch_tokens=512,
    seed=1,
)
MODEL = ModelConfig(name="m", path="pocket:olmoe", device="cpu", threads=1)


def step(device: str, plan: Step | None = None, storage: Storage | None = None) -> Timing:
    pruned = Pruned(loaded_field(MODEL), plan, None, storage, RecoveryConfig(), True)
    text = IdentifiedText.of(TEXT)
    return Timing(pruned, text, replace(TIMED, device=device), MODEL.threads)


def test_timing_is_of_one_device_and_computed_on_no_other(tmp_path: Path) -> None:
    device = device_name("cpu")
    assert step(device).id != step("another").id
    files = Files(tmp_path, tmp_path, {}, tmp_path / "log", tmp_path)
    message = f"timing is about another, and this machine has {re.escape(device)}"
    with pytest.raises(Unavailable, match=message):
        step("another").work(files)
    step(device).work(files)
    record = json.loads((tmp_path / "timing.json").read_text())
    assert record["device"] == device
    assert record["threads"] == 1
    assert record["weight_bytes"] > 14e6
    assert len(pd.read_parquet(tmp_path / "timing.parquet")) == 4 * 7


def test_timed_model_is_pruned_and_quantised(tmp_path: Path) -> None:
    model = tiny.build("olmoe")
    plan = Example()
    tiny.plan(model, 0.5).save(tmp_path / "plan.json")
    files = Files(tmp_path, tmp_path, {plan.id: tmp_path}, tmp_path / "log", tmp_path)

    def expert_bytes(*changes: Any) -> int:
        """Bytes of the experts that are timed."""
        deployed = step("cpu", *changes).deployed_model(model, files)
        return sum(
            tensor.nbytes
            for module in filter(is_experts, deployed.modules())
            for tensor in (*module.parameters(), *module.buffers())
        )

    unpruned = expert_bytes()
    nf4 = Storage(4, ("experts",))
    assert expert_bytes(plan) == unpruned / 2
    assert expert_bytes(plan, nf4) < unpruned / 12


@pytest.fixture
def device_commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that ask for the name of a device; this machine has a CPU only."""
    commands: list[list[str]] = []

    def answer(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        error = "Traceback\nmoe_lab.errors.UserError: model.device=cuda:7: this machine has none"
        return SimpleNamespace(
            returncode=int("cuda:7" in command), stdout="a note\nA GPU\n", stderr=error
        )

    monkeypatch.setattr(estimates.subprocess, "run", answer)
    return commands


def test_device_name_is_asked_for_once(device_commands: list[list[str]]) -> None:
    cells = [cell_of(MODEL, TEXT, ratio=ratio) for ratio in (0.25, 0.5)]
    graph = build(Config(timing=True, timed=TIMED), [(cells, [])])
    timings = [cell.timing for cell in graph.cells]
    devices = {timing.timed.device for timing in timings if isinstance(timing, Timing)}
    assert len(timings) == 3
    assert devices == {"A GPU"}
    assert len(device_commands) == 1
    assert device_commands[0][-1] == "cpu"


def test_missing_device_is_reported(device_commands: list[list[str]]) -> None:
    with pytest.raises(UserError, match=r"^model\.device=cuda:7: this machine has none"):
        estimates.hardware_name("cuda:7")


def test_provenance_has_the_peak_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance(time.time())["peak_gpu_memory_bytes"] is None or torch.cuda.is_available()
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        max_memory_allocated=lambda number: 7 + number,
        get_device_name=lambda number: f"GPU {number}",
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    record = provenance(time.time())
    assert record["peak_gpu_memory_bytes"] == 7 + 8
    assert record["gpus"] == ["GPU 0", "GPU 1"]
    assert record["processor"]


def test_timing_beside_other_work_is_reported_before_the_start() -> None:
    local, slurm = (
        list(timing_mistakes(LauncherConfig(name, 1), TimingConfig(), MODEL))
        for name in ("local", "slurm")
    )
    assert "timing=true beside other work" in local[0]
    assert "timing=true with launcher=slurm needs timed.device" in slurm[0]
    assert not list(timing_mistakes(LauncherConfig(name="inline"), TimingConfig(), MODEL))
