"""What is taken as a source, with conversations and functions called in them; what templates get; what is refused."""

import gzip
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import choices
import pytest
from pydantic import ValidationError

from moe_lab.calibration.batches import answer_batches, batches
from moe_lab.calibration.documents import Chat, Text, pair, tokenize
from moe_lab.calibration.sources import first_record, locate, read, whole_text
from moe_lab.config import BenchmarkConfig, CalibrationConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import suite
from moe_lab.evaluation.harness import Document
from moe_lab.evaluation.harnesses import perplexity

Settings = Callable[..., CalibrationConfig]

MESSAGES = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
NOTED = [{**MESSAGES[0], "timestamp": 3}, {**MESSAGES[1], "reasoning_content": None, "images": []}]
CHAT = Chat(tuple(MESSAGES))
PAIR = {"instruction": "w1", "output": "w2"}
CALLED = {"query": "w1", "answers": [{"name": "w2", "arguments": {}}], "tools": [{"name": "w2"}]}
ONE, TWO = {"text": "one\u2028still one\x85"}, {"text": "two"}
"""A newline alone ends a JSON line."""


def lines(*records: object) -> str:
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n"


def written(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" and isinstance(content, str) else raw)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, "\ufeffone\nmore\r\n\r\ntwo\n \t\n\n\nthree\n") for name in ("a.txt", "a.md", "a.txt.gz")),
        ("a.jsonl", "\n" + lines(ONE, {"text": " "}, {"messages": []}) + "\n\n" + lines(TWO)),
        ("a.jsonl.gz", lines({**ONE, "url": 1}, TWO)),
        ("a.json.gz", lines(ONE, TWO)),
        ("a.json", json.dumps([ONE, TWO], indent=2)),
    ],
)
def test_a_text_is_a_document_as_is_each_record(tmp_path: Path, settings: Settings, name: str, content: str) -> None:
    """Empty records are left out."""
    of_records, of_text = [Text(ONE["text"]), Text("two")], [Text("one\nmore\n\ntwo\n \t\n\n\nthree\n")]
    found = read(settings(written(tmp_path / name, content)))
    assert found == (of_records if "json" in name else of_text)


@pytest.mark.parametrize(
    ("record", "changes", "expected"),
    [
        ({"text": "one", "system": "w3", "conversations": [1], "messages": MESSAGES, **PAIR}, {}, Text("one")),
        ({"messages": MESSAGES}, {}, CHAT),
        ({"messages": json.dumps(MESSAGES)}, {}, CHAT),
        ({"messages": json.dumps(MESSAGES), "system": "w3"}, {"field": "messages"}, CHAT),
        ({"messages": NOTED, "system": "", "history": [], "images": None, "id": 3, "prompt": "w1"}, {}, CHAT),
        ({"instruction": "add", "input": "1 2", "output": "3"}, {}, pair("add\n\n1 2", "3")),
        ({**PAIR, "input": "", "system": "", "history": "[]", "id": 3}, {}, pair("w1", "w2")),
        ({"question": "why", "answer": "so"}, {}, pair("why", "so")),
        ({"text": "no", "story": "yes"}, {"field": "story"}, Text("yes")),
        ({"text": "no", "story": MESSAGES}, {"field": "story"}, CHAT),
        ({"story": json.dumps(MESSAGES)}, {"field": "story"}, CHAT),
        ({"story": '[{"w1": 1}]'}, {"field": "story"}, Text('[{"w1": 1}]')),
        ({"story": "[w1] w2"}, {"field": "story"}, Text("[w1] w2")),
        ({**PAIR, "system": "w3"}, {"template": "{system} {instruction} {output}"}, Text("w3 w1 w2")),
        ({"question": "w1 {answer}", "answer": "w2"}, {"template": "{question}: {answer}"}, Text("w1 {answer}: w2")),
    ],
)
def test_fields_are_known_or_named(record: Any, changes: dict[str, str], expected: object, source: Settings) -> None:
    assert read(source(record, record, **changes)) == [expected] * 2


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        ({"messages": [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "w3"}]}, "reasoning_content", "w3"),
        ({"messages": [{**MESSAGES[0], "images": ["w3.png"]}, MESSAGES[1]]}, "images", "w3.png"),
        ({"messages": MESSAGES, "system": "w3"}, "system", "w3"),
        ({**PAIR, "input": "", "history": [["w3", "w4"]]}, "history", "w3"),
        ({**PAIR, "conversations": [{"from": "human", "value": "w3"}]}, "conversations", "human"),
        ({"question": "w1", "answer": "w2", "context": "w3"}, "context", "w3"),
        ({"prompt": "w1", "completion": "w2", "tools": [{"name": "w3"}]}, "tools", "w3"),
        ({**CALLED, "system": "w3"}, "system", "w3"),
        *(({"messages": wrong}, "messages", "") for wrong in ("w1 w2", '{"role": "user"}', '["w1"]', None)),
    ],
)
def test_records_with_unread_parts_are_refused(record: dict[str, Any], key: str, value: str, source: Settings) -> None:
    with pytest.raises(UserError, match=rf"set\.jsonl line 2.*\b{re.escape(key)}\b.*{re.escape(value)}"):
        read(source({"messages": MESSAGES}, record))


