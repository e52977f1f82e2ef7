"""The command line as a stranger meets it: what it prints, how fast, and what a mistake gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from budgets import of_children, within
from hydra.core.override_parser.overrides_parser import OverridesParser

from moe_lab.compose import compose, quoted, started
from moe_lab.config.base import SettingsError
from tests.campaign.commands import NEAREST as MISTAKES

pytestmark = pytest.mark.slow

LIMIT = 1.5
"""Seconds of processor time, as tests/budgets.py counts them, for --help and for any mistake in the configuration.
Importing torch alone takes longer."""


def moe_lab(*words: str, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_lab", *words]
    if words and words[0] != "--help":
        command.append(f"store={store}")
    return subprocess.run(command, capture_output=True, text=True, cwd=store.parent)


def test_help_lists_every_group_quickly_and_alone_it_says_how_to_start(tmp_path: Path) -> None:
    with within(LIMIT, of_children):
        done = moe_lab("--help", store=tmp_path / "store")
    assert all(group in done.stdout for group in ("criterion:", "calibration:", "model:", "suite:", "experiment:"))
    done = moe_lab(store=tmp_path / "store")
    assert done.returncode == 0 and done.stdout.count("python -m moe_lab ") >= 3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence_before_anything_heavy(mistake: str, tmp_path: Path) -> None:
    words, sentence = MISTAKES[mistake]
    with within(LIMIT, of_children):
        done = moe_lab(*words, store=tmp_path / "store")
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("typed", ["2026_11_25", "7e3", "true", "'a'"])
def test_a_text_keeps_what_was_typed(typed: str) -> None:
    with started():
        assert compose([f"study={typed}"])[0].study == typed.strip("'")
        assert compose(["push=me/1234e56"])[0].push == "me/1234e56"
        (cells, _), *_ = compose(["model.revision=1234e56", "calibration.subset=007"])[1]
    assert (cells[0].model.revision, cells[0].calibration.subset) == ("1234e56", "007")


def test_a_comma_list_is_a_grid_and_a_range_has_decimals() -> None:
    with started():
        listed = compose(["ratio=.1,.2,.3", "criterion=glob(m*)", "calibration.tokens=1024,2048"])[1]
        ranged = compose(["ratio=range(0.1,0.35,0.1)", "criterion=m*", "calibration.tokens=choice(1024,2048)"])[1]
    cells = [cell for part, _ in listed for cell in part]
    assert cells == [cell for part, _ in ranged for cell in part]
    assert {cell.ratio for cell in cells} == {0.1, 0.2, 0.3} and len(cells) % 6 == 0


REFUSED = {
    "calibration.tokens=[1,2]": "calibration.tokens=[1, 2]: expected a whole number",
    "plugins=[[os]]": "plugins.0=",
    "suite=quick,code": "names several files",
    "store=a,b": "\"store='a,b'\"",
    "grid.criterion=[man]": "setting=grid is unknown",
    "ratio={a: " + "[" * 40 + "1" + "]" * 40 + "}": "ratio=",
    "calibration.tokens=interval(1,2)": "names no values",
    "suite=null": "suite=null is unknown",
    "resources.jobs={scores:{gpu:1}}": "resources.jobs.scores.gpu is not a setting",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_is_one_sentence(word: str) -> None:
    with started(), pytest.raises(SettingsError) as error:
        compose([word])
    (sentence,) = error.value.sentences
    assert REFUSED[word] in sentence
    if word == "store=a,b":
        with started():
            assert compose([sentence.split('"')[1]])[0].store == "a,b", "the advice is a word that works"


@pytest.mark.parametrize("module", ["moe_lab", "moe_lab.study", "moe_lab.inspect", "analysis"])
def test_an_interrupt_during_the_imports_is_one_sentence(module: str, tmp_path: Path) -> None:
    (tmp_path / "difflib.py").write_text("raise KeyboardInterrupt\n")  # which our errors import
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", module, "x"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "stopped")


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
    assert OverridesParser.create().parse_override(quoted(word)).value() == value, quoted(word)
