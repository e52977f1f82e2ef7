"""Studies that are killed at random moments, and then run to their end: nothing is lost, done twice
or left behind."""

import errno
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from cluster import Cluster, instant_environment, missing_requirement, running_cluster
from processes import LOCAL_LOCKS, NO_LOCKS, lock_environment, wait_until
from studies import command, executed_steps, results

from moe_lab.results import read_record
from moe_lab.study.store import Store

from .programs import adopt_orphans

PATIENCE = 300
"""Seconds after which a command hangs; on a quiet machine the longest takes twenty."""
GRACE = 30
"""Seconds in which the workers of a parent that was killed must end; on a quiet machine they take a
tenth."""
SERIES = 6
"""Kills of one study before it is run to its end, at most."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
VICTIMS = ("parent", "worker", "group")
FAULTS = ("EDQUOT", "EROFS")
"""Errors of a disk, which victims may be as well: writing fails until the command has ended. And a
copy: the store is copied and the study is finished there while the original has paused."""
PACKED = 0
QUICK = [
    "criterion=random,magnitude,man",
    "ratio=0.1,0.2,0.3,0.4",
    "suite.benchmarks=[pocket_boolq]",
]
FEW = ["criterion=random", "ratio=0.25,0.5", "suite.benchmarks=[]"]
MODEL = ["criterion=man,random", "ratio=0.25,0.5", "suite.benchmarks=[pocket_boolq]"]


@dataclass(frozen=True)
class Scene:
    """A command that is killed, and its share of the kills. `instant`: its steps take no time;
    those of others are real ones on the shipped model. `at_once`: how many such commands are
    started at the same time; the clock of the last of several is an hour fast, and that of the
    times that it gives files an hour slow. `locks`: what locks of files do."""

    share: float
    settings: Sequence[str]
    instant: bool = False
    at_once: int = 1
    locks: str = ""
    victims: Sequence[str] = VICTIMS


SCENES = {
    "quick": Scene(0.24, [*QUICK, "launcher.processes=2"], instant=True),
    "own_locks": Scene(
        0.1, [*QUICK, "launcher.processes=2"], instant=True, at_once=2, locks=LOCAL_LOCKS
    ),
    "no_locks": Scene(
        0.1, [*QUICK, "launcher.processes=2"], instant=True, at_once=2, locks=NO_LOCKS
    ),
    "model": Scene(0.08, [*MODEL, "launcher.processes=2"]),
    "inline": Scene(0.04, [*MODEL, "launcher=inline"]),
    "slurm": Scene(0.2, [*FEW, "launcher=slurm", "wait=true"], instant=True),
    "faults": Scene(0.12, [*FEW, "launcher.processes=1"], instant=True, victims=FAULTS),
    "copies": Scene(0.12, [*FEW, "launcher.processes=1"], instant=True, victims=["copy"]),
}


@dataclass
class Killed:
    """What came of the kills."""

    kills: Counter[str] = field(default_factory=Counter)
    """Scenario, victim and signal -> how many processes, or groups, were sent it while they ran."""
    problems: list[str] = field(default_factory=list)
    """What is not as it must be."""

    def of(self, scenario: str) -> int:
        """How many kills of a scenario there were."""
        return sum(count for name, count in self.kills.items() if name.startswith(f"{scenario} "))


def killed(kills: int, seed: int) -> Killed:
    """Kill so often, split over SCENES by their shares. Without Slurm, `quick` has its share."""
    adopt_orphans()
    # a shell's background commands, and theirs, ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(seed)
    report = Killed()
    shares = {name: scene.share for name, scene in SCENES.items()}
    if missing_requirement() is not None:
        shares["quick"] += shares.pop("slurm")
    with tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name:
        folder = Path(name)
        for scenario, share in shares.items():
            if count := round(share * kills):
                with (
                    running_cluster(folder / "cluster")
                    if scenario == "slurm"
                    else nullcontext() as cluster
                ):
                    _kill_often(scenario, folder / scenario, cluster, count, draw, report)
    return report


def _kill_often(
    scenario: str,
    folder: Path,
    cluster: Cluster | None,
    count: int,
    draw: random.Random,
    report: Killed,
) -> None:
    """Studies that are killed up to SERIES times each, until there were so many kills."""
    reference = Study(scenario, folder / "undisturbed", cluster, draw, report)
    start = time.monotonic()
    codes = [run.wait(2 * PATIENCE) for run in reference.start()]
    if any(codes):
        raise RuntimeError(f"{scenario}: undisturbed it ends with {codes}: {reference.printed()}")
    reference.settle()
    usual = time.monotonic() - start
    reference.check_once(Counter())
    number = 0
    while (remaining := count - report.of(scenario)) > 0:
        study = Study(scenario, folder / f"study{number}", cluster, draw, report)
        number += 1
        for _ in range(min(SERIES, remaining)):
            if study.kill(usual, reference):
                break
        study.end(reference)


@dataclass
class Study:
    """One command, or several equal ones at the same time, which are killed again and again in a
    folder."""

    scenario: str
    root: Path
    cluster: Cluster | None
    draw: random.Random
    report: Killed
    history: list[str] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    """Steps that were finished at some time: folder -> its inode, or PACKED."""

    def __post_init__(self) -> None:
        for folder in ("temporary", "instant"):
            (self.root / folder).mkdir(parents=True)
        self.store = self.root / "store"

    def start(self) -> list[subprocess.Popen[str]]:
        """Type the commands. Temporary files go where they are counted; instant steps note there
        what they do."""
        scene = SCENES[self.scenario]
        environment = dict(self.cluster.environment if self.cluster else os.environ)
        environment |= {
            "TMPDIR": str(self.root / "temporary"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= {
            **lock_environment(scene.locks, self.root),
            "INSTANT_STORE": str(self.store),
        }
        if scene.instant:
            environment |= {
                **instant_environment(self.root / "instant"),
                "INSTANT_PAUSE": "0.05",
                "INSTANT_MANY": "9",
            }
        with (self.root / "printed").open("a") as printed:
            return [
                subprocess.Popen(
                    command(self.store, *scene.settings),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    text=True,
                    cwd=self.root,
                    env={**environment, "INSTANT_CLOCK": str(3600 * number)},
                    start_new_session=True,
                )
                for number in range(scene.at_once)
            ]

    def settle(self) -> None:
        """Wait until no job is in the queue."""
        deadline = time.monotonic() + PATIENCE
        while (
            self.cluster
            and self.cluster.command_output("squeue", "-h").strip()
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)

    def printed(self) -> str:
        """The end of what was printed."""
        return (self.root / "printed").read_text()[-1500:]

    def begun(self) -> Counter[str]:
        """Steps that were given to a process, and how often."""
        notes = self.root / "instant" / "begun"
        if notes.exists():
            return Counter(line.split()[0] for line in notes.read_text().splitlines())
        return executed_steps(self.store)

    def processes(self) -> list[psutil.Process]:
        """Python processes that were started for it, the command and its jobs included."""
        processes = []
        mark = str(self.root / "temporary")
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get("TMPDIR") == mark
                ):
                    processes.append(process)
        return processes

    def problem(self, kind: str, sentence: str) -> None:
        self.report.problems.append(
            f"{kind}: {self.scenario} [{'; '.join(self.history)}]: {sentence}"
        )

    def kill(self, usual: float, reference: "Study") -> bool:
        """Start the command and kill something of it within its usual time; whether it ended before
        that.

        Of several commands one is killed.
        """
        begun = self.begun()
        finished = set(self.published)
        runs = self.start()
        run = self.draw.choice(runs)
        victim = self.draw.choice(SCENES[self.scenario].victims)
        number = self.draw.choice(SIGNALS)
        moment = self.draw.uniform(0, usual)
        steps = self.draw.randrange(4)
        if victim not in VICTIMS:
            moment = 0
            wait_until(lambda: run.poll() is not None or (self.begun() - begun).total() > steps)
        try:
            run.wait(moment)
        except subprocess.TimeoutExpired:
            self.send(run, victim, number, {process.pid for process in runs}, reference)
            self.history.append(f"{victim} {number.name} after {moment:.2f} s")
        codes = [
            self.wait(process, stopped=process is run and victim in ("parent", "group"))
            for process in runs
        ]
        (self.root / "instant" / "fault").unlink(missing_ok=True)
        self.check_orphans(victim)
        self.check_finished(begun, finished)
        return not any(codes)

    def send(
        self,
        run: subprocess.Popen[str],
        victim: str,
        number: signal.Signals,
        commands: Set[int],
        reference: "Study",
    ) -> None:
        workers = [process for process in self.processes() if process.pid not in commands]
        if victim == "worker" and not workers:
            victim = "parent"
        with suppress(ProcessLookupError, psutil.Error):
            if victim in FAULTS:
                (self.root / "instant" / "fault").write_text(str(getattr(errno, victim)))
            elif victim == "copy":
                copy = Study(
                    self.scenario,
                    self.root / f"copy{self.report.kills.total()}",
                    None,
                    self.draw,
                    self.report,
                )
                copies = (
                    ["rsync", "-a", f"{self.store}/"]
                    if shutil.which("rsync")
                    else ["cp", "-a", self.store]
                )
                subprocess.run([*copies, copy.store])  # it misses what is removed meanwhile
                os.killpg(run.pid, signal.SIGSTOP)
                copy.end(reference)
                os.killpg(run.pid, signal.SIGCONT)
            elif victim == "worker":
                self.draw.choice(workers).send_signal(number)
            elif victim == "group" and self.cluster is not None and workers:
                os.killpg(os.getpgid(self.draw.choice(workers).pid), number)
            else:
                (os.killpg if victim == "group" else os.kill)(run.pid, number)
            self.report.kills[f"{self.scenario} {victim} {number.name}"] += 1

    def wait(self, run: subprocess.Popen[str], *, stopped: bool) -> int:
        """Its exit code. One that was stopped must end soon; one whose worker was, goes on with the
        others."""
        try:
            return run.wait(GRACE + PATIENCE * (not stopped or self.cluster is not None))
        except subprocess.TimeoutExpired:
            self.problem("hang", f"it goes on: {self.printed()}")
            os.killpg(run.pid, signal.SIGKILL)
            return run.wait()

    def check_orphans(self, victim: str) -> None:
        """Nothing that the command started is left; jobs of a cluster may go on, which is what they
        are for."""
        deadline = time.monotonic() + GRACE
        while self.cluster is None and (orphans := self.processes()):
            if time.monotonic() > deadline:
                self.problem(
                    "orphan", f"{victim}: {[' '.join(process.cmdline()) for process in orphans]}"
                )
                for process in orphans:
                    process.kill()
                break
            time.sleep(0.05)
        _reap()

    def check_finished(self, begun: Counter[str], finished: set[str]) -> None:
        """What was finished before the run was neither given to a process again nor replaced, and
        is still there."""
        repeated = {step for step in finished if self.begun()[step] > begun[step]}
        folders = [file.parent for file in self.store.glob("[!.]*/[!.]*/step.json")]
        now = {str(folder.relative_to(self.store)): folder.stat().st_ino for folder in folders}
        packs = Store(self.store).packs
        packs.refresh()
        now = dict.fromkeys(packs.steps().values(), PACKED) | now
        repeated |= {
            step
            for step, inode in self.published.items()
            if now.get(step) not in (None, PACKED, inode)
        }
        if repeated:
            self.problem("computed twice", ", ".join(sorted(repeated)))
        if lost := set(self.published) - set(now):
            self.problem("lost", ", ".join(sorted(lost)))
        self.published |= now

    def check_once(self, begun: Counter[str]) -> None:
        """Since steps were `begun` so often, each was given to a process once at most, as when
        nothing is killed."""
        if twice := [step for step, number in (self.begun() - begun).items() if number > 1]:
            self.problem("computed twice", ", ".join(sorted(twice)))

    def end(self, reference: "Study") -> None:
        """Run the command to its end and compare with a study that nobody killed."""
        self.settle()
        begun = self.begun()
        finished = set(self.published)
        codes = [self.wait(run, stopped=False) for run in self.start()]
        if any(codes):
            self.problem("exit code", f"in the end it is {codes}: {self.printed()}")
        self.settle()
        self.check_orphans("end")
        self.check_finished(begun, finished)
        self.check_once(begun)
        expected = results(reference.store)
        contents = results(self.store)
        if lost := set(expected) - set(contents):
            self.problem("lost", ", ".join(sorted(lost)))
        if differing := [name for name in contents if contents[name] != expected.get(name)]:
            self.problem("other result", ", ".join(differing))
        store = Store(self.store)
        if damaged := {
            step: what
            for step in self.published
            if (what := store.damaged_files(step, hash_all=True))
        }:
            self.problem("lost", f"damaged: {damaged}")
        if not lost and _record(self.store) != _record(reference.store):
            self.problem("other result", "the record of the study")
        # torch's cache
        self.check_folders({path.name for path in (reference.root / "temporary").iterdir()})
        for trace in (
            (self.root / "printed").read_text().split("Traceback (most recent call last)")[1:]
        ):
            # One that is interrupted before it has come to our code is Python's own.
            if "\nKeyboardInterrupt" not in trace or "run_and_exit" in trace:
                self.problem("trace", trace[:1500])

    def check_folders(self, usual: Set[str]) -> None:
        """No temporary file but the usual ones is left, nor what only unfinished or failed steps
        leave, or packing."""
        (packs := Store(self.store).packs).clear()
        files = [path for path in self.store.rglob(".*") if path.name[1:13] not in packs]
        files = [
            path for path in files if not path.name.startswith((".made_from", ".submission_file_"))
        ]
        files += [
            path
            for name in ("partial", "failed", "damaged", "claims")
            for path in (self.store / name).glob("*")
        ]
        files += [path for path in (self.root / "temporary").iterdir() if path.name not in usual]
        if files:
            self.problem(
                "left behind", ", ".join(str(path.relative_to(self.root)) for path in files)
            )


def _record(store: Path) -> Any:
    """What the study says of its cells, but for when and where."""
    document = read_record(store, "study") or {}
    return {
        key: value
        for key, value in document.items()
        if key not in ("created", "config", "replaces", "run")
    }


def _reap() -> None:
    """Wait for adopted processes that have ended."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE and not child.cmdline():
                os.waitpid(child.pid, os.WNOHANG)
