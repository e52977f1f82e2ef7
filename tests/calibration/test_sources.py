"""What is taken as a source, with conversations and functions called in them; what templates get;
what is refused."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import choices
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError

from moe_lab.calibration import held_out_text
from moe_lab.calibration.batches import Calibration, answer_batches, batches
from moe_lab.calibration.documents import Chat, Documents, Text, render, tokenize
from moe_lab.calibration.sources import first_document, local_files, read, read_as_one_text
from moe_lab.config import BenchmarkConfig, CalibrationConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.evaluation.harness import benchmark_errors
from moe_lab.evaluation.harnesses import perplexity
from moe_lab.evaluation.items import Document
from moe_lab.models.files import IdentifiedModel
from moe_lab.models.load import load_tokenizer

Settings = Callable[..., CalibrationConfig]
Read = Callable[..., Calibration]

MESSAGES = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
NOTED: list[dict[str, Any]] = [
    {**MESSAGES[0], "timestamp": 3},
    {**MESSAGES[1], "reasoning_content": None, "images": []},
]
NOTED_READ = (NOTED[0], {**MESSAGES[1], "images": []})
METADATA = {
    "history": "[]",
    "id": 3,
    "source": "w3/w4",
    "is_new": True,
    "prompt": "w1",
}
CHAT = Chat(tuple(MESSAGES))
BARE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
"""A chat template that reads roles and contents."""
PAIR = {"instruction": "w1", "output": "w2"}
LABELS = {"level": "Level 5", "problem_type": "Counting & Probability"}
"""Fields of the data set MATH."""
CALLED = {
    "query": "w1",
    "answers": [{"name": "w2", "arguments": {}}],
    "tools": [{"name": "w2"}],
}
ONE, TWO = {"text": "one\u2028still one\x85"}, {"text": "two"}
"""A newline alone ends a JSON line."""


@pytest.fixture
def read_batches(tokenizer_with: Callable[..., Any], source: Settings) -> Read:
    """Function (records, chat template, changed settings) that reads a set of the records, nine
    times over."""

    def read(records: list[Any], template: str | None, **changes: Any) -> Calibration:
        return batches(source(*9 * records, **changes), tokenizer_with(template))

    return read


def pair(task: str, answer: str, arguments: dict[str, Any] | None = None) -> Chat:
    """A document with a task and its answer."""
    turns = {"role": "user", "content": task}, {"role": "assistant", "content": answer}
    return Chat(turns, arguments or {}, Text(f"{task}\n\n{answer}", len(task) + 2))


def lines(*records: object) -> str:
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n"


def written(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(
        gzip.compress(raw) if path.suffix == ".gz" and isinstance(content, str) else raw
    )
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (name, "\ufeffone\nmore\r\n\r\ntwo\n \t\n\n\nthree\n")
            for name in ("a.txt", "a.md", "a.txt.gz")
        ),
        ("a.jsonl", "\n" + lines(ONE, {"text": " "}, {"messages": []}) + "\n\n" + lines(TWO)),
        ("a.json.gz", lines({**ONE, "url": 1}, TWO)),
        ("a.json", json.dumps([ONE, TWO], indent=2)),
    ],
)
def test_texts_and_records_are_documents(
    tmp_path: Path, settings: Settings, name: str, content: str
) -> None:
    """Empty records are left out."""
    of_records = [Text(ONE["text"]), Text("two")]
    of_text = [Text("one\nmore\n\ntwo\n \t\n\n\nthree\n")]
    documents = read(settings(written(tmp_path / name, content))).documents
    assert documents == (of_records if "json" in name else of_text)


@pytest.mark.parametrize(
    ("record", "changes", "expected"),
    [
        (
            {"text": "one", "system": "w3", "conversations": [1], "messages": MESSAGES, **PAIR},
            {},
            Text("one"),
        ),
        ({"messages": json.dumps(MESSAGES)}, {}, CHAT),
        ({"messages": json.dumps(MESSAGES), "system": "w3"}, {"field": "messages"}, CHAT),
        ({"messages": NOTED, "system": None, **METADATA}, {}, Chat(NOTED_READ, METADATA)),
        (
            {"messages": NOTED, "license": "w3 w4"},
            {"ignored": ("license", "timestamp", "images")},
            CHAT,
        ),
        (
            {"instruction": "add", "input": "1 2", "output": "3"},
            {},
            pair("add\n\n1 2", "3"),
        ),
        ({**PAIR, "input": "", **METADATA}, {}, pair("w1", "w2", METADATA)),
        ({**PAIR, **LABELS}, {}, pair("w1", "w2", LABELS)),
        ({"a": "w1", "b": "w2", "c": "w3 w4"}, {"field": ("a", "b")}, pair("w1", "w2")),
        ({"text": "no", "story": "yes"}, {"field": "story"}, Text("yes")),
        ({"story": '[{"w1": 1}]'}, {"field": "story"}, Text('[{"w1": 1}]')),
        (
            {**PAIR, "system": "w3"},
            {"template": "{system} {instruction} {output}"},
            Text("w3 w1 w2"),
        ),
        (
            {"question": "w1 {answer}", "answer": "w2"},
            {"template": "{question}: {answer}"},
            Text("w1 {answer}: w2"),
        ),
    ],
)
def test_fields_are_known_or_named(
    record: Any, changes: dict[str, str], expected: object, source: Settings
) -> None:
    assert read(source(record, record, **changes)).documents == [expected] * 2


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        (
            {"messages": [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "w3 w4"}]},
            "reasoning_content",
            "w3",
        ),
        ({"messages": [{**MESSAGES[0], "images": ["w3.png"]}, MESSAGES[1]]}, "images", "w3.png"),
        ({"messages": MESSAGES, "system": "w3 w4"}, "system", "w3"),
        ({"messages": MESSAGES, "system": "\u7b80\u77ed"}, "system", "\u7b80"),
        ({"messages": MESSAGES, "documents": [{"title": "w3", "text": "w4"}]}, "documents", "w3"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs",
            "False",
        ),
        ({**CALLED, "system": "w3 w4"}, "system", "w3"),
        ({**PAIR, "input": "", "history": [["w3", "w4"]]}, "history", "w3"),
        ({"question": "w1", "answer": "w2", "context": "w3 w4"}, "context", "w3"),
        ({**PAIR, **LABELS, "type": "w3 w4 w5 w6"}, "type", "w3"),
        ({"prompt": "w1", "completion": "w2", "tools": [{"name": "w3"}]}, "tools", "w3"),
        *(
            ({"messages": wrong}, "messages", "")
            for wrong in ("w1 w2", '{"role": "user"}', '["w1"]')
        ),
    ],
)
def test_records_with_unread_parts_are_refused(
    record: dict[str, Any], key: str, value: str, read_batches: Read
) -> None:
    """Ids, numbers, flags and texts that are part of the conversation are no such parts."""
    with pytest.raises(
        UserError, match=rf"set\.jsonl line 2.*\b{re.escape(key)}\b.*{re.escape(value)}"
    ):
        read_batches([{"messages": MESSAGES}, record], READS_TOOLS)


@pytest.mark.parametrize(
    ("record", "reads", "text"),
    [
        ({"tool_plan": "w3 w4"}, "{{ m.tool_plan }}", "w3 w4"),
        ({"weight": 0}, "{{ 'w3' if m.get('weight') == 0 }}", "w3"),
        (
            {"thoughts": [{"step": "w3 w4"}]},
            "{% for thought in m.thoughts %}{{ thought.step }}{% endfor %}",
            "w3 w4",
        ),
    ],
)
def test_template_gets_every_key_of_a_message(
    record: dict[str, Any], reads: str, text: str, read_batches: Read
) -> None:
    records = [{"messages": [MESSAGES[0], {**MESSAGES[1], **record}]}]
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} " + reads + " {% endfor %}"
    report = read_batches(records, template, length=6, tokens=6).report
    assert report["first_row"].startswith(f"user w1 assistant w2 {text}")


@pytest.mark.parametrize(
    ("record", "reads"),
    [
        (
            {"documents": [{"text": "w3"}]},
            "{% for document in documents %}{{ document.text }}{% endfor %}",
        ),
        ({"chat_template_kwargs": {"documents": [{"text": "w3"}]}}, "{{ documents[0].text }}"),
        ({"chat_template_kwargs": '{"mode": "w3"}'}, "{{ mode }}"),
        ({"chat_template_kwargs": {"thinking": False}}, "{% if thinking is false %}w3{% endif %}"),
        (
            {"chat_template_kwargs": {"thinking": False}},
            "w3{% if add_generation_prompt %}{{ thinking }}{% endif %}",
        ),
        ({"thinking": False}, "{{ 'w3' if thinking is defined and not thinking }}"),
        ({"system": "w3"}, "{%- macro first() %}{{ system }}{% endmacro %}{{ first() }}"),
    ],
)
@pytest.mark.parametrize("conversation", [{"messages": MESSAGES}, PAIR])
def test_template_gets_the_fields_of_a_record(
    conversation: dict[str, Any],
    record: dict[str, Any],
    reads: str,
    tokenizer_with: Callable[..., Any],
    source: Settings,
) -> None:
    """Those of a pair only where they are no content."""
    tokenizer = tokenizer_with(
        reads + " {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    )
    chosen = source(
        *9 * [{**conversation, **record, "tokenize": True, "chat_template": "w9"}],
        length=5,
        tokens=5,
    )
    if "documents" in record and "messages" not in conversation:
        with pytest.raises(UserError, match="documents"):
            batches(chosen, tokenizer)
    else:
        assert batches(chosen, tokenizer).report["first_row"] == "w3 user w1 assistant w2"
        ((ids, _, answers),) = answer_batches(chosen, tokenizer)
        assert tokenizer.decode(ids[answers]) == "w2"


@pytest.mark.parametrize(
    ("record", "template", "unread"),
    [
        (
            {**PAIR, "language": "French", "id": "w3", "hint": 5, "is_new": True},
            None,
            ["language", "id"],
        ),
        ({**PAIR, "prompt": "", "hint": 5}, None, []),
        (
            {**PAIR, "system": "w3", "language": "French"},
            "{{ system }} " + BARE,
            ["system", "language"],
        ),
        ({"messages": MESSAGES, "system": "w3"}, BARE, ["system"]),
        ({"messages": MESSAGES, **LABELS}, BARE, [*LABELS]),
        ({"text": "w1", "language": "French"}, None, []),
    ],
)
def test_texts_of_one_word_beside_a_document_are_reported(
    record: dict[str, Any], template: str | None, unread: list[str], read_batches: Read
) -> None:
    for ignored, expected in ([], unread), (unread, []):
        result = read_batches([record], template, ignored=ignored, length=4, tokens=4)
        ((form, number),) = result.report["sources"][0]["forms"].items()
        assert form.split(", beside ")[1:] == expected
        assert number == 9


def test_list_that_is_read_in_some_messages_is_refused(read_batches: Read) -> None:
    template = BARE.replace(
        "{{ m.content }}", "{{ m.content }} {{ (m.images or []) | join if m.role == 'user' }}"
    )
    pictured = [{**message, "images": [f"{message['content']}.png"]} for message in MESSAGES]
    assert read_batches([{"messages": [pictured[0], MESSAGES[1]]}], template)
    with pytest.raises(UserError, match=r"set\.jsonl line 1 .*images=.*w2\.png"):
        read_batches([{"messages": pictured}], template)


DOCUMENT = {"title": "w3 w4", "text": "w5 w6"}
READS_DOCUMENT_TEXTS = (
    "{% for document in documents or [] %}{{ document.text }} {% endfor %}" + BARE
)
CALLED_WITH = [
    {"role": "user", "content": "w1"},
    {"role": "assistant", "tool_calls": [{"name": "w7", "arguments": {"place": "w8 w9"}}]},
]
READS_CALLED_NAMES = BARE.replace(
    "{{ m.content }}",
    "{{ m.content }} {{ m.tool_calls | map(attribute='function.name') | join if m.tool_calls }}",
)


@pytest.mark.parametrize(
    ("record", "template", "key"),
    [
        ({"messages": MESSAGES, "documents": [DOCUMENT]}, READS_DOCUMENT_TEXTS, "documents"),
        ({"messages": CALLED_WITH}, READS_CALLED_NAMES, "tool_calls"),
    ],
)
def test_every_text_inside_documents_and_calls_is_read_or_refused(
    record: dict[str, Any], template: str, key: str, read_batches: Read
) -> None:
    with pytest.raises(UserError, match=rf"set\.jsonl line 1 .*\b{key}="):
        read_batches([record], template)


def calling_record(name: str, arguments: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A record of a conversation in which a function is called."""
    properties = {key: {"type": "w9"} for key in arguments}
    call = {"function": {"name": name, "arguments": arguments}}
    calling = {"role": "assistant", "tool_calls": [call]}
    return {
        "messages": [QUESTION, calling, {"role": "tool", "content": "w3"}],
        "tools": [{"name": name, "parameters": {"properties": properties}}],
        **others,
    }


