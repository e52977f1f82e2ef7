"""A checkpoint in several files, and a copy of it that a test may damage."""

import shutil
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    tiny.save("olmoe", folder, shard="100KB")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "model")
