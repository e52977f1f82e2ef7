"""Which steps share a job, what jobs ask for, and which are still of use."""

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
from example_steps import Example, cell_of, evaluated, step_of
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
    ResourcesConfig,
    TimingConfig,
)
from moe_lab.config.base import valid
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy
from moe_lab.evaluation.harness import IdentifiedBenchmark, Questions
from moe_lab.study.claims import in_queue
from moe_lab.study.estimates import Seconds
from moe_lab.study.provenance import code_state
from moe_lab.study.runs import RECORD, Submitted, begin, runs
from moe_lab.study.schedule import Schedule, StepError, WorkerProcess
from moe_lab.study.slurm import arrays as module
from moe_lab.study.slurm import scheduler
from moe_lab.study.slurm.arrays import Array, arrange
from moe_lab.study.slurm.jobs import StepsJob, missing_inputs, settle
from moe_lab.study.slurm.scheduler import Queued, longest_array, queue, time_limits
from moe_lab.study.slurm.submit import _download as download
from moe_lab.study.slurm.submit import _submit_missing as submit_missing
from moe_lab.study.slurm.submit import copy_code, setup_lines, under_way
from moe_lab.study.status import StepState, queued_jobs, seconds_left
from moe_lab.study.step import Step
from moe_lab.study.steps.evaluation import Asking, Generate, Grade, Grading
from moe_lab.study.store import Store

SETTINGS = LauncherConfig(cells_per_job=2)


def study(cells: int, models: Sequence[str] = ("m",)) -> list[Step]:
    """Steps of some models with some plans each, two benchmarks and the cost for every plan; inputs
    first."""
    steps: list[Step] = []
    for name in models:
        model = ModelConfig(name=name, path=name)
        facts = Example("model", name, models.index(name))
        whole = Example("cost", name, needed={"facts": facts}, model=model)
        steps += [facts, whole]
        for number in range(cells):
            plan = Example("plan", f"{name}{number}", number, {"facts": facts})
            inputs: dict[str, Step] = {"facts": facts, "plan": plan}
            cost = Example(
                "cost",
                plan.name,
                needed={**inputs, "unpruned": whole},
                model=model,
                done_in="evaluate",
            )
            steps += [plan, cost]
            steps += [Example("evaluate", f"{plan.name}-{n}", n, inputs, model) for n in range(2)]
    return steps


def ask(steps: Sequence[Step]) -> dict[str, Any]:
    model = steps[0].resources().model
    return {"gpus": 4 if model and model.name == "large" and steps[0].kind == "evaluate" else 0}


def test_every_step_is_in_one_job_after_its_inputs() -> None:
    steps = study(5, ("m", "large"))
    done: list[str] = []
    for array in (arrays := arrange(steps, ask, SETTINGS)):
        before = set(done)
        for pack in array.packs:
            inside: set[str] = set()
            for step in sorted(pack, key=steps.index):
                assert {needed.id for needed in step.inputs.values()} <= before | inside
                inside.add(step.id)
            done += inside
    assert sorted(done) == sorted(step.id for step in steps)
    evaluating = [array for array in arrays if array.kind == "evaluate"]
    assert [array.asks["gpus"] for array in evaluating] == [0, 4]
    for array in evaluating:
        assert sorted(len({step.inputs["plan"].id for step in pack}) for pack in array.packs) == [
            1,
            2,
            2,
        ]
        for pack in array.packs:
            assert len({repr(step.resources().model) for step in pack}) == 1
        for pack in array.packs:
            assert [step.kind for step in pack] == ["evaluate", "evaluate", "cost"] * (
                len(pack) // 3
            )