def test_rows_of_the_hub_are_read_as_those_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_with: Callable[..., Any],
    settings: Settings,
    source: Settings,
) -> None:
    """Arrow gives each record the keys of all, with null; an object without keys stays one."""
    import datasets

    rows = [
        calling_record("w4", {"w5": "w6"}, text=None, chat_template_kwargs=None),
        calling_record("w7", {"w8": 1, "w9": ["a", None]}, chat_template_kwargs={"mode": "w3"}),
        calling_record("w4", {}),
        {"text": "w1 w2"},
    ]
    tokenizer = tokenizer_with("{{ mode }}{{ tools | tojson }}{{ messages | tojson }}")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    of_hub = read(settings("owner/set")).documents
    of_file = read(source(*rows)).documents
    assert of_hub == of_file
    assert of_hub[-1] == Text("w1 w2")
    texts = [tokenize(document, tokenizer, special_tokens=False) for document in of_hub]
    assert texts == [tokenize(document, tokenizer, special_tokens=False) for document in of_file]
    chat = of_hub[2]
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_settings_that_do_not_fit_the_records_are_refused(source: Settings) -> None:
    with pytest.raises(UserError, match=r"contents of .* did you mean content\?"):
        read(source({"content": "one", "id": 1}, field="contents"))
    with pytest.raises(UserError, match=r"line 1: .* answers of .* did you mean answer\?"):
        read(source({"answer": "w2"}, template="{answers}"))
    with pytest.raises(UserError, match=r"calibration.joined=true: .* holds conversations"):
        read(source({"messages": MESSAGES}, joined=True))
    with pytest.raises(ValidationError, match="both set"):
        source(template="{answer}", field="answer")


