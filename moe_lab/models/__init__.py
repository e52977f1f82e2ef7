"""Models: their files, shapes, families and loading.

Here: the processor, the main memory of the machine or of the control group of a job, and end tokens. No torch.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
GROUPS = Path("/proc/self/cgroup")
LIMITS = Path("/sys/fs/cgroup")


def processor() -> str:
    """Name of the processor."""
    named = re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE) if CPUINFO.is_file() else None
    return (named[1] if named else platform.processor() or platform.machine()).strip()


def main_memory() -> float:
    """Most bytes of main memory that this process may use: those of the machine, or the limit of its control group."""
    return min([float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), *_limits()])


def release_memory() -> None:
    """Free what nothing refers to any more, on the GPU too."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def eos_tokens(configured: int | list[int] | None, tokenizer: Any) -> list[int]:
    """The tokens that end a text: the configured ones and the tokenizer's, in order."""
    several = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*several, tokenizer.eos_token_id) if token is not None})


def _limits() -> Iterator[float]:
    """Limits of the control groups this process is in, of version 2 or 1."""
    for line in GROUPS.read_text().splitlines() if GROUPS.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        group = LIMITS / controllers / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / ("memory.limit_in_bytes" if controllers else "memory.max")
            if file.is_file() and (stated := file.read_text().strip()).isdigit():
                yield float(stated)
            if folder == LIMITS:
                break
