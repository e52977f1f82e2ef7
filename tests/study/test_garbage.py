"""`python -m moe_lab.study gc`: frees what nothing refers to, and nothing else, whoever works or
dies meanwhile."""

import os
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from example_steps import Example
from studies import STUDY, StudyRequest, Worker, run_until_killed, start, study_command

from moe_lab.config import LauncherConfig
from moe_lab.errors import UserError
from moe_lab.json_files import read_sealed, write_sealed
from moe_lab.results import FIGURES
from moe_lab.study import garbage
from moe_lab.study import run as running
from moe_lab.study.garbage import LEFTOVERS, find_garbage, gc
from moe_lab.study.graph import build
from moe_lab.study.runs import Submitted, begin, runs, steps_at_work
from moe_lab.study.slurm import jobs as slurm_jobs
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.scheduler import Queued
from moe_lab.study.step import Step
from moe_lab.study.store import Store

NO_FIGURES: dict[str, list[Any]] = {figure: [] for figure in FIGURES}
pytestmark = pytest.mark.usefixtures("fake_worker")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def replaced(place: Path, aimer_study: StudyRequest, reap_study: StudyRequest) -> Path:
    """A store in which the cells of `one` were replaced by those of `other`."""
    assert start(place, aimer_study) == start(place, reap_study) == 0
    Worker.executed.clear()
    return place


def steps(of: StudyRequest) -> dict[str, Step]:
    return {step.folder: step for step in build(*of).steps}


def finished(place: Path) -> set[str]:
    return {str(path.parent.relative_to(place)) for path in place.glob("*/[!.]*/step.json")}


def named(place: Path) -> set[str]:
    """Folders that gc would free."""
    return {str(item.path.relative_to(place)) for item in find_garbage(Store(place))[0]}


def test_what_no_study_refers_to_is_named_first_and_freed_on_request(
    replaced: Path,
    aimer_study: StudyRequest,
    reap_study: StudyRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only_one = steps(aimer_study).keys() - steps(reap_study).keys()
    shared = steps(aimer_study).keys() & steps(reap_study).keys()
    assert {name.partition("/")[0] for name in only_one} >= {
        "weights",
        "scores",
        "plan",
        "evaluate",
    } and shared
    before = sorted((path, path.stat().st_mtime_ns) for path in replaced.rglob("*"))
    assert study_command(replaced, "gc") == 0
    shown = capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in replaced.rglob("*")) == before, (
        "it only looks"
    )
    assert "weights" in shown and "apply=true" in shown and "model" not in shown.split("kept")[0]
    assert named(replaced) == only_one
    bytes_of_one = sum(
        path.stat().st_size for name in only_one for path in (replaced / name).iterdir()
    )
    assert sum(item.bytes for item in find_garbage(Store(replaced))[0]) == bytes_of_one

    assert study_command(replaced, "gc", "apply=true") == 0
    assert finished(replaced) == set(steps(reap_study)) and not list(replaced.glob("*/.*"))
    assert study_command(replaced, "verify", STUDY) == 0
    assert start(replaced, reap_study) == 0 and Worker.executed == []
    assert start(replaced, aimer_study) == 0 and set(Worker.executed) == only_one
    assert study_command(replaced, "gc", "apply=true") == 0, (
        "the last run is of one, and the record too"
    )
    assert finished(replaced) == set(steps(aimer_study))


def test_a_record_alone_keeps_the_inputs_of_its_steps(
    place: Path, aimer_study: StudyRequest
) -> None:
    assert start(place, aimer_study) == 0
    next(place.glob("runs/*/*/run.json")).unlink()
    gc(Store(place), apply=True)
    assert finished(place) == set(steps(aimer_study))
    shutil.rmtree(place / "runs")
    gc(Store(place), apply=True)
    assert finished(place) == set()


