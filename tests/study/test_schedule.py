"""The schedule: every step once, after its inputs, whatever fails; and what is said of a study
meanwhile and after."""

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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import studies
from example_steps import Example
from processes import until
from studies import STUDY, StudyRequest, start, study_command

from moe_lab import machine, progress
from moe_lab.config import Config, LauncherConfig
from moe_lab.errors import UserError, check_installed
from moe_lab.machine import WORKERS
from moe_lab.results import FIGURES
from moe_lab.study import record
from moe_lab.study import run as running
from moe_lab.study.graph import Graph
from moe_lab.study.provenance import error_document
from moe_lab.study.resources import GIB, Resources
from moe_lab.study.runs import RECORD, Submitted, begin
from moe_lab.study.schedule import (
    InProcessExecutor,
    Schedule,
    StepError,
    WorkerProcess,
    overview,
    recall_failures,
    work,
)
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.jobs import StepsJob
from moe_lab.study.step import Step
from moe_lab.study.store import Store

TESTS = f"{Path(__file__).parents[1]}{os.pathsep}{Path(__file__).parents[2]}"
"""Where steps of tests are, and moe_lab."""


def chain(merged: bool = False) -> tuple[Step, Step, Step, Step]:
    """Four steps; the last one has the two before it as inputs, or merges them."""
    first = Example("first")
    left, right = (Example(kind, needed={"in": first}) for kind in ("left", "right"))
    last = (
        Example("last", merges=(left, right))
        if merged
        else Example("last", needed={"l": left, "r": right})
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
def test_each_step_once_after_its_inputs(tmp_path: Path, threads: int, merged: bool) -> None:
    steps = chain(merged)[::-1]
    ran = []
    store = Store(tmp_path).create()

    def execute(step: Step, scratch: Path) -> None:
        assert all(store.done(needed) for needed in (*step.inputs.values(), *step.merges))
        ran.append(step.kind)

    run(store, execute, *[Schedule(steps)] * threads)
    assert sorted(ran) == ["first", "last", "left", "right"]
    assert ran[0] == "first" and ran[-1] == "last"


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("transient", [False, True])
def test_a_failure_skips_what_needs_it_and_nothing_else(
    tmp_path: Path, merged: bool, transient: bool
) -> None:
    """It is remembered unless it is the machine's fault, as when a server dies or memory runs
    out."""
    first, left, right, last = chain(merged)
    store = Store(tmp_path).create()
    schedule = Schedule((first, left, right, last))

    def execute(step: Step, scratch: Path) -> None:
        if step is left:
            raise StepError({"message": "no", "transient": transient})

    run(store, execute, schedule)
    assert set(schedule.failed) == {left.id} and set(schedule.skipped) == {last.id}
    assert store.done(right) and (store.error(left.id) or {}).get("message") == (
        None if transient else "no"
    )


def test_a_dead_worker_has_its_signal_named_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the kernel kills it, because memory ran out."""
    worker_that(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    first, left, right, _ = chain()
    with WorkerProcess(Store(tmp_path / "store").create()) as execute:
        execute(first, tmp_path)
        with pytest.raises(StepError, match=r"worker died .*SIGKILL") as died:
            execute(left, tmp_path)
        assert died.value.transient
        execute(right, tmp_path)


def test_a_worker_goes_on_when_slurm_warns_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job's first process handles the warning; a worker that died of it would leave a failed
    step."""
    worker_that(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGUSR2)")
    first, left, *_ = chain()
    with WorkerProcess(Store(tmp_path / "store").create()) as execute:
        execute(first, tmp_path)
        before = execute.child
        execute(left, tmp_path)
        assert execute.child is before


@pytest.mark.parametrize("saves", [True, False])
def test_a_warned_job_lets_its_worker_save(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker warns it, as Slurm would, and then ends, or does not, within the time that the job
    has."""
    saved = tmp_path / "saved"
    store = Store(tmp_path / "store").create()
    ends = (
        f"signal.signal(signal.SIGTERM, lambda *_: {saves} and (os.mkdir({str(saved)!r}) or "
        "os._exit(0)))"
    )
    worker_that(
        tmp_path,
        monkeypatch,
        f"{ends}; os.kill(os.getppid(), signal.SIGUSR2); signal.pause(); signal.pause()",
    )
    monkeypatch.setattr("moe_lab.child_process.GRACE", 0.1)
    pack = StepsJob(
        str(store.root),
        [],
        "study/1",
        LauncherConfig(max_requeues=1, signal_seconds=120 if saves else 1),
    )

    def warned(*_: object) -> None:
        again = pack.checkpoint()
        assert again and again.function == replace(
            pack, launcher=replace(pack.launcher, max_requeues=0)
        )
        assert saved.exists() == saves
        raise InterruptedError

    before = signal.signal(signal.SIGUSR2, warned)
    try:
        with pack.worker as execute, pytest.raises(InterruptedError):
            execute(chain()[1], tmp_path)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_group_may_write_what_a_step_leaves_in_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask of the process, which is not changed."""
    resume_files = tmp_path / "store" / "partial"
    worker_that(tmp_path, monkeypatch, f"os.mkdir({str(resume_files)!r})")
    resume_files.parent.mkdir()
    resume_files.parent.chmod(0o2775)
    before = os.umask(0o077)
    try:
        with InProcessExecutor(Store(resume_files.parent).create()) as execute:
            execute(chain()[1], tmp_path)
        assert resume_files.stat().st_mode & 0o020 and os.umask(0o077) == 0o077
    finally:
        os.umask(before)


def test_a_worker_that_cannot_read_a_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it does not find the module of the step."""
    monkeypatch.setenv("PYTHONPATH", "")
    first, *_ = chain()
    with (
        WorkerProcess(Store(tmp_path).create()) as execute,
        pytest.raises(StepError, match="example_steps") as unable,
    ):
        execute(first, tmp_path)
    assert not unable.value.transient


def test_a_worker_does_not_make_a_deleted_store_again(
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
        with pytest.raises(StepError) as lost:
            execute(left, tmp_path)
    assert not store.root.exists() and "worker died" not in str(lost.value)


def worker_that(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Have workers do nothing, but this at the step called left."""
    script = folder / "worker.py"
    script.write_text(
        "import base64, json, os, pickle, signal, sys\n"
        "for line in sys.stdin:\n"
        "    step, files = pickle.loads(base64.b64decode(json.loads(line)[1]['work']))\n"
        f"    if step.kind == 'left': {does}\n"
        "    print(json.dumps({'done': {}}), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", TESTS)
    monkeypatch.setattr("moe_lab.study.schedule.command", lambda *_: [sys.executable, str(script)])


def locally(
    schedule: Schedule, place: Path, monkeypatch: pytest.MonkeyPatch, processes: int | None = None
) -> tuple[list[dict[str, str]], list[tuple[str, int]]]:
    """The environments of the workers that work on a schedule, and the kinds of their steps, on how
    many GPUs each."""
    workers = list[dict[str, str]]()
    did = list[tuple[str, int]]()

    class Noted(contextlib.nullcontext[Any]):
        def __init__(self, store: Store, environment: dict[str, str]) -> None:
            super().__init__(
                lambda step, _: did.append(
                    (step.kind, environment["CUDA_VISIBLE_DEVICES"].count(",") + 1)
                )
            )
            workers.append(environment)

    monkeypatch.setattr(running, "WorkerProcess", Noted)
    config = Config(launcher=LauncherConfig(name="local", processes=processes))
    study: Any = SimpleNamespace(config=config, store=Store(place).create())
    assert running.local(schedule, study, None)  # type: ignore[arg-type]
    return workers, did


@pytest.mark.parametrize(
    ("visible", "processes", "memory", "given"),
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
def test_local_workers_get_gpus_of_the_visible_ones(
    visible: str,
    processes: int | None,
    memory: float | None,
    given: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By index, UUID or MIG name; more workers than GPUs share them in turn, but no sets; a step of
    unknown size gets one; on the CPU (a negative size), there is a worker for each core of three,
    for which there are 10 GiB."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    # CUDA reads no further than others
    usable = takewhile(re.compile(r"\d|GPU-|MIG-").match, visible.split(","))
    count = len(list(usable))
    monkeypatch.setattr(machine, "gpu_count", lambda: count)
    monkeypatch.setattr(running, "work", lambda *_: None)
    monkeypatch.setattr(running, "cores", lambda: 3)
    monkeypatch.setattr(running, "main_memory", lambda: 10.0 * GIB)
    needed = {"memory": None, "on_gpu": True}
    if memory is not None:
        needed = {"memory": abs(memory) * GIB, "on_gpu": memory > 0}
    workers, _ = locally(
        Schedule([Example(machine=needed)], set()), tmp_path, monkeypatch, processes
    )
    assert {environment[WORKERS] for environment in workers} == {str(len(given))}
    found = [environment.get("CUDA_VISIBLE_DEVICES") for environment in workers]
    assert sorted(found, key=str) == given


def test_steps_on_few_gpus_run_before_those_on_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes on a GPU each, then evaluations on four, and with these what needs them."""
    one_gpu, four_gpus = ({"memory": gib * GIB, "on_gpu": True} for gib in (30, 200))
    passes = [Example("statistics", str(number), number, machine=one_gpu) for number in range(3)]
    evaluated = [
        Example(
            "evaluate", str(number), number, needed={"statistics": statistics}, machine=four_gpus
        )
        for number, statistics in enumerate(passes)
    ]
    graded = Example("grade", "0", needed={"evaluate": evaluated[0]})
    monkeypatch.setattr(running, "visible_gpus", lambda: list("0123"))
    schedule = Schedule([*passes, *evaluated, graded], set())
    _, did = locally(schedule, tmp_path, monkeypatch)
    assert did[:3] == [("statistics", 1)] * 3 and not schedule.failed
    assert sorted(did[3:]) == [("evaluate", 4)] * 3 + [("grade", 4)]


# ---- what is said of a study


def cells(table: str) -> dict[str, list[str]]:
    """First cell of each row of a printed table -> its other cells."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


Study = Callable[..., str]


@pytest.fixture
def study(fake_worker: None, capsys: pytest.CaptureFixture[str]) -> Study:
    """Runs commands of `python -m moe_lab.study` on a store; gives what they print."""

    def run(name: str, store: Path, of: str = STUDY) -> str:
        capsys.readouterr()
        assert study_command(store, name, of) == 0
        return capsys.readouterr().out

    return run


def test_the_table_of_a_study_while_it_runs_and_at_its_end(
    tmp_path: Path, aimer_study: StudyRequest, study: Study
) -> None:
    gate = threading.Event()
    at_plan = threading.Event()
    codes = list[int]()

    def hook(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            at_plan.set()
            gate.wait()

    studies.Worker.hook = hook
    thread = threading.Thread(
        target=lambda: codes.append(start(tmp_path / "store", aimer_study)), daemon=True
    )
    thread.start()
    until(at_plan.is_set)
    table = cells(study("status", tmp_path / "store"))
    assert table["step"] == ["done", "running", "pending", "one takes", "left, about"]
    assert table["plan"] == ["", "1", "", "", ""]
    done, under_way, pending, *_ = table["all"]
    assert under_way == "1" and int(pending) >= 2
    assert set(cells(study("status", tmp_path / "store", "plan/"))) == {"step", "plan", "all"}
    why = study("why", tmp_path / "store")
    by = f"process {os.getpid()} on {socket.gethostname()}"
    assert (
        f"running: being computed by {by}" in why and "pending: another run will compute it" in why
    )
    gate.set()
    thread.join()
    assert codes == [0]
    table = cells(study("status", tmp_path / "store"))
    assert table["step"] == ["done", "one takes", "left, about"]
    assert table["all"][0] == str(int(done) + 1 + int(pending)) and table["plan"] == [
        "1",
        "0:00:02",
        "0:00:00",
    ]


def test_steps_of_a_killed_command_are_missing(tmp_path: Path, study: Study) -> None:
    """Its claim ends with it."""
    store = Store(tmp_path).create()
    steps = [Example()]
    process = ExitStack()
    process.enter_context(begin(store, STUDY, steps))
    assert cells(study("status", tmp_path))["step"][0] == "pending"
    process.close()
    out = study("status", tmp_path)
    assert cells(out)["step"][0] == "missing" and "same command" in out.splitlines()[-1]


def test_a_silent_scheduler_hides_no_error(
    tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path).create()
    steps = [Example("k", str(number), number) for number in range(3)]
    with begin(store, STUDY, steps) as run:
        last = Submitted("8", "8", "s.record", RECORD, [], [])
        run.add([Submitted("7", "7", "s.k", "k", [step.id for step in steps], []), last])
    store.fail(steps[0], {"message": "it broke"})
    monkeypatch.setattr(scheduler, "job_state", fate := Mock(side_effect=UserError("no scontrol")))
    monkeypatch.setattr(scheduler, "queue", lambda _: {})
    why = study("why", tmp_path)
    assert (
        "it broke" in why
        and "and 1 more: missing: job 7 is gone" in why
        and "record: missing" in why
    )
    assert [call.args for call in fate.call_args_list] == [("7",), ("8",)]
    with begin(store, STUDY, steps):
        assert "record" not in study("why", tmp_path), "another run will write it"
    monkeypatch.setattr(scheduler, "queue", Mock(side_effect=UserError("squeue has not answered")))
    fate.reset_mock()
    why = study("why", tmp_path)
    assert "it broke" in why and "squeue has not answered" in why and not fate.called
    assert "ended" not in study("status", tmp_path)
    assert study_command(tmp_path, "cancel", STUDY) == 2


class Vanished(RuntimeError):
    """As transformers raises it when the import of a family fails."""

    __cause__ = ImportError("cannot import name 'Cache'")


def missing_name() -> AttributeError:
    with pytest.raises(AttributeError) as raised:
        _ = json.nothing  # type: ignore[attr-defined]
    return raised.value


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ModuleNotFoundError("No module named 'x'"), True),
        (missing_name(), True),
        (
            OSError("libcudart.so.12: cannot open shared object file: No such file or directory"),
            True,
        ),
        (Vanished("Failed to import"), True),
        (
            RuntimeError("vLLM's process ended: ModuleNotFoundError: No module named 'vllm._C'"),
            True,
        ),
        (
            RuntimeError(
                "the server ended: ImportError: cannot import name 'Cache' from 'transformers'"
            ),
            True,
        ),
        (UserError("the process ended: libtorch.so: undefined symbol: _ZN3c10"), True),
        (AttributeError("'Plan' object has no attribute 'x'"), False),
        (ValueError("it broke"), False),
    ],
)
def test_a_failure_of_what_is_installed_is_no_failure_of_the_step(
    tmp_path: Path, error: Exception, again: bool
) -> None:
    """Its message stays until the next start, which tries the step again."""
    store = Store(tmp_path).create()
    step = Example()
    store.fail(step, error_document(error))
    assert str(error) in (store.error(step.id) or {})["message"]
    recall_failures(schedule := Schedule([step]), store, retry=None)
    assert (step.id in schedule.waiting) == again and (store.error(step.id) is None) == again


def test_a_step_refused_by_a_missing_import_is_tried_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store").create()
    step = Example()
    monkeypatch.setenv("PYTHONPATH", "")
    with WorkerProcess(store) as execute:
        work(Schedule([step]), store, execute)
    assert "example_steps" in (store.error(step.id) or {})["message"]
    recall_failures(schedule := Schedule([step]), store, retry=None)
    work(schedule, store, lambda *_: None)
    assert store.done(step)


def test_a_package_that_a_step_needs_may_be_installed_later(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        check_installed("no_such_package", "extra", "a step")
    assert error_document(raised.value)["environment"]


# The report of a run


def test_a_report_counts_as_made_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config: Any = SimpleNamespace(study="study", tracker=SimpleNamespace(name="none"))
    study = record.Study(
        config, Graph([], {figure: {} for figure in FIGURES}), Store(tmp_path).create()
    )
    folder = tmp_path / "reports" / "study"
    (folder / "failed").mkdir(parents=True)
    (folder / "report.html").touch()
    lacking = [folder / "failed" / f"{name}.log" for name in ("coverage.fig10", "ranks")]
    for printed, failed, says in (
        ("", [], "the report failed: KeyError: 'cell'"),
        ("report.html\n", lacking, "the report lacks coverage.fig10, ranks"),
        ("report.html\n", [], "report.html"),
    ):
        for file in failed:
            file.touch()
        done = SimpleNamespace(returncode=1, stdout=printed, stderr="KeyError: 'cell'")
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **options: done)
        complete = record._report(study)
        assert says in capsys.readouterr().err
        assert complete == (folder / record.MADE_FROM).exists() == (says == "report.html")
        for file in failed:
            file.unlink()


# The time left


class Timed:
    """A run of steps of which each takes as long as said, by a clock of its own, on so many
    workers."""

    def __init__(self, store: Path, seconds: dict[Step, float], workers: int = 1) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.workers = workers
        self.store, self.schedule = Store(store).create(), Schedule(seconds, clock=lambda: self.now)

    def go(self, until: float) -> None:
        """Do what ends by then, or everything; then let the running steps tell how far they are."""
        while self.schedule.waiting or self.schedule.running:
            while self.schedule.waiting and len(self.schedule.running) < self.workers:
                self.schedule.take()
            end, step = min(
                (at + self.seconds[step], step) for step, at in self.schedule.running.values()
            )
            if end > until:
                self.now = until
                break
            self.now = end
            self.schedule.finish(step, computed=True)
        for step, begun in self.schedule.running.values():
            self.store.partial(step).mkdir(parents=True, exist_ok=True)
            told = [100 * (self.now - begun) / self.seconds[step], 100, "requests"]
            (self.store.partial(step) / progress.NAME).write_text(json.dumps(told))

    def says(self, seconds: float | None = None) -> str:
        return overview(self.schedule, self.store, lambda step: seconds, self.workers)

    def minutes(self) -> float:
        return float(self.says().rpartition("about ")[2].partition(" min left")[0])


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
def test_the_time_left_is_known_after_a_quarter_of_the_work(
    tmp_path: Path, sizes: Any, workers: int
) -> None:
    run = Timed(tmp_path, sized("evaluate", *sizes), workers)
    whole = Timed(tmp_path / "whole", run.seconds, workers)
    whole.go(1e9)
    run.go(whole.now / 4)
    assert run.minutes() / 2 < (whole.now - run.now) / 60 < run.minutes() * 2


def test_progress_inside_a_step_is_shown_and_moves_the_time_left(tmp_path: Path) -> None:
    run = Timed(tmp_path, sized("evaluate", 50, 50))
    run.go(0)
    assert "evaluate 0/2" in run.says() and "time left unknown" in run.says()
    assert "about 8 min" in run.says(seconds=240.0), "the store knows what a run does not"
    run.go(600)
    assert "10 of 100 requests" in run.says() and run.minutes() == pytest.approx(190, rel=0.02)


def test_a_thousand_short_cells_have_a_time_left_only_when_it_is_known(tmp_path: Path) -> None:
    """Plans take no time, and say nothing of evaluations; nor does one that another run has
    done."""
    plans = dict.fromkeys(sized("plan", *[1] * 1000), 0.01)
    run = Timed(tmp_path, {**plans, **dict.fromkeys(sized("evaluate", *[1] * 1001), 0.6)})
    run.schedule.finish(list(run.seconds)[-1], computed=False)
    run.go(9.9)
    assert "time left unknown" in run.says() and " min left" not in run.says()
    run.go(70)
    assert run.minutes() == pytest.approx(9)
    run.go(600)
    assert "about 0" not in run.says() and "less than 1 min" in run.says()


def test_a_process_tells_how_far_it_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
