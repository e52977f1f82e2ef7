"""Questions about a text in the prompt: boolq, rte, winogrande, hellaswag, openbookqa."""

from __future__ import annotations

from random import Random

from tools.pocket.examples import Example
from tools.pocket.facts import pick_choices
from tools.pocket.world import DAYS, MATERIALS, OBJECTS, PEOPLE, PLACES, RELATIONS, World, pronoun

MATERIAL = next(relation for relation in RELATIONS if relation.name == "material")

# Pairs of sentences with the same meaning; a reader must get the order of {a} and {b} right.
ENTAILED = (
    ("{a} sold the {o} to {b}.", "{b} bought the {o} from {a}."),
    ("{a} lent the {o} to {b}.", "{b} borrowed the {o} from {a}."),
    ("{a} gave the {o} to {b}.", "{b} got the {o} from {a}."),
    ("{a} is taller than {b}.", "{b} is shorter than {a}."),
    ("{a} is older than {b}.", "{b} is younger than {a}."),
    ("{a} taught {b} in the {p}.", "{b} learned from {a} in the {p}."),
    ("{a} came to the {p} before {b}.", "{b} came to the {p} after {a}."),
    ("{a} won the race against {b}.", "{b} lost the race against {a}."),
)

# Introductions that make a premise true, and introductions that make it false.
VERACITY = (
    ("It is true that", "Everybody saw that", "It turned out that", "They proved that"),
    ("It is wrong that", "Nobody saw that", "They only dreamed that", "It was a lie that"),
)

# Sentence with two candidates; the candidates; for each, an ending that fits only it.
PRONOUNS = (
    (
        "The {o} did not fit into the {q} because the",
        ("{o}", "{q}"),
        ("was too big.", "was too small."),
    ),
    (
        "{a} gave {b} some bread because",
        ("{b}", "{a}"),
        ("was very hungry.", "had bread left over."),
    ),
    ("{a} thanked {b} because", ("{b}", "{a}"), ("had been a great help.", "had been given help.")),
    (
        "{a} asked {b} about the way because",
        ("{b}", "{a}"),
        ("knew the town well.", "was new in town."),
    ),
    ("{a} lost the race to {b} because", ("{b}", "{a}"), ("ran very fast.", "ran very slowly.")),
    (
        "{a} lent a coat to {b} because",
        ("{b}", "{a}"),
        ("felt cold outside.", "had two warm coats."),
    ),
    (
        "{a} carried the bag for {b} because",
        ("{b}", "{a}"),
        ("had a bad back.", "was very strong."),
    ),
    (
        "{a} paid {b} for the {o} because",
        ("{b}", "{a}"),
        ("had made it well.", "wanted to own it."),
    ),
)

PROCEDURES = {
    "bake bread": (
        "mixes flour and water",
        "kneads the dough",
        "lets the dough rise",
        "heats the oven",
        "bakes the loaf",
    ),
    "plant a tree": (
        "chooses a sunny spot",
        "digs a deep hole",
        "sets the tree in it",
        "fills in the soil",
        "waters the roots",
    ),
    "wash a coat": (
        "fills a tub",
        "adds some soap",
        "rubs the cloth",
        "rinses it twice",
        "hangs it to dry",
    ),
    "make tea": (
        "boils the water",
        "warms the pot",
        "puts in the leaves",
        "pours the water",
        "fills the cups",
    ),
    "catch fish": (
        "digs up some worms",
        "rows onto the lake",
        "baits the hook",
        "waits for a bite",
        "pulls in the line",
    ),
    "paint a wall": (
        "cleans the wall",
        "covers the floor",
        "opens the paint",
        "brushes the corners",
        "rolls the rest",
    ),
    "light a fire": (
        "gathers dry twigs",
        "piles them up",
        "strikes a match",
        "blows on the flame",
        "adds a big log",
    ),
    "mend a chair": (
        "finds the broken leg",
        "saws a new one",
        "glues it in place",
        "ties it with rope",
        "sands the wood",
    ),
    "send a letter": (
        "finds pen and paper",
        "writes the words",
        "folds the sheet",
        "seals the envelope",
        "walks to the post",
    ),
    "ride a horse": (
        "brushes the horse",
        "puts on the saddle",
        "checks the straps",
        "climbs up",
        "takes the reins",
    ),
    "make cheese": (
        "milks the cow",
        "warms the milk",
        "stirs in the salt",
        "presses the curd",
        "stores it in the cellar",
    ),
    "build a boat": (
        "draws a plan",
        "cuts the boards",
        "bends the frame",
        "nails the hull",
        "paints the name",
    ),
}
STEP_WORDS = ("First", "Next", "After that", "Then", "At last")

PROPERTIES = (
    "float on water", "break when they fall", "rust in the rain", "burn quickly", ("keep people "
                                                                                   "warm"),
    "shine in the sun", "shrink in hot water", "carry sound well", "smell in summer",
    "crack in the frost",
    "attract moths", "last for ever",
)  # fmt: skip


