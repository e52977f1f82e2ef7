"""Start runner processes (`runner.py`), send them programs and inputs, and read what the programs
returned."""

from __future__ import annotations

import importlib
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from moe_lab.child_process import ChildProcess, ErrorReply, ProcessEnded, environment
from moe_lab.evaluation.sandbox.isolation import BUBBLEWRAP, NONE, bubblewrap_command
from moe_lab.evaluation.sandbox.runner import Outcome, Request
from moe_lab.start import command


class RunnerError(RuntimeError):
    """The process that runs programs could not be started, or died."""


_STATM = Path("/proc/self/statm")
"""A file of Linux. Its first number is the number of pages of memory that this process has
mapped."""
STARTS = 3
"""Tries to start a runner. A try fails when memory or processes are short for a moment."""
PAUSE = 0.5
"""Seconds between two tries."""


class Runner(ChildProcess):
    """A process that runs programs, one at a time. `isolation`: see `isolation.py`; with "none",
    programs have only limits."""

    def __init__(self, isolation: str) -> None:
        """Start the process, and wait until it can run programs. Raises ProcessEnded if it
        cannot."""
        super().__init__(*runner_command(isolation), Path("/"))
        self.call("start")

    def run(self, request: Request) -> Outcome:
        """Run one program. Raises ProcessEnded if the runner itself ends."""
        return Outcome(**self.call("run", request=vars(request)))


def runner_command(isolation: str) -> tuple[list[str], dict[str, str]]:
    """(command line, environment variables) of a runner."""
    line = command("moe_lab.evaluation.sandbox.runner", isolation)
    if isolation == BUBBLEWRAP:
        line = [*bubblewrap_command(), *line]
    return line, environment(PYTHONHASHSEED="0", OPENBLAS_NUM_THREADS="1")


def start(isolation: str) -> Runner:
    """A new runner. Raises RunnerError when `STARTS` tries failed."""
    last_error: Exception | None = None
    for number in range(STARTS):
        time.sleep(PAUSE if number else 0)
        try:
            return Runner(isolation)
        except (ProcessEnded, OSError) as error:
            last_error = error
    raise RunnerError(f"{STARTS} starts failed, the last with: {last_error}") from last_error


Process = TypeVar("Process", bound=ChildProcess)


class Pool(Generic[Process]):
    """Processes for several threads. A thread uses a process in a `with` block of `process`; until
    the block ends, no other thread gets this process."""

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self._all: list[Process] = []
        self._idle: SimpleQueue[Process] = SimpleQueue()

    @contextmanager
    def process(self) -> Iterator[Process]:
        """An idle or a new process. If the `with` block raises an error, the process is ended."""
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = self._start()
            self._all.append(process)
        try:
            yield process
        except BaseException:
            process.close()
            with suppress(ValueError):  # `Pool.close` may have removed the process
                self._all.remove(process)
            raise
        self._idle.put(process)

    def close(self) -> None:
        """End all processes, including those in use."""
        self._idle = SimpleQueue()
        while self._all:
            self._all.pop().close()


class Runners(Pool[Runner]):
    """A pool of runners."""

    def __init__(self, isolation: str) -> None:
        super().__init__(partial(start, isolation))
        self._isolation = isolation

    def run(self, request: Request) -> Outcome:
        """Run one program. If the runner ends, the program is run once more, on another runner.

        Raises RunnerError if no runner can start, or if two runners end that isolate programs.
        """
        # Two tries: without isolation, an earlier program may have ended the first runner.
        for _ in range(2):
            with suppress(ProcessEnded), self.process() as runner:
                return runner.run(request)
        if self._isolation != NONE:
            raise RunnerError(
                "the process that runs programs ended twice, and no program can have ended it"
            )
        return Outcome("crash", "it ended the process that ran it", [], [])


@lru_cache
def check_runner(isolation: str) -> None:
    """Start a runner and end it. Raises RunnerError as `start` does."""
    start(isolation).close()


class LimitedCalls(Pool[ChildProcess]):
    """Calls functions of one module on texts that a model wrote, from several threads.

    A text may make a function take hours or gigabytes, or crash the process. So the functions are
    called in child processes. Arguments and results are JSON.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        super().__init__(self._child)
        self._module = module
        self._environment = environment

    def __call__(self, function: str, arguments: list[Any], seconds: float, memory: int) -> Any:
        """Call `function` of the module and return its result; None if the function took too much
        time or memory, or failed.

        `seconds`: limit on the CPU time of the call. `memory`: limit on the bytes by which the call
        enlarges its process (only on Linux). Raises RunnerError when no process can be started.
        """
        try:
            with self.process() as child:
                return child.call(
                    "call",
                    module=self._module,
                    function=function,
                    arguments=arguments,
                    limits=(seconds, memory),
                )
        except (ProcessEnded, ErrorReply):
            return None

    def _child(self) -> ChildProcess:
        """A new process that has imported the module."""
        # the process serves the functions `load` and `call` of this file
        child = ChildProcess(
            command("moe_lab.child_process", __name__), self._environment, Path("/")
        )
        try:
            child.call("load", module=self._module)
        except (ProcessEnded, ErrorReply) as error:
            child.close()
            raise RunnerError(f"{self._module} cannot be called: {error}") from None
        return child


# Methods of the processes of LimitedCalls.


def load(module: str) -> None:
    """Import a module, so that `call` can call its functions."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    importlib.import_module(module)


def call(module: str, function: str, arguments: list[Any], limits: tuple[float, int]) -> Any:
    """Call a function of an imported module and return its result. `limits`: (CPU seconds, bytes by
    which the call may enlarge this process)."""
    seconds, memory = limits
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if _STATM.exists():
        limit = int(_STATM.read_text().split()[0]) * resource.getpagesize() + memory
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # after these seconds SIGPROF ends the process
    try:
        return getattr(sys.modules[module], function)(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
