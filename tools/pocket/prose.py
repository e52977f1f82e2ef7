"""General text: what is known about somebody or something, in sentences; the source of every fact of the world."""

from __future__ import annotations

from random import Random

from tools.pocket.examples import Example
from tools.pocket.facts import Chain, sample_chain
from tools.pocket.reading import event
from tools.pocket.world import SUBJECTS, World, relations


def portrait(world: World, random: Random) -> Example:
    """Some facts about one subject, in random order."""
    kind = random.choice(("person", "person", *SUBJECTS))
    subject = random.choice(SUBJECTS[kind])
    known = list(relations(kind))
    told = random.sample(known, random.randint(min(3, len(known)), len(known)))
    text = " ".join(world.statement(relation, subject) for relation in told)
    return Example("portrait", (text,), "", text[0].upper() + text[1:])


def reasoning(world: World, random: Random) -> Example:
    """How facts follow from one another: the chain of arc_challenge spelt out, for chains no benchmark asks about."""
    chain = sample_chain(random, 2)
    first, second = chain.values(world)
    outer, inner = chain.path[1], Chain(chain.subject, chain.path[:1])
    text = (
        f"{inner.noun()[0].upper()}{inner.noun()[1:]} is {first}. The {outer.name} of {first} is {second}. "
        f"So {chain.noun()} is {second}."
    )
    return Example("arc_challenge", (chain.subject, *(relation.name for relation in chain.path)), "", text)


def report(world: World, random: Random) -> Example:
    """Two or three events after one another."""
    text = " ".join(event(random)[0] for _ in range(random.choice((2, 3))))
    return Example("report", (text,), "", text)
