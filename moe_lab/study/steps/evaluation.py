"""Steps that evaluate a pruned model on a benchmark, or generate its answers and grade them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moe_lab.config import BackendConfig, BenchmarkConfig, Config
from moe_lab.errors import Unavailable
from moe_lab.evaluation.recorded import COMPUTED, Record
from moe_lab.json_files import write_json
from moe_lab.study.step import Job, Part, Step
from moe_lab.study.steps.inputs import plan_of
from moe_lab.study.steps.kind import Kind, Packing, Reads
from moe_lab.study.steps.memory import answer_bytes, benchmark_memory
from moe_lab.study.steps.plans import drops_whole_experts
from moe_lab.study.steps.recovery import PrunedModel, checkpoint_step, forget_models, pruned_model

GRADING_MEMORY = 4 * 2**30
"""Bytes that grading may take; programs that it runs are limited to the same."""


def results_step(pruned: PrunedModel, benchmark: BenchmarkConfig) -> Step:
    """The step with a benchmark's results: GRADE where texts are graded without the model, else EVALUATE."""
    from moe_lab.evaluation import suite

    kind = GRADE if suite.has_two_phases(benchmark) else EVALUATE
    return kind.step(pruned, benchmark)


LOADED = BackendConfig(name="hf")
"""The model is loaded here: for likelihoods, which a server does not give."""


def backend_of(config: Config) -> BackendConfig:
    """The study's back end, with the interpreter of vLLM that the study names."""
    return replace(config.backend, python=config.interpreters.get("vllm"))


def _backend(pruned: PrunedModel, *, generates: bool) -> tuple[dict[str, Part], dict[str, Step], BackendConfig]:
    """What runs the model of a step: the part that identifies it, its checkpoint if it needs one, and its settings.

    A server only generates texts. vLLM also gives likelihoods, and needs no checkpoint for plans of whole experts.
    """
    builder = pruned.builder
    backend = builder.once(("backend",), lambda: backend_of(builder.config))
    if backend.name == "server" and not generates:
        backend = LOADED
    recovered = bool(pruned.finetune or pruned.storage)
    identity: dict[str, Any] = {}
    exported = False
    if backend.name == "server":
        identity = {"name": backend.name, "command": backend.command}
        exported = pruned.plan is not None
    elif backend.name == "vllm":
        identity = {"name": backend.name, "arguments": dict(backend.arguments)}
        exported = pruned.plan is not None and (recovered or not drops_whole_experts(pruned.cell))
    part = {"backend": builder.once(("backend", generates), lambda: Part(identity))} if identity else {}
    usual = "padded" if backend.name == "vllm" and not recovered else "natural"  # vLLM has one width in each layer
    return part, {"checkpoint": checkpoint_step(pruned, usual)} if exported else {}, backend


def _evaluate_step(pruned: PrunedModel, benchmark: BenchmarkConfig) -> Step:
    """The step that runs one benchmark on the model and grades it."""
    builder, model = pruned.builder, pruned.cell.model
    graded, grading = _grading(pruned, benchmark)
    key = ("evaluate", model, benchmark)
    backend, checkpoint, settings = _backend(pruned, generates=False)

    def make() -> tuple[Part, Mapping[str, Any]]:
        runtime = {**builder.runtime(model=model, backend=settings), **grading}
        return Part(_asked(pruned, benchmark, graded.settings)), runtime

    part, runtime = builder.once(key, make)
    parts = {"benchmark": part, **backend, **pruned.storage}
    inputs = pruned.inputs(finetune=pruned.finetune, **checkpoint)
    return Step("evaluate", f"{pruned.label}-{benchmark.name}", parts, inputs, runtime)


def _grading(pruned: PrunedModel, benchmark: BenchmarkConfig) -> tuple[Part, Mapping[str, Any]]:
    """What identifies a benchmark's results, and the runtime settings of grading.

    Without namespaces some programs are not run, which changes results, so the sandbox is then part of the identity.
    Otherwise the step may not run in a weaker one, also where another machine of the study has no namespaces.
    """
    from moe_lab.evaluation import suite
    from moe_lab.evaluation.sandbox.policy import LIMITED

    builder = pruned.builder

    def make() -> tuple[Part, Mapping[str, Any]]:
        policy = suite.policy(builder.config)
        limited = suite.runs_limited(benchmark, policy)
        if policy.sandbox == "auto" and not limited:
            policy = replace(policy, sandbox="namespaces")
        part = Part({**suite.identity(benchmark), **({"sandbox": LIMITED} if limited else {})})
        return part, {**builder.runtime(benchmark=benchmark), "policy": asdict(policy)}

    return builder.once(("benchmark", benchmark), make)


