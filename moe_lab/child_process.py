"""Child processes that answer requests, in lines of JSON.

`ChildProcess` sends requests, and `serve` answers them in the child process.
`python -m moe_lab.child_process MODULE` serves the functions of a module. A child process ends when
its standard input is closed, which also happens when its parent is killed.

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


class ProcessEnded(RuntimeError):
    """The child process has ended."""


class ErrorReply(RuntimeError):
    """The child process replied with an error. `kind`: name of the class of that error."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def environment(*names: str, **variables: str) -> dict[str, str]:
    """The environment variables of a process that must not see all of ours, such as keys:
    `variables`, and those of this process that are called `names`."""
    # some interpreters find their shared libraries only by LD_LIBRARY_PATH
    inherited = {"LD_LIBRARY_PATH", *names} & {*os.environ}
    return {
        **{name: os.environ[name] for name in inherited},
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


class ChildProcess(AbstractContextManager["ChildProcess"]):
    """A child process in which `serve` calls methods of one object, the worker. The child's
    standard error goes to a temporary file, the log."""

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
            start_new_session=True,  # its own process group, which `close` kills
            umask=umask,
        )
        self._log_content = b""
        """Copy of the log that remains after `close`."""
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Replies of the child, one line each; "" after the child has closed its output."""
        threading.Thread(target=self._listen, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, seconds: float | None = None, **arguments: Any) -> Any:
        """Call the worker's method `method`, and return its result. The method must not be a
        generator. Arguments and errors are those of `replies`."""
        return next(self.replies(method, seconds, **arguments))["done"]

    def replies(
        self, method: str, seconds: float | None = None, **arguments: Any
    ) -> Iterator[dict[str, Any]]:
        """Call the worker's method `method`, and yield the child's replies. If the method is a
        generator, there is a reply {"item": value} for each value. The last reply is
        {"done": result}. `seconds`: time limit for each reply; None: no limit.

        Raises ErrorReply if the method fails, ProcessEnded if the child has ended, and TimeoutError
        if a reply takes too long. The child is ended after TimeoutError, and if the caller stops
        before the last reply.
        """
        assert self.process.stdin is not None
        is_finished = False
        try:
            # if the process has ended or was closed, the loop below raises ProcessEnded
            with suppress(OSError, ValueError):
                self.process.stdin.write(json.dumps([method, arguments]) + "\n")
                self.process.stdin.flush()
            while not is_finished:
                try:
                    line = self._replies.get(timeout=seconds)
                except queue.Empty:
                    raise TimeoutError(
                        f"no reply within {seconds:g} s: {self._last_line()}"
                    ) from None
                if not line:  # the child process has closed its output
                    self._replies.put("")  # the next request must raise ProcessEnded, too
                    code = self.process.wait()
                    reason = (
                        f"killed by {signal.Signals(-code).name}"
                        if code < 0
                        else f"exit code {code}"
                    )
                    raise ProcessEnded(f"{reason}: {self._last_line()}")
                reply = json.loads(line)
                is_finished = "item" not in reply
                if "error" in reply:
                    raise ErrorReply(reply["error"], reply["kind"])
                yield reply
        finally:
            # the remaining replies would be taken for those to the next request
            if not is_finished:
                self.close()

    def log(self) -> str:
        """Text that the child has printed so far."""
        # pread, because seek would move the position at which the child writes
        if not self._log.closed:
            file = self._log.fileno()
            self._log_content = os.pread(file, os.fstat(file).st_size, 0)
        return self._log_content.decode(errors="replace")

    def _last_line(self) -> str:
        """The last non-blank line of the log, for error messages."""
        lines = [line.strip() for line in self.log().splitlines() if line.strip()]
        return lines[-1] if lines else "nothing in its log"

    def close(self) -> None:
        """Close the child's standard input, and wait up to GRACE seconds for the child to end. Then
        kill what is left of its process group."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        # one of these errors, depending on the system, if no process of the group is left
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log()  # keeps a copy of the log in `_log_content`
        self._log.close()

    def _listen(self) -> None:
        """Put each line of the child's output into the queue, and "" after the last line."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._replies.put(line)
        self._replies.put("")


def serve(worker: object, at_end: Callable[[], object] = lambda: None) -> None:
    """Read requests from standard input, and write replies to standard output. Requests and replies
    are lines of JSON. At the end of standard input, call `at_end`, and then kill this process and
    its process group.

    A request is [name of a method of `worker`, arguments]. The reply is {"done": result of the
    method}, or {"error": message, "kind": class of the error}. If the method is a generator,
    replies {"item": value} come before {"done": null}.
    """
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # only replies may be written to the original standard output: prints go to standard error
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def reply(**content: Any) -> None:
        output.write(json.dumps(content) + "\n")
        output.flush()

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
    """Put each request [method, arguments] on standard input into the queue `requests`."""
    # not sys.stdin: a thread that waits for it holds a lock, which would block forked processes
    with os.fdopen(os.dup(0), encoding="utf-8") as lines:
        for line in lines:
            requests.put(json.loads(line))
    at_end()
    os.killpg(0, signal.SIGKILL)


def _sentence(error: Exception) -> str:
    """The message of an error, on one line. For a ValidationError of pydantic, the line has the
    messages of all mistakes."""
    messages = [str(error)]
    if hasattr(error, "errors"):
        messages = [mistake["msg"] for mistake in error.errors()]
    return " ".join("; ".join(messages).split()) or type(error).__name__


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]))
