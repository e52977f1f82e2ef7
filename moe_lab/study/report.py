"""Finish a study: write its record, print each error once, and make the report."""

from __future__ import annotations

import subprocess
import time
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
from moe_lab.study.sync import MADE_FROM, shared

NAMED = 8
"""Most exports that are listed one by one."""


def finish(study: Study, schedule: Schedule, run: Run) -> int:
    """Write the record and the report when the steps of `schedule` have ended. Returns the exit code.

    0: all done; 1: something failed or is missing; 2: all failures are mistakes of the user.
    """
    plugins.load(study.config.plugins)  # the last job on a cluster is another process, which has not loaded them
    store, name = study.store, study.config.study
    store.check_there()
    errors = {step: error.document for step, error in schedule.failed.items()}
    before = _fingerprint_before(store, name)
    write(study, run, errors)
    if not schedule.total and fingerprint(store, name) == before:
        run.remove()  # the record before says the same
    whole = shared(store, [name])
    say_notices(store)
    _say_differing(store, name)
    _complain(schedule, store)
    _name_exports(study, schedule)
    full = any(error["message"] == NO_ROOM for error in errors.values())
    code = _report(study) if study.config.report and not full else 0
    if whole and study.config.report:
        whole = shared(store, [name])
    if not (whole or schedule.failed):
        say_notices(store)
        code = 1
    if schedule.failed:
        return 2 if all(error.document.get("user") for error in schedule.failed.values()) else 1
    return code


def _fingerprint_before(store: Store, study: str) -> str:
    """`fingerprint` of the study as earlier runs recorded it; "" when their records are damaged."""
    try:
        return fingerprint(store, study)
    except UserError:
        return ""


def _say_differing(store: Store, study: str) -> None:
    if differing := read(store, study).get("differing"):
        say(
            f"moe_lab: study={study}: another run of it has ended meanwhile, and {len(differing)} of its cells are "
            "called as cells of this run and have other settings: those of the later run count; give one of the runs "
            "another study="
        )


def _complain(schedule: Schedule, store: Store) -> None:
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
        difference = None
        with suppress(FileNotFoundError, Damaged):  # without a result of verifying, the folder is printed alone
            difference = read_json(folder / "verified.json", {"difference": Number | None})["difference"]
        say(f"export: {(folder / 'checkpoint').absolute()}{_compared(difference)}")
    if len(written) > NAMED:
        say(f"and {len(written) - NAMED} more, in {(study.store.root / 'export').absolute()}")


def _compared(difference: float | None) -> str:
    """The result of `verify` as text; "" when it was not run."""
    if difference is None:
        return ""
    how = "to the bit" if difference == 0 else f"up to {difference:.1e} of the largest number"
    return f" (verified: its layers give what those of the masked model give, {how})"


def _report(study: Study) -> int:
    """Make tables, figures and the page, in a process of the analysis package; skipped when they are up to date.

    Two runs of one study write to the same folder, so only one at a time makes its report.
    Returns the exit code.
    """
    store, name = study.store, study.config.study
    page = report_folder(store, name) / "report.html"
    with store.claims.awaited(f"report-{name}"):
        if not report_is_current(store, name) and not _make_report(study, page):
            return 1
    say(f"report: {page.absolute()}")
    return 0


def _make_report(study: Study, page: Path) -> bool:
    """Make the report; whether it is complete."""
    store, name = study.store, study.config.study
    start, made_from = time.monotonic(), fingerprint(store, name)
    about = [f"store={store.root}", f"study={name}", f"out={page.parent}"]
    if study.config.tracker.name != "none":
        about.append("format=png")  # trackers show no vector images
    done = subprocess.run(command("analysis", "report", *about), capture_output=True, text=True)
    if not done.stdout.strip():  # a report that was written prints the path of its page
        _say_failed(done, store.root / "logs" / f"report-{name}.log")
        return False
    _track(study, page.parent)
    say(f"report written in {time.monotonic() - start:.0f} s")
    if failed := sorted(log.stem for log in (page.parent / "failed").glob("*.log")):
        say(f"report: {page.absolute()}")
        say(f"moe_lab: the report lacks {', '.join(failed)}: traces are in {page.parent / 'failed'}", style="red")
        return False
    mark_report(store, name, made_from)
    return True


def _say_failed(done: subprocess.CompletedProcess[str], log: Path) -> None:
    """Print one sentence on why there is no report; write all of the output to `log` if it has several lines."""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    more = ""
    if len(lines) > 1:
        log.parent.mkdir(exist_ok=True)
        log.write_text(done.stderr)
        more = f" (all that it printed is in {log})"
    say(f"moe_lab: the report failed: {lines[-1].removeprefix('analysis: ')}{more}", style="red")


def _track(study: Study, folder: Path) -> None:
    if study.config.tracker.name == "none":
        return
    from moe_lab.study.tracking import log_study

    tables: dict[str, Path] = {file.stem: file for file in sorted(folder.rglob("*.csv"))}
    figures: list[Path] = sorted(folder.rglob("*.png"))
    if document := read(study.store, study.config.study):
        log_study(study.config.tracker, document, tables, figures)


def report_folder(store: Store, study: str) -> Path:
    """Folder of a study's report."""
    return store.root / "reports" / study


def fingerprint(store: Store, study: str) -> str:
    """Digest of what the study is, without its time and settings: a report is up to date while this is the same."""
    unshown = ("created", "config", "replaces", "run")
    return digest({key: value for key, value in read(store, study).items() if key not in unshown})


def report_is_current(store: Store, study: str) -> bool:
    """Whether the study has a report that was made from its present record."""
    folder = report_folder(store, study)
    mark = folder / MADE_FROM
    return (folder / "report.html").is_file() and mark.is_file() and mark.read_text() == fingerprint(store, study)


def outdate_reports(store: Store) -> None:
    """Mark all reports as outdated, because a step that was set aside may be part of them."""
    for mark in (store.root / "reports").glob(f"*/{MADE_FROM}"):
        mark.unlink(missing_ok=True)


def mark_report(store: Store, study: str, made_from: str) -> None:
    """Note what the report was made from: the `fingerprint` taken before it was made."""
    (report_folder(store, study) / MADE_FROM).write_text(made_from)
