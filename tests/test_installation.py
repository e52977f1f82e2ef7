"""What is installed: plugins from outside the repository, and the wheel, which works outside a
checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import preloaded
import pytest

from moe_lab import allocation, criteria, plugins
from moe_lab.errors import UserError
from moe_lab.results import read_record
from moe_lab.start import FILE
from moe_lab.study.steps.scores import needed_kind

pytestmark = pytest.mark.slow

MODULE = """
import numpy
from moe_lab.allocation import Allocation, register
from moe_lab.allocation.shapes import uniform_experts
from moe_lab.criteria import criterion


@criterion("crest", needs=("statistics",), reference="mine")
def crest(layer, power: float = 1.0):
    mean_square = layer["channel_square"] / numpy.maximum(layer.tokens, 1)[:, None]
    return mean_square.max(axis=1) ** power


def like_uniform(problem):
    return uniform_experts(problem)


register(Allocation("like_uniform", {"expert": like_uniform}))
"""
TINY = """calibration.tokens=1024 calibration.length=128 suite=pocket_quick
suite.benchmarks=[pocket_boolq]
suite.limit=4 launcher.processes=1 store=store"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the package my_methods, whose module `scores` is a plugin."""
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "__init__.py").touch()
    (tmp_path / "my_methods" / "scores.py").write_text(MODULE)
    return tmp_path


def moe_lab(
    folder: Path, *words: str, package: str = "moe_lab"
) -> subprocess.CompletedProcess[str]:
    return preloaded.run(folder, package, *words, PYTHONPATH=str(folder))


def test_a_study_with_a_criterion_and_an_allocation_of_a_folder(folder: Path) -> None:
    words = [
        "plugins=[my_methods.scores]",
        "criterion=cres*,man",
        "allocation=like_uniform",
        *TINY.split(),
    ]
    done = moe_lab(folder, *words)
    assert done.returncode == 0, done.stderr
    record = read_record(folder / "store", "study") or {}
    pruned = [entry["cell"] for entry in record["cells"] if entry["plan"]]
    assert {(cell["criterion"], cell["granularity"], cell["allocation"]) for cell in pruned} == {
        ("crest", "expert", "like_uniform"),
        ("man", "expert", "like_uniform"),
    }
    tables = list((folder / "store/reports/study").rglob("*.csv"))
    assert sum("crest" in table.read_text() for table in tables) >= 5
    steps = [json.loads(file.read_text()) for file in folder.glob("store/*/*/step.json")]
    scored = [step["settings"]["criterion"] for step in steps if step["kind"] == "scores"]
    assert {one["name"]: bool(one["source"]) for one in scored} == {"crest": True, "man": False}
    assert all(step["settings"]["allocation"]["source"] for step in steps if step["kind"] == "plan")


def test_equal_scores_are_named_when_a_study_ends(folder: Path) -> None:
    """Each time, as the plan is of ids; and of plans without any nothing is said."""
    (folder / "my_methods" / "scores.py").write_text(
        MODULE.replace("return mean_square.max(axis=1) ** power", "return layer.tokens * 0")
    )
    words = [
        "plugins=[my_methods.scores]",
        "criterion=crest,man",
        "suite.benchmarks=[]",
        *TINY.split()[:2],
    ]
    for _ in range(2):
        done = moe_lab(folder, *words, "store=store", "launcher.processes=1")
        [sentence] = [line for line in done.stderr.splitlines() if "equal scores" in line]
        assert done.returncode == 0
        assert "128 in 4 layers" in sentence
        assert "crest" in sentence
        assert "-man-" not in sentence


def test_an_installed_plugin_needs_no_word(folder: Path) -> None:
    about = folder / "my_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[moe_lab.plugins]\nscores = my_methods.scores\n")
    done = moe_lab(
        folder, "criterion=crest", "criterion.parameters.power=2", "dry_run=true", *TINY.split()
    )
    assert done.returncode == 0 and "study: 2 cells" in done.stderr, done.stderr
    wrong = moe_lab(folder, "criterion=crets", "store=store")
    assert wrong.returncode == 2 and "did you mean crest?" in wrong.stderr
    listed = moe_lab(folder, "model=pocket_olmoe", package="moe_lab.inspect")
    assert "crest" in listed.stdout, listed.stderr


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise KeyError('a')", "plugins: broken cannot be imported (KeyError: 'a')"),
        ("value = 1", "plugins: broken registers nothing"),
        (
            MODULE.replace("crest", "man"),
            "criterion man of broken is registered already, by moe_lab.criteria.experts",
        ),
        (MODULE.replace('"like_uniform"', '"uniform"'), "allocation=uniform is registered already"),
    ],
)
def test_wrong_plugins_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, says: str
) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(criteria, "CRITERIA", known := dict(criteria.CRITERIA))
    monkeypatch.setattr(allocation, "ALLOCATIONS", dict(allocation.ALLOCATIONS))
    with pytest.raises(UserError) as error:
        plugins.load(["broken"])
    sys.modules.pop("broken", None)
    assert says in str(error.value) and len(str(error.value).splitlines()) == 1
    assert set(known) >= set(criteria.CRITERIA)


def test_a_criterion_that_needs_a_step_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r"statistic .*did you mean statistics\?"):
        needed_kind("statistic")


ROOT = Path(__file__).parents[1]
RUNNER = "moe_lab.evaluation.sandbox.runner"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules are called like ours and like some that we import, and fail when they
    are."""
    for name in (
        "moe_lab",
        "analysis",
        "moe_lab/study",
        "moe_lab/evaluation",
        "moe_lab/evaluation/sandbox",
    ):
        (tmp_path / name).mkdir()
        for module in ("__init__", "__main__", "worker", "runner", "client"):
            (tmp_path / name / f"{module}.py").write_text(
                "raise SystemExit('a module of the current folder')"
            )
    for name in ("torch", "pandas", "json", "inspect"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current folder')")
    return tmp_path


@pytest.mark.parametrize(
    "variables", [{}, {"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": "packages"}], ids=str
)
def test_what_is_started_is_this_installation(variables: dict[str, str], hostile: Path) -> None:
    """Whatever the current folder holds, and a folder of PYTHONPATH that holds packages called like
    ours."""
    for name in ("moe_lab", "analysis"):
        shutil.copytree(hostile / name, hostile / "packages" / name)
    about: Any = {"cwd": hostile, "env": {**os.environ, **variables}, "stdin": subprocess.DEVNULL}
    for words, says in (
        (["-u", "-m", RUNNER, "limited"], ""),
        (["-m", "analysis", "help"], "unified.table1"),
    ):
        done = subprocess.run(
            [sys.executable, FILE, *words], **about, capture_output=True, text=True
        )
        assert done.returncode == 0 and says in done.stdout and (says or not done.stdout), (
            done.stderr
        )


def test_a_study_of_the_wheel_is_reported_by_the_wheel(hostile: Path, tmp_path: Path) -> None:
    """Installed in an environment of its own; the workers and the report are started in the hostile
    folder."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    options = [
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-w",
        str(environment),
    ]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (wheel,) = environment.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    # but not what their .pth files add
    others = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    words = [
        "-m",
        "criterion=random",
        "suite.benchmarks=[]",
        "study=s",
        "store=store",
        "launcher.processes=1",
    ]
    done = subprocess.run(
        [
            environment / "bin" / "python",
            packages / "moe_lab" / "start.py",
            "-m",
            "moe_lab",
            *words,
        ],
        cwd=hostile,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (hostile / "store/reports/s/report.html").exists()
    assert "a module of the current folder" not in done.stderr
    assert not (packages / "tools").exists(), "what trains the shipped models needs a checkout"
