"""The operations of which small programs are composed, in the words of a docstring and as Python
code."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Operation:
    """An operation. `words` and `code` may contain {k}, a constant drawn from `constants`."""

    name: str
    words: str
    code: str
    constants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Applied:
    """An operation with a drawn constant; "" for an operation without constants."""

    operation: Operation
    constant: str = ""

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def words(self) -> str:
        return self.operation.words.replace("{k}", self.constant)

    @property
    def code(self) -> str:
        return self.operation.code.replace("{k}", self.constant)


@dataclass(frozen=True)
class Domain:
    """The values on which a kind of programs works, numbers or words, with the operations for
    them."""

    name: str
    argument: str
    element: str
    source: str
    things: str
    filters: tuple[Operation, ...]
    maps: tuple[Operation, ...]
    reductions: tuple[Operation, ...]


SMALL = tuple("23456789")
LETTERS = tuple("abcdeost")

NUMBERS = Domain(
    "numbers", "values", "x", "values", "numbers",
    filters=(
        Operation("even", "even", "x % 2 == 0"),
        Operation("odd", "odd", "x % 2 == 1"),
        Operation("positive", "positive", "x > 0"),
        Operation("negative", "negative", "x < 0"),
        Operation("above", "above {k}", "x > {k}", SMALL),
        Operation("below", "below {k}", "x < {k}", SMALL),
        Operation("least", "at least {k}", "x >= {k}", SMALL),
        Operation("most", "at most {k}", "x <= {k}", SMALL),
        Operation("divisible", "divisible by {k}", "x % {k} == 0", SMALL[1:]),
        Operation("other", "not {k}", "x != {k}", SMALL),
    ),
    maps=(
        Operation("square", "square each", "x * x"),
        Operation("negate", "negate each", "-x"),
        Operation("absolute", "take the size of each", "abs(x)"),
        Operation("add", "add {k} to each", "x + {k}", SMALL),
        Operation("take", "take {k} from each", "x - {k}", SMALL),
        Operation("times", "multiply each by {k}", "x * {k}", SMALL),
        Operation("rest", "take each modulo {k}", "x % {k}", SMALL[1:]),
        Operation("halve", "halve each", "x // 2"),
    ),
    reductions=(
        Operation("sum", "the sum", "sum({body})"),
        Operation("count", "how many there are", "len([{body}])"),
        Operation("list", "the list", "[{body}]"),
        Operation("maximum", "the largest or 0", "max([{body}], default=0)"),
        Operation("minimum", "the smallest or 0", "min([{body}], default=0)"),
        Operation("sorted", "them sorted", "sorted({body})"),
        Operation("down", "them sorted down", "sorted([{body}], reverse=True)"),
        Operation("distinct", "how many differ", "len(set({body}))"),
        Operation("reversed", "them reversed", "[{body}][::-1]"),
    ),
)  # fmt: skip

WORDS = Domain(
    "words", "text", "w", "text.split()", "words",
    filters=(
        Operation("longer", "longer than {k}", "len(w) > {k}", SMALL[:4]),
        Operation("shorter", "shorter than {k}", "len(w) < {k}", SMALL[1:5]),
        Operation("starting", "starting with {k}", "w[0] == '{k}'", LETTERS),
        Operation("ending", "ending with {k}", "w[-1] == '{k}'", LETTERS),
        Operation("holding", "holding {k}", "'{k}' in w", LETTERS),
        Operation("without", "without {k}", "'{k}' not in w", LETTERS),
    ),
    maps=(
        Operation("upper", "write each in capitals", "w.upper()"),
        Operation("flip", "turn each around", "w[::-1]"),
        Operation("first", "take the first letter of each", "w[0]"),
        Operation("last", "take the last letter of each", "w[-1]"),
        Operation("double", "double each", "w + w"),
        Operation("mark", "put {k} behind each", "w + '{k}'", LETTERS),
    ),
    reductions=(
        Operation("count", "how many there are", "len([{body}])"),
        Operation("list", "the list", "[{body}]"),
        Operation("sorted", "them sorted", "sorted({body})"),
        Operation("join", "them joined by spaces", "' '.join({body})"),
        Operation("dash", "them joined by dashes", "'-'.join({body})"),
        Operation("letters", "how many letters there are", "len(''.join({body}))"),
        Operation("distinct", "how many differ", "len(set({body}))"),
        Operation("reversed", "them reversed", "[{body}][::-1]"),
    ),
)  # fmt: skip

CONDITIONS = (
    Operation("greater", "a is greater than b", "a > b"),
    Operation("less", "a is less than b", "a < b"),
    Operation("same", "a equals b", "a == b"),
    Operation("a_even", "a is even", "a % 2 == 0"),
    Operation("b_odd", "b is odd", "b % 2 == 1"),
    Operation("a_above", "a is above {k}", "a > {k}", SMALL),
    Operation("b_below", "b is below {k}", "b < {k}", SMALL),
)
RESULTS = (
    Operation("plus", "the sum", "a + b"),
    Operation("minus", "a minus b", "a - b"),
    Operation("back", "b minus a", "b - a"),
    Operation("product", "the product", "a * b"),
    Operation("a_times", "{k} times a", "{k} * a", SMALL),
    Operation("b_plus", "b plus {k}", "b + {k}", SMALL),
    Operation("a_square", "the square of a", "a * a"),
    Operation("larger", "the larger one", "max(a, b)"),
    Operation("smaller", "the smaller one", "min(a, b)"),
    Operation("zero", "0", "0"),
)


def choose(random: Random, operations: tuple[Operation, ...], decay: float) -> Applied:
    """A random operation with a random constant. The weight of the n-th operation is n^-decay; with
    decay 0 all are equally likely."""
    weights = [(position + 1) ** -decay for position in range(len(operations))]
    operation = random.choices(operations, weights)[0]
    return Applied(operation, random.choice(operation.constants) if operation.constants else "")
