"""Stores that are damaged, gone, full, read-only, or in use by another run of the same study."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from example_steps import Example
from processes import quoted, until
from studies import SMALL, STUDY, StudyRequest, Worker, start, study_command, study_request

from analysis.load.reader import Reader
from analysis.load.studies import document
from moe_lab.config import LauncherConfig, TrackerConfig
from moe_lab.errors import UserError
from moe_lab.study import record, run
from moe_lab.study.runs import Submitted, runs
from moe_lab.study.schedule import StepError
from moe_lab.study.slurm.jobs import StepsJob
from moe_lab.study.step import Step
from moe_lab.study.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fake_worker")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, aimer_study: StudyRequest) -> Iterator[Path]:
    """A store with a study of which one step failed, and with one file of every kind of JSON."""
    store = tmp_path_factory.mktemp("broken") / "store"

    def hook(step: Step, scratch: Path) -> None:
        if step.kind == "evaluate" and "plan" in step.inputs:
            raise StepError({"message": "no"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "InProcessExecutor", Worker)
        patch.setattr(Worker, "hook", hook)
        assert start(store, aimer_study) == 1
    (run_,) = runs(Store(store).create(), STUDY)
    run_.add([Submitted("1", "1", "study.plan", "plan", ("x",), ())])
    return store


KINDS = {
    "store.json": "store.json",
    "run.json": "runs/study/*/run.json",
    "jobs.json": "runs/study/*/jobs.json",
    "failed": "failed/*.json",
    "step": "plan/*/step.json",
    "result": "model/*/result.json",
}
STEPS = ("step", "result")


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


def damage(file: Path, way: str) -> None:
    if way == "a folder":
        file.unlink()
        file.mkdir()
        (file / "inside").touch()
    else:
        file.write_bytes(DAMAGES[way](file.read_bytes()))


@pytest.mark.parametrize("way", [*DAMAGES, "a folder"])
def test_whatever_is_damaged_is_set_aside_and_the_same_command_goes_on(
    finished: Path,
    aimer_study: StudyRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    way: str,
) -> None:
    """One file of every kind is damaged in the same way."""
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    damaged = {kind: sorted(store.glob(pattern))[0] for kind, pattern in KINDS.items()}
    for file in damaged.values():
        damage(file, way)
    before = sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*"))
    assert study_command(store, "status", STUDY) == 2, "no run says what its steps are"
    assert start(store, aimer_study, dry_run=True) == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*")) == before, (
        "asking changes nothing"
    )
    capsys.readouterr()
    assert start(store, aimer_study) == 0
    said = " ".join(capsys.readouterr().err.split())
    for kind in ("store.json", "failed", "run.json", "jobs.json"):
        assert f"{damaged[kind].relative_to(store)}: " in said
    for kind in STEPS:
        folder = damaged[kind].parent.relative_to(store)
        assert f"{folder}: {damaged[kind].name} is " in said and str(folder) in Worker.executed
    assert len(list((store / "damaged").iterdir())) == said.count("moved to")
    assert start(store, aimer_study) == 0 and "moved to" not in capsys.readouterr().err
    assert study_command(store, "status", STUDY) == study_command(store, "verify", STUDY) == 0
    first = runs(Store(store).create(), STUDY)[0]
    assert first.jobs == [] and first.plan is None


NAMED_BY = {
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


@pytest.mark.parametrize("kind", NAMED_BY)
def test_a_changed_byte_is_damage_for_every_reader(
    finished: Path,
    aimer_study: StudyRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """Gc frees nothing then. After a new start everything is as it should be."""
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    file = sorted(store.glob(KINDS.get(kind, "runs/study/*/record.json")))[0]
    change_a_byte(file)
    for word in NAMED_BY[kind]:
        code = study_command(store, word, *[STUDY] * (word != "gc"))
        printed = capsys.readouterr()
        assert str(file.relative_to(store)) in "".join("".join(printed).split()), word
        assert code != 0 or word == "status"
    if kind == "record.json":
        with pytest.raises(UserError, match="damaged"):
            document(store, [STUDY])
    assert (
        start(store, aimer_study) == 0
        and study_command(store, "verify", STUDY) == study_command(store, "gc") == 0
    )


def test_a_changed_result_is_computed_again_before_it_is_told(
    aimer_study: StudyRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the tracker, a sweeper or the hub. One that changes after that is refused when it is
    read."""
    store = tmp_path / "store"
    told = set[bytes]()
    logged = (replace(aimer_study[0], tracker=TrackerConfig(name="wandb")), aimer_study[1])

    def log(_: object, of: Store, study: dict[str, Any]) -> str:
        told.update(
            of.content(name, "result.json")
            for cell in study["cells"]
            for name in cell["evaluate"].values()
        )
        return ""

    monkeypatch.setattr("moe_lab.study.tracker.log", log)
    assert start(store, logged) == 0
    change_a_byte(changed := next(store.glob("evaluate/*/result.json")))
    Worker.executed.clear()
    assert (
        start(store, logged) == 0
        and Worker.executed == [str(changed.parent.relative_to(store))]
        and len(told) == 1
    )
    monkeypatch.setattr(run, "_damaged_results", lambda *_: set())
    change_a_byte(changed)
    with pytest.raises(UserError, match=f"{changed.parent.name}: result.json is damaged"):
        start(store, logged)


