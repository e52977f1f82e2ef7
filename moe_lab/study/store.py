"""The store: one folder per finished step, renamed into place when complete, with checksums and
provenance."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from moe_lab.errors import DISK_FULL, Unavailable, UserError
from moe_lab.json_files import Damaged, parse_sealed, read_sealed, write_sealed
from moe_lab.packs import Packs, packs_in
from moe_lab.paths import is_of_group, store_folder
from moe_lab.results import ID_DIGITS
from moe_lab.study.claims import LIMIT, Claim, Claims, InQueue
from moe_lab.study.integrity import STEP, damaged_files, read_step, seal
from moe_lab.study.provenance import DISK_FULL_MESSAGE
from moe_lab.study.step import Step, identity_document

SCHEMA = 1
MARKER = "store.json"
SCRATCH = re.compile(rf"\.([0-9a-f]{{{ID_DIGITS}}})\.[0-9a-f]{{8}}")
"""Name of a folder with unfinished work: start of the step's id, and a random suffix."""
FOLDER = re.compile(rf"[^.].*-([0-9a-f]{{{ID_DIGITS}}})")
"""Name of the folder of a finished step: its label, and the start of its id."""
SAMPLE = 200
"""Maximum number of steps of a kind in packs that `Store.documents` reads."""
VISIBLE_AFTER = 70.0
"""Seconds after which files of another node are visible: NFS caches folders for up to a minute."""
RETRY_INTERVAL = 5.0
"""Seconds between two attempts to find what another node may have written."""


class StoreGone(Unavailable):
    """The store was deleted or unmounted while it was in use. This does not count as a failure of
    the step."""


