"""Share finished steps and records with other machines by store=s3://bucket/path, or another URL of fsspec; and take
finished steps over from the stores in `also`.

The store itself is a folder in the user's cache, which everything works on. At the URL are copies:

    KIND/NAME/DIGEST/FILE   the files of a finished step; DIGEST is of their names, sizes and hashes
    KIND/NAME.json          its step.json, with size and sha256 of each file; written when all of them are there
    runs/STUDY/RUN.json     the record of a run

Object stores cannot rename a folder, so a step is finished where its KIND/NAME.json is. What two machines make of one
step may differ, and then has two digests, so that files never mix. Only a copy that is found damaged is ever removed.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from moe_lab.errors import DISK_FULL, Unavailable, UserError, nearest
from moe_lab.json_files import Damaged, fits, parse_sealed, sealed, write_sealed
from moe_lab.paths import url_of
from moe_lab.results import DIGITS, RECORD, RECORD_SHAPE, current_records, places, read_record
from moe_lab.study.claims import Busy
from moe_lab.study.packing import MANY, Packing, take
from moe_lab.study.runs import studies
from moe_lab.study.schedule import beside
from moe_lab.study.step import NO_ROOM, digest
from moe_lab.study.store import FOLDER, STEP, Gone, Store, damage, entry, read_step

LARGE = 64 << 20
"""Bytes from which a file of a folder in `also` is not copied: a link to it is made."""
AT_ONCE = 8
"""Steps that are copied at the same time: most are small, and every request waits for an answer."""
EVERY = 600.0
"""Seconds between two copies of what a running study has finished: what is lost with a machine that vanishes."""


class Remote:
    """The folder at a URL, which a field names. Raises UserError when no installed file system of fsspec opens it."""

    def __init__(self, url: str, field: str = "store") -> None:
        import fsspec

        self.name, protocol = f"{field}={url}", url.partition("://")[0]
        try:
            self.files, self.folder = fsspec.core.url_to_fs(url)
        except Exception as error:  # noqa: BLE001 - every file system has its own exceptions
            close = nearest(protocol, fsspec.available_protocols())
            hint = f": did you mean {close}://?" if close not in (protocol, None) else ""
            raise UserError(f"{self.name} cannot be opened ({error}){hint}") from None

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Turn an exception of the file system, each of which has its own, into an Unavailable."""
        try:
            yield
        except (UserError, Damaged, Busy):
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                reason = NO_ROOM
            raise Unavailable(f"{self.name}: {reason}") from error

    def path(self, place: str) -> str:
        """Path in the file system of a file or folder there."""
        return f"{self.folder.rstrip('/')}/{place}"

    def folder_of(self, place: str, marker: Mapping[str, Any]) -> str:
        """Path of the folder there with the files of a step, which is named by their digest."""
        return self.path(f"{place}/{digest(marker['files'])[:DIGITS]}")

    def listed(self, pattern: str) -> list[str]:
        """Places of the documents there that match a pattern such as runs/*/*, without their .json."""
        found: list[str] = []
        with self.asked(), suppress(FileNotFoundError):
            self.files.invalidate_cache()  # other machines write too
            found = self.files.glob(self.path(f"{pattern}.json"), on_error="raise")
        return ["/".join(PurePosixPath(path).with_suffix("").parts[-pattern.count("/") - 1 :]) for path in found]

    def finished(self) -> dict[str, str]:
        """Start of the id -> KIND/NAME of every step that is there."""
        return {match[1]: place for place in self.listed("*/*") if (match := FOLDER.fullmatch(place))}

    def read(self, place: str) -> Any:
        """A document there; None when it is missing or damaged."""
        with suppress(FileNotFoundError, Damaged):
            return parse_sealed(self.files.cat_file(self.path(f"{place}.json")), {}, place)
        return None

    def get(self, place: str, marker: Mapping[str, Any], file: str, target: Path) -> None:
        """Copy a file of the step that `marker` describes."""
        self.files.get_file(f"{self.folder_of(place, marker)}/{file}", str(target))

    def write(self, place: str, document: Any) -> None:
        """Write a document there. Not every file system writes a file at once, but they rename at once."""
        path = self.path(f"{place}.json")
        beside = f"{path}.{uuid.uuid4().hex[:8]}"  # of this process: others may write the same document
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(beside, sealed(json.dumps(document, indent=1)).encode())
        self.files.mv(beside, path)

    def remove(self, places: Iterable[str]) -> None:
        """Remove copies that are damaged, so that the steps do not count as pushed."""
        with self.asked():
            for name in (name for place in places for name in (place, f"{place}.json")):
                with suppress(FileNotFoundError):  # the marker last: it is found again if this is interrupted
                    self.files.rm(self.path(name), recursive=True)


class Folder:
    """The finished steps of another store, which is a folder and is only read. Raises UserError when it is none."""

    def __init__(self, place: str) -> None:
        self.name = f"also={place}"
        try:
            self.store = Store(place)
            if not self.store.is_there():
                raise UserError("no store is there")
        except (OSError, UserError) as error:
            raise UserError(f"{self.name}: {error}: expected the folder or the URL of a store") from None
        self.asked = self.store.errors_as_sentences

    def finished(self) -> dict[str, str]:
        """Start of the id -> KIND/NAME of every step that is there."""
        with self.asked():
            return self.store.present()

    def read(self, place: str) -> Any:
        """STEP of a step; None when it is missing or damaged."""
        with suppress(FileNotFoundError, PermissionError, Damaged):
            return self.store.document(place)
        return None

    def get(self, place: str, marker: Mapping[str, Any], file: str, target: Path) -> None:
        """Copy a file of a step, or make a link to a large one. Raises FileNotFoundError when it may not be read."""
        path = self.store.place(place) / file
        try:
            if marker["files"][file]["bytes"] >= LARGE and os.access(path, os.R_OK):
                target.symlink_to(os.path.realpath(path))
            else:
                target.write_bytes(self.store.stored(place, file))
        except PermissionError:
            raise FileNotFoundError(path) from None


