"""Passes, masks, likelihoods and generation on a device other than the CPU: the CPU's numbers, and
no wait within a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import MagicMock, patch

import naive
import pytest
import tiny
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from identities.plans import random_plan
from second_device import DeviceTensor, SecondDevice, on_device

from moe_lab.evaluation.engines import GenerationSettings, Prompt, Row
from moe_lab.evaluation.engines.hf import Batch, generate_tokens
from moe_lab.evaluation.engines.likelihoods import log_likelihoods
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.alignment import alignment_hook
from moe_lab.pruning.mask import mask
from moe_lab.pruning.prune import prune
from moe_lab.recovery.merge_fit import MergeHook, merged_weights
from moe_lab.search.candidates import Candidates, Plans, SearchSettings
from moe_lab.search.reconstruction import SubsetHook
from moe_lab.statistics.damage import DamageHook, SimilarityHook
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.gradients import (
    GradientHook,
    WeightGradientHook,
    collect_gradient_statistics,
    differentiable,
    forward_and_backward,
)
from moe_lab.statistics.observe import Observer, SaveTimer, collect_statistics, forward
from moe_lab.statistics.streaming import States, stream, stream_gradients

TOLERANCE = 2e-6
"""Largest difference from the CPU, whose attention is another kernel, as a share of the largest
number of a tensor."""


QUICK = ("olmoe", "deepseek_v3", "gpt_oss")
FAMILIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in tiny.one_of_each(tiny.arithmetic)
]


@pytest.fixture
def device() -> Iterator[SecondDevice]:
    with SecondDevice() as device:
        yield device


def sums(model: Any, hook: Any, reading: Any) -> Any:
    with Observer(model, hook) as observer:
        for ids, valid in tiny.batches():
            observer.run_batch(ids, valid, reading)
        return observer.layers()


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_are_those_of_the_cpu(name: str, device: SecondDevice) -> None:
    model = naive.model(name)
    copied = on_device(model)
    hooks = [ForwardHook, DamageHook, *([SimilarityHook] if name in QUICK else [])]
    for hook in hooks:
        naive.assert_sums_close(sums(copied, hook, forward), sums(model, hook, forward), TOLERANCE)
    for hook in (GradientHook, *([WeightGradientHook] if name in QUICK else [])):
        results = []
        for network in (copied, model):
            with differentiable(network):
                results.append(sums(network, hook, forward_and_backward))
        naive.assert_sums_close(*results, 10 * TOLERANCE)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(
    ("hook", "reading"),
    [
        (ForwardHook, forward),
        (SimilarityHook, forward),
        (GradientHook, forward_and_backward),
        (WeightGradientHook, forward_and_backward),
    ],
)
def test_a_pass_has_the_waits_and_unordered_sums_of_the_model_alone(
    name: str, hook: Any, reading: Any, device: SecondDevice
) -> None:
    """From the second batch on: the first tells, for example, what router it is."""
    model = on_device(naive.model(name))
    ids, valid = naive.batch()
    device.waits.clear()
    with differentiable(model):
        reading(model, ids, valid)
        plain = device.waits.total(), device.unordered.total()
        with Observer(model, hook) as observer:
            observer.run_batch(ids, valid, reading)
            device.waits.clear()
            device.unordered.clear()
            observer.run_batch(ids, valid, reading)
            assert device.waits.total() == plain[0], device.waits
            assert device.unordered.total() <= plain[1], device.unordered


def waits_of_the_model(model: Any, batch: Any, device: SecondDevice) -> int:
    """Waits of its forward pass alone."""
    device.waits.clear()
    forward(model, *batch)
    return device.waits.total()


@pytest.mark.parametrize("name", QUICK)
def test_exact_damage_waits_once_in_each_layer(name: str, device: SecondDevice) -> None:
    """For the number of experts that a token uses."""
    model = on_device(naive.model(name))
    plain = waits_of_the_model(model, naive.batch(), device)
    with Observer(model, DamageHook) as observer:
        observer.run_batch(*naive.batch())
        device.waits.clear()
        observer.run_batch(*naive.batch())
    assert device.waits.total() == plain + len(observer.hooks), device.waits
    assert not [line for line in device.unordered if line.endswith((":sum", "experts"))]


def on_two_devices(model: Any) -> Any:
    """A copy whose middle layer and head are on the CPU, with the hooks of a device map."""
    copied = copy.deepcopy(model)
    copied.set_experts_implementation("grouped_mm")
    parts = ["embed_tokens", "rotary_emb", "layers.0", "layers.1", "layers.2", "norm"]
    places = {f"model.{part}": "gpu" for part in parts} | {"model.layers.1": "cpu"}
    for name, place in places.items():
        copied.get_submodule(name).to(place)
    places["lm_head"] = "cpu"
    attach_align_device_hook_on_blocks(copied, places, offload=dict.fromkeys(places, False))
    return copied


@pytest.mark.parametrize("hook", [ForwardHook, DamageHook, GradientHook, WeightGradientHook])
def test_a_model_on_two_devices_is_observed_where_it_lies(hook: Any, device: SecondDevice) -> None:
    reading = forward if hook in (ForwardHook, DamageHook) else forward_and_backward
    model = naive.model("qwen3_moe")
    divided = on_two_devices(model)
    with differentiable(divided), Observer(divided, hook) as observer:
        for ids, valid in tiny.batches():
            observer.run_batch(ids, valid, reading)
        devices = [{part.device.type for part in hook.sums.values()} for hook in observer.hooks]
        layers = observer.layers()
    with differentiable(model):
        naive.assert_sums_close(layers, sums(model, hook, reading), 10 * TOLERANCE)
    assert hook is WeightGradientHook or devices == [{"gpu"}, {"cpu"}, {"gpu"}]


@pytest.mark.parametrize(("name", "expected"), [("olmoe", True), ("qwen3_next", False)])
def test_a_backward_pass_adds_in_a_fixed_order(
    name: str, expected: bool, device: SecondDevice
) -> None:
    """But for linear attention, whose cumulative sums have none on CUDA."""
    model = on_device(naive.model(name))
    modes = []

    def note(module: Any, args: Any, result: torch.Tensor) -> None:
        result.register_hook(lambda _: modes.append(torch.are_deterministic_algorithms_enabled()))

    with differentiable(model):
        model.get_input_embeddings().register_forward_hook(note)
        forward_and_backward(model, *naive.batch())
    assert modes == [expected]
    assert not torch.are_deterministic_algorithms_enabled()


def hook_of(kind: str, model: Any) -> Any:
    """A hook that computes other experts than the router chose, for choices of experts, or an
    alignment or a fit of merged ones."""
    plan = random_plan(model, "merged")
    if kind == "alignment":
        return alignment_hook(plan)
    if kind == "fit":
        merged = merged_weights(prune(model, plan), plan)
        return type("Fit", (MergeHook,), {"plan": plan, "merged": merged})
    choices = {layer.index: [range(2, 16), (0, *range(3, 16))] for layer in tiny.moe_layers(model)}
    return type("Choices", (SubsetHook,), {"subsets": choices})


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["choices", "alignment", "fit"])
def test_passes_of_other_experts_are_those_of_the_cpu_without_waiting(
    name: str, kind: str, device: SecondDevice
) -> None:
    model = naive.model(name)
    copied = on_device(model)
    plain = [waits_of_the_model(copied, batch, device) for batch in tiny.batches()]
    with (
        Observer(model, hook_of(kind, model)) as observer,
        Observer(copied, hook_of(kind, copied)) as on_the_device,
    ):
        for number, (ids, valid) in enumerate(tiny.batches()):
            observer.run_batch(ids, valid)
            device.waits.clear()
            on_the_device.run_batch(ids, valid)
            assert device.waits.total() == plain[number] or number == 0, device.waits
        expected = {hook.layer.index: hook.sums for hook in observer.hooks}
        actual = {
            # the CPU computes only the experts that an alignment needs
            hook.layer.index: {
                name: total.cpu() * (expected[hook.layer.index][name] != 0)
                for name, total in hook.sums.items()
            }
            for hook in on_the_device.hooks
        }
    naive.assert_sums_close(actual, expected, 10 * TOLERANCE)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *((name, ()) for name in tiny.one_of_each(tiny.arithmetic) if name != "gpt_oss"),
        *((name, ("cpu",)) for name in ("olmoe", "deepseek_v3")),  # by Triton
    ],
)
def test_a_fit_of_all_merged_experts_at_once_has_the_sums_of_each_alone(
    name: str, devices: tuple[str, ...]
) -> None:
    model = naive.model(name)
    grouped = copy.deepcopy(model)
    grouped.set_experts_implementation("grouped_mm")
    expected = naive.hook_sums(model, hook_of("fit", model))
    with patch("moe_lab.models.rows.TRITON_DEVICES", devices):
        actual = naive.hook_sums(grouped, hook_of("fit", grouped))
    naive.assert_sums_close(actual, expected, TOLERANCE)


def test_a_pass_goes_on_on_another_device(device: SecondDevice) -> None:
    model = naive.model("olmoe")
    first, second = tiny.batches()[:2]
    expected = sums(model, ForwardHook, forward)
    with Observer(model, ForwardHook) as observer:
        observer.run_batch(*first)
        start = observer.layers()
    with Observer(on_device(model), ForwardHook, start) as observer:
        observer.run_batch(*second)
        for batch in tiny.batches()[2:]:
            observer.run_batch(*batch)
        naive.assert_sums_close(observer.layers(), expected, TOLERANCE)


@pytest.mark.parametrize("hook", [ForwardHook, DamageHook])
def test_statistics_in_half_precision_are_those_of_the_cpu(hook: Any, device: SecondDevice) -> None:
    """Up to the rounding of sums of outputs in bf16, of which some change an expert's tokens."""
    model = tiny.build("olmoe", dtype=torch.bfloat16)
    expected = sums(model, hook, forward)
    for layer, tensors in sums(on_device(model), hook, forward).items():
        for name, values in tensors.items():
            assert values.dtype == torch.float64
            error = (values - expected[layer][name]).norm() / expected[layer][name].norm()
            assert error < 0.05, (layer, name, error)