@pytest.mark.parametrize(("backend", "generates"), [("hf", "evaluate"), ("server", "generate")])
def test_texts_are_graded_in_jobs_of_their_own(backend: str, generates: str) -> None:
    steps = study(5)
    for plan in [step for step in steps if step.kind == "plan"]:
        asked = BenchmarkConfig(
            name="code", harness="evalplus", task="pocket:benchmarks/mbpp.jsonl"
        )
        by = BackendConfig(name=backend, command="serve {checkpoint}")
        pruned = evaluated(ModelConfig(name="m", path="owner/m"), asked, plan).pruned
        generate = Generate(Asking(asked, Questions(asked), by), pruned, None, None)
        steps += [
            pruned.loaded.facts,
            generate,
            Grade(Grading(IdentifiedBenchmark.of(asked), Policy(), None), generate),
        ]
    arrays = arrange(steps, lambda pack: {"gpus": int(pack[0].kind != "grade")}, SETTINGS)
    of = {step.kind: array for array in arrays for pack in array.packs for step in pack}
    assert of["generate"].kind == generates and of["generate"].asks["gpus"] == 1
    assert of["grade"].kind == "grade" and of["grade"].asks["gpus"] == 0
    assert arrays.index(of["generate"]) < arrays.index(of["grade"])


def test_what_an_unpruned_model_costs_comes_first_and_small_steps_share_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moe_lab.study.slurm.arrays.STEPS_PER_JOB", 4)
    arrays = arrange(study(9), ask, SETTINGS)
    assert [array.kind for array in arrays].index("cost") < [array.kind for array in arrays].index(
        "evaluate"
    )
    (plans,) = [array for array in arrays if array.kind == "plan"]
    assert [len(pack) for pack in plans.packs] == [3, 3, 3]


@pytest.mark.parametrize(("longest", "sizes"), [((), [1001, 199]), ((500,), [500, 500, 200])])
def test_an_array_is_no_longer_than_slurm_takes(longest: tuple[int, ...], sizes: list[int]) -> None:
    arrays = arrange(study(1200), ask, replace(SETTINGS, cells_per_job=1), *longest)
    assert [len(array.packs) for array in arrays if array.kind == "evaluate"] == sizes


def test_jobs_and_limits_are_read_whatever_jobs_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever submitted them; time limits as sinfo writes them; the longest array in both of a
    cluster's limits."""
    squeue = (
        "7_1|RUNNING|None|1:00|s.k\n8|PENDING|Priority|0:00|two\nlines|\f|x\n"
        "9|BOOT_FAIL|None|0:00|s.k\n"
    )
    squeue += "10|COMPLETING|None|0:22|cancelled\n11|COMPLETING|None|0:00|requeued\n"
    squeue += "12|COMPLETING|NonZeroExitCode|0:00|died at once\n"
    ask = Mock(side_effect=lambda *words: squeue if words[-1] == "--user=7" else "")
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.run_command", ask)
    jobs = {job.id: job for job in (replace(submitted("7_1", "a"), user=7), submitted("8", "b"))}
    assert (
        queued_jobs(jobs)[0].keys() == {"7_1"}
        and in_queue("8", 7)
        and not in_queue("8", os.getuid())
    )
    ask.reset_mock()
    assert any([in_queue("8", 7) for _ in range(99)]) and ask.call_count <= 4, (
        "once a minute for each user"
    )
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.run_command", lambda *_: squeue)
    found = [(job.id, job.name, job.pending) for job in queue().values()]
    assert found == [("7_1", "s.k", False), ("8", "two", True), ("11", "requeued", False)]
    config = (
        "MaxArraySize            = 1001\nSchedulerParameters     = "
        "bf_continue,max_array_tasks=3,defer\n"
    )
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.run_command", lambda *_: config)
    assert longest_array() == 3
    sinfo = "debug*|infinite\ngpu|1-12:00:00\nshort|30:00\n"
    monkeypatch.setattr("moe_lab.study.slurm.scheduler.run_command", lambda *_: sinfo)
    assert time_limits() == {"": inf, "debug": inf, "gpu": 2160, "short": 30}


