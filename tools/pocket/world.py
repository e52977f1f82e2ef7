"""The closed world: people, towns, jobs, animals and objects, and the relations between them. It is
small enough for a small model to know by heart."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.pocket.examples import generator

WORLD_SEED = 7


def words(text: str) -> list[str]:
    """The words of a text as a list. Lists of words are easier to read as texts."""
    return text.split()


WOMEN = words(
    "Mira Anna Lena Rosa Ivy Nora Tess Vera Clara Dina Elsa Fay Gwen Hana Iris June Kira Lucy Maya "
    "Olga"
)
MEN = words(
    "Tom Ben Carl Dan Erik Finn Gus Hugo Ian Jack Karl Leo Max Ned Otto Paul Rolf Sam Theo Walt"
)
PEOPLE = WOMEN + MEN
TOWNS = words("Lund Brin Calder Dorn Esk Fenn Glim Harrow Ister Jarl Kell Morn")
JOBS = words("baker smith farmer doctor painter sailor teacher tailor miner gardener fisher potter")
ANIMALS = words("dog cat horse cow sheep goat duck hen crow frog bee mouse")
OBJECTS = words(
    "lamp cup scarf box key coat chair jar bell spoon rope blanket vase coin table mirror"
)
MATERIALS = words("metal wood glass wool clay paper")
PLACES = words("forest market harbour garden bridge castle mill beach park library")
FEELINGS = words("happy sad proud angry calm tired brave lonely")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


@dataclass(frozen=True)
class Relation:
    """An attribute of a kind of subjects.

    `statement` and `question` have the placeholders {s} for the subject and {v} for the value. If
    `points_to` is a kind, the values are subjects of this kind, which allows questions of two and
    three hops.
    """

    kind: str
    name: str
    values: tuple[str, ...]
    statement: str
    question: str
    points_to: str = ""


def _relation(
    kind: str, name: str, values: str | list[str], statement: str, question: str, to: str = ""
) -> Relation:
    return Relation(
        kind,
        name,
        tuple(words(values) if isinstance(values, str) else values),
        statement,
        question,
        to,
    )


DISHES = "soup cheese bread fish honey pie cake jam"
RELATIONS = (
    _relation("person", "town", TOWNS, "{s} lives in {v}.", "Where does {s} live?", "town"),
    _relation("person", "job", JOBS, "{s} works as a {v}.", "What does {s} work as?", "job"),
    _relation(
        "person", "pet", ANIMALS, "{s} keeps a {v}.", "Which animal does {s} keep?", "animal"
    ),
    _relation(
        "person", "friend", PEOPLE, "{s} is a friend of {v}.", "Who is the friend of {s}?", "person"
    ),
    _relation(
        "person",
        "colour",
        "red blue green white black yellow",
        "{s} likes the colour {v}.",
        "Which colour does {s} like?",
    ),
    _relation("person", "dish", DISHES, "{s} eats {v} every day.", "What does {s} eat every day?"),
    _relation(
        "town",
        "region",
        "north south east west",
        "{s} lies in the {v}.",
        "In which region does {s} lie?",
    ),
    _relation(
        "town",
        "river",
        "Aire Bree Clyde Dove Exe Frome",
        "{s} stands on the river {v}.",
        "On which river does {s} stand?",
    ),
    _relation("town", "speciality", DISHES, "{s} is known for its {v}.", "What is {s} known for?"),
    _relation(
        "town",
        "weather",
        "rain snow wind fog sun",
        "{s} has a lot of {v}.",
        "What does {s} have a lot of?",
    ),
    _relation(
        "town",
        "landmark",
        "tower bridge castle mill harbour museum",
        "In {s} stands an old {v}.",
        "What old building stands in {s}?",
    ),
    _relation(
        "job",
        "tool",
        "oven hammer plough needle brush rope book spade wheel saw net lamp",
        "A {s} uses a {v}.",
        "What does a {s} use?",
    ),
    _relation(
        "job",
        "workplace",
        "shop forge field clinic studio ship school mine",
        "A {s} works in the {v}.",
        "Where does a {s} work?",
    ),
    _relation(
        "job",
        "wage",
        "copper silver gold salt grain cloth",
        "A {s} is paid in {v}.",
        "What is a {s} paid in?",
    ),
    _relation(
        "animal",
        "food",
        "grass seeds meat leaves berries milk",
        "A {s} eats {v}.",
        "What does a {s} eat?",
    ),
    _relation(
        "animal",
        "home",
        "barn nest pond tree hole house",
        "A {s} sleeps in a {v}.",
        "Where does a {s} sleep?",
    ),
    _relation(
        "animal",
        "sound",
        "bark hum roar squeak song cry",
        "The call of a {s} is a {v}.",
        "What is the call of a {s}?",
    ),
    _relation(
        "animal",
        "season",
        "spring summer autumn winter",
        "A {s} is most active in {v}.",
        "When is a {s} most active?",
    ),
    _relation("object", "material", MATERIALS, "A {s} is made of {v}.", "What is a {s} made of?"),
    _relation(
        "object",
        "room",
        "kitchen hall attic cellar",
        "The {s} is kept in the {v}.",
        "Where is the {s} kept?",
    ),
    _relation(
        "object",
        "price",
        "one two three five six nine",
        "A {s} costs {v} coins.",
        "How many coins does a {s} cost?",
    ),
)
SUBJECTS = {"person": PEOPLE, "town": TOWNS, "job": JOBS, "animal": ANIMALS, "object": OBJECTS}


@dataclass(frozen=True)
class World:
    """The value of each relation of each subject: value[kind of subject, name of relation,
    subject]."""

    value: dict[tuple[str, str, str], str]

    def of(self, relation: Relation, subject: str) -> str:
        return self.value[relation.kind, relation.name, subject]

    def statement(self, relation: Relation, subject: str) -> str:
        return relation.statement.format(s=subject, v=self.of(relation, subject))


def relations(kind: str) -> tuple[Relation, ...]:
    """The relations whose subject is of this kind."""
    return tuple(relation for relation in RELATIONS if relation.kind == kind)


def _spread(subjects: list[str], values: tuple[str, ...], random: Random) -> list[str]:
    """A random value for each subject, with values about equally frequent, so that no answer can be
    guessed from its frequency."""
    assigned = [values[index % len(values)] for index in range(len(subjects))]
    random.shuffle(assigned)
    return assigned


def _friends(people: list[str], random: Random) -> dict[str, str]:
    """Person -> friend. Friends form a single ring, so everybody is the friend of one person, and
    nobody of themselves."""
    ring = list(people)
    random.shuffle(ring)
    return dict(zip(ring, ring[1:] + ring[:1], strict=True))


def build_world(seed: int = WORLD_SEED) -> World:
    """The world of a seed; the shipped models know the world of WORLD_SEED."""
    value: dict[tuple[str, str, str], str] = {}
    for relation in RELATIONS:
        random = generator(seed, "world", relation.kind, relation.name)
        subjects = SUBJECTS[relation.kind]
        if relation.name == "friend":
            value_of = _friends(subjects, random)
        else:
            values = _spread(subjects, relation.values, random)
            value_of = dict(zip(subjects, values, strict=True))
        for subject in subjects:
            value[relation.kind, relation.name, subject] = value_of[subject]
    return World(value)


def pronoun(person: str) -> str:
    return "she" if person in WOMEN else "he"
