"""Make mirrors from the hub or from local files: `python -m moe_lab.evaluation.mirror`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from moe_lab.config import BenchmarkConfig, SuiteConfig
from moe_lab.config.base import valid
from moe_lab.errors import UserError, unknown
from moe_lab.evaluation import mirror
from moe_lab.evaluation.mirror.sources import Part, parts
from moe_lab.json_files import write_json
from moe_lab.paths import conf


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
            print("\n".join(make(benchmark, source)), flush=True)
        except (UserError, OSError) as error:
            failed = True
            reason = error if isinstance(error, UserError) else f"data_root={root} cannot be written ({error})"
            print(f"moe_lab: {reason}", file=sys.stderr, flush=True)
    return 2 if failed else 0


def make(benchmark: BenchmarkConfig, source: Path | None) -> list[str]:
    """Write the mirror of the benchmark's data from `source` (None: the hub). Returns a line about each split.

    Nothing is written unless every row has all columns and the evaluated split has the expected number of rows.
    """
    assert benchmark.data is not None and benchmark.root is not None
    place = Path(benchmark.root).expanduser().absolute() / benchmark.data
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mirror-", dir=place.parent) as scratch:
        splits = list(parts(benchmark, source, Path(scratch)))
        _check(benchmark, splits)
        with FileLock(place.with_name(f".{place.name}.lock")):  # several processes may mirror the same data set
            entries = {**mirror.manifest(place), **dict(_write(part, place) for part in splits)}
            _put(place / "README.md", _readme(str(benchmark.data), entries).encode())
            write_json(place / mirror.MANIFEST, {"files": entries})
    mirror.check(benchmark)
    return _lines(benchmark, splits)


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


def _check(benchmark: BenchmarkConfig, splits: Sequence[Part]) -> None:
    evaluated = [part for part in splits if part.split == benchmark.split]
    rows, wanted = sum(len(part.rows) for part in evaluated), mirror.expected_rows(benchmark)
    if wanted is not None and rows != wanted:
        source = splits[0].source if splits else "nothing"
        raise UserError(
            f"benchmark {benchmark.name}: {source} has {rows} rows for the split {benchmark.split} and should have "
            f"{wanted}, so nothing was written: it is not the published set, or expected is wrong"
        )
    columns = mirror.known_data(benchmark).get("columns", ())
    for part in splits:
        for number, row in enumerate(part.rows):
            missing = [column for column in columns if column not in row]
            if missing:
                raise UserError(
                    f"benchmark {benchmark.name}: row {number + 1} of {part.source} lacks {', '.join(missing)}, so "
                    f"nothing was written: expected the columns {', '.join(columns)}"
                )


# Files are written whole or not at all, the manifest last.


def _write(part: Part, place: Path) -> tuple[str, dict[str, Any]]:
    """Write the part's file. Returns its name and its entry in the manifest."""
    if part.original is not None:
        name = part.original.name
        _put(place / name, part.original.read_bytes())
    else:
        name = f"{part.subset}/{part.split}-00000-of-00001.parquet"
        _put(place / name, _parquet(part))
    content = (place / name).read_bytes()
    return name, {
        "subset": part.subset,
        "split": part.split,
        "rows": len(part.rows),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "digest": hashlib.sha256(json.dumps(part.rows, sort_keys=True, default=str).encode()).hexdigest(),
        "source": part.source,
        "revision": part.revision,
    }


def _parquet(part: Part) -> bytes:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    sink = arrow.BufferOutputStream()
    try:
        parquet.write_table(arrow.Table.from_pylist(part.rows), sink)
    except arrow.ArrowInvalid as error:
        raise UserError(f"{part.source}: its rows are no table ({str(error).splitlines()[0]})") from error
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.part")
    beside.write_bytes(content)
    os.replace(beside, file)


def _readme(data: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The dataset card, from which `datasets` knows the subset and split of each file."""
    configs: dict[str, list[str]] = {}
    for name, entry in sorted(entries.items()):
        if name.endswith(".parquet"):
            configs.setdefault(entry["subset"], []).append(f"  - split: {entry['split']}\n    path: {name}\n")
    listed = "".join(f"- config_name: {name}\n  data_files:\n{''.join(files)}" for name, files in configs.items())
    head = f"---\nconfigs:\n{listed}---\n" if configs else ""
    return (
        f"{head}# {data}\n\nA mirror made by `python -m moe_lab.evaluation.mirror`; {mirror.MANIFEST} says of what.\n"
    )


def _lines(benchmark: BenchmarkConfig, written: Sequence[Part]) -> list[str]:
    """A line of text about each split, with the number of its subsets if there are several."""
    splits: dict[str, list[Part]] = {}
    for part in written:
        splits.setdefault(part.split, []).append(part)
    lines = []
    for split, of_split in splits.items():
        first = of_split[0]
        subset = first.subset if len(of_split) == 1 else f"{len(of_split)} subsets"
        rows = sum(len(part.rows) for part in of_split)
        origin = first.source + (f" at {first.revision}" if first.revision else "")
        lines.append(f"{benchmark.name}: {benchmark.data} {subset} {split}: {rows} rows of {origin}")
    return lines
