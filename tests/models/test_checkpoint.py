from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import INDEX, open_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / FIRST)
    save_file({"c": torch.zeros(())}, tmp_path / SECOND, {"format": "pt"})
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_header(path: Path, text: str, payload: int) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(payload))


def test_entries_say_where_the_bytes_are(folder: Path) -> None:
    found = open_checkpoint(folder)
    assert found.shards == (FIRST, SECOND)
    assert found.metadata == {FIRST: {}, SECOND: {"format": "pt"}}
    entry = found.tensors["a"]
    assert (entry.shard, entry.dtype, entry.shape, entry.size) == (FIRST, "F32", (2, 3), 24)
    data = (folder / FIRST).read_bytes()[entry.start : entry.start + entry.size]
    assert struct.unpack("<6f", data) == (0, 1, 2, 3, 4, 5)
    assert found.tensors["b"].size == 8 and found.tensors["c"].shape == ()


def test_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).shards == ("model.safetensors",)


def cut(folder: Path, size: int) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:size] if size >= 0 else data + bytes(-size))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / SECOND).unlink(), f"shard {SECOND} is missing, {INDEX} expects 1 tensors in it"),
        (
            lambda f: cut(f, len((f / FIRST).read_bytes()) - 5),
            r"00001-of-00002.safetensors is damaged: expected \d+ bytes, f",
        ),
        (lambda f: cut(f, -3), r"is damaged: expected \d+ bytes, found \d+"),
        (lambda f: cut(f, 20), "is damaged: its 20 bytes do not hold the header"),
        (lambda f: cut(f, 0), "is damaged: its 0 bytes do not hold the header"),
        (lambda f: (f / FIRST).write_bytes(b"<html>" * 9), "is damaged: its 54 bytes do not hold the header"),
        (lambda f: write_header(f / FIRST, "not json", 0), "is damaged: its header is not that of a safetensors file"),
        (lambda f: write_header(f / FIRST, '{"a": {"dtype": "F7"}}', 0), "is damaged: its header"),
        (
            lambda f: write_header(f / FIRST, '{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}', 2),
            r"U8 of shape \(3,\) takes 3 bytes, not 2",
        ),
        (
            lambda f: write_header(f / FIRST, '{"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}', 4),
            "tensor a starts at byte",
        ),
        (lambda f: write_header(f / FIRST, '{"a": {}, "a": {}}', 0), "a is there twice"),
        (lambda f: write_index(f, {"a": FIRST, "c": SECOND}), "holds tensor b, which .* does not list"),
        (
            lambda f: write_index(f, {"a": FIRST, "b": FIRST, "d": FIRST, "c": SECOND}),
            "expects tensor d in .*not there",
        ),
        (
            lambda f: write_index(f, {"a": SECOND, "b": FIRST, "c": SECOND}),
            f"expects tensor a in {SECOND}, but it is in",
        ),
        (lambda f: write_index(f, {"a": "../x.safetensors"}), r"shard \.\./x\.safetensors is missing"),
        (lambda f: write_index(f, ["a"]), "is damaged: expected a weight_map"),
        (lambda f: (f / INDEX).write_text("{"), "index.json is damaged: expected JSON"),
        (lambda f: (f / INDEX).unlink(), f"has neither .* nor .*: found only {FIRST}, {SECOND}"),
        (lambda f: save_file({"a": torch.ones(1), "c": torch.ones(())}, f / SECOND), "tensor a is both in"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message):
        open_checkpoint(folder)
