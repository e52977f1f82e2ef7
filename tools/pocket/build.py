"""Write the benchmark, calibration and search files: `python -m tools.pocket.build`. Seconds; needs
no model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from moe_lab.errors import run_and_exit
from moe_lab.paths import DATA
from tools.pocket.benchmarks import write_benchmarks, write_lines
from tools.pocket.corpus import CALLING, KNOWING, documents
from tools.pocket.examples import Example
from tools.pocket.world import World, build_world

# Calibration set -> seed, kinds of documents with their weights, number of documents. Sets have
# about 70,000 tokens; `function_calls` has half as many, since its conversations describe their
# functions in full. `general` stands for web text: it has every skill, in the proportions of the
# first training stage.
CALIBRATION = {
    "general": (204, KNOWING, 1600),
    "stories": (
        201,
        {"portrait": 4, "reasoning": 2, "report": 2, "wildbench": 4, "hellaswag": 2},
        1450,
    ),
    "code": (202, {"functions": 1}, 1050),
    "math": (203, {"gsm8k": 1, "math500": 1}, 1250),
    "function_calls": (205, CALLING, 500),
}


def write_calibration(world: World, folder: Path) -> None:
    """Write a file for each calibration set, with lines {"text": ...} or {"messages": ..., "tools":
    ...}; it has the same bytes on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CALIBRATION:
        write_lines(folder / f"{name}.jsonl", map(_record, calibration_examples(world, name)))


def _record(example: Example) -> dict[str, Any]:
    """The line of a document in a calibration set: its conversation with tools, or its text."""
    if "messages" in example.details:
        return {name: example.details[name] for name in ("messages", "tools")}
    return {"text": example.text}


def calibration_examples(world: World, name: str) -> Iterator[Example]:
    """The documents of one set, in order."""
    seed, mixture, count = CALIBRATION[name]
    return islice(documents(world, seed, mixture), count)


SEARCH_COUNT = 128
SEARCH_SEEDS = {"code": 301, "math": 302}
"""Set -> seed; its kinds of documents are those of the calibration set of the same name."""


def search_examples(world: World, name: str) -> list[Example]:
    """The tasks of a search set. Their keys differ from each other and from those of the
    calibration set of the same name."""
    seen = {(example.skill, example.key) for example in calibration_examples(world, name)}
    tasks: list[Example] = []
    stream = documents(world, SEARCH_SEEDS[name], CALIBRATION[name][1])
    while len(tasks) < SEARCH_COUNT:
        example = next(stream)
        key = (example.skill, example.key)
        if key not in seen:
            seen.add(key)
            tasks.append(example)
    return tasks


def write_search(world: World, folder: Path) -> None:
    """Write a file for each search set, with lines {"prompt": ..., "completion": ...}; it has the
    same bytes on every machine.

    The completion follows the prompt without a separator, as in the training text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in SEARCH_SEEDS:
        tasks = search_examples(world, name)
        rows = ({"prompt": task.prompt, "completion": task.answer} for task in tasks)
        write_lines(folder / f"{name}.jsonl", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DATA)
    folder = parser.parse_args().output
    world = build_world()
    write_benchmarks(world, folder / "benchmarks")
    write_calibration(world, folder / "calibration")
    write_search(world, folder / "search")


if __name__ == "__main__":
    run_and_exit(main)
