"""The process between moe_lab and a server: it ends when moe_lab does, and the server with all its
child processes.

    python -m moe_lab.evaluation.server_process GRACE COMMAND...

GRACE are the seconds between telling the server to stop and killing it. Standard library only.
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
    """Run the server until it ends, or standard input does. Ends the whole process group."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # which is for the server
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except OSError as error:
        # A folder of PATH that may not be read hides that the program is nowhere.
        reason = error.strerror if shutil.which(command[0]) else "there is no such program"
        raise SystemExit(f"{command[0]} cannot be started: {reason}") from None
    threading.Thread(target=_end_with_input, args=(server, grace), daemon=True).start()
    code = server.wait()
    print(
        f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}",
        file=sys.stderr,
        flush=True,
    )
    os.killpg(0, signal.SIGKILL)


def _end_with_input(server: subprocess.Popen[bytes], grace: float) -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(grace)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
