"""Studies from the command line on the shipped model: shared, repeated, swept."""

import json
import os
import re
import shutil
from collections import Counter
from functools import partial, reduce
from pathlib import Path

import numpy
import pyarrow.parquet
import pytest
import yaml
from studies import executed_steps, moe_lab, results, run_on_boolq

from moe_lab import __main__ as command_line
from moe_lab.errors import run_and_exit
from moe_lab.result_files import read_record
from moe_lab.statistics import read

GRID = ["criterion=man,reap", "ratio=0.25,0.5", "calibration=pocket_code,pocket_math"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the grid has been run by two processes."""
    store = tmp_path_factory.mktemp("finished") / "store"
    result = moe_lab(store, "suite.benchmarks=[pocket_boolq]", *GRID, "launcher.processes=2")
    assert result.returncode == 0, result.stderr
    return store


ROOT = Path(__file__).parents[2]
COMMAND = r"^(?: {4})?moe-lab ((?!run|dry-run).*?)(?: +#.*| && .*)?$"
COMMANDS = {
    page.name: commands
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    if (commands := re.findall(COMMAND, page.read_text("utf-8"), re.MULTILINE))
}
"""Page -> verb and arguments of each of its commands that read results, models or data."""
EXAMPLES = {
    "/shared/me/store": "store",
    "data_root=/data": "data_root=data",
    "store=copy": "store=store",
    "model=NAME": "model=pocket_olmoe",
    "model=DIR": "model=pocket_olmoe",
    "first": "study",
    "NAME": "study",
    "STUDY": "study",
    "study=validate": "study=study",
    "store=$store": "store=store",
    "task_agnostic": "study",
}
"""Example in a page -> its value for the finished study."""
ELSEWHERE = ("FIRST", "HERE", "LOGS", "imported", "pocket_code")
"""Parts of commands that need other studies, stores, texts or logs: test_results.py and
test_foreign.py have them."""
MISSING = {
    "from=": "is no such file or folder",
    "data_root=": "could not be",
    "": "study=study does",
}
"""Setting of commands that need missing files -> their error message; "" for all other commands."""


@pytest.mark.parametrize("page", sorted(COMMANDS))
def test_documented_commands_about_finished_studies_run(
    page: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished, tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    for text in COMMANDS[page]:
        if any(part in text for part in ELSEWHERE):
            continue
        arguments = reduce(lambda text, pair: text.replace(*pair), EXAMPLES.items(), text).split()
        with pytest.raises(SystemExit) as ended:
            run_and_exit(partial(command_line.main, arguments))
        errors = capsys.readouterr().err
        message = next(message for setting, message in MISSING.items() if setting in text)
        assert ended.value.code == 0 or message in errors, (text, errors)


def scores_of(store: Path, study: str) -> list[tuple[float, float]]:
    """Ratio and score of each cell of a study."""
    scores = []
    for cell in (read_record(store, study) or {})["cells"]:
        (folder,) = cell["evaluate"].values()
        (result,) = json.loads((store / folder / "result.json").read_text())["results"]
        assert result["n"] == 8
        scores.append((cell["cell"]["ratio"], result["score"]))
    return scores


def test_shared_steps_ran_once_and_each_cell_has_a_score(finished: Path) -> None:
    kinds = Counter(name.split("/")[0] for name in executed_steps(finished))
    assert kinds == {
        "model": 1,
        "items": 1,
        "statistics": 2,
        "scores": 4,
        "plan": 8,
        "cost": 9,
        "evaluate": 9,
        "contamination": 2,
    }
    assert set(executed_steps(finished).values()) == {1}
    assert not list(finished.glob("partial/*"))
    assert not [*finished.glob("logs/evaluate/*")]
    scores = scores_of(finished, "study")
    assert len(scores) == 9
    assert all(0 <= score <= 1 for _, score in scores)


@pytest.mark.parametrize("launcher", ["study", "basic"])
def test_a_multirun_has_the_cells_and_steps_of_a_grid(finished: Path, launcher: str) -> None:
    steps_before = executed_steps(finished)
    study = f"swept_{launcher}"
    result = run_on_boolq(finished, "-m", *GRID, f"hydra/launcher={launcher}", f"study={study}")
    assert result.returncode == 0, result.stderr
    assert executed_steps(finished) == steps_before
    swept, grid = ((read_record(finished, name) or {})["cells"] for name in (study, "study"))
    assert sorted(map(str, swept)) == sorted(map(str, grid))


SWEEPER = ["-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid"]
SWEEPER += [
    f"hydra.sweeper.{setting}" for setting in ("n_trials=2", "n_jobs=1", "direction=maximize")
]


@pytest.mark.parametrize("launcher", ["study", "basic"])
def test_a_sweeper_finds_the_best_value_of_the_objective(finished: Path, launcher: str) -> None:
    folder = finished / f"by_{launcher}"
    settings = [
        "criterion=man",
        "ratio=0.25,0.5",
        "calibration=pocket_code",
        f"hydra/launcher={launcher}",
        f"hydra.sweep.dir={folder}",
        "objective=Avg",
        f"study=best_{launcher}",
    ]
    result = run_on_boolq(finished, *SWEEPER, *settings, "report=true")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("report: /") == 1, "one report, after both trials"
    assert (finished / f"reports/best_{launcher}/report.html").is_file()
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    scores = dict(scores_of(finished, f"best_{launcher}"))
    ratio = float(best["best_params"]["++ratio"])
    assert best["best_value"] == scores[ratio] == max(scores[0.25], scores[0.5])


@pytest.mark.parametrize(
    ("settings", "message"), [([], "objective"), (["objective=bolq"], "did you mean boolq")]
)
def test_a_sweeper_without_an_objective_is_refused(
    finished: Path, settings: list[str], message: str
) -> None:
    steps_before = executed_steps(finished)
    grid = ["criterion=man", "ratio=0.25,0.5", "calibration=pocket_code"]
    result = run_on_boolq(finished, *SWEEPER, *grid, *settings)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert executed_steps(finished) == steps_before


def test_inline_gives_the_same_results(finished: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = ["criterion=man", "ratio=0.5", "calibration=pocket_code", "launcher=inline"]
    result = run_on_boolq(store, *settings)
    assert result.returncode == 0, result.stderr
    assert len(list(store.glob("*/*/step.json"))) == 10
    assert results(store).items() <= results(finished).items()


MIXTURE = ", ".join(f"{{calibration: pocket_{name}, share: 0.5}}" for name in ("code", "math"))
TOO_SHORT = [
    "criterion=man,random",
    "calibration=mix",
    f"calibration.sources=[{MIXTURE}]",
    "calibration.tokens=100000000",
]
"""A mixture with fewer tokens than are set, which a step finds out."""


def test_a_model_with_thoughts_is_sampled_and_graded_without_them(tmp_path: Path) -> None:
    """The shipped model with a template that begins a thought by plain tokens, and with a mark that
    it writes: a thought ends with its first sentence."""
    model = shutil.copytree(ROOT / "moe_lab/pocket/data/olmoe", tmp_path / "model")
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    (model / "generation_config.json").write_text('{"temperature": 0.9, "eos_token_id": 0}')
    settings = [
        *("model=local", f"+model.path={model}", 'model.thinking_marks=[["<think>","."]]'),
        *("suite.benchmarks=[pocket_gsm8k]", "+protocol.benchmarks.pocket_gsm8k.chat=true"),
        *("protocol.sampling={temperature: null, samples: 2}", "protocol.thinking_tokens=4"),
        *("criterion=aimer", "ratio=0.25", "launcher=inline"),
    ]
    result = run_on_boolq(tmp_path / "store", *settings)
    assert result.returncode == 0, result.stderr
    lines = (ROOT / "moe_lab/pocket/data/benchmarks/gsm8k.jsonl").read_text().splitlines()
    targets = {item["id"]: item["target"].split("#### ")[1] for item in map(json.loads, lines)}
    ends = set()
    for file in tmp_path.glob("store/*/*/samples.parquet"):
        rows = pyarrow.parquet.read_table(file).to_pylist()
        assert len({(row["item"], row["replicate"]) for row in rows}) == len(rows) == 16
        evaluation = json.loads((file.parent / "result.json").read_text())
        assert evaluation["results"][0]["score"] == numpy.mean([row["outcome"] for row in rows])
        assert evaluation["protocol"]["sampling"]["temperature"] == 0.9
        for row in rows:
            is_cut = "." not in row["thought"]
            number = re.search(r"#### (-?\d+)", row["output"] or "")
            assert row["outcome"] == (number is not None and number[1] == targets[row["item"]])
            assert (row["output"] is None) == row["unfinished"] == is_cut
            ends.add((is_cut, row["ended"]))
    assert {(True, "limit"), (False, "end")} <= ends


def test_an_error_in_a_step_stops_dependent_steps_only(tmp_path: Path) -> None:
    store = tmp_path / "store"
    result = run_on_boolq(store, *TOO_SHORT)
    assert result.returncode == 2
    assert "calibration.tokens" in result.stderr
    assert "Traceback" not in result.stderr
    evaluations = {
        cell["cell"]["criterion"]: next(iter(cell["evaluate"].values()))
        for cell in (read_record(store, "study") or {})["cells"]
    }
    assert evaluations["random"]
    assert evaluations["none"]
    assert evaluations["man"] is None
    repeated = run_on_boolq(store, "-m", *TOO_SHORT)
    assert repeated.returncode == 2
    assert "retry=failed" in repeated.stderr


CRITERION = """
from moe_lab.criteria import criterion


@criterion("fewest_negative", needs=("signs",), reference="mine")
def fewest_negative(layer):
    return -layer["negative"]
"""


def test_a_study_runs_the_documented_step_kind(tmp_path: Path) -> None:
    """In a copy of the package with the step kind of docs/architecture.md, and a plugin whose
    criterion needs it. A dry run shows it."""
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    [example] = re.findall(r"```python\n(.*?class Signs\(Step\):.*?)```", page, re.DOTALL)
    (tmp_path / "moe_lab/study/steps/signs.py").write_text(example)
    (tmp_path / "mine.py").write_text(CRITERION)
    store = tmp_path / "store"
    settings = ("criterion=fewest_negative", "plugins=[mine]", "suite.benchmarks=[]")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for further_settings in (["dry_run=true"], []):
        arguments = (*settings, "launcher=inline", *further_settings)
        result = moe_lab(store, *arguments, environment=environment)
        assert result.returncode == 0, result.stderr
        if further_settings:
            rows = [re.findall(r"[\w.]+", line) for line in result.stderr.splitlines()]
            assert ["signs", "1", "0", "1"] in [row[:4] for row in rows]
    [file] = store.glob("signs/*/statistics.safetensors")
    [facts] = store.glob("model/*/facts.json")
    negative = {layer: arrays["negative"] for layer, arrays in read(file).items()}
    layers = json.loads(facts.read_text())["layers"]
    assert {layer: len(counts) for layer, counts in negative.items()} == {
        int(index): layer["n_experts"] for index, layer in layers.items()
    }
    assert all(numpy.all(counts > 0) for counts in negative.values())
    assert len(list(store.glob("plan/*fewest_negative*/plan.json"))) == 1
