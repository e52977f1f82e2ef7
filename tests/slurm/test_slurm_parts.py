"""Which steps share a job, what resources jobs request, and which jobs have failed."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import choices
import pytest
from example_steps import Example, cell_of, evaluation_step, step_of
from omegaconf import OmegaConf

import moe_lab
from moe_lab import plugins, start
from moe_lab.config import (
    BackendConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    ExpectedConfig,
    JobConfig,
    LauncherConfig,
    ModelConfig,
    RecoveryConfig,
    ResourcesConfig,
    TimingConfig,
)
from moe_lab.config.base import validated
from moe_lab.errors import UserError
from moe_lab.study.claims import in_queue
from moe_lab.study.estimates import Seconds
from moe_lab.study.provenance import code_state
from moe_lab.study.runs import RECORD_KIND, SubmittedJob, create_run, runs
from moe_lab.study.schedule import Schedule, StepError, WorkerProcess
from moe_lab.study.slurm import arrays as module
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.arrays import Array, divide_into_arrays
from moe_lab.study.slurm.jobs import StepsJob, missing_inputs, update_from_store
from moe_lab.study.slurm.scheduler import QueuedJob, longest_array, queue, time_limits
from moe_lab.study.slurm.submit import _download as download
from moe_lab.study.slurm.submit import _submit_missing as submit_missing
from moe_lab.study.slurm.submit import copy_code, pending_jobs, setup_lines
from moe_lab.study.status import queued_jobs
from moe_lab.study.step import Step
from moe_lab.study.store import Store

SETTINGS = LauncherConfig(cells_per_job=2)


def study(cells: int, models: Sequence[str] = ("m",)) -> list[Step]:
    """Steps of some models with some plans each, two benchmarks and the cost for every plan; inputs
    first."""
    steps: list[Step] = []
    for name in models:
        model = ModelConfig(name=name, path=name)
        facts = Example("model", name, models.index(name))
        unpruned = Example("cost", name, input_steps={"facts": facts}, model=model)
        steps += [facts, unpruned]
        for number in range(cells):
            plan = Example("plan", f"{name}{number}", number, {"facts": facts})
            inputs: dict[str, Step] = {"facts": facts, "plan": plan}
            cost = Example(
                "cost",
                plan.name,
                input_steps={**inputs, "unpruned": unpruned},
                model=model,
                job_kind="evaluate",
            )
            steps += [plan, cost]
            steps += [Example("evaluate", f"{plan.name}-{n}", n, inputs, model) for n in range(2)]
    return steps


def gpus(steps: Sequence[Step]) -> dict[str, Any]:
    model = steps[0].resources().model
    return {"gpus": 4 if model and model.name == "large" and steps[0].kind == "evaluate" else 0}


def test_each_step_is_in_one_job_after_its_inputs() -> None:
    """Evaluations that need other GPUs are another array. A job evaluates at most two plans of one
    model (`cells_per_job`); the cost of a plan follows its evaluations."""
    steps = study(5, ("m", "large"))
    arrays = divide_into_arrays(steps, gpus, SETTINGS)
    assert [array.resources["gpus"] for array in arrays if array.kind == "evaluate"] == [0, 4]
    finished: list[str] = []
    for array in arrays:
        earlier = set(finished)
        for pack in array.jobs:
            inside: set[str] = set()
            for step in sorted(pack, key=steps.index):
                assert {needed.id for needed in step.inputs.values()} <= earlier | inside
                inside.add(step.id)
            finished += inside
        if array.kind == "evaluate":
            plans = [{step.inputs["plan"].id for step in pack} for pack in array.jobs]
            assert sorted(map(len, plans)) == [1, 2, 2]
            for pack in array.jobs:
                assert len({repr(step.resources().model) for step in pack}) == 1
                kinds = ["evaluate", "evaluate", "cost"] * (len(pack) // 3)
                assert [step.kind for step in pack] == kinds
    assert sorted(finished) == sorted(step.id for step in steps)


@pytest.mark.parametrize(("backend", "generates"), [("hf", "evaluate"), ("server", "generate")])
def test_texts_are_graded_in_jobs_of_their_own(backend: str, generates: str) -> None:
    benchmark = BenchmarkConfig(
        "code", "evalplus", "pocket:benchmarks/mbpp.jsonl", max_new_tokens=48
    )
    config = Config(backend=BackendConfig(name=backend, command="serve {checkpoint}"))
    steps: list[Step] = []
    for ratio in (0.25, 0.5):
        grade = step_of("grade", cell_of(BIG, TEXT, ratio=ratio), config, benchmark)
        steps += [grade.inputs["generate"], grade]
    arrays = divide_into_arrays(
        steps, lambda pack: {"gpus": int(pack[0].kind != "grade")}, SETTINGS
    )
    by_kind = {step.kind: array for array in arrays for pack in array.jobs for step in pack}
    assert by_kind["generate"].kind == generates
    assert by_kind["generate"].resources["gpus"] == 1
    assert by_kind["grade"].kind == "grade"
    assert by_kind["grade"].resources["gpus"] == 0
    assert arrays.index(by_kind["generate"]) < arrays.index(by_kind["grade"])


def test_small_steps_share_jobs_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lab.study.slurm.arrays.STEPS_PER_JOB", 4)
    arrays = divide_into_arrays(study(9), gpus, SETTINGS)
    (plans,) = [array for array in arrays if array.kind == "plan"]
    assert [len(pack) for pack in plans.jobs] == [3, 3, 3]


@pytest.mark.parametrize(("longest", "sizes"), [((), [1001, 199]), ((500,), [500, 500, 200])])
def test_arrays_are_no_longer_than_slurm_allows(longest: tuple[int, ...], sizes: list[int]) -> None:
    arrays = divide_into_arrays(study(1200), gpus, replace(SETTINGS, cells_per_job=1), *longest)
    assert [len(array.jobs) for array in arrays if array.kind == "evaluate"] == sizes


SQUEUE = """\
7_1|RUNNING|None|1:00|s.k
8|PENDING|Priority|0:00|two
lines|\f|x
9|BOOT_FAIL|None|0:00|s.k
10|COMPLETING|None|0:22|cancelled
11|COMPLETING|None|0:00|requeued
12|COMPLETING|NonZeroExitCode|0:00|died at once
"""


def patch_slurm(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """Have all commands of Slurm print a text."""
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.command_output", lambda *_: output)


def test_squeue_is_read_whatever_jobs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_slurm(monkeypatch, SQUEUE)
    rows = [(job.id, job.name, job.is_pending) for job in queue().values()]
    assert rows == [("7_1", "s.k", False), ("8", "two", True), ("11", "requeued", False)]


def test_the_queue_of_each_submitting_user_is_read_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only user 7 has jobs."""
    squeue = Mock(side_effect=lambda *command: SQUEUE if command[-1] == "--user=7" else "")
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.command_output", squeue)
    jobs = {job.id: job for job in (replace(submitted("7_1", "a"), user=7), submitted("8", "b"))}
    assert queued_jobs(jobs)[0].keys() == {"7_1"}
    assert not in_queue("8", os.getuid())
    squeue.reset_mock()
    assert all(in_queue("8", 7) for _ in range(99))
    assert squeue.call_count <= 4


