"""End a command that still imports at Ctrl-C, with one sentence and exit code 130, as
`errors.run_and_exit` does later; and end every command on Windows.

This is the first import of every command. It imports next to nothing, so that the time in which
Ctrl-C prints a stack trace is short.
"""

import os
import sys
from types import TracebackType


def _handle_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """After Ctrl-C, print "stopped" instead of a stack trace, and end the process at once."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    sys.stderr.write("\nstopped\n")
    sys.stderr.flush()
    os._exit(130)


sys.excepthook = _handle_uncaught
if sys.platform == "win32":
    sys.exit("moe_lab runs on Linux: on Windows, install it in WSL (Windows Subsystem for Linux)")
