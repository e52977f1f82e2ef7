"""Function calling: BFCL's AST check, files in its format, and the way from a question to a
table."""

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engines import (
    ScriptedEngine,
    assert_only_answers_are_graded,
    evaluate_into,
    protocol,
    samples,
    with_chat_template,
)
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.config import BenchmarkConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy
from moe_lab.evaluation.adapters import function_call_rules as rules
from moe_lab.evaluation.adapters.function_call_rules import Call, Undecodable, tool
from moe_lab.evaluation.answers import render_prompt
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import benchmark_errors
from moe_lab.evaluation.harnesses import function_calls
from moe_lab.evaluation.items import answer_after_thought
from moe_lab.models.config_json import check_chat_template

EXAMPLE = Path(__file__).parents[2] / "examples/function_calls"
ALLOWED = Policy()


def decode(text: str, functions: Sequence[Mapping[str, Any]] = ()) -> list[Call]:
    return rules.decode_calls(answer_after_thought(text) or "", functions)


def mistake(text: str, functions: Sequence[Any], right: Sequence[Any]) -> str | None:
    return rules.answer_mistake(answer_after_thought(text), functions, right)


def described(type_: str, **more: Any) -> dict[str, Any]:
    return {"type": type_, "description": "", **more}


def function(
    name: str = "f", required: Sequence[str] = ("x",), **properties: Any
) -> dict[str, Any]:
    schema = {"type": "dict", "properties": properties, "required": list(required)}
    return {"name": name, "description": "Does it.", "parameters": schema}


def written(*calls: tuple[str, Mapping[str, Any]]) -> str:
    """Calls in the form in which Qwen models write them."""
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


# Rule 1: the output decodes to a list of calls.

TWO = [Call("f", {"x": 1}), Call("g.h", {})]


@pytest.mark.parametrize(
    "text",
    [
        "I call both.\n" + written(("f", {"x": 1}), ("g.h", {})) + "\nDone.",
        "<think>\n"
        + written(("wrong", {}))
        + "\n</think>\n\n"
        + written(("f", {"x": 1}), ("g.h", {})),
        written(("f", {"x": 1})) + "<tool_call>{not JSON}</tool_call>" + written(("g.h", {})),
        '[{"name": "f", "arguments": {"x": 1}}, {"name": "g.h", "arguments": {}}]',
        ' [{"f": {"x": 1}}, {"g.h": {}}]\n',
    ],
)
def test_calls_are_decoded(text: str) -> None:
    assert decode(text) == TWO
    assert decode('{"name": "f", "arguments": {"x": 1}}') == decode('{"f": {"x": 1}}') == TWO[:1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        '["f"]',
        '{"error": "no function helps"}',
        "[" * 100_000,
    ],
)
def test_malformed_calls_are_wrong_and_count_as_no_call(text: str) -> None:
    with pytest.raises(Undecodable):
        decode(text)
    assert mistake(text, [function(x=described("integer"))], [{"f": {"x": [1]}}])
    assert mistake(text, [function(x=described("integer"))], []) is None


WEATHER = [function("get_weather", ("city",), city=described("string")), function("math.area", ())]
CALLS = [
    '{"get_weather": {"city": "Paris"}}',
    'commentary to=functions.get_weather json{"city": ',
    '<tool_call>{"name": "get_wea',
    "<tool_call>get_weather\n<arg_key>city",
    'get_weather(city="Paris")!',
    "I call get_weather('Paris').",
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
    'get_weather{"city": "Paris"}',
    '<invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>',
    '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "```tool_code\nprint(get_weather(city='Paris'))\n```",
    "```python\nget_weather(city='Paris')\n```",
    'Action: get_weather\nAction Input: {"city": "Paris"}',
    'It is {"tool": "get_weather", "input": {"city": "Par',
    'It is {"get_weather": {"city": ',
    '{"name": "square_area", "arguments": {"side": ',
    "square_area(side=5)",
    "get_weather(city)",
    "<function=get_wea",
    "<｜tool▁call▁begin｜>get",
]
SPEECH = [
    "None of the functions helps.",
    "[]",
    "get_weather(city) is of no use here.",
    "I cannot call get_weather(city) for the area of a square.",
    "The functions `get_weather` and `math.area` are of no use: it is 25 (5*5).",
    "- get_weather: gives the weather\n- math.area: gives an area",
    "```python\nprint(5 * 5)\n```",
    "Is it 3<fraction?",
    '```json\n{"area": 25}\n```',
    'I would need a function such as `square_area(side)`, or {"name": "Paris"}.',
]


