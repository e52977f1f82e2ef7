"""Four calibration sets from seeds the training text does not use: all skills mixed, and three with some of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tools.pocket.benchmarks import write_lines
from tools.pocket.corpus import KNOWING, documents
from tools.pocket.examples import Example
from tools.pocket.world import World

# Kinds of documents, their weights, and how many documents; about 70,000 tokens each. `general` stands for web text:
# it has every skill, in the proportions of the first training stage.
SETS = {
    "general": (204, KNOWING, 1600),
    "stories": (201, {"portrait": 4, "reasoning": 2, "report": 2, "wildbench": 4, "hellaswag": 2}, 1450),
    "code": (202, {"functions": 1}, 1050),
    "math": (203, {"gsm8k": 1, "math500": 1}, 1250),
}


def write_calibration(world: World, folder: Path) -> None:
    """One file of {"text": ...} lines for each set; the same bytes on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        write_lines(folder / f"{name}.jsonl", ({"text": example.text} for example in examples(world, name)))


def examples(world: World, name: str) -> Iterator[Example]:
    """The documents of one set, in order."""
    seed, mixture, count = SETS[name]
    return islice(documents(world, seed, mixture), count)
