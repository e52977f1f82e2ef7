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
    """The answer among `count` - 1 different wrong ones, in random order, and its position."""
    wrong = random.sample(sorted(set(others) - {answer}), count - 1)
    label = random.randrange(count)
    return (*wrong[:label], answer, *wrong[label:]), label


@dataclass(frozen=True)
class Chain:
    """A subject and the relations to follow from it: (town, river) from Mira is the river of the
    town of Mira."""

    subject: str
    path: tuple[Relation, ...]

    def noun(self) -> str:
        """The chain as words, outermost relation first."""
        return (
            " of ".join(f"the {relation.name}" for relation in reversed(self.path))
            + f" of {self.subject}"
        )

    def values(self, world: World) -> list[str]:
        """What each step leads to; the last one is the answer."""
        found = [self.subject]
        for relation in self.path:
            found.append(world.of(relation, found[-1]))
        return found[1:]


@cache
def paths(kind: str, hops: int) -> tuple[tuple[Relation, ...], ...]:
    """All ways to follow `hops` relations from a subject of this kind."""
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
    """arc_easy: one relation of one subject."""
    relation = random.choice(RELATIONS)
    subject = random.choice(SUBJECTS[relation.kind])
    answer = world.of(relation, subject)
    choices, label = pick_choices(answer, list(relation.values), random)
    prompt = f"Question: {relation.question.format(s=subject)}\nAnswer:"
    return Example(
        "arc_easy", (relation.kind, relation.name, subject), prompt, " " + answer, choices, label
    )


def chained(world: World, random: Random) -> Example:
    """arc_challenge: two hops, sometimes three, none of them spelt out."""
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
    """mmlu: a field of knowledge, four lettered options, the answer is the letter."""
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
