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
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.json_files import Damaged, Document, read_sealed, sealed

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


class Busy(Exception):
    """Another process holds the claim, or has taken it over."""


@lru_cache(maxsize=1)
def machine() -> list[str]:
    """[boot id, PID namespace] of this machine, within which process ids are unique. Host names
    would not suffice, because containers may share a host name. Without /proc: [host name, random
    text]."""
    with suppress(OSError):
        return [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    # to other processes, this looks like another machine: only heartbeats decide about the claim
    return [socket.gethostname(), uuid.uuid4().hex]


def start_time(pid: int) -> str | None:
    """Time at which the process `pid` started, in clock ticks since boot. None if the process has
    ended. "?" if the process exists, but /proc is missing or hides the process."""
    with suppress(OSError):
        # field 2 is the program's name in parentheses; field 3, the state, is the first after it
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # zombies (Z) and dead processes (X) have ended; fields[18] is field 22, the start
        return None if state in "ZX" else fields[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # the process exists and belongs to another user
        pass
    return "?"


class Claim(AbstractContextManager["Claim"]):
    """The exclusive right of this process to the work with the name `name`, such as the id of a
    step, until the `with` block ends. `token`: a unique text, by which the claim's file is
    recognised."""

    def __init__(self, claims: Claims, name: str, generation: int) -> None:
        """Create the file of the claim. Raises FileExistsError when the file exists, and
        FileNotFoundError when the folder of `claims` is missing."""
        self.claims = claims
        self.name = name
        self.generation = generation
        self.token = uuid.uuid4().hex
        self.path = claims.path(name, generation)
        owner = {
            "token": self.token,
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "started": start_time(os.getpid()),
            "job": own_job(),
            "restarts": restart_count(),
            "limit": claims.limit,
        }
        self.descriptor = _create_file(self.path)
        try:
            if claims.shared:
                os.fchmod(self.descriptor, 0o664)
            status = os.fstat(self.descriptor)
            # `_has_ended` recognises a copy of the file in another store by its other inode
            owner |= {"device": status.st_dev, "inode": status.st_ino}
            os.write(self.descriptor, sealed(json.dumps(owner)).encode())
            os.fsync(self.descriptor)  # other machines see the content from here on
        except OSError:  # such as a full disk. Other processes would wait if an empty file stayed
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
        """Remove the claim's file, because this process does not get the claim after all."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def release(self) -> None:
        """Remove the claim's file and the files of lower generations. If another process took over
        the claim, only set the modification time of the claim's file to 0, which marks the file as
        released."""
        # The thread that renews owned claims uses their descriptors. So it must forget this claim
        # before the descriptor is closed.
        with self.claims.lock:
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


class Claims:
    """The claims in the folder `folder` of a store. A claim on a name, such as the start of a
    step's id, is held by one process, its owner. The owner renews the time of the claim's file:
    these are the heartbeats. A claim whose owner is gone is stale. To take it over, another process
    creates the file of the next generation.

    `limit`: seconds without a heartbeat after which other processes regard claims of this process
    as stale."""

    def __init__(self, folder: Path, limit: float = LIMIT) -> None:
        self.folder = folder
        self.limit = limit
        self.shared = False
        """Whether a group of users may write all claims."""
        self.owned: set[Claim] = set()
        self.lock = threading.Lock()
        """Held while `owned` is changed, and while the claims in `owned` are renewed."""
        self._watched: dict[Path, tuple[tuple[int, str], float]] = {}
        """File of a claim -> ((modification time of the file in ns, token in the file), monotonic
        time at which this process first saw these two values)."""
        self._has_heartbeat = False
        """Whether a thread renews the claims."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the settings, so that a copy in another process holds no claims."""
        return Claims, (self.folder, self.limit), {"shared": self.shared}

    def path(self, name: str, generation: int) -> Path:
        """The file of the claim `name` with this generation."""
        return self.folder / f"{name}.{generation}"

    def take(self, name: str) -> Claim:
        """Take the claim `name`. Raises Busy when any process, even this one, holds the claim."""
        for generation in count(1):
            try:
                claim = Claim(self, name, generation)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    self.folder.mkdir()
                    if self.shared:
                        self.folder.chmod(0o2775)
                return self.take(name)
            except FileExistsError:
                if not self.is_stale(self.path(name, generation)):
                    raise Busy(name) from None
                continue
            # other processes may have removed and created lower generations since the checks above
            if not all(self.is_stale(self.path(name, lower)) for lower in range(1, generation)):
                claim.abandon()
                raise Busy(name)
            if not self.path(name, generation + 1).exists():
                break
            # the new file only fills a gap between generations: mark it as released
            os.utime(claim.descriptor, (0, 0))
            os.close(claim.descriptor)
        with self.lock:
            self.owned.add(claim)
            if not self._has_heartbeat:
                self._has_heartbeat = True
                threading.Thread(target=self._beat, daemon=True).start()
        return claim

    def wait_for(self, name: str) -> Claim:
        """Wait until no process holds the claim `name`, and take the claim."""
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
        """A text that names the process, machine and job that hold the claim `name`."""
        # ValueError: `max` gets no file; FileNotFoundError: the file was removed meanwhile
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
        """Every BEAT seconds, renew the files of all owned claims, until this process owns no
        claim."""
        pause = threading.Event()  # is never set: `wait` only sleeps, by the monotonic clock
        while not pause.wait(BEAT):
            with self.lock:
                for claim in self.owned:
                    with suppress(OSError):
                        # not by path: the file at the path may have another owner by now
                        os.utime(claim.descriptor)
                if not self.owned:
                    self._has_heartbeat = False
                    return

    def is_stale(self, path: Path) -> bool:
        """Whether the claim with the file `path` was released, or its owner is gone.

        An owner on this machine is gone if its process has ended. An owner on any machine is gone
        if heartbeats have been missing for longer than the limit in the claim's file. But missing
        heartbeats do not count while the owner's job is in the scheduler's queue."""
        try:
            status = path.stat()
            owner = _owner(path)
        except FileNotFoundError:
            return False
        beat_ns = status.st_mtime_ns
        if beat_ns == 0 or (owner and _has_ended(owner, status)):  # 0 marks a released claim
            return True
        is_own_job = owner is not None and owner["job"] is not None and owner["job"] == own_job()
        if owner and is_own_job and owner["restarts"] < restart_count():
            return True  # the owner ended when this job was requeued, perhaps from another node
        state = (beat_ns, owner["token"] if owner else "")
        last_state, watch_start = self._watched.get(path, (None, 0.0))
        if state != last_state:
            watch_start = time.monotonic()
            self._watched[path] = (state, watch_start)
        watched_seconds = time.monotonic() - watch_start
        if watched_seconds < WATCH * BEAT and time.time() - beat_ns / 1e9 < MAXIMUM_CLOCK_ERROR:
            return False
        if owner is None:  # a process was killed while it wrote the file
            return True
        # this process's own job is in the queue even if the owner, another process of it, is gone
        has_other_job = owner["job"] is not None and not is_own_job
        if has_other_job and in_queue(owner["job"], status.st_uid):
            return False
        try:
            os.utime(self.folder)  # sets the present time by the clock of the file system
            silent_seconds = max(watched_seconds, self.folder.stat().st_mtime - beat_ns / 1e9)
            return bool(silent_seconds > owner["limit"])
        except OSError:  # this process cannot write here, so it cannot take over the claim either
            return False

    def active(self) -> set[str]:
        """Names of the claims that are not stale."""
        return {path.stem for path in self.folder.glob("*") if not self.is_stale(path)}

    def clear(self) -> None:
        """Remove the files of all stale claims."""
        for name in {path.stem for path in self.folder.glob("*")}:
            with suppress(Busy), self.take(name) as claim:
                for path in self.folder.glob(f"{name}.*"):
                    # the end of the `with` block removes the files up to `claim.generation`
                    if int(path.suffix[1:]) > claim.generation and self.is_stale(path):
                        path.unlink(missing_ok=True)


def _create_file(path: Path) -> int:
    """Create the file `path`, and return its descriptor. Raises FileExistsError if the file exists.
    On sshfs, whose protocol has no EEXIST, the error for an existing file is EPERM."""
    last_error = OSError()
    for _ in range(ATTEMPTS):
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o664)
        except OSError as error:
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            last_error = error
    raise last_error


def _has_ended(owner: Document, status: os.stat_result) -> bool:
    """Whether a claim of this machine is no longer held: its owner has ended, or its file is only a
    copy, such as in a copied store. `owner`: content of the claim's file."""
    if owner["machine"] != machine():
        return False
    # inodes are compared only if the device numbers are equal, because each mount of a network file
    # system has a device number of its own
    is_copy = owner["device"] == status.st_dev and owner["inode"] != status.st_ino
    # a process with the same pid and another start is not the owner; "?": unknown
    return is_copy or start_time(owner["pid"]) not in (owner["started"], "?")


def own_job() -> str | None:
    """Id of the Slurm job of this process, such as 123_4 for task 4 of array 123. None outside of
    jobs."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return (
        f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")
    )


def restart_count() -> int:
    """How often the job of this process was requeued; 0 outside of jobs."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def in_queue(job: str, user: int) -> bool:
    """Whether the job with the id `job` of the user with the uid `user` is in Slurm's queue. False
    when Slurm does not answer."""
    # cached for a minute: after a power cut, thousands of claims have to be checked
    minute = int(time.monotonic() // 60)
    return job in _queued_jobs(user, minute)


@lru_cache(maxsize=64)
def _queued_jobs(user: int, _: int) -> Collection[str]:
    """Ids of the jobs that the user with the uid `user` has in Slurm's queue. The second argument,
    the present minute, is only a key of the cache."""
    from moe_lab.study.slurm import scheduler  # needed only if heartbeats are missing

    try:
        return scheduler.queue([user]).keys()
    except UserError:
        return ()


def _owner(path: Path) -> Document | None:
    """The fields of the file `path` of a claim, which describe its owner. None while the file is
    being written, or if it cannot be read."""
    with suppress(Damaged, FileNotFoundError, PermissionError):
        return read_sealed(path)
    return None
