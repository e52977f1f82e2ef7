from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import files
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.files import check, fingerprint, local_folder
from tests.campaign.models import pickled, reconfigure


def settings(path: object, **changes: object) -> ModelConfig:
    return ModelConfig(name="m", path=str(path), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"has no config\.json: expected a transformers checkpoint"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is damaged: expected JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"expected a JSON object, found a list"),
        (lambda f: (f / "config.json").write_text("{}"), r"has no model_type"),
        (
            lambda f: reconfigure(f, model_type="llama4_text"),
            r"model_type=llama4_text is not supported: it does not hand",
        ),
        (
            lambda f: (f / "model-00002-of-00007.safetensors").unlink(),
            r"shard model-00002-of-00007\.safetensors is missing",
        ),
        (pickled, r"found no safetensors file: convert its \.bin files to safetensors"),
    ],
)
def test_bad_folders_are_found_before_anything_is_loaded(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    check(settings(folder))
    damage(folder)
    with pytest.raises(UserError, match=message):
        check(settings(folder))


def test_safetensors_beside_pickles_are_taken(folder: Path) -> None:
    before = fingerprint(folder)
    torch.save({}, folder / "pytorch_model.bin")
    check(settings(folder))
    assert fingerprint(folder) == before, "pickles are never loaded"


@pytest.mark.parametrize("path", ["/nowhere/at/all", "no folder", "nobody"])
def test_paths_that_lead_nowhere(path: str) -> None:
    with pytest.raises(UserError, match="is no folder: expected a folder, a hub id"):
        check(settings(path))


def test_hub_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    check(settings("nobody/nothing"))
    with pytest.raises(
        UserError, match=r"model\.path=nobody/nothing is no folder, and the hub gave no such model at revision v1"
    ):
        local_folder(settings("nobody/nothing", revision="v1"))


def test_fingerprint_depends_on_content_alone(folder: Path, original: Path) -> None:
    assert fingerprint(str(folder)) == fingerprint(str(original))
    (folder / "README.md").write_text("words")
    assert fingerprint(str(folder)) == fingerprint(str(original))
    for file in ("config.json", "tokenizer.json", "model-00003-of-00007.safetensors"):
        data = bytearray((original / file).read_bytes())
        data[-1] ^= 1
        (folder / file).write_bytes(data)
        assert fingerprint(str(folder)) != fingerprint(str(original)), file
        (folder / file).write_bytes((original / file).read_bytes())


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes as if the tiny checkpoint were a large one: routers of 1 KiB, 3 KiB matrices of an expert."""
    for name, value in {"HASHED_WHOLE": 1000, "TENSOR_WHOLE": 2048, "SAMPLE": 64, "STRIDE": 512}.items():
        monkeypatch.setattr(files, name, value)


@pytest.mark.usefixtures("sampled")
def test_no_tensor_of_large_weights_can_be_another_unseen(folder: Path) -> None:
    """Each becomes another one, small ones in one byte; large ones in any stretch of STRIDE + SAMPLE bytes."""
    before = fingerprint(folder)
    kinds = set()
    for name, entry in open_checkpoint(folder).tensors.items():
        small = entry.size <= (3 * 64 if ".experts." in name else 2048)
        kinds.add(small)
        last = entry.start + entry.size
        for first, size in [(last - 2, 1)] if small else [(entry.start, entry.size), (last - 1000, 576)]:
            with changed(folder / entry.shard, first, size):
                assert fingerprint(folder) != before, name
    assert kinds == {True, False} and fingerprint(folder) == before


@pytest.mark.usefixtures("sampled")
def test_of_large_weights_little_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expert = [entry for name, entry in open_checkpoint(folder).tensors.items() if files.ONE_EXPERT.search(name)]
    assert sum(length for _, length in files._read_of(expert[0].size, 0)) < expert[0].size / 4
    with changed(folder / expert[0].shard, expert[0].start + 100, 1):
        before = fingerprint(folder)
    assert before == fingerprint(folder), "a byte between samples is not seen"


@pytest.mark.usefixtures("sampled")
def test_damage_to_large_weights_is_said(folder: Path) -> None:
    name = "model-00001-of-00007.safetensors"
    (folder / name).write_bytes((folder / name).read_bytes()[:-5])
    with pytest.raises(UserError, match=f"{re.escape(name)} is damaged"):
        fingerprint(folder)


@contextmanager
def changed(file: Path, first: int, size: int) -> Iterator[None]:
    """Some bytes of a file are others."""
    data = file.read_bytes()
    file.write_bytes(data[:first] + bytes(byte ^ 1 for byte in data[first : first + size]) + data[first + size :])
    yield
    file.write_bytes(data)


def test_fingerprint_of_no_folder() -> None:
    with pytest.raises(UserError, match="is no folder"):
        fingerprint("/nowhere")


def test_no_torch_is_needed(folder: Path) -> None:
    code = f"""
import sys
from moe_lab.config import ModelConfig
from moe_lab.models.files import check, fingerprint
check(ModelConfig(name="m", path={str(folder)!r}))
fingerprint({str(folder)!r})
sys.exit(any(name in sys.modules for name in ("torch", "transformers", "huggingface_hub")))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