def source(place: str, field: str = "also") -> Remote | Folder:
    """One of the stores in `also`, or that at a URL. Raises UserError when there is none."""
    url = url_of(place, field)
    return Remote(url, field) if url else Folder(place)


def pull(store: Store, there: Remote | Folder, wanted: Iterable[str]) -> list[str]:
    """Copy finished steps, each named by KIND/NAME, into the store, unless it has them. They are found by their ids.

    Left out are steps that are not there, those that another process is working on, and, with a notice, those that are
    incomplete or damaged there, which are returned.
    """
    here = store.present()
    missing = [place[-DIGITS:] for place in wanted if place[-DIGITS:] not in here]
    finished = there.finished() if missing else {}
    found = [finished[start] for start in missing if start in finished]
    if isinstance(there, Folder):
        for pack in there.store.packs.damaged:
            store.notices.append(f"{there.name}: {pack} is damaged: its steps are made anew where they are needed")
        take(store, there.store, found)
        found = [name for name in found if name[-DIGITS:] not in store.packs]
    packing, damaged = Packing(store), list[str]()
    with there.asked():
        for at in range(0, len(found), MANY):
            damaged += filter(None, _at_once(partial(_pull, store, there), found[at : at + MANY]))
            packing.pack()
    return damaged


def _pull(store: Store, there: Remote | Folder, place: str) -> str | None:
    """Copy a step. Returns its place when it is damaged there."""
    marker = there.read(place)
    try:
        if marker is None:
            raise Damaged(f"its {STEP} is damaged")
        with store.receive(place, marker) as scratch:
            if scratch is None:
                return None
            for name, expected in marker["files"].items():
                target = scratch / name
                if not target.resolve().is_relative_to(scratch.resolve()):
                    raise Damaged(f"its {STEP} is damaged")
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    there.get(place, marker, name, target)
                    copied = entry(target)
                except FileNotFoundError:
                    raise Damaged(f"{name} is missing") from None
                if copied != expected:
                    raise Damaged(f"{name} is damaged")
    except Damaged as error:
        store.notices.append(f"{there.name}: {place}: {error}: it is made anew where it is needed")
        return place
    except Busy:
        pass
    return None


def push(store: Store, remote: Remote) -> None:
    """Copy the finished steps of the store, of any study, that are not there; then records."""
    own = {start: str(paths[0].relative_to(store.root)) for start, paths in store.finished().items()}
    there = remote.finished()
    with remote.asked():
        _at_once(lambda place: _push(store, remote, place), [own[start] for start in own if start not in there])
    recorded = remote.listed("runs/*/*")
    for study in studies(store):
        with remote.asked(), suppress(Damaged):  # the next run of the study replaces a damaged record
            for run, record in current_records(store.root, study).items():
                if f"runs/{study}/{run}" not in recorded:
                    remote.write(f"runs/{study}/{run}", record)


def _push(store: Store, remote: Remote, place: str) -> None:
    """Copy a finished step: its files, and then its marker. Files that are there with their size are not copied again.

    A step that is damaged here, or that gc frees meanwhile, is left out.
    """
    folder = store.root / place
    if damage(folder):  # the next run sees to it
        return
    try:
        marker = read_step(folder)
        target = remote.folder_of(place, marker)
        there = remote.files.find(target, detail=True)
        for name, expected in marker["files"].items():
            path = f"{target}/{name}"
            if there.get(path, {}).get("size") != expected["bytes"]:
                remote.files.makedirs(path.rpartition("/")[0], exist_ok=True)
                remote.files.put_file(str(folder / name), path)
        remote.write(place, marker)
    except (Damaged, FileNotFoundError):
        if not damage(folder):
            raise


def pull_records(store: Store, remote: Remote, study: str) -> None:
    """Copy the records of a study that the store does not have."""
    for place in remote.listed(f"runs/{study}/*"):
        path = store.root / place / RECORD
        if not path.exists():
            with remote.asked():
                record = remote.read(place)
            if fits(record, RECORD_SHAPE):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_sealed(path, record)
            else:
                store.notices.append(f"{remote.name}: {place} is damaged: it is left out")


def exchange(store: Store, remote: Remote, study: str) -> None:
    """Pull the records of a study with the steps that they name, and push whatever is not there."""
    pull_records(store, remote, study)
    with suppress(Damaged):  # whoever reads it says so
        remote.remove(pull(store, remote, places(read_record(store.root, study) or {})))
    push(store, remote)


def shared(store: Store, study: str) -> bool:
    """`exchange`, if the store has a URL. A failure becomes a notice: False, and the next run goes on from there."""
    try:
        if store.url:
            exchange(store, Remote(store.url), study)
        return True
    except Gone:
        raise
    except UserError as error:
        store.notices.append(f"{error}: what is finished stays in {store.root}, and the next run pushes it")
        return False


def pushed_regularly(store: Store) -> AbstractContextManager[None]:
    """Push what is finished every ten minutes, in a thread, until the block ends, if the store has a URL."""

    def push_until_ended(ended: threading.Event) -> None:
        while store.url and not ended.wait(EVERY):
            with suppress(UserError, OSError):  # the end of the study says what was not pushed
                push(store, Remote(store.url))

    return beside(push_until_ended)


def _at_once(work: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(work, names))  # after a failure, what has not begun is left out
