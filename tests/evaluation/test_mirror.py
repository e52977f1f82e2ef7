"""Mirrors: what the hub has, or a folder or file like it; counted, and never half of it."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import yaml
from fake_engines import problems
from harness_files import RTE, subject_rows, write_lines
from huggingface_hub.utils import filter_repo_objects

from benchmarks.data_sets import write_data_set
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.mirror import benchmarks, main, make


@pytest.fixture
def rte(tmp_path: Path) -> BenchmarkConfig:
    (benchmark,) = benchmarks(["rte"], str(tmp_path / "data"))
    return replace(benchmark, expected=len(RTE))


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a hub with the data sets tmp_path/hub/OWNER/NAME has sent, as revision/path."""
    files_sent: list[str] = []

    def names(name: str) -> list[str]:
        folder = tmp_path / "hub" / name
        if not folder.is_dir():
            raise OSError(f"404: there is no {name}")
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*.*")]

    def about(_: object, name: str, revision: str) -> SimpleNamespace:
        return SimpleNamespace(
            sha=revision, siblings=[SimpleNamespace(rfilename=file) for file in names(name)]
        )

    def download(
        name: str, *, repo_type: str, revision: str, local_dir: Path, allow_patterns: list[str]
    ) -> None:
        assert repo_type == "dataset"
        for file in filter_repo_objects(names(name), allow_patterns=allow_patterns):
            (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tmp_path / "hub" / name / file, local_dir / file)
            files_sent.append(f"{revision}/{file}")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", about)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return files_sent


def test_data_sets_are_mirrored_from_the_hub(sent: list[str], tmp_path: Path) -> None:
    """It lacks one of four, which is reported. Of the others, the rows are complete, and the files
    are those of the pinned revision."""
    parts = {
        ("ax", "test"): RTE,
        ("rte", "validation"): (RTE * 93)[:277],
        ("rte", "train"): RTE[:1],
    }
    write_data_set(tmp_path / "hub/nyu-mll/glue", parts)
    subjects = {
        (name, "test"): subject_rows(name, count)
        for name, count in (("all", 14042), ("anatomy", 14040), ("virology", 2))
    }
    write_data_set(tmp_path / "hub/cais/mmlu", subjects)
    aime25 = tmp_path / "hub/math-ai/aime25"
    aime25.mkdir(parents=True)
    write_lines(aime25 / "test.jsonl", [{"problem": "p", "answer": "1", "id": "0"}] * 30)
    (aime25 / "README.md").write_text("---\nlicense: mit\n---\nNo files are listed here.\n")
    root = str(tmp_path / "data")
    with pytest.raises(UserError, match=r"^[^\n]*aps/super_glue could not be downloaded[^\n]*$"):
        main(["rte", "mmlu", "aime25", "boolq", f"data_root={root}"])
    mirrored = benchmarks(["rte", "mmlu", "aime25"], root)
    revision = mirrored[0].revision
    assert {file for file in sent if str(revision) in file} == {
        f"{revision}/{file}" for file in ("README.md", "rte/validation.jsonl", "rte/train.jsonl")
    }
    entries = mirror.read_manifest(mirror.folder(mirrored[0]))
    assert {entry["source"] for entry in entries.values()} == {f"nyu-mll/glue@{revision}"}
    assert set(mirror.subsets(mirrored[1])) == {"anatomy", "virology"}
    assert [len(mirror.rows(benchmark)) for benchmark in mirrored] == [277, 14042, 30]
    assert problems(mirrored[:1], Policy()) == []


PARTS = {("rte", "validation"): RTE}
SOURCES: dict[str, Callable[[Path], Path]] = {
    "a folder of data sets": lambda place: write_data_set(place / "nyu-mll/glue", PARTS).parents[1],
    "a data set": lambda place: write_data_set(place, PARTS),
    "a file": lambda place: write_lines(place / "any_name.jsonl", RTE),
    "names of splits": lambda place: write_lines(place / "rte-dev.jsonl", RTE).parent,
}


@pytest.mark.parametrize("name", SOURCES)
def test_mirror_is_made_without_the_hub(rte: BenchmarkConfig, tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    write_lines(tmp_path / "source" / "greatest.jsonl", RTE)  # a name with "test" in a word
    make(rte, SOURCES[name](tmp_path / "source"))
    assert set(mirror.subsets(rte)["rte"]) == {"validation"}
    assert mirror.rows(rte) == RTE
    assert problems([rte], Policy()) == []
    digest = mirror.digest(rte)
    make(rte, write_data_set(tmp_path / "other", PARTS))
    assert mirror.rows(rte) == RTE and mirror.digest(rte) == digest, (
        "only the content identifies it"
    )


@pytest.mark.parametrize(
    "listed",
    [
        {"data_files": [{"split": "validation", "path": "a/dev/*.jsonl"}]},
        {"data_files": [{"split": "validation", "path": ["a/*/one.jsonl"]}]},
        {"data_files": {"validation": "a/dev/one.jsonl"}},
        {"data_dir": "a"},
        {"data_dir": "a/", "data_files": [{"split": "validation", "path": "dev/one*"}]},
    ],
)
def test_files_of_a_subset_are_those_that_its_card_lists(
    rte: BenchmarkConfig, tmp_path: Path, listed: dict[str, Any]
) -> None:
    """A * does not match the name of a folder and what follows."""
    metadata = {"configs": [{"config_name": "rte", **listed}]}
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(metadata)}---\n")
    for folder, name in (("a/dev", "one"), ("b/dev", "one"), ("a/x/y", "one"), ("a/dev/z", "two")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        write_lines(tmp_path / folder / f"{name}.jsonl", RTE[: 1 if folder != "a/dev" else None])
    if listed == {"data_dir": "a"}:
        shutil.rmtree(tmp_path / "a/dev/z")
    make(rte, tmp_path)
    assert mirror.rows(rte) == RTE


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv"])
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, ending: str) -> None:
    rows = [{"text": 'a\u2028b, "c"\nd', "label": "1"}, {"text": "", "label": "2"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    file = tmp_path / f"rows{ending}"
    content = {
        ".jsonl": lines,
        ".jsonl.gz": gzip.compress(lines),
        ".json": json.dumps(rows).encode(),
        ".csv": 'text,label\n"a\u2028b, ""c""\nd",1\n,2\n'.encode(),
    }
    if ending == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), file)
    else:
        file.write_bytes(content[ending])
    assert mirror.read_rows(file) == rows
    file.write_bytes(b"[1\n" if ending != ".csv" else b"\xff")
    with pytest.raises(
        UserError, match=rf"{re.escape(str(file))}\b.*(cannot be read|damaged|UTF-8)"
    ):
        mirror.read_rows(file)


