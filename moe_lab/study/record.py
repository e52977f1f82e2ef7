"""Finish a run: write its record, print errors, make the report, and log to a tracker.

The analysis reads the record, record.json: cells and the folders of their results. A record is
never changed; it names the records that existed when its run began, which it replaces.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import moe_lab
from moe_lab import criteria, plugins, progress
from moe_lab.config import AllocationConfig, Config
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.json_files import Damaged, Document, Number, parse_sealed, read_json, write_text
from moe_lab.result_files import (
    RECORD,
    SCHEMA,
    current_records,
    read_record,
)
from moe_lab.start import command
from moe_lab.study import UNREPORTED
from moe_lab.study.graph import CellSteps, Graph, garbage_collection_off
from moe_lab.study.provenance import DISK_FULL_MESSAGE
from moe_lab.study.runs import ENDED, Run, runs
from moe_lab.study.schedule import Schedule, inform, print_notices, show_regularly
from moe_lab.study.step import Step, unmerged
from moe_lab.study.steps.plans import TIES
from moe_lab.study.store import Store

PREPARATION = ("model", "statistics", "scores", "plan", "finetune", "export")
"""Fields of `CellSteps` whose steps only prepare the results of a cell."""
FINGERPRINT_FILE = ".made_from"
"""File in the folder of a report with the names of the runs whose records it shows."""
LISTED_PLANS = 3
"""Maximum number of plans that a sentence names."""


@dataclass(frozen=True)
class Study:
    """A study to run."""

    config: Config
    graph: Graph
    store: Store
    add: bool = False
    """Whether its cells are added to the recorded cells of the study, instead of replacing them."""
    report_later: bool = False
    """Whether `finish` notes the study in UNREPORTED instead of making its report."""

    def steps_and_finished_ids(
        self, ids_elsewhere: Set[str] = frozenset()
    ) -> tuple[list[Step], set[str]]:
        """(steps of the study, ids of the finished steps). Prints how many steps are in each. Steps
        whose results a finished step has merged are left out of both. `ids_elsewhere`: ids of steps
        that are finished in other stores and will be copied."""
        done = self.store.finished_ids(self.graph.steps) | ids_elsewhere
        steps = unmerged(self.graph.steps, done)
        done &= {step.id for step in steps}
        stores = [self.config.store]
        if ids_elsewhere:
            stores += self.config.also
        cell_count = len(self.graph.cells)
        inform(
            f"{self.config.study}: {cell_count} cells, {len(steps)} steps, {len(done)} of them in "
            f"{', '.join(stores)}"
        )
        return steps, done


def finish(study: Study, schedule: Schedule, run: Run) -> int:
    """Finish a run after its steps have ended: write the record, print errors, make the report and
    log to the tracker.

    Returns the exit code. 0: no step failed, and the report is complete. 2: steps failed, and every
    error can be understood from its message, without a trace. 1: other steps failed, or the report
    is incomplete."""
    # the job that finishes a run on a cluster is a new process, in which no plugins are loaded
    plugins.load(study.config.plugins)
    store = study.store
    name = study.config.study
    store.check_exists()
    errors = {step_id: error.document for step_id, error in schedule.failed.items()}
    document = record_of(study, run, errors)
    if not schedule.total and _is_recorded(store, name, document):
        run.remove()
    else:
        store.make_folder(run.folder)  # the store may have been created again meanwhile
        store.write(run.folder / RECORD, document)
    print_notices(store)
    _print_errors(study, schedule)
    _print_ties(study, schedule)
    _print_exports(study, schedule)
    is_disk_full = any(error["message"] == DISK_FULL_MESSAGE for error in errors.values())
    is_complete = True
    if study.config.report and not is_disk_full:
        if study.report_later:
            UNREPORTED[name] = study
        else:
            is_complete = update_report(study)
    if study.config.tracker.name != "none" and not is_disk_full:
        from moe_lab.study import tracker

        inform(tracker.log(study.config.tracker, store, study_record(store, name)))
    if is_complete:
        _write_end(store, name)
    if errors:
        return 2 if all(error.get("user") for error in errors.values()) else 1
    return 0 if is_complete else 1


def _write_end(store: Store, study: str) -> None:
    """Write ended.json to the folder of the last recorded run of a study, if this run has jobs."""
    recorded_runs = [run for run in runs(store, study) if run.is_recorded]
    if recorded_runs and recorded_runs[-1].jobs:
        store.write(recorded_runs[-1].folder / ENDED, {"time": time.time()})


def _is_recorded(store: Store, study: str, document: Document) -> bool:
    """Whether a current record of the study has the same content as `document`, a new record
    which would replace at most this one."""
    try:
        records = current_records(store.root, study)
    except Damaged:
        return False
    # fields that differ between equal records
    varying = dict.fromkeys(("created", "config", "replaces"))
    for name, record in records.items():
        is_same = {**record, **varying} == {**document, **varying}
        if is_same and records.keys() & set(document["replaces"]) <= {name}:
            return True
    return False


def _print_errors(study: Study, schedule: Schedule) -> None:
    """Print the errors of failed steps."""
    store = study.store
    messages = Counter(str(error) for error in schedule.failed.values())
    for message, count in messages.items():
        inform(f"moe_lab: {message}{f' ({count} steps)' if count > 1 else ''}", style="red")
    if schedule.skipped:
        inform(f"moe_lab: {len(schedule.skipped)} steps were not run because they need those")
    if any(not error.document.get("user") for error in schedule.failed.values()):
        inform(f"moe_lab: traces are in {store.root / 'logs'} and {store.root / 'failed'}")


def _finished_steps(study: Study, schedule: Schedule, field: str) -> Iterable[Step]:
    """The distinct finished steps in the field `field` of the study's cells."""
    steps = [getattr(cell, field) for cell in study.graph.cells]
    return {step.id: step for step in steps if step and step.id in schedule.finished}.values()


