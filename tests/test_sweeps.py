"""Every file under sweeps/ composes, can start, and asks for the cells of its table.

python tests/test_sweeps.py     writes step_ids.json anew, where an id must change: see what `git diff` says of it
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from analysis.published import numbers
from analysis.published.numbers import Printed
from moe_lab import compose as composition
from moe_lab import config, grid
from moe_lab.config.base import valid
from moe_lab.errors import UserError
from moe_lab.evaluation import suite
from moe_lab.evaluation.harnesses import evalscope
from moe_lab.study import record, run
from moe_lab.study.graph import Graph, build
from moe_lab.study.preflight import preflight
from moe_lab.study.runs import begin
from moe_lab.study.store import Store

ROOT = Path(__file__).parents[1]
SWEEPS = ROOT / "sweeps"
NAMES = sorted(file.stem for file in SWEEPS.glob("*.yaml"))
TABLES = {
    "unified": [1, 2, 5],
    "evoesap": [1, 2, 5, 6, 7],
    "heapr": [1, 2],
    "aimer": [2, 3],
    "coverage": [1, 2, "2_qwen1_5", 3, "3_qwen3", 4, "4_thinking", 5, 6, 7, 8, 9, 10, 11, 13, 14, 16, 17, 18],
}
FIGURES = {"unified": [2, 3], "evoesap": [1], "heapr": [2, 3], "aimer": [1, 2, 6], "coverage": [6, 10]}
EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))
IDS = Path(__file__).with_name("step_ids.json")
"""Sweep or experiment -> kind of step -> how many there are, and the beginning of a digest of their ids."""
GPU = "NVIDIA H100 80GB HBM3"
SCHEMAS = {
    "allocation": config.AllocationConfig,
    "calibration": config.CalibrationConfig,
    "suite": config.SuiteConfig,
}


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra once for all tests."""
    with started():
        yield


@contextmanager
def started() -> Iterator[None]:
    """Hydra as `python -m moe_lab --config-dir sweeps` starts it. Harnesses are of no version, wherever they are
    installed, since versions are part of ids, and so is what the hub says, which is not asked."""
    with pytest.MonkeyPatch.context() as patch, composition.started(SWEEPS):
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr(suite, "installed", lambda package: "any")
        patch.setattr(evalscope, "installed", lambda benchmark: "any")
        yield


@cache
def composed(name: str) -> tuple[config.Config, list[grid.Request]]:
    """A sweep, or an experiment."""
    if name in EXPERIMENTS:
        return composition.compose([f"+experiment={name}"])
    return composition.compose([], name)


@cache
def request(name: str) -> tuple[config.Config, list[grid.Cell], list[config.BenchmarkConfig]]:
    settings, asked = composed(name)
    cells = [cell for cells, _ in asked for cell in cells]
    return settings, cells, [benchmark for _, benchmarks in asked for benchmark in benchmarks]


def by_protocol(name: str) -> list[grid.Request]:
    """The cells of a sweep with what they are asked."""
    return composed(name)[1]


@cache
def graph(name: str) -> Graph:
    settings, _, _ = request(name)
    named = replace(settings, timed=replace(settings.timed, device=GPU))  # which would be looked up in another process
    return build(named, by_protocol(name))


def asked(name: str) -> set[tuple[Any, ...]]:
    """Model, criterion, allocation and ratio of each cell."""
    return {
        (cell.model.name, cell.criterion.name, cell.allocation.label or cell.allocation.name, cell.ratio)
        for cell in request(name)[1]
    }


def test_every_published_table_and_figure_has_its_file() -> None:
    tables = [f"{paper}_table{number}" for paper, numbers in TABLES.items() for number in numbers]
    figures = [f"{paper}_fig{number}" for paper, numbers in FIGURES.items() for number in numbers]
    assert sorted([*tables, *figures]) == NAMES


