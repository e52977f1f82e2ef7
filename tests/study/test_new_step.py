"""A kind of step is added by writing one file: a criterion can then need it, a dry run shows it, a study runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from moe_lab.statistics import read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CRITERION = """
from moe_lab.criteria import criterion


@criterion("fewest_negative", needs=("signs",), reference="mine")
def fewest_negative(layer):
    return -layer["negative"]
"""
WORDS = ["criterion=fewest_negative", "plugins=[mine]", "suite.benchmarks=[]", "launcher=inline", "report=false"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package with the file that the documentation shows, and a criterion that needs the step."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "moe_lab", tmp_path / "moe_lab", ignore=ignored)
    for name in ("conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    [example] = re.findall(r"```python\n(.*?OnWeights\):.*?)```", text, re.DOTALL)
    (tmp_path / "moe_lab/study/steps/signs.py").write_text(example)
    (tmp_path / "mine.py").write_text(CRITERION)
    return tmp_path


def moe_lab(checkout: Path, *words: str) -> str:
    command = [sys.executable, "-m", "moe_lab", f"store={checkout / 'store'}", *WORDS, *words]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_kind_of_step_is_added_by_writing_the_file_that_the_documentation_shows(checkout: Path) -> None:
    rows = [re.findall(r"[\w.]+", line) for line in moe_lab(checkout, "dry_run=true").splitlines()]
    assert ["signs", "1", "0", "1"] in [row[:4] for row in rows]
    moe_lab(checkout)
    [file] = checkout.glob("store/signs/*/statistics.safetensors")
    sums = read(file)
    [facts] = checkout.glob("store/model/*/facts.json")
    experts = {int(layer): about["n_experts"] for layer, about in json.loads(facts.read_text())["layers"].items()}
    assert {layer: len(arrays["negative"]) for layer, arrays in sums.items()} == experts
    assert all(numpy.all(arrays["negative"] > 0) for arrays in sums.values())
    assert len(list(checkout.glob("store/plan/*fewest_negative*/plan.json"))) == 1
