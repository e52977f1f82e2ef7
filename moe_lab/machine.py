"""The machine: the processors, the GPUs and the main memory that this process may use, and the
packages of its Pythons. No torch."""

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
    """Processors that this process may use: those that it is bound to, or fewer by its control
    group."""
    limits = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits = [len(os.sched_getaffinity(0))]
    # microseconds in each period: version 2 has both in one file, version 1 has a file for each
    quotas: list[Sequence[str]] = [text.split() for text in _group_limits("cpu", "cpu.max", "")]
    used = _group_limits("cpu", "", "cpu.cfs_quota_us")
    periods = _group_limits("cpu", "", "cpu.cfs_period_us")
    quotas += zip(used, periods, strict=True)
    for quota, period in quotas:
        if quota not in ("max", "-1"):
            limits.append(math.ceil(int(quota) / int(period)))
    if requested := os.environ.get("SLURM_CPUS_PER_TASK"):  # clusters may not bind processes to it
        limits.append(int(requested))
    return max(1, min(limits))


def main_memory() -> float:
    """Most bytes of main memory that this process may use: those of the machine, the limit of its
    control group, or those that its Slurm job requested; of these its part where it is one of
    several workers (WORKERS)."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for text in _group_limits("memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdigit():
            limits.append(float(text))
    requested = os.environ.get("SLURM_MEM_PER_NODE", "")  # MiB; 0 for all
    if requested.strip("0").isdigit():  # clusters may not limit the group
        limits.append(2.0**20 * int(requested))
    return min(limits) / int(os.environ.get(WORKERS, "1"))


def release_memory() -> None:
    """Free what nothing refers to any more, on the GPU too."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def visible_gpus() -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES, one for each GPU that torch finds in this process: of NVIDIA or
    AMD."""
    count = gpu_count()
    ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ids.split(",")[:count] if ids else [str(number) for number in range(count)]


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """Number of GPUs that torch finds with the environment of this process. Another process runs
    torch, which takes seconds to import, and only if it is built for GPUs."""
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
    """Contents of the files of a limit, of the control groups that this process is in and of those
    around them: `file_in_2` in version 2, `file_in_1` in version 1, where each controller has
    groups of its own."""
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
def installed(package: str) -> str | None:
    """The version of `package`, None if it is not installed. Cached, because reading metadata takes
    milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def interpreter(module: str, path: str | None, user: str) -> str:
    """The Python that has `module`: `path` of interpreters.MODULE, or that of `make MODULE`, or
    this one.

    Raises UserError, for the `user` that needs it, when there is none.
    """
    if path is not None:
        python = Path(path).expanduser()
        if not python.is_file():
            raise UserError(
                f"interpreters.{module}={path}, and there is no such file: run make {module}"
            )
        return str(python.absolute())
    # Links are resolved because torch compiles nothing below a path with a space, which vLLM needs.
    made = (_ROOT / f".venv-{module}").resolve() / "bin" / "python"
    if made.is_file():
        return str(made)
    if find_spec(module) is not None:
        return sys.executable
    raise UserError(
        f"{user} needs {module}, which is not installed: run make {module}, or name an interpreter "
        f"that has it, interpreters.{module}=PYTHON"
    )


@lru_cache(maxsize=8)
def installed_in(python: str, package: str) -> str | None:
    """The version of `package` in another interpreter; None if either does not exist."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return _output(python, program) or None


def check_has(module: str, python: str) -> None:
    """Raise UserError when the interpreter `python` does not exist or has no `module`."""
    # a module, not a package: builds of vLLM have several names
    program = f"from importlib.util import find_spec; print(find_spec({module!r}) or '')"
    if not _output(python, program):
        raise UserError(
            f"interpreters.{module}={python} has no {module}: run make {module}, or name another"
        )


def _output(python: str, program: str) -> str:
    """What a program prints in another interpreter; "" if it fails, or there is no such
    interpreter."""
    line = [python, "-I", "-c", program]
    try:
        return subprocess.run(line, capture_output=True, text=True, env={}).stdout.strip()
    except OSError:
        return ""
