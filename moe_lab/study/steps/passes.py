"""Steps that measure the model: its shape, sums over its weights, and passes over a calibration set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_lab import results
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.grid import Cell
from moe_lab.json_files import write_json
from moe_lab.study.step import Job, Part, Step
from moe_lab.study.steps import tables
from moe_lab.study.steps.builder import Builder
from moe_lab.study.steps.engine import engine
from moe_lab.study.steps.inputs import STATISTICS, model_and_tokenizer, rows, write_table
from moe_lab.study.steps.kind import Kind, Packing, Reads, always
from moe_lab.study.steps.memory import expert_gradients

VERSIONS = {"weight_gradients": 2}
"""Kinds of passes whose files hold other sums than they once did: with a new id, old files are not taken for them."""


def reading(builder: Builder, kind: str, model: ModelConfig, calibration: CalibrationConfig, seed: int) -> Step:
    """A pass over a calibration set; `kind` says which sums it leaves."""

    def make() -> Step:
        text = builder.seeded(calibration, seed)
        version = {"version": Part({"version": VERSIONS[kind]})} if kind in VERSIONS else {}
        return Step(
            kind,
            f"{model.name}-{calibration.name}",
            {"model": builder.model_part(model), "calibration": builder.text_part(text), **version},
            {"model": builder.model(model)},
            builder.runtime(model=model, calibration=text),
        )

    return builder.once((kind, model, calibration, seed), make)


def of_text(kind: str) -> Callable[[Builder, Cell], Step]:
    """What identifies a pass over the cell's calibration set."""
    return lambda builder, cell: reading(builder, kind, cell.model, cell.calibration, cell.seed)


def of_weights(kind: str) -> Callable[[Builder, Cell], Step]:
    """What identifies a reading of the model's weights."""

    def step(builder: Builder, cell: Cell) -> Step:
        model = cell.model

        def make() -> Step:
            parts = {"model": builder.model_part(model)}
            return Step(kind, model.name, parts, {"model": builder.model(model)}, builder.runtime(model=model))

        return builder.once((kind, model), make)

    return step


def model(job: Job) -> None:
    """Layers, experts and parameters of the model, from its configuration alone."""
    from moe_lab.models.facts import facts
    from moe_lab.models.files import fingerprint, local_folder

    write_json(job.output("facts.json"), {**facts(job.model), "sha256": fingerprint(local_folder(job.model))})


MODEL = Kind(name="model", work=model, step=lambda builder, cell: builder.model(cell.model), packing=Packing.SMALL)


def statistics(job: Job) -> None:
    """One forward pass over the calibration set: all sums, how many tokens each expert saw, and what figures show."""
    from moe_lab.statistics.sums import coverage

    sums = engine(job).statistics(job.text.snapshots)
    sums.save(job.output(STATISTICS))
    write_table(job.output("coverage.parquet"), results.COVERAGE, coverage(sums))
    write_table(job.output("experts.parquet"), results.EXPERTS, tables.experts(sums.layers))
    write_table(job.output("layers.parquet"), results.LOSSES, tables.losses(sums.layers))
    write_table(job.output("entropy.parquet"), results.ENTROPIES, tables.entropies(sums.layers))


STATISTICS_PASS = Kind(
    name="statistics",
    work=statistics,
    step=of_text("statistics"),
    reads=Reads.MODEL,
    reads_text=True,
    checkpoint_reads=1,
)


def gradients(job: Job) -> None:
    """One forward and one backward pass: sums over the channels and the gradients of the loss at them."""
    sums = engine(job).gradients(job.text.snapshots)
    sums.save(job.output(STATISTICS))
    write_table(job.output("gradients.parquet"), results.GRADIENTS, tables.gradients(sums.layers))


GRADIENTS = Kind(
    name="gradients",
    work=gradients,
    step=of_text("gradients"),
    reads=Reads.MODEL,
    reads_text=True,
    checkpoint_reads=2,
    backward=always,
)


def weight_gradients(job: Job) -> None:
    """One forward and one backward pass with gradients of the experts' weights, reduced to a number per channel."""
    engine(job).weight_gradients().save(job.output(STATISTICS))


WEIGHT_GRADIENTS = Kind(
    name="weight_gradients",
    work=weight_gradients,
    step=of_text("weight_gradients"),
    reads=Reads.MODEL,
    reads_text=True,
    checkpoint_reads=2,
    backward=always,
    layer_memory=expert_gradients,
)


def damage(job: Job) -> None:
    """The exact damage of removing each expert alone, in a forward pass with one expert more per token."""
    from moe_lab.statistics.damage import DamageTap

    engine(job).read(DamageTap).save(job.output(STATISTICS))


DAMAGE = Kind(
    name="damage", work=damage, step=of_text("damage"), reads=Reads.MODEL, reads_text=True, checkpoint_reads=1
)


def ablation(job: Job) -> None:
    """What the loss gains when each expert alone is silent: a pass per expert from its layer on."""
    sums = _loss_rises(job, "ablation")
    sums.save(job.output(STATISTICS))
    write_table(job.output("ablation.parquet"), results.ABLATIONS, tables.ablations(sums.layers))


ABLATION = Kind(name="ablation", work=ablation, step=of_text("ablation"), reads=Reads.MODEL, reads_text=True)


def scaling(job: Job) -> None:
    """What the loss gains when the routed output of each layer alone is scaled: a pass per layer from it on."""
    _loss_rises(job, "scaling").save(job.output(STATISTICS))


def _loss_rises(job: Job, kind: str) -> Any:
    from moe_lab.search.ablation import loss_rises

    network, tokenizer = model_and_tokenizer(job)
    return loss_rises(network, kind, rows(job, tokenizer), fingerprint=job.settings, out=Path(job.partial))


SCALING = Kind(name="scaling", work=scaling, step=of_text("scaling"), reads=Reads.MODEL, reads_text=True)


def weights(job: Job) -> None:
    """Sums over the weights of each expert, read from the checkpoint without building the model."""
    from moe_lab.statistics.weights import weigh_experts

    folder, device = _checkpoint(job)
    sums = weigh_experts(folder, fingerprint=job.settings, device=device)
    sums.save(job.output(STATISTICS))
    write_table(job.output("weights.parquet"), results.WEIGHTS, tables.weights(sums.layers))


WEIGHTS = Kind(name="weights", work=weights, step=of_weights("weights"), reads=Reads.CHECKPOINT)


def channel_weights(job: Job) -> None:
    """Sums over the weights of each channel, read like those of each expert."""
    from moe_lab.statistics.weights import weigh_channels

    folder, device = _checkpoint(job)
    weigh_channels(folder, fingerprint=job.settings, device=device).save(job.output(STATISTICS))


CHANNEL_WEIGHTS = Kind(
    name="channel_weights", work=channel_weights, step=of_weights("channel_weights"), reads=Reads.CHECKPOINT
)


def _checkpoint(job: Job) -> tuple[Path, str]:
    """The folder of the job's model, and the one device that is to sum over its weights."""
    from moe_lab.models.device import place
    from moe_lab.models.files import DEVICE_MAPS, local_folder

    device: Any = place(job.model)
    return local_folder(job.model), "cuda" if device in DEVICE_MAPS else device
