"""Sums over batches: they add up, go on where a pass was stopped, are read back as they were saved,
and are the same of a pass that has one decoder layer in memory."""

import itertools
import re
import signal
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import naive
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.streamed import StreamedModel, open_streamed
from moe_lab.statistics import Statistics, check_finite, header, observe, streaming
from moe_lab.statistics import read as read_file
from moe_lab.statistics.damage import DamageHook, SimilarityHook
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.gradients import (
    GradientHook,
    WeightGradientHook,
    collect_gradient_statistics,
)
from moe_lab.statistics.observe import CHECKPOINT, Observer, StatisticsHook, collect_statistics
from moe_lab.statistics.streaming import stream, stream_gradients
from tests.campaign.models import reconfigure

pytestmark = pytest.mark.slow

BATCHES = tiny.batches()
SIX = 2 * BATCHES


READS = [
    *((collect_statistics, hook) for hook in (ForwardHook, DamageHook, SimilarityHook)),
    *((collect_gradient_statistics, hook) for hook in (GradientHook, WeightGradientHook)),
]


@pytest.fixture
def ended_by_signal() -> Iterator[None]:
    """Have SIGTERM end a pass, not the process that tests it."""

    def end(*_: object) -> None:
        raise tiny.SimulatedKill

    handler = signal.signal(signal.SIGTERM, end)
    yield
    assert signal.signal(signal.SIGTERM, handler) is end


def send_signal_in_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, numbers: Container[int]
) -> None:
    """Have calls of `owner.run_batch` begin with SIGTERM, as a worker gets it when its job is
    warned."""
    calls = itertools.count(1)
    run_batch = owner.run_batch

    def warned(*args: Any) -> Any:
        if next(calls) in numbers:
            signal.raise_signal(signal.SIGTERM)
        return run_batch(*args)

    monkeypatch.setattr(owner, "run_batch", warned)


