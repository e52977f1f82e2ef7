"""Turn a record of a source into a document, and a document into token ids."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as data_field
from functools import partial
from typing import Any

from moe_lab.errors import UserError, nearest
from moe_lab.json_files import fits

TASKS = (("instruction", "output"), ("question", "answer"))
"""Field names under which sets publish a task and its solution."""
UNREAD = (
    *("system", "system_prompt", "system_message", "history", "conversation", "conversations", "chosen", "rejected"),
    *("input", "context", "passage", "choices", "options", "tools", "functions", "function_call"),
    *("reasoning_content", "reasoning", "thinking", "image", "images", "audio", "audios", "video", "videos"),
)
"""Names under which sets publish further parts of a conversation. A record or a message with one that is not read is
refused; other fields, such as id or source, are taken for remarks about it."""
BLANK_LINE = "\n\n"
"""Separates the two halves of a pair for a model without a chat template, and the rows of a joined set."""
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"role"\s*:')
"""How the JSON text of messages begins, as columns of them are after a way through CSV."""


Tools = Sequence[Mapping[str, Any]]
"""Functions that a model may call, in the form of chat templates: {"type": "function", "function": {"name", ...}}."""


@dataclass(frozen=True)
class Text:
    """Plain text, read without a chat template."""

    text: str
    answer: int | None = data_field(default=None, repr=False)
    """Where its answer begins, such as the completion of a prompt."""

    @property
    def plain(self) -> Text:
        """What a model without a chat template reads."""
        return self


@dataclass(frozen=True)
class Chat:
    """A conversation, and the functions that the assistant may call in it."""

    messages: tuple[Mapping[str, Any], ...]
    """A role and a content each; with calls of functions also `tool_calls`, whose arguments are objects."""
    tools: Tools = ()
    plain: Text | None = None
    """What a model without a chat template reads; None where only such a template can write it."""
    where: str = data_field(default="calibration.path", compare=False, repr=False)


Document = Text | Chat


def pair(instruction: str, output: str, where: str = "calibration.path") -> Chat:
    """An instruction and its answer: a conversation of two messages, or two paragraphs of plain text."""
    begun = instruction + BLANK_LINE
    messages = ({"role": "user", "content": instruction}, {"role": "assistant", "content": output})
    return Chat(messages, (), Text(begun + output, len(begun)), where)


def document(record: Any, field: str | None, where: str, template: str | None = None) -> Document:
    """The document in one JSON record, which is at `where`.

    `field` names the field to read; None takes `text`, `messages`, `instruction` and `output` (with the optional
    `input` of instruction sets), `question` and `answer`, `prompt` and `completion`, or `query`, `answers` and `tools`
    (a request and the calls that answer it), whichever is there first. `tools` beside messages are read with them.
    UserError for further parts of a conversation beside them (`UNREAD`), but not beside `text`, which is whole.
    `template` is a text with fields in braces; with these filled in, it is read as plain text.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with fields such as text, found {record!r:.40}")
    if template is not None:
        return Text(re.sub(r"\{(\w+)\}", lambda name: _field(record, name[1], where, "calibration.template"), template))
    if field is not None:
        return _named(record, field, where)
    return _standard(record, where)


def _standard(record: Mapping[str, Any], where: str) -> Document:
    """The document in the fields under which sets usually publish it."""
    if "text" in record:
        return _named(record, "text", where)
    if "messages" in record:
        _check_all_read(record, ("tools",), where, "calibration.field=messages, which reads the messages alone")
        return _named(record, "messages", where)
    alone = "calibration.template with the fields to read"
    for task, solution in TASKS:
        if task in record and solution in record:
            _check_all_read(record, ("input",), where, alone)
            parts = [task, "input"] if record.get("input") else [task]
            instruction = BLANK_LINE.join(_field(record, part, where) for part in parts)
            return pair(instruction, _field(record, solution, where), where)
    if "prompt" in record and "completion" in record:
        _check_all_read(record, (), where, alone)
        prompt = _field(record, "prompt", where)
        return Text(prompt + _field(record, "completion", where), len(prompt))
    if all(name in record for name in ("query", "answers", "tools")):
        _check_all_read(record, ("tools",), where, alone)
        request = {"role": "user", "content": _field(record, "query", where)}
        calls = {"role": "assistant", "content": "", "tool_calls": record["answers"]}
        return Chat((request, _message(calls, f"{where}, field answers")), _tools(record, where), where=where)
    raise UserError(
        f"{where}: none of the fields text, messages, instruction and output, question and answer, prompt and "
        f"completion, or query, answers and tools is there (found: {_names(record)}): name it with calibration.field"
    )


