"""The machine: processors, GPUs and main memory that this process may use, Python interpreters and
their packages. No torch."""

from __future__ import annotations

import gc
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from moe_lab.errors import UserError

_ROOT = Path(__file__).resolve().parents[1]
CPUINFO = Path("/proc/cpuinfo")
CONTROL_GROUPS = Path("/proc/self/cgroup")
LIMITS = Path("/sys/fs/cgroup")
WORKERS = "MOE_LAB_WORKERS"
"""Environment variable with the number of processes that share the memory of this one."""


def processor() -> str:
    """Name of the processor."""
    if CPUINFO.is_file():
        name = re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE)
        if name:
            return name[1].strip()
    return (platform.processor() or platform.machine()).strip()


def cores() -> int:
    """Number of processors that this process may use: those that it is bound to, or fewer by the
    limits of its control group or its Slurm job."""
    limits = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits = [len(os.sched_getaffinity(0))]
    # quota and period in microseconds: one file in version 2, a file for each in version 1
    limit_pairs: list[Sequence[str]] = [
        text.split() for text in _group_limits("cpu", "cpu.max", "")
    ]
    quotas = _group_limits("cpu", "", "cpu.cfs_quota_us")
    periods = _group_limits("cpu", "", "cpu.cfs_period_us")
    limit_pairs += zip(quotas, periods, strict=True)
    for quota, period in limit_pairs:
        if quota not in ("max", "-1"):
            limits.append(math.ceil(int(quota) / int(period)))
    # clusters may not bind processes to the processors that they requested
    if requested := os.environ.get("SLURM_CPUS_PER_TASK"):
        limits.append(int(requested))
    return max(1, min(limits))


def main_memory() -> float:
    """Most bytes of main memory that this process may use: the least of the machine's memory, the
    limits of its control groups and the request of its Slurm job, divided by the number of workers
    (WORKERS)."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for text in _group_limits("memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdigit():
            limits.append(float(text))
    requested = os.environ.get("SLURM_MEM_PER_NODE", "")  # MiB; 0 for all
    if requested.strip("0").isdigit():  # clusters may not limit the control group
        limits.append(2.0**20 * int(requested))
    return min(limits) / int(os.environ.get(WORKERS, "1"))


def release_memory() -> None:
    """Free objects without references, and GPU memory that torch has cached."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def visible_gpus() -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES, one for each GPU (of NVIDIA or AMD) that torch finds in this
    process."""
    count = gpu_count()
    ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ids.split(",")[:count] if ids else [str(number) for number in range(count)]


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """Number of GPUs that torch finds with the environment of this process. Torch is imported in
    another process, because that takes seconds, and only if it is built for GPUs."""
    try:
        build = version("torch")
    except PackageNotFoundError:
        return 0
    if build.endswith("+cpu"):
        return 0
    program = "import torch; print(torch.cuda.device_count())"
    completed = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True)
    return int(completed.stdout or 0)  # a step that needs torch reports that it is broken


def _group_limits(controller: str, file_in_2: str, file_in_1: str) -> Iterator[str]:
    """Values of a limit in the control groups of this process and the groups around them. The limit
    is in `file_in_2` of groups of version 2, and in `file_in_1` of groups of version 1, where each
    controller has groups of its own."""
    for line in CONTROL_GROUPS.read_text().splitlines() if CONTROL_GROUPS.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = LIMITS / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / (file_in_1 if controllers else file_in_2)
            if file.is_file():
                yield file.read_text().strip()
            if folder == LIMITS:
                break


@cache
def package_version(package: str) -> str | None:
    """The version of `package`, None if it is not installed. Cached, because reading metadata takes
    milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def interpreter(module: str, path: str | None, user: str) -> str:
    """The Python that has `module`: `path` (of interpreters.MODULE), the one that `make MODULE`
    installs, or the one of this process.

    Raises UserError when none has it; `user` is the setting that needs it.
    """
    if path is not None:
        python = Path(path).expanduser()
        if not python.is_file():
            raise UserError(
                f"interpreters.{module}={path}, and there is no such file: run make {module}"
            )
        return str(python.absolute())
    # torch cannot compile for vLLM below a path with a space, so the folder may be a link
    installed_by_make = (_ROOT / f".venv-{module}").resolve() / "bin" / "python"
    if installed_by_make.is_file():
        return str(installed_by_make)
    if find_spec(module) is not None:
        return sys.executable
    raise UserError(
        f"{user} needs {module}, which is not installed: run make {module}, or name an interpreter "
        f"that has it, interpreters.{module}=PYTHON"
    )


@lru_cache(maxsize=8)
def package_version_in(python: str, package: str) -> str | None:
    """The version of `package` in the interpreter `python`; None without the package or the
    interpreter."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return _output(python, program) or None


def check_has(module: str, python: str) -> None:
    """Raise UserError when the interpreter `python` does not exist or has no `module`."""
    # asks for the module, since the packages of vLLM's builds have several names
    program = f"from importlib.util import find_spec; print(find_spec({module!r}) or '')"
    if not _output(python, program):
        raise UserError(
            f"interpreters.{module}={python} has no {module}: run make {module}, or name another"
        )


def _output(python: str, program: str) -> str:
    """Text that a program prints in another interpreter; "" if it fails, or if there is no such
    interpreter."""
    command = [python, "-I", "-c", program]
    try:
        return subprocess.run(command, capture_output=True, text=True, env={}).stdout.strip()
    except OSError:
        return ""