@pytest.mark.usefixtures("ended_by_signal")
@pytest.mark.parametrize(("read", "hook"), READS[:-1])  # gradients of weights are of the whole set
def test_stopped_pass_resumes(
    read: Callable[..., Statistics],
    hook: type[StatisticsHook],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = naive.model("qwen3_moe")
    expected = read(model, hook, SIX)
    settings: Any = {"out": tmp_path}
    with monkeypatch.context() as patch, pytest.raises(tiny.SimulatedKill):
        send_signal_in_call(patch, Observer, [5])
        read(model, hook, SIX, **settings)
    assert header(tmp_path / CHECKPOINT)["done"] == 5
    with monkeypatch.context() as patch:
        calls = tiny.count_calls(patch, Observer, "run_batch")
        resumed = read(model, hook, SIX, **settings)
    assert len(calls) == 1
    naive.assert_sums_close(resumed.layers, expected.layers)
    monkeypatch.setattr(Observer, "run_batch", None)  # a finished pass reads nothing again
    finished = read(model, hook, SIX, **settings)
    assert finished.header == resumed.header
    for layers in (finished.layers, read_file(tmp_path / CHECKPOINT, "pt")):
        naive.assert_sums_close(layers, expected.layers)
    assert [file.name for file in tmp_path.iterdir()] == [CHECKPOINT]


def written() -> int:
    """Bytes that this process has written."""
    return int(re.findall(r"wchar: (\d+)", Path("/proc/self/io").read_text())[0])


def test_saving_a_pass_takes_a_small_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of seconds writes its sums once, at its end; of long passes at most 2 % of the time is
    for saves."""

    content = written()
    collect_statistics(naive.model("olmoe"), ForwardHook, 8 * BATCHES, out=tmp_path)
    assert written() - content < 1.5 * (tmp_path / CHECKPOINT).stat().st_size
    now = [0.0]
    monkeypatch.setattr(observe.time, "monotonic", lambda: now[0])
    timer = observe.SaveTimer(tmp_path)
    saved = 0.0
    for seconds in (1.0, 100.0) * 5000:
        now[0] += 10
        if timer.is_due():
            with timer.saving():
                now[0] += seconds
            saved += seconds
    assert 0 < saved < 0.02 * now[0]


@pytest.mark.parametrize("change", ["batches", "damaged"])
def test_sums_of_another_pass_are_not_continued(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = naive.model("olmoe")
    collect_statistics(model, ForwardHook, SIX[:4], out=tmp_path)
    data: Any = SIX[:4]
    if change == "batches":  # the same rows, cut otherwise
        data = [
            tuple(torch.cat(parts) for parts in zip(*pair, strict=True))
            for pair in (data[:2], data[2:])
        ]
    else:
        (tmp_path / CHECKPOINT).write_bytes((tmp_path / CHECKPOINT).read_bytes()[:-9])
    calls = tiny.count_calls(monkeypatch, Observer, "run_batch")
    collect_statistics(model, ForwardHook, data, out=tmp_path)
    assert len(calls) == len(data)


@pytest.mark.parametrize(("read", "hook"), [case for case in READS if case[1] is not DamageHook])
def test_weight_that_is_not_finite_is_named(
    read: Callable[..., Statistics], hook: type[StatisticsHook], tmp_path: Path
) -> None:
    model = tiny.build("qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[5] = float("nan")
    settings: Any = {} if hook is WeightGradientHook else {"out": tmp_path}
    with pytest.raises(
        UserError, match=r"NaN or Inf in layer \d, expert \d+: \w+ of batches 1 to \d"
    ):
        read(model, hook, SIX, **settings)
    assert not (tmp_path / CHECKPOINT).exists()


def statistics(values: list[float]) -> Statistics:
    tensor = torch.tensor(values, dtype=torch.float64)
    layers = {
        2: {"tokens": tensor, "channel_max": tensor},
        5: {"tokens": 2 * tensor, "channel_max": -tensor},
    }
    return Statistics(layers, {"kind": "forward", "batches": "b"})


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums.safetensors"
    with pytest.raises(UserError, match="cannot be read"):
        Statistics.load(path)
    statistics([1, 2, 3]).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        read_file(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(UserError, match="expected a file of statistics"):
        read_file(path)


def test_infinite_statistics_are_named_with_every_expert() -> None:
    broken = statistics([4, 0, 2])
    for value in (torch.nan, torch.inf):
        broken.layers[5]["tokens"][1] = value
        with pytest.raises(UserError, match="layer 5, expert 1: tokens of batch 7"):
            check_finite(broken.layers, "batch 7", torch.float32)


PASSES: dict[str, tuple[Callable[..., Statistics], Callable[..., Statistics]]] = {
    hook.kind: (
        partial(read, hook=hook),
        partial(stream if read is collect_statistics else stream_gradients, hook=hook),
    )
    for read, hook in READS
}
FORWARD = PASSES["forward"]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def resident(read: Callable[..., Statistics], name: str) -> Statistics:
    return read(tiny.build(name), batches=BATCHES)


def opened(name: str, folder: Path) -> StreamedModel:
    tiny.save(name, folder)
    return tiny.streamed(folder)


def assert_equal(actual: Statistics, expected: Statistics) -> None:
    """To the bit forward; backward, autograd may add up what several experts say of a token in
    another order."""
    assert actual.header == expected.header
    naive.assert_sums_close(
        actual.layers, expected.layers, 1e-6 if "gradients" in expected.header["kind"] else 0.0
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(("olmoe", "deepseek_v3:grouped", "gpt_oss"), PASSES),
        *itertools.product(("qwen3_next", "deepseek", "jamba"), ("forward", "gradients")),
        *itertools.product(("ernie4_5_moe", "minimax"), ("damage", "similarity")),
    ],
)
def test_the_sums_are_the_same(name: str, kind: str, tmp_path: Path) -> None:
    loaded, layered = PASSES[kind]
    expected = resident(loaded, name)
    model = opened(name, tmp_path / "model")
    assert_equal(layered(model, batches=BATCHES, out=tmp_path / "out"), expected)
    assert all(weight.is_meta for weight in model.layers.parameters()), "no layer is left behind"


@pytest.mark.usefixtures("ended_by_signal")
@pytest.mark.parametrize(
    ("kind", "held"),
    [*((kind, 4) for kind in PASSES), *itertools.product(("forward", "gradients"), (0, 1000))],
)
def test_killed_passes_go_on_at_a_layer(
    kind: str, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With none, some and all of the hidden states in memory; killed within layers after saves, and
    once at its end."""
    loaded, layered = PASSES[kind]
    expected = resident(loaded, "deepseek_v2")
    model = opened("deepseek_v2", tmp_path / "model")
    monkeypatch.setattr(
        streaming, "main_memory", lambda: held * state_bytes(model) / streaming.SHARE
    )
    finished = tiny.count_calls(monkeypatch, streaming.LayerPass, "finish")
    tiny.count_calls(monkeypatch, streaming.LayerPass, "result", kill_at=1)
    send_signal_in_call(monkeypatch, streaming.LayerPass, range(5, 99, 5))
    for _ in range(20):
        with suppress(tiny.SimulatedKill):
            result = layered(model, batches=BATCHES, out=tmp_path / "out")
            break
    assert_equal(result, expected)
    layers = len(model.layers)
    backward = "gradients" in kind
    parts = layers + backward * (1 + layers - min(model.moe_layers))
    assert len(finished) == parts + 1, "nothing is done twice, but for the last layer"
    assert backward or len(list(tmp_path.glob("out/*/states/*"))) == 1, (
        "only what was saved last is left"
    )


def state_bytes(model: StreamedModel) -> int:
    """Of the hidden states of a batch."""
    return int(BATCHES[0][0].numel() * model.model.config.hidden_size * 4)


@pytest.mark.parametrize(("kind", "places"), [("forward", 2), ("gradients", 4)])
def test_hidden_states_beyond_memory_are_written_to_disk(
    kind: str, places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory are those of two layers at a time; backward, of three, and a layer's gradients."""
    model = opened("olmoe", tmp_path / "model")
    sums = []
    for memory in (places * len(BATCHES) * state_bytes(model) / streaming.SHARE, 0.0):
        monkeypatch.setattr(streaming, "main_memory", lambda memory=memory: memory)
        folder = tmp_path / str(memory)
        content = written()
        sums.append(PASSES[kind][1](model, batches=BATCHES, out=folder))
        states = (written() - content) / state_bytes(model) / len(BATCHES)
        assert folder.exists() == (not memory)
        assert states < 0.5 if memory else states > len(model.layers) - 1
        assert not list(folder.glob("*/states/*")), "what is needed no more is deleted"
    naive.assert_sums_close(sums[0].layers, sums[1].layers)


def test_streaming_holds_one_layer_and_restarts_with_a_new_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened("olmoe", tmp_path / "model")
    folder = tmp_path / "out"
    FORWARD[1](model, batches=BATCHES[:1], out=folder)
    residents = []
    run_batch = streaming.LayerPass.run_batch

    def counting(*args: Any) -> torch.Tensor:
        residents.append(sum(not next(layer.parameters()).is_meta for layer in model.layers))
        return run_batch(*args)

    monkeypatch.setattr(streaming.LayerPass, "run_batch", counting)
    result = FORWARD[1](model, batches=BATCHES, out=folder)
    assert set(residents) == {1}
    assert_equal(result, resident(FORWARD[0], "olmoe"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda tensors: tensors.pop(QUERY), "missing"),
        (lambda tensors: tensors[QUERY].fill_(float("inf")), "holds inf"),
        (lambda tensors: tensors.update({QUERY: torch.zeros(3, 3)}), "config.json asks for"),
    ],
)
def test_damaged_weights_are_named(damage: Any, says: str, tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path / "model")
    damage(tensors := load_file(tmp_path / "model" / "model.safetensors"))
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        model = tiny.streamed(tmp_path / "model")
        FORWARD[1](model, batches=BATCHES, out=tmp_path / "out")
    assert QUERY in str(caught.value)


def test_device_map_is_streamed_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save("olmoe", tmp_path)
    devices: list[str] = []

    def opened(_: Path, *, device: str, **settings: Any) -> Any:
        devices.append(device)
        return SimpleNamespace(model=None)

    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: len(devices) == 0)
        patch.setattr("moe_lab.models.streamed.StreamedModel", opened)
        patch.setattr("moe_lab.models.streamed.moe_layers", lambda _: [])
        for _ in range(2):
            open_streamed(ModelConfig(name="m", path=str(tmp_path), device="balanced"))
    assert devices == ["cuda", "cpu"]
    reconfigure(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="fp8"):
        open_streamed(ModelConfig(name="m", path=str(tmp_path)))