def test_longest_array_is_the_lower_limit_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "MaxArraySize            = 1001",
        "SchedulerParameters     = bf_continue,max_array_tasks=3,defer",
    )
    patch_slurm(monkeypatch, "\n".join([*lines, ""]))
    assert longest_array() == 3


def test_time_limits_are_minutes_by_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_slurm(monkeypatch, "debug*|infinite\ngpu|1-12:00:00\nshort|30:00\n")
    assert time_limits() == {"": inf, "debug": inf, "gpu": 2160, "short": 30}


def test_jobs_of_a_store_are_unknown_in_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at a renamed mount point: all disks have the same inode at their root, so that it
    identifies no store."""
    store = Store(tmp_path / "store").create()
    with create_run(store, "s", []) as run:
        run.add_jobs([submitted("1", "a")])
    (tmp_path / "link").symlink_to(store.root)
    shutil.copytree(store.root, tmp_path / "copy")
    counts = [len(runs(Store(tmp_path / name), "s")[0].jobs) for name in ("store", "link", "copy")]
    assert counts == [1, 1, 0]
    store.root.rename(tmp_path / "mount")
    assert len(runs(Store(tmp_path / "mount"), "s")[0].jobs) == 1
    monkeypatch.setattr("os.path.ismount", lambda _: True)
    assert not runs(Store(tmp_path / "mount"), "s")[0].jobs


def submitted(job: str, steps: str, dependencies: str = "", kind: str = "k") -> SubmittedJob:
    return SubmittedJob(
        job, job.partition("_")[0], "s." + kind, kind, tuple(steps), tuple(dependencies.split())
    )


def queued(job: str, state: str = "PENDING", name: str = "s.k") -> tuple[str, QueuedJob]:
    return job, QueuedJob(job, name, state, "Dependency", "0:00")


def test_a_preempted_job_saves_and_a_cancelled_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where scontrol is missing, a signal is taken for a preemption."""
    preempted = [{"JobState": "RUNNING"}, {}, UserError("there is no scontrol here")]
    # cancelled; requeued by Slurm
    ended = [{"JobState": "COMPLETING", "Restarts": number} for number in "01"]
    monkeypatch.setattr(scheduler, "job_fields", Mock(side_effect=[*preempted, *ended]))
    monkeypatch.setattr(os, "kill", killed := Mock())
    pack = StepsJob(str(tmp_path), [], "s/r", LauncherConfig())
    pack.__dict__["worker"] = worker = Mock()
    for _ in preempted:
        pack.handle_sigterm(signal.SIGTERM, None)
    assert [call.args[1] for call in killed.call_args_list] == [signal.SIGUSR2] * 3
    for calls in range(2):
        with pytest.raises(SystemExit, match="143"):
            pack.handle_sigterm(signal.SIGTERM, None)
        assert worker.end.call_count == calls


