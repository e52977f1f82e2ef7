"""Word problems with short worked answers (gsm8k) and harder exercises (math500); all numbers are
integers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.pocket.examples import Example
from tools.pocket.world import PEOPLE, World, pronoun, words

THINGS = words("apples eggs coins nuts pears shells stones cards books plums")
GAINS = (
    "{a} buys {n} more.",
    "{b} gives {a} {n} more.",
    "{he} finds {n} more.",
    "Then {he} gets {n} more.",
)
LOSSES = ("{a} loses {n}.", "{a} gives {n} to {b}.", "{he} sells {n}.", "Then {he} breaks {n}.")
CHANGES = {"+": GAINS, "-": LOSSES, "*": ("Then {he} has {n} times as many.",)}


def compute(left: int, sign: str, right: int) -> int:
    """The result of one step of a worked answer."""
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def work(start: int, changes: list[tuple[str, int]]) -> tuple[list[str], int]:
    """(steps of the form `12+7=19.`, result) of changes (sign, number) from `start`."""
    steps = []
    value = start
    for sign, number in changes:
        result = compute(value, sign, number)
        steps.append(f"{value}{sign}{number}={result}.")
        value = result
    return steps, value


def _changes(random: Random, start: int, count: int) -> list[tuple[str, int]]:
    """Random changes (sign, number) that keep the running value between 0 and 49."""
    value = start
    changes = []
    for _ in range(count):
        possible = {"+": value < 45, "-": value > 1, "*": 0 < value < 17}
        sign = random.choice([sign for sign, is_possible in possible.items() if is_possible])
        bounds = {"+": (2, min(20, 49 - value)), "-": (1, min(20, value)), "*": (2, 3)}[sign]
        number = random.randint(*bounds)
        changes.append((sign, number))
        value = compute(value, sign, number)
    return changes


def word_problem(world: World, random: Random) -> Example:
    """gsm8k: a number of things changes one to three times; the answer computes one change after
    another."""
    a, b = random.sample(PEOPLE, 2)
    things = random.choice(THINGS)
    start = random.randint(2, 40)
    changes = _changes(random, start, random.choice((1, 2, 2, 3)))
    sentences = [f"{a} has {start} {things}."]
    for sign, number in changes:
        sentence = random.choice(CHANGES[sign]).format(a=a, b=b, he=pronoun(a), n=number)
        sentences.append(sentence[0].upper() + sentence[1:])
    steps, result = work(start, changes)
    prompt = f"Question: {' '.join(sentences)} How many {things} does {a} have now?\nAnswer:"
    answer = f"{' '.join(steps)}\n#### {result}"
    return Example("gsm8k", (start, *changes), prompt, f" {answer}", details={"target": answer})


def _expression(random: Random) -> tuple[str, list[str], int]:
    a = random.randint(2, 15)
    b = random.randint(2, 15)
    c = random.randint(2, 5)
    d = random.randint(2, 20)
    steps, result = work(a, [("+", b), ("*", c), ("-", d)])
    return f"Compute ({a}+{b})*{c}-{d}.", steps, result


def _difference(random: Random) -> tuple[str, list[str], int]:
    a, b, c, d = (random.randint(2, 9) for _ in range(4))
    return (
        f"Compute {a}*{b}-{c}*{d}.",
        [f"{a}*{b}={a * b}.", f"{c}*{d}={c * d}.", f"{a * b}-{c * d}={a * b - c * d}."],
        a * b - c * d,
    )


def _equation(random: Random) -> tuple[str, list[str], int]:
    a = random.randint(2, 9)
    b = random.randint(1, 20)
    x = random.randint(2, 9)
    c = a * x + b
    return f"Solve {a}*x+{b}={c} for x.", [f"{c}-{b}={c - b}.", f"{c - b}/{a}={x}."], x


def _sequence(random: Random) -> tuple[str, list[str], int]:
    start = random.randint(1, 20)
    step = random.randint(2, 9)
    position = random.randint(5, 9)
    first_terms = ", ".join(str(start + step * index) for index in range(3))
    gap = step * (position - 1)
    steps = [
        f"{start + step}-{start}={step}.",
        f"{step}*{position - 1}={gap}.",
        f"{start}+{gap}={start + gap}.",
    ]
    return f"Find term {position} of {first_terms}, ...", steps, start + gap


def _remainder(random: Random) -> tuple[str, list[str], int]:
    a = random.randint(2, 9)
    b = random.randint(2, 9)
    c = random.randint(3, 9)
    product = a * b
    multiple = product // c * c
    steps = [
        f"{a}*{b}={product}.",
        f"{c}*{product // c}={multiple}.",
        f"{product}-{multiple}={product - multiple}.",
    ]
    return f"Find the remainder of {a}*{b} divided by {c}.", steps, product - multiple


def _mean(random: Random) -> tuple[str, list[str], int]:
    mean = random.randint(5, 20)
    shift = random.randint(1, 4)
    other = random.randint(1, 4)
    a = mean - shift
    b = mean + shift + other
    c = mean - other
    steps = [f"{a}+{b}={a + b}.", f"{a + b}+{c}={a + b + c}.", f"{a + b + c}/3={mean}."]
    return f"Find the mean of {a}, {b} and {c}.", steps, mean


KINDS: tuple[Callable[[Random], tuple[str, list[str], int]], ...] = (
    _expression,
    _difference,
    _equation,
    _sequence,
    _remainder,
    _mean,
)
"""Functions that return (task, steps, result) of a random exercise."""


def exercise(world: World, random: Random) -> Example:
    """math500: an exercise on expressions, equations, sequences, remainders or means, with two or
    three steps and larger numbers."""
    task, steps, result = random.choice(KINDS)(random)
    answer = f"{' '.join(steps)} The answer is {result}."
    return Example(
        "math500", (task,), f"Problem: {task}\nSolution:", f" {answer}", details={"target": answer}
    )