@pytest.mark.parametrize("text", CALLS + SPEECH)
def test_malformed_calls_are_no_abstention(
    text: str,
) -> None:
    assert (mistake(text, WEATHER, []) is None) is (text in SPEECH)


DECLARED = [
    function(
        "f",
        x=described("integer"),
        y=described("string"),
        z=described("array", items=described("string")),
    ),
    function("f_json"),
    function("g.h"),
]


def in_tags(name: str, arguments: Mapping[str, str], gap: str = "\n") -> str:
    """A call as the chat template of GLM-4.5 writes it; without gaps, as that of GLM-4.7 does."""
    pairs = [
        f"<arg_key>{key}</arg_key>{gap}<arg_value>{text}</arg_value>{gap}"
        for key, text in arguments.items()
    ]
    return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize("gap", ["\n", ""])
def test_tagged_arguments_have_the_type_that_the_function_declares(gap: str) -> None:
    arguments = {"x": "5", "y": "5", "z": '["a", "5"]', "other": "true"}
    text = "<think>\n</think>\n" + in_tags("f", arguments, gap) + "\n" + in_tags("g.h", {}, gap)
    right = [Call("f", {"x": 5, "y": "5", "z": ["a", "5"], "other": True}), Call("g.h", {})]
    assert decode(text, DECLARED) == right
    assert decode(in_tags("f", {"x": "n", "z": "['a']"}), DECLARED) == [
        Call("f", {"x": "n", "z": ["a"]})
    ]
    assert decode(in_tags("unknown", {"x": "5"}), DECLARED) == [Call("unknown", {"x": 5})]
    assert decode("<tool_call>unknown</tool_call>", DECLARED) == []