def test_steps_and_records_of_queued_jobs_need_no_new_job() -> None:
    """Of pending and running jobs; a queued job of another name is another job."""
    jobs = [submitted("1", "a"), submitted("2_0", "bc", "1"), submitted("3", "d", "2")]
    active = pending_jobs(jobs, dict([queued("1", "RUNNING"), queued("2_0")]), "dab")
    assert active.job_of == {"a": "1", "b": "2_0"}
    assert active.failed_jobs == []
    assert pending_jobs(jobs[:1], dict([queued("1", name="other")]), "a").job_of == {}
    record = [submitted("9", "", "1", RECORD_KIND)]
    queue = dict([queued("9", name="s.record")])
    assert pending_jobs(record, queue, "").record_jobs == ["9"]
    assert pending_jobs(record, {}, "").record_jobs == []


def test_jobs_that_wait_for_a_lost_job_have_failed() -> None:
    """1_0 is lost; 2 waits for it, and 3_0 for 2. Jobs of a colleague have not failed, and a job
    is not lost whose step is not missing."""
    jobs = [
        submitted("1_0", "a"),
        submitted("1_1", "b"),
        submitted("2", "c", "1"),
        submitted("3_0", "d", "2"),
    ]
    queue = dict([queued("1_1", "RUNNING"), queued("2"), queued("3_0")])
    active = pending_jobs(jobs, queue, "abcd")
    assert active.job_of == {"b": "1_1"}
    assert active.failed_jobs == ["2", "3_0"]
    of_a_colleague = [replace(job, user=-1) for job in jobs]
    assert pending_jobs(of_a_colleague, queue, "abcd").failed_jobs == []
    assert pending_jobs(jobs, queue, "bcd").failed_jobs == []


