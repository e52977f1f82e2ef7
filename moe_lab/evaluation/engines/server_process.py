"""Run a server, and end it with all its child processes on SIGTERM or when the parent process has died.

    python server_process.py PARENT SECONDS COMMAND ...

PARENT is a process id, SECONDS is the time between telling the server to stop and killing it. This process and the
server form a process group, which it always kills at the end. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_POLL_SECONDS = 0.1


def main(parent: int, seconds: float, command: list[str]) -> None:
    """Run the command until it ends, a SIGTERM comes, or the parent dies."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        # A folder of PATH that may not be read hides that the program is nowhere.
        reason = error.strerror if shutil.which(command[0]) else "there is no such program"
        sys.exit(f"{command[0]} cannot be started: {reason}")
    while server.poll() is None and not stopping.wait(_POLL_SECONDS) and os.getppid() == parent:
        pass
    if server.poll() is None:
        os.killpg(0, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(seconds)
    elif server.returncode < 0:
        print(f"ended by {signal.Signals(-server.returncode).name}", flush=True)
    else:
        print(f"exit code {server.returncode}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