def test_settings_that_do_not_fit_the_records_are_refused(source: Settings) -> None:
    with pytest.raises(UserError, match=r"contents of calibration.field .* did you mean content\?"):
        read(source({"content": "one", "id": 1}, field="contents"))
    with pytest.raises(UserError, match=r"line 1: .* answers of calibration.template .* did you mean answer\?"):
        read(source({"answer": "w2"}, template="{answers}"))
    with pytest.raises(UserError, match=r"calibration.joined=true: .* more than plain texts"):
        read(source({"messages": MESSAGES}, joined=True))
    with pytest.raises(ValidationError, match="both set"):
        source(template="{answer}", field="answer")


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path / "general.jsonl", "x")
    for path, says in (
        (str(tmp_path / "genersl.jsonl"), r"does not exist: did you mean .*general\.jsonl\?"),
        (str(tmp_path / "nowhere" / "general.jsonl"), "there is no folder"),
        (str(tmp_path), "is a folder"),
        ("mydata.pkl", r"mydata\.pkl does not exist"),
        ("hf://datasets/allenai/c4/en/train.parquet", r"ends in \.parquet"),
    ):
        with pytest.raises(UserError, match=says):
            locate(path)
    for hub in ("allenai/tulu-3-sft-personas-math", "wikitext", "hf://datasets/allenai/c4/en/c4-train.json.gz"):
        assert locate(hub) is None


def test_a_split_and_a_file_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Settings) -> None:
    import datasets
    import huggingface_hub

    asked: list[Any] = []

    def giving(result: Any) -> Callable[..., Any]:
        return lambda *given, **named: asked.append((*given, *named.values())) or result

    monkeypatch.setattr(datasets, "load_dataset", giving(datasets.Dataset.from_list([TWO])))
    file = written(tmp_path / "part.json.gz", lines(TWO))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", giving(str(file)))
    chosen = (settings("owner/set", subset="raw", split="test"), settings("hf://datasets/allenai/c4/en/part.json.gz"))
    for text in chosen:
        assert read(text) == [Text("two")]
    assert asked == [("owner/set", "raw", "test"), ("allenai/c4", "en/part.json.gz", "dataset")]
    error = ConnectionError("Couldn't reach 'owner/set' on the Hub (OfflineModeIsEnabled)\nmore")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=error))
    for text in chosen:
        with pytest.raises(UserError, match=r"could not be had from the hub \(Couldn't reach") as caught:
            read(text)
        assert "\n" not in str(caught.value) and text.path in str(caught.value)


def measured_text(benchmark: BenchmarkConfig) -> str:
    """The text whose perplexity a benchmark is."""
    (item,) = perplexity.items(benchmark)
    (request,) = item.requests
    assert isinstance(request, Document)
    return request.text


def test_calibration_reads_wikitext_as_perplexity_does(tmp_path: Path) -> None:
    """Rows joined by blank lines, empty ones included: from a text, from records, and from the mirror."""
    from benchmarks.data_sets import mirror_files
    from moe_lab.evaluation.mirror import benchmarks

    text = "\n = Heading = \n \n One sentence . \n\n\n Another , after two empty rows . \n"
    rows = [f"{line}\n" if line.strip() else "" for line in text.split("\n")[:-1]]
    as_text = written(tmp_path / "wikitext2_test.txt", text)
    records = written(tmp_path / "rows.jsonl", lines(*({"text": row} for row in rows)))
    (benchmark,) = benchmarks(["wikitext2"], str(tmp_path / "data"))
    mirror_files(benchmark, tmp_path, tmp_path / "source")
    measured = measured_text(benchmark)
    chosen = choices.choose(CalibrationConfig, "calibration", "wikitext2")
    assert measured == "\n\n".join(rows) and len(rows) > 5 and "" in rows
    for path in (as_text, records):
        assert read(replace(chosen, path=str(path))) == [Text(measured)]


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
def test_what_is_no_text_is_refused(tmp_path: Path, settings: Settings, name: str, content: bytes, line: int) -> None:
    path = str(written(tmp_path / name, content))
    with pytest.raises(UserError, match=rf"calibration.path={re.escape(path)} .*UTF-8.* line {re.escape(str(line))}\b"):
        first_record(settings(path))
    (said,) = suite.wrong([BenchmarkConfig("p", "perplexity", path, reports={"p": "perplexity"})])
    assert f"suite.path={path} " in said and "UTF-8" in said


