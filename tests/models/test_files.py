from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import files
from moe_lab.models.files import check, fingerprint, fingerprint_of, local_folder


def settings(path: object, **changes: object) -> ModelConfig:
    return ModelConfig(name="m", path=str(path), **changes)  # type: ignore[arg-type]


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
def in_the_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A model of the hub as the hub's cache holds it: its weights are links to files named by their sha256."""
    place = tmp_path / "hub/models--owner--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("c0ffee" * 6 + "c0de")
    (snapshot := place / "snapshots" / ("c0ffee" * 6 + "c0de")).mkdir(parents=True)
    (place / "blobs").mkdir()
    for file in folder.iterdir():
        blob = place / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    files._fingerprint_there.cache_clear()
    return ModelConfig(name="n", path="owner/name")


def test_a_folder_and_the_hub_name_of_the_same_files_are_one_model(
    folder: Path, in_the_cache: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fingerprint_of(in_the_cache) == fingerprint(folder)
    weights = {file.name: file for file in folder.glob("*.safetensors")}
    stated = {
        name: (file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()) for name, file in weights.items()
    }
    others = {"README.md": (1, ""), "old/a.safetensors": (1, "")}
    monkeypatch.setattr(files, "stated_files", lambda *_: {**stated, **others})
    for link in tmp_path.glob("hub/*/snapshots/*/*.safetensors"):
        link.unlink()
    (snapshot,) = tmp_path.glob("hub/*/snapshots/*")
    monkeypatch.setattr(files, "configuration_folder", lambda _: snapshot)
    files._fingerprint_there.cache_clear()
    assert fingerprint_of(in_the_cache) == fingerprint(folder), "the hub states the sha256 of weights that are not here"
    monkeypatch.setattr(files, "stated_files", lambda *_: None)
    files._fingerprint_there.cache_clear()
    assert fingerprint_of(in_the_cache) is None


def test_a_large_file_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "REMEMBERED_FROM", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read, digest = [], hashlib.file_digest
    monkeypatch.setattr(files.hashlib, "file_digest", lambda *given: (read.append(1), digest(*given))[1])
    (file := tmp_path / "weights").write_bytes(b"one two")
    for _ in range(2):
        assert files.sha256_of(file) == hashlib.sha256(b"one two").hexdigest() and len(read) == 1
    os.utime(file, (1, 1))
    assert files.sha256_of(file) == hashlib.sha256(b"one two").hexdigest() and len(read) == 2
    next(tmp_path.glob("cache/moe_lab/hashes/*")).write_text("{")
    assert files.sha256_of(file) == hashlib.sha256(b"one two").hexdigest() and len(read) == 3


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


def test_a_hub_that_cannot_be_reached_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    assert files.stated_files("owner/unreachable", None, "model") is None