def test_missing_file_error_names_a_near_one(tmp_path: Path) -> None:
    written(tmp_path / "general.jsonl", "x")
    for path, says in (
        (str(tmp_path / "genersl.jsonl"), r"does not exist: did you mean .*general\.jsonl\?"),
        (str(tmp_path / "nowhere" / "general.jsonl"), r"nowhere/general\.jsonl does not exist"),
        ("mydata.csv", r"mydata\.csv does not exist"),
    ):
        with pytest.raises(UserError, match=says):
            local_files(CalibrationConfig("c", path))
    for hub in (
        "allenai/tulu-3-sft-personas-math",
        "wikitext",
        "hf://datasets/allenai/c4/en/c4-train.json.gz",
    ):
        assert not local_files(CalibrationConfig("c", hub))


@pytest.fixture
def hub_texts(settings: Settings) -> list[CalibrationConfig]:
    """A split of a data set, and a file."""
    return [
        settings("owner/set", subset="raw", split="test"),
        settings("hf://datasets/allenai/c4/en/part.json.gz"),
    ]


def test_splits_and_files_are_read_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub_texts: list[CalibrationConfig]
) -> None:
    import datasets
    import huggingface_hub

    requests: list[Any] = []

    def returning(result: Any) -> Callable[..., Any]:
        return lambda *args, **arguments: requests.append((*args, *arguments.values())) or result

    monkeypatch.setattr(datasets, "load_dataset", returning(datasets.Dataset.from_list([TWO])))
    file = written(tmp_path / "part.json.gz", lines(TWO))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", returning(str(file)))
    for text in hub_texts:
        assert read(text).documents == [Text("two")]
    assert requests == [
        ("owner/set", "raw", "test"),
        ("allenai/c4", "en/part.json.gz", "dataset"),
    ]


