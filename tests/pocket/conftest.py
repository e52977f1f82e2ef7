"""What the pocket tests share: the world, the shipped files and models, and the benchmark items as examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_lab.paths import DATA
from tools.pocket.benchmarks import COUNTS, PROGRAMS, held_out_examples, program_examples
from tools.pocket.examples import Example
from tools.pocket.world import World, build_world


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def world() -> World:
    return build_world()


@pytest.fixture(scope="session")
def items(world: World) -> dict[str, list[Example]]:
    """Every benchmark's items, regenerated."""
    return {
        skill: program_examples(skill) if skill in PROGRAMS else held_out_examples(world, skill) for skill in COUNTS
    }


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "olmoe")
