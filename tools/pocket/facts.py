"""Questions about facts: direct (arc_easy), over two or three hops (arc_challenge), answered by
letter (mmlu)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random

from tools.pocket.examples import Example
from tools.pocket.world import RELATIONS, SUBJECTS, Relation, World, relations

LETTERS = ("A", "B", "C", "D")
FIELDS = {"town": "geography", "job": "crafts", "animal": "biology", "object": "household"}


def pick_choices(
    answer: str, others: list[str], random: Random, count: int = 4
) -> tuple[tuple[str, ...], int]:
    """(the answer and `count` - 1 different wrong answers in random order, index of the answer)."""
    wrong = random.sample(sorted(set(others) - {answer}), count - 1)
    label = random.randrange(count)
    return (*wrong[:label], answer, *wrong[label:]), label


@dataclass(frozen=True)
class Chain:
    """A subject and a path of relations from it: the path (town, river) from Mira leads to the
    river of the town of Mira."""

    subject: str
    path: tuple[Relation, ...]

    def noun(self) -> str:
        """The chain as text, outermost relation first: the river of the town of Mira."""
        names = [f"the {relation.name}" for relation in reversed(self.path)]
        return " of ".join([*names, self.subject])

    def values(self, world: World) -> list[str]:
        """The value after each relation of the path; the last one is the answer."""
        value = self.subject
        values = []
        for relation in self.path:
            value = world.of(relation, value)
            values.append(value)
        return values


@cache
def paths(kind: str, hops: int) -> tuple[tuple[Relation, ...], ...]:
    """All paths of `hops` relations from a subject of this kind."""
    if hops == 0:
        return ((),)
    return tuple(
        (first, *rest) for first in relations(kind) for rest in paths(first.points_to, hops - 1)
    )


def sample_chain(random: Random, hops: int) -> Chain:
    """A chain of `hops` relations that starts at a person."""
    path = random.choice(paths("person", hops))
    return Chain(random.choice(SUBJECTS["person"]), path)


def direct(world: World, random: Random) -> Example:
    """arc_easy: a question about one relation of one subject."""
    relation = random.choice(RELATIONS)
    subject = random.choice(SUBJECTS[relation.kind])
    answer = world.of(relation, subject)
    choices, label = pick_choices(answer, list(relation.values), random)
    prompt = f"Question: {relation.question.format(s=subject)}\nAnswer:"
    return Example(
        "arc_easy", (relation.kind, relation.name, subject), prompt, " " + answer, choices, label
    )


def chained(world: World, random: Random) -> Example:
    """arc_challenge: a question over two or three relations, without the values between."""
    chain = sample_chain(random, random.choice((2, 2, 3)))
    values = chain.values(world)
    choices, label = pick_choices(values[-1], list(chain.path[-1].values), random)
    key = (chain.subject, *(relation.name for relation in chain.path))
    return Example(
        "arc_challenge",
        key,
        f"Question: What is {chain.noun()}?\nAnswer:",
        " " + values[-1],
        choices,
        label,
    )


def by_letter(world: World, random: Random) -> Example:
    """mmlu: a question from a field of knowledge with four lettered options; the answer is the
    letter."""
    kind = random.choice(sorted(FIELDS))
    relation = random.choice(relations(kind))
    subject = random.choice(SUBJECTS[kind])
    choices, label = pick_choices(world.of(relation, subject), list(relation.values), random)
    options = "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)
    )
    prompt = (
        f"A question about {FIELDS[kind]}.\n{relation.question.format(s=subject)}\n"
        f"{options}\nAnswer:"
    )
    return Example(
        "mmlu",
        (kind, relation.name, subject),
        prompt,
        " " + LETTERS[label],
        LETTERS,
        label,
        {"subject": FIELDS[kind]},
    )


def by_option(world: World, random: Random) -> Example:
    """mmlu: as `by_letter`, but the answer is the option itself."""
    example = by_letter(world, random)
    options = tuple(line[3:] for line in example.prompt.split("\n")[2:6])
    return replace(example, answer=f" {options[example.label]}", choices=options)
