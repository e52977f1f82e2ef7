"""Name of the processor; total and free main memory, of the machine or of the control group that a job runs in; freeing
it. No torch."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")
GROUPS = Path("/proc/self/cgroup")
LIMITS = Path("/sys/fs/cgroup")


def processor() -> str:
    """Name of the processor."""
    named = re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE) if CPUINFO.is_file() else None
    return (named[1] if named else platform.processor() or platform.machine()).strip()


def free_memory() -> float:
    """Bytes of main memory available now without swapping, including what the system uses for caches."""
    return min([_stated("MemAvailable"), *(limit - used for limit, used in _limits())])


def release_memory() -> None:
    """Free what nothing refers to any more, on the GPU too."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _stated(name: str) -> float:
    """An entry of /proc/meminfo in bytes; all memory where there is no such file, as on a Mac."""
    if not MEMINFO.is_file():
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    entries = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    return 1024.0 * int(entries[name].split()[0]) if name in entries else float("inf")


def _limits() -> Iterator[tuple[float, float]]:
    """(limit, bytes used that cannot be reclaimed) of the control groups this process is in, of version 2 or 1."""
    for line in GROUPS.read_text().splitlines() if GROUPS.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        cached = "total_inactive_file" if controllers else "inactive_file"
        group = LIMITS / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / names[0]).is_file() and (stated := (folder / names[0]).read_text().strip()).isdigit():
                yield float(stated), float((folder / names[1]).read_text()) - _cached(folder / "memory.stat", cached)
            if folder == LIMITS:
                break


def _cached(file: Path, name: str) -> float:
    entries = dict(line.split() for line in file.read_text().splitlines())
    return float(entries.get(name, 0))
