"""Turn the records of a source into documents, and documents into token ids.

Data sets name the same things differently. `Record` recognises the form of a record, and gives
conversations the keys and roles that chat templates read.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as data_field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.errors import UserError, nearest
from moe_lab.json_files import fits
from moe_lab.models.config_json import selected_template

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Field of a record with arguments of the chat template, as documented by TRL."""
BLANK_LINE = "\n\n"
"""Text between the halves of a pair for a model without a chat template, and between the rows of a
joined set."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which chat templates and data sets have the thoughts of the assistant."""
_ONE_WORD = re.compile(r"[!-~]*")
"""A text in ASCII without white space, such as an id, a source or an empty list in JSON."""

TASKS = ("instruction", "question", "problem", "query", "prompt")
ANSWERS = ("output", "solution", "answer", "response", "completion", "answers")
"""Fields with a task, and fields with its answer. The first that a record has is taken. `answers`
are calls of functions, as in xlam-function-calling-60k."""
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text", "system_prompt")
CALLERS = ("function_call", "tool_call")
"""Roles of turns whose content is the call of a function, as JSON."""
ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "ai", "model", *CALLERS), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response"), "tool"),
}
"""Role in a data set -> role in chat templates. Other roles stay as they are."""
_OUTER = ("type", "id")
"""Keys of a call of a function that stand beside the function, not in it."""
LABELS = ("category", "difficulty", "domain", "level", "subject", "type")
"""Last parts of the names of fields that sort records, such as problem_type. A text of at most
LABEL_WORDS words in one is metadata."""
LABEL_WORDS = 3
_CACHE = "cache_control"
"""Key of a message, or of a part of its content, that only a server reads."""
_COPIES = {"message_type": ("thought", "action", "tool_call_ids"), "traj_id": ("patch",)}
"""Key of a turn or record of SWE-agent -> keys beside it that only repeat what turns say and do."""
_TURNS = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")
"""Beginning of a conversation as JSON text, or as a Python literal. Data sets that were stored as
CSV have such texts."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that a model may call, in the form of chat templates: {"type": "function", "function":
{"name", ...}}."""


@dataclass(frozen=True)
class Text:
    """Plain text, read without a chat template."""

    text: str
    answer_start: int | None = data_field(default=None, repr=False)
    """Index in `text` at which the answer begins; None for a text without an answer."""

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
    ignored: tuple[str, ...] = data_field(default=(), compare=False, repr=False)
    """The keys in calibration.ignored, for error messages."""


Document = Text | Chat


# A record becomes a document.


class LeftOut(Exception):
    """A record without content. The text says why, such as "text is null"."""


class Documents:
    """The documents of a set, the forms of its records, and what was left out."""

    def __init__(self, settings: CalibrationConfig) -> None:
        self.settings = settings
        self.documents: list[Document] = []
        self.forms: Counter[str] = Counter()
        """Form, such as "question and answer" -> number of records."""
        self.left_out: dict[str, list[str]] = defaultdict(list)
        """Why records and turns were left out -> the location of each."""

    def add(self, value: Any, location: str) -> None:
        """Add the document in a record. UserError for a record that is no object, and the errors of
        `Record.document`."""
        fields = {"text": value} if isinstance(value, str) else value or {}
        if not isinstance(fields, Mapping):
            raise UserError(
                f"{location}: expected an object with fields such as text, found {value!r:.40}"
            )
        fields = without_keys(_without_copies(fields), self.settings.ignored)
        fields = {key: _without_null(inner) for key, inner in fields.items()}
        record = Record(fields, location, self.settings)
        try:
            self.documents.append(record.document())
            self.forms[record.form] += 1
        except LeftOut as reason:
            self.left_out[str(reason)].append(location)
        if record.turns_left_out:
            self.left_out["a turn has no words"].append(location)


