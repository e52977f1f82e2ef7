"""What timings are taken on and with: CPU seconds of this process, or seconds of a CUDA device that has finished."""

from __future__ import annotations

import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def describe(device: str) -> str:
    """One line: the device, its threads or memory, and the versions."""
    if device == "cpu":
        where = f"{_processor()}, {torch.get_num_threads()} threads"
    else:
        about = torch.cuda.get_device_properties(device)
        where = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"{where}, torch {torch.__version__}, Python {platform.python_version()}"


def seconds(device: str, run: Callable[[], object]) -> float:
    """What `run` takes: CPU seconds of all threads, which other work on the machine disturbs little; on CUDA seconds
    until the device has done it all."""
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak(device: str) -> int:
    """Bytes that were in use at most: of this process so far, or on the CUDA device."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(device)


def report(what: str, figures: list[float], relation: str, bar: float) -> bool:
    """Print the median of some ratios with their bar, "<=" or ">="; True when the bar fails."""
    median = statistics.median(figures)
    good = median <= bar if relation == "<=" else median >= bar
    spread = f"{min(figures):.2f} to {max(figures):.2f} in {len(figures)} pairs"
    print(f"  {what}: {median:.2f} ({spread}), bar {relation} {bar:.2f}: {'ok' if good else 'FAILED'}", flush=True)
    return not good


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
