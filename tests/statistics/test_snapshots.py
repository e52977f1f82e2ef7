from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import Observer, gather
from moe_lab.statistics.sums import SNAPSHOT_INDEX, Snapshots, load_snapshots


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = tiny.tokens(rows=7, length=12)
    valid = torch.ones(ids.shape, dtype=torch.bool)
    valid[2, 5:] = False
    return [(ids[at : at + 1], valid[at : at + 1]) for at in range(7)]


def test_points_part_the_batches_evenly() -> None:
    def points(batches: int, parts: int) -> list[int]:
        return Snapshots(Path(), range(batches), parts).points

    assert points(64, 8) == [8, 16, 24, 32, 40, 48, 56]
    assert points(7, 3) == [3, 5]
    assert points(3, 8) == [1, 2] and points(1, 8) == [] and points(5, 1) == [] and points(5, 0) == []


def run(folder: Path, rows: list, kept: Snapshots | None, groups: int = 2):
    return gather(
        tiny.build("olmoe"), ForwardTap, rows, out=folder, fingerprint={"a": 1}, groups=groups, snapshots=kept
    )


def test_a_snapshot_is_a_pass_over_its_part(tmp_path: Path) -> None:
    rows = batches()
    kept = Snapshots(tmp_path / "partial", rows, 3)
    whole = run(tmp_path / "partial", rows, kept)
    (tmp_path / "result").mkdir()
    assert kept.publish(tmp_path / "result") and list((tmp_path / "partial").glob("snapshot*")) == []
    found = load_snapshots(tmp_path / "result", 3)
    assert found is not None and [tokens for tokens, _ in found] == [36 - 7, 60 - 7]
    for (_, layers), done in zip(found, (3, 5), strict=True):
        part = run(tmp_path / f"{done}", rows[:done], None).layers
        for layer, sums in layers.items():
            assert set(sums) == set(part[layer])
            for name, value in sums.items():
                expected = part[layer][name].float() if "channel_" in name else part[layer][name]
                assert (torch.from_numpy(value) == expected).all(), name
    assert (whole.layers[0]["tokens"].numpy() >= found[1][1][0]["tokens"]).all()
    assert load_snapshots(tmp_path / "result", 4) is None and load_snapshots(tmp_path / "3", 3) is None


def test_a_stopped_pass_leaves_the_same_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = batches()
    model = tiny.build("olmoe")
    kept = Snapshots(tmp_path / "partial", rows, 3)
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, Observer, "read", kill_at=5)
        gather(model, ForwardTap, rows, out=tmp_path / "partial", fingerprint={"a": 1}, groups=3, snapshots=kept)
    again = Snapshots(tmp_path / "partial", rows, 3)
    run(tmp_path / "partial", rows, again, groups=3)
    straight = Snapshots(tmp_path / "other", rows, 3)
    run(tmp_path / "other", rows, straight, groups=3)
    for number in (1, 2):
        name = f"snapshot-{number}-of-3.safetensors"
        assert (tmp_path / "partial" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_pass_that_was_begun_without_publishes_none(tmp_path: Path) -> None:
    kept = Snapshots(tmp_path, batches(), 3)
    run(tmp_path, batches(), None)
    assert not kept.publish(tmp_path) and not (tmp_path / SNAPSHOT_INDEX).exists()