@dataclass
class Record:
    """One record of a set."""

    fields: Mapping[str, Any]
    """Name of a field -> value. A field whose value is null counts as missing."""
    location: str
    """Place of the record, for error messages."""
    settings: CalibrationConfig
    form: str = ""
    """The fields with the document, and those beside them with a text of one word, which is read
    only by some chat templates."""
    turns_left_out: bool = False
    """Whether turns of the conversation have no words."""

    def document(self) -> Document:
        """The document in the fields that calibration.template or calibration.field names; by
        default, in the first of these that the record has: a text, messages, a task and its answer,
        or another conversation.

        LeftOut for a record without words. UserError for a record of no such form, and if content
        in other fields would not be read. A key with the value null counts as missing.
        """
        template = self.settings.template
        if template is not None:
            self.form = "calibration.template"
            return Text(re.sub(r"\{(\w+)\}", lambda match: self._text(match[1]), template))
        field = self.settings.field or self._known_fields()
        keys = [field] if isinstance(field, str) else [*field]
        self.form = " and ".join(keys)
        if len(keys) > 1:
            are_turns = all(_is_conversation(self.fields.get(key)) for key in keys)
            return self._conversation(*keys) if are_turns else self._pair(keys)
        value = self._value(*keys)
        # `messages` always counts as a conversation, so that the error for another value says that
        # a list is expected
        if isinstance(value, list) or _is_conversation(value) or keys == ["messages"]:
            return self._conversation(*keys)
        if self.settings.joined or self._text(*keys).strip():
            return Text(value)
        raise LeftOut(f"{self.form} without words")

    def _known_fields(self) -> Sequence[str]:
        """The fields that are read without calibration.field: the first of the known ones that all
        have a value. LeftOut for a record that has none, but has fields without a value; UserError
        for any other that has none."""
        fields = self.fields
        if self.settings.joined and "text" in fields:  # also an empty one
            return ["text"]
        conversations = [[key] for key, value in fields.items() if _is_conversation(value)]
        if ["prompt"] in conversations and ["completion"] in conversations:  # as in TRL
            conversations = [["prompt", "completion"]]
        task, answer = _first(TASKS, fields), _first(ANSWERS, fields)
        pairs = [task, "input", answer], [task, answer], ["input", answer]
        for keys in (["text"], ["messages"], *conversations, *pairs):
            if not any(_is_blank(fields.get(key)) for key in keys):
                return keys
        if all(map(_is_blank, fields.values())):
            raise LeftOut("no words")
        texts = [key for key, value in fields.items() if isinstance(value, str)]
        longest = max(texts, key=lambda key: len(fields[key]), default="NAME")
        sentence = (
            "none of the fields text, messages, or a task and its answer such as question and "
            f"answer has a value (found: {', '.join(_without_null(fields)) or 'no field'}): "
            f"expected calibration.field={longest}, or calibration.field=[TASK,ANSWER]"
        )
        if any(map(_is_blank, fields.values())):
            raise LeftOut(sentence)
        raise UserError(f"{self.location}: {sentence}")

    def _conversation(self, *keys: str) -> Chat:
        """The conversation in fields with lists of turns, or with their texts."""
        turns = []
        for key in keys:
            turns += _decode(self.fields[key], f"{self.location}, field {key}", list)
        used = [*keys]
        system = self.fields.get("system")
        # the system prompt of ShareGPT stands beside the conversation
        if system and fits(turns[:1], [{"from": str}]) and turns[0]["from"] != "system":
            turns = [{"from": "system", "value": system}, *turns]
            used.append("system")
        return self._chat(turns, used)

    def _pair(self, keys: Sequence[str]) -> Document:
        """A document with a task, which may be in several fields, and its answer, in the last of
        the fields `keys`."""
        *tasks, answer_key = keys
        used = [*keys, "input"]
        task = BLANK_LINE.join(map(self._text, tasks))
        turn = {"role": "user", "content": task}
        if answer_key == "answers":
            calls = {"role": CALLERS[0], "content": self._value(answer_key)}
            return self._chat([turn, calls], used)
        answer = self._text(answer_key)
        turns = [turn, {"role": "assistant", "content": answer}]
        plain = Text(task + BLANK_LINE + answer, len(task + BLANK_LINE))
        if self.settings.field is None:
            others = without_keys(self.fields, [*used, TEMPLATE_ARGUMENTS])
            content = unread(others, f"{task} {answer}")
            check_read(content, f"{self.location} holds", self.settings.ignored)
            if keys == ["prompt", "completion"]:
                self._note(others)
                return Text(task + answer, len(task))
        return self._chat(turns, used, plain)

    def _chat(self, turns: Sequence[Any], used: Sequence[str], plain: Text | None = None) -> Chat:
        """The conversation of turns that have words or are results of calls. The others are
        counted. All fields that are not `used` are arguments of the chat template; with
        calibration.field, only the tools and TEMPLATE_ARGUMENTS. LeftOut if no turn has words, and
        if a turn without words stands between two turns of one role."""
        messages = [self._message(turn, f"{self.location}, field {used[0]}") for turn in turns]
        if not any(map(_has_words, messages)):
            raise LeftOut(f"{self.form} without words")
        spoken = {
            position: turn
            for position, turn in enumerate(messages)
            if _has_words(turn) or turn["role"] == "tool"
        }
        for before, after in pairwise(spoken):
            if after > before + 1 and messages[before]["role"] == messages[after]["role"]:
                raise LeftOut("no words between messages of one role")
        self.turns_left_out = len(spoken) < len(messages)
        arguments = _without_null(without_keys(self.fields, [*used, "tools"]))
        if self.settings.field is not None:
            arguments = without_keys(arguments, arguments.keys() - {TEMPLATE_ARGUMENTS})
        # some templates would write a heading for an empty list
        if tools := _functions(self.fields.get("tools"), f"{self.location}: tools"):
            arguments["tools"] = tools
        # an object, or its JSON text, that `flat_arguments` unpacks later
        if nested := arguments.get(TEMPLATE_ARGUMENTS):
            where = f"{self.location}: {TEMPLATE_ARGUMENTS}"
            arguments[TEMPLATE_ARGUMENTS] = _decode(nested, where, dict)
        self._note(arguments)
        return Chat(tuple(spoken.values()), arguments, plain, self.location, self.settings.ignored)

    def _note(self, fields: Mapping[str, Any]) -> None:
        """Add the names of other `fields` of text, which only a chat template may read, to the
        form."""
        keys = [key for key, value in fields.items() if value and isinstance(value, str)]
        self.form = ", beside ".join([self.form, *keys])

    def _value(self, key: str) -> Any:
        """The value of a field. LeftOut for null; UserError for a field that is not there."""
        if key not in self.fields:
            nearest_name = nearest(key, self.fields)
            hint = f"did you mean {nearest_name}? " if nearest_name else ""
            raise UserError(
                f"{self.location}: the field {key} of calibration.field or calibration.template is "
                f"not there: {hint}(found: {', '.join(self.fields) or 'no field'})"
            )
        if self.fields[key] is None:
            raise LeftOut(f"{key} is null")
        return self.fields[key]

    def _text(self, key: str) -> str:
        """The string in a field. Errors as in `_value`; UserError also for any other value."""
        value = self._value(key)
        if not isinstance(value, str):
            raise UserError(f"{self.location}: field {key} holds {value!r:.40}, expected a string")
        return value

    def _message(self, turn: Any, where: str) -> dict[str, Any]:
        """The message in `turn`, with the keys and roles of chat templates, and without
        calibration.ignored. UserError for a turn without a role, and for content that is no
        text."""
        message = _without_null(turn) if isinstance(turn, Mapping) else {}
        unread_keys = (*self.settings.ignored, _CACHE)
        message = without_keys(_without_copies(message), unread_keys)
        role = message.pop(_first(ROLE_KEYS, message), None)
        content = message.pop(_first(CONTENT_KEYS, message), "")
        if role in CALLERS:
            message["tool_calls"], content = content, ""
        if isinstance(content, list):
            texts = [_text_of_part(part, unread_keys) for part in content]
            content = "\n".join(texts) if fits(texts, [str]) else content
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(
                f"{where}: expected messages with a role and a content that are strings, found "
                f"{turn!r:.80}"
            )
        message |= {"role": ROLES.get(role, role), "content": content}
        calls = _functions(message.pop("tool_calls", None), f"{where}: tool_calls")
        calls += _functions(message.pop("function_call", None), f"{where}: function_call")
        for call in calls:
            function = call["function"]
            name = f"{where}: arguments of {function['name']}"
            function["arguments"] = _decode(function.get("arguments"), name, dict)
        if calls:
            message["tool_calls"] = calls
        return message


