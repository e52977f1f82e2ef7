"""Ctrl-C while a command still imports is one sentence and exit code 130, as it is later
(`errors.end_with`).

The first import of every command. It imports next to nothing, so that the time in which Python
itself answers is short.
"""

import os
import sys
from types import TracebackType


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("\nstopped\n")
    sys.stderr.flush()
    os._exit(130)


sys.excepthook = _end
