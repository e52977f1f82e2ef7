"""Stores that are damaged, gone, full, read-only, or in use by another run of the same study."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from example_steps import Example
from processes import python_command, wait_until
from studies import SMALL_STUDY, STUDY, StudyRequest, Worker, start, study_command, study_request
from test_store import state

from moe_lab.analysis.load.reader import Reader
from moe_lab.analysis.load.studies import combined_record
from moe_lab.config import LauncherConfig, TrackerConfig
from moe_lab.errors import UserError
from moe_lab.study import record, run
from moe_lab.study.runs import SubmittedJob, runs
from moe_lab.study.schedule import StepError
from moe_lab.study.slurm.jobs import StepsJob
from moe_lab.study.step import Step
from moe_lab.study.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fake_worker")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, aimer_study: StudyRequest) -> Path:
    """A store with a study of which one step failed, and with one file of every kind of JSON."""
    store = tmp_path_factory.mktemp("broken") / "store"

    def fail_evaluation(step: Step, scratch: Path) -> None:
        if step.kind == "evaluate" and "plan" in step.inputs:
            raise StepError({"message": "no"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "InProcessExecutor", Worker)
        patch.setattr(Worker, "hook", fail_evaluation)
        assert start(store, aimer_study) == 1
    (only_run,) = runs(Store(store).create(), STUDY)
    only_run.add_jobs([SubmittedJob("1", "1", "study.plan", "plan", ("x",), ())])
    return store


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished`."""
    shutil.copytree(finished, tmp_path / "store")
    return tmp_path / "store"


FILES = {
    "store.json": "store.json",
    "run.json": "runs/study/*/run.json",
    "jobs.json": "runs/study/*/jobs.json",
    "failed": "failed/*.json",
    "step": "plan/*/step.json",
    "result": "model/*/result.json",
}
"""Kind of a JSON file -> pattern of its path."""
STEP_FILES = ("step", "result")


def wrong(document: Any) -> Any:
    """A document of the same form with other types in it."""
    if isinstance(document, dict):
        return {key: wrong(value) for key, value in document.items()}
    if isinstance(document, list):
        return [wrong(value) for value in document]
    return 3 if isinstance(document, str) else "x"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "{}": lambda content: b"{}",
    "[]": lambda content: b"[]",
    "null": lambda content: b"null",
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "binary": lambda content: bytes(range(256)),
    "wrong types": lambda content: json.dumps(wrong(json.loads(content))).encode(),
    "nested": lambda content: b"[" * 100_000,
}


def damage(file: Path, method: str) -> None:
    if method == "a folder":
        file.unlink()
        file.mkdir()
        (file / "inside").touch()
    else:
        file.write_bytes(DAMAGES[method](file.read_bytes()))


@pytest.fixture(params=[*DAMAGES, "a folder"])
def damaged(request: pytest.FixtureRequest, store: Path) -> dict[str, Path]:
    """Kind -> the file of this kind in `store`, after all of them are damaged by one method."""
    files = {kind: sorted(store.glob(pattern))[0] for kind, pattern in FILES.items()}
    for file in files.values():
        damage(file, request.param)
    return files


@pytest.mark.usefixtures("damaged")
def test_status_and_a_dry_run_leave_damaged_files_as_they_are(
    store: Path, aimer_study: StudyRequest
) -> None:
    state_before = state(store)
    assert study_command(store, "status", STUDY) == 2, "run.json is damaged"
    assert start(store, aimer_study, dry_run=True) == 0
    assert state(store) == state_before


