"""Studies on a real cluster of one node, without accounting: the same numbers, whatever happens to their jobs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, until
from studies import asked, command, jobs, moe_lab, ran, results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(__file__).parents[2] / "moe_lab/pocket/data/olmoe/model.safetensors").exists(),
        reason="no shipped model",
    ),
]
LONG = 120
"""Seconds after which a test gives up on a job; on a quiet machine it takes a tenth."""
GRID = ["grid.criterion=[man,reap]", "grid.ratio=[0.25,0.5]", "suite.benchmarks=[pocket_boolq]", "study=wide"]
BROKEN = [
    "grid.criterion=[man,random]",
    "calibration.tokens=100000000",
    "suite.benchmarks=[pocket_boolq]",
    "study=broken",
]
LITTLE = ["criterion=random", "grid.ratio=[0.25,0.5]", "suite.benchmarks=[]", "study=little"]
"""A study in which nothing is evaluated: model, scores, plans, costs."""
SLURM = ["launcher=slurm", "launcher.cells_per_job=8"]


@pytest.fixture(autouse=True)
def tidy(cluster: Cluster) -> Iterator[None]:
    """Each test finds an idle node and an empty queue, whatever became of the one before."""
    yield
    cluster.ask("scancel", "--user=root")
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    _wait_for_the_end(cluster)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the cells of all these studies were run in one process."""
    store = tmp_path_factory.mktemp("inline") / "store"
    done = moe_lab(store, *GRID, "grid.criterion=[man,reap,random]", "launcher=inline")
    assert done.returncode == 0, done.stderr
    return store