def test_text_that_the_hub_does_not_send_is_named(
    monkeypatch: pytest.MonkeyPatch, hub_texts: list[CalibrationConfig]
) -> None:
    message = "Couldn't reach 'owner/set' on the Hub (OfflineModeIsEnabled)\nmore"
    failing = Mock(side_effect=ConnectionError(message))
    monkeypatch.setattr("datasets.load_dataset", failing)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", failing)
    for text in hub_texts:
        with pytest.raises(
            UserError, match=r"could not be had from the hub \(.*Couldn't reach"
        ) as error:
            read(text)
        assert "\n" not in str(error.value)
        assert text.path in str(error.value)


def test_second_half_of_a_set_is_held_out(tmp_path: Path) -> None:
    texts = "\n".join(json.dumps({"text": letter}) for letter in "abcd")
    settings = CalibrationConfig("c", str(written(tmp_path / "c.jsonl", texts)), order="first")
    assert held_out_text(settings, 100).split() == ["c", "d"]


def measured_text(benchmark: BenchmarkConfig) -> str:
    """The text whose perplexity a benchmark is."""
    (item,) = perplexity.HARNESS.items(benchmark)
    (request,) = item.requests
    assert isinstance(request, Document)
    return request.text


def test_calibration_reads_wikitext_as_perplexity_does(tmp_path: Path) -> None:
    """Rows joined by blank lines, empty ones included: from a text, from records, and from the
    mirror."""
    from benchmarks.data_sets import mirror_files
    from moe_lab.evaluation.mirror import benchmarks

    text = "\n = Heading = \n \n One sentence . \n\n\n Another , after two empty rows . \n"
    rows = [f"{line}\n" if line.strip() else "" for line in text.split("\n")[:-1]]
    as_text = written(tmp_path / "wikitext2_test.txt", text)
    records = written(tmp_path / "rows.jsonl", lines(*({"text": row} for row in rows)))
    (benchmark,) = benchmarks(["wikitext2"], str(tmp_path / "data"))
    mirror_files(benchmark, tmp_path, tmp_path / "source")
    measured = measured_text(benchmark)
    chosen = choices.read_choice(CalibrationConfig, "calibration", "wikitext2")
    assert measured == "\n\n".join(rows)
    assert len(rows) > 5 and "" in rows
    for path in (as_text, records):
        assert read(replace(chosen, path=str(path))).documents == [Text(measured)]


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_last_line_of_a_joined_text_is_read(end: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", f"First .\n\nLast .{end}")
    settings = CalibrationConfig(name="own", path=str(path), joined=True)
    assert read(settings).documents == [Text("First .\n\n\n\n\nLast .\n")]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("Text, and more.".encode("utf-16"), 1),
        ("Text, and more.".encode("utf-16-le"), 1),
        (b"text\n" * 50_000 + b"text\0text", 50_001),
        (b"text\n" * 50_000 + b"caf\xe9", 50_001),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_binary_files_are_refused(
    tmp_path: Path, settings: Settings, name: str, content: bytes, line: int
) -> None:
    path = str(written(tmp_path / name, content))
    with pytest.raises(
        UserError,
        match=rf"calibration.path={re.escape(path)} .*UTF-8.* line {re.escape(str(line))}\b",
    ):
        first_document(settings(path))
    (message,) = benchmark_errors(
        [BenchmarkConfig("p", "perplexity", path, reports={"p": "perplexity"})]
    )
    assert f"suite.path={path} " in message
    assert "UTF-8" in message


def test_perplexity_text_is_read_like_a_calibration_text(tmp_path: Path) -> None:
    records = written(
        tmp_path / "a.jsonl", lines({"text": "one"}, {"question": "two", "answer": "three"})
    )
    assert read_as_one_text(records, "suite.path") == "one\n\ntwo\n\nthree"
    assert measured_text(BenchmarkConfig("p", "perplexity", str(records))) == "one\n\ntwo\n\nthree"
    assert (
        read_as_one_text(written(tmp_path / "a.txt", "one\n\n\ntwo\n"), "suite.path")
        == "one\n\n\ntwo\n"
    )
    with pytest.raises(UserError, match="conversations"):
        read_as_one_text(written(tmp_path / "b.jsonl", lines({"messages": MESSAGES})), "suite.path")


# ---- conversations, and functions that are called in them

TOOL = {
    "name": "w10",
    "description": "w11",
    "parameters": {"type": "object", "properties": {}},
}
WRAPPED = {"type": "function", "function": TOOL}
CALL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "w10", "arguments": {"w12": "w13"}},
}
QUESTION: dict[str, Any] = {"role": "user", "content": "w1"}
CALLING: list[dict[str, Any]] = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
CALLING_CHAT = Chat(tuple(CALLING), {"tools": [WRAPPED]})
NAMED_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool.function.description "
    "}} {% endfor %}"
)
WRITES_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% for k, v in call.function.arguments.items() %} {{ k }} {{ v }} {% endfor %}{% endfor %}"
)
TURNS = "{% for m in messages %}{{ m.role }} {{ m.content }} {calls}{% endfor %}{{ eos_token }}"
READS_TOOLS = NAMED_TOOLS + TURNS.replace("{calls}", WRITES_CALLS)


