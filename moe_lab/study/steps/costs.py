"""Steps that measure a pruned model: parameters, FLOPs, time and memory, and the behaviour of its layers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from moe_lab import results
from moe_lab.config import CalibrationConfig, Config, ModelConfig, TimingConfig
from moe_lab.errors import Unavailable, UserError, user_errors
from moe_lab.json_files import write_json
from moe_lab.models.config_json import check_plain_weights, has_uneven_layers
from moe_lab.start import command
from moe_lab.study.step import Job, Part, Step
from moe_lab.study.steps.engine import engine
from moe_lab.study.steps.inputs import facts, model_and_tokenizer, plan_of, rows, skeleton_of, write_table
from moe_lab.study.steps.kind import Kind, Reads, always, never
from moe_lab.study.steps.plans import drops_whole_experts
from moe_lab.study.steps.recovery import NO_RECOVERY, PrunedModel, finetuned, storage_of


def _cost_step(pruned: PrunedModel) -> Step:
    """The step that counts parameters, storage, and FLOPs in a row as long as those of the text.

    The text itself is read only where experts of one layer may differ in width, since FLOPs then depend on routing.
    """
    builder, cell = pruned.builder, pruned.cell
    text = pruned.cell.texts["flops"]
    before = COST.step(PrunedModel(builder, replace(cell, recovery=NO_RECOVERY), None)) if pruned.plan else None
    row = builder.once(("row", text), lambda: Part({"length": text.length}))
    parts, inputs = {"row": row, **pruned.storage}, pruned.inputs(unpruned=before)
    if _has_uneven_layers(pruned):
        return _reading("cost", pruned, pruned.label, parts, inputs, text)
    return Step("cost", pruned.label, parts, inputs, builder.runtime(model=cell.model))


def _has_uneven_layers(pruned: PrunedModel) -> bool:
    """Whether experts of one layer may differ in width."""
    cell = pruned.cell
    if pruned.plan is None:
        return pruned.builder.once(("uneven", cell.model), lambda: has_uneven_layers(cell.model))
    return not drops_whole_experts(cell)


def _reading(
    kind: str,
    pruned: PrunedModel,
    label: str,
    parts: Mapping[str, Part],
    inputs: Mapping[str, Step],
    text: CalibrationConfig,
) -> Step:
    """A step that passes over a text, in the order of the cell's seed."""
    builder, cell = pruned.builder, pruned.cell
    text = builder.seeded(text, cell.seed)
    runtime = builder.runtime(model=cell.model, text=text)
    return Step(kind, label, {"text": builder.text_part(text), **parts}, inputs, runtime)


def cost(job: Job) -> None:
    """Count parameters, storage, and the FLOPs of a token. The model is run only where FLOPs depend on routing."""
    from moe_lab.models.discover import routed_layers
    from moe_lab.pruning.cost import cost as count
    from moe_lab.pruning.flops import even_routing, row_flops

    network, plan = skeleton_of(job), plan_of(job)
    if "unpruned" in job.inputs:  # counted once for all plans
        row = json.loads(job.input("unpruned", "cost.json").read_text())["flops_by_part"]
    else:
        row = row_flops(network, job.settings["row"]["length"])
    routing = even_routing(routed_layers(network), plan) or _routing(job, plan)
    costs = count(network, plan, row, routing, facts=facts(job), **job.settings.get("storage", {}))
    write_json(job.output("cost.json"), costs)


def _routing(job: Job, plan: Any) -> Any:
    """The measured routing of the job's text under the plan. Raises UserError when the job has no text."""
    if "text" not in job.runtime:
        raise UserError(
            f"cost of model={job.model.name}: its experts differ in width, which is known only of a "
            "folder: download it, and give the folder as model.path"
        )
    return engine(job).routing(plan)


def _with_evaluations(step: Step) -> str | None:
    """Costs of pruned models go into the Slurm jobs of evaluations, which load the model anyway."""
    return "evaluate" if "plan" in step.inputs else None


COST = Kind(
    name="cost",
    work=cost,
    step=_cost_step,
    reads=Reads.MODEL,
    checkpoint_reads=1,
    second_model=never,  # storage is counted on the meta device, without a copy
    packed_as=_with_evaluations,
)


