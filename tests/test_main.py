"""The command line: its output, its speed, its error messages; and a choice gives the same steps in
every form: `GROUP=x`, a list in a file, `-m GROUP=x,y`, however its file is composed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from processes import children_seconds, time_limit
from transformers import AutoModelForCausalLM

from moe_lab import __main__ as command_line
from moe_lab import grid, plugins
from moe_lab.compose import Groups, compose, hydra_context, multirun_context
from moe_lab.config import Config
from moe_lab.config.base import SettingsError
from moe_lab.errors import UserError, run_and_exit
from moe_lab.overrides import quote_letters
from moe_lab.paths import DATA
from moe_lab.study import run
from moe_lab.study.graph import build
from tests.campaign.commands import MISTAKES

LIMIT = 1.5
"""Seconds of processor time, as tests/processes.py counts them, for --help and for any mistake in
the configuration. Importing torch alone takes longer."""


def moe_lab(*arguments: str, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_lab", *arguments]
    if arguments and "--help" not in arguments:
        command.append(f"store={store}")
    return subprocess.run(command, capture_output=True, text=True, cwd=store.parent)


@pytest.mark.slow
def test_help_lists_every_group_quickly(tmp_path: Path) -> None:
    with time_limit(LIMIT, children_seconds):
        result = moe_lab("run", "--help", store=tmp_path / "store")
    groups = ("criterion:", "calibration:", "model:", "suite:", "experiment:")
    assert all(group in result.stdout for group in groups)


@pytest.mark.slow
def test_a_command_without_arguments_shows_examples(tmp_path: Path) -> None:
    result = moe_lab(store=tmp_path / "store")
    assert result.returncode == 0
    assert result.stdout.count("  moe-lab ") >= 3


@pytest.mark.slow
def test_a_verb_does_not_import_the_command_again() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "moe_lab", "dry-run", "nothing=1"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 2
    assert "moe_lab.__main__" not in result.stderr


# a process takes seconds: tests/campaign makes the others in one
@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*MISTAKES][::8])
def test_a_mistake_is_reported_quickly(mistake: str, tmp_path: Path) -> None:
    arguments, sentence = MISTAKES[mistake]
    with time_limit(LIMIT, children_seconds):
        result = moe_lab(*arguments, store=tmp_path / "store")
    assert result.returncode == 2 and sentence in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not (tmp_path / "store").exists()


def test_a_multirun_loads_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[str] = []
    monkeypatch.setattr(plugins, "load", modules.extend)
    with multirun_context(["-m", "plugins=[mine,yours]", "criterion=man"]):
        assert modules == ["mine", "yours"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["2026_11_25", "7e3", "true", "'a'"])
def test_texts_like_numbers_stay_texts(text: str) -> None:
    others = ["objective=1234e56", "model.revision=1234e56", "calibration.subset=007"]
    with hydra_context():
        settings, ((cells, _), *_) = compose([f"study={text}", *others])
    assert (settings.study, settings.objective) == (text.strip("'"), "1234e56")
    assert (cells[0].model.revision, cells[0].calibration.subset) == ("1234e56", "007")


@pytest.mark.slow
def test_a_comma_list_is_a_grid_and_a_range_has_decimals() -> None:
    comma_lists = ["ratio=.1,.2,.3", "criterion=glob(m*)", "calibration.tokens=1024,2048"]
    ranges = ["ratio=range(0.1,0.35,0.1)", "criterion=m*", "calibration.tokens=choice(1024,2048)"]
    with hydra_context():
        cells, cells_of_ranges = (
            [cell for part, _ in compose(settings)[1] for cell in part]
            for settings in (comma_lists, ranges)
        )
    assert cells == cells_of_ranges
    assert {cell.ratio for cell in cells} == {0.1, 0.2, 0.3}
    assert len(cells) % 6 == 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["store=a,b", "calibration=a,b.txt"])
def test_a_comma_in_a_path_needs_the_suggested_quotes(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a setting without axis, and of a text that exists."""
    monkeypatch.chdir(tmp_path)
    Path("a,b.txt").write_text("words")
    with hydra_context():
        with pytest.raises(SettingsError) as error:
            compose([setting])
        settings, ((cells, _), *_) = compose([str(error.value).split('"')[1]])
    assert setting in (f"store={settings.store}", f"calibration={cells[0].calibration.path}")


