"""Work in processes that are forked from this one, so that they have what it has imported and read."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
MOST_PROCESSES = 8
"""More would wait for the longest output."""


def _processes() -> int:
    """As many as there are processors; 1 on systems without safe forks."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if sys.platform == "linux" else 1


def _pool(count: int, *initial: Any) -> ProcessPoolExecutor:
    fork = multiprocessing.get_context("fork")  # a process that starts afresh would take seconds to import and read
    return ProcessPoolExecutor(count, fork, *initial)


@contextmanager
def beside(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Do `work` in another process while the body of the `with` statement runs; yields what waits for its result.

    `work` and its result are pickled. With one processor, the work is done when its result is asked for.
    """
    if _processes() < 2:
        yield work
        return
    with _pool(1) as pool:
        yield pool.submit(work).result


def in_processes(work: Callable[[str], T], tasks: Sequence[str]) -> Iterable[T]:
    """Do `work` on each task in several processes; results come in the order of the tasks.

    One task, or one processor, needs no other process.
    """
    count = min(_processes(), len(tasks))
    if count < 2:
        yield from map(work, tasks)
        return
    gc.freeze()  # what this process has read is not to be copied, nor looked through, in the others
    with _pool(count, _start, (work,)) as pool:
        yield from pool.map(_do, tasks)


_work: Callable[[str], Any]
"""What a process of `in_processes` does."""


def _start(work: Callable[[str], Any]) -> None:
    global _work
    _work = work


def _do(task: str) -> Any:
    return _work(task)
