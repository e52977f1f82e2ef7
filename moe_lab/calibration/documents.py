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
from moe_lab.models.config_json import selected_template

TASK_FIELDS = (("instruction", "output"), ("question", "answer"))
"""Pairs of field names under which data sets publish a task and its solution."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Field of a record with arguments of the chat template, as documented by TRL."""
BLANK_LINE = "\n\n"
"""Text between the halves of a pair for a model without a chat template, and between the rows of a
joined set."""
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"role"\s*:')
"""Beginning of messages as JSON text. Data sets that were stored as CSV have such texts."""
_ONE_WORD = re.compile(r"[!-~]*")
"""A text in ASCII without white space, such as an id, a source or an empty list in JSON."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that a model may call, in the form of chat templates: {"type": "function", "function":
{"name", ...}}."""


@dataclass(frozen=True)
class Text:
    """Plain text, read without a chat template."""

    text: str
    answer_start: int | None = data_field(default=None, repr=False)
    """Index in `text` at which the answer begins; None for a text without an answer."""
    unread: tuple[str, ...] = data_field(default=(), compare=False, repr=False)
    """Keys of the record's other fields whose values are texts of one word that `text` lacks."""

    @property
    def plain(self) -> Text:
        """The text itself, see `Chat.plain`."""
        return self


@dataclass(frozen=True)
class Chat:
    """A conversation, and the other fields of its record that a chat template may read."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages with a role, a content and all other keys. Arguments of `tool_calls` are objects,
    not JSON texts."""
    arguments: Mapping[str, Any] = data_field(default_factory=dict)
    """The other fields of the record, such as "tools"."""
    plain: Text | None = None
    """The text that a model without a chat template reads; None if there is no such text."""
    location: str = data_field(default="calibration.path", compare=False, repr=False)
    """Place of the record, for error messages."""


Document = Text | Chat


def instruction_document(
    instruction: str,
    output: str,
    arguments: Mapping[str, Any] | None = None,
    location: str = "calibration.path",
) -> Chat:
    """A document with an instruction and its answer, the `output`. arguments, location: see
    `Chat`."""
    prompt = instruction + BLANK_LINE
    messages = ({"role": "user", "content": instruction}, {"role": "assistant", "content": output})
    return Chat(messages, arguments or {}, Text(prompt + output, len(prompt)), location)


def document(
    record: Any,
    field: str | None,
    location: str,
    template: str | None = None,
    ignored: Collection[str] = (),
) -> Document:
    """The document in one JSON record. location: place of the record, for error messages.

    field: name of the field to read. None reads the first of these that the record has: `text`;
    `messages`; `instruction` and `output`, with the optional `input`; `question` and `answer`;
    `prompt` and `completion`; or `query` (a request), `answers` (the calls that answer it) and
    `tools`. UserError if a record with an instruction, question or prompt has content in other
    fields that nothing would read.

    template: a text with names of fields in braces, which becomes the document, with the values of
    the fields in place of their names. `field` is not used then. ignored: keys of the record and of
    its messages that are not read. A key whose value is null counts as missing.
    """
    if not isinstance(record, Mapping):
        raise UserError(
            f"{location}: expected an object with fields such as text, found {record!r:.40}"
        )
    record = _without_keys(_without_null(record), ignored)
    if template is not None:
        return Text(
            re.sub(
                r"\{(\w+)\}",
                lambda match: _string_field(record, match[1], location, "calibration.template"),
                template,
            )
        )
    if field is not None:
        return _from_field(record, field, location, ignored)
    return _from_standard_fields(record, location, ignored)


