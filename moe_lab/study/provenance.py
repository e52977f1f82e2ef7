"""What is recorded about a step. A finished step has step.json, with the provenance of its result
and the hashes of its files, by which missing and damaged files are found. A failed step has an
error as JSON."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import resource
import socket
import stat
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab.errors import DISK_FULL, Unavailable, UserError, mask
from moe_lab.json_files import Damaged, Document, digest, read_json, read_sealed, write_sealed
from moe_lab.machine import package_version, processor

STEP = "step.json"
"""File in the folder of every finished step, besides its results: identity, provenance, size and
sha256 of each file, and the modification time that all files were given.

Hashing takes most of a second per GiB, so a study that starts compares only sizes and times. The
time is an even number of seconds, which all file systems can store. It is before the publication of
the step, so any later write to a file changes the file's time."""
PROVENANCE = "provenance.json"
"""File in which a worker writes the provenance of a step; `seal` moves it into STEP."""
TICK = 2
"""Seconds between two modification times on the file systems with the coarsest clocks."""
NANO = 10**9


def seal(folder: Path, document: Document) -> None:
    """Write STEP, and set the permissions and times of a step's files for publication.

    `document`: the identity of the step. For a step copied from another store, `document` is the
    complete content of STEP in that store. The caller must have compared the files with it."""
    provenance: Document = {}
    with suppress(FileNotFoundError):  # a copied step has its provenance in `document`
        provenance = read_json(folder / PROVENANCE, {})
        (folder / PROVENANCE).unlink()
    # `document` comes last: for a copied step, it has these entries, too
    content = {"provenance": provenance, "time": (int(time.time()) // TICK - 1) * TICK, **document}
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    if "files" not in content:
        content["files"] = {str(path.relative_to(folder)): file_entry(path) for path in files}
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in paths:
        if path.is_symlink():  # leads to a file of another store
            continue
        if path.is_dir():
            path.chmod(mode)
        else:
            path.chmod(mode & 0o666)  # safetensors makes files that only their owner may read
            os.utime(path, ns=(content["time"] * NANO, content["time"] * NANO))
    write_sealed(folder / STEP, content, indent=1)
    (folder / STEP).chmod(mode & 0o666)


def file_entry(path: Path) -> Document:
    """Entry of a file in STEP: {"bytes": size, "sha256": hash}."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def read_step(folder: Path) -> Document:
    """Content of STEP of a finished step. Raises FileNotFoundError when STEP is missing, and
    Damaged when STEP was changed after it was written."""
    return read_sealed(folder / STEP)


def damaged_files(folder: Path, *, hash_all: bool) -> dict[str, str]:
    """Missing and damaged files of a step's folder: name of the file -> "missing" or "damaged".

    A file with another modification time than in STEP is hashed; with `hash_all`, every file is
    hashed. An unchanged file then gets the time in STEP. A damaged file must not keep this time, as
    later calls without `hash_all` would not hash it. A link to a damaged file that has the time in
    STEP is removed."""
    try:
        document = read_step(folder)
    except FileNotFoundError:
        return {STEP: "missing"}
    except Damaged:
        return {STEP: "damaged"}
    states = {}
    for name, expected in document["files"].items():
        try:
            if not _is_unchanged(folder / name, expected, document["time"], hash_all):
                states[name] = "damaged"
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            # a link may lead to a file that this user must not read: it counts as missing
            if isinstance(error, PermissionError) and not (folder / name).is_symlink():
                raise
            states[name] = "missing"
    return states


def _is_unchanged(path: Path, expected: Document, moment: int, hash_all: bool) -> bool:
    """Whether a file has the `expected` size and hash. `moment`: modification time of the file
    according to STEP, in seconds."""
    status = path.stat()
    if status.st_size != expected["bytes"]:
        return False
    has_moment = status.st_mtime_ns == moment * NANO
    if has_moment and not hash_all:
        return True
    with path.open("rb") as file:
        is_same = bool(_sha256(file) == expected["sha256"])
        # The time is wrong if an unchanged file has another time than `moment`, or a changed file
        # has the time `moment`. It is only corrected if no other process has written the file since
        # `path.stat()`.
        if is_same != has_moment and os.fstat(file.fileno()).st_mtime_ns == status.st_mtime_ns:
            # the time of a file of another user cannot be set
            with suppress(OSError, OverflowError):
                _set_time(path, file, moment if is_same else None)
    return is_same


def _set_time(path: Path, file: BufferedReader, moment: int | None) -> None:
    """Set the modification time of an open file to `moment` (in seconds), or to the present time if
    `moment` is None, which stands for a damaged file. Links lead to files of another store, so
    their times are not set."""
    if not path.is_symlink():
        time_ns = time.time_ns() if moment is None else moment * NANO
        os.utime(file.fileno(), ns=(time_ns, time_ns))
    elif moment is None:
        path.unlink()


CODE_STATE_FILE = "code_state.json"
"""File in the copy of the package that Slurm jobs run, with the `code_state` of the original."""


@cache
def code_state() -> Document:
    """State of the code of moe_lab as a JSON object with the entry "version". A git checkout also
    has "commit", a hash, and "edits", a digest of uncommitted changes (None without changes). A
    copy of the package that Slurm jobs run has the state of the original package."""
    package = Path(moe_lab.__file__).parent
    with suppress(FileNotFoundError, Damaged):
        original: Document = read_json(package / CODE_STATE_FILE, {"version": str})
        return original
    state: Document = {"version": moe_lab.__version__}

    def git(*arguments: str) -> str:
        # safe.directory allows a checkout that a colleague owns
        command = ("git", "-c", "safe.directory=*", *arguments)
        process = subprocess.run(command, cwd=package, capture_output=True, check=True)
        return process.stdout.decode(errors="surrogateescape")

    with suppress(OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        # fails, as intended, if the package is installed inside the checkout of another project
        git("ls-files", "--error-unmatch", "__init__.py")
        edits = git("diff", "HEAD", "--", ".")
        for file in git("ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]:
            path = package / file
            if path.is_file() and os.access(path, os.R_OK):
                edits += f"{file} {hashlib.sha256(path.read_bytes()).hexdigest()}"
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


def provenance(start: float) -> Document:
    """Provenance of a step that began at `start` (seconds since the epoch), as a JSON object.
    "gpus" and "peak_gpu_memory_bytes" are None if this process used no GPU."""
    torch: Any = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
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
        "gpus": [torch.cuda.get_device_name(number) for number in gpus] if on_gpu else None,
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
