"""Mirrors: local copies of benchmark data, laid out as on the hub, with a manifest of their files.

    moe-lab mirror NAME ... data_root=FOLDER [from=FOLDER|FILE]

makes mirrors for benchmarks or whole suites. Evaluation reads mirrors alone, never the hub.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from moe_lab.calibration.sources import DataFile
from moe_lab.config import BenchmarkConfig
from moe_lab.config.base import Mistakes, validated
from moe_lab.errors import UserError, check_known, reason_in, unknown_name_error
from moe_lab.json_files import Damaged, read_json, write_json
from moe_lab.models.files import sha256_of
from moe_lab.paths import conf

MANIFEST = "moe_lab.json"
_CARD = "README.md"
_SHAPE = {"files": {str: {"subset": str, "split": str, "rows": int, "sha256": str}}}
"""Expected form of a manifest."""
ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv")
_SPLITS = {"train": "train", "validation": "validation|valid|val|dev", "test": "test"}
"""Split -> regular expression of a part of the paths of its files, for a data set without a card.
The package `datasets` has the same rule."""

DataRow = dict[str, Any]
"""A row of a data set."""
Entry = dict[str, Any]
"""Subset, split, rows, sha256 and source of a file of a mirror."""


# Read a mirror.


def folder(benchmark: BenchmarkConfig) -> Path:
    """The folder of the benchmark's mirror, which may not exist."""
    assert benchmark.data is not None and benchmark.root is not None
    return Path(benchmark.root).expanduser().absolute() / benchmark.data


def digest(benchmark: BenchmarkConfig) -> str:
    """One sha256 over the subset, split and content of all files that a benchmark reads."""
    entries = sorted(
        _entries_read(benchmark).values(), key=lambda entry: (entry["subset"], entry["split"])
    )
    hashes = [[entry["subset"], entry["split"], entry["sha256"]] for entry in entries]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def check(benchmark: BenchmarkConfig) -> None:
    """Raise UserError when there is no mirror, when a file differs from the manifest, or when rows
    are missing."""
    _check_row_count(benchmark, _entries(benchmark, benchmark.split).values())
    for file, entry in _entries_read(benchmark).items():
        if not file.is_file() or sha256_of(file) != entry["sha256"]:
            raise UserError(
                f"benchmark {benchmark.name}: {file} is missing, or not what {MANIFEST} describes: "
                f"make the mirror again with {_command(benchmark)}"
            )


def rows(benchmark: BenchmarkConfig) -> list[DataRow]:
    """The rows of benchmark.subset (null: of all subsets) and benchmark.split, in order."""
    return [row for file in files(benchmark) for row in read_rows(file)]


def files(benchmark: BenchmarkConfig) -> list[Path]:
    """The files with the `rows` of a benchmark."""
    return list(_entries(benchmark, benchmark.split))


def subsets(benchmark: BenchmarkConfig) -> dict[str, dict[str, list[Path]]]:
    """Subset -> split -> files of the mirror. A data set without subsets has the subset
    `default`."""
    by_subset: dict[str, dict[str, list[Path]]] = {}
    for file, entry in _entries(benchmark, None).items():
        by_subset.setdefault(entry["subset"], {}).setdefault(entry["split"], []).append(file)
    return by_subset


def read_rows(file: Path) -> list[DataRow]:
    """The rows of a .parquet, .jsonl, .jsonl.gz, .json or .csv file. Raises UserError for a file
    that cannot be read."""
    rows_of_file = [row for _, row in DataFile(file, setting="data").rows()]
    if not all(isinstance(row, dict) for row in rows_of_file):
        raise UserError(f"{file} cannot be read: expected objects with named fields")
    return rows_of_file


def read_manifest(path: Path) -> dict[str, Entry]:
    """The manifest of the mirror `path`: file -> its subset, split, rows, sha256 and source. {} if
    there is no manifest. Raises UserError for a manifest that cannot be read."""
    file = path / MANIFEST
    try:
        return dict(read_json(file, _SHAPE)["files"])
    except FileNotFoundError:
        return {}
    except Damaged:
        raise UserError(
            f"{file} is no manifest of a mirror: delete {path} and make it again"
        ) from None


def _entries_read(benchmark: BenchmarkConfig) -> dict[Path, Entry]:
    """The files that a benchmark reads, with their entries in the manifest."""
    # any split may have the solved examples
    return _entries(benchmark, None if benchmark.shots else benchmark.split)


def _entries(benchmark: BenchmarkConfig, split: str | None) -> dict[Path, Entry]:
    """The files of benchmark.subset (None: all subsets) and `split` (None: all splits), with their
    entries in the manifest. UserError if there is no mirror or no such file."""
    path = folder(benchmark)
    entries = read_manifest(path)
    if not entries:
        raise UserError(
            f"benchmark {benchmark.name} needs {benchmark.data}, and data_root={benchmark.root} "
            f"has no mirror of it: {_command(benchmark)}"
        )
    selected_entries = {
        path / name: entry
        for name, entry in entries.items()
        if benchmark.subset in (None, entry["subset"]) and split in (None, entry["split"])
    }
    if not selected_entries:
        known_parts = {f"{entry['subset']}/{entry['split']}" for entry in entries.values()}
        requested_part = f"{benchmark.subset or '*'}/{split or '*'}"
        error = unknown_name_error(
            f"benchmark {benchmark.name}: subset/split", requested_part, known_parts
        )
        raise UserError(f"{error}: the mirror {path} has none, {_command(benchmark)} adds it")
    return selected_entries


