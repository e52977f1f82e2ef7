"""Where steps live: one folder each, written beside and renamed into place, with checksums and provenance."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from moe_lab.errors import UserError
from moe_lab.study.identity import Step

SCHEMA = 1
MANIFEST = "manifest.json"
"""In the folder of a finished step: size and sha256 of each file, and the modification time all of them were given.

Hashing takes most of a second per GiB, so a start compares sizes and times. The time is a whole, even second before the
step was published: clocks and copies that keep seconds keep it, and whoever writes to a file afterwards, be it within
the same tick of a coarse clock, changes it.
"""
TICK = 2
"""Seconds between two times of the file systems whose clocks are coarsest."""
NANO = 10**9


class Busy(Exception):
    """Another run is working on the step right now."""


def write_json(path: Path, document: Any) -> None:
    """Write `document` so that a reader sees all of it or nothing."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    beside.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    beside.replace(path)


class Store:
    """A folder of finished steps, errors of failed ones, locks, and what unfinished ones have saved so far."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.notices: list[str] = []
        self._hashed: set[str] = set()
        self._index: dict[str, tuple[int, dict[str, Path]]] = {}
        self._open()

    def _open(self) -> None:
        marker = self.root / "store.json"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not marker.exists():
                write_json(marker, {"schema": SCHEMA})
            probe = self.root / f".probe.{uuid.uuid4().hex[:8]}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"store={self.root} cannot be written ({error.strerror}): name a folder you own") from None
        try:
            schema = json.loads(marker.read_text())["schema"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"store={self.root} is not a moe_lab store: {marker} is damaged") from None
        if schema > SCHEMA:
            raise UserError(
                f"store={self.root} has schema {schema}, written by a newer moe_lab, and this one reads up to "
                f"{SCHEMA}: upgrade moe_lab or name another store"
            )

    def path(self, step: Step) -> Path:
        """Folder of the finished step. The id decides; a label of another run (a renamed model, say) is accepted."""
        return self.place(step.folder, step.id)

    def place(self, name: str, step_id: str) -> Path:
        """Folder of the finished step of that name and id."""
        folder = self.root / name
        return folder if folder.exists() else self._known(name.partition("/")[0]).get(step_id[:12], folder)

    def _known(self, kind: str) -> dict[str, Path]:
        """Start of the id -> folder, for all finished steps of a kind; read again when the kind's folder changed."""
        parent = self.root / kind
        changed = parent.stat().st_mtime_ns if parent.exists() else 0
        if self._index.get(kind, (None,))[0] != changed:
            names = [entry.name for entry in os.scandir(parent) if not entry.name.startswith(".")] if changed else []
            self._index[kind] = (changed, {name[-12:]: parent / name for name in names})
        return self._index[kind][1]

    def partial(self, step: Step) -> Path:
        """Folder in which an unfinished step keeps what it can resume from."""
        return self.root / "partial" / step.id[:16]

    def done(self, step: Step) -> bool:
        """Whether the step is finished and undamaged, as far as sizes and modification times tell. A file of another
        time, as in a copied store, is hashed, once. A damaged step is set aside, and `notices` says so."""
        return self._keep(self.path(step), changed(self.path(step)))

    def readable(self, step: Step) -> bool:
        """`done`, with every file hashed the first time this object is asked: for what is about to be read, because
        times tell nothing of bits that flip on a disk."""
        folder = self.path(step)
        if not self._keep(folder, changed(folder) if step.id in self._hashed else damaged(folder)):
            return False
        self._hashed.add(step.id)
        return True

    def _keep(self, folder: Path, damage: Mapping[str, str]) -> bool:
        """Whether the folder is there and has no damage; if it has, it is set aside."""
        if damage and folder.exists():
            self._set_aside(folder, damage)
            return False
        return not damage

    def _set_aside(self, folder: Path, damage: Mapping[str, str]) -> None:
        aside = self.root / "damaged" / f"{folder.parent.name}-{folder.name}-{uuid.uuid4().hex[:6]}"
        aside.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another run may have set it aside first
            folder.rename(aside)
            what = ", ".join(f"{file} is {state}" for file, state in damage.items())
            self.notices.append(f"{folder.relative_to(self.root)}: {what}: moved to {aside} and computed again")

    def error(self, step: Step) -> dict[str, Any] | None:
        """What the step failed with in an earlier run, if it did."""
        return self.error_of(step.id)

    def error_of(self, step_id: str) -> dict[str, Any] | None:
        """What the step with that id failed with, if it did."""
        path = self.root / "failed" / f"{step_id}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def fail(self, step: Step, error: dict[str, Any]) -> None:
        """Leave the error of a failed step where a later run finds it."""
        folder = self.root / "failed"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{step.id}.json", {"step": step.folder, "time": time.time(), **error})

    def being_done(self, kind: str) -> dict[str, float]:
        """Start of the id -> since when, in seconds since the epoch, for steps of a kind that somebody works on."""
        parent = self.root / kind
        hidden = [entry for entry in os.scandir(parent) if entry.name.startswith(".")] if parent.exists() else []
        return {entry.name[1:13]: entry.stat().st_mtime for entry in hidden if self._locked(entry.name[1:13])}

    def _locked(self, start_of_id: str) -> bool:
        """Whether the lock of a step is held by somebody."""
        for path in (self.root / "locks").glob(f"{start_of_id}*.lock"):
            try:
                with FileLock(path, timeout=0):
                    return False
            except Timeout:
                return True
        return False

    def forget(self, step: Step) -> None:
        """Remove the error of a failed step, so that it runs again."""
        (self.root / "failed" / f"{step.id}.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def claim(self, step: Step) -> Iterator[Path | None]:
        """Hold the step's lock and give a scratch folder to write in; None when the step is finished already.

        Leaving the block without an exception publishes the scratch folder under the step's name, at once and whole.
        A process that dies leaves nothing but scratch, and the lock ends with it. Raises Busy when another run has it.
        """
        locks = self.root / "locks"
        locks.mkdir(exist_ok=True)
        try:
            with FileLock(locks / f"{step.id[:16]}.lock", timeout=0):
                if self.done(step):
                    yield None
                    return
                parent = self.root / step.kind
                for left in parent.glob(f".{step.id[:12]}.*"):  # by a run that was killed
                    shutil.rmtree(left, ignore_errors=True)
                scratch = parent / f".{step.id[:12]}.{uuid.uuid4().hex[:8]}"
                scratch.mkdir(parents=True)
                try:
                    yield scratch
                    self._publish(step, scratch)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
        except Timeout:
            raise Busy from None

    def _publish(self, step: Step, scratch: Path) -> None:
        write_json(scratch / "step.json", step.document())
        files = sorted(path for path in scratch.rglob("*") if path.is_file())
        _seal(scratch, {str(path.relative_to(scratch)): _entry(path) for path in files})
        scratch.rename(self.root / step.folder)
        self._hashed.add(step.id)
        shutil.rmtree(self.partial(step), ignore_errors=True)
        self.forget(step)


def changed(folder: Path) -> dict[str, str]:
    """File -> "missing" or "damaged", of a step's folder, as far as sizes and modification times tell.

    A file of another time is hashed, and gets its time back if it is what was published. So is every file of a manifest
    without a time, as earlier versions wrote them, which then gets one.
    """
    return _damage(folder, hash_all=False)


def damaged(folder: Path) -> dict[str, str]:
    """The same with every file hashed. A damaged one gets another time, so that `changed` tells of it too."""
    return _damage(folder, hash_all=True)


def _damage(folder: Path, *, hash_all: bool) -> dict[str, str]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, moment = manifest["files"], manifest.get("time")
    except FileNotFoundError:
        return {MANIFEST: "missing"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {MANIFEST: "damaged"}
    found = {}
    for name, expected in files.items():
        try:
            with (folder / name).open("rb") as file:
                if not _as_published(file, expected, moment, hash_all):
                    found[name] = "damaged"
        except FileNotFoundError:
            found[name] = "missing"
    if moment is None and not found:
        with contextlib.suppress(OSError):  # another owner's, or set aside by another run
            _seal(folder, files)
    return found


def _as_published(file: BinaryIO, expected: Mapping[str, Any], moment: int | None, hash_all: bool) -> bool:
    status = os.fstat(file.fileno())
    timely = moment is not None and status.st_mtime_ns == moment * NANO
    if status.st_size != expected["bytes"]:
        return False
    if timely and not hash_all:
        return True
    same = bool(_sha256(file) == expected["sha256"])
    if same != timely and moment is not None and os.fstat(file.fileno()).st_mtime_ns == status.st_mtime_ns:
        with contextlib.suppress(OSError):  # another owner's: hashed again next time
            mended = moment * NANO if same else time.time_ns()
            os.utime(file.fileno(), ns=(mended, mended))
    return same


def _sha256(file: BinaryIO) -> str:
    total = sha256()
    while block := file.read(1 << 20):
        total.update(block)
    return total.hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": _sha256(file)}


def _seal(folder: Path, files: Mapping[str, Any]) -> None:
    """Give `files` their time, and write the manifest."""
    moment = (int(time.time()) // TICK - 1) * TICK
    for name in files:
        os.utime(folder / name, ns=(moment * NANO, moment * NANO))
    write_json(folder / MANIFEST, {"schema": SCHEMA, "time": moment, "files": files})
