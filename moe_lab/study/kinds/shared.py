"""What several kinds of step do with a job: load its model, read its text and its evidence, write a table."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.json_files import write_json
from moe_lab.study.job import Job

STATISTICS = "statistics.safetensors"
NO_SUMS = ("model", "scores", "by")
"""Inputs of a step that are no sums."""


@lru_cache(maxsize=1)
def _loaded(settings: str) -> tuple[Any, Any]:
    from moe_lab.models.load import load_model

    return load_model(ModelConfig(**json.loads(settings)))


def model_and_tokenizer(job: Job) -> tuple[Any, Any]:
    """The job's model; the same objects as long as jobs ask for the same model."""
    return _loaded(json.dumps(job.runtime["model"], sort_keys=True))


@lru_cache(maxsize=1)
def _skeleton(settings: str) -> Any:
    from moe_lab.models.files import local_folder
    from moe_lab.models.load import skeleton
    from moe_lab.models.top_k import set_top_k

    model = ModelConfig(**json.loads(settings))
    network = skeleton(local_folder(model), trust_remote_code=model.trust_remote_code).eval()
    set_top_k(network, model.top_k)
    return network


def skeleton_of(job: Job) -> Any:
    """The job's model on the meta device, without weights; the same object as long as jobs ask for the same model."""
    return _skeleton(json.dumps(job.runtime["model"], sort_keys=True))


def is_streamed(job: Job, role: str = "calibration") -> bool:
    """Whether the job's text is to be read by a model of which one decoder layer is in memory at a time."""
    return bool(job.runtime[role]["engine"] == "streamed")


def streamed_model(job: Job, role: str = "calibration") -> tuple[Any, Any, float]:
    """Such a model, its tokenizer, and how many bytes of hidden states are to be kept in memory."""
    from moe_lab.models.streamed import open_streamed

    return *open_streamed(ModelConfig(**job.runtime["model"])), job.runtime[role]["activation_budget"] * 2**30


def plan_of(job: Job) -> Any:
    """The job's plan; None for the unpruned model."""
    from moe_lab.pruning.plan import Plan

    return Plan.load(job.input("plan", "plan.json")) if "plan" in job.inputs else None


def rows(job: Job, tokenizer: Any, role: str = "calibration") -> Any:
    """Batches (ids, valid) of the job's text, whose report is written down."""
    from moe_lab.calibration.batches import batches

    text = batches(CalibrationConfig(**job.runtime[role]), tokenizer)
    write_json(job.output("calibration.json"), text.report)
    return text.rows


def facts(job: Job) -> dict[str, Any]:
    """What the model step found: layers by number, parameters."""
    found: dict[str, Any] = json.loads(job.input("model", "facts.json").read_text())
    return {**found, "layers": {int(layer): about for layer, about in found["layers"].items()}}


def sums(job: Job) -> dict[str, dict[int, dict[str, Any]]]:
    """All sums the job was given: the step's role -> layer -> arrays by name."""
    from moe_lab.statistics_file import read

    return {role: read(job.input(role, STATISTICS)) for role in sorted(set(job.inputs) - set(NO_SUMS))}


def evidence(job: Job) -> dict[int, dict[str, Any]]:
    """Layer -> the arrays of all sums the job was given, by name."""
    merged: dict[int, dict[str, Any]] = {}
    for layers in sums(job).values():
        for layer, arrays in layers.items():
            merged.setdefault(layer, {}).update(arrays)
    return merged


def expert_scores(job: Job, role: str = "scores") -> dict[int, list[float]]:
    """Layer -> a score per expert."""
    import pyarrow.parquet as parquet

    scored: dict[int, list[float]] = {}
    for row in parquet.read_table(job.input(role, "scores.parquet")).to_pylist():
        scored.setdefault(row["layer"], []).append(row["score"])
    return scored


def write_table(path: Path, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Rows as a Parquet table."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    parquet.write_table(arrow.table(dict(zip(columns, map(list, values), strict=True))), path)
