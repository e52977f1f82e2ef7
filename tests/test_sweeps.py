"""Every file under sweeps/ composes, can start, and asks for the cells of its table.

`python tests/test_sweeps.py` writes step_ids.json anew, where an id must change: see what
`git diff` says of it.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from operator import attrgetter
from pathlib import Path

import pytest

from moe_lab import compose as composition
from moe_lab import config, grid
from moe_lab.analysis.published import numbers
from moe_lab.analysis.published.numbers import PublishedNumber
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.harnesses.evalscope import EvalScope
from moe_lab.study import run
from moe_lab.study.graph import Graph, build
from moe_lab.study.preflight import preflight

ROOT = Path(__file__).parents[1]
SWEEPS = ROOT / "sweeps"
NAMES = sorted(file.stem for file in SWEEPS.glob("*.yaml"))
EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))
IDS = Path(__file__).with_name("step_ids.json")
"""Sweep or experiment -> kind of step -> how many there are, and the beginning of a digest of their
ids."""


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra once for all tests."""
    with hydra_context():
        yield


@contextmanager
def hydra_context() -> Iterator[None]:
    """Hydra as `python -m moe_lab --config-dir sweeps` starts it. Harnesses are of no version,
    wherever they are installed, since versions are part of ids, and so is what the hub says, which
    is not asked."""
    with pytest.MonkeyPatch.context() as patch, composition.hydra_context(SWEEPS):
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("moe_lab.evaluation.harness.package_version", lambda package: "any")
        patch.setattr(EvalScope, "version", lambda self, benchmark: "any")
        yield


@cache
def composed(name: str) -> tuple[config.Config, list[grid.Request]]:
    """The settings of a sweep, or of an experiment, and its cells with what they are asked."""
    if name in EXPERIMENTS:
        return composition.compose([f"+experiment={name}"])
    return composition.compose([], name)


def cells_of(name: str) -> list[grid.Cell]:
    return [cell for cells, _ in composed(name)[1] for cell in cells]


