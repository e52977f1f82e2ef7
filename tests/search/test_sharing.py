"""Candidates that share forward passes: the same fitness, the same search, and a choice that does not change."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from sharing_costs import fix_costs
from test_candidates import ARCHITECTURES, answer_rows, make_plans, some_schedules

from moe_lab.models import device
from moe_lab.search.candidates import Candidates
from moe_lab.search.prefix import Decoder, Schedule, States
from moe_lab.search.screening import halving, quartered
from moe_lab.search.settings import FitnessSettings
from moe_lab.search.sharing import Choice, Sharing

SETTINGS = FitnessSettings()


def candidates(name: str = "olmoe", record: Path | None = None, **changes: Any) -> Candidates:
    model = tiny.build(name)
    return Candidates(model, make_plans(model), answer_rows(**changes), SETTINGS, seed=0, record=record)


def evaluated(monkeypatch: pytest.MonkeyPatch, name: str, *, together: bool) -> tuple[list[float], Candidates]:
    fix_costs(monkeypatch, together=together)
    judge = candidates(name)
    schedules = some_schedules(judge.plans)
    half = len(schedules) // 2
    values = judge.evaluate(schedules[:half]) + judge.evaluate(schedules[half:])
    assert judge.sharing.choice is not None and judge.sharing.choice.together == together
    return values, judge


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_candidates_have_the_same_fitness_alone_and_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = evaluated(monkeypatch, name, together=False)
    shared, judge = evaluated(monkeypatch, name, together=True)
    assert shared == pytest.approx(alone, abs=1e-6)
    assert len(set(alone)) == len(alone)
    assert judge.sharing.choice is not None and judge.sharing.choice.difference < 1e-6
    assert not any("forward" in vars(module) for module in judge.model.modules())


def test_prefixes_are_computed_once_and_dropped_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_costs(monkeypatch, together=True)
    judge = candidates(rows=2)
    schedules = list(itertools.product((0, 4), repeat=3))
    for _ in range(2):
        before = judge.cost.forwards
        judge.evaluate(schedules)
        assert judge.cost.forwards - before == pytest.approx((2 + 4 + 8) / 3)
        assert judge._relatives.states == [{}]


def test_layers_run_once_for_each_prefix_that_is_not_known() -> None:
    model = tiny.build("olmoe", num_hidden_layers=4)
    ids = tiny.tokens(2, 5)
    valid = torch.ones_like(ids, dtype=torch.bool)
    runs: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda module, given, at=number: runs.append((at, len(given[0]) // 2)))
    states: States = {}
    decoder, schedules = Decoder(model), [(0, 0, 0, 0), (0, 0, 0, 4), (0, 4, 0, 0)]
    decoder.logits(ids, valid, valid, (0, 0, 4, 4), states)
    runs.clear()
    del states[()], states[(0,)]
    masked: list[list[int]] = []
    logits, run = decoder.logits_of_each(schedules, ids, valid, valid, states, masked.append)
    # the third has no known state; the state of the others before layer 2 is known
    assert runs == [(0, 1), (1, 1), (2, 2), (3, 3)] and run == 7
    assert masked == [[2, 2], [0, 0, 2, 2], [0, 0, 1, 1, 2, 2]]
    assert set(states) >= {schedule[:k] for schedule in schedules for k in (2, 3)}
    whole = model(ids).logits.reshape(-1, tiny.VOCABULARY)
    assert all((one - whole).abs().max() < 1e-5 for one in logits)


@pytest.mark.parametrize("together", [False, True])
def test_the_faster_way_is_chosen_once_and_kept(
    together: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "partial" / "sharing.json"
    trials = fix_costs(monkeypatch, together=together)
    judge = candidates(record=record)
    schedules = some_schedules(judge.plans)
    first = judge.evaluate(schedules)
    choice = judge.sharing.choice
    assert choice is not None and choice.together == together and choice.most is None
    assert choice.seconds == {"alone": 2.0 if together else 1.0, "together": 1.0 if together else 2.0}
    assert judge.cost.trials > 0
    assert Sharing(record).choice == choice
    count = len(trials)
    fix_costs(monkeypatch, together=not together)
    again = candidates(record=record)
    assert again.evaluate(schedules) == first and again.sharing.choice == choice
    assert again.cost.trials == 0 and len(trials) == count


@pytest.mark.parametrize("tokens", [23, 4096])
def test_nothing_is_timed_without_a_choice(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = fix_costs(monkeypatch, together=True)
    monkeypatch.setattr(device, "PASS_TOKENS", tokens)
    judge = candidates(rows=2)  # 24 tokens
    schedules = some_schedules(judge.plans)
    judge.evaluate(schedules[:1])
    assert judge.sharing.choice is None and not trials
    judge.evaluate(schedules[1:])
    assert (judge.sharing.choice is None) == (not trials) == (tokens == 23)


def test_a_damaged_record_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    fix_costs(monkeypatch, together=True)
    for text in ("{", "{}", json.dumps({"together": 1, "most": None, "seconds": {}, "difference": 0})):
        (tmp_path / "sharing.json").write_text(text)
        judge = candidates(record=tmp_path / "sharing.json")
        assert judge.sharing.choice is None and "is damaged" in capsys.readouterr().out


def limit_rows(judge: Candidates, rows: int) -> list[int]:
    """Let the model run out of memory with more than `rows` rows; returns a list to which every pass adds its rows."""
    seen: list[int] = []

    def before(module: Any, given: Any, named: Any) -> None:
        seen.append(len(named["input_ids"]))
        if seen[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")

    judge.model.register_forward_pre_hook(before, with_kwargs=True)
    return seen


@pytest.mark.parametrize(("rows", "most"), [(5, 2), (3, 1)])
def test_trials_that_run_out_of_memory_are_made_smaller(rows: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = evaluated(monkeypatch, "olmoe", together=False)
    fix_costs(monkeypatch, together=True)
    judge = candidates()
    limit_rows(judge, rows)
    assert judge.evaluate(some_schedules(judge.plans)) == pytest.approx(expected, abs=1e-6)
    choice = judge.sharing.choice
    assert choice is not None and choice.most == most and choice.together == (most > 1)
    assert not any("forward" in vars(module) for module in judge.model.modules())


def test_memory_that_runs_out_later_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected, _ = evaluated(monkeypatch, "olmoe", together=False)
    record = tmp_path / "sharing.json"
    Sharing(record)._set(Choice(True, None, {"alone": 2.0, "together": 1.0}, 0.0))
    judge = candidates(record=record)
    seen = limit_rows(judge, 9)  # four candidates of two rows
    assert judge.evaluate(some_schedules(judge.plans)) == pytest.approx(expected, abs=1e-6)
    assert Sharing(record).choice == judge.sharing.choice == Choice(True, 4, {"alone": 2.0, "together": 1.0}, 0.0)
    assert max(seen) == 16 and seen.count(16) == 1


def test_memory_that_no_candidate_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_costs(monkeypatch, together=True)
    judge = candidates()
    limit_rows(judge, 2)
    judge._full_log_probabilities(0)
    limit_rows(judge, 1)
    with pytest.raises(torch.OutOfMemoryError):
        judge.evaluate(some_schedules(judge.plans))


def test_halving_shares_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("olmoe")
    plans = make_plans(model)
    values: list[list[float]] = []
    for together in (False, True):
        fix_costs(monkeypatch, together=together)
        judge = Candidates(model, plans, quartered(answer_rows(rows=8), 3), SETTINGS, seed=0)
        schedules: list[Schedule] = some_schedules(plans)
        values.append(halving(judge)(schedules) + judge.evaluate(schedules[:3]))
    assert values[1] == pytest.approx(values[0], abs=1e-6)