def _without_null(value: Any) -> Any:
    """The JSON value without keys that have the value null, at all levels. Arrow adds such keys to
    the objects of a column."""
    if isinstance(value, Mapping):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _without_keys(record: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def _from_standard_fields(
    record: Mapping[str, Any], location: str, ignored: Collection[str]
) -> Document:
    """The document that `document` returns for field=None."""
    if "text" in record:
        return _from_field(record, "text", location, ignored)
    if "messages" in record:
        messages = _messages(record["messages"], f"{location}, field messages", ignored)
        return Chat(messages, _arguments(record, ["messages"], location), location=location)
    for task_key, answer_key in TASK_FIELDS:
        if task_key in record and answer_key in record:
            task_keys = [task_key, "input"] if record.get("input") else [task_key]
            instruction = BLANK_LINE.join(_string_field(record, key, location) for key in task_keys)
            answer = _string_field(record, answer_key, location)
            arguments = _arguments(record, [task_key, "input", answer_key], location)
            # the field TEMPLATE_ARGUMENTS is checked by `render_whole`
            other_fields = _without_keys(arguments, [TEMPLATE_ARGUMENTS])
            _check_unread(other_fields, f"{instruction} {answer}", f"{location} holds")
            return instruction_document(instruction, answer, arguments, location)
    if "prompt" in record and "completion" in record:
        prompt = _string_field(record, "prompt", location)
        text = prompt + _string_field(record, "completion", location)
        other_fields = _without_keys(record, ["prompt", "completion"])
        _check_unread(other_fields, text, f"{location} holds")
        return Text(text, len(prompt), _keys_of_other_texts(other_fields, text))
    if all(name in record for name in ("query", "answers", "tools")):
        request = {"role": "user", "content": _string_field(record, "query", location)}
        calls = {"role": "assistant", "content": "", "tool_calls": record["answers"]}
        messages = (request, _message(calls, f"{location}, field answers", ()))
        return Chat(messages, _arguments(record, ["query", "answers"], location), location=location)
    raise UserError(
        f"{location}: none of the fields text, messages, instruction and output, question and "
        f"answer, prompt and completion, or query, answers and tools has a value (found: "
        f"{_field_names(record)}): name it with calibration.field"
    )


def is_content(value: Any) -> bool:
    """Whether a value of a record is content, which a model must read. All other values are
    metadata, which may be left out: numbers, flags, empty values, and ASCII texts without white
    space, such as ids."""
    if isinstance(value, str):
        return not _ONE_WORD.fullmatch(value)
    return bool(value) and not isinstance(value, int | float)


def _check_unread(fields: Mapping[str, Any], text: str, error_start: str) -> None:
    """Raise UserError if a value in `fields` is content that `text` lacks."""
    for key, value in fields.items():
        is_in_text = isinstance(value, str) and not _missing_words([value], text)
        if is_content(value) and not is_in_text:
            raise _unread_error(error_start, key, value)


def _keys_of_other_texts(fields: Mapping[str, Any], text: str) -> tuple[str, ...]:
    """Keys of the `fields` whose values are texts with words, of which `text` lacks at least
    one."""
    return tuple(
        key
        for key, value in fields.items()
        if isinstance(value, str) and re.search(r"\w", value) and _missing_words([value], text)
    )


def _unread_error(error_start: str, key: str, value: Any) -> UserError:
    """The error for a field `key` whose content, `value`, would not be read."""
    return UserError(
        f"{error_start} {key}={value!r:.60}, which is not read: expected a model whose chat "
        "template reads it, or, for a calibration set, calibration.template with the fields to "
        f"read, or calibration.ignored=[{key}]"
    )


def _from_field(
    record: Mapping[str, Any], field: str, location: str, ignored: Collection[str]
) -> Document:
    """The document in one field, which holds a string, a list of chat messages, or a list of chat
    messages as JSON text."""
    value = record.get(field)
    is_messages_json = isinstance(value, str) and _MESSAGES.match(value)
    # The field `messages` always counts as messages, so that the error for another value says that
    # a list is expected.
    if is_messages_json or isinstance(value, list) or (field == "messages" and field in record):
        messages = _messages(value, f"{location}, field {field}", ignored)
        fields = {key: record[key] for key in ("tools", TEMPLATE_ARGUMENTS) if key in record}
        return Chat(messages, _arguments(fields, [], location), location=location)
    return Text(_string_field(record, field, location, "calibration.field"))


def _messages(value: Any, location: str, ignored: Collection[str]) -> tuple[Mapping[str, Any], ...]:
    """The chat messages in `value`, a list or the JSON text of a list."""
    return tuple(_message(entry, location, ignored) for entry in _decode(value, location, list))


def _arguments(record: Mapping[str, Any], used: Collection[str], location: str) -> dict[str, Any]:
    """Arguments of a chat template, name -> value: a record without its `used` fields."""
    arguments = _without_keys(record, [*used, "tools"])
    # some templates would write a heading for an empty list
    if tools := _tools(record.get("tools"), location):
        arguments["tools"] = tools
    # an object, or its JSON text, that `_flat_arguments` unpacks later
    if nested := arguments.get(TEMPLATE_ARGUMENTS):
        arguments[TEMPLATE_ARGUMENTS] = _decode(nested, f"{location}: {TEMPLATE_ARGUMENTS}", dict)
    return arguments


def _string_field(record: Mapping[str, Any], field: str, location: str, setting: str = "") -> str:
    """The string in a field of a record. UserError when the field is missing or holds no string.
    setting: the setting that names the field, for the error message; "" if the field is certainly
    in the record."""
    if field not in record:
        nearest_name = nearest(field, record)
        hint = f"did you mean {nearest_name}? " if nearest_name else ""
        raise UserError(
            f"{location}: the field {field} of {setting} is not there: {hint}(found: "
            f"{_field_names(record)})"
        )
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{location}: field {field} holds {value!r:.40}, expected a string")
    return value


def _message(entry: Any, location: str, ignored: Collection[str]) -> Mapping[str, Any]:
    """The chat message `entry` without `ignored` keys. UserError for a message without a role, and
    for a message with neither content nor tool calls."""
    error = UserError(
        f"{location}: expected messages with a role and a content that are strings, found "
        f"{entry!r:.80}"
    )
    if not isinstance(entry, Mapping):
        raise error
    message = _without_keys(entry, ignored)
    if calls := _decode(message.pop("tool_calls", None) or [], f"{location}: tool_calls", list):
        # A message with calls may have no content.
        message = {
            "content": "",
            **message,
            "tool_calls": [_tool_call(call, location) for call in calls],
        }
    if not fits(message, {"role": str, "content": str}):
        raise error
    return message


def _tool_call(call: Any, location: str) -> dict[str, Any]:
    """A call of a function in the form that chat templates read: {"type": "function", "function":
    {"name": text, "arguments": object}}. `call` may have this form. Or it is only the object of
    "function", perhaps with the keys "type" and "id". Its arguments may be JSON text."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else None
    if not fits(function, {"name": str}):
        raise UserError(
            f"{location}: expected tool_calls with a name and arguments, found {call!r:.80}"
        )
    arguments = _decode(
        function.get("arguments", {}), f"{location}: arguments of {function['name']}", dict
    )
    if "function" in call:
        return {"type": "function", **call, "function": {**function, "arguments": arguments}}
    # "type" and "id" belong beside "function", not into it
    call_fields = {key: call[key] for key in ("type", "id") if key in call}
    function = {**_without_keys(call, call_fields), "arguments": arguments}
    return {"type": "function", **call_fields, "function": function}


def _tools(value: Any, location: str) -> Tools:
    """The functions in `value`, a list or the JSON text of a list. A function in `value` may be
    only the object of "function"."""
    tools = []
    for tool in _decode(value or [], f"{location}: tools", list):
        entry = (
            tool
            if isinstance(tool, Mapping) and "function" in tool
            else {"type": "function", "function": tool}
        )
        if not fits(entry, {"function": {"name": str}}):
            raise UserError(f"{location}: tools holds {tool!r:.80}, expected functions with a name")
        tools.append(entry)
    return tools


def _decode(value: Any, location: str, kind: type) -> Any:
    """`value`, decoded if it is JSON text. UserError for a result that is no `kind`, and for
    damaged JSON."""
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


def _field_names(record: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, record))) or "no field"


def is_empty(document: Document) -> bool:
    """Whether a document has no content."""
    if plain := document.plain:
        return not plain.text.strip()
    return isinstance(document, Chat) and not document.messages


def has_answer(document: Document) -> bool:
    """Whether a document has an answer: an output, a completion, or a turn of the assistant."""
    if isinstance(document, Text):
        return document.answer_start is not None and bool(
            document.text[document.answer_start :].strip()
        )
    answers = [message for message in document.messages if message["role"] == "assistant"]
    return any(answer["content"].strip() or answer.get("tool_calls") for answer in answers)


def rendering(document: Document, tokenizer: Any) -> str:
    """How `tokenize` turns the document into text."""
    if isinstance(document, Text):
        return "as it stands"
    if not tokenizer.chat_template:
        return "pair parted by a blank line"  # instruction and output
    template = "chat template with tools" if document.arguments.get("tools") else "chat template"
    # templates get today's date from strftime_now
    if "strftime_now" in _template(document.arguments, tokenizer):
        return f"{template}, dated {_date(tokenizer)}"
    return template


def unread_texts(document: Document, tokenizer: Any) -> tuple[str, ...]:
    """Keys of the record whose values are texts that the model does not read. tokenizer: None means
    that there is no chat template."""
    if isinstance(document, Text):
        return document.unread
    arguments = document.arguments
    if tokenizer is not None and tokenizer.chat_template:
        from moe_lab.models.transformers_private import template_variables

        arguments = _without_keys(arguments, template_variables(_template(arguments, tokenizer)))
    text = " ".join(message["content"] for message in document.messages)
    return _keys_of_other_texts(arguments, text)


def tokenize(document: Document, tokenizer: Any, special_tokens: bool) -> list[int]:
    """Token ids of one document. special_tokens: whether the tokenizer adds special tokens to a
    text that was not written by a chat template."""
    text, adds_special = document_text(document, tokenizer, special_tokens)
    ids: list[int] = tokenizer(text, add_special_tokens=adds_special, verbose=False)["input_ids"]
    return ids


def document_text(document: Document, tokenizer: Any, special_tokens: bool) -> tuple[str, bool]:
    """(text of a document as the model reads it, whether the tokenizer must add special tokens).
    special_tokens: see `tokenize`.

    A chat template writes special tokens itself. UserError when the chat template leaves out
    content of the document, or when the document needs a chat template and there is none.
    """
    if isinstance(document, Chat) and tokenizer.chat_template:
        error_start = f"{document.location} holds conversations with"
        return render_whole(document.messages, document.arguments, tokenizer, error_start), False
    text = document.plain
    if text is None:
        raise UserError(
            "calibration.path holds chat messages but the model's tokenizer has no chat template: "
            "use a source of plain text, or of instruction and output pairs"
        )
    return text.text, special_tokens


def render(
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    tokenizer: Any,
    **options: Any,
) -> str:
    """The text into which the tokenizer's chat template renders the messages. arguments: see
    `Chat`. options: further arguments of apply_chat_template. UserError when the template raises an
    error."""
    from jinja2 import TemplateError

    from moe_lab.models.transformers_private import template_variables, with_date

    template = _template(arguments, tokenizer)
    variables = template_variables(template)
    values = {
        name: value for name, value in _flat_arguments(arguments).items() if name in variables
    }
    try:
        with with_date(datetime.fromisoformat(_date(tokenizer)), template):
            text: str = tokenizer.apply_chat_template(
                list(messages), **{**values, **options, "tokenize": False}
            )
    except (TemplateError, TypeError) as error:
        # A template that appends the arguments of a call to a text raises TypeError, because the
        # arguments are an object.
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the model's chat template refuses messages with roles {roles}: {error}"
        ) from error
    return text


def _date(tokenizer: Any) -> str:
    """The date, as ISO text, that chat templates write as today's date. `load_tokenizer` sets it on
    the tokenizer."""
    date: str = getattr(tokenizer, "date", ModelConfig.date)
    return date


def _flat_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments`, name -> value, with the items of the object TEMPLATE_ARGUMENTS in its
    place."""
    return {
        **_without_keys(arguments, [TEMPLATE_ARGUMENTS]),
        **arguments.get(TEMPLATE_ARGUMENTS, {}),
    }


def _template(arguments: Mapping[str, Any], tokenizer: Any) -> str:
    """The text of the chat template that the tokenizer uses with the `arguments`. A tokenizer may
    have another template for conversations with tools. UserError if it has several templates, and
    none of them is the default."""
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        return templates
    tools = bool(_flat_arguments(arguments).get("tools"))
    return selected_template(templates, tools, "the model's tokenizer")


def render_whole(
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    tokenizer: Any,
    error_start: str,
    **options: Any,
) -> str:
    """The text into which the tokenizer's chat template renders a conversation. arguments, options:
    see `render`.

    Templates ignore fields that they do not know. UserError, which begins with `error_start`, for
    each of these:

    - a text has a word that the rendered text lacks
    - an argument in TEMPLATE_ARGUMENTS is no variable of the template
    - the template renders the same text without a certain list or object
    """
    from moe_lab.models.transformers_private import template_variables

    text = render(messages, arguments, tokenizer, **options)
    flat_arguments = _flat_arguments(arguments)
    _check_words(messages, text, error_start)
    for key in arguments.get(TEMPLATE_ARGUMENTS, {}):
        if key not in template_variables(_template(arguments, tokenizer)):
            raise _unread_error(error_start, TEMPLATE_ARGUMENTS, {key: flat_arguments[key]})
    texts = {key: value for key, value in flat_arguments.items() if isinstance(value, str)}
    _check_unread(texts, text, error_start)
    for key, value, remaining_messages, remaining_arguments in _omissions(messages, flat_arguments):
        # The words of tools are not checked, because templates rewrite tools.
        if key != "tools" and _missing_words(list(filter(is_content, _texts(value))), text):
            raise _unread_error(error_start, key, value)
        try:
            text_without_value = render(
                remaining_messages, remaining_arguments, tokenizer, **options
            )
        except UserError:
            # A template that refuses the conversation without the value does read the value.
            continue
        if text_without_value == text:
            raise _unread_error(error_start, key, value)
    return text


def _omissions(
    messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Sequence[Mapping[str, Any]], Mapping[str, Any]]]:
    """For each non-empty list or object among the values of `arguments` and of the messages, yield
    (its key, the list or object, the messages without it, the arguments without it)."""
    for key, value in arguments.items():
        if is_content(value) and not isinstance(value, str):
            yield key, value, messages, _without_keys(arguments, [key])
    for number, message in enumerate(messages):
        for key, value in message.items():
            if is_content(value) and not isinstance(value, str):
                remaining_message = _without_keys(message, [key])
                yield (
                    key,
                    value,
                    [*messages[:number], remaining_message, *messages[number + 1 :]],
                    arguments,
                )


