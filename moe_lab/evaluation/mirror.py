"""Mirrors: local copies of benchmark data, laid out as on the hub, with a manifest of their files.

    python -m moe_lab.evaluation.mirror NAME ... data_root=FOLDER [from=FOLDER|FILE]

makes them for benchmarks or whole suites. Evaluation reads mirrors alone, never the hub.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import shutil
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from moe_lab.config import BenchmarkConfig, SuiteConfig
from moe_lab.config.base import valid
from moe_lab.errors import UserError, end_with, unknown
from moe_lab.json_files import Damaged, read_json, write_json
from moe_lab.paths import conf

MANIFEST = "moe_lab.json"
_COMMAND = "python -m moe_lab.evaluation.mirror"
_CARD = "README.md"
_SHAPE = {"files": {str: {"subset": str, "split": str, "rows": int, "sha256": str}}}
"""Expected form of a manifest."""
ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv")
_WORDS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""Words in the paths of files that tell their split where the dataset card does not, as for `datasets`."""

Entries = Mapping[str, Mapping[str, Any]]
"""File of a mirror -> its subset, split, rows, sha256 and source."""


# Read a mirror.


def folder(benchmark: BenchmarkConfig) -> Path:
    """The folder of the benchmark's mirror. Raises UserError with the command that makes it when there is none."""
    place = _place(benchmark)
    if not (place / MANIFEST).is_file():
        raise UserError(
            f"benchmark {benchmark.name} needs {benchmark.data}, and data_root={benchmark.root} has no mirror of it: "
            f"{_COMMAND} {benchmark.name} data_root={benchmark.root}"
        )
    return place


def digest(benchmark: BenchmarkConfig) -> str:
    """sha256 over the hashes, in the manifest, of the files that a benchmark reads.

    These are the files of its split, or of all splits if it shows examples. Neither their names nor where they came
    from matter.
    """
    read = _entries(benchmark, None if benchmark.shots else benchmark.split).values()
    in_order = sorted(read, key=lambda entry: (entry["subset"], entry["split"]))
    hashes = [[entry["subset"], entry["split"], entry["sha256"]] for entry in in_order]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def check(benchmark: BenchmarkConfig) -> None:
    """Raise UserError when the mirror is missing, or a file differs from the manifest, or rows are missing."""
    place = folder(benchmark)
    _check_rows(benchmark, manifest(place))
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


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a .parquet, .jsonl, .jsonl.gz, .json or .csv file. Raises UserError if it cannot be read."""
    with _readable(file):
        if file.suffix == ".parquet":
            import pyarrow.parquet as parquet

            table: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
            return table
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        rows_of_file = _rows_of_text(content.decode("utf-8"), file.suffix)
        if not all(isinstance(row, dict) for row in rows_of_file):
            raise ValueError("expected objects with named fields")
    return rows_of_file


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise UserError where reading the file fails."""
    try:
        yield
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def _rows_of_text(text: str, suffix: str) -> list[dict[str, Any]]:
    if suffix == ".csv":
        return list(csv.DictReader(text.splitlines(keepends=True)))
    if suffix == ".json" and text.lstrip().startswith("["):
        whole: list[dict[str, Any]] = json.loads(text)
        return whole
    return [json.loads(line) for line in text.split("\n") if line.strip()]  # \u2028 does not end a line of JSON


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


def _place(benchmark: BenchmarkConfig) -> Path:
    assert benchmark.data is not None and benchmark.root is not None
    return Path(benchmark.root).expanduser().absolute() / benchmark.data


def _check_rows(benchmark: BenchmarkConfig, entries: Entries) -> None:
    """Raise UserError for fewer rows than items; harnesses may choose among more, and check the number of items."""
    read = [e for e in entries.values() if benchmark.subset in (None, e["subset"]) and e["split"] == benchmark.split]
    count = sum(entry["rows"] for entry in read)
    if read and count < (benchmark.expected or 0):
        wanted = " ".join(word for word in (benchmark.data, benchmark.subset, benchmark.split) if word)
        raise UserError(
            f"benchmark {benchmark.name}: {wanted} has {count} rows and should have {benchmark.expected}: its data is "
            f"not the published set, or expected is wrong"
        )


