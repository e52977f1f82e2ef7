"""Mirrors: the same rows from wherever they come, counted, and never half of them."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from harness_files import write_lines
from mirrors import BOOLQ, RTE, mirrored, subject_rows

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import mirror, suite
from moe_lab.evaluation.mirror.make import benchmarks, main, make
from moe_lab.evaluation.sandbox.policy import Policy


@pytest.fixture
def rte(tmp_path: Path) -> BenchmarkConfig:
    (benchmark,) = benchmarks(["rte"], str(tmp_path / "data"))
    return replace(benchmark, expected=len(RTE))


def folder_of(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_rows_and_digest_are_the_same_from_every_source(
    rte: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, table, zipped, listed = (folder_of(tmp_path / name) for name in ("lines", "table", "zipped", "listed"))
    write_lines(lines / "rte_validation.jsonl", RTE)
    backwards = arrow.Table.from_pylist([dict(reversed(row.items())) for row in RTE])
    parquet.write_table(backwards, table / "rte_validation.parquet")
    (zipped / "rte_validation.jsonl.gz").write_bytes(gzip.compress((lines / "rte_validation.jsonl").read_bytes()))
    (listed / "rte_validation.json").write_text(json.dumps(RTE))
    hub = folder_of(tmp_path / "hub" / "nyu-mll" / "glue")
    shutil.copy(lines / "rte_validation.jsonl", folder_of(hub / "rte") / "val.jsonl")
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: rte\n  data_files:\n  - split: validation\n    path: rte/val.jsonl\n---\n"
    )
    asked: list[Any] = []

    class Api:
        def dataset_info(self, name: str) -> Any:
            return SimpleNamespace(sha="a1" * 20)

    def load_dataset(path: str, name: str | None, **settings: Any) -> Any:
        asked.append((path, name, settings["revision"]))
        splits = {"validation": RTE, "train": RTE[:1]}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})

    digests = set()
    sources = [lines, lines / "rte_validation.jsonl", table, zipped, listed, tmp_path / "hub", hub, None]
    for number, source in enumerate(sources):
        own = replace(rte, root=str(tmp_path / f"root{number}"))
        if source is None:
            monkeypatch.setattr(datasets, "load_dataset", load_dataset)
            monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        said = make(own, source)
        assert said[0].startswith("rte: nyu-mll/glue rte validation: 3 rows of ")
        assert mirror.rows(own) == RTE
        assert suite.preflight([own], Policy()) == []
        digests.add(mirror.digest(own))
    assert len(digests) == 1 and asked == [("nyu-mll/glue", "rte", "a1" * 20)]
    entries = mirror.manifest(mirror.folder(own))
    assert set(entries) == {f"rte/{split}-00000-of-00001.parquet" for split in ("train", "validation")}
    assert {(entry["source"], entry["revision"]) for entry in entries.values()} == {("nyu-mll/glue", "a1" * 20)}
    assert not list((tmp_path / "root0" / "nyu-mll").glob(".mirror-*"))
    monkeypatch.undo()
    again = datasets.load_dataset(str(mirror.folder(own)), "rte", cache_dir=str(tmp_path / "cache"))
    assert again["validation"].to_list() == RTE and len(again["train"]) == 1


def test_benchmarks_of_one_data_set_can_be_made_side_by_side(tmp_path: Path) -> None:
    row = {"id": "a", "question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"}
    wanted = [replace(b, expected=1) for b in benchmarks(["arc_easy", "arc_challenge"], str(tmp_path / "data"))]
    for name in ("arc_easy_test", "arc_challenge_test", "arc_easy_train", "arc_challenge_train"):
        write_lines(tmp_path / f"{name}.jsonl", [row])
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda number: make(wanted[number % 2], tmp_path), range(8)))
    assert len(mirror.manifest(mirror.folder(wanted[0]))) == 4
    for benchmark in wanted:
        assert mirror.rows(benchmark) == [row]


def test_a_digest_is_of_what_is_read(rte: BenchmarkConfig, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    write_lines(source / "rte_validation.jsonl", RTE)
    make(rte, source)
    before, with_examples = mirror.digest(rte), mirror.digest(replace(rte, shots=2))
    write_lines(source / "rte_train.jsonl", RTE[:1])
    make(rte, source)
    assert mirror.digest(rte) == before, "the new split is not read"
    assert mirror.digest(replace(rte, shots=2)) not in (before, with_examples), "examples come from the new split"
    write_lines(source / "rte_validation.jsonl", [*RTE[:2], {**RTE[2], "label": 1}])
    make(rte, source)
    assert mirror.digest(rte) != before


def test_subsets_keep_their_rows_in_order(tmp_path: Path) -> None:
    rows = [*subject_rows("anatomy", 3), *subject_rows("virology", 2)]
    random.Random(0).shuffle(rows)
    benchmark = mirrored(tmp_path, "mmlu", rows, dev=subject_rows("anatomy", 1))
    assert set(mirror.subsets(benchmark)) == {"anatomy", "virology"}
    for subject in ("anatomy", "virology"):
        own = replace(benchmark, subset=subject, expected=None)
        assert mirror.rows(own) == [row for row in rows if row["subject"] == subject]
    mirror.check(benchmark)
    with pytest.raises(UserError, match=r"subset=astronomy is unknown.*anatomy, virology"):
        mirror.rows(replace(benchmark, subset="astronomy"))
    with pytest.raises(UserError, match=r"split=test is unknown \(known: validation\): the mirror .* lacks it"):
        mirror.check(replace(mirrored(tmp_path, "boolq", BOOLQ), split="test"))


def test_answers_and_texts_of_files_beside(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    write_lines(source / "valid.jsonl", [{"goal": "g", "sol1": "a", "sol2": "b"}] * 2)
    (source / "valid-labels.lst").write_text("1\n0\n")
    text = " \n = One = \n \n The first . \n = = Part = = \n more \n = Two = \n \n The second . \n"
    (source / "wiki.test.tokens").write_text(text)
    piqa, lines, documents = benchmarks(["piqa", "wikitext2", "wikitext2_word"], str(tmp_path / "data"))
    piqa, documents = replace(piqa, expected=2), replace(documents, expected=2)
    for benchmark in (piqa, lines, documents):
        make(benchmark, source)
    assert [row["label"] for row in mirror.rows(piqa)] == [1, 0]
    assert [row["text"] for row in mirror.rows(lines)][:4] == ["", " = One = \n", "", " The first . \n"]
    assert [row["page"] for row in mirror.rows(documents)] == [
        " = One = \n \n The first . \n = = Part = = \n more ",
        " = Two = \n \n The second . \n",
    ]
    (source / "valid-labels.lst").write_text("1\n")
    with pytest.raises(UserError, match="1 answers for the 2 rows"):
        make(piqa, source)


def test_a_file_that_no_table_holds_is_kept_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "p", "entry_point": "f", "canonical_solution": "c"}
    rows = [{**row, "base_input": [[1, [2.5, "a\u2028b"]]], "plus_input": [[[]]]}]
    file = tmp_path / "HumanEvalPlus.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(rows[0], ensure_ascii=False).encode()))
    about = {"columns": ["task_id"], "keep": True, "files": {"test": ["HumanEvalPlus"]}, "address": file.as_uri()}
    monkeypatch.setattr(mirror, "_data_sets", lambda: {"evalplus/some_release": {"default": about}})
    benchmark = BenchmarkConfig(
        name="h", harness="evalplus", data="evalplus/some_release", split="test", expected=1, root=str(tmp_path / "one")
    )
    for number, source in enumerate((tmp_path, None)):  # None takes it from its address
        own = replace(benchmark, root=str(tmp_path / f"root{number}"))
        make(own, source)
        assert (mirror.folder(own) / file.name).read_bytes() == file.read_bytes()
        assert mirror.rows(own) == rows
    about["address"] = (tmp_path / "nowhere.gz").as_uri()
    with pytest.raises(UserError, match=r"could not be downloaded.*add from=FOLDER with nowhere.gz"):
        make(replace(benchmark, root=str(tmp_path / "other")), None)


def spoiled(benchmark: BenchmarkConfig, how: str) -> None:
    file = next(iter(mirror.folder(benchmark).glob("rte/*.parquet")))
    if how == "missing":
        file.unlink()
    elif how == "changed":
        content = file.read_bytes()
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif how == "manifest":
        (mirror.folder(benchmark) / mirror.MANIFEST).write_text('{"files"')
    else:
        manifest = mirror.folder(benchmark) / mirror.MANIFEST
        manifest.write_text(manifest.read_text().replace(f'"{how}"', '"x"'))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", "parquet is missing, which moe_lab.json describes"),
        (
            "changed",
            "is not what moe_lab.json describes: make the mirror again with python -m .* rte data_root=",
        ),
        ("manifest", "is no manifest of a mirror: delete"),
        *((name, "is no manifest of a mirror: delete") for name in ("subset", "split", "rows", "sha256", "digest")),
    ],
)
def test_a_damaged_mirror_is_refused(rte: BenchmarkConfig, tmp_path: Path, how: str, says: str) -> None:
    write_lines(folder_of(tmp_path / "source") / "rte_validation.jsonl", RTE)
    make(rte, tmp_path / "source")
    mirror.check(rte)
    spoiled(rte, how)
    with pytest.raises(UserError, match=says):
        mirror.check(rte)
    if how in ("missing", "changed"):
        assert any("rte" in sentence for sentence in suite.preflight([rte], Policy()))
        make(rte, tmp_path / "source")
        mirror.check(rte)


def test_another_number_of_rows_is_refused_by_who_makes_and_by_who_reads(rte: BenchmarkConfig, tmp_path: Path) -> None:
    write_lines(folder_of(tmp_path / "source") / "rte_validation.jsonl", RTE)
    with pytest.raises(UserError, match="has 3 rows for the split validation and should have 277, so nothing was"):
        make(replace(rte, expected=277), tmp_path / "source")
    assert not (tmp_path / "data" / "nyu-mll" / "glue").exists()
    make(rte, tmp_path / "source")
    with pytest.raises(UserError, match="rte validation has 3 rows and should have 277"):
        mirror.check(replace(rte, expected=277))
    assert "should have 277" in suite.preflight([replace(rte, expected=277, limit=2)], Policy())[0]
    with pytest.raises(
        UserError, match=r"data_root=.* has no mirror of it: python -m moe_lab.evaluation.mirror rte data"
    ):
        mirror.folder(replace(rte, root=str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("rte_validation.jsonl", b'{"sentence1": "a", "label": 0}\n', "row 1 of .* lacks sentence2, idx.*sentence1"),
        ("rte_validation.jsonl", b'{"sentence1": \n', "cannot be read"),
        ("rte_validation.jsonl", b"[1]\n", "expected objects with named fields"),
        ("rte_validation.parquet", b"PAR1 no", "cannot be read"),
        ("rte_validation.jsonl.gz", b"no gzip", "cannot be read"),
        ("rte_validation.txt", b"a text", "is a text, and nyu-mll/glue has rows with fields"),
        ("rte_validation.pkl", b"\x80\x04.", r"has no rte_validation \(.parquet .* laid out as on the hub"),
    ],
)
def test_files_that_cannot_be_a_data_set_are_refused(
    rte: BenchmarkConfig, tmp_path: Path, file: str, content: bytes, says: str
) -> None:
    (folder_of(tmp_path / "source") / file).write_bytes(content)
    with pytest.raises(UserError, match=says):
        make(replace(rte, expected=None), tmp_path / "source")
    assert not (tmp_path / "data" / "nyu-mll" / "glue").exists()


def test_a_pickle_is_never_read(rte: BenchmarkConfig, tmp_path: Path) -> None:
    file = tmp_path / "rows.pkl"
    file.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "touched").encode() + b"'\ntR.")
    with pytest.raises(UserError, match="is of no kind that is read"):
        make(rte, file)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ret", "data_root={}"], "did you mean rte"),
        (["rte"], "expected NAME ... data_root=FOLDER"),
        (["rte", "data_rot={}"], "did you mean data_root"),
        (["rte", "data_root={}", "from=nowhere"], "there is no such file or folder"),
        (["mc8", "data_root={}", "from={}/file.jsonl"], "is one file: expected the name of one benchmark"),
        (["pocket16", "data_root={}"], "needs no mirror"),
        (["rte", "data_root={}/file.jsonl", "from={}"], "cannot be written (["),
        (["rte", "data_root={}"], "nyu-mll/glue could not be downloaded from the hub"),
    ],
)
def test_mistakes_on_the_command_line(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.jsonl").write_text("")
    assert main([word.format(tmp_path) for word in words]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and "Traceback" not in said


def test_what_people_have_becomes_the_published_sets(shared_data: Path, tmp_path: Path) -> None:
    """Every count is checked by the command itself; what is not there is said, and the rest is made all the same."""
    names = ["mc8", "piqa", "wikitext2", "wikitext2_word", "gsm8k_8shot"]
    command = [
        sys.executable,
        "-m",
        "moe_lab.evaluation.mirror",
        *names,
        f"data_root={tmp_path}",
        f"from={shared_data}",
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    missing = [line.split()[2] for line in run.stderr.splitlines() if line.startswith("moe_lab: benchmark")]
    assert missing == ["boolq:", "hellaswag:", "rte:"]
    made = {name.split(":")[0] for name in run.stdout.splitlines()}
    whole = {"arc_challenge", "arc_easy", "mmlu", "openbookqa", "winogrande", "piqa", "gsm8k_8shot"}
    assert made == {*whole, "wikitext2", "wikitext2_word"}
    for benchmark in benchmarks(sorted(made), str(tmp_path)):
        assert suite.preflight([benchmark], Policy()) == []
    assert {b.name: b.expected for b in benchmarks(sorted(whole), str(tmp_path))} == {
        "arc_challenge": 1172,
        "arc_easy": 2376,
        "mmlu": 14042,
        "openbookqa": 500,
        "winogrande": 1267,
        "piqa": 1838,
        "gsm8k_8shot": 1319,
    }
    assert len(mirror.subsets(benchmarks(["mmlu"], str(tmp_path))[0])) == 57
