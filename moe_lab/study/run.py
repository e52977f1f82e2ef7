"""Run a study: build the graph, run missing steps, write the record and the report. The launchers
say where steps are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from moe_lab.config import Config
from moe_lab.config.base import Mistakes, SettingsError
from moe_lab.errors import Unavailable
from moe_lab.grid import Request
from moe_lab.machine import WORKERS, cores, main_memory, visible_gpus
from moe_lab.study.claims import in_queue
from moe_lab.study.graph import build, unresolved
from moe_lab.study.preflight import (
    missing_requirements,
    preflight,
    remarks,
    too_small,
    visible_difference,
)
from moe_lab.study.record import Study, finish, outdate_reports
from moe_lab.study.runs import Run, begin
from moe_lab.study.schedule import (
    InProcessExecutor,
    Schedule,
    WorkerProcess,
    inform,
    print_notices,
    recall_failures,
    show_progress,
    work,
)
from moe_lab.study.steps.files import Models
from moe_lab.study.store import Store


class Ended(NamedTuple):
    """How a study ended."""

    code: int
    """0: all done; 1: something failed or is missing; 2: all failures are mistakes of the user."""
    study: Study


def check_and_run(
    config: Config, requests: Sequence[Request], *, add: bool = False, models: Models | None = None
) -> Ended:
    """Check the settings of a study, and run it."""
    with Mistakes() as mistakes:
        mistakes += preflight(config, requests)
    return run(config, requests, add=add, models=models)


def run(
    config: Config, requests: Sequence[Request], *, add: bool = False, models: Models | None = None
) -> Ended:
    """Run a study whose settings are valid. `add`: add its cells to those recorded under its name,
    instead of replacing them. `models`: those that studies of this process share.

    Raises UserError for what is missing on this machine, before anything is run, after the forecast
    of a dry run; and Unavailable, always after the forecast, for models and texts that are not
    available.
    """
    for remark in remarks(config, requests):
        inform(remark)
    graph = build(config, requests)
    store = Store(config.store, 60 * config.launcher.stale_minutes, in_queue)
    study = Study(config, graph, store, add, models)
    absent = unresolved(graph.steps)
    problems = missing_requirements(graph.steps, config.launcher)
    with store.errors_as_sentences():
        if config.dry_run or absent:
            from moe_lab.study.forecast import print_forecast

            problems += print_forecast(study)
            for sentence in visible_difference(requests):
                inform(sentence)
        if absent:
            names = (
                f"missing here: {', '.join(absent)}: no folder or file, not in the cache, and "
                "not given by the hub"
            )
            advice = (
                "check the name, connect to the hub, download it first, or give a folder or a file"
            )
            raise Unavailable(str(SettingsError([f"{names}: {advice}", *problems])))
        if problems:
            raise SettingsError(problems)
        return Ended(0 if config.dry_run else _run(study), study)


def _run(study: Study) -> int:
    """Compute the missing steps, or submit them, and finish; the exit code."""
    config = study.config
    store = study.store.create()
    every = study.graph.steps
    with begin(store, config.study, every) as current:
        if config.also:
            from moe_lab.study.other_stores import take_over

            for path in config.also:
                take_over(store, path, every)
        steps, done = study.in_store()
        if config.tracker.name != "none" or config.objective:
            done -= _damaged_results(study, done)
        if store.notices:
            outdate_reports(store)
        print_notices(store)
        if len(steps) < len(every):  # shares of what is finished as a whole are not computed
            current.write_plan(steps)
        missing = [step for step in steps if step.id not in done]
        store.remove_resume_files({step.id for step in every} - {step.id for step in missing})
        if problems := too_small(store.root, missing, config.launcher):
            current.remove()
            raise SettingsError(problems)
        schedule = Schedule(steps, done)
        recall_failures(schedule, store, retry=config.retry)
        print_notices(store)
        if schedule.waiting and not LAUNCHERS[config.launcher.name](schedule, study, current):
            return 0
        return finish(study, schedule, current)


def _damaged_results(study: Study, done: Set[str]) -> set[str]:
    """Ids of those of the finished steps whose results are read at the end and are damaged, found
    by hashing."""
    results = {
        step.id: step for cell in study.graph.cells for step in (*cell.evaluate.values(), cell.cost)
    }
    return {
        name for name, step in results.items() if name in done and not study.store.readable(step)
    }


def inline(schedule: Schedule, study: Study, current: Run) -> bool:
    """Compute one step after another in this process."""
    with (
        show_progress(schedule, study.store, 1),
        InProcessExecutor(study.store, study.models) as execute,
    ):
        work(schedule, study.store, execute)
    return True


def local(schedule: Schedule, study: Study, current: Run) -> bool:
    """Compute steps in worker processes: launcher.processes of them, or one for each core, if there
    is memory for the largest step in each. With GPUs, steps that need one run first, in a process
    for each GPU; then those that need two, in a process for each pair; and so on."""
    processes = study.config.launcher.processes
    resources = {name: step.resources() for name, step in schedule.waiting.items()}
    known = {name: one for name, one in resources.items() if one.memory is not None}
    on_gpu = any(one.on_gpu for one in resources.values())
    devices = visible_gpus() if on_gpu else []
    if not devices:
        largest = max((one.memory or 0.0 for one in known.values()), default=1.0)
        count = processes or max(1, min(cores(), int(main_memory() // largest)))
        _compute(schedule, study.store, [{}] * count)
        return True
    gpu_memory = study.config.resources.gpu_memory
    needed = {name: one.gpus(gpu_memory) or 1 for name, one in known.items()}
    for size in sorted(set(needed.values())) or [1]:
        subset = schedule.without({name for name, count in needed.items() if count > size})
        starts = range(0, max(1, len(devices) - size + 1), size)
        sets = [",".join(devices[start : start + size]) for start in starts]
        count = processes or len(sets)
        if size > 1:
            count = min(count, len(sets))  # a step that needs several leaves no room on them
        _compute(
            schedule,
            study.store,
            [{"CUDA_VISIBLE_DEVICES": sets[i % len(sets)]} for i in range(count)],
            subset,
        )
    return True


def _compute(
    schedule: Schedule,
    store: Store,
    environments: Sequence[Mapping[str, str]],
    subset: Set[str] | None = None,
) -> None:
    """Compute steps in a worker process for each of the environments. `subset`: of
    `Schedule.take`."""
    errors: list[BaseException] = []

    def compute(environment: Mapping[str, str]) -> None:
        try:
            with WorkerProcess(store, {**environment, WORKERS: str(len(environments))}) as execute:
                work(schedule, store, execute, subset)
        except BaseException as error:  # noqa: BLE001 - a bug in this thread must not look like the end of the work
            errors.append(error)

    threads = [
        threading.Thread(target=compute, args=(environment,), daemon=True)
        for environment in environments
    ]
    with show_progress(schedule, store, len(environments)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def slurm(schedule: Schedule, study: Study, current: Run) -> bool:
    """Submit steps as jobs of a Slurm cluster; with wait=true, wait until they have ended."""
    from moe_lab.study.slurm.jobs import follow
    from moe_lab.study.slurm.submit import submit

    submit(schedule, study, current)
    if study.config.wait:
        follow(schedule, study)
    return study.config.wait


Launcher = Callable[[Schedule, Study, Run], bool]
"""Computes the steps of a schedule. True when they have ended, False when they are only
submitted."""
LAUNCHERS: Mapping[str, Launcher] = {"inline": inline, "local": local, "slurm": slurm}