@pytest.mark.slow
def test_paths_hub_ids_and_benchmarks_are_choices() -> None:
    """With the same settings as in their long form."""
    short = ["model=owner/MoE-7B", "model.dtype=bfloat16", "calibration=texts/notes.txt"]
    long = ["model=local", "model.path=owner/MoE-7B", "model.name=MoE-7B", "model.dtype=bfloat16"]
    long += ["calibration=text", "calibration.path=texts/notes.txt", "calibration.name=notes.txt"]
    with hydra_context():
        config, requests = compose([*short, "suite=mmlu,arc_easy", "export=none"])
        names = [benchmark.name for _, benchmarks in requests for benchmark in benchmarks]
        assert compose([*long, "suite.benchmarks=[mmlu,arc_easy]"]) == (config, requests)
        assert names == ["mmlu", "arc_easy"]
        cells = compose(["model=owner/first,owner/second,pocket_olmoe", *short[2:]])[1][0][0]
    assert {cell.model.name for cell in cells} >= {"first", "second"}


@pytest.mark.slow
def test_a_model_and_a_text_of_the_user_give_a_ranking_and_checkpoints(tmp_path: Path) -> None:
    shutil.copytree(DATA / "olmoe", tmp_path / "model")
    records = (DATA / "calibration" / "general.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "notes.jsonl").write_text("".join(records[:40]))
    settings = ["model=model", "calibration=notes.jsonl", "criterion=reap,aimer"]
    result = preloaded.run(tmp_path, "moe_lab", "run", *settings, "calibration.tokens=512")
    assert result.returncode == 0, result.stderr
    ranking = re.findall(r"^ +[12] +(REAP|AIMER) ", result.stdout + result.stderr, re.MULTILINE)
    assert {*ranking} == {"REAP", "AIMER"}
    folders = re.findall(r"export: (.*)", result.stdout + result.stderr)
    assert len(folders) == 2
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.num_experts == 24


@pytest.mark.slow
def test_windows_is_refused_in_one_sentence() -> None:
    script = "import sys; sys.platform = 'win32'; import moe_lab.__main__"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "Windows" in line


@pytest.mark.slow
@pytest.mark.parametrize("module", ["moe_lab", "analysis"])
def test_an_interrupt_during_the_imports_is_one_sentence(module: str, tmp_path: Path) -> None:
    (tmp_path / "difflib.py").write_text("raise KeyboardInterrupt\n")  # which our errors import
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", module, "x"], env=environment, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr.strip()) == (130, "stopped")


def test_an_interrupt_inside_a_library_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            None.gone  # type: ignore[attr-defined] # noqa: B018 - as OmegaConf does

    with pytest.raises(SystemExit) as ended:
        run_and_exit(interrupted)
    assert (ended.value.code, capsys.readouterr().err.strip()) == (130, "stopped")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a=/höme/of c", "/höme/of c"),
        ("a='/höme/of, c'", "/höme/of, c"),
        ("a=[/höme, 'ü, \\'x', 3]", ["/höme", "ü, 'x", 3]),
        ("a={b: höme, c: 3}", {"b": "höme", "c": 3}),
    ],
)
def test_a_value_may_have_letters_outside_ascii(override: str, value: object) -> None:
    quoted = quote_letters(override)
    assert OverridesParser.create().parse_override(quoted).value() == value, quoted