@lru_cache(maxsize=1024)
def _sha256(file: Path, size: int, changed: int) -> str:
    """sha256 of a file, cached by size and time: a worker checks the same mirror before each of many plans."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# Make a mirror.


def make(benchmark: BenchmarkConfig, source: Path | None) -> str:
    """Make the mirror of the benchmark's data and return a line about it.

    `source` is a folder laid out as on the hub, or the file of the evaluated split. None: the benchmark's revision on
    the hub. The manifest is written when everything is there and the evaluated split has as many rows as expected.
    """
    place = _place(benchmark)
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_name(f".{place.name}.lock")):  # several processes may mirror the same data set
        if benchmark.url or (source is not None and source.is_file()):
            origin, files = _one_file(benchmark, source, place)
        elif source is not None:
            origin, files = _copy(benchmark, source, place)
        else:
            origin, files = _download(benchmark, place)
        entries = {name: _entry(place / name, *part, origin) for name, part in files.items()}
        _check_rows(benchmark, entries)
        # Files of other subsets and splits stay; those of these may have had other names.
        others = {n: e for n, e in manifest(place).items() if (e["subset"], e["split"]) not in files.values()}
        write_json(place / MANIFEST, {"files": {**others, **entries}})
    check(benchmark)
    count = sum(entry["rows"] for entry in entries.values())
    return f"{benchmark.name}: {benchmark.data}: {count} rows in {len(entries)} files of {origin}"


Layout = dict[str, tuple[str, str]]
"""File, relative to the folder of a data set -> its subset and split."""


def _download(benchmark: BenchmarkConfig, place: Path) -> tuple[str, Layout]:
    """Download the files of the benchmark's subset. Returns where they came from, with the commit, and the files."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, snapshot_download

    name = str(benchmark.data)
    try:
        commit = str(HfApi().dataset_info(name, revision=benchmark.revision).sha)
        download = partial(snapshot_download, name, repo_type="dataset", revision=commit, local_dir=place)
        download(allow_patterns=[_CARD])
        download(allow_patterns=[pattern for _, _, pattern in _patterns(place, benchmark.subset)])
    except (OSError, ValueError, HTTPError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        raise UserError(
            f"benchmark {benchmark.name}: {name} could not be downloaded from the hub ({reason}): "
            f"where the hub can be reached, make the mirror there and copy it, or add from=FOLDER with files you have"
        ) from error
    return f"{name}@{commit}", _layout(benchmark, place)


def _one_file(benchmark: BenchmarkConfig, source: Path | None, place: Path) -> tuple[str, Layout]:
    """Copy the file `source`, or the one in the folder `source`, or the one at the benchmark's address."""
    name_there = str(benchmark.url).rpartition("/")[2]
    if source is not None and source.is_dir():
        source /= name_there
    origin = str(benchmark.url if source is None else source)
    ending = next((ending for ending in ENDINGS if origin.endswith(ending)), None)
    if ending is None:
        raise UserError(f"benchmark {benchmark.name}: from={origin}: expected a file that ends in {' '.join(ENDINGS)}")
    subset, split = benchmark.subset or "default", str(benchmark.split)
    name = f"{subset}/{split}{ending}"
    (place / name).parent.mkdir(exist_ok=True)
    part = place / f"{name}.part"
    address = origin if source is None else source.as_uri()
    try:
        with urllib.request.urlopen(address, timeout=60) as content, part.open("wb") as file:
            shutil.copyfileobj(content, file)
    except OSError as error:
        hint = f": add from=FILE with {name_there}" if source is None else ""
        raise UserError(f"benchmark {benchmark.name}: {origin} could not be read ({error}){hint}") from error
    part.replace(place / name)
    return origin, {name: (subset, split)}


def _copy(benchmark: BenchmarkConfig, source: Path, place: Path) -> tuple[str, Layout]:
    """Copy the files of the benchmark's subset from a folder laid out as on the hub, or from OWNER/NAME in it."""
    origin = source / str(benchmark.data)
    if not origin.is_dir():
        origin = source
    files = _layout(benchmark, origin)
    for name in files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / name, place / name)
    return str(origin), files


def _layout(benchmark: BenchmarkConfig, origin: Path) -> Layout:
    """The files of the benchmark's subset. Raises UserError if there are none of the evaluated split."""
    files = {
        file.relative_to(origin).as_posix(): (subset, split)
        for subset, split, pattern in _patterns(origin, benchmark.subset)
        for file in sorted(origin.glob(pattern))
        if file.name.endswith(ENDINGS)
    }
    if not any(split == benchmark.split for _, split in files.values()):
        wanted = " ".join(word for word in (benchmark.data, benchmark.subset, benchmark.split) if word)
        raise UserError(
            f"benchmark {benchmark.name}: {origin} has no files of {wanted}: expected a folder laid out as on the hub, "
            f"with a {_CARD} that lists the files of each split, or files named by their split"
        )
    return files


