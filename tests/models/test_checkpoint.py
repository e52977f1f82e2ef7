from __future__ import annotations

import json
import struct
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
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}}))
    return tmp_path


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


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F7", "shape": [3], "data_offsets": [0, 3]}}',
        '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 3]}}',
        '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
    ],
)
def test_a_header_that_cannot_be_is_refused(folder: Path, header: str) -> None:
    (folder / FIRST).write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(3))
    with pytest.raises(UserError, match=FIRST):
        open_checkpoint(folder)
