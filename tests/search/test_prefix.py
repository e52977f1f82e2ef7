"""Which states are kept, and for how many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from moe_lab.search.prefix import Relatives, Schedule, States

STATE = torch.zeros(4)  # 16 bytes
LAYERS = 4


def visited(relatives: Relatives, schedules: list[Schedule]) -> list[tuple[Schedule, int]]:
    """Each schedule in the order of the walk, and the layer it starts from; all its states are then known."""
    seen = []

    def visit(schedules: Sequence[Schedule], states: States) -> None:
        (schedule,) = schedules
        assert all(schedule[: len(start)] == start for start in states)
        seen.append((schedule, max(map(len, states), default=0)))
        states.update({schedule[:k]: STATE for k in range(LAYERS)})

    relatives.walk(0, schedules, 1, visit)
    return seen


def test_every_beginning_is_run_once() -> None:
    schedules = [tuple(schedule) for schedule in itertools.product((0, 1, 2), repeat=LAYERS)]
    found = visited(Relatives(1, 0), schedules[::-1])
    assert [schedule for schedule, _ in found] == schedules
    # nodes of the tree: 3 + 9 + 27 + 81; the input of the first layer is known to all but the first
    assert sum(LAYERS - start for _, start in found) == 3 + 9 + 27 + 81


def test_states_of_the_best_outlive_a_call_and_others_do_not() -> None:
    relatives = Relatives(1, 10**6)
    visited(relatives, [(1, 1, 1, 1), (2, 2, 2, 2)])
    relatives.choose([(2, 2, 2, 2)])
    assert visited(relatives, [(2, 2, 2, 0), (1, 1, 1, 0)]) == [((1, 1, 1, 0), 0), ((2, 2, 2, 0), 3)]


def test_the_budget_holds_and_goes_to_the_wanted() -> None:
    relatives = Relatives(2, 2 * 3 * STATE.nbytes)
    visited(relatives, [(1, 1, 1, 1), (2, 2, 2, 2)])
    relatives.choose([(3, 3, 3, 3)])
    visited(relatives, [(1, 1, 1, 1), (3, 3, 3, 0)])
    assert relatives.bytes == [3 * STATE.nbytes, 0]
    assert set(relatives.states[0]) == {(), (3,), (3, 3)}