def _command(benchmark: BenchmarkConfig) -> str:
    """The command that makes the benchmark's mirror."""
    return f"moe-lab mirror {benchmark.name} data_root={benchmark.root}"


def _check_row_count(benchmark: BenchmarkConfig, entries: Iterable[Entry]) -> int:
    """Check and return the number of rows of `entries`."""
    count: int = sum(entry["rows"] for entry in entries)
    # more rows are allowed, as a harness may use only some of them
    if count < (benchmark.expected or 0):
        raise UserError(
            f"benchmark {benchmark.name}: {benchmark.data} has {count} rows and should have "
            f"{benchmark.expected}: its data is not the published set, or expected is wrong"
        )
    return count


# Make a mirror.


def make(benchmark: BenchmarkConfig, source: Path | None) -> str:
    """Make the mirror of the benchmark's data and return a line for the log.

    `source` is a folder laid out as on the hub, or the file of the evaluated split. If `source` is
    None, the data is downloaded from benchmark.url or, without a URL, from the hub.
    """
    path = folder(benchmark)
    path.mkdir(parents=True, exist_ok=True)
    if benchmark.url or (source is not None and source.is_file()):
        origin, files = _copy_file(benchmark, source, path)
    elif source is not None:
        origin, files = _copy_folder(benchmark, source, path)
    else:
        origin, files = _download(benchmark, path)
    entries: dict[str, Entry] = {
        name: {
            "subset": subset,
            "split": split,
            "rows": len(read_rows(path / name)),
            "sha256": sha256_of(path / name),
            "source": origin,
        }
        for name, (subset, split) in files.items()
    }
    evaluated_entries = [entry for entry in entries.values() if entry["split"] == benchmark.split]
    count = _check_row_count(benchmark, evaluated_entries)
    # Of the old manifest, keep the entries for subsets and splits that were not copied now.
    for name, entry in read_manifest(path).items():
        if (entry["subset"], entry["split"]) not in files.values():
            entries.setdefault(name, entry)
    write_json(path / MANIFEST, {"files": entries})
    return f"{benchmark.name}: {benchmark.data}: {count} rows of {benchmark.split}, from {origin}"


Layout = dict[str, tuple[str, str]]
"""File, relative to the folder of a data set -> (subset, split)."""


def _download(benchmark: BenchmarkConfig, path: Path) -> tuple[str, Layout]:
    """Download the files of the benchmark's subset from the hub to the folder `path`. Returns
    NAME@COMMIT of the data set, and the downloaded files."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, snapshot_download

    name = str(benchmark.data)
    try:
        info = HfApi().dataset_info(name, revision=benchmark.revision)
        origin = f"{name}@{info.sha}"
        download = partial(
            snapshot_download, name, repo_type="dataset", revision=info.sha, local_dir=path
        )
        download(allow_patterns=[_CARD])  # `_layout` reads the card
        files = _layout(
            benchmark, origin, [file.rfilename for file in info.siblings or ()], path / _CARD
        )
        download(allow_patterns=list(files))
    except (OSError, HTTPError) as error:
        raise UserError(
            f"benchmark {benchmark.name}: {name} could not be downloaded from the hub "
            f"({reason_in(error)}): where the hub can be reached, make the mirror there and copy "
            "it, or add from=FOLDER with files you have"
        ) from error
    return origin, files


def _copy_file(benchmark: BenchmarkConfig, source: Path | None, path: Path) -> tuple[str, Layout]:
    """Copy the file `source` (None: the file at benchmark.url) to the folder `path`. Returns the
    address of the original file, and the copied file."""
    address = str(benchmark.url) if source is None else source.as_uri()
    ending = next((ending for ending in ENDINGS if address.endswith(ending)), None)
    if ending is None:
        raise UserError(
            f"benchmark {benchmark.name}: from={source}: expected a file that ends in "
            f"{' '.join(ENDINGS)}"
        )
    subset = benchmark.subset or "default"
    split = str(benchmark.split)
    name = f"{subset}/{split}{ending}"
    (path / name).parent.mkdir(exist_ok=True)
    try:
        with urllib.request.urlopen(address, timeout=60) as content:
            (path / name).write_bytes(content.read())
    except OSError as error:
        raise UserError(
            f"benchmark {benchmark.name}: {address} could not be read ({error}): add from=FILE "
            f"with {address.rpartition('/')[2]}"
        ) from error
    return address, {name: (subset, split)}


def _copy_folder(benchmark: BenchmarkConfig, source: Path, path: Path) -> tuple[str, Layout]:
    """Copy files of the benchmark's subset to the folder `path`, from the subfolder benchmark.data
    of `source`, or else from `source` itself. Returns the folder that was read, and the copied
    files."""
    origin = source / str(benchmark.data)
    if not origin.is_dir():
        origin = source
    names = sorted(
        file.relative_to(origin).as_posix() for file in origin.rglob("*") if file.is_file()
    )
    files = _layout(benchmark, str(origin), names, origin / _CARD)
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / name, path / name)
    return str(origin), files


def _layout(benchmark: BenchmarkConfig, origin: str, names: Iterable[str], card: Path) -> Layout:
    """File -> (subset, split), for each file of `names` that belongs to the benchmark's subset."""
    patterns = list(_patterns(card, benchmark.subset))
    files = {
        name: (subset, split)
        for name in names
        for subset, split, pattern in patterns
        if name.endswith(ENDINGS) and re.search(pattern, name)
    }
    if not any(split == benchmark.split for _, split in files.values()):
        part = " ".join(filter(None, (benchmark.data, benchmark.subset, benchmark.split)))
        raise UserError(
            f"benchmark {benchmark.name}: {origin} has no files of {part}: expected a folder laid "
            f"out as on the hub, with a {_CARD} that lists the files of each split, or files named "
            "by their split"
        )
    return files


