"""Texts that answer problems of HumanEval+, MBPP+, GSM8K and MATH-500, right and wrong ones, in the
forms in which models write programs and mathematical answers."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class AnswerText:
    """A text that answers a problem."""

    dataset: str
    """humaneval, mbpp, gsm8k or math500."""
    row: Row
    """The problem."""
    form: tuple[str, ...]
    """The form of the text: the name of a program's form, or how an answer is spelled and where it
    stands."""
    is_right: bool | None
    """Whether the answer in the text is right; None if that is not known."""
    text: str


# Programs.

Change = Callable[[str], str]


def indented(text: str, margin: str = "    ") -> str:
    """A text with a margin before each line."""
    return "".join(margin + line for line in text.splitlines(keepends=True))


PROGRAM_FORMS: dict[str, str] = {
    "program alone": "PROGRAM",
    "fence": "So:\n```python\nPROGRAM\n```",
    "fence of py": "```py\nPROGRAM\n```",
    "fence of Python3": "```Python3\nPROGRAM\n```",
    "fence without language": "```\nPROGRAM\n```",
    "fence with attributes": '```python title="a.py"\nPROGRAM\n```',
    "tildes": "So:\n~~~python\nPROGRAM\n~~~",
    "longer fence": "````markdown\nSolution\n```python\nPROGRAM\n```\n````",
    "fence after a tag": "<details>\n```python\nPROGRAM\n```\n</details>",
    "fence after prose": "So: ```python\nPROGRAM\n```",
    "unclosed fence": "So:\n```python\nPROGRAM",
    "closing fence after code": "```python\nPROGRAM```\nDone.",
    "prose around": "This solves it. It is quick.\n\nPROGRAM\n\nIt does what was asked.\n",
    "thought": "<think>Is it\n```python\nWRONG\n```\n? No.</think>\n```python\nPROGRAM\n```",
    "explained": (
        "## Idea\n\n1. **Look** at the values.\n2. Return them.\n\n```python\nPROGRAM\n```\n\n"
        "## Complexity\n\n- Time: $O(n)$\n- Space: `O(1)`\n"
    ),
    "inline code": "```NAME``` does it:\n\n```python\nPROGRAM\n```",
    "signature before": "Its signature:\n```python\nSIGNATURE\n```\nSo:\n```python\nPROGRAM\n```",
    "signature again": "```python\nPROGRAM\n```\nThat is:\n```python\nSIGNATURE\n    ...\n```",
    "stub before": "```python\nSIGNATURE\n    pass\n```\nSo:\n```python\nPROGRAM\n```",
    "fence in a docstring": (
        '```python\nRENAMED\n\n\ndef NAME(*values):\n    """Solve it.\n\n    ```\n    NAME(1)\n'
        '    ```\n    """\n    return solved(*values)\n```'
    ),
    "helper in another block": "```python\nRENAMED\n```\nThen:\n```python\nCALL\n```",
    "helper after the function": "```python\nCALL\n```\nIts helper:\n```python\nRENAMED\n```",
    "import in another block": (
        "```python\nimport functools\n```\nThen:\n```python\nRENAMED\n\n\ndef NAME(*values):\n"
        "    return functools.partial(solved, *values)()\n```"
    ),
    "decorator": "```python\nimport functools\nDECORATED\n```",
    "decorated helper": "```python\nimport functools\nDECORATED_HELPER\n\n\nCALL\n```",
    "table at the top": (
        "```python\nRENAMED\n\n\nTABLE = {}\nfor number in range(3):\n    TABLE[number] = number\n"
        "\n\ndef NAME(*values):\n    return solved(*values, *range(TABLE[0]))\n```"
    ),
    "lambda": "```python\nRENAMED\n\n\nNAME = lambda *values: solved(*values)\n```",
    "another name": "```python\nRENAMED\n\n\nNAME = solved\n```",
    "from the future": "```python\nfrom __future__ import annotations\nPROGRAM\n```",
    "tests in another block": (
        "```python\nPROGRAM\n```\nTests:\n```python\nassert NAME() == 1\nprint(NAME())\n```"
    ),
    "session": "```python\nPROGRAM\n```\n```python\n>>> NAME(1)\n1\n```",
    "shell block": "```sh\npip install numpy\n```\n```python\nPROGRAM\n```",
    "block in C": "```python\nPROGRAM\n```\nIn C:\n```c\nint solved(int);\n```",
    "example that reads": "```python\nPROGRAM\n\nx = int(input())\nprint(NAME(x))\n```",
    "example that exits": "```python\nimport sys\nPROGRAM\n\nsys.exit(NAME())\n```",
    "example that imports": (
        "```python\nPROGRAM\n```\n```python\nfrom solution import NAME\nNAME(1)\n```"
    ),
    "main block": "```python\nPROGRAM\n\nif __name__ == '__main__':\n    print(NAME())\n```",
    "cut off in an example": "```python\nPROGRAM\n\nprint(NAME(",
    "cut off in an alternative": "```python\nPROGRAM\n```\nOr:\n```python\nSIGNATURE\n    for",
    "wrong program before": "```python\nWRONG\n```\nBetter:\n```python\nPROGRAM\n```",
    "twice": "```python\nPROGRAM\n```\nIn all:\n```python\nPROGRAM\n```",
    "comments around": "```python\n# solution.py\nPROGRAM\n# end\n```",
    "main block of tests": (
        "```python\nPROGRAM\n\n\ndef test():\n    assert NAME()\n\n\n"
        "if __name__ == '__main__':\n    test()\n```"
    ),
}
"""Name -> text with a program. WRONG is a wrong program, SIGNATURE the first line of the function
NAME, RENAMED the program with the function `solved` in place of NAME, CALL a function NAME that
calls `solved`, DECORATED the program and DECORATED_HELPER the renamed one with a decorator."""
CHANGED_FORMS: dict[str, tuple[Change, str, Change]] = {
    "indented block": (indented, "So:\n\nPROGRAM\n\nDone.", str),
    "indented in a fence": (indented, "```python\nPROGRAM\n```", str),
    "fence in a list": (str, "1. So:\n\n   ```python\nPROGRAM\n   ```\n2. Done.", str),
    "quoted fence": (str, "```python\nPROGRAM\n```", partial(indented, margin="> ")),
    "carriage returns": (
        str,
        "So:\n```python\nPROGRAM\n```\nDone.",
        lambda text: text.replace("\n", "\r\n"),
    ),
    "tabulators": (str, "```python\nPROGRAM\n```", lambda text: text.replace("    ", "\t")),
}
"""Name -> change of the program, text with the program, change of the text."""
OTHER_FUNCTIONS: dict[str, str] = {
    "asynchronous function": "```python\nRENAMED\n\n\nasync CALL\n```",
    "method": "```python\nRENAMED\n\n\nclass Solution:\n    CALL\n```",
    "another function": "```python\nRENAMED\n```",
    "signature alone": "```python\nSIGNATURE\n    pass\n```",
    "description": "Call `NAME` and return its value.",
}
"""Name -> text without the requested function, which is wrong whatever the program."""


def program_texts(
    rows: Sequence[Row], dataset: str, chance: random.Random, passes: Callable[[Row, str], bool]
) -> Iterator[AnswerText]:
    """Yield a right and a wrong text in each form of programs, and texts of `OTHER_FUNCTIONS`.
    `rows`: the problems of the data set. `passes`: whether a program passes all tests of a
    problem."""
    forms: dict[str, tuple[Change, str, Change]] = {
        name: (str, text, str) for name, text in PROGRAM_FORMS.items()
    }
    forms |= CHANGED_FORMS
    wrong_programs: dict[str, str] = {}
    for form, (change, template, change_text) in forms.items():
        row = chance.choice(rows)
        program = solution(row)
        task = row["task_id"]
        if task not in wrong_programs:
            faulty = _faulty_programs(program, row["entry_point"])
            wrong_programs[task] = next(other for other in faulty if not passes(row, other))
        wrong = wrong_programs[task]
        for is_right, values in ((True, (program, wrong)), (False, (wrong, wrong))):
            text = change_text(
                _filled(template, row["entry_point"], change(values[0]), change(values[1]))
            )
            yield AnswerText(dataset, row, (form,), is_right, text)
    for form, template in OTHER_FUNCTIONS.items():
        row = chance.choice(rows)
        text = _filled(template, row["entry_point"], solution(row), "")
        yield AnswerText(dataset, row, (form,), False, text)


def solution(row: Row) -> str:
    """The canonical solution of a problem of EvalPlus."""
    return str(row["prompt"] + row["canonical_solution"]).strip()


def _filled(template: str, name: str, program: str, wrong: str) -> str:
    """A template with the program for the function `name`, and a wrong program."""
    signature = re.search(rf"^ *def {name}\(.*", program, re.MULTILINE)
    renamed = re.sub(rf"\b{name}\b", "solved", program)
    values = {
        "PROGRAM": program,
        "WRONG": wrong,
        "SIGNATURE": signature[0] if signature else "",
        "RENAMED": renamed,
        "DECORATED_HELPER": _decorated(renamed, "solved"),
        "DECORATED": _decorated(program, name),
        "CALL": f"def {name}(*values): return solved(*values)",
        "NAME": name,
    }
    return re.sub("|".join(values), lambda word: values[word[0]], template)


def _decorated(program: str, name: str) -> str:
    """A program with a decorator of the function `name` that changes no result."""
    return re.sub(rf"^(def {name}\()", r"@functools.wraps(len)\n\1", program, flags=re.MULTILINE)


def _faulty_programs(program: str, name: str) -> Iterator[str]:
    """Yield programs with one fault: another comparison, number or operator, or other results of
    the function `name`."""
    for number, _ in enumerate(ast.walk(ast.parse(program))):
        tree = ast.parse(program)
        if _makes_fault([*ast.walk(tree)][number]):
            yield ast.unparse(tree)
    original = re.sub(rf"\b{name}\b", "original", program)
    yield f"{original}\n\n\ndef {name}(*values):\n    return [original(*values)]"


def _makes_fault(node: ast.AST) -> bool:
    """Change a node of a syntax tree. False if it is none that can be changed."""
    match node:
        case ast.Compare(ops=[ast.Eq() | ast.Lt() | ast.Gt() | ast.In()]):
            node.ops = [ast.NotEq()]
        case ast.BinOp(op=ast.Add() | ast.Mult()):
            node.op = ast.Sub()
        case ast.Constant(value=int(value)):
            node.value = value + 1
        case _:
            return False
    return True


# Mathematical answers.


def _digits(zero: str) -> Callable[[str], str]:
    """A function that writes a number with the ten digits that begin with `zero`."""
    table = {ord("0") + digit: ord(zero) + digit for digit in range(10)}
    return lambda number: number.translate(table)


def _grouped(separator: str) -> Callable[[str], str]:
    """A function that writes a number with a separator between thousands."""
    return lambda number: f"{int(number):,}".replace(",", separator)


def _times(factor: int, template: str) -> Callable[[str], str]:
    """A function that writes a template in which @ is the number times `factor`."""
    return lambda number: template.replace("@", str(int(number) * factor))


NUMBERS: dict[str, str | Change] = {
    "plain": "@",
    "thousands by comma": _grouped(","),
    "thousands by braces": _grouped("{,}"),
    "thousands by space": _grouped(" "),
    "thousands by narrow space": _grouped("\u202f"),
    "thousands by thin space": _grouped(r"\,"),
    "full-width digits": _digits("０"),
    "Arabic digits": _digits("٠"),
    "Persian digits": _digits("۰"),
    "Devanagari digits": _digits("०"),
    "decimal": "@.0",
    "two decimals": "@.00",
    "dollar": "$@",
    "LaTeX dollar": r"\$@",
    "dollar with cents": "$@.00",
    "euro": "€@",
    "dollars": "@ dollars",
    "text dollars": r"@\text{ dollars}",
    "text unit": r"@ \text{ miles per hour}",
    "roman unit": r"@\,\mathrm{cm}",
    "unit": "@ km/h",
    "square unit": r"@\text{ cm}^2",
    "students": "@ students",
    "percent": "@%",
    "LaTeX percent": r"@\%",
    "degrees": r"@^\circ",
    "degree sign": "@°",
    "word degrees": "@ degrees",
    "text": r"\text{@}",
    "bold LaTeX": r"\mathbf{@}",
    "bold": "**@**",
    "sum": "m+n=@",
    "variable": "x = @",
    "fraction": _times(2, r"\frac{@}{2}"),
    "dfrac": _times(3, r"\dfrac{@}{3}"),
    "quotient": _times(2, "@/2"),
    "plus sign": "+@",
    "point": "@.",
    "parentheses": r"\left(@\right)",
    "style": r"\displaystyle @",
    "spaces": r"\; @ \;",
    "braces": "{@}",
    "inner dollars": "$@$",
    "approximately": r"\approx @",
    "scientific": _times(10, "@e-1"),
}
"""Name -> how a number is spelled: a template in which @ is the number, or a function."""
EXPRESSIONS: dict[str, str | Change] = {
    "plain": "@",
    "dfrac": lambda answer: answer.replace(r"\frac", r"\dfrac"),
    "tfrac": lambda answer: answer.replace(r"\frac", r"\tfrac"),
    "no left and right": lambda answer: answer.replace(r"\left", "").replace(r"\right", ""),
    "spaces": r"\, @ \,",
    "no spaces": lambda answer: re.sub(r"(?<![a-z]) ", "", answer),
    "style": r"\displaystyle @",
    "point": "@.",
    "inner dollars": "$@$",
    "bold": "**@**",
}
"""Name -> how an expression in LaTeX is spelled."""
PLACES: dict[str, str] = {
    "box": r"Step 1 of 3: look. So \boxed{@}.",
    "sentence": "We add them. The answer is @.",
}
"""Name -> place in which answers of every spelling stand: a text in which @ is the answer."""
MORE_PLACES: dict[str, str] = {
    "box in dollars": r"So $\boxed{@}$.",
    "displayed box": "Thus\n\\[\n\\boxed{@}\n\\]",
    "box alone": r"\boxed{@}",
    "equation in a box": r"Thus $\boxed{x = @}$.",
    "box after an equation": r"$2 + 2 = 4$, so $x = \boxed{@}$.",
    "framebox": r"So \fbox{@}.",
    "bold box": r"**\boxed{@}**",
    "box in a box": r"\boxed{\boxed{@}}",
    "unclosed box": r"So \boxed{@",
    "box without braces": r"So \boxed @.",
    "box with a space": r"So \boxed {@}.",
    "unit after the box": r"It is $\boxed{@}$ dollars.",
    "number after the box": r"So \boxed{@}. (In step 3 we had §.)",
    "wrong box before": r"Is it \boxed{§}? No. So \boxed{@}.",
    "wrong sentence before": r"The answer is §. No: \boxed{@}.",
    "wrong sentence after": r"So \boxed{@}. At first I thought that the answer is §.",
    "thought": r"<think>Is it \boxed{§}?</think>So \boxed{@}.",
    "fence": "```\n\\boxed{@}\n```",
    "final answer": "**Final Answer**\n$$\\boxed{@}$$",
    "Minerva": "Final Answer: The final answer is $@$. I hope it is correct.",
    "formula": "The answer is $@$.",
    "parenthesised formula": r"The answer is \(@\).",
    "displayed formula": "The answer is\n\\[@\\]",
    "last formula": r"First $2 + 2 = 4$. Then we get $@$.",
    "colon": "Answer: @",
    "bold colon": "**Answer: @**",
    "bold word": "**Answer:** @",
    "bold sentence": "The answer is **@**.",
    "underscored": "The answer is __@__.",
    "GSM8K": "We add them.\n#### @",
    "alone": "@",
    "tag": "<answer>@</answer>",
    "JSON": '{"answer": @}',
    "Chinese": "所以答案是@。",
    "Chinese colon": "答案：@",
    "Japanese": "答えは@です。",
    "French": "La réponse est @.",
    "two sentences": "The answer is §? No. The answer is @.",
    "next line": "The answer is:\n\n@",
    "last equation": "4 + 4 - 1 = @",
    "equals": "So x = @",
}
"""Name -> place in which a plain answer stands, and another answer where § is."""


_FOR_LATEX = re.compile(r"box|\$|\\[(\[]")
"""In a place where an expression in LaTeX may stand."""


def mathematical_texts(
    rows: Sequence[Row], dataset: str, chance: random.Random
) -> Iterator[AnswerText]:
    """Yield a right and a wrong text in each form of numbers (for gsm8k) or expressions (for
    math500). `rows`: the problems of the data set."""
    is_number = dataset == "gsm8k"
    problems = [row for row in rows if is_integer(reference(row)) == is_number]
    spellings = NUMBERS if is_number else EXPRESSIONS
    forms = [*product(spellings, PLACES), *product(["plain"], MORE_PLACES)]
    for spelling, place in forms:
        template = {**PLACES, **MORE_PLACES}[place]
        if not is_number and not _FOR_LATEX.search(template):
            continue
        long_answers = [row for row in problems if len(reference(row)) > 3]
        row = chance.choice(long_answers if spelling.startswith("thousands") else problems)
        answer = reference(row)
        if is_number:
            answer = answer.replace(",", "")
            other = str(int(answer) + chance.choice([-1, 1, 2, 10]))
        else:
            other = chance.choice([other for other in map(reference, problems) if other != answer])
        for is_right, values in ((True, (answer, other)), (False, (other, answer))):
            text = _written(spellings[spelling], template, *values)
            yield AnswerText(dataset, row, (spelling, place), is_right, text)


def reference(row: Row) -> str:
    """The right answer of a problem of GSM8K or MATH-500."""
    return str(row["answer"]).split("####")[-1].strip()


def is_integer(answer: str) -> bool:
    """Whether a right answer is an integer, with or without commas."""
    return re.fullmatch(r"-?[\d,]+", answer) is not None


def _written(spelling: str | Change, place: str, answer: str, other: str) -> str:
    """An answer at a place, where another answer may stand too."""
    spelled = spelling.replace("@", answer) if isinstance(spelling, str) else spelling(answer)
    return place.replace("@", spelled).replace("§", other)
