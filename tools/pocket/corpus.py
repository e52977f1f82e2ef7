"""The training text of a pocket model: an endless stream of random documents of all skills, without
the items of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from tools.pocket import arithmetic, calls, facts, functions, practice, prose, reading
from tools.pocket.examples import Example, Sampler, draw, generator
from tools.pocket.world import World

WORLD_SAMPLERS: dict[str, Callable[[World, Random], Example]] = {
    "arc_easy": facts.direct, "arc_challenge": facts.chained, "mmlu": facts.by_letter,
    "options": facts.by_option,
    "boolq": reading.yes_or_no, "rte": reading.entailment, "winogrande": reading.pronouns,
    "hellaswag": reading.continuation, "openbookqa": reading.application,
    "gsm8k": arithmetic.word_problem, "math500": arithmetic.exercise, "wildbench": prose.story,
    "passages": practice.passages, "lettering": practice.lettering, "claims": practice.claims,
    "roles": practice.roles, "echo": practice.echo, "pairs": practice.pairs,
    "portrait": prose.portrait, "reasoning": prose.reasoning, "report": prose.report,
    "function_calls": calls.conversation,
    "calls_among_many": calls.among_many,
}  # fmt: skip

# Mixtures: kind of document -> its weight. Since documents differ in length, the shares of tokens
# differ from these weights.
# First the world, arithmetic and programs; then, with those known, mostly reading closely.
KNOWING = {
    "portrait": 9, "reasoning": 4, "report": 1, "wildbench": 7,
    "arc_easy": 5, "arc_challenge": 10, "mmlu": 10,
    "boolq": 8, "roles": 8, "winogrande": 6, "hellaswag": 3, "openbookqa": 5,
    "gsm8k": 14, "math500": 14, "functions": 14,
}  # fmt: skip
READING = {
    "portrait": 3, "reasoning": 2, "wildbench": 3, "arc_easy": 2, "arc_challenge": 8, "mmlu": 6,
    "lettering": 14,
    "boolq": 8, "passages": 8, "roles": 10, "claims": 8, "winogrande": 8, "hellaswag": 1,
    "openbookqa": 4,
    "gsm8k": 6, "math500": 6, "functions": 6,
}  # fmt: skip
MATCHING_MORE = {
    "roles": 14, "claims": 12, "boolq": 12, "passages": 8, "lettering": 12, "options": 10,
    "pairs": 6, "winogrande": 5,
    "portrait": 3, "wildbench": 2, "arc_easy": 5, "arc_challenge": 8, "hellaswag": 1,
    "openbookqa": 2,
    "gsm8k": 4, "math500": 5, "functions": 5,
}  # fmt: skip
MATCHING = {
    "echo": 16, "pairs": 20, "lettering": 12, "mmlu": 4,
    "passages": 6, "boolq": 6, "claims": 8, "roles": 8, "winogrande": 8,
    "portrait": 3, "wildbench": 2, "arc_easy": 3, "arc_challenge": 7, "hellaswag": 1,
    "openbookqa": 2,
    "gsm8k": 5, "math500": 6, "functions": 6,
}  # fmt: skip
JUDGING = {
    "rte": 14, "boolq": 14, "passages": 8, "lettering": 14, "options": 12, "pairs": 4,
    "winogrande": 5,
    "portrait": 3, "wildbench": 2, "arc_easy": 5, "arc_challenge": 8, "hellaswag": 1,
    "openbookqa": 2,
    "gsm8k": 4, "math500": 5, "functions": 5,
}  # fmt: skip
# For models that are too small to learn to compare words of a text: without questions whose answers
# they could only guess.
APPLYING = {
    "portrait": 4, "reasoning": 4, "wildbench": 3, "arc_easy": 6, "arc_challenge": 12, "options": 6,
    "pairs": 5,
    "rte": 5, "boolq": 3, "winogrande": 4, "hellaswag": 1, "openbookqa": 2,
    "gsm8k": 20, "math500": 20, "functions": 16,
}  # fmt: skip
# For small models that know the world, but not yet arithmetic.
CALCULATING = {
    "gsm8k": 30, "math500": 30, "functions": 18, "pairs": 4, "arc_easy": 4, "arc_challenge": 6,
    "options": 4, "rte": 2,
    "portrait": 2, "wildbench": 2, "openbookqa": 1, "hellaswag": 1,
}  # fmt: skip

CALLING_MANY = {"calls_among_many": 1}
CALLING = {"function_calls": 1}


def sampler(world: World, kind: str) -> Sampler:
    """A function that draws an example of this kind, which can be an item of a benchmark."""
    sample = WORLD_SAMPLERS[kind]
    return lambda random: sample(world, random)


def training_example(world: World, kind: str, random: Random) -> Example:
    """A random example of this kind that is not held out for a benchmark."""
    if kind == "functions":
        return functions.training_function(random)
    return draw(sampler(world, kind), random, benchmark=False)


def documents(world: World, seed: int, mixture: dict[str, int]) -> Iterator[Example]:
    """Yield random examples without end; mixture: kind -> its weight."""
    random = generator(seed, "corpus")
    kinds = list(mixture)
    weights = list(mixture.values())
    while True:
        yield training_example(world, random.choices(kinds, weights)[0], random)
