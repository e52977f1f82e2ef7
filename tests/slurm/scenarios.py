"""What happens to studies on the cluster while others run: each is played to its end and leaves what came of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
from cluster import LONG, Cluster, until
from instant_studies import InstantStudies
from studies import asked, command, jobs, moe_lab

from moe_lab.statistics import header
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
"""A calibration pass of 32 batches that saves its sums after every eighth."""
SAVING = """
import os, pathlib, shutil, time
replace, folder = pathlib.Path.replace, pathlib.Path(__file__).parent
def replace_and_note(self, target):
    done = replace(self, target)
    if str(target).endswith("checkpoint.safetensors"):
        number = 1
        while (folder / f"{number}").exists():
            number += 1
        shutil.copy(target, folder / "copy")
        os.rename(folder / "copy", folder / f"{number}")
        while (folder / "hold").exists():
            time.sleep(0.02)
    return done
pathlib.Path.replace = replace_and_note
"""
"""With this as its sitecustomize, Python keeps a numbered copy of all sums that are saved, and stops after saving while
there is a file `hold`."""
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


def play_interrupted(cluster: Cluster, store: Path) -> tuple[Path, list[int]]:
    """A store in which a calibration pass had to make room, and how many batches it had saved, each time it did."""
    folder = store.with_name(f"{store.name}-saved")
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SAVING)
    hold = folder / "hold"
    hold.touch()
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    words = [*PASS, *SLURM, f"launcher.python={preloaded.python()}"]
    done = moe_lab(store, *words, environment={**os.environ, "PYTHONPATH": path})
    job = jobs(done.stdout)["statistics"]
    until(lambda: (folder / "1").exists(), LONG, "nothing is saved")
    cluster.ask("scancel", "--signal=USR2", job)
    until(lambda: cluster.job(job)["Restarts"] == "1", LONG, "it is not requeued")
    hold.unlink()
    cluster.wait_for_the_end(store)
    files = sorted((file for file in folder.iterdir() if file.name.isdecimal()), key=lambda file: int(file.name))
    return store, [header(file)["done"] for file in files]


def a_checkout(folder: Path) -> Path:
    """A copy of the code in which files may be edited."""
    root = Path(__file__).parents[2]
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


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
    first: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    restarted: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    def play(self) -> Limited:
        """The first time it is the job's real limit, brought down while it runs.

        Slurm looks twice a minute, and a job that is past its limit when Slurm looks is killed without the signal: the
        new limit leaves one to two minutes, however long the job took to begin.
        """
        instant, cluster = self.instant, self.instant.cluster
        words = [TWO, "study=limited", "launcher.max_requeues=1", "launcher.signal_seconds=59"]
        words += ["+resources.jobs={cost: {minutes: 10}}"]
        instant.hold("cost")
        self.first = instant.submit(*words)
        job = self.first["cost"]
        instant.wait_for("cost")
        cluster.ask("scontrol", "update", f"jobid={job}", f"timelimit={cluster.minutes(job) + 2}")
        instant.wait_for("cost", 2)
        self.restarted = dict(cluster.job(job))
        cluster.ask("scancel", "--signal=USR2", job)
        until(lambda: cluster.job(job)["JobState"] == "FAILED", LONG, "it goes on")
        self.ended = dict(cluster.job(job))
        self.why = asked(instant.store, "why", "limited")
        instant.release()
        instant.wait_for_the_end()
        self.again = instant.submit(*words)
        instant.wait_for_the_end()
        return self


@dataclass
class Overlapping:
    """Two studies that share steps, in one of which a criterion's input cannot be had."""

    instant: InstantStudies
    printed: list[str] = field(default_factory=list)

    def play(self) -> Overlapping:
        """Both are submitted before any step is done."""
        instant = self.instant
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
            self.printed.append(printed)
        instant.release()
        instant.wait_for_the_end()
        return self
