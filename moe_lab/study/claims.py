"""Claims: which process computes what in a store that processes, machines and users share.

A claim is a file, claims/NAME.GENERATION. It is created with O_EXCL, which is atomic on every file
system. Locks would not do, as on many file systems other nodes do not see them. The file names its
owner. A thread of the owner renews the modification time of the file again and again: these are the
heartbeats of the claim. A claim whose owner is gone is stale. A process that finds NAME.1 stale
creates NAME.2, again with O_EXCL: so there is one new owner, and no process renames or removes a
file that another process may have taken over meanwhile. The highest generation counts. If an owner
was killed after it had removed NAME.1 and before it removed NAME.2, the next owner creates NAME.1
to fill the gap, and then NAME.3.

A suspended owner may resume after another process has taken over the claim. For the former owner,
`Claim.check` then raises Busy. The store has renamed the scratch folder of the former owner, which
therefore can publish nothing.
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
"""Seconds without a heartbeat after which a claim of another machine is stale, unless the claim's
file states another limit."""
WATCH = 2.5
"""Number of intervals between heartbeats for which this process watches a claim before the claim
can be stale. The time of the file alone does not suffice, as it may come from the owner's clock,
which may be wrong."""
MAXIMUM_CLOCK_ERROR = 86400.0
"""Assumed maximum difference between clocks in seconds. A claim whose last heartbeat is longer ago
is not watched."""
POLL = 0.2
"""Seconds between two attempts to take a claim that another process holds."""
ATTEMPTS_BEFORE_NOTICE = 50
"""Attempts to take a claim after which the user is told who holds it."""
ATTEMPTS = 3
"""Maximum attempts to create a claim's file when an attempt fails although the file is missing."""
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
"""Expected fields of a claim's file, which describe its owner."""


class Busy(Exception):
    """Another process holds the claim, or has taken it over."""


