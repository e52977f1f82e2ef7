"""How tests start processes and ask about them, wherever this repository and its Python lie.

Nothing here has a limit of its own: a test that waits in vain ends with pytest's.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path


def quoted(*words: object) -> str:
    """A command line of this Python that a shell, or a setting that is read like one, takes apart into `words`."""
    return shlex.join([sys.executable, *map(str, words)])


def executable(file: Path, text: str, *options: str) -> Path:
    """Write a program that this Python runs, with `options` before it.

    `#!` cannot name a Python whose path has a space or is long, so that a shell starts it: Python takes the shell's
    first command for a text.
    """
    file.write_text(f"""#!/bin/sh\n'''exec' {quoted(*options)} "$0" "$@"\n' '''\n{text}""")
    file.chmod(0o755)
    return file


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, however long a busy machine takes."""
    while not condition():
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process has not ended; one that nobody waits for has ended too."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"