CODER = "<function=f>\n<parameter=x>\n5\n</parameter>\n<parameter=y>\n5\n</parameter>\n</function>"
JSON = '{"x": 5, "y": "5"}'
FORMS = {
    "Qwen3-Coder": f"<tool_call>\n{CODER}\n</tool_call>",
    "Qwen3-Coder without a block": f"I call it.\n{CODER}\n</tool_call>",
    "DeepSeek-V3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{JSON}",
    "DeepSeek-V3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{JSON}\n```",
    "Kimi-K2": f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{JSON}",
    "Kimi-K2 without special tokens": f"functions.f:0{JSON}",
    "Hunyuan-A13B": f'Yes:\n<tool_calls>[{{"name": "f", "arguments": {JSON}}}]</tool_calls>',
    "Hunyuan": f"<tool_calls><tool_call>function<tool_sep>f\n```json\n{JSON}\n```</tool_call>",
    "Hy3": "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>\n"
    "<arg_key>y</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n</tool_calls>",
    "Llama 3.1": f'<|python_tag|>{{"name": "f", "parameters": {JSON}}}',
    "Llama 3.2": '[f(x=5, y="5")]',
    "Llama 4": "<|python_start|>f(x=5, y='5')<|python_end|>",
    "Llama, own functions": f"<function=f>{JSON}</function>",
    "fence": f'Here:\n```json\n[{{"name": "f", "arguments": {JSON}}}]\n```\nDone.',
    "fence without a language": f'```\n{{"f": {JSON}}}\n```',
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_calls_are_read_in_the_forms_of_model_families(text: str) -> None:
    right = [{"f": {"x": [5], "y": ["5"], "z": [""]}}]
    assert mistake(text, DECLARED, right) is None
    assert mistake(text, DECLARED, [])
    if not text.startswith(("<|python_", "[f(")):
        assert mistake(f"{text}\n{text}", DECLARED, 2 * right) is None
    for end in range(3, text.index("5")):
        assert mistake(text[:end], DECLARED, right), "an incomplete call"
    call = json.dumps({"name": "f", "arguments": {"x": 1, "y": text}})
    quoting = f"<tool_call>{call}</tool_call>\n{DRAFT}"
    assert decode(quoting, DECLARED)[0].arguments["y"] == text


PIECES = [*FORMS.values(), *CALLS, "<tool_call>", '{"x": "', "[", "(", "9" * 400, "0x", "f"]
PIECES += [
    "</parameter>",
    "<arg_key>",
    "```",
    "'",
    "\\",
    "\x00",
    "\ud800",
    " ",
    "assistant to=functions.",
]


@given(st.lists(st.sampled_from(PIECES), max_size=6), st.integers(0, 60))
def test_every_text_is_graded(pieces: list[str], start: int) -> None:
    text = "".join(pieces)[start:]
    for right in ([{"f": {"x": [5], "y": [""]}}], []):
        assert isinstance(mistake(text, DECLARED, right), str | None)


@pytest.mark.parametrize(
    "piece",
    [*PIECES[-15:], "json", "<tool_call>{", "functions.", FORMS["Hy3"], *CALLS[-6:-4]],
)
@pytest.mark.parametrize(
    "start", ["", "f ", "<tool_call>f ", "assistant to=functions.f", "<function=f>"]
)
def test_time_is_linear_in_the_length_of_an_answer(start: str, piece: str) -> None:
    """100 KB take well under a second, and hours if the time is quadratic."""
    text = start + piece * (100_000 // len(piece)) + "!"
    began = time.process_time()
    mistake(text, DECLARED, [{"f": {"x": [5]}}])
    mistake(text, DECLARED, [])
    assert time.process_time() - began < 3


LONG_VALUES = ["9" * 400, "1e999", "NaN", "9" * 5000, "0x" + "f" * 5000]
LONG_VALUES += ["[" * depth + "]" * depth for depth in range(100, 1100, 50)]


@pytest.mark.parametrize("text", LONG_VALUES, ids=range(len(LONG_VALUES)))
def test_long_numbers_and_deeply_nested_values_are_graded(text: str) -> None:
    for call in (f'{{"f": {{"x": {text}}}}}', f"[f(x={text})]", in_tags("f", {"x": text}), text):
        assert mistake(call, [function(x=described("float"))], [{"f": {"x": [5.0]}}])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.{name} json<|message|>",
        "<|channel|>commentary to=functions.{name}<|message|>",
        " to=functions.{name}<|channel|>commentary json<|message|>",
        " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ["f", "f_json", "g.h", "unknown"])
def test_messages_to_functions_are_calls(header: str, special: bool, name: str) -> None:
    """The forms in the description of the harmony format, with its special tokens and as tokenizers
    leave them out."""
    thought = "<|channel|>analysis<|message|>I need {it}.<|end|><|start|>assistant"
    text = thought + header.replace("{name}", name) + '{"x": {"y": "}"}}<|call|>'
    if not special:
        text = re.sub(r"<\|\w+\|>", "", text)
    assert decode(text, DECLARED) == [Call(name, {"x": {"y": "}"}})]


INSIDE = 'to=functions.f {"x": 1}'


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("said", [INSIDE, f"<|start|>assistant<|channel|>commentary {INSIDE}"])
def test_only_the_header_of_a_message_makes_it_a_call(said: str, special: bool) -> None:
    """Neither an argument nor an analysis that says how calls are written is one."""
    start = "<|start|>assistant<|channel|>commentary to=functions.g.h <|constrain|>json<|message|>"
    thought = f"<|channel|>analysis<|message|>We call {INSIDE}.<|end|>"
    text = thought + 2 * (start + json.dumps({"y": said}) + "<|call|>")
    if not special:
        text, said = (re.sub(r"<\|\w+\|>", "", part) for part in (text, said))
    assert decode(text, DECLARED) == 2 * [Call("g.h", {"y": said})]
    final = thought + "<|start|>assistant<|channel|>final<|message|>No function helps."
    assert mistake(final, DECLARED, []) is None
    assert mistake(final, DECLARED, [{"f": {"x": [1]}}])


@pytest.mark.parametrize(
    "content", ['<|constrain|>code<|message|>{"x": 5}', ' code{"x": 5}', "<|message|>f(5)", ""]
)
def test_call_that_is_not_json_is_no_call_with_a_reason(content: str) -> None:
    call = '<|channel|>commentary to=functions.f <|message|>{"x": 5}<|call|><|start|>assistant'
    for prefix in ("", call):
        with pytest.raises(Undecodable, match=r"JSON object of arguments, found .to=functions.f"):
            decode(f"{prefix}<|channel|>commentary to=functions.f{content}", DECLARED)


DRAFT = written(("f", {"x": 1}))


# Rules 2 and 3: the number of calls, in any order, and the names.

PLAY = [
    {"play": {"artist": [name], "minutes": [count]}}
    for name, count in (("Taylor Swift", 20), ("Maroon 5", 15))
]
PLAYER = function(
    "play", ("artist", "minutes"), artist=described("string"), minutes=described("integer")
)
TAYLOR = ("play", {"artist": "Taylor Swift", "minutes": 20})
MAROON = ("play", {"artist": "Maroon 5", "minutes": 15})
X = described("integer")
GCD_OR_LCM = [function("math.gcd", x=X), function("math.lcm", x=X)]
XYZ = [function(x=X, y=X, z=X)]


@pytest.mark.parametrize(
    ("functions", "right", "calls", "is_right"),
    [
        ([PLAYER], PLAY, [TAYLOR, MAROON], True),
        ([PLAYER], PLAY, [MAROON, TAYLOR], True),
        ([PLAYER], PLAY, [TAYLOR], False),
        ([PLAYER], PLAY, [TAYLOR, MAROON, MAROON], False),
        # 5 == 5.0 in Python
        ([function(x=X)], [{"f": {"x": [5]}}] * 2, [("f", {"x": 5.0}), ("f", {"x": 5})], False),
        (GCD_OR_LCM, [{"math.lcm": {"x": [4]}}], [("math.lcm", {"x": 4})], True),
        (GCD_OR_LCM, [{"math.lcm": {"x": [4]}}], [("math.gcd", {"x": 4})], False),
        (GCD_OR_LCM, [{"math.lcm": {"x": [4]}}], [("math_lcm", {"x": 4})], False),
        (XYZ, [{"f": {"x": [1], "y": [2, ""]}}], [("f", {"x": 1, "y": 2})], True),
        (XYZ, [{"f": {"x": [1], "y": [2, ""]}}], [("f", {"x": 1})], True),  # y may be left out
        (XYZ, [{"f": {"x": [1], "y": [2, ""]}}], [("f", {"y": 2})], False),  # x is required
        # the answer does not allow z
        (XYZ, [{"f": {"x": [1], "y": [2, ""]}}], [("f", {"x": 1, "z": 3})], False),
        # free in the schema, not in the answer
        (XYZ, [{"f": {"x": [1], "y": [2]}}], [("f", {"x": 1})], False),
        (XYZ, [{"f": {"x": [1, ""]}}], [("f", {})], False),  # required, whatever the answer says
    ],
)
def test_calls_and_parameters(
    functions: list[Any], right: list[Any], calls: list[Any], is_right: bool
) -> None:
    assert (mistake(written(*calls), functions, right) is None) is is_right


# Rules 5 and 6: types and values.

STRING = described("string")
INTEGER = described("integer")
DICT = described("dict")
STRINGS = described("array", items=STRING)
LIST_OF_DICTS = described("array", items=DICT)
OF_DICT = [{"k": ["ab"], "m": [1, ""]}]


@pytest.mark.parametrize(
    ("value", "declared", "allowed", "right"),
    [
        (5, described("float"), [5.0], True),
        (5.0, INTEGER, [5], False),
        (True, INTEGER, [1], False),
        (1, described("boolean"), [True], False),
        ("5", INTEGER, [5], False),
        ("n", INTEGER, ["n", ""], True),  # a variable: the type of the answer, not of the schema
        ("N", INTEGER, ["n"], False),  # and then letter by letter
        ("ab", STRING, [5, "A b"], False),  # the first allowed value says which type answers have
        ("newyork ny", STRING, ["New York, NY."], True),
        ("a/b-c_d*e^f", STRING, ["abcdef"], True),
        ("it's", STRING, ['it"s'], True),
        ("New Jersey", STRING, ["New York"], False),
        ("x", described("any"), ["X"], True),
        (["a", "B."], STRINGS, [["A", "b"]], True),
        (["b", "a"], STRINGS, [["a", "b"]], False),
        (["b", "a"], STRINGS, [["a", "b"], ["b", "a"]], True),
        ([1, 2], described("tuple", items=INTEGER), [[1, 2]], True),
        ([1.0, 2.0], described("array", items=INTEGER), [[1, 2]], False),
        # exact inside lists
        ([1, 2], described("array", items=described("float")), [[1.0, 2.0]], False),
        ({"k": "A b"}, DICT, OF_DICT, True),
        ({"m": 1}, DICT, OF_DICT, False),
        ({"k": "ab", "z": 1}, DICT, OF_DICT, False),
        ({"k": "ab"}, DICT, ["", {"k": ["x"]}, {"k": ["ab"]}], True),
        ([{"k": 1}, {"k": 2}], LIST_OF_DICTS, [[{"k": [1]}, {"k": [2]}]], True),
        ([{"k": 2}, {"k": 1}], LIST_OF_DICTS, [[{"k": [1]}, {"k": [2]}]], False),
        ([{"k": 1}], LIST_OF_DICTS, [[{"k": [1]}, {"k": [2]}]], False),
        ([1], LIST_OF_DICTS, ["", [{"k": [1]}]], False),
    ],
)
def test_types_and_values(
    value: Any, declared: Mapping[str, Any], allowed: list[Any], right: bool
) -> None:
    """Of the only argument of a function."""
    error = mistake(written(("f", {"x": value})), [function(x=declared)], [{"f": {"x": allowed}}])
    assert (error is None) is right


def test_tools_have_the_types_of_json_schema_and_a_note_on_the_language() -> None:
    inner = described("tuple", items=described("float"))
    nested = tool(function(x=described("dict", properties={"y": inner}), z=described("any")))
    assert nested["type"] == "function"
    assert nested["function"]["name"] == "f"
    assert (
        nested["function"]["description"]
        == "Does it. Note that the provided function is in Python 3 syntax."
    )
    schema = nested["function"]["parameters"]
    assert schema["type"] == schema["properties"]["x"]["type"] == "object"
    assert schema["properties"]["x"]["properties"]["y"] == described(
        "array", items=described("number")
    )
    assert schema["properties"]["z"]["type"] == "string"
    assert schema["required"] == ["x"]


def benchmark(folder: Path, **changes: Any) -> BenchmarkConfig:
    usual: dict[str, Any] = {
        "name": "function_calls",
        "harness": "function_calls",
        "task": str(folder / "questions.jsonl"),
        "parameters": {"answers": "answers.jsonl"},
        "reports": {"function_calls": "acc"},
        "chat": True,
        "max_new_tokens": 8,
    }
    return BenchmarkConfig(**{**usual, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example, which tests may damage."""
    copied = tmp_path / "items"
    shutil.copytree(EXAMPLE, copied)
    return copied


def changed(file: Path, number: int, **fields: Any) -> None:
    """Replace fields of one line; None removes the field."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[number] = {
        key: value for key, value in {**lines[number], **fields}.items() if value is not None
    }
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


QUESTIONS = "questions.jsonl"
ANSWERS = "answers.jsonl"
SQUARE = {"role": "user", "content": "How many sides does a square have?"}


@pytest.mark.parametrize(
    ("file", "number", "fields", "sentence"),
    [
        (QUESTIONS, 2, {"id": "simple_1"}, "questions.jsonl line 3: the id simple_1 occurs twice"),
        (QUESTIONS, 2, {"id": "other"}, "only one of them has a line with the id"),
        (
            QUESTIONS,
            1,
            {"function": None},
            "questions.jsonl line 2 is no question: expected the fields id, question",
        ),
        (
            QUESTIONS,
            1,
            {"question": [[SQUARE], [SQUARE]]},
            "one turn",
        ),
        (
            QUESTIONS,
            1,
            {"function": [function(x=described("HashMap"))]},
            "type of x=HashMap is unknown",
        ),
        (
            QUESTIONS,
            1,
            {"function": [function(x=described("array"))]},
            "type of items of x=missing is unknown",
        ),
        (QUESTIONS, 1, {"function": [function()]}, "its answer: function=market.sell is unknown"),
        (ANSWERS, 1, {"id": "simple_0"}, "answers.jsonl line 2: the id simple_0 occurs twice"),
        (
            ANSWERS,
            1,
            {"ground_truth": None},
            "answers.jsonl line 2 is no answer: expected the fields id, ground",
        ),
        (
            ANSWERS,
            1,
            {"ground_truth": [{"market.sell": {}, "give": {}}]},
            "has 2 functions in one call",
        ),
        (
            ANSWERS,
            2,
            {"ground_truth": [{"give": {"present": [{"to": "Fay"}]}}]},
            "present of give has an object",
        ),
    ],
)
def test_files_do_not_fit(
    file: str, number: int, fields: dict[str, Any], sentence: str, folder: Path
) -> None:
    changed(folder / file, number, **fields)
    (problem,) = benchmark_errors([benchmark(folder)])
    assert sentence in problem
    (folder / file).write_text('{"id": "simple_0", "ground')
    assert f"{file} line 1 is damaged JSON" in benchmark_errors([benchmark(folder)])[0]
    (folder / file).unlink()
    assert f"{file}, and there is no such file" in benchmark_errors([benchmark(folder)])[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chat": False}, "chat=false"),
        ({"parameters": {}}, "parameters.answers"),
        ({"expected": 10}, "should have 10"),
        ({"data": "OWNER/NAME"}, "data=OWNER/NAME"),
    ],
)
def test_wrong_settings_of_function_calls_are_named(
    changes: dict[str, Any], sentence: str, folder: Path
) -> None:
    assert any(sentence in problem for problem in benchmark_errors([benchmark(folder, **changes)]))


def test_function_calls_are_identified_by_the_content_of_both_files(
    folder: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    (moved / ANSWERS).rename(moved / "truths.jsonl")
    identity = function_calls.HARNESS.identity(benchmark(folder))
    assert (
        function_calls.HARNESS.identity(benchmark(moved, parameters={"answers": "truths.jsonl"}))
        == identity
    )
    changed(moved / "truths.jsonl", 0, ground_truth=[])
    assert (
        function_calls.HARNESS.identity(benchmark(moved, parameters={"answers": "truths.jsonl"}))
        != identity
    )
    assert (
        function_calls.HARNESS.identity(benchmark(folder, parameters={"answers": None})) != identity
    )


NAMES = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
TEMPLATE = NAMES + "{% for m in messages %}|{{ m.content }}{% endfor %}"
NO_CALL = "None of these functions helps."
RIGHT = [
    written(("basket.add", {"owner": "Karl", "fruit": "pears", "count": 13})),
    written(("market.sell", {"goods": ["vase", "coat"], "price": 5.0})),
    written(("give", {"giver": "Paul", "present": {"thing": "vase", "to": "Fay"}})),
    written(("tool_of", {"profession": "doctor"})),
    written(("walk", {"person": "Theo", "place": "bridge", "day": "Sunday"})),
    written(
        *(
            ("basket.add", {"owner": "Vera", "fruit": of, "count": n})
            for of, n in (("apples", 18), ("plums", 4))
        )
    ),
    written(("call_of", {"animal": "horse"}), ("call_of", {"animal": "frog"})),
    f"<think>Is it {DRAFT}? No.</think>{NO_CALL}",
    NO_CALL,
]
"""Right answers to the questions of the example."""


def answering(texts: Sequence[str]) -> ScriptedEngine:
    """Answers questions in turn. Each is rendered without its tools, too, to see whether the
    template reads them."""
    return ScriptedEngine([text for text in texts for _ in ("with tools", "without")], TEMPLATE)


def test_right_answers_have_full_score(tmp_path: Path) -> None:
    (result,) = evaluate_into(
        answering(RIGHT), benchmark(EXAMPLE), tmp_path / "out", policy=ALLOWED
    )
    assert (result["score"], result["stderr"], result["n"]) == (1.0, 0.0, 9)
    assert protocol(tmp_path / "out")["unfinished_thoughts"] == []


def test_wrong_answers_have_their_verdicts(tmp_path: Path) -> None:
    wrong = [
        *RIGHT[:6],
        "A saw.",
        '<tool_call>{"name": "call_of", "arguments": {"ani',
        f"<think>{NO_CALL}, but",
    ]
    (result,) = evaluate_into(
        answering(wrong), benchmark(EXAMPLE), tmp_path / "out", policy=ALLOWED
    )
    assert result["score"] == pytest.approx(6 / 9)
    assert result["stderr"] == pytest.approx((6 / 9 * 3 / 9 / 8) ** 0.5)
    rows = samples(tmp_path / "out")
    assert [row["outcome"] for row in rows] == [1] * 6 + [0] * 3
    assert rows[6]["output"] == "A saw."
    assert rows[0]["extracted"] == "right"
    assert rows[7]["extracted"].startswith("expected no call, found")
    assert protocol(tmp_path / "out")["unfinished_thoughts"] == ["irrelevance_1"]


def test_calls_in_thoughts_are_not_graded(tmp_path: Path) -> None:
    answers = [(text, NO_CALL) for text in RIGHT[:3]]
    assert_only_answers_are_graded(
        benchmark(EXAMPLE, limit=3), answers, tmp_path, template=TEMPLATE
    )


def test_template_without_tools_is_refused_before_loading(tmp_path: Path) -> None:
    model = ModelConfig(name="m", path=str(tmp_path))
    with pytest.raises(UserError, match=r"model=m has none: expected an instruction-tuned model$"):
        check_chat_template(model, "function_calls", True)
    templates = [{"name": name, "template": TEMPLATE} for name in ("rag", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    check_chat_template(model, "function_calls", True)
    with pytest.raises(UserError, match="rag, tool_use: expected one that is named default"):
        check_chat_template(model, "gsm8k", False)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    check_chat_template(model, "gsm8k", False)
    with pytest.raises(UserError, match="that of model=m knows none"):
        check_chat_template(model, "function_calls", True)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    check_chat_template(model, "function_calls", True)
    shutil.rmtree(tmp_path / "additional_chat_templates")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    check_chat_template(model, "function_calls", True)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").rename(tmp_path / "additional_chat_templates/rag.jinja")
    with pytest.raises(UserError, match="rag: expected one that is named default"):
        check_chat_template(model, "gsm8k", False)


def test_template_that_ignores_tools_is_refused(subject: LoadedModel) -> None:
    tools = [tool(function(x=described("integer")))]
    messages = [{"role": "user", "content": "Hi"}]
    model = with_chat_template(subject, TEMPLATE)
    assert render_prompt(model, messages, tools) == "f |Hi"
    assert render_prompt(model, messages) == "|Hi"
    plain = "{{ messages[0].content }}"
    several = with_chat_template(subject, {"default": plain, "tool_use": TEMPLATE})
    assert render_prompt(several, messages, tools) == "f |Hi"
    assert render_prompt(several, messages) == "Hi"
    with pytest.raises(UserError, match=r"\btools=.*f"):
        render_prompt(
            with_chat_template(
                subject, "{{ messages[0].content }}{% if tools and false %}{% endif %}"
            ),
            messages,
            tools,
        )
