"""The schedule: every step once, after its inputs; a failure stops only what needs it."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_lab.evaluation.recorded import COMPUTED, Record
from moe_lab.study.schedule import Schedule, StepError, work
from moe_lab.study.step import Part, Step
from moe_lab.study.store import Store
from moe_lab.study.worker import Worker


def chain(merged: bool = False) -> tuple[Step, Step, Step, Step]:
    """Four steps; the last one has the two before it as inputs, or merges them."""
    first = Step("first", "a", {"p": Part({"n": 1})})
    left = Step("left", "a", inputs={"in": first})
    right = Step("right", "a", inputs={"in": first})
    last = Step("last", "a", merges=(left, right)) if merged else Step("last", "a", inputs={"l": left, "r": right})
    return first, left, right, last


def run(schedule: Schedule, store: Store, execute, threads: int = 1) -> None:  # type: ignore[no-untyped-def]
    workers = [threading.Thread(target=work, args=(schedule, store, execute)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_step_once_after_its_inputs(tmp_path: Path, threads: int, merged: bool) -> None:
    steps, ran, store = chain(merged)[::-1], [], Store(tmp_path).create()

    def execute(step: Step, scratch: Path, others: object) -> None:
        assert all(store.done(needed) for needed in (*step.inputs.values(), *step.merges))
        ran.append(step.kind)

    run(Schedule(steps), store, execute, threads)
    assert sorted(ran) == ["first", "last", "left", "right"]
    assert ran[0] == "first" and ran[-1] == "last"


@pytest.mark.parametrize("merged", [False, True])
def test_a_failure_skips_what_needs_it_and_nothing_else(tmp_path: Path, merged: bool) -> None:
    first, left, right, last = chain(merged)
    store = Store(tmp_path).create()
    schedule = Schedule((first, left, right, last))

    def execute(step: Step, scratch: Path, others: object) -> None:
        if step is left:
            raise StepError({"message": "no"})

    run(schedule, store, execute)
    assert set(schedule.failed) == {left.id} and set(schedule.skipped) == {last.id}
    assert store.done(right) and (store.error(left.id) or {})["message"] == "no"


def test_a_full_disk_is_said_and_not_remembered(tmp_path: Path) -> None:
    first, *_ = chain()
    store, schedule = Store(tmp_path).create(), Schedule([first])

    def execute(step: Step, scratch: Path, others: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(scratch))

    run(schedule, store, execute)
    assert "disk of the store is full" in str(schedule.failed[first.id])
    assert store.error(first.id) is None and not store.done(first)


def test_two_runs_share_the_work(tmp_path: Path) -> None:
    """Two schedules on one store, both of which have begun before either goes on: every step is executed once."""
    ran: list[str] = []
    began, together = set[int](), threading.Barrier(2, timeout=60)

    def execute(step: Step, scratch: Path, others: object) -> None:
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


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Twelve steps of two groups, each of which needs a step of its own."""

    def group(step: Step) -> str | None:
        return str(step.parts["p"].settings["group"]) if step.kind == "shared" else None

    monkeypatch.setattr("moe_lab.study.schedule.group_of", group)
    plans = [Step("plan", str(n), {"p": Part({"n": n})}) for n in range(12)]
    shared = [
        Step("shared", str(n), {"p": Part({"n": n, "group": n % 2})}, {"plan": plan}) for n, plan in enumerate(plans)
    ]
    return [step for pair in zip(plans, shared, strict=True) for step in pair]


def test_steps_of_a_group_are_done_together_when_all_are_ready(tmp_path: Path, grouped: list[Step]) -> None:
    ran: list[tuple[str, list[str]]] = []

    def execute(step: Step, scratch: Path, others: Mapping[Step, Path]) -> None:
        assert all(other not in (scratch, None) and other.is_dir() for other in others.values())
        ran.append((step.label, [other.label for other in others]))

    schedule = Schedule(grouped)
    run(schedule, Store(tmp_path).create(), execute)
    assert schedule.finished == {step.id for step in grouped}
    evens, odds = ["0", "2", "4", "6", "8", "10"], ["1", "3", "5", "7", "9", "11"]
    plans = [(str(n), []) for n in range(12)]
    together = [[(label, labels[n + 1 :]) for n, label in enumerate(labels)] for labels in (evens, odds)]
    assert ran == [*plans[:11], *together[0], plans[11], *together[1]], "the last plan of the even ones is the eleventh"