def test_jobs_work_for_the_store_that_they_were_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store").create()
    with begin(store, "s", []) as run:
        run.add([submitted("1", "a")])
    (tmp_path / "link").symlink_to(store.root)
    shutil.copytree(store.root, tmp_path / "copy")
    counts = [len(runs(Store(tmp_path / name), "s")[0].jobs) for name in ("store", "link", "copy")]
    store.root.rename(tmp_path / "mount")  # the same folder by another path
    assert [*counts, len(runs(Store(tmp_path / "mount"), "s")[0].jobs)] == [1, 1, 0, 1]
    monkeypatch.setattr("os.path.ismount", lambda _: True)
    assert not runs(Store(tmp_path / "mount"), "s")[0].jobs, (
        "the inode of a whole disk says nothing"
    )


def submitted(job: str, steps: str, after: str = "", kind: str = "k") -> Submitted:
    return Submitted(
        job, job.partition("_")[0], "s." + kind, kind, tuple(steps), tuple(after.split())
    )


def queued(job: str, state: str = "PENDING", name: str = "s.k") -> tuple[str, Queued]:
    return job, Queued(job, name, state, "Dependency", "0:00")


def test_a_job_that_must_end_saves_unless_it_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its image has no scontrol that says which it is."""
    preempted = [{"JobState": "RUNNING"}, {}, UserError("there is no scontrol here")]
    # cancelled; requeued by Slurm
    ended = [{"JobState": "COMPLETING", "Restarts": number} for number in "01"]
    monkeypatch.setattr(scheduler, "job_state", Mock(side_effect=[*preempted, *ended]))
    monkeypatch.setattr(os, "kill", killed := Mock())
    pack = StepsJob(str(tmp_path), [], "s/r", LauncherConfig())
    pack.__dict__["worker"] = worker = Mock()
    for _ in preempted:
        pack.leave(signal.SIGTERM, None)
    assert [call.args[1] for call in killed.call_args_list] == [signal.SIGUSR2] * 3
    for calls in range(2):
        with pytest.raises(SystemExit, match="143"):
            pack.leave(signal.SIGTERM, None)
        assert worker.end.call_count == calls


def test_steps_of_pending_and_running_jobs_need_no_new_job() -> None:
    jobs = [submitted("1", "a"), submitted("2_0", "bc", "1"), submitted("3", "d", "2")]
    found = under_way(jobs, dict([queued("1", "RUNNING"), queued("2_0")]), "dab")
    assert found.steps == {"a": "1", "b": "2_0"} and found.failed_jobs == []
    assert under_way(jobs, dict([queued("1", name="other")]), "a").steps == {}, (
        "a job of another name is another"
    )
    last = [submitted("9", "", "1", RECORD)]
    assert under_way(last, dict([queued("9", name="s.record")]), "").recorded == ["9"]
    assert under_way(last, {}, "").recorded == []


def test_what_waits_for_a_lost_job_is_hopeless_and_so_is_what_waits_for_that() -> None:
    jobs = [
        submitted("1_0", "a"),
        submitted("1_1", "b"),
        submitted("2", "c", "1"),
        submitted("3_0", "d", "2"),
    ]
    queue = dict([queued("1_1", "RUNNING"), queued("2"), queued("3_0")])
    found = under_way(jobs, queue, "abcd")
    assert found.steps == {"b": "1_1"} and found.failed_jobs == ["2", "3_0"]
    assert under_way([replace(job, user=-1) for job in jobs], queue, "abcd").failed_jobs == [], (
        "they are of a colleague"
    )
    assert under_way(jobs, queue, "bcd").failed_jobs == [], "a is done, its job ended well"


def test_a_queued_pass_is_not_divided_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def divided(parts: int) -> list[Step]:
        shares = tuple(
            Example("statistics", "share", 10 * parts + number) for number in range(parts)
        )
        return [*shares, Example("statistics", "whole", merges=shares)]

    whole = divided(2)[-1]
    added = list[Array]()
    store = Store(tmp_path).create()
    with begin(store, "study", []) as run:
        run.add([replace(submitted("1", ""), steps=(whole.id,))])
    monkeypatch.setattr(scheduler, "queue", lambda *_: dict([queued("1")]))
    monkeypatch.setattr(scheduler, "time_limits", dict)
    monkeypatch.setattr(scheduler, "longest_array", lambda: 9)
    asked = SimpleNamespace(config=Config(), store=store)
    submission: Any = SimpleNamespace(study=asked, jobs={}, add=added.append, close=lambda: None)
    submit_missing(Schedule(divided(3)), submission)
    assert added == [] and submission.jobs == {whole.id: "1"}
    looks = Mock(side_effect=[{}, dict([queued("1")])])
    clock = count(step=99)
    monkeypatch.setattr(scheduler, "queue", looks)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    submit_missing(Schedule(divided(3)), submission)
    assert added == [] and looks.call_count == 2, "it was submitted during a long download"


def test_a_pack_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path).create()
    given = []
    there = Example("first", "there")
    gone = Example("first", "gone", 1)
    with store.claim(there):
        pass
    good = Example("next", "good", 0, {"in": there})
    bad = Example("next", "bad", 0, {"in": gone})
    last = Example("last", "bad", 0, {"in": bad})
    failed = Example("next", "failed", 2, {"in": there})

    def execute(_: WorkerProcess, step: Step, scratch: Path) -> None:
        given.append(step.label())
        if step is failed:
            raise StepError({"message": "no"})

    monkeypatch.setattr(WorkerProcess, "__call__", execute)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr("moe_lab.study.store.VISIBLE_AFTER", 0.0)
    with begin(store, "study", []) as run:
        name = str(run.folder.relative_to(tmp_path / "runs"))
        pack = StepsJob(
            str(tmp_path), [bad, last, failed, good], name, LauncherConfig(max_requeues=1)
        )
    assert pack() == {"done": 2, "failed": 1, "skipped": 3}
    assert given == ["failed", "good"] and store.done(good) and store.error(failed.id)
    again = pack.checkpoint()
    assert again is not None and again.function.checkpoint() is None


def test_parts_of_a_pass_are_an_array_before_their_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sees what other nodes have written late, as on NFS, and does not wait for what has
    failed."""
    model = ModelConfig(name="m", path="m")
    parts = tuple(Example("statistics", f"rows{n}", n, model=model) for n in range(3))
    merge = Example("statistics", "whole", 3, model=model, merges=parts)
    arrays = arrange([*parts, merge], ask, SETTINGS)
    assert [array.packs for array in arrays] == [[[part] for part in parts], [[merge]]]
    schedule = Schedule([merge])
    store = Store(tmp_path).create()
    written = iter(parts)

    def another_node_writes(_: float) -> None:
        with store.claim(next(written)):
            pass

    monkeypatch.setattr(time, "sleep", another_node_writes)
    assert store.readable(parts[0]) and missing_inputs(schedule, store) == []
    (one, two) = (Example("plan", name) for name in "ab")
    store.fail(one, {"message": "no"})
    needs = Schedule(
        [Example("cost", needed={"plan": Example("plan", "c", needed={"a": one, "b": two})})]
    )
    assert [step.label() for step in missing_inputs(needs, store)] == ["c"], "it does not wait"


