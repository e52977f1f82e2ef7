"""Tensors that are read through buffers are those of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.statistics.weights import read_tensors, through_buffers

FILE = "model.safetensors"


def test_buffers_hold_one_tensor_after_the_other(tmp_path: Path) -> None:
    """Of many sizes, growing and shrinking, in any order, none changed by the one that is read meanwhile."""
    tiny.save("deepseek_v2", tmp_path, dtype=torch.bfloat16)
    checkpoint, expected = open_checkpoint(tmp_path), load_file(tmp_path / FILE)
    for names in (list(expected), list(expected)[::-1], list(expected)[5:6], []):
        entries = [checkpoint.tensors[name] for name in names]
        buffered = through_buffers(tmp_path / FILE, entries, torch.device("cpu"))
        for found in (buffered, read_tensors(checkpoint, FILE, names)):
            for name, tensor in zip(names, found, strict=True):
                assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected[name]), name


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:-100])
    with pytest.raises(UserError, match="became shorter while it was read: 100 bytes lack"):
        list(through_buffers(tmp_path / FILE, list(checkpoint.tensors.values()), torch.device("cpu")))
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match=r"shard .*model\.safetensors cannot be read: .*No such file"):
        list(read_tensors(checkpoint, FILE, list(checkpoint.tensors)))
