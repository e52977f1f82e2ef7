"""Forks of a trusted process that work on texts of a model, within limits of time and memory."""

from __future__ import annotations

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

_STATM = Path("/proc/self/statm")


class LimitedChildren:
    """Forks of this process that do work on texts of a model, one request after the other, each within limits.

    Texts of a model may be such that the work takes hours or gigabytes. `seconds` are CPU seconds, `memory` is in bytes
    in addition to what this process has mapped (Linux), and both are for one request. A fork is replaced by a fresh one
    when a request ended it, or left it with more memory than before. `work` must leave nothing behind that a later
    request could notice. Must be made while this process has no other thread; may be called by several.
    """

    def __init__(self, work: Callable[[Any], str], seconds: float, memory: int, count: int) -> None:
        self._all = [_LimitedChild(work, seconds, memory) for _ in range(count)]
        self._free: SimpleQueue[_LimitedChild] = SimpleQueue()
        for child in self._all:
            self._free.put(child)

    def __call__(self, request: Any) -> str | None:
        """The result of work(request), a document of JSON; None if the fork ended without a result."""
        child = self._free.get()
        try:
            return child.ask(request)
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


class _LimitedChild:
    """One of `LimitedChildren`: a process that forks the process that works, and forks the next when that has ended.

    A request is a line with its number and the document, and a reply a line with the number and the result. For a
    process that ended without a reply, its parent replies [null, null].
    """

    def __init__(self, work: Callable[[Any], str], seconds: float, memory: int) -> None:
        self._number = 0
        reading, requests = os.pipe()
        replies, writing = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            try:
                die_with_parent()
                _close_all_but(reading, writing)  # no pipe that has to end when this process's parent does
                _fork_again_and_again(lambda: _serve(work, reading, writing, seconds, memory), writing)
            finally:
                os._exit(0)
        os.close(reading)
        os.close(writing)
        self._requests, self._replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")

    def ask(self, request: Any) -> str | None:
        self._number += 1
        self._requests.write(json.dumps([self._number, request]).encode() + b"\n")
        self._requests.flush()
        for line in self._replies:
            try:
                number, result = json.loads(line)
            except ValueError:  # the process was killed while it replied
                return None
            if number is None or number == self._number:
                return None if result is None else str(result)
        raise ChildProcessError("the process that starts processes with limits has ended")

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


_RETIRED = 3
"""Exit code of a process that has replied, and should be replaced before the next request."""
_GROWTH = 64 << 20
"""Bytes by which a process may grow before it is replaced."""


def _close_all_but(*kept: int) -> None:
    begin = 3
    for number in sorted(kept):
        os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, 1 << 16)


def _fork_again_and_again(work: Callable[[], None], replies: int) -> None:
    """Fork a process that calls `work`, and another when it has ended, until one ends well."""
    while True:
        child = os.fork()
        if child == 0:
            try:
                die_with_parent()
                work()
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        if code != _RETIRED:
            os.write(replies, b"[null, null]\n")


def _serve(work: Callable[[Any], str], reading: int, replies: int, seconds: float, memory: int) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = _mapped()
    with open(reading, "rb") as requests:
        for line in requests:
            try:
                number, request = json.loads(line)
            except ValueError:  # the end of a line that another process was reading when it was killed
                continue
            _limit_more_memory(memory)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            result = work(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            rest = json.dumps([number, result]).encode() + b"\n"
            while rest:
                rest = rest[os.write(replies, rest) :]
            if _mapped() > before + _GROWTH:
                os._exit(_RETIRED)


def _mapped() -> int:
    """Bytes of address space of this process; 0 where there is no /proc."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


def _limit_more_memory(memory: int) -> None:
    """Limit this process to `memory` bytes of address space beyond what it has mapped now, if that can be known."""
    if _STATM.exists():
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        allowed = _mapped() + memory
        resource.setrlimit(
            resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard)
        )