def pass_in_parts(parts: int) -> list[Step]:
    """The parts of a pass, and the step that merges them."""
    shares = tuple(Example("statistics", "share", 10 * parts + number) for number in range(parts))
    return [*shares, Example("statistics", "whole", merged_steps=shares)]


@pytest.fixture
def queued_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A submission to a store for which job 1 computes a pass in two parts; and the arrays that are
    added to it."""
    store = Store(tmp_path).create()
    with create_run(store, "study", []) as run:
        run.add_jobs([replace(submitted("1", ""), steps=(pass_in_parts(2)[-1].id,))])
    monkeypatch.setattr(scheduler, "time_limits", dict)
    monkeypatch.setattr(scheduler, "longest_array", lambda: 9)
    arrays = list[Array]()
    study = SimpleNamespace(config=Config(), store=store)
    return SimpleNamespace(study=study, jobs={}, arrays=arrays, add=arrays.append)


def test_a_queued_pass_is_not_submitted_in_other_parts(
    queued_pass: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "queue", lambda *_: dict([queued("1")]))
    submit_missing(Schedule(pass_in_parts(3)), queued_pass)
    assert [array.kind for array in queued_pass.arrays] == ["record"]
    assert queued_pass.jobs == {pass_in_parts(2)[-1].id: "1"}


def test_a_pass_queued_during_a_download_is_not_submitted(
    queued_pass: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is read again after the download."""
    read_queue = Mock(side_effect=[{}, dict([queued("1")])])
    clock = count(step=99)
    monkeypatch.setattr(scheduler, "queue", read_queue)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    submit_missing(Schedule(pass_in_parts(3)), queued_pass)
    assert [array.kind for array in queued_pass.arrays] == ["record"]
    assert read_queue.call_count == 2


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A job in Slurm with four steps in a store: two that lack an input, one that fails and one
    that succeeds; and the labels of the steps that it executes."""
    store = Store(tmp_path).create()
    present = Example("first", "present")
    with store.claim(present):
        pass
    without_input = Example("next", "bad", 0, {"in": Example("first", "missing", 1)})
    after_it = Example("last", "bad", 0, {"in": without_input})
    failed = Example("next", "failed", 2, {"in": present})
    good = Example("next", "good", 0, {"in": present})
    executed: list[str] = []

    def execute(_: WorkerProcess, step: Step, scratch: Path) -> None:
        executed.append(step.label())
        if step is failed:
            raise StepError({"message": "no"})

    monkeypatch.setattr(WorkerProcess, "__call__", execute)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr("moe_lab.study.store.VISIBLE_AFTER", 0.0)
    with create_run(store, "study", []) as run:
        name = str(run.folder.relative_to(tmp_path / "runs"))
    job = StepsJob(
        str(tmp_path),
        [without_input, after_it, failed, good],
        name,
        LauncherConfig(max_requeues=1),
    )
    return SimpleNamespace(job=job, store=store, executed=executed, failed=failed, good=good)


def test_a_job_goes_on_after_a_failure(pack: SimpleNamespace) -> None:
    assert pack.job() == {"done": 2, "failed": 1, "skipped": 3}
    assert pack.executed == ["failed", "good"]
    assert pack.store.is_finished(pack.good)
    assert pack.store.error(pack.failed.id)


def test_a_job_is_requeued_as_often_as_the_launcher_allows(pack: SimpleNamespace) -> None:
    requeued = pack.job.checkpoint()
    assert requeued is not None
    assert requeued.function.checkpoint() is None


@pytest.fixture
def merge() -> Step:
    """A step that merges three parts of a pass."""
    return pass_in_parts(3)[-1]


def test_parts_of_a_pass_are_an_array_before_their_merge(merge: Step) -> None:
    arrays = divide_into_arrays([*merge.merged_steps, merge], gpus, SETTINGS)
    packs_of_parts = [[part] for part in merge.merged_steps]
    assert [array.jobs for array in arrays] == [packs_of_parts, [[merge]]]


def test_a_merge_waits_for_parts_that_become_visible_late(
    merge: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of other nodes become visible late on NFS."""
    store = Store(tmp_path).create()
    unwritten = iter(merge.merged_steps)

    def publish_next_part(_: float) -> None:
        with store.claim(next(unwritten)):
            pass

    monkeypatch.setattr(time, "sleep", publish_next_part)
    assert store.is_readable(merge.merged_steps[0])
    assert missing_inputs(Schedule([merge]), store) == []


