"""The wheel: everything a study needs is in it, and it works outside a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moe_lab.start import FILE

pytestmark = pytest.mark.slow

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
    for name in (
        "moe_lab/pocket/data/olmoe/model.safetensors",
        "analysis/render/templates/page.html.j2",
        "hydra_plugins",
    ):
        assert (site / name).exists(), name
    assert [file.name for file in (site / "moe_lab/pocket").iterdir() if file.suffix == ".py"] == ["__init__.py"]
    assert not (site / "tools").exists(), "what trains the shipped models needs a checkout"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules are called like ours and like some that we import, and fail when they are."""
    for name in ("moe_lab", "analysis", "moe_lab/study", "moe_lab/evaluation", "moe_lab/evaluation/sandbox"):
        (tmp_path / name).mkdir()
        for module in ("__init__", "__main__", "worker", "runner", "client"):
            (tmp_path / name / f"{module}.py").write_text("raise SystemExit('a module of the current folder')")
    for name in ("torch", "pandas", "json", "inspect"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current folder')")
    return tmp_path


@pytest.mark.parametrize("variables", [{}, {"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": "packages"}], ids=str)
def test_what_is_started_is_this_installation(variables: dict[str, str], hostile: Path) -> None:
    """Whatever the current folder holds, and a folder of PYTHONPATH that holds packages called like ours."""
    for name in ("moe_lab", "analysis"):
        shutil.copytree(hostile / name, hostile / "packages" / name)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, FILE, *words],
            cwd=hostile,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-u", "-m", "moe_lab.evaluation.sandbox.runner", "limited") == ""
    assert "unified.table1" in run("-m", "analysis", "help")


def test_a_study_of_the_wheel_is_reported_by_the_wheel(site: Path, hostile: Path, tmp_path: Path) -> None:
    """Installed in an environment of its own; the workers and the report are started in the hostile folder."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.copytree(site, packages, dirs_exist_ok=True)
    others = [folder for folder in sys.path if folder.endswith("site-packages")]  # but not what their .pth files add
    (packages / "others.pth").write_text("\n".join(others))
    words = ["-m", "criterion=random", "suite.benchmarks=[]", "study=s", "store=store", "launcher.processes=1"]
    done = subprocess.run(
        [environment / "bin" / "python", packages / "moe_lab" / "start.py", "-m", "moe_lab", *words],
        cwd=hostile,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (hostile / "store/reports/s/report.html").exists()
    assert "a module of the current folder" not in done.stderr
