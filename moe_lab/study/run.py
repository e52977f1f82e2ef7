"""Run a study: build the graph, run missing steps, write the record and the report. A launcher
computes the steps, in this process, in worker processes or in Slurm jobs."""

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
    capacity_problems,
    missing_requirements,
    preflight,
    remarks,
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


class RunResult(NamedTuple):
    """The exit code of a run, and its study."""

    code: int
    """0: all steps are done or submitted, or the run was dry. 2: steps failed, and all failures are
    mistakes of the user. 1: other steps failed, or results are missing."""
    study: Study


def check_and_run(
    config: Config, requests: Sequence[Request], *, add: bool = False, models: Models | None = None
) -> RunResult:
    """Check the settings of a study, and run the study, see `run`. If settings are wrong, nothing
    is run, and a SettingsError with all mistakes is raised."""
    with Mistakes() as mistakes:
        mistakes += preflight(config, requests)
    return run(config, requests, add=add, models=models)


def run(
    config: Config, requests: Sequence[Request], *, add: bool = False, models: Models | None = None
) -> RunResult:
    """Run a study whose settings are valid. `add`: add its cells to the recorded cells of the
    study, instead of replacing these. `models`: models in memory that the studies of this process
    share.

    Raises UserError for requirements that are missing on this machine, before any step is run; in
    a dry run, after the forecast. Raises Unavailable for models and texts that are not available,
    always after a forecast.
    """
    for remark in remarks(config, requests):
        inform(remark)
    graph = build(config, requests)
    store = Store(config.store, 60 * config.launcher.stale_minutes, in_queue)
    study = Study(config, graph, store, add, models)
    unavailable = unresolved(graph.steps)
    problems = missing_requirements(graph.steps, config.launcher)
    with store.errors_as_sentences():
        if config.dry_run or unavailable:
            from moe_lab.study.forecast import print_forecast

            problems += print_forecast(study)
            for sentence in visible_difference(requests):
                inform(sentence)
        if unavailable:
            names = (
                f"missing here: {', '.join(unavailable)}: no folder or file, not in the cache, and "
                "not given by the hub"
            )
            advice = (
                "check the name, connect to the hub, download it first, or give a folder or a file"
            )
            raise Unavailable(str(SettingsError([f"{names}: {advice}", *problems])))
        if problems:
            raise SettingsError(problems)
        return RunResult(0 if config.dry_run else _run(study), study)


def _run(study: Study) -> int:
    """Compute the missing steps and finish the run; or, if the launcher does not wait for the jobs
    of a cluster, only submit the steps. Returns the exit code. Raises SettingsError if disk or
    memory are too small."""
    config = study.config
    store = study.store.create()
    all_steps = study.graph.steps
    with begin(store, config.study, all_steps) as new_run:
        if config.also:
            from moe_lab.study.other_stores import take_over

            for path in config.also:
                take_over(store, path, all_steps)
        steps, done = study.in_store()
        if config.tracker.name != "none" or config.objective:
            # this process reads these results at the end of the run, so damage must be found now
            done -= _damaged_results(study, done)
        if store.notices:  # perhaps of a step that was set aside and is part of a report
            outdate_reports(store)
        print_notices(store)
        if len(steps) < len(all_steps):  # `steps` lacks the shares of finished passes
            new_run.write_plan(steps)
        missing = [step for step in steps if step.id not in done]
        store.remove_resume_files({step.id for step in all_steps} - {step.id for step in missing})
        if problems := capacity_problems(store.root, missing, config.launcher):
            new_run.remove()
            raise SettingsError(problems)
        schedule = Schedule(steps, done)
        recall_failures(schedule, store, retry=config.retry)
        print_notices(store)
        # False: the steps were only submitted, and their last job finishes the run
        if schedule.waiting and not LAUNCHERS[config.launcher.name](schedule, study, new_run):
            return 0
        return finish(study, schedule, new_run)


