"""A Slurm cluster of one node, made from Debian's packages, in a folder of its own.

Accounting is off, as on many a cluster: there is no sacct. Ports, sockets and keys are the cluster's own, so that it
does not meet another one on the machine. Credentials expire soon, since a requeued job waits for that; the two GPUs are
none.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

LONG = 500
"""Seconds after which a test gives up on a job; on a quiet machine it takes a fraction."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
GresTypes=gpu
MaxArraySize=3
KillWait=2
MinJobAge=300
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=64000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """What keeps a cluster from being started here; None when nothing does."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install munge slurm-wlm slurm-client"
    return None if os.geteuid() == 0 else "slurmd needs root"


def until(what: Callable[[], object], seconds: float, why: str) -> None:
    """Wait for `what` to become true. AssertionError with `why` when it does not in `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


class Cluster:
    """Daemons and the configuration they share; `start` and `stop`, or each daemon by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname().split(".")[0]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        ports = _free_ports(2)
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.format(host=self.host, folder=folder, controller_port=ports[0], node_port=ports[1])
        )

    @property
    def impatient(self) -> Path:
        """The configuration for a command that does not wait long for a controller that is not there."""
        path = self.folder / "impatient.conf"
        path.write_text(self.configuration.read_text() + "MessageTimeout=2\n")
        return path

    @property
    def environment(self) -> Mapping[str, str]:
        """What points Slurm's commands at this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        """Start all daemons and wait until the node takes jobs."""
        folder = self.folder
        files = [
            f"--{name}-file={folder}/munge.{end}" for name, end in (("log", "log"), ("pid", "pid"), ("seed", "seed"))
        ]
        words = ["--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key", *files]
        self.launch("munged", *words)
        until((folder / "munge.socket").exists, 10, "munged did not start")
        self.launch("slurmctld", "-D", "-i")
        self.launch("slurmd", "-D", "-N", self.host)
        until(self.is_idle, 30, f"the node did not come up: {self.ask('sinfo')}")

    def launch(self, program: str, *words: str) -> None:
        """Start one daemon."""
        with (self.folder / f"{program}.out").open("ab") as out:
            self.daemons[program] = subprocess.Popen(
                [program, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self.environment
            )

    def end(self, program: str) -> None:
        """End one daemon."""
        daemon = self.daemons.pop(program)
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def stop(self) -> None:
        """Cancel what runs and end all daemons."""
        self.ask("scancel", "--user=root")
        until(lambda: not self.ask("squeue", "-h"), 20, "jobs do not end")
        for program in ("slurmd", "slurmctld", "munged"):
            if program in self.daemons:
                self.end(program)

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints, errors included."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        return done.stdout + done.stderr

    def job(self, job: str) -> Mapping[str, str]:
        """What scontrol says of a job, ended ones too."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def minutes(self, job: str) -> int:
        """How many whole minutes a job has run since it was started or restarted."""
        days, _, clock = self.job(job)["RunTime"].rpartition("-")
        hours, minutes, _ = map(int, clock.split(":"))
        return (int(days or 0) * 24 + hours) * 60 + minutes

    def wait_for_the_end(self, store: Path) -> None:
        """Until the queue has no jobs of the studies in a store."""
        arrays = self.arrays(store)
        until(lambda: not arrays.intersection(self.ask("squeue", "-h", "-o", "%F").split()), LONG, "jobs do not end")

    def arrays(self, store: Path) -> set[str]:
        """All jobs that were ever submitted for the studies in a store; of an array, its own id."""
        return {job["array"] for file in store.glob("runs/*/*/jobs.json") for job in json.loads(file.read_text())}

    def is_idle(self) -> bool:
        """Whether the node is there and nothing runs on it."""
        return self.ask("sinfo", "-h", "-o", "%T").strip() == "idle"


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster in a new folder, whose parent others must be able to enter: munge refuses its socket otherwise."""
    folder.parent.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