def test_inputs_that_cannot_appear_are_missing_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path).create()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    failed, missing = (Example("plan", name) for name in "ab")
    store.fail(failed, {"message": "no"})
    plan = Example("plan", "c", input_steps={"a": failed, "b": missing})
    schedule = Schedule([Example("cost", input_steps={"plan": plan})])
    assert [step.label() for step in missing_inputs(schedule, store)] == ["c"]


def test_settle_distinguishes_lost_failed_and_skipped_steps(tmp_path: Path) -> None:
    store = Store(tmp_path).create()
    finished = Example("k", "done")
    failed = Example("k", "failed", 1)
    lost = Example("k", "lost", 2, {"in": finished})
    skipped = [Example("after", step.name, input_steps={"in": step}) for step in (failed, lost)]
    with store.claim(finished):
        pass
    store.fail(failed, {"message": "no", "user": True})
    schedule = Schedule([*skipped, finished, failed, lost])
    update_from_store(schedule, store)
    assert schedule.finished == {finished.id}
    assert set(schedule.skipped) == {step.id for step in skipped}
    assert str(schedule.failed[failed.id]) == "no"
    assert "was not finished" in str(schedule.failed[lost.id])
    assert not schedule.waiting


def test_code_is_copied_once_for_each_state_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_state()["version"]  # of the real code, and remembered
    code = tmp_path / "own" / "moe_lab" / "example.py"
    code.parent.mkdir(parents=True)
    code.write_text("1")
    monkeypatch.setattr(moe_lab, "__file__", str(code.with_name("__init__.py")))
    starts = [copy_code(tmp_path / "jobs") for _ in range(2)]
    code.write_text("2")
    starts.append(copy_code(tmp_path / "jobs"))
    assert starts[0] == starts[1] != starts[2]
    assert [start.with_name("example.py").read_text() for start in starts] == ["1", "1", "2"]
    assert len(list((tmp_path / "jobs" / "code").iterdir())) == 2, "nothing is left behind"


