"""Provenance of a result: the code and its version, the machine, and what the step took. Or, of a
step that failed, why, and whether the next run tries it again."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import moe_lab
from moe_lab.errors import DISK_FULL, Unavailable, UserError, mask
from moe_lab.json_files import Damaged, digest, read_json
from moe_lab.machine import package_version, processor

NOTED = "code_state.json"
"""File in a copy of the package for Slurm jobs with the `code_state` of the original."""


@cache
def code_state() -> dict[str, Any]:
    """Version of moe_lab; in a checkout also the commit and a digest of what is not committed."""
    noted = Path(moe_lab.__file__).parent / NOTED
    with contextlib.suppress(FileNotFoundError, Damaged):
        copied: dict[str, Any] = read_json(noted, {"version": str})
        return copied
    state: dict[str, Any] = {"version": moe_lab.__version__}

    def git(*words: str) -> str:  # also in a checkout that a colleague owns
        line = ("git", "-c", "safe.directory=*", *words)
        done = subprocess.run(line, cwd=noted.parent, capture_output=True, check=True)
        return done.stdout.decode(errors="surrogateescape")

    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        # an environment may lie in a checkout of something else
        git("ls-files", "--error-unmatch", "__init__.py")
        edited = git("diff", "HEAD", "--", ".")
        new = git("ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]
        files = {
            file: path
            for file in new
            if (path := noted.parent / file).is_file() and os.access(path, os.R_OK)
        }
        edited += "".join(
            f"{file} {sha256(path.read_bytes()).hexdigest()}" for file, path in files.items()
        )
        state |= {
            "commit": git("rev-parse", "HEAD").strip(),
            "edits": digest(edited)[:12] if edited else None,
        }
    return state


PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "datasets"),
    *("lm-eval", "evalplus", "bitsandbytes"),
)
"""Packages whose versions are recorded."""


DRIVER = Path("/proc/driver/nvidia/version")


def provenance(start: float) -> dict[str, Any]:
    """Provenance of a step that began at `start` (seconds since the epoch): code, versions,
    machine, time, memory; and threads of torch, and names, driver and peak bytes of the GPUs that
    it used, each None in a process that used none.
    """
    torch: Any = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    driver = torch.version.cuda if on_gpu else None
    return {
        "code": code_state(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "processor": processor(),
        "started": start,
        "seconds": round(time.time() - start, 3),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "threads": torch.get_num_threads() if torch else None,
        "gpus": [torch.cuda.get_device_name(number) for number in gpus] if on_gpu else None,
        "driver": DRIVER.read_text().splitlines()[0] if on_gpu and DRIVER.is_file() else driver,
        "peak_gpu_memory_bytes": sum(map(torch.cuda.max_memory_allocated, gpus))
        if on_gpu
        else None,
    }


NO_ROOM = (
    "the disk of the store is full: make room and start the same command again, what is "
    "finished is kept"
)
TRANSIENT = {
    *DISK_FULL,
    errno.EIO,
    errno.ENOMEM,
    errno.EROFS,
    errno.ESTALE,
    errno.ENODEV,
    errno.ENOTCONN,
}
"""Numbers of errors that are the machine's fault, not the work's: the next run tries the step
again."""


def error_document(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: a message for the user, the trace for the log, and whether a rerun
    should try again."""
    text = str(error) or type(error).__name__
    transient = isinstance(error, (MemoryError, Unavailable)) or (
        isinstance(error, OSError) and error.errno in TRANSIENT
    )
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        text = f"out of memory: a smaller batch_size, or a device with more of it, helps ({text})"
        transient = True
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        text = NO_ROOM
    return {
        "message": mask(text),
        "type": type(error).__name__,
        "user": isinstance(error, UserError) or transient,
        "transient": transient,
        "environment": _is_of_environment(error),
        "trace": ""
        if isinstance(error, UserError)
        else mask("".join(traceback.format_exception(error))),
        "code": code_state(),
    }


MISSING_SYMBOL = re.compile(
    "undefined symbol|cannot open shared object file|symbol not found|No module named|cannot "
    "import name"
)
"""In messages of exceptions; also in those of other processes, which arrive as texts."""


def _is_of_environment(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, is about what is installed: a package, a name in one, or
    a library."""
    while error is not None:
        of_module = isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)
        if isinstance(error, ImportError) or of_module or MISSING_SYMBOL.search(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
