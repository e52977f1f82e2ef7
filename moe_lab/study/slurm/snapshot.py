"""A copy of the code as it is now, for jobs that start when it has been edited."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

import moe_lab
from moe_lab import start
from moe_lab.errors import masked
from moe_lab.json_files import write_json
from moe_lab.study.job import NOTED, code_state

COPIED = ("moe_lab", "analysis", "conf")


def take(folder: Path) -> None:
    """Copy the packages to `folder`, noting which code they are."""
    root = Path(moe_lab.__file__).parents[1]
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.rglob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if (shown := masked(content)) != content:  # jobs are handed their settings, secrets in the environment
            file.write_text(yaml.safe_dump(shown), encoding="utf-8")
    write_json(folder / "moe_lab" / NOTED, code_state())


def starter(folder: Path) -> Path:
    """The file of the copy in `folder` that starts its modules, and in turn whatever they start."""
    return folder.absolute() / "moe_lab" / Path(start.FILE).name
