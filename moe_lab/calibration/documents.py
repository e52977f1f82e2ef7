"""Turn a record of a source into a document, and a document into token ids."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as data_field
from datetime import datetime
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError, nearest
from moe_lab.json_files import fits

TASKS = (("instruction", "output"), ("question", "answer"))
"""Field names under which sets publish a task and its solution."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Field of a record with arguments of the chat template, as documented by TRL."""
BLANK_LINE = "\n\n"
"""Separates the two halves of a pair for a model without a chat template, and the rows of a joined
set."""
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"role"\s*:')
"""How the JSON text of messages begins, as columns of them are after a way through CSV."""
_ONE_WORD = re.compile(r"[!-~]*")
"""A text in ASCII without white space, such as an id, a source or an empty list in JSON."""


Tools = Sequence[Mapping[str, Any]]
"""Functions that a model may call, in the form of chat templates: {"type": "function", "function":
{"name", ...}}."""


@dataclass(frozen=True)
class Text:
    """Plain text, read without a chat template."""

    text: str
    answer: int | None = data_field(default=None, repr=False)
    """Where its answer begins, such as the completion of a prompt."""
    unread: tuple[str, ...] = data_field(default=(), compare=False, repr=False)
    """Keys of texts of one word beside a prompt and a completion."""

    @property
    def plain(self) -> Text:
        """What a model without a chat template reads."""
        return self


@dataclass(frozen=True)
class Chat:
    """A conversation, and what else of its record a chat template may read."""

    messages: tuple[Mapping[str, Any], ...]
    """A role, a content and all other keys; the arguments of `tool_calls` are objects."""
    arguments: Mapping[str, Any] = data_field(default_factory=dict)
    """The other fields of the record, such as `tools`: the functions that the assistant may
    call."""
    plain: Text | None = None
    """What a model without a chat template reads; None where only such a template can write it."""
    location: str = data_field(default="calibration.path", compare=False, repr=False)


Document = Text | Chat


def pair(
    instruction: str,
    output: str,
    arguments: Mapping[str, Any] | None = None,
    location: str = "calibration.path",
) -> Chat:
    """An instruction and its answer: a conversation of two messages, or two paragraphs of plain
    text."""
    begun = instruction + BLANK_LINE
    messages = ({"role": "user", "content": instruction}, {"role": "assistant", "content": output})
    return Chat(messages, arguments or {}, Text(begun + output, len(begun)), location)


def document(
    record: Any,
    field: str | None,
    location: str,
    template: str | None = None,
    ignored: Collection[str] = (),
) -> Document:
    """The document in one JSON record, which is at `location`.

    `field` names the field to read; None takes `text`, `messages`, `instruction` and `output` (with
    the optional `input` of instruction sets), `question` and `answer`, `prompt` and `completion`,
    or `query`, `answers` and `tools` (a request and the calls that answer it), whichever is there
    first. A chat template may read the other fields. UserError for other fields with content beside
    pairs, but not beside `text`, which is whole. `template` is a text with fields in braces; with
    these filled in, it is read as plain text. `ignored`: keys of the record and of its messages
    that are not read. A key whose value is null counts as missing.
    """
    if not isinstance(record, Mapping):
        raise UserError(
            f"{location}: expected an object with fields such as text, found {record!r:.40}"
        )
    record = _without(_without_null(record), ignored)
    if template is not None:
        return Text(
            re.sub(
                r"\{(\w+)\}",
                lambda name: _field(record, name[1], location, "calibration.template"),
                template,
            )
        )
    if field is not None:
        return _named(record, field, location, ignored)
    return _standard(record, location, ignored)


