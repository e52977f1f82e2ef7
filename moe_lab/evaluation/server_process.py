"""The process between moe_lab and a server: it ends when moe_lab does, and the server with all its child processes.

Requests are those of `moe_lab/child_process.py`. Standard library only.
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

from moe_lab.child_process import serve


class Watcher:
    """Runs one server in its own process group."""

    server: subprocess.Popen[bytes]
    grace = 0.0

    def start(self, command: Sequence[str], grace: float) -> None:
        """Start the server; `grace` are the seconds between telling it to stop and killing it."""
        self.grace = grace
        try:
            self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            # A folder of PATH that may not be read hides that the program is nowhere.
            reason = error.strerror if shutil.which(command[0]) else "there is no such program"
            raise ValueError(f"{command[0]} cannot be started: {reason}") from None
        threading.Thread(target=self._wait, daemon=True).start()

    def stop(self) -> None:
        """Tell the group to end, and wait for the server."""
        os.killpg(0, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired, AttributeError):  # it may not have been started
            self.server.wait(self.grace)

    def _wait(self) -> None:
        """End this process when the server has ended, after a line about it in the log."""
        code = self.server.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(how, file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # which is for the server
    watcher = Watcher()
    serve(watcher, watcher.stop)