@pytest.mark.parametrize(("most", "sizes"), [(16, {6}), (4, {3}), (1, {1})])
def test_a_group_is_cut_into_equal_parts(
    grouped: list[Step], monkeypatch: pytest.MonkeyPatch, most: int, sizes: set[int]
) -> None:
    monkeypatch.setattr("moe_lab.study.schedule.MOST_TOGETHER", most)
    schedule = Schedule(grouped, {step.id for step in grouped if step.kind == "plan"})
    taken = []
    while steps := schedule.take():
        taken.append(len(steps))
    assert set(taken) == sizes and sum(taken) == 12


def test_workers_divide_a_group(grouped: list[Step]) -> None:
    """Six ready steps and three workers: none takes more than two."""
    ready = {step.id for step in grouped if step.kind == "plan" or step.parts["p"].settings["group"] == 1}
    schedule = Schedule(grouped, ready, workers=3)
    assert [len(schedule.take()) for _ in range(3)] == [2, 2, 2]


def test_a_worker_without_other_work_does_not_wait_for_a_whole_group(grouped: list[Step]) -> None:
    schedule = Schedule(grouped, {grouped[0].id, grouped[4].id})
    plans = [schedule.take() for _ in range(10)]
    assert all(step.kind == "plan" for (step,) in plans)
    assert [step.label for step in schedule.take()] == ["0", "2"], "the plans of the others are still being made"


def test_a_failure_in_a_group_is_that_of_one_step(tmp_path: Path, grouped: list[Step]) -> None:
    store, schedule = Store(tmp_path).create(), Schedule(grouped)

    def execute(step: Step, scratch: Path, others: object) -> None:
        if step.kind == "shared" and step.label in ("2", "10"):
            raise StepError({"message": "no"})
        (scratch / "result.txt").write_text(step.label)

    run(schedule, store, execute)
    broken = {step.id for step in grouped if step.kind == "shared" and step.label in ("2", "10")}
    assert set(schedule.failed) == broken and len(schedule.finished) == 22
    assert all((store.path(step) / "result.txt").exists() for step in grouped if step.id not in broken)


def test_a_step_that_another_run_is_doing_is_left_out_of_its_group(tmp_path: Path, grouped: list[Step]) -> None:
    store, others_of = Store(tmp_path).create(), {}
    elsewhere = next(step for step in grouped if step.kind == "shared" and step.label == "4")
    schedule = Schedule(grouped)
    with ExitStack() as other_run:
        scratch_there = other_run.enter_context(Store(tmp_path).create().claim(elsewhere))
        assert scratch_there is not None

        def execute(step: Step, scratch: Path, others: Mapping[Step, Path]) -> None:
            assert step is not elsewhere and elsewhere not in others
            others_of[step.label if step.kind == "shared" else ""] = len(others)
            if len(others_of) == 12:  # with the plans counted as one
                other_run.close()

        run(schedule, store, execute)
    assert schedule.finished == {step.id for step in grouped}
    assert others_of["0"] == 4


def test_an_error_of_the_program_publishes_nothing_of_a_group(tmp_path: Path, grouped: list[Step]) -> None:
    store, shared = Store(tmp_path).create(), [step for step in grouped if step.kind == "shared"]
    schedule = Schedule(grouped)

    def execute(step: Step, scratch: Path, others: object) -> None:
        if step.kind == "shared":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(schedule, store, execute)
    assert not any(store.path(step).exists() for step in shared)
    assert not list((tmp_path / "shared").iterdir())


def test_steps_during_whose_shared_batches_the_worker_died_are_done_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: list[Step]
) -> None:
    """As when the kernel kills it, because memory ran out for all of them together."""
    script = tmp_path / "dying.py"
    script.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    job = json.loads(line)\n"
        "    if job['others']: os.kill(os.getpid(), 9)\n"
        "    print('{}', flush=True)\n"
    )
    monkeypatch.setattr("moe_lab.study.worker.command", lambda module: [sys.executable, str(script)])
    store = Store(tmp_path / "store").create()
    first, *others = [step for step in grouped if step.kind == "shared"][:3]
    with Worker(store, "dying") as execute:
        execute(first, tmp_path, {other: tmp_path for other in others})
    assert all(Record(store.partial(step) / COMPUTED).alone for step in (first, *others))
