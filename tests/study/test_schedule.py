"""The schedule: every step once, after its inputs; a failure stops only what needs it."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from moe_lab.study.schedule import Schedule, StepError, work
from moe_lab.study.step import Part, Step
from moe_lab.study.store import Store


def chain() -> tuple[Step, Step, Step, Step]:
    first = Step("first", "a", {"p": Part({"n": 1})})
    left = Step("left", "a", inputs={"in": first})
    right = Step("right", "a", inputs={"in": first})
    last = Step("last", "a", inputs={"l": left, "r": right})
    return first, left, right, last


def run(schedule: Schedule, store: Store, execute, threads: int = 1) -> None:  # type: ignore[no-untyped-def]
    workers = [threading.Thread(target=work, args=(schedule, store, execute)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@pytest.mark.parametrize("threads", [1, 3])
def test_each_step_once_after_its_inputs(tmp_path: Path, threads: int) -> None:
    steps, ran, store = chain(), [], Store(tmp_path).create()

    def execute(step: Step, scratch: Path) -> None:
        assert all(store.done(needed) for needed in step.inputs.values())
        ran.append(step.kind)

    run(Schedule(steps), store, execute, threads)
    assert sorted(ran) == ["first", "last", "left", "right"]
    assert ran[0] == "first" and ran[-1] == "last"


def test_a_failure_skips_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    first, left, right, last = chain()
    store = Store(tmp_path).create()
    schedule = Schedule((first, left, right, last))

    def execute(step: Step, scratch: Path) -> None:
        if step is left:
            raise StepError({"message": "no"})

    run(schedule, store, execute)
    assert set(schedule.failed) == {left.id} and set(schedule.skipped) == {last.id}
    assert store.done(right) and (store.error(left.id) or {})["message"] == "no"


def test_a_full_disk_is_said_and_not_remembered(tmp_path: Path) -> None:
    first, *_ = chain()
    store, schedule = Store(tmp_path).create(), Schedule([first])

    def execute(step: Step, scratch: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(scratch))

    run(schedule, store, execute)
    assert "disk of the store is full" in str(schedule.failed[first.id])
    assert store.error(first.id) is None and not store.done(first)


def test_two_runs_share_the_work(tmp_path: Path) -> None:
    """Two schedules on one store, both of which have begun before either goes on: every step is executed once."""
    ran: list[str] = []
    began, together = set[int](), threading.Barrier(2, timeout=60)

    def execute(step: Step, scratch: Path) -> None:
        if (thread := threading.get_ident()) not in began:
            began.add(thread)
            together.wait()
        ran.append(step.id)

    steps = [Step("many", str(n), {"p": Part({"n": n})}) for n in range(12)]
    schedules = [Schedule(steps), Schedule(steps)]
    threads = [threading.Thread(target=work, args=(one, Store(tmp_path).create(), execute)) for one in schedules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(began) == 2
    assert sorted(ran) == sorted(step.id for step in steps)
    assert all(one.finished == {step.id for step in steps} for one in schedules)