def _asked(pruned: PrunedModel, benchmark: BenchmarkConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A benchmark's settings, with the arguments of the model's chat template where the benchmark uses it."""
    arguments = {"template_arguments": dict(pruned.cell.model.template_arguments)} if benchmark.chat else {}
    return {**settings, **arguments}


def evaluate(job: Job) -> None:
    """Run one benchmark on the job's model, pruned and recovered, and grade it."""
    from moe_lab.evaluation import run

    with _language_model(job) as model:
        run.evaluate(model, _benchmark(job), Path(job.scratch), policy=job.policy)
    _show(job, json.loads(job.output("result.json").read_text())["protocol"]["prompt"])


EVALUATE = Kind(
    name="evaluate",
    work=evaluate,
    step=_evaluate_step,
    reads=Reads.MODEL,
    batch_memory=benchmark_memory,
    own_process=True,
    packing=Packing.CELLS,
)


def _generate_step(pruned: PrunedModel, benchmark: BenchmarkConfig) -> Step:
    """The step that generates answers to one benchmark."""
    from moe_lab.evaluation import suite

    builder, model = pruned.builder, pruned.cell.model
    backend, checkpoint, settings = _backend(pruned, generates=True)

    def make() -> tuple[Part, Mapping[str, Any]]:
        part = Part(_asked(pruned, benchmark, suite.question_identity(benchmark)))
        return part, builder.runtime(model=model, benchmark=benchmark, backend=settings)

    part, runtime = builder.once(("generate", model, benchmark), make)
    parts = {"benchmark": part, **backend, **pruned.storage}
    inputs = pruned.inputs(finetune=pruned.finetune, **checkpoint)
    return Step("generate", f"{pruned.label}-{benchmark.name}", parts, inputs, runtime)


def generate(job: Job) -> None:
    """Generate the answers to one benchmark."""
    from moe_lab.evaluation import run

    with _generator(job) as generator:
        answers = run.generate(generator, _benchmark(job), Path(job.scratch))
    _show(job, answers[0].prompt)


def _show(job: Job, prompt: str) -> None:
    """Write one prompt, as the model read it, to the log."""
    print(f"{job.name} asks, for example: {prompt!r}", file=sys.stderr, flush=True)


@contextmanager
def _generator(job: Job) -> Iterator[Any]:
    """The generator of texts: a server that is started for the job, or what also gives likelihoods."""
    if job.backend.name != "server":
        with _language_model(job) as model:
            yield model
        return
    from moe_lab.evaluation.recorded import RecordedTexts
    from moe_lab.evaluation.server import serving

    with _record(job) as record, serving(_checkpoint(job), job.backend, job.model, job.name) as generator:
        yield RecordedTexts(generator, record)


@contextmanager
def _language_model(job: Job) -> Iterator[Any]:
    """The job's model, pruned and recovered: loaded here, or on an engine that stays for the next job.

    What it computes is recorded in the job's partial results.
    """
    from moe_lab.evaluation.recorded import Recorded

    with _record(job) as record:
        if job.backend.name == "vllm":
            from moe_lab.evaluation import engine_model

            forget_models()
            model = engine_model.opened(_checkpoint(job), job.backend, job.model, _masked(job))
            write_json(job.output("backend.json"), model.engine.about)
            yield Recorded(model, record)
            return
        from moe_lab.evaluation.local_model import LocalModel

        with pruned_model(job) as (network, tokenizer):
            yield Recorded(LocalModel(network, tokenizer, job.model.template_arguments), record)


def _record(job: Job) -> Record:
    """What the job's model has computed so far."""
    return Record(Path(job.partial, COMPUTED))


def _checkpoint(job: Job) -> Path:
    """The files that a server or an engine reads: the export of the job's plan, or the original."""
    from moe_lab.models.files import local_folder

    return job.input("checkpoint", "checkpoint") if "checkpoint" in job.inputs else local_folder(job.model)


def _masked(job: Job) -> Any:
    """The plan that masks the original; None if the checkpoint is pruned, and for the unpruned model."""
    return None if "checkpoint" in job.inputs else plan_of(job)


def _with_loaded_models(step: Step) -> str | None:
    """Generating by a model that is loaded goes into the Slurm jobs that evaluate its other benchmarks."""
    return None if step.runtime["backend"]["name"] == "server" else "evaluate"


GENERATE = Kind(
    name="generate",
    work=generate,
    step=_generate_step,
    reads=Reads.MODEL,
    batch_memory=benchmark_memory,
    writes=answer_bytes,
    own_process=True,
    packed_as=_with_loaded_models,
)


def _grade_step(pruned: PrunedModel, benchmark: BenchmarkConfig) -> Step:
    """The step that grades the texts of a generate step."""
    part, runtime = _grading(pruned, benchmark)
    generated = GENERATE.step(pruned, benchmark)
    return Step("grade", generated.label, {"benchmark": part}, {"generate": generated}, runtime)


def grade(job: Job) -> None:
    """Grade generated texts; needs no model."""
    from moe_lab.evaluation import generation, run

    answers = generation.read(job.input("generate", run.ANSWERS))
    run.grade(answers, _benchmark(job), Path(job.scratch), policy=job.policy)


GRADE = Kind(
    name="grade",
    work=grade,
    step=_grade_step,
    memory=GRADING_MEMORY,
    own_process=True,
    packing=Packing.GRADING,
)


def _benchmark(job: Job) -> BenchmarkConfig:
    """The job's benchmark. Raises Unavailable when its data has changed since the study was started.

    Results on other data belong to a step with another id.
    """
    from moe_lab.evaluation import suite

    benchmark = job.benchmark
    if job.settings["benchmark"]["data"] != suite.data_digest(benchmark):
        raise Unavailable(
            f"benchmark {benchmark.name}: its data is not what it was when this was started: start the study again"
        )
    return benchmark