def with_call(call: object) -> list[dict[str, object]]:
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CALLING, "tools": [WRAPPED]},
        {"messages": CALLING, "tools": json.dumps([TOOL])},
        {"messages": with_call(CALL), "tools": [WRAPPED]},
        {"messages": with_call({"name": "w10", "arguments": '{"w12": "w13"}'}), "tools": [TOOL]},
        {  # the columns of xlam-function-calling-60k
            "query": "w1",
            "answers": json.dumps([{"name": "w10", "arguments": {"w12": "w13"}}]),
            "tools": json.dumps([TOOL]),
        },
    ],
)
def test_tools_and_calls_are_read_in_the_form_of_chat_templates(
    record: dict[str, Any], source: Settings
) -> None:
    assert read(source(record)).documents == [CALLING_CHAT]


def test_calls_and_results_keep_their_further_keys(source: Settings) -> None:
    returned = {"role": "tool", "content": "w14", "name": "w10", "tool_call_id": "7", "extra": 1}
    call = {"id": "7", "index": 0, "function": {**CALL["function"], "thought": "w15"}}
    identified = [*CALLING[:1], {**CALLING[1], "tool_calls": [call]}, returned]
    (chat,) = read(source({"messages": identified, "tools": [WRAPPED]})).documents
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"] == [{"type": "function", **call}]
    assert chat.messages[2] == returned


def test_templates_get_tools_and_arguments_as_objects(
    tokenizer_with: Callable[..., Any], source: Settings
) -> None:
    tokenizer = tokenizer_with(READS_TOOLS)
    expected = "w10 w11 user w1 assistant w10 w12 w13 </s>"
    assert tokenizer.decode(tokenize(CALLING_CHAT, tokenizer, special_tokens=True)) == expected
    chosen = source(*4 * [{"messages": CALLING, "tools": [TOOL]}])
    report = batches(chosen, tokenizer).report
    assert expected.startswith(report["first_row"])
    only_calls = TURNS.replace("{calls}", WRITES_CALLS)
    only_tools = NAMED_TOOLS + TURNS.replace("{calls}", "")
    for template, name in ((only_calls, "tools"), (only_tools, "tool_calls")):
        with pytest.raises(UserError, match=rf"set\.jsonl line 1 .*\b{name}="):
            batches(chosen, tokenizer_with(template))


