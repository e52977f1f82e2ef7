"""Read the files of a store as objects and data frames, and record unreadable files as gaps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moe_lab.json_files import parse_sealed
from moe_lab.packs import packs_in
from moe_lab.result_files import ID_DIGITS

SCHEMA = 1
"""Newest schema of a study's record that this code can read."""

STEP = "step.json"


class Gap(NamedTuple):
    """A missing result. `location` is the name of a step's folder, the label of a cell, or text
    that says what is missing."""

    reason: str
    location: str


class Reader:
    """Reader of the results in `root`, the folder of a store.

    A step is one computation of a study. Its name is also its folder in the store:
    `<kind>/<label>-<id>`. Some steps are packed: the content of their folders is in a pack, one
    file with many steps. Files that cannot be read are recorded in `gaps`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packs = packs_in(root.absolute())
        self.gaps: dict[Gap, None] = {}
        """The gaps, as keys so that each is listed once and in order."""
        self._folders: dict[str, Path | None] = {}
        """Name of a step -> its folder; None when the store does not have the folder."""
        self._folders_by_id: dict[str, dict[str, Path]] = {}
        """Kind of steps -> id of a step -> folder."""
        self._steps: dict[Path, dict[str, Any]] = {}
        """Folder of a step -> content of its step.json; {} when the file is missing."""

    def record_gap(self, reason: str, location: str) -> None:
        """Record a missing result once."""
        self.gaps[Gap(reason, location)] = None

    def step(self, name: str | None, purpose: str, error: str | None = None) -> Path | None:
        """The path of a step's folder; None, with a gap, when the store does not have the folder.

        name: name of the step, None for a step that failed or did not run.
        purpose: what the step is for, such as `mmlu of qwen unpruned`: its gap is recorded under
            this text.
        error: message of the step's failure, None for a step that did not run.
        """
        if name is None:
            self.record_gap(f"failed: {error}" if error else "not computed", purpose)
            return None
        return self.folder(name)

    def folder(self, name: str) -> Path | None:
        """The path of a step's folder; None, with a gap, when the store does not have the
        folder."""
        folder = self.find_folder(name)
        if folder is None:
            self.record_gap("the folder is gone from the store", name)
        return folder

    def find_folder(self, name: str) -> Path | None:
        """The path of a step's folder; None, without a gap, when the store does not have the
        folder. The path of a packed step does not exist on the disk.

        The folder is looked up by its name, or else by the id at the end of the name, because the
        label before the id may differ between runs.
        """
        if name not in self._folders:
            self._folders[name] = self._look_up(name)
        return self._folders[name]

    def _look_up(self, name: str) -> Path | None:
        path = self.root / name
        if path.is_dir():
            return path
        if packed_path := self.packs.find(path.name[-ID_DIGITS:]):
            return self.root / packed_path
        kind_folder = path.parent
        kind = kind_folder.name
        if kind not in self._folders_by_id:
            self._folders_by_id[kind] = {
                child.name[-ID_DIGITS:]: child for child in kind_folder.glob("[!.]*")
            }
        return self._folders_by_id[kind].get(path.name[-ID_DIGITS:])

    def json(self, folder: Path | None, file: str) -> dict[str, Any] | None:
        """Read a JSON document; None, with a gap, when the file cannot be read."""
        if folder is None or (content := self.content(folder, file)) is None:
            return None
        with contextlib.suppress(ValueError):
            document = json.loads(content)
            if isinstance(document, dict):
                return document
        self._add_gap(f"{file} is damaged", folder)
        return None

    def content(self, folder: Path, file: str) -> bytes | None:
        """The content of a file of a step; None, with a gap, when the file cannot be read."""
        try:
            return self._read_verified(folder, file)
        except FileNotFoundError:
            self._add_gap(f"{file} is missing", folder)
        except (OSError, ValueError):
            self._add_gap(f"{file} is damaged", folder)
        return None

    def provenance(self, folder: Path | None) -> dict[str, Any]:
        """The entry "provenance" of a step's step.json; {} when the folder, the file or the entry
        is missing."""
        return self.step_document(folder).get("provenance") or {}

    def step_document(self, folder: Path | None) -> dict[str, Any]:
        """The content of a step's step.json; {} when the folder or the file is missing, and with a
        gap when the file is damaged."""
        if folder is None:
            return {}
        try:
            return self._step(folder)
        except ValueError:
            self._add_gap(f"{STEP} is damaged", folder)
            return {}

    def table(self, folder: Path, file: str, columns: Sequence[str]) -> pa.Table | None:
        """Read those of `columns` that a Parquet file has; None, with a gap, when the file cannot
        be read."""
        content = self.content(folder, file)
        if content is None:
            return None
        try:
            with pq.ParquetFile(pa.BufferReader(content)) as parquet_file:
                # `read` leaves out columns that the file lacks
                return parquet_file.read(columns=list(columns), use_threads=False)
        except (OSError, ValueError, pa.ArrowException):
            self._add_gap(f"{file} is damaged", folder)
            return None

    def frame(self, folder: Path | None, file: str, columns: Sequence[str]) -> pd.DataFrame | None:
        """Read columns of a Parquet file; None, with a gap, when the file cannot be read."""
        table = self.table(folder, file, columns) if folder else None
        return None if table is None else table.to_pandas()

    def _read_verified(self, folder: Path, file: str) -> bytes:
        """The content of a file of a step. Raises ValueError when the content does not have the
        sha256 in step.json."""
        content = self.packs.read_from(folder, file)
        published = self._step(folder).get("files", {}).get(file)
        if published is not None and sha256(content).hexdigest() != published["sha256"]:
            raise ValueError(f"{file} differs from the published file")
        return content

    def has(self, folder: Path, file: str) -> bool:
        """Whether a step has a file."""
        return (folder / file).is_file() or file in self.packs.files(folder.name[-ID_DIGITS:])

    def _step(self, folder: Path) -> dict[str, Any]:
        """The content of a step's step.json; {} when the file is missing. Raises Damaged, a
        ValueError, when it is damaged."""
        if folder not in self._steps:
            document: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError):
                document = parse_sealed(self.packs.read_from(folder, STEP), STEP)
            self._steps[folder] = document
        return self._steps[folder]

    def _add_gap(self, reason: str, folder: Path) -> None:
        self.record_gap(reason, str(folder.relative_to(self.root)))


_NUMBERS = {"seconds": "seconds", "peak": "peak_memory_bytes", "gpu_peak": "peak_gpu_memory_bytes"}
"""Column of `time_and_memory` -> field of a step's provenance."""


