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
    assert configured["gpus-per-node"] == "2"
    assert configured["time"] == "77"
    assert estimated["gpus-per-node"] == "1"
    assert estimated["time"] == "1440"
    assert not any("gpus-per-node" in job for job in of_kind["scores"])
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
