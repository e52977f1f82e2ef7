"""Conversations, and functions that are called in them: what the chat template gets, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from moe_lab.calibration.batches import answer_batches, batches
from moe_lab.calibration.documents import Chat, tokenize
from moe_lab.calibration.sources import read
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError

Settings = Callable[..., CalibrationConfig]
TOOL = {"name": "w10", "description": "w11", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}
CALL = {"type": "function", "function": {"name": "w10", "arguments": {"w12": "w13"}}}
QUESTION = {"role": "user", "content": "w1"}
MESSAGES = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
CHAT = Chat(tuple(MESSAGES), (WRAPPED,))
NAMED_TOOLS = "{% for tool in tools %}{{ tool.function.name }} {{ tool.function.description }} {% endfor %}"
CALLED = (
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% for k, v in call.function.arguments.items() %} {{ k }} {{ v }} {% endfor %}{% endfor %}"
)
TURNS = "{% for m in messages %}{{ m.role }} {{ m.content }} {calls}{% endfor %}{{ eos_token }}"
READS_TOOLS = NAMED_TOOLS + TURNS.replace("{calls}", CALLED)


def with_call(call: object) -> list[dict[str, object]]:
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES, "tools": [WRAPPED]},
        {"messages": MESSAGES, "tools": json.dumps([TOOL])},
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
    assert read(source(record)) == [CHAT]


def test_what_a_tool_returned_keeps_the_name_of_the_function(source: Settings) -> None:
    returned = {"role": "tool", "content": "w14", "name": "w10", "tool_call_id": "7", "extra": 1}
    identified = [*MESSAGES[:1], {**MESSAGES[1], "tool_calls": [{**CALL, "id": "7"}]}, returned]
    (chat,) = read(source({"messages": identified, "tools": [WRAPPED]}))
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"] == [{**CALL, "id": "7"}]
    assert chat.messages[2] == {key: value for key, value in returned.items() if key != "extra"}


def test_the_template_gets_the_tools_and_arguments_as_objects(
    tokenizer_with: Callable[..., Any], source: Settings
) -> None:
    tokenizer = tokenizer_with(READS_TOOLS)
    expected = "w10 w11 user w1 assistant w10 w12 w13 </s>"
    assert tokenizer.decode(tokenize(CHAT, tokenizer, special_tokens=True)) == expected
    report = batches(source(*4 * [{"messages": MESSAGES, "tools": [TOOL]}]), tokenizer).report
    assert report["rendered"] == ["chat template with tools"] and expected.startswith(report["first_row"])


@pytest.mark.parametrize(
    ("template", "name"),
    [(TURNS.replace("{calls}", CALLED), "tools"), (NAMED_TOOLS + TURNS.replace("{calls}", ""), "tool_calls")],
)
def test_a_template_that_ignores_them_is_refused(
    template: str, name: str, tokenizer_with: Callable[..., Any], source: Settings
) -> None:
    with pytest.raises(UserError, match=f"conversations with {re.escape(name)}, .* ignores them"):
        batches(source(*4 * [{"messages": MESSAGES, "tools": [TOOL]}]), tokenizer_with(template))


def test_calls_are_answers_as_whole_turns(tokenizer_with: Callable[..., Any], source: Settings) -> None:
    tokenizer = tokenizer_with(READS_TOOLS)
    one = source({"messages": MESSAGES, "tools": [TOOL]}, length=9, tokens=9, packing="none")
    ((ids, _, answers),) = answer_batches(one, tokenizer, header=True)
    assert tokenizer.decode(ids[answers]) == "assistant w10 w12 w13 </s>"
    with pytest.raises(UserError, match="the chat template writes the calls"):
        answer_batches(one, tokenizer)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"messages": MESSAGES, "tools": "[{"}, "line 1: tools is damaged JSON"),
        ({"messages": MESSAGES, "tools": {"w10": TOOL}}, "line 1: tools holds .*, expected a list"),
        ({"messages": MESSAGES, "tools": [{"description": "w1"}]}, "expected functions with a name"),
        ({"messages": MESSAGES, "tools": ["w10"]}, "expected functions with a name"),
        ({"messages": with_call({"arguments": {}}), "tools": [TOOL]}, "expected tool_calls with a name and arguments"),
        ({"messages": with_call({"name": "w10", "arguments": "[1]"})}, "arguments of w10 hold .*, expected an object"),
        ({"messages": with_call({"name": "w10", "arguments": "{"})}, "arguments of w10 is damaged JSON"),
        ({"query": "w1", "answers": "w2", "tools": "[]"}, "field answers: tool_calls is damaged JSON"),
    ],
)
def test_one_sentence_for_what_is_no_tool(record: dict[str, Any], sentence: str, source: Settings) -> None:
    with pytest.raises(UserError, match=sentence):
        read(source(record))


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
