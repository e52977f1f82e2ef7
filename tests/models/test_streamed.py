"""Stacks of experts are those that transformers makes; bytes read ahead are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from moe_lab.errors import UserError
from moe_lab.models import streamed
from moe_lab.models.streamed import StreamedModel

STORED = {torch.float32: torch.float16, torch.bfloat16: torch.bfloat16}
"""Precision of the model -> that of the checkpoint."""


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", ["olmoe", "mixtral", "jamba", "deepseek_v3", "lfm2_moe", "gpt_oss"])
def test_every_layer_has_the_weights_of_the_whole_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.build(name).to(STORED[dtype]).save_pretrained(tmp_path)
    whole = tiny.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = StreamedModel(tmp_path, dtype=dtype, device="cpu")
    for number in (1, 2, 1):
        with model.layer(number) as layer:
            for own, weight in whole.get_submodule(f"{model.path}.{number}").named_parameters():
                assert torch.equal(layer.get_parameter(own), weight), own
                assert layer.get_parameter(own).dtype == weight.dtype


@pytest.mark.parametrize("shape", [(24, 30), (24, 1), (12, 32)])
def test_projections_of_another_shape_are_not_stretched(shape: tuple[int, ...], tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.update({f"model.layers.1.mlp.experts.{number}.up_proj.weight": torch.ones(shape) for number in range(16)})
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="experts of layer 1"):
        StreamedModel(tmp_path, dtype=torch.float32, device="cpu")


def test_bytes_are_read_ahead_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save("olmoe", tmp_path)
    read: list[int] = []
    monkeypatch.setattr(streamed, "_read_ranges", lambda ranges: read.append(sum(size for *_, size in ranges)))
    model = StreamedModel(tmp_path, dtype=torch.float32, device="cpu")
    for number in range(3):
        with model.layer(number, then=number + 1):
            pass
    assert len(read) == 4 and sum(read) == sum(entry.size for entry in model.checkpoint.tensors.values())
