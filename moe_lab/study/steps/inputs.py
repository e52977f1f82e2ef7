"""Helpers for the work of steps: load the job's model, read its text and its inputs, write a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.json_files import write_json
from moe_lab.study.step import Job

STATISTICS = "statistics.safetensors"
REPORT = "calibration.json"
NO_SUMS = ("model", "scores", "by")
"""Roles of inputs that hold no sums."""


@lru_cache(maxsize=1)
def _loaded(settings: str) -> tuple[Any, Any]:
    from moe_lab.models.load import load_model

    return load_model(ModelConfig(**json.loads(settings)))


def model_and_tokenizer(job: Job) -> tuple[Any, Any]:
    """The job's model and tokenizer. The last pair is kept in memory for further jobs with the same model.

    An engine is ended, as both may need all the memory of a device.
    """
    from moe_lab.evaluation.engines import vllm

    vllm.close()
    return _loaded(json.dumps(job.runtime["model"], sort_keys=True))


def forget_loaded() -> None:
    """Forget the model that `model_and_tokenizer` keeps."""
    _loaded.cache_clear()


@lru_cache(maxsize=1)
def _skeleton(settings: str) -> Any:
    from moe_lab.models.files import local_folder
    from moe_lab.models.load import set_top_k, skeleton

    model = ModelConfig(**json.loads(settings))
    network = skeleton(local_folder(model), trust_remote_code=model.trust_remote_code).eval()
    set_top_k(network, model.top_k)
    return network


def skeleton_of(job: Job) -> Any:
    """The job's model on the meta device, without weights. The last one is kept for further jobs with this model."""
    return _skeleton(json.dumps(job.runtime["model"], sort_keys=True))


def plan_of(job: Job) -> Any:
    """The job's plan; None for the unpruned model."""
    from moe_lab.pruning.plan import Plan

    return Plan.load(job.input("plan", "plan.json")) if "plan" in job.inputs else None


def rows(job: Job, tokenizer: Any) -> Any:
    """Batches (ids, valid) of the job's text. Also writes the report on the text to calibration.json."""
    from moe_lab.calibration.batches import batches

    text = batches(job.text, tokenizer)
    write_json(job.output(REPORT), text.report)
    return text.rows


def own_batches(job: Job) -> slice:
    """Which batches of its text the job reads: all, or those of its share of the rows (calibration.parts)."""
    share, batch_size = job.settings.get("rows"), job.text.batch_size
    return slice(share["first"] // batch_size, -(-share["end"] // batch_size)) if share else slice(None)


def facts(job: Job) -> dict[str, Any]:
    """Facts that the model step wrote: layers by number, parameters."""
    content: dict[str, Any] = json.loads(job.input("model", "facts.json").read_text())
    return {**content, "layers": {int(layer): about for layer, about in content["layers"].items()}}


def sums(job: Job, *, besides: Sequence[str] = ()) -> dict[str, dict[int, dict[str, Any]]]:
    """All sums among the job's inputs, but for the roles `besides`: role of the input -> layer -> arrays by name."""
    from moe_lab.statistics.sums import read

    roles = sorted(set(job.inputs) - {*NO_SUMS, *besides})
    return {role: read(job.input(role, STATISTICS)) for role in roles}


def evidence(job: Job) -> dict[int, dict[str, Any]]:
    """Layer -> the arrays of all sums among the job's inputs, by name."""
    from moe_lab.statistics.sums import by_layer

    return by_layer(sums(job).values())


def expert_scores(job: Job, role: str = "scores") -> dict[int, list[float]]:
    """Layer -> a score per expert."""
    import pyarrow.parquet as parquet

    scores: dict[int, list[float]] = {}
    for row in parquet.read_table(job.input(role, "scores.parquet")).to_pylist():
        scores.setdefault(row["layer"], []).append(row["score"])
    return scores


def write_table(path: Path, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Rows as a Parquet table."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    parquet.write_table(arrow.table(dict(zip(columns, map(list, values), strict=True))), path)