def _profile_step(pruned: PrunedModel) -> Step:
    """The step that measures hidden states and routing layer by layer, of the pruned model before recovery."""
    text = pruned.cell.texts["flops"]
    return _reading("profile", pruned, pruned.unrecovered_label, {}, pruned.inputs(), text)


def profile(job: Job) -> None:
    """Measure how much hidden states differ between tokens after every layer, and how its router decides."""
    from moe_lab.pruning.profile import profile as measure

    network, tokenizer = model_and_tokenizer(job)
    measured = measure(network, plan_of(job), rows(job, tokenizer))
    write_table(job.output("profile.parquet"), results.PROFILES, measured)


PROFILE = Kind(name="profile", work=profile, step=_profile_step, reads=Reads.MODEL)


def _timing_step(pruned: PrunedModel) -> Step:
    """The step that measures time and memory of the model as deployed. The device's name is part of its identity."""
    builder, model, config = pruned.builder, pruned.cell.model, pruned.builder.config

    def make() -> Part:
        device = config.timed.device or device_here(model.device)
        return Part({**asdict(config.timed), "device": device, "threads": model.threads})

    parts = {"timing": builder.once(("timing", model), make), **pruned.storage}
    inputs = pruned.inputs(finetune=pruned.finetune)
    return _reading("timing", pruned, pruned.label, parts, inputs, pruned.cell.texts["flops"])


def wrong_timing(config: Config, model: ModelConfig) -> Iterator[str]:
    """A sentence for each reason why the model cannot be timed.

    Timing must run alone. The name of its device must be known in advance, because it is part of the step's identity.
    """
    if not config.timing:
        return
    if config.launcher.name == "local" and config.launcher.processes != 1:
        yield "timing=true beside other work would measure that too: expected launcher=inline, or launcher.processes=1"
    if config.launcher.name == "slurm" and config.timed.device is None:
        yield "timing=true with launcher=slurm needs timed.device: expected the name of the nodes' GPU, as jobs see it"
    yield from user_errors(check_plain_weights, model, "timing=true")


def device_here(device: str) -> str:
    """Name of the device that `model.device` selects on this machine. Raises UserError when there is none.

    Runs in another process, because torch takes seconds to import.
    """
    answer = subprocess.run(command("moe_lab.models.device", device), capture_output=True, text=True)
    if answer.returncode:
        reason = answer.stderr.strip().splitlines()[-1].partition(": ")[2]
        raise UserError(reason if reason.startswith("model.device=") else f"model.device={device}: {reason}")
    return answer.stdout.strip().splitlines()[-1]


def timing(job: Job) -> None:
    """Measure seconds of prompts and answers, and memory, of the model as deployed: without what its plan removes, in
    the bits it is stored in.

    Raises Unavailable on another device than the one that identifies the step.
    """
    import torch

    from moe_lab.evaluation.timing import measure
    from moe_lab.models.device import device_name

    settings = dict(job.settings["timing"])
    device, here = settings["device"], device_name(job.model.device)
    if here != device:
        raise Unavailable(f"timing is about {device}, and this machine has {here}: run it there, or set timed.device")
    network, tokenizer = model_and_tokenizer(job)
    model = _deployed(job, network)
    tokens = torch.cat([ids[valid] for ids, valid in rows(job, tokenizer)])
    conditions = TimingConfig(**{name: value for name, value in settings.items() if name != "threads"})
    load = os.getloadavg()[0]
    measured = measure(model, tokens, conditions)
    write_table(job.output("timing.parquet"), results.TIMINGS, measured)
    write_json(job.output("timing.json"), {"device": device, "load": load, **_about(model)})


def _deployed(job: Job, network: Any) -> Any:
    """The model as a server would hold it: pruned parts removed, fine-tuned, quantised."""
    from moe_lab.recovery.apply import recovered

    plan, storage = plan_of(job), storage_of(job)
    if plan is None and storage["bits"] == 16:
        return network
    return recovered(network, plan, bits=storage["bits"], modules=storage["modules"], tuned=finetuned(job))


def _about(model: Any) -> dict[str, Any]:
    import torch

    from moe_lab.models.discover import is_experts
    from moe_lab.recovery.quantize import storage

    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "experts": sorted({type(module).__name__ for module in model.modules() if is_experts(module)}),
        "weight_bytes": storage(model)["total"],
    }


TIMING = Kind(name="timing", work=timing, step=_timing_step, reads=Reads.MODEL, second_model=always)
