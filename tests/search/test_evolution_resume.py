from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lab.errors import UserError
from moe_lab.search.evolution import Outcome, evolve
from moe_lab.search.schedules import Problem, Schedule
from moe_lab.search.settings import EvolutionSettings

PROBLEM = Problem((16,) * 6, (4,) * 6, (1,) * 6, 24)
GENERATIONS = 5
PLAIN = EvolutionSettings(population=14, generations=GENERATIONS)
SCREENED = replace(PLAIN, population=40, proposals=3, elites=8)
FINGERPRINT = {"model": {"name": "pocket", "layers": [0, 1]}, "search_set": "a1"}
GOAL = (0, 12, 0, 12, 0, 0)


class Stop(Exception):
    """What kills a run."""


class Judge:
    """Counts calls and dies in one of them. A long climb over broad steps, so that ties among new elites are common."""

    def __init__(self, dies: int | None = None) -> None:
        self.calls, self.dies = 0, dies

    def __call__(self, schedules: Sequence[Schedule]) -> list[float]:
        if self.calls == self.dies:
            raise Stop
        self.calls += 1
        return [
            -float(sum(abs(lost - goal) for lost, goal in zip(schedule, GOAL, strict=True)) // 5)
            for schedule in schedules
        ]


def screen(schedules: Sequence[Schedule]) -> list[float]:
    return [float(sum(schedule[::2]) % 7) for schedule in schedules]


def search(judge: Judge, path: Path | None, settings: EvolutionSettings = PLAIN, **changes: Any) -> Outcome:
    given: dict[str, Any] = {"problem": PROBLEM, "fingerprint": FINGERPRINT, **changes}
    return evolve(given["problem"], settings, judge, screen=screen, checkpoint=path, fingerprint=given["fingerprint"])


@pytest.mark.parametrize("settings", [PLAIN, SCREENED], ids=["plain", "screened"])
@pytest.mark.parametrize("dies", range(GENERATIONS))
def test_a_killed_search_goes_on_as_if_never_stopped(tmp_path: Path, dies: int, settings: EvolutionSettings) -> None:
    whole = search(Judge(), tmp_path / "whole.json", settings)
    with pytest.raises(Stop):
        search(Judge(dies), tmp_path / "killed.json", settings)
    judge = Judge()
    resumed = search(judge, tmp_path / "killed.json", settings)
    assert resumed == whole == search(Judge(), None, settings)
    assert judge.calls == GENERATIONS - dies
    assert (tmp_path / "killed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert json.dumps(resumed.history) == json.dumps(whole.history)


def test_killed_after_every_generation(tmp_path: Path) -> None:
    whole = search(Judge(), None, SCREENED)
    for _ in range(GENERATIONS - 1):
        with pytest.raises(Stop):
            search(Judge(1), tmp_path / "killed.json", SCREENED)
    assert search(Judge(1), tmp_path / "killed.json", SCREENED) == whole


def test_a_finished_search_evaluates_nothing(tmp_path: Path) -> None:
    done = search(Judge(), tmp_path / "search.json")
    assert search(Judge(0), tmp_path / "search.json") == done
    assert [file.name for file in tmp_path.iterdir()] == ["search.json"]


def test_killed_while_writing_leaves_the_last_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(Judge(), None)
    with pytest.raises(Stop):
        search(Judge(2), tmp_path / "search.json")
    before = (tmp_path / "search.json").read_bytes()

    def half(self: Path, text: str, **more: Any) -> int:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Path, "write_text", half)
        search(Judge(), tmp_path / "search.json")
    assert (tmp_path / "search.json").read_bytes() == before
    assert search(Judge(), tmp_path / "search.json") == whole


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (replace(PLAIN, elites=3), {}, "of a search with settings.elites=4, not 3: go on with the old value, or rem"),
        (replace(PLAIN, generations=9), {}, "settings.generations=5, not 9"),
        (PLAIN, {"problem": replace(PROBLEM, budget=26)}, "problem.budget=24, not 26"),
        (PLAIN, {"problem": replace(PROBLEM, fewest=(2,) * 6)}, r"problem.fewest=\[4, 4, 4, 4, 4, 4\], not \[2, 2, "),
        (PLAIN, {"fingerprint": {**FINGERPRINT, "search_set": "b2"}}, 'fingerprint.search_set="a1", not "b2"'),
        (PLAIN, {"fingerprint": {**FINGERPRINT, "model": {"name": "x", "layers": [0, 1]}}}, 'model.name="pocket", not'),
        (PLAIN, {"fingerprint": {**FINGERPRINT, "new": 1}}, "fingerprint.new=null, not 1"),
    ],
)
def test_going_on_with_something_else_is_refused(
    tmp_path: Path, settings: EvolutionSettings, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Stop):
        search(Judge(2), tmp_path / "search.json")
    with pytest.raises(UserError, match=message):
        search(Judge(), tmp_path / "search.json", settings, **changes)


RANDOM = {"bit_generator": "PCG64", "state": {"state": "x"}}
WRONG = json.dumps({"search": {}, "generations": 1, "random": RANDOM, "history": []})


@pytest.mark.parametrize("text", ['{"search": {}, "gener', "[]", "{}", "", WRONG])
def test_a_damaged_checkpoint_is_set_aside_and_the_search_begins_again(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "search.json").write_text(text)
    assert search(Judge(), tmp_path / "search.json") == search(Judge(), None)
    (aside,) = tmp_path.glob("search.json.*.damaged")
    assert aside.read_text() == text and aside.name in capsys.readouterr().out
