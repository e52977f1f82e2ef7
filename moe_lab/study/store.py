"""The store: one folder per finished step, renamed into place when complete, with checksums and
provenance."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any

from moe_lab.errors import DISK_FULL, Unavailable, UserError
from moe_lab.json_files import Damaged, parse_sealed, read_json, read_sealed, write_sealed
from moe_lab.packs import Packs, packs_in
from moe_lab.paths import store_folder
from moe_lab.results import DIGITS
from moe_lab.study.claims import LIMIT, Claim, Claims
from moe_lab.study.failures import NO_ROOM
from moe_lab.study.step import Step

SCHEMA = 1
MARKER = "store.json"
STEP = "step.json"
"""The one file beside a step's results: what it is (its identity in full), how it came about
(provenance), size and sha256 of each file with the modification time that all were given; sealed,
as all documents of the store are.

Hashing takes most of a second per GiB, so a start compares only sizes and times. The time is a
whole, even number of seconds, which all file systems keep, before the publication of the step: any
later write to a file changes it."""
PROVENANCE = "provenance.json"
"""In a scratch folder: what a worker says of how the step came about; it becomes part of STEP."""
SCRATCH = re.compile(rf"\.([0-9a-f]{{{DIGITS}}})\.[0-9a-f]{{8}}")
"""Name of a folder with unfinished work: start of the step's id, and a random word."""
FOLDER = re.compile(rf"[^.].*-([0-9a-f]{{{DIGITS}}})")
"""Name of the folder of a finished step, with or without its kind."""
SAMPLE = 200
"""Steps of a kind in packs from whose times those of others are estimated."""
SHARED = stat.S_ISGID | stat.S_IWGRP
"""Bits of the mode of a folder in which everybody of a group may write, and whose content is of the
group."""
TICK = 2
"""Seconds between two modification times on the file systems with the coarsest clocks."""
NANO = 10**9
LATE, LOOK = 70.0, 5.0
"""Seconds after which what another node has written is seen, as NFS keeps what it knows of a folder
for up to a minute; and between two looks."""


class Gone(Unavailable):
    """The store was deleted or unmounted while it was in use, which does not count as a failure of
    the step."""