@pytest.mark.parametrize("way", ["whole experts", "ragged", "constants", "merged"])
def test_masks_and_pruned_models_are_those_of_the_cpu(way: str, device: SecondDevice) -> None:
    model = naive.model("olmoe")
    plan = tiny.plan(model, 0.5) if way == "whole experts" else random_plan(model, way, share=0.5)
    ids = tiny.tokens()
    copied = on_device(model)
    with torch.no_grad():
        with mask(model, plan):
            expected = model(ids).logits
        with mask(copied, plan):
            masked = copied(ids.to("gpu")).logits.cpu()
        pruned = prune(copied, plan)(ids.to("gpu")).logits.cpu()
    assert (masked - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (pruned - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_likelihoods_are_those_of_the_cpu(device: SecondDevice) -> None:
    model = naive.model("olmoe")
    rows = [Row((5, 6, question, answer, answer), 3) for question in (7, 8) for answer in (9, 10)]
    expected = log_likelihoods(model, rows, 8)
    copied = on_device(model)
    log_likelihoods(copied, rows, 8)  # a trial finds out whether answers can share a pass
    device.waits.clear()
    results = log_likelihoods(copied, rows, 8)
    assert results == [
        replace(likelihood, nats=pytest.approx(likelihood.nats, rel=1e-5))
        for likelihood in expected
    ]
    waits = [count for wait, count in device.waits.items() if wait.endswith(":likelihoods")]
    assert waits == [1], device.waits


def test_generated_tokens_are_those_of_the_cpu(device: SecondDevice) -> None:
    settings = GenerationSettings(6)
    prompts = [Prompt("", tokens, settings) for tokens in ((5, 6, 7), (8, 9, 10, 11, 12))]
    batch = Batch(prompts, frozenset(), 0)
    model = naive.model("olmoe")
    expected = generate_tokens(model, batch)
    assert generate_tokens(on_device(model), batch) == expected


def test_searches_find_the_fitness_that_the_cpu_finds(device: SecondDevice) -> None:
    model = naive.model("olmoe")
    scores = {layer.index: list(range(layer.n_experts)) for layer in tiny.moe_layers(model)}
    ids, valid = naive.batch()
    batch = (ids, valid, valid)
    schedules = [(8, 8, 8), (8, 8, 4), (4, 8, 8)]
    results = []
    for copied in (on_device(model), model):
        candidates = Candidates(
            copied, Plans(tiny.routers_of(copied), scores), [batch], SearchSettings(seed=0)
        )
        results.append(candidates.evaluate(schedules))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize(
    ("hook", "read", "read_streamed"),
    [
        (ForwardHook, collect_statistics, stream),
        (GradientHook, collect_gradient_statistics, stream_gradients),
    ],
)
def test_a_streamed_pass_is_that_of_the_loaded_model(
    hook: Any, read: Any, read_streamed: Any, tmp_path: Path, device: SecondDevice
) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    expected = read(model, hook, tiny.batches())
    streamed = tiny.streamed(tmp_path / "model", "gpu")
    actual = read_streamed(streamed, hook, tiny.batches(), out=tmp_path / "out")
    naive.assert_sums_close(actual.layers, expected.layers, 10 * TOLERANCE)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_the_next_layer_is_read_while_the_present_one_runs(
    where: str, tmp_path: Path, device: SecondDevice
) -> None:
    """Reading begins when the layer runs, and ends before the layer does."""
    tiny.save("olmoe", tmp_path)
    streamed = tiny.streamed(tmp_path, where)
    layer_runs = Event()

    def read(number: int) -> Any:
        assert number == 0 or layer_runs.wait(60)
        return StreamedModel._read(streamed, number)

    with patch.object(streamed, "_read", read), streamed.layer(0, next_number=1):
        layer_runs.set()
        tensors = streamed._pending[1].result(60)
        assert {tensor.device.type for tensor in tensors.values()} == {where}


def test_weights_are_copied_from_pinned_memory_on_a_stream_of_their_own(
    tmp_path: Path, device: SecondDevice
) -> None:
    """Their memory is not used again before computing has used them."""
    tiny.save("olmoe", tmp_path)
    with patch.object(torch, "empty_like", side_effect=torch.empty_like) as empty_like:
        streamed = tiny.streamed(tmp_path, "gpu")
        streamed._copy_stream = MagicMock()
        streamed._request(1)
        tensors = streamed._pending[1].result()
    calls = [name for name, *_ in streamed._copy_stream.mock_calls if name != "__bool__"]
    assert calls == ["__enter__", "__exit__", "synchronize"]
    assert any(call.kwargs.get("pin_memory") for call in empty_like.mock_calls)
    count = len(tensors)
    DeviceTensor.recorded.clear()
    with patch.object(torch.accelerator, "current_stream") as computing, streamed.layer(1):
        pass
    assert DeviceTensor.recorded == [computing()] * count


def test_no_memory_is_reserved_for_the_whole_model(tmp_path: Path, device: SecondDevice) -> None:
    tiny.save("olmoe", tmp_path)
    streamed = tiny.streamed(tmp_path, "gpu")
    with patch.object(torch, "empty", side_effect=torch.empty) as empty, streamed.layer(0):
        pass
    devices = [call.kwargs.get("device", "cpu") for call in empty.call_args_list]
    assert {torch.device(device).type for device in devices} <= {"cpu"}


def test_states_are_saved_when_they_are_copied(tmp_path: Path, device: SecondDevice) -> None:
    tiny.save("olmoe", tmp_path / "model")
    streamed = tiny.streamed(tmp_path / "model", "gpu")
    saves: list[int] = []
    with (
        patch.object(torch.accelerator, "current_stream") as computing,
        patch.object(SaveTimer, "is_due", lambda _: True),
        patch.object(States, "save", lambda *_: saves.append(computing().synchronize.call_count)),
    ):
        stream(streamed, ForwardHook, tiny.batches(), out=tmp_path / "out")
    assert saves == list(range(1, 1 + len(saves))) != []