def test_stored_head_is_not_tied_to_embeddings(tmp_path: Path) -> None:
    """Although config.json ties them: transformers loads head and embeddings as they are stored."""
    model = tiny.save("olmoe", tmp_path, tie_word_embeddings=False)
    reconfigure(tmp_path, tie_word_embeddings=True)
    streamed = tiny.streamed(tmp_path).model
    assert torch.equal(streamed.lm_head.weight, model.lm_head.weight)
    assert torch.equal(streamed.model.embed_tokens.weight, model.model.embed_tokens.weight)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any tensor has which is computed while this is open."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else [result]:
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
        return result


@pytest.mark.parametrize("padding", [0, 100])
def test_memory_of_a_row_is_linear_in_its_tokens(padding: int, tmp_path: Path) -> None:
    length = 8192
    tiny.save("olmoe", tmp_path / "model", max_position_embeddings=length, num_hidden_layers=2)
    model = tiny.streamed(tmp_path / "model")
    ids = torch.randint(3, tiny.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    valid = (torch.arange(length) < length - padding)[None]
    with LargestTensor() as largest:
        sums = stream(model, ForwardHook, [(ids, valid)], out=tmp_path / "out")
    assert (
        int(sums.layers[1]["tokens"].sum())
        == (length - padding) * model.model.config.num_experts_per_tok
    )
    assert largest.elements < length * 500 < length**2


@pytest.mark.parametrize("name", ["olmoe", "qwen3_next", "deepseek_v2", "jamba", "minimax"])
def test_padding_on_the_right_changes_no_sums_without_a_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference masks the padding, in the model's own forward."""
    (ids, _), *_ = tiny.batches()
    valid = (
        torch.arange(ids.shape[1]) < torch.arange(ids.shape[1] - len(ids), ids.shape[1])[:, None]
    )
    model = tiny.build(name)

    def masked(model: Any, ids: torch.Tensor, valid: torch.Tensor) -> Any:
        return model.base_model(input_ids=ids, attention_mask=valid.long(), use_cache=False)

    result = collect_statistics(model, hook=ForwardHook, batches=[(ids, valid)])
    monkeypatch.setattr("moe_lab.statistics.observe.run", masked)
    expected = collect_statistics(model, hook=ForwardHook, batches=[(ids, valid)])
    naive.assert_sums_close(result.layers, expected.layers, 1e-5)
