"""Candidates with all shortcuts against the plain way: mask the model, run all of it on all of the set."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch
from test_fitness import naive

from moe_lab.errors import UserError
from moe_lab.pruning.mask import mask
from moe_lab.search.candidates import Candidates, Decoder, Plans, Relatives, States
from moe_lab.search.evolution import FitnessSettings
from moe_lab.search.fitness import POSITION_FITNESS
from moe_lab.search.schedules import Schedule
from moe_lab.search.speculative_decoding import DraftingCandidates

ARCHITECTURES = [
    "olmoe", "deepseek_v2", "deepseek_v2:grouped", "deepseek_v3", "deepseek_v3:grouped", "ernie4_5_moe", "minimax_m2",
    "qwen3_next", "gpt_oss", "granitemoe", "afmoe", "jamba",
]  # fmt: skip


def answer_rows(rows: int = 6, length: int = 12, batch: int = 2) -> list[tuple[torch.Tensor, ...]]:
    """Rows of different lengths, each with a task and an answer, in batches."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, tiny.VOCABULARY, (rows, length), generator=generator)
    end = torch.randint(length // 2 + 1, length + 1, (rows, 1), generator=generator)
    begin = torch.randint(1, length // 2, (rows, 1), generator=generator)
    place = torch.arange(length)[None]
    valid = place < end
    return list(zip(*(part.split(batch) for part in (ids, valid, valid & (place >= begin))), strict=True))


def make_plans(model: Any, seed: int = 0) -> Plans:
    generator = torch.Generator().manual_seed(seed)
    layers = Plans(model, {layer.index: [0.0] for layer in tiny.moe_layers(model)}).layers
    return Plans(model, {layer.index: torch.rand(layer.n_experts, generator=generator).tolist() for layer in layers})


def some_schedules(plans: Plans) -> list[Schedule]:
    """A family: relatives that differ early, late, and in between; feasible for groups of four."""
    half = [(layer.n_experts // 2) // 4 * 4 for layer in plans.layers]
    steps = list(itertools.product((0, 4), repeat=len(half)))
    return [tuple(count - less for count, less in zip(half, step, strict=True)) for step in steps][::-1]


def plainly(model: Any, plans: Plans, schedule: Schedule, rows: Any, name: str, draws: torch.Tensor) -> float:
    """Macro average in fp64 with nothing spared; `draws` is the luck of all judged positions."""
    means, used = [], 0
    for ids, valid, answers in rows:
        with torch.no_grad():
            p = model(ids, attention_mask=valid.long()).logits.double().softmax(-1)
            with mask(model, plans.plan(schedule)):
                q = model(ids, attention_mask=valid.long()).logits.double().softmax(-1)
        for row in range(len(ids)):
            values = []
            for place in range(ids.shape[1] - 1):
                if answers[row, place + 1]:
                    one, other = p[row, place].tolist(), q[row, place].tolist()
                    values.append(naive(name, one, other, int(ids[row, place + 1]), float(draws[used])))
                    used += 1
            means.append(sum(values) / len(values))
    return sum(means) / len(means)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shortcuts_change_nothing(name: str) -> None:
    model = tiny.build(name)
    plans, rows = make_plans(model), answer_rows()
    candidates = Candidates(model, plans, rows, FitnessSettings(), seed=0)
    schedules = some_schedules(plans)
    early, late = schedules[: len(schedules) // 2], schedules[len(schedules) // 2 :]
    found = candidates.evaluate(early) + candidates.evaluate(late)
    expected = [plainly(model, plans, schedule, rows, "esap", torch.zeros(999)) for schedule in schedules]
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(set(found)) == len(schedules)
    assert candidates.cost.forwards < 0.85 * len(schedules) and candidates.cost.full == pytest.approx(1)


def test_prefixes_are_computed_once() -> None:
    model = tiny.build("olmoe")
    candidates = Candidates(model, make_plans(model), answer_rows(), FitnessSettings(), seed=0)
    candidates.evaluate(list(itertools.product((0, 4), repeat=3)))
    assert candidates.cost.forwards == pytest.approx((2 + 4 + 8) / 3)


@pytest.mark.parametrize("fitness", sorted(POSITION_FITNESS))
def test_every_fitness_is_what_the_plain_way_gives(fitness: str) -> None:
    model = tiny.build("olmoe")
    plans, rows = make_plans(model), answer_rows()
    generator = torch.Generator().manual_seed(7)
    luck = torch.cat([torch.rand(int(marks.sum()), generator=generator, dtype=torch.float64) for _, _, marks in rows])
    found = Candidates(model, plans, rows, FitnessSettings(fitness=fitness), seed=7).evaluate([(8, 4, 8), (4, 8, 8)])
    assert found == pytest.approx(
        [plainly(model, plans, schedule, rows, fitness, luck) for schedule in [(8, 4, 8), (4, 8, 8)]], abs=1e-6
    )


@pytest.mark.parametrize("budget", [0, 20_000, 40_000, 2**31])
def test_no_memory_gives_the_same_numbers_at_a_higher_cost(budget: int) -> None:
    model = tiny.build("olmoe")
    plans, rows = make_plans(model), answer_rows()
    rich, poor = (
        Candidates(model, plans, rows, FitnessSettings(memory_budget=size), seed=0) for size in (2**31, budget)
    )
    schedules = some_schedules(plans)
    for some in (schedules[:3], schedules[3:6], schedules[6:]):
        assert poor.evaluate(some) == rich.evaluate(some)
    assert poor.cost.full == pytest.approx(1 if budget else 3)
    assert poor.cost.forwards >= rich.cost.forwards


def test_batches_of_another_size_give_the_same_fitness() -> None:
    model = tiny.build("olmoe")
    plans = make_plans(model)
    schedules = some_schedules(plans)
    one, other = (
        Candidates(model, plans, answer_rows(batch=size), FitnessSettings(fitness="sap"), seed=1).evaluate(schedules)
        for size in (1, 6)
    )
    assert one == pytest.approx(other, abs=1e-6)


def test_a_damaged_model_is_named() -> None:
    model = tiny.build("olmoe")
    plans = make_plans(model)
    model.get_output_embeddings().weight.data[5, 5] = float("nan")
    with pytest.raises(UserError, match=r"esap of the model that loses \[4, 4, 4\] .* is nan"):
        Candidates(model, plans, answer_rows(), FitnessSettings(), seed=0).evaluate([(4, 4, 4)])


def test_the_model_is_as_before() -> None:
    model = tiny.build("olmoe")
    ids = tiny.tokens()
    before = model(ids).logits
    Candidates(model, make_plans(model), answer_rows(), FitnessSettings(), seed=0).evaluate([(4, 8, 4), (8, 4, 4)])
    assert torch.equal(model(ids).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_spec_dec_of_the_unpruned_model_accepts_everything() -> None:
    model = tiny.build("deepseek_v2")
    plans = make_plans(model)
    candidates = DraftingCandidates(
        model, plans, answer_rows(), FitnessSettings(fitness="spec_dec", max_new_tokens=4), seed=0, ends=frozenset({2})
    )
    everything, half = candidates.evaluate([(0, 0), (12, 12)])
    assert everything == 1 and 0 < half < 1
    assert candidates.evaluate([(12, 12)]) == [half]


def test_spec_dec_needs_room() -> None:
    model = tiny.build("olmoe")
    with pytest.raises(UserError, match=r"max_new_tokens=125 and a task of \d+ tokens do not fit the model's 128"):
        DraftingCandidates(
            model,
            make_plans(model),
            answer_rows(),
            FitnessSettings(fitness="spec_dec", max_new_tokens=125),
            seed=0,
            ends=frozenset(),
        )


# ---- which layers are run, which states are kept, and for how many bytes

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
