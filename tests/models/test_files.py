"""Where files are, and what tells one model from another: the content of its files."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import torch
from tiny import settings

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import files
from moe_lab.models.files import check, fingerprint, fingerprint_of, local_folder
from moe_lab.paths import caches, resolve, shipped


def test_paths_that_lead_nowhere() -> None:
    for path in ("/nowhere/at/all", "no folder", "nobody"):
        with pytest.raises(UserError, match="is no folder: expected a folder, a hub id"):
            check(settings(path))
    with pytest.raises(UserError, match="is no folder"):
        fingerprint("/nowhere")
    check(settings("nobody/nothing"))
    with pytest.raises(UserError, match=r"model\.path=nobody/nothing .* no such model at revision v1"):
        local_folder(settings("nobody/nothing", revision="v1"))


def test_fingerprint_depends_on_content_alone(folder: Path, original: Path) -> None:
    before = fingerprint(original)
    (folder / "README.md").write_text("words")
    torch.save({}, folder / "pytorch_model.bin")
    check(settings(folder))
    assert fingerprint(folder) == before, "pickles are never loaded"
    for file in ("config.json", "tokenizer.json", "model-00003-of-00007.safetensors"):
        data = bytearray((original / file).read_bytes())
        data[-1] ^= 1
        (folder / file).write_bytes(data)
        assert fingerprint(folder) != before, file
        shutil.copy(original / file, folder)


def test_a_folder_and_the_hub_name_of_the_same_files_are_one_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache holds weights as links to files named by their sha256."""
    place, in_the_cache = tmp_path / "hub/models--owner--name", ModelConfig(name="n", path="owner/name")
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
    assert fingerprint_of(in_the_cache) == fingerprint(folder)
    stated: dict[str, tuple[int, str]] = {"README.md": (1, ""), "old/a.safetensors": (1, "")}
    for file in folder.glob("*.safetensors"):
        stated[file.name] = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
    for link in snapshot.glob("*.safetensors"):
        link.unlink()
    monkeypatch.setattr(files, "configuration_folder", lambda _: snapshot)
    for found, expected in ((stated, fingerprint(folder)), (None, None)):  # the hub states the sha256 of weights
        monkeypatch.setattr(files, "stated_files", lambda *_, found=found: found)
        files._fingerprint_there.cache_clear()
        assert fingerprint_of(in_the_cache) == expected


def test_a_large_file_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "REMEMBERED_FROM", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read, digest = [], hashlib.file_digest
    monkeypatch.setattr(files.hashlib, "file_digest", lambda *given: (read.append(1), digest(*given))[1])
    (file := tmp_path / "weights").write_bytes(b"one two")

    def is_read(times: int) -> bool:
        return files.sha256_of(file) == hashlib.sha256(b"one two").hexdigest() and len(read) == times

    assert is_read(1) and is_read(1)
    os.utime(file, (1, 1))
    assert is_read(2)
    next(tmp_path.glob("cache/moe_lab/hashes/*")).write_text("{")
    assert is_read(3)


def test_a_hub_that_cannot_be_reached_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    no_network = Mock(side_effect=httpx.ConnectError("Name or service not known"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    assert files.stated_files("owner/unreachable", None, "model") is None


def test_shipped_models_and_files_are_found_and_other_paths_stay() -> None:
    assert (Path(resolve("pocket:olmoe")) / "config.json").is_file()
    assert Path(resolve("pocket:calibration/general.jsonl")).is_file()
    assert all(path.exists() for path in shipped().values())
    for path in ("allenai/OLMoE-1B-7B-0924", "/some/folder", "model"):
        assert resolve(path) == path
    for path, nearest in (("olmo", "olmoe"), ("calibration/genral.jsonl", "calibration/general.jsonl")):
        with pytest.raises(UserError, match=f"did you mean pocket:{re.escape(nearest)}"):
            resolve(f"pocket:{path}")
    with pytest.raises(UserError, match="did you mean pocket:olmoe"):
        resolve("pocket:../data/olmoe")


def test_caches_are_among_temporary_files_where_the_home_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is the user's alone, as anybody may write there."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert caches() == tmp_path / "home" / ".cache"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    folder = caches()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    somebody = os.getuid() + 1
    folder.rename(tmp_path / f"moe_lab-{somebody}")
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        caches()
