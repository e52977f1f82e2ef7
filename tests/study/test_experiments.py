"""Every shipped experiment runs to its page, alone and beside the others in one store, with as little as shows it."""

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest

from analysis.__main__ import main
from analysis.render import style

ROOT = Path(__file__).parents[2]
SMALL = ["calibration.tokens=2048", "suite.limit=2", "launcher=inline", "report=false"]
CHOICES = "suite.benchmarks=[pocket_arc_challenge,pocket_winogrande]"
MIXED = "suite.benchmarks=[pocket_arc_challenge,pocket_gsm8k,pocket_livecodebench]"
LESS = {
    "coverage": [CHOICES, "seed=42"],
    "heapr": [CHOICES, "seed=42"],
    "aimer": [MIXED, "ratio=0.5", "criterion=aimer,random,reap"],
    "evoesap": [CHOICES, "ratio=0.25", "criterion=reap"],
    "quantized": [CHOICES, "ratio=0.0,0.5"],
    "methods": [CHOICES, "ratio=0.5", "seed=42"],
    "beyond": [CHOICES, "model=pocket_olmoe"],
    "task_specific": [MIXED, "ratio=0.5", "criterion=reap,man"],
    "task_agnostic": [CHOICES, "criterion=frequency,reap,man", "calibration=pocket_general,pocket_code"],
}
"""Experiment -> the suite, and what is left out of the grid: values that show what others of their axis show."""
FEWER = """more:
  - {criterion: [heapr], allocation: [global]}
  - {criterion: [reap], recovery: [pocket_router_kd]}
"""
"""Further grids of `beyond`; its other methods are run by test_methods.py."""
SHORT_SEARCH = """
  population: 4
  elites: 2
  generations: 2
"""
"""Parameters of the allocation pocket_evolutionary that are enough for a plan and a history."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all experiments: what they share is computed once."""
    return tmp_path_factory.mktemp("experiments") / "store"


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped configuration, with short searches, fine-tunings and texts for FLOPs: words on the command line would
    hold for all allocations or recoveries of a grid."""
    folder = tmp_path_factory.mktemp("short") / "conf"
    shutil.copytree(ROOT / "conf", folder)
    file = folder / "allocation" / "pocket_evolutionary.yaml"
    before, _, _ = file.read_text(encoding="utf-8").partition("\n  population:")
    file.write_text(before + SHORT_SEARCH, encoding="utf-8")
    file = folder / "experiment" / "beyond.yaml"
    before, _, _ = file.read_text(encoding="utf-8").partition("more:\n")
    file.write_text(before + FEWER, encoding="utf-8")
    for file in (folder / "recovery").glob("*.yaml"):
        file.write_text(re.sub(r"\nepochs: .*", "\nepochs: 0.1", file.read_text(encoding="utf-8")), encoding="utf-8")
    file = folder / "calibration" / "pocket_excerpt.yaml"
    text = file.read_text(encoding="utf-8")
    assert "tokens: 4096" in text
    file.write_text(text.replace("tokens: 4096", "tokens: 512"), encoding="utf-8")
    return folder


@pytest.fixture
def report(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], None]:
    """Makes the page of a study, which must be there and lack nothing; figures are drawn for the page alone."""

    def make(study: str) -> None:
        monkeypatch.setattr(style, "write", lambda figure, folder, _: [folder / figure.name])
        code = main(["report", f"store={store}", f"study={study}", f"out={tmp_path}"])
        assert code == 0 and not list(tmp_path.glob("failed/*")), capsys.readouterr().err
        assert "Nothing is missing" in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))

    return make


@pytest.mark.parametrize("experiment", sorted(file.stem for file in (ROOT / "conf/experiment").glob("*.yaml")))
def test_an_experiment_runs_to_its_page(
    experiment: str, store: Path, conf: Path, tmp_path: Path, report: Callable[[str], None]
) -> None:
    words = ["--config-dir", str(conf), f"+experiment={experiment}", *SMALL, *LESS[experiment]]
    command = preloaded.command("-m", "moe_lab", *words)
    done = subprocess.run([*command, f"store={store}"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report(experiment)


def test_all_experiments_of_a_store_stand_on_one_page(report: Callable[[str], None]) -> None:
    report("all")
