"""What is installed: plugins from outside the repository, and the wheel, which works outside a
checkout."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import preloaded
import pytest

from moe_lab import __version__, allocation, criteria, plugins
from moe_lab.__main__ import VERBS
from moe_lab.errors import UserError
from moe_lab.result_files import read_record
from moe_lab.start import FILE
from moe_lab.study.steps.scores import step_class

pytestmark = pytest.mark.slow

MODULE = """
import numpy
from moe_lab.allocation import Allocation, register
from moe_lab.allocation.shapes import uniform_experts
from moe_lab.criteria import criterion


@criterion("crest", needs=("statistics",), reference="mine")
def crest(layer, power: float = 1.0):
    mean_square = layer["channel_square"] / numpy.maximum(layer.tokens, 1)[:, None]
    return mean_square.max(axis=1) ** power


def like_uniform(problem):
    return uniform_experts(problem)


register(Allocation("like_uniform", {"expert": like_uniform}))
"""
TABLES = """
from moe_lab.analysis.registry import output
from moe_lab.analysis.render.table import Table


@output("my_cells", chapter="cost")
def my_cells(results):
    \"\"\"Cells of mine\"\"\"
    frame = results.study.cells[["criterion", "allocation"]].astype(str)
    return Table("Cells of mine", "", frame, {})
"""
TINY = """calibration.tokens=1024 calibration.length=128 suite=pocket_quick
suite.benchmarks=[pocket_boolq]
suite.limit=4 launcher.processes=1 store=store"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the package my_methods, whose module `scores` is a plugin."""
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "__init__.py").touch()
    (tmp_path / "my_methods" / "scores.py").write_text(MODULE)
    return tmp_path


def moe_lab(
    folder: Path, *arguments: str, package: str = "moe_lab"
) -> subprocess.CompletedProcess[str]:
    return preloaded.run(folder, package, *arguments, PYTHONPATH=str(folder))


def test_a_study_with_criterion_allocation_and_table_of_plugins(folder: Path) -> None:
    """Its cells, its tables, and the source of the plugin in its steps."""
    (folder / "my_tables.py").write_text(TABLES)
    settings = ["plugins=[my_methods.scores,my_tables]", "criterion=cres*,man"]
    settings.append("allocation=like_uniform")
    result = moe_lab(folder, *settings, *TINY.split())
    assert result.returncode == 0, result.stderr
    record = read_record(folder / "store", "study") or {}
    pruned = [entry["cell"] for entry in record["cells"] if entry["plan"]]
    assert {(cell["criterion"], cell["granularity"], cell["allocation"]) for cell in pruned} == {
        ("crest", "expert", "like_uniform"),
        ("man", "expert", "like_uniform"),
    }
    tables = [*(folder / "store/reports/study").rglob("*.csv")]
    [mine] = [table for table in tables if table.stem == "my_cells"]
    assert "like_uniform" in mine.read_text()
    assert "Cells of mine" in (folder / "store/reports/study/report.html").read_text()
    assert sum("crest" in table.read_text() for table in tables) >= 5
    steps = [json.loads(file.read_text()) for file in folder.glob("store/*/*/step.json")]
    criteria = [step["settings"]["criterion"] for step in steps if step["kind"] == "scores"]
    sources = {criterion["name"]: bool(criterion["source"]) for criterion in criteria}
    assert sources == {"crest": True, "man": False}
    assert all(step["settings"]["allocation"]["source"] for step in steps if step["kind"] == "plan")


def test_equal_scores_are_reported_at_the_end_of_a_study(folder: Path) -> None:
    """Each time the study ends; plans without equal scores are not reported."""
    (folder / "my_methods" / "scores.py").write_text(
        MODULE.replace("return mean_square.max(axis=1) ** power", "return layer.tokens * 0")
    )
    arguments = [
        "plugins=[my_methods.scores]",
        "criterion=crest,man",
        "suite.benchmarks=[]",
        *TINY.split()[:2],
    ]
    for _ in range(2):
        result = moe_lab(folder, *arguments, "store=store", "launcher.processes=1")
        [sentence] = [line for line in result.stderr.splitlines() if "equal scores" in line]
        assert result.returncode == 0
        assert "128 in 4 layers" in sentence
        assert "crest" in sentence
        assert "-man-" not in sentence


def test_an_installed_plugin_needs_no_setting(folder: Path) -> None:
    metadata = folder / "my_methods-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[moe_lab.plugins]\nscores = my_methods.scores\n")
    result = moe_lab(
        folder, "criterion=crest", "criterion.parameters.power=2", "dry_run=true", *TINY.split()
    )
    assert result.returncode == 0 and "study: 2 cells" in result.stderr, result.stderr
    refused = moe_lab(folder, "criterion=crets", "store=store")
    assert refused.returncode == 2
    assert "did you mean crest?" in refused.stderr
    listed = moe_lab(folder, "inspect", "model=pocket_olmoe")
    assert "crest" in listed.stdout, listed.stderr


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise KeyError('a')", "plugins: broken cannot be imported (KeyError: 'a')"),
        ("value = 1", "plugins: broken registers nothing"),
        (
            MODULE.replace("crest", "man"),
            "criterion man of broken is registered already, by moe_lab.criteria.experts",
        ),
        (MODULE.replace('"like_uniform"', '"uniform"'), "allocation=uniform is registered already"),
    ],
)
def test_invalid_plugins_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(criteria, "CRITERIA", known := dict(criteria.CRITERIA))
    monkeypatch.setattr(allocation, "ALLOCATIONS", dict(allocation.ALLOCATIONS))
    with pytest.raises(UserError) as error:
        plugins.load(["broken"])
    sys.modules.pop("broken", None)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert set(known) >= set(criteria.CRITERIA)


