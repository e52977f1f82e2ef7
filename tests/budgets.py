"""How long something may take, on whatever machine the tests run.

A bar is in seconds of one thread's processor time on the machine that the figures in docs/performance.md come
from, at rest. Neighbours slow even processor time (shared caches, two threads of one core), so a fixed piece of work
is timed just before and just after: as much longer as it takes, so much longer may the thing itself take.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YARDSTICK_SECONDS = 0.058
FRESH = 1
"""Seconds for which a measurement of the machine also holds for what begins next."""
_last = (-1.0, 0.0)
"""When the machine was measured last, and what came out."""


def yardstick() -> float:
    """Processor seconds of a fixed piece of plain Python: numbers, texts, a dictionary, a sort; least of three."""

    def once() -> float:
        start = time.process_time()
        lengths: dict[str, int] = {}
        for number in range(400_000):
            word = f"{number % 5003}"
            lengths[word] = lengths.get(word, 0) + len(word)
        sorted(lengths.items(), key=lambda pair: (pair[1], pair[0]))
        return time.process_time() - start

    return min(once() for _ in range(3))


def of_children() -> float:
    """Processor seconds of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def within(seconds: float, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Fail when the body takes more than `seconds` of processor time, on a machine as fast as the yardstick's.

    What earlier tests left in memory is kept out of the collector's sight, for no user has it.
    """
    global _last
    gc.collect()
    gc.freeze()
    measured, before = _last
    if time.monotonic() - measured > FRESH:
        before = yardstick()
    start = clock()
    yield
    took = clock() - start
    gc.unfreeze()
    after = yardstick()
    _last = (time.monotonic(), after)
    slowness = max(1.0, (before + after) / 2 / YARDSTICK_SECONDS)
    assert took <= seconds * slowness, f"{took:.2f} s, on a machine {slowness:.2f} times as slow as the one of the bar"
