"""Studies that are killed at random moments, and then run to their end: no result may be lost or
computed twice, and no file or process left behind."""

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

from moe_lab.result_files import read_record
from moe_lab.study.store import Store

from .programs import adopt_orphans

COMMAND_SECONDS = 300
"""Seconds after which a command counts as hanging; on an idle machine, the longest takes twenty."""
WORKER_END_SECONDS = 30
"""Seconds in which the workers of a killed parent must end; on an idle machine they take a tenth of
them."""
MOST_KILLS_OF_STUDY = 6
"""Largest number of kills of one study before it is run to its end."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
VICTIMS = ("parent", "worker", "group")
FAULTS = ("EDQUOT", "EROFS")
"""Errors of a disk. As a victim, an error makes writing fail until the command has ended. The
victim `copy` stands for a copy of the store, in which the study is finished while the original
pauses."""
PACKED_INODE = 0
QUICK = [
    "criterion=random,magnitude,man",
    "ratio=0.1,0.2,0.3,0.4",
    "suite.benchmarks=[pocket_boolq]",
]
FEW = ["criterion=random", "ratio=0.25,0.5", "suite.benchmarks=[]"]
MODEL = ["criterion=man,random", "ratio=0.25,0.5", "suite.benchmarks=[pocket_boolq]"]


@dataclass(frozen=True)
class Scene:
    """A command that is killed, and its share of the kills.

    - instant: whether its steps take no time; otherwise they are real steps of the shipped model
    - n_commands: number of equal commands that are started at the same time. The clock of each
      further command is another hour fast, and the times of its files are slow by the same time
    - locks: body of the lock functions, see `processes.lock_environment`; "" for real locks
    """

    share: float
    settings: Sequence[str]
    instant: bool = False
    n_commands: int = 1
    locks: str = ""
    victims: Sequence[str] = VICTIMS


SCENES = {
    "quick": Scene(0.24, [*QUICK, "launcher.processes=2"], instant=True),
    "own_locks": Scene(
        0.1, [*QUICK, "launcher.processes=2"], instant=True, n_commands=2, locks=LOCAL_LOCKS
    ),
    "no_locks": Scene(
        0.1, [*QUICK, "launcher.processes=2"], instant=True, n_commands=2, locks=NO_LOCKS
    ),
    "model": Scene(0.08, [*MODEL, "launcher.processes=2"]),
    "inline": Scene(0.04, [*MODEL, "launcher=inline"]),
    "slurm": Scene(0.2, [*FEW, "launcher=slurm", "wait=true"], instant=True),
    "faults": Scene(0.12, [*FEW, "launcher.processes=1"], instant=True, victims=FAULTS),
    "copies": Scene(0.12, [*FEW, "launcher.processes=1"], instant=True, victims=["copy"]),
}


@dataclass
class KillReport:
    """Numbers of kills, and problems that they caused."""

    kills: Counter[str] = field(default_factory=Counter)
    """Scenario, victim and signal -> number of running processes, or groups, that were sent the
    signal."""
    problems: list[str] = field(default_factory=list)
    """Sentences on violated expectations."""

    def kills_of(self, scenario: str) -> int:
        """Number of kills of a scenario."""
        return sum(count for name, count in self.kills.items() if name.startswith(f"{scenario} "))


def run_kills(kills: int, seed: int) -> KillReport:
    """Kill studies `kills` times, each in one of SCENES, which are drawn by their shares. Without
    Slurm, `quick` gets its share."""
    adopt_orphans()
    # background commands of a shell, and their children, ignore SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(seed)
    report = KillReport()
    shares = {name: scene.share for name, scene in SCENES.items()}
    if missing_requirement() is not None:
        shares["quick"] += shares.pop("slurm")
    with tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name:
        folder = Path(name)
        drawn = draw.choices(list(shares), list(shares.values()), k=kills)
        for scenario, count in Counter(drawn).items():
            with (
                running_cluster(folder / "cluster")
                if scenario == "slurm"
                else nullcontext() as cluster
            ):
                _kill_studies(scenario, folder / scenario, cluster, count, draw, report)
    return report


def _kill_studies(
    scenario: str,
    folder: Path,
    cluster: Cluster | None,
    count: int,
    draw: random.Random,
    report: KillReport,
) -> None:
    """Kill studies up to MOST_KILLS_OF_STUDY times each, until there are `count` kills."""
    reference = Study(scenario, folder / "undisturbed", cluster, draw, report)
    start = time.monotonic()
    codes = [run.wait(2 * COMMAND_SECONDS) for run in reference.start()]
    if any(codes):
        raise RuntimeError(f"{scenario}: undisturbed it ends with {codes}: {reference.printed()}")
    reference.settle()
    usual_seconds = time.monotonic() - start
    reference.check_once(Counter())
    number = 0
    while (remaining := count - report.kills_of(scenario)) > 0:
        study = Study(scenario, folder / f"study{number}", cluster, draw, report)
        number += 1
        for _ in range(min(MOST_KILLS_OF_STUDY, remaining)):
            if study.kill(usual_seconds, reference):
                break
        study.end(reference)


@dataclass
class Study:
    """One command, or several equal ones at the same time, which are killed repeatedly in a
    folder."""

    scenario: str
    root: Path
    cluster: Cluster | None
    draw: random.Random
    report: KillReport
    history: list[str] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    """Folder of each step that was finished at some time -> its inode, or PACKED_INODE."""

    def __post_init__(self) -> None:
        for folder in ("temporary", "instant"):
            (self.root / folder).mkdir(parents=True)
        self.store = self.root / "store"

    def start(self) -> list[subprocess.Popen[str]]:
        """Start the commands, with folders for temporary files and for the records of instant
        steps."""
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
                for number in range(scene.n_commands)
            ]

    def settle(self) -> None:
        """Wait until no job is in the queue."""
        deadline = time.monotonic() + COMMAND_SECONDS
        while (
            self.cluster
            and self.cluster.command_output("squeue", "-h").strip()
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)

    def printed(self) -> str:
        """The end of the output."""
        return (self.root / "printed").read_text()[-1500:]

    def start_counts(self) -> Counter[str]:
        """Step -> number of times that it was given to a process."""
        notes = self.root / "instant" / "begun"
        if notes.exists():
            return Counter(line.split()[0] for line in notes.read_text().splitlines())
        return executed_steps(self.store)

    def processes(self) -> list[psutil.Process]:
        """Python processes of the study, including the command and its jobs."""
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

    def kill(self, usual_seconds: float, reference: "Study") -> bool:
        """Start the commands and kill a victim of one of them within `usual_seconds`. Returns
        whether all commands ended successfully."""
        starts_before = self.start_counts()
        finished_before = set(self.published)
        runs = self.start()
        run = self.draw.choice(runs)
        victim = self.draw.choice(SCENES[self.scenario].victims)
        number = self.draw.choice(SIGNALS)
        moment = self.draw.uniform(0, usual_seconds)
        steps = self.draw.randrange(4)
        if victim not in VICTIMS:
            moment = 0
            wait_until(
                lambda: (
                    run.poll() is not None or (self.start_counts() - starts_before).total() > steps
                )
            )
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
        self.check_finished(starts_before, finished_before)
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
        """Wait for the exit code of a command. A killed command must end soon; a command with a
        killed worker continues with other workers."""
        try:
            return run.wait(
                WORKER_END_SECONDS + COMMAND_SECONDS * (not stopped or self.cluster is not None)
            )
        except subprocess.TimeoutExpired:
            self.problem("hang", f"it goes on: {self.printed()}")
            os.killpg(run.pid, signal.SIGKILL)
            return run.wait()

    def check_orphans(self, victim: str) -> None:
        """Check that no process of the command is left. Jobs of a cluster may continue after it."""
        deadline = time.monotonic() + WORKER_END_SECONDS
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

    def check_finished(self, starts_before: Counter[str], finished_before: set[str]) -> None:
        """Check that steps that were finished before the run were not given to a process again,
        were not replaced, and still exist."""
        repeated = {
            step for step in finished_before if self.start_counts()[step] > starts_before[step]
        }
        folders = [file.parent for file in self.store.glob("[!.]*/[!.]*/step.json")]
        inodes = {str(folder.relative_to(self.store)): folder.stat().st_ino for folder in folders}
        packs = Store(self.store).packs
        packs.refresh()
        inodes = dict.fromkeys(packs.steps().values(), PACKED_INODE) | inodes
        repeated |= {
            step
            for step, inode in self.published.items()
            if inodes.get(step) not in (None, PACKED_INODE, inode)
        }
        if repeated:
            self.problem("computed twice", ", ".join(sorted(repeated)))
        if lost := set(self.published) - set(inodes):
            self.problem("lost", ", ".join(sorted(lost)))
        self.published |= inodes

    def check_once(self, starts_before: Counter[str]) -> None:
        """Check that each step was given to a process at most once since the counts
        `starts_before`."""
        if repeated := [
            step for step, number in (self.start_counts() - starts_before).items() if number > 1
        ]:
            self.problem("computed twice", ", ".join(sorted(repeated)))

    def end(self, reference: "Study") -> None:
        """Run the commands to their end, and compare the store with that of an undisturbed
        study."""
        self.settle()
        starts_before = self.start_counts()
        finished_before = set(self.published)
        codes = [self.wait(run, stopped=False) for run in self.start()]
        if any(codes):
            self.problem("exit code", f"in the end it is {codes}: {self.printed()}")
        self.settle()
        self.check_orphans("end")
        self.check_finished(starts_before, finished_before)
        self.check_once(starts_before)
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

    def check_folders(self, usual_names: Set[str]) -> None:
        """Check that no temporary files but `usual_names` are left, and no files of unfinished or
        failed steps, or of packing."""
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
        files += [
            path for path in (self.root / "temporary").iterdir() if path.name not in usual_names
        ]
        if files:
            self.problem(
                "left behind", ", ".join(str(path.relative_to(self.root)) for path in files)
            )


def _record(store: Path) -> Any:
    """The record of the study, without its times and places."""
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
