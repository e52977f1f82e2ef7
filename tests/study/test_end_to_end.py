"""Studies from the command line on the shipped model: shared, repeated, swept."""

import json
import os
import re
import shutil
import sys
from collections import Counter
from functools import reduce
from importlib import import_module
from pathlib import Path

import numpy
import pytest
import yaml
from studies import executed_steps, moe_lab, on_boolq, results

from moe_lab.results import read_record
from moe_lab.statistics import read

GRID = ["criterion=man,reap", "ratio=0.25,0.5", "calibration=pocket_code,pocket_math"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the grid has been run by two processes."""
    store = tmp_path_factory.mktemp("finished") / "store"
    done = moe_lab(store, "suite.benchmarks=[pocket_boolq]", *GRID, "launcher.processes=2")
    assert done.returncode == 0, done.stderr
    return store


ROOT = Path(__file__).parents[2]
COMMAND = (
    r"^(?: {4})?python -m "
    r"(analysis|moe_lab\.(?:study|inspect|evaluation\.mirror))\b(.*?)(?: +#.*| && .*)?$"
)
COMMANDS = {
    page.name: found
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    if (found := re.findall(COMMAND, page.read_text("utf-8"), re.MULTILINE))
}
"""Page -> program and words of each of its commands that read results, models or data."""
READERS = {
    "/shared/me/store": "store",
    "store=copy": "store=store",
    "model=NAME": "model=pocket_olmoe",
    "NAME": "study",
    "task_agnostic": "study",
}
"""What a page leaves to its reader, or says of the main job -> what the finished study has."""
ELSEWHERE = {
    "from=": "is no such file or folder",
    "data_root=": "could not be",
    "": "study=study does",
}
"""Words of commands that need what is not here -> what they say before they do anything."""


@pytest.mark.parametrize("page", sorted(COMMANDS))
def test_commands_about_finished_studies_run(
    page: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished, tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    for program, written in COMMANDS[page]:
        words = reduce(lambda text, pair: text.replace(*pair), READERS.items(), written).split()
        module = import_module(
            f"{program}.__main__" if program in ("analysis", "moe_lab.study") else program
        )
        monkeypatch.setattr(sys, "argv", [program, *words])
        code = module.main() if program == "moe_lab.study" else module.main(words)
        missing = next(says for word, says in ELSEWHERE.items() if word in written)
        assert code == 0 or missing in (said := capsys.readouterr().err), (written, code, said)


def scores_of(store: Path, study: str) -> list[tuple[float, float]]:
    """Ratio and score of each cell of a study."""
    scores = []
    for cell in (read_record(store, study) or {})["cells"]:
        (folder,) = cell["evaluate"].values()
        (result,) = json.loads((store / folder / "result.json").read_text())["results"]
        assert result["n"] == 8
        scores.append((cell["cell"]["ratio"], result["score"]))
    return scores


def test_shared_steps_ran_once(finished: Path) -> None:
    kinds = Counter(name.split("/")[0] for name in executed_steps(finished))
    assert kinds == {
        "model": 1,
        "statistics": 2,
        "scores": 4,
        "plan": 8,
        "cost": 9,
        "evaluate": 9,
        "contamination": 2,
    }
    assert set(executed_steps(finished).values()) == {1} and not list(finished.glob("partial/*"))
    # small steps have no files of their own
    printed = [log.read_text() for log in finished.glob("logs/*-worker.log")]
    assert sum(text.count(" asks, for example: ") for text in printed) == 9 and not [
        *finished.glob("logs/evaluate/*")
    ]
    scores = scores_of(finished, "study")
    assert len(scores) == 9 and all(0 <= score <= 1 for _, score in scores)


@pytest.mark.parametrize("launcher", ["study", "basic"])
def test_a_multirun_is_the_same_cells_steps_and_store(finished: Path, launcher: str) -> None:
    before = executed_steps(finished)
    done = on_boolq(finished, "-m", *GRID, f"hydra/launcher={launcher}", "study=swept_" + launcher)
    assert done.returncode == 0, done.stderr
    assert executed_steps(finished) == before
    swept, grid = (
        (read_record(finished, name) or {})["cells"] for name in (f"swept_{launcher}", "study")
    )
    assert sorted(map(str, swept)) == sorted(map(str, grid))


SWEEPER = ["-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid"]
SWEEPER += [
    f"hydra.sweeper.{setting}" for setting in ("n_trials=2", "n_jobs=1", "direction=maximize")
]


@pytest.mark.parametrize("launcher", ["study", "basic"])
def test_a_sweeper_finds_the_best_value_by_the_objective(finished: Path, launcher: str) -> None:
    words = [
        "criterion=man",
        "ratio=0.25,0.5",
        "calibration=pocket_code",
        f"hydra/launcher={launcher}",
    ]
    found = finished / f"by_{launcher}"
    words += [f"hydra.sweep.dir={found}", "objective=Avg", f"study=best_{launcher}"]
    done = on_boolq(finished, *SWEEPER, *words)
    assert done.returncode == 0, done.stderr
    best = yaml.safe_load((found / "optimization_results.yaml").read_text())
    scores = dict(scores_of(finished, f"best_{launcher}"))
    ratio = float(best["best_params"]["++ratio"])
    assert best["best_value"] == scores[ratio] == max(scores[0.25], scores[0.5])


@pytest.mark.parametrize(
    ("wrong", "says"), [([], "objective"), (["objective=bolq"], "did you mean boolq")]
)
def test_a_sweeper_without_an_objective_is_refused(
    finished: Path, wrong: list[str], says: str
) -> None:
    before = executed_steps(finished)
    refused = on_boolq(
        finished, *SWEEPER, "criterion=man", "ratio=0.25,0.5", "calibration=pocket_code", *wrong
    )
    assert refused.returncode == 2 and says in refused.stderr and "Traceback" not in refused.stderr
    assert executed_steps(finished) == before


def test_inline_gives_the_same_results(finished: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = on_boolq(
        store, "criterion=man", "ratio=0.5", "calibration=pocket_code", "launcher=inline"
    )
    assert done.returncode == 0, done.stderr
    mine = results(store)
    theirs = results(finished)
    assert len(list(store.glob("*/*/step.json"))) == 9 and mine.items() <= theirs.items()


def test_a_mistake_inside_a_step_stops_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    """A mixture that is too short, which is known when its sets are read."""
    store = tmp_path / "store"
    sets = ",".join(f"{{calibration:pocket_{name},share:0.5}}" for name in ("code", "math"))
    words = [
        "criterion=man,random",
        "calibration=mix",
        f"calibration.sources=[{sets}]",
        "calibration.tokens=100000000",
    ]
    done = on_boolq(store, *words)
    assert done.returncode == 2
    assert "calibration.tokens" in done.stderr and "Traceback" not in done.stderr
    study = read_record(store, "study") or {}
    found = {
        cell["cell"]["criterion"]: next(iter(cell["evaluate"].values())) for cell in study["cells"]
    }
    assert found["random"] and found["none"] and found["man"] is None
    again = on_boolq(store, *words)
    assert "retry=failed" in again.stderr


CRITERION = """
from moe_lab.criteria import criterion


@criterion("fewest_negative", needs=("signs",), reference="mine")
def fewest_negative(layer):
    return -layer["negative"]
"""


def test_a_kind_of_step_is_added_by_writing_the_file_that_the_documentation_shows(
    tmp_path: Path,
) -> None:
    """A criterion can then need it, a dry run shows it, a study runs it: in a copy of the
    package."""
    for name in ("moe_lab", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    [example] = re.findall(r"```python\n(.*?class Signs\(Step\):.*?)```", text, re.DOTALL)
    (tmp_path / "moe_lab/study/steps/signs.py").write_text(example)
    (tmp_path / "mine.py").write_text(CRITERION)
    words = [
        "criterion=fewest_negative",
        "plugins=[mine]",
        "suite.benchmarks=[]",
        "launcher=inline",
    ]
    store = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown, done = (
        moe_lab(store, *words, dry_run, environment=environment)
        for dry_run in ("dry_run=true", "dry_run=false")
    )
    assert shown.returncode == done.returncode == 0, shown.stderr + done.stderr
    rows = [re.findall(r"[\w.]+", line) for line in shown.stderr.splitlines()]
    assert ["signs", "1", "0", "1"] in [row[:4] for row in rows]
    [file] = store.glob("signs/*/statistics.safetensors")
    [facts] = store.glob("model/*/facts.json")
    sums = read(file)
    experts = {
        int(layer): about["n_experts"]
        for layer, about in json.loads(facts.read_text())["layers"].items()
    }
    assert {layer: len(arrays["negative"]) for layer, arrays in sums.items()} == experts
    assert all(numpy.all(arrays["negative"] > 0) for arrays in sums.values())
    assert len(list(store.glob("plan/*fewest_negative*/plan.json"))) == 1
