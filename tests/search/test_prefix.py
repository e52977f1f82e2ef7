"""Which layers are run, which states are kept, and for how many bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch

from moe_lab.search.prefix import Decoder, Relatives, Schedule, States

STATE = torch.zeros(4)  # 16 bytes
LAYERS = 4


def visited(relatives: Relatives, schedules: list[Schedule]) -> list[tuple[Schedule, int]]:
    """Each schedule in the order of the walk, and the layer it starts from; all its states are then known."""
    seen = []
    for schedule, states in relatives.walk(0, schedules):
        assert all(schedule[: len(start)] == start for start in states)
        seen.append((schedule, max(map(len, states), default=0)))
        states.update({schedule[:k]: STATE for k in range(LAYERS)})
    return seen


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2"])
def test_layers_after_the_longest_known_prefix_are_run(name: str) -> None:
    model = tiny.build(name, num_hidden_layers=4)
    ids = tiny.tokens(2, 5)
    valid = torch.ones_like(ids, dtype=torch.bool)
    runs: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda module, given, at=number: runs.append(at))
    states: States = {}
    decoder = Decoder(model)
    schedule = (0,) * len(decoder.moe)
    whole, run = decoder.logits(ids, valid, valid, schedule, states)
    assert runs == [0, 1, 2, 3] and run == 4
    assert set(states) == {schedule[:k] for k in range(len(schedule))}
    before = {start: state.clone() for start, state in states.items()}
    runs.clear()
    changed = (*schedule[:-1], 4)
    logits, run = decoder.logits(ids, valid, valid, changed, states)
    assert runs == [3] and run == 1 and torch.equal(logits, whole)
    assert states.keys() == before.keys() and all(torch.equal(states[start], before[start]) for start in before)


def test_layers_that_are_not_run_get_a_forward_of_their_own_back() -> None:
    """As the forward of a model that is spread over devices."""
    model = tiny.build("olmoe")
    layer, calls = model.model.layers[0], []
    original = layer.forward

    def own(*given: Any, **named: Any) -> Any:
        calls.append(layer)
        return original(*given, **named)

    layer.forward = own
    ids, states = tiny.tokens(2, 5), {}
    valid = torch.ones_like(ids, dtype=torch.bool)
    for schedule in ((0, 0, 0), (0, 0, 4)):
        Decoder(model).logits(ids, valid, valid, schedule, states)
    assert layer.forward is own and len(calls) == 1


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


def test_the_budget_holds() -> None:
    relatives = Relatives(2, 2 * 3 * STATE.nbytes)
    visited(relatives, [(1, 1, 1, 1), (2, 2, 2, 2)])
    assert relatives.bytes == [3 * STATE.nbytes, 0] and set(relatives.states[0]) == {(), (1,), (1, 1)}
    relatives.choose([(2, 2, 2, 2)])
    assert relatives.bytes == [STATE.nbytes, 0] and set(relatives.states[0]) == {()}