@cache
def graph(name: str) -> Graph:
    settings, requests = composed(name)
    # the device would be looked up in another process
    return build(
        replace(settings, timed=replace(settings.timed, device="NVIDIA H100 80GB HBM3")), requests
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_can_start(name: str) -> None:
    settings, requests = composed(name)
    assert settings.study == name
    assert preflight(settings, requests) == []


def test_a_dry_run_for_slurm_prints_resources_of_jobs_and_submits_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The study cannot start for lack of data and of a judge."""
    settings, [(cells, benchmarks)] = composed("evoesap_table1")
    job = config.JobConfig(gpus=2, partition="long", minutes=77)
    dry_run = replace(
        settings,
        dry_run=True,
        store=str(tmp_path / "store"),
        launcher=config.LauncherConfig(name="slurm"),
        resources=config.ResourcesConfig(models={"ernie_21b_a3b": job}),
    )
    without_data = [replace(benchmark, root=str(tmp_path)) for benchmark in benchmarks]
    with pytest.raises(UserError, match=r"allow_judge=false(.|\n)*has no mirror of it"):
        run.run(dry_run, [(cells, without_data)])
    scripts = capsys.readouterr().out.split("#!/bin/bash")[1:]
    jobs = [dict(re.findall(r"#SBATCH --([\w-]+)=(.*)", script)) for script in scripts]
    of_kind = {
        kind: [job for job in jobs if job["job-name"].endswith(f".{kind}")]
        for kind in ("search", "scores")
    }
    [configured] = [job for job in of_kind["search"] if job.get("partition") == "long"]
    [estimated] = [job for job in of_kind["search"] if "partition" not in job]
    assert (configured["array"], estimated["array"]) == ("0-7%8", "0-3%4"), "searches"
    assert configured["gres"] == "gpu:2"
    assert configured["time"] == "77"
    assert estimated["gres"] == "gpu:1"
    assert estimated["time"] == "1440"
    assert not any("gres" in job for job in of_kind["scores"])
    assert not (tmp_path / "store" / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "resource"),
    [("aimer_fig2", "baidu/ERNIE-4.5-21B-A3B-PT"), ("coverage_table2", "model.device=balanced")],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_missing_models_and_gpus_are_reported_after_the_table(
    name: str, resource: str, dry_run: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No step begins before that."""
    settings, requests = composed(name)
    store = tmp_path / "store"
    with pytest.raises(Unavailable) as raised:
        run.run(replace(settings, dry_run=dry_run, store=str(store)), requests)
    models = {cell.model.path for cells, _ in requests for cell in cells}
    assert raised.value.code == 3
    assert all(text in str(raised.value) for text in {"missing here: ", *models, resource})
    table = capsys.readouterr().err
    assert all(kind in table for kind in {step.kind for step in graph(name).steps})
    assert not store.exists()


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_those_of_the_published_protocols(name: str) -> None:
    paper, _, table = name.replace("_table", "_").partition("_")
    for cell in cells_of(name):
        key = (cell.model.name, cell.ratio, cell.criterion.name, "", "", "")
        published = numbers.protocol(PublishedNumber(paper, table, key, "gsm8k", "0", ""))
        assert cell.gate == (published.get("gate") or "model"), (
            cell.model.name,
            cell.criterion.name,
        )
        tokens = published.get("tokens")
        if "_table" in name and tokens:
            assert cell.calibration.tokens == int(tokens), (cell.model.name, cell.criterion.name)
        generations = published.get("generations")
        if cell.allocation.name == "evolutionary" and generations:
            assert cell.allocation.parameters["generations"] == int(generations), cell.model.name


MONE = {
    *((name, "mean_output", ratio) for name in ("mone", "mone_freq") for ratio in (0.25, 0.5)),
    ("channel_activation", "none", 0.5),
    ("channel_activation", "none", 0.25),
}
"""Criterion, replacement and ratio of MoE-Slimming's tables of whole methods."""


WHOLE_EXPERTS = (0.25, 0.383, 0.5, 0.617, 0.75)
"""Ratios of MoE-Slimming's table of channels against whole experts."""


@pytest.mark.parametrize(
    ("place", "name", "axes", "values"),
    [
        ("Unified, Section 3, Equation 1", "unified_table1", "gate", {"renormalized"}),
        ("Unified, Section 4.1, Figure 3", "unified_fig3", "gate", {"renormalized"}),
        ("Unified, Section 5.2, Table 3", "unified_fig3", "ratio", {0.25, 0.5}),
        (
            "Unified, Section 1, Figure 2",
            "unified_fig2",
            "criterion.name",
            {"frequency", "seer", "ean", "reap", "mone", "mone_freq"},
        ),
        ("HEAPr, Section 4.2, Figure 2", "heapr_fig2", "calibration.order", {"rows"}),
        ("HEAPr, Section 4.3, Figure 3", "heapr_fig3", "calibration.order", {"rows", "random"}),
        (
            "AIMER, Section 5.2, Table 4",
            "aimer_table4",
            "model.name ratio",
            {
                ("olmoe_1b_7b", 0.5),
                ("ernie_21b_a3b", 0.5),
                ("qwen3_30b_a3b_instruct", 0.5),
            },
        ),
        *[
            (
                f"MoE-Slimming, Section 5.1, Table {table}",
                f"coverage_table{table}",
                "calibration.name",
                {"c4", "gsm8k", "opencodereasoning"},
            )
            for table in (6, 7, 8, 9, 11, 13, 14, 16, 17)
        ],
        *[
            (
                f"MoE-Slimming, Section 5.2, Table {table}",
                f"coverage_table{table}",
                "criterion.name allocation.replacement ratio",
                MONE,
            )
            for table in (3, 5)
        ],
        (
            "MoE-Slimming, Appendix C.2.1, Table 10",
            "coverage_table10",
            "criterion.name allocation.replacement ratio",
            {
                *product(["channel_activation"], ["none"], [0.133, *WHOLE_EXPERTS]),
                *product(["mone", "mone_freq"], ["mean_output"], WHOLE_EXPERTS),
            },
        ),
        (
            "MoE-Slimming, Appendix C.3.1, Table 13",
            "coverage_table13",
            "criterion.name",
            {
                "channel_activation",
                "channel_weight",
                "channel_weight_activation",
                *(
                    f"{code}{name}"
                    for code in ("", "moe_slimming.")
                    for name in ("channel_gradient", "channel_activation_gradient", "snip")
                ),
            },
        ),
    ],
)
def test_sweeps_follow_the_papers(place: str, name: str, axes: str, values: set[object]) -> None:
    assert set(map(attrgetter(*axes.split()), cells_of(name))) == values, place


def test_figures_of_channels_have_qwen3_without_recovery() -> None:
    """MoE-Slimming, Section 5.4 and Appendix C, Figures 7, 11, 15 and 16."""
    assert ("qwen3_30b_a3b", 0.25, "none") in {
        (cell.model.name, cell.ratio, cell.recovery.name) for cell in cells_of("coverage_fig7")
    }


def test_moe_slimming_evaluates_as_opencompass() -> None:
    """MoE-Slimming, Appendix C.1: eight examples where there are any, and the academic version of
    LiveCodeBench."""
    [(_, of_base_models)] = composed("coverage_table4")[1]
    [(_, of_thinking_models)] = composed("coverage_table4_thinking")[1]
    by_name = {benchmark.name: benchmark for benchmark in (*of_base_models, *of_thinking_models)}
    assert by_name["gsm8k_8shot"].shots == 8
    assert by_name["livecodebench_v6"].sampling.samples == 6
    assert by_name["livecodebench_v6"].parameters["seconds"] == 6


def step_ids(name: str) -> dict[str, str]:
    by_kind: dict[str, list[str]] = {}
    for step in graph(name).steps:
        by_kind.setdefault(step.kind, []).append(step.id)
    return {
        kind: f"{len(ids)} {hashlib.sha256(' '.join(sorted(ids)).encode()).hexdigest()[:12]}"
        for kind, ids in sorted(by_kind.items())
    }


@pytest.mark.parametrize("name", [*EXPERIMENTS, *NAMES])
def test_step_ids_are_the_recorded_ones(name: str) -> None:
    """So that what stores hold is found again. A change that must alter ids says why."""
    recorded = json.loads(IDS.read_text(encoding="utf-8"))
    assert recorded.keys() == {*EXPERIMENTS, *NAMES}
    assert step_ids(name) == recorded[name]


if __name__ == "__main__":
    with hydra_context():
        IDS.write_text(
            json.dumps({name: step_ids(name) for name in [*EXPERIMENTS, *NAMES]}, indent=1) + "\n"
        )