def _check_all_read(part: Mapping[str, Any], read: Collection[str], where: str, remedy: str) -> None:
    """Raise UserError for a further part of a conversation, in a record or message, that is not among those `read`."""
    for name in UNREAD:
        if part.get(name) and part[name] not in ("[]", "{}") and name not in read:
            raise UserError(f"{where}: {name}={part[name]!r:.40} is not read: expected none, or {remedy}")


def _named(record: Mapping[str, Any], field: str, where: str) -> Document:
    """The document in one field: a string, or a list of chat messages. The messages may be JSON text."""
    value = record.get(field)
    if (field == "messages" and field in record) or (isinstance(value, str) and _MESSAGES.match(value)):
        value = _decoded(value, f"{where}: {field}", list)
    if isinstance(value, list):
        messages = tuple(_message(entry, f"{where}, field {field}") for entry in value)
        return Chat(messages, _tools(record, where), where=where)
    return Text(_field(record, field, where, "calibration.field"))


def _field(record: Mapping[str, Any], field: str, where: str, setting: str = "") -> str:
    """The string in a field. Raises UserError, with the nearest field and the `setting` that asks for this one."""
    if field not in record:
        close = nearest(field, record)
        hint = f"did you mean {close}? " if close else ""
        raise UserError(f"{where}: the field {field} of {setting} is not there: {hint}(found: {_names(record)})")
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field} holds {value!r:.40}, expected a string")
    return value


def _message(entry: Any, where: str) -> Mapping[str, Any]:
    """A message with what chat templates read of it; without content if it only calls functions."""
    calls = _decoded(entry.get("tool_calls") or [], f"{where}: tool_calls", list) if isinstance(entry, Mapping) else []
    if calls and entry.get("content") is None:
        entry = {**entry, "content": ""}
    if not fits(entry, {"role": str, "content": str}):
        raise UserError(f"{where}: expected messages with a role and a content that are strings, found {entry!r:.80}")
    _check_all_read(entry, (), where, "its words in the content of the message")
    # some templates name the function that returned the content of a role=tool, or its call
    names = ("role", "content", *(("name", "tool_call_id") if entry["role"] == "tool" else ()))
    message: dict[str, Any] = {key: entry[key] for key in names if isinstance(entry.get(key), str)}
    return {**message, "tool_calls": [_tool_call(call, where) for call in calls]} if calls else message


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call in the form of chat templates, its arguments an object."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else None
    if not fits(function, {"name": str}):
        raise UserError(f"{where}: expected tool_calls with a name and arguments, found {call!r:.80}")
    arguments = _decoded(function.get("arguments", {}), f"{where}: arguments of {function['name']}", dict)
    identified = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **identified, "function": {"name": function["name"], "arguments": arguments}}


def _tools(record: Mapping[str, Any], where: str) -> Tools:
    """The functions in the field `tools`, a list or its JSON text; empty without the field."""
    tools = []
    for tool in _decoded(record.get("tools") or [], f"{where}: tools", list):
        wrapped = tool if isinstance(tool, Mapping) and "function" in tool else {"type": "function", "function": tool}
        if not fits(wrapped, {"function": {"name": str}}):
            raise UserError(f"{where}: tools holds {tool!r:.80}, expected functions with a name")
        tools.append(wrapped)
    return tuple(tools)


def _decoded(value: Any, where: str, kind: type) -> Any:
    """A list or an object, as `kind` says, or that in its JSON text."""
    try:
        decoded = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is damaged JSON: {error.msg}") from error
    if not isinstance(decoded, kind):
        raise UserError(f"{where}: found {decoded!r:.40}, expected {'a list' if kind is list else 'an object'}")
    return decoded


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, record))) or "no field"


def is_empty(document: Document) -> bool:
    """Whether a document has no content."""
    text = document.plain
    return not text.text.strip() if text else isinstance(document, Chat) and not document.messages


