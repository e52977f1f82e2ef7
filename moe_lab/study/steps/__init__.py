"""Kinds of steps. Every subclass of `Step` in a module of this package is registered in KINDS.

Modules import torch inside the functions that do the work, since a study is checked without it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import pkgutil
import sys
import time
from base64 import b64decode
from contextlib import suppress
from pathlib import Path

from moe_lab import plugins, progress
from moe_lab.json_files import Document, write_json
from moe_lab.study.provenance import error_document, provenance
from moe_lab.study.step import KINDS, Step
from moe_lab.study.steps.files import Files

__all__ = ["KINDS", "perform"]

for _module in pkgutil.iter_modules(__path__):
    for _value in vars(importlib.import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_value, type) and issubclass(_value, Step):
            for _kind in filter(None, getattr(_value, "kinds", [_value.kind])):
                if KINDS.setdefault(_kind, _value) is not _value:
                    raise ValueError(f"two kinds of steps are called {_kind}")


def perform(step: Step, files: Files) -> None:
    """Do the work of `step`, and write its result and provenance.json."""
    start = time.time()
    plugins.import_modules_at(step.plugins)
    # the work, and programs that it starts, report progress to this file
    os.environ[progress.FILE] = str(files.partial / progress.NAME)
    files.models.experts = None
    step.work(files)
    resources = step.resources()
    document = provenance(start)
    document["experts"] = files.models.experts
    # the time of later steps is estimated from these two entries
    document["units"] = resources.units
    document["pace"] = resources.rate_key
    if step.merged_steps:
        document["merged"] = [Path(merged.folder).name for merged in step.merged_steps]
    write_json(files.out / "provenance.json", document)


def perform_pickled(pickled_step: str) -> Document:
    """Do a step in this worker process. `pickled_step`: the pickled pair (step, `Files`), in
    base64. Returns the `error_document` if the step failed, else {}."""
    step, files = pickle.loads(b64decode(pickled_step))
    with suppress(OSError):
        # only the last folder is created: if the store was deleted, this fails, and there is no log
        files.log.parent.mkdir(exist_ok=True)
        with files.log.open("a") as log:
            # stdout (1) and stderr (2), also of child processes
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    error: Document = {}
    try:
        perform(step, files)
    except Exception as raised:  # noqa: BLE001 - any error fails this step alone, and is reported
        error = error_document(raised)
    with suppress(OSError):  # the disk may be full
        if error:
            # the trace is "" for a UserError
            print(error["trace"] or error["message"], file=sys.stderr)
        sys.stderr.flush()
        if not files.log.stat().st_size:
            files.log.unlink()
    return error
