"""Steps about one pruned model: recover it, evaluate it, count its cost, write it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_lab.config import BackendConfig, BenchmarkConfig, CalibrationConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.json_files import write_json
from moe_lab.study.job import Job
from moe_lab.study.kinds.shared import (
    facts,
    is_streamed,
    model_and_tokenizer,
    plan_of,
    rows,
    skeleton_of,
    streamed_model,
    write_table,
)


@lru_cache(maxsize=1)
def _recovered(network: Any, plan: Any, bits: int, modules: tuple[str, ...], tuned: Path | None) -> Any:
    from moe_lab.recovery.apply import recovered

    return recovered(network, plan, bits=bits, modules=modules, tuned=tuned)


@contextmanager
def _subject(job: Job) -> Iterator[Any]:
    """The job's model as it is pruned and stored: a mask on the loaded one, or, when recovered, a model of its own.

    Benchmarks of one recovered model share it; masks cost nothing to make again.
    """
    from moe_lab.pruning.mask import mask

    network, tokenizer = model_and_tokenizer(job)
    plan, storage = plan_of(job), job.settings.get("storage", {"bits": 16, "modules": []})
    tuned = Path(job.inputs["finetune"]) if "finetune" in job.inputs else None
    if storage["bits"] == 4 or tuned:
        yield _recovered(network, plan, storage["bits"], tuple(storage["modules"]), tuned), tokenizer
    elif plan:
        with mask(network, plan):
            yield network, tokenizer
    else:
        yield network, tokenizer


def finetune(job: Job) -> None:
    """The weights that fine-tuning the pruned model changed."""
    from moe_lab.recovery.finetune import finetune as train

    network, tokenizer = model_and_tokenizer(job)
    train(
        network,
        tokenizer,
        plan_of(job),
        RecoveryConfig(**job.runtime["recovery"]),
        CalibrationConfig(**job.runtime["text"]),
        out=Path(job.scratch),
        partial=Path(job.partial),
        fingerprint=job.settings,
        seed=job.settings["recovery"]["seed"],
    )


def evaluate(job: Job) -> None:
    """One benchmark on the model, pruned and recovered as the job says."""
    from moe_lab.evaluation import run
    from moe_lab.evaluation.local_model import LocalModel

    arguments = job.runtime["model"]["template_arguments"]
    with _subject(job) as (network, tokenizer):
        run.evaluate(LocalModel(network, tokenizer, arguments), _benchmark(job), Path(job.scratch), policy=_policy(job))
    _show(job, json.loads(job.output("result.json").read_text())["protocol"]["prompt"])


def generate(job: Job) -> None:
    """The texts that answer one benchmark."""
    from moe_lab.evaluation import run

    with _generator(job) as generator:
        answers = run.generate(generator, _benchmark(job), Path(job.scratch), Path(job.partial, "answers.jsonl"))
    _show(job, answers[0].prompt)


def _show(job: Job, prompt: str) -> None:
    """One prompt, as the model read it, for the log."""
    print(f"{job.name} asks, for example: {prompt!r}", file=sys.stderr, flush=True)


@contextmanager
def _generator(job: Job) -> Iterator[Any]:
    """What generates: the job's model, loaded, or behind a server that is started for it."""
    model = ModelConfig(**job.runtime["model"])
    backend = BackendConfig(**job.runtime["backend"])
    if backend.name == "server":
        from moe_lab.evaluation.server import serving
        from moe_lab.models.files import local_folder

        checkpoint = job.input("checkpoint", "checkpoint") if "checkpoint" in job.inputs else local_folder(model)
        with serving(checkpoint, backend, model, job.name) as generator:
            yield generator
        return

    from moe_lab.evaluation.local_model import ContinuousModel, LocalModel

    sort = ContinuousModel if backend.continuous else LocalModel
    with _subject(job) as (network, tokenizer):
        yield sort(network, tokenizer, model.template_arguments)


def grade(job: Job) -> None:
    """The results of texts that were generated; needs no model."""
    from moe_lab.evaluation import generation, run

    answers = generation.read(job.input("generate", run.ANSWERS))
    run.grade(answers, _benchmark(job), Path(job.scratch), policy=_policy(job))


def _benchmark(job: Job) -> BenchmarkConfig:
    """The job's benchmark. Unavailable when its data is not, or no longer, what it was when the job was
    handed in: what it would come to belongs under another name."""
    from moe_lab.evaluation import suite

    benchmark = BenchmarkConfig(**job.runtime["benchmark"])
    if job.settings["benchmark"]["data"] != suite.data_digest(benchmark):
        raise Unavailable(
            f"benchmark {benchmark.name}: its data is not what it was when this was started: start the study again"
        )
    return benchmark


def _policy(job: Job) -> Any:
    from moe_lab.evaluation.sandbox.policy import Policy

    return Policy(**job.runtime["policy"])


def cost(job: Job) -> None:
    """Parameters, storage, and the FLOPs of a token. The model is run only where these depend on where tokens go."""
    from moe_lab.models.discover import routed_layers
    from moe_lab.pruning.cost import cost as count
    from moe_lab.pruning.flops import even_routing, row_flops

    network, plan = skeleton_of(job), plan_of(job)
    if "unpruned" in job.inputs:  # counted once for all plans
        row = json.loads(job.input("unpruned", "cost.json").read_text())["flops_by_part"]
    else:
        row = row_flops(network, job.settings["row"]["length"])
    routing = even_routing(routed_layers(network), plan) or _routing(job, plan)
    found = count(network, plan, row, routing, facts=facts(job), **job.settings.get("storage", {}))
    write_json(job.output("cost.json"), found)


def _routing(job: Job, plan: Any) -> Any:
    """Where the tokens of the job's text go, in the whole model or with one layer of it in memory."""
    if "text" not in job.runtime:
        raise UserError(
            f"cost of model={job.runtime['model']['name']}: its experts differ in width, which is known only of a "
            "folder: download it, and give the folder as model.path"
        )
    if is_streamed(job, "text"):
        from moe_lab.pruning.layered_flops import layered_routing

        streamed, tokenizer, budget = streamed_model(job, "text")
        return layered_routing(streamed, plan, rows(job, tokenizer, "text"), out=Path(job.partial), budget=budget)
    from moe_lab.pruning.flops import measured_routing

    network, tokenizer = model_and_tokenizer(job)
    return measured_routing(network, plan, rows(job, tokenizer, "text"))


def profile(job: Job) -> None:
    """How much hidden states differ between tokens after every layer, and how its router decides."""
    from moe_lab.pruning.profile import COLUMNS
    from moe_lab.pruning.profile import profile as look

    network, tokenizer = model_and_tokenizer(job)
    found = look(network, plan_of(job), rows(job, tokenizer, "text"))
    write_table(job.output("profile.parquet"), COLUMNS, found)


def export(job: Job) -> None:
    """The pruned model as a checkpoint."""
    from moe_lab.models.files import local_folder
    from moe_lab.pruning.export import export as write

    settings = ModelConfig(**job.runtime["model"])
    source, plan, asked = local_folder(settings), plan_of(job), job.settings["shape"]
    partial = Path(job.partial, "checkpoint")
    checkpoint = write(source, plan, job.output("checkpoint"), shape=asked["export"], partial=partial)
    if asked.get("verify"):
        from moe_lab.pruning.verify import verify

        # On the CPU whatever the model's device is: there alone are both sides equal to the bit.
        found = verify(source, plan, checkpoint, device="cpu", trust_remote_code=settings.trust_remote_code)
        write_json(job.output("verified.json"), {"difference": found})
