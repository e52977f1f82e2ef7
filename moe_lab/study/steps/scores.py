"""Steps that compute scores from sums, and functions for the input steps of a cell's criterion and
allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from moe_lab import allocation, criteria, plugins, result_files
from moe_lab.config import CriterionConfig, ModelConfig
from moe_lab.criteria import IdentifiedCriterion
from moe_lab.criteria.experts import s_family_scores
from moe_lab.errors import UserError, check_known
from moe_lab.grid import Cell
from moe_lab.models.config_json import check_plain_weights, config_of, has_packed_experts
from moe_lab.study.step import KINDS, Step
from moe_lab.study.steps import tables
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import Facts, Pass, loaded_field

CHANNEL_SCORES = "scores.safetensors"
ByLayer = Mapping[int, Mapping[str, Any]]


def step_class(name: str) -> Any:
    """The class of the steps of the kind `name`. UserError, with the nearest known name, if there
    is no such kind."""
    check_known("step in needs", name, KINDS)
    return KINDS[name]


def input_roles(cell: Cell) -> tuple[str, ...]:
    """Roles of the input steps that the cell's allocation needs besides the cell's scores. A role
    is the kind of the step, or "by" for the scores of the criterion `allocation.by`."""
    return allocation.required_evidence(vars(cell.allocation))


def plan_kinds(cell: Cell) -> list[Any]:
    """Classes of the step that makes the cell's plan, and of its input steps."""
    kinds = [allocation.get(cell.allocation.name).step, *criteria.get(cell.criterion.name).needs]
    for role in input_roles(cell):
        kinds += criteria.get(str(cell.allocation.by)).needs if role == "by" else [role]
    return [step_class(kind) for kind in kinds]


def reads_text(cell: Cell) -> bool:
    """Whether the step that makes the cell's plan, or one of its input steps, reads the calibration
    set."""
    return any(kind.reads_text for kind in plan_kinds(cell))


def input_step(role: str, cell: Cell) -> Step:
    """The input step with the role `role`, see `input_roles`."""
    if role == "by":
        return Scores.of(replace(cell, criterion=CriterionConfig(name=str(cell.allocation.by))))
    step: Step = step_class(role).of(cell, role)
    return step


class Scores(Step):
    """The scores of experts, or of their channels, by a criterion. What has the lowest scores is
    removed first."""

    kind = "scores"
    small = True
    facts: Facts
    criterion: IdentifiedCriterion
    sums: dict[str, Step]
    name: str
    gate: str | None
    """The gate that weighs outputs of experts; None for criteria that do not use it."""
    seed: int | None
    """Seed of a random criterion; None for others."""
    runtime = ("name",)

    def label(self) -> str:
        return self.name

    @classmethod
    def of(cls, cell: Cell) -> Self:
        criterion = criteria.get(cell.criterion.name)
        name = f"{cell.model.name}-{cell.calibration.name}-{criterion.name}"
        sums = {need: input_step(need, cell) for need in criterion.needs}
        return cls(
            loaded_field(cell.model).facts,
            IdentifiedCriterion.of(cell.criterion),
            sums,
            name,
            *gate_and_seed(cell),
            plugins=plugin_locations(cell),
        )

    def work(self, files: Files) -> None:
        """Write a table with the scores of experts. For a criterion of channels, write arrays with
        the scores of channels and a table with concentration curves instead."""
        values = score(self, files.evidence(self.sums), files.facts(self.facts)["layers"])
        if criteria.get(self.criterion.name).granularity == "channel":
            from safetensors.numpy import save_file

            save_file(
                {str(layer): array for layer, array in values.items()}, files.out / CHANNEL_SCORES
            )
            files.table(
                "expert_concentration.parquet",
                result_files.CONCENTRATION,
                tables.concentration(values),
            )
            return
        files.table("scores.parquet", result_files.SCORES, tables.scores(values))


def gate_and_seed(cell: Cell) -> tuple[str | None, int | None]:
    """(gate, seed) of a cell; each is None if the cell's criterion does not use it."""
    criterion = criteria.get(cell.criterion.name)
    return (
        cell.gate if criterion.uses_gate else None,
        cell.seed if criterion.uses_seed else None,
    )


def plugin_locations(cell: Cell) -> tuple[Mapping[str, str], ...]:
    """One result of `plugins.module_location` for each function of the cell's criterion and
    allocation that a plugin defines."""
    criterion = criteria.get(cell.criterion.name)
    cell_allocation = allocation.get(cell.allocation.name)
    functions: list[Callable[..., Any]] = []
    if criterion.source:
        functions.append(criterion.function)
    if cell_allocation.source:
        # None for a granularity at which a step other than the plan step allocates
        functions += [function for function in cell_allocation.functions.values() if function]
    return tuple(plugins.module_location(function) for function in functions)


def score(step: Any, inputs: ByLayer, layers: ByLayer) -> dict[int, Any]:
    """Layer -> scores of its experts, of shape (E,), or of its channels, of shape (E, I). `step`: a
    step with the fields `criterion`, `gate` and `seed`. `inputs`: layer -> name of a statistic ->
    array. `layers`: layer -> facts about the layer."""
    return criteria.score(
        step.criterion.name,
        inputs,
        layers,
        gate=step.gate,
        seed=step.seed,
        parameters=step.criterion.parameters,
    )


def check_weights(criterion: CriterionConfig, model: ModelConfig) -> None:
    """Raise UserError when the criterion needs plain weights and the model's weights are
    quantised, and for a model with packed experts."""
    if has_packed_experts(config_of(model)):
        raise UserError(
            f"model={model.name} has packed experts, which can be evaluated, but neither scored "
            "nor pruned: expected the model that it was pruned from"
        )
    if criteria.get(criterion.name).needs_plain_weights:
        check_plain_weights(model, f"criterion={criterion.name}")


class Family(Step):
    """Scores of every expert by 17 criteria, see `criteria.experts.s_family_scores`."""

    kind = "family"
    small = True
    statistics: Pass
    gate: str

    def label(self) -> str:
        return self.statistics.label()

    @classmethod
    def of(cls, cell: Cell) -> Self:
        return cls(Pass.of(cell, "statistics"), cell.gate)

    def work(self, files: Files) -> None:
        table = s_family_scores(files.evidence({"statistics": self.statistics}), gate=self.gate)
        files.table("family.parquet", result_files.FAMILY, table)
