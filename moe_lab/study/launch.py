"""Launchers: run the steps of a study in this process, in several processes, or as Slurm jobs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

from moe_lab.study.devices import visible_gpus
from moe_lab.study.progress import say, watch
from moe_lab.study.record import Study
from moe_lab.study.runs import Run
from moe_lab.study.schedule import Schedule, work
from moe_lab.study.worker import Here, Worker


def inline(schedule: Schedule, study: Study, run: Run) -> bool:
    """Run one step after another in this process."""
    with watch(schedule), Here(study.store) as execute:
        work(schedule, study.store, execute)
    return True


def local(schedule: Schedule, study: Study, run: Run) -> bool:
    """Run steps in worker processes: launcher.processes of them, or one per GPU, or one per CPU core without GPUs."""
    gpus = visible_gpus()
    count = study.config.launcher.processes or len(gpus) or os.cpu_count() or 1
    errors: list[BaseException] = []

    def serve(number: int) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
        try:
            with Worker(study.store, f"{os.getpid()}-worker{number}", environment) as execute:
                work(schedule, study.store, execute)
        except BaseException as error:  # noqa: BLE001 - a bug in this thread must not look like the end of the work
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(count)]
    with watch(schedule):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return True


def slurm(schedule: Schedule, study: Study, run: Run) -> bool:
    """Run steps as jobs of a Slurm cluster; returns when they are submitted, or with wait=true when they have ended."""
    from moe_lab.study.slurm.pack import follow
    from moe_lab.study.slurm.submit import submit

    submit(schedule, study, run)
    if study.config.wait:
        follow(schedule, study)
    elif study.config.push is not None:  # not by a job: nodes may have no network, and an upload may take hours
        say(f"push={study.config.push}: start the same command again when the jobs have ended: it uploads the model")
    return study.config.wait


Launcher = Callable[[Schedule, Study, Run], bool]
"""Runs the steps of a schedule. True when they have ended, False when they are only submitted."""
LAUNCHERS: Mapping[str, Launcher] = {"inline": inline, "local": local, "slurm": slurm}