@pytest.fixture(scope="module")
def swept(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store on which two overlapping studies, one with a mistake in it, were submitted at the same time."""
    store = tmp_path_factory.mktemp("swept") / "store"
    store.parent.chmod(0o755)
    both = [
        subprocess.Popen(command(store, *words, *SLURM), cwd=store.parent, stdout=subprocess.PIPE, text=True)
        for words in (GRID, BROKEN)
    ]
    printed = [run.communicate(timeout=LONG)[0] for run in both]
    assert [run.returncode for run in both] == [0, 0]
    assert all("record" in jobs(text) for text in printed)
    assert not list(store.glob("evaluate/*/manifest.json")), "the command returns when jobs are submitted"
    _wait_for_the_end(cluster)
    return store


def test_the_numbers_are_those_of_one_process(swept: Path, inline: Path) -> None:
    mine, theirs = results(swept), results(inline)
    assert Counter(name.split("/")[0] for name in mine) == {
        "model": 1, "statistics": 1, "scores": 3, "plan": 5, "cost": 6, "evaluate": 12
    }  # fmt: skip
    assert all(theirs[name] == content for name, content in mine.items())


def test_overlapping_studies_do_each_step_once(swept: Path) -> None:
    assert set(ran(swept).values()) == {1}
    assert Counter(name.split("/")[0] for name in ran(swept)) == {
        "model": 1, "statistics": 2, "scores": 3, "plan": 5, "cost": 6, "evaluate": 6
    }  # fmt: skip


def test_the_last_job_writes_the_record(swept: Path) -> None:
    wide = json.loads((swept / "studies" / "wide.json").read_text())
    assert len(wide["cells"]) == 5 and all(cell["evaluate"]["pocket_boolq"] for cell in wide["cells"])


def test_a_mistake_stops_what_needs_it_and_nothing_else(swept: Path) -> None:
    broken = json.loads((swept / "studies" / "broken.json").read_text())
    there = {(cell["cell"]["criterion"], cell["evaluate"]["pocket_boolq"] is not None) for cell in broken["cells"]}
    assert there == {("none", True), ("random", True), ("man", False)}
    assert "calibration.tokens=100000000" in asked(swept, "why", "broken")
    assert "statistics/" in asked(swept, "logs", "broken")
    assert "failed" in asked(swept, "status", "broken")


def test_the_same_command_survives_what_clusters_do(
    cluster: Cluster, inline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled job; a worker killed; a job requeued, then told to make room, the controller restarted meanwhile; a
    node that is drained: the same command completes the study, nothing is lost, and nothing is done twice."""
    tmp_path.chmod(0o755)
    store = tmp_path / "store"
    words = [*LITTLE, *SLURM]

    def submit() -> dict[str, str]:
        done = moe_lab(store, *words)
        assert done.returncode == 0, done.stderr
        return jobs(done.stdout)

    first = submit()
    assert "under way" in moe_lab(store, *words).stderr, "what is in the queue is not submitted again"
    _wait_for_work(store, "model", first["model"])
    cluster.ask("scancel", first["model"])
    _wait_for_the_end(cluster)
    assert not results(store) and "cancelled" in asked(store, "why", "little")

    shutil.copytree(inline / "model", store / "model", dirs_exist_ok=True)  # saves its time
    second = submit()
    _wait_for_work(store, "cost", second["cost"])
    os.kill(_worker(store / "logs" / f"slurm-{second['cost']}.log"), signal.SIGKILL)
    _wait_for_the_end(cluster)
    assert "was not finished" in next((store / "runs").glob(f"little/*/jobs/{second['record']}_0_log.err")).read_text()
    assert Counter(name.split("/")[0] for name in results(store)) == {"model": 1, "scores": 1, "plan": 2}

    third = submit()
    assert set(third) == {"cost", "evaluate", "record"}, "only what is missing"
    job = third["cost"]
    for interrupt in (["scontrol", "requeue", job], ["scancel", "--signal=TERM", job]):
        _wait_for_work(store, "cost", job)
        (store / "logs" / f"slurm-{job}.log").unlink()
        cluster.ask(*interrupt)
        until(lambda: _state(cluster, job) == "PENDING", LONG, f"{interrupt} did not requeue: {cluster.ask('squeue')}")
        if interrupt[0] == "scontrol":
            cluster.end("slurmctld")
            with monkeypatch.context() as patched:
                patched.setenv("SLURM_CONF", str(cluster.impatient))
                assert "does not answer" in asked(store, "status", "little")
            cluster.launch("slurmctld", "-D")
            until(lambda: _state(cluster, job) == "PENDING", LONG, "the job did not outlive the controller")
        else:
            cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=drain", "reason=test")
        cluster.ask("scontrol", "update", f"jobid={job}", "starttime=now")
    until(lambda: "drain" in cluster.ask("sinfo", "-h", "-o", "%T"), LONG, "not drained")
    assert "pending" in asked(store, "why", "little")
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    _wait_for_the_end(cluster)
    mine, theirs = results(store), results(inline)
    assert len(mine) == 7 and all(theirs[name] == content for name, content in mine.items())
    assert not list(store.glob("*/.*")) and "all 7 steps are done" in asked(store, "why", "little")
    assert "7 of them" in moe_lab(store, *words).stderr


def _wait_for_work(store: Path, kind: str, job: str) -> None:
    """Until a step of the kind is worked on in the job."""
    log = store / "logs" / f"slurm-{job}.log"
    until(lambda: log.exists() and f" {kind}/" in log.read_text(), LONG, f"{kind} does not start in {job}")


def _wait_for_the_end(cluster: Cluster) -> None:
    """Until the queue is empty."""
    until(lambda: not cluster.ask("squeue", "-h"), LONG, cluster.ask("squeue"))


def _state(cluster: Cluster, job: str) -> str:
    return cluster.ask("squeue", "-h", "-o", "%T", "-j", job).strip()


def _worker(log: Path) -> int:
    """The worker process that prints to `log`."""
    found = subprocess.run(["pgrep", "-f", "moe_lab.study.worker"], capture_output=True, text=True).stdout.split()
    (own,) = [pid for pid in found if Path(f"/proc/{pid}/fd/2").resolve() == log]
    return int(own)


def test_what_the_scheduler_refuses_is_said_in_its_words(cluster: Cluster, tmp_path: Path) -> None:
    """Also when the first arrays were taken already: nothing of the study stays in the queue."""
    for words, said, key in (
        ("resources.every.partition=nope", "invalid partition specified: nope", "resources.every.partition"),
        ("+resources.jobs={plan: {partition: nope}}", "invalid partition specified: nope", "resources.jobs"),
        ("resources.every.memory=900", "Memory specification can not be satisfied", "resources.every.memory"),
        ("resources.every.constraint=h100", "Invalid feature specification", "resources.every.constraint"),
    ):
        done = moe_lab(tmp_path / "store", *LITTLE, *SLURM, words)
        assert done.returncode == 2 and said in done.stderr and key in done.stderr and "Traceback" not in done.stderr
        assert not cluster.ask("squeue", "-h", "-t", "pending,running"), "something was left in the queue"
        assert not list((tmp_path / "store" / "runs").glob("*/*"))


def test_cancel_and_wait(cluster: Cluster, tmp_path: Path) -> None:
    """wait=true returns when the jobs are gone, and says what is missing; cancel takes them away."""
    tmp_path.chmod(0o755)
    store = tmp_path / "store"
    run = subprocess.Popen(
        command(store, *LITTLE, *SLURM, "wait=true"), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    until(lambda: cluster.ask("squeue", "-h", "-t", "R"), LONG, "nothing runs")
    until(lambda: "record" in cluster.ask("squeue", "-h", "-o", "%j"), LONG, "not all is submitted")
    before = time.monotonic()
    assert "cancelled 6 jobs" in asked(store, "cancel", "little")
    _wait_for_the_end(cluster)
    assert time.monotonic() - before < 30
    _, errors = run.communicate(timeout=LONG)
    assert run.returncode == 1 and "the same command goes on from here" in errors


def test_jobs_run_the_code_as_it_was_when_they_were_submitted(cluster: Cluster, inline: Path, tmp_path: Path) -> None:
    """snapshot=true: what is edited while jobs are in the queue, even in the folder they start in, does not matter."""
    tmp_path.chmod(0o755)
    checkout, store = tmp_path / "checkout", tmp_path / "store"
    root = Path(__file__).parents[2]
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(root / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(inline, store)
    for plan in (store / "plan").glob("*-random-*"):
        shutil.rmtree(plan)
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=drain", "reason=test")
    done = subprocess.run(
        command(store, *LITTLE, *SLURM, "snapshot=true"), cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0 and set(jobs(done.stdout)) == {"plan", "record"}, done.stderr
    for file in checkout.glob("moe_lab/study/**/*.py"):
        file.write_text("raise RuntimeError('edited')\n")
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    _wait_for_the_end(cluster)
    assert results(store) == results(inline)