def test_a_new_source_leaves_parts_that_it_lacks(rte: BenchmarkConfig, tmp_path: Path) -> None:
    parts = {("rte", "validation"): RTE, ("rte", "train"): RTE[:1]}
    make(rte, write_data_set(tmp_path / "source", parts))
    assert set(mirror.subsets(rte)["rte"]) == {"validation", "train"}
    del parts["rte", "train"]
    make(rte, write_data_set(tmp_path / "other", parts))
    assert set(mirror.subsets(rte)["rte"]) == {"validation", "train"}


def test_mirror_digest_is_of_the_files_that_are_read(rte: BenchmarkConfig, tmp_path: Path) -> None:
    def digests(**parts: list[dict[str, object]]) -> list[str]:
        make(
            rte,
            write_data_set(
                tmp_path / "source", {("rte", split): rows for split, rows in parts.items()}
            ),
        )
        return [mirror.digest(rte), mirror.digest(replace(rte, shots=2))]

    first = digests(validation=RTE)
    with_train = digests(validation=RTE, train=RTE[:1])
    assert with_train[0] == first[0] and with_train[1] != first[1], (
        "examples come from the new split"
    )
    assert digests(validation=[*RTE[:2], {**RTE[2], "label": 1}])[0] != first[0]


def test_file_of_a_url_is_mirrored_unchanged(tmp_path: Path) -> None:
    (benchmark,) = benchmarks(["humaneval"], str(tmp_path / "data"))
    file = tmp_path / "HumanEvalPlus.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0"}\n'))
    named_file = replace(benchmark, expected=1, url=file.as_uri())
    for source in (None, file):
        make(named_file, source)
        ((copy,),) = mirror.subsets(named_file)["default"].values()
        assert copy.read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match=r"add from=FILE with nowhere\.jsonl\.gz"):
        make(replace(named_file, url=(tmp_path / "nowhere.jsonl.gz").as_uri()), None)


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "changed",
        "manifest",
        "subset",
        "split",
        "rows",
        "sha256",
    ],
)
def test_damaged_mirror_is_refused_and_made_again(
    rte: BenchmarkConfig, tmp_path: Path, how: str
) -> None:
    source = write_data_set(tmp_path / "source", PARTS)
    make(rte, source)
    file = mirror.folder(rte) / "rte/validation.jsonl"
    manifest = mirror.folder(rte) / mirror.MANIFEST
    if how == "missing":
        file.unlink()
    elif how == "changed":
        file.write_bytes(file.read_bytes().replace(b"Rome", b"Oslo"))
    else:
        manifest.write_text(
            '{"files"' if how == "manifest" else manifest.read_text().replace(f'"{how}"', '"x"')
        )
    (sentence,) = problems([rte], Policy())
    assert str(file if how in ("missing", "changed") else manifest) in sentence
    if how in ("missing", "changed"):
        make(rte, source)
        assert problems([rte], Policy()) == []


def test_too_few_rows_and_unknown_parts_are_refused(rte: BenchmarkConfig, tmp_path: Path) -> None:
    source = write_data_set(tmp_path / "source", PARTS)
    with pytest.raises(UserError, match="has 3 rows and should have 277"):
        make(replace(rte, expected=277), source)
    with pytest.raises(
        UserError,
        match=r"has no mirror of it: moe-lab mirror rte data_root=",
    ):
        mirror.check(rte)
    make(rte, source)
    for changes, says in (
        ({"split": "tset"}, "known: rte/validation"),
        ({"subset": "ret"}, "did you mean rte/"),
    ):
        with pytest.raises(UserError, match=says):
            mirror.rows(replace(rte, **changes))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ret", "data_root={}"], "did you mean rte"),
        (["rte"], "required: --data_root"),
        (["rte", "data_rot={}"], "required: --data_root"),
        (["rte", "data_root={}", "form={}"], "did you mean from?"),
        (["rte", "data_root={}", "from=nowhere"], "there is no such file or folder"),
        (["rte", "data_root={}", "from={}/rows.pkl"], "expected a file that ends in .parquet"),
        (["rte", "data_root={}", "from={}/empty"], "has no files of nyu-mll/glue rte validation"),
        (["pocket16", "data_root={}"], "needs no mirror"),
        (["rte", "data_root={}/file.jsonl", "from={}"], "Not a directory"),
        (["rte", "data_root={}"], "nyu-mll/glue could not be downloaded from the hub"),
    ],
)
def test_wrong_command_lines(tmp_path: Path, arguments: list[str], says: str) -> None:
    for name in ("file.jsonl", "rows.pkl"):
        (tmp_path / name).write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"^[^\n]*{re.escape(says)}[^\n]*$"):
        main([argument.format(tmp_path) for argument in arguments])
