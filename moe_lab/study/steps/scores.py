"""Steps that compute scores from sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lab import criteria, results
from moe_lab.config import ModelConfig
from moe_lab.grid import Cell
from moe_lab.models.config_json import check_plain_weights
from moe_lab.study.step import Job, Part, Step
from moe_lab.study.steps import tables
from moe_lab.study.steps.builder import Builder, scoring
from moe_lab.study.steps.inputs import evidence, facts, write_table
from moe_lab.study.steps.kind import Kind, Packing
from moe_lab.study.steps.passes import STATISTICS_PASS

CHANNEL_SCORES = "scores.safetensors"
ByLayer = Mapping[int, Mapping[str, Any]]


def scores_step(builder: Builder, cell: Cell) -> Step:
    """The step that scores the experts, or the channels, of every layer."""
    criterion = criteria.get(cell.criterion.name)

    def make() -> Step:
        settings, runtime = scoring(cell)
        inputs = {"model": builder.model(cell.model)}
        inputs |= {need: builder.evidence(need, cell) for need in criterion.needs}
        label = f"{cell.model.name}-{cell.calibration.name}-{criterion.name}"
        return Step("scores", label, {"criterion": settings}, inputs, runtime)

    return builder.once(("scores", cell.model, cell.calibration, cell.criterion, cell.gate, cell.seed), make)


def scores(job: Job) -> None:
    """Compute a score per expert, or per channel; higher means keep."""
    settings = job.settings["criterion"]
    values = score(settings, evidence(job), facts(job)["layers"])
    if criteria.get(settings["criterion"]).granularity == "channel":
        from safetensors.numpy import save_file

        save_file({str(layer): array for layer, array in values.items()}, job.output(CHANNEL_SCORES))
        write_table(job.output("expert_concentration.parquet"), results.CONCENTRATION, tables.concentration(values))
        return
    table = [(layer, expert, float(value)) for layer, array in values.items() for expert, value in enumerate(array)]
    write_table(job.output("scores.parquet"), results.SCORES, table)


def score(settings: Mapping[str, Any], inputs: ByLayer, layers: ByLayer) -> dict[int, Any]:
    """Layer -> scores by a criterion, from sums over the layer's tokens and weights.

    `settings` are those of `scoring`; `layers` has the facts of the layers to score.
    """
    return criteria.score(
        settings["criterion"],
        inputs,
        experts={layer: about["n_experts"] for layer, about in layers.items()},
        widths={layer: about["width"] for layer, about in layers.items()},
        gate=settings.get("gate"),
        seed=settings.get("seed"),
        parameters=settings["parameters"],
    )


def check_weights(criterion: str, model: ModelConfig) -> None:
    """Raise UserError when the criterion needs plain weights and the model's are quantised."""
    if criteria.get(criterion).needs_plain_weights:
        check_plain_weights(model, f"criterion={criterion}")


SCORES = Kind(name="scores", work=scores, step=scores_step, packing=Packing.SMALL)


def family_step(builder: Builder, cell: Cell) -> Step:
    """The step that computes all S(b, alpha, beta), for the overlap figures."""
    model, calibration = cell.model, cell.calibration

    def make() -> Step:
        inputs = {"statistics": STATISTICS_PASS.step(builder, cell)}
        return Step("family", f"{model.name}-{calibration.name}", {"family": Part({"gate": cell.gate})}, inputs)

    return builder.once(("family", model, calibration, cell.gate, cell.seed), make)


def family(job: Job) -> None:
    """Compute S(b, alpha, beta) of every expert for all 17 meaningful combinations."""
    table = criteria.family(evidence(job), gate=job.settings["family"]["gate"])
    write_table(job.output("family.parquet"), results.FAMILY, table)


FAMILY = Kind(name="family", work=family, step=family_step, packing=Packing.SMALL)
