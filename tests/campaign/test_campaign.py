"""The campaign in short: a few kills, all models, and a sample of the command lines, drawn by a
seed.

CAMPAIGN=20 in the environment makes it twenty times as long; CAMPAIGN_SEED is another seed than
that of the day. All programs are run by tests/evaluation/test_runner.py.
"""

import os
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from . import commands, kills, models

pytestmark = pytest.mark.slow
LENGTH = int(os.environ.get("CAMPAIGN", "1"))
SEED = int(os.environ.get("CAMPAIGN_SEED", time.time() // 86400))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Printed when a test fails."""
    print(f"seed {SEED}")


def sample(rows: Sequence[Any], count: int) -> list[Any]:
    return random.Random(SEED).sample(rows, min(count * LENGTH, len(rows)))


@pytest.mark.timeout(300 * LENGTH)
def test_a_wrong_command_line_is_one_sentence() -> None:
    rows = commands.all_commands()
    assert not commands.failures(
        [*rows[: commands.FIXED_COUNT], *sample(rows[commands.FIXED_COUNT :], 42)]
    )


@pytest.mark.timeout(300)
def test_a_broken_model_is_one_sentence() -> None:
    assert not models.failures()


@pytest.mark.timeout(900 * LENGTH)
def test_kills_lose_nothing() -> None:
    """On the cluster too, where there is one, and of two commands at the same time."""
    n_kills = 10 * LENGTH if LENGTH > 1 else 3
    report = kills.run_kills(n_kills, SEED)
    print(*(f"{count:4} {name}" for name, count in sorted(report.kills.items())), sep="\n")
    print(*report.problems, sep="\n")  # in full
    assert not report.problems
    assert report.kills.total() >= n_kills - 1
