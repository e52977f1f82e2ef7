"""Kinds of steps, one module for each family: what identifies a step, what it does, and which resources it needs.

A module of this package registers a kind of step by defining a `Kind`; no other entry is needed. The graph, launchers
and estimates read its properties from that object. Modules import torch inside the functions that do the work, since
a study is checked without it.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from pathlib import Path

from moe_lab.json_files import write_json
from moe_lab.study.step import Job, provenance
from moe_lab.study.steps.kind import KINDS, Kind

__all__ = ["KINDS", "Kind", "perform"]

for _module in pkgutil.iter_modules(__path__):
    for _value in vars(importlib.import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_value, Kind) and KINDS.setdefault(_value.name, _value) is not _value:
            raise ValueError(f"two kinds of steps are called {_value.name}")


def perform(job: Job) -> None:
    """Do `job`: write its result and provenance to its scratch folder. Any exception counts as the job's failure."""
    start = time.time()
    if places := job.runtime.get("plugins"):
        from moe_lab import plugins

        plugins.bring(places)
    KINDS[job.kind].work(job)
    merged = {"merged": [Path(folder).name for folder in job.merges]} if job.merges else {}
    write_json(job.output("provenance.json"), {**provenance(start), **merged})
