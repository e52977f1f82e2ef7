"""Every file under conf/ says what it is and fits its dataclass; every field of the configuration is explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import choices
import pytest
from omegaconf import OmegaConf

from moe_lab import config, grid
from moe_lab.config.base import valid

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
DATA = ROOT / "moe_lab" / "pocket" / "data"

SCHEMAS: dict[str, type] = {
    "model": config.ModelConfig,
    "criterion": config.CriterionConfig,
    "calibration": config.CalibrationConfig,
    "allocation": config.AllocationConfig,
    "recovery": config.RecoveryConfig,
    "export": config.ExportConfig,
    "benchmark": config.BenchmarkConfig,
    "suite": config.SuiteConfig,
    "protocol": config.ProtocolConfig,
    "judge": config.JudgeConfig,
    "backend": config.BackendConfig,
    "launcher": config.LauncherConfig,
    "resources": config.ResourcesConfig,
    "tracker": config.TrackerConfig,
}
GIVEN: dict[str, Any] = {
    "path": "some/set",
    "sources": [{"calibration": "c4", "share": 0.5}, {"calibration": "tulu_math", "share": 0.5}],
}
"""What a file may leave to the user, and an example of it."""
FILES = sorted(file for group in SCHEMAS for file in (CONF / group).glob("*.yaml"))


def label(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def content(group: str, name: str) -> Any:
    return OmegaConf.load(CONF / group / f"{name}.yaml")


def names(group: str) -> set[str]:
    return {file.stem for file in (CONF / group).glob("*.yaml")}


def test_every_group_has_files_and_every_folder_is_a_group() -> None:
    assert {file.parent.name for file in FILES} == set(SCHEMAS)
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} == {*SCHEMAS, "experiment"}


@pytest.mark.parametrize("file", FILES, ids=label)
def test_a_group_file_fits_its_dataclass_and_is_named_as_it_says(file: Path) -> None:
    group, loaded = file.parent.name, OmegaConf.load(file)
    given = {name: GIVEN[name] for name in loaded if OmegaConf.is_missing(loaded, name)}
    found = valid(SCHEMAS[group], {**choices.content(group, file.stem), **given}, group)
    if group == "export":
        assert (found.shape or "none") == file.stem
    else:
        other = group == "criterion" or (group == "allocation" and {"label", "replacement", "protect"} & set(loaded))
        assert getattr(found, "name", file.stem) == file.stem or other
    assert len(loaded) <= 14, "a small file"


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONF)))
def test_a_file_says_in_its_first_lines_what_it_is(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if not line.startswith("# @package"))
    assert first.startswith("# ") and len(first.split()) >= 5
    assert max(map(len, lines)) <= 125


@pytest.mark.parametrize("group", sorted(set(SCHEMAS) - {"launcher", "benchmark"}))
def test_a_group_file_says_how_it_is_called(group: str) -> None:
    for name in names(group):
        head = [line for line in (CONF / group / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
        assert any(f"Use: {group}={name}" in line for line in head), f"{group}/{name}"


@pytest.mark.parametrize("name", sorted(names("suite")))
def test_a_suite_names_benchmarks_that_exist(name: str) -> None:
    listed = content("suite", name).benchmarks
    assert listed and set(listed) <= names("benchmark")
    assert len(set(listed)) == len(listed)


def reported(suite: str) -> list[str]:
    return [result for name in content("suite", suite).benchmarks for result in content("benchmark", name).reports]


def test_pocket16_reports_the_sixteen_results_of_the_papers() -> None:
    code = ["humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "livecodebench"]
    choice = ["arc_challenge", "arc_easy", "boolq", "hellaswag", "mmlu", "openbookqa", "rte", "winogrande"]
    assert sorted(reported("pocket16")) == sorted([*code, *choice, "wildbench", "gsm8k", "math500"])


def test_the_metrics_are_those_the_papers_print() -> None:
    metrics: dict[str, set[str]] = {}
    for benchmark in (content("benchmark", name) for name in names("benchmark")):
        for result, metric in benchmark.reports.items() if benchmark.harness == "lm_eval" else ():
            metrics.setdefault(metric, set()).add(result)
    assert metrics["acc_norm"] == {"arc_challenge", "arc_easy", "hellaswag", "openbookqa"}
    assert metrics["acc"] == {"boolq", "mmlu", "rte", "winogrande", "piqa", "mathqa"}


@pytest.mark.parametrize("name", sorted(names("protocol")))
def test_a_protocol_says_what_differs_of_benchmarks_that_exist(name: str) -> None:
    for benchmark, differing in content("protocol", name).get("benchmarks", {}).items():
        own = choices.choose(config.BenchmarkConfig, "benchmark", benchmark)
        asked = replace(own, **OmegaConf.to_container(differing))
        assert set(asked.reports) == set(own.reports), "the same results, measured otherwise"
        assert set(differing) <= {"reports", "shots", "max_length", "max_new_tokens"}


def test_the_protocols_of_one_paper_differ_in_the_accuracy() -> None:
    suite = set(content("suite", "heapr7").benchmarks)
    for name, normalised in (("heapr", set()), ("heapr_norm", suite - {"winogrande"})):
        protocol = content("protocol", name).benchmarks
        assert set(protocol) == suite
        assert {each for each in suite if "acc_norm" in protocol[each].reports.values()} == normalised


POCKET = sorted(name for name in names("benchmark") if name.startswith("pocket_"))


@pytest.mark.parametrize("name", POCKET)
def test_a_shipped_benchmark_has_its_data_and_as_many_items_as_it_says(name: str) -> None:
    benchmark = content("benchmark", name)
    task = DATA / benchmark.task.removeprefix("pocket:")
    assert task.exists()
    with task.with_suffix(".jsonl").open(encoding="utf-8") as lines:
        assert sum(1 for _ in lines) == benchmark.expected


@pytest.mark.parametrize("name", POCKET)
def test_whatever_writes_text_says_how_much(name: str) -> None:
    benchmark = content("benchmark", name)
    written = any(metric in ("base", "plus", "score", "exact_match") for metric in benchmark.reports.values())
    assert (benchmark.get("max_new_tokens", 0) > 0) is (written or benchmark.harness == "function_calls")


def test_a_criterion_file_names_a_criterion_that_takes_its_parameters() -> None:
    """A criterion without a file is a choice without parameters: test_plugins.py."""
    from moe_lab.criteria import check

    for name in names("criterion"):
        check(content("criterion", name).name, OmegaConf.to_container(content("criterion", name).parameters))


@pytest.mark.parametrize("name", sorted(names("calibration")))
def test_calibration_settings_hold_together(name: str) -> None:
    from moe_lab.calibration import check

    loaded = content("calibration", name)
    given = {key: GIVEN[key] for key in loaded if OmegaConf.is_missing(loaded, key)}
    text = valid(config.CalibrationConfig, {**choices.content("calibration", name), **given}, "calibration")
    settings = grid.mixed(text, choices.Files())
    assert settings.tokens % settings.length == 0
    check(settings)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("pocket_general", "olmoe"),
        ("pocket_code", "olmoe"),
        ("pocket_math", "olmoe"),
        ("pocket_function_calls", "function_calls"),
    ],
)
def test_the_shipped_texts_fill_their_rows(name: str, model: str) -> None:
    from transformers import AutoTokenizer

    from moe_lab.calibration.batches import batches
    from moe_lab.paths import resolve

    settings = replace(choices.choose(config.CalibrationConfig, "calibration", name), seed=42)
    report = batches(settings, AutoTokenizer.from_pretrained(resolve(f"pocket:{model}"))).report
    assert report["rows"] == 64 and report["valid_tokens"][name] > 31_000
