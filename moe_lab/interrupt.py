"""End a command that still imports at Ctrl-C, with one sentence and exit code 130, as
`errors.end_with` does later.

This is the first import of every command. It imports next to nothing, so that the time in which
Ctrl-C prints a stack trace is short.
"""

import os
import sys
from types import TracebackType


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook for exceptions that end the process. Ctrl-C prints a word instead of a stack trace,
    and ends the process at once; other exceptions are handled as usual."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("\nstopped\n")
    sys.stderr.flush()
    os._exit(130)


sys.excepthook = _end