def _print_ties(study: Study, schedule: Schedule) -> None:
    """Print a sentence about the finished plans that have ties: experts or channels with equal
    scores, of which only some are dropped."""
    descriptions = []
    for step in _finished_steps(study, schedule, "plan"):
        with suppress(FileNotFoundError, Damaged):  # a plan without ties has no such file
            content = study.store.content(step.folder, TIES)
            # layer -> number of experts or channels with equal scores
            tie_counts = parse_sealed(content, step.folder).values()
            descriptions.append(f"{sum(tie_counts)} in {len(tie_counts)} layers of {step.label()}")
    if not descriptions:
        return
    listed = ", ".join(descriptions[:LISTED_PLANS])
    if len(descriptions) > LISTED_PLANS:
        listed += f", and {len(descriptions) - LISTED_PLANS} more plans"
    inform(
        "moe_lab: experts or channels have equal scores at the cut, where the lowest ids are "
        f"dropped: {listed}"
    )


def _print_exports(study: Study, schedule: Schedule) -> None:
    """Print the checkpoint of each finished export, and the result of its verification."""
    for step in _finished_steps(study, schedule, "export"):
        folder = study.store.path(step)
        verification = ""
        with suppress(FileNotFoundError, Damaged):  # the checkpoint was not verified
            difference = read_json(folder / "verified.json", {"difference": Number})["difference"]
            precision = "bit for bit"
            if difference:
                precision = f"up to {difference:.1e} of the largest number"
            verification = f" (verified: its layers equal those of the masked model, {precision})"
        inform(f"export: {(folder / 'checkpoint').absolute()}{verification}")


def update_report(study: Study) -> bool:
    """Make the report of a study, unless it is up to date, and print its summary. Returns whether
    the report is complete."""
    store = study.store
    name = study.config.study
    page = store.root / "reports" / name / "report.html"
    fingerprint_file = page.with_name(FINGERPRINT_FILE)
    with store.claims.wait_for(f"report-{name}"):
        recorded_names = [run.folder.name for run in runs(store, name) if run.is_recorded]
        fingerprint = " ".join(recorded_names)
        if not (
            page.is_file()
            and fingerprint_file.is_file()
            and fingerprint_file.read_text() == fingerprint
        ):
            if not _make_report(study, page):
                return False
            write_text(fingerprint_file, fingerprint, store.file_mode)
    # a report without evaluations has no summary; another user's summary may not be readable
    with suppress(FileNotFoundError, PermissionError):
        inform(page.with_name("summary.txt").read_text(encoding="utf-8").rstrip())
    inform(f"report: {page.absolute()}")
    return True


def _make_report(study: Study, page: Path) -> bool:
    """Make the report in a process of its own. Returns whether the report is complete."""
    store = study.store
    name = study.config.study
    folder = page.parent
    argv = command(
        "moe_lab.analysis", "report", f"store={store.root}", f"study={name}", f"out={folder}"
    )
    progress_file = folder / progress.NAME
    with show_regularly(
        # [1]: a text such as "3 of 40 figures"
        lambda: f"report: {progress.read(progress_file)[1] or 'reading the results'}"
    ):
        # progress.FILE: name of an environment variable
        environment = {**os.environ, progress.FILE: str(progress_file)}
        process = subprocess.run(
            argv, capture_output=True, text=True, env=environment, umask=store.umask
        )
    progress_file.unlink(missing_ok=True)
    if not process.stdout.strip():  # the path of the page is printed if the report was written
        log = store.root / "logs" / f"report-{name}.log"
        with suppress(OSError):  # a full disk
            store.make_folder(log.parent)
            write_text(log, process.stderr, store.file_mode)
        *_, reason = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        inform(
            f"moe_lab: the report failed: {reason.removeprefix('moe_lab: ')} (all that it "
            f"printed is in {log})"
        )
        return False
    if failures := sorted(log.stem for log in (folder / "failed").glob("*.log")):
        inform(f"report: {page.absolute()}")
        inform(
            f"moe_lab: the report lacks {', '.join(failures)}: traces are in {folder / 'failed'}",
            style="red",
        )
    return not failures


