"""What each kind of step does: a job's files in, files in its scratch folder out.

This is the only file that knows all parts. Imports are inside, since a process that only evaluates needs no
calibration, and one that only scores needs no torch.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig, CalibrationConfig, ModelConfig
from moe_lab.study.job import Job, code_state
from moe_lab.study.store import write_json

PACKAGES = ("torch", "transformers", "lm-eval", "evalplus", "safetensors", "numpy")
STATISTICS = "statistics.safetensors"
GROUP = 8
"""Batches between two checkpoints of a calibration pass."""


def perform(job: Job) -> None:
    """Do `job`: fill its scratch folder, provenance included. Whatever is raised is the job's failure."""
    start = time.time()
    KINDS[job.kind](job)
    write_json(job.output("provenance.json"), provenance(start))


def provenance(start: float) -> dict[str, Any]:
    """How a result came about: versions, commit, host, time, peak memory."""
    return {
        "code": code_state(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "started": start,
        "seconds": round(time.time() - start, 3),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def _loaded(settings: str) -> tuple[Any, Any]:
    from moe_lab.models.load import load_model

    return load_model(ModelConfig(**json.loads(settings)))


def model_and_tokenizer(job: Job) -> tuple[Any, Any]:
    """The job's model; the same objects as long as jobs ask for the same model."""
    return _loaded(json.dumps(job.runtime["model"], sort_keys=True))


def model(job: Job) -> None:
    """Layers, experts and parameters of the model, from its configuration alone."""
    from moe_lab.models.facts import facts

    write_json(job.output("facts.json"), facts(ModelConfig(**job.runtime["model"])))


def _calibration(job: Job, tokenizer: Any) -> Any:
    from moe_lab.calibration.batches import batches

    calibration = batches(CalibrationConfig(**job.runtime["calibration"]), tokenizer)
    write_json(job.output("calibration.json"), calibration.report)
    return calibration.rows


def statistics(job: Job) -> None:
    """One forward pass over the calibration set: all sums, and how many tokens each expert saw."""
    from moe_lab.statistics.gather import gather
    from moe_lab.statistics.sums import coverage

    network, tokenizer = model_and_tokenizer(job)
    rows = _calibration(job, tokenizer)
    sums = gather(network, rows, out=Path(job.partial), fingerprint=job.settings, groups=GROUP)
    sums.save(job.output(STATISTICS))
    write_table(job.output("coverage.parquet"), ("layer", "expert", "tokens"), coverage(sums))


def damage(job: Job) -> None:
    """The exact damage of removing each expert alone, in a forward pass with one expert more per token."""
    from moe_lab.statistics.damage import measure

    network, tokenizer = model_and_tokenizer(job)
    rows = _calibration(job, tokenizer)
    measure(network, rows, fingerprint=job.settings, out=Path(job.partial), groups=GROUP).save(job.output(STATISTICS))


def weights(job: Job) -> None:
    """Sums over the weights of each expert, read from the checkpoint without building the model."""
    from moe_lab.models.files import local_folder
    from moe_lab.statistics.weights import weigh

    weigh(local_folder(ModelConfig(**job.runtime["model"])), fingerprint=job.settings).save(job.output(STATISTICS))


def scores(job: Job) -> None:
    """A score per expert; higher means keep."""
    from moe_lab import criteria
    from moe_lab.statistics.read import read

    settings = job.settings["criterion"]
    experts = {int(layer): facts["n_experts"] for layer, facts in _facts(job)["layers"].items()}
    evidence = read(job.input("evidence", STATISTICS)) if "evidence" in job.inputs else {}
    found = criteria.score(
        settings["criterion"],
        evidence,
        experts=experts,
        gate=settings.get("gate"),
        seed=settings.get("seed"),
        parameters=settings["parameters"],
    )
    rows = [(layer, expert, float(value)) for layer, values in found.items() for expert, value in enumerate(values)]
    write_table(job.output("scores.parquet"), ("layer", "expert", "score"), rows)


def family(job: Job) -> None:
    """S(b, alpha, beta) of every expert for all 17 combinations that mean something."""
    from moe_lab import criteria
    from moe_lab.statistics.read import read

    rows = criteria.family(read(job.input("evidence", STATISTICS)), gate=job.settings["family"]["gate"])
    write_table(job.output("family.parquet"), ("layer", "expert", "b", "alpha", "beta", "score"), rows)


def plan(job: Job) -> None:
    """How many experts each layer loses, and which."""
    import pyarrow.parquet as parquet

    from moe_lab.allocation import allocate
    from moe_lab.pruning.plan import make_plan

    layers = {int(layer): facts for layer, facts in _facts(job)["layers"].items()}
    scored: dict[int, list[float]] = {layer: [] for layer in layers}
    for row in parquet.read_table(job.input("scores", "scores.parquet")).to_pylist():
        scored[row["layer"]].append(row["score"])
    remove = allocate(job.settings["allocation"], layers, scored)
    made = make_plan(
        scored,
        remove,
        top_k={layer: facts["top_k"] for layer, facts in layers.items()},
        n_group={layer: facts["n_group"] for layer, facts in layers.items()},
        topk_group={layer: facts["topk_group"] for layer, facts in layers.items()},
        provenance={"allocation": job.settings["allocation"], "scores": job.inputs["scores"].rsplit("/", 2)[-1]},
    )
    made.save(job.output("plan.json"))


def evaluate(job: Job) -> None:
    """One benchmark on the loaded model, under a plan if there is one."""
    from contextlib import nullcontext

    from moe_lab.evaluation import run
    from moe_lab.pruning.mask import mask
    from moe_lab.pruning.plan import Plan

    network, tokenizer = model_and_tokenizer(job)
    pruned = mask(network, Plan.load(job.input("plan", "plan.json"))) if "plan" in job.inputs else nullcontext()
    with pruned:
        run.evaluate(
            run.Subject(network, tokenizer),
            BenchmarkConfig(**job.runtime["benchmark"]),
            Path(job.scratch),
            policy=run.Policy(**job.runtime["policy"]),
        )


def export(job: Job) -> None:
    """The pruned model as a checkpoint that stock transformers loads."""
    from moe_lab.models.files import local_folder
    from moe_lab.pruning.export import export as write
    from moe_lab.pruning.plan import Plan

    source = local_folder(ModelConfig(**job.runtime["model"]))
    write(source, Plan.load(job.input("plan", "plan.json")), job.output("checkpoint"))


def _facts(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(job.input("model", "facts.json").read_text())
    return found


def write_table(path: Path, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Rows as a Parquet table."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    parquet.write_table(arrow.table(dict(zip(columns, map(list, values), strict=True))), path)


KINDS: Mapping[str, Callable[[Job], None]] = {
    function.__name__: function
    for function in (model, statistics, damage, weights, scores, family, plan, evaluate, export)
}
