from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import files
from moe_lab.models.files import check, fingerprint, local_folder


def settings(path: object, **changes: object) -> ModelConfig:
    return ModelConfig(name="m", path=str(path), **changes)  # type: ignore[arg-type]


def pickled(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def reconfigure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


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
        (pickled, r"only pickled weights .*model\.allow_pickle=true if you trust"),
    ],
)
def test_bad_folders_are_found_before_anything_is_loaded(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    check(settings(folder))
    damage(folder)
    with pytest.raises(UserError, match=message):
        check(settings(folder))


def test_pickles_that_are_allowed_pass(folder: Path) -> None:
    pickled(folder)
    check(settings(folder, allow_pickle=True))


def test_safetensors_beside_pickles_are_taken(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    check(settings(folder))


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


def test_large_weights_are_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint(str(folder))
    monkeypatch.setattr(files, "HASHED_WHOLE", 1000)
    monkeypatch.setattr(files, "SAMPLE", 64)
    sampled = fingerprint(str(folder))
    assert sampled != whole and sampled == fingerprint(str(folder))
    shard = folder / "model-00003-of-00007.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert fingerprint(str(folder)) != sampled


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
