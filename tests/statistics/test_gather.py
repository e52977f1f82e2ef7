from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch

from moe_lab.errors import UserError
from moe_lab.statistics.damage import DamageTap
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import CHECKPOINT, Observer, gather
from moe_lab.statistics.sums import Layers, Statistics, header

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


def test_parts_add_up_to_the_whole() -> None:
    model = naive.model("olmoe")
    whole = gather(model, ForwardTap, batches(), fingerprint=FINGERPRINT)
    first = gather(model, ForwardTap, batches()[:4], fingerprint=FINGERPRINT)
    rest = gather(model, ForwardTap, batches()[4:], fingerprint=FINGERPRINT)
    assert {**whole.header, "batches": None} == {"kind": "forward", "fingerprint": FINGERPRINT, "batches": None}
    for layer, named in whole.layers.items():
        assert int(named["tokens"].sum()) == 4 * sum(int(valid.sum()) for _, valid in batches())
        for name, part in named.items():
            add = torch.maximum if name.endswith("_max") else torch.add
            assert torch.allclose(add(first.layers[layer][name], rest.layers[layer][name]), part, rtol=1e-12), name


def test_a_stopped_pass_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = naive.model("qwen3_moe")
    expected = gather(model, ForwardTap, batches(), fingerprint=FINGERPRINT)
    settings: Any = {"out": tmp_path, "fingerprint": FINGERPRINT, "groups": 2}
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, Observer, "read", kill_at=6)
        gather(model, ForwardTap, batches(), **settings)
    assert header(tmp_path / CHECKPOINT)["done"] == 4
    with monkeypatch.context() as patch:
        calls = tiny.count_calls(patch, Observer, "read")
        resumed = gather(model, ForwardTap, batches(), **settings)
    assert len(calls) == 2
    assert equal(resumed.layers, expected.layers)
    monkeypatch.setattr(Observer, "read", None)  # a finished pass reads nothing again
    finished = gather(model, ForwardTap, batches(), **settings)
    assert equal(finished.layers, expected.layers)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_gather as t
read, calls = t.Observer.read, []
def waiting(*given):
    read(*given)
    calls.append(given)
    print(len(calls), flush=True)
    if len(calls) == 3:
        sys.stdin.read()
t.Observer.read = waiting
t.gather(t.naive.model("olmoe"), t.ForwardTap, t.batches(), out=Path(sys.argv[1]), fingerprint=t.FINGERPRINT, groups=2)
"""


def test_a_killed_pass_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parents[1])]
    killed = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "part"), *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdin is not None
    assert killed.stdout is not None
    while "3" not in killed.stdout.readline():
        assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    killed.stdin.close()
    killed.stdout.close()
    assert header(tmp_path / "part" / CHECKPOINT)["done"] == 2
    model = naive.model("olmoe")
    resumed = gather(model, ForwardTap, batches(), out=tmp_path / "part", fingerprint=FINGERPRINT, groups=2)
    expected = gather(model, ForwardTap, batches(), out=tmp_path / "whole", fingerprint=FINGERPRINT, groups=2)
    assert equal(resumed.layers, expected.layers)
    assert resumed.header == expected.header


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


def test_a_broken_weight_is_named(tmp_path: Path) -> None:
    model = tiny.build("qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[5] = float("nan")
    with pytest.raises(UserError, match=r"NaN or Inf in layer 1, expert 5: \w+ of batches 1 to 2"):
        gather(model, ForwardTap, batches(), out=tmp_path, fingerprint=FINGERPRINT, groups=2)
    assert not (tmp_path / CHECKPOINT).exists()


def test_no_batches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no batches"):
        gather(naive.model("olmoe"), ForwardTap, [], out=tmp_path, fingerprint=FINGERPRINT, groups=2)


def test_the_damage_pass_resumes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = naive.model("olmoe")
    expected = gather(model, DamageTap, batches(3), fingerprint=FINGERPRINT)
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, Observer, "read", kill_at=3)
        gather(model, DamageTap, batches(3), fingerprint=FINGERPRINT, out=tmp_path, groups=1)
    resumed = gather(model, DamageTap, batches(3), fingerprint=FINGERPRINT, out=tmp_path, groups=1)
    assert equal(resumed.layers, expected.layers)
    assert resumed.header["kind"] == "damage"
    assert Statistics.load(tmp_path / CHECKPOINT).header["done"] == 3