def _patterns(card: Path, subset: str | None) -> Iterator[tuple[str, str, str]]:
    """Yield (subset, split, regular expression for the paths of the split's files), as listed in
    the dataset `card`. A subset without a list has the files that are named by their split, in its
    `data_dir`. If `subset` is None, all subsets are yielded except the subset `all`, which repeats
    the files of the other subsets."""
    from datasets.data_files import sanitize_patterns
    from fsspec.utils import glob_translate  # in which * does not match /, as on the hub
    from huggingface_hub import metadata_load

    # None without a card, and for a card without metadata
    metadata = metadata_load(card) if card.is_file() else None
    configs = (metadata or {}).get("configs") or [{"config_name": subset or "default"}]
    for config in configs:
        name = config["config_name"]
        is_left_out = name == "all" if subset is None else name != subset
        if is_left_out:
            continue
        data_dir = str(config.get("data_dir") or "").strip("/")
        start = f"^{re.escape(data_dir)}/" if data_dir else "^"
        parts = config.get("data_files")
        if parts is None:
            for split, patterns in _SPLITS.items():
                yield name, split, rf"{start}(?:.*[-_./])?(?:{patterns})[-_./]"
        for split, paths in sanitize_patterns(parts or []).items():
            yield from ((name, split, start + glob_translate(path)) for path in paths)


# The command.


def named_benchmarks(names: Iterable[str]) -> list[BenchmarkConfig]:
    """The benchmarks with these `names`, and the benchmarks of suites with these `names`. UserError
    for an unknown name."""
    suites = shipped_settings("suite")
    settings = shipped_settings("benchmark")
    benchmark_names: dict[str, None] = {}  # an ordered set
    for name in names:
        check_known("benchmark or suite", name, settings | suites)
        suite = {"benchmarks": [name]} if name in settings else suites[name]
        benchmark_names |= dict.fromkeys(suite["benchmarks"])
    return [validated(BenchmarkConfig, settings[name], "benchmark") for name in benchmark_names]


def benchmarks(names: Iterable[str], root: str) -> list[BenchmarkConfig]:
    """The `named_benchmarks` that need a mirror. `root`: the folder of all mirrors. UserError if
    there are none."""
    configs = named_benchmarks(names)
    mirrored_configs = [
        replace(benchmark, root=root) for benchmark in configs if benchmark.data is not None
    ]
    if not mirrored_configs:
        raise UserError(
            f"{', '.join(names)} needs no mirror: its data comes with moe_lab, or is a "
            "file of yours"
        )
    return mirrored_configs


@cache
def shipped_settings(group: str) -> dict[str, Any]:
    """Name of a file in conf/`group` -> its settings."""
    files = (conf() / group).glob("*.yaml")
    return {file.stem: yaml.safe_load(file.read_bytes()) for file in files}


def main(arguments: Sequence[str]) -> int:
    """NAME ... data_root=FOLDER [from=FOLDER|FILE]: make the mirrors of benchmarks or whole suites.

    A mirror that cannot be made is reported after all others are made. Returns the exit code.
    """
    from moe_lab.arguments import Parser  # only this command parses arguments

    parser = Parser(prog="moe-lab mirror", description=main.__doc__)
    parser.add_argument("names", nargs="+", help="benchmarks or suites")
    parser.add_argument("--data_root", required=True, help="the folder of all mirrors")
    parser.add_argument("--from", help="a folder or file instead of the hub")
    request = parser.read(arguments)
    origin = vars(request)["from"]
    source = Path(origin).expanduser().absolute() if origin else None
    if source is not None and not source.exists():
        raise UserError(f"from={source}: there is no such file or folder")
    with Mistakes() as mistakes:
        for benchmark in benchmarks(request.names, request.data_root):
            with mistakes.caught():
                try:
                    line = make(benchmark, source)
                except OSError as error:
                    raise UserError(f"benchmark {benchmark.name}: {error}") from error
                print(line, flush=True)
    return 0