def test_a_criterion_that_needs_an_unknown_step_is_refused() -> None:
    with pytest.raises(UserError, match=r"statistic .*did you mean statistics\?"):
        step_class("statistic")


ROOT = Path(__file__).parents[1]
RUNNER = "moe_lab.evaluation.sandbox.runner"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules are called like ours and like some that we import, and fail when they
    are."""
    for name in (
        "moe_lab",
        "moe_lab/study",
        "moe_lab/evaluation",
        "moe_lab/evaluation/sandbox",
    ):
        (tmp_path / name).mkdir()
        for module in ("__init__", "__main__", "worker", "runner", "client"):
            (tmp_path / name / f"{module}.py").write_text(
                "raise SystemExit('a module of the current folder')"
            )
    for name in ("torch", "pandas", "json", "inspect"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current folder')")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["-u", "-m", RUNNER, "none", "/none"], ""),
        (["-m", "moe_lab.analysis", "help"], "unified.table1"),
    ],
)
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONPATH": "packages"},
    ],
    ids=str,
)
def test_programs_start_from_this_installation(
    variables: dict[str, str], arguments: list[str], output: str, hostile: Path
) -> None:
    """Modules of the current folder and packages on PYTHONPATH with the same names are not
    imported."""
    shutil.copytree(hostile / "moe_lab", hostile / "packages/moe_lab")
    result = subprocess.run(
        [sys.executable, FILE, *arguments],
        cwd=hostile,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert output in result.stdout
    assert bool(output) == bool(result.stdout)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which the wheel of this repository is installed."""
    folder = tmp_path_factory.mktemp("wheel") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = packages_of(folder)
    options = ["-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    # the packages of this environment, but not what their .pth files add
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    return folder


def packages_of(environment: Path) -> Path:
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


def test_a_study_of_the_wheel_is_reported_by_the_wheel(hostile: Path, environment: Path) -> None:
    """Workers and report are started in the hostile folder. The programs that train the shipped
    models need a checkout."""
    assert not (packages_of(environment) / "tools").exists()
    start_file = packages_of(environment) / "moe_lab" / "start.py"
    settings = ["criterion=random", "suite.benchmarks=[]", "study=s", "store=store"]
    arguments = ["-m", "moe_lab", "-m", *settings, "launcher.processes=1"]
    result = subprocess.run(
        [environment / "bin" / "python", start_file, *arguments],
        cwd=hostile,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert (hostile / "store/reports/s/report.html").exists()
    assert "a module of the current folder" not in result.stderr


def test_the_wheel_has_one_command(environment: Path, tmp_path: Path) -> None:
    """With every verb in its help; sweeps and examples ship too."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["moe-lab"].split(":")
    script = f"from {module} import {function}; {function}()"

    def run(*arguments: str) -> str:
        return subprocess.run(
            [environment / "bin" / "python", "-c", script, *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        ).stdout

    help_text = run("--help")
    assert all(f"    {verb} " in help_text for verb in VERBS)
    assert run("--version") == run("version") == f"moe_lab {__version__}\n"
    assert "[--apply" in run("gc", "--help")
    packages = packages_of(environment)
    assert f"{packages}/moe_lab/sweeps" in help_text
    assert (packages / "moe_lab" / "py.typed").is_file()
    for folder in ("sweeps", "examples"):
        shipped = {path.name for path in (packages / "moe_lab" / folder).iterdir()}
        assert shipped >= {path.name for path in (ROOT / folder).glob("*.*")}
    sweep = ["--config-dir", "pkg://moe_lab.sweeps", "--config-name", "unified_table1"]
    small = ["model=pocket_olmoe", "calibration=pocket_general", "flops_text=pocket_excerpt"]
    table = run("dry-run", *sweep, *small, "suite.benchmarks=[]")
    assert "statistics" in table and "plan" in table


APPLICATION = """
import hydra
from moe_lab.compose import compose, hydra_context, register_choices

with hydra_context():
    print(compose(["criterion=man", "ratio=0.5"])[1][0][0][-1].criterion.name)
register_choices()


@hydra.main(version_base="1.3", config_path="configs", config_name="app")
def main(config):
    print(config.mine, config.criterion.name, config.calibration.name)


main()
"""
APPLICATION_CONFIG = """
defaults: [criterion: reap, calibration: pocket_code, _self_]
mine: 7
hydra: {searchpath: ["pkg://moe_lab.conf"]}
"""


@pytest.mark.parametrize("is_wheel", [False, True], ids=["clone", "wheel"])
def test_a_foreign_application_of_hydra_composes_our_groups(
    environment: Path, tmp_path: Path, is_wheel: bool
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "app.yaml").write_text(APPLICATION_CONFIG)
    (tmp_path / "app.py").write_text(APPLICATION)
    python = environment / "bin" / "python" if is_wheel else sys.executable
    command = [python, "app.py", "calibration=pocket_math"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == ["man", "7", "reap", "pocket_math"], result.stderr
