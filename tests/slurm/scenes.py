"""What happens to studies on the cluster while others run: each is played to its end and leaves what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import LONG, Cluster, until
from little import Little
from studies import asked, jobs, moe_lab

from moe_lab.statistics_file import header

SLURM = ["launcher=slurm", "launcher.cells_per_job=3"]
AGNOSTIC = [
    "+experiment=task_agnostic",
    "model=pocket_olmoe",
    "suite.benchmarks=[pocket_boolq,pocket_gsm8k]",
    "grid.criterion=[man,reap,aimer,random]",
    "calibration=pocket_code",
]
"""The main experiment, smaller: one model, one calibration set, some criteria, two benchmarks."""
PASS = ["criterion=man", "suite.benchmarks=[]", "study=pass", "calibration.tokens=16384", "calibration.batch_size=1"]
"""A calibration pass of 32 batches that saves its sums after every eighth."""
TWO = "grid.ratio=[0.25,0.5]"
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
    done = moe_lab(store, *AGNOSTIC, *SLURM)
    assert done.returncode == 0 and "record" in jobs(done.stdout), done.stderr
    assert not list(store.glob("evaluate/*/manifest.json")), "the command returns when jobs are submitted"
    cluster.wait_for_the_end(store)
    return store


def play_interrupted(cluster: Cluster, store: Path) -> tuple[Path, list[int]]:
    """A store in which a calibration pass had to make room, and how many batches it had saved, each time it did."""
    done = moe_lab(store, *PASS, *SLURM)
    job = jobs(done.stdout)["statistics"]
    saved: list[int] = []
    seen = 0
    deadline = time.monotonic() + LONG
    while not list(store.glob("statistics/*/manifest.json")):
        assert time.monotonic() < deadline, f"{saved} of 32 batches"
        for file in store.glob("partial/*/checkpoint.safetensors"):
            if (now := file.stat().st_mtime_ns) != seen:
                seen = now
                saved.append(header(file)["done"])
                if len(saved) == 1:
                    cluster.ask("scancel", "--signal=USR2", job)
        time.sleep(0.02)
    assert cluster.job(job)["Restarts"] == "1", cluster.job(job)
    cluster.wait_for_the_end(store)
    return store, saved


@dataclass
class Limited:
    """A job whose time is over twice, where one requeue is allowed, and the same command afterwards."""

    little: Little
    first: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    restarted: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    def play(self) -> Limited:
        """The first time it is the job's real limit, brought down to the least there is; Slurm looks twice a minute."""
        little, cluster = self.little, self.little.cluster
        words = [TWO, "study=limited", "launcher.max_requeues=1", "launcher.signal_seconds=59"]
        words += ["+resources.jobs={cost: {minutes: 2}}"]
        little.hold("cost")
        self.first = little.submit(*words)
        job = self.first["cost"]
        little.wait_for("cost")
        cluster.ask("scontrol", "update", f"jobid={job}", "timelimit=1")
        little.wait_for("cost", 2)
        self.restarted = dict(cluster.job(job))
        cluster.ask("scancel", "--signal=USR2", job)
        until(lambda: cluster.job(job)["JobState"] == "FAILED", LONG, "it goes on")
        self.ended = dict(cluster.job(job))
        self.why = asked(little.store, "why", "limited")
        little.release()
        little.wait_for_the_end()
        self.again = little.submit(*words)
        little.wait_for_the_end()
        return self


@dataclass
class Overlapping:
    """Two studies that share steps, in one of which a criterion's input cannot be had."""

    little: Little
    printed: list[str] = field(default_factory=list)

    def play(self) -> Overlapping:
        """Both are submitted before any step is done."""
        little = self.little
        little.hold("model")
        (little.folder / "break-weights").touch()
        words = {
            "wide": ["grid.ratio=[0.1,0.2,0.3,0.4]"],
            "broken": ["grid.ratio=[0.2,0.3,0.4,0.5]", "grid.criterion=[random,magnitude]"],
        }
        runs = [little.start(*more, f"study={name}", "launcher.steps_per_job=1") for name, more in words.items()]
        for run in runs:
            printed, errors = run.communicate(timeout=LONG)
            assert run.returncode == 0, errors
            self.printed.append(printed)
        little.release()
        little.wait_for_the_end()
        return self