@pytest.mark.parametrize("lost", ["deleted", "unmounted", "made again", "an input"])
@pytest.mark.parametrize(
    "error", [StepError({"message": "no such file"}), FileNotFoundError(2, "no"), "goes on", None]
)
def test_a_store_that_is_lost_fails_no_step(
    aimer_study: StudyRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
    error: Exception | str | None,
) -> None:
    """What is left of a mount is the empty folder that it was mounted on."""
    store = tmp_path / "store"

    def hook(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            shutil.rmtree(next(store.glob("scores/*")) if lost == "an input" else store)
            if lost == "unmounted":
                store.mkdir()
            if lost == "made again":
                Store(store).create()
            if isinstance(error, Exception):
                raise error
            if error:  # as a worker does that makes the folders which it writes to
                scratch.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(Worker, "hook", hook)
    monkeypatch.setattr("moe_lab.study.store.VISIBLE_AFTER", 0.0)
    if lost in ("deleted", "unmounted"):
        with pytest.raises(UserError, match="is gone"):
            start(store, aimer_study)
        assert not [path for path in store.rglob("*") if path.is_file()], (
            "nothing is left where the store was"
        )
    elif isinstance(error, Exception) or (lost == "made again" and not error):
        assert start(store, aimer_study) != 0
    monkeypatch.setattr(Worker, "hook", None)
    assert not list(store.glob("failed/*")) and start(store, aimer_study) == 0


def test_a_job_on_a_node_without_the_store_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(UserError, match="is gone"):
        StepsJob(str(tmp_path / "store"), [Example(name="x")], "study/1", LauncherConfig())()
    assert not list(tmp_path.iterdir())


def cells(store: Path) -> list[str]:
    return sorted(cell["cell"]["criterion"] for cell in record.read(Store(store), STUDY)["cells"])


def two_runs(store: Path, first: StudyRequest, second: StudyRequest, kind: str = "plan") -> None:
    """The second begins and ends when the first is about to do a step of that kind."""
    codes: list[int] = []

    def hook(step: Step, scratch: Path) -> None:
        if step.kind == kind:
            Worker.hook = None
            codes.append(start(store, second))

    Worker.hook = hook
    assert start(store, first) == 0 and codes == [0]


def test_two_runs_of_a_study_at_once_are_recorded_together(
    aimer_study: StudyRequest, reap_study: StudyRequest, tmp_path: Path
) -> None:
    """A dry run leaves nothing."""
    store = tmp_path / "store"
    assert start(store, aimer_study, dry_run=True) == 0 and not store.exists()
    two_runs(store, aimer_study, reap_study)
    assert cells(store) == ["aimer", "none", "reap"]
    assert start(store, aimer_study) == 0
    assert cells(store) == ["aimer", "none"], "a later run says what the study is"


def test_cells_that_share_a_name_are_told(
    reap_study: StudyRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    second = study_request("criterion=reap", "ratio=0.5", "calibration.tokens=1024")
    two_runs(store, reap_study, second)
    assert cells(store) == ["none", "reap"] and " 1 of its cells " in capsys.readouterr().err


def test_benchmarks_of_two_runs_at_once_stand_beside_each_other(
    aimer_study: StudyRequest, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    second = study_request("criterion=aimer", "ratio=0.5", "suite.benchmarks=[pocket_rte]")
    two_runs(store, aimer_study, second, "evaluate")
    for cell in record.read(Store(store), STUDY)["cells"]:
        assert set(cell["evaluate"]) == {"pocket_boolq", "pocket_rte"} and all(
            cell["evaluate"].values()
        )


def test_a_store_without_a_name_is_refused(
    aimer_study: StudyRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match="store"):
        replace(aimer_study[0], store="")
    assert study_command(Path(), "status", STUDY) == 2


MOUNTS = """
import os, subprocess, sys
options, store, *command = sys.argv[1:]
subprocess.run(["mount", *options.split(), store], check=True)
if "bind" in options:
    subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
os.execvp(command[0], command)
"""


def mounted(options: str, store: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds `store` mounted; nobody else does. Skips where root may not mount
    either."""
    unshare = ["unshare", "--mount", sys.executable, "-c", MOUNTS, options, str(store)]
    probe = (
        subprocess.run([*unshare, "true"], capture_output=True, text=True)
        if shutil.which("unshare")
        else None
    )
    if probe is None or probe.returncode:
        pytest.skip("one may not mount here")
    return subprocess.run([*unshare, *command], capture_output=True, text=True, cwd=store.parent)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, aimer_study: StudyRequest) -> Path:
    """A store with a study whose results are real enough for the analysis."""
    store = tmp_path_factory.mktemp("done") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "InProcessExecutor", Worker)
        assert start(store, aimer_study) == 0
    return store


@pytest.mark.root  # which may mount
def test_a_read_only_store_can_be_read(done: Path, tmp_path: Path) -> None:
    words = [*SMALL, "criterion=aimer", "ratio=0.5", f"store={done}"]
    python = [sys.executable, "-m"]
    unread = f"{quoted('-m', 'analysis', 'gaps', f'store={done}', f'out={tmp_path}')} | true"
    for command_, code in (
        ([*python, "moe_lab.study", "status", STUDY, f"store={done}"], 0),
        ([*python, "moe_lab", "-m", *words, "dry_run=true", "hydra/launcher=basic"], 0),
        ([*python, "moe_lab", *words], 2),
        (["bash", "-o", "pipefail", "-c", unread], 141),
    ):
        answer = mounted(f"--bind {done}", done, *command_)
        assert answer.returncode == code and "Traceback" not in answer.stderr, answer.stderr
        assert code != 2 or answer.stderr.startswith(f"moe_lab: store={done} cannot be written")
    assert list(tmp_path.rglob("*.csv"))


@pytest.mark.root  # which may mount
def test_a_report_on_a_full_disk_is_one_sentence(done: Path, tmp_path: Path) -> None:
    words = " ".join([*SMALL[:-1], "criterion=aimer", "ratio=0.5", f"store={tmp_path}"])
    script = (
        f"cp -a {done}/. {tmp_path} && dd if=/dev/zero of={tmp_path}/rest bs=1k; truncate -s "
        f"-40k {tmp_path}/rest"
    )
    script += f"; exec {quoted('-m', 'moe_lab')} {words}"
    answer = mounted("-t tmpfs -o size=1m tmpfs", tmp_path, "sh", "-c", script)
    assert answer.returncode == 1 and "Traceback" not in answer.stderr, answer.stderr
    assert "the report failed: out=" in answer.stderr.splitlines()[-1]


def test_a_file_for_which_there_is_no_room_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, moe_lab.json_files as own; "
        "own.write_json(pathlib.Path(sys.argv[1]), '7' * 2**22)"
    )
    command_ = [sys.executable, "-c", script, str(tmp_path / "run.json")]
    answer = mounted(
        "-t tmpfs -o size=1m tmpfs",
        tmp_path,
        "sh",
        "-c",
        '"$@"; ls -A $0',
        str(tmp_path),
        *command_,
    )
    assert "No space left" in answer.stderr and answer.stdout == ""


def test_what_the_last_job_left_undone_is_said_until_a_command_does_it(
    aimer_study: StudyRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was killed, or had no network, after it had written the record."""
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.queue", lambda _: {})
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.job_state", lambda _: {"JobState": "FAILED"})
    log = Mock(side_effect=UserError("no network"))
    monkeypatch.setattr("moe_lab.study.tracker.log", log)
    logged = (replace(aimer_study[0], tracker=TrackerConfig(name="wandb")), aimer_study[1])
    store = tmp_path / "store"
    with pytest.raises(UserError):
        start(store, logged)
    runs(Store(store).create(), STUDY)[0].add(
        [Submitted("8", "8", "study.record", "record", (), ())]
    )

    def shown() -> list[bool]:
        assert study_command(store, "status", STUDY) == study_command(store, "why", STUDY) == 0
        printed = capsys.readouterr().out
        return [
            "jobs that ended without their steps: 1" in printed,
            "record: missing: job 8 is failed" in printed,
        ]

    assert shown() == [True, True]
    with pytest.raises(UserError):
        start(store, logged)
    assert shown() == [True, True]
    log.side_effect = None
    log.return_value = ""
    assert start(store, logged) == 0 and shown() == [False, False]


def test_no_report_is_begun_when_the_disk_is_full(
    aimer_study: StudyRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(step: Step, scratch: Path) -> None:
        if step.kind == "plan":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Worker, "hook", hook)
    monkeypatch.setattr(record, "_report", lambda *_: pytest.fail("it was begun"))
    store = tmp_path / "store"
    assert start(store, aimer_study, report=True) == 2 and not list(store.glob("failed/*"))
    write = Store.write

    def fail(of: Store, path: Path, document: dict[str, Any]) -> None:
        if path.name == "record.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(of, path, document)

    monkeypatch.setattr(Store, "write", fail)
    with pytest.raises(UserError, match="disk of the store is full"):
        start(store, aimer_study)


@pytest.mark.parametrize(
    "words", ["moe_lab", "moe_lab.study verify study store={}", "moe_lab.inspect --help"]
)
def test_a_reader_that_has_had_enough_gets_no_trace(done: Path, words: str) -> None:
    command = [sys.executable, "-m", *words.format(done).split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 141


def test_an_interrupted_study_prints_no_trace(tmp_path: Path) -> None:
    words = [*SMALL[:2], "launcher.processes=1", f"store={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_lab", *words], stderr=subprocess.PIPE, text=True
    )
    until(lambda: list(tmp_path.glob("runs/*/*/run.json")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    assert process.stderr
    said = process.stderr.read()
    assert (
        process.wait() == 130
        and "Traceback" not in said
        and "goes on from here" in said.splitlines()[-1]
    )


@pytest.mark.parametrize("way", [*DAMAGES, "a folder"])
def test_the_analysis_refuses_a_damaged_record_in_a_sentence(
    finished: Path, tmp_path: Path, way: str
) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    damage(next(store.glob("runs/study/*/record.json")), way)
    for step in store.glob("*/*/step.json"):
        damage(step, way)
        assert Reader(store).json(step.parent, "result.json") is None
    with pytest.raises(UserError, match="study=study cannot be read"):
        document(store, [STUDY])
