"""Launchers: where the steps of a study are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set

from moe_lab.machine import WORKERS, cores, main_memory, visible_gpus
from moe_lab.study.record import Study
from moe_lab.study.runs import Run
from moe_lab.study.schedule import InProcessExecutor, Schedule, WorkerProcess, show_progress, work
from moe_lab.study.store import Store


def inline(schedule: Schedule, study: Study, run: Run) -> bool:
    """Compute one step after another in this process."""
    with show_progress(schedule, study.store, 1), InProcessExecutor(study.store) as execute:
        work(schedule, study.store, execute)
    return True


def local(schedule: Schedule, study: Study, run: Run) -> bool:
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


def slurm(schedule: Schedule, study: Study, run: Run) -> bool:
    """Submit steps as jobs of a Slurm cluster; with wait=true, wait until they have ended."""
    from moe_lab.study.slurm.jobs import follow
    from moe_lab.study.slurm.submit import submit

    submit(schedule, study, run)
    if study.config.wait:
        follow(schedule, study)
    return study.config.wait


Launcher = Callable[[Schedule, Study, Run], bool]
"""Computes the steps of a schedule. True when they have ended, False when they are only
submitted."""
LAUNCHERS: Mapping[str, Launcher] = {"inline": inline, "local": local, "slurm": slurm}