def test_calls_are_answers_as_whole_turns(
    tokenizer_with: Callable[..., Any], source: Settings
) -> None:
    tokenizer = tokenizer_with(READS_TOOLS)
    settings = source({"messages": CALLING, "tools": [TOOL]}, length=9, tokens=9, packing="none")
    ((ids, _, answers),) = answer_batches(settings, tokenizer, header=True)
    assert tokenizer.decode(ids[answers]) == "assistant w10 w12 w13 </s>"
    with pytest.raises(UserError, match=r"tool_calls.*header=true"):
        answer_batches(settings, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "", r"a\.txt holds no document"),
        ("a.txt", " \n\n \n", "holds no document"),
        ("a.jsonl", "\n", r"holds no document \(it is empty\)"),
        ("a.jsonl", '{"text": "one"}\n{"text": "tw\n', "a.jsonl line 2"),
        ("a.json", '[{"text": "one"},\n', "a.json line 2"),
        (
            "a.jsonl",
            lines({"body": "one", "id": 1}),
            r"line 1: none of .*text.*body, id.*calibration.field",
        ),
        ("a.json", '[{"text": "one"}, 7]', "record 2: expected an object .* found 7"),
        (
            "a.jsonl",
            lines({"instruction": None, "output": "x"}),
            r"holds no document .*found: output\b.*line 1",
        ),
        ("a.jsonl", lines({"messages": [{"role": "user"}]}), "holds no document .*messages"),
        ("a.jsonl", lines({"messages": [{"content": "w1"}]}), "line 1, field messages: .* role"),
        ("a.jsonl", lines({"messages": CALLING, "tools": "[{"}), "line 1: tools is damaged JSON"),
        (
            "a.jsonl",
            lines({"messages": CALLING, "tools": {"w10": TOOL}}),
            "line 1: tools holds .*w10",
        ),
        (
            "a.jsonl",
            lines({"messages": CALLING, "tools": ["w10"]}),
            "expected functions with a name",
        ),
        (
            "a.jsonl",
            lines({"messages": with_call({"arguments": {}}), "tools": [TOOL]}),
            "tool_calls holds .* with a name",
        ),
        (
            "a.jsonl",
            lines({"messages": with_call({"name": "w10", "arguments": "[1]"})}),
            "w10: .* expected an object",
        ),
        (
            "a.jsonl",
            lines({"messages": with_call({"name": "w10", "arguments": "{"})}),
            "of w10 is damaged JSON",
        ),
        (
            "a.jsonl",
            lines({"query": "w1", "answers": "w2", "tools": "[]"}),
            "line 1, .* tool_calls is damaged JSON",
        ),
        ("a.pkl", b"\x80\x04K\x01.", r"a\.pkl is not UTF-8 text"),
        ("a.jsonl", '{"text": "one"}\n{"text": "cut \\ud83d"}\n', r"line 2 .*\\ud83d"),
        ("a.csv", "text,id\none,1\ntwo,2,3\n", "line 3 .*text,id"),
        ("a.csv", "text,id\none\n", "line 2 .*text,id"),
        ("a.csv", "text,text\none,two\n", "line 2 .*text,text"),
        ("a.csv", 'text\n"one\n', r"a\.csv line 1 .*end of data"),
        ("a.parquet", "x", r"a\.parquet cannot be read"),
        ("a.txt.zst", "x", r"a\.txt\.zst cannot be read"),
        ("a.txt", b"fine \xff\xfe", r"UTF-8 text: line 1 .*0xff.*byte 5\b"),
        ("c.txt.gz", b"not compressed", r"c\.txt\.gz cannot be read"),
        ("d.txt.gz", gzip.compress(b"one", mtime=0)[:10] + b"\xff" * 20, "cannot be read"),
    ],
)
def test_unreadable_sources_are_refused(
    tmp_path: Path, settings: Settings, name: str, content: str | bytes, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        read(settings(written(tmp_path / name, content)))


SYSTEM = {"role": "system", "content": "w3"}
THOUGHT = {"role": "assistant", "content": "<think> w4 </think> w5"}
SKIPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }} {{ m.content }} {% "
    "endif %}{% endfor %}"
)
SKIPS_THOUGHTS = (
    "{% for m in messages %}{{ m.role }} {{ m.content.split('</think>')[-1] }} {% endfor %}"
)
SKIPS_TOOLS = SKIPS_SYSTEM.replace("'system'", "'tool'")
FIRST_ONLY = "{% for m in messages[:2] %}{{ m.role }} {{ m.content }} {% endfor %}"
CALLS_ONLY = (
    "{% for m in messages %}{{ m.role }} {{ m.tool_calls if m.tool_calls else m.content "
    "}} {% endfor %}"
)
ANSWER = {"role": "assistant", "content": "w2"}


@pytest.mark.parametrize(
    ("template", "messages", "role", "text"),
    [
        (SKIPS_SYSTEM, [{**SYSTEM, "content": "w2"}, QUESTION, ANSWER], "system", "w2"),
        (SKIPS_TOOLS, [QUESTION, ANSWER, {"role": "tool", "content": "w6"}], "tool", "w6"),
        (SKIPS_THOUGHTS, [QUESTION, THOUGHT], "assistant", "w4"),
        (SKIPS_THOUGHTS, [QUESTION, {**ANSWER, "content": "!!! </think> w5"}], "assistant", "!"),
        (FIRST_ONLY, [QUESTION, ANSWER, QUESTION, ANSWER], "user", "w1"),
        (
            CALLS_ONLY,
            [QUESTION, {**ANSWER, "content": "w1 w8", "tool_calls": [CALL]}],
            "assistant",
            "w1",
        ),
    ],
)
def test_template_that_omits_words_of_a_turn_is_refused(
    template: str,
    messages: list[Any],
    role: str,
    text: str,
    read_batches: Read,
) -> None:
    records = [{"messages": [QUESTION, {**ANSWER, "content": "w7"}]}, {"messages": messages}]
    with pytest.raises(
        UserError, match=rf"set\.jsonl line 2 .*\b{re.escape(role)}\b.*{re.escape(text)}"
    ):
        read_batches(records, template)


MOVED = "{% for m in messages[1:] + messages[:1] %}{{ m.role }} {{ m.content }} {% endfor %}"
AS_JSON = "{% for m in messages %}{{ {m.role: m.content} | tojson }} {% endfor %}"
TRIMMED = "{% for m in messages %}{{ m.role }} {{ m.content | trim }} {% endfor %}"
THOUGHTS = (
    "{% for m in messages %}{{ m.role }} {{ m.content | replace('</think>', ' </think> w9 "
    "') }} {% endfor %}"
)


@pytest.mark.parametrize("template", [MOVED, AS_JSON, TRIMMED, THOUGHTS])
def test_template_may_rewrite_words(template: str, tokenizer_with: Callable[..., Any]) -> None:
    reply = {"role": "assistant", "content": ' w2\n"w3" \\w4\t</think>w5 \u00fc '}
    assert tokenize(
        Chat((SYSTEM, QUESTION, reply, QUESTION)), tokenizer_with(template), special_tokens=False
    )


