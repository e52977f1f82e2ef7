"""Models: their files, shapes, families and loading.

Here: the processors, the GPUs and the main memory that this process may use, and tokens that end
texts. No torch.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
GROUPS = Path("/proc/self/cgroup")
LIMITS = Path("/sys/fs/cgroup")
WORKERS = "MOE_LAB_WORKERS"
"""Environment variable with the number of processes that share the memory of this one."""


def processor() -> str:
    """Name of the processor."""
    named = (
        re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE)
        if CPUINFO.is_file()
        else None
    )
    return (named[1] if named else platform.processor() or platform.machine()).strip()


def main_memory() -> float:
    """Most bytes of main memory that this process may use: those of the machine, or the limit of
    its control group, or those that its Slurm job has asked for; or its part of them where it is
    one of several workers (WORKERS)."""
    limits = [
        float(text)
        for text in _stated("memory", "memory.max", "memory.limit_in_bytes")
        if text.isdigit()
    ]
    # MiB, 0 for all; clusters may not limit the group
    asked = os.environ.get("SLURM_MEM_PER_NODE", "")
    limits += [2.0**20 * int(asked)] if asked.strip("0").isdigit() else []
    there = min([float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), *limits])
    return there / int(os.environ.get(WORKERS, "1"))


def release_memory() -> None:
    """Free what nothing refers to any more, on the GPU too."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def eos_tokens(configured: int | list[int] | None, tokenizer: Any) -> list[int]:
    """The tokens that end a text: the configured ones and the tokenizer's, in order."""
    several = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*several, tokenizer.eos_token_id) if token is not None})


def cores() -> int:
    """Processors that this process may use: those that it is bound to, or fewer by its control
    group."""
    quotas = [text.split() for text in _stated("cpu", "cpu.max", "")]  # microseconds of so many
    quotas += map(
        list,
        zip(
            *(_stated("cpu", "", f"cpu.cfs_{name}_us") for name in ("quota", "period")), strict=True
        ),
    )
    allowed = [
        math.ceil(int(quota) / int(period))
        for quota, period in quotas
        if quota not in ("max", "-1")
    ]
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    # clusters may not bind processes to them
    asked = int(os.environ.get("SLURM_CPUS_PER_TASK") or bound)
    return max(1, min([bound, asked, *allowed]))


def visible_gpus() -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES, one for each GPU that torch finds in this process: of NVIDIA or
    AMD."""
    count = gpu_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """Number of GPUs that torch finds with the environment of this process. Another process asks
    it, as torch takes seconds to import, and only if it is built for GPUs."""
    try:
        build = version("torch")
    except PackageNotFoundError:
        return 0
    if build.endswith("+cpu"):
        return 0
    count = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-P", "-c", count], capture_output=True)
    return int(asked.stdout or 0)  # a step that needs torch reports that it is broken


def _stated(controller: str, in_2: str, in_1: str) -> Iterator[str]:
    """What a file says of the control groups this process is in, and of those around them: `in_2`
    in version 2, `in_1` in version 1, where a controller has groups of its own."""
    for line in GROUPS.read_text().splitlines() if GROUPS.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = LIMITS / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / (in_1 if controllers else in_2)
            if file.is_file():
                yield file.read_text().strip()
            if folder == LIMITS:
                break
