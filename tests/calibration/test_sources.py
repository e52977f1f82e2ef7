"""What is taken as a source, and the sentence for what is not."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import choices
import pytest
import torch
from pydantic import ValidationError

from moe_lab.calibration import check
from moe_lab.calibration.batches import batches
from moe_lab.calibration.documents import Chat, Text, pair
from moe_lab.calibration.sources import locate, read, whole_text
from moe_lab.config import BenchmarkConfig, CalibrationConfig
from moe_lab.config.base import identity
from moe_lab.errors import UserError
from moe_lab.evaluation import suite
from moe_lab.evaluation.harnesses import perplexity

Settings = Callable[..., CalibrationConfig]

MESSAGES = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
MESSAGES_ALONE = {"messages": MESSAGES}


def lines(*records: object) -> str:
    return "\n".join(json.dumps(record) for record in records) + "\n"


def written(path: Path, content: str) -> Path:
    raw = content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz"])
def test_blank_lines_part_the_documents_of_a_text(tmp_path: Path, settings: Settings, name: str) -> None:
    file = written(tmp_path / name, "\ufeffone\nmore\r\n\r\ntwo\n \t\n\n\nthree\n")
    assert read(settings(file)) == [Text("one\nmore"), Text("two"), Text("three\n")]
    assert read(settings(written(tmp_path / name, "one\ntwo\nthree"))) == [Text("one\ntwo\nthree")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines({"text": "one"}, {"text": "two"})),
        ("a.jsonl", "\n" + lines({"text": "one"}) + "\n\n" + lines({"text": "two"})),
        ("a.jsonl.gz", lines({"text": "one", "url": 1}, {"text": "two"})),
        ("a.json.gz", lines({"text": "one"}, {"text": "two"})),
        ("a.json", json.dumps([{"text": "one"}, {"text": "two"}], indent=2)),
    ],
)
def test_json_lines_and_lists(tmp_path: Path, settings: Settings, name: str, content: str) -> None:
    assert read(settings(written(tmp_path / name, content))) == [Text("one"), Text("two")]


def test_only_a_newline_ends_a_json_line(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path / "a.jsonl", '{"text": "one\u2028still one\x85"}\n')
    assert read(settings(file)) == [Text("one\u2028still one\x85")]


def test_fields_that_are_known_without_being_named(tmp_path: Path, settings: Settings) -> None:
    file = written(
        tmp_path / "a.jsonl",
        lines(
            {"text": "one", "messages": MESSAGES},
            {"messages": MESSAGES},
            {"instruction": "say", "output": "said"},
            {"instruction": "add", "input": "1 2", "output": "3"},
            {"instruction": "wait", "input": "", "output": "waited"},
            {"question": "why", "answer": "so"},
        ),
    )
    assert read(settings(file)) == [
        Text("one"),
        Chat(tuple(MESSAGES)),
        pair("say", "said"),
        pair("add\n\n1 2", "3"),
        pair("wait", "waited"),
        pair("why", "so"),
    ]


def test_a_named_field_may_hold_text_or_messages(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path / "a.jsonl", lines({"text": "no", "story": "yes"}, {"text": "no", "story": MESSAGES}))
    assert read(settings(file, field="story")) == [Text("yes"), Chat(tuple(MESSAGES))]


PAIR = {"instruction": "w1", "output": "w2"}
ANSWERED = {"question": "w1", "answer": "w2"}
COMPLETED = {"prompt": "w1", "completion": "w2"}
CALLED = {"query": "w1", "answers": [{"name": "w2", "arguments": {}}], "tools": [{"name": "w2"}]}


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        ({"messages": [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "w3"}]}, "reasoning_content", "w3"),
        ({"messages": [{**MESSAGES[0], "images": ["w3.png"]}, MESSAGES[1]]}, "images", "w3.png"),
        ({"messages": MESSAGES, "system": "w3"}, "system", "w3"),
        ({**PAIR, "input": "", "history": [["w3", "w4"]]}, "history", "w3"),
        ({**PAIR, "conversations": [{"from": "human", "value": "w3"}]}, "conversations", "human"),
        ({**ANSWERED, "context": "w3"}, "context", "w3"),
        ({**COMPLETED, "tools": [{"name": "w3"}]}, "tools", "w3"),
        ({**CALLED, "system": "w3"}, "system", "w3"),
    ],
)
def test_a_record_of_which_a_part_is_not_read_is_refused(
    tmp_path: Path, settings: Settings, record: dict[str, Any], key: str, value: str
) -> None:
    file = written(tmp_path / "a.jsonl", lines(MESSAGES_ALONE, record))
    with pytest.raises(UserError, match=rf"a\.jsonl line 2.*\b{re.escape(key)}=.*{re.escape(value)}"):
        read(settings(file))


def test_empty_parts_and_remarks_are_no_parts_of_a_conversation(tmp_path: Path, settings: Settings) -> None:
    noted = [{**MESSAGES[0], "timestamp": 3}, {**MESSAGES[1], "reasoning_content": None, "images": []}]
    record = {"messages": noted, "system": "", "history": [], "images": None, "id": 3, "source": "w3", "prompt": "w1"}
    file = written(tmp_path / "a.jsonl", lines(record, {**PAIR, "system": "", "history": "[]", "id": 3}))
    assert read(settings(file)) == [Chat(tuple(MESSAGES)), pair("w1", "w2")]


def test_what_is_to_be_read_may_be_named(tmp_path: Path, settings: Settings) -> None:
    """The advice for a record of which a part is not read."""
    file = written(tmp_path / "a.jsonl", lines({"messages": MESSAGES, "system": "w3"}))
    assert read(settings(file, field="messages")) == [Chat(tuple(MESSAGES))]
    file = written(tmp_path / "b.jsonl", lines({**PAIR, "system": "w3"}))
    assert read(settings(file, template="{system} {instruction} {output}")) == [Text("w3 w1 w2")]


@pytest.mark.parametrize("field", [None, "messages"])
def test_messages_may_be_json_text(tmp_path: Path, settings: Settings, field: str | None) -> None:
    file = written(tmp_path / "a.jsonl", lines({"messages": json.dumps(MESSAGES)}))
    assert read(settings(file, field=field)) == [Chat(tuple(MESSAGES))]
    for wrong in ("w1 w2", '{"role": "user"}', '["w1"]', '[{"role": "user"}]', None):
        file = written(tmp_path / "a.jsonl", lines(MESSAGES_ALONE, {"messages": wrong}))
        with pytest.raises(UserError, match=r"a\.jsonl line 2.*messages"):
            read(settings(file, field=field))


def test_a_named_field_may_hold_messages_as_json_text(tmp_path: Path, settings: Settings) -> None:
    told, other = json.dumps(MESSAGES), '[{"w1": 1}]'
    file = written(tmp_path / "a.jsonl", lines({"story": told}, {"story": other}, {"story": "[w1] w2"}))
    assert read(settings(file, field="story")) == [Chat(tuple(MESSAGES)), Text(other), Text("[w1] w2")]


def test_a_text_is_whole_whatever_stands_beside_it(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path / "a.jsonl", lines({"text": "one", "system": "w3", "conversations": [1], **PAIR}))
    assert read(settings(file)) == [Text("one")]


def test_empty_documents_are_left_out(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path / "a.jsonl", lines({"text": " "}, {"messages": []}, {"text": "one"}))
    assert read(settings(file)) == [Text("one")]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", " \n\n \n", "holds no document"),
        ("a.json", "[]", "holds no document"),
        ("a.jsonl", '{"text": "one"}\n{"text": "tw\n', "a.jsonl line 2 is damaged JSON"),
        ("a.json", '[{"text": "one"},\n', "a.json line 2 is damaged JSON"),
        (
            "a.jsonl",
            lines({"body": "one", "id": 1}),
            r"line 1: none of the fields text.*found: body, id.*calibration.field",
        ),
        ("a.jsonl", lines({"text": "one"}, {"txet": "two"}), "line 2: none of the fields"),
        ("a.json", '[{"text": "one"}, 7]', "record 2: expected an object with fields such as text, found 7"),
        ("a.jsonl", lines({"instruction": None, "output": "x"}), "field instruction holds None, expected a string"),
        ("a.jsonl", lines({"text": None}), "line 1: field text holds None, expected a string"),
        ("a.jsonl", lines({"messages": [{"role": "user"}]}), "line 1, field messages: expected messages with a role"),
        ("a.pkl", "x", r"ends in \.pkl: pickles run code"),
        ("a.arrow", "x", r"ends in \.arrow: this format is not read; expected \.txt"),
        ("a.tar.gz", "x", r"ends in \.tar\.gz: this format is not read"),
        ("notes", "x", "ends in no suffix: this format is not read"),
    ],
)
def test_one_sentence_for_what_cannot_be_read(
    tmp_path: Path, settings: Settings, name: str, content: str, sentence: str
) -> None:
    file = written(tmp_path / name, content)
    with pytest.raises(UserError, match=sentence):
        read(settings(file))


def test_a_field_that_is_not_there_names_the_nearest(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path / "a.jsonl", lines({"content": "one", "id": 1}))
    with pytest.raises(UserError, match=r"contents of calibration.field is not there: did you mean content\?"):
        read(settings(file, field="contents"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"fine \xff\xfe", r"not UTF-8 text: line 1 .*0xff.*byte 5\b"),
        ("b.txt.gz", gzip.compress(b"one two three" * 50)[:-12], "damaged gz file"),
        ("c.txt.gz", b"not compressed", "damaged gz file"),
        ("d.txt.gz", gzip.compress(b"one")[:10] + b"\xff" * 20, "damaged gz file"),
    ],
)
def test_damaged_files(tmp_path: Path, settings: Settings, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read(settings(tmp_path / name))


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path / "general.jsonl", "x")
    with pytest.raises(UserError, match=r"does not exist: did you mean .*general\.jsonl\?"):
        locate(str(tmp_path / "genersl.jsonl"))
    with pytest.raises(UserError, match="there is no folder"):
        locate(str(tmp_path / "nowhere" / "general.jsonl"))
    with pytest.raises(UserError, match="is a folder"):
        locate(str(tmp_path))
    with pytest.raises(UserError, match=r"mydata\.pkl does not exist"):
        locate("mydata.pkl")


def test_what_is_no_file_may_be_a_set_on_the_hub() -> None:
    assert locate("allenai/tulu-3-sft-personas-math") is None
    assert locate("wikitext") is None
    assert locate("hf://datasets/allenai/c4/en/c4-train.00000-of-01024.json.gz") is None
    with pytest.raises(UserError, match=r"ends in \.parquet"):
        locate("hf://datasets/allenai/c4/en/train.parquet")


def test_a_split_on_the_hub(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    import datasets

    asked: list[Any] = []

    def load(path: str, subset: str | None, split: str) -> Any:
        asked.append((path, subset, split))
        return datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read(settings("owner/set", subset="raw", split="test")) == [Text("one"), Text("two")]
    assert asked == [("owner/set", "raw", "test")]


def test_a_file_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Settings) -> None:
    import huggingface_hub

    file = written(tmp_path / "part.json.gz", lines({"text": "one"}))
    asked: list[tuple[str, str]] = []

    def download(repository: str, name: str, repo_type: str) -> str:
        asked.append((repository, name))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert read(settings("hf://datasets/allenai/c4/en/part.json.gz")) == [Text("one")]
    assert asked == [("allenai/c4", "en/part.json.gz")]


@pytest.mark.parametrize("path", ["owner/set", "hf://datasets/owner/set/a.jsonl"])
def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch, settings: Settings, path: str) -> None:
    import datasets
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'owner/set' on the Hub (OfflineModeIsEnabled)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(UserError, match=r"is no file here and could not be had from the hub \(Couldn't reach") as error:
        read(settings(path))
    assert "\n" not in str(error.value)


WIKI = Path(__file__).parents[3] / "shared" / "data"
LINES = "\n = Heading = \n \n One sentence . \n\n\n Another , after two empty rows . \n"


@pytest.mark.parametrize("file", ["tiny", "wikitext2_test.txt", "wikitext2_valid.txt"])
def test_calibration_reads_wikitext_as_perplexity_does(file: str, tmp_path: Path) -> None:
    """Rows joined by blank lines, empty ones included: from a text, from records, and from the mirror."""
    from benchmarks.data_sets import mirror_files
    from moe_lab.evaluation.harnesses import perplexity
    from moe_lab.evaluation.mirror import benchmarks

    if file == "tiny":
        text = LINES
    elif (WIKI / file).exists():
        text = (WIKI / file).read_text(encoding="utf-8")
    else:
        pytest.skip("the real text is not at hand")
    rows = [f"{line}\n" if line.strip() else "" for line in text.split("\n")[:-1]]
    (tmp_path / "wikitext2_test.txt").write_text(text, encoding="utf-8")
    records = written(tmp_path / "rows.jsonl", lines(*({"text": row} for row in rows)))
    (benchmark,) = benchmarks(["wikitext2"], str(tmp_path / "data"))
    mirror_files(benchmark, tmp_path, tmp_path / "source")
    measured = perplexity._text(benchmark)
    chosen = choices.choose(CalibrationConfig, "calibration", "wikitext2")
    assert measured == "\n\n".join(rows) and len(rows) > 5 and "" in rows
    for path in (tmp_path / "wikitext2_test.txt", records):
        assert read(replace(chosen, path=str(path))) == [Text(measured)]


def test_windows_of_perplexity_are_rows_of_calibration(tmp_path: Path, settings: Settings, tokenizer: Any) -> None:
    file = written(tmp_path / "a.jsonl", lines(*({"text": text} for text in ("w1 w2", "", "w3", "w4 w5 w6", "w7"))))
    chosen = settings(file, joined=True, packing="chunk", length=4, tokens=8, special_tokens=True)
    windows = torch.tensor(tokenizer("\n\n".join(["w1 w2", "", "w3", "w4 w5 w6", "w7"])).input_ids).split(4)
    ((ids, valid),) = batches(chosen, tokenizer).rows
    assert torch.equal(ids, torch.stack(windows[:2])) and bool(valid.all())


def test_only_texts_can_be_joined_and_a_joined_set_is_another(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path / "a.jsonl", lines({"messages": MESSAGES}))
    with pytest.raises(UserError, match=r"calibration.joined=true: .* more than plain texts"):
        read(settings(file, joined=True))
    assert identity(settings(file)) != identity(settings(file, joined=True))
    assert identity(settings(file)) != identity(settings(file, template="{text}"))


def test_a_template_names_fields_that_are_there(tmp_path: Path, settings: Settings) -> None:
    file = written(tmp_path / "a.jsonl", lines({"question": "w1 {answer}", "answer": "w2"}))
    assert read(settings(file, template="Q: {question}\nA: {answer}")) == [Text("Q: w1 {answer}\nA: w2")]
    with pytest.raises(UserError, match=r"line 1: .* answers of calibration.template .* did you mean answer\?"):
        read(settings(file, template="{answers}"))
    with pytest.raises(ValidationError, match="both set"):
        settings(file, template="{answer}", field="answer")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("Text, and more.".encode("utf-16"), 1),
        ("Text, and more.".encode("utf-16-le"), 1),
        (pickle.dumps({"text": "x"}), 1),
        (b"text\n" * 50_000 + b"text\0text", 50_001),
        (b"text\n" * 50_000 + b"caf\xe9", 50_001),
        (gzip.compress(b"text", mtime=0), 1),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_no_text_is_refused_before_the_start_whatever_it_is_called(
    tmp_path: Path, settings: Settings, name: str, content: bytes, line: int
) -> None:
    (file := tmp_path / name).write_bytes(content)
    with pytest.raises(
        UserError, match=rf"calibration.path={re.escape(str(file))} .*UTF-8.* line {re.escape(str(line))}\b"
    ):
        check(settings(file))
    benchmark = BenchmarkConfig("p", "perplexity", str(file), reports={"p": "perplexity"})
    assert [f"suite.path={file} " in sentence and "UTF-8" in sentence for sentence in suite.wrong([benchmark])] == [
        True
    ]


def test_one_text_of_all_documents(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", lines({"text": "one"}, {"question": "two", "answer": "three"}))
    assert whole_text(file, "suite.path") == "one\n\ntwo\n\nthree"
    assert whole_text(written(tmp_path / "a.txt", "one\n\n\ntwo\n"), "suite.path") == "one\n\n\ntwo\n"
    with pytest.raises(UserError, match="conversations"):
        whole_text(written(tmp_path / "b.jsonl", lines({"messages": MESSAGES})), "suite.path")


def test_a_text_for_perplexity_is_read_as_one_for_calibration_is(tmp_path: Path) -> None:
    records = written(tmp_path / "a.jsonl", lines({"text": "one"}))
    assert perplexity._text(BenchmarkConfig("p", "perplexity", str(records))) == "one"
    pickled = BenchmarkConfig("p", "perplexity", str(written(tmp_path / "a.pkl", "x")), reports={"p": "loss"})
    assert "suite.path" in suite.wrong([pickled])[0] and "pickles" in suite.wrong([pickled])[0]
