"""Studies from the command line on the shipped model: shared, killed, repeated, side by side."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import preloaded
import pytest
import yaml

from moe_lab.results import read_record

SMALL = ["suite.benchmarks=[pocket_boolq]", "suite.limit=8", "calibration.tokens=2048", "report=false"]
GRID = ["criterion=man,reap", "ratio=0.25,0.5", "calibration=pocket_code,pocket_math"]
SWEEP = ["-m", "criterion=man,reap", "ratio=0.25,0.5", "calibration=pocket_code,pocket_math"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(__file__).parents[2] / "moe_lab/pocket/data/olmoe/model.safetensors").exists(),
        reason="no shipped model",
    ),
]


def command(store: Path, *words: str) -> list[str]:
    flags = [word for word in words if word.startswith("-")]
    settings = [word for word in words if not word.startswith("-")]
    return preloaded.command("-m", "moe_lab", *flags, *SMALL, *settings, f"store={store}")


def fresh(store: Path, *words: str) -> list[str]:
    """The same, whose processes import everything anew, with a seed of hashes for each."""
    return [sys.executable, *command(store, *words)[1:]]


def moe_lab(store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(store, *words), capture_output=True, text=True, cwd=store.parent)


def results(store: Path) -> dict[str, bytes]:
    """Everything that was computed, by file; provenance and times are not part of it."""
    files = [file for file in store.glob("*/[!.]*-*/*") if file.is_file() and file.name != "step.json"]
    return {str(file.relative_to(store)): file.read_bytes() for file in files}


def ran(store: Path) -> Counter[str]:
    """Which steps workers were given, and how often."""
    lines = [line for log in (store / "logs").glob("*.log") for line in log.read_text().splitlines()]
    return Counter(line.split()[1] for line in lines if re.match(r"\d\d:\d\d:\d\d \w+/", line))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the grid has been run by two processes."""
    store = tmp_path_factory.mktemp("finished") / "store"
    words = fresh(store, *GRID, "launcher.processes=2")
    done = subprocess.run(words, capture_output=True, text=True, cwd=store.parent)
    assert done.returncode == 0, done.stderr
    return store


def test_shared_steps_ran_once(finished: Path) -> None:
    kinds = Counter(name.split("/")[0] for name in ran(finished))
    assert kinds == {"model": 1, "statistics": 2, "scores": 4, "plan": 8, "cost": 9, "evaluate": 9}
    assert set(ran(finished).values()) == {1} and not list(finished.glob("partial/*"))
    logs = [finished / "logs" / f"{name}.log" for name in ran(finished) if name.startswith("evaluate/")]
    assert [log.read_text().count(" asks, for example: ") for log in logs] == [1] * 9


def test_the_study_lists_every_cell_with_its_results(finished: Path) -> None:
    study = read_record(finished, "study") or {}
    assert len(study["cells"]) == 9
    for cell in study["cells"]:
        (folder,) = cell["evaluate"].values()
        (result,) = json.loads((finished / folder / "result.json").read_text())["results"]
        assert result["n"] == 8 and 0 <= result["score"] <= 1


@pytest.mark.parametrize("launcher", ["study", "basic"])
def test_a_multirun_is_the_same_cells_steps_and_store(finished: Path, launcher: str) -> None:
    before = ran(finished)
    done = moe_lab(finished, *SWEEP, f"hydra/launcher={launcher}", "study=swept_" + launcher)
    assert done.returncode == 0, done.stderr
    assert ran(finished) == before
    swept, grid = ((read_record(finished, name) or {})["cells"] for name in (f"swept_{launcher}", "study"))
    assert sorted(map(str, swept)) == sorted(map(str, grid))


SWEEPER = [
    "-m",
    "hydra/sweeper=optuna",
    "hydra/sweeper/sampler=grid",
    "hydra.sweeper.n_trials=2",
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.direction=maximize",
]


@pytest.mark.parametrize("launcher", ["study", "basic"])
def test_a_sweeper_finds_the_best_value_by_the_objective(finished: Path, launcher: str) -> None:
    words = ["criterion=man", "ratio=0.25,0.5", "calibration=pocket_code", f"hydra/launcher={launcher}"]
    found = finished / f"by_{launcher}"
    sweep = [*SWEEPER, *words, f"hydra.sweep.dir={found}"]
    done = moe_lab(finished, *sweep, "objective=Avg", f"study=best_{launcher}")
    assert done.returncode == 0, done.stderr
    best = yaml.safe_load((found / "optimization_results.yaml").read_text())
    scores = {}
    for cell in (read_record(finished, f"best_{launcher}") or {})["cells"]:
        (folder,) = cell["evaluate"].values()
        (result,) = json.loads((finished / folder / "result.json").read_text())["results"]
        scores[cell["cell"]["ratio"]] = result["score"]
    ratio = float(best["best_params"]["++ratio"])
    assert best["best_value"] == scores[ratio] == max(scores[0.25], scores[0.5])
    before = ran(finished)
    for wrong in ([], ["objective=bolq"]):  # found before anything runs
        refused = moe_lab(finished, *sweep, *wrong)
        assert refused.returncode == 2 and "objective" in refused.stderr and "Traceback" not in refused.stderr
    assert "did you mean boolq" in refused.stderr and ran(finished) == before


def test_a_second_sweep_runs_only_what_is_new(finished: Path, tmp_path: Path) -> None:
    store = shutil.copytree(finished, tmp_path / "store")
    before = ran(store)
    done = moe_lab(store, "criterion=man,frequency", "calibration=pocket_code,pocket_math")
    assert done.returncode == 0, done.stderr
    new = ran(store) - before
    assert Counter(name.split("/")[0] for name in new) == {"scores": 2, "plan": 2, "cost": 2, "evaluate": 2}
    assert all("frequency" in name for name in new)


def test_inline_gives_the_same_results(finished: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = moe_lab(store, "criterion=man", "ratio=0.5", "calibration=pocket_code", "launcher=inline")
    assert done.returncode == 0, done.stderr
    mine, theirs = results(store), results(finished)
    assert len(list(store.glob("*/*/step.json"))) == 8 and mine.items() <= theirs.items()


def test_a_mistake_inside_a_step_stops_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = moe_lab(store, "criterion=man,random", "calibration.tokens=100000000")
    assert done.returncode == 2
    assert "calibration.tokens" in done.stderr and "Traceback" not in done.stderr
    study = read_record(store, "study") or {}
    found = {cell["cell"]["criterion"]: next(iter(cell["evaluate"].values())) for cell in study["cells"]}
    assert found["random"] and found["none"] and found["man"] is None
    again = moe_lab(store, "criterion=man,random", "calibration.tokens=100000000")
    assert "retry=failed" in again.stderr
