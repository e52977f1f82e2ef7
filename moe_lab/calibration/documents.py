"""Turn a record of a source into a document, and a document into token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_lab.errors import UserError, nearest

PAIRS = (("instruction", "output"), ("question", "answer"))
"""Field names under which sets publish a task and its solution."""
BLANK_LINE = "\n\n"
"""Separates the two halves of a pair for a model without a chat template, and the rows of a joined set."""


@dataclass(frozen=True)
class Text:
    """Plain text, read without a chat template."""

    text: str


@dataclass(frozen=True)
class Chat:
    """A conversation: messages with a role and a content each."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Pair:
    """An instruction and its answer: a conversation of two messages, or plain text for a model without a template."""

    instruction: str
    output: str


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion: one text, with nothing between the two, for a model trained on such text."""

    prompt: str
    completion: str


Document = Text | Chat | Pair | Completion


def document(
    record: Any,
    field: str | None,
    where: str,
    template: str | None = None,
    *,
    remedy: str = "name the one to read with calibration.field=NAME",
) -> Document:
    """The document in one JSON record.

    `field` names the field to read; None takes `text`, `messages`, `instruction` and `output` (with the optional
    `input` of instruction sets), `question` and `answer`, or `prompt` and `completion`, whichever is there first.
    `template` is a text with fields in braces; with these filled in, it is read as plain text.
    For error messages, `where` is the location of the record and `remedy` the advice to give.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with fields such as text, found {_kind(record)}")
    if template is not None:
        return Text(re.sub(r"\{(\w+)\}", lambda name: _filled_in(record, name[1], where), template))
    if field is not None:
        return _named(record, field, where)
    for standard_field in ("text", "messages"):
        if standard_field in record:
            return _named(record, standard_field, where)
    for task, solution in PAIRS:
        if task in record and solution in record:
            instruction = _string(record, task, where)
            if record.get("input"):
                instruction += BLANK_LINE + _string(record, "input", where)
            return Pair(instruction, _string(record, solution, where))
    if "prompt" in record and "completion" in record:
        return Completion(_string(record, "prompt", where), _string(record, "completion", where))
    raise UserError(
        f"{where}: none of the fields text, messages, instruction and output, question and answer, or prompt and "
        f"completion is there (found: {_names(record)}); {remedy}"
    )


def _named(record: Mapping[str, Any], field: str, where: str) -> Document:
    """The document in one field: a string, or a list of chat messages."""
    _check_field(record, field, where, f"calibration.field={field}")
    if isinstance(record[field], list):
        return Chat(tuple(_message(entry, f"{where}, field {field}") for entry in record[field]))
    return Text(_string(record, field, where))


def _filled_in(record: Mapping[str, Any], field: str, where: str) -> str:
    """The text for one field of a template."""
    _check_field(record, field, where, f"field {field} of calibration.template")
    return _string(record, field, where)


def _check_field(record: Mapping[str, Any], field: str, where: str, setting: str) -> None:
    """Raise UserError, naming the nearest field and the `setting` that asks for this one, if the record lacks it."""
    if field not in record:
        close = nearest(field, record)
        hint = f"did you mean {close}? " if close else ""
        raise UserError(f"{where}: {setting} is not there: {hint}(found: {_names(record)})")


def _message(entry: Any, where: str) -> Mapping[str, str]:
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("role", "content")):
        raise UserError(f"{where}: expected messages with a role and a content that are strings, found {entry!r:.80}")
    return {"role": entry["role"], "content": entry["content"]}


def _string(record: Mapping[str, Any], field: str, where: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field} holds {_kind(value)}, expected a string")
    return value


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, record))) or "no field"


def _kind(value: Any) -> str:
    """The type of a JSON value in plain words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def is_empty(document: Document) -> bool:
    """Whether a document has no content."""
    return not document.messages if isinstance(document, Chat) else not plain(document).strip()


def has_answer(document: Document) -> bool:
    """Whether a document has an answer: an output, a completion, or a turn of the assistant."""
    if isinstance(document, Text | Completion):
        return isinstance(document, Completion) and bool(document.completion.strip())
    turns = messages(document)
    return any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns)


def rendering(document: Document, tokenizer: Any) -> str:
    """How `tokenize` will turn this document into text, in words for the report."""
    if isinstance(document, Text | Completion):
        return "as it stands"
    return "chat template" if tokenizer.chat_template else "pair parted by a blank line"


def tokenize(document: Document, tokenizer: Any, special_tokens: bool) -> list[int]:
    """Token ids of one document.

    Conversations go through the tokenizer's chat template, which writes its own special tokens: adding the
    tokenizer's would double the first one, so `special_tokens` applies only to text without a chat template.
    """
    text, add = written(document, tokenizer, special_tokens)
    ids: list[int] = tokenizer(text, add_special_tokens=add, verbose=False)["input_ids"]
    return ids


def written(document: Document, tokenizer: Any, special_tokens: bool) -> tuple[str, bool]:
    """The text of a document as the model reads it, and whether the tokenizer adds its special tokens to it."""
    if isinstance(document, Chat | Pair) and tokenizer.chat_template:
        return from_template(messages(document), tokenizer), False
    if not isinstance(document, Chat):
        return plain(document), special_tokens
    raise UserError(
        "calibration.path holds chat messages but the model's tokenizer has no chat template: "
        "use a source of plain text, or of instruction and output pairs"
    )


def plain(document: Text | Pair | Completion) -> str:
    """The text of a document for a model without a chat template."""
    if isinstance(document, Text):
        return document.text
    if isinstance(document, Completion):
        return document.prompt + document.completion
    return f"{document.instruction}{BLANK_LINE}{document.output}"


def messages(document: Chat | Pair) -> list[Mapping[str, str]]:
    """The messages of a conversation; a pair becomes one message of the user and one of the assistant."""
    if isinstance(document, Chat):
        return list(document.messages)
    return [
        {"role": "user", "content": document.instruction},
        {"role": "assistant", "content": document.output},
    ]


def from_template(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> str:
    """Render messages with the tokenizer's chat template; UserError when it refuses them."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"calibration.path: the chat template refuses messages with roles {roles}: {error}") from error
    return text