def permissions(name: str) -> set[str]:
    """What a sweep's benchmarks are only done with when it is said."""
    benchmarks = request(name)[2]
    runs_programs = [each.harness == "evalplus" or each.name == "livecodebench" for each in benchmarks]
    needs = {
        "allow_code_execution=true": any(runs_programs),
        "allow_judge=true": any(benchmark.judge for benchmark in benchmarks),
        "allow_pickled_data=true": any(benchmark.name == "livecodebench" for benchmark in benchmarks),
    }
    return {permission for permission, needed in needs.items() if needed}


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_says_what_it_is_and_how_it_is_run(name: str) -> None:
    lines = (SWEEPS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = [line for line in lines if line.startswith("#")]
    kind, number = re.findall(r"_(table|fig)(\d+)", name)[0]
    assert f"{'Table' if kind == 'table' else 'Figure'} {number}" in head[0] and max(map(len, lines)) <= 120
    command = " ".join(" ".join(head).partition("# Use: ")[2].replace("\\ #", "").split())
    start = f"python -m moe_lab --config-dir sweeps --config-name {name}"
    assert command.startswith(start) and set(command.removeprefix(start).split()) == permissions(name)
    assert any("Expected: " in line for line in head)
    assert "study: " + name in lines


@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_choice_of_one_table_fits_its_schema_and_is_used(file: Path) -> None:
    loaded = OmegaConf.load(file)
    group = file.parent.name
    merged = valid(SCHEMAS[group], OmegaConf.to_container(loaded), group)
    assert (
        merged.label == file.stem.replace("_", " ")
        if group == "allocation"
        else getattr(merged, "name", file.stem) == file.stem
    )
    assert not (ROOT / "conf" / group / file.name).exists(), "a sweep must not change what a name means"
    others = [other for other in SWEEPS.rglob("*.yaml") if other != file]
    assert any(re.search(rf"\b{file.stem}\b", other.read_text(encoding="utf-8")) for other in others)


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_can_start(name: str) -> None:
    assert preflight(request(name)[0], by_protocol(name)) == []


def empty(benchmarks: list[config.BenchmarkConfig], root: Path) -> list[config.BenchmarkConfig]:
    """The benchmarks on a machine without mirrors."""
    return [replace(benchmark, root=str(root)) for benchmark in benchmarks]


def test_a_dry_run_prints_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = request("heapr_table2")[0]
    dry = replace(settings, dry_run=True, store=str(tmp_path / "store"))
    with pytest.raises(UserError, match="has no mirror of it") as missing:
        run.run(dry, [(cells, empty(list(asked), tmp_path)) for cells, asked in by_protocol("heapr_table2")])
    assert str(missing.value).count("has no mirror of it") == 7
    printed = capsys.readouterr().err
    assert "heapr_table2: 14 cells" in printed and "gradients" in printed and "unknown" in printed


def test_a_dry_run_for_slurm_prints_what_jobs_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, cells, benchmarks = request("evoesap_table1")
    job = config.JobConfig(gpus=2, partition="long", minutes=77)
    cluster = config.ResourcesConfig(models={"ernie_21b_a3b": job})
    slurm = config.LauncherConfig(name="slurm")
    dry = replace(settings, dry_run=True, store=str(tmp_path / "store"), launcher=slurm, resources=cluster)
    with pytest.raises(UserError, match="allow_judge=false"):
        run.run(dry, [(cells, empty(benchmarks, tmp_path))])
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().err.splitlines() if "│" in line]
    asks = {(row[0], row[1]): row[2:] for row in rows if len(row) == 8}
    assert asks["search", "8"][:3] == ["8", "2", "16"] and asks["search", "8"][-2:] == ["77", "long"]
    assert asks["search", "4"][:2] == ["4", "1"] and asks["search", "4"][-2:] == ["1440?", "default"]
    assert asks["scores", "1"][:2] == ["8", "0"]
    assert not (tmp_path / "store" / "runs").exists(), "nothing is submitted"


def refusals(name: str, *overrides: str, **allocation: Any) -> list[str]:
    """What is said of a sweep with other settings, and with other parameters of its allocations."""
    settings, [(cells, benchmarks)] = composition.compose(overrides, name)
    changed = [
        replace(cell, allocation=replace(cell.allocation, parameters={**cell.allocation.parameters, **allocation}))
        for cell in cells
    ]
    return preflight(settings, [(changed, benchmarks)])


def test_what_the_models_cannot_have_is_refused_before_they_are_there() -> None:
    (ratio,) = refusals("aimer_table3", "ratio=0.95")
    assert ratio.startswith("ratio=0.95") and "7 of 128 experts" in ratio and "top_k=8" in ratio
    (block,) = refusals("coverage_table8", align={"block": 1536})
    assert "align.block=1536" in block and "1408 channels" in block
    (search,) = refusals("evoesap_table7", "ratio=0.95")[:1]
    assert "ratio=0.95" in search


