"""The AST check of the Berkeley Function Calling Leaderboard (BFCL v4), for functions in Python.

A question comes with functions. The right answer is a list of calls, in which every argument has a
list of allowed values. If "" is an allowed value, the argument may be left out.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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
_RECIPIENT = (
    r"(?:\A|assistant)\s*(?:<\|channel\|>)?(?:(?:commentary|analysis)\s+)?(?P<to>to=functions\.)"
)
"""The beginning of a message to a function in the harmony format. The first message of an answer
does not name its role."""
_MARK = re.compile(
    rf"""<tool_call>\s*(?:<function=|function<tool_sep>)?
    |<function=
    |<tool_calls>\s*(?=\[)
    |<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?
    |<\|tool_call_begin\|>(?:functions\.)?
    |functions\.(?=[^\s:{{]{{1,100}}:\d)
    |```\w*\s*(?=[{{\[])
    |{_RECIPIENT}""",
    re.VERBOSE,
)
"""What precedes a call, which begins with the name of its function or is JSON."""
_SEPARATORS = r"""(?:\s|>|json|```json|:\d+|commentary|analysis|<｜tool▁sep｜>|<tool_sep>
    |<\|(?:tool_call_argument_begin|channel|constrain|message)\|>)*"""
"""Text between the name of a function and its arguments."""
_TAG = re.compile(r"\s*<(?:arg_key>|parameter=)([^<>]*)(?:</arg_key>\s*<arg_value>|>)")
"""What precedes the value of an argument; group 1 is the name of the argument."""
_TAG_END = re.compile(r"</(?:arg_value|parameter)>")
_CLOSING = re.compile(r"\s*</")
_IGNORED = re.compile(r"[ ,./\-_*^]")
"""Characters that do not count when texts are compared."""
_DECODER = json.JSONDecoder()
_PARSE_ERRORS = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError, AttributeError)
"""Errors of a text that is no JSON or no Python literal."""
Description = Mapping[str, Any]
"""BFCL's description of a function or of a parameter."""
Options = Mapping[str, Sequence[Any]]
"""Argument of a call, or key of a dict -> allowed values."""
RightCall = Mapping[str, Options]
"""A right call: one entry, name of the function -> allowed arguments."""


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: Mapping[str, Any]


class Undecodable(ValueError):
    """Raised for a text that is no list of calls."""


def decode_calls(answer: str, functions: Sequence[Description]) -> list[Call]:
    """The calls in an answer. docs/evaluation.md lists the forms of calls. Raises Undecodable for
    an answer that has none of these forms.

    The time is linear in the length of the answer. `answer`: the model's text after its thought.
    `functions`: the descriptions of functions that came with the question.
    """
    # marks around the calls of Llama models
    answer = re.sub(r"\A<\|python_\w+\|>|<\|python_\w+\|>\Z", "", answer.strip())
    for read in (_json_calls, _python_calls):
        calls = read(answer)
        if calls is not None:
            return calls
    return _marked_calls(answer, _descriptions_by_name(functions))


def _descriptions_by_name(functions: Sequence[Description]) -> dict[str, Description]:
    """Name of a function -> description."""
    # reversed, so that the first description replaces later ones
    return {function["name"]: function for function in reversed(functions)}


def _json_calls(text: str) -> list[Call] | None:
    """The calls in a text that consists of JSON values; None for another text."""
    documents: list[Any] = []
    end = 0
    try:
        while end < len(text) or not text:
            document, end = _DECODER.raw_decode(text, end)
            documents += document if isinstance(document, list) else [document]
            while text[end : end + 1] in (" ", "\n", ";", ","):
                end += 1
    except (ValueError, RecursionError):
        return None
    return [_call(document) for document in documents]


def _python_calls(text: str) -> list[Call] | None:
    """The calls in a Python list such as [f(x=1), g()], with or without brackets; None for another
    text."""
    calls = []
    try:
        body: Any = ast.parse(text if text.startswith("[") else f"[{text}]", mode="eval").body
        for node in body.elts:
            if node.args:  # values without names
                return None
            arguments = {str(entry.arg): _literal(entry.value) for entry in node.keywords}
            calls.append(Call(ast.unparse(node.func), arguments))
    except _PARSE_ERRORS:
        return None
    return calls or None


def _marked_calls(answer: str, descriptions: Mapping[str, Description]) -> list[Call]:
    """The calls in an answer that marks them. A mark without a call is ignored, unless it is the
    header of a message. `descriptions`: name -> description of a function."""
    # Without the special tokens of the harmony format, nothing separates the name from a following
    # `json`. So known names are tried first, longest first.
    known_names = map(re.escape, sorted(descriptions, key=len, reverse=True))
    names = "|".join([*known_names, r"[^\s<>{}\[\]:`]{1,100}?"])
    header_pattern = re.compile(rf"({names})?{_SEPARATORS}(?=[{{[<]|\Z)", re.VERBOSE)
    calls = []
    end = 0
    while mark := _MARK.search(answer, end):
        header = header_pattern.match(answer, mark.end())
        name = header and header[1]
        end = header.end() if header else mark.end()
        document = None
        with suppress(ValueError, RecursionError):
            document, end = _DECODER.raw_decode(answer, end)
        if name and isinstance(document, dict):
            calls.append(Call(name, document))
        elif mark["to"]:
            text = answer[mark.start("to") :]
            raise Undecodable(f"expected a JSON object of arguments, found {text!r:.80}")
        elif document is not None:
            calls += map(_call, document if isinstance(document, list) else [document])
        elif name:
            arguments, end = _tagged_arguments(answer, end, descriptions.get(name))
            # a name alone is a call of a known function only
            if arguments or name in descriptions:
                calls.append(Call(name, arguments))
    if not end:
        raise Undecodable(f"expected a call, found {answer!r:.80}")
    return calls


def _tagged_arguments(
    answer: str, start: int, description: Description | None
) -> tuple[dict[str, Any], int]:
    """(arguments in the tags from the index `start` on, index after them). `description`: that of
    the function; None for an unknown function. Raises Undecodable unless a closing tag follows."""
    properties = description["parameters"]["properties"] if description else {}
    arguments = {}
    end = start
    while tag := _TAG.match(answer, end):
        key = tag[1].strip()
        tag_end = _TAG_END.search(answer, tag.end())
        if tag_end is None:
            break
        text = answer[tag.end() : tag_end.start()].strip()
        arguments[key] = _value(text, properties.get(key, {}))
        end = tag_end.end()
    if not _CLOSING.match(answer, end):
        raise Undecodable(f"expected the end of a call, found {answer[end:]!r:.80}")
    return arguments, end


def _value(text: str, description: Description) -> Any:
    """The value of an argument that is written as `text` in tags."""
    if TYPES.get(str(description.get("type"))) is str:
        return text
    for parse in (json.loads, _literal):
        with suppress(*_PARSE_ERRORS):
            return parse(text)
    return text


def _literal(literal: Any) -> Any:
    """The value of a Python literal, a text or a node, if JSON can represent it."""
    return json.loads(json.dumps(ast.literal_eval(literal)))


def _call(document: Any) -> Call:
    """The call that a JSON value describes: {"name": name, "arguments": {...}}, with "parameters"
    in place of "arguments", or {name: {...}}. Raises Undecodable for other values."""
    if not isinstance(document, dict):
        raise Undecodable(f"expected an object with a name and arguments, found {document!r:.80}")
    name = document.get("name")
    arguments = document.get("arguments", document.get("parameters"))
    if len(document) == 1:
        ((name, arguments),) = document.items()
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Undecodable(f"expected a name and an object of arguments, found {document!r:.80}")
    return Call(name, arguments)


def answer_mistake(
    answer: str | None,
    functions: Sequence[Description],
    right_calls: Sequence[RightCall],
) -> str | None:
    """A sentence that says why an answer is wrong; None if the answer is right.

    `answer`: the model's text after its thought, or None if the thought does not end. `functions`:
    the descriptions of functions that came with the question. `right_calls`: the calls of a right
    answer, in any order, each {name: {argument: allowed values}}. If `right_calls` is empty, any
    call is wrong.
    """
    if answer is None:
        return "expected an answer, found a thought that does not end"
    calls = []
    try:
        calls = decode_calls(answer, functions)
        if right_calls:
            return _calls_mistake(calls, functions, right_calls)
    except Undecodable as error:
        if right_calls:
            return str(error)
    except RecursionError:
        return "expected values that are nested less deeply"
    if calls or _looks_like_call(answer, functions):
        return f"expected no call, found {answer.strip()!r:.80}"
    return None


def _looks_like_call(answer: str, functions: Sequence[Description]) -> bool:
    """Whether an answer contains a call in any form, complete or not: marks of calls, or the name
    of one of the `functions` where calls have it."""
    names = "|".join(re.escape(function["name"]) for function in functions) or "(?!)"
    # name(argument=, name("value", name{"argument":, {"tool": "name"}, {"name":, Action: name
    forms = rf"""<[^<>\s]*(?:tool.?call|function|invoke|start_action|\|action)
        |\[TOOL_CALLS|{_RECIPIENT}
        |["'](?:arguments|parameters)["']\s*:
        |(?<![\w.])(?:{names})\s*\(\s*(?:\w+\s*=|["'\d\[{{-])
        |(?<![\w.])(?:{names})[^\w\s{{]{{0,3}}\s*(?:```(?:json)?\s*)?{{\s*["']
        |["']\s*:\s*["'](?:{names})["']
        |{{\s*["'](?:{names})["']\s*:
        |\A(?:{names})\s*\(.*\)\Z
        |\baction:\s*(?:{names})"""
    return re.search(forms, answer.strip(), re.IGNORECASE | re.VERBOSE) is not None


def _calls_mistake(
    calls: Sequence[Call],
    functions: Sequence[Description],
    right_calls: Sequence[RightCall],
) -> str | None:
    """A sentence that says why `calls` are not the `right_calls`; None if they are."""
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


def _call_mistake(call: Call, name: str, options: Options, parameters: Description) -> str | None:
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


def _is_allowed(value: Any, description: Description, allowed_values: Sequence[Any]) -> bool:
    """Whether BFCL accepts the `value` of an argument.

    For some arguments, a right answer passes a variable. Then the allowed values are names of
    variables, which are texts, whatever type the `description` declares."""
    declared_type = TYPES[description["type"]]
    allowed_type = _type_of_first(allowed_values)
    value_type = type(value)
    if description["type"] == "float" and value_type is int:
        value_type = float
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
        return any(
            len(value) == len(allowed) and all(map(_is_dict_allowed, value, allowed))
            for allowed in typed_values
        )
    if declared_type is list:
        return _normalize_list(value) in [_normalize_list(allowed) for allowed in typed_values] or (
            not value and "" in allowed_values
        )
    return _normalize(value) in _normalize_list(allowed_values)


def _type_of_first(values: Iterable[Any]) -> type | None:
    """The type of the first value other than ""; None if all values are ""."""
    return next((type(value) for value in values if value != ""), None)


def _has_element_types(value: Any, description: Description, allowed_values: Sequence[Any]) -> bool:
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


def _is_dict_allowed(value: Any, options: Options) -> bool:
    """Whether `value` is a dict with allowed values. `options`: those of an allowed dict."""
    if not isinstance(value, dict) or not isinstance(options, dict) or value.keys() - options:
        return False
    return all(
        _normalize(value[key]) in _normalize_list(allowed) if key in value else "" in allowed
        for key, allowed in options.items()
    )


def tool(function: Description) -> dict[str, Any]:
    """Convert BFCL's `function` to a tool for chat templates, with types named as in JSON
    schema."""
    description = f"{function.get('description', '')}{PYTHON_NOTE}"
    parameters = _schema(function["parameters"])
    return {
        "type": "function",
        "function": {**function, "description": description, "parameters": parameters},
    }


def _schema(description: Description) -> dict[str, Any]:
    """The description of a parameter, with types named as in JSON schema."""
    schema = {**description, "type": SCHEMA_TYPES.get(description["type"], description["type"])}
    if "properties" in schema:
        schema["properties"] = {
            name: _schema(inner) for name, inner in schema["properties"].items()
        }
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    return schema
