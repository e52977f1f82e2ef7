"""Steps that measure the model: facts from its configuration, sums over its weights, passes over a calibration set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_lab import results
from moe_lab.calibration import settings as calibrations
from moe_lab.grid import Cell
from moe_lab.json_files import write_json
from moe_lab.study.step import Job, Part, Step
from moe_lab.study.steps import tables
from moe_lab.study.steps.builder import Builder
from moe_lab.study.steps.engine import Merged, engine, engine_or_parts
from moe_lab.study.steps.inputs import STATISTICS, model_and_tokenizer, own_batches, rows, write_table
from moe_lab.study.steps.kind import Kind, Packing, Reads, always
from moe_lab.study.steps.memory import expert_gradients


def of_text(work: Callable[[Job], None], *, by_rows: bool = False, **fields: Any) -> Kind:
    """Make a kind of step that passes over the cell's calibration set, named after the function `work`.

    `by_rows`: what the pass gathers over rows can be added up, so calibration.parts divides it into steps. `fields` are
    further fields of Kind.
    """
    name = work.__name__

    def step(builder: Builder, cell: Cell) -> Step:
        model, calibration = cell.model, cell.calibration

        def make() -> Step:
            text = builder.seeded(calibration, cell.seed)
            parts = {"model": builder.model_part(model), "calibration": builder.text_part(text)}
            inputs, runtime = {"model": builder.model(model)}, builder.runtime(model=model, calibration=text)
            label = f"{model.name}-{calibration.name}"
            shares = []
            for first, end in calibrations.shares(text) if by_rows else ():
                rows = Part({"first": first, "end": end})
                shares.append(Step(name, f"{label}-rows{first}-{end}", {**parts, "rows": rows}, inputs, runtime))
            return Step(name, label, parts, inputs, runtime, shares)

        return builder.once((name, model, calibration, cell.seed), make)

    return Kind(name=name, work=work, step=step, reads=Reads.MODEL, reads_text=True, **fields)


def of_weights(work: Callable[[Job], None]) -> Kind:
    """Make a kind of step that reads the weights of the cell's model, named after the function `work`."""
    name = work.__name__

    def step(builder: Builder, cell: Cell) -> Step:
        model = cell.model

        def make() -> Step:
            parts = {"model": builder.model_part(model)}
            return Step(name, model.name, parts, {"model": builder.model(model)}, builder.runtime(model=model))

        return builder.once((name, model), make)

    return Kind(name=name, work=work, step=step, reads=Reads.CHECKPOINT)


def model(job: Job) -> None:
    """Write layers, experts and parameters of the model, from its configuration alone, and a hash of its files."""
    from moe_lab.models.facts import facts
    from moe_lab.models.files import fingerprint, local_folder

    write_json(job.output("facts.json"), {**facts(job.model), "sha256": fingerprint(local_folder(job.model))})


MODEL = Kind(name="model", work=model, step=lambda builder, cell: builder.model(cell.model), packing=Packing.SMALL)


def statistics(job: Job) -> None:
    """Run one forward pass over the calibration set; write all sums, tokens per expert, and tables for figures."""
    from moe_lab.statistics.forward import ForwardTap
    from moe_lab.statistics.sums import coverage

    sums = engine_or_parts(job).read(ForwardTap)
    sums.save(job.output(STATISTICS))
    write_table(job.output("coverage.parquet"), results.COVERAGE, coverage(sums))
    write_table(job.output("experts.parquet"), results.EXPERTS, tables.experts(sums.layers))
    write_table(job.output("layers.parquet"), results.LOSSES, tables.losses(sums.layers))
    write_table(job.output("entropy.parquet"), results.ENTROPIES, tables.entropies(sums.layers))


STATISTICS_PASS = of_text(statistics, by_rows=True, checkpoint_reads=1)


