"""Import results that other programs have measured into a store."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab import criteria
from moe_lab.arguments import Parser
from moe_lab.errors import UserError, check_known
from moe_lab.evaluation import foreign
from moe_lab.paths import check_name
from moe_lab.result_files import FIGURE_STEPS, RECORD, SCHEMA, STEPS
from moe_lab.study.runs import create_run
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.foreign import Foreign
from moe_lab.study.store import Store

NONE = ("criterion", "granularity", "calibration", "allocation", "replacement", "recovery", "gate")
"""Axes that are `none` for an unpruned model."""
UNPRUNED = {**dict.fromkeys(NONE, "none"), "protect": None, "ratio": 0.0, "seed": 0}
PRUNED = {"allocation": "uniform", "gate": "model", "seed": 42}
"""Axis in a record -> its default for an imported cell, if it is pruned or not."""


def import_results(
    path: str | Path, store: str | Path = "store", study: str = "imported", **axes: Any
) -> str:
    """Add results of lm-eval, EvalPlus or EvalScope to a study of a store, as one cell. Returns a
    sentence about what was imported.

    path: a file or folder, see `evaluation.foreign.read`. axes: those of the cell, of which the
    model is needed, and for a pruned model criterion and ratio. Files that moe_lab has exported
    have their axes. The axis `source` of the cell is the program. The cell is compared with cells
    of other studies as study=A,B, and its items are paired with theirs by the hashes of documents.

    Raises UserError for files that cannot be read, for unknown axes, and without a model.
    """
    check_name("study", study)
    for axis in axes:
        check_known("import: axis", axis, ["model", *UNPRUNED])
    tasks = foreign.read(Path(path))
    defaults = PRUNED if "criterion" in axes else {}
    cell = {**UNPRUNED, **defaults, **tasks[0].cell, **axes, "source": tasks[0].source}
    if "model" not in cell:
        raise UserError("import: the model is unknown, expected model=NAME as in your studies")
    try:
        cell |= {"ratio": float(cell["ratio"]), "seed": int(cell["seed"])}
    except ValueError:
        raise UserError(
            f"import: ratio={cell['ratio']} seed={cell['seed']}: expected numbers"
        ) from None
    if known := criteria.CRITERIA.get(cell["criterion"]):
        cell["granularity"] = known.granularity
    steps = {task.name: Foreign.of(task) for task in tasks}
    entry = {
        "cell": cell,
        "protocol": tasks[0].source,
        **dict.fromkeys(STEPS),
        "evaluate": {name: step.folder for name, step in steps.items()},
        "errors": {},
    }
    record = {
        "schema": SCHEMA,
        "study": study,
        "created": time.time(),
        "moe_lab": moe_lab.__version__,
        "replaces": [],  # earlier imports stay
        "config": {"study": study},
        "cells": [entry],
        **{figure: [] for figure in FIGURE_STEPS},
    }
    target = Store(store).create()
    with target.errors_as_sentences(), create_run(target, study, list(steps.values())) as run:
        for step in steps.values():
            with target.claim(step) as scratch:
                if scratch:  # None if the same results were imported before
                    step.work(Files.of(step, target, scratch))
        target.write(run.folder / RECORD, record)
    names = [result["benchmark"] for task in tasks for result in task.results]
    return (
        f"{path}: results of {tasks[0].source} on {', '.join(names)} are in study={study} of "
        f"store={target.root}"
    )


def main(arguments: Sequence[str]) -> int:
    """`moe-lab import PATH model=NAME [AXIS=VALUE ...]`. Returns the exit code, 2 after an error
    that is printed as a sentence."""
    parser = Parser(prog="moe-lab import", description=import_results.__doc__)
    parser.add_argument("path", help="a file of lm-eval, EvalPlus or EvalScope, or a folder")
    for name in ("store", "study", "model", *UNPRUNED):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    try:
        print(import_results(**vars(parser.read(arguments))))
    except UserError as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2
    return 0
