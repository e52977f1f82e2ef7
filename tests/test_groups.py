"""A choice means the same in every form: `GROUP=x`, a list in a file, `-m GROUP=x,y`, however its file is made."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from moe_lab import __main__ as command_line
from moe_lab import compose, grid
from moe_lab.config import Config
from moe_lab.errors import UserError
from moe_lab.study import preflight, run
from moe_lab.study.graph import build

pytestmark = pytest.mark.slow

FILES: dict[str, dict[str, Any]] = {
    "model/first": {"defaults": ["pocket_olmoe"], "dtype": "float32"},
    "model/second": {"defaults": ["pocket_qwen3_moe", "_self_"], "name": "second"},
    "criterion/first": {"defaults": ["s_family", "/mine/exponents@parameters", "_self_"], "parameters": {"b": 1}},
    "criterion/second": {"defaults": ["first"], "parameters": {"alpha": 0, "beta": 2}},
    "mine/exponents": {"alpha": 1, "beta": 2},
    "calibration/first": {"defaults": ["pocket_code"], "tokens": 8192, "length": 512, "batch_size": 2},
    "calibration/second": {"defaults": ["/mine/rows@_here_", "pocket_math"], "name": "second"},
    "mine/rows": {"length": 128, "gap": "eos"},
    "calibration/answered": {"defaults": ["pocket_math_search"], "name": "answered", "tokens": 4096},
    "allocation/first": {"defaults": ["global"], "by": "frequency"},
    "allocation/second": {"defaults": ["pocket_evolutionary"], "label": "second", "search": "answered"},
    "recovery/first": {"defaults": ["nf4"], "modules": ["experts"]},
    "recovery/second": {"defaults": ["pocket_dora"], "rank": 4, "instructions": "answered"},
    "protocol/first": {"defaults": ["coverage"], "name": "first"},
    "protocol/second": {"name": "second", "benchmarks": {"first": {"shots": 2}}},
    "benchmark/first": {"defaults": ["pocket_rte"], "batch_size": 2},
    "suite/first": {"benchmarks": ["first", "pocket_boolq"]},
}
"""Group and name -> content; each needs more than its own file."""
GROUPS = ["model", "criterion", "calibration", "allocation", "recovery", "protocol"]
ALWAYS = ["suite=first", "flops_text=first", "seed=2"]
Asked = Callable[..., set[str]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The ids of the steps that a command line asks for, with FILES in a folder of the user's."""
    folder = tmp_path / "configs"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    steps: set[str] = set()

    def noting(config: Config, requests: Sequence[grid.Request], **_: Any) -> Any:
        steps.update(step.id for step in build(config, requests).steps())
        return run.Ended(0, SimpleNamespace(config=config))  # type: ignore[arg-type]

    monkeypatch.setattr(run, "run", noting)
    monkeypatch.setattr(preflight, "preflight", lambda *_: [])

    def ids(*words: str, found_by: Sequence[str] = ("--config-dir", str(folder))) -> set[str]:
        steps.clear()
        monkeypatch.setattr(sys, "argv", ["moe_lab", *found_by, *words, *ALWAYS, f"store={tmp_path / 'store'}"])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert ended.value.code == 0
        return set(steps)

    return ids


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_choice_is_the_same_steps_in_every_form(asked: Asked, name: str, tmp_path: Path) -> None:
    alone = [f"{group}={name}" for group in GROUPS]
    text = "# @package _global_\n" + yaml.safe_dump({"grid": {group: [name] for group in GROUPS}})
    (tmp_path / "configs" / "experiment").mkdir()
    (tmp_path / "configs" / "experiment" / "listed.yaml").write_text(text)
    assert asked(*alone) == asked("+experiment=listed") == asked("-m", *alone)


def test_choices_in_a_list_are_those_of_a_multirun(asked: Asked) -> None:
    both = asked("protocol=first,second", "allocation=first,second")
    assert both == asked("-m", "protocol=first,second", "allocation=first,second")


def test_what_is_set_beyond_a_file_holds_for_every_choice(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "configs" / "experiment").mkdir()
    body = {"calibration": {"tokens": 4096}, "criterion": {"parameters": {"b": 0}}}
    text = "# @package _global_\n" + yaml.safe_dump({"defaults": [{"override /criterion": "first"}], **body})
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(text)
    words = ("+experiment=mine", "calibration.gap=zero")
    chosen = ("calibration=second", "criterion=second")
    assert asked(*words, *chosen) != asked(*chosen)
    assert asked(*words, "calibration=second", "calibration.tokens=8192") != asked(*words, "calibration=second")


def test_a_folder_can_be_said_by_hydras_search_path(asked: Asked, tmp_path: Path) -> None:
    path = f"hydra.searchpath=[file://{tmp_path / 'configs'}]"
    assert asked(path, "criterion=second", found_by=()) == asked("criterion=second")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"defaults": ["nobody"]}, "criterion=wrong: .*nobody"),
        ({"defaults": ["/calibration@_global_.calibration: pocket_code"]}, "criterion=wrong"),
        ({"name": "man", "parameters": {"b": "${ratio}"}}, "criterion=wrong: criterion.parameters.b=.*ratio"),
        ({"name": "man", "parameters": {"b": "${oc.env:HOME}"}}, "criterion=wrong: criterion.parameters.b=.*oc.env"),
        ({"name": 7}, "criterion=wrong: criterion.name=7"),
        ({"nam": "man"}, r"criterion=wrong: criterion.nam .*criterion.name\?"),
    ],
)
def test_a_file_that_cannot_be_a_choice_is_one_sentence(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str
) -> None:
    (tmp_path / "configs" / "criterion" / "wrong.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(AssertionError):
        asked("criterion=man,wrong")
    assert re.search(says, said := capsys.readouterr().err), said


def test_choices_are_composed_together_and_alone_alike() -> None:
    with compose.started():
        together, alone = compose.Groups(), compose.Groups()
        choices = [("criterion", "man"), ("criterion", "reap"), ("benchmark", "rte"), ("calibration", "pocket_code")]
        with pytest.raises(UserError, match="criterion=nobody"):
            together.load([*choices, ("criterion", "nobody")])
        assert together.load(choices) == {choice: alone.load([choice])[choice] for choice in choices}
