"""Finish a study: write its record, print each error once, and make the report."""

from __future__ import annotations

import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

from moe_lab import plugins
from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Number, read_json
from moe_lab.start import command
from moe_lab.study.progress import say, say_notices
from moe_lab.study.record import Study, read, write
from moe_lab.study.runs import Run
from moe_lab.study.schedule import Schedule
from moe_lab.study.step import NO_ROOM, digest
from moe_lab.study.store import Store
from moe_lab.study.sync import shared

NAMED = 8
"""Most exports that are listed one by one."""
MADE_FROM = ".made_from"
"""File in the folder of a report with the `fingerprint` of the study that it shows."""


def finish(study: Study, schedule: Schedule, run: Run) -> int:
    """Write the record and the report when the steps of `schedule` have ended. Returns the exit code.

    0: all done; 1: something failed or is missing; 2: all failures are mistakes of the user.
    """
    plugins.load(study.config.plugins)  # the last job on a cluster is another process, which has not loaded them
    store, name = study.store, study.config.study
    store.check_there()
    errors = {step: error.document for step, error in schedule.failed.items()}
    before = fingerprint(store, name)
    write(study, run, errors)
    if not schedule.total and fingerprint(store, name) == before:
        run.remove()  # the record before says the same
    whole = shared(store, name)
    say_notices(store)
    _complain(study, schedule)
    _name_exports(study, schedule)
    full = any(error["message"] == NO_ROOM for error in errors.values())
    complete = _report(study) if study.config.report and not full else True
    if errors:
        return 2 if all(error.get("user") for error in errors.values()) else 1
    return 0 if whole and complete else 1


def _complain(study: Study, schedule: Schedule) -> None:
    """Print errors, and what does not fit into the record."""
    store, name = study.store, study.config.study
    if differing := read(store, name).get("differing"):
        say(
            f"moe_lab: study={name}: another run of it has ended meanwhile, and {len(differing)} of its cells are "
            "called as cells of this run and have other settings: those of the later run count; give one of the runs "
            "another study="
        )
    messages = Counter(str(error) for error in schedule.failed.values())
    for message, count in messages.items():
        say(f"moe_lab: {message}{f' ({count} steps)' if count > 1 else ''}", style="red")
    if schedule.skipped:
        say(f"moe_lab: {len(schedule.skipped)} steps were not run because they need those")
    if any(not error.document.get("user") for error in schedule.failed.values()):
        say(f"moe_lab: traces are in {store.root / 'logs'} and {store.root / 'failed'}")


def _name_exports(study: Study, schedule: Schedule) -> None:
    """Print where the exported checkpoints are, and the results of verifying them."""
    steps = {cell.export.id: cell.export for cell in study.graph.cells if cell.export}
    written = [study.store.path(step) for name, step in steps.items() if name in schedule.finished]
    for folder in written[:NAMED]:
        verified = ""
        with suppress(FileNotFoundError, Damaged):  # it was not verified
            difference = read_json(folder / "verified.json", {"difference": Number})["difference"]
            how = f"up to {difference:.1e} of the largest number" if difference else "to the bit"
            verified = f" (verified: its layers give what those of the masked model give, {how})"
        say(f"export: {(folder / 'checkpoint').absolute()}{verified}")
    if len(written) > NAMED:
        say(f"and {len(written) - NAMED} more, in {(study.store.root / 'export').absolute()}")


def _report(study: Study) -> bool:
    """Make tables, figures and the page, in a process of the analysis package, unless they are up to date.

    Two runs of one study write to the same folder, so only one at a time makes its report. Returns whether it is
    complete.
    """
    store, name = study.store, study.config.study
    page = store.root / "reports" / name / "report.html"
    mark = page.with_name(MADE_FROM)
    with store.claims.wait_for(f"report-{name}"):
        made_from = fingerprint(store, name)
        if not (page.is_file() and mark.is_file() and mark.read_text() == made_from):
            if not _make_report(study, page):
                return False
            mark.write_text(made_from)
    say(f"report: {page.absolute()}")
    return True


def _make_report(study: Study, page: Path) -> bool:
    """Make the report; whether it is complete."""
    store, name, folder = study.store, study.config.study, page.parent
    tracks = study.config.tracker.name != "none"
    about = [f"store={store.root}", f"study={name}", f"out={folder}"]
    about += ["format=png"] if tracks else []  # trackers show no vector images
    done = subprocess.run(command("analysis", "report", *about), capture_output=True, text=True)
    if not done.stdout.strip():  # a report that was written prints the path of its page
        log = store.root / "logs" / f"report-{name}.log"
        with suppress(OSError):  # a full disk
            log.parent.mkdir(exist_ok=True)
            log.write_text(done.stderr)
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        say(f"moe_lab: the report failed: {reason.removeprefix('analysis: ')} (all that it printed is in {log})")
        return False
    if tracks:
        from moe_lab.study.tracking import log_study

        tables = {file.stem: file for file in sorted(folder.rglob("*.csv"))}
        log_study(study.config.tracker, read(store, name), tables, sorted(folder.rglob("*.png")))
    if failed := sorted(log.stem for log in (folder / "failed").glob("*.log")):
        say(f"report: {page.absolute()}")
        say(f"moe_lab: the report lacks {', '.join(failed)}: traces are in {folder / 'failed'}", style="red")
    return not failed


def fingerprint(store: Store, study: str) -> str:
    """Digest of what the study is, without its time and settings: a report is up to date while this is the same.

    "" when the record is damaged.
    """
    unshown = ("created", "config", "replaces", "run")
    with suppress(UserError):
        return digest({key: value for key, value in read(store, study).items() if key not in unshown})
    return ""


def outdate_reports(store: Store) -> None:
    """Mark all reports as outdated, because a step that was set aside may be part of them."""
    for mark in (store.root / "reports").glob(f"*/{MADE_FROM}"):
        mark.unlink(missing_ok=True)
