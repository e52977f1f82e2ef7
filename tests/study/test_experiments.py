"""Every shipped experiment runs to its page, alone and beside the others in one store, with as
little as shows it."""

import html
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest

from moe_lab.analysis.__main__ import main
from moe_lab.analysis.report import Publisher

ROOT = Path(__file__).parents[2]
SMALL = ["calibration.tokens=2048", "suite.limit=2", "launcher=inline", "report=false"]
CHOICES = "suite.benchmarks=[pocket_arc_challenge,pocket_winogrande]"
TWO_MODELS = "model=pocket_olmoe,pocket_qwen3_moe"
MIXED = "suite.benchmarks=[pocket_arc_challenge,pocket_gsm8k,pocket_livecodebench]"
LESS = {
    "coverage": [CHOICES, "seed=42"],
    "heapr": [CHOICES, "seed=42", "ratio=0.2,0.4"],
    "aimer": [MIXED, "ratio=0.5", "criterion=aimer,random,reap", "seed=42,43"],
    "evoesap": [CHOICES, "ratio=0.25", "criterion=reap"],
    "quantized": [CHOICES, "ratio=0.0,0.5"],
    "validate": [
        CHOICES,
        "model=pocket_olmoe",
        "calibration=pocket_general",
        "flops_text=pocket_excerpt",
    ],
    "methods": [CHOICES, "ratio=0.5", "seed=42"],
    "beyond": [CHOICES, "model=pocket_olmoe"],
    "task_specific": [MIXED, TWO_MODELS, "ratio=0.5", "criterion=reap,man"],
    "task_agnostic": [
        CHOICES,
        TWO_MODELS,
        "criterion=frequency,reap,man",
        "calibration=pocket_general,pocket_code",
    ],
}
"""Experiment -> the suite, and what is left out of the grid: values that show what others of their
axis show."""
FEWER = """more:
  - {criterion: [heapr], allocation: [global]}
  - {criterion: [reap], recovery: [pocket_router_kd]}
"""
"""Further grids of `beyond`; its other methods are run by test_methods.py."""
SHORTER = [
    (
        "allocation/pocket_evolutionary.yaml",
        r"  population:(.|\n)*",
        "  population: 3\n  elites: 1\n  generations: 1\n",
    ),
    ("experiment/beyond.yaml", r"more:\n(.|\n)*", FEWER),
    ("recovery/*.yaml", r"\nepochs: .*", "\nepochs: 0.1"),
    ("calibration/pocket_excerpt.yaml", "tokens: 4096", "tokens: 512"),
]
"""Files of the configuration, what is replaced in them, and what by."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all experiments, so that steps that they share are computed once."""
    return tmp_path_factory.mktemp("experiments") / "store"


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped configuration, with short searches, fine-tunings and texts for FLOPs: words on
    the command line would hold for all allocations or recoveries of a grid."""
    folder = tmp_path_factory.mktemp("short") / "conf"
    shutil.copytree(ROOT / "conf", folder)
    for pattern, old, new in SHORTER:
        for file in folder.glob(pattern):
            text, count = re.subn(old, new, file.read_text(encoding="utf-8"))
            assert count == 1 or "*" in pattern
            file.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def report(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], None]:
    """Makes the page of a study, which must be there and lack nothing; figures are drawn for the
    page alone."""

    def make(study: str) -> None:
        monkeypatch.setattr(Publisher, "_write", lambda *_: [tmp_path])
        code = main(["report", f"store={store}", f"study={study}", f"out={tmp_path}"])
        assert code == 0 and not list(tmp_path.glob("failed/*")), capsys.readouterr().err
        assert "Nothing is missing" in html.unescape(
            (tmp_path / "report.html").read_text(encoding="utf-8")
        )

    return make


@pytest.mark.parametrize(
    "experiment", sorted(file.stem for file in (ROOT / "conf/experiment").glob("*.yaml"))
)
def test_an_experiment_runs_to_its_page(
    experiment: str, store: Path, conf: Path, tmp_path: Path, report: Callable[[str], None]
) -> None:
    arguments = ["--config-dir", str(conf), f"+experiment={experiment}", *SMALL, *LESS[experiment]]
    result = preloaded.run(tmp_path, "moe_lab", *arguments, f"store={store}")
    assert result.returncode == 0, result.stderr
    report(experiment)


def test_all_experiments_of_a_store_stand_on_one_page(report: Callable[[str], None]) -> None:
    report("all")
