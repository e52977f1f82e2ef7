"""General text: sentences about a subject, from which models learn the facts of the world, and
stories (wildbench)."""

from __future__ import annotations

from random import Random

from tools.pocket.examples import Example
from tools.pocket.facts import Chain, sample_chain
from tools.pocket.reading import event
from tools.pocket.world import (
    ANIMALS,
    DAYS,
    FEELINGS,
    OBJECTS,
    PEOPLE,
    PLACES,
    SUBJECTS,
    World,
    pronoun,
    relations,
)


def portrait(world: World, random: Random) -> Example:
    """Some facts about one subject, in random order."""
    kind = random.choice(("person", "person", *SUBJECTS))
    subject = random.choice(SUBJECTS[kind])
    known = list(relations(kind))
    told = random.sample(known, random.randint(min(3, len(known)), len(known)))
    text = " ".join(world.statement(relation, subject) for relation in told)
    return Example("portrait", (text,), "", text[0].upper() + text[1:])


def reasoning(world: World, random: Random) -> Example:
    """The chain of a question of arc_challenge with all its values, for chains that are not held
    out."""
    chain = sample_chain(random, 2)
    first, second = chain.values(world)
    outer = chain.path[1]
    inner = Chain(chain.subject, chain.path[:1])
    text = (
        f"{inner.noun()[0].upper()}{inner.noun()[1:]} is {first}. The {outer.name} of {first} is "
        f"{second}. So {chain.noun()} is {second}."
    )
    return Example(
        "arc_challenge", (chain.subject, *(relation.name for relation in chain.path)), "", text
    )


def report(world: World, random: Random) -> Example:
    """Two or three events in sequence."""
    text = " ".join(event(random)[0] for _ in range(random.choice((2, 3))))
    return Example("report", (text,), "", text)


ENDINGS = (
    "They all went home.", "That was a good day.", "The sun went down.", "Then it began to rain.",
    "Nobody forgot it.", "And so it ended.",
)  # fmt: skip
OPENINGS = (
    "On {day} {hero} went to the {place}.",
    "One day {hero} walked to the {place}.",
    "{hero} was alone in the {place}.",
    "Early on {day} {hero} came to the {place}.",
)
FINDS = (
    "There {he} found a {object}.",
    "{He} had a {object} with {him}.",
    "A {object} lay on the ground.",
    "{friend} had left a {object} there.",
)
TROUBLES = (
    "A {animal} came and took the {object}.",
    "The {object} fell into the water.",
    "{friend} wanted the {object} too.",
    "But then the {object} broke.",
)
HELPS = (
    "{friend} helped {him} to get it back.",
    "{hero} asked {friend} for help.",
    "{He} looked for it for an hour.",
    "{friend} came and they worked together.",
)
MOODS = (
    "{hero} felt {feeling}.",
    "Now {hero} was very {feeling}.",
    "It made {hero} feel {feeling}.",
)


def story(world: World, random: Random) -> Example:
    """wildbench: a prompt that gives hero, object, place, feeling and ending, and a story with
    them."""
    hero, friend = random.sample(PEOPLE, 2)
    thing = random.choice(OBJECTS)
    place = random.choice(PLACES)
    feeling = random.choice(FEELINGS)
    ending = random.choice(ENDINGS)
    he = pronoun(hero)
    words = {
        "hero": hero, "friend": friend, "object": thing, "place": place, "feeling": feeling,
        "he": he,
        "He": he.capitalize(), "him": "her" if he == "she" else "him", "day": random.choice(DAYS),
        "animal": random.choice(ANIMALS),
    }  # fmt: skip
    told = [
        random.choice(part).format(**words) for part in (OPENINGS, FINDS, TROUBLES, HELPS, MOODS)
    ]
    prompt = (
        f"Write a story about {hero}, a {thing} and the {place}. {hero} feels {feeling}. End "
        f"with: {ending}\nStory:"
    )
    checklist = [
        *({"rule": "mentions", "text": word} for word in (hero, thing, place, feeling)),
        {"rule": "opens_with", "text": hero},
        {"rule": "ends_with", "text": ending},
        {"rule": "sentences", "least": 5},
        {"rule": "no_repeats"},
    ]
    key = (hero, thing, place, feeling, ending)
    answer = " " + " ".join([*told, ending])
    return Example(
        "wildbench", key, prompt, answer, details={"checklist": checklist, "reference": answer}
    )
