"""A copy of the code as it is now, for jobs that start when it has been edited."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import moe_lab
from moe_lab.study.job import NOTED, code_state
from moe_lab.study.store import write_json

COPIED = ("moe_lab", "analysis", "conf")
START = "start.py"
STARTER = '''"""Runs `-m MODULE ARGUMENTS` with the copy of the code in this folder; the current folder has no say."""

import runpy
import sys

while sys.argv[1] != "-m":
    del sys.argv[1]
module = sys.argv[2]
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
'''


def take(folder: Path) -> None:
    """Copy the packages to `folder`, noting which code they are."""
    root = Path(moe_lab.__file__).parents[1]
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    write_json(folder / "moe_lab" / NOTED, code_state())
    (folder / START).write_text(STARTER)


def started(folder: Path, python: str) -> str:
    """The shell command that stands for `python` and runs the copy in `folder`."""
    return f"{python} {shlex.quote(str(folder.absolute() / START))}"


def settings(folder: Path) -> Sequence[str]:
    """Shell lines for what the job starts in turn."""
    return [f"export PYTHONPATH={shlex.quote(str(folder.absolute()))} PYTHONSAFEPATH=1"]