def _texts(value: Any) -> list[str]:
    """All texts within a JSON value."""
    if isinstance(value, Mapping):
        return _texts(list(value.values()))
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


def _check_words(messages: Sequence[Mapping[str, Any]], text: str, error_start: str) -> None:
    """Raise UserError if `text`, into which a chat template rendered the messages, lacks a word of
    a message."""
    contents = [
        (message["role"], key, value)
        for message in messages
        for key, value in message.items()
        if key == "content" or (isinstance(value, str) and (key == "name" or is_content(value)))
    ]
    missing_words = _missing_words([content for _, _, content in contents], text)
    # Contents that are in `text` as they stand come last, because most likely the missing word is
    # from another content.
    contents.sort(key=lambda entry: entry[2].strip() in text)
    for role, key, content in contents:
        for word in _words(content):
            if word in missing_words:
                raise UserError(
                    f"{error_start} role={role} {key}={content!r:.60}, of which the model's "
                    f"chat template leaves out {word!r}: expected a set without it, or a model "
                    "whose template reads it"
                )


def _missing_words(contents: Sequence[str], text: str) -> Counter[str]:
    """The words of `contents` that `text` lacks. Word -> number of occurrences in `contents`, minus
    the number in `text`."""
    end = 0  # end of the last content that was found in `text`
    for content in contents:
        start = text.find(content.strip(), end)
        if start < 0:
            break
        end = start + len(content.strip())
    else:
        return Counter()  # `text` has all contents, one after another
    # A template may move a message, or write a message as JSON. In JSON, an escape such as \n
    # stands right before the next word: \nwhy would be read as the word nwhy. So words are counted
    # with and without the escapes, and | takes the larger number of each word.
    return _words(" ".join(contents)) - (_words(text) | _words(re.sub(r'\\[ntr"\\/]', " ", text)))


def _words(text: str) -> Counter[str]:
    """Word or punctuation mark -> number of occurrences."""
    return Counter(re.findall(r"\w+|[^\w\s]", text))