def _damaged_results(study: Study, done: Set[str]) -> set[str]:
    """Ids of those evaluation and cost steps in `done` that are damaged. Their results are read at
    the end of the run, so all their files are hashed. `done`: ids of finished steps."""
    step_of = {
        step.id: step for cell in study.graph.cells for step in (*cell.evaluate.values(), cell.cost)
    }
    return {
        step_id
        for step_id, step in step_of.items()
        if step_id in done and not study.store.readable(step)
    }


def inline(schedule: Schedule, study: Study, new_run: Run) -> bool:
    """Compute one step after another in this process. Returns True, see LAUNCHERS."""
    with (
        show_progress(schedule, study.store, 1),
        InProcessExecutor(study.store, study.models) as execute,
    ):
        work(schedule, study.store, execute)
    return True


def local(schedule: Schedule, study: Study, new_run: Run) -> bool:
    """Compute steps in worker processes. Their number is launcher.processes, or else the number of
    cores, but at most the number of largest steps that main memory holds. With GPUs, steps that
    need one GPU run first, in a process for each GPU; then steps that need two, in a process for
    each pair; and so on. Returns True, see LAUNCHERS."""
    processes = study.config.launcher.processes
    resources = {step_id: step.resources() for step_id, step in schedule.waiting.items()}
    # steps of unknown memory are left out here, and so are computed with the smallest sets of GPUs
    known_resources = {
        step_id: needed for step_id, needed in resources.items() if needed.memory is not None
    }
    on_gpu = any(needed.on_gpu for needed in resources.values())
    devices = visible_gpus() if on_gpu else []
    if not devices:
        # if the memory of all steps is unknown, only the number of cores counts
        largest = max((needed.memory or 0.0 for needed in known_resources.values()), default=1.0)
        count = processes or max(1, min(cores(), int(main_memory() // largest)))
        _compute(schedule, study.store, [{}] * count)
        return True
    gpu_memory = study.config.resources.gpu_memory
    gpus_of = {step_id: needed.gpus(gpu_memory) or 1 for step_id, needed in known_resources.items()}
    # the numbers of GPUs that steps need; 1 if the memory of all steps is unknown
    for set_size in sorted(set(gpus_of.values())) or [1]:
        larger_steps = {step_id for step_id, gpus in gpus_of.items() if gpus > set_size}
        # at least one set, even if this machine has fewer GPUs
        starts = range(0, max(1, len(devices) - set_size + 1), set_size)
        gpu_sets = [",".join(devices[start : start + set_size]) for start in starts]
        count = processes or len(gpu_sets)
        if set_size > 1:
            count = min(count, len(gpu_sets))  # one step uses all GPUs of its set
        environments = [
            {"CUDA_VISIBLE_DEVICES": gpu_sets[number % len(gpu_sets)]} for number in range(count)
        ]
        _compute(schedule, study.store, environments, schedule.waiting_without(larger_steps))
    return True


def _compute(
    schedule: Schedule,
    store: Store,
    environments: Sequence[Mapping[str, str]],
    subset: Set[str] | None = None,
) -> None:
    """Compute steps in worker processes. `environments`: for each worker process, the environment
    variables that are added to those of this process. `subset`: ids of the steps to compute, see
    `Schedule.take`. An error of a thread is raised when all threads have ended."""
    errors: list[BaseException] = []

    def compute(environment: Mapping[str, str]) -> None:
        try:
            with WorkerProcess(store, {**environment, WORKERS: str(len(environments))}) as execute:
                work(schedule, store, execute, subset)
        except BaseException as error:  # noqa: BLE001 - an error in this thread must not look like the end of the work
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


def slurm(schedule: Schedule, study: Study, new_run: Run) -> bool:
    """Submit steps as jobs of a Slurm cluster. With wait=true, wait until the jobs have ended, and
    return True; otherwise return False."""
    from moe_lab.study.slurm.jobs import wait_for_jobs
    from moe_lab.study.slurm.submit import submit

    submit(schedule, study, new_run)
    if study.config.wait:
        wait_for_jobs(schedule, study)
    return study.config.wait


Launcher = Callable[[Schedule, Study, Run], bool]
"""Computes the steps of a schedule. Returns True if the steps have ended, and False if they were
only submitted."""
LAUNCHERS: Mapping[str, Launcher] = {"inline": inline, "local": local, "slurm": slurm}
