"""What is read for a device through buffers is what is mapped on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.staging import Staging, read_tensors


def test_buffers_hold_one_tensor_after_the_other(tmp_path: Path) -> None:
    """Tensors of many sizes and both halves of the pair, none of which may change what was read before."""
    tiny.save("deepseek_v2", tmp_path, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path)
    names = list(checkpoint.tensors)
    staging = Staging("cpu")
    with (tmp_path / "model.safetensors").open("rb", buffering=0) as file:
        found = {name: staging.read(file, checkpoint.tensors[name]) for name in names}
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys() and len(names) > 100
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in names)
    mapped = list(read_tensors(checkpoint, "model.safetensors", names[5:9], "cpu"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in zip(names[5:9], mapped, strict=True))


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    last = checkpoint.tensors[list(checkpoint.tensors)[-1]]
    with (
        (tmp_path / "model.safetensors").open("rb", buffering=0) as file,
        pytest.raises(UserError, match="became shorter while it was read: 100 bytes lack"),
    ):
        Staging("cpu").read(file, last)