def _patterns(origin: Path, subset: str | None) -> Iterator[tuple[str, str, str]]:
    """Subset, split and pattern of the files of a data set: as its card says, otherwise by the names of its files.

    For subset None these are all subsets but `all`, which repeats the others.
    """
    from huggingface_hub import metadata_load

    card = (metadata_load(origin / _CARD) if (origin / _CARD).is_file() else None) or {}
    if not card.get("configs"):
        for split, words in _WORDS.items():
            for word in words:
                names = (f"{word}[-_.]*", f"*[-_.]{word}[-_.]*", f"{word}/*")
                yield from ((subset or "default", split, start + name) for name in names for start in ("", "**/"))
    for config in card.get("configs", ()):
        name = config["config_name"]
        if name != subset and (subset is not None or name == "all"):
            continue
        for part in _listed(config.get("data_files", [])):
            split, paths = (part["split"], part["path"]) if isinstance(part, dict) else ("train", part)
            yield from ((name, split, path) for path in _listed(paths))


def _listed(value: Any) -> list[Any]:
    """A card may have a value in place of a list with one value."""
    return value if isinstance(value, list) else [value]


def _entry(file: Path, subset: str, split: str, origin: str) -> dict[str, Any]:
    state = file.stat()
    sha256 = _sha256(file, state.st_size, state.st_mtime_ns)
    return {"subset": subset, "split": split, "rows": _count(file), "sha256": sha256, "source": origin}


def _count(file: Path) -> int:
    if file.suffix != ".parquet":
        return len(read_rows(file))
    import pyarrow.parquet as parquet

    with _readable(file):
        return int(parquet.read_metadata(file).num_rows)


# The command.


def benchmarks(names: Sequence[str], root: str) -> list[BenchmarkConfig]:
    """The benchmarks, each once, that are named or in a named suite, and that need a mirror."""
    names_by_group = {
        group: sorted(file.stem for file in (conf() / group).glob("*.yaml")) for group in ("benchmark", "suite")
    }
    listed: list[str] = []
    for name in names:
        if name in names_by_group["benchmark"]:
            listed.append(name)
        elif name in names_by_group["suite"]:
            listed += _loaded("suite", name, SuiteConfig).benchmarks
        else:
            raise unknown("benchmark or suite", name, [*names_by_group["benchmark"], *names_by_group["suite"]])
    loaded = [replace(_loaded("benchmark", name, BenchmarkConfig), root=root) for name in dict.fromkeys(listed)]
    with_data = [benchmark for benchmark in loaded if benchmark.data is not None]
    if not with_data:
        raise UserError(f"{', '.join(names)} needs no mirror: its data comes with moe_lab, or is a file of yours")
    return with_data


def _loaded(group: str, name: str, kind: Any) -> Any:
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(OmegaConf.load(conf() / group / f"{name}.yaml"), resolve=True)
    assert isinstance(content, dict)
    return valid(kind, {key: value for key, value in content.items() if value != "???"}, group)


def main(words: Sequence[str]) -> int:
    """NAME ... data_root=FOLDER [from=FOLDER|FILE]: make the mirrors of benchmarks or whole suites.

    Returns 0; or 2 if data is missing, after printing a sentence for each such benchmark and making the other mirrors.
    """
    try:
        names, root, source = _arguments(words)
        wanted = benchmarks(names, root)
    except UserError as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2
    failed = False
    for benchmark in wanted:
        try:
            print(make(benchmark, source), flush=True)
        except (UserError, OSError) as error:
            failed = True
            reason = error if isinstance(error, UserError) else f"data_root={root} cannot be written ({error})"
            print(f"moe_lab: {reason}", file=sys.stderr, flush=True)
    return 2 if failed else 0


def _arguments(words: Sequence[str]) -> tuple[list[str], str, Path | None]:
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    for setting in settings:
        if setting not in ("data_root", "from"):
            raise unknown("setting", setting, ("data_root", "from"))
    if not names or not settings.get("data_root"):
        given = " ".join(words) or "nothing"
        raise UserError(f"expected NAME ... data_root=FOLDER [from=FOLDER], of benchmarks or suites; got {given}")
    if "from" not in settings:
        return names, settings["data_root"], None
    source = Path(settings["from"]).expanduser().absolute()
    if not source.exists():
        raise UserError(f"from={source}: there is no such file or folder")
    if source.is_file() and len(benchmarks(names, "")) > 1:
        raise UserError(f"from={source} is one file: expected the name of one benchmark, got {' '.join(names)}")
    return names, settings["data_root"], source


if __name__ == "__main__":
    end_with(partial(main, sys.argv[1:]))
