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
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from moe_lab.errors import DISK_FULL, Unavailable, UserError
from moe_lab.json_files import Damaged, Document, parse_sealed, read_sealed, write_sealed
from moe_lab.packs import Packs, packs_in
from moe_lab.paths import is_of_group, store_folder
from moe_lab.result_files import ID_DIGITS, start_of
from moe_lab.study.claims import LIMIT, Claim, Claims
from moe_lab.study.provenance import DISK_FULL_MESSAGE, STEP, damaged_files, seal
from moe_lab.study.step import Step, identity_document

SCHEMA = 1
MARKER = "store.json"
SCRATCH = re.compile(rf"\.([0-9a-f]{{{ID_DIGITS}}})\.[0-9a-f]{{8}}")
"""Name of a folder with unfinished work: start of the step's id, and a random suffix."""
FOLDER = re.compile(rf"[^.].*-([0-9a-f]{{{ID_DIGITS}}})")
"""Name of the folder of a finished step: its label, and the start of its id."""
SAMPLE = 200
"""Maximum number of steps that `Store.documents` reads."""
VISIBLE_AFTER = 70.0
"""Seconds after which files of another node are visible: NFS caches folders for up to a minute."""
RETRY_INTERVAL = 5.0
"""Seconds between two attempts to find what another node may have written."""


class StoreGone(Unavailable):
    """The store was deleted or unmounted while it was in use. This does not count as a failure of
    the step."""


