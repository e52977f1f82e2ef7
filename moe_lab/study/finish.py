"""The end of a study: its record, what went wrong in a sentence each, and the report."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab import plugins
from moe_lab.config import Config
from moe_lab.start import command
from moe_lab.study import record
from moe_lab.study.graph import Graph
from moe_lab.study.progress import say
from moe_lab.study.schedule import Schedule
from moe_lab.study.store import Store

NAMED = 8
"""Exports that are named one by one."""


@dataclass(frozen=True)
class Study:
    """What is to be done, and where."""

    config: Config
    graph: Graph
    store: Store
    add: bool
    """Whether its cells are added to those recorded under its name."""


def finish(study: Study, schedule: Schedule) -> int:
    """Write the record of what `schedule` has come to, and the report. Gives the exit code.

    0: all done; 1: something failed or is missing; 2: nothing failed but for a user's mistake.
    """
    plugins.load(study.config.plugins)  # the last job of a cluster is a process of its own
    errors = {name: error.document for name, error in schedule.failed.items()}
    record.write(study.store, study.config, study.graph, errors, add=study.add)
    _complain(schedule, study.store)
    _name_exports(study, schedule)
    code = _report(study.config, study.store) if study.config.report else 0
    if schedule.failed:
        return 2 if all(error.document.get("user") for error in schedule.failed.values()) else 1
    return code


def _complain(schedule: Schedule, store: Store) -> None:
    messages = Counter(str(error) for error in schedule.failed.values())
    for message, count in messages.items():
        say(f"moe_lab: {message}{f' ({count} steps)' if count > 1 else ''}", style="red")
    if schedule.skipped:
        say(f"moe_lab: {len(schedule.skipped)} steps were not run because they need those")
    if any(not error.document.get("user") for error in schedule.failed.values()):
        say(f"moe_lab: traces are in {store.root / 'logs'} and {store.root / 'failed'}")


def _name_exports(study: Study, schedule: Schedule) -> None:
    """Say where the checkpoints are that were asked for, and what comparing them has come to."""
    steps = {cell.export.id: cell.export for cell in study.graph.cells if cell.export}
    written = [study.store.path(step) for name, step in steps.items() if name in schedule.finished]
    for folder in written[:NAMED]:
        file = folder / "verified.json"
        difference = json.loads(file.read_text())["difference"] if file.exists() else None
        say(f"export: {(folder / 'checkpoint').absolute()}{_compared(difference)}")
    if len(written) > NAMED:
        say(f"and {len(written) - NAMED} more, in {(study.store.root / 'export').absolute()}")


def _compared(difference: float | None) -> str:
    """What `verify` has come to, if it was asked."""
    if difference is None:
        return ""
    how = "to the bit" if difference == 0 else f"up to {difference:.1e} of the largest number"
    return f" (verified: its layers give what those of the masked model give, {how})"


def _report(config: Config, store: Store) -> int:
    """Tables, figures and the page, by the analysis package in a process of its own; skipped when up to date."""
    page = record.report_folder(store, config.study) / "report.html"
    if not record.report_is_current(store, config.study):
        start = time.monotonic()
        about = f"store={store.root}", f"study={config.study}", f"out={page.parent}"
        done = subprocess.run(command("analysis", "report", *about), capture_output=True, text=True)
        if not done.stdout.strip():  # it prints where the page is
            say(f"moe_lab: the report failed: {done.stderr.strip()[-2000:]}", style="red")
            return 1
        _track(config, store, page.parent)
        say(f"report written in {time.monotonic() - start:.0f} s")
        say(f"report: {page.absolute()}")
        if failed := sorted(log.stem for log in (page.parent / "failed").glob("*.log")):
            say(f"moe_lab: the report lacks {', '.join(failed)}: traces are in {page.parent / 'failed'}", style="red")
            return 1
        record.mark_report(store, config.study)
        return 0
    say(f"report: {page.absolute()}")
    return 0


def _track(config: Config, store: Store, folder: Path) -> None:
    if config.tracker.name == "none":
        return
    from moe_lab.tracking import log_study

    tables: dict[str, Path] = {file.stem: file for file in sorted(folder.rglob("*.csv"))}
    figures: list[Path] = sorted(folder.rglob("*.png"))
    study: dict[str, Any] = record.read(store, config.study)
    log_study(config.tracker, study, tables, figures)
