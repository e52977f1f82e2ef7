"""Kinds of steps: each is a class in a module of this package, and no other entry is needed.

Modules import torch inside the functions that do the work, since a study is checked without it.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from pathlib import Path

from moe_lab import plugins
from moe_lab.json_files import write_json
from moe_lab.study.step import KINDS, Step, provenance
from moe_lab.study.steps.files import Files

__all__ = ["KINDS", "perform"]

for _module in pkgutil.iter_modules(__path__):
    for _value in vars(importlib.import_module(f"{__name__}.{_module.name}")).values():
        is_kind = isinstance(_value, type) and issubclass(_value, Step) and vars(_value).get("kind")
        if is_kind and KINDS.setdefault(_value.kind, _value) is not _value:
            raise ValueError(f"two kinds of steps are called {_value.kind}")


def perform(step: Step, files: Files) -> None:
    """Do `step`: write its result and provenance. Any exception counts as its failure."""
    start = time.time()
    plugins.bring(step.plugins)
    step.work(files)
    merged = {"merged": [Path(share.folder).name for share in step.merges]} if step.merges else {}
    about = {"units": step.units(), "pace": step.pace()}
    write_json(files.out / "provenance.json", {**provenance(start), **about, **merged})
