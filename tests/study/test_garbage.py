"""`moe-lab gc`: frees what nothing refers to, and nothing else, whoever works or
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
from test_store import state

from moe_lab.config import LauncherConfig
from moe_lab.errors import UserError
from moe_lab.json_files import read_sealed, write_sealed
from moe_lab.result_files import FIGURE_STEPS
from moe_lab.study import garbage
from moe_lab.study import run as running
from moe_lab.study.garbage import LEFTOVERS, find_garbage, gc
from moe_lab.study.graph import build
from moe_lab.study.runs import SubmittedJob, create_run, runs, steps_of_active_runs
from moe_lab.study.slurm import jobs as slurm_jobs
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.scheduler import QueuedJob
from moe_lab.study.step import Step
from moe_lab.study.store import Store

NO_FIGURES: dict[str, list[Any]] = {figure: [] for figure in FIGURE_STEPS}
pytestmark = pytest.mark.usefixtures("fake_worker")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a store."""
    return tmp_path / "store"


@pytest.fixture
def replaced(root: Path, aimer_study: StudyRequest, reap_study: StudyRequest) -> Path:
    """A store in which `reap_study` has replaced `aimer_study`: both have one name."""
    assert start(root, aimer_study) == start(root, reap_study) == 0
    Worker.executed_folders.clear()
    return root


def steps(study: StudyRequest) -> dict[str, Step]:
    return {step.folder: step for step in build(*study).steps}


@pytest.fixture(scope="module")
def aimer_steps(aimer_study: StudyRequest) -> set[str]:
    """Folders of the steps of `aimer_study`."""
    return set(steps(aimer_study))


@pytest.fixture(scope="module")
def reap_steps(reap_study: StudyRequest) -> set[str]:
    return set(steps(reap_study))


def finished(root: Path) -> set[str]:
    """Folders of the finished steps of a store."""
    return {str(path.parent.relative_to(root)) for path in root.glob("*/[!.]*/step.json")}


def garbage_in(root: Path) -> set[str]:
    """Folders that gc would free."""
    return {str(item.path.relative_to(root)) for item in find_garbage(Store(root))[0]}


def test_steps_that_no_study_needs_are_garbage(
    replaced: Path, aimer_steps: set[str], reap_steps: set[str]
) -> None:
    unneeded = aimer_steps - reap_steps
    assert aimer_steps & reap_steps
    kinds = {name.partition("/")[0] for name in unneeded}
    assert kinds >= {"weights", "scores", "plan", "evaluate"}
    assert garbage_in(replaced) == unneeded
    files = [path for name in unneeded for path in (replaced / name).iterdir()]
    garbage_bytes = sum(item.bytes for item in find_garbage(Store(replaced))[0])
    assert garbage_bytes == sum(path.stat().st_size for path in files)


