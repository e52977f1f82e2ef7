"""An export that computes something else than the masked model is noticed, and the layer named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from identities.plans import random_plan
from safetensors.torch import load_file, save_file

from moe_lab.errors import UserError
from moe_lab.pruning.export import export
from moe_lab.pruning.export.verify import TOLERANCE, verify

ROUNDING = TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("name", "way", "shape", "bound"),
    [
        *((name, "even", "natural", 0) for name in ("deepseek_v3:grouped", "gpt_oss", "qwen3_moe")),
        ("deepseek_v3:grouped", "even", "masked", ROUNDING),
        ("qwen3_moe", "ragged", "natural", ROUNDING),
        ("qwen3_moe", "one width", "natural", ROUNDING),
    ],
)
def test_whole_experts_agree_to_the_bit_and_others_within_rounding(
    name: str, way: str, shape: str, bound: float, tmp_path: Path
) -> None:
    plan = random_plan(tiny.save(name, tmp_path / "model"), way)
    export(tmp_path / "model", plan, tmp_path / "export", shape=shape)
    assert verify(tmp_path / "model", plan, tmp_path / "export") <= bound


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.down_proj.weight"])
def test_a_wrong_export_is_named(tensor: str, tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save("qwen3_moe", tmp_path / "model"), 0.25)
    export(tmp_path / "model", plan, tmp_path / "export")
    rewrite(tmp_path / "export", lambda tensors: tensors[tensor].copy_(tensors[tensor].flip(0)))
    with pytest.raises(UserError, match=r"decoder layer 1 of .*export gives something else than the masked model"):
        verify(tmp_path / "model", plan, tmp_path / "export")


def test_weights_that_begin_anywhere_in_a_file_agree_to_the_bit(tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save("qwen3_moe", tmp_path / "model"), 0.25)
    rewrite(tmp_path / "model", lambda tensors: None, moved_by=8)
    export(tmp_path / "model", plan, tmp_path / "export")
    assert verify(tmp_path / "model", plan, tmp_path / "export") == 0.0


@pytest.mark.parametrize("channels", [False, True])
def test_a_large_residual_hides_no_wrong_expert(channels: bool, tmp_path: Path) -> None:
    """One number of each hidden state is as large as in trained models; experts do not add to it."""
    model = tiny.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    plan = random_plan(model, "one width", width=16) if channels else tiny.plan(model, 0.25)
    rewrite(tmp_path / "model", grow)
    export(tmp_path / "model", plan, tmp_path / "export")
    clean = verify(tmp_path / "model", plan, tmp_path / "export")
    assert clean <= (TOLERANCE[torch.bfloat16] / 2 if channels else 0)
    rewrite(tmp_path / "export", swap)
    with pytest.raises(UserError, match="decoder layer 1 of"):
        verify(tmp_path / "model", plan, tmp_path / "export")


def test_experts_that_no_token_chooses_are_compared_too(tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save("deepseek_v3", tmp_path / "model"), 0.25)
    last = max(plan.experts)
    bias, name = (
        f"model.layers.{last}.mlp.{of}" for of in ("gate.e_score_correction_bias", "experts.3.down_proj.weight")
    )
    rewrite(tmp_path / "model", lambda tensors: tensors[bias][plan.experts[last][3]].fill_(-1e4))
    export(tmp_path / "model", plan, tmp_path / "export")
    assert verify(tmp_path / "model", plan, tmp_path / "export") == 0
    rewrite(tmp_path / "export", lambda tensors: tensors[name].neg_())
    with pytest.raises(
        UserError, match=f"decoder layer {re.escape(str(last))} .* outputs of all kept experts, asked in turn"
    ):
        verify(tmp_path / "model", plan, tmp_path / "export")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], moved_by: int = 0) -> None:
    """Change the tensors of a checkpoint, and where they begin."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    for pad in range(64):
        save_file(tensors, file, {"format": "pt", "pad": "x" * pad})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == moved_by:
            return


def grow(tensors: dict[str, torch.Tensor]) -> None:
    """The first number of each hidden state becomes 100, as no layer reads or writes it; the norms make up for it."""
    tensors["model.embed_tokens.weight"][:, 0] = 100
    for name, tensor in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")):
            tensor.mul_(100 / len(tensor) ** 0.5)[0] = 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0


def swap(tensors: dict[str, torch.Tensor]) -> None:
    """Two experts of layer 1 trade places."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"model.layers.1.mlp.experts.{expert}.{part}.weight" for expert in (1, 2))
        tensors[one], tensors[other] = tensors[other], tensors[one]
