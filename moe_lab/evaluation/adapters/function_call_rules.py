"""The AST check of the Berkeley Function Calling Leaderboard (BFCL v4), for functions in Python.

A question comes with functions. The right answer is a list of calls, in which every argument has a
list of allowed values. If "" is an allowed value, the argument may be left out.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
"""Type in the description of a Python function -> type of the JSON value."""
SCHEMA_TYPES: Mapping[str, str] = {
    "dict": "object",
    "float": "number",
    "any": "string",
    "tuple": "array",
}
"""Type in the description of a function -> type in JSON schema, where the two differ."""
PYTHON_NOTE = " Note that the provided function is in Python 3 syntax."
"""What BFCL adds to the description of every function in Python."""
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_ARGUMENT = re.compile(
    r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>\s*(.*?)\s*</arg_value>", re.DOTALL
)
_RECIPIENT = re.compile(
    r"(?:\A|assistant)\s*(?:<\|channel\|>)?(?:(?:commentary|analysis)\s+)?(?P<to>to=functions\.)"
)
"""The beginning of a message to a function. The first message of an answer does not name its
role."""
_IGNORED = re.compile(r"[ ,./\-_*^]")
"""Characters that do not count when texts are compared."""


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: Mapping[str, Any]


class Undecodable(ValueError):
    """Raised for a text that is no list of calls."""


def decode_calls(answer: str, functions: Sequence[Mapping[str, Any]] = ()) -> list[Call]:
    """The calls in an answer. docs/evaluation.md lists the forms of calls. Raises Undecodable for
    an answer that has none of these forms.

    `answer`: the model's text after its thought. `functions`: the descriptions of functions that
    came with the question.
    """
    answer = answer.strip()
    descriptions = _descriptions_by_name(functions)
    document = _json(answer)
    if document is not None:
        return [_call(entry) for entry in (document if isinstance(document, list) else [document])]
    if "<tool_call>" in answer:
        calls = [_call_in_block(block, descriptions) for block in _BLOCK.findall(answer)]
        return [call for call in calls if call is not None]
    message_calls = _calls_in_messages(answer, descriptions)
    if not message_calls:
        raise Undecodable(f"expected a call, found {answer!r:.80}")
    return message_calls


def _descriptions_by_name(functions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name of a function -> description."""
    # reversed, so that the first description replaces later ones
    return {function["name"]: function for function in reversed(functions)}


def _call_in_block(block: str, descriptions: Mapping[str, Mapping[str, Any]]) -> Call | None:
    """The call in a <tool_call> block: JSON, or the name of a function followed by <arg_key> and
    <arg_value> tags. None for other blocks. `descriptions`: name -> description of a function."""
    name = block.partition("<arg_key>")[0].strip()
    # a block that is just the name of a function is a call without arguments
    if "<arg_key>" not in block and name not in descriptions:
        document = _json(block)
        return None if document is None else _call(document)
    parameters = descriptions[name]["parameters"]["properties"] if name in descriptions else {}
    return Call(
        name, {key: _value(text, parameters.get(key, {})) for key, text in _ARGUMENT.findall(block)}
    )


def _value(text: str, description: Mapping[str, Any]) -> Any:
    """The value of an argument that is written as `text` in an <arg_value> tag."""
    if TYPES.get(str(description.get("type"))) is str:
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        # the errors that literal_eval documents
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return text


def _calls_in_messages(answer: str, descriptions: Mapping[str, Any]) -> list[Call]:
    """The calls in an answer in the harmony format. `descriptions`: name -> description of a
    function. Raises Undecodable if no JSON object follows a recipient.

    A call is a message with the recipient `to=functions.NAME`, whose text is a JSON object of
    arguments. The recipient may come before or after the message's channel, which is `commentary`
    or `analysis`.
    """
    # Without special tokens such as `<|channel|>`, nothing separates the name from a following
    # `json`. So known names are tried first, longest first.
    names = "|".join([*map(re.escape, sorted(descriptions, key=len, reverse=True)), r"[^\s<{]+?"])
    # the rest of a message's header after `to=functions.`; group 1 is the function's name
    header = re.compile(
        rf"({names})(?:<\|channel\|>)?(?:commentary|analysis)?\s*(?:<\|constrain\|>)?(?:json)?\s*(?:<\|message\|>)?\s*"
        r"(?=\{)"
    )
    calls = []
    end = 0
    while recipient := _RECIPIENT.search(answer, end):
        error = Undecodable(
            f"expected a JSON object of arguments, found {answer[recipient.start('to') :]!r:.80}"
        )
        message = header.match(answer, recipient.end())
        if message is None:
            raise error
        try:
            arguments, end = json.JSONDecoder().raw_decode(answer, message.end())
        except (ValueError, RecursionError):
            raise error from None
        calls.append(Call(message[1], arguments))
    return calls


