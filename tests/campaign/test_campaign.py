"""The campaign in short: a few kills, and a sample of the programs, command lines and models, drawn by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from moe_lab.evaluation.sandbox.client import namespaces_missing

from . import commands, kills, models, programs

pytestmark = [pytest.mark.slow, pytest.mark.walls]
SEED = int(time.time()) // 86400
"""Another sample every day."""


@pytest.fixture(autouse=True)
def seed() -> None:
    """Printed when a test fails."""
    print(f"seed {SEED}")


def sample(rows: Sequence[Any], count: int) -> list[Any]:
    return random.Random(SEED).sample(rows, min(count, len(rows)))


def test_no_program_escapes_or_passes() -> None:
    if missing := namespaces_missing():
        pytest.skip(f"no namespaces: {missing}")
    graded = programs.graded([*programs.ENDLESS[:1], *sample(programs.PROGRAMS, 40)])
    assert not graded.wrong


@pytest.mark.parametrize(("end", "count"), [(commands.here, 40), (commands.started, 6)], ids=["here", "started"])
def test_a_wrong_command_line_is_one_sentence(end: commands.End, count: int) -> None:
    assert not commands.wrong(end, sample(commands.every_command(), count))


@pytest.mark.parametrize(
    ("end", "count"), [(models.here, len(models.BROKEN)), (models.started, 1)], ids=["here", "started"]
)
def test_a_broken_model_is_one_sentence(end: models.End, count: int) -> None:
    assert not models.wrong(end, sample(models.BROKEN, count))


@pytest.mark.timeout(600)
def test_kills_lose_nothing() -> None:
    """On the cluster too, where there is one; of two commands at the same time; and of steps on the shipped model."""
    found = kills.killed(10, SEED, ("quick", "two", "model", "slurm"))
    assert not found.problems and found.kills.total() == 10
