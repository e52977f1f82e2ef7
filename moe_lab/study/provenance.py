"""Provenance of a result: version of the code, machine, time and memory. For a failed step: the
error as JSON, and whether the next run tries the step again."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab.errors import DISK_FULL, Unavailable, UserError, mask
from moe_lab.json_files import Damaged, Document, digest, read_json
from moe_lab.machine import package_version, processor

CODE_STATE_FILE = "code_state.json"
"""File in the copy of the package that Slurm jobs run, with the `code_state` of the original."""


@cache
def code_state() -> Document:
    """State of the code of moe_lab as a JSON object with the entry "version". A git checkout also
    has "commit", a hash, and "edits", a digest of uncommitted changes (None without changes). A
    copy of the package that Slurm jobs run has the state of the original package."""
    package = Path(moe_lab.__file__).parent
    with contextlib.suppress(FileNotFoundError, Damaged):
        original: Document = read_json(package / CODE_STATE_FILE, {"version": str})
        return original
    state: Document = {"version": moe_lab.__version__}

    def git(*arguments: str) -> str:
        # safe.directory allows a checkout that a colleague owns
        command = ("git", "-c", "safe.directory=*", *arguments)
        process = subprocess.run(command, cwd=package, capture_output=True, check=True)
        return process.stdout.decode(errors="surrogateescape")

    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        # fails, as intended, if the package is installed inside the checkout of another project
        git("ls-files", "--error-unmatch", "__init__.py")
        edits = git("diff", "HEAD", "--", ".")
        for file in git("ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]:
            path = package / file
            if path.is_file() and os.access(path, os.R_OK):
                edits += f"{file} {sha256(path.read_bytes()).hexdigest()}"
        state |= {
            "commit": git("rev-parse", "HEAD").strip(),
            "edits": digest(edits)[:12] if edits else None,
        }
    return state


PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "datasets",
    "lm-eval",
    "evalplus",
    "bitsandbytes",
)
"""Packages whose versions are recorded."""


DRIVER = Path("/proc/driver/nvidia/version")
"""File whose first line has the version of the GPU driver."""


def provenance(start: float) -> Document:
    """Provenance of a step that began at `start` (seconds since the epoch), as a JSON object.
    "gpus", "driver" and "peak_gpu_memory_bytes" are None if this process used no GPU. "driver" is
    the version of CUDA if the version of the GPU driver cannot be read."""
    torch: Any = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    cuda = torch.version.cuda if on_gpu else None
    return {
        "code": code_state(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "processor": processor(),
        "started": start,
        "seconds": round(time.time() - start, 3),
        # ru_maxrss is in KiB, on macOS in bytes
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "threads": torch.get_num_threads() if torch else None,
        "gpus": [torch.cuda.get_device_name(number) for number in gpus] if on_gpu else None,
        "driver": DRIVER.read_text().splitlines()[0] if on_gpu and DRIVER.is_file() else cuda,
        "peak_gpu_memory_bytes": sum(map(torch.cuda.max_memory_allocated, gpus))
        if on_gpu
        else None,
    }


DISK_FULL_MESSAGE = (
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
"""Numbers of system errors after which the next run tries the step again."""


def error_document(error: BaseException) -> Document:
    """The exception with which a step failed, as a JSON object with these entries:

    message: text for the user. trace: text for the log, "" for a UserError. code: `code_state`.
    user: whether the message suffices without the trace. transient: whether the error may not occur
    at another time or on another machine."""
    text = str(error) or type(error).__name__
    transient = isinstance(error, (MemoryError, Unavailable)) or (
        isinstance(error, OSError) and error.errno in TRANSIENT
    )
    # compared by name, as torch may not be imported
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        text = f"out of memory: lower calibration.batch_tokens or benchmark.batch_size ({text})"
        transient = True
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        text = DISK_FULL_MESSAGE
    return {
        "message": mask(text),
        "user": isinstance(error, UserError) or transient,
        "transient": transient,
        "trace": ""
        if isinstance(error, UserError)
        else mask("".join(traceback.format_exception(error))),
        "code": code_state(),
    }
