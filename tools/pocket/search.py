"""Two sets of tasks with their answers, to search allocations by: neither in a benchmark nor in a calibration set."""

from __future__ import annotations

from pathlib import Path

from tools.pocket.benchmarks import write_lines
from tools.pocket.calibration import SETS as CALIBRATION
from tools.pocket.calibration import examples as calibration_examples
from tools.pocket.corpus import documents
from tools.pocket.examples import Example
from tools.pocket.world import World

COUNT = 128
SEEDS = {"code": 301, "math": 302}
"""Set -> seed; its kinds of documents are those of the calibration set of the same name."""


def search_examples(world: World, name: str) -> list[Example]:
    """The tasks of one set, no two about the same, none about what its calibration set asks for."""
    seen = {(example.skill, example.key) for example in calibration_examples(world, name)}
    found: list[Example] = []
    stream = documents(world, SEEDS[name], CALIBRATION[name][1])
    while len(found) < COUNT:
        example = next(stream)
        key = (example.skill, example.key)
        if key not in seen:
            seen.add(key)
            found.append(example)
    return found


def write_search(world: World, folder: Path) -> None:
    """One file of {"prompt": ..., "completion": ...} lines for each domain; the same bytes on every machine.

    The two follow each other with nothing between, as in the text the models were trained on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in SEEDS:
        tasks = search_examples(world, name)
        rows = ({"prompt": task.prompt, "completion": task.answer} for task in tasks)
        write_lines(folder / f"{name}.jsonl", rows)
