"""Small Python functions that are compositions of operations, in the formats of humaneval, mbpp and
livecodebench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

from tools.pocket.examples import Example, fraction
from tools.pocket.operations import CONDITIONS, NUMBERS, RESULTS, WORDS, Applied, Domain, choose
from tools.pocket.world import words

SHAPES = ((1, 1), (1, 1), (2, 0), (1, 0), (0, 1), (2, 1))
# `decay` of the frequencies of operations (see operations.choose) in training text and calibration
# sets; it is 0 in benchmarks, where all operations are equally likely.
TRAINING_DECAY = 0.7
RESERVED_PAIRS = 1 / 6
HELD_OUT = {"humaneval": (0.0, 0.1), "mbpp": (0.1, 0.2)}


@dataclass(frozen=True)
class Program:
    """A function as a composition of operations, with the clauses of its docstring and its body."""

    domain: str
    parameters: str
    operations: tuple[Applied, ...]
    clauses: tuple[str, ...]
    body: str

    @property
    def name(self) -> str:
        return f"{self.operations[-1].name}_{self.operations[0].name}"

    @property
    def composition(self) -> tuple[object, ...]:
        """The operations with their constants, filters in name order. It is equal for equal
        programs."""
        return (self.domain, *((applied.name, applied.constant) for applied in self.operations))

    @property
    def source(self) -> str:
        return f"def {self.name}({self.parameters}):\n{self.body}"

    def run(self, arguments: list[Any]) -> Any:
        """The result of the function for these arguments."""
        return compiled(self)(*arguments)


def compiled(program: Program) -> Callable[..., Any]:
    """The program as a Python function. Its source is composed from the tables of operations;
    nothing else reaches exec."""
    namespace: dict[str, Any] = {}
    exec(program.source, namespace)
    function: Callable[..., Any] = namespace[program.name]
    return function


def reserved(program: Program) -> bool:
    """Whether the program has a reserved pair of operations (a sixth of all pairs), which training
    text never combines."""
    names = [applied.name for applied in program.operations]
    return any(
        fraction("pair", program.domain, *sorted(pair)) < RESERVED_PAIRS
        for pair in combinations(names, 2)
        if pair[0] != pair[1]
    )


def side(program: Program) -> str:
    """The only text that may contain the program: livecodebench, humaneval, mbpp or training."""
    if reserved(program):
        return "livecodebench"
    position = fraction("composition", program.composition)
    for name, (low, high) in HELD_OUT.items():
        if low <= position < high:
            return name
    return "training"


def sequence_program(
    random: Random, domain: Domain, shape: tuple[int, int], decay: float
) -> Program:
    """A random program of filters, maps and a reduction over the elements of a list or the words of
    a text. shape: numbers of filters and of maps."""
    filter_count, map_count = shape
    filters = sorted(
        (choose(random, domain.filters, decay) for _ in range(filter_count)),
        key=lambda applied: applied.name,
    )
    if len({applied.name for applied in filters}) < len(filters):
        return sequence_program(random, domain, shape, decay)
    maps = [choose(random, domain.maps, decay) for _ in range(map_count)]
    reduction = choose(random, domain.reductions, decay)
    element = maps[0].code if maps else domain.element
    condition = " and ".join(applied.code for applied in filters)
    loop = f"{element} for {domain.element} in {domain.source}"
    clauses = [f"take all {domain.things}"]
    if filters:
        loop += f" if {condition}"
        words_of_filters = " and ".join(applied.words for applied in filters)
        clauses = [f"take the {domain.things} that are {words_of_filters}"]
    clauses += [applied.words for applied in maps]
    clauses.append(f"return {reduction.words}")
    body = f"    return {reduction.code.replace('{body}', loop)}"
    return Program(domain.name, domain.argument, (*filters, *maps, reduction), tuple(clauses), body)


def branching_program(random: Random, conditions: int, decay: float) -> Program:
    """A random program with one or two conditions on two numbers that decide between two
    results."""
    tested = sorted(
        (choose(random, CONDITIONS, decay) for _ in range(conditions)),
        key=lambda applied: applied.name,
    )
    then, otherwise = (choose(random, RESULTS, decay) for _ in range(2))
    if len({applied.name for applied in (*tested, then, otherwise)}) < conditions + 2:
        return branching_program(random, conditions, decay)
    words = " and ".join(applied.words for applied in tested)
    code = " and ".join(applied.code for applied in tested)
    clauses = (f"if {words} return {then.words}", f"otherwise return {otherwise.words}")
    body = f"    if {code}:\n        return {then.code}\n    return {otherwise.code}"
    return Program("branches", "a, b", (*tested, then, otherwise), clauses, body)


def sample_program(random: Random, decay: float) -> Program:
    kind = random.choice(("numbers", "numbers", "words", "words", "branches"))
    if kind == "branches":
        return branching_program(random, random.choice((1, 1, 2)), decay)
    return sequence_program(
        random, NUMBERS if kind == "numbers" else WORDS, random.choice(SHAPES), decay
    )


def program_for(random: Random, text: str, decay: float) -> Program:
    """The next random program for a text: see `side`."""
    while True:
        program = sample_program(random, decay)
        if side(program) == text:
            return program


def as_completion(program: Program, skill: str = "humaneval") -> Example:
    """An example whose prompt is the signature and the docstring, and whose answer is the body."""
    sentences = " ".join(f"{clause[0].upper()}{clause[1:]}." for clause in program.clauses)
    prompt = f'def {program.name}({program.parameters}):\n    """{sentences}"""\n'
    return Example(skill, program.composition, prompt, program.body, details={"program": program})


def as_description(program: Program, random: Random) -> Example:
    """An example whose prompt is a description with an assertion, and whose answer is the whole
    function."""
    [arguments] = base_inputs(program.domain, random, 1)
    listed = ", ".join(map(repr, arguments))
    assertion = f"assert {program.name}({listed}) == {program.run(arguments)!r}"
    task = f"Write a function to {', '.join(program.clauses)}."
    prompt = f'"""\n{task}\n{assertion}\n"""\n'
    details = {"program": program, "assertion": assertion}
    return Example("mbpp", program.composition, prompt, program.source, details=details)


def training_function(random: Random) -> Example:
    """A random function for training text or a calibration set, in one of the two formats."""
    program = program_for(random, "training", TRAINING_DECAY)
    return as_completion(program) if random.random() < 0.5 else as_description(program, random)


# Arguments to test a function with: a few easy ones (base), and many that find near misses (plus).

INPUT_WORDS = words(
    "sun bed cat toad stone seed oats dots tee ace boat desk east cosd abba deed nest scent tea bat"
)


def _random_numbers(random: Random, count: int, low: int, high: int) -> list[int]:
    return [random.randint(low, high) for _ in range(count)]


def _random_words(random: Random, count: int) -> str:
    return " ".join(random.choice(INPUT_WORDS) for _ in range(count))


def base_inputs(domain: str, random: Random, count: int) -> list[list[Any]]:
    """`count` lists of easy arguments: three small positive numbers, three words, or two different
    small numbers."""
    if domain == "numbers":
        return [[_random_numbers(random, 3, 1, 9)] for _ in range(count)]
    if domain == "words":
        return [[_random_words(random, 3)] for _ in range(count)]
    return [random.sample(range(1, 10), 2) for _ in range(count)]


def plus_inputs(domain: str, random: Random, count: int) -> list[list[Any]]:
    """Lists of arguments with difficult cases: nothing, negative numbers, all small constants,
    repetitions, equal numbers; then `count` lists of random arguments."""
    if domain == "numbers":
        numbers = list(range(-10, 11))
        shuffled = random.sample(numbers, len(numbers))
        return [
            [[]],
            [shuffled],
            [shuffled + numbers],
            *([_random_numbers(random, 7, -12, 12)] for _ in range(count)),
        ]
    if domain == "words":
        everything = " ".join(random.sample(INPUT_WORDS, len(INPUT_WORDS)))
        return [[""], [everything], *([_random_words(random, 6)] for _ in range(count))]
    pairs = [[a, b] for a in (-3, 0, 1, 2, 4, 7, 9) for b in (-2, 0, 1, 2, 3, 5, 8, 9)]
    return pairs + [random.sample(range(-9, 10), 2) for _ in range(count)]