def test_gc_without_apply_prints_garbage_and_changes_nothing(
    replaced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_before = state(replaced)
    assert study_command(replaced, "gc") == 0
    output = capsys.readouterr().out
    assert state(replaced) == state_before
    assert "weights" in output
    assert "apply=true" in output
    assert "model" not in output.split("kept")[0]


def test_gc_frees_garbage_and_nothing_else(
    replaced: Path,
    aimer_study: StudyRequest,
    reap_study: StudyRequest,
    aimer_steps: set[str],
    reap_steps: set[str],
) -> None:
    """The last run and the last record of the study are those of `aimer_study` in the end."""
    assert study_command(replaced, "gc", "apply=true") == 0
    assert finished(replaced) == reap_steps
    assert not list(replaced.glob("*/.*"))
    assert study_command(replaced, "verify", STUDY) == 0
    assert start(replaced, reap_study) == 0
    assert Worker.executed_folders == []
    assert start(replaced, aimer_study) == 0
    assert set(Worker.executed_folders) == aimer_steps - reap_steps
    assert study_command(replaced, "gc", "apply=true") == 0
    assert finished(replaced) == aimer_steps


def test_a_record_alone_keeps_inputs_of_its_steps(root: Path, aimer_study: StudyRequest) -> None:
    assert start(root, aimer_study) == 0
    next(root.glob("runs/*/*/run.json")).unlink()
    gc(Store(root), apply=True)
    assert finished(root) == set(steps(aimer_study))
    shutil.rmtree(root / "runs")
    gc(Store(root), apply=True)
    assert finished(root) == set()


def test_gc_keeps_the_steps_of_interrupted_runs(
    root: Path,
    aimer_study: StudyRequest,
    reap_study: StudyRequest,
    aimer_steps: set[str],
    reap_steps: set[str],
) -> None:
    """Two runs of a study, with different cells, are interrupted at plans, and leave no record. The
    steps of both are kept, though the last run needs other steps."""

    def interrupt(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            partial = Store(root).partial(step)
            partial.mkdir(parents=True, exist_ok=True)
            (partial / "half.txt").touch()
            raise KeyboardInterrupt

    Worker.hook = interrupt
    for study in (aimer_study, reap_study):
        with pytest.raises(KeyboardInterrupt):
            start(root, study)
    Worker.hook = None
    Worker.executed_folders.clear()
    steps_before = finished(root)
    assert steps_before & (aimer_steps - reap_steps)
    gc(Store(root), apply=True)
    assert finished(root) == steps_before
    assert len(list(root.glob("partial/*/half.txt"))) == 2
    assert start(root, aimer_study) == 0
    assert set(Worker.executed_folders) == aimer_steps - steps_before


@pytest.fixture
def killed_step(root: Path) -> Step:
    """A step whose run was killed while it wrote results and resume files."""
    Store(root).create()
    run_until_killed(f"""
        store, step = Store({str(root)!r}), Example(number=1)
        with create_run(store, "study", [step]), store.claim(step) as scratch:
            (scratch / "half.txt").write_text("half")
            store.partial(step).mkdir(parents=True)
            (store.partial(step) / "half.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    return Example(number=1)


def test_files_of_a_killed_run_are_garbage(root: Path, killed_step: Step) -> None:
    """Its resume files are garbage after the record of the run is removed."""
    store = Store(root)
    assert steps_of_active_runs(store) == set()
    assert {item.kind for item in find_garbage(store)[0]} == {LEFTOVERS}
    runs(store, "study")[0].remove()
    garbage_items = find_garbage(store)[0]
    assert [item.kind for item in garbage_items] == [LEFTOVERS] * 2
    assert [item.bytes for item in garbage_items] == [4, 4]


def test_resume_files_of_a_finished_step_are_garbage(root: Path) -> None:
    """A process may be killed right after it has published a step."""
    store = Store(root).create()
    finished, unfinished = Example(number=0), Example(number=1)
    with create_run(store, "study", [finished, unfinished]), store.claim(finished):
        pass
    for step in (finished, unfinished):
        store.partial(step).mkdir(parents=True)
    assert [item.path for item in find_garbage(store)[0]] == [store.partial(finished)]


def test_gc_keeps_files_of_a_step_that_is_computed(root: Path, killed_step: Step) -> None:
    store = Store(root)
    runs(store, "study")[0].remove()
    step = Example(number=0)
    with store.claim(step) as scratch:
        assert scratch is not None
        store.partial(step).mkdir(parents=True)
        assert len(find_garbage(store)[0]) == 2
        gc(store, apply=True)
        assert list(root.glob("plan/.*")) == [scratch]
        assert list(root.glob("partial/*")) == [store.partial(step)]
    assert store.is_finished(step)
    assert not store.is_finished(killed_step)


def test_gc_during_a_run_frees_none_of_its_steps(
    root: Path,
    aimer_study: StudyRequest,
    reap_study: StudyRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The study is replaced and garbage collected in the middle of a run, whose steps only its
    claim keeps until its record is written."""

    def replace_study(step: Step, scratch: Path) -> None:
        if step.kind == "evaluate" and "plan" in step.inputs:
            Worker.hook = None
            assert start(root, reap_study) == 0
            gc(Store(root), apply=True)

    def collect_then_finish(*arguments: Any) -> int:
        gc(Store(root), apply=True)
        return finish(*arguments)

    finish = running.finish
    monkeypatch.setattr(running, "finish", collect_then_finish)
    Worker.hook = replace_study
    assert start(root, aimer_study) == 0
    assert len(Worker.executed_folders) == len(set(Worker.executed_folders))
    assert finished(root) == {*steps(aimer_study), *steps(reap_study)}


def test_gc_keeps_steps_of_a_run_that_ends_meanwhile(
    replaced: Path,
    aimer_steps: set[str],
    reap_steps: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim of the run ends after gc has read the old records."""
    claims = ExitStack()
    read_record = garbage.read_record

    def read_then_end(*arguments: Any) -> Any:
        document = read_record(*arguments)
        claims.close()
        return document

    monkeypatch.setattr(garbage, "read_record", read_then_end)
    claims.enter_context(runs(Store(replaced), STUDY)[0].claim())
    assert garbage_in(replaced) == set()
    assert garbage_in(replaced) == aimer_steps - reap_steps


def test_a_run_that_starts_during_gc_waits(
    replaced: Path, aimer_study: StudyRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would find a finished step that gc frees right afterwards."""
    threads: list[threading.Thread] = []
    codes: list[int] = []

    def find_then_start(store: Store) -> Any:
        items = find_garbage(store)
        threads.append(threading.Thread(target=lambda: codes.append(start(replaced, aimer_study))))
        threads[0].start()
        threads[0].join(0.5)  # more than it takes when it does not wait
        assert threads[0].is_alive(), "the run did not wait"
        return items

    find_garbage = garbage.find_garbage
    monkeypatch.setattr(garbage, "find_garbage", find_then_start)
    gc(Store(replaced), apply=True)
    threads[0].join()
    assert codes == [0]
    assert set(steps(aimer_study)) <= finished(replaced)
    assert Worker.executed_folders


def test_a_store_works_after_a_killed_gc(
    replaced: Path, aimer_study: StudyRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """gc is killed when the first folder is half removed."""
    garbage_before = garbage_in(replaced)
    run_until_killed(f"""
        from moe_lab.study.garbage import gc
        def rmtree(path, **_):
            sorted(path.iterdir())[-1].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        shutil.rmtree = rmtree
        gc(Store({str(replaced)!r}), apply=True)
    """)
    assert study_command(replaced, "verify", STUDY) == 0
    assert not finished(replaced) & garbage_before
    assert {item.kind for item in find_garbage(Store(replaced))[0]} == {LEFTOVERS}
    capsys.readouterr()
    assert start(replaced, aimer_study) == 0
    assert set(Worker.executed_folders) == garbage_before
    assert "damaged" not in capsys.readouterr().err
    gc(Store(replaced), apply=True)
    assert not list(replaced.glob("*/.*"))
    assert finished(replaced) == set(steps(aimer_study))


@pytest.mark.parametrize(
    "file",
    [
        "runs/study/*/record.json",
        "runs/study/*/run.json",
        "runs/study/*/jobs.json",
        "statistics/*/step.json",
    ],
)
def test_gc_frees_nothing_while_a_document_is_damaged(
    replaced: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(Store(replaced), STUDY)[-1].add_jobs(
        [SubmittedJob("1", "1", "study.plan", "plan", ("x",), ())]
    )
    damaged = sorted(replaced.glob(file))[-1]
    damaged.write_text("{")
    steps_before = finished(replaced)
    for arguments in ([], ["apply=true"]):
        assert study_command(replaced, "gc", *arguments) == 2
        errors = capsys.readouterr().err
        assert damaged.name in errors
        assert len(errors.splitlines()) == 1
    assert finished(replaced) == steps_before
    assert damaged.read_text() == "{"


def test_gc_keeps_steps_of_queued_jobs(
    replaced: Path,
    aimer_steps: set[str],
    reap_steps: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = runs(Store(replaced), STUDY)[0]
    first.add_jobs([SubmittedJob("7", "7", "study.plan", "plan", (), ())])
    queue = {"7": QueuedJob("7", "study.plan", "PENDING", "Dependency", "0:00")}
    monkeypatch.setattr(scheduler, "queue", lambda *_: queue)
    assert garbage_in(replaced) == set()
    queue.clear()
    assert garbage_in(replaced) == aimer_steps - reap_steps
    monkeypatch.setattr(scheduler, "queue", Mock(side_effect=UserError("no scheduler here")))
    assert garbage_in(replaced) == set()
    assert find_garbage(Store(replaced))[1] == "no scheduler here"


def test_partial_run_records_of_a_killed_command_are_removed(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path).create()
    partial_record = ".run.json.0123abcd"
    with create_run(store, STUDY, []) as killed_run:
        (killed_run.folder / partial_record).touch()
    with create_run(store, STUDY, []) as live_run:
        (live_run.folder / partial_record).touch()
        with create_run(store, STUDY, []):
            assert not (killed_run.folder / partial_record).exists()
            assert (live_run.folder / partial_record).exists()


def test_gc_keeps_inputs_and_results_of_a_job_while_it_works(
    root: Path, aimer_study: StudyRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No queue lists the job. After its run, another one has written a record without cells."""
    store = Store(root).create()
    needed = list(steps(aimer_study).values())
    with create_run(store, STUDY, needed) as run, create_run(store, STUDY, []) as later:
        name = str(run.folder.relative_to(root / "runs"))
    write_sealed(
        later.folder / "record.json",
        {"schema": 1, "created": 0, "replaces": [], "cells": [], **NO_FIGURES},
    )

    def collect_garbage(step: Step, scratch: Path) -> None:
        assert {read_sealed(path)["limit"] for path in root.glob("claims/*")} == {30.0}
        gc(Store(root), apply=True)

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(slurm_jobs, "WorkerProcess", Worker)
    Worker.hook = collect_garbage
    first = [step for step in needed if not step.needs]
    second = [step for step in needed if step.needs and {*step.needs} <= {*first}]
    launcher = LauncherConfig(stale_minutes=0.5)
    counts = slurm_jobs.StepsJob(str(root), [*first, *second], name, launcher)()
    assert first
    assert second
    assert counts["failed"] == counts["skipped"] == 0
    assert {step.folder for step in (*first, *second)} <= finished(root)
    gc(Store(root), apply=True)
    assert finished(root) == set()


def test_gc_keeps_folders_that_are_no_steps(replaced: Path) -> None:
    """Files of the user whose names look like those of steps, and steps that were set aside."""
    notes = replaced / "plan" / "notes-0123456789ab"
    notes.mkdir()
    plan = next(replaced / name for name in garbage_in(replaced) if name.startswith("plan/"))
    copy = replaced / "mine" / plan.name
    shutil.copytree(plan, copy)
    other_id = plan.with_name("x-0123456789ab")
    shutil.copytree(plan, other_id)
    os.rename(other_id / "step.json", other_id / "other.json")
    document = read_sealed(other_id / "other.json")
    write_sealed(other_id / "step.json", {**document, "id": "f" * 64})
    gc(Store(replaced), apply=True)
    assert not plan.exists()
    assert notes.is_dir()
    assert other_id.is_dir()
    assert copy.is_dir()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("gc apply_all=true", "did you mean apply"),
        ("gc apply=yes", "apply=yes"),
        (f"gc {STUDY}", STUDY),
        (f"status {STUDY} apply=true", "setting=apply"),
        (f"verify {STUDY} more", "more is neither"),
        ("status", "required: name"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    root: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    Store(root).create()
    assert study_command(root, *command.split()) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1
