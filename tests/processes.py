"""What tests ask of processes. Nothing here has a limit of its own: a test that waits in vain ends with pytest's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


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