def test_a_tracked_installation_has_a_commit_and_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git is also asked in a checkout that belongs to a colleague. An installation in the
    repository of another project, which does not track it, has no commit."""
    (package := tmp_path / "moe_lab").mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(moe_lab, "__file__", str(package / "__init__.py"))

    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True)

    def commit_and_edits() -> tuple[str | None, str | None]:
        state = code_state.__wrapped__()
        return state.get("commit"), state.get("edits")

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another project")
    assert commit_and_edits() == (None, None)
    git("add", ".")
    git("commit", "-q", "-m", "moe_lab")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    commits, edits = {}, {}
    for text in ("", "1", "2"):
        if text:
            (package / "new.py").write_text(text)
        commits[text], edits[text] = commit_and_edits()
    assert commits[""] is not None
    assert set(commits.values()) == {commits[""]}
    assert edits[""] is None
    assert len(set(edits.values())) == 3


def test_jobs_run_plugins_as_they_were_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package of a plugin, or its only file; Python would find its later state."""
    folder = tmp_path / "mine"
    installation = tmp_path / "own" / "moe_lab"
    (folder / "plugged").mkdir(parents=True)
    installation.mkdir(parents=True)
    shutil.copy(start.FILE, installation)
    monkeypatch.setattr(moe_lab, "__file__", str(installation / "__init__.py"))
    monkeypatch.setattr(
        plugins, "load", lambda names: [importlib.import_module(name).__name__ for name in names]
    )
    monkeypatch.syspath_prepend(folder)
    copies = []
    for text in ("before", "after"):
        for file in ("plugged/part.py", "plugged_file.py"):
            (folder / file).write_text(f"print('{text}')")
        copies.append(copy_code(tmp_path / "store", ["plugged.part", "plugged_file"]))
    assert copies[0] != copies[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("plugged.part", "plugged_file"):
        result = subprocess.run(
            [sys.executable, str(copies[0]), "-m", name],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert result.stdout == "before\n"


# Requested resources: the most specific setting, or an estimate for all steps of the job

FACTS = ExpectedConfig(
    parameters=57_000_000_000,
    layers=28,
    moe_layers=28,
    experts=64,
    top_k=8,
    hidden=3584,
    width=2560,
)
BIG = ModelConfig(name="big", path="a/b", dtype="bfloat16", expected=FACTS)
TEXT = CalibrationConfig(name="t", path="a/b", seed=1)
WRITTEN = BenchmarkConfig(
    "b", "lm_eval", "pocket:benchmarks/boolq.yaml", expected=1000, max_new_tokens=2048
)


def request_of(
    steps: list[Step],
    text: str = "{}",
    seconds: Seconds = lambda step: 3600.0,
    limits: Mapping[str, float] | None = None,
) -> Any:
    """The resources that a job requests for steps of an hour each, under settings in YAML."""
    settings = validated(
        ResourcesConfig, OmegaConf.to_container(OmegaConf.create(text)), "resources"
    )
    return module.job_resources(steps, settings, seconds, limits or {})


def step_about(model: ModelConfig = BIG, kind: str = "generate") -> Step:
    return step_of(kind, cell_of(model, TEXT), benchmark=WRITTEN)


def test_models_and_texts_are_downloaded_before_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model and text that a step reads is downloaded once, and no other."""
    downloads: list[str] = []
    monkeypatch.setattr(
        "moe_lab.models.files.local_folder", lambda model: downloads.append(model.name)
    )
    monkeypatch.setattr(
        "moe_lab.calibration.sources.download", lambda text: downloads.append(text.path)
    )
    steps = [step_about(kind="profile"), step_about(kind="statistics"), Example("plan", "o")]
    download(steps)
    assert sorted(downloads) == ["a/b", "big"]


DEEPSEEK_V3 = choices.read_choice(ModelConfig, "model", "deepseek_v3")
ON_FOUR_GPUS = "{models: {deepseek_v3: {gpus: 4}}}"


def test_a_model_of_unknown_format_gets_one_gpu() -> None:
    assert request_of([step_about(replace(BIG, device="cuda"))])["gpus"] == 1


@pytest.fixture
def hub_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub states the format of all models, with 28 attention heads."""
    config = {"model_type": "any", "num_attention_heads": 28}
    monkeypatch.setattr("moe_lab.models.config_json.hub_json", lambda *_: config)


@pytest.mark.usefixtures("hub_config")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DEEPSEEK_V3, "enough, or"),
        (replace(BIG, name="deepseek_v3", device="cuda"), "model.device=auto"),
    ],
)
def test_a_model_larger_than_the_gpus_of_a_node_is_refused(
    model: ModelConfig, message: str
) -> None:
    with pytest.raises(UserError, match=rf"deepseek_v3.*resources\.gpu_memory.*{message}"):
        request_of([step_about(model)])


