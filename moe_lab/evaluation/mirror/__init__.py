"""Mirrors: local copies of benchmark data in the layout of the hub, with a manifest of their content.

`python -m moe_lab.evaluation.mirror NAME ... data_root=FOLDER [from=FOLDER]` makes them (make.py).
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown
from moe_lab.json_files import Damaged, read_json

MANIFEST = "moe_lab.json"
_COMMAND = "python -m moe_lab.evaluation.mirror"

Entries = Mapping[str, Mapping[str, Any]]
"""File of a mirror -> its subset, split, rows, bytes, sha256, digest of its rows, source, revision."""

_SHAPE = {"files": {str: {"subset": str, "split": str, "rows": int, "sha256": str, "digest": str}}}
"""Expected form of a manifest."""


def folder(benchmark: BenchmarkConfig) -> Path:
    """The folder of the benchmark's mirror. Raises UserError with the command that makes it when there is none."""
    assert benchmark.data is not None and benchmark.root is not None
    place = Path(benchmark.root).expanduser().absolute() / benchmark.data
    if not (place / MANIFEST).is_file():
        raise UserError(
            f"benchmark {benchmark.name} needs {benchmark.data}, and data_root={benchmark.root} has no mirror of it: "
            f"{_COMMAND} {benchmark.name} data_root={benchmark.root}"
        )
    return place


def digest(benchmark: BenchmarkConfig) -> str:
    """sha256 over the digests, in the manifest, of the rows that a benchmark reads.

    These are the rows of its split, or of all splits if it shows examples. The digest depends neither on the file
    format nor on the source of the data.
    """
    read = _entries(benchmark, None if benchmark.shots else benchmark.split)
    names = sorted([entry["subset"], entry["split"], entry["digest"]] for entry in read.values())
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def check(benchmark: BenchmarkConfig) -> None:
    """Raise UserError when the mirror is missing, is damaged, or does not have the expected number of rows."""
    rows = sum(entry["rows"] for entry in _entries(benchmark, benchmark.split).values())
    wanted = expected_rows(benchmark)
    if wanted is not None and rows != wanted:
        place = " ".join(word for word in (str(folder(benchmark)), benchmark.subset, benchmark.split) if word)
        raise UserError(
            f"benchmark {benchmark.name}: {place} has {rows} rows and should have {wanted}: "
            f"its data is not the published set, or expected is wrong"
        )
    verify(benchmark)


def verify(benchmark: BenchmarkConfig) -> None:
    """Raise UserError naming the first file that differs from the manifest."""
    place = folder(benchmark)
    for name, entry in _entries(benchmark, None if benchmark.shots else benchmark.split).items():
        file = place / name
        state = file.stat() if file.is_file() else None
        if state is None or _sha256(file, state.st_size, state.st_mtime_ns) != entry["sha256"]:
            raise UserError(
                f"benchmark {benchmark.name}: {file} {'is missing, which' if state is None else 'is not what'} "
                f"{MANIFEST} describes: make the mirror again with {_COMMAND} {benchmark.name} "
                f"data_root={benchmark.root}"
            )


def rows(benchmark: BenchmarkConfig) -> list[dict[str, Any]]:
    """The rows of benchmark.subset (null: of all subsets) and benchmark.split, in order."""
    place = folder(benchmark)
    return [row for name in _entries(benchmark, benchmark.split) for row in read_rows(place / name)]


def subsets(benchmark: BenchmarkConfig) -> dict[str, dict[str, list[Path]]]:
    """Subset -> split -> files of the mirror. A data set without subsets has one, called default."""
    place = folder(benchmark)
    by_subset: dict[str, dict[str, list[Path]]] = {}
    for name, entry in _entries(benchmark, None).items():
        by_subset.setdefault(entry["subset"], {}).setdefault(entry["split"], []).append(place / name)
    return by_subset


def expected_rows(benchmark: BenchmarkConfig) -> int | None:
    """Number of rows of the evaluated split. The benchmark has fewer items if the harness selects among the rows."""
    count: int | None = known_data(benchmark).get("rows", {}).get(benchmark.split, benchmark.expected)
    return count


def known_data(benchmark: BenchmarkConfig) -> Mapping[str, Any]:
    """The entry of data_sets.yaml for the benchmark's data: columns, usual file names, and so on."""
    of_data = _data_sets().get(str(benchmark.data), {})
    of_subset: Mapping[str, Any] = of_data.get(benchmark.subset or "default", {})
    return of_subset


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a .parquet, .jsonl or .jsonl.gz file."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        rows_of_table: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        return rows_of_table
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]


def manifest(place: Path) -> dict[str, dict[str, Any]]:
    """The entries of a mirror's manifest; {} if there is none. Raises UserError for a manifest that cannot be read."""
    file = place / MANIFEST
    try:
        entries: dict[str, dict[str, Any]] = read_json(file, _SHAPE)["files"]
    except FileNotFoundError:
        return {}
    except Damaged:
        raise UserError(f"{file} is no manifest of a mirror: delete {place} and make it again") from None
    return entries


def _entries(benchmark: BenchmarkConfig, split: str | None) -> Entries:
    """The manifest's entries for the benchmark's subset and for `split` (None: for every split)."""
    every = manifest(folder(benchmark))
    of_subset = {n: e for n, e in every.items() if benchmark.subset in (None, e["subset"])}
    chosen = {n: e for n, e in of_subset.items() if split in (None, e["split"])}
    if not chosen:
        field, has = ("split", of_subset) if of_subset else ("subset", every)
        wanted = str(split if of_subset else benchmark.subset)
        names = sorted({entry[field] for entry in has.values()})
        raise UserError(
            f"{unknown(f'benchmark {benchmark.name}: {field}', wanted, names)}: the mirror {folder(benchmark)} lacks "
            f"it, {_COMMAND} {benchmark.name} data_root={benchmark.root} adds it"
        )
    return chosen


@lru_cache(maxsize=1024)
def _sha256(file: Path, size: int, changed: int) -> str:
    """sha256 of a file, cached by size and time: a worker checks the same mirror before each of many plans."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@lru_cache(maxsize=1)
def _data_sets() -> Mapping[str, Any]:
    import yaml

    document: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("data_sets.yaml").read_text(encoding="utf-8"))
    return document