class Store:
    """A folder with the files of finished steps, the errors of failed steps, and files from which
    unfinished steps resume. While a process computes a step, it holds a claim on the step, so that
    no other process computes the step too.

    A finished step is called KIND/NAME. NAME is the step's label, "-", and the start of the step's
    id (ID_DIGITS digits). The files of the step are in the folder KIND/NAME, or in a pack, which is
    one file with the files of many small steps. The file STEP of a step states the step's identity,
    and the hash of each other file of the step.

    Sealed documents, such as STEP, are JSON files that end with a hash of their content. A damaged
    file or folder is set aside: it is moved to the folder `damaged`, and a notice, which is a
    sentence for the user, is added to `notices`.

    Before `create` is called, nothing is written or moved. The constructor raises UserError for an
    empty path, a URL, a file, a folder that is no store, and a store of a newer moe_lab. Its
    argument `limit`: see `Claims`.
    """

    def __init__(self, root: str | Path, limit: float = LIMIT) -> None:
        self.root = store_folder(str(root))
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"store={root} is a file: expected a folder, or a new name")
        self.claims = Claims(self.root / "claims", limit)
        self.notices: list[str] = []
        """Sentences about damage that have not been printed yet."""
        self.shared = self.claims.shared = is_of_group(self.root)
        """Whether the folder belongs to a group of users."""
        self._is_writable = False
        """Whether `create` was called."""
        self._hashed_ids: set[str] = set()
        """Ids of the steps whose files this process has hashed or published."""
        self._awaited_ids: set[str] = set()
        """Ids of the steps that were given to `is_readable`, which waits only once for missing
        files."""
        self._check_marker()

    @cached_property
    def packs(self) -> Packs:
        return packs_in(self.root.absolute())

    def create(self) -> Store:
        """Create the folder of the store if it is missing, and let all methods write to the store
        from now on. UserError when this user cannot write to the folder."""
        self._is_writable = True
        # damaged files get a new notice when they are read again
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
        """Raise UserError when a newer moe_lab wrote the file MARKER. A damaged MARKER is set aside
        if there is a folder `runs`; otherwise, UserError."""
        marker = self.root / MARKER
        try:
            schema = read_sealed(marker)["schema"]
        except FileNotFoundError:
            return
        except Damaged:
            if not (self.root / "runs").is_dir():
                raise UserError(
                    f"store={self.root} is not a moe_lab store: {marker} is damaged"
                ) from None
            self.set_aside(marker, problem="damaged", consequence="written again")
            return
        if schema > SCHEMA:
            raise UserError(
                f"store={self.root} has schema {schema}, written by a newer moe_lab, and this one "
                f"reads up to {SCHEMA}: upgrade moe_lab or name another store"
            )

    def exists(self) -> bool:
        """Whether the folder is a store."""
        # a store whose damaged MARKER was set aside has only `runs`
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
        """A context that replaces errors by errors with a sentence for the user:

        - Damaged: by UserError
        - any OSError while the store is gone: by StoreGone
        - OSError about a file of the store, or about any full disk: by UserError"""
        try:
            yield
        except Damaged as error:
            advice = f"`moe-lab verify NAME store={self.root}`, then start the study again"
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
        """Permissions of new files; None for those that the umask gives."""
        return 0o664 if self.shared else None

    @property
    def umask(self) -> int:
        """The umask for a `subprocess` that writes into the store; -1 is the umask of this
        process."""
        return 0o002 if self.shared else -1

    def share(self, path: Path) -> None:
        """Let the store's group, if any, write a file or folder that this process created."""
        if self.shared:
            path.chmod(0o2775 if path.is_dir() else 0o664)

    def make_folder(self, folder: Path) -> None:
        """Create a folder of the store and its missing parents. Raises FileNotFoundError when the
        store itself is gone."""
        try:
            folder.mkdir()
        except FileExistsError:
            return
        except FileNotFoundError:
            if folder.parent == self.root:
                raise
            self.make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
        self.share(folder)

    def write(self, path: Path, document: Document) -> None:
        """Write `document` to `path` as a sealed document."""
        write_sealed(path, document, mode=self.file_mode)

    def read(self, path: Path, consequence: str) -> Document | None:
        """Read a sealed document. Returns it without its hash, or None when the file is missing or
        damaged. A damaged file is set aside.

        `consequence`: end of the notice about a damaged file, such as "the step is tried again"."""
        try:
            return read_sealed(path)
        except FileNotFoundError:
            return None
        except Damaged:
            self.set_aside(path, "damaged", consequence)
            return None

    def path(self, step: Step) -> Path:
        """Folder of a finished step that is not in a pack, perhaps with another label than the
        step."""
        return self.folder(step.folder)

    def folder(self, name: str) -> Path:
        """Folder of the finished step KIND/NAME, perhaps with another label. Without such a folder,
        the path of the missing folder KIND/NAME."""
        folder = self.root / name
        if folder.exists():
            return folder
        kind, _, _ = name.partition("/")
        return self.folders_of_kind(kind).get(start_of(name), folder)

    def content(self, name: str, file: str) -> bytes:
        """Content of a file of the finished step KIND/NAME. Raises FileNotFoundError when the file
        is missing, and Damaged when its hash is not the one in STEP."""
        content = self.packs.read_from(self.folder(name), file)
        entry = self.document(name)["files"].get(file, {})
        # STEP has no entry for itself: `document` has checked it
        if file != STEP and sha256(content).hexdigest() != entry.get("sha256"):
            raise Damaged(f"{name}: {file} is damaged")
        return content

    def document(self, name: str) -> Document:
        """Content of STEP of the finished step KIND/NAME. Raises FileNotFoundError when STEP is
        missing, and Damaged when it is damaged."""
        content = self.packs.read_from(self.folder(name), STEP)
        return parse_sealed(content, f"{name}/{STEP}")

    def documents(self, kind: str) -> Iterator[Document]:
        """Content of STEP for at most SAMPLE finished steps of a kind."""
        names = [name for name in self.finished_names().values() if name.startswith(f"{kind}/")]
        for name in names[:SAMPLE]:
            with contextlib.suppress(OSError, Damaged):
                yield self.document(name)

    def finished_names(self) -> dict[str, str]:
        """Start of the id -> KIND/NAME, for all finished steps. Folders are not checked for
        damage."""
        # folders are read before packs: a step that moves to a pack meanwhile is then found there
        folders = {
            id_start: f"{path.parent.name}/{path.name}"
            for id_start, (path, *_) in self.step_folders().items()
        }
        self.packs.refresh()
        return {**self.packs.steps(), **folders}

    def folders_of_kind(self, kind: str) -> dict[str, Path]:
        """Start of the id -> folder, for all finished steps of a kind that are not in packs."""
        parent = self.root / kind
        names = os.listdir(parent) if parent.exists() else ()
        return {start_of(name): parent / name for name in names if not name.startswith(".")}

    def log(self, name: str) -> Path:
        """File with the output of the step KIND/NAME in worker processes. The file is missing if
        the step printed nothing."""
        return self.root / "logs" / f"{name}.log"

    def partial(self, step: Step) -> Path:
        """Folder in which an unfinished step saves files to resume from."""
        return self.root / "partial" / step.id_start

    def is_finished(self, step: Step) -> bool:
        """Whether the step is finished and undamaged. A damaged step is set aside. A step in a pack
        counts as undamaged.

        Hashing takes long, so a file is only hashed if its modification time is not the one in
        STEP, as in a copied store."""
        return self._is_sound(step.folder)

    def finished_ids(self, steps: Iterable[Step]) -> set[str]:
        """Ids of the finished and undamaged steps among `steps`, see `is_finished`. A pack that
        cannot be read is set aside."""
        names = self.finished_names()
        for path in self.packs.damaged_packs:
            if path.exists():
                self.set_aside(path, "damaged", "its steps are computed again")
        done = set()
        for step in steps:
            if step.id_start in names and (step.id_start in self.packs or self.is_finished(step)):
                done.add(step.id)
        return done

    def is_readable(self, step: Step) -> bool:
        """Whether a step that is about to be read is finished and undamaged.

        The first call for a step looks for the step during VISIBLE_AFTER seconds, as another node
        may just have written it. The files of a step are hashed once in this process, as
        modification times do not reveal bits that flipped on the disk."""
        if step.id not in self._awaited_ids:
            for _ in retries():
                if self.folder(step.folder).exists() or self.packs.find(step.id_start):
                    break
            self._awaited_ids.add(step.id)
        if not self._is_sound(step.folder, hash_all=step.id not in self._hashed_ids):
            return False
        self._hashed_ids.add(step.id)
        return True

    def damaged_files(self, name: str, *, hash_all: bool) -> dict[str, str]:
        """Missing and damaged files of the step KIND/NAME: file -> "missing" or "damaged". STEP is
        missing if the step is not in the store.

        With `hash_all`, every file is hashed. Without it, a file in a folder is only hashed if its
        modification time is not the time in STEP, and a step in a pack counts as undamaged."""
        folder = self.folder(name)
        states = damaged_files(folder, hash_all=hash_all)
        # a missing step may be in a pack; in all other cases, the result is known
        if not states or folder.exists() or not self.packs.find(start_of(name)):
            return states
        if not hash_all:
            return {}
        states = self._damaged_files_in_pack(name)
        if states:
            self.packs.damaged_steps.add(start_of(name))
        return states

    def _damaged_files_in_pack(self, name: str) -> dict[str, str]:
        """The result of `damaged_files` for a step in a pack."""
        states = {}
        files: Iterable[str] = [STEP]
        with contextlib.suppress(FileNotFoundError, Damaged):  # reported for STEP below
            files = self.document(name)["files"]
        for file in files:
            try:
                self.content(name, file)
            except FileNotFoundError:
                states[file] = "missing"
            except Damaged:
                states[file] = "damaged"
        # a step that was removed from its pack meanwhile has missing files, but is not damaged
        return states if self.packs.find(start_of(name)) else {}

    def _is_sound(self, name: str, *, hash_all: bool = False) -> bool:
        """Whether the step KIND/NAME is finished and undamaged. A damaged step in a folder is set
        aside."""
        states = self.damaged_files(name, hash_all=hash_all)
        if not states:
            return True
        folder = self.folder(name)
        problem = ", ".join(f"{file} is {state}" for file, state in states.items())
        if folder.exists():
            self.set_aside(folder, problem, "computed again")
        elif start_of(name) in self.packs.damaged_steps:
            self.notices.append(f"{name}: {problem}, in a pack: computed again")
        return False

    def set_aside(self, path: Path, problem: str, consequence: str) -> None:
        """Move a damaged file or folder of the store to the folder `damaged`, and add a notice.
        Before `create` is called, only the notice is added. `problem`, such as "damaged", and
        `consequence`, such as "computed again": parts of the notice."""
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

    def error(self, step_id: str) -> Document | None:
        """The stored error of a step, see `fail`. None when no error is stored, or its file is
        damaged. `step_id`: the id or its start."""
        return self.read(self._failure(step_id), "the step is tried again")

    def _failure(self, step_id: str) -> Path:
        """File with the stored error of a step."""
        return self.root / "failed" / f"{step_id[:ID_DIGITS]}.json"

    def fail(self, step: Step, error: Document) -> None:
        """Store the error of a failed step for later runs. `error`: JSON data with a `message`."""
        path = self._failure(step.id)
        # if the error cannot be stored, as on a full disk, the next run tries the step again
        with contextlib.suppress(OSError):
            self.make_folder(path.parent)
            self.write(path, {"step": step.folder, "time": time.time(), **error})

    def forget(self, step_id: str) -> None:
        """Remove the stored error of a step, so that the step is tried again. `step_id`: the id or
        its start."""
        self._failure(step_id).unlink(missing_ok=True)

    def step_folders(self) -> Mapping[str, list[Path]]:
        """Start of the id -> folders, for all folders that are named like a finished step. A step
        that is stored under several labels has several folders."""
        folders = defaultdict(list)
        for parent in sorted(self.root.glob("[!.]*/")):
            # lost+found, or a folder of a colleague, may not be readable
            with contextlib.suppress(PermissionError):
                for entry in os.scandir(parent):
                    if (match := FOLDER.fullmatch(entry.name)) and entry.is_dir():
                        folders[match[1]].append(Path(entry.path))
        return folders

    def claim(self, step: Step) -> contextlib.AbstractContextManager[Path | None]:
        """A context that holds the claim of `step`, see `claim_named`."""
        return self.claim_named(step.folder, identity_document(step))

    @contextlib.contextmanager
    def claim_named(self, name: str, document: Document) -> Iterator[Path | None]:
        """A context that holds the claim of the step KIND/NAME. It yields a scratch folder for the
        step's files, or None if the step is already finished. `document`: the identity of the step,
        see `identity_document`. For a step that is copied from another store, `document` is the
        content of STEP there.

        When the block ends without an exception, the step is published: the scratch folder is
        renamed to KIND/NAME. Raises Busy when another process holds the claim, or has taken it over
        while this process was suspended. Raises StoreGone when the store or the scratch folder was
        removed."""
        id_start = document["id"][:ID_DIGITS]
        parent = (self.root / name).parent
        self.check_exists()
        with self.claims.take(id_start) as claim:
            # An earlier owner of the claim is perhaps suspended. Its scratch folder is renamed, so
            # that this owner cannot publish the step. Only then the step is looked up, as the
            # owner may have published it before the renaming.
            for abandoned in parent.glob(f".{id_start}.*"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(rename_as_scratch(abandoned, id_start), ignore_errors=True)
            if self._is_sound(name):
                yield None
                return
            # with the token of the claim, no two owners have the same scratch folder
            scratch = parent / f".{id_start}.{claim.token[:8]}"
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

    def _publish(self, name: str, document: Document, scratch: Path, claim: Claim) -> None:
        """Write STEP into the scratch folder and rename the folder to KIND/NAME. `document`: see
        `claim_named`."""
        seal(scratch, document)
        # if the store was deleted, the work may have created the scratch folder again
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
        # `is_readable` need not hash files that this process has just published
        self._hashed_ids.add(step_id)
        shutil.rmtree(self.root / "partial" / step_id[:ID_DIGITS], ignore_errors=True)
        self.forget(step_id)


def retries() -> Iterator[None]:
    """Yield None at once, and then every RETRY_INTERVAL seconds for VISIBLE_AFTER seconds."""
    deadline = time.monotonic() + VISIBLE_AFTER
    yield
    while time.monotonic() < deadline:
        time.sleep(RETRY_INTERVAL)
        yield


def rename_as_scratch(folder: Path, step_id: str) -> Path:
    """Rename a folder to a scratch folder of the step that no process uses, and return its new
    path. `step_id`: the id or its start."""
    scratch = folder.with_name(f".{step_id[:ID_DIGITS]}.{uuid.uuid4().hex[:8]}")
    folder.rename(scratch)
    return scratch
