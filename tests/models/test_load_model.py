"""From the files of a checkpoint to a model that can be scored: what is read, and in which precision."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import settings

from moe_lab.errors import UserError
from moe_lab.models import experts, streamed
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.load import load_model
from moe_lab.models.streamed import StreamedModel
from tests.campaign.models import SHARD

STORED = [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
"""Precision of the checkpoint, and that of the model."""


def test_entries_say_where_the_bytes_are(folder: Path) -> None:
    found = open_checkpoint(folder)
    assert len(found.shards) == 7 and found.metadata == {shard: {"format": "pt"} for shard in found.shards}
    for shard in found.shards:
        data = (folder / shard).read_bytes()
        for name, tensor in load_file(folder / shard).items():
            entry = found.tensors[name]
            assert (entry.shard, entry.dtype, entry.shape) == (shard, "F32", tuple(tensor.shape))
            assert data[entry.start : entry.start + entry.size] == tensor.numpy().tobytes()


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F7", "shape": [3], "data_offsets": [0, 3]}}',
        '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 3]}}',
        '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
    ],
)
def test_a_header_that_cannot_be_is_refused(folder: Path, header: str) -> None:
    (folder / SHARD).write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(3))
    with pytest.raises(UserError, match=SHARD):
        open_checkpoint(folder)


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halved")
    tiny.save("olmoe", folder, dtype=torch.bfloat16)
    return folder


def test_loaded_model_is_ready_to_be_scored(halved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_model(settings(halved, threads=1))
    assert model.dtype == torch.float32 and not model.training
    assert set(model.get_experts_implementation().values()) == {experts.CPU_EXPERTS}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.pad_token == "</s>" and model.generation_config.pad_token_id is not None
    assert capfd.readouterr() == ("", "")
    chosen, _ = load_model(settings(halved, dtype="bfloat16"))
    assert chosen.dtype == torch.bfloat16 and set(chosen.get_experts_implementation().values()) == {"eager"}
    expected = tiny.build("olmoe", dtype=torch.bfloat16).float()
    assert torch.equal(model(input_ids=tiny.tokens()).logits, expected(input_ids=tiny.tokens()).logits)


@pytest.mark.cuda
def test_cuda_keeps_the_stored_precision(halved: Path) -> None:
    model, _ = load_model(settings(halved, device="auto"))
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}


def test_a_device_that_is_not_here_is_refused(halved: Path) -> None:
    with pytest.raises(UserError, match=r"model\.device=cuda:99: this machine has \d+ CUDA devices"):
        load_model(settings(halved, device="cuda:99"))


@pytest.mark.parametrize(("stored", "dtype"), STORED)
@pytest.mark.parametrize("name", ["olmoe", "mixtral", "jamba", "deepseek_v3", "lfm2_moe", "gpt_oss"])
def test_every_layer_has_the_weights_of_the_whole_model(
    name: str, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny.build(name).to(stored).save_pretrained(tmp_path)
    whole = tiny.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = StreamedModel(tmp_path, dtype=dtype, device="cpu")
    for number in (1, 2, 1):
        with model.layer(number) as layer:
            expected = whole.get_submodule(f"{model.path}.{number}")
            found = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            for own, weight in (*expected.named_parameters(), *expected.named_buffers()):
                assert torch.equal(found[own], weight) and found[own].dtype == weight.dtype, own


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