def gradients(job: Job) -> None:
    """Run a forward and a backward pass; write sums for each channel, of activations and of the loss's gradients."""
    sums = engine_or_parts(job).gradients()
    sums.save(job.output(STATISTICS))
    write_table(job.output("gradients.parquet"), results.GRADIENTS, tables.gradients(sums.layers))


GRADIENTS = of_text(gradients, by_rows=True, checkpoint_reads=2, backward=always)


def weight_gradients(job: Job) -> None:
    """Run a forward and a backward pass; write gradients of the experts' weights, reduced to a number per channel."""
    engine(job).weight_gradients().save(job.output(STATISTICS))


WEIGHT_GRADIENTS = of_text(weight_gradients, checkpoint_reads=2, backward=always, layer_memory=expert_gradients)


def damage(job: Job) -> None:
    """Measure the exact damage of removing each expert alone, in a forward pass with one more expert per token."""
    from moe_lab.statistics.damage import DamageTap

    engine_or_parts(job).read(DamageTap).save(job.output(STATISTICS))


DAMAGE = of_text(damage, by_rows=True, checkpoint_reads=1)


def similarity(job: Job) -> None:
    """Run one forward pass in which every expert reads every token, for groupings of similar experts."""
    from moe_lab.statistics.similarity import SimilarityTap

    engine_or_parts(job).read(SimilarityTap).save(job.output(STATISTICS))


SIMILARITY = of_text(similarity, by_rows=True, checkpoint_reads=1)


def ablation(job: Job) -> None:
    """Measure how much the loss rises when one expert's output is set to 0: one pass per expert, from its layer on."""
    sums = _loss_rises(job, "ablation")
    sums.save(job.output(STATISTICS))
    write_table(job.output("ablation.parquet"), results.ABLATIONS, tables.ablations(sums.layers))


ABLATION = of_text(ablation, by_rows=True)


def scaling(job: Job) -> None:
    """Measure how much the loss rises when the routed output of one layer is scaled: one pass per layer, from it on."""
    _loss_rises(job, "scaling").save(job.output(STATISTICS))


def _loss_rises(job: Job, kind: str) -> Any:
    from moe_lab.search.ablation import loss_rises

    if job.merges:
        return Merged(job).loss_rises()
    network, tokenizer = model_and_tokenizer(job)
    text = rows(job, tokenizer)[own_batches(job)]
    return loss_rises(network, kind, text, fingerprint=job.settings, out=Path(job.partial))


SCALING = of_text(scaling, by_rows=True)


def weights(job: Job) -> None:
    """Write sums over the weights of each expert, read from the checkpoint without building the model."""
    from moe_lab.statistics.weights import weigh_experts

    folder, device = _checkpoint(job)
    sums = weigh_experts(folder, fingerprint=job.settings, device=device)
    sums.save(job.output(STATISTICS))
    write_table(job.output("weights.parquet"), results.WEIGHTS, tables.weights(sums.layers))


WEIGHTS = of_weights(weights)


def channel_weights(job: Job) -> None:
    """Write sums over the weights of each channel, read from the checkpoint without building the model."""
    from moe_lab.statistics.weights import weigh_channels

    folder, device = _checkpoint(job)
    weigh_channels(folder, fingerprint=job.settings, device=device).save(job.output(STATISTICS))


CHANNEL_WEIGHTS = of_weights(channel_weights)


def weight_distances(job: Job) -> None:
    """Write how far the weights of experts are from each other, read from the checkpoint without building the model."""
    from moe_lab.statistics.weights import compare_experts

    folder, device = _checkpoint(job)
    compare_experts(folder, fingerprint=job.settings, device=device).save(job.output(STATISTICS))


WEIGHT_DISTANCES = of_weights(weight_distances)


def _checkpoint(job: Job) -> tuple[Path, str]:
    """The folder of the job's model, and the device that sums over its weights."""
    from moe_lab.config.pruning import DEVICE_MAPS
    from moe_lab.models.device import place
    from moe_lab.models.files import local_folder

    device: Any = place(job.model)
    return local_folder(job.model), "cuda" if device in DEVICE_MAPS else device