@pytest.mark.usefixtures("hub_config")
def test_configured_gpus_of_a_large_model_are_used() -> None:
    assert request_of([step_about(DEEPSEEK_V3)], ON_FOUR_GPUS)["gpus"] == 4


@pytest.mark.usefixtures("hub_config")
def test_a_streamed_pass_asks_for_one_gpu() -> None:
    text = CalibrationConfig(name="t", path="a/b", engine="streamed", seed=1)
    streamed = step_of("statistics", cell_of(DEEPSEEK_V3, text))
    assert request_of([streamed])["gpus"] == request_of([streamed], ON_FOUR_GPUS)["gpus"] == 1
    with pytest.raises(UserError, match="among at most 1 GPUs"):
        request_of([streamed], "{gpu_memory: 8}")


@pytest.mark.usefixtures("hub_config")
@pytest.mark.parametrize("kind", ["statistics", "gradients", "finetune"])
def test_a_batch_larger_than_the_gpus_is_refused(kind: str) -> None:
    recovery = RecoveryConfig(name="r", distill="t")

    def request(batch_tokens: int) -> None:
        text = replace(TEXT, batch_tokens=batch_tokens, tokens=2**24)
        request_of([step_of(kind, cell_of(BIG, text, recovery=recovery))])

    with pytest.raises(UserError, match=r"calibration\.batch_tokens.*gpus: 8"):
        request(2**23)
    request(TEXT.length)


@pytest.mark.parametrize(("device", "gpus"), [("NVIDIA H100", 1), ("2 x NVIDIA H100", 2)])
def test_a_timing_asks_for_the_gpus_of_its_device(device: str, gpus: int) -> None:
    timing = step_of("timing", cell_of(BIG, TEXT), Config(timed=TimingConfig(device=device)))
    assert request_of([timing], "{gpu_memory: 250}")["gpus"] == gpus


@pytest.mark.usefixtures("hub_config")
def test_vllm_jobs_ask_for_gpus_that_divide_the_attention_heads() -> None:
    """vLLM uses no other number of GPUs."""
    step = evaluation_step(BIG, WRITTEN, backend=BackendConfig("vllm"))
    assert request_of([step])["gpus"] == 4
    with pytest.raises(UserError, match=r"at most 4 GPUs of resources\.gpu_memory=24 "):
        request_of([step], "{gpu_memory: 24}")


@pytest.mark.usefixtures("hub_config")
def test_vllm_jobs_ask_for_the_configured_tensor_parallel_size() -> None:
    backend = BackendConfig("vllm", arguments={"tensor_parallel_size": 2})
    step = evaluation_step(BIG, WRITTEN, backend=backend)
    assert request_of([step], "{gpu_memory: 96}")["gpus"] == 2
    unknown = evaluation_step(ModelConfig(name="n", path="a/b"), WRITTEN, backend=backend)
    assert unknown.resources().memory is None
    assert request_of([unknown], "{gpu_memory: 96}")["gpus"] == 2


@pytest.mark.parametrize(
    "command",
    [
        "[ -f none ] && . none",
        "exit 3",
        "f() { false; }; f",
        "set -u; echo $none",
        "(exit 4)",
        ": fine",
    ],
)
def test_a_line_of_setup_that_ends_a_job_is_named(tmp_path: Path, command: str) -> None:
    """The line sources a file with a command that ends the job, but for one that changes
    nothing."""
    (tmp_path / "rc").write_text(f"{command}\n")
    setup = setup_lines(["echo before", f"source {tmp_path}/rc"])
    script = "\n".join([*setup, "echo Python", "exit 5"])
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    if command == ": fine":
        assert (result.stdout, result.stderr, result.returncode) == ("before\nPython\n", "", 5)
        return
    assert result.stdout == "before\n"
    assert result.returncode != 0
    assert f"source {tmp_path}/rc" in result.stderr