def test_a_text_for_perplexity_is_read_as_one_for_calibration_is(tmp_path: Path) -> None:
    records = written(tmp_path / "a.jsonl", lines({"text": "one"}, {"question": "two", "answer": "three"}))
    assert whole_text(records, "suite.path") == "one\n\ntwo\n\nthree"
    assert measured_text(BenchmarkConfig("p", "perplexity", str(records))) == "one\n\ntwo\n\nthree"
    assert whole_text(written(tmp_path / "a.txt", "one\n\n\ntwo\n"), "suite.path") == "one\n\n\ntwo\n"
    with pytest.raises(UserError, match="conversations"):
        whole_text(written(tmp_path / "b.jsonl", lines({"messages": MESSAGES})), "suite.path")
    pickled = BenchmarkConfig("p", "perplexity", str(written(tmp_path / "a.pkl", "x")), reports={"p": "loss"})
    assert "suite.path" in suite.wrong([pickled])[0] and "pickles" in suite.wrong([pickled])[0]


# ---- conversations, and functions that are called in them

TOOL = {"name": "w10", "description": "w11", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}
CALL = {"type": "function", "function": {"name": "w10", "arguments": {"w12": "w13"}}}
QUESTION = {"role": "user", "content": "w1"}
CALLING = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
CALLING_CHAT = Chat(tuple(CALLING), (WRAPPED,))
NAMED_TOOLS = "{% for tool in tools %}{{ tool.function.name }} {{ tool.function.description }} {% endfor %}"
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
def test_tools_and_calls_are_read_in_the_form_of_chat_templates(record: dict[str, Any], source: Settings) -> None:
    assert read(source(record)) == [CALLING_CHAT]


def test_what_a_tool_returned_keeps_the_name_of_the_function(source: Settings) -> None:
    returned = {"role": "tool", "content": "w14", "name": "w10", "tool_call_id": "7", "extra": 1}
    identified = [*CALLING[:1], {**CALLING[1], "tool_calls": [{**CALL, "id": "7"}]}, returned]
    (chat,) = read(source({"messages": identified, "tools": [WRAPPED]}))
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"] == [{**CALL, "id": "7"}]
    assert chat.messages[2] == {key: value for key, value in returned.items() if key != "extra"}


def test_templates_get_tools_and_arguments_as_objects(tokenizer_with: Callable[..., Any], source: Settings) -> None:
    tokenizer = tokenizer_with(READS_TOOLS)
    expected = "w10 w11 user w1 assistant w10 w12 w13 </s>"
    assert tokenizer.decode(tokenize(CALLING_CHAT, tokenizer, special_tokens=True)) == expected
    chosen = source(*4 * [{"messages": CALLING, "tools": [TOOL]}])
    report = batches(chosen, tokenizer).report
    assert report["rendered"] == ["chat template with tools"] and expected.startswith(report["first_row"])
    only_calls, only_tools = TURNS.replace("{calls}", WRITES_CALLS), NAMED_TOOLS + TURNS.replace("{calls}", "")
    for template, name in ((only_calls, "tools"), (only_tools, "tool_calls")):
        with pytest.raises(UserError, match=f"conversations with {name}, .* ignores them"):
            batches(chosen, tokenizer_with(template))