def test_an_interrupted_study_goes_on_from_where_it_was(
    place: Path, aimer_study: StudyRequest, reap_study: StudyRequest
) -> None:
    """Two runs of it were, and no record was written since. Both are kept, though the last one asks
    for other steps."""

    def hook(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            partial = Store(place).partial(step)
            partial.mkdir(parents=True, exist_ok=True)
            (partial / "half.txt").touch()
            raise KeyboardInterrupt

    Worker.hook = hook
    for of in (aimer_study, reap_study):
        with pytest.raises(KeyboardInterrupt):
            start(place, of)
    made = finished(place)
    assert made & (steps(aimer_study).keys() - steps(reap_study).keys())
    gc(Store(place), apply=True)
    assert finished(place) == made and len(list(place.glob("partial/*/half.txt"))) == 2
    Worker.hook = None
    Worker.executed.clear()
    assert (
        start(place, aimer_study) == 0 and set(Worker.executed) == steps(aimer_study).keys() - made
    )


def test_what_killed_processes_left_is_freed_and_what_is_worked_on_is_not(place: Path) -> None:
    store = Store(place).create()
    alive, dead = (Example(number=number) for number in range(2))
    run_until_killed(f"""
        store, step = Store({str(place)!r}), Example(number=1)
        with begin(store, "study", [step]), store.claim(step) as scratch:
            (scratch / "half.txt").write_text("half")
            store.partial(step).mkdir(parents=True)
            (store.partial(step) / "half.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert steps_at_work(store) == set()
    assert {item.kind for item in find_garbage(Store(place))[0]} == {LEFTOVERS}
    runs(store, "study")[0].remove()  # otherwise what the killed run saved is kept for the next one
    with store.claim(alive) as scratch:
        assert scratch is not None
        store.partial(alive).mkdir(parents=True)
        left = find_garbage(Store(place))[0]
        assert [item.kind for item in left] == [LEFTOVERS] * 2 and [
            item.bytes for item in left
        ] == [4, 4]
        gc(Store(place), apply=True)
        assert list(place.glob("plan/.*")) == [scratch] and list(place.glob("partial/*")) == [
            store.partial(alive)
        ]
    assert store.done(alive) and not store.done(dead)


def test_a_concurrent_run_loses_nothing(
    place: Path,
    aimer_study: StudyRequest,
    reap_study: StudyRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The study is replaced and garbage collected in the middle of a run, whose steps only its
    claim keeps until its record is written."""

    def hook(step: Step, scratch: Path) -> None:
        if step.kind == "evaluate" and "plan" in step.inputs:
            Worker.hook = None
            assert start(place, reap_study) == 0
            gc(Store(place), apply=True)

    def finish(*arguments: Any) -> int:
        gc(Store(place), apply=True)
        return end(*arguments)

    end = running.finish
    monkeypatch.setattr(running, "finish", finish)
    Worker.hook = hook
    assert start(place, aimer_study) == 0
    assert len(Worker.executed) == len(set(Worker.executed)) and finished(place) == {
        *steps(aimer_study),
        *steps(reap_study),
    }


def test_a_run_ending_while_gc_looks_loses_nothing(
    replaced: Path,
    aimer_study: StudyRequest,
    reap_study: StudyRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is let go after gc has read the records, which still are the old ones."""
    held = ExitStack()
    read = garbage.read_record

    def read_then_end(*arguments: Any) -> Any:
        document = read(*arguments)
        held.close()
        return document

    monkeypatch.setattr(garbage, "read_record", read_then_end)
    held.enter_context(runs(Store(replaced), STUDY)[0].claim())
    assert named(replaced) == set()
    assert named(replaced) == steps(aimer_study).keys() - steps(reap_study).keys()


def test_a_run_starting_while_gc_chooses_waits(
    replaced: Path, aimer_study: StudyRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would find a step finished that is freed right afterwards."""
    threads: list[threading.Thread] = []
    codes: list[int] = []

    def look_then_start(store: Store) -> Any:
        survey = survey_of(store)
        threads.append(threading.Thread(target=lambda: codes.append(start(replaced, aimer_study))))
        threads[0].start()
        threads[0].join(0.5)  # more than it takes when it does not wait
        assert threads[0].is_alive(), "the run did not wait"
        return survey

    survey_of = garbage.find_garbage
    monkeypatch.setattr(garbage, "find_garbage", look_then_start)
    gc(Store(replaced), apply=True)
    threads[0].join()
    assert codes == [0] and set(steps(aimer_study)) <= finished(replaced) and Worker.executed


def test_a_killed_gc_leaves_a_store_that_works(
    replaced: Path, aimer_study: StudyRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """It dies when the first folder is half removed."""
    garbage_of_one = named(replaced)
    run_until_killed(f"""
        from moe_lab.study.garbage import gc
        def rmtree(path, **_):
            sorted(path.iterdir())[-1].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        shutil.rmtree = rmtree
        gc(Store({str(replaced)!r}), apply=True)
    """)
    assert study_command(replaced, "verify", STUDY) == 0 and not finished(replaced) & garbage_of_one
    assert {item.kind for item in find_garbage(Store(replaced))[0]} == {LEFTOVERS}
    capsys.readouterr()
    assert start(replaced, aimer_study) == 0 and set(Worker.executed) == garbage_of_one
    assert "damaged" not in capsys.readouterr().err
    gc(Store(replaced), apply=True)
    assert not list(replaced.glob("*/.*")) and finished(replaced) == set(steps(aimer_study))


@pytest.mark.parametrize(
    "file",
    [
        "runs/study/*/record.json",
        "runs/study/*/run.json",
        "runs/study/*/jobs.json",
        "statistics/*/step.json",
    ],
)
def test_nothing_goes_while_needs_are_unclear(
    replaced: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(Store(replaced), STUDY)[-1].add([Submitted("1", "1", "study.plan", "plan", ("x",), ())])
    damaged = sorted(replaced.glob(file))[-1]
    damaged.write_text("{")
    before = finished(replaced)
    for words in ([], ["apply=true"]):
        assert study_command(replaced, "gc", *words) == 2
        said = capsys.readouterr().err
        assert damaged.name in said and len(said.splitlines()) == 1
    assert finished(replaced) == before and damaged.read_text() == "{"


def test_queued_jobs_keep_steps(
    replaced: Path,
    aimer_study: StudyRequest,
    reap_study: StudyRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = runs(Store(replaced), STUDY)[0]
    first.add([Submitted("7", "7", "study.plan", "plan", (), ())])
    queue = {"7": Queued("7", "study.plan", "PENDING", "Dependency", "0:00")}
    monkeypatch.setattr(scheduler, "queue", lambda *_: queue)
    assert named(replaced) == set()
    queue.clear()
    assert named(replaced) == steps(aimer_study).keys() - steps(reap_study).keys()
    monkeypatch.setattr(scheduler, "queue", Mock(side_effect=UserError("no scheduler here")))
    assert named(replaced) == set() and find_garbage(Store(replaced))[1] == "no scheduler here"


def test_partial_run_records_of_a_killed_command_are_removed(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path).create()
    partial_record = ".run.json.0123abcd"
    with begin(store, STUDY, []) as killed_run:
        (killed_run.folder / partial_record).touch()
    with begin(store, STUDY, []) as live_run:
        (live_run.folder / partial_record).touch()
        with begin(store, STUDY, []):
            assert (
                not (killed_run.folder / partial_record).exists()
                and (live_run.folder / partial_record).exists()
            )


def test_a_job_keeps_what_it_reads_and_makes(
    place: Path, aimer_study: StudyRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a queue that shows it, and after the record of a later run."""
    store = Store(place).create()
    needed = list(steps(aimer_study).values())
    with begin(store, STUDY, needed) as run, begin(store, STUDY, []) as later:
        name = str(run.folder.relative_to(place / "runs"))
    write_sealed(
        later.folder / "record.json",
        {"schema": 1, "created": 0, "replaces": [], "cells": [], **NO_FIGURES},
    )

    def hook(step: Step, scratch: Path) -> None:
        assert {read_sealed(path, {})["limit"] for path in place.glob("claims/*")} == {30.0}
        gc(Store(place), apply=True)

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(slurm_jobs, "WorkerProcess", Worker)
    Worker.hook = hook
    first = [step for step in needed if not step.needs]
    after = [step for step in needed if step.needs and all(each in first for each in step.needs)]
    done = slurm_jobs.StepsJob(
        str(place), [*first, *after], name, LauncherConfig(stale_minutes=0.5)
    )()
    assert first and after and done["failed"] == done["skipped"] == 0
    assert {step.folder for step in (*first, *after)} <= finished(place)
    gc(Store(place), apply=True)
    assert finished(place) == set()


def test_folders_that_are_no_steps_stay(replaced: Path) -> None:
    """Files of the user whose names look like those of steps, and steps that were set aside."""
    notes = replaced / "plan" / "notes-0123456789ab"
    notes.mkdir()
    copied = next(replaced / name for name in named(replaced) if name.startswith("plan/"))
    shutil.copytree(copied, replaced / "mine" / copied.name)
    wrong = copied.with_name("x-0123456789ab")
    shutil.copytree(copied, wrong)
    os.rename(wrong / "step.json", wrong / "other.json")
    write_sealed(wrong / "step.json", {**read_sealed(wrong / "other.json", {}), "id": "f" * 64})
    gc(Store(replaced), apply=True)
    assert (
        not copied.exists()
        and notes.is_dir()
        and wrong.is_dir()
        and (replaced / "mine" / copied.name).is_dir()
    )


def test_wrong_words_are_one_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(place).create()
    wrong = {
        "gc apply_all=true": "did you mean apply",
        "gc apply=yes": "apply=yes",
        f"gc {STUDY}": STUDY,
    }
    more = {
        f"status {STUDY} apply=true": "setting=apply",
        f"verify {STUDY} more": "expected 1",
        "status": "expected 1",
    }
    for words, says in {**wrong, **more}.items():
        assert study_command(place, *words.split()) == 2
        said = capsys.readouterr().err
        assert says in said and len(said.splitlines()) == 1
