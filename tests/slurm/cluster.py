"""A Slurm cluster of one node, made from Debian's packages, in its own folder; and studies on it
whose steps take no time, see instant_work.

Accounting is off, as on many clusters: there is no sacct. The cluster has its own ports, sockets
and keys, so that it does not interfere with another cluster on the machine. Credentials expire
soon, because a requeued job waits for their expiry. The two GPUs do not exist.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import preloaded
from processes import wait_until
from studies import jobs

JOB_SECONDS = 500
"""Seconds after which a test stops waiting for a job; on an idle machine, jobs take a fraction of
them."""
TWO_RATIOS = "ratio=0.25,0.5"
STEP_COUNTS = {"model": 1, "scores": 1, "plan": 2, "cost": 3}
"""Kind -> number of steps of a study with TWO_RATIOS and without evaluations. Costs are computed
for the unpruned model and for both plans."""
INSTANT_SETTINGS = [
    "criterion=random",
    "suite.benchmarks=[]",
    "report=false",
    "resources.every.memory=1",
]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
MaxArraySize=3
KillWait=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=64000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_requirement() -> str | None:
    """The reason why no cluster can be started here; None if one can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install munge slurm-wlm slurm-client"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    """The daemons of a cluster and their configuration. `start` and `stop` apply to all daemons,
    `launch` and `end` to one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname().split(".")[0]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        self.configuration = folder / "slurm.conf"
        # of commands for this cluster
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        with (
            socket.create_server(("127.0.0.1", 0)) as controller,
            socket.create_server(("127.0.0.1", 0)) as node,
        ):
            ports = {
                "controller_port": controller.getsockname()[1],
                "node_port": node.getsockname()[1],
            }
        self.configuration.write_text(CONFIGURATION.format(host=self.host, folder=folder, **ports))

    def start(self) -> None:
        """Start all daemons and wait until the node takes jobs."""
        folder = self.folder
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self.launch("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_until((folder / "munge.socket").exists, 10, "munged did not start")
        self.launch("slurmctld", "-D", "-i")
        self.launch("slurmd", "-D", "-N", self.host)
        wait_until(self.is_idle, 30, f"the node did not come up: {self.command_output('sinfo')}")

    def launch(self, program: str, *arguments: str) -> None:
        """Start one daemon."""
        with (self.folder / f"{program}.out").open("ab") as log:
            self.daemons[program] = subprocess.Popen(
                [program, *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
            )

    def end(self, program: str) -> None:
        """End one daemon."""
        with self.daemons.pop(program) as daemon:
            daemon.terminate()

    def stop(self) -> None:
        """Cancel what runs and end all daemons."""
        self.command_output("scancel", "--user=root")
        wait_until(lambda: not self.command_output("squeue", "-h"), 20, "jobs do not end")
        for program in reversed(list(self.daemons)):
            self.end(program)

    def command_output(self, *command: str) -> str:
        """The output of a command of Slurm, errors included."""
        result = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        return result.stdout + result.stderr

    def job_fields(self, job: str) -> Mapping[str, str]:
        """The fields of a job that scontrol prints, even after the job has ended."""
        entries = self.command_output("scontrol", "--oneliner", "show", "job", job).split()
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)

    def run_minutes(self, job: str) -> int:
        """Number of whole minutes that a job has run since it was started or restarted, less than a
        day ago."""
        hours, minutes, _ = map(int, self.job_fields(job)["RunTime"].split(":"))
        return hours * 60 + minutes

    def wait_for_the_end(self, store: Path) -> None:
        """Wait until the queue has no jobs of the studies in a store."""
        arrays = self.arrays(store)
        wait_until(
            lambda: (
                not arrays.intersection(self.command_output("squeue", "-h", "-o", "%F").split())
            ),
            JOB_SECONDS,
            "jobs do not end",
        )

    def arrays(self, store: Path) -> set[str]:
        """Ids of all arrays and jobs that were ever submitted for the studies in a store."""
        documents = [json.loads(run.read_text()) for run in store.glob("runs/*/*/jobs.json")]
        return {row["job"]["array"] for document in documents for row in document["jobs"]}

    def is_idle(self) -> bool:
        """Whether the node is up and no job runs on it."""
        return self.command_output("sinfo", "-h", "-o", "%T").strip() == "idle"


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster in a new folder and stop it at the end. Other users must be able to enter the
    parent folder, because munge refuses its socket otherwise."""
    folder.parent.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def instant_environment(folder: Path) -> dict[str, str]:
    """Environment in which steps take no time and record their parts in files of a folder."""
    path = [str(Path(__file__).parent / "instant_work"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "INSTANT_WORK": str(folder)}


class InstantStudies:
    """A store with studies, and the folder whose files control and count their steps."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.store, self.folder = folder / "store", folder / "instant"
        self.folder.mkdir(parents=True)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that submits jobs."""
        launcher = ["launcher=slurm", f"launcher.python={preloaded.python()}"]
        return self.start_command(*INSTANT_SETTINGS, *launcher, *arguments)

    def start_command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start any command, on the store of these studies unless the arguments name one."""
        names_store = any(argument.startswith("store=") for argument in arguments)
        store = [] if names_store else [f"store={self.store}"]
        return subprocess.Popen(
            [preloaded.python(), "-m", "moe_lab", *arguments, *store],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder.parent,
            env={**os.environ, **instant_environment(self.folder)},
        )

    def submit(self, *arguments: str) -> dict[str, str]:
        """Run a command that submits jobs to its end. Returns kind of jobs -> id of their array."""
        run = self.start(*arguments)
        output, errors = run.communicate(timeout=JOB_SECONDS)
        assert run.returncode == 0, errors
        return jobs(output)

    def hold(self, *kinds: str) -> None:
        """Stop steps of some kinds in their last part."""
        for kind in kinds:
            (self.folder / f"hold-{kind}").touch()

    def release(self) -> None:
        """Let all held steps continue."""
        for file in self.folder.glob("hold-*"):
            file.unlink()

    def lines(self, name: str) -> list[list[str]]:
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def processes_of(self, kind: str) -> list[int]:
        """Ids of the processes that started steps of a kind, in the order of the starts."""
        return [
            int(process) for step, process in self.lines("begun") if step.startswith(f"{kind}/")
        ]

    def wait_for(self, kind: str, times: int = 1) -> int:
        """Wait until steps of a kind were started `times` times. Returns the id of the process of
        the last start."""
        wait_until(
            lambda: len(self.processes_of(kind)) >= times,
            JOB_SECONDS,
            f"{kind} was begun {len(self.processes_of(kind))} times",
        )
        return self.processes_of(kind)[-1]

    def finished_step_counts(self) -> Counter[str]:
        """Kind -> number of finished steps. Asserts that every part of every step was done exactly
        once, in any number of jobs."""
        parts = Counter((step, part) for step, part in self.lines("parts"))
        assert set(parts.values()) == {1}, parts
        steps = [step for step, part in parts]
        assert set(Counter(steps).values()) == {2}
        assert {
            str(path.parent.relative_to(self.store)) for path in self.store.glob("*/*/instant.txt")
        } == set(steps)
        return Counter(step.partition("/")[0] for step in set(steps))

    def wait_for_the_end(self) -> None:
        """Wait until the queue has no jobs of these studies."""
        self.cluster.wait_for_the_end(self.store)

    def end(self) -> None:
        """Release and cancel all jobs of these studies, also after a failed test."""
        self.release()
        self.cluster.command_output("scancel", *self.cluster.arrays(self.store))
        self.wait_for_the_end()
