"""The graph of a study: the distinct steps of all its cells; cells share steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from moe_lab.config import AllocationConfig, BenchmarkConfig, CalibrationConfig, Config, CriterionConfig
from moe_lab.grid import Cell, Request
from moe_lab.results import ID_DIGITS, with_id
from moe_lab.study.progress import say
from moe_lab.study.step import Step
from moe_lab.study.steps.builder import Builder, reads_text
from moe_lab.study.steps.costs import COST, PROFILE, TIMING
from moe_lab.study.steps.evaluation import results_step
from moe_lab.study.steps.passes import STATISTICS_PASS
from moe_lab.study.steps.plans import plan_step
from moe_lab.study.steps.recovery import EXPORT, NO_RECOVERY, PrunedModel
from moe_lab.study.steps.scores import FAMILY, scores_step

EXACT_DAMAGE = CriterionConfig(name="exact_damage")
NO_CRITERION = CriterionConfig(name="none")
NO_CALIBRATION = CalibrationConfig(name="none", path="none")
NO_ALLOCATION = AllocationConfig(name="none")


INPUTS = ("statistics", "finetune")
"""Fields of CellSteps whose steps run only if another step needs them."""


@dataclass(frozen=True)
class CellSteps:
    """The steps of one cell. The unpruned model has no scores, no plan and no export."""

    cell: Cell
    model: Step
    statistics: Step | None
    scores: Step | None
    plan: Step | None
    finetune: Step | None
    export: Step | None
    cost: Step
    profile: Step | None
    timing: Step | None
    evaluate: Mapping[str, Step]

    def named(self) -> dict[str, Step | None]:
        """Field -> step, without the benchmarks."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:-1]}


FigureKey = tuple[str, str, str, int]
"""Names of the calibration set and the model, gate and seed."""


@dataclass(frozen=True)
class Graph:
    """All steps of a study. `families` and `damages` are for figures, by calibration set, model, gate and seed."""

    cells: Sequence[CellSteps]
    families: Mapping[FigureKey, Step]
    damages: Mapping[FigureKey, Step]

    def figures(self) -> dict[str, Mapping[FigureKey, Step]]:
        """Field -> the steps for figures, by their keys."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def steps(self) -> list[Step]:
        """Distinct steps, each after its inputs."""
        ordered: dict[str, Step] = {}

        def visit(step: Step) -> None:
            if step.id not in ordered:
                for needed in step.needs:
                    visit(needed)
                ordered[step.id] = step

        for step in self._wanted():
            visit(step)
        return list(ordered.values())

    def _wanted(self) -> Iterable[Step]:
        for steps in self.figures().values():
            yield from steps.values()
        for cell in self.cells:
            yield from (step for name, step in cell.named().items() if step and name not in INPUTS)
            yield from cell.evaluate.values()


def _steps(builder: Builder, cell: Cell, benchmarks: Sequence[BenchmarkConfig]) -> CellSteps:
    """All steps of one cell; criterion "none" is the unpruned model."""
    config = builder.config
    pruned = cell.criterion is not NO_CRITERION
    plan = plan_step(builder, cell) if pruned else None
    model = PrunedModel(builder, cell, plan)
    return CellSteps(
        cell=cell,
        model=builder.model(cell.model),
        statistics=STATISTICS_PASS.step(builder, cell) if pruned and reads_text(cell) else None,
        scores=scores_step(builder, cell) if pruned else None,
        plan=plan,
        finetune=model.finetune,
        export=EXPORT.step(model) if plan and config.export.shape else None,
        cost=COST.step(model),
        profile=PROFILE.step(model) if config.profile else None,
        timing=TIMING.step(model) if config.timing else None,
        evaluate={benchmark.name: results_step(model, benchmark) for benchmark in benchmarks},
    )


def normalized(cell: Cell) -> Cell:
    """The cell without its calibration set if nothing in the cell reads it, so that cells for several sets coincide."""
    return cell if reads_text(cell) else replace(cell, calibration=NO_CALIBRATION)


def unpruned(cell: Cell) -> Cell:
    """The cell of the unpruned model, with which the cell is compared."""
    texts = {"flops": cell.texts["flops"]}
    return Cell(
        cell.model, NO_CRITERION, NO_CALIBRATION, NO_ALLOCATION, NO_RECOVERY, 0.0, "none", 0, texts, cell.protocol
    )


def _distinct_names(requests: Sequence[Request], builder: Builder) -> list[Request]:
    """The requests, with the start of an id added to the name of each model that shares its name with another model."""
    models = {id(cell.model): cell.model for cells, _ in requests for cell in cells}
    by_name: dict[str, dict[str, str]] = {}
    for model in models.values():
        by_name.setdefault(model.name, {})[builder.model(model).id] = model.path
    ambiguous = {name: paths for name, paths in by_name.items() if len(paths) > 1}
    for name, paths in ambiguous.items():
        which = ", ".join(f"{step_id[:ID_DIGITS]} is {path}" for step_id, path in paths.items())
        say(f"moe_lab: {len(paths)} models are called {name}, and shown by their ids, too: {which}")
    renamed = {
        key: replace(model, name=with_id(model.name, builder.model(model).id))
        for key, model in models.items()
        if model.name in ambiguous
    }
    if not renamed:
        return list(requests)
    return [
        ([replace(cell, model=renamed.get(id(cell.model), cell.model)) for cell in cells], benchmarks)
        for cells, benchmarks in requests
    ]


def build(config: Config, requests: Iterable[Request]) -> Graph:
    """The graph of a study: its cells, each once with all its benchmarks, and the unpruned models.

    `config` has the settings that hold for all requests, such as permissions, exports and overlap.
    """
    builder = Builder(config)
    benchmarks_of: dict[Cell, dict[str, BenchmarkConfig]] = {}
    families: dict[FigureKey, Step] = {}
    damages: dict[FigureKey, Step] = {}
    for cells, benchmarks in _distinct_names(list(requests), builder):
        named = {benchmark.name: benchmark for benchmark in benchmarks}
        for cell in cells:
            for candidate in (unpruned(cell), normalized(cell)):
                benchmarks_of.setdefault(candidate, {}).update(named)
            if config.overlap:
                key = (cell.calibration.name, cell.model.name, cell.gate, cell.seed)
                families[key] = FAMILY.step(builder, cell)
                damages[key] = scores_step(builder, replace(cell, criterion=EXACT_DAMAGE))
    steps = [_steps(builder, cell, list(named.values())) for cell, named in benchmarks_of.items()]
    return Graph(steps, families, damages)
