"""Claims: which process computes what in a store that processes, machines and users share.

A claim is a file, claims/NAME.GENERATION, created with O_EXCL, which is atomic on every file
system; on many of them, other nodes do not see locks. The file names its owner, and a thread of the
owner, the heartbeat, renews the time of the file. A claim whose owner is gone is stale. A process
that finds NAME.1 stale creates NAME.2, again with O_EXCL: so there is one new owner, and no process
renames or removes a file that another may have taken over meanwhile. The highest generation counts.
Where an owner was killed while it removed NAME.1 and NAME.2, the next owner fills the gap at
NAME.1, and then creates NAME.3.

An owner that was only suspended may resume. `Claim.check` then raises Busy, and the store has
renamed its scratch folder, so that it can publish nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Number, read_sealed, sealed

BEAT = 60.0
"""Seconds between two heartbeats of a claim."""
LIMIT = 1800.0
"""Seconds without a heartbeat after which a claim of another machine is stale, unless its owner
says otherwise."""
WATCH = 2.5
"""Intervals between heartbeats for which this process must have watched a claim itself: the time of
the file may be by the owner's clock, which may be wrong."""
LONG_AGO = 86400.0
"""Seconds without a heartbeat that no wrong clock explains: such a claim need not be watched."""
POLL = 0.2
"""Seconds between two attempts to take a claim that another process holds."""
SILENT = 50
"""Attempts after which a message tells the user who holds the claim."""
ATTEMPTS = 3
"""How often the creation of a claim's file is tried if it fails although there is no such file."""
OWNER_SHAPE = {
    "token": str,
    "since": Number,
    "host": str,
    "machine": [str],
    "pid": int,
    "started": str | None,
    "job": str | None,
    "restarts": int,
    "device": int,
    "inode": int,
    "limit": Number,
}


class Busy(Exception):
    """Another process holds the claim, or has taken it over."""