def test_what_is_left_takes_as_long_as_what_is_done_did() -> None:
    """Three steps of 60 s to come, two at a time, of which one has been running for 20 s and one
    for too long."""
    now = time.time()
    rows = [
        ("a", "done", None),
        ("b", "running", now - 20),
        ("c", "running", now - 99),
        ("d", "pending", None),
    ]
    steps = [StepState(f"k/{name}", state, since=since or 0.0) for name, state, since in rows]
    assert seconds_left(steps, 60.0) == pytest.approx((3 * 60 - 20 - 60) / 2, abs=1)


def test_a_lost_step_is_told_apart_from_failed_and_skipped_ones(tmp_path: Path) -> None:
    store = Store(tmp_path).create()
    done, failed, lost = (
        Example("k", name, number) for number, name in enumerate(("done", "failed", "lost"))
    )
    after = [Example("after", step.name, needed={"in": step}) for step in (failed, lost)]
    with store.claim(done):
        pass
    store.fail(failed, {"message": "no", "user": True})
    schedule = Schedule([done, failed, lost, *after])
    settle(schedule, store)
    assert schedule.finished == {done.id} and set(schedule.skipped) == {step.id for step in after}
    assert str(schedule.failed[failed.id]) == "no" and "was not finished" in str(
        schedule.failed[lost.id]
    )
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