def _first(names: Sequence[str], fields: Mapping[str, Any]) -> str:
    """The first of `names` that has a value in `fields`; "" if none has."""
    return next((name for name in names if fields.get(name) is not None), "")


def _text_of_part(part: Any, unread_keys: Sequence[str]) -> Any:
    """The text of a part of a content, if the part has nothing else than a text, metadata, and
    `unread_keys`; otherwise `part`."""
    if not fits(part, {"type": str, "text": str}) or not part["type"].endswith("text"):
        return part
    others = without_keys(part, ("type", "text", *unread_keys))
    return part if any(map(is_content, others.values())) else part["text"]


def _without_copies(record: Mapping[str, Any]) -> dict[str, Any]:
    """A turn or a record without the keys in `_COPIES`."""
    return without_keys(
        record, [key for mark in _COPIES if mark in record for key in _COPIES[mark]]
    )


def _is_blank(value: Any) -> bool:
    """Whether a value is null, empty, or white space."""
    return not str(value or "").strip()


def _is_conversation(value: Any) -> bool:
    """Whether a value is a list of turns with a role, or the text of one."""
    if isinstance(value, str):
        return _TURNS.match(value) is not None
    return isinstance(value, list) and any(
        isinstance(turn, Mapping) and _first(ROLE_KEYS, turn) for turn in value
    )


