"""Helpers of the benchmark programs: command line, timing, memory, and comparison of figures with
their bars.

torch is imported late, so that programs that do not need it are measured without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
GIB = 2**30


def parser(program: str, doc: str) -> argparse.ArgumentParser:
    """The command line of `python -m benchmarks.PROGRAM`, described by the first line of its
    docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}", description=doc.splitlines()[0]
    )


def program_isolation() -> str:
    """How programs of models are isolated on this machine: landlock, bubblewrap, or none."""
    from moe_lab.evaluation.sandbox.isolation import ISOLATIONS, NONE, missing

    return next((kind for kind in ISOLATIONS if missing(kind) is None), NONE)


# Timing.


def describe(device: str) -> str:
    """One line with the device, its threads or memory, and the versions."""
    import torch

    if device == "cpu":
        hardware = f"{_processor()}, {torch.get_num_threads()} threads"
    else:
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / GIB
        hardware = f"{properties.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}"
    return f"{hardware}, torch {torch.__version__}, Python {platform.python_version()}"


def _processor() -> str:
    """The name of the processor."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process, which other work on the machine disturbs
    little."""
    start = time.process_time()
    run()
    return time.process_time() - start


def wall_seconds(run: Callable[[], object]) -> float:
    """Seconds of wall-clock time."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def timed(run: Callable[[], T]) -> tuple[T, float, float]:
    """(result of `run`, wall-clock seconds, CPU seconds including those of ended child
    processes)."""
    wall = time.perf_counter()
    cpu = _all_cpu_seconds()
    result = run()
    return result, time.perf_counter() - wall, _all_cpu_seconds() - cpu


def _all_cpu_seconds() -> float:
    """CPU seconds so far, of this process and of ended child processes."""
    usages = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def device_seconds(device: str, run: Callable[[], object]) -> float:
    """CPU seconds of `run` on the CPU; on CUDA, wall-clock seconds until the device has
    finished."""
    if device == "cpu":
        return cpu_seconds(run)
    import torch

    def finished() -> None:
        run()
        torch.cuda.synchronize(device)

    torch.cuda.synchronize(device)
    return wall_seconds(finished)


def rounds(variants: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Name of a variant -> its CPU seconds in each of `count` rounds; in a round, all variants run
    one after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(count):
        for name, run in variants.items():
            seconds[name].append(cpu_seconds(run))
    return seconds


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Ratios of corresponding numbers."""
    pairs = zip(numerators, denominators, strict=True)
    return [numerator / denominator for numerator, denominator in pairs]


# Memory and files.


def peak(device: str) -> int:
    """Peak memory in bytes so far, of this process or on the CUDA device."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return torch.cuda.max_memory_allocated(device)


def in_own_process(program: str, option: str, value: str) -> dict[str, float]:
    """Run a benchmark program in a new process, with the arguments of this process and one more
    option; returns the JSON that it prints."""
    command = [sys.executable, "-m", f"benchmarks.{program}", *sys.argv[1:], option, value]
    document: dict[str, float] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )
    return document


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def bytes_of(folder: Path) -> int:
    """Size of a checkpoint's weights."""
    return sum(file.stat().st_size for file in weight_files(folder))


def drop_cache(folder: Path) -> None:
    """Drop a checkpoint's weights from the system's page cache."""
    os.sync()
    for path in weight_files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading_seconds(folder: Path) -> float:
    """Wall-clock seconds for reading a checkpoint's weights from the disk in pieces of 8 MiB."""
    drop_cache(folder)
    buffer = bytearray(8 << 20)

    def read() -> None:
        for path in weight_files(folder):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return wall_seconds(read)


# Bars.


def misses(what: str, value: float, relation: str, bar: float, note: str = "") -> bool:
    """Print a figure with its bar; True when it misses the bar.

    relation: "<=" or ">=", between the figure and the bar; note: a text after the figure."""
    passed = value <= bar if relation == "<=" else value >= bar
    print(
        f"  {what}: {value:.2f}{note}, bar {relation} {bar:.2f}: {'ok' if passed else 'FAILED'}",
        flush=True,
    )
    return not passed


def median_misses(what: str, figures: list[float], relation: str, bar: float) -> bool:
    """Print the median of figures with its bar; True when it misses the bar. See `misses`."""
    spread = f" ({min(figures):.2f} to {max(figures):.2f} in {len(figures)} pairs)"
    return misses(what, statistics.median(figures), relation, bar, spread)
