"""Child processes that answer requests, in lines of JSON.

`Child` starts such a process, sends requests to the process and ends it. `serve` answers requests
in the child process; `python -m moe_lab.child_process MODULE` serves the functions of a module. A
request is [method, arguments]. Its replies are any number of {"item": value} and then
{"done": result}, or {"error": message, "kind": class of the error}. A child process ends when its
standard input is closed, which also happens when its parent is killed.

Standard library only: the child process may run in another interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

GRACE = 20.0
"""Seconds that a process may take to end by itself, before it is killed."""


class Ended(RuntimeError):
    """The child process has ended. The message has the exit code or the signal, and the last line
    of the process's log."""


class Refused(RuntimeError):
    """The child process replied with an error. `kind`: name of the class of that error."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Child(AbstractContextManager["Child"]):
    """A process that runs `serve`, in a session of its own. Its standard error is a temporary log.
    `environment`, `folder` (the current folder of the process) and `umask`: as in Popen."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        umask: int = -1,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            umask=umask,
        )
        self._log_content = b""
        """Content of the log when it was last read, for reading after `close`."""
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Lines of replies; "" after the process has closed its output."""
        threading.Thread(target=self._listen, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, seconds: float | None = None, **arguments: Any) -> Any:
        """The result of the worker's method `method`, which is not a generator. Arguments and
        errors are those of `replies`."""
        return next(self.replies(method, seconds, **arguments))["done"]

    def replies(
        self, method: str, seconds: float | None = None, **arguments: Any
    ) -> Iterator[dict[str, Any]]:
        """The replies to a request, which calls the worker's method `method` with `arguments`. The
        last reply has the key `done`; each other reply has an item of a generator. `seconds`: time
        limit for each reply; None: no limit.

        Raises Refused if the reply is an error, Ended if the process has ended, and TimeoutError if
        a reply takes too long. After Ended and TimeoutError the process does not run any more. If
        the caller does not take the last reply, the process is ended, too, because the next request
        would get the remaining replies.
        """
        assert self.process.stdin is not None
        is_finished = False
        try:
            # if the process has ended or was closed, the loop below raises Ended
            with suppress(OSError, ValueError):
                self.process.stdin.write(json.dumps([method, arguments]) + "\n")
                self.process.stdin.flush()
            while not is_finished:
                try:
                    line = self._replies.get(timeout=seconds)
                except queue.Empty:
                    raise TimeoutError(
                        f"no reply within {seconds:g} s: {_last_line(self.log())}"
                    ) from None
                if not line:
                    self._replies.put("")  # for the next request
                    code = self.process.wait()
                    reason = (
                        f"killed by {signal.Signals(-code).name}"
                        if code < 0
                        else f"exit code {code}"
                    )
                    raise Ended(f"{reason}: {_last_line(self.log())}")
                reply = json.loads(line)
                is_finished = "item" not in reply
                if "error" in reply:
                    raise Refused(reply["error"], reply["kind"])
                yield reply
        finally:
            if not is_finished:
                self.close()

    def log(self) -> str:
        """Text that the process has printed so far."""
        # pread, because seek would move the position at which the process writes
        if not self._log.closed:
            self._log_content = os.pread(
                self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0
            )
        return self._log_content.decode(errors="replace")

    def close(self) -> None:
        """Let the process end by itself within GRACE seconds. Then kill its process group, which
        has the process and the processes that it has started."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        # either error means that no process of the group is left
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log()
        self._log.close()

    def _listen(self) -> None:
        """Put the lines of the replies into the queue, and "" after the last line."""
        assert self.process.stdout is not None
        with self.process.stdout as replies:
            for line in replies:
                self._replies.put(line)
        self._replies.put("")


def _last_line(log: str) -> str:
    """The last line of a log that is not blank, or a text for messages about a log without one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing in its log"


def serve(worker: object, at_end: Callable[[], object] = lambda: None) -> None:
    """Answer the requests on standard input with methods of `worker`. At the end of standard input,
    call `at_end`, and then kill this process and its process group.

    If a method is a generator, each value that the generator yields is an item. Text that is
    printed to standard output goes to standard error.
    """
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # replies go to the original output, and everything that is printed to standard error
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def reply(**content: Any) -> None:
        """Write one line to the original standard output."""
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    threading.Thread(target=_receive, args=(requests, at_end), daemon=True).start()
    while True:
        method, arguments = requests.get()
        try:
            result = getattr(worker, method)(**arguments)
            if isinstance(result, Iterator):
                for item in result:
                    reply(item=item)
                result = None
            reply(done=result)
        except Exception as error:  # noqa: BLE001 - the parent process reports the error
            sys.excepthook(*sys.exc_info())
            reply(error=_sentence(error), kind=type(error).__name__)


def _receive(requests: queue.SimpleQueue[Any], at_end: Callable[[], object]) -> None:
    """Put the requests on standard input into a queue. At the end of standard input, call `at_end`,
    and then kill this process and its process group."""
    # not sys.stdin: a thread that waits for it holds a lock, which would block forked processes
    with os.fdopen(os.dup(0), encoding="utf-8") as lines:
        for line in lines:
            requests.put(json.loads(line))
    at_end()
    os.killpg(0, signal.SIGKILL)


def _sentence(error: Exception) -> str:
    """The message of an error on one line. For a ValidationError of pydantic, the messages of all
    mistakes."""
    reasons = [str(error)]
    if hasattr(error, "errors"):
        reasons = [part["msg"] for part in error.errors()]
    return " ".join("; ".join(reasons).split()) or type(error).__name__


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]))