DATED = (
    "{{ strftime_now('w%m w%d') }}",
    "{% macro today(form) %}{{ strftime_now(form) }}{% endmacro %}{{ today('w%m w%d') }}",
    "{% if not date_string is defined %}{% set date_string = strftime_now(format='w%m w%d') %}{% "
    "endif %}"
    "{{ date_string if strftime_now is defined and strftime_now('%H:%M') == '00:00' }}",
)


@pytest.mark.parametrize("dated", DATED)
def test_template_writes_the_date_of_the_model(
    dated: str, tokenizer_with: Callable[..., Any], source: Settings, tmp_path: Path
) -> None:
    model = ModelConfig("m", str(tmp_path / "model"), date="2024-12-31")
    tokenizer_with(dated + " " + TURNS.replace("{calls}", "")).save_pretrained(model.path)
    (tmp_path / "model/config.json").write_text('{"model_type": "olmoe"}')
    chosen = source(*9 * [{"messages": MESSAGES}], length=7, tokens=7)
    report = batches(chosen, load_tokenizer(tmp_path / "model", model)).report
    assert report["first_row"] == "w12 w31 user w1 assistant w2 </s>"
    usual = load_tokenizer(tmp_path / "model", replace(model, date="2024-11-30"))
    assert batches(chosen, usual).report["first_row"].startswith("w11 w30")
    other = replace(model, date="2024-11-30")
    assert IdentifiedModel.of(model).identity != IdentifiedModel.of(other).identity
    tokenizer = tokenizer_with("{{ strftime_now('%Y-%m-%d') }}")
    assert render(MESSAGES, {}, tokenizer) == ModelConfig.date, (
        "also where the tokenizer is the user's"
    )
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == f"{datetime.now():%Y-%m-%d}"
    with pytest.raises(ValidationError, match="such as 2026-01-01"):
        replace(model, date="today")


# ---- the same conversations and rows as other tools write them

CALL_TEXT = json.dumps(CALL["function"])
ASKED = {"from": "human", "value": "w1"}
REPLY = {"from": "gpt", "value": "w2"}
SYSTEM_TURN = {"role": "system", "content": "w3 w4"}
TRAJECTORY = [{"role": "user", "text": "w1", "mask": False}, {"role": "ai", "text": "w2"}]
CACHED = {"cache_control": {"type": "ephemeral"}}
PARTS = [{"type": "text", "text": "w1", "annotations": [], **CACHED}, "w5"]
ACTED = {"role": "assistant", "content": "w2", "message_type": "action"}
"""A turn of SWE-agent."""
EMPTY_CALL = {"type": "function", "function": {"name": "w10", "arguments": {}}}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": [ASKED, REPLY]}, MESSAGES),
        ({"talk": json.dumps([ASKED, REPLY])}, MESSAGES),
        ({"conversations": [ASKED, REPLY], "system": "w3 w4"}, [SYSTEM_TURN, *MESSAGES]),
        ({"trajectory": TRAJECTORY}, [{**MESSAGES[0], "mask": False}, MESSAGES[1]]),
        (
            {"messages": [{"role": "user", "content": PARTS, **CACHED}]},
            [{**QUESTION, "content": "w1\nw5"}],
        ),
        ({"messages": str(MESSAGES)}, MESSAGES),
        ({"completion": MESSAGES[1:], "prompt": MESSAGES[:1]}, MESSAGES),
        (
            {
                "messages": json.dumps([QUESTION, {**ACTED, "thought": "w2", "action": "w3 w4"}]),
                "patch": "w5 w6",
                "traj_id": "w7",
            },
            [QUESTION, ACTED],
        ),
        *(
            ({"messages": [QUESTION, turn]}, CALLING)
            for turn in (
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "assistant", "tool_calls": CALL_TEXT},
                {"role": "function_call", "content": CALL_TEXT},
            )
        ),
        *(
            (
                {"messages": with_call({"name": "w10", "arguments": arguments})},
                [QUESTION, {**CALLING[1], "tool_calls": [EMPTY_CALL]}],
            )
            for arguments in ("", None, "null", '"{}"')
        ),
        (
            {"messages": [ASKED, {"from": "observation", "value": ""}]},
            [QUESTION, {"role": "tool", "content": ""}],
        ),
        *(
            ({task: "w1", answer: "w2", "answer": "w2", "id": 3}, MESSAGES)
            for task, answer in (
                ("problem", "solution"),
                ("query", "response"),
            )
        ),
        ({"text": "", "messages": [*MESSAGES, {"role": "user", "content": " "}]}, MESSAGES),
    ],
)
def test_conversations_of_other_tools_are_those_of_chat_templates(
    record: dict[str, Any], messages: list[Any], source: Settings
) -> None:
    (document,) = read(source(record)).documents
    assert isinstance(document, Chat)
    assert list(document.messages) == messages
    assert not {"system", "patch"} & document.arguments.keys()


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("read_key", ["reasoning_content", "thinking"])
def test_thoughts_are_read_under_the_name_that_the_template_knows(
    key: str, read_key: str, read_batches: Read
) -> None:
    records = [{"messages": [QUESTION, {**ANSWER, key: "w7"}]}]
    reads = BARE.replace("{{ m.content }}", "{{ m.content }} {{ m." + read_key + " }}")
    report = read_batches(records, reads, length=5, tokens=5).report
    assert report["first_row"].endswith("w2 w7")
    with pytest.raises(UserError, match=rf"{key}='w7'.*ignored=\[{key}\]"):
        read_batches(records, BARE)


