"""Read the rows of a mirror: from the hub, a folder in the hub's layout, or single files."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.calibration.sources import lines
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import mirror

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".txt", ".tokens", ".raw")
SPLITS = ("train", "validation", "test", "dev")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One split of one subset."""

    subset: str
    split: str
    rows: Rows
    source: str
    """A file, a folder, or a data set on the hub."""
    revision: str | None = None
    """Commit on the hub, if it came from there."""
    original: Path | None = None
    """The file to copy unchanged, if its rows do not fit a table."""


def parts(benchmark: BenchmarkConfig, source: Path | None, scratch: Path) -> Iterator[Part]:
    """All splits in `source` (None: the hub) of the benchmark's subset, or of all subsets if it names none.

    `scratch` is an empty folder for downloads. Raises UserError when the data cannot be downloaded or read.
    """
    about = mirror.known_data(benchmark)
    if source is None and "address" in about:
        source = _download(benchmark, about["address"], scratch)
    if source is None:
        yield from _from_hub(benchmark, about, str(scratch))
        return
    files = _find(benchmark, about, source)
    if not files:
        yield from _from_layout(benchmark, about, source, str(scratch))
    for split, file in files.items():
        rows = _read(benchmark, about, file)
        if about.get("keep"):
            yield Part(benchmark.subset or "default", split, rows, str(file), original=file)
            continue
        for subset, chosen in _by_subset(benchmark, about, rows).items():
            yield Part(subset, split, chosen, str(file))


# The hub, and folders laid out like it.


def _from_hub(benchmark: BenchmarkConfig, about: Mapping[str, Any], scratch: str) -> Iterator[Part]:
    import huggingface_hub
    from datasets.exceptions import DatasetsError
    from httpx import HTTPError

    try:
        commit = huggingface_hub.HfApi().dataset_info(str(benchmark.data)).sha
        yield from _loaded(benchmark, about, str(benchmark.data), scratch, commit)
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"benchmark {benchmark.name}: {benchmark.data} could not be downloaded from the hub ({reason}): "
            f"where the hub can be reached, make the mirror there and copy it, or add from=FOLDER with files you have"
        ) from error


def _from_layout(benchmark: BenchmarkConfig, about: Mapping[str, Any], source: Path, scratch: str) -> Iterator[Part]:
    place = next((place for place in (source / str(benchmark.data), source) if _is_layout(place)), None)
    if place is None:
        split = benchmark.split or "test"
        names = [f"{benchmark.name}_{split}", *about.get("files", {}).get(split, ())]
        raise UserError(
            f"benchmark {benchmark.name}: from={source} has no {' or '.join(names)} ({' '.join(ENDINGS)}), and no "
            f"folder {benchmark.data} laid out as on the hub"
        )
    from datasets.exceptions import DatasetsError

    try:
        yield from _loaded(benchmark, about, str(place), scratch)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise UserError(f"benchmark {benchmark.name}: {place} cannot be read: {str(error).splitlines()[0]}") from error


def _is_layout(place: Path) -> bool:
    """Whether the folder has a dataset card that names the files of each split."""
    card = place / "README.md"
    return card.is_file() and re.search(r"\A---\n.*^configs:", card.read_text("utf-8"), re.S | re.M) is not None


def _loaded(
    benchmark: BenchmarkConfig, about: Mapping[str, Any], place: str, scratch: str, commit: str | None = None
) -> Iterator[Part]:
    """The splits of `place`, which is a folder, or the name of a data set on the hub with a commit."""
    import datasets

    datasets.disable_progress_bars()
    subsets = [benchmark.subset]
    if "by" in about:
        every = datasets.get_dataset_config_names(place, revision=commit)
        subsets = [name for name in every if name not in about.get("skip", ())]
    for subset in subsets:
        for split, rows in datasets.load_dataset(place, subset, revision=commit, cache_dir=scratch).items():
            yield Part(subset or "default", split, list(rows), place, commit)