def _has_words(message: Mapping[str, Any]) -> bool:
    """Whether a message has more than a role and metadata."""
    return bool(message["content"].strip()) or any(map(is_content, message.values()))


def _functions(value: Any, where: str) -> list[dict[str, Any]]:
    """The functions in `value`, or the calls of functions, in the form that chat templates read:
    {"type": "function", "function": {"name": text, ...}}. `value` is a list, one function, or JSON
    text. A function may have this form, or be only the object of "function", perhaps with the keys
    "type" and "id"."""
    functions = []
    entries = _decode(value, where, list, dict)
    for entry in [entries] if isinstance(entries, Mapping) and entries else entries:
        function: Any = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not fits(function, {"name": str}):
            raise UserError(f"{where} holds {entry!r:.80}, expected functions with a name")
        outer = entry
        if "function" not in entry:
            outer = {key: entry[key] for key in _OUTER if key in entry}
            function = without_keys(entry, _OUTER)
        functions.append({"type": "function", **outer, "function": dict(function)})
    return functions


def _decode(value: Any, where: str, *kinds: type) -> Any:
    """`value`, decoded if it is JSON text or a Python literal. An empty value of the first of the
    `kinds` for null and for any empty value. UserError for a damaged text, and for a result that is
    none of the `kinds`."""
    while isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                raise UserError(f"{where} is damaged JSON: {error}") from None
    if _is_blank(value):
        return kinds[0]()
    if not isinstance(value, kinds):
        expected = "a list" if list in kinds else "an object"
        raise UserError(f"{where}: found {value!r:.40}, expected {expected}")
    return value


def _without_null(value: Any) -> Any:
    """The JSON value without keys that have the value null, at all levels. Arrow adds such keys to
    the objects of a column."""
    if isinstance(value, Mapping):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


# A document becomes text and token ids.


