"""How a result came about: versions, commit, host, time, peak memory."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import time
from typing import Any

from moe_lab.evaluation.harness import installed
from moe_lab.study.job import code_state

PACKAGES = ("torch", "transformers", "lm-eval", "evalplus", "safetensors", "numpy", "bitsandbytes", "peft")


def provenance(start: float) -> dict[str, Any]:
    """What is written beside the result of a step that began at `start`, seconds since the epoch."""
    return {
        "code": code_state(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "started": start,
        "seconds": round(time.time() - start, 3),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "peak_gpu_memory_bytes": _gpu_peak(),
    }


def _gpu_peak() -> int | None:
    """Bytes that torch held at once on each GPU at most, added up; None in a process that used none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.max_memory_allocated(number)) for number in range(torch.cuda.device_count()))