def test_a_start_reports_damaged_files_and_mends_the_store(
    damaged: dict[str, Path],
    store: Path,
    aimer_study: StudyRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert start(store, aimer_study) == 0
    messages = " ".join(capsys.readouterr().err.split())
    for kind in damaged.keys() - STEP_FILES:
        assert f"{damaged[kind].relative_to(store)}: " in messages
    for kind in STEP_FILES:
        folder = damaged[kind].parent.relative_to(store)
        assert f"{folder}: {damaged[kind].name} is " in messages
        assert str(folder) in Worker.executed_folders
    assert len(list((store / "damaged").iterdir())) == messages.count("moved to")
    assert start(store, aimer_study) == 0
    assert "moved to" not in capsys.readouterr().err
    assert study_command(store, "status", STUDY) == study_command(store, "verify", STUDY) == 0
    first_run = runs(Store(store).create(), STUDY)[0]
    assert first_run.jobs == []
    assert first_run.plan is None


READERS = {
    **dict.fromkeys(
        ("store.json", "run.json", "jobs.json", "record.json"), ("status", "verify", "gc")
    ),
    "failed": ("status", "verify"),
    "step": ("verify", "gc"),
    "result": ("verify",),
}
"""Kind of a file -> the commands that read files of this kind."""


def change_a_byte(file: Path) -> None:
    """Change a digit or a letter of the first value, as a failing disk may: form, size and time
    stay."""
    content = bytearray(file.read_bytes())
    status = file.stat()
    value = re.search(rb'": ?"?([0-9a-zA-Z])', content)
    assert value
    content[value.start(1)] = ord("2" if value[1] == b"1" else "1")
    json.loads(content)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("kind", READERS)
def test_a_changed_byte_is_damage_for_every_reader(
    store: Path, aimer_study: StudyRequest, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """`gc` frees nothing then. A new start mends the store."""
    file = sorted(store.glob(FILES.get(kind, "runs/study/*/record.json")))[0]
    change_a_byte(file)
    for command in READERS[kind]:
        code = study_command(store, command, *[STUDY] * (command != "gc"))
        output = capsys.readouterr()
        assert str(file.relative_to(store)) in "".join("".join(output).split()), command
        assert code != 0 or command == "status"
    if kind == "record.json":
        with pytest.raises(UserError, match="damaged"):
            combined_record(store, [STUDY])
    assert start(store, aimer_study) == 0
    assert study_command(store, "verify", STUDY) == study_command(store, "gc") == 0


@pytest.fixture
def tracked_study(aimer_study: StudyRequest) -> StudyRequest:
    config, requests = aimer_study
    return replace(config, tracker=TrackerConfig(name="wandb")), requests


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """The results that the tracker gets from now on."""
    contents = set[bytes]()

    def log(_: object, store: Store, study: dict[str, Any]) -> str:
        for cell in study["cells"]:
            contents.update(
                store.content(name, "result.json") for name in cell["evaluate"].values()
            )
        return ""

    monkeypatch.setattr("moe_lab.study.tracker.log", log)
    return contents


@pytest.mark.usefixtures("logged")
def test_a_changed_result_is_not_logged(tracked_study: StudyRequest, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert start(store, tracked_study) == 0
    changed = next(store.glob("evaluate/*/result.json"))
    change_a_byte(changed)
    with pytest.raises(UserError, match=f"{changed.parent.name}: result.json is damaged"):
        start(store, tracked_study)


def lose(store: Path, loss: str) -> None:
    """Remove a store, or a part of it."""
    shutil.rmtree(next(store.glob("scores/*")) if loss == "an input" else store)
    if loss == "unmounted":
        store.mkdir()
    if loss == "made again":
        Store(store).create()


LOSSES = ["deleted", "unmounted", "made again", "an input"]
"""The mount point is an empty folder after a store is unmounted."""
WORKER_ENDS: list[Exception | str | None] = [
    StepError({"message": "no such file"}),
    FileNotFoundError(2, "no"),
    "makes the scratch folder",
    None,
]
"""How a worker ends when the store is lost."""


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("worker_end", WORKER_ENDS)
def test_a_lost_store_fails_no_step(
    aimer_study: StudyRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
    worker_end: Exception | str | None,
) -> None:
    store = tmp_path / "store"

    def lose_at_plan(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            lose(store, loss)
            if isinstance(worker_end, Exception):
                raise worker_end
            if worker_end:
                scratch.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(Worker, "hook", lose_at_plan)
    monkeypatch.setattr("moe_lab.study.store.VISIBLE_AFTER", 0.0)
    if loss in ("deleted", "unmounted"):
        with pytest.raises(UserError, match="is gone"):
            start(store, aimer_study)
        assert not [path for path in store.rglob("*") if path.is_file()]
    elif isinstance(worker_end, Exception) or (loss == "made again" and not worker_end):
        assert start(store, aimer_study) != 0
    monkeypatch.setattr(Worker, "hook", None)
    assert not list(store.glob("failed/*"))
    assert start(store, aimer_study) == 0


def test_a_job_on_a_node_without_the_store_creates_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(UserError, match="is gone"):
        StepsJob(str(tmp_path / "store"), [Example(name="x")], "study/1", LauncherConfig())()
    assert not list(tmp_path.iterdir())


def cells(store: Path) -> list[str]:
    return sorted(
        cell["cell"]["criterion"] for cell in record.study_record(Store(store), STUDY)["cells"]
    )


def start_during(
    store: Path, first: StudyRequest, second: StudyRequest, kind: str = "plan"
) -> None:
    """Run `first`, and `second` from begin to end when `first` is about to execute a step of that
    kind."""
    codes: list[int] = []

    def start_second(step: Step, scratch: Path) -> None:
        if step.kind == kind:
            Worker.hook = None
            codes.append(start(store, second))

    Worker.hook = start_second
    assert start(store, first) == 0
    assert codes == [0]


def test_simultaneous_runs_of_a_study_are_recorded_together(
    aimer_study: StudyRequest, reap_study: StudyRequest, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    start_during(store, aimer_study, reap_study)
    assert cells(store) == ["aimer", "none", "reap"]
    assert start(store, aimer_study) == 0
    assert cells(store) == ["aimer", "none"], "a later run replaces both"


def test_cells_that_share_a_name_are_recorded_once(
    reap_study: StudyRequest, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    second = study_request("criterion=reap", "ratio=0.5", "calibration.tokens=1024")
    start_during(store, reap_study, second)
    assert cells(store) == ["none", "reap"]


def test_benchmarks_of_simultaneous_runs_are_recorded_together(
    aimer_study: StudyRequest, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    second = study_request("criterion=aimer", "ratio=0.5", "suite.benchmarks=[pocket_rte]")
    start_during(store, aimer_study, second, "evaluate")
    for cell in record.study_record(Store(store), STUDY)["cells"]:
        assert set(cell["evaluate"]) == {"pocket_boolq", "pocket_rte"}
        assert all(cell["evaluate"].values())


MOUNTS = """
import os, subprocess, sys
options, store, *command = sys.argv[1:]
subprocess.run(["mount", *options.split(), store], check=True)
if "bind" in options:
    subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
os.execvp(command[0], command)
"""


def mounted(options: str, store: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds `store` mounted; no other process does. Skips where root may not
    mount either."""
    unshare = ["unshare", "--mount", sys.executable, "-c", MOUNTS, options, str(store)]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    return subprocess.run([*unshare, *command], capture_output=True, text=True, cwd=store.parent)


AIMER = [*SMALL_STUDY, "criterion=aimer", "ratio=0.5"]
"""Settings of `aimer_study`."""


@pytest.fixture(scope="module")
def done_store(tmp_path_factory: pytest.TempPathFactory, aimer_study: StudyRequest) -> Path:
    """A store with a study whose results are real enough for the analysis."""
    store = tmp_path_factory.mktemp("done") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "InProcessExecutor", Worker)
        assert start(store, aimer_study) == 0
    return store


@pytest.mark.root  # which may mount
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["moe_lab", "status", STUDY], 0),
        (["moe_lab", "-m", *AIMER, "dry_run=true", "hydra/launcher=basic"], 0),
        (["moe_lab", *AIMER], 2),
    ],
)
def test_commands_on_a_read_only_store(done_store: Path, arguments: list[str], code: int) -> None:
    python = [sys.executable, "-m"]
    result = mounted(f"--bind {done_store}", done_store, *python, *arguments, f"store={done_store}")
    assert result.returncode == code and "Traceback" not in result.stderr, result.stderr
    if code == 2:
        assert result.stderr.startswith(f"moe_lab: store={done_store} cannot be written")


@pytest.mark.root  # which may mount
def test_the_analysis_reads_a_read_only_store(done_store: Path, tmp_path: Path) -> None:
    """Nobody reads its output, so that it ends with a broken pipe."""
    command = python_command(
        "-m", "moe_lab.analysis", "gaps", f"store={done_store}", f"out={tmp_path}"
    )
    script = f"{command} | true"
    result = mounted(f"--bind {done_store}", done_store, "bash", "-o", "pipefail", "-c", script)
    assert result.returncode == 141 and "Traceback" not in result.stderr, result.stderr
    assert list(tmp_path.rglob("*.csv"))


@pytest.mark.root  # which may mount
def test_a_report_on_a_full_disk_is_one_sentence(done_store: Path, tmp_path: Path) -> None:
    settings = [*SMALL_STUDY[:-1], "criterion=aimer", "ratio=0.5", f"store={tmp_path}"]
    commands = [
        f"cp -a {done_store}/. {tmp_path} && dd if=/dev/zero of={tmp_path}/rest bs=1k",
        f"truncate -s -40k {tmp_path}/rest",
        f"exec {python_command('-m', 'moe_lab')} {' '.join(settings)}",
    ]
    result = mounted("-t tmpfs -o size=1m tmpfs", tmp_path, "sh", "-c", "; ".join(commands))
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "the report failed: out=" in result.stderr.splitlines()[-1]


def test_a_file_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, moe_lab.json_files as own; "
        "own.write_json(pathlib.Path(sys.argv[1]), '7' * 2**22)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run.json")]
    list_after = ["sh", "-c", '"$@"; ls -A $0', str(tmp_path)]
    result = mounted("-t tmpfs -o size=1m tmpfs", tmp_path, *list_after, *command)
    assert "No space left" in result.stderr
    assert result.stdout == ""


def test_a_study_that_was_not_logged_is_unfinished_until_it_is(
    tracked_study: StudyRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tracker had no network, and the job that was to write the record has failed."""
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.queue", lambda _: {})
    monkeypatch.setattr(
        "moe_lab.study.slurm.scheduler.job_fields", lambda _: {"JobState": "FAILED"}
    )
    log = Mock(side_effect=UserError("no network"))
    monkeypatch.setattr("moe_lab.study.tracker.log", log)
    store = tmp_path / "store"
    with pytest.raises(UserError):
        start(store, tracked_study)
    record_job = SubmittedJob("8", "8", "study.record", "record", (), ())
    runs(Store(store).create(), STUDY)[0].add_jobs([record_job])

    def reports_failed_job() -> list[bool]:
        """Whether `status` and `why` do."""
        assert study_command(store, "status", STUDY) == study_command(store, "why", STUDY) == 0
        output = capsys.readouterr().out
        messages = ("jobs that ended without their steps: 1", "record: missing: job 8 is failed")
        return [message in output for message in messages]

    assert reports_failed_job() == [True, True]
    with pytest.raises(UserError):
        start(store, tracked_study)
    assert reports_failed_job() == [True, True]
    log.side_effect = None
    log.return_value = ""
    assert start(store, tracked_study) == 0
    assert reports_failed_job() == [False, False]


def disk_is_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_no_report_is_begun_when_the_disk_is_full(
    aimer_study: StudyRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_plan(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            raise disk_is_full()

    monkeypatch.setattr(Worker, "hook", fail_at_plan)
    monkeypatch.setattr(record, "update_report", lambda *_: pytest.fail("it was begun"))
    store = tmp_path / "store"
    assert start(store, aimer_study, report=True) == 2
    assert not list(store.glob("failed/*"))


def test_a_record_on_a_full_disk_is_one_sentence(
    aimer_study: StudyRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Store.write

    def fail_for_record(store: Store, path: Path, document: dict[str, Any]) -> None:
        if path.name == "record.json":
            raise disk_is_full()
        write(store, path, document)

    monkeypatch.setattr(Store, "write", fail_for_record)
    with pytest.raises(UserError, match="disk of the store is full"):
        start(tmp_path / "store", aimer_study)


@pytest.mark.parametrize(
    "arguments", ["moe_lab", "moe_lab verify study store={}", "moe_lab inspect --help"]
)
def test_a_closed_pipe_gives_no_traceback(done_store: Path, arguments: str) -> None:
    command = [sys.executable, "-m", *arguments.format(done_store).split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_an_interrupted_study_gives_no_traceback(tmp_path: Path) -> None:
    settings = [*SMALL_STUDY[:2], "launcher.processes=1", f"store={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_lab", *settings], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: list(tmp_path.glob("runs/*/*/run.json")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    assert process.stderr
    errors = process.stderr.read()
    assert process.wait() == 130
    assert "Traceback" not in errors
    assert "goes on from here" in errors.splitlines()[-1]


@pytest.mark.parametrize("method", [*DAMAGES, "a folder"])
def test_the_analysis_refuses_a_damaged_record(store: Path, method: str) -> None:
    damage(next(store.glob("runs/study/*/record.json")), method)
    for step in store.glob("*/*/step.json"):
        damage(step, method)
        assert Reader(store).json(step.parent, "result.json") is None
    with pytest.raises(UserError, match="study=study cannot be read"):
        combined_record(store, [STUDY])
