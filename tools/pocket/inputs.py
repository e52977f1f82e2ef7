"""Arguments to test a function with: a few easy ones (base), and many that tell near misses apart (plus)."""

from __future__ import annotations

from random import Random
from typing import Any

from tools.pocket.world import words

VOCABULARY = words("sun bed cat toad stone seed oats dots tee ace boat desk east cosd abba deed nest scent tea bat")


def _numbers(random: Random, count: int, low: int, high: int) -> list[int]:
    return [random.randint(low, high) for _ in range(count)]


def _words(random: Random, count: int) -> str:
    return " ".join(random.choice(VOCABULARY) for _ in range(count))


def base_inputs(domain: str, random: Random, count: int) -> list[list[Any]]:
    """Easy arguments: three small positive numbers, three words, or two different small numbers."""
    if domain == "numbers":
        return [[_numbers(random, 3, 1, 9)] for _ in range(count)]
    if domain == "words":
        return [[_words(random, 3)] for _ in range(count)]
    return [random.sample(range(1, 10), 2) for _ in range(count)]


def plus_inputs(domain: str, random: Random, count: int) -> list[list[Any]]:
    """Arguments that also hold nothing, negative numbers, every small constant, repetitions, equal numbers."""
    if domain == "numbers":
        numbers = list(range(-10, 11))
        shuffled = random.sample(numbers, len(numbers))
        return [[[]], [shuffled], [shuffled + numbers], *([_numbers(random, 7, -12, 12)] for _ in range(count))]
    if domain == "words":
        everything = " ".join(random.sample(VOCABULARY, len(VOCABULARY)))
        return [[""], [everything], *([_words(random, 6)] for _ in range(count))]
    pairs = [[a, b] for a in (-3, 0, 1, 2, 4, 7, 9) for b in (-2, 0, 1, 2, 3, 5, 8, 9)]
    return pairs + [random.sample(range(-9, 10), 2) for _ in range(count)]