FOUR = {"frequency", "seer", "ean", "reap"}


@pytest.mark.parametrize("name", NAMES)
def test_gates_are_those_of_the_printed_numbers(name: str) -> None:
    paper, _, table = name.replace("_table", "_").partition("_")
    for cell in request(name)[1]:
        key = (cell.model.name, cell.ratio, cell.criterion.name, "", "", "")
        gate = numbers.protocol(Printed(paper, table, key, "gsm8k", "0", "")).gate
        assert cell.gate == (gate or "model"), (cell.model.name, cell.criterion.name)


def test_evoesap_tables_search_as_published() -> None:
    generations = {"olmoe_1b_7b": 50, "ernie_21b_a3b": 20, "deepseek_v2_lite_chat": 30, "qwen3_30b_a3b_instruct": 10}
    for name in ("evoesap_table1", "evoesap_table2", "evoesap_table7"):
        for cell in request(name)[1]:
            assert cell.calibration.tokens == 4194304
            if cell.allocation.name == "evolutionary":
                assert cell.allocation.parameters["generations"] == generations[cell.model.name]
                transfers = cell.allocation.parameters.get("max_transfers", 3)
                assert transfers == (5 if (cell.model.name[:5], cell.criterion.name) == ("qwen3", "reap") else 3)
        assert {criterion for _, criterion, _, _ in asked(name)} == FOUR
    assert len(asked("evoesap_table1")) == 3 * 8 and len(asked("evoesap_table2")) == 3 * 8
    assert len(asked("evoesap_table5")) == 14


def test_each_model_of_heapr_table_2_is_asked_as_the_paper_asks_it(tmp_path: Path) -> None:
    """acc for Qwen, acc_norm where lm-eval has it for DeepSeekMoE, in one study that says which."""
    asked: dict[str, set[str]] = {}
    for cell in graph("heapr_table2").cells:
        metrics = {step.settings["benchmark"]["reports"][name] for name, step in cell.evaluate.items()}
        asked.setdefault(cell.cell.model.name, set()).update(metrics)
        assert len(cell.evaluate) == 7
    assert asked == {"qwen1_5_moe_chat": {"acc"}, "deepseek_moe_16b": {"acc", "acc_norm"}}
    store = Store(tmp_path).create()
    with begin(store, "heapr_table2", []) as run:
        record.write(record.Study(request("heapr_table2")[0], graph("heapr_table2"), store), run, {})
    noted = {(entry["cell"]["model"], entry["protocol"]) for entry in record.read(store, "heapr_table2")["cells"]}
    assert noted == {("qwen1_5_moe_chat", "heapr"), ("deepseek_moe_16b", "heapr_norm")}


def test_coverage_tables_change_one_thing() -> None:
    assert len(asked("coverage_table6")) == 15 and len(asked("coverage_table7")) == 5
    assert len({criterion for _, criterion, _, _ in asked("coverage_table13")}) == 6
    blocks = [cell.allocation.parameters["align"] for cell in request("coverage_table8")[1]]
    assert {(align["block"], align["order"]) for align in blocks} == {
        (block, order) for block in (64, 128) for order in ("remainder", "scores")
    }
    smallest = [cell.allocation.parameters["align"]["min_channels"] for cell in request("coverage_table16")[1]]
    assert sorted(smallest) == [64, 128, 256, 512]
    assert len({(cell.ratio, cell.recovery.name) for cell in request("coverage_table11")[1]}) == 10
    for name in ("coverage_table11", "coverage_table16", "coverage_table8"):
        aligned = [cell for cell in request(name)[1] if cell.recovery.bits == 4]
        assert aligned and all("align" in cell.allocation.parameters for cell in aligned)
    assert {
        (cell.allocation.parameters["align"]["block"], cell.allocation.parameters["align"]["min_channels"])
        for cell in request("coverage_table11")[1]
    } == {(128, 128)}
    routed = {
        (cell.model.expected.top_k, cell.model.top_k) for cell in request("coverage_table9")[1] if cell.model.expected
    }
    assert routed == {(trained, top_k) for trained in (4, 6) for top_k in (None, 2, 1)}


