"""The command line as a stranger meets it: what it prints, how fast, what a mistake gets, and that
a choice means the same in every form: `GROUP=x`, a list in a file, `-m GROUP=x,y`, however its file
is made."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from processes import of_children, within

from moe_lab import __main__ as command_line
from moe_lab import grid
from moe_lab.compose import Groups, compose, started
from moe_lab.config import Config
from moe_lab.config.base import SettingsError
from moe_lab.errors import UserError, end_with
from moe_lab.overrides import quote_letters
from moe_lab.study import run
from moe_lab.study.graph import build
from tests.campaign.commands import NEAREST as MISTAKES

LIMIT = 1.5
"""Seconds of processor time, as tests/processes.py counts them, for --help and for any mistake in
the configuration. Importing torch alone takes longer."""


def moe_lab(*words: str, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_lab", *words]
    if words and words[0] != "--help":
        command.append(f"store={store}")
    return subprocess.run(command, capture_output=True, text=True, cwd=store.parent)


@pytest.mark.slow
def test_help_lists_every_group_quickly_and_alone_it_says_how_to_start(tmp_path: Path) -> None:
    with within(LIMIT, of_children):
        done = moe_lab("--help", store=tmp_path / "store")
    assert all(
        group in done.stdout
        for group in ("criterion:", "calibration:", "model:", "suite:", "experiment:")
    )
    done = moe_lab(store=tmp_path / "store")
    assert done.returncode == 0 and done.stdout.count("python -m moe_lab ") >= 3


# a process takes seconds: tests/campaign makes the others in one
@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*MISTAKES][::5])
def test_a_mistake_gets_one_sentence_before_anything_heavy(mistake: str, tmp_path: Path) -> None:
    words, sentence = MISTAKES[mistake]
    with within(LIMIT, of_children):
        done = moe_lab(*words, store=tmp_path / "store")
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("mistake", [*MISTAKES][:2])
def test_a_mistake_ends_the_command_with_2_and_one_sentence(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, sentence = MISTAKES[mistake]
    monkeypatch.setattr(sys, "argv", ["moe_lab", *words, f"store={tmp_path / 'store'}"])
    with pytest.raises(SystemExit) as ended:
        end_with(command_line.main)
    errors = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert len(errors) == 1 and sentence in errors[0]
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["2026_11_25", "7e3", "true", "'a'"])
def test_a_text_keeps_what_was_typed(typed: str) -> None:
    with started():
        assert compose([f"study={typed}"])[0].study == typed.strip("'")
        assert compose(["objective=1234e56"])[0].objective == "1234e56"
        (cells, _), *_ = compose(["model.revision=1234e56", "calibration.subset=007"])[1]
    assert (cells[0].model.revision, cells[0].calibration.subset) == ("1234e56", "007")


@pytest.mark.slow
def test_a_comma_list_is_a_grid_and_a_range_has_decimals() -> None:
    with started():
        listed = compose(["ratio=.1,.2,.3", "criterion=glob(m*)", "calibration.tokens=1024,2048"])[
            1
        ]
        ranged = compose(
            ["ratio=range(0.1,0.35,0.1)", "criterion=m*", "calibration.tokens=choice(1024,2048)"]
        )[1]
        with pytest.raises(SettingsError) as error:
            compose(["store=a,b"])
        assert compose([str(error.value).split('"')[1]])[0].store == "a,b", "what is advised works"
    cells = [cell for part, _ in listed for cell in part]
    assert cells == [cell for part, _ in ranged for cell in part]
    assert {cell.ratio for cell in cells} == {0.1, 0.2, 0.3} and len(cells) % 6 == 0


@pytest.mark.slow
@pytest.mark.parametrize("module", ["moe_lab", "moe_lab.study", "moe_lab.inspect", "analysis"])
def test_an_interrupt_during_the_imports_is_one_sentence(module: str, tmp_path: Path) -> None:
    (tmp_path / "difflib.py").write_text("raise KeyboardInterrupt\n")  # which our errors import
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", module, "x"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (130, "stopped")


def test_an_interrupt_of_which_a_library_makes_an_error_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            None.gone  # type: ignore[attr-defined] # noqa: B018 - as OmegaConf does

    with pytest.raises(SystemExit) as ended:
        end_with(interrupted)
    assert (ended.value.code, capsys.readouterr().err.strip()) == (130, "stopped")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a=/höme/of c", "/höme/of c"),
        ("a='/höme/of, c'", "/höme/of, c"),
        ("a=[/höme, 'ü, \\'x', 3]", ["/höme", "ü, 'x", 3]),
        ("a={b: höme, c: 3}", {"b": "höme", "c": 3}),
    ],
)
def test_a_value_may_have_letters_outside_ascii(word: str, value: object) -> None:
    assert OverridesParser.create().parse_override(quote_letters(word)).value() == value, (
        quote_letters(word)
    )


FILES: dict[str, dict[str, Any]] = {
    "model/first": {"defaults": ["pocket_olmoe"], "dtype": "float32"},
    "model/second": {"defaults": ["pocket_qwen3_moe", "_self_"], "name": "second"},
    "criterion/first": {
        "defaults": ["s_family", "/mine/exponents@parameters", "_self_"],
        "parameters": {"b": 1},
    },
    "criterion/second": {"defaults": ["first"], "parameters": {"alpha": 0, "beta": 2}},
    "mine/exponents": {"alpha": 1, "beta": 2},
    "calibration/first": {
        "defaults": ["pocket_code"],
        "tokens": 8192,
        "length": 512,
        "batch_size": 2,
    },
    "calibration/second": {"defaults": ["/mine/rows@_here_", "pocket_math"], "name": "second"},
    "mine/rows": {"length": 128, "gap": "eos"},
    "calibration/answered": {
        "defaults": ["pocket_math_search"],
        "name": "answered",
        "tokens": 4096,
    },
    "allocation/first": {"defaults": ["global"], "by": "frequency"},
    "allocation/second": {
        "defaults": ["pocket_evolutionary"],
        "label": "second",
        "search": "answered",
    },
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
        steps.update(step.id for step in build(config, requests).steps)
        return run.Ended(0, SimpleNamespace(config=config))  # type: ignore[arg-type]

    monkeypatch.setattr(run, "run", noting)

    def ids(*words: str, found_by: Sequence[str] = ("--config-dir", str(folder))) -> set[str]:
        steps.clear()
        monkeypatch.setattr(
            sys, "argv", ["moe_lab", *found_by, *words, *ALWAYS, f"store={tmp_path / 'store'}"]
        )
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert ended.value.code == 0
        return set(steps)

    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_choice_is_the_same_steps_in_every_form(asked: Asked, name: str, tmp_path: Path) -> None:
    alone = [f"{group}={name}" for group in GROUPS]
    text = "# @package _global_\n" + yaml.safe_dump({"grid": {group: [name] for group in GROUPS}})
    (tmp_path / "configs" / "experiment").mkdir()
    (tmp_path / "configs" / "experiment" / "listed.yaml").write_text(text)
    assert asked(*alone) == asked("+experiment=listed") == asked("-m", *alone)


@pytest.mark.slow
def test_choices_in_a_list_are_those_of_a_multirun_and_of_hydras_search_path(
    asked: Asked, tmp_path: Path
) -> None:
    words = ("protocol=first,second", "allocation=first,second")
    path = f"hydra.searchpath=[file://{tmp_path / 'configs'}]"
    assert asked(*words) == asked("-m", *words) == asked(path, *words, found_by=())


@pytest.mark.slow
def test_what_is_set_beyond_a_file_holds_for_every_choice(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "configs" / "experiment").mkdir()
    body = {"calibration": {"tokens": 4096}, "criterion": {"parameters": {"b": 0}}}
    text = "# @package _global_\n" + yaml.safe_dump(
        {"defaults": [{"override /criterion": "first"}], **body}
    )
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(text)
    words = ("+experiment=mine", "calibration.gap=zero")
    chosen = ("calibration=second", "criterion=second")
    assert asked(*words, *chosen) != asked(*chosen)
    assert asked(*words, "calibration=second", "calibration.tokens=8192") != asked(
        *words, "calibration=second"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"defaults": ["nobody"]}, "criterion=wrong: .*nobody"),
        ({"defaults": ["/calibration@_global_.calibration: pocket_code"]}, "criterion=wrong"),
        (
            {"name": "man", "parameters": {"b": "${ratio}"}},
            "criterion=wrong: criterion.parameters.b=.*ratio",
        ),
        (
            {"name": "man", "parameters": {"b": "${oc.env:HOME}"}},
            "criterion=wrong: criterion.parameters.b=.*oc.env",
        ),
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


@pytest.mark.slow
def test_choices_are_composed_together_and_alone_alike() -> None:
    with started():
        together = Groups()
        alone = Groups()
        choices = [
            ("criterion", "man"),
            ("criterion", "reap"),
            ("benchmark", "rte"),
            ("calibration", "pocket_code"),
        ]
        with pytest.raises(UserError, match="criterion=nobody"):
            together.load([*choices, ("criterion", "nobody")])
        assert together.load(choices) == {
            choice: alone.load([choice])[choice] for choice in choices
        }


@pytest.mark.slow
def test_paths_are_of_the_folder_in_which_a_command_is_typed(tmp_path: Path) -> None:
    """Also where Hydra changes into another one; and a folder that was removed is named."""
    (tmp_path / "notes.txt").write_text("A dog sleeps. " * 2000)
    words = [
        "calibration=text",
        "calibration.path=notes.txt",
        "hydra.job.chdir=true",
        "hydra.run.dir=other/${now:%M}",
    ]
    done = moe_lab(
        *words,
        "suite.benchmarks=[]",
        "calibration.tokens=512",
        "dry_run=true",
        store=tmp_path / "store",
    )
    assert done.returncode == 0, done.stderr
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m moe_lab dry_run=true'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "folder was removed" in done.stderr
    assert "Traceback" not in done.stderr