def outdate_reports(store: Store) -> None:
    """Mark all reports of a store as outdated, by removing their fingerprints."""
    for file in (store.root / "reports").glob(f"*/{FINGERPRINT_FILE}"):
        file.unlink(missing_ok=True)


@garbage_collection_off()
def record_of(study: Study, run: Run, failed: Mapping[str, Document]) -> Document:
    """The record of a run: for every cell, the folders of its steps and the error messages of its
    failed steps. `failed`: id of a failed step -> error document.

    The record replaces the records that existed when the run began. With `study.add`, it replaces
    no record."""
    config = study.config
    graph = study.graph
    finished_names = study.store.finished_names()

    def name_of(step: Step | None) -> str | None:
        """KIND/NAME of a finished step, otherwise None."""
        return finished_names.get(step.id_start) if step else None

    model_names = _model_names(graph)
    cells = []
    for steps in graph.cells:
        cell = steps.cell
        model = model_names[cell.model.name, cell.protocol.name]
        cells.append(
            {
                "cell": {"model": model, **cell_columns(cell)},
                "protocol": cell.protocol.name,
                **{field: name_of(step) for field, step in steps.by_field().items()},
                "evaluate": {name: name_of(step) for name, step in steps.evaluate.items()},
                "errors": _cell_errors(steps, failed) if failed else {},
            }
        )
    # figure -> one entry for each of its steps: the fields of the `FigureKey`, and the step
    figures: dict[str, list[Document]] = {}
    for figure, figure_steps in graph.figures.items():
        figures[figure] = []
        for key, step in figure_steps.items():
            figures[figure].append({**key._asdict(), "step": name_of(step)})
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


def _cell_errors(steps: CellSteps, failed: Mapping[str, Document]) -> dict[str, str]:
    """Name of a benchmark, or field of `CellSteps`, -> error message of its failed step. `failed`:
    id of a step -> error document."""
    errors = {}
    for name, step in {**steps.evaluate, **steps.by_field()}.items():
        if name not in PREPARATION and step and step.id in failed:
            errors[name] = str(failed[step.id]["message"])
    return errors


def study_record(store: Store, study: str) -> Document:
    """The record of a study, see `result_files.read_record`; {} if the study has no record. Raises
    UserError for a damaged record."""
    try:
        return read_record(store.root, study) or {}
    except Damaged as error:
        raise UserError(f"study={study}: {error}: remove it, and start the study again") from None


def _model_names(graph: Graph) -> dict[tuple[str, str], str]:
    """(name of the model, name of the protocol) -> name of the model in the record. Two protocols
    of a model get two names, because their scores are not comparable."""
    first_protocols: dict[str, str] = {}
    names = {}
    for steps in graph.cells:
        model = steps.cell.model.name
        protocol = steps.cell.protocol.name
        is_first = first_protocols.setdefault(model, protocol) == protocol
        names[model, protocol] = model if is_first else f"{model} ({protocol})"
    return names


def cell_columns(cell: Cell) -> Document:
    """The settings of a cell, except the model, as the record shows them: name -> value."""
    # None for the unpruned model
    criterion = criteria.CRITERIA.get(cell.criterion.name)
    return {
        "criterion": _name_with_parameters(cell.criterion.name, cell.criterion.parameters),
        "granularity": criterion.granularity if criterion else "none",
        "calibration": cell.calibration.name,
        **allocation_columns(cell.allocation),
        "recovery": cell.recovery.name,
        "ratio": cell.ratio,
        "gate": cell.gate,
        "seed": cell.seed,
    }


def _name_with_parameters(name: str, parameters: Document) -> str:
    """NAME, or NAME(PARAMETER=VALUE,...) if there are parameters."""
    values = ",".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{name}({values})" if values else name


def allocation_columns(allocation: AllocationConfig) -> dict[str, str | None]:
    """The settings of an allocation, as the record of a cell shows them: name -> value.

    allocation: the label. Without a label: the name, all parameters, and the settings that differ
    from their defaults. replacement: what dropped experts become. protect: which experts are
    protected, or None."""
    default = AllocationConfig()
    changed_settings = {
        name: getattr(allocation, name)
        for name in ("multiple_of", "by", "search", "path")
        if getattr(allocation, name) != getattr(default, name)
    }
    protect: str | None = allocation.protect
    if protect and allocation.protect_layers != default.protect_layers:
        protect = f"{protect}, protect_layers={allocation.protect_layers:g}"
    return {
        "allocation": allocation.label
        or _name_with_parameters(allocation.name, {**changed_settings, **allocation.parameters}),
        "replacement": allocation.replacement,
        "protect": protect,
    }
