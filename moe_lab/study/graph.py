"""From cells to distinct steps: work that cells share stands in the graph once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_lab import criteria
from moe_lab.config import (
    AllocationConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    CriterionConfig,
    ModelConfig,
)
from moe_lab.grid import Cell
from moe_lab.results import ID_DIGITS
from moe_lab.study.identity import Step
from moe_lab.study.maker import Maker, reads_text
from moe_lab.study.progress import say
from moe_lab.study.pruned import NO_RECOVERY, Pruned

EXACT_DAMAGE = CriterionConfig(name="exact_damage")
NO_CRITERION = CriterionConfig(name="none")
NO_CALIBRATION = CalibrationConfig(name="none", path="none")
NO_ALLOCATION = AllocationConfig(name="none")


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


@dataclass(frozen=True)
class Graph:
    """All steps of a study. `families`, `damages` and `convergences` feed figures, by "calibration@model@gate@seed";
    `channel_convergences` too, by "criterion@calibration@model@gate@seed"."""

    cells: Sequence[CellSteps]
    families: Mapping[str, Step]
    damages: Mapping[str, Step]
    convergences: Mapping[str, Step]
    channel_convergences: Mapping[str, Step]

    def steps(self) -> list[Step]:
        """Distinct steps, each after its inputs."""
        found: dict[str, Step] = {}

        def visit(step: Step) -> None:
            if step.id not in found:
                for needed in step.inputs.values():
                    visit(needed)
                found[step.id] = step

        for step in self._wanted():
            visit(step)
        return list(found.values())

    def _wanted(self) -> Iterable[Step]:
        yield from self.families.values()
        yield from self.damages.values()
        yield from self.convergences.values()
        yield from self.channel_convergences.values()
        for cell in self.cells:
            yield cell.model
            yield from (step for step in (cell.scores, cell.plan, cell.export, cell.profile, cell.timing) if step)
            yield cell.cost
            yield from cell.evaluate.values()


def _steps(maker: Maker, cell: Cell, benchmarks: Sequence[BenchmarkConfig]) -> CellSteps:
    """All steps of one cell; criterion "none" is the unpruned model."""
    pruned = cell.criterion is not NO_CRITERION
    plan = maker.plan(cell) if pruned else None
    model = Pruned(maker, cell, plan)
    return CellSteps(
        cell=cell,
        model=maker.model(cell.model),
        statistics=maker.statistics(cell) if pruned else None,
        scores=maker.scores(cell) if pruned else None,
        plan=plan,
        finetune=model.finetune,
        export=model.export() if plan and maker.config.export else None,
        cost=model.cost(),
        profile=model.profile() if maker.config.profile else None,
        timing=model.timing() if maker.config.timing else None,
        evaluate={benchmark.name: model.evaluate(benchmark) for benchmark in benchmarks},
    )


def normalized(cell: Cell) -> Cell:
    """The cell without a calibration set, if nothing in it reads one: one cell instead of one per set."""
    return cell if reads_text(cell) else replace(cell, calibration=NO_CALIBRATION)


def settles_by_channels(cell: Cell) -> bool:
    """Whether the cell's criterion scores channels by sums that a pass adds up token by token."""
    name = cell.criterion.name
    return criteria.get(name).granularity == "channel" and criteria.summed_over(name) is not None


def unpruned(cell: Cell) -> Cell:
    """The cell everything is compared with."""
    texts = {"flops": cell.texts["flops"]}
    return Cell(
        cell.model, NO_CRITERION, NO_CALIBRATION, NO_ALLOCATION, NO_RECOVERY, 0.0, "none", 0, texts, cell.protocol
    )


def _told_apart(
    requests: Sequence[tuple[Sequence[Cell], Sequence[BenchmarkConfig]]], maker: Maker
) -> list[tuple[Sequence[Cell], Sequence[BenchmarkConfig]]]:
    """The requests with models of one name that are not the same called by it and the start of their ids."""
    models = {id(cell.model): cell.model for cells, _ in requests for cell in cells}
    called: dict[str, dict[str, str]] = {}
    for model in models.values():
        called.setdefault(model.name, {})[maker.model(model).id] = model.path
    new = {key: _with_id(model, maker) for key, model in models.items() if len(called[model.name]) > 1}
    for name, paths in called.items():
        if len(paths) > 1:
            which = ", ".join(f"{id_[:ID_DIGITS]} is {path}" for id_, path in paths.items())
            say(f"moe_lab: {len(paths)} models are called {name}, and shown by their ids, too: {which}")
    return [
        ([replace(cell, model=new.get(id(cell.model), cell.model)) for cell in cells], benchmarks)
        for cells, benchmarks in requests
    ]


def _with_id(model: ModelConfig, maker: Maker) -> ModelConfig:
    ending = "" if model.top_k is None else f"_top{model.top_k}"  # which a name has to end in
    return replace(model, name=f"{model.name.removesuffix(ending)}-{maker.model(model).id[:ID_DIGITS]}{ending}")


def build(config: Config, requests: Iterable[tuple[Sequence[Cell], Sequence[BenchmarkConfig]]]) -> Graph:
    """The graph of a study: its cells, each once with all benchmarks asked of it, and the unpruned models.

    `config` says what holds for all requests: permissions, exports, whether overlaps are wanted.
    """
    maker = Maker(config)
    asked: dict[Cell, dict[str, BenchmarkConfig]] = {}
    families: dict[str, Step] = {}
    damages: dict[str, Step] = {}
    convergences: dict[str, Step] = {}
    channel_convergences: dict[str, Step] = {}
    for cells, benchmarks in _told_apart(list(requests), maker):
        named = {benchmark.name: benchmark for benchmark in benchmarks}
        for cell in cells:
            for candidate in (unpruned(cell), normalized(cell)):
                asked.setdefault(candidate, {}).update(named)
            name = f"{cell.calibration.name}@{cell.model.name}@{cell.gate}@{cell.seed}"
            if cell.calibration.snapshots:
                convergences[name] = maker.convergence(cell.model, cell.calibration, cell.gate, cell.seed)
                if settles_by_channels(cell):
                    channel_convergences[f"{cell.criterion.name}@{name}"] = maker.channel_convergence(cell)
            if config.overlap:
                families[name] = maker.family(cell.model, cell.calibration, cell.gate, cell.seed)
                damages[name] = maker.scores(replace(cell, criterion=EXACT_DAMAGE))
    steps = [_steps(maker, cell, list(named.values())) for cell, named in asked.items()]
    return Graph(steps, families, damages, convergences, channel_convergences)