def event(random: Random) -> tuple[str, dict[str, str]]:
    """(sentences about a random event, its people, object, place and day by their letters in
    templates)."""
    a, b = random.sample(PEOPLE, 2)
    parts = {
        "a": a,
        "b": b,
        "o": random.choice(OBJECTS),
        "p": random.choice(PLACES),
        "d": random.choice(DAYS),
    }
    he = pronoun(a).capitalize()
    text = (
        f"On {parts['d']} {a} went to the {parts['p']}. {he} bought a {parts['o']} and gave it to "
        f"{b}."
    )
    return text, parts


def ask(random: Random, parts: dict[str, str]) -> tuple[str, int]:
    """(question about an event, 1 if the answer is yes, 0 if it is no). For no, one part of the
    event is changed in the question."""
    changed = dict(parts)
    pools = {"a": PEOPLE, "b": PEOPLE, "o": OBJECTS, "p": PLACES, "d": DAYS}
    part = random.choice("abopd")
    label = random.randrange(2)
    if label == 0:
        known = (parts[part], parts["a"], parts["b"])
        changed[part] = random.choice([value for value in pools[part] if value not in known])
    question = {
        "a": "did {a} go to the {p}", "b": "did {b} get the {o}", "o": "did {a} buy a {o}",
        "p": "did {a} go to the {p}", "d": "did {a} go there on {d}",
    }[part].format(**changed)  # fmt: skip
    return question, label


def yes_or_no(world: World, random: Random) -> Example:
    """boolq: a passage and a question about it."""
    passage, parts = event(random)
    question, label = ask(random, parts)
    answer = ("no", "yes")[label]
    prompt = f"{passage}\nQuestion: {question}?\nAnswer:"
    return Example("boolq", (passage, question), prompt, " " + answer, ("no", "yes"), label)


def entailment(world: World, random: Random) -> Example:
    """rte: a premise is introduced as true or false; is a sentence with the same meaning true or
    false?"""
    a, b = random.sample(PEOPLE, 2)
    words = {"a": a, "b": b, "o": random.choice(OBJECTS), "p": random.choice(PLACES)}
    premise, hypothesis = random.sample(random.choice(ENTAILED), 2)
    label = random.randrange(2)
    said = f"{random.choice(VERACITY[label])} {premise.format(**words)}"
    claimed = hypothesis.format(**words)
    prompt = f"{said}\nQuestion: {claimed} True or False?\nAnswer:"
    return Example(
        "rte", (said, claimed), prompt, (" True", " False")[label], ("True", "False"), label
    )


def pronouns(world: World, random: Random) -> Example:
    """winogrande: which of two people or objects fits a clause? The choices are the two contexts,
    the answer is the clause that ends both."""
    a, b = random.sample(PEOPLE, 2)
    o, q = random.sample(OBJECTS, 2)
    sentence, candidates, endings = random.choice(PRONOUNS)
    which = random.randrange(2)
    names = [candidate.format(a=a, b=b, o=o, q=q) for candidate in candidates]
    context = sentence.format(a=a, b=b, o=o, q=q)
    order = random.sample((0, 1), 2)
    contexts = tuple(f"{context} {names[index]}" for index in order)
    label = order.index(which)
    return Example(
        "winogrande",
        (contexts[label], which),
        contexts[label],
        " " + endings[which],
        contexts,
        label,
    )


def continuation(world: World, random: Random) -> Example:
    """hellaswag: what comes next in a procedure? Wrong choices are other steps of it and of another
    procedure."""
    task = random.choice(sorted(PROCEDURES))
    person = random.choice(PEOPLE)
    steps = PROCEDURES[task]
    cut = random.randrange(1, 5)
    he = pronoun(person)
    told = [f"{person} wants to {task}."]
    told += [f"{word} {he} {step}." for word, step in zip(STEP_WORDS, steps[:cut], strict=False)]
    other = random.choice(
        [one for name, others in sorted(PROCEDURES.items()) if name != task for one in others]
    )
    wrong = [step for index, step in enumerate(steps) if index != cut]
    choices, label = pick_choices(steps[cut], [*random.sample(wrong, 2), other], random)
    prompt = " ".join([*told, f"{STEP_WORDS[cut]} {he}"])
    rest = [
        f"{word} {he} {step}."
        for word, step in list(zip(STEP_WORDS, steps, strict=True))[cut + 1 :]
    ]
    answer = " ".join([f" {steps[cut]}.", *rest])
    return Example(
        "hellaswag", (task, person), prompt, answer, tuple(f"{one}." for one in choices), label
    )


def application(world: World, random: Random) -> Example:
    """openbookqa: a rule about a material is given; which thing does it hold for?"""
    material = random.choice(MATERIALS)
    property_ = random.choice(PROPERTIES)
    fitting = [thing for thing in OBJECTS if world.of(MATERIAL, thing) == material]
    answer = random.choice(fitting)
    others = [thing for thing in OBJECTS if thing not in fitting]
    choices, label = pick_choices(answer, others, random)
    prompt = (
        f"Fact: Things of {material} {property_}.\nQuestion: Which thing may {property_}?\n"
        "Answer: the"
    )
    return Example(
        "openbookqa", (material, property_, answer), prompt, " " + answer, choices, label
    )
