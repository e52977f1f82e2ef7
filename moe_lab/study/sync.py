"""Share finished steps and records with other machines by store=s3://bucket/path, or another URL of fsspec.

The store itself is a folder in the user's cache, which everything works on. At the URL are copies:

    KIND/NAME/DIGEST/FILE   the files of a finished step; DIGEST is of their names, sizes and hashes
    KIND/NAME.json          its step.json, with size and sha256 of each file; written when all of them are there
    runs/STUDY/RUN.json     the record of a run

Object stores cannot rename a folder, so a step is finished where its KIND/NAME.json is. What two machines make of one
step may differ, and then has two digests, so that their files never mix. Nothing there is ever
changed; only a copy that is found damaged is removed.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from moe_lab.errors import DISK_FULL, Unavailable, UserError, nearest, unknown
from moe_lab.json_files import Damaged, fits, write_json
from moe_lab.paths import url_of
from moe_lab.results import DIGITS, RECORD, RECORD_SHAPE, current_records, places, read_record
from moe_lab.study.claims import Busy
from moe_lab.study.step import NO_ROOM, digest
from moe_lab.study.store import FOLDER, Gone, Store, damage, entry, is_whole, read_step

IDENTITY = ("id", "kind", "settings", "inputs", "provenance")
"""What step.json says of a step apart from its files."""
AT_ONCE = 8
"""Steps that are copied at the same time: most are small, and every request waits for an answer."""
EVERY = 600.0
"""Seconds between two copies of what a running study has finished: what is lost with a machine that vanishes."""


def check(store: str) -> None:
    """Raise UserError when store= is a URL that cannot be one, or cannot be opened."""
    if url := url_of(store):
        Remote(url)


class Remote:
    """The folder at a URL. Raises UserError when no installed file system of fsspec can open it."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url, protocol = url, url.partition("://")[0]
        try:
            self.files, self.folder = fsspec.core.url_to_fs(url)
        except Exception as error:  # noqa: BLE001 - every file system has its own exceptions
            close = nearest(protocol, fsspec.available_protocols())
            hint = f": did you mean {close}://?" if close not in (protocol, None) else ""
            raise UserError(f"store={url} cannot be opened ({error}){hint}") from None

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
            raise Unavailable(f"store={self.url}: {reason}") from error

    def path(self, place: str) -> str:
        """Path in the file system of a file or folder there."""
        return f"{self.folder.rstrip('/')}/{place}"

    def names(self, folder: str) -> list[PurePosixPath]:
        """Names of the files and folders in a folder there; none when it is missing."""
        with self.asked(), suppress(FileNotFoundError):
            self.files.invalidate_cache()  # other machines write too
            return [PurePosixPath(PurePosixPath(path).name) for path in self.files.ls(self.path(folder), detail=False)]
        return []

    def read(self, place: str) -> Any:
        """A JSON document there; None when it is missing or damaged."""
        with suppress(FileNotFoundError, ValueError):
            return json.loads(self.files.cat_file(self.path(place)))
        return None

    def write(self, place: str, document: Any) -> None:
        """Write a JSON document there. Not every file system writes a file at once, but they rename at once."""
        beside = self.path(f"{place}.{uuid.uuid4().hex[:8]}")  # of this process: others may write the same document
        self.files.makedirs(beside.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(beside, json.dumps(document, indent=1).encode())
        self.files.mv(beside, self.path(place))

    def put(self, source: Path, path: str) -> None:
        """Copy a file to there."""
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(source), path)

    def finished(self, kinds: Iterable[str]) -> dict[str, str]:
        """Start of the id -> KIND/NAME of every step of these kinds that is there."""
        names = [(kind, name) for kind in dict.fromkeys(kinds) for name in self.names(kind)]
        found = [(kind, name.stem, FOLDER.fullmatch(name.stem)) for kind, name in names if name.suffix == ".json"]
        return {match[1]: f"{kind}/{stem}" for kind, stem, match in found if match}


def pull(store: Store, remote: Remote, wanted: Iterable[str]) -> None:
    """Copy finished steps, each named by KIND/NAME, into the store, unless it has them. They are found by their ids.

    Left out are steps that are not there, those that another process is working on, and, with a notice, those whose
    copy is incomplete or damaged. Such a copy is removed there, so that the step does not count as pushed.
    """
    missing = [place for place in wanted if not store.place(place).exists()]
    there = remote.finished(place.partition("/")[0] for place in missing)
    found = [there[place[-DIGITS:]] for place in missing if place[-DIGITS:] in there]
    with remote.asked():
        _at_once(lambda place: _pull(store, remote, place), found)


def _pull(store: Store, remote: Remote, place: str) -> None:
    marker = remote.read(f"{place}.json")
    copies = [f"{place}.json"]
    try:
        if not fits(marker, {"id": str, "digest": str}) or not is_whole(marker):
            raise Damaged(f"{place}.json is damaged")
        copies.insert(0, _folder(place, marker))
        if not marker["id"].startswith(place[-DIGITS:]):
            raise Damaged(f"{place}.json is of another step")
        with store.receive(place, {name: marker[name] for name in IDENTITY}) as scratch:
            if scratch is not None:
                _copy(remote, place, marker, scratch)
    except Damaged as error:
        store.notices.append(f"store={remote.url}: {error}: {place} is made anew where it is needed")
        for copy in copies:  # the marker last, so that it is found again if this is interrupted
            with suppress(FileNotFoundError):
                remote.files.rm(remote.path(copy), recursive=True)
    except Busy:
        return


