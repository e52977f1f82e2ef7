"""Criteria and allocations from outside the repository: of a folder, installed, and wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

from moe_lab import allocation, criteria, plugins
from moe_lab.errors import UserError
from moe_lab.results import read_record

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


register(Allocation("like_uniform", "mine", {"expert": like_uniform}))
"""
TINY = [
    "calibration.tokens=1024",
    "calibration.length=128",
    "suite=pocket_quick",
    "suite.benchmarks=[pocket_boolq]",
    "suite.limit=4",
    "launcher.processes=1",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the package my_methods, whose module `scores` is a plugin."""
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "__init__.py").touch()
    (tmp_path / "my_methods" / "scores.py").write_text(MODULE)
    return tmp_path


def moe_lab(folder: Path, *words: str, package: str = "moe_lab") -> subprocess.CompletedProcess[str]:
    command = preloaded.command("-m", package, *words)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_a_study_with_a_criterion_and_an_allocation_of_a_folder(folder: Path) -> None:
    words = ["plugins=[my_methods.scores]", "criterion=cres*,man", "allocation=like_uniform", *TINY]
    done = moe_lab(folder, *words, "store=store")
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


def test_a_criterion_that_needs_a_step_there_is_not_is_refused(folder: Path) -> None:
    (folder / "my_methods" / "scores.py").write_text(MODULE.replace('needs=("statistics",)', 'needs=("statistic",)'))
    done = moe_lab(folder, "plugins=[my_methods.scores]", "criterion=crest", *TINY, "store=store")
    assert done.returncode == 2 and "did you mean statistics?" in done.stderr, done.stderr


def test_an_installed_plugin_needs_no_word(folder: Path) -> None:
    about = folder / "my_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[moe_lab.plugins]\nscores = my_methods.scores\n")
    done = moe_lab(folder, "criterion=crest", "criterion.parameters.power=2", "dry_run=true", *TINY, "store=store")
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
        (MODULE.replace("crest", "man"), "criterion man of broken is there already, of moe_lab.criteria.experts"),
        (MODULE.replace('"like_uniform"', '"uniform"'), "allocation uniform is there already"),
    ],
)
def test_a_plugin_that_cannot_be_is_one_sentence(
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


def test_what_a_module_says_is_part_of_what_its_scores_are(tmp_path: Path) -> None:
    digests = []
    for text in ("x = 1\ndef f(): pass\n", "x = 2\ndef f(): pass\n"):
        (file := tmp_path / "other.py").write_text(text)
        names: dict[str, object] = {"__name__": "other"}
        exec(compile(text, str(file), "exec"), names)
        digests.append(criteria.source_of(names["f"]))  # type: ignore[arg-type]
    assert digests[0] != digests[1] and "" not in digests
    assert all(not one.source for one in (*criteria.CRITERIA.values(), *allocation.ALLOCATIONS.values()))
