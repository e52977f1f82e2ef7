"""What happens to studies on the cluster while others run: each is played to its end and leaves what came of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import preloaded
from cluster import LONG, Cluster, until
from instant_studies import InstantStudies
from studies import asked, command, jobs, moe_lab

from tests.test_secrets import PLANTED, SERVER, served

SLURM = ["launcher=slurm", "launcher.cells_per_job=3"]
AGNOSTIC = [
    "+experiment=task_agnostic",
    "model=pocket_olmoe",
    "suite.benchmarks=[pocket_boolq,pocket_gsm8k]",
    "criterion=man,reap,aimer,random",
    "calibration=pocket_code",
]
"""The main experiment, smaller: one model, one calibration set, some criteria, two benchmarks."""
PASS = ["criterion=man", "suite.benchmarks=[]", "study=pass", "calibration.tokens=16384", "calibration.batch_size=1"]
"""A calibration pass of 32 batches."""
TWO = "ratio=0.25,0.5"
STEPS = {"model": 1, "scores": 1, "plan": 2, "cost": 3}
"""What TWO comes to where nothing is evaluated: the costs are those of the unpruned model and of both plans."""


def play_inline(store: Path) -> Path:
    """A store with the results of one process."""
    for words in (AGNOSTIC, PASS):
        done = moe_lab(store, *words, "launcher=inline")
        assert done.returncode == 0, done.stderr
    return store


def play_agnostic(cluster: Cluster, store: Path) -> Path:
    """A store in which jobs did all of the main experiment."""
    done = moe_lab(store, *AGNOSTIC, *SLURM, f"launcher.python={preloaded.python()}")
    assert done.returncode == 0 and "record" in jobs(done.stdout), done.stderr
    assert not list(store.glob("evaluate/*/step.json")), "the command returns when jobs are submitted"
    cluster.wait_for_the_end(store)
    return store


def play_planted(store: Path) -> subprocess.CompletedProcess[str]:
    """The command of a study after all its jobs ended. Its environment has secrets, which all begin with PLANTED."""
    settings = [
        served(SERVER, "{port} {name} {checkpoint}"),
        "backend=server",
        "criterion=random",
        "suite.benchmarks=[pocket_mbpp]",
        "suite.limit=2",
        "allow_code_execution=true",
        "resources.every.setup=['test -n $HF_TOKEN']",
        "report=true",
        "wait=true",
    ]
    words = command(store, *settings, *SLURM)
    store.mkdir()
    return subprocess.run(words, cwd=store.parent, capture_output=True, text=True, env={**os.environ, **PLANTED})


@dataclass
class Limited:
    """A job whose time is over twice, where one requeue is allowed, and the same command afterwards."""

    instant: InstantStudies
    job: str
    again: dict[str, str]
    restarted: Mapping[str, str]
    ended: Mapping[str, str]
    why: str


def play_limited(cluster: Cluster, folder: Path) -> Limited:
    """The first time it is the job's real limit, brought down while it runs.

    Slurm looks twice a minute, and a job that is past its limit when Slurm looks is killed without the signal: the
    new limit leaves one to two minutes, however long the job took to begin.
    """
    instant = InstantStudies(cluster, folder)
    words = [TWO, "study=limited", "launcher.max_requeues=1", "launcher.signal_seconds=59"]
    words += ["+resources.jobs={cost: {minutes: 10}}"]
    instant.hold("cost")
    job = instant.submit(*words)["cost"]
    instant.wait_for("cost")
    cluster.ask("scontrol", "update", f"jobid={job}", f"timelimit={cluster.minutes(job) + 2}")
    instant.wait_for("cost", 2)
    restarted = cluster.job(job)
    cluster.ask("scancel", "--signal=USR2", job)
    until(lambda: cluster.job(job)["JobState"] == "FAILED", LONG, "it goes on")
    ended, why = cluster.job(job), asked(instant.store, "why", "limited")
    instant.release()
    instant.wait_for_the_end()
    again = instant.submit(*words)
    instant.wait_for_the_end()
    return Limited(instant, job, again, restarted, ended, why)


def play_overlapping(cluster: Cluster, folder: Path) -> tuple[InstantStudies, list[str]]:
    """Two studies that share steps, in one of which a criterion's input cannot be had; and what was printed.

    Both are submitted before any step is done.
    """
    instant, texts = InstantStudies(cluster, folder), []
    instant.hold("model")
    (instant.folder / "break-weights").touch()
    (instant.folder / "apart").touch()
    words = {
        "wide": ["ratio=0.1,0.2,0.3,0.4"],
        "broken": ["ratio=0.2,0.3,0.4,0.5", "criterion=random,magnitude"],
    }
    runs = [instant.start(*more, f"study={name}") for name, more in words.items()]
    for run in runs:
        printed, errors = run.communicate(timeout=LONG)
        assert run.returncode == 0, errors
        texts.append(printed)
    instant.release()
    instant.wait_for_the_end()
    return instant, texts
