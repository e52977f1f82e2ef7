"""Studies whose steps take no time, on a real cluster: see instant_work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from cluster import LONG, Cluster, until
from studies import jobs

WORDS = ["criterion=random", "suite.benchmarks=[]", "report=false", "resources.every.memory=1"]


def instant_environment(folder: Path) -> dict[str, str]:
    """What makes steps take no time, and note what they do in a folder."""
    path = [str(Path(__file__).parent / "instant_work"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "INSTANT_WORK": str(folder)}


class InstantStudies:
    """A store with studies in it, and the folder that steers and counts their steps."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.store, self.folder = folder / "store", folder / "instant"
        self.folder.mkdir(parents=True)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Type a command that submits jobs."""
        return self.type(*WORDS, "launcher=slurm", *words)

    def type(self, *words: str) -> subprocess.Popen[str]:
        """Type any command, on the store of these studies unless it names one."""
        store = [] if any(word.startswith("store=") for word in words) else [f"store={self.store}"]
        return subprocess.Popen(
            [sys.executable, "-m", "moe_lab", *words, *store],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder.parent,
            env={**os.environ, **instant_environment(self.folder)},
        )

    def submit(self, *words: str) -> dict[str, str]:
        """The same, to its end; kind -> id of the array."""
        printed, errors = (run := self.start(*words)).communicate(timeout=LONG)
        assert run.returncode == 0, errors
        return jobs(printed)

    def hold(self, *kinds: str) -> None:
        """Stop steps of some kinds in their last part."""
        for kind in kinds:
            (self.folder / f"hold-{kind}").touch()

    def release(self) -> None:
        """Let all steps go on."""
        for file in self.folder.glob("hold-*"):
            file.unlink()

    def lines(self, name: str) -> list[list[str]]:
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def begun(self, kind: str) -> list[int]:
        """The processes that were given steps of a kind, the last one last."""
        return [int(process) for step, process in self.lines("begun") if step.startswith(f"{kind}/")]

    def wait_for(self, kind: str, times: int = 1) -> int:
        """Wait until steps of a kind were begun so many times; the last process that did."""
        until(lambda: len(self.begun(kind)) >= times, LONG, f"{kind} was begun {len(self.begun(kind))} times")
        return self.begun(kind)[-1]

    def done_once(self) -> Counter[str]:
        """Kind -> steps, all of whose parts were done once, by any number of jobs."""
        parts = Counter((step, part) for step, part in self.lines("parts"))
        assert set(parts.values()) == {1}, parts
        steps = [step for step, part in parts]
        assert set(Counter(steps).values()) == {2}
        assert {str(path.parent.relative_to(self.store)) for path in self.store.glob("*/*/instant.txt")} == set(steps)
        return Counter(step.partition("/")[0] for step in set(steps))

    def wait_for_the_end(self) -> None:
        """Until no job of these studies is in the queue."""
        self.cluster.wait_for_the_end(self.store)

    def end(self) -> None:
        """Take away what the queue still has of these studies, whatever became of a test."""
        self.release()
        self.cluster.ask("scancel", *self.cluster.arrays(self.store))
        self.wait_for_the_end()