class Store:
    """A folder of finished steps, errors of failed steps, claims, and files from which unfinished
    steps resume.

    A finished step is called KIND/NAME. NAME is the step's label, "-", and the start of the step's
    id (ID_DIGITS digits). The step is the folder KIND/NAME, or part of a pack, a file of many small
    steps. Its file STEP has its identity and the hashes of its other files. Sealed documents hold a
    hash of themselves. Damaged files are set aside: moved to the folder `damaged`.

    `limit`, `in_queue`: see `Claims`. Before `create` is called, nothing is written or moved, so
    the folder may be missing or read-only. Raises UserError for an empty path, a URL, a file, a
    folder that is no store, and a store of a newer moe_lab.
    """

    def __init__(
        self, root: str | Path, limit: float = LIMIT, in_queue: InQueue | None = None
    ) -> None:
        self.root = store_folder(str(root))
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"store={root} is a file: expected a folder, or a new name")
        self.claims = Claims(self.root / "claims", in_queue, limit)
        self.notices: list[str] = []
        """Sentences about damage that have not been printed yet."""
        self.shared = self.claims.shared = is_of_group(self.root)
        """Whether the folder belongs to a group, whose members may all resume unfinished steps."""
        self._is_writable = False
        """Whether `create` was called."""
        self._hashed_ids: set[str] = set()
        """Ids of the steps whose files this process has hashed or published."""
        self._awaited_ids: set[str] = set()
        """Ids of the steps that `is_readable` has waited for."""
        self._index: dict[str, tuple[int, dict[str, Path]]] = {}
        """Kind -> modification time of the kind's folder (ns), and its steps: start of the id ->
        folder."""
        self._check_marker()

    @cached_property
    def packs(self) -> Packs:
        """The packs of the store, which hold small steps."""
        return packs_in(self.root.absolute())

    def create(self) -> Store:
        """Create the folder of the store if it is missing, and let all methods write to the store
        from now on. Returns this object. Raises UserError when the folder cannot be written."""
        self._is_writable = True
        # damage that these notices report is found again: the damaged files are then set aside,
        # with a new notice
        self.notices.clear()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.shared = self.claims.shared = is_of_group(self.root)
            self._check_marker()
            if not (self.root / MARKER).exists():
                self.write(self.root / MARKER, {"schema": SCHEMA})
            os.utime(self.root)  # raises OSError if this user may not write to the folder
        except OSError as error:
            if error.errno in DISK_FULL:
                raise UserError(DISK_FULL_MESSAGE) from None
            raise UserError(
                f"store={self.root} cannot be written ({error.strerror}): name a folder you own; "
                f"also=[{self.root}] uses what is finished there"
            ) from None
        return self

    def _check_marker(self) -> None:
        """Check MARKER, the file with the schema of the store. Raise UserError when a newer moe_lab
        wrote it, or when it is damaged and the store has no folder `runs`. In a store with `runs`,
        a damaged marker is set aside. A missing marker is no error."""
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
                f"reads up to {SCHEMA}: upgrade moe_lab or name another store"
            )

    def exists(self) -> bool:
        """Whether the folder is a store. A store whose marker was set aside still has the folder
        `runs`."""
        return any(os.path.lexists(self.root / name) for name in (MARKER, "runs"))

    def check_exists(self) -> None:
        """Raise StoreGone when the folder is no longer a store."""
        if not self.exists():
            raise StoreGone(
                f"store={self.root} is gone: it was deleted or unmounted, or this machine does not "
                "see it; no step counts as failed: restore it and start the same command again"
            )

    @contextlib.contextmanager
    def errors_as_sentences(self) -> Iterator[None]:
        """A context that turns errors about the store into sentences for the user. An OSError
        becomes a StoreGone if the store is gone. Otherwise an OSError becomes a UserError if it is
        about a file in the store or a full disk. Damaged becomes a UserError."""
        try:
            yield
        except Damaged as error:
            advice = (
                f"`python -m moe_lab.study verify NAME store={self.root}`, then start the "
                "study again"
            )
            raise UserError(f"store={self.root}: {error}: {advice}") from None
        except OSError as error:
            self.check_exists()
            is_outside = error.filename and not str(error.filename).startswith(str(self.root))
            if error.errno in DISK_FULL:
                raise UserError(
                    f"{error.filename}: {error.strerror}" if is_outside else DISK_FULL_MESSAGE
                ) from None
            if is_outside or not error.filename:
                raise
            raise UserError(f"store={self.root}: {error.strerror}: {error.filename}") from None

    @property
    def file_mode(self) -> int | None:
        """Permissions of new files, if the store belongs to a group. Otherwise None, for the
        permissions that the umask gives."""
        return 0o664 if self.shared else None

    @property
    def umask(self) -> int:
        """The umask of processes that write into the store, as an argument of `subprocess`, where
        -1 stands for the umask of this process."""
        return 0o002 if self.shared else -1

    def share(self, path: Path) -> None:
        """If the store belongs to a group, let the group write a file or folder that this process
        has created."""
        if self.shared:
            path.chmod(0o2775 if path.is_dir() else 0o664)

    def make_folder(self, folder: Path) -> None:
        """Create a folder inside the store, and the missing folders above it. Raises
        FileNotFoundError when the store itself is gone."""
        try:
            folder.mkdir()
        except FileExistsError:
            return
        except FileNotFoundError:
            if folder.parent == self.root:  # the store itself is missing
                raise
            self.make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
        self.share(folder)

    def write(self, path: Path, document: Mapping[str, Any]) -> None:
        """Write `document` to the file `path` of the store, as a sealed document."""
        write_sealed(path, document, mode=self.file_mode)

    def read(self, path: Path, shape: Any, consequence: str) -> Any:
        """The sealed document in the file `path` of the store; None when the file is missing or
        damaged. A damaged file is set aside, see `set_aside` for `consequence`. `shape`: see
        `read_sealed`."""
        try:
            return read_sealed(path, shape)
        except FileNotFoundError:
            return None
        except Damaged:
            self.set_aside(path, "damaged", consequence)
            return None

    def path(self, step: Step) -> Path:
        """Folder of a finished step that is not in a pack. The folder may have another label than
        the step, if another run has stored the step."""
        return self.folder(step.folder)

    def folder(self, name: str) -> Path:
        """Folder of the finished step KIND/NAME. If this folder is missing, the folder of the step
        with the same id and another label. If both are missing, as for a step in a pack, the path
        of the missing folder KIND/NAME."""
        folder = self.root / name
        if folder.exists():
            return folder
        kind, _, _ = name.partition("/")
        return self.folders_of_kind(kind).get(name[-ID_DIGITS:], folder)

    def stored_name(self, step: Step) -> str | None:
        """KIND/NAME of a finished step, with the label under which the step is stored. None when
        the step is not in the store."""
        start = step.id[:ID_DIGITS]
        if start not in self.packs:
            # most steps are stored under their own label, which takes one system call to check
            if (self.root / step.folder).exists():
                return step.folder
            if folder := self.folders_of_kind(step.kind).get(start):
                return f"{step.kind}/{folder.name}"
        return self.packs.find(start)

    def content(self, name: str, file: str) -> bytes:
        """Content of a file of the finished step KIND/NAME. Raises FileNotFoundError when the file
        is missing, and Damaged when the content has another hash than STEP states."""
        content = self._read_file(name, file)
        entry = self.document(name)["files"].get(file, {})
        # STEP does not list itself: it is sealed, and `document` has checked the hash in the seal
        if file != STEP and sha256(content).hexdigest() != entry.get("sha256"):
            raise Damaged(f"{name}: {file} is damaged")
        return content

    def _read_file(self, name: str, file: str) -> bytes:
        """Content of a file of the step KIND/NAME, from its folder, or else from a pack. The
        content is not compared with its hash. Raises FileNotFoundError when the file is missing."""
        try:
            return (self.folder(name) / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return self.packs.read(name[-ID_DIGITS:], file)

    def document(self, name: str) -> dict[str, Any]:
        """Content of STEP of the finished step KIND/NAME. Raises FileNotFoundError when STEP is
        missing, and Damaged when it is damaged."""
        document: dict[str, Any] = parse_sealed(self._read_file(name, STEP), {}, f"{name}/{STEP}")
        return document

    def documents(self, kind: str) -> Iterator[Any]:
        """Content of STEP for finished steps of a kind: all steps in folders, then at most SAMPLE
        steps in packs. A STEP that cannot be read is left out."""
        for folder in self.folders_of_kind(kind).values():
            with contextlib.suppress(OSError, Damaged):
                yield read_step(folder)
        self.packs.refresh()
        packed_starts = [
            start for start, name in self.packs.steps().items() if name.startswith(f"{kind}/")
        ]
        for start in packed_starts[:SAMPLE]:
            with contextlib.suppress(FileNotFoundError, Damaged):
                yield parse_sealed(self.packs.read(start, STEP), {}, start)

    def finished_names(self) -> dict[str, str]:
        """Start of the id -> KIND/NAME, for all finished steps in folders and packs. Nothing is
        checked, so damaged steps in folders are included."""
        # folders are read before packs: a step that moves to a pack meanwhile is then found there
        folders = {
            start: f"{path.parent.name}/{path.name}"
            for start, (path, *_) in self.step_folders().items()
        }
        self.packs.refresh()
        return {**self.packs.steps(), **folders}

    def folders_of_kind(self, kind: str) -> dict[str, Path]:
        """Start of the id -> folder, for all finished steps of a kind that are not in packs. The
        folder KIND is only read again when its modification time has changed."""
        parent = self.root / kind
        time_ns = parent.stat().st_mtime_ns if parent.exists() else 0
        # a kind that is not in the index is read: no folder has the time -1
        indexed_time, folders = self._index.get(kind, (-1, {}))
        if time_ns != indexed_time:
            entries = os.scandir(parent) if time_ns else ()
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
            folders = {name[-ID_DIGITS:]: parent / name for name in names}
            self._index[kind] = (time_ns, folders)
        return folders

    def log(self, name: str) -> Path:
        """File with the output of the step KIND/NAME in worker processes. The file is missing if
        the step printed nothing."""
        return self.root / "logs" / f"{name}.log"

    def partial(self, step: Step) -> Path:
        """Folder in which an unfinished step saves files to resume from."""
        return self.root / "partial" / step.id[:ID_DIGITS]

    def remove_resume_files(self, finished: Set[str]) -> None:
        """Remove the resume files of finished steps. Resume files remain if a process is killed
        right after it has published a step. `finished`: ids of the finished steps."""
        paths = list((self.root / "partial").glob("*"))
        if not paths:
            return
        starts = {step_id[:ID_DIGITS] for step_id in finished}
        for path in paths:
            if path.name in starts:
                shutil.rmtree(path, ignore_errors=True)

    def is_finished(self, step: Step) -> bool:
        """Whether the step is finished and undamaged, judged by sizes and modification times of
        files. A damaged step is set aside, with a notice.

        STEP has the modification time that all files of the step were given. A file with another
        time, as in a copied store, is hashed. If its hash is right, it gets the time in STEP."""
        return self._is_sound(step.folder)

    def finished_ids(self, steps: Iterable[Step]) -> set[str]:
        """Ids of the finished and undamaged steps among `steps`. Steps in folders are checked by
        `is_finished`. Steps in packs count as undamaged, but a pack that cannot be read is set
        aside."""
        # folders are read before packs: a step that moves to a pack meanwhile is then found there
        folders = self.step_folders()
        self.packs.refresh()
        for path in self.packs.damaged_packs:
            if path.exists():
                self.set_aside(path, "damaged", "its steps are computed again")
        packed_starts = self.packs.id_starts()
        done = set()
        for step in steps:
            start = step.id[:ID_DIGITS]
            if start in packed_starts or (start in folders and self.is_finished(step)):
                done.add(step.id)
        return done

    def is_readable(self, step: Step) -> bool:
        """Whether a step that is about to be read is finished and undamaged.

        In the first call for a step, a missing step is looked up again for VISIBLE_AFTER seconds,
        as another node may just have written it. The files of a step are hashed once in this
        process, as modification times do not reveal bits that flipped on the disk. Later calls
        judge the step as `is_finished` does."""
        if step.id not in self._awaited_ids:
            for _ in retries():
                if self.folder(step.folder).exists() or self.packs.find(step.id[:ID_DIGITS]):
                    break
            self._awaited_ids.add(step.id)
        if not self._is_sound(step.folder, hash_all=step.id not in self._hashed_ids):
            return False
        self._hashed_ids.add(step.id)
        return True

    def damaged_files(self, name: str, *, hash_all: bool = False) -> dict[str, str]:
        """Missing and damaged files of the step KIND/NAME: file -> "missing" or "damaged", see
        `integrity.damaged_files`. A step in a pack is only checked if `hash_all`. If it is damaged,
        the start of its id is added to `packs.damaged_steps`."""
        folder = self.root / name
        states = damaged_files(folder, hash_all=hash_all)
        if STEP in states:
            stored_folder = self.folder(name)  # perhaps under another label
            if stored_folder != folder:
                folder = stored_folder
                states = damaged_files(folder, hash_all=hash_all)
        # a step whose folder is missing may be in a pack
        if not states or folder.exists() or not self.packs.find(name[-ID_DIGITS:]):
            return states
        if not hash_all:
            return {}
        states = self._damaged_files_in_pack(name)
        if states:
            self.packs.damaged_steps.add(name[-ID_DIGITS:])
        return states

    def _damaged_files_in_pack(self, name: str) -> dict[str, str]:
        """Missing and damaged files of the step KIND/NAME in a pack: file -> "missing" or
        "damaged". All files are hashed."""
        try:
            files = self.document(name)["files"]
        except FileNotFoundError:
            states = {STEP: "missing"}
        except Damaged:
            states = {STEP: "damaged"}
        else:
            states = {}
            for file in files:
                try:
                    self.content(name, file)
                except FileNotFoundError:
                    states[file] = "missing"
                except Damaged:
                    states[file] = "damaged"
        # a step that was removed from its pack meanwhile has missing files, but is not damaged
        return states if self.packs.find(name[-ID_DIGITS:]) else {}

    def _is_sound(self, name: str, *, hash_all: bool = False) -> bool:
        """Whether the step KIND/NAME is finished and undamaged. A damaged step in a folder is set
        aside. A damaged step in a pack stays there, and a notice is added."""
        states = self.damaged_files(name, hash_all=hash_all)
        if not states:
            return True
        folder = self.folder(name)
        problem = ", ".join(f"{file} is {state}" for file, state in states.items())
        if folder.exists():
            self.set_aside(folder, problem, "computed again")
        elif name[-ID_DIGITS:] in self.packs.damaged_steps:
            self.notices.append(f"{name}: {problem}, in a pack: computed again")
        return False

    def set_aside(self, path: Path, problem: str, consequence: str) -> None:
        """Move a damaged file or folder `path` of the store to the folder `damaged`, and add a
        notice with the `problem`, such as "damaged", and the `consequence`, such as "computed
        again". Before `create` is called, nothing is moved, and the notice says that the next run
        sets `path` aside."""
        name = path.absolute().relative_to(self.root.absolute())
        sentence = f"{name}: {problem}: the next run sets it aside"
        if self._is_writable:
            target = self.root / "damaged" / f"{'-'.join(name.parts)}-{uuid.uuid4().hex[:6]}"
            self.make_folder(target.parent)
            try:
                path.rename(target)
            except FileNotFoundError:  # another run has set it aside first
                return
            sentence = f"{name}: {problem}: moved to {target} and {consequence}"
        if sentence not in self.notices:
            self.notices.append(sentence)

    def error(self, step_id: str) -> dict[str, Any] | None:
        """The stored error of a step, see `fail`. None when no error is stored, and when the file
        of the error is damaged. A damaged file is set aside. `step_id`: the id or its start."""
        path = self.root / "failed" / f"{step_id[:ID_DIGITS]}.json"
        content: dict[str, Any] | None = self.read(
            path, {"message": str}, "the step is tried again"
        )
        return content

    def fail(self, step: Step, error: dict[str, Any]) -> None:
        """Store the error of a failed step for later runs. `error`: JSON data with a `message`."""
        folder = self.root / "failed"
        # if the error cannot be stored, as on a full disk, the next run tries the step again
        with contextlib.suppress(OSError):
            self.make_folder(folder)
            document = {"step": step.folder, "time": time.time(), **error}
            self.write(folder / f"{step.id[:ID_DIGITS]}.json", document)

    def forget(self, step_id: str) -> None:
        """Remove the stored error of a step, if there is one, so that the step is tried again.
        `step_id`: the id or its start."""
        (self.root / "failed" / f"{step_id[:ID_DIGITS]}.json").unlink(missing_ok=True)

    def step_folders(self) -> Mapping[str, list[Path]]:
        """Start of the id -> folders, for all folders that are named like a finished step. A step
        that is stored under several labels has several folders. Steps in packs are left out."""
        folders = defaultdict(list)
        for parent in sorted(self.root.glob("[!.]*/")):
            # lost+found, or a folder of a colleague, may not be readable
            with contextlib.suppress(PermissionError):
                for entry in os.scandir(parent):
                    if (match := FOLDER.fullmatch(entry.name)) and entry.is_dir():
                        folders[match[1]].append(Path(entry.path))
        return folders

    def claim(self, step: Step) -> contextlib.AbstractContextManager[Path | None]:
        """A context in which this process computes `step`: the context of `claim_named` for the
        step, which yields a scratch folder, or None if the step is already finished."""
        return self.claim_named(step.folder, identity_document(step))

    @contextlib.contextmanager
    def claim_named(self, name: str, document: Mapping[str, Any]) -> Iterator[Path | None]:
        """A context that holds the claim of the step KIND/NAME. It yields a scratch folder for the
        step's files, or None if the step is already finished. `document`: the identity of the step,
        or the content of its STEP in another store.

        When the block ends without an exception, the step is published: the scratch folder is
        renamed to KIND/NAME. A process that dies leaves only the scratch folder and a stale claim.
        Raises Busy when another process holds the claim, or took the claim over while this process
        was suspended. Raises StoreGone when the store or the scratch folder was removed."""
        start = document["id"][:ID_DIGITS]
        parent = (self.root / name).parent
        self.check_exists()
        with self.claims.take(start) as claim:
            # A former owner of the claim may only be suspended. Its scratch folder is renamed, so
            # that it can no longer publish the step when it resumes. The step is looked up after
            # this, and found if the former owner has published the step already.
            for abandoned in parent.glob(f".{start}.*"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(rename_as_scratch(abandoned, start), ignore_errors=True)
            # the index compares modification times, which may be too coarse to show a step that
            # was just published
            self._index.clear()
            if self._is_sound(name):
                yield None
                return
            # with the token of the claim, no two owners have the same scratch folder
            scratch = parent / f".{start}.{claim.token[:8]}"
            self.make_folder(scratch)
            try:
                yield scratch
                self._publish(name, document, scratch, claim)
            except Exception:
                # if the store or the claim was lost, that is the error to raise
                self.check_exists()
                claim.check()
                if not os.path.lexists(scratch):
                    raise StoreGone(
                        f"{scratch} was removed while {name} was written there"
                    ) from None
                raise
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def _publish(self, name: str, document: Mapping[str, Any], scratch: Path, claim: Claim) -> None:
        """Seal the scratch folder, rename it to KIND/NAME, and remove the step's resume files and
        stored error. `document`: see `seal`. If another process has published the step first, the
        scratch folder is only sealed."""
        seal(scratch, document)
        # raises StoreGone if the store was deleted during the work and the work recreated folders
        self.check_exists()
        claim.check()
        try:
            scratch.rename(self.root / name)
        except OSError:
            # the error is ENOTEMPTY or EEXIST, on sshfs EPERM, if another owner has published first
            if scratch.exists() and (self.root / name / STEP).exists():
                return
            raise
        step_id = document["id"]
        self._hashed_ids.add(step_id)
        shutil.rmtree(self.root / "partial" / step_id[:ID_DIGITS], ignore_errors=True)
        self.forget(step_id)


def retries() -> Iterator[None]:
    """Yield None at once, and then every RETRY_INTERVAL seconds for VISIBLE_AFTER seconds. After
    each yield, the caller looks for a file that another node may just have written."""
    deadline = time.monotonic() + VISIBLE_AFTER
    yield
    while time.monotonic() < deadline:
        time.sleep(RETRY_INTERVAL)
        yield


def rename_as_scratch(folder: Path, step_id: str) -> Path:
    """Rename a folder to a new path, which is returned. The new name is that of a scratch folder of
    the step, but with a random suffix, so that no owner of a claim uses the folder. `step_id`: the
    id or its start."""
    scratch = folder.with_name(f".{step_id[:ID_DIGITS]}.{uuid.uuid4().hex[:8]}")
    folder.rename(scratch)
    return scratch