def test_calls_are_answers_as_whole_turns(tokenizer_with: Callable[..., Any], source: Settings) -> None:
    tokenizer = tokenizer_with(READS_TOOLS)
    one = source({"messages": CALLING, "tools": [TOOL]}, length=9, tokens=9, packing="none")
    ((ids, _, answers),) = answer_batches(one, tokenizer, header=True)
    assert tokenizer.decode(ids[answers]) == "assistant w10 w12 w13 </s>"
    with pytest.raises(UserError, match="the chat template writes the calls"):
        answer_batches(one, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", " \n\n \n", "holds no document"),
        ("a.jsonl", '{"text": "one"}\n{"text": "tw\n', "a.jsonl line 2"),
        ("a.json", '[{"text": "one"},\n', "a.json line 2"),
        ("a.jsonl", lines({"body": "one", "id": 1}), r"line 1: none of .*text.*body, id.*calibration.field"),
        ("a.json", '[{"text": "one"}, 7]', "record 2: expected an object .* found 7"),
        ("a.jsonl", lines({"instruction": None, "output": "x"}), "field instruction holds None"),
        ("a.jsonl", lines({"text": None}), "line 1: field text holds None"),
        ("a.jsonl", lines({"messages": [{"role": "user"}]}), "line 1, field messages: .* role"),
        ("a.jsonl", lines({"messages": CALLING, "tools": "[{"}), "line 1: tools is damaged JSON"),
        ("a.jsonl", lines({"messages": CALLING, "tools": {"w10": TOOL}}), "line 1: tools: found .*, expected a list"),
        ("a.jsonl", lines({"messages": CALLING, "tools": [{"description": "w1"}]}), "expected functions with a name"),
        ("a.jsonl", lines({"messages": CALLING, "tools": ["w10"]}), "expected functions with a name"),
        ("a.jsonl", lines({"messages": with_call({"arguments": {}}), "tools": [TOOL]}), "with a name and arguments"),
        (
            "a.jsonl",
            lines({"messages": with_call({"name": "w10", "arguments": "[1]"})}),
            "w10: .* expected an object",
        ),
        ("a.jsonl", lines({"messages": with_call({"name": "w10", "arguments": "{"})}), "of w10 is damaged JSON"),
        ("a.jsonl", lines({"query": "w1", "answers": "w2", "tools": "[]"}), "answers: tool_calls is damaged JSON"),
        ("a.pkl", "x", r"\.pkl: pickles run code"),
        ("a.arrow", "x", r"\.arrow: .* expected \.txt"),
        ("a.tar.gz", "x", r"\.tar\.gz: this format"),
        ("a.txt", b"fine \xff\xfe", r"UTF-8 text: line 1 .*0xff.*byte 5\b"),
        ("c.txt.gz", b"not compressed", "damaged gz file"),
        ("d.txt.gz", gzip.compress(b"one", mtime=0)[:10] + b"\xff" * 20, "damaged gz file"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, settings: Settings, name: str, content: str | bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(settings(written(tmp_path / name, content)))


SYSTEM = {"role": "system", "content": "w3"}
THOUGHT = {"role": "assistant", "content": "<think> w4 </think> w5"}
SKIPS_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }} {{ m.content }} {% endif %}{% endfor %}"
SKIPS_THOUGHTS = "{% for m in messages %}{{ m.role }} {{ m.content.split('</think>')[-1] }} {% endfor %}"
SKIPS_TOOLS = SKIPS_SYSTEM.replace("'system'", "'tool'")
FIRST_ONLY = "{% for m in messages[:2] %}{{ m.role }} {{ m.content }} {% endfor %}"
CALLS_ONLY = "{% for m in messages %}{{ m.role }} {{ m.tool_calls if m.tool_calls else m.content }} {% endfor %}"
ANSWER = {"role": "assistant", "content": "w2"}


@pytest.mark.parametrize(
    ("template", "messages", "role", "word"),
    [
        (SKIPS_SYSTEM, [{**SYSTEM, "content": "w2"}, QUESTION, ANSWER], "system", "w2"),
        (SKIPS_TOOLS, [QUESTION, ANSWER, {"role": "tool", "content": "w6"}], "tool", "w6"),
        (SKIPS_THOUGHTS, [QUESTION, THOUGHT], "assistant", "w4"),
        (SKIPS_THOUGHTS, [QUESTION, {**ANSWER, "content": "!!! </think> w5"}], "assistant", "!"),
        (FIRST_ONLY, [QUESTION, ANSWER, QUESTION, ANSWER], "user", "w1"),
        (CALLS_ONLY, [QUESTION, {**ANSWER, "content": "w1 w8", "tool_calls": [CALL]}], "assistant", "w1"),
    ],
)
def test_a_template_that_leaves_out_words_of_a_turn_is_refused(
    template: str, messages: list[Any], role: str, word: str, tokenizer_with: Callable[..., Any], source: Settings
) -> None:
    records = [{"messages": [QUESTION, {**ANSWER, "content": "w7"}]}, {"messages": messages}]
    with pytest.raises(UserError, match=rf"set\.jsonl line 2 .*\b{re.escape(role)}\b.*{re.escape(word)}"):
        batches(source(*9 * records), tokenizer_with(template))


MOVED = "{% for m in messages[1:] + messages[:1] %}{{ m.role }} {{ m.content }} {% endfor %}"
AS_JSON = "{% for m in messages %}{{ {m.role: m.content} | tojson }} {% endfor %}"
TRIMMED = "{% for m in messages %}{{ m.role }} {{ m.content | trim }} {% endfor %}"
THOUGHTS = "{% for m in messages %}{{ m.role }} {{ m.content | replace('</think>', ' </think> w9 ') }} {% endfor %}"


@pytest.mark.parametrize("template", [MOVED, AS_JSON, TRIMMED, THOUGHTS])
def test_a_template_may_write_all_words_in_another_way(template: str, tokenizer_with: Callable[..., Any]) -> None:
    said = {"role": "assistant", "content": ' w2\n"w3" \\w4\t</think>w5 \u00fc '}
    assert tokenize(Chat((SYSTEM, QUESTION, said, QUESTION)), tokenizer_with(template), special_tokens=False)