def test_the_commit_is_of_moe_lab_and_new_files_are_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation in the folder of another project, which ignores it, has no commit."""
    (package := tmp_path / "moe_lab").mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(moe_lab, "__file__", str(package / "__init__.py"))

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True
        )

    def commit_and_edits() -> tuple[str | None, str | None]:
        state = code_state.__wrapped__()
        return state.get("commit"), state.get("edits")

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another project")
    assert commit_and_edits() == (None, None)
    git("add", ".")
    git("commit", "-q", "-m", "moe_lab")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in the checkout of a colleague
    states = [commit_and_edits()]
    for text in ("1", "2"):
        (package / "new.py").write_text(text)
        states.append(commit_and_edits())
    commits, edits = map(set, zip(*states, strict=True))
    assert None not in commits and len(commits) == 1 and states[0][1] is None and len(edits) == 3


def test_jobs_run_plugins_as_they_were_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package that a plugin is in, or its only file, also where Python would find what they
    have become."""
    own = tmp_path / "own" / "moe_lab"
    mine = tmp_path / "mine"
    copies = []
    for folder in (own, mine / "plugged"):
        folder.mkdir(parents=True)
    shutil.copy(start.FILE, own)
    monkeypatch.setattr(moe_lab, "__file__", str(own / "__init__.py"))
    monkeypatch.setattr(
        plugins, "load", lambda names: [importlib.import_module(name).__name__ for name in names]
    )
    monkeypatch.syspath_prepend(mine)
    for text in ("before", "after"):
        for file in ("plugged/part.py", "plugged_file.py"):
            (mine / file).write_text(f"print('{text}')")
        copies.append(copy_code(tmp_path / "store", ["plugged.part", "plugged_file"]))
    assert copies[0] != copies[1]
    for name in ("plugged.part", "plugged_file"):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, str(copies[0]), "-m", name]
        assert (
            subprocess.run(words, capture_output=True, text=True, env=environment).stdout
            == "before\n"
        )


# What jobs ask for: the most particular that is set, the rest estimated for all steps together

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


def resources(
    steps: list[Step],
    text: str = "{}",
    seconds: Seconds = lambda step: 3600.0,
    limits: Mapping[str, float] | None = None,
) -> Any:
    """What a job asks for whose steps take an hour each, under settings that are written as a file
    of them."""
    settings = valid(ResourcesConfig, OmegaConf.to_container(OmegaConf.create(text)), "resources")
    return module.resources(steps, settings, seconds, limits or {})


def asking(model: ModelConfig = BIG, kind: str = "evaluate") -> Step:
    return step_of(kind, cell_of(model, TEXT), benchmark=WRITTEN)