def without_keys(record: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def is_content(value: Any) -> bool:
    """Whether a value of a record is content, which a model must read. All other values are
    metadata, which may be left out: numbers, flags, dates, empty values, and ASCII texts without
    white space, such as ids."""
    if isinstance(value, str):
        return not _ONE_WORD.fullmatch(value.strip())
    return bool(value) and not isinstance(value, int | float | Decimal | date | time | timedelta)


def unread(fields: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The `fields` of a record with content that `text` lacks."""
    content = {}
    for key, value in fields.items():
        if not is_content(value):
            continue
        if isinstance(value, str):
            is_label = key.lower().rpartition("_")[2] in LABELS
            if is_label and len(value.split()) <= LABEL_WORDS:
                continue
            if not missing_words([value], text):
                continue
        content[key] = value
    return content


def check_read(content: Mapping[str, Any], error_start: str, ignored: Sequence[str]) -> None:
    """Raise UserError if there is `content`, key -> value, that would not be read. ignored: the
    keys in calibration.ignored."""
    for key, value in content.items():
        keys = ",".join([*ignored, *content])
        raise UserError(
            f"{error_start} {key}={value!r:.60}, which is not read: expected a model whose chat "
            f"template reads it, or, for a calibration set, calibration.ignored=[{keys}]"
        )


def has_answer(document: Document) -> bool:
    """Whether a document has an answer: an output, a completion, or a turn of the assistant."""
    if isinstance(document, Text):
        return document.answer_start is not None
    return any(message["role"] == "assistant" for message in document.messages)


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
        text = render_whole(
            document.messages,
            document.arguments,
            tokenizer,
            f"{document.location} holds conversations with",
            document.ignored,
        )
        return text, False
    if document.plain is None:
        assert isinstance(document, Chat)  # a text is plain
        raise UserError(
            f"{document.location} holds messages, and the model has no chat template: expected an "
            "instruction-tuned model, or a set of plain texts, or of tasks and answers"
        )
    return document.plain.text, special_tokens


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
    # `load_tokenizer` has set model.date on the tokenizer
    day = datetime.fromisoformat(getattr(tokenizer, "date", ModelConfig.date))
    try:
        with with_date(day, template):
            text: str = tokenizer.apply_chat_template(
                [{**_thoughts(message, template), **message} for message in messages],
                **{**values, **options, "tokenize": False},
            )
    except (TemplateError, TypeError) as error:
        # A template that appends the arguments of a call to a text raises TypeError, because the
        # arguments are an object.
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the model's chat template refuses messages with roles {roles}: {error}"
        ) from error
    return text


def _thoughts(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The thoughts of a message, under each of THOUGHTS that the template reads."""
    thoughts = [message[key] for key in THOUGHTS if key in message]
    read = [key for key in THOUGHTS if re.search(rf"[.'\"]{key}\b", template)]
    return dict.fromkeys(read, thoughts[0]) if thoughts else {}


def _flat_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The `arguments`, name -> value, with the items of the object TEMPLATE_ARGUMENTS in its
    place."""
    return {
        **without_keys(arguments, [TEMPLATE_ARGUMENTS]),
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
    ignored: Sequence[str] = (),
    **options: Any,
) -> str:
    """The text into which the tokenizer's chat template renders a conversation. arguments, options:
    see `render`. ignored: the keys in calibration.ignored.

    Templates ignore fields that they do not know. UserError, which begins with `error_start`, for
    each of these:

    - a text has a word that the rendered text lacks
    - an argument in TEMPLATE_ARGUMENTS is no variable of the template
    - the template renders the same text without a certain list or object
    """
    from moe_lab.models.transformers_private import template_variables

    text = render(messages, arguments, tokenizer, **options)
    flat_arguments = _flat_arguments(arguments)
    others = _unread_of_messages(messages, text, error_start)
    for key in arguments.get(TEMPLATE_ARGUMENTS, {}):
        if key not in template_variables(_template(arguments, tokenizer)):
            others[TEMPLATE_ARGUMENTS] = {key: flat_arguments[key]}
    texts = {key: value for key, value in flat_arguments.items() if isinstance(value, str)}
    others |= unread(texts, text)
    # objects with the values that the template may read
    holders = [flat_arguments, *messages]
    items = [(holder, *item) for holder in holders for item in holder.items()]
    for holder, key, value in items:
        if isinstance(value, str) or not is_content(value):
            continue
        without_value = [
            without_keys(other, [key]) if other is holder else other for other in holders
        ]
        try:
            is_read = render(without_value[1:], without_value[0], tokenizer, **options) != text
        except UserError:
            # A template that refuses the conversation without the value does read the value.
            is_read = True
        # The words of tools are not checked, because templates rewrite tools.
        if not is_read or (
            key != "tools" and missing_words(list(filter(is_content, _texts(value))), text)
        ):
            others[key] = value
    check_read(others, error_start, ignored)
    return text


def _texts(value: Any) -> list[str]:
    """All texts within a JSON value."""
    if isinstance(value, Mapping):
        return _texts(list(value.values()))
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


def _unread_of_messages(
    messages: Sequence[Mapping[str, Any]], text: str, error_start: str
) -> dict[str, Any]:
    """The key of a message, and its text, of which `text`, into which a chat template rendered the
    messages, lacks a word; {} if there is none. UserError if this text is a content."""
    contents = [
        (message["role"], key, value)
        for message in messages
        for key, value in message.items()
        if key == "content"
        or (isinstance(value, str) and (key in ("name", *THOUGHTS) or is_content(value)))
    ]
    missing = missing_words([content for _, _, content in contents], text)
    # Contents that are in `text` as they stand come last, because most likely the missing word is
    # from another content.
    contents.sort(key=lambda entry: entry[2].strip() in text)
    for role, key, content in contents:
        for word in _words(content) & missing:
            if key != "content":
                return {key: content}
            raise UserError(
                f"{error_start} role={role} content={content!r:.60}, of which the model's chat "
                f"template leaves out {word!r}: expected a set without it, or a model whose "
                "template reads it"
            )
    return {}


def missing_words(contents: Sequence[str], text: str) -> Counter[str]:
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
