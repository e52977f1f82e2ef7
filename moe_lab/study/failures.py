"""Why a step failed, as JSON: what the user reads, and whether the next run tries it again."""

from __future__ import annotations

import errno
import re
import traceback
from types import ModuleType
from typing import Any

from moe_lab.errors import DISK_FULL, Unavailable, UserError, mask
from moe_lab.study.provenance import code_state

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