def test_models_are_there_before_jobs_are_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and their texts; none that no step reads."""
    done: list[str] = []
    monkeypatch.setattr("moe_lab.models.files.local_folder", lambda model: done.append(model.name))
    monkeypatch.setattr("moe_lab.calibration.sources.download", lambda text: done.append(text.path))
    steps = [asking(kind="profile"), asking(kind="statistics"), Example("plan", "o")]
    download(steps)
    assert sorted(done) == ["a/b", "big"]


def test_a_job_asks_for_gpus_of_a_node_and_a_layered_pass_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not known how a model is read whose config.json cannot be had."""
    assert resources([asking(replace(BIG, device="cuda"))])["gpus"] == 1
    monkeypatch.setattr("moe_lab.models.config_json.hub_config", lambda *_: {"model_type": "any"})
    huge = choices.choose(ModelConfig, "model", "deepseek_v3")
    for model, way in (
        (huge, "enough, or"),
        (replace(BIG, name="deepseek_v3", device="cuda"), "model.device=auto"),
    ):
        with pytest.raises(UserError, match=rf"deepseek_v3.*resources\.gpu_memory.*{way}"):
            resources([asking(model)])
    four = "{models: {deepseek_v3: {gpus: 4}}}"
    assert resources([asking(huge)], four)["gpus"] == 4
    text = CalibrationConfig(name="t", path="a/b", engine="streamed", seed=1)
    layered = step_of("statistics", cell_of(huge, text))
    assert resources([layered])["gpus"] == resources([layered], four)["gpus"] == 1
    with pytest.raises(UserError, match="among at most 1 GPUs"):
        resources([layered], "{gpu_memory: 8}")
    for device, gpus in (("NVIDIA H100", 1), ("2 x NVIDIA H100", 2)):
        timing = step_of("timing", cell_of(BIG, TEXT), Config(timed=TimingConfig(device=device)))
        assert resources([timing], "{gpu_memory: 250}")["gpus"] == gpus