def _copy(remote: Remote, place: str, marker: Mapping[str, Any], scratch: Path) -> None:
    """Copy the files of a step into `scratch`. Raises Damaged when one is not as the marker says."""
    for name, expected in marker["files"].items():
        target = scratch / name
        if ".." in target.parts or not target.is_relative_to(scratch):
            raise Damaged(f"{place}.json is damaged")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            remote.files.get_file(remote.path(f"{_folder(place, marker)}/{name}"), str(target))
        except FileNotFoundError:
            raise Damaged(f"{place}/{name} is missing") from None
        if entry(target) != expected:
            raise Damaged(f"{place}/{name} is damaged")


def _folder(place: str, marker: Mapping[str, Any]) -> str:
    """The folder there with the files of a step."""
    return f"{place}/{digest(marker['files'])[:DIGITS]}"


def push(store: Store, remote: Remote) -> None:
    """Copy the finished steps of the store, of any study, that are not there; then records."""
    own = {start: str(paths[0].relative_to(store.root)) for start, paths in store.finished().items()}
    there = remote.finished(place.partition("/")[0] for place in own.values())
    with remote.asked():
        _at_once(lambda place: _push(store, remote, place), [own[start] for start in own if start not in there])
        for path in sorted((store.root / "runs").glob("*")):
            there_too = {name.stem for name in remote.names(f"runs/{path.name}")}
            with suppress(Damaged):  # the next run of the study replaces it
                for run, record in current_records(store.root, path.name).items():
                    if run not in there_too:
                        remote.write(f"runs/{path.name}/{run}.json", record)


def _push(store: Store, remote: Remote, place: str) -> None:
    """Copy a finished step: its files, and then its marker. Files that are there with their size are not copied again.

    A step that is damaged here, or that gc frees meanwhile, is left out.
    """
    folder = store.root / place
    if damage(folder):  # the next run sees to it
        return
    try:
        marker = read_step(folder)
        target = remote.path(_folder(place, marker))
        there = remote.files.find(target, detail=True)
        for name, expected in marker["files"].items():
            if there.get(f"{target}/{name}", {}).get("size") != expected["bytes"]:
                remote.put(folder / name, f"{target}/{name}")
        remote.write(f"{place}.json", marker)
    except (Damaged, FileNotFoundError):
        if not damage(folder):
            raise


def pull_records(store: Store, remote: Remote, study: str) -> None:
    """Copy the records of a study that the store does not have."""
    for name in remote.names(f"runs/{study}"):
        path = store.root / "runs" / study / name.stem / RECORD
        if name.suffix != ".json" or path.exists():
            continue
        with remote.asked():
            record = remote.read(f"runs/{study}/{name}")
        if fits(record, RECORD_SHAPE):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, record)


def exchange(store: Store, remote: Remote, studies: Collection[str]) -> None:
    """Pull the records of these studies with the steps that they name, and push whatever is not there."""
    for study in studies:
        pull_records(store, remote, study)
        with suppress(Damaged):  # whoever reads it says so
            pull(store, remote, places(read_record(store.root, study) or {}))
    push(store, remote)


def shared(store: Store, study: str) -> bool:
    """`exchange`, if the store has a URL. A failure becomes a notice: False, and the next run goes on from there."""
    try:
        if store.url:
            exchange(store, Remote(store.url), [study])
        return True
    except Gone:
        raise
    except UserError as error:
        store.notices.append(f"{error}: what is finished stays in {store.root}, and the next run pushes it")
        return False


@contextmanager
def pushed_regularly(store: Store) -> Iterator[None]:
    """Push what is finished every ten minutes, in a thread, until the block ends, if the store has a URL."""
    ended = threading.Event()

    def push_until_ended() -> None:
        while store.url and not ended.wait(EVERY):
            with suppress(UserError, OSError):  # the end of the study says what was not pushed
                push(store, Remote(store.url))

    thread = threading.Thread(target=push_until_ended, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def sync(store: Store, study: str | None = None) -> int:
    """`python -m moe_lab.study sync [NAME] store=URL`: exchange a study, or all that are there or here.

    Returns 1 when some of the steps that it names are nowhere. Raises UserError for a store without a URL, and when the
    study is nowhere.
    """
    if store.url is None:
        raise UserError(f"store={store.root} is a folder, and sync copies from and to a URL: expected store=URL")
    remote = Remote(store.url)
    studies = sorted({*map(str, remote.names("runs")), *(path.name for path in (store.root / "runs").glob("*"))})
    if study is not None and study not in studies:
        raise unknown("study", study, studies)
    store.create()
    absent = 0
    exchange(store, remote, [study] if study else studies)
    for name in [study] if study else studies:
        named = places(read_record(store.root, name) or {})
        there = sum(store.place(place).exists() for place in named)
        absent += len(named) - there
        print(f"{name}: {there} of the {len(named)} steps that it names are in {store.root}")
    return 1 if absent else 0


def _at_once(work: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(work, names))  # after a failure, what has not begun is left out