def _download(benchmark: BenchmarkConfig, address: str, scratch: Path) -> Path:
    """Download the file at an address from data_sets.yaml. Returns its path."""
    file = scratch / address.rpartition("/")[2]
    try:
        with urllib.request.urlopen(address, timeout=60) as content:
            file.write_bytes(content.read())
    except OSError as error:
        raise UserError(
            f"benchmark {benchmark.name}: {address} could not be downloaded ({error}): add from=FOLDER with {file.name}"
        ) from error
    return file


# Single files.


def _find(benchmark: BenchmarkConfig, about: Mapping[str, Any], source: Path) -> dict[str, Path]:
    """Split -> its file, for splits that have one in `source`."""
    if source.is_file():
        return {benchmark.split or "test": source}
    by_split = {}
    for split in dict.fromkeys((benchmark.split or "test", *SPLITS)):
        stems = [f"{benchmark.name}_{split}", *about.get("files", {}).get(split, ())]
        files = [source / f"{stem}{ending}" for stem in stems for ending in ENDINGS]
        chosen = next((file for file in files if file.is_file()), None)
        if chosen is not None:
            by_split[split] = chosen
    return by_split


def _read(benchmark: BenchmarkConfig, about: Mapping[str, Any], file: Path) -> Rows:
    if not file.name.endswith(ENDINGS):
        raise UserError(
            f"benchmark {benchmark.name}: {file} is of no kind that is read (pickles and archives run or hide what is "
            f"in them): expected {' '.join(ENDINGS)}"
        )
    try:
        if file.suffix in (".txt", ".tokens", ".raw"):
            return _text(benchmark, about, file)
        if file.suffix == ".json":
            rows: Rows = json.loads(file.read_text(encoding="utf-8"))
        else:
            rows = mirror.read_rows(file)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected objects with named fields")
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"benchmark {benchmark.name}: {file} cannot be read: {str(error).splitlines()[0]}") from error
    return _labelled(about, file, rows)


def _labelled(about: Mapping[str, Any], file: Path, rows: Rows) -> Rows:
    """The rows with the answers of the label file beside `file`, if there is one."""
    stem = file.name.partition(".")[0]
    beside = next((b for end in about.get("labels", ()) if (b := file.with_name(stem + end)).is_file()), None)
    if beside is None:
        return rows
    labels = beside.read_text(encoding="utf-8").split()
    if len(labels) != len(rows):
        raise UserError(f"{beside} has {len(labels)} answers for the {len(rows)} rows of {file}")
    return [{**row, "label": int(label)} for row, label in zip(rows, labels, strict=True)]


def _text(benchmark: BenchmarkConfig, about: Mapping[str, Any], file: Path) -> Rows:
    """Rows of a text as on the hub: one per line (with its line end, unless blank), or one per document."""
    text = file.read_text(encoding="utf-8")
    if about.get("text") == "lines":
        return [{"text": line} for line in lines(text)]
    if about.get("text") == "documents":
        return [{"page": page} for page in _documents(text.split("\n"))]
    raise UserError(f"benchmark {benchmark.name}: {file} is a text, and {benchmark.data} has rows with fields")


def _documents(lines: list[str]) -> Iterator[str]:
    """The documents of WikiText, each of which starts with a heading of the first level: ` = Title = `."""
    page: list[str] = []
    for line in [*lines, None]:
        if line is None or re.fullmatch(r" *= [^=].*[^=] = *", line):
            if "".join(page).strip():
                yield "\n".join(page)
            page = []
        page.append(line or "")


def _by_subset(benchmark: BenchmarkConfig, about: Mapping[str, Any], rows: Rows) -> dict[str, Rows]:
    """The rows of each subset, in their order."""
    if "by" not in about:
        return {benchmark.subset or "default": rows}
    by_subset: dict[str, Rows] = {}
    for row in rows:
        by_subset.setdefault(str(row.get(about["by"])), []).append(row)
    return by_subset
