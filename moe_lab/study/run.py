"""Run a study: build the graph, run missing steps, write the record and the report."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from statistics import fmean
from typing import NamedTuple

from moe_lab.config import Config
from moe_lab.config.base import Mistakes, SettingsError
from moe_lab.errors import Unavailable, UserError, check_known, user_errors
from moe_lab.grid import Request
from moe_lab.machine import WORKERS, cores, main_memory, visible_gpus
from moe_lab.study.estimates import forecast_table, seconds_estimator
from moe_lab.study.graph import build, normalized, unresolved_names
from moe_lab.study.preflight import (
    AVERAGE,
    failure_forecast,
    missing_requirements,
    preflight,
    remark_sentences,
)
from moe_lab.study.record import Study, finish, outdate_reports
from moe_lab.study.runs import Run, create_run
from moe_lab.study.schedule import (
    InProcessExecutor,
    Schedule,
    WorkerProcess,
    console,
    inform,
    print_notices,
    recall_failures,
    show_progress,
    work,
)
from moe_lab.study.store import Store


class RunResult(NamedTuple):
    """The exit code of a run, and its study."""

    code: int
    """0: all steps are done or submitted, or the run was dry. 2: steps failed, and all failures are
    mistakes of the user. 1: other steps failed, or results are missing."""
    study: Study


def run(config: Config, requests: Sequence[Request], **options: bool) -> RunResult:
    """Check the settings of a study, and run it. A dry run only prints the forecast. `options`:
    "add" and "report_later", see `Study`.

    Raises SettingsError with all mistakes in the settings, or if this machine does not meet the
    requirements of the steps. Raises Unavailable if models or texts are not available.
    """
    with Mistakes() as mistakes:
        mistakes += preflight(config, requests)
    for remark in remark_sentences(config, requests):
        inform(remark)
    graph = build(config, requests)
    store = Store(config.store, limit=60 * config.launcher.stale_minutes)
    study = Study(config, graph, store, **options)
    unavailable = unresolved_names(graph.steps)
    problems = missing_requirements(graph.steps, config.launcher)
    with store.errors_as_sentences():
        if config.dry_run or unavailable:
            problems += print_forecast(study)
        if unavailable:
            problem = (
                f"missing here: {', '.join(unavailable)}: no folder or file, not in the cache, and "
                "not given by the hub: check the name, connect to the hub, download it first, or "
                "give a folder or a file"
            )
            # the message of a SettingsError joins several sentences
            raise Unavailable(str(SettingsError([problem, *problems])))
        if problems:
            raise SettingsError(problems)
        return RunResult(0 if config.dry_run else _run(study), study)


def print_forecast(study: Study) -> list[str]:
    """Print a table of the steps of a study. With launcher=slurm, also print the scripts of
    the Slurm jobs for the missing steps. Returns a sentence for each problem: the disk or
    the memory is too small, or the settings of jobs are wrong."""
    from moe_lab.study.other_stores import finished_in, open_other

    config = study.config
    # a run would copy finished steps of the stores in `also`, so these steps count as finished
    ids_elsewhere = [finished_in(open_other(path), study.graph.steps) for path in config.also]
    steps, done = study.steps_and_finished_ids(set().union(*ids_elsewhere))
    print_notices(study.store)
    gpu_memory = config.resources.gpu_memory
    console.print(forecast_table(steps, done, gpu_memory, seconds_estimator(study.store)))
    missing = [step for step in steps if step.id not in done]
    problems = failure_forecast(study.store.root, missing, config.launcher)
    if config.launcher.name == "slurm" and missing:
        from moe_lab.study.slurm.submit import preview

        problems += user_errors(preview, study, missing)
    return problems


def _run(study: Study) -> int:
    """Compute the missing steps, and write the record and the report. Returns the exit code."""
    config = study.config
    store = study.store.create()
    all_steps = study.graph.steps
    with create_run(store, config.study, all_steps) as new_run:
        if config.also:
            from moe_lab.study.other_stores import copy_from

            for path in config.also:
                copy_from(store, path, all_steps)
        steps, done = study.steps_and_finished_ids()
        if store.notices:  # they may be about damaged steps, which reports may show
            outdate_reports(store)
        print_notices(store)
        # `steps` lacks those whose results a finished step has merged
        if len(steps) < len(all_steps):
            new_run.write_plan(steps)
        missing = [step for step in steps if step.id not in done]
        if problems := failure_forecast(store.root, missing, config.launcher):
            new_run.remove()
            raise SettingsError(problems)
        schedule = Schedule(steps, done)
        recall_failures(schedule, store, retry=config.retry)
        print_notices(store)
        if schedule.waiting:
            LAUNCHERS[config.launcher.name](schedule, study, new_run)
            # the last of the submitted jobs finishes the run
            if config.launcher.name == "slurm" and not config.wait:
                return 0
        return finish(study, schedule, new_run)


def run_inline(schedule: Schedule, study: Study, new_run: Run) -> None:
    """Compute one step after another in this process."""
    with (
        show_progress(schedule, study.store, workers=1),
        InProcessExecutor(study.store) as execute,
    ):
        work(schedule, study.store, execute)


def run_in_workers(schedule: Schedule, study: Study, new_run: Run) -> None:
    """Compute steps in worker processes. `launcher.processes` overrides the number of processes.

    Without GPUs, there is a process for each core, or fewer if the main memory would not suffice.
    With GPUs, there are several rounds. The first round computes the steps that need one GPU, in a
    process for each GPU. The next round computes the steps that need two GPUs, in a process for
    each pair of GPUs, and so on."""
    processes = study.config.launcher.processes
    resources = {step_id: step.resources() for step_id, step in schedule.waiting.items()}
    on_gpu = any(needed.on_gpu for needed in resources.values())
    devices = visible_gpus() if on_gpu else []
    if not devices:
        # 1 byte if the memory of all steps is unknown
        max_memory = max(needed.memory or 1.0 for needed in resources.values())
        count = processes or max(1, min(cores(), int(main_memory() // max_memory)))
        _compute(schedule, study.store, [{}] * count)
        return
    gpu_memory = study.config.resources.gpu_memory
    # a step of unknown memory needs the smallest number of GPUs on which it can run
    gpus_of = {step_id: needed.gpus(gpu_memory) or 1 for step_id, needed in resources.items()}
    # set_size: number of GPUs of each step of a round
    for set_size in sorted(set(gpus_of.values())):
        later_ids = {step_id for step_id, gpus in gpus_of.items() if gpus > set_size}
        # at least one set, even if this machine has fewer GPUs
        starts = range(0, max(1, len(devices) - set_size + 1), set_size)
        gpu_sets = [",".join(devices[start : start + set_size]) for start in starts]
        count = processes or len(gpu_sets)
        if set_size > 1:
            # processes can share one GPU, but not a set of GPUs, as a step uses all its GPUs
            count = min(count, len(gpu_sets))
        environments = [
            {"CUDA_VISIBLE_DEVICES": gpu_sets[number % len(gpu_sets)]} for number in range(count)
        ]
        _compute(schedule, study.store, environments, schedule.waiting_without(later_ids))


def _compute(
    schedule: Schedule,
    store: Store,
    environments: Sequence[Mapping[str, str]],
    subset: Set[str] | None = None,
) -> None:
    """Compute steps in worker processes. `environments`: for each worker process, the environment
    variables that it gets in addition to those of this process. `subset`: see `Schedule.take`."""
    errors: list[BaseException] = []

    def compute(environment: Mapping[str, str]) -> None:
        try:
            worker_environment = {**environment, WORKERS: str(len(environments))}
            with WorkerProcess(store, **worker_environment) as execute:
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


def run_in_slurm(schedule: Schedule, study: Study, new_run: Run) -> None:
    """Submit the steps as jobs of a Slurm cluster. With wait=true, wait until the jobs have
    ended."""
    from moe_lab.study.slurm.jobs import wait_for_jobs
    from moe_lab.study.slurm.submit import submit

    submit(schedule, study, new_run)
    if study.config.wait:
        wait_for_jobs(schedule, study)


Launcher = Callable[[Schedule, Study, Run], None]
"""Computes or submits the steps of a schedule."""
LAUNCHERS: Mapping[str, Launcher] = {
    "inline": run_inline,
    "local": run_in_workers,
    "slurm": run_in_slurm,
}


def objective_value(result: RunResult, requests: Iterable[Request]) -> float:
    """The number that a job of a multirun returns to the sweeper: the number that the setting
    `objective` names. In a dry run, or if no objective is set, it is the exit code of the job.

    The objective "Avg" is a mean over benchmarks. The number of a benchmark is the mean over its
    results in which higher is better. Any other objective is the name of a result, such as arc_easy
    or perplexity. Raises UserError unless the job prunes exactly one model and has all results."""
    code, study = result
    objective = study.config.objective
    if objective is None or study.config.dry_run:
        return code
    requested_cells = {normalized(cell) for cells, _ in requests for cell in cells}
    pruned_cells = [steps for steps in study.graph.cells if steps.cell in requested_cells]
    if len(pruned_cells) != 1:
        raise UserError(
            f"objective={objective} is a number of one pruned model, but a job of this sweep "
            f"prunes {len(pruned_cells)}: expected one value in each axis"
        )
    names = study.store.finished_names()
    scores: dict[str, float] = {}
    averages: list[float] = []
    for benchmark, step in pruned_cells[0].evaluate.items():
        name = names.get(step.id_start)
        if name is None:
            raise UserError(
                f"objective={objective}: {benchmark} has no result: `moe-lab why "
                f"{study.config.study} store={study.config.store}` explains it"
            )
        with study.store.errors_as_sentences():
            results = json.loads(study.store.content(name, "result.json"))["results"]
        scores |= {entry["benchmark"]: entry["score"] for entry in results}
        # of the scales, only "score" means that higher is better
        increasing_scores = [entry["score"] for entry in results if entry["scale"] == "score"]
        if increasing_scores:
            averages.append(fmean(increasing_scores))
    if objective == AVERAGE and averages:
        return fmean(averages)
    check_known("objective", objective, scores)
    return scores[objective]