class Store:
    """A folder of finished steps, errors of failed ones, claims, and files from which unfinished
    ones resume.

    `root`: the folder. `limit`: of `Claims`. Nothing is written, made or set aside before `create`
    is called: the folder may be missing or read-only. UserError for an empty path, a URL, a file, a
    folder that is no store, and a store of a newer moe_lab.
    """

    def __init__(self, root: str | Path, limit: float = LIMIT) -> None:
        self.root = store_folder(str(root))
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"store={root} is a file: expected a folder, or a new name")
        self.claims = Claims(self.root / "claims", _in_queue, limit)
        self.notices: list[str] = []
        self._writing = False
        self._hashed: set[str] = set()
        self._awaited: set[str] = set()
        self._index: dict[str, tuple[int, dict[str, Path]]] = {}
        self._check_marker()

    @cached_property
    def packs(self) -> Packs:
        """Small steps that are kept together."""
        return packs_in(self.root.absolute())

    def create(self) -> Store:
        """Make the folder if there is none, and allow writing. Raises UserError when nothing can be
        written there."""
        self._writing = True
        # damage was only reported so far; from now on it is set aside and reported again
        self.notices.clear()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if self.root.stat().st_mode & SHARED == SHARED:
                # of a group, of which everybody goes on with what others have begun
                os.umask(0o002)
            self._check_marker()
            if not (self.root / MARKER).exists():
                write_sealed(self.root / MARKER, {"schema": SCHEMA})
            os.utime(self.root)  # fails where one may not write
        except OSError as error:
            if error.errno in DISK_FULL:
                raise UserError(NO_ROOM) from None
            raise UserError(
                f"store={self.root} cannot be written ({error.strerror}): name a folder you own; "
                f"also=[{self.root}] "
                "uses what is finished there"
            ) from None
        return self

    def _check_marker(self) -> None:
        marker = self.root / MARKER
        try:
            schema = read_sealed(marker, {"schema": int})["schema"]
        except FileNotFoundError:
            return
        except Damaged:
            if not (self.root / "runs").is_dir():
                raise UserError(
                    f"store={self.root} is not a moe_lab store: {marker} is damaged"
                ) from None
            self.set_aside(marker, "damaged", "written again")
            return
        if schema > SCHEMA:
            raise UserError(
                f"store={self.root} has schema {schema}, written by a newer moe_lab, and this one "
                "reads up to "
                f"{SCHEMA}: upgrade moe_lab or name another store"
            )

    def is_there(self) -> bool:
        """Whether the folder is a store. One whose marker was set aside is recognised by its
        runs."""
        return any(os.path.lexists(self.root / name) for name in (MARKER, "runs"))

    def check_there(self) -> None:
        """Raise Gone when the folder is no longer a store."""
        if not self.is_there():
            raise Gone(
                f"store={self.root} is gone: it was deleted or unmounted meanwhile, or this "
                "machine does not see it; "
                "no step counts as failed for it: bring it back and start the same command again"
            )

    @contextlib.contextmanager
    def errors_as_sentences(self) -> Iterator[None]:
        """Turn an OSError that the store's disk causes, and Damaged, into a UserError, and into
        Gone when the store is gone."""
        try:
            yield
        except Damaged as error:
            how = (
                f"`python -m moe_lab.study verify NAME store={self.root}` and a new start have "
                "it made anew"
            )
            raise UserError(f"store={self.root}: {error}: {how}") from None
        except OSError as error:
            self.check_there()
            elsewhere = error.filename and not str(error.filename).startswith(str(self.root))
            if error.errno in DISK_FULL:
                raise UserError(
                    f"{error.filename}: {error.strerror}" if elsewhere else NO_ROOM
                ) from None
            if elsewhere or not error.filename:
                raise
            raise UserError(f"store={self.root}: {error.strerror}: {error.filename}") from None

    def read(self, path: Path, shape: Any, instead: str) -> Any:
        """The document in a file of the store, as by `read_sealed`; None when it is missing or
        damaged. A damaged one is set aside, with a notice that says what happens `instead`."""
        try:
            return read_sealed(path, shape)
        except FileNotFoundError:
            return None
        except Damaged:
            self.set_aside(path, "damaged", instead)
            return None

    def path(self, step: Step) -> Path:
        """Folder of a finished step that is not in a pack, found by its id: the label may be of
        another run with another model name."""
        return self.place(step.folder)

    def name(self, step: Step) -> str | None:
        """KIND/NAME under which a finished step is stored; None when it is not there."""
        start = step.id[:DIGITS]
        if start not in self.packs:
            # no further calls in the usual case, as steps may be many
            if (self.root / step.folder).exists():
                return step.folder
            if folder := self.folders(step.kind).get(start):
                return f"{step.kind}/{folder.name}"
        return self.packs.find(start)

    def content(self, name: str, file: str) -> bytes:
        """A file of the finished step KIND/NAME. Raises FileNotFoundError without it, and Damaged
        unless it is as it was published."""
        content = self.stored(name, file)
        published = self.document(name)["files"].get(file, {})
        if file != STEP and hashlib.sha256(content).hexdigest() != published.get("sha256"):
            raise Damaged(f"{name}: {file} is damaged")
        return content

    def stored(self, name: str, file: str) -> bytes:
        """As `content`, of a file that may be damaged."""
        try:
            return (self.place(name) / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return self.packs.read(name[-DIGITS:], file)

    def document(self, name: str) -> dict[str, Any]:
        """STEP of the finished step KIND/NAME. Raises FileNotFoundError without it, and Damaged."""
        content: dict[str, Any] = parse_sealed(self.stored(name, STEP), {}, f"{name}/{STEP}")
        return content

    def documents(self, kind: str) -> Iterator[Any]:
        """STEP of finished steps of a kind, of those in packs at most SAMPLE; what cannot be read
        is left out."""
        for folder in self.folders(kind).values():
            with contextlib.suppress(OSError, Damaged):
                yield read_step(folder)
        self.packs.refresh()
        packed = [
            start for start, name in self.packs.steps().items() if name.startswith(f"{kind}/")
        ]
        for start in packed[:SAMPLE]:
            with contextlib.suppress(FileNotFoundError, Damaged):
                yield parse_sealed(self.packs.read(start, STEP), {}, start)

    def present(self) -> dict[str, str]:
        """Start of the id -> KIND/NAME of all finished steps, undamaged or not."""
        # Folders first: a step in one that is packed meanwhile is then found in the pack as well,
        # not in neither.
        folders = {
            start: f"{path.parent.name}/{path.name}"
            for start, (path, *_) in self.finished().items()
        }
        self.packs.refresh()
        return {**self.packs.steps(), **folders}

    def place(self, name: str) -> Path:
        """Folder of the finished step KIND/NAME, or else with the id in that name under another
        label."""
        folder = self.root / name
        return (
            folder
            if folder.exists()
            else self.folders(name.partition("/")[0]).get(name[-DIGITS:], folder)
        )

    def folders(self, kind: str) -> dict[str, Path]:
        """Start of the id -> folder, for all finished steps of a kind; read again when the kind's
        folder changed."""
        parent = self.root / kind
        changed = parent.stat().st_mtime_ns if parent.exists() else 0
        known = self._index.get(kind)
        if known is None or known[0] != changed:
            names = (
                [entry.name for entry in os.scandir(parent) if not entry.name.startswith(".")]
                if changed
                else []
            )
            known = self._index[kind] = (changed, {name[-DIGITS:]: parent / name for name in names})
        return known[1]  # other threads may have cleared the index

    def log(self, name: str) -> Path:
        """File with what the step `name` (kind/label-id) printed in worker processes; there is none
        if it printed nothing."""
        return self.root / "logs" / f"{name}.log"

    def partial(self, step: Step) -> Path:
        """Folder in which an unfinished step saves files to resume from."""
        return self.root / "partial" / step.id[:DIGITS]

    def clear(self, finished: Iterable[str]) -> None:
        """Remove the resume files of finished steps, which are left if a process is killed right
        after publishing."""
        if left := {path.name: path for path in (self.root / "partial").glob("*")}:
            for step_id in finished:
                if path := left.get(step_id[:DIGITS]):
                    shutil.rmtree(path, ignore_errors=True)

    def done(self, step: Step) -> bool:
        """Whether the step is finished and undamaged, judged by sizes and modification times.

        A file with another time, as in a copied store, is hashed once. A damaged step is set aside,
        with a notice."""
        return self._is_sound(step.folder)

    def done_of(self, steps: Iterable[Step]) -> set[str]:
        """Ids of those of the steps that are `done`. What is in packs is looked up at once."""
        loose = self.finished()  # before the packs, as in `present`
        self.packs.refresh()
        for path in self.packs.damaged:
            if path.exists():
                self.set_aside(path, "damaged", "its steps are computed again")
        packed = self.packs.starts()
        starts = ((step, step.id[:DIGITS]) for step in steps)
        return {
            step.id
            for step, start in starts
            if start in packed or (start in loose and self.done(step))
        }

    def readable(self, step: Step) -> bool:
        """As `done`, for a step that is about to be read: every file is hashed the first time this
        object checks it.

        Modification times do not reveal bits that flipped on the disk. What is missing is looked
        for again for LATE seconds, as it may just have been written by another node."""
        for _ in () if step.id in self._awaited else looks():
            if self.place(step.folder).exists() or self.packs.find(step.id[:DIGITS]):
                break
        self._awaited.add(step.id)
        if not self._is_sound(step.folder, hash_all=step.id not in self._hashed):
            return False
        self._hashed.add(step.id)
        return True

    def damage(self, name: str, *, hash_all: bool = False) -> dict[str, str]:
        """`damage` of the step KIND/NAME. What is in a pack is only looked at with `hash_all`."""
        folder = self.root / name
        found = damage(folder, hash_all=hash_all)
        if STEP in found and (other := self.place(name)) != folder:
            folder = other
            found = damage(other, hash_all=hash_all)
        if not found or folder.exists() or not self.packs.find(name[-DIGITS:]):
            return found
        in_pack = self._damage_in_pack(name) if hash_all else {}
        self.packs.bad |= {name[-DIGITS:]} if in_pack else set()
        return in_pack

    def _damage_in_pack(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        files: Iterable[str] = ()
        try:
            files = self.document(name)["files"]
        except FileNotFoundError:
            found[STEP] = "missing"
        except Damaged:
            found[STEP] = "damaged"
        for file in files:
            try:
                self.content(name, file)
            except FileNotFoundError:
                found[file] = "missing"
            except Damaged:
                found[file] = "damaged"
        return found if self.packs.find(name[-DIGITS:]) else {}  # else it was taken out meanwhile

    def _is_sound(self, name: str, *, hash_all: bool = False) -> bool:
        """Whether a step is there without damage; a damaged one is set aside."""
        found = self.damage(name, hash_all=hash_all)
        if not found:
            return True
        folder = self.place(name)
        what = ", ".join(f"{file} is {state}" for file, state in found.items())
        if folder.exists():
            self.set_aside(folder, what, "computed again")
        elif name[-DIGITS:] in self.packs.bad:
            self.notices.append(f"{name}: {what}, in a pack: computed again")
        return False

    def set_aside(self, path: Path, what: str, instead: str) -> None:
        """Move what is damaged to a folder for that, or only say so while nothing may be
        written."""
        place = path.absolute().relative_to(self.root.absolute())
        sentence = f"{place}: {what}: the next run sets it aside"
        if self._writing:
            aside = self.root / "damaged" / f"{'-'.join(place.parts)}-{uuid.uuid4().hex[:6]}"
            aside.parent.mkdir(exist_ok=True)
            try:
                path.rename(aside)
            except FileNotFoundError:  # another run has set it aside first
                return
            sentence = f"{place}: {what}: moved to {aside} and {instead}"
        if sentence not in self.notices:
            self.notices.append(sentence)

    def error(self, step_id: str) -> dict[str, Any] | None:
        """The stored error of the step whose id begins so; None when it has not failed."""
        path = self.root / "failed" / f"{step_id[:DIGITS]}.json"
        content: dict[str, Any] | None = self.read(
            path, {"message": str}, "the step is tried again"
        )
        return content

    def fail(self, step: Step, error: dict[str, Any]) -> None:
        """Store the error of a failed step for later runs."""
        folder = self.root / "failed"
        # on a full disk, say; without a stored error the next run tries again
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            document = {"step": step.folder, "time": time.time(), **error}
            write_sealed(folder / f"{step.id[:DIGITS]}.json", document)

    def forget(self, step_id: str) -> None:
        """Remove the error of a failed step, so that it runs again."""
        (self.root / "failed" / f"{step_id[:DIGITS]}.json").unlink(missing_ok=True)

    def finished(self) -> Mapping[str, list[Path]]:
        """Start of the id -> the folders that are named as a finished step is."""
        folders = defaultdict(list)
        for kind in sorted(self.root.glob("[!.]*/")):
            with contextlib.suppress(PermissionError):  # lost+found, or a folder of a colleague
                for entry in os.scandir(kind):
                    if (match := FOLDER.fullmatch(entry.name)) and entry.is_dir():
                        folders[match[1]].append(Path(entry.path))
        return folders

    def claim(self, step: Step) -> contextlib.AbstractContextManager[Path | None]:
        """Claim the step and yield a scratch folder for its result, as `receive` does."""
        return self.receive(step.folder, step.document())

    @contextlib.contextmanager
    def receive(self, name: str, document: Mapping[str, Any]) -> Iterator[Path | None]:
        """Claim the step with that folder's name and identity, and yield a scratch folder for all
        of its files; None when the step is finished already. `document`: the identity, or STEP of
        another store.

        Leaving the block without an exception publishes the scratch folder: one rename gives it the
        step's name. A process that dies leaves only the scratch folder, and a stale claim. Busy
        when another process has the claim, or took it over from this one, suspended for long. Gone
        when the store or the scratch folder was removed."""
        start = document["id"][:DIGITS]
        parent = (self.root / name).parent
        self.check_there()
        with self.claims.take(start) as claim:
            # First what a former owner left is taken from it, then the step is looked up. So should
            # that owner come
            # back, it has either published before, which is found, or has nothing left to publish.
            for left in parent.glob(f".{start}.*"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(hidden(left, start), ignore_errors=True)
            # another label is found even if the time of the folder is too coarse to show it
            self._index.clear()
            if self._is_sound(name):
                yield None
                return
            scratch = parent / f".{start}.{claim.token[:8]}"
            scratch.mkdir(parents=True)
            try:
                yield scratch
                self._publish(name, document, scratch, claim)
            except Exception:
                self.check_there()
                claim.check()
                if not os.path.lexists(scratch):
                    raise Gone(f"{scratch} was removed while {name} was written there") from None
                raise
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def _publish(self, name: str, document: Mapping[str, Any], scratch: Path, claim: Claim) -> None:
        _seal(scratch, document)
        self.check_there()  # the work may have made the folders again after the store was deleted
        claim.check()
        try:
            scratch.rename(self.root / name)
        except OSError:
            # Another owner was faster: ENOTEMPTY or EEXIST, and EPERM on sshfs. What it has
            # published stays.
            if scratch.exists() and (self.root / name / STEP).exists():
                return
            raise
        step_id = document["id"]
        self._hashed.add(step_id)
        shutil.rmtree(self.root / "partial" / step_id[:DIGITS], ignore_errors=True)
        self.forget(step_id)


def looks() -> Iterator[None]:
    """Once for each look at what another node may have written just now: at once, and again for
    LATE seconds."""
    deadline = time.monotonic() + LATE
    yield
    while time.monotonic() < deadline:
        time.sleep(LOOK)
        yield


def hidden(folder: Path, step_id: str) -> Path:
    """Rename a folder as scratch that belongs to nobody; the new path."""
    hidden = folder.with_name(f".{step_id[:DIGITS]}.{uuid.uuid4().hex[:8]}")
    folder.rename(hidden)
    return hidden


def _in_queue(job: str, user: int) -> bool:
    """Whether Slurm shows a job of a user. False when it does not answer: then heartbeats alone
    decide."""
    # once a minute: after a power cut old claims are many
    return job in _queue(user, int(time.monotonic() // 60))


@lru_cache(maxsize=64)
def _queue(user: int, _: int) -> Collection[str]:
    from moe_lab.study.slurm import scheduler  # asked only about old claims of jobs

    with contextlib.suppress(UserError):
        return scheduler.queue([user]).keys()
    return ()


def read_step(folder: Path) -> dict[str, Any]:
    """STEP of a finished step. Raises FileNotFoundError without it, and Damaged when it is not as
    it was written."""
    content: dict[str, Any] = read_sealed(folder / STEP, {})
    return content


def damage(folder: Path, *, hash_all: bool = False) -> dict[str, str]:
    """Missing and damaged files of a step's folder: file -> "missing" or "damaged".

    It is found by size and modification time; a file with another time is hashed, and gets its time
    back if unchanged. With `hash_all`, every file is hashed, and a damaged one gets another time,
    so that it is found from then on. Files of other stores, to which there are links, are left as
    they are; a link to a damaged one is removed."""
    try:
        document = read_step(folder)
    except FileNotFoundError:
        return {STEP: "missing"}
    except Damaged:
        return {STEP: "damaged"}
    found = {}
    for name, expected in document["files"].items():
        try:
            if not _as_published(folder / name, expected, document["time"], hash_all):
                found[name] = "damaged"
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            if isinstance(error, PermissionError) and not (folder / name).is_symlink():
                raise
            found[name] = "missing"
    return found


def _as_published(path: Path, expected: Mapping[str, Any], moment: int, hash_all: bool) -> bool:
    status = path.stat()
    timely = status.st_mtime_ns == moment * NANO
    if status.st_size != expected["bytes"]:
        return False
    if timely and not hash_all:
        return True
    with path.open("rb") as file:
        same = bool(_sha256(file) == expected["sha256"])
        if same != timely and os.fstat(file.fileno()).st_mtime_ns == status.st_mtime_ns:
            # a file of another owner: hashed again next time
            with contextlib.suppress(OSError, OverflowError):
                mended = moment * NANO if same else time.time_ns()
                if not path.is_symlink():
                    os.utime(file.fileno(), ns=(mended, mended))
                elif not same:
                    path.unlink()
    return same


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def entry(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as in STEP."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": _sha256(file)}


def _seal(folder: Path, document: Mapping[str, Any]) -> None:
    """Set the modification time of all files, and write STEP. `document`: the identity; or STEP of
    another store, with which the files were compared, and of which large ones may be links that
    have its time already."""
    provenance: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        provenance = read_json(folder / PROVENANCE, {})
        (folder / PROVENANCE).unlink()
    content = {"provenance": provenance, "time": (int(time.time()) // TICK - 1) * TICK, **document}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if "files" not in content:
        content["files"] = {str(path.relative_to(folder)): entry(path) for path in paths}
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in (path for path in paths if not path.is_symlink()):
        os.chmod(path, mode)  # safetensors makes files that only their owner may read
        os.utime(path, ns=(content["time"] * NANO, content["time"] * NANO))
    write_sealed(folder / STEP, content, indent=1)
