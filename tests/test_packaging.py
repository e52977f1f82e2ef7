"""The wheel: everything a study needs is in it, and it works outside a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_configuration_and_shipped_data_are_packed(site: Path) -> None:
    assert {file.name for file in (ROOT / "conf/criterion").iterdir()} == {
        file.name for file in (site / "moe_lab/conf/criterion").iterdir()
    }
    for name in ("moe_lab/pocket/data/olmoe/model.safetensors", "analysis/templates/page.html.j2", "hydra_plugins"):
        assert (site / name).exists(), name


def test_it_works_outside_a_checkout(site: Path, tmp_path: Path) -> None:
    """-P keeps the current folder off the path, so that moe_lab can only come from the wheel."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", "moe_lab", "-m", "criterion=man,reap", "dry_run=true"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "3 cells" in done.stderr
