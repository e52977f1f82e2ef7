"""Studies that are killed at random moments, and then run to their end: nothing is lost, done twice or left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from cluster import Cluster, why_not
from studies import ran, results

from moe_lab.results import read_record
from moe_lab.study.store import damage

from .programs import adopt_orphans

PATIENCE = 300
"""Seconds after which a command hangs; on a quiet machine the longest takes twenty."""
GRACE = 30
"""Seconds in which the workers of a parent that was killed must end; on a quiet machine they take a tenth."""
SERIES = 6
"""Kills of one study before it is run to its end, at most."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
VICTIMS = ("parent", "worker", "group")
QUICK = [
    "criterion=random,magnitude,man",
    "ratio=0.1,0.2,0.3,0.4",
    "suite.benchmarks=[pocket_boolq]",
    "report=false",
]
FEW = ["criterion=random", "ratio=0.25,0.5", "suite.benchmarks=[]", "report=false"]
MODEL = [
    "criterion=man,random",
    "ratio=0.25,0.5",
    "suite.benchmarks=[pocket_boolq]",
    "suite.limit=8",
    "calibration.tokens=2048",
    "report=false",
]


@dataclass(frozen=True)
class Scene:
    """A command that is killed. `instant`: its steps take no time. `at_once`: how many such commands are started at
    the same time."""

    words: Sequence[str]
    instant: bool = False
    at_once: int = 1


SCENES = {
    "quick": Scene([*QUICK, "launcher.processes=2"], instant=True),
    "two": Scene([*QUICK, "launcher.processes=2"], instant=True, at_once=2),
    "model": Scene([*MODEL, "launcher.processes=2"]),
    "inline": Scene([*MODEL, "launcher=inline"]),
    "slurm": Scene([*FEW, "launcher=slurm", "wait=true", "resources.every.memory=1"], instant=True),
}
"""Scenario -> what is killed. Steps that are not instant are real ones on the shipped model."""
SHARES = {"quick": 0.4, "two": 0.2, "model": 0.15, "inline": 0.1, "slurm": 0.15}
"""Scenario -> its share of the kills."""