CONFIG_FILES: dict[str, dict[str, Any]] = {
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
        "batch_tokens": 1024,
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
StepIds = Callable[..., set[str]]


@pytest.fixture
def step_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepIds:
    """Arguments of a command line -> ids of the steps of its study. The user has CONFIG_FILES."""
    folder = tmp_path / "configs"
    (folder / "experiment").mkdir(parents=True)
    for name, content in CONFIG_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    steps: set[str] = set()

    def note_steps(config: Config, requests: Sequence[grid.Request], **_: Any) -> Any:
        steps.update(step.id for step in build(config, requests).steps)
        return run.RunResult(0, SimpleNamespace(config=config))  # type: ignore[arg-type]

    monkeypatch.setattr(run, "run", note_steps)
    monkeypatch.setattr(sys, "argv", ["moe-lab"])  # Hydra reads and changes it

    def ids(
        *arguments: str, search_path: Sequence[str] = ("--config-dir", str(folder))
    ) -> set[str]:
        steps.clear()
        assert command_line.main([*search_path, *arguments, *ALWAYS, f"store={tmp_path}/s"]) == 0
        return set(steps)

    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_choice_gives_the_same_steps_in_every_form(
    step_ids: StepIds, name: str, tmp_path: Path
) -> None:
    alone = [f"{group}={name}" for group in GROUPS]
    text = "# @package _global_\n" + yaml.safe_dump({"grid": {group: [name] for group in GROUPS}})
    (tmp_path / "configs" / "experiment" / "listed.yaml").write_text(text)
    assert step_ids(*alone) == step_ids("+experiment=listed") == step_ids("-m", *alone)


@pytest.mark.slow
def test_a_list_of_choices_equals_a_multirun(step_ids: StepIds, tmp_path: Path) -> None:
    choices = ("protocol=first,second", "allocation=first,second")
    path = f"hydra.searchpath=[file://{tmp_path / 'configs'}]"
    ids = step_ids(*choices)
    assert ids == step_ids("-m", *choices) == step_ids(path, *choices, search_path=())


@pytest.mark.slow
def test_settings_beside_a_choice_hold_for_every_choice(step_ids: StepIds, tmp_path: Path) -> None:
    experiment = {
        "defaults": [{"override /criterion": "first"}],
        "calibration": {"tokens": 4096},
        "criterion": {"parameters": {"b": 0}},
    }
    text = "# @package _global_\n" + yaml.safe_dump(experiment)
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(text)
    settings = ("+experiment=mine", "calibration.gap=zero")
    choices = ("calibration=second", "criterion=second")
    assert step_ids(*settings, *choices) != step_ids(*choices)
    ids = step_ids(*settings, "calibration=second")
    assert step_ids(*settings, "calibration=second", "calibration.tokens=8192") != ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
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
def test_an_invalid_group_file_is_one_sentence(
    step_ids: StepIds,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    message: str,
) -> None:
    (tmp_path / "configs" / "criterion" / "wrong.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match="2"):
        step_ids("criterion=man,wrong")
    errors = capsys.readouterr().err
    assert re.search(message, errors), errors


@pytest.mark.slow
def test_choices_are_composed_together_as_alone() -> None:
    choices = [
        ("criterion", "man"),
        ("criterion", "reap"),
        ("benchmark", "rte"),
        ("calibration", "pocket_code"),
    ]
    with hydra_context():
        groups = Groups()
        with pytest.raises(UserError, match="criterion=nobody"):
            groups.load([*choices, ("criterion", "nobody")])
        contents = groups.load(choices)
        single = Groups()
        assert contents == {choice: single.load([choice])[choice] for choice in choices}


@pytest.mark.slow
def test_paths_are_relative_to_the_working_directory(tmp_path: Path) -> None:
    """Hydra changes into another folder here."""
    (tmp_path / "notes.txt").write_text("A dog sleeps. " * 2000)
    result = moe_lab(
        "calibration=text",
        "calibration.path=notes.txt",
        "hydra.job.chdir=true",
        "hydra.run.dir=other/${now:%M}",
        "suite.benchmarks=[]",
        "calibration.tokens=512",
        "dry_run=true",
        store=tmp_path / "store",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_removed_working_directory_is_reported(tmp_path: Path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m moe_lab dry_run=true'
    result = subprocess.run(
        ["sh", "-c", script, sys.executable], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 2
    assert "folder was removed" in result.stderr
    assert "Traceback" not in result.stderr