def steps_with_inputs(steps: Iterable[str | None], reader: Reader) -> dict[str, Path]:
    """Name of a step -> path of its folder, for `steps` and all their direct and indirect inputs.
    Steps that the store does not have are left out."""
    folders: dict[str, Path] = {}
    remaining_names = [name for name in steps if name]
    while remaining_names:
        name = remaining_names.pop()
        if name in folders or (folder := reader.find_folder(name)) is None:
            continue
        folders[name] = folder
        remaining_names += reader.step_document(folder).get("inputs", {}).values()
    return folders


def step_kind(name: str) -> str:
    """Kind of a step: the part of its name before the slash."""
    return name.partition("/")[0]


def time_and_memory(names: Iterable[str], reader: Reader) -> pd.DataFrame:
    """Time and memory of steps, one row per step whose provenance is known.

    Columns: folder, kind, seconds, peak (largest memory of the step's process in MiB), gpu_peak
    (largest GPU memory in MiB, NaN without a GPU), machine.
    """
    rows = []
    for name in names:
        if provenance := reader.provenance(reader.find_folder(name)):
            numbers = [provenance.get(field) for field in _NUMBERS.values()]
            rows.append((name, step_kind(name), *numbers, str(provenance.get("machine", ""))))
    frame = pd.DataFrame(rows, columns=["folder", "kind", *_NUMBERS, "machine"])
    frame = frame.astype(dict.fromkeys(_NUMBERS, float))
    frame[["peak", "gpu_peak"]] /= 2**20
    return frame


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dictionaries, column -> value."""
    columns = [str(column) for column in frame.columns]
    return [dict(zip(columns, row, strict=True)) for row in frame.to_numpy(object).tolist()]


def stacked(frames: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """Concatenate `columns` of all frames."""
    if not frames:
        return pd.DataFrame(columns=list(columns))
    return pd.concat(frames, ignore_index=True)[list(columns)]


def groups(
    frame: pd.DataFrame, columns: Sequence[str]
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield (key, rows) for each group of rows with equal values in `columns`, in the order in
    which the groups first appear. key: column -> value."""
    if frame.empty:  # an empty frame may lack the columns
        return
    for key, group in frame.groupby(list(columns), sort=False):
        yield dict(zip(columns, key, strict=True)), group