def _without_null(value: Any) -> Any:
    """The value without keys whose value is null: Arrow gives every object of a column the keys of
    all of them."""
    if isinstance(value, Mapping):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _without(record: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def _standard(record: Mapping[str, Any], location: str, ignored: Collection[str]) -> Document:
    """The document in the fields under which sets usually publish it."""
    if "text" in record:
        return _named(record, "text", location, ignored)
    if "messages" in record:
        messages = _messages(record["messages"], f"{location}, field messages", ignored)
        return Chat(messages, _arguments(record, ["messages"], location), location=location)
    for task, solution in TASKS:
        if task in record and solution in record:
            parts = [task, "input"] if record.get("input") else [task]
            instruction = BLANK_LINE.join(_field(record, part, location) for part in parts)
            answer = _field(record, solution, location)
            rest = _arguments(record, [task, "input", solution], location)
            _check_rest(
                _without(rest, [TEMPLATE_ARGUMENTS]), f"{instruction} {answer}", f"{location} holds"
            )
            return pair(instruction, answer, rest, location)
    if "prompt" in record and "completion" in record:
        prompt = _field(record, "prompt", location)
        text = prompt + _field(record, "completion", location)
        rest = _without(record, ["prompt", "completion"])
        _check_rest(rest, text, f"{location} holds")
        return Text(text, len(prompt), _other_texts(rest, text))
    if all(name in record for name in ("query", "answers", "tools")):
        request = {"role": "user", "content": _field(record, "query", location)}
        calls = {"role": "assistant", "content": "", "tool_calls": record["answers"]}
        messages = (request, _message(calls, f"{location}, field answers", ()))
        return Chat(messages, _arguments(record, ["query", "answers"], location), location=location)
    raise UserError(
        f"{location}: none of the fields text, messages, instruction and output, question and "
        "answer, prompt and "
        f"completion, or query, answers and tools has a value (found: {_names(record)}): name it "
        "with calibration.field"
    )


def is_content(value: Any) -> bool:
    """Whether a value must be part of what a model reads. Numbers, flags, and texts of one word in
    ASCII, such as ids, are metadata."""
    if isinstance(value, str):
        return not _ONE_WORD.fullmatch(value)
    return bool(value) and not isinstance(value, int | float)


def _check_rest(rest: Mapping[str, Any], text: str, what: str) -> None:
    """Raise UserError, which begins with `what`, for content in `rest` that is not a part of
    `text`."""
    for key, value in rest.items():
        is_in_text = isinstance(value, str) and not _missing([value], text)
        if is_content(value) and not is_in_text:
            raise _unread(what, key, value)


def _other_texts(rest: Mapping[str, Any], text: str) -> tuple[str, ...]:
    """Keys of texts in `rest` that have words and are not a part of `text`."""
    texts = {
        key: value
        for key, value in rest.items()
        if isinstance(value, str) and re.search(r"\w", value)
    }
    return tuple(key for key, value in texts.items() if _missing([value], text))


def _unread(what: str, key: str, value: Any) -> UserError:
    return UserError(
        f"{what} {key}={value!r:.60}, which is not read: expected a model whose chat template "
        "reads it, or, for a calibration set, calibration.template with the fields to read, or "
        f"calibration.ignored=[{key}]"
    )


def _named(
    record: Mapping[str, Any], field: str, location: str, ignored: Collection[str]
) -> Document:
    """The document in one field: a string, or a list of chat messages. The messages may be JSON
    text."""
    value = record.get(field)
    is_json = isinstance(value, str) and _MESSAGES.match(value)
    if is_json or isinstance(value, list) or (field == "messages" and field in record):
        messages = _messages(value, f"{location}, field {field}", ignored)
        read = {key: record[key] for key in ("tools", TEMPLATE_ARGUMENTS) if key in record}
        return Chat(messages, _arguments(read, [], location), location=location)
    return Text(_field(record, field, location, "calibration.field"))


def _messages(value: Any, location: str, ignored: Collection[str]) -> tuple[Mapping[str, Any], ...]:
    return tuple(_message(entry, location, ignored) for entry in _decoded(value, location, list))


def _arguments(record: Mapping[str, Any], read: Collection[str], location: str) -> dict[str, Any]:
    """The fields of a record beside those that were `read`, in the form of chat templates."""
    arguments = _without(record, [*read, "tools"])
    # some templates write a frame around an empty list
    if tools := _tools(record.get("tools"), location):
        arguments["tools"] = tools
    if named := arguments.get(TEMPLATE_ARGUMENTS):
        arguments[TEMPLATE_ARGUMENTS] = _decoded(named, f"{location}: {TEMPLATE_ARGUMENTS}", dict)
    return arguments


def _field(record: Mapping[str, Any], field: str, location: str, setting: str = "") -> str:
    """The string in a field. Raises UserError, with the nearest field and the `setting` that asks
    for this one."""
    if field not in record:
        close = nearest(field, record)
        hint = f"did you mean {close}? " if close else ""
        raise UserError(
            f"{location}: the field {field} of {setting} is not there: {hint}(found: "
            f"{_names(record)})"
        )
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{location}: field {field} holds {value!r:.40}, expected a string")
    return value


def _message(entry: Any, location: str, ignored: Collection[str]) -> Mapping[str, Any]:
    """A message with all its keys; without content if it only calls functions."""
    if not isinstance(entry, Mapping):
        raise UserError(
            f"{location}: expected messages with a role and a content that are strings, found "
            f"{entry!r:.80}"
        )
    message = _without(entry, ignored)
    if calls := _decoded(message.pop("tool_calls", None) or [], f"{location}: tool_calls", list):
        message = {
            "content": "",
            **message,
            "tool_calls": [_tool_call(call, location) for call in calls],
        }
    if not fits(message, {"role": str, "content": str}):
        raise UserError(
            f"{location}: expected messages with a role and a content that are strings, found "
            f"{entry!r:.80}"
        )
    return message


def _tool_call(call: Any, location: str) -> dict[str, Any]:
    """A call in the form of chat templates, its arguments an object."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else None
    if not fits(function, {"name": str}):
        raise UserError(
            f"{location}: expected tool_calls with a name and arguments, found {call!r:.80}"
        )
    arguments = _decoded(
        function.get("arguments", {}), f"{location}: arguments of {function['name']}", dict
    )
    around = (
        call if "function" in call else {key: call[key] for key in ("type", "id") if key in call}
    )
    inside = {**_without(function, around if function is call else ()), "arguments": arguments}
    return {"type": "function", **around, "function": inside}


def _tools(value: Any, location: str) -> Tools:
    """The functions in the field `tools`, a list or its JSON text."""
    tools = []
    for tool in _decoded(value or [], f"{location}: tools", list):
        wrapped = (
            tool
            if isinstance(tool, Mapping) and "function" in tool
            else {"type": "function", "function": tool}
        )
        if not fits(wrapped, {"function": {"name": str}}):
            raise UserError(f"{location}: tools holds {tool!r:.80}, expected functions with a name")
        tools.append(wrapped)
    return tools


def _decoded(value: Any, location: str, kind: type) -> Any:
    """A list or an object, as `kind` says, or that in its JSON text."""
    try:
        decoded = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise UserError(f"{location} is damaged JSON: {error.msg}") from error
    if not isinstance(decoded, kind):
        raise UserError(
            f"{location}: found {decoded!r:.40}, expected "
            f"{'a list' if kind is list else 'an object'}"
        )
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
    if not tokenizer.chat_template:
        return "pair parted by a blank line"
    how = "chat template with tools" if document.arguments.get("tools") else "chat template"
    return (
        f"{how}, dated {_date(tokenizer)}"
        if "strftime_now" in _template(document.arguments, tokenizer)
        else how
    )


def unread_texts(document: Document, tokenizer: Any) -> tuple[str, ...]:
    """Keys of the record's texts of one word that are no part of the document, and that the chat
    template of `tokenizer` does not read. None: as without a template."""
    if isinstance(document, Text):
        return document.unread
    rest = document.arguments
    if tokenizer is not None and tokenizer.chat_template:
        from moe_lab.models.transformers_private import template_variables

        rest = _without(rest, template_variables(_template(rest, tokenizer)))
    return _other_texts(rest, " ".join(message["content"] for message in document.messages))


def tokenize(document: Document, tokenizer: Any, special_tokens: bool) -> list[int]:
    """Token ids of one document; `special_tokens` applies only to text without a chat template."""
    text, add = written(document, tokenizer, special_tokens)
    ids: list[int] = tokenizer(text, add_special_tokens=add, verbose=False)["input_ids"]
    return ids


def written(document: Document, tokenizer: Any, special_tokens: bool) -> tuple[str, bool]:
    """The text of a document as the model reads it, and whether the tokenizer adds its special
    tokens to it. Chat templates write their own: adding the tokenizer's would double the first
    one."""
    if isinstance(document, Chat) and tokenizer.chat_template:
        what = f"{document.location} holds conversations with"
        return render_whole(document.messages, document.arguments, tokenizer, what), False
    text = document.plain
    if text is None:
        raise UserError(
            "calibration.path holds chat messages but the model's tokenizer has no chat template: "
            "use a source of plain text, or of instruction and output pairs"
        )
    return text.text, special_tokens


def from_template(
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    tokenizer: Any,
    **options: Any,
) -> str:
    """Render messages with the tokenizer's chat template, which gets those of `arguments` that it
    reads, and `options`. Today is the tokenizer's date. UserError when it refuses."""
    from jinja2 import TemplateError

    from moe_lab.models.transformers_private import rendered_on, template_variables

    template = _template(arguments, tokenizer)
    read = template_variables(template)
    passed = {name: value for name, value in _flat(arguments).items() if name in read}
    try:
        with rendered_on(datetime.fromisoformat(_date(tokenizer)), template):
            text: str = tokenizer.apply_chat_template(
                list(messages), **{**passed, **options, "tokenize": False}
            )
    except (TemplateError, TypeError) as error:
        # TypeError: a template that joins arguments, an object, to a text
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the model's chat template refuses messages with roles {roles}: {error}"
        ) from error
    return text