def has_answer(document: Document) -> bool:
    """Whether a document has an answer: an output, a completion, or a turn of the assistant."""
    if isinstance(document, Text):
        return document.answer is not None and bool(document.text[document.answer :].strip())
    spoken = [turn for turn in document.messages if turn["role"] == "assistant"]
    return any(turn["content"].strip() or turn.get("tool_calls") for turn in spoken)


def rendering(document: Document, tokenizer: Any) -> str:
    """How `tokenize` will turn this document into text, in words for the report."""
    if isinstance(document, Text):
        return "as it stands"
    if document.tools:
        return "chat template with tools"
    return "chat template" if tokenizer.chat_template else "pair parted by a blank line"


def tokenize(document: Document, tokenizer: Any, special_tokens: bool) -> list[int]:
    """Token ids of one document; `special_tokens` applies only to text without a chat template."""
    text, add = written(document, tokenizer, special_tokens)
    ids: list[int] = tokenizer(text, add_special_tokens=add, verbose=False)["input_ids"]
    return ids


def written(document: Document, tokenizer: Any, special_tokens: bool) -> tuple[str, bool]:
    """The text of a document as the model reads it, and whether the tokenizer adds its special tokens to it. Chat
    templates write their own: adding the tokenizer's would double the first one."""
    if isinstance(document, Chat) and tokenizer.chat_template:
        render = partial(from_template, tokenizer=tokenizer)
        what = f"{document.where} holds conversations with"
        return render_whole(document.messages, document.tools, render, what), False
    text = document.plain
    if text is None:
        raise UserError(
            "calibration.path holds chat messages but the model's tokenizer has no chat template: "
            "use a source of plain text, or of instruction and output pairs"
        )
    return text.text, special_tokens


def from_template(messages: Sequence[Mapping[str, Any]], tools: Tools, tokenizer: Any, **arguments: Any) -> str:
    """Render messages, and the tools they may call, with the tokenizer's chat template, which may get further
    `arguments`; UserError when it refuses."""
    from jinja2 import TemplateError

    with_tools = {"tools": list(tools)} if tools else {}
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **with_tools, **arguments)
    except (TemplateError, TypeError) as error:  # TypeError: a template that joins arguments, an object, to a text
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the model's chat template refuses messages with roles {roles}: {error}") from error
    return text


def render_whole(
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    render: Callable[[Sequence[Mapping[str, Any]], Tools], str],
    what: str,
) -> str:
    """The text of a conversation, if the chat template behind `render` reads all of it. Templates that know no tools,
    or not the role of a message, ignore them, and some leave out the thoughts in earlier answers: UserError, which
    begins with `what`, for a text that is the same without tools or calls, or lacks words."""
    text = render(messages, tools)
    _check_words(messages, text, what)
    without: dict[str, tuple[Sequence[Mapping[str, Any]], Tools]] = {}
    if tools:
        without["tools"] = messages, ()
    if any("tool_calls" in message for message in messages):
        silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        without["tool_calls"] = silent, tools
    for name, conversation in without.items():
        try:
            ignored = render(*conversation) == text
        except UserError:  # such as of a template that refuses an empty message: so it reads the calls
            continue
        if ignored:
            raise UserError(
                f"{what} {name}, and the model's chat template ignores them: expected a model that was trained to call "
                "functions"
            )
    return text


def _check_words(messages: Sequence[Mapping[str, Any]], text: str, what: str) -> None:
    """Raise UserError unless `text` has all words of the messages."""
    contents, end = [message["content"].strip() for message in messages], 0
    for content in contents:
        start = text.find(content, end)
        if start < 0:
            break
        end = start + len(content)
    else:
        return  # all are there, one after another
    # Templates may move a message to another place, or write it as JSON, so that its words are there but not its text.
    lost = _words(" ".join(contents)) - (_words(text) | _words(re.sub(r'\\[ntr"\\/]', " ", text)))
    if lost:
        losing = [message for message in messages if lost.keys() & _words(message["content"]).keys()]
        about = min(losing, key=lambda message: message["content"].strip() in text)  # first one that is not there whole
        word = next(word for word in _words(about["content"]) if word in lost)
        raise UserError(
            f"{what} role={about['role']} content={about['content']!r:.60}, of which the model's chat template leaves "
            f"out {word!r}: expected a set without it, or a model whose template reads it"
        )


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+|[^\w\s]", text))
