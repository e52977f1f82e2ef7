"""What a study leaves when its steps have ended: the record of the run, its errors, the report, and
runs of a tracker.

The record, record.json, is what the analysis reads: cells and the folders of their results. It is
never changed, and names the records that its run found when it began, which do not count any more.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab import criteria, plugins, progress
from moe_lab.config import AllocationConfig, Config
from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Number, parse_sealed, read_json, write_text
from moe_lab.results import DIGITS, KEY, RECORD, SCHEMA, current_records, joined, read_record
from moe_lab.start import command
from moe_lab.study.graph import CellSteps, Graph, uncollected
from moe_lab.study.provenance import NO_ROOM
from moe_lab.study.runs import ENDED, Run, runs
from moe_lab.study.schedule import Schedule, inform, print_notices, show_regularly
from moe_lab.study.step import Step, unmerged
from moe_lab.study.steps.files import Models
from moe_lab.study.steps.plans import TIES
from moe_lab.study.store import Store

PREPARATION = ("model", "statistics", "scores", "plan", "finetune", "export")
"""Steps of a cell that are not results themselves, so that their errors are not listed in the
record."""
MADE_FROM = ".made_from"
"""File in the folder of a report with the `fingerprint` of the study that it shows."""
SHOWN = 3
"""Plans that are named in a sentence, at most."""


@dataclass(frozen=True)
class Study:
    """A study to run: settings, graph of steps, and store."""

    config: Config
    graph: Graph
    store: Store
    add: bool = False
    """Whether its cells are added to the recorded cells of the study, instead of replacing them."""
    models: Models | None = None
    """The models that earlier studies of this process have loaded."""

    def in_store(self, elsewhere: Set[str] = frozenset()) -> tuple[list[Step], set[str]]:
        """The steps of the study, and the ids of those that are finished; says how many.
        `elsewhere`: ids of those that will be taken over from other stores."""
        done = self.store.done_of(self.graph.steps) | elsewhere
        steps = unmerged(self.graph.steps, done)
        done &= {step.id for step in steps}
        stores = [self.config.store]
        if elsewhere:
            stores += self.config.also
        cells = len(self.graph.cells)
        inform(
            f"{self.config.study}: {cells} cells, {len(steps)} steps, {len(done)} of them in "
            f"{', '.join(stores)}"
        )
        return steps, done


def finish(study: Study, schedule: Schedule, run: Run) -> int:
    """Write the record and the report when the steps of `schedule` have ended. Returns the exit
    code, which is 0 if all is done, 1 if something failed or is missing, and 2 if all failures are
    mistakes of the user."""
    # the last job on a cluster is another process, which has not loaded them
    plugins.load(study.config.plugins)
    store = study.store
    name = study.config.study
    store.check_exists()
    errors = {step: error.document for step, error in schedule.failed.items()}
    document = record_of(study, run, errors)
    if not schedule.total and _is_recorded(store, name, run, document):
        run.remove()
    else:
        store.make_folder(run.folder)  # the store may have been created again meanwhile
        store.write(run.folder / RECORD, document)
    print_notices(store)
    _print_errors(study, schedule)
    _print_ties(study, schedule)
    _print_exports(study, schedule)
    full = any(error["message"] == NO_ROOM for error in errors.values())
    complete = _report(study) if study.config.report and not full else True
    if study.config.tracker.name != "none" and not full:
        from moe_lab.study import tracker

        inform(tracker.log(study.config.tracker, store, read(store, name)))
    if complete:
        _write_end(store, name)
    if errors:
        return 2 if all(error.get("user") for error in errors.values()) else 1
    return 0 if complete else 1


def _write_end(store: Store, study: str) -> None:
    """Note, for readers, that nothing is left to do for the last record of a study, if its run has
    jobs."""
    recorded = [run for run in runs(store, study) if (run.folder / RECORD).exists()]
    if recorded and recorded[-1].jobs:
        store.write(recorded[-1].folder / ENDED, {"time": time.time()})


def _is_recorded(store: Store, study: str, run: Run, document: dict[str, Any]) -> bool:
    """Whether a study would be the same without the record of a run, but for its time and
    settings."""

    def content(records: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        record = joined(records) if len(records) > 1 else next(iter(records.values()))
        return {**record, **dict.fromkeys(("created", "config", "replaces", "run"))}

    try:
        before = current_records(store.root, study)
    except Damaged:
        return False
    if not before:
        return False
    after = {name: record for name, record in before.items() if name not in document["replaces"]}
    after[run.folder.name] = document
    return content(before) == content(after)


def _print_errors(study: Study, schedule: Schedule) -> None:
    """Print errors, and what does not fit into the record."""
    store = study.store
    name = study.config.study
    several = " " in fingerprint(store, name)  # records, of which joining takes long
    if several and (differing := read(store, name).get("differing")):
        inform(
            f"moe_lab: study={name}: another run of it has ended meanwhile; {len(differing)} of "
            "its cells have the names of cells of this run and other settings: those of the later "
            "run count; give one of the runs another study="
        )
    messages = Counter(str(error) for error in schedule.failed.values())
    for message, count in messages.items():
        inform(f"moe_lab: {message}{f' ({count} steps)' if count > 1 else ''}", style="red")
    if schedule.skipped:
        inform(f"moe_lab: {len(schedule.skipped)} steps were not run because they need those")
    if any(not error.document.get("user") for error in schedule.failed.values()):
        inform(f"moe_lab: traces are in {store.root / 'logs'} and {store.root / 'failed'}")


def _print_ties(study: Study, schedule: Schedule) -> None:
    """Print in which plans ids decided between equal scores."""
    plans = {cell.plan.id: cell.plan for cell in study.graph.cells if cell.plan}
    tied = []
    for name, step in plans.items():
        if name not in schedule.finished:
            continue
        with suppress(FileNotFoundError, Damaged):  # a plan without ties has no such file
            content = study.store.content(step.folder, TIES)
            numbers = parse_sealed(content, {str: int}, step.folder).values()
            tied.append(f"{sum(numbers)} in {len(numbers)} layers of {step.label()}")
    if not tied:
        return
    listed = ", ".join(tied[:SHOWN])
    if len(tied) > SHOWN:
        listed += f", and {len(tied) - SHOWN} more plans"
    inform(
        "moe_lab: experts or channels have equal scores at the cut, where the lowest ids are "
        f"dropped: {listed}"
    )


def _print_exports(study: Study, schedule: Schedule) -> None:
    """Print where the exported checkpoints are, and the results of verifying them."""
    exports = {cell.export.id: cell.export for cell in study.graph.cells if cell.export}
    for name, step in exports.items():
        if name not in schedule.finished:
            continue
        folder = study.store.path(step)
        verified = ""
        with suppress(FileNotFoundError, Damaged):  # it was not verified
            difference = read_json(folder / "verified.json", {"difference": Number})["difference"]
            how = f"up to {difference:.1e} of the largest number" if difference else "bit for bit"
            verified = f" (verified: its layers equal those of the masked model, {how})"
        inform(f"export: {(folder / 'checkpoint').absolute()}{verified}")


def _report(study: Study) -> bool:
    """Make tables, figures and the page, in a process of the analysis package, unless they are up
    to date. Two runs of one study write to the same folder, so only one at a time makes its report.
    Returns whether it is complete."""
    store = study.store
    name = study.config.study
    page = store.root / "reports" / name / "report.html"
    mark = page.with_name(MADE_FROM)
    with store.claims.wait_for(f"report-{name}"):
        made_from = fingerprint(store, name)
        if not (page.is_file() and mark.is_file() and mark.read_text() == made_from):
            if not _make_report(study, page):
                return False
            write_text(mark, made_from, store.file_mode)
    # nothing was evaluated, or a report that only its owner may read
    with suppress(FileNotFoundError, PermissionError):
        inform(page.with_name("summary.txt").read_text(encoding="utf-8").rstrip())
    inform(f"report: {page.absolute()}")
    return True


def _make_report(study: Study, page: Path) -> bool:
    """Make the report; whether it is complete."""
    store = study.store
    name = study.config.study
    folder = page.parent
    report = command("analysis", "report", f"store={store.root}", f"study={name}", f"out={folder}")
    progress_file = folder / progress.NAME
    with show_regularly(
        lambda: f"report: {progress.read(progress_file)[1] or 'reading the results'}"
    ):
        environment = {**os.environ, progress.FILE: str(progress_file)}
        done = subprocess.run(
            report, capture_output=True, text=True, env=environment, umask=store.umask
        )
    progress_file.unlink(missing_ok=True)
    if not done.stdout.strip():  # a report that was written prints the path of its page
        log = store.root / "logs" / f"report-{name}.log"
        with suppress(OSError):  # a full disk
            store.make_folder(log.parent)
            write_text(log, done.stderr, store.file_mode)
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        inform(
            f"moe_lab: the report failed: {reason.removeprefix('analysis: ')} (all that it "
            f"printed is in {log})"
        )
        return False
    if failed := sorted(log.stem for log in (folder / "failed").glob("*.log")):
        inform(f"report: {page.absolute()}")
        inform(
            f"moe_lab: the report lacks {', '.join(failed)}: traces are in {folder / 'failed'}",
            style="red",
        )
    return not failed


def fingerprint(store: Store, study: str) -> str:
    """Names of the runs of a study that were recorded: a report is up to date while they are the
    same, as records are never changed."""
    return " ".join(run.folder.name for run in runs(store, study) if (run.folder / RECORD).exists())


def outdate_reports(store: Store) -> None:
    """Mark all reports as outdated, because a step that was set aside may be part of them."""
    for mark in (store.root / "reports").glob(f"*/{MADE_FROM}"):
        mark.unlink(missing_ok=True)


@uncollected()
def record_of(study: Study, run: Run, failed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The record of a run: every cell with the folders of its steps, and with error messages of
    failed steps.

    It replaces the records that existed when the run began, so that runs at the same time all
    count. With `study.add` it replaces none: each job of a multirun knows only its own
    cells."""
    store = study.store
    config = study.config
    graph = study.graph

    names: dict[str, str | None] = {**store.packs.steps()}

    def name_of(step: Step | None) -> str | None:
        if step is None:
            return None
        start = step.id[:DIGITS]
        if start not in names:
            names[start] = store.name(step)
        return names[start]

    model_names = _models(graph)
    cells = []
    for steps in graph.cells:
        cell = steps.cell
        by_field = steps.by_field()
        model = model_names[cell.model.name, cell.protocol.name]
        cells.append(
            {
                "cell": {"model": model, **_names(steps)},
                "protocol": cell.protocol.name,
                **{field: name_of(step) for field, step in by_field.items()},
                "evaluate": {name: name_of(step) for name, step in steps.evaluate.items()},
                "errors": _errors(steps, failed) if failed else {},
            }
        )
    figures: dict[str, list[dict[str, Any]]] = {}
    for figure, figure_steps in graph.figures.items():
        figures[figure] = []
        for key, step in figure_steps.items():
            row = dict(zip(KEY, key, strict=True))
            figures[figure].append({**row, "step": name_of(step)})
    return {
        "schema": SCHEMA,
        "study": config.study,
        "created": time.time(),
        "moe_lab": moe_lab.__version__,
        "replaces": [] if study.add else run.replaces,
        "config": asdict(config),
        "cells": cells,
        **figures,
    }


