"""The command line as a stranger meets it: what it prints, how fast, and what a mistake gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from budgets import of_children, within
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

from moe_lab.__main__ import main
from moe_lab.compose import compose_plain, quoted, register
from moe_lab.paths import conf
from tests.campaign.commands import NEAREST as MISTAKES

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
    done = moe_lab("calibration.packing=reep", "allocation.name=unifrom", "suite=pocket16", store=tmp_path / "store")
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("did you mean reap", "did you mean uniform", "allow_code_execution"))


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("experiment", sorted(file.stem for file in (ROOT / "conf/experiment").glob("*.yaml")))
def test_every_experiment_is_ready_to_run(experiment: str, tmp_path: Path) -> None:
    done = moe_lab(f"+experiment={experiment}", "dry_run=true", store=tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{experiment}: ") and "evaluate" in done.stderr


@pytest.mark.parametrize(
    ("words", "count"), [(["criterion=man"], 4), (["criterion=man", "grid.criterion=[reap,man]"], 7), (["-m"], 7)]
)
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
    assert done.returncode == 2 and "this cannot start yet" in done.stderr, "it is not allowed to ask a judge"
    assert done.stderr.startswith("evoesap_table7: 9 cells") and "GPU-hours" in done.stderr


def test_a_start_composes_its_configuration_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[str] = []
    load = ConfigStore.load
    monkeypatch.setattr(
        ConfigStore, "load", lambda store, config_path: (loaded.append(config_path), load(store, config_path))[1]
    )
    monkeypatch.setattr(sys, "argv", ["moe_lab", "seed=-1", f"store={tmp_path / 'store'}"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # which main sets
    with pytest.raises(SystemExit):
        main()
    assert loaded.count("schema.yaml") == 1


@pytest.mark.parametrize("setting", [{"mode": "MULTIRUN"}, {"output_subdir": ".hydra"}, {"job": {"chdir": True}}])
def test_a_file_may_ask_hydra_for_more_than_a_configuration(setting: dict[str, object]) -> None:
    register()
    ConfigStore.instance().store("more", {"hydra": setting}, group="experiment", package="_global_")
    with initialize_config_dir(str(conf()), version_base="1.3"):
        assert compose_plain(["seed=1"]) is not None
        assert compose_plain(["+experiment=more"]) is None


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
