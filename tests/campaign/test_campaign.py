"""The campaign in short: a few kills, and a sample of the programs, command lines and models, drawn by a seed."""

from __future__ import annotations

import random
import time

import pytest

from moe_lab.evaluation.sandbox.client import namespaces_missing

from . import commands, kills, models, programs
from .commands import answers, every_command
from .models import BROKEN, refusals
from .programs import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.walls]
SEED = int(time.time()) // 86400
"""Another sample every day."""


@pytest.fixture(autouse=True)
def seed() -> int:
    """Printed when a test fails."""
    print(f"seed {SEED}")
    return SEED


def test_no_program_escapes_or_passes() -> None:
    if namespaces_missing():
        pytest.skip("no namespaces")
    sample = [*programs.ENDLESS[:1], *random.Random(SEED).sample(PROGRAMS, 40)]
    graded = programs.graded(sample)
    assert not graded.unexpected and not graded.others and not graded.escapes, graded


@pytest.mark.parametrize(("end", "count"), [(commands.here, 40), (commands.started, 6)], ids=["here", "started"])
def test_a_wrong_command_line_is_one_sentence(end: commands.End, count: int) -> None:
    sample = random.Random(SEED).sample(every_command(), count)
    wrong = {str(row): ended for row, ended in answers(end, sample).items() if not commands.as_expected(row, ended)}
    assert not wrong


@pytest.mark.parametrize(("end", "count"), [(models.here, len(BROKEN)), (models.started, 1)], ids=["here", "started"])
def test_a_broken_model_is_one_sentence(end: models.End, count: int) -> None:
    sample = random.Random(SEED).sample(BROKEN, count)
    found = refusals(end, sample)
    assert not {row.name: found[row.name] for row in sample if not models.as_expected(row, found[row.name])}


def test_kills_lose_nothing() -> None:
    """On the cluster too, where there is one; of two commands at the same time; and of steps on the shipped model."""
    found = kills.killed(10, SEED, {"quick": 0.4, "two": 0.3, "model": 0.1, "slurm": 0.2})
    assert not found.problems and found.kills.total() == 10


def test_what_is_listed_is_enough_and_named_once() -> None:
    assert len(every_command()) >= 250 and len(PROGRAMS) >= 60 and len(BROKEN) >= 40
    for names in (map(str, every_command()), (row.name for row in PROGRAMS), (row.name for row in BROKEN)):
        listed = list(names)
        assert len(set(listed)) == len(listed), [name for name in listed if listed.count(name) > 1]