def _date(tokenizer: Any) -> str:
    """The date that a chat template writes as today's; a tokenizer that `load_tokenizer` did not
    load has the usual."""
    date: str = getattr(tokenizer, "date", ModelConfig.date)
    return date


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record, and the arguments in one of them, by name."""
    return {**_without(arguments, [TEMPLATE_ARGUMENTS]), **arguments.get(TEMPLATE_ARGUMENTS, {})}


def _template(arguments: Mapping[str, Any], tokenizer: Any) -> str:
    """The chat template that is used with these arguments: a tokenizer may have another one for
    tools."""
    template: str = tokenizer.get_chat_template(tools=_flat(arguments).get("tools") or None)
    return template


def render_whole(
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    tokenizer: Any,
    what: str,
    **options: Any,
) -> str:
    """The text of a conversation, if the chat template reads all of it. Templates ignore what they
    do not know, such as tools, documents or the role of a message, and some leave out the thoughts
    in earlier answers: UserError, which begins with `what`, for content that the text lacks, or
    without which it is the same."""
    from moe_lab.models.transformers_private import template_variables

    text = from_template(messages, arguments, tokenizer, **options)
    flat = _flat(arguments)
    _check_words(messages, text, what)
    for key in arguments.get(TEMPLATE_ARGUMENTS, {}):
        if key not in template_variables(_template(arguments, tokenizer)):
            raise _unread(what, TEMPLATE_ARGUMENTS, {key: flat[key]})
    _check_rest({key: value for key, value in flat.items() if isinstance(value, str)}, text, what)
    for key, value, remaining_messages, remaining_arguments in _omissions(messages, flat):
        if key != "tools" and _missing(list(filter(is_content, _texts(value))), text):
            raise _unread(what, key, value)
        try:
            ignored = (
                from_template(remaining_messages, remaining_arguments, tokenizer, **options) == text
            )
        except UserError:
            # such as of a template that refuses an empty message: so it reads the calls
            continue
        if ignored:
            raise _unread(what, key, value)
    return text


def _omissions(
    messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Sequence[Mapping[str, Any]], Mapping[str, Any]]]:
    """Key and value of each list and object, and the conversation without it."""
    for key, value in arguments.items():
        if is_content(value) and not isinstance(value, str):
            yield key, value, messages, _without(arguments, [key])
    for number, message in enumerate(messages):
        for key, value in message.items():
            if is_content(value) and not isinstance(value, str):
                without = _without(message, [key])
                yield key, value, [*messages[:number], without, *messages[number + 1 :]], arguments


def _texts(value: Any) -> list[str]:
    """The texts in a value, such as those of documents or of the arguments of a call."""
    if isinstance(value, Mapping):
        return _texts(list(value.values()))
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


def _check_words(messages: Sequence[Mapping[str, Any]], text: str, what: str) -> None:
    """Raise UserError unless `text` has all words of the messages."""
    parts = [
        (message, key)
        for message in messages
        for key, value in message.items()
        if key == "content" or (isinstance(value, str) and (key == "name" or is_content(value)))
    ]
    missing = _missing([message[key] for message, key in parts], text)
    for message, key in sorted(
        parts, key=lambda part: part[0][part[1]].strip() in text
    ):  # first what is not there whole
        for word in _words(message[key]):
            if word in missing:
                raise UserError(
                    f"{what} role={message['role']} {key}={message[key]!r:.60}, of which the "
                    "model's chat template "
                    f"leaves out {word!r}: expected a set without it, or a model whose template "
                    "reads it"
                )


def _missing(contents: Sequence[str], text: str) -> Counter[str]:
    """The words of the contents that `text` lacks."""
    end = 0
    for content in contents:
        start = text.find(content.strip(), end)
        if start < 0:
            break
        end = start + len(content.strip())
    else:
        return Counter()  # all are there, one after another
    # Templates may move a message to another place, or write it as JSON, so that its words are
    # there but not its text.
    return _words(" ".join(contents)) - (_words(text) | _words(re.sub(r'\\[ntr"\\/]', " ", text)))


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+|[^\w\s]", text))
