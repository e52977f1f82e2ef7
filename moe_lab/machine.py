"""The processors, the GPUs and the main memory that this process may use, and the Python
interpreters of this machine with their packages. Does not import torch."""

from __future__ import annotations

import gc
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from moe_lab.errors import UserError

_ROOT = Path(__file__).resolve().parents[1]
CPUINFO = Path("/proc/cpuinfo")
CONTROL_GROUPS = Path("/proc/self/cgroup")
"""File that lists the control groups of this process."""
LIMITS = Path("/sys/fs/cgroup")
"""Folder with the limits of all control groups."""
WORKERS = "MOE_LAB_WORKERS"
"""Environment variable with the number of worker processes that share processors and main memory,
this process included."""


def processor() -> str:
    """Name of the processor."""
    if CPUINFO.is_file():
        name = re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE)
        if name:
            return name[1].strip()
    return (platform.processor() or platform.machine()).strip()


def cores() -> int:
    """Number of processors that this process may use, by its affinity, its control groups and its
    Slurm job. Worker processes share the processors (see WORKERS)."""
    limits = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits = [len(os.sched_getaffinity(0))]
    for text in _group_limits("cpu", "cpu.max"):
        # a group may use `quota` microseconds of processor time in each `period`
        quota, period = text.split()
        if quota != "max":  # it means no limit
            limits.append(math.ceil(int(quota) / int(period)))
    # not all clusters bind processes to the processors that the job has requested
    if requested := os.environ.get("SLURM_CPUS_PER_TASK"):
        limits.append(int(requested))
    return max(1, min(limits) // _workers())


def main_memory() -> float:
    """Bytes of main memory that this process may use, by the machine, its control groups and its
    Slurm job. Worker processes share the memory (see WORKERS)."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for text in _group_limits("memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdigit():
            limits.append(float(text))
    # not all clusters limit the control group to what the job has requested
    requested = os.environ.get("SLURM_MEM_PER_NODE", "")  # in MiB; 0 requests all memory
    if requested.strip("0").isdigit():  # a number, and not 0
        limits.append(2.0**20 * int(requested))
    return min(limits) / _workers()


def _workers() -> int:
    """Number of worker processes that share this machine; 1 outside of a worker process."""
    return int(os.environ.get(WORKERS, "1"))


def release_memory() -> None:
    """Free unreachable objects, and GPU memory that torch has cached."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def visible_gpus() -> list[str]:
    """Ids of the GPUs (NVIDIA or AMD) that torch finds, as in CUDA_VISIBLE_DEVICES."""
    count = gpu_count()
    ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ids.split(",")[:count] if ids else [str(number) for number in range(count)]


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """Number of GPUs that torch finds with the environment of this process. Torch is imported in
    another process, because the import takes seconds."""
    build = package_version("torch")
    if build is None or build.endswith("+cpu"):
        return 0
    program = "import torch; print(torch.cuda.device_count())"
    completed = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True)
    # if torch is broken, there is no output; the first step that needs torch reports the error
    return int(completed.stdout or 0)


def _group_limits(controller: str, file_v2: str, file_v1: str = "") -> Iterator[str]:
    """The texts of the files with a limit, of the control groups of this process and of all groups
    around them. `controller`: cpu or memory. `file_v2`, `file_v1`: name of the file in control
    groups of version 2 and version 1; "" leaves out groups of version 1."""
    for line in CONTROL_GROUPS.read_text().splitlines() if CONTROL_GROUPS.is_file() else []:
        # a line of version 1 names the controllers of the group, such as "4:cpu,cpuacct:/path"; a
        # line of version 2 names none, such as "0::/path"
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = LIMITS / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / (file_v1 if controllers else file_v2)
            if file.is_file():
                yield file.read_text().strip()
            if folder == LIMITS:
                break


@cache
def package_version(package: str) -> str | None:
    """The version of an installed package; None if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def interpreter(module: str, path: str | None, setting: str) -> str:
    """Path of the Python interpreter for `module`. UserError if no interpreter is found, or if
    there is no file at `path`.

    `path`: the value of interpreters.MODULE. `setting`: the setting that needs the module, for the
    message."""
    if path is not None:
        python = Path(path).expanduser()
        if not python.is_file():
            raise UserError(
                f"interpreters.{module}={path}, and there is no such file: expected the Python "
                f"interpreter of an environment with {module}"
            )
        return str(python.absolute())
    # torch cannot compile for vLLM below a path with a space, so the folder may be a link to a path
    # without a space
    installed_by_make = (_ROOT / f".venv-{module}").resolve() / "bin" / "python"
    if installed_by_make.is_file():
        return str(installed_by_make)
    if find_spec(module) is not None:
        return sys.executable
    raise UserError(
        f"{setting} needs {module}, which is not installed: install it into an environment of its "
        f"own, and name its interpreter, interpreters.{module}=PYTHON"
    )


@lru_cache(maxsize=8)
def package_version_in(python: str, package: str) -> str | None:
    """The version of a package in the interpreter `python`; None if the package or the interpreter
    is missing."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return _output(python, program) or None


def check_has(module: str, python: str) -> None:
    """Raise UserError when the interpreter `python` does not exist or does not have `module`."""
    # looks up the module instead of the package, because builds of vLLM differ in the package name
    program = f"from importlib.util import find_spec; print(find_spec({module!r}) or '')"
    if not _output(python, program):
        raise UserError(
            f"interpreters.{module}={python} has no {module}: install it there, or name another"
        )


def _output(python: str, program: str) -> str:
    """Output of a program that the interpreter `python` runs; "" if the program fails."""
    command = [python, "-I", "-c", program]
    try:
        return subprocess.run(command, capture_output=True, text=True, env={}).stdout.strip()
    except OSError:
        return ""
