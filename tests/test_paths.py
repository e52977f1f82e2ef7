from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from moe_lab.errors import UserError
from moe_lab.paths import caches, resolve, shipped


def test_shipped_models_and_files_are_found() -> None:
    assert (Path(resolve("pocket:olmoe")) / "config.json").is_file()
    assert Path(resolve("pocket:calibration/general.jsonl")).is_file()
    assert all(path.exists() for path in shipped().values())


@pytest.mark.parametrize("path", ["allenai/OLMoE-1B-7B-0924", "/some/folder", "model"])
def test_other_paths_stay(path: str) -> None:
    assert resolve(path) == path


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("pocket:olmo", "pocket:olmoe"),
        ("pocket:calibration/genral.jsonl", "pocket:calibration/general.jsonl"),
        ("pocket:../data/olmoe", "pocket:olmoe"),
    ],
)
def test_unknown_names_get_the_nearest(path: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {re.escape(nearest)}"):
        resolve(path)


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
