"""Progress of a run: bars with ETA on a terminal, one line a minute otherwise; and messages for the user."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from moe_lab.study.schedule import Schedule
from moe_lab.study.store import Store

LINE_EVERY = 60.0
"""Seconds between two lines of progress without a terminal."""
console = Console(stderr=True, highlight=False)


def say(sentence: str, style: str | None = None) -> None:
    """Print a sentence for the user on standard error, without markup or wrapping."""
    console.print(sentence, markup=False, soft_wrap=True, style=style)


def say_notices(store: Store) -> None:
    """Print, and then forget, the notices on what was set aside in the store."""
    while store.notices:
        say(f"moe_lab: {store.notices.pop(0)}")


@contextlib.contextmanager
def watch(schedule: Schedule) -> Iterator[None]:
    """Show the state of `schedule` from another thread until the block ends."""
    stop = threading.Event()
    show = _bars if console.is_terminal else _lines
    thread = threading.Thread(target=show, args=(schedule, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _left(schedule: Schedule) -> Counter[str]:
    with schedule.changed:
        return Counter(step.kind for step in (*schedule.waiting.values(), *schedule.running.values()))


def _bars(schedule: Schedule, stop: threading.Event) -> None:
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        bars = {kind: progress.add_task(kind, total=total) for kind, total in schedule.total.items()}
        done = False
        while not done:
            done = stop.wait(0.2)
            left = _left(schedule)
            for kind, bar in bars.items():
                progress.update(bar, completed=schedule.total[kind] - left[kind])


def _lines(schedule: Schedule, stop: threading.Event) -> None:
    start, total = time.monotonic(), sum(schedule.total.values())
    while not stop.wait(LINE_EVERY):
        left = _left(schedule)
        done = total - sum(left.values())
        parts = [
            f"{kind} {schedule.total[kind] - left[kind]}/{count}"
            for kind, count in schedule.total.items()
            if left[kind]
        ]
        elapsed = time.monotonic() - start
        eta = f", about {elapsed / done * (total - done) / 60:.0f} min left" if done else ""
        print(f"{elapsed / 60:.0f} min: {', '.join(parts)}{eta}", file=sys.stderr, flush=True)
