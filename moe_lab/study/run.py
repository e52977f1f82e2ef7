"""One study from beginning to end: check, expand, run what is missing, write down the cells, report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig, Config
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.study import record
from moe_lab.study.graph import Graph, build
from moe_lab.study.identity import Step
from moe_lab.study.job import code_state
from moe_lab.study.launch import launcher
from moe_lab.study.preflight import preflight
from moe_lab.study.progress import console, watch
from moe_lab.study.schedule import Schedule, StepError
from moe_lab.study.store import Store

Request = tuple[Sequence[Cell], Sequence[BenchmarkConfig]]


def run(config: Config, requests: Sequence[Request], *, add: bool = False) -> int:
    """Run the study; `add` its cells to those recorded under its name. Gives the exit code.

    0: all done; 1: something failed or is missing; 2: nothing failed but for a user's mistake. Raises UserError for
    mistakes that show before anything is run.
    """
    launch = launcher(config.launcher)
    if problems := preflight(config, requests):
        raise UserError("; ".join(problems) if len(problems) == 1 else "\n  - ".join(["several things:", *problems]))
    graph = build(config, requests)
    store = Store(config.store)
    steps = graph.steps()
    done = {step.id for step in steps if store.done(step)}
    for notice in store.notices:
        console.print(f"moe_lab: {notice}", markup=False, soft_wrap=True)
    console.print(_summary(config, graph, steps, done), markup=False, soft_wrap=True)
    if config.dry_run:
        show(config, steps, done)
        return 0
    schedule = Schedule(steps, done)
    _recall_failures(schedule, store, steps, retry=config.retry)
    if schedule.waiting:
        with watch(schedule):
            launch(schedule, store, config.launcher)
    record.write(store, config, graph, {name: error.document for name, error in schedule.failed.items()}, add=add)
    _complain(schedule, store)
    code = _report(config, store) if config.report else 0
    if schedule.failed:
        return 2 if all(error.document.get("user") for error in schedule.failed.values()) else 1
    return code


def _summary(config: Config, graph: Graph, steps: Sequence[Step], done: set[str]) -> str:
    return f"{config.study}: {len(graph.cells)} cells, {len(steps)} steps, {len(done)} of them in {config.store}"


def show(config: Config, steps: Sequence[Step], done: set[str]) -> None:
    """The graph as a table: distinct steps by kind, cached, missing, and what the missing ones take by estimate."""
    from rich.table import Table

    from moe_lab.study import estimate

    gpu_memory = config.resources.gpu_memory
    columns = ("step", "distinct", "cached", "missing", "memory of one", "hours", "GPU-hours")
    table = Table(*columns, title="what would run, and about what it takes", show_footer=True)
    for kind in dict.fromkeys(step.kind for step in steps):
        all_steps = [step for step in steps if step.kind == kind]
        missing = [step for step in all_steps if step.id not in done]
        hours, gpu_hours = estimate.hours(missing, gpu_memory)
        counts = (len(all_steps), len(all_steps) - len(missing), len(missing))
        table.add_row(kind, *map(str, counts), estimate.memory(missing), f"{hours:.2f}", f"{gpu_hours:.2f}")
    total = estimate.hours([step for step in steps if step.id not in done], gpu_memory)
    for column, value in zip(table.columns[-2:], total, strict=True):
        column.footer = f"{value:.2f}"
    console.print(table)


def _recall_failures(schedule: Schedule, store: Store, steps: Iterable[Step], *, retry: str | None) -> None:
    """Steps that failed in an earlier run stay failed, with their error; retry=failed or other code tries again."""
    for step in steps:
        if step.id not in schedule.waiting or (document := store.error(step)) is None:
            continue
        if retry == "failed" or document.get("code") != code_state():
            store.forget(step)
        else:
            again = {**document, "message": f"{document['message']} (failed before; retry=failed tries again)"}
            schedule.fail(step, StepError(again))


def _complain(schedule: Schedule, store: Store) -> None:
    messages = Counter(str(error) for error in schedule.failed.values())
    for message, count in messages.items():
        console.print(
            f"moe_lab: {message}{f' ({count} steps)' if count > 1 else ''}", markup=False, soft_wrap=True, style="red"
        )
    if schedule.skipped:
        console.print(
            f"moe_lab: {len(schedule.skipped)} steps were not run because they need those", markup=False, soft_wrap=True
        )
    if any(not error.document.get("user") for error in schedule.failed.values()):
        console.print(
            f"moe_lab: traces are in {store.root / 'logs'} and {store.root / 'failed'}", markup=False, soft_wrap=True
        )


def _report(config: Config, store: Store) -> int:
    """Tables, figures and the page, by the analysis package in a process of its own; skipped when up to date."""
    page = record.report_folder(store, config.study) / "report.html"
    if not record.report_is_current(store, config.study):
        start = time.monotonic()
        command = [sys.executable, "-m", "analysis", "report", f"store={store.root}", f"study={config.study}"]
        done = subprocess.run([*command, f"out={page.parent}"], capture_output=True, text=True)
        if done.returncode not in (0, 1) or not page.exists():
            console.print(
                f"moe_lab: the report failed: {done.stderr.strip()[-2000:]}", markup=False, soft_wrap=True, style="red"
            )
            return 1
        record.mark_report(store, config.study)
        _track(config, store, page.parent)
        console.print(f"report written in {time.monotonic() - start:.0f} s", markup=False, soft_wrap=True)
    console.print(f"report: {page.absolute()}", markup=False, soft_wrap=True)
    return 0


def _track(config: Config, store: Store, folder: Path) -> None:
    if config.tracker.name == "none":
        return
    from moe_lab.tracking import log_study

    tables: dict[str, Path] = {file.stem: file for file in sorted(folder.rglob("*.csv"))}
    figures: list[Path] = sorted(folder.rglob("*.png"))
    study: dict[str, Any] = record.read(store, config.study)
    log_study(config.tracker, study, tables, figures)
