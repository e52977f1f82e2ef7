"""An export that computes something else than the masked model is noticed, and the layer named."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from channel_plans import channel_plan
from safetensors.torch import load_file, save_file

from moe_lab.errors import UserError
from moe_lab.pruning.export import export
from moe_lab.pruning.verify import TOLERANCE, verify

ROUNDING = TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["deepseek_v3:grouped", "gpt_oss", "qwen3_moe"])
def test_whole_experts_agree_to_the_bit(name: str, tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save(name, tmp_path / "model"), 0.25)
    export(tmp_path / "model", plan, tmp_path / "export")
    assert verify(tmp_path / "model", plan, tmp_path / "export") == 0.0


def test_the_shape_of_the_original_agrees_within_rounding(tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save("deepseek_v3:grouped", tmp_path / "model"), 0.25)
    export(tmp_path / "model", plan, tmp_path / "export", shape="masked")
    assert verify(tmp_path / "model", plan, tmp_path / "export") <= ROUNDING


@pytest.mark.parametrize("width", [None, 16], ids=["ragged", "even"])
def test_channels_agree_within_rounding(width: int | None, tmp_path: Path) -> None:
    plan = channel_plan(tiny.save("qwen3_moe", tmp_path / "model"), width=width)
    export(tmp_path / "model", plan, tmp_path / "export")
    assert verify(tmp_path / "model", plan, tmp_path / "export") <= ROUNDING


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.down_proj.weight"])
def test_a_wrong_export_is_named(tensor: str, tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save("qwen3_moe", tmp_path / "model"), 0.25)
    export(tmp_path / "model", plan, tmp_path / "export")
    file = tmp_path / "export" / "model.safetensors"
    tensors = load_file(file)
    tensors[tensor] = torch.flip(tensors[tensor], [0])
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"decoder layer 1 of .*export gives something else than the masked model"):
        verify(tmp_path / "model", plan, tmp_path / "export")
