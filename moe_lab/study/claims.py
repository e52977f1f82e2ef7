"""Claims: which process computes what in a store that processes, machines and users share.

A claim is a file, claims/NAME.GENERATION, made with O_EXCL, which is atomic on every file system;
on many of them, other nodes do not see locks. It names its owner, whose heartbeat, a thread, renews
its time. A claim whose owner is gone is stale. A process that finds NAME.1 stale creates NAME.2:
that is one O_EXCL as well, so that there is one new owner, and nobody renames or removes a file
that may have become another's meanwhile. The last one counts: where an owner was killed while it
removed NAME.1 and NAME.2, the next one fills the gap, and creates NAME.3.

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
"""Heartbeats that this process must have missed itself: a file's time may be of the owner's clock.
"""
LONG_AGO = 86400.0
"""Seconds without a heartbeat that no wrong clock explains, so that one check finds it stale."""
POLL = 0.2
"""Seconds between two attempts to take a claim that another process holds."""
SILENT = 50
"""Attempts after which the user is told who holds the claim."""
ATTEMPTS = 3
"""How often the creation of a claim is tried while it fails and no claim is there."""
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
    """What makes process ids comparable: the boot and the PID namespace, as containers share host
    names."""
    with suppress(OSError):
        return [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return [socket.gethostname(), uuid.uuid4().hex]  # without /proc only the heartbeat decides


def started(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None when there is none; "?" when it is
    hidden from us."""
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
    """A claim that this process holds until the `with` block ends. `token`: a text that no other
    claim has."""

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
            "started": started(os.getpid()),
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
        except OSError:  # a full disk, say: nobody may wait for an empty claim
            self.abandon()
            raise

    def __exit__(self, *exception: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise Busy when another process took over."""
        owner = _owner(self.path)
        if (
            owner is None
            or owner["token"] != self.token
            or self.claims.path(self.name, self.generation + 1).exists()
        ):
            raise Busy(self.name)

    def abandon(self) -> None:
        """Remove a claim that never counted."""
        self.path.unlink(missing_ok=True)
        os.close(self.file)

    def release(self) -> None:
        """Remove the claim, and the stale ones before it. One that was lost is only marked as given
        up."""
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
"""Whether the scheduler shows the job with this id of this user (uid)."""


class Claims:
    """The claims in a folder. `in_queue`: a job in the queue keeps even old claims; None where
    there is no scheduler. `limit`: seconds without a heartbeat after which claims made here are
    stale to others."""

    def __init__(self, folder: Path, in_queue: InQueue | None = None, limit: float = LIMIT) -> None:
        self.folder = folder
        self.in_queue = in_queue
        self.limit = limit
        self.shared = False
        """Whether the store is of a group, which may then read and write claims whatever the
        umask."""
        self.owned: set[Claim] = set()
        self.lock = threading.Lock()
        self._seen: dict[Path, tuple[tuple[int, str], float]] = {}
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
            # Those before it may have been released, and taken anew, since they were judged.
            if not all(self.is_stale(self.path(name, before)) for before in range(1, generation)):
                claim.abandon()
                raise Busy(name)
            if not self.path(name, generation + 1).exists():
                break
            os.utime(claim.file, (0, 0))  # it only fills a gap, and is given up
            os.close(claim.file)
        with self.lock:
            self.owned.add(claim)
            if not self._beating:
                self._beating = True
                threading.Thread(target=self._beat, daemon=True).start()
        return claim

    def wait_for(self, name: str) -> Claim:
        """As `take`, but wait until no other process holds it. Says who does when that takes
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
        """Who holds a claim, in words: process, machine and job, and for how long its heartbeat is
        missing."""
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
        try again later.

        A process of this machine is looked up. For another machine, an old time is not enough,
        unless it is LONG_AGO: this process must have missed heartbeats itself, for long if the time
        is recent. On some file systems the time is by the clock of the owner, which may be wrong.
        A claim without an owner and heartbeats is of a process that was killed while it wrote
        it."""
        try:
            file = path.stat()
            owner = _owner(path)
        except FileNotFoundError:
            return False
        changed = file.st_mtime_ns
        if changed == 0 or (owner and _is_gone(owner, file)):  # 0: given up
            return True
        is_own_job = owner is not None and owner["job"] is not None and owner["job"] == own_job()
        if owner and is_own_job and owner["restarts"] < restarts():
            return True  # of this job before it was requeued, on another node perhaps
        mark = (changed, owner["token"] if owner else "")
        if path not in self._seen or self._seen[path][0] != mark:
            self._seen[path] = (mark, time.monotonic())
        watched = time.monotonic() - self._seen[path][1]
        if watched < WATCH * BEAT and time.time() - changed / 1e9 < LONG_AGO:
            return False
        if owner is None:
            return True
        # That this job is in the queue does not mean that its other processes are alive.
        has_other_job = owner["job"] is not None and not is_own_job
        if has_other_job and self.in_queue and self.in_queue(owner["job"], file.st_uid):
            return False
        try:
            os.utime(self.folder)  # gives it the present time by the clock of the file system
            silent = max(watched, self.folder.stat().st_mtime - changed / 1e9)
            return bool(silent > owner["limit"])
        except OSError:  # where nothing can be written, nothing is taken over either
            return False

    def active(self) -> dict[str, float]:
        """Claims that are not stale: name -> creation time in seconds since the epoch, 0 if it is
        unknown. Writes nothing permanent."""
        claims = {}
        for path in self.folder.glob("*"):
            if not self.is_stale(path):
                owner = _owner(path)
                claims[path.stem] = float(owner["since"]) if owner else 0.0
        return claims

    def clear(self) -> None:
        """Remove stale claims by taking them over, and those after gaps, which no owner removes."""
        for name in {path.stem for path in self.folder.glob("*")}:
            with suppress(Busy), self.take(name) as claim:
                for path in self.folder.glob(f"{name}.*"):
                    # those before it go with it
                    if int(path.suffix[1:]) > claim.generation and self.is_stale(path):
                        path.unlink(missing_ok=True)


def _create(path: Path) -> int:
    """Create a file that does not exist yet, and open it. Raises FileExistsError where another
    process was faster.

    A creation that loses such a race ends with EPERM on sshfs, whose protocol has no EEXIST. So
    whether the file exists decides, not the number of the error; it is tried again since the file
    may have been removed in between."""
    refusal = OSError()
    for _ in range(ATTEMPTS):
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o664)
        except OSError as error:
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            refusal = error
    raise refusal


def _is_gone(owner: dict[str, Any], file: os.stat_result) -> bool:
    """Whether the process of a claim of this machine has ended, or the claim file was copied from
    another store.

    Inodes are compared on one device only: each mount of a network file system numbers files
    anew."""
    if owner["machine"] != machine():
        return False
    is_copy = owner["device"] == file.st_dev and owner["inode"] != file.st_ino
    return is_copy or started(owner["pid"]) not in (owner["started"], "?")


def own_job() -> str | None:
    """Slurm's id of the job that this process belongs to, as squeue shows it; None outside of
    jobs."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return (
        f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")
    )


def restarts() -> int:
    """How often the job was requeued; 0 outside of jobs."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def in_queue(job: str, user: int) -> bool:
    """Whether Slurm shows a job of a user. False when it does not answer: then heartbeats alone
    decide on a claim."""
    # it is asked once a minute, as old claims are many after a power cut
    minute = int(time.monotonic() // 60)
    return job in _jobs(user, minute)


@lru_cache(maxsize=64)
def _jobs(user: int, _: int) -> Collection[str]:
    from moe_lab.study.slurm import scheduler  # imported only when there are old claims of jobs

    try:
        return scheduler.queue([user]).keys()
    except UserError:
        return ()


def _owner(path: Path) -> dict[str, Any] | None:
    """Who made a claim; None while it is being written, and when it is damaged: then heartbeats
    decide."""
    with suppress(Damaged, FileNotFoundError, PermissionError):
        owner: dict[str, Any] = read_sealed(path, OWNER_SHAPE)
        return owner
    return None