@lru_cache(maxsize=1)
def machine() -> list[str]:
    """Boot id and PID namespace of this machine. Process ids are unique within the pair; host names
    would not do, as containers share them. Without /proc: the host name and a random text, which is
    the same in all calls of this process."""
    with suppress(OSError):
        return [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return [socket.gethostname(), uuid.uuid4().hex]  # without /proc only the heartbeat decides


def start_of(pid: int) -> str | None:
    """Start of the process `pid` in clock ticks since boot. None if there is no such process, or it
    has ended. "?" if the process exists, but /proc is missing or hides it from this user."""
    with suppress(OSError):
        # the fields begin after the name of the program, in parentheses
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # zombies (Z) and dead processes (X) have ended; fields[18] is `starttime`, field 22 in all
        return None if state in "ZX" else fields[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # the process exists and belongs to another user
        pass
    return "?"


class Claim(AbstractContextManager["Claim"]):
    """A claim that this process holds until the `with` block ends. Making the object creates the
    claim's file, and raises FileExistsError when the file exists. `token` is unique."""

    def __init__(self, claims: Claims, name: str, generation: int) -> None:
        """Create the file of a generation of the claim `name`, and write this process into it as
        the owner. Raises FileNotFoundError when the folder of `claims` is missing."""
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
        self.descriptor = _create_file(self.path)
        try:
            if claims.shared:
                os.fchmod(self.descriptor, 0o664)
            status = os.fstat(self.descriptor)
            # a copy of the file in another store has another inode, see `_has_ended`
            owner |= {"device": status.st_dev, "inode": status.st_ino}
            os.write(self.descriptor, sealed(json.dumps(owner)).encode())
            os.fsync(self.descriptor)  # other machines see the content from here on
        except OSError:  # such as a full disk; other processes would wait for an empty claim
            self.abandon()
            raise

    def __exit__(self, *exception: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise Busy when another process took over this claim: when the claim's file is missing,
        damaged or names another owner, or when there is a file of a higher generation."""
        owner = _owner(self.path)
        if (
            owner is None
            or owner["token"] != self.token
            or self.claims.path(self.name, self.generation + 1).exists()
        ):
            raise Busy(self.name)

    def abandon(self) -> None:
        """Remove the claim's file, which this process created without getting the claim."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def release(self) -> None:
        """Remove the files of this generation and of lower generations of the claim. If another
        process took over the claim, no file is removed: the file of this generation gets the
        modification time 0, which marks it as released."""
        with self.claims.lock:  # no heartbeat may use the descriptor after it is closed
            self.claims.owned.discard(self)
        try:
            self.check()
            for generation in range(1, self.generation + 1):
                self.claims.path(self.name, generation).unlink(missing_ok=True)
        except Busy:
            with suppress(OSError):
                os.utime(self.descriptor, (0, 0))
        finally:
            os.close(self.descriptor)


InQueue = Callable[[str, int], bool]
"""Whether the job with an id, of a user (uid), is in the scheduler's queue."""


class Claims:
    """The claims in a folder. `in_queue`: tells whether a job is in the scheduler's queue, as the
    claim of such a job is not stale; None without a scheduler. `limit`: seconds without a heartbeat
    after which other processes regard claims of this process as stale."""

    def __init__(self, folder: Path, in_queue: InQueue | None = None, limit: float = LIMIT) -> None:
        self.folder = folder
        self.in_queue = in_queue
        self.limit = limit
        self.shared = False
        """Whether the store belongs to a group, whose members may read and write all claims,
        whatever the umask."""
        self.owned: set[Claim] = set()
        """Claims that this process holds."""
        self.lock = threading.Lock()
        """Held while `owned` is changed, and while the claims in `owned` are renewed."""
        self._watched: dict[Path, tuple[tuple[int, str], float]] = {}
        """File of a claim -> (modification time in ns, token), and the monotonic time at which this
        process saw this pair first."""
        self._has_heartbeat = False
        """Whether a thread renews the claims."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process holds no claims.
        return Claims, (self.folder, self.in_queue, self.limit), {"shared": self.shared}

    def path(self, name: str, generation: int) -> Path:
        """File of a generation of the claim `name`."""
        return self.folder / f"{name}.{generation}"

    def take(self, name: str) -> Claim:
        """Claim a name: create the file of the lowest generation above all stale files. Raises Busy
        when a process holds the claim, even if it is this process."""
        for generation in count(1):
            try:
                claim = Claim(self, name, generation)
            except FileNotFoundError:  # the folder of claims is missing
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
            # a higher generation exists: this file only fills a gap below it. It is marked as
            # released, and the next generation is tried
            os.utime(claim.descriptor, (0, 0))
            os.close(claim.descriptor)
        with self.lock:
            self.owned.add(claim)
            if not self._has_heartbeat:
                self._has_heartbeat = True
                threading.Thread(target=self._beat, daemon=True).start()
        return claim

    def wait_for(self, name: str) -> Claim:
        """Wait until no other process holds the claim `name`, and take the claim. After
        ATTEMPTS_BEFORE_NOTICE attempts, the holder is printed once."""
        attempts = 0
        while True:
            with suppress(Busy):
                return self.take(name)
            attempts += 1
            if attempts == ATTEMPTS_BEFORE_NOTICE:
                print(
                    f"moe_lab: waiting for {self.holder(name)}, who has claimed {name}",
                    file=sys.stderr,
                )
            time.sleep(POLL)

    def holder(self, name: str) -> str:
        """The holder of the claim `name` as text: process, machine and job, or "another process" if
        these are unknown. If heartbeats are missing, the text has the minutes since the last
        heartbeat."""
        # ValueError: the claim has no file; FileNotFoundError: the file was removed meanwhile
        with suppress(ValueError, FileNotFoundError):
            latest_file = max(self.folder.glob(f"{name}.*"), key=lambda path: int(path.suffix[1:]))
            silent_seconds = time.time() - latest_file.stat().st_mtime
            if owner := _owner(latest_file):
                text = f"process {owner['pid']} on {owner['host']}"
                if owner["job"]:
                    text += f", job {owner['job']}"
                if silent_seconds > WATCH * BEAT:
                    text += f" (no heartbeat for {silent_seconds / 60:.0f} min)"
                return text
        return "another process"

    def _beat(self) -> None:
        """Set the modification time of the files of all owned claims to the present time every BEAT
        seconds, until this process owns no claim."""
        pause = threading.Event()
        while not pause.wait(BEAT):  # waits by the monotonic clock
            with self.lock:
                for claim in self.owned:
                    with suppress(OSError):
                        # by descriptor, as the path may lead to the file of another owner by now
                        os.utime(claim.descriptor)
                if not self.owned:
                    self._has_heartbeat = False
                    return

    def is_stale(self, path: Path) -> bool:
        """Whether the claim with the file `path` was released, or its owner is gone. False when the
        file has just been removed: the caller tries again later.

        An owner on this machine is gone if its process has ended. An owner on another machine is
        gone if heartbeats have been missing for longer than the limit in the claim's file, unless
        the owner belongs to another job that is still in the queue. The time of the file is not
        enough to tell, as it may come from the owner's clock, which may be wrong. So this process
        watches the claim itself for WATCH intervals, unless the time of the file is more than
        MAXIMUM_CLOCK_ERROR ago. A file that names no owner, and gets no heartbeats while this
        process watches it, was left by a process that was killed while it wrote the file."""
        try:
            status = path.stat()
            owner = _owner(path)
        except FileNotFoundError:
            return False
        beat_ns = status.st_mtime_ns
        if beat_ns == 0 or (owner and _has_ended(owner, status)):  # released claims have the time 0
            return True
        is_own_job = owner is not None and owner["job"] is not None and owner["job"] == own_job()
        if owner and is_own_job and owner["restarts"] < restarts():
            return True  # the owner ran before this job was requeued, perhaps on another node
        state = (beat_ns, owner["token"] if owner else "")
        last_state, watch_start = self._watched.get(path, (None, 0.0))
        if state != last_state:
            watch_start = time.monotonic()
            self._watched[path] = (state, watch_start)
        watched_seconds = time.monotonic() - watch_start
        if watched_seconds < WATCH * BEAT and time.time() - beat_ns / 1e9 < MAXIMUM_CLOCK_ERROR:
            return False
        if owner is None:
            return True
        # the queue does not show whether other processes of this job are alive
        has_other_job = owner["job"] is not None and not is_own_job
        if has_other_job and self.in_queue and self.in_queue(owner["job"], status.st_uid):
            return False
        try:
            os.utime(self.folder)  # sets the present time by the clock of the file system
            silent_seconds = max(watched_seconds, self.folder.stat().st_mtime - beat_ns / 1e9)
            return bool(silent_seconds > owner["limit"])
        except OSError:  # where nothing can be written, nothing is taken over either
            return False

    def active(self) -> dict[str, float]:
        """Names of the claims that are not stale -> their creation times, in seconds since the
        epoch, or 0 if unknown. Creates and removes no files."""
        claims = {}
        for path in self.folder.glob("*"):
            if not self.is_stale(path):
                owner = _owner(path)
                claims[path.stem] = float(owner["since"]) if owner else 0.0
        return claims

    def clear(self) -> None:
        """Take over all stale claims and release them, which removes their files. Also remove the
        files of stale generations above a missing generation, which `Claim.release` leaves."""
        for name in {path.stem for path in self.folder.glob("*")}:
            with suppress(Busy), self.take(name) as claim:
                for path in self.folder.glob(f"{name}.*"):
                    # the release of `claim` removes lower generations
                    if int(path.suffix[1:]) > claim.generation and self.is_stale(path):
                        path.unlink(missing_ok=True)


def _create_file(path: Path) -> int:
    """Create a file, and return its descriptor. Raises FileExistsError if the file exists.

    sshfs, whose protocol has no EEXIST, raises EPERM for a file that exists. So after any error the
    function looks the file up. If the file is missing, it may have been removed after the error,
    and the function tries the creation again."""
    last_error = OSError()
    for _ in range(ATTEMPTS):
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o664)
        except OSError as error:
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            last_error = error
    raise last_error


def _has_ended(owner: dict[str, Any], status: os.stat_result) -> bool:
    """Whether the owner of a claim is a process of this machine that has ended. For a claim of this
    machine, True, too, if the claim's file is a copy from another store. `owner`: content of the
    claim's file. `status`: result of `stat` for this file."""
    if owner["machine"] != machine():
        return False
    # a copy has another inode. This is only compared on one device, since each mount of a network
    # file system has its own device number
    is_copy = owner["device"] == status.st_dev and owner["inode"] != status.st_ino
    return is_copy or start_of(owner["pid"]) not in (owner["started"], "?")


def own_job() -> str | None:
    """Slurm's id of the job that this process belongs to, as squeue shows it: ARRAY_TASK for a task
    of an array. None outside of jobs."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return (
        f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")
    )


def restarts() -> int:
    """How often the job of this process was requeued; 0 outside of jobs."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def in_queue(job: str, user: int) -> bool:
    """Whether the job with the id `job` of the user with the uid `user` is in Slurm's queue. False
    when Slurm does not answer: then only heartbeats decide whether a claim is stale."""
    # one query a minute, as there are many old claims after a power cut
    minute = int(time.monotonic() // 60)
    return job in _queued_jobs(user, minute)


@lru_cache(maxsize=64)
def _queued_jobs(user: int, _: int) -> Collection[str]:
    """Ids of the jobs that the user with the uid `user` has in Slurm's queue; () when Slurm does
    not answer. The second argument, the present minute, is only a key of the cache: so Slurm is
    asked again in the next minute."""
    from moe_lab.study.slurm import scheduler  # imported only when there are old claims of jobs

    try:
        return scheduler.queue([user]).keys()
    except UserError:
        return ()


def _owner(path: Path) -> dict[str, Any] | None:
    """Content of a claim's file, which describes the owner. None while the file is being written,
    and when it is damaged, missing or not readable by this user."""
    with suppress(Damaged, FileNotFoundError, PermissionError):
        owner: dict[str, Any] = read_sealed(path, OWNER_SHAPE)
        return owner
    return None