def _json(text: str) -> Any:
    """The value of a JSON text; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(document: Any) -> Call:
    """The call that a JSON value describes: {"name": name, "arguments": {...}} or {name:
    {...}}. Raises Undecodable for other values."""
    if not isinstance(document, dict):
        raise Undecodable(f"expected an object with a name and arguments, found {document!r:.80}")
    name = document.get("name")
    arguments = document.get("arguments")
    if len(document) == 1:
        ((name, arguments),) = document.items()
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Undecodable(f"expected a name and an object of arguments, found {document!r:.80}")
    return Call(name, arguments)


def answer_mistake(
    answer: str | None,
    functions: Sequence[Mapping[str, Any]],
    right_calls: Sequence[Mapping[str, Mapping[str, Any]]],
) -> str | None:
    """A sentence that says why an answer is wrong; None if the answer is right.

    `answer`: the model's text after its thought, or None if the thought does not end. `functions`:
    the descriptions of functions that came with the question. `right_calls`: the calls of a right
    answer, in any order, each {name: {argument: allowed values}}. If `right_calls` is empty, any
    call is wrong.
    """
    if answer is None:
        return "expected an answer, found a thought that does not end"
    try:
        calls = decode_calls(answer, functions)
    except Undecodable as error:
        if right_calls:
            return str(error)
        calls = []
    if not right_calls:
        has_call = calls or "<tool_call>" in answer or _RECIPIENT.search(answer.strip())
        return f"expected no call, found {answer.strip()!r:.80}" if has_call else None
    if len(calls) != len(right_calls):
        return f"expected {len(right_calls)} calls, found {len(calls)}"
    descriptions = _descriptions_by_name(functions)
    remaining_calls = list(calls)
    for expected_call in right_calls:
        ((name, options),) = expected_call.items()
        mistakes = []
        for index, call in enumerate(remaining_calls):
            reason = _call_mistake(call, name, options, descriptions[name]["parameters"])
            if reason is None:
                del remaining_calls[index]
                break
            mistakes.append(reason)
        else:  # no remaining call is the expected call
            return "; ".join(dict.fromkeys(mistakes))
    return None


def _call_mistake(
    call: Call, name: str, options: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any]
) -> str | None:
    """A sentence that says why `call` is not a call of the function `name` with allowed arguments;
    None if the call is right. `options`: argument -> allowed values. `parameters`: the schema of
    all arguments."""
    if call.name != name:
        return f"expected {name}, found {call.name}"
    for argument in parameters.get("required", ()):
        if argument not in call.arguments:
            return f"{name}: {argument} is required"
    for argument, value in call.arguments.items():
        description = parameters["properties"].get(argument)
        if description is None or argument not in options:
            return f"{name}: {argument} is not expected"
        if not _is_allowed(value, description, options[argument]):
            return (
                f"{name}: {argument}={value!r:.80} is not one of {list(options[argument])!r:.200}"
            )
    for argument, values in options.items():
        if argument not in call.arguments and "" not in values:
            return f"{name}: {argument} is missing"
    return None


def _is_allowed(value: Any, description: Mapping[str, Any], allowed_values: Sequence[Any]) -> bool:
    """Whether BFCL accepts the `value` of an argument.

    For some arguments, a right answer passes a variable. Then the allowed values are names of
    variables, which are texts, whatever type the `description` declares."""
    declared_type = TYPES[description["type"]]
    allowed_type = _type_of_first(allowed_values)
    if description["type"] == "float" and type(value) is int:
        value = float(value)
    value_type = type(value)
    if value_type is not declared_type:
        return value_type is allowed_type and value in allowed_values
    if not _has_element_types(value, description, allowed_values):
        return False
    # the allowed values are names of variables
    if allowed_type not in (None, declared_type):
        return value in allowed_values
    typed_values: list[Any] = [
        allowed for allowed in allowed_values if isinstance(allowed, declared_type)
    ]
    if declared_type is dict:
        return any(_is_dict_allowed(value, allowed) for allowed in typed_values)
    if declared_type is list and TYPES[description["items"]["type"]] is dict:
        return any(_is_list_allowed(value, allowed) for allowed in typed_values)
    if declared_type is list:
        return _normalize_list(value) in [_normalize_list(allowed) for allowed in typed_values] or (
            not value and "" in allowed_values
        )
    return _normalize(value) in _normalize_list(allowed_values)


def _type_of_first(values: Iterable[Any]) -> type | None:
    """The type of the first value other than ""; None if all values are ""."""
    return next((type(value) for value in values if value != ""), None)


def _has_element_types(
    value: Any, description: Mapping[str, Any], allowed_values: Sequence[Any]
) -> bool:
    """Whether BFCL accepts the types of the elements of a list; True for a value that is no list.
    One of the allowed values must accept all elements."""
    if not isinstance(value, list):
        return True
    declared_type = TYPES[description["items"]["type"]]
    return any(
        not isinstance(allowed, list)
        or all(type(element) in (declared_type, _type_of_first(allowed)) for element in value)
        for allowed in allowed_values
    )


def _normalize(value: Any) -> Any:
    """A text as BFCL compares it; any other value unchanged."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _normalize_list(values: Iterable[Any]) -> list[Any]:
    return [_normalize(value) for value in values]


def _is_dict_allowed(value: Mapping[str, Any], option: Mapping[str, Any]) -> bool:
    """Whether the dict `value` is allowed by `option` (key -> allowed values)."""
    for key, entry in value.items():
        if key not in option or _normalize(entry) not in _normalize_list(option[key]):
            return False
    return all(key in value or "" in values for key, values in option.items())


def _is_list_allowed(value: Sequence[Any], option: Sequence[Any]) -> bool:
    """Whether each dict in `value` is allowed by the dict at the same index in `option`."""
    return len(value) == len(option) and all(
        isinstance(entry, dict) and isinstance(allowed, dict) and _is_dict_allowed(entry, allowed)
        for entry, allowed in zip(value, option, strict=True)
    )


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Convert BFCL's `function` to a tool for chat templates, with types named as in JSON
    schema."""
    description = f"{function.get('description', '')}{PYTHON_NOTE}"
    parameters = _schema(function["parameters"])
    return {
        "type": "function",
        "function": {**function, "description": description, "parameters": parameters},
    }


def _schema(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a parameter, with types named as in JSON schema."""
    schema = {**description, "type": SCHEMA_TYPES.get(description["type"], description["type"])}
    if "properties" in schema:
        schema["properties"] = {
            name: _schema(inner) for name, inner in schema["properties"].items()
        }
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    return schema
