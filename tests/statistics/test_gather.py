"""Sums over batches: they add up, go on where a pass was stopped, and are read back as they were saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from safetensors.torch import save_file

from moe_lab.errors import UserError
from moe_lab.statistics import Layers, Statistics, check_finite, header
from moe_lab.statistics import read as read_file
from moe_lab.statistics.damage import DamageTap, SimilarityTap
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.gradients import GradientTap, WeightGradientTap, gather_gradients
from moe_lab.statistics.observe import CHECKPOINT, Observer, Tap, gather
from moe_lab.study.steps.tables import coverage

pytestmark = pytest.mark.slow

FINGERPRINT = {"model": "tiny", "data": "random"}


def batches(n: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for seed in range(n):
        ids = tiny.tokens(rows=2, length=10, seed=seed)
        valid = torch.ones_like(ids, dtype=torch.bool)
        valid[0, : seed % 3] = False
        made.append((ids, valid))
    return made


def equal(first: Layers, second: Layers) -> bool:
    return all(torch.equal(first[layer][name], part) for layer in second for name, part in second[layer].items())


READS = [
    *((gather, tap) for tap in (ForwardTap, DamageTap, SimilarityTap)),
    *((gather_gradients, tap) for tap in (GradientTap, WeightGradientTap)),
]


@pytest.mark.parametrize(("read", "tap"), READS)
def test_parts_add_up_to_the_whole(read: Callable[..., Statistics], tap: type[Tap]) -> None:
    model = naive.model("olmoe")
    with pytest.raises(UserError, match="no batches"):
        read(model, tap, [], fingerprint=FINGERPRINT)
    whole, first, rest = (
        read(model, tap, some, fingerprint=FINGERPRINT) for some in (batches(), batches()[:4], batches()[4:])
    )
    assert {**whole.header, "batches": None} == {"kind": tap.kind, "fingerprint": FINGERPRINT, "batches": None}
    for layer, named in whole.layers.items() if tap is not WeightGradientTap else ():  # sums of |sums|
        for name, part in named.items():
            add = torch.maximum if name.endswith("_max") else torch.add
            summed = add(first.layers[layer][name], rest.layers[layer][name])
            assert torch.allclose(summed, part, rtol=1e-12, atol=1e-15), name


@pytest.mark.parametrize(("read", "tap"), READS[:-1])  # gradients of weights are of the whole set
def test_a_stopped_pass_goes_on_where_it_was(
    read: Callable[..., Statistics], tap: type[Tap], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = naive.model("qwen3_moe")
    expected = read(model, tap, batches(), fingerprint=FINGERPRINT)
    settings: Any = {"out": tmp_path, "fingerprint": FINGERPRINT, "groups": 2}
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, Observer, "read", kill_at=6)
        read(model, tap, batches(), **settings)
    assert header(tmp_path / CHECKPOINT)["done"] == 4
    with monkeypatch.context() as patch:
        calls = tiny.count_calls(patch, Observer, "read")
        resumed = read(model, tap, batches(), **settings)
    assert len(calls) == 2
    assert equal(resumed.layers, expected.layers)
    monkeypatch.setattr(Observer, "read", None)  # a finished pass reads nothing again
    finished = read(model, tap, batches(), **settings)
    assert equal(finished.layers, expected.layers)


@pytest.mark.parametrize("change", ["fingerprint", "batches", "damaged"])
def test_sums_of_another_pass_are_not_continued(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = naive.model("olmoe")
    gather(model, ForwardTap, batches()[:4], out=tmp_path, fingerprint=FINGERPRINT, groups=2)
    data: Any = batches()[:4]
    fingerprint = dict(FINGERPRINT)
    if change == "fingerprint":
        fingerprint["model"] = "other"
    elif change == "batches":  # the same rows, cut otherwise
        data = [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in (data[:2], data[2:])]
    else:
        (tmp_path / CHECKPOINT).write_bytes((tmp_path / CHECKPOINT).read_bytes()[:-9])
    calls = tiny.count_calls(monkeypatch, Observer, "read")
    gather(model, ForwardTap, data, out=tmp_path, fingerprint=fingerprint, groups=2)
    assert len(calls) == len(data)


@pytest.mark.parametrize(("read", "tap"), [each for each in READS if each[1] is not DamageTap])
def test_a_broken_weight_is_named(read: Callable[..., Statistics], tap: type[Tap], tmp_path: Path) -> None:
    model = tiny.build("qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[5] = float("nan")
    settings: Any = {} if tap is WeightGradientTap else {"out": tmp_path, "groups": 2}
    with pytest.raises(UserError, match=r"NaN or Inf in layer \d, expert \d+: \w+ of batches 1 to \d"):
        read(model, tap, batches(), fingerprint=FINGERPRINT, **settings)
    assert not (tmp_path / CHECKPOINT).exists()


def statistics(values: list[float]) -> Statistics:
    tensor = torch.tensor(values, dtype=torch.float64)
    layers = {2: {"tokens": tensor, "channel_max": tensor}, 5: {"tokens": 2 * tensor, "channel_max": -tensor}}
    return Statistics(layers, {"kind": "forward", "fingerprint": {"model": "m"}})


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = statistics([1, 2, 3])
    saved.layers[2]["layer_loss"] = torch.tensor(0.25, dtype=torch.float64)
    saved.save(file := tmp_path / "new" / "sums.safetensors")
    loaded = Statistics.load(file)
    assert loaded.header == saved.header == header(file)
    for layer, named in saved.layers.items():
        assert all(torch.equal(loaded.layers[layer][name], tensor) for name, tensor in named.items())
    assert loaded.layers[2]["layer_loss"].shape == () and read_file(file)[5]["tokens"].tolist() == [2, 4, 6]
    assert list((tmp_path / "new").iterdir()) == [file]


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


def test_what_is_not_finite_is_named_and_every_expert_is_listed() -> None:
    broken = statistics([4, 0, 2])
    assert coverage(broken.layers)[:3] == [(2, 0, 4), (2, 1, 0), (2, 2, 2)] and len(coverage(broken.layers)) == 6
    for value in (torch.nan, torch.inf):
        broken.layers[5]["tokens"][1] = value
        with pytest.raises(UserError, match="layer 5, expert 1: tokens of batch 7"):
            check_finite(broken.layers, "batch 7")