@lru_cache(maxsize=1)
def machine() -> list[str]:
    """Boot and PID namespace of this machine, within which process ids are unique. Containers share
    host names."""
    with suppress(OSError):
        return [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return [socket.gethostname(), uuid.uuid4().hex]  # without /proc only the heartbeat decides


def start_of(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; None without such a process, "?" when it is
    hidden from this user."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # a zombie has ended, and its parent has not asked how
        return None if state in "ZX" else fields[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "?"


class Claim(AbstractContextManager["Claim"]):
    """A claim that this process holds until the `with` block ends. `token` is unique."""

    def __init__(self, claims: Claims, name: str, generation: int) -> None:
        self.claims = claims
        self.name = name
        self.generation = generation
        self.token = uuid.uuid4().hex
        self.path = claims.path(name, generation)
        owner = {
            "token": self.token,
            "since": time.time(),
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "started": start_of(os.getpid()),
            "job": own_job(),
            "restarts": restarts(),
            "limit": claims.limit,
        }
        self.file = _create(self.path)
        try:
            if claims.shared:
                os.fchmod(self.file, 0o664)
            status = os.fstat(self.file)
            owner |= {"device": status.st_dev, "inode": status.st_ino}
            os.write(self.file, sealed(json.dumps(owner)).encode())
            os.fsync(self.file)  # other machines see it from here on
        except OSError:  # such as a full disk: no process may wait for an empty claim
            self.abandon()
            raise

    def __exit__(self, *exception: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise Busy when another process took over this claim."""
        owner = _owner(self.path)
        if (
            owner is None
            or owner["token"] != self.token
            or self.claims.path(self.name, self.generation + 1).exists()
        ):
            raise Busy(self.name)

    def abandon(self) -> None:
        """Remove the file of a claim that this process does not hold after all."""
        self.path.unlink(missing_ok=True)
        os.close(self.file)

    def release(self) -> None:
        """Remove the claim, and stale ones of lower generations. A claim that another process took
        over is only marked as given up, by the time 0."""
        with self.claims.lock:  # no heartbeat may use the number of a file that is closed
            self.claims.owned.discard(self)
        try:
            self.check()
            for generation in range(1, self.generation + 1):
                self.claims.path(self.name, generation).unlink(missing_ok=True)
        except Busy:
            with suppress(OSError):
                os.utime(self.file, (0, 0))
        finally:
            os.close(self.file)


InQueue = Callable[[str, int], bool]
"""Whether the job with an id, of a user (uid), is in the scheduler's queue."""


class Claims:
    """The claims in a folder. `in_queue`: claims of jobs in the queue are not stale; None without a
    scheduler. `limit`: seconds without a heartbeat after which claims of this process are stale for
    others."""

    def __init__(self, folder: Path, in_queue: InQueue | None = None, limit: float = LIMIT) -> None:
        self.folder = folder
        self.in_queue = in_queue
        self.limit = limit
        self.shared = False
        """Whether the store is of a group, which may then read and write claims whatever the
        umask."""
        self.owned: set[Claim] = set()
        """Claims that this process holds."""
        self.lock = threading.Lock()
        self._watched: dict[Path, tuple[tuple[int, str], float]] = {}
        """File of a claim -> its time and token, and since when this process sees these."""
        self._beating = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process holds no claims.
        return Claims, (self.folder, self.in_queue, self.limit), {"shared": self.shared}

    def path(self, name: str, generation: int) -> Path:
        """The file of a claim."""
        return self.folder / f"{name}.{generation}"

    def take(self, name: str) -> Claim:
        """Claim a name. Raises Busy when another process, or this one, holds it."""
        for generation in count(1):
            try:
                claim = Claim(self, name, generation)
            except FileNotFoundError:  # created no sooner, as claims are many
                with suppress(FileExistsError):
                    self.folder.mkdir()
                    if self.shared:
                        self.folder.chmod(0o2775)
                return self.take(name)
            except FileExistsError:
                if not self.is_stale(self.path(name, generation)):
                    raise Busy(name) from None
                continue
            # lower generations may have been released and taken again since they were checked
            if not all(self.is_stale(self.path(name, lower)) for lower in range(1, generation)):
                claim.abandon()
                raise Busy(name)
            if not self.path(name, generation + 1).exists():
                break
            os.utime(claim.file, (0, 0))  # gives it up: it only fills a gap
            os.close(claim.file)
        with self.lock:
            self.owned.add(claim)
            if not self._beating:
                self._beating = True
                threading.Thread(target=self._beat, daemon=True).start()
        return claim

    def wait_for(self, name: str) -> Claim:
        """As `take`, but wait while another process holds the claim; print its holder if that takes
        long."""
        attempts = 0
        while True:
            with suppress(Busy):
                return self.take(name)
            attempts += 1
            if attempts == SILENT:
                print(
                    f"moe_lab: waiting for {self.holder(name)}, who has claimed {name}",
                    file=sys.stderr,
                )
            time.sleep(POLL)

    def holder(self, name: str) -> str:
        """The holder of a claim as text: process, machine and job, and for how long its heartbeat
        has been missing."""
        with suppress(ValueError, FileNotFoundError):
            last = max(self.folder.glob(f"{name}.*"), key=lambda path: int(path.suffix[1:]))
            silent = time.time() - last.stat().st_mtime
            owner = _owner(last)
            if owner is None:
                return "another process"
            text = f"process {owner['pid']} on {owner['host']}"
            if owner["job"]:
                text += f", job {owner['job']}"
            if silent > WATCH * BEAT:
                text += f" (no heartbeat for {silent / 60:.0f} min)"
            return text
        return "another process"

    def _beat(self) -> None:
        """Renew all owned claims, until none is owned."""
        pause = threading.Event()
        while not pause.wait(BEAT):  # monotonic, whatever the clock says
            with self.lock:
                for claim in self.owned:
                    with suppress(OSError):
                        os.utime(claim.file)  # the open file is never one of another owner
                if not self.owned:
                    self._beating = False
                    return

    def is_stale(self, path: Path) -> bool:
        """Whether the owner of a claim is gone. A claim that has just been removed is not stale:
        the caller tries again later.

        An owner on this machine is gone if its process has ended. For an owner on another machine,
        heartbeats must be missing for longer than its limit. The time of the file alone does not
        show this, unless it is LONG_AGO: on some file systems it is by the clock of the owner,
        which may be wrong. So this process watches the claim for WATCH heartbeats itself. A claim
        without an owner and heartbeats is of a process that was killed while it wrote the file."""
        try:
            file = path.stat()
            owner = _owner(path)
        except FileNotFoundError:
            return False
        changed = file.st_mtime_ns
        if changed == 0 or (owner and _has_ended(owner, file)):  # 0: given up
            return True
        is_own_job = owner is not None and owner["job"] is not None and owner["job"] == own_job()
        if owner and is_own_job and owner["restarts"] < restarts():
            return True  # a process of this job before it was requeued, perhaps on another node
        state = (changed, owner["token"] if owner else "")
        last_state, start_time = self._watched.get(path, (None, 0.0))
        if state != last_state:
            start_time = time.monotonic()
            self._watched[path] = (state, start_time)
        watched = time.monotonic() - start_time
        if watched < WATCH * BEAT and time.time() - changed / 1e9 < LONG_AGO:
            return False
        if owner is None:
            return True
        # the queue does not show whether other processes of this job are alive
        has_other_job = owner["job"] is not None and not is_own_job
        if has_other_job and self.in_queue and self.in_queue(owner["job"], file.st_uid):
            return False
        try:
            os.utime(self.folder)  # sets the present time by the clock of the file system
            silent = max(watched, self.folder.stat().st_mtime - changed / 1e9)
            return bool(silent > owner["limit"])
        except OSError:  # where nothing can be written, nothing is taken over either
            return False

    def active(self) -> dict[str, float]:
        """Name -> creation time (seconds since the epoch, 0 if it is unknown) of claims that are
        not stale. Writes nothing permanent."""
        claims = {}
        for path in self.folder.glob("*"):
            if not self.is_stale(path):
                owner = _owner(path)
                claims[path.stem] = float(owner["since"]) if owner else 0.0
        return claims

    def clear(self) -> None:
        """Remove stale claims by taking them over; also those after gaps between generations, which
        no owner removes."""
        for name in {path.stem for path in self.folder.glob("*")}:
            with suppress(Busy), self.take(name) as claim:
                for path in self.folder.glob(f"{name}.*"):
                    # the release of `claim` removes lower generations
                    if int(path.suffix[1:]) > claim.generation and self.is_stale(path):
                        path.unlink(missing_ok=True)


def _create(path: Path) -> int:
    """Create a file, and return its descriptor. Raises FileExistsError if the file exists.

    sshfs, whose protocol has no EEXIST, raises EPERM for a file that exists. So after any error the
    file is looked up. If it is missing, the creation is tried again, as the file may have been
    removed after the error."""
    last_error = OSError()
    for _ in range(ATTEMPTS):
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o664)
        except OSError as error:
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            last_error = error
    raise last_error


def _has_ended(owner: dict[str, Any], file: os.stat_result) -> bool:
    """Whether a claim is of a process of this machine that has ended, or its file was copied from
    another store.

    Inodes are only compared on the same device, since each mount of a network file system has its
    own numbers."""
    if owner["machine"] != machine():
        return False
    is_copy = owner["device"] == file.st_dev and owner["inode"] != file.st_ino
    return is_copy or start_of(owner["pid"]) not in (owner["started"], "?")


def own_job() -> str | None:
    """Slurm's id of the job that this process belongs to, as squeue shows it; None outside of
    jobs."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return (
        f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")
    )


def restarts() -> int:
    """How often the job of this process was requeued; 0 outside of jobs."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def in_queue(job: str, user: int) -> bool:
    """Whether a job of a user is in Slurm's queue. False when Slurm does not answer: then
    heartbeats alone decide on a claim."""
    # one query a minute, since there are many old claims after a power cut
    minute = int(time.monotonic() // 60)
    return job in _jobs(user, minute)


@lru_cache(maxsize=64)
def _jobs(user: int, _: int) -> Collection[str]:
    """Ids of the jobs of a user in Slurm's queue, cached for a minute by the second argument."""
    from moe_lab.study.slurm import scheduler  # imported only when there are old claims of jobs

    try:
        return scheduler.queue([user]).keys()
    except UserError:
        return ()


def _owner(path: Path) -> dict[str, Any] | None:
    """The owner that the file of a claim names; None while the file is being written, and when it
    is damaged."""
    with suppress(Damaged, FileNotFoundError, PermissionError):
        owner: dict[str, Any] = read_sealed(path, OWNER_SHAPE)
        return owner
    return None
