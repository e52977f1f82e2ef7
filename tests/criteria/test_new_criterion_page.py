"""docs/new_criterion.md works as it is written: its blocks are put where it says, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import preloaded
import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"`((?:moe_lab|conf|tests)/[\w/.]+)`[^`]*?:\n\n```\w+\n(.*?)```", re.DOTALL)
BELOW = '"""Criterion -> its formula on the tokens one expert served. Scores of experts that served none are 0."""\n'


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository after somebody followed the page."""
    copied = tmp_path_factory.mktemp("copy")
    for name in ("moe_lab", "analysis", "conf", "docs", "hydra_plugins", "tests"):
        shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copied)
    blocks = BLOCK.findall((ROOT / "docs" / "new_criterion.md").read_text(encoding="utf-8"))
    assert [file for file, _ in blocks] == [
        "moe_lab/criteria/peak.py",
        "conf/criterion/peak_half.yaml",
        "tests/criteria/test_criteria.py",
    ]
    for file, text in blocks:
        place = copied / file
        before = place.read_text(encoding="utf-8") if place.exists() else BELOW
        place.write_text(before.replace(BELOW, BELOW + text if place.exists() else text), encoding="utf-8")
    return copied


def started(copy: Path, *words: str) -> str:
    """What a command prints that ends well in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = preloaded.command("-m", *words)
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_tests_hold_the_new_criterion(copy: Path) -> None:
    wanted = "peak or (alone and olmoe) or golden_values or criterion_file or criterion/"
    files = ("tests/criteria/test_criteria.py", "tests/test_conf.py")
    printed = started(copy, "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", wanted)
    assert "passed" in printed and "failed" not in printed


def test_it_can_be_chosen_with_its_parameters(copy: Path) -> None:
    words = ("dry_run=true", f"store={copy / 'store'}", "suite=pocket_quick", "suite.benchmarks=[pocket_boolq]")
    assert "study: 5 cells" in started(copy, "moe_lab", "criterion=peak*,man,reap", *words)
    assert "study: 2 cells" in started(copy, "moe_lab", "criterion=peak", "criterion.parameters.power=2", *words)
