"""The AST check of the Berkeley Function Calling Leaderboard (BFCL v4), for functions in Python.

Pure functions on JSON values: no code is run. A question comes with functions. The right answer is
a list of calls, in which every argument has a list of allowed values. If "" is an allowed value,
the argument may be left out.
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


def decode(answer: str, functions: Sequence[Mapping[str, Any]] = ()) -> list[Call]:
    """The calls in an answer. Raises Undecodable for an answer that is no list of calls.

    `answer` comes without its thought. `functions` are the descriptions that came with the
    question. docs/evaluation.md lists the forms of calls that are read. A <tool_call> block that
    has none of them is skipped.
    """
    answer = answer.strip()
    descriptions = _descriptions_by_name(functions)
    document = _json(answer)
    if document is not None:
        return [_call(entry) for entry in (document if isinstance(document, list) else [document])]
    if "<tool_call>" in answer:
        blocks = [_call_in_block(block, descriptions) for block in _BLOCK.findall(answer)]
        return [call for call in blocks if call is not None]
    calls = _calls_in_messages(answer, descriptions)
    if not calls:
        raise Undecodable(f"expected a call, found {answer!r:.80}")
    return calls


def _descriptions_by_name(functions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> description of the first function of that name."""
    # reversed, so that the first description replaces later ones
    return {function["name"]: function for function in reversed(functions)}


def _call_in_block(block: str, descriptions: Mapping[str, Mapping[str, Any]]) -> Call | None:
    """The call in a <tool_call> block; None for a block that is neither JSON nor a name with tagged
    arguments."""
    name = block.partition("<arg_key>")[0].strip()
    # the name of a described function alone is a call without arguments
    if "<arg_key>" not in block and name not in descriptions:
        document = _json(block)
        return None if document is None else _call(document)
    parameters = descriptions[name]["parameters"]["properties"] if name in descriptions else {}
    return Call(
        name, {key: _value(text, parameters.get(key, {})) for key, text in _ARGUMENT.findall(block)}
    )


def _value(text: str, description: Mapping[str, Any]) -> Any:
    """The value of a tagged argument. It is the `text` itself if the argument's `description`
    declares a string; otherwise the JSON or Python value that the text stands for, or the text if
    it stands for no value."""
    if TYPES.get(str(description.get("type"))) is str:
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            # the errors that literal_eval documents
            continue
    return text


def _calls_in_messages(answer: str, descriptions: Mapping[str, Any]) -> list[Call]:
    """The calls in the messages of an answer in the harmony format, where the recipient of a
    message comes before or after its channel. `descriptions`: name -> description of a function.

    Calls that are mentioned in the text of a message, such as an analysis or an argument, do not
    count. Without special tokens nothing separates a name from `json` or `commentary` after it, so
    the names of the question's functions are tried before other names. Raises Undecodable for a
    recipient after which no JSON object of arguments follows.
    """
    # longest first, because a name may begin with another name
    names = "|".join([*map(re.escape, sorted(descriptions, key=len, reverse=True)), r"[^\s<{]+?"])
    # the rest of a message's header after the recipient's prefix; group 1 is the function's name
    header = re.compile(
        rf"({names})(?:<\|channel\|>)?(?:commentary|analysis)?\s*(?:<\|constrain\|>)?(?:json)?\s*(?:<\|message\|>)?\s*"
        r"(?=\{)"
    )
    calls = []
    end = 0
    while recipient := _RECIPIENT.search(answer, end):
        refusal = Undecodable(
            f"expected a JSON object of arguments, found {answer[recipient.start('to') :]!r:.80}"
        )
        message = header.match(answer, recipient.end())
        if message is None:
            raise refusal
        try:
            arguments, end = json.JSONDecoder().raw_decode(answer, message.end())
        except (ValueError, RecursionError):
            raise refusal from None
        calls.append(Call(message[1], arguments))
    return calls