def test_a_job_with_vllm_asks_for_gpus_that_divide_the_heads_of_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same number that vLLM takes of the GPUs it is given."""
    monkeypatch.setattr(
        "moe_lab.models.config_json.hub_config", lambda *_: {"num_attention_heads": 28}
    )
    asked = evaluated(BIG, WRITTEN, backend=BackendConfig("vllm"))
    assert resources([asked])["gpus"] == 4
    with pytest.raises(UserError, match=r"at most 4 GPUs of resources\.gpu_memory=24 "):
        resources([asked], "{gpu_memory: 24}")
    assert resources([asking()], "{gpu_memory: 24}")["gpus"] == 8, (
        "in transformers, layers are divided"
    )
    two = evaluated(
        BIG, WRITTEN, backend=BackendConfig("vllm", arguments={"tensor_parallel_size": 2})
    )
    assert resources([two], "{gpu_memory: 96}")["gpus"] == 2


@pytest.mark.parametrize(
    "sourced",
    [
        "[ -f none ] && . none",
        "exit 3",
        "f() { false; }; f",
        "set -u; echo $none",
        "(exit 4)",
        ": fine",
    ],
)
def test_a_line_of_setup_that_ends_a_job_is_named(tmp_path: Path, sourced: str) -> None:
    """Whatever ends it in a file that the line sources."""
    (tmp_path / "rc").write_text(f"{sourced}\n")
    script = "\n".join(
        [*setup_lines(["echo before", f"source {tmp_path}/rc"]), "echo Python", "exit 5"]
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    if sourced == ": fine":
        assert (done.stdout, done.stderr, done.returncode) == ("before\nPython\n", "", 5)
    else:
        assert (
            done.stdout == "before\n"
            and f"source {tmp_path}/rc" in done.stderr
            and done.returncode != 0
        )


def test_where_nothing_is_set_all_is_estimated() -> None:
    """A pack asks for the time of all its steps, and the memory of one."""
    asked = resources([asking()])
    assert set(asked) == {field.name for field in fields(JobConfig)}
    assert asked["gpus"] == 4 and asked["cpus"] == 32, "three do not divide a model"
    assert asked["memory"] > 106, "the weights pass through main memory"
    assert asked["minutes"] % 30 == 0
    assert (asked["partition"], asked["sbatch"], asked["setup"]) == (None, {}, [])
    one, four = (resources([asking()] * count) for count in (1, 4))
    assert (one["minutes"], four["minutes"]) == (120, 480), "with a margin of 2"
    assert {**one, "minutes": 0} == {**four, "minutes": 0}
    assert resources([asking()] * 400)["minutes"] == ResourcesConfig().longest


@pytest.mark.parametrize(
    ("kinds", "every", "minutes"),
    [
        ("evaluate export", "{}", 777),
        ("evaluate", "{}", 30),
        ("evaluate export", "{partition: short}", 60),
        ("export", "{partition: 'short,long'}", 90),
        ("export", "{partition: elsewhere}", 777),
        ("export", "{partition: short, sbatch: {qos: long}}", 777),
        ("export", "{partition: short, minutes: 70}", 70),
    ],
)
def test_a_pack_of_which_no_time_is_known_or_set_asks_for_the_longest(
    kinds: str, every: str, minutes: int
) -> None:
    """That its partition allows. An evaluation takes a minute, an export nobody knows how long."""
    limits = {"": inf, "short": 60.0, "long": 90.0}
    seconds = {"evaluate": 60.0}
    pack = [asking(kind=kind) for kind in kinds.split()]
    asked = resources(
        pack, f"{{longest: 777, every: {every}}}", lambda one: seconds.get(one.kind), limits
    )
    assert asked["minutes"] == minutes


def test_the_most_particular_counts() -> None:
    cluster = """
        every: {partition: gpu, sbatch: {exclusive: true, nice: 5}, setup: [module load cuda]}
        jobs:
          evaluate: {partition: long, gpus: 1, minutes: 60, sbatch: {nice: 7}}
          scores: {partition: cpu}
        models:
          big: {gpus: 8, minutes: 90}
          other: {gpus: 3}
        """
    asked = resources([asking()], cluster)
    assert (asked["gpus"], asked["cpus"], asked["minutes"]) == (8, 64, 90)
    assert (asked["partition"], asked["setup"]) == ("long", ["module load cuda"])
    assert asked["sbatch"] == {"exclusive": True, "nice": 7}
    assert resources([asking(kind="export")], cluster)["gpus"] == 8
    assert resources([asking(kind="model")], cluster)["gpus"] == 0, (
        "a job of small steps is about no model"
    )


def test_gpus_are_asked_for_in_one_way() -> None:
    for ours in ("gpus: 2", "gpu_type: a100"):
        text = f"{{every: {{{ours}}}, jobs: {{evaluate: {{sbatch: {{gres: 'nvme:1,gpu:1'}}}}}}}}"
        with pytest.raises(
            UserError,
            match=rf"evaluate jobs have .*{ours.replace(': ', '=')}.* and sbatch.gres=nvme",
        ):
            resources([asking()], text)
    assert (
        resources([asking()], "{every: {gpus: 0, gpu_type: a100, sbatch: {gres: 'gpu:1'}}}")["gpus"]
        == 0
    )
    cluster = "{every: {sbatch: {gpus: 1}}, models: {big: {gpus: 2, sbatch: {gpus: null}}}}"
    assert resources([asking(replace(BIG, name="big_top4", top_k=4))], cluster)["gpus"] == 2, (
        "the same weights"
    )


POCKET = ModelConfig(name="pocket", path="pocket:olmoe", threads=1)


@pytest.mark.parametrize(
    ("kinds", "model", "text", "gpus", "cpus", "memory"),
    [
        (["evaluate"], POCKET, "{}", 0, 1, 4),
        (["plan", "scores"], BIG, "{}", 0, 1, 2),
        (["evaluate"], BIG, "{every: {gpus: 0, cpus: 32}}", 0, 32, None),
        (["evaluate"], BIG, "{gpu_memory: 48}", 4, 32, None),
        (["evaluate"], ModelConfig(name="unknown", path="a/b"), "{}", 1, 8, None),
    ],
)
def test_gpus_and_cores_follow_from_the_work(
    kinds: list[str], model: ModelConfig, text: str, gpus: int, cpus: int, memory: int | None
) -> None:
    asked = resources([asking(model, kind) for kind in kinds], text)
    assert (asked["gpus"], asked["cpus"]) == (gpus, cpus) and asked["memory"] <= (memory or 10**6)
