"""The schedule runs every step once, after its inputs, whatever fails; and commands describe the
state of a study during and after it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import studies
from example_steps import Example
from processes import wait_until
from studies import STUDY, StudyRequest, start, study_command

from moe_lab import machine, progress
from moe_lab.config import Config, LauncherConfig
from moe_lab.errors import UserError
from moe_lab.machine import WORKERS
from moe_lab.result_files import FIGURE_STEPS
from moe_lab.study import record
from moe_lab.study import run as running
from moe_lab.study.graph import Graph
from moe_lab.study.provenance import error_document
from moe_lab.study.resources import GIB, Resources
from moe_lab.study.runs import RECORD_KIND, SubmittedJob, create_run
from moe_lab.study.schedule import (
    InProcessExecutor,
    Schedule,
    StepError,
    WorkerProcess,
    progress_line,
    recall_failures,
    work,
)
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.jobs import StepsJob
from moe_lab.study.step import Step
from moe_lab.study.store import Store

TESTS = f"{Path(__file__).parents[1]}{os.pathsep}{Path(__file__).parents[2]}"
"""PYTHONPATH of the steps of tests and of moe_lab."""


def chain(merged: bool = False) -> tuple[Step, Step, Step, Step]:
    """Four steps; the last one has the two before it as inputs, or merges them."""
    first = Example("first")
    left, right = (Example(kind, input_steps={"in": first}) for kind in ("left", "right"))
    last = (
        Example("last", merged_steps=(left, right))
        if merged
        else Example("last", input_steps={"l": left, "r": right})
    )
    return first, left, right, last


def run(store: Store, execute: Callable[[Step, Path], None], *schedules: Schedule) -> None:
    """Work on each of the schedules in a thread."""
    threads = [
        threading.Thread(target=work, args=(schedule, store, execute)) for schedule in schedules
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_step_runs_once_after_its_inputs(tmp_path: Path, threads: int, merged: bool) -> None:
    steps = chain(merged)[::-1]
    kinds = []
    store = Store(tmp_path).create()

    def execute(step: Step, scratch: Path) -> None:
        assert all(
            store.is_finished(needed) for needed in (*step.inputs.values(), *step.merged_steps)
        )
        kinds.append(step.kind)

    run(store, execute, *[Schedule(steps)] * threads)
    assert sorted(kinds) == ["first", "last", "left", "right"]
    assert kinds[0] == "first"
    assert kinds[-1] == "last"


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("transient", [False, True])
def test_a_failure_skips_dependent_steps_only(
    tmp_path: Path, merged: bool, transient: bool
) -> None:
    """The failure is recorded unless it is transient, as when a server dies or memory runs out."""
    first, left, right, last = chain(merged)
    store = Store(tmp_path).create()
    schedule = Schedule((first, left, right, last))

    def execute(step: Step, scratch: Path) -> None:
        if step is left:
            raise StepError({"message": "no", "transient": transient})

    run(store, execute, schedule)
    assert set(schedule.failed) == {left.id}
    assert set(schedule.skipped) == {last.id}
    assert store.is_finished(right)
    assert (store.error(left.id) or {}).get("message") == (None if transient else "no")


def test_a_dead_worker_is_reported_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills a worker so when memory runs out."""
    worker_that(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    first, left, right, _ = chain()
    with WorkerProcess(Store(tmp_path / "store").create()) as execute:
        execute(first, tmp_path)
        with pytest.raises(StepError, match=r"worker died .*SIGKILL") as died:
            execute(left, tmp_path)
        assert died.value.transient
        execute(right, tmp_path)


def test_a_worker_ignores_the_warning_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of the job handles the warning; a worker that died of it would leave a
    failed step."""
    worker_that(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGUSR2)")
    first, left, *_ = chain()
    with WorkerProcess(Store(tmp_path / "store").create()) as execute:
        execute(first, tmp_path)
        process = execute.child
        execute(left, tmp_path)
        assert execute.child is process


def warned_job(store: Store, signal_seconds: int) -> StepsJob:
    launcher = LauncherConfig(max_requeues=1, signal_seconds=signal_seconds)
    return StepsJob(str(store.root), [], "study/1", launcher)


@contextlib.contextmanager
def at_warning(handle: Callable[..., None]) -> Iterator[None]:
    """Call `handle` for the signal by which Slurm warns a job."""
    previous = signal.signal(signal.SIGUSR2, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, previous)


@pytest.mark.parametrize("saves", [True, False])
def test_a_warned_job_lets_its_worker_save(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker sends the warning, as Slurm would. Then it saves and ends, or does not end within
    the time of the job."""
    saved = tmp_path / "saved"
    on_end = f"lambda *_: {saves} and (os.mkdir({str(saved)!r}) or os._exit(0))"
    worker_that(
        tmp_path,
        monkeypatch,
        f"signal.signal(signal.SIGTERM, {on_end}); os.kill(os.getppid(), signal.SIGUSR2); "
        "signal.pause(); signal.pause()",
    )
    monkeypatch.setattr("moe_lab.child_process.GRACE", 0.1)
    job = warned_job(Store(tmp_path / "store").create(), 120 if saves else 1)

    def requeue(*_: object) -> None:
        requeued = job.checkpoint()
        launcher = replace(job.launcher, max_requeues=0)
        assert requeued
        assert requeued.function == replace(job, launcher=launcher)
        assert saved.exists() == saves
        raise InterruptedError

    with at_warning(requeue), job.worker as execute, pytest.raises(InterruptedError):
        execute(chain()[1], tmp_path)


def test_files_of_a_step_are_writable_by_the_group_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask of the process does not matter and is not changed."""
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o2775)
    made_by_worker = store / "partial"
    worker_that(tmp_path, monkeypatch, f"os.mkdir({str(made_by_worker)!r})")
    umask = os.umask(0o077)
    try:
        with InProcessExecutor(Store(store).create()) as execute:
            execute(chain()[1], tmp_path)
        assert made_by_worker.stat().st_mode & 0o020
        assert os.umask(0o077) == 0o077  # which returns the umask that is in effect
    finally:
        os.umask(umask)


def test_a_worker_does_not_recreate_a_deleted_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS)
    first, left, *_ = chain()
    store = Store(tmp_path / "store").create()
    with WorkerProcess(store) as execute:
        with pytest.raises(StepError):  # there is nothing to do in it
            execute(first, tmp_path)
        assert list((store.root / "logs").glob("*/*.log"))
        shutil.rmtree(store.root)
        with pytest.raises(StepError) as error:
            execute(left, tmp_path)
    assert not store.root.exists()
    assert "worker died" not in str(error.value)


def worker_that(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Have workers do nothing, but this at the step called left."""
    script = folder / "worker.py"
    script.write_text(
        "import base64, json, os, pickle, signal, sys\n"
        "for line in sys.stdin:\n"
        "    step, files = pickle.loads(base64.b64decode(json.loads(line)[1]['pickled_step']))\n"
        f"    if step.kind == 'left': {does}\n"
        "    print(json.dumps({'done': {}}), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", TESTS)
    monkeypatch.setattr("moe_lab.study.schedule.command", lambda *_: [sys.executable, str(script)])


def run_locally(
    schedule: Schedule, store: Path, monkeypatch: pytest.MonkeyPatch, processes: int | None = None
) -> tuple[list[dict[str, str]], list[tuple[str, int]]]:
    """Run a schedule with `launcher=local`: the environment of each worker; the kind of each step
    with its number of GPUs."""
    environments = list[dict[str, str]]()
    executed = list[tuple[str, int]]()

    class FakeProcess(contextlib.nullcontext[Any]):
        def __init__(self, store: Store, **environment: str) -> None:
            super().__init__(self.execute)
            environments.append(environment)
            self.environment = environment

        def execute(self, step: Step, scratch: Path) -> None:
            gpus = self.environment["CUDA_VISIBLE_DEVICES"].count(",") + 1
            executed.append((step.kind, gpus))

    monkeypatch.setattr(running, "WorkerProcess", FakeProcess)
    config = Config(launcher=LauncherConfig(name="local", processes=processes))
    study: Any = SimpleNamespace(config=config, store=Store(store).create())
    running.run_in_workers(schedule, study, None)  # type: ignore[arg-type]
    return environments, executed


@pytest.mark.parametrize(
    ("visible", "processes", "memory", "devices"),
    [
        ("1,GPU-8f2c,MIG-7a", None, 30, ["1", "GPU-8f2c", "MIG-7a"]),
        ("0,1", 4, 30, ["0", "0", "1", "1"]),
        ("0,1,2,3,4,5,6,7", None, 200, ["0,1,2,3", "4,5,6,7"]),
        ("0,1,2,3,4,5,6,7", 8, 200, ["0,1,2,3", "4,5,6,7"]),
        ("0,1", None, 200, ["0,1"]),
        ("0,1", None, None, ["0", "1"]),
        ("0,-1,1", None, 30, ["0"]),
        ("NoDevFiles", None, 5, [None] * 2),
        ("0,1", None, -1, [None] * 3),
        ("", None, -1, [None] * 3),
        ("", None, -5, [None] * 2),
        ("-1", 2, -1, [None] * 2),
    ],
)
def test_local_workers_get_the_visible_gpus(
    visible: str,
    processes: int | None,
    memory: float | None,
    devices: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs are named by index, UUID or MIG name. Workers share single GPUs in turn, but no sets of
    GPUs; a step of unknown size gets one GPU; on the CPU (a negative size), there are up to three
    workers, one for each core, as far as 10 GiB of memory suffice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    # CUDA ignores the names after an invalid one
    valid_names = takewhile(re.compile(r"\d|GPU-|MIG-").match, visible.split(","))
    count = len(list(valid_names))
    monkeypatch.setattr(machine, "gpu_count", lambda: count)
    monkeypatch.setattr(running, "work", lambda *_: None)
    monkeypatch.setattr(running, "cores", lambda: 3)
    monkeypatch.setattr(running, "main_memory", lambda: 10.0 * GIB)
    resources = {"memory": None, "on_gpu": True}
    if memory is not None:
        resources = {"memory": abs(memory) * GIB, "on_gpu": memory > 0}
    schedule = Schedule([Example(resource_fields=resources)], set())
    environments, _ = run_locally(schedule, tmp_path, monkeypatch, processes)
    assert {environment[WORKERS] for environment in environments} == {str(len(devices))}
    visible_devices = [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments]
    assert sorted(visible_devices, key=str) == devices


def test_steps_on_few_gpus_run_before_those_on_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes on a GPU each, then evaluations on four, and with these the steps that need them."""
    one_gpu, four_gpus = ({"memory": gib * GIB, "on_gpu": True} for gib in (30, 200))
    passes = [
        Example("statistics", str(number), number, resource_fields=one_gpu) for number in range(3)
    ]
    evaluations = [
        Example("evaluate", step.name, step.number, {"statistics": step}, resource_fields=four_gpus)
        for step in passes
    ]
    grade = Example("grade", "0", input_steps={"evaluate": evaluations[0]})
    monkeypatch.setattr(running, "visible_gpus", lambda: list("0123"))
    schedule = Schedule([*passes, *evaluations, grade], set())
    _, executed = run_locally(schedule, tmp_path, monkeypatch)
    assert executed[:3] == [("statistics", 1)] * 3
    assert not schedule.failed
    assert sorted(executed[3:]) == [("evaluate", 4)] * 3 + [("grade", 4)]


# ---- the commands `status` and `why`


def cells(table: str) -> dict[str, list[str]]:
    """First cell of each row of a printed table -> its other cells."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


Study = Callable[..., str]


@pytest.fixture
def study(fake_worker: None, capsys: pytest.CaptureFixture[str]) -> Study:
    """Runs commands of `python -m moe_lab.study` on a store; returns what they print."""

    def run(command: str, store: Path, argument: str = STUDY) -> str:
        capsys.readouterr()
        assert study_command(store, command, argument) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def running_study(
    fake_worker: None, tmp_path: Path, aimer_study: StudyRequest
) -> Iterator[Callable[[], None]]:
    """A study that runs in a thread and stops at its first plan; the function ends it."""
    may_go_on = threading.Event()
    at_plan = threading.Event()
    codes = list[int]()

    def wait_at_plan(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            at_plan.set()
            may_go_on.wait()

    def end() -> None:
        may_go_on.set()
        thread.join()
        assert codes == [0]

    studies.Worker.hook = wait_at_plan
    thread = threading.Thread(
        target=lambda: codes.append(start(tmp_path / "store", aimer_study)), daemon=True
    )
    thread.start()
    wait_until(at_plan.is_set)
    yield end
    end()


def test_status_of_a_running_and_of_a_finished_study(
    running_study: Callable[[], None], tmp_path: Path, study: Study
) -> None:
    """`why` names the process that computes a step."""
    table = cells(study("status", tmp_path / "store"))
    assert table["step"] == ["done", "running", "pending"]
    assert table["plan"] == ["", "1", ""]
    done, under_way, pending, *_ = table["all"]
    assert under_way == "1"
    assert int(pending) >= 2
    assert set(cells(study("status", tmp_path / "store", "plan/"))) == {"step", "plan", "all"}
    output = study("why", tmp_path / "store")
    process = f"process {os.getpid()} on {socket.gethostname()}"
    assert f"running: being computed by {process}" in output
    assert "pending: another run will compute it" in output
    running_study()
    output = study("status", tmp_path / "store")
    assert f": ended on {datetime.now():%Y-%m-%d} at " in output
    table = cells(output)
    assert table["step"] == ["done"]
    assert table["all"][0] == str(int(done) + 1 + int(pending))
    assert table["plan"] == ["1"]


def test_status_shows_missing_steps_of_a_killed_command(tmp_path: Path, study: Study) -> None:
    """The claim of a command ends with its process."""
    store = Store(tmp_path).create()
    steps = [Example()]
    process = ExitStack()
    process.enter_context(create_run(store, STUDY, steps))
    assert cells(study("status", tmp_path))["step"][0] == "pending"
    process.close()
    output = study("status", tmp_path)
    assert cells(output)["step"][0] == "missing"
    assert "same command" in output.splitlines()[-1]


@pytest.fixture
def unfinished(tmp_path: Path) -> tuple[Store, list[Step]]:
    """A study of three steps, of which one failed, and whose jobs 7 and 8 are gone."""
    store = Store(tmp_path).create()
    steps: list[Step] = [Example("k", str(number), number) for number in range(3)]
    with create_run(store, STUDY, steps) as run:
        record_job = SubmittedJob("8", "8", "s.record", RECORD_KIND, [], [])
        run.add_jobs(
            [SubmittedJob("7", "7", "s.k", "k", [step.id for step in steps], []), record_job]
        )
    store.fail(steps[0], {"message": "it broke"})
    return store, steps


@pytest.fixture
def job_fields(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """An empty queue, and a scontrol that cannot be run."""
    state = Mock(side_effect=UserError("no scontrol"))
    monkeypatch.setattr(scheduler, "job_fields", state)
    monkeypatch.setattr(scheduler, "queue", lambda _: {})
    return state


def test_why_shows_errors_of_steps_whose_jobs_are_gone(
    unfinished: tuple[Store, list[Step]], tmp_path: Path, study: Study, job_fields: Mock
) -> None:
    output = study("why", tmp_path)
    assert "it broke" in output
    assert "and 1 more: missing: job 7 is gone" in output
    assert "record: missing" in output
    assert [call.args for call in job_fields.call_args_list] == [("7",), ("8",)]
    store, steps = unfinished
    with create_run(store, STUDY, steps):  # which will write the record
        assert "record" not in study("why", tmp_path)


@pytest.mark.usefixtures("unfinished")
def test_commands_work_without_an_answer_of_the_scheduler(
    tmp_path: Path, study: Study, job_fields: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `cancel` needs the scheduler."""
    monkeypatch.setattr(scheduler, "queue", Mock(side_effect=UserError("squeue has not answered")))
    output = study("why", tmp_path)
    assert "it broke" in output
    assert "squeue has not answered" in output
    assert not job_fields.called
    assert "ended" not in study("status", tmp_path)
    assert study_command(tmp_path, "cancel", STUDY) == 2


@pytest.mark.parametrize("retry", [None, "failed"])
def test_an_error_of_a_step_is_stored_until_a_retry(tmp_path: Path, retry: str | None) -> None:
    store = Store(tmp_path).create()
    step = Example()
    store.fail(step, error_document(ModuleNotFoundError("No module named 'x'")))
    recall_failures(schedule := Schedule([step]), store, retry=retry)
    assert (step.id in schedule.waiting) == (store.error(step.id) is None) == bool(retry)


# The report of a run


@pytest.mark.parametrize(
    ("stdout", "failed", "message"),
    [
        ("", [], "the report failed: KeyError: 'cell'"),
        (
            "report.html\n",
            ["coverage.fig10", "ranks"],
            "the report lacks coverage.fig10, ranks",
        ),
        ("report.html\n", [], "report.html"),
    ],
)
def test_a_report_is_finished_when_it_is_complete(
    stdout: str,
    failed: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config: Any = SimpleNamespace(study="study", tracker=SimpleNamespace(name="none"))
    graph = Graph([], {figure: {} for figure in FIGURE_STEPS})
    folder = tmp_path / "reports" / "study"
    (folder / "failed").mkdir(parents=True)
    (folder / "report.html").touch()
    for name in failed:
        (folder / "failed" / f"{name}.log").touch()
    result = SimpleNamespace(returncode=1, stdout=stdout, stderr="KeyError: 'cell'")
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: result)
    complete = record.update_report(record.Study(config, graph, Store(tmp_path).create()))
    printed = capsys.readouterr().err
    assert message in printed
    assert (str(folder / "report.html") in printed) == bool(stdout), "the path of a page"
    assert complete == (folder / record.FINGERPRINT_FILE).exists() == (message == "report.html")


# The time left


class SimulatedRun:
    """A run of steps that take the given seconds of its own clock, on a number of workers."""

    def __init__(self, store: Path, seconds: dict[Step, float], workers: int = 1) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.workers = workers
        self.store, self.schedule = Store(store).create(), Schedule(seconds, clock=lambda: self.now)

    def run_until(self, wait_until: float) -> None:
        """Finish the steps that end by `until`; then write the progress of the running steps."""
        while self.schedule.waiting or self.schedule.running:
            while self.schedule.waiting and len(self.schedule.running) < self.workers:
                self.schedule.take()
            end, step = min(
                (begun + self.seconds[step], step) for step, begun in self.schedule.running.values()
            )
            if end > wait_until:
                self.now = wait_until
                break
            self.now = end
            self.schedule.finish(step, computed=True)
        for step, begun in self.schedule.running.values():
            self.store.partial(step).mkdir(parents=True, exist_ok=True)
            done = 100 * (self.now - begun) / self.seconds[step]
            document = json.dumps({"done": done, "total": 100, "unit": "requests"})
            (self.store.partial(step) / progress.NAME).write_text(document)

    def overview_text(self) -> str:
        return progress_line(self.schedule, self.store, self.workers)

    def minutes(self) -> float:
        return float(self.overview_text().rpartition("about ")[2].partition(" min left")[0])


class Sized(Example):
    def resources(self) -> Resources:
        return super().resources()._replace(units=float(self.number % 1000))

    def __lt__(self, other: "Sized") -> bool:
        return self.number < other.number


def sized(kind: str, *units: int) -> dict[Step, float]:
    """Steps with so many units, of which each takes two minutes."""
    return {
        Sized(kind, number=1000 * number + size): 120.0 * size for number, size in enumerate(units)
    }


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("sizes", [(1, 50, 2, 30, 9, 1), (7, 1) * 20, (1,) * 40 + (40,)])
def test_time_left_is_known_after_a_quarter_of_the_work(
    tmp_path: Path, sizes: Any, workers: int
) -> None:
    run = SimulatedRun(tmp_path, sized("evaluate", *sizes), workers)
    full_run = SimulatedRun(tmp_path / "whole", run.seconds, workers)
    full_run.run_until(1e9)
    run.run_until(full_run.now / 4)
    assert run.minutes() / 2 < (full_run.now - run.now) / 60 < run.minutes() * 2


def test_progress_inside_a_step_changes_the_time_left(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, sized("evaluate", 50, 50))
    run.run_until(0)
    assert "evaluate 0/2" in run.overview_text()
    assert "time left unknown" in run.overview_text()
    run.run_until(600)
    assert "10 of 100 requests" in run.overview_text()
    assert run.minutes() == pytest.approx(190, rel=0.02)


def test_time_left_of_a_thousand_short_cells(tmp_path: Path) -> None:
    """Plans take no time, and say nothing of evaluations; nor does one that another run has
    done."""
    plans = dict.fromkeys(sized("plan", *[1] * 1000), 0.01)
    run = SimulatedRun(tmp_path, {**plans, **dict.fromkeys(sized("evaluate", *[1] * 1001), 0.6)})
    run.schedule.finish(list(run.seconds)[-1], computed=False)
    run.run_until(9.9)
    assert "time left unknown" in run.overview_text()
    assert " min left" not in run.overview_text()
    run.run_until(70)
    assert run.minutes() == pytest.approx(9)
    run.run_until(600)
    assert "about 0" not in run.overview_text()
    assert "less than 1 min" in run.overview_text()


def test_progress_is_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "step" / progress.NAME
    monkeypatch.setenv(progress.FILE, str(file))
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    assert progress.read(file) == (0, "")
    progress.update(3, 40, "batches")
    progress.add(2)
    assert progress.read(file) == (0.125, "5 of 40 batches")
    monkeypatch.setattr(progress, "INTERVAL", 1e9)
    progress.update(40, 40, "batches")
    assert progress.read(file)[0] == 0.125, "written rarely"


@pytest.mark.parametrize("total", [None, "many", 0])
def test_damaged_progress_is_none(total: str | int | None, tmp_path: Path) -> None:
    file = tmp_path / progress.NAME
    document = {"done": 1, "total": total, "unit": "batches"}
    file.write_text(json.dumps(document) if total is not None else "")
    assert progress.read(file) == (0, "")