@dataclass
class Killed:
    """What came of the kills."""

    kills: Counter[str] = field(default_factory=Counter)
    """Scenario, victim and signal -> how many processes, or groups, were sent it while they ran."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """What is not as it must be: one of KINDS, and a sentence."""
    studies: int = 0
    """Studies that were run to their end."""


KINDS = ("lost", "other result", "computed twice", "left behind", "orphan", "hang", "trace", "exit code")


def killed(kills: int, seed: int, scenarios: Mapping[str, float] = SHARES) -> Killed:
    """Kill so often, split over `scenarios` by their shares. Without Slurm, `quick` has its share."""
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands, and theirs, ignore it
    draw, found = random.Random(seed), Killed()
    shares = dict(scenarios)
    if why_not() is not None:
        shares["quick"] = shares.get("quick", 0) + shares.pop("slurm", 0)
    with tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munge refuses a socket in a folder that others cannot enter
        for scenario, share in shares.items():
            count = max(1, round(share / sum(shares.values()) * kills))
            with _cluster(folder) if scenario == "slurm" else nullcontext() as cluster:
                _kill_often(Scenario(scenario, folder / scenario, cluster), count, draw, found)
    return found


@contextmanager
def _cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder / "cluster")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@dataclass
class Scenario:
    """One command, or several equal ones at the same time, as they are run in folders of their own."""

    name: str
    folder: Path
    cluster: Cluster | None = None

    @property
    def scene(self) -> Scene:
        return SCENES[self.name]

    def environment(self, place: Path) -> dict[str, str]:
        """Temporary files go where they are counted; steps that take no time are told where to note what they do."""
        base = dict(self.cluster.environment if self.cluster else os.environ)
        base |= {"TMPDIR": str(place / "temporary"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if self.scene.instant:
            work = str(Path(__file__).parents[1] / "slurm" / "instant_work")
            base["PYTHONPATH"] = os.pathsep.join(filter(None, [work, os.environ.get("PYTHONPATH", "")]))
            base |= {"INSTANT_WORK": str(place / "instant"), "INSTANT_PAUSE": "0.05"}
        return base

    def place(self, name: str) -> Path:
        """A new folder for one study."""
        place = self.folder / name
        for folder in ("temporary", "instant"):
            (place / folder).mkdir(parents=True)
        return place

    def start(self, place: Path) -> list[subprocess.Popen[str]]:
        """Type the commands."""
        with (place / "printed").open("a") as printed:
            return [
                subprocess.Popen(
                    [sys.executable, "-m", "moe_lab", *self.scene.words, f"store={place / 'store'}"],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    text=True,
                    cwd=place,
                    env=self.environment(place),
                    start_new_session=True,
                )
                for _ in range(self.scene.at_once)
            ]

    def settle(self, place: Path) -> None:
        """Wait until no job is in the queue."""
        if self.cluster is not None:
            deadline = time.monotonic() + PATIENCE
            while self.cluster.ask("squeue", "-h").strip() and time.monotonic() < deadline:
                time.sleep(0.2)

    def begun(self, place: Path) -> Counter[str]:
        """Steps that were given to a process, and how often."""
        notes = place / "instant" / "begun"
        if notes.exists():
            return Counter(line.split()[0] for line in notes.read_text().splitlines())
        return ran(place / "store")

    def running(self, place: Path) -> list[psutil.Process]:
        """Python processes that were started for a study, the command and its jobs included."""
        found, mark = [], str(place / "temporary")
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == mark:
                    found.append(process)
        return found


def _kill_often(scenario: Scenario, count: int, draw: random.Random, found: Killed) -> None:
    """Studies that are killed up to SERIES times each, until there were so many kills."""
    reference = scenario.place("undisturbed")
    start = time.monotonic()
    codes = [run.wait(2 * PATIENCE) for run in scenario.start(reference)]
    if any(codes):
        raise RuntimeError(f"{scenario.name}: undisturbed it ends with {codes}: {_printed(reference)}")
    scenario.settle(reference)
    usual = time.monotonic() - start
    Series(scenario, reference, draw, found).check_once(Counter())
    expected, record = results(reference / "store"), _record(reference / "store")
    while sum(number for name, number in found.kills.items() if name.startswith(f"{scenario.name} ")) < count:
        series = Series(scenario, scenario.place(f"study{found.studies}"), draw, found)
        done = sum(number for name, number in found.kills.items() if name.startswith(f"{scenario.name} "))
        for _ in range(min(SERIES, count - done)):
            if series.kill(usual):
                break
        series.end(expected, record)
        found.studies += 1


@dataclass
class Series:
    """One study that is killed again and again."""

    scenario: Scenario
    place: Path
    draw: random.Random
    found: Killed
    history: list[str] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    """Steps that were finished at some time: folder -> its inode."""

    def problem(self, kind: str, sentence: str) -> None:
        told = f"{self.scenario.name} [{'; '.join(self.history)}]: {sentence}"
        self.found.problems.append((kind, told))
        print(f"{kind}: {told}", flush=True)

    def kill(self, usual: float) -> bool:
        """Start the command and kill something of it within its usual time; whether it ended before that.

        Of several commands one is killed.
        """
        begun, before = self.scenario.begun(self.place), set(self.published)
        runs = self.scenario.start(self.place)
        run = self.draw.choice(runs)
        victim, number = self.draw.choice(VICTIMS), self.draw.choice(SIGNALS)
        moment = self.draw.uniform(0, usual)
        try:
            run.wait(moment)
        except subprocess.TimeoutExpired:
            self._send(run, victim, number, moment, {each.pid for each in runs})
        codes = [self._wait(each, stopped=each is run and victim != "worker") for each in runs]
        self._check_orphans(victim)
        self._check_finished(begun, before)
        return not any(codes)

    def _send(
        self, run: subprocess.Popen[str], victim: str, number: signal.Signals, moment: float, commands: Set[int]
    ) -> None:
        workers = [process for process in self.scenario.running(self.place) if process.pid not in commands]
        if victim == "worker" and not workers:
            victim = "parent"
        with suppress(ProcessLookupError, psutil.Error):
            if victim == "worker":
                self.draw.choice(workers).send_signal(number)
            elif victim == "group" and self.scenario.cluster is not None and workers:
                os.killpg(os.getpgid(self.draw.choice(workers).pid), number)
            else:
                (os.killpg if victim == "group" else os.kill)(run.pid, number)
            self.found.kills[f"{self.scenario.name} {victim} {number.name}"] += 1
            self.history.append(f"{victim} {number.name} after {moment:.2f} s")

    def _wait(self, run: subprocess.Popen[str], *, stopped: bool) -> int:
        """Its exit code. One that was stopped must end soon; one whose worker was, goes on with the others."""
        try:
            return run.wait(GRACE + PATIENCE * (not stopped or self.scenario.cluster is not None))
        except subprocess.TimeoutExpired:
            self.problem("hang", f"it goes on: {_printed(self.place)}")
            os.killpg(run.pid, signal.SIGKILL)
            return run.wait()

    def _check_orphans(self, victim: str) -> None:
        """Nothing that the command started is left; jobs of a cluster may go on, which is what they are for."""
        deadline = time.monotonic() + GRACE
        while self.scenario.cluster is None and (left := self.scenario.running(self.place)):
            if time.monotonic() > deadline:
                self.problem("orphan", f"{victim}: {[' '.join(process.cmdline()) for process in left]}")
                for process in left:
                    process.kill()
                break
            time.sleep(0.05)
        _reap()

    def _check_finished(self, begun: Counter[str], before: set[str]) -> None:
        """What was finished before the run was neither given to a process again nor replaced, and is still there."""
        store = self.place / "store"
        again = {step for step in before if self.scenario.begun(self.place)[step] > begun[step]}
        folders = [file.parent for file in store.glob("[!.]*/[!.]*/step.json")]
        now = {str(folder.relative_to(store)): folder.stat().st_ino for folder in folders}
        again |= {step for step, inode in self.published.items() if now.get(step, inode) != inode}
        if again:
            self.problem("computed twice", ", ".join(sorted(again)))
        if lost := set(self.published) - set(now):
            self.problem("lost", ", ".join(sorted(lost)))
        self.published |= now

    def check_once(self, begun: Counter[str]) -> None:
        """Since steps were `begun` so often, each was given to a process once at most, as when nothing is killed."""
        since = self.scenario.begun(self.place) - begun
        if twice := [step for step, number in since.items() if number > 1]:
            self.problem("computed twice", ", ".join(sorted(twice)))

    def end(self, expected: dict[str, bytes], record: Any) -> None:
        """Run the command to its end and compare."""
        self.scenario.settle(self.place)
        begun, before = self.scenario.begun(self.place), set(self.published)
        codes = [self._wait(run, stopped=False) for run in self.scenario.start(self.place)]
        if any(codes):
            self.problem("exit code", f"in the end it is {codes}: {_printed(self.place)}")
        self.scenario.settle(self.place)
        self._check_orphans("end")
        self._check_finished(begun, before)
        self.check_once(begun)
        store = self.place / "store"
        found = results(store)
        if lost := set(expected) - set(found):
            self.problem("lost", ", ".join(sorted(lost)))
        if other := [name for name in found if found[name] != expected.get(name)]:
            self.problem("other result", ", ".join(other))
        folders = [file.parent for file in store.glob("*/*/step.json")]
        if damaged := {str(folder): what for folder in folders if (what := damage(folder, hash_all=True))}:
            self.problem("lost", f"damaged: {damaged}")
        if not lost and _record(store) != record:
            self.problem("other result", "the record of the study")
        self._check_folders(store)
        for trace in (self.place / "printed").read_text().split("Traceback (most recent call last)")[1:]:
            # One that is interrupted before it has come to our code is Python's own.
            if "\nKeyboardInterrupt" not in trace or "end_with" in trace:
                self.problem("trace", trace[:1500])

    def _check_folders(self, store: Path) -> None:
        """No temporary file or folder is left, nor what only unfinished or failed steps leave."""
        usual = {path.name for path in (self.scenario.folder / "undisturbed" / "temporary").iterdir()}  # torch's cache
        left = [path for path in store.rglob(".*") if not path.name.startswith((".made_from", ".submission_file_"))]
        left += [path for name in ("partial", "failed", "damaged", "claims") for path in (store / name).glob("*")]
        left += [path for path in (self.place / "temporary").iterdir() if path.name not in usual]
        if left:
            self.problem("left behind", ", ".join(str(path.relative_to(self.place)) for path in left))


def _record(store: Path) -> Any:
    """What the study says of its cells, but for when and where."""
    document = read_record(store, "study") or {}
    return {key: value for key, value in document.items() if key not in ("created", "config", "replaces", "run")}


def _printed(place: Path) -> str:
    return (place / "printed").read_text()[-1500:]


def _reap() -> None:
    """Wait for adopted processes that have ended."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE and not child.cmdline():
                os.waitpid(child.pid, os.WNOHANG)
