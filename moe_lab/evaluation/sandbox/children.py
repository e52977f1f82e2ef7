"""Forks of a trusted process that work on texts of a model, within limits of time and memory."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from moe_lab.evaluation.sandbox.confinement import die_with_parent

Work = Callable[[Any], str]
_STATM = Path("/proc/self/statm")


class LimitedChildren:
    """Forks of this process that do work on texts of a model, each request in a process of its own, within limits.

    Texts of a model may be such that the work takes hours or gigabytes. Must be made before this process starts threads
    that hold locks; may be called by several.
    """

    def __init__(self, work: Work, count: int) -> None:
        self._all = [_Child(work) for _ in range(count)]
        self._free: SimpleQueue[_Child] = SimpleQueue()
        for child in self._all:
            self._free.put(child)

    def __call__(self, request: Any, seconds: float, memory: int) -> str | None:
        """The result of work(request), a document of JSON, or None if it took too much time or memory, or failed.

        `seconds` of the processor; `memory`: bytes in addition to what this process has mapped (Linux).
        """
        child = self._free.get()
        try:
            return child.ask(request, seconds, memory)
        finally:
            self._free.put(child)

    def __enter__(self) -> LimitedChildren:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all forks."""
        for child in self._all:
            child.close()


class _Child:
    """A process that forks another for each request. Requests and replies are lines of JSON."""

    def __init__(self, work: Work) -> None:
        reading, requests = os.pipe()
        replies, writing = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            try:
                die_with_parent()
                _close_all_but(reading, writing)  # no pipe that has to end when this process's parent does
                _serve(work, reading, writing)
            finally:
                os._exit(0)
        os.close(reading)
        os.close(writing)
        self._requests, self._replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")

    def ask(self, *request: Any) -> str | None:
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        line = self._replies.readline()
        if not line:
            raise ChildProcessError("the process that starts processes with limits has ended")
        result: str | None = json.loads(line)
        return result

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _close_all_but(*kept: int) -> None:
    begin = 3
    for number in sorted(kept):
        os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, 1 << 16)


def _serve(work: Work, reading: int, replies: int) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # otherwise each fork would copy the pages of all objects that it collects over
    with open(reading, "rb") as requests:
        for line in requests:
            receiving, sending = os.pipe()
            process = os.fork()
            if process == 0:
                try:
                    die_with_parent()
                    request, seconds, memory = json.loads(line)
                    _limit(seconds, memory)
                    _write(sending, json.dumps(work(request)).encode())
                    os._exit(0)
                finally:
                    os._exit(1)
            os.close(sending)
            with open(receiving, "rb") as result:
                content = result.read()
            _, status = os.waitpid(process, 0)
            _write(replies, (b"null" if status else content) + b"\n")


def _limit(seconds: float, memory: int) -> None:
    """Limit this process to CPU seconds, and to `memory` bytes beyond what it has mapped, where there is a /proc."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    if _STATM.exists():
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        allowed = int(_STATM.read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(
            resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard)
        )


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]
