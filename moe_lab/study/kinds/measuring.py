"""Steps that look at the model: its shape, its weights, and what it does with a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.json_files import write_json
from moe_lab.study.job import Job
from moe_lab.study.kinds import tables
from moe_lab.study.kinds.shared import (
    STATISTICS,
    is_streamed,
    model_and_tokenizer,
    rows,
    streamed_model,
    write_table,
)

GROUP = 8
"""Batches between two checkpoints of a pass over a text."""


def model(job: Job) -> None:
    """Layers, experts and parameters of the model, from its configuration alone."""
    from moe_lab.models.facts import facts
    from moe_lab.models.files import fingerprint, local_folder

    settings = ModelConfig(**job.runtime["model"])
    write_json(job.output("facts.json"), {**facts(settings), "sha256": fingerprint(local_folder(settings))})


def statistics(job: Job) -> None:
    """One forward pass over the calibration set: all sums, how many tokens each expert saw, and what figures show."""
    from moe_lab.statistics.forward import ForwardTap
    from moe_lab.statistics.streaming import stream
    from moe_lab.statistics.sums import coverage

    if is_streamed(job):
        sums = _streamed(job, stream, ForwardTap, "forward")
    else:
        sums = forward_sums(job, job.runtime["calibration"]["snapshots"])
    sums.save(job.output(STATISTICS))
    write_table(job.output("coverage.parquet"), ("layer", "expert", "tokens"), coverage(sums))
    write_table(job.output("experts.parquet"), tables.EXPERTS, tables.experts(sums.layers))
    write_table(job.output("layers.parquet"), tables.LOSSES, tables.losses(sums.layers))
    write_table(job.output("entropy.parquet"), tables.ENTROPIES, tables.entropies(sums.layers))


def forward_sums(job: Job, parts: int) -> Any:
    """The sums of a forward pass that has the whole model in memory, which leaves so many snapshots."""
    from moe_lab.statistics.gather import gather

    return _resident(job, gather, parts)


def gradient_sums(job: Job, parts: int) -> Any:
    """The same of a forward and a backward pass."""
    from moe_lab.statistics.gradients import gather_gradients

    return _resident(job, gather_gradients, parts, checkpointing=job.runtime["calibration"]["checkpointing"])


def _resident(job: Job, read: Callable[..., Any], parts: int, **settings: bool) -> Any:
    from moe_lab.statistics.snapshots import Snapshots

    network, tokenizer = model_and_tokenizer(job)
    text = rows(job, tokenizer)
    snapshots = Snapshots(Path(job.partial), text, parts)
    common = {"out": Path(job.partial), "fingerprint": job.settings, "groups": GROUP, "snapshots": snapshots}
    sums = read(network, text, **common, **settings)
    snapshots.publish(Path(job.scratch))
    return sums


def _streamed(job: Job, read: Callable[..., Any], tap: type, kind: str) -> Any:
    """The sums of a pass that has one decoder layer in memory at a time."""
    model, tokenizer, budget = streamed_model(job)
    text = rows(job, tokenizer)
    return read(model, tap, text, kind=kind, out=Path(job.partial), fingerprint=job.settings, budget=budget)


def gradients(job: Job) -> None:
    """One forward and one backward pass: sums over the channels and the gradients of the loss at them."""
    from moe_lab.statistics.gradients import GradientTap
    from moe_lab.statistics.streaming import stream_back

    if is_streamed(job):
        sums = _streamed(job, stream_back, GradientTap, "gradients")
    else:
        sums = gradient_sums(job, job.runtime["calibration"]["snapshots"])
    sums.save(job.output(STATISTICS))
    write_table(job.output("gradients.parquet"), tables.GRADIENTS, tables.gradients(sums.layers))


def weight_gradients(job: Job) -> None:
    """One forward and one backward pass with gradients of the experts' weights, reduced to a number per channel."""
    from moe_lab.statistics.streaming import stream_back
    from moe_lab.statistics.weight_gradients import WeightGradientTap, gather_weight_gradients

    if is_streamed(job):
        sums = _streamed(job, stream_back, WeightGradientTap, "weight_gradients")
    else:
        network, tokenizer = model_and_tokenizer(job)
        sums = gather_weight_gradients(network, rows(job, tokenizer), fingerprint=job.settings)
    sums.save(job.output(STATISTICS))


def damage(job: Job) -> None:
    """The exact damage of removing each expert alone, in a forward pass with one expert more per token."""
    from moe_lab.statistics.damage import DamageTap, measure
    from moe_lab.statistics.streaming import stream

    if is_streamed(job):
        sums = _streamed(job, stream, DamageTap, "damage")
    else:
        network, tokenizer = model_and_tokenizer(job)
        text = rows(job, tokenizer)
        sums = measure(network, text, fingerprint=job.settings, out=Path(job.partial), groups=GROUP)
    sums.save(job.output(STATISTICS))


def ablation(job: Job) -> None:
    """What the loss gains when each expert alone is silent: a pass per expert from its layer on."""
    from moe_lab.search.ablation import ablate

    network, tokenizer = model_and_tokenizer(job)
    text = rows(job, tokenizer)
    sums = ablate(network, text, fingerprint=job.settings, out=Path(job.partial))
    sums.save(job.output(STATISTICS))
    write_table(job.output("ablation.parquet"), tables.ABLATIONS, tables.ablations(sums.layers))


def scaling(job: Job) -> None:
    """What the loss gains when the routed output of each layer alone is scaled: a pass per layer from it on."""
    from moe_lab.search.ablation import scale_layers

    network, tokenizer = model_and_tokenizer(job)
    text = rows(job, tokenizer)
    sums = scale_layers(network, text, fingerprint=job.settings, out=Path(job.partial), groups=GROUP)
    sums.save(job.output(STATISTICS))


def weights(job: Job) -> None:
    """Sums over the weights of each expert, read from the checkpoint without building the model."""
    from moe_lab.statistics.weights import weigh

    folder, device = _checkpoint(job)
    sums = weigh(folder, fingerprint=job.settings, device=device)
    sums.save(job.output(STATISTICS))
    write_table(job.output("weights.parquet"), tables.WEIGHTS, tables.weights(sums.layers))


def channel_weights(job: Job) -> None:
    """Sums over the weights of each channel, read like those of each expert."""
    from moe_lab.statistics.channel_weights import weigh_channels

    folder, device = _checkpoint(job)
    weigh_channels(folder, fingerprint=job.settings, device=device).save(job.output(STATISTICS))


def _checkpoint(job: Job) -> tuple[Path, str]:
    """The folder of the job's model, and the one device that is to sum over its weights."""
    from moe_lab.models.device import place
    from moe_lab.models.files import DEVICE_MAPS, local_folder

    settings = ModelConfig(**job.runtime["model"])
    device = place(settings)
    return local_folder(settings), "cuda" if device in DEVICE_MAPS else device
