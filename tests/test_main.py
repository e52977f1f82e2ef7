"""The command line as a stranger meets it: what it prints, how fast, and what a mistake gets."""

from __future__ import annotations

import os
import re
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


def test_alone_it_says_how_to_start(tmp_path: Path) -> None:
    done = moe_lab(store=tmp_path / "store")
    assert done.returncode == 0
    assert done.stdout.count("python -m moe_lab ") >= 3


def test_help_lists_every_group_quickly(tmp_path: Path) -> None:
    with within(LIMIT, of_children):
        done = moe_lab("--help", store=tmp_path / "store")
    assert all(group in done.stdout for group in ("criterion:", "calibration:", "model:", "suite:", "experiment:"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence_before_anything_heavy(mistake: str, tmp_path: Path) -> None:
    words, sentence = MISTAKES[mistake]
    with within(LIMIT, of_children):
        done = moe_lab(*words, store=tmp_path / "store")
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_several_mistakes_are_told_together(tmp_path: Path) -> None:
    done = moe_lab("calibration.packing=reep", "retry=faild", "suite=pocket61", store=tmp_path / "store")
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("did you mean reap", "did you mean failed", "did you mean pocket16"))


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("experiment", sorted(file.stem for file in (ROOT / "conf/experiment").glob("*.yaml")))
def test_every_experiment_is_ready_to_run(experiment: str, tmp_path: Path) -> None:
    done = moe_lab(f"+experiment={experiment}", "dry_run=true", store=tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{experiment}: ") and "evaluate" in done.stderr


@pytest.mark.parametrize(("words", "count"), [(["criterion=man"], 4), (["criterion=reap,man"], 7), (["-m"], 7)])
def test_what_is_typed_for_an_axis_stands_above_the_lists_of_an_experiment(
    words: list[str], count: int, tmp_path: Path
) -> None:
    """One model on three calibration sets, and the model itself."""
    swept = ["-m", "criterion=man,reap"] if words == ["-m"] else words
    typed = [*swept, "+experiment=task_agnostic", "model=pocket_ernie4_5_moe", "dry_run=true"]
    done = moe_lab(*typed, store=tmp_path / "store")
    assert done.stderr.startswith(f"task_agnostic: {count} cells"), done.stderr


def test_a_sweep_is_a_configuration_in_a_folder_of_yours(tmp_path: Path) -> None:
    """All of them, and what they cost, are tested in one process: test_sweeps.py."""
    where = ("--config-dir", str(ROOT / "sweeps"), "--config-name", "evoesap_table7")
    done = moe_lab(*where, "dry_run=true", store=tmp_path / "store")
    assert done.returncode == 2 and "allow_judge=" in done.stderr, "it is not allowed to ask a judge"
    assert "evoesap_table7: 9 cells" in done.stderr and "GPU-hours" in done.stderr


TYPED = {
    "study=2026_11_25": ("study", "2026_11_25"),
    "study=7e3": ("study", "7e3"),
    "study=true": ("study", "true"),
    "push=me/1234e56": ("push", "me/1234e56"),
    "study='a'": ("study", "a"),
}


@pytest.mark.parametrize("word", TYPED)
def test_a_text_keeps_what_was_typed(word: str) -> None:
    name, value = TYPED[word]
    with started():
        assert getattr(compose([word])[0], name) == value
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


def test_the_advice_for_a_text_with_a_comma_is_a_word_that_works() -> None:
    with started():
        with pytest.raises(SettingsError) as error:
            compose(["store=a, b"])
        (word,) = re.findall(r'"(store=.*?)"', str(error.value))
        assert compose([word])[0].store == "a, b"


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
    read = OverridesParser.create().parse_override(quoted(word)).value()
    assert read == value, quoted(word)