def test_advice_of_a_refusal_is_valid(read_batches: Read) -> None:
    """All fields that are not read are named at once, with those that are ignored already."""
    record = {"messages": MESSAGES, "a": "w3 w4", "b": ["w5"], "c": "w6 w7"}
    with pytest.raises(UserError) as error:
        read_batches([record], BARE, ignored=("c",))
    ignored = re.findall(r"ignored=\[(.*)\]", str(error.value))[0].split(",")
    assert ignored == ["c", "a", "b"]
    assert read_batches([record], BARE, ignored=ignored)
    with pytest.raises(UserError, match=r"calibration\.field=body, "):
        read_batches([{"title": "w1", "body": "w1 w2"}], BARE)


def test_records_and_turns_without_words_are_counted(read_batches: Read) -> None:
    empty = {"role": "assistant", "content": " "}
    records = [{"text": "w1 w2"}, None, {"text": None}, {"messages": [QUESTION, empty]}]
    records.append({"messages": [QUESTION, empty, QUESTION]})
    report = read_batches([*records, {**PAIR, "output": ""}], BARE, length=2, tokens=2).report
    left_out = report["sources"][0]["left_out"]
    assert sorted(entry["number"] for entry in left_out.values()) == [9, 9, 9, 18]
    assert left_out["a turn has no words"]["first"][0].endswith("set.jsonl line 4")
    with pytest.raises(UserError, match=r"holds no document .*messages without words.*line 1"):
        read_batches([{"messages": [empty]}], BARE)


TABLE = [{"text": "w1,\nw2", "id": "1"}, {"text": 'w3 "w4"', "id": "2"}]
CSV = 'text|id\n"w1,\nw2"|1\n"w3 ""w4"""|2\n'


@pytest.mark.parametrize(
    "name", ["a.CSV", "a.csv.gz", "a.tsv", "a.ndjson", "a.JSONL.zst", "a.parquet"]
)
def test_tables_are_records(tmp_path: Path, settings: Settings, name: str) -> None:
    file = tmp_path / name
    if "parquet" in name:
        parquet.write_table(pyarrow.Table.from_pylist(TABLE), file)
    elif "sv" in name.lower():
        written(file, CSV.replace("|", "\t" if "tsv" in name else ";"))
    elif "zst" in name:
        written(file, pyarrow.compress(lines(*TABLE).encode(), "zstd", asbytes=True))
    else:
        written(file, lines(*TABLE))
    assert read(settings(file)).documents == [Text(row["text"]) for row in TABLE]


def test_folders_are_read_by_file(tmp_path: Path, settings: Settings) -> None:
    """Those with records alone, where there are any; otherwise the texts."""
    (tmp_path / "b").mkdir()
    for path in ("b/two.py", "a.c", ".config"):
        written(tmp_path / path, path)
    written(tmp_path / "logo.png", b"\x89PNG\0")
    written(tmp_path / "package.json", json.dumps({"name": "w1"}, indent=2))
    written(tmp_path / "prices.csv", "day,price\n1,2\n")
    result = read(settings(tmp_path))
    assert result.documents == [Text("a.c"), Text("b/two.py")]
    assert sum(map(len, result.left_out.values())) == 3
    for name in ("data.json", "data.jsonl"):
        written(tmp_path / "b" / name, lines(TWO))
        result = read(settings(tmp_path))
        assert {*result.documents} == {Text("two")}
        assert sum(map(len, result.left_out.values())) == 5
    with pytest.raises(UserError, match="none of the fields"):
        written(tmp_path / "b" / name, lines({"name": "w1"}))
        read(settings(tmp_path))


SOME_PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": st.text("w12 ", max_size=4)},
        optional={"note": st.sampled_from((None, 3, "w11 w22"))},
    ),
    max_size=2,
)
VALUES = st.one_of(st.none(), st.text("w12 ", max_size=4), st.integers(0, 3))
TURN_KEYS = ("role", "from", "content", "value", "tool_calls")
PARTED = st.fixed_dictionaries({"role": st.just("user"), "content": SOME_PARTS})
LISTS = st.lists(PARTED | st.dictionaries(st.sampled_from(TURN_KEYS), VALUES), max_size=3)
SOME_TURNS = LISTS | LISTS.map(str) | LISTS.map(json.dumps)
KEYS = ("text", "messages", "problem", "answer", "tools", "prompt", "completion", "note")


@given(record=st.dictionaries(st.sampled_from(KEYS), VALUES | SOME_TURNS))
def test_any_record_is_read_or_counted_or_refused(record: dict[str, Any]) -> None:
    """Of a record that is read, every word is in the document or its arguments; but beside a text,
    nothing else is read."""
    documents = Documents(CalibrationConfig("set", "set.jsonl"))
    try:
        documents.add(record, "set.jsonl line 1")
    except UserError as error:
        assert "set.jsonl line 1" in str(error)
        return
    assert len(documents.documents) + any("turn" not in why for why in documents.left_out) == 1
    text = f"{documents.documents} {record.get('text') and record}"
    if documents.documents:
        words = re.findall("w[12]+", str(list(record.values())))
        assert all(word in text for word in words)