def test_every_resource_has_an_estimate_or_default() -> None:
    """The weights pass through main memory."""
    estimate = request_of([step_about()])
    assert set(estimate) == {field.name for field in fields(JobConfig)}
    assert (estimate["partition"], estimate["sbatch"], estimate["setup"]) == (None, {}, [])
    assert estimate["memory"] > 106


def test_minutes_of_a_job_are_twice_the_time_of_its_steps_up_to_the_longest() -> None:
    single, four, many = (request_of([step_about()] * count) for count in (1, 4, 400))
    assert (single["minutes"], four["minutes"]) == (120, 480)
    assert many["minutes"] == ResourcesConfig().longest
    assert {**single, "minutes": 0} == {**four, "minutes": 0}


@pytest.mark.parametrize(
    ("kinds", "every", "minutes"),
    [
        ("generate export", "{}", 777),
        ("generate", "{}", 30),
        ("generate export", "{partition: short}", 60),
        ("export", "{partition: 'short,long'}", 90),
        ("export", "{partition: elsewhere}", 777),
        ("export", "{partition: short, sbatch: {qos: long}}", 777),
        ("export", "{partition: short, minutes: 70}", 70),
    ],
)
def test_a_job_of_unknown_time_asks_for_the_longest_allowed(
    kinds: str, every: str, minutes: int
) -> None:
    """That its partition allows. An evaluation takes a minute, an export nobody knows how long."""
    limits = {"": inf, "short": 60.0, "long": 90.0}
    seconds = {"generate": 60.0}
    pack = [step_about(kind=kind) for kind in kinds.split()]
    request = request_of(
        pack, f"{{longest: 777, every: {every}}}", lambda step: seconds.get(step.kind), limits
    )
    assert request["minutes"] == minutes


def test_resources_of_models_override_those_of_jobs() -> None:
    cluster = """
        every: {partition: gpu, sbatch: {exclusive: true, nice: 5}, setup: [module load cuda]}
        jobs:
          evaluate: {partition: long, gpus: 1, minutes: 60, sbatch: {nice: 7}}
          scores: {partition: cpu}
        models:
          big: {gpus: 8, minutes: 90}
          other: {gpus: 3}
        """
    request = request_of([step_about()], cluster)
    assert (request["gpus"], request["cpus"], request["minutes"]) == (8, 64, 90)
    assert (request["partition"], request["setup"]) == ("long", ["module load cuda"])
    assert request["sbatch"] == {"exclusive": True, "nice": 7}
    assert request_of([step_about(kind="export")], cluster)["gpus"] == 8
    assert request_of([step_about(kind="model")], cluster)["gpus"] == 0, (
        "a job of small steps is about no model"
    )


def test_a_model_with_the_same_weights_has_the_same_resources() -> None:
    cluster = "{every: {gpus: 1}, models: {big: {gpus: 2}}}"
    assert request_of([step_about(replace(BIG, name="big_top4", top_k=4))], cluster)["gpus"] == 2


POCKET = ModelConfig(name="pocket", path="pocket:olmoe", threads=1)


@pytest.mark.parametrize(
    ("kinds", "model", "text", "gpus", "cpus", "memory"),
    [
        (["generate"], POCKET, "{}", 0, 1, 4),
        (["plan", "scores"], BIG, "{}", 0, 1, 2),
        (["generate"], BIG, "{every: {gpus: 0, cpus: 32}}", 0, 32, None),
        (["generate"], BIG, "{gpu_memory: 48}", 4, 32, None),
        (["generate"], ModelConfig(name="unknown", path="a/b"), "{}", 1, 8, None),
    ],
)
def test_gpus_and_cores_are_estimated_from_the_steps(
    kinds: list[str], model: ModelConfig, text: str, gpus: int, cpus: int, memory: int | None
) -> None:
    request = request_of([step_about(model, kind) for kind in kinds], text)
    assert (request["gpus"], request["cpus"]) == (gpus, cpus)
    assert request["memory"] <= (memory or 10**6)
