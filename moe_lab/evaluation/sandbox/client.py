"""Start runner processes (`runner.py`), send them programs and inputs, and read what the programs returned."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from moe_lab.child_process import Child, Ended
from moe_lab.evaluation.sandbox.encoding import decode_text
from moe_lab.evaluation.sandbox.runner import NO_NAMESPACES, Request, runner_command


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: str
    """ok (every call returned), failed (an exception), timeout, crash (it died), or output (too much, or no value)."""
    error: str
    """Exception of a failed program."""
    encoded: list[str]
    """What each call returned, as JSON of an encoded value; fewer than there are inputs unless status is ok."""
    seconds: list[float]
    """CPU seconds of each call."""

    def values(self) -> list[Any]:
        """What each call returned, decoded. Raises ValueError when the program sent anything but encoded values."""
        return [decode_text(text) for text in self.encoded]


class RunnerError(RuntimeError):
    """The process that runs programs could not be started, or died. The message says why."""


class NoNamespaces(RunnerError):
    """This machine does not let a process be confined by namespaces."""


STARTS, PAUSE = 3, 0.5
"""Tries to start a runner, and seconds between them: memory or processes may be short at that moment."""


class Runner:
    """A runner process, confined by namespaces or only by limits. It runs one program at a time."""

    def __init__(self, *, confined: bool) -> None:
        self.child = Child(*runner_command(confined=confined), Path("/"))
        try:
            self.child.call("start")
        except Ended as error:
            self.close()
            raise (NoNamespaces if NO_NAMESPACES in str(error) else RunnerError)(str(error)) from None

    def run(self, request: Request) -> Outcome:
        """Run one program. Whatever the program does affects only its own outcome."""
        try:
            return Outcome(**self.child.call("run", request=vars(request)))
        except Ended as error:
            raise RunnerError(str(error)) from None

    def close(self) -> None:
        """End the runner and everything a program may have left behind."""
        self.child.close(seconds=5)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(*, confined: bool) -> Runner:
    """A new runner, tried `STARTS` times.

    Raises NoNamespaces at once where the machine has none, and RunnerError when every try failed otherwise.
    """
    last: Exception | None = None
    for number in range(STARTS):
        time.sleep(PAUSE if number else 0)
        try:
            return Runner(confined=confined)
        except NoNamespaces:
            raise
        except (RunnerError, OSError) as error:
            last = error
    raise RunnerError(f"{STARTS} starts failed, the last with: {last}") from last


class Runners:
    """A pool of runners for several threads, one per program running at the same time. Dead runners are replaced."""

    def __init__(self, *, confined: bool) -> None:
        self._confined = confined
        self._all: list[Runner] = []
        self._free: SimpleQueue[Runner] = SimpleQueue()

    def run(self, request: Request) -> Outcome:
        """Run one program. An unconfined program that ends its runner twice counts as crashed.

        Raises RunnerError when no runner can start, or when confined runners end twice, which no program can cause.
        """
        # Two tries: an earlier unconfined program may have ended this runner, not the program of this request.
        for _ in range(2):
            runner = self._idle_runner()
            try:
                outcome = runner.run(request)
            except RunnerError:
                runner.close()
                self._all.remove(runner)
            else:
                self._free.put(runner)
                return outcome
        if self._confined:
            raise RunnerError("the process that runs programs ended twice, and no program can have ended it")
        return Outcome("crash", "it ended the process that ran it", [], [])

    def _idle_runner(self) -> Runner:
        try:
            return self._free.get_nowait()
        except Empty:
            runner = start(confined=self._confined)
            self._all.append(runner)
            return runner

    def close(self) -> None:
        """End all runners, also those that still run a program."""
        for runner in self._all:
            runner.close()


@lru_cache(maxsize=1)
def check_namespaces() -> None:
    """Raise NoNamespaces when no confined runner starts on this machine, and RunnerError when none does at this moment.

    That one does is found out once.
    """
    if not sys.platform.startswith("linux"):
        raise NoNamespaces(f"{sys.platform} has no namespaces")
    start(confined=True).close()


def namespaces_missing() -> str | None:
    """Why programs cannot be confined on this machine, or None when they can."""
    try:
        check_namespaces()
    except RunnerError as error:
        return str(error)
    return None
