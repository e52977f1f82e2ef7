"""The process between moe_lab and a server. When moe_lab ends, this process ends the server, all
child processes of the server, and itself.

    python -m moe_lab.evaluation.server_process GRACE COMMAND...

GRACE is the time in seconds between telling the server to stop and killing it. Standard library
only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress


def main(grace: float, command: Sequence[str]) -> None:
    """Run the server until the server or standard input ends; then kill the whole process group."""
    # This process ignores SIGTERM, which `_stop_at_end_of_input` sends to the whole process group.
    # The server inherits SIG_IGN, but not a handler.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except OSError as error:
        # The error may be that a folder of PATH cannot be read, though no folder has the program.
        reason = error.strerror if shutil.which(command[0]) else "there is no such program"
        raise SystemExit(f"{command[0]} cannot be started: {reason}") from None
    threading.Thread(target=_stop_at_end_of_input, args=(server, grace), daemon=True).start()
    code = server.wait()
    end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    print(end, file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


def _stop_at_end_of_input(server: subprocess.Popen[bytes], grace: float) -> None:
    """Wait for the end of standard input. Then tell the server to stop, and after `grace` seconds
    kill the whole process group, including this process."""
    os.read(0, 1)  # returns when moe_lab closes the pipe or ends
    os.killpg(0, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(grace)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
