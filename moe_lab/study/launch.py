"""Run a graph: here, or in several processes of this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from moe_lab.config import LauncherConfig
from moe_lab.errors import unknown
from moe_lab.study.execute import Here, Worker
from moe_lab.study.schedule import Schedule, work
from moe_lab.study.store import Store


def inline(schedule: Schedule, store: Store, settings: LauncherConfig) -> None:
    """One step after another in this process."""
    with Here(store) as execute:
        work(schedule, store, execute)


def local(schedule: Schedule, store: Store, settings: LauncherConfig) -> None:
    """One worker process per GPU, or `processes` of them on CPU, each taking the next step that is ready."""
    gpus = visible_gpus()
    count = settings.processes or len(gpus) or os.cpu_count() or 1
    errors: list[BaseException] = []

    def serve(number: int) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
        try:
            with Worker(store, number, environment) as execute:
                work(schedule, store, execute)
        except BaseException as error:  # noqa: BLE001 - a bug in this thread must not look like the end of the work
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def visible_gpus() -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES, one per GPU this process may use; empty without the NVIDIA driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
    cards = "/proc/driver/nvidia/gpus"
    return [str(number) for number in range(len(os.listdir(cards)))] if os.path.isdir(cards) else []


LAUNCHERS: dict[str, Callable[[Schedule, Store, LauncherConfig], None]] = {"inline": inline, "local": local}


def launcher(settings: LauncherConfig) -> Callable[[Schedule, Store, LauncherConfig], None]:
    """The launcher by name. UserError for an unknown one."""
    if settings.name not in LAUNCHERS:
        raise unknown("launcher", settings.name, LAUNCHERS)
    return LAUNCHERS[settings.name]