def _json(text: str) -> Any:
    """The value of a JSON text; None for a text that is not JSON, and for null."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(document: Any) -> Call:
    """The call that a JSON object describes: {"name", "arguments"} or {name: arguments}. Raises
    Undecodable for other values."""
    if not isinstance(document, dict):
        raise Undecodable(f"expected an object with a name and arguments, found {document!r:.80}")
    name = document.get("name")
    arguments = document.get("arguments")
    if len(document) == 1:
        ((name, arguments),) = document.items()
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Undecodable(f"expected a name and an object of arguments, found {document!r:.80}")
    return Call(name, arguments)


def mistake(
    answer: str | None,
    functions: Sequence[Mapping[str, Any]],
    right: Sequence[Mapping[str, Mapping[str, Any]]],
) -> str | None:
    """A sentence that says why an answer is wrong; None if the answer is right. `answer` is None if
    its thought does not end.

    `functions` are the descriptions that came with the question; `right` are the calls of a right
    answer, each {name: {argument: allowed values}}, in any order. If `right` is empty, no call
    helps to answer the question, and any call, even a malformed one, is wrong.
    """
    if answer is None:
        return "expected an answer, found a thought that does not end"
    try:
        calls = decode(answer, functions)
    except Undecodable as error:
        if right:
            return str(error)
        calls = []
    if not right:
        is_call = calls or "<tool_call>" in answer or _RECIPIENT.search(answer.strip())
        return f"expected no call, found {answer.strip()!r:.80}" if is_call else None
    if len(calls) != len(right):
        return f"expected {len(right)} calls, found {len(calls)}"
    descriptions = _descriptions_by_name(functions)
    remaining_calls = list(calls)
    for expected_call in right:
        ((name, allowed_values),) = expected_call.items()
        mistakes = []
        for index, call in enumerate(remaining_calls):
            reason = _call_mistake(call, name, allowed_values, descriptions[name]["parameters"])
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
    None if the call is right. `options`: argument -> allowed values, with "" among them for an
    argument that may be left out. `parameters`: the schema of all arguments, from the function's
    description."""
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
    """Whether the value of an argument has the type that its `description` declares and is one of
    the allowed values. An int is read as a float where a float is declared. An empty list is
    allowed where "" is. A value of another type is allowed if it equals an allowed value and has
    the type of the first one, because a right answer may have the name of a variable, which is a
    text, in place of a value."""
    declared_type = TYPES[description["type"]]
    allowed_type = _type_of_first(allowed_values)
    typed_values: list[Any] = [
        entry for entry in allowed_values if isinstance(entry, declared_type)
    ]
    if description["type"] == "float" and type(value) is int:
        value = float(value)
    value_type = type(value)
    if value_type is not declared_type:
        return value_type is allowed_type and value in allowed_values
    if not _has_element_types(value, description, allowed_values):
        return False
    # the allowed values are names of variables, not values of the declared type
    if allowed_type not in (None, declared_type):
        return value in allowed_values
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
    """The type of the first value that is not ""; None if there is no such value."""
    return next((type(value) for value in values if value != ""), None)


def _has_element_types(value: Any, description: Mapping[str, Any], options: Sequence[Any]) -> bool:
    """Whether the elements of a list have allowed types; True for a value that is no list.

    `options` are the allowed values. One of them must be a list whose first element has the type of
    every element of `value` that is not of the declared type. As in BFCL, an int element is no
    float, and if an allowed value is no list, such as "", elements of all types pass.
    """
    if not isinstance(value, list):
        return True
    declared_type = TYPES[description["items"]["type"]]
    return any(
        not isinstance(option, list)
        or all(type(element) in (declared_type, _type_of_first(option)) for element in value)
        for option in options
    )


def _normalize(value: Any) -> Any:
    """For a text: the text without spaces and , . / - _ * ^, in lower case, with " in place of '.
    Any other value unchanged."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _normalize_list(values: Iterable[Any]) -> list[Any]:
    return [_normalize(value) for value in values]


def _is_dict_allowed(value: Mapping[str, Any], option: Mapping[str, Any]) -> bool:
    """Whether the dict `value` is allowed by `option` (key -> allowed values): every key of `value`
    has an allowed value, and every key that is only in `option` has "" among its allowed values,
    that is, may be left out."""
    for key, entry in value.items():
        if key not in option or _normalize(entry) not in _normalize_list(option[key]):
            return False
    return all(key in value or "" in values for key, values in option.items())


def _is_list_allowed(value: Sequence[Any], option: Sequence[Any]) -> bool:
    """Whether the list `value` is allowed by `option`: both have the same number of elements, and
    each element of `option` allows the dict at the same index of `value`."""
    return len(value) == len(option) and all(
        isinstance(entry, dict) and isinstance(allowed, dict) and _is_dict_allowed(entry, allowed)
        for entry, allowed in zip(value, option, strict=True)
    )


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a function in the form that chat templates read. Types are named as in
    JSON schema, and the text ends with BFCL's note that the function is in Python 3."""
    description = f"{function.get('description', '')}{PYTHON_NOTE}"
    parameters = _schema(function["parameters"])
    return {
        "type": "function",
        "function": {**function, "description": description, "parameters": parameters},
    }


def _schema(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a parameter, including its inner parameters, with types named as in JSON
    schema."""
    schema = {**description, "type": SCHEMA_TYPES.get(description["type"], description["type"])}
    if "properties" in schema:
        schema["properties"] = {
            name: _schema(inner) for name, inner in schema["properties"].items()
        }
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    return schema