def _errors(steps: CellSteps, failed: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Error messages of the results of a cell."""
    errors = {}
    for name, step in {**steps.evaluate, **steps.by_field()}.items():
        if name not in PREPARATION and step and step.id in failed:
            errors[name] = str(failed[step.id]["message"])
    return errors


def read(store: Store, study: str) -> dict[str, Any]:
    """The record of a study, {} without any; see `results.read_record`. Raises UserError for a
    damaged record."""
    try:
        return read_record(store.root, study) or {}
    except Damaged as error:
        raise UserError(f"study={study}: {error}: remove it, and start the study again") from None


def _models(graph: Graph) -> dict[tuple[str, str], str]:
    """(model, protocol) -> name of the model in the record, with the protocol in it for each but
    the model's first, as scores of different protocols are not comparable."""
    first: dict[str, str] = {}
    named = {}
    for cell in graph.cells:
        model = cell.cell.model.name
        protocol = cell.cell.protocol.name
        is_first = first.setdefault(model, protocol) == protocol
        named[model, protocol] = model if is_first else f"{model} ({protocol})"
    return named


def _names(steps: CellSteps) -> dict[str, Any]:
    cell = steps.cell
    chosen = criteria.CRITERIA.get(cell.criterion.name)
    return {
        "criterion": _with_parameters(cell.criterion.name, cell.criterion.parameters),
        "granularity": chosen.granularity if chosen else "none",
        "calibration": cell.calibration.name,
        **allocation_columns(cell.allocation),
        "recovery": cell.recovery.name,
        "ratio": cell.ratio,
        "gate": cell.gate,
        "seed": cell.seed,
    }


def _with_parameters(name: str, parameters: Mapping[str, Any]) -> str:
    """Name of a choice in the record: its name, followed by its parameters if it has any."""
    values = ",".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{name}({values})" if values else name


def allocation_columns(allocation: AllocationConfig) -> dict[str, str | None]:
    """An allocation in the record: its label, or its name with parameters and settings that are not
    default; what replaces dropped experts; what is protected, with an unusual share of layers."""
    usual = AllocationConfig()
    settings = ("multiple_of", "by", "search", "path")
    unusual = {
        name: getattr(allocation, name)
        for name in settings
        if getattr(allocation, name) != getattr(usual, name)
    }
    protect: str | None = allocation.protect
    if protect and allocation.protect_layers != usual.protect_layers:
        protect = f"{protect}, protect_layers={allocation.protect_layers:g}"
    return {
        "allocation": allocation.label
        or _with_parameters(allocation.name, {**unusual, **allocation.parameters}),
        "replacement": allocation.replacement,
        "protect": protect,
    }
