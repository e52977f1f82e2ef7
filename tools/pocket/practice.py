"""Training documents with several short questions about one text, from which models learn to read
texts; single questions are not enough."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tools.pocket.examples import Example, held_out
from tools.pocket.facts import LETTERS, by_letter
from tools.pocket.reading import ENTAILED, ask, event
from tools.pocket.world import ANIMALS, JOBS, OBJECTS, PEOPLE, PLACES, TOWNS, World

OPEN_QUESTIONS = {
    "a": "who went to the {p}", "b": "who got the {o}", "o": "what did {a} buy",
    "p": "where did {a} go",
    "d": "when did {a} go there",
}  # fmt: skip


def passages(world: World, random: Random) -> Example:
    """As boolq, but with several questions: open ones, each followed by one of yes or no."""
    passage, parts = event(random)
    asked = []
    for part in random.sample("abopd", 3):
        question, label = ask(random, parts)
        while held_out("boolq", (passage, question)):
            question, label = ask(random, parts)
        asked.append((OPEN_QUESTIONS[part].format(**parts), parts[part]))
        asked.append((question, ("no", "yes")[label]))
    turns = [(f"\nQuestion: {question}?\nAnswer:", f" {answer}") for question, answer in asked]
    keys = tuple(question for question, _ in asked)
    return Example(
        "passages", (passage, *keys), passage + turns[0][0], turns[0][1], more=tuple(turns[1:])
    )


def lettering(world: World, random: Random) -> Example:
    """As mmlu, but the answer is followed by questions for its option, and for other letters and
    options."""
    example = by_letter(world, random)
    options = [line[3:] for line in example.prompt.split("\n")[2:6]]
    first, second = random.sample(range(4), 2)
    more = (
        ("\nThat is", f" {options[example.label]}"),
        (f"\nOption {LETTERS[first]}:", f" {options[first]}"),
        (f"\nLetter of {options[second]}:", f" {LETTERS[second]}"),
    )
    order = random.sample(more, 3)
    return replace(example, more=tuple(order))


def roles(world: World, random: Random) -> Example:
    """As rte, but a claim is false because its two people are swapped, not because of the words
    that introduce the premise."""
    a, b = random.sample(PEOPLE, 2)
    o = random.choice(OBJECTS)
    p = random.choice(PLACES)
    pair = random.choice(ENTAILED)
    premise, hypothesis = pair if random.random() < 0.5 else pair[::-1]
    label = random.randrange(2)
    first, second = (a, b) if label == 0 else (b, a)
    said = premise.format(a=a, b=b, o=o, p=p)
    claimed = hypothesis.format(a=first, b=second, o=o, p=p)
    prompt = f"{said}\nQuestion: {claimed} True or False?\nAnswer:"
    return Example(
        "rte", (said, claimed), prompt, (" True", " False")[label], ("True", "False"), label
    )


def claims(world: World, random: Random) -> Example:
    """As `roles`, but a sentence is followed by four claims: the sentence, its entailment, and both
    with people swapped."""
    pair = random.sample(random.choice(ENTAILED), 2)
    while True:
        a, b = random.sample(PEOPLE, 2)
        words = {"o": random.choice(OBJECTS), "p": random.choice(PLACES)}
        said = pair[0].format(a=a, b=b, **words)
        right = [(form.format(a=a, b=b, **words), " True") for form in pair]
        wrong = [(form.format(a=b, b=a, **words), " False") for form in pair]
        asked = random.sample([*right, *wrong], 4)
        if not any(held_out("rte", (said, claimed)) for claimed, _ in asked):
            break
    turns = [
        (f"\nQuestion: {claimed} True or False?\nAnswer:", answer) for claimed, answer in asked
    ]
    return Example("claims", (said,), said + turns[0][0], turns[0][1], more=tuple(turns[1:]))


def echo(world: World, random: Random) -> Example:
    """Some words, and the same words again, from which a model learns to copy."""
    words = random.sample(
        [*PEOPLE, *TOWNS, *ANIMALS, *JOBS, *OBJECTS, *LETTERS], random.randint(6, 14)
    )
    text = " ".join(words)
    return Example("echo", (text,), f"Words: {text}\nAgain:", f" {text}")


def pairs(world: World, random: Random) -> Example:
    """Names or letters with a word for each, then questions for the pairs in another order."""
    count = random.randint(3, 6)
    names = random.sample([*PEOPLE, *LETTERS], count) if random.random() < 0.5 else list(LETTERS)
    words = random.sample([*OBJECTS, *ANIMALS, *JOBS, *PLACES, *TOWNS], len(names))
    listed = "\n".join(f"{name} {word}" for name, word in zip(names, words, strict=True))
    turns = [(f"\n{name}", f" {word}") for name, word in zip(names, words, strict=True)]
    turns += [(f"\n{word}", f" {name}") for name, word in zip(names, words, strict=True)]
    asked = random.sample(turns, len(turns))
    return Example("pairs", (listed,), listed + asked[0][0], asked[0][1], more=tuple(asked[1:]))