MILLIONS = 6400 * 512
"""Tokens that MoE-Slimming calibrates on, padding included."""


def test_coverage_tables_of_tasks_calibrate_on_them() -> None:
    for name, model in (("coverage_table4", "qwen1_5_moe"), ("coverage_table4_thinking", "qwen3_30b_a3b_thinking")):
        found = {
            (c.calibration.name, c.ratio, c.allocation.label or c.allocation.name, c.recovery.name)
            for c in request(name)[1]
        }
        assert {cell.model.name for cell in request(name)[1]} == {model}
        assert found == {
            (text, *rest)
            for text in ("gsm8k", "opencodereasoning")
            for rest in ((0.5, "coverage", "dora"), (0.25, "coverage aligned 128", "dora_nf4"))
        }
    texts = [cell.calibration for cell in request("coverage_table18")[1]]
    assert len({text.name for text in texts}) == 6 and {cell.ratio for cell in request("coverage_table18")[1]} == {0.25}
    assert {(text.packing, text.length, text.tokens) for text in texts} == {("none", 512, MILLIONS)}


def test_figures_ask_for_their_axes() -> None:
    cells = {name: request(name)[1] for name in NAMES if "_fig" in name}
    models = {name: {cell.model.name for cell in found} for name, found in cells.items()}
    models["aimer_table"] = {model for name in ("aimer_table2", "aimer_table3") for model, *_ in asked(name)}
    texts = {name: {cell.calibration.name for cell in found} for name, found in cells.items()}
    gates = {name: {cell.gate for cell in found} for name, found in cells.items()}
    assert texts["unified_fig2"] == texts["unified_fig3"] == {"c4", "evol_codealpaca", "tulu_math"}
    assert len(models["unified_fig3"]) == 4 and request("unified_fig3")[0].overlap
    assert {(cell.model.name, cell.ratio) for cell in cells["unified_fig2"]} == {
        ("olmoe_1b_7b", 0.25),
        ("ernie_21b_a3b", 0.5),
    }
    assert gates["evoesap_fig1"] == gates["aimer_fig1"] == {"double_softmax"} and gates["unified_fig2"] == {"model"}
    assert len({cell.allocation.label or cell.allocation.name for cell in cells["evoesap_fig1"]}) == 3
    assert {cell.calibration.tokens for cell in cells["evoesap_fig1"]} == {1024 * 4096}
    assert [cell.ratio for cell in cells["heapr_fig2"]] == [tenth / 10 for tenth in range(1, 10)]
    assert sorted(cell.calibration.tokens // 2048 for cell in cells["heapr_fig3"]) == [32, 32, 64, 64, 128, 128]
    assert [cell.calibration.tokens for cell in cells["aimer_fig1"]] == [rows * 4096 for rows in (128, 256, 384, 512)]
    scored = {(cell.model.name, cell.criterion.name) for cell in cells["aimer_fig2"]}
    assert scored == {(model, one) for model in models["aimer_table"] for one in ("magnitude", "aimer")}
    assert request("aimer_fig6")[0].profile and {cell.texts["flops"].tokens for cell in cells["aimer_fig6"]} == {4096}


def test_what_is_timed_is_timed_of_every_model_on_the_device_it_is_asked_for() -> None:
    steps = [step for step in graph("coverage_table2").steps() if step.kind == "timing"]
    assert len(steps) == 1 + 6 * 2
    assert {step.settings["timed"]["device"] for step in steps} == {GPU}


def step_ids(name: str) -> dict[str, str]:
    by_kind: dict[str, list[str]] = {}
    for step in graph(name).steps():
        by_kind.setdefault(step.kind, []).append(step.id)
    return {
        kind: f"{len(ids)} {hashlib.sha256(' '.join(sorted(ids)).encode()).hexdigest()[:12]}"
        for kind, ids in sorted(by_kind.items())
    }


@pytest.mark.parametrize("name", [*EXPERIMENTS, *NAMES])
def test_steps_have_the_ids_they_had(name: str) -> None:
    """So that what stores hold is found again. A change that must alter ids says why."""
    assert step_ids(name) == json.loads(IDS.read_text(encoding="utf-8"))[name]


if __name__ == "__main__":
    with started():
        IDS.write_text(json.dumps({name: step_ids(name) for name in [*EXPERIMENTS, *NAMES]}, indent=1) + "\n")
