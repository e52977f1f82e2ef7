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
    """Run the server by the command line `command`. When the server has ended, print its exit code
    or signal, and kill the whole process group, including this process. SystemExit if the server
    cannot be started."""
    # `_stop_at_end_of_input` sends SIGTERM to the whole process group, and this process must not
    # end by it. A handler is set instead of SIG_IGN, because the server would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except OSError as error:
        # if no folder of PATH has the program, the error may only say that one of the folders is
        # unreadable
        reason = error.strerror if shutil.which(command[0]) else "there is no such program"
        raise SystemExit(f"{command[0]} cannot be started: {reason}") from None
    threading.Thread(target=_stop_at_end_of_input, args=(server, grace), daemon=True).start()
    code = server.wait()
    outcome = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    print(outcome, file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


def _stop_at_end_of_input(server: subprocess.Popen[bytes], grace: float) -> None:
    """When standard input ends, end the whole process group, including this process."""
    os.read(0, 1)  # returns when moe_lab closes the pipe or ends
    os.killpg(0, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(grace)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
