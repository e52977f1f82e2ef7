"""The record of a run, record.json, which the analysis reads: its cells and the folders of their results.

A record is never changed. It names the records that its run found when it began, which do not count any more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab import criteria
from moe_lab.allocation.protection import SUPER
from moe_lab.config import AllocationConfig, Config
from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, write_json
from moe_lab.results import KEY, RECORD, SCHEMA, read_record
from moe_lab.study.graph import CellSteps, Graph
from moe_lab.study.runs import Run
from moe_lab.study.step import Step
from moe_lab.study.store import Store

PREPARATION = ("model", "statistics", "scores", "plan", "finetune", "export")
"""Steps of a cell that are not results themselves, so that their errors are not listed in the record."""


@dataclass(frozen=True)
class Study:
    """A study to run: settings, graph of steps, and store."""

    config: Config
    graph: Graph
    store: Store
    add: bool = False
    """Whether its cells are added to the recorded cells of the study, instead of replacing them."""


def write(study: Study, run: Run, failed: Mapping[str, Mapping[str, Any]]) -> None:
    """Write record.json of the run: every cell with the folders of its steps, and with error messages of failed steps.

    It replaces the records that the run found when it began, so runs at the same time count beside each other. With
    `study.add` it replaces none: each job of a multirun knows only its own cells.
    """
    store, config, graph = study.store, study.config, study.graph

    def place(step: Step | None) -> str | None:
        return str(store.path(step).relative_to(store.root)) if step and store.path(step).exists() else None

    def errors(cell: CellSteps) -> dict[str, str]:
        steps = {name: step for name, step in {**cell.evaluate, **cell.named()}.items() if name not in PREPARATION}
        return {name: str(failed[step.id]["message"]) for name, step in steps.items() if step and step.id in failed}

    called = _models(graph)
    cells = [
        {
            "cell": {"model": called[cell.cell.model.name, cell.cell.protocol.name], **_names(cell)},
            "protocol": cell.cell.protocol.name,
            **{name: place(step) for name, step in cell.named().items()},
            "evaluate": {name: place(step) for name, step in cell.evaluate.items()},
            "errors": errors(cell),
        }
        for cell in graph.cells
    ]
    figures = {
        figure: [{**dict(zip(KEY, key, strict=True)), "step": place(step)} for key, step in steps.items()]
        for figure, steps in graph.figures().items()
    }
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "study": config.study,
        "created": time.time(),
        "moe_lab": moe_lab.__version__,
        "replaces": [] if study.add else run.replaces,
        "config": asdict(config),
        "cells": cells,
        **figures,
    }
    run.folder.mkdir(parents=True, exist_ok=True)  # the store may have been made anew meanwhile
    write_json(run.folder / RECORD, document)


def read(store: Store, study: str) -> dict[str, Any]:
    """What a study that was recorded is; see `results.read_record`. Raises UserError for a damaged record."""
    try:
        return read_record(store.root, study) or {}
    except Damaged as error:
        raise UserError(f"study={study}: {error}: remove it, and start the study again") from None


def _models(graph: Graph) -> dict[tuple[str, str], str]:
    """(model, protocol) -> name of the model in the record.

    Scores of different protocols are not comparable. So for each protocol but its first, a model is recorded as a model
    of its own, with the protocol in its name.
    """
    first: dict[str, str] = {}
    named = {}
    for cell in graph.cells:
        model, protocol = cell.cell.model.name, cell.cell.protocol.name
        is_first = first.setdefault(model, protocol) == protocol
        named[model, protocol] = model if is_first else f"{model} ({protocol})"
    return named


def _names(steps: CellSteps) -> dict[str, Any]:
    cell = steps.cell
    chosen = criteria.CRITERIA.get(cell.criterion.name)
    return {
        "criterion": _called(cell.criterion.name, cell.criterion.parameters),
        "granularity": chosen.granularity if chosen else "none",
        "calibration": cell.calibration.name,
        **allocation_columns(cell.allocation),
        "recovery": cell.recovery.name,
        "ratio": cell.ratio,
        "gate": cell.gate,
        "seed": cell.seed,
    }


def _called(name: str, parameters: Mapping[str, Any]) -> str:
    """Name of a choice in the record: its name, followed by its parameters if it has any."""
    values = ",".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{name}({values})" if values else name


def allocation_columns(allocation: AllocationConfig) -> dict[str, str | None]:
    """An allocation in the record: its label, or its name with parameters and settings that are not default; what
    replaces dropped experts; what is protected, by the name of a file or, for super experts, with an unusual share of
    layers."""
    usual = AllocationConfig()
    words = ("multiple_of", "ratio_basis", "by", "search", "path")
    unusual = {word: getattr(allocation, word) for word in words if getattr(allocation, word) != getattr(usual, word)}
    protect = Path(allocation.protect).name if allocation.protect else None
    if allocation.protect == SUPER and allocation.protect_layers != usual.protect_layers:
        protect = f"{SUPER}, protect_layers={allocation.protect_layers:g}"
    return {
        "allocation": allocation.label or _called(allocation.name, {**unusual, **allocation.parameters}),
        "replacement": allocation.replacement,
        "protect": protect,
    }
