"""What a study leaves for the analysis: its cells, and in which folders their results lie."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

import moe_lab
from moe_lab import criteria
from moe_lab.config import AllocationConfig, Config
from moe_lab.study.graph import CellSteps, Graph
from moe_lab.study.identity import Step, digest
from moe_lab.study.store import Store, write_json

SCHEMA = 1


def _path(store: Store, study: str) -> Path:
    return store.root / "studies" / f"{study}.json"


def write(store: Store, config: Config, graph: Graph, failed: Mapping[str, Mapping[str, Any]], *, add: bool) -> None:
    """Write studies/<study>.json: every cell with the folders of its steps; failed ones with their sentence.

    `add` keeps the cells that are there already, for the jobs of a multirun, each of which knows only its own.
    """

    def place(step: Step | None) -> str | None:
        return str(store.path(step).relative_to(store.root)) if step and store.path(step).exists() else None

    def errors(cell: CellSteps) -> dict[str, str]:
        steps = {**cell.evaluate, "cost": cell.cost, "profile": cell.profile, "timing": cell.timing}
        return {name: str(failed[step.id]["message"]) for name, step in steps.items() if step and step.id in failed}

    called = _models(graph)
    cells = [
        {
            "cell": {"model": called[cell.cell.model.name, cell.cell.protocol.name], **_names(cell)},
            "protocol": cell.cell.protocol.name,
            "model": place(cell.model),
            "statistics": place(cell.statistics),
            "scores": place(cell.scores),
            "plan": place(cell.plan),
            "finetune": place(cell.finetune),
            "export": place(cell.export),
            "cost": place(cell.cost),
            "profile": place(cell.profile),
            "timing": place(cell.timing),
            "evaluate": {name: place(step) for name, step in cell.evaluate.items()},
            "errors": errors(cell),
        }
        for cell in graph.cells
    ]
    document = {
        "schema": SCHEMA,
        "study": config.study,
        "created": time.time(),
        "moe_lab": moe_lab.__version__,
        "config": asdict(config),
        "cells": cells,
        "families": {name: place(step) for name, step in graph.families.items()},
        "damages": {name: place(step) for name, step in graph.damages.items()},
        "convergences": {name: place(step) for name, step in graph.convergences.items()},
        "channel_convergences": {name: place(step) for name, step in graph.channel_convergences.items()},
    }
    path = _path(store, config.study)
    path.parent.mkdir(exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if add and path.exists():
            document = _joined(read(store, config.study), document)
        write_json(path, document)


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new document with the cells, families, damages and convergences only the old one has."""
    named = [cell["cell"] for cell in new["cells"]]
    return {
        **new,
        "cells": [cell for cell in old["cells"] if cell["cell"] not in named] + new["cells"],
        "families": {**old["families"], **new["families"]},
        "damages": {**old["damages"], **new["damages"]},
        **{name: {**old.get(name, {}), **new[name]} for name in ("convergences", "channel_convergences")},
    }


def _models(graph: Graph) -> dict[tuple[str, str], str]:
    """Model and protocol -> the word for the model: scores by two protocols do not compare, so that a model asked by
    another protocol than its first is one of its own."""
    found: dict[str, dict[str, str]] = {}
    for cell in graph.cells:
        words = found.setdefault(cell.cell.model.name, {})
        protocol = cell.cell.protocol.name
        words.setdefault(protocol, f"{cell.cell.model.name} ({protocol})" if words else cell.cell.model.name)
    return {(model, protocol): word for model, words in found.items() for protocol, word in words.items()}


def _names(steps: CellSteps) -> dict[str, Any]:
    cell = steps.cell
    chosen = criteria.CRITERIA.get(cell.criterion.name)
    return {
        "criterion": _called(cell.criterion.name, cell.criterion.parameters),
        "granularity": chosen.granularity if chosen else "none",
        "calibration": cell.calibration.name,
        "allocation": cell.allocation.label or _called(cell.allocation.name, _differing(cell.allocation)),
        "recovery": cell.recovery.name,
        "ratio": cell.ratio,
        "gate": cell.gate,
        "seed": cell.seed,
    }


def _called(name: str, parameters: Mapping[str, Any]) -> str:
    """The word for a choice: its name, and its parameters where it has any."""
    values = ",".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{name}({values})" if values else name


def _differing(allocation: AllocationConfig) -> dict[str, Any]:
    """What tells an allocation from another of its name."""
    usual = AllocationConfig()
    words = ("multiple_of", "ratio_basis", "by", "search", "path")
    own = {word: getattr(allocation, word) for word in words if getattr(allocation, word) != getattr(usual, word)}
    return {**own, **allocation.parameters}


def read(store: Store, study: str) -> dict[str, Any]:
    """The study as written."""
    document: dict[str, Any] = json.loads(_path(store, study).read_text())
    return document


def report_folder(store: Store, study: str) -> Path:
    """Where the report of a study is."""
    return store.root / "reports" / study


def _fingerprint(store: Store, study: str) -> str:
    return digest({key: value for key, value in read(store, study).items() if key not in ("created", "config")})


def report_is_current(store: Store, study: str) -> bool:
    """Whether the report there is shows exactly these cells, made by this version."""
    folder = report_folder(store, study)
    mark = folder / ".made_from"
    return (folder / "report.html").exists() and mark.exists() and mark.read_text() == _fingerprint(store, study)


def outdate_reports(store: Store) -> None:
    """Forget what reports were made from: a step that was set aside may be missing in them."""
    for mark in (store.root / "reports").glob("*/.made_from"):
        mark.unlink(missing_ok=True)


def mark_report(store: Store, study: str) -> None:
    """Remember what the report was made from."""
    (report_folder(store, study) / ".made_from").write_text(_fingerprint(store, study))
