"""The graph of a study: the distinct steps of all its cells; cells share steps."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from moe_lab.allocation import IdentifiedAllocation
from moe_lab.calibration import IdentifiedText
from moe_lab.config import (
    AllocationConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    CriterionConfig,
)
from moe_lab.criteria import IdentifiedCriterion
from moe_lab.grid import Cell, Request
from moe_lab.models.files import UNRESOLVED
from moe_lab.result_files import FIGURE_STEPS, STEPS, FigureKey
from moe_lab.study.estimates import resolved_device, resolved_text
from moe_lab.study.step import Step
from moe_lab.study.steps.costs import Cost, Profile, Timing, timing_of
from moe_lab.study.steps.evaluation import (
    BenchmarkRun,
    Contamination,
    Evaluate,
    Grade,
    Task,
    evaluation_tasks,
)
from moe_lab.study.steps.passes import Pass, StepModel
from moe_lab.study.steps.recovery import NO_RECOVERY, export_of, pruned_of, unpruned_model
from moe_lab.study.steps.scores import Family, Scores, reads_text

Result = TypeVar("Result")
EXACT_DAMAGE = CriterionConfig(name="exact_damage")
NO_CRITERION = CriterionConfig(name="none")
NO_CALIBRATION = CalibrationConfig(name="none", path="none")
NO_ALLOCATION = AllocationConfig(name="none")


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """A context in which Python's garbage collector is off. It would take half of the time of
    building the graph of a large study."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class CellSteps:
    """The steps of one cell. A cell of the unpruned model has no scores, no plan and no export."""

    cell: Cell
    model: Step
    """The step with the facts about the unpruned model."""
    statistics: Step | None
    scores: Step | None
    plan: Step | None
    finetune: Step | None
    export: Step | None
    cost: Step
    profile: Step | None
    timing: Step | None
    evaluate: Mapping[str, Evaluate | Grade]
    """Name of a benchmark -> step with its results."""

    def by_field(self) -> dict[str, Step | None]:
        """Name of a field in STEPS -> step in the field, None if the cell has no such step."""
        return {name: getattr(self, name) for name in STEPS}


@dataclass(frozen=True)
class Graph:
    """All steps of a study."""

    cells: Sequence[CellSteps]
    figures: Mapping[str, Mapping[FigureKey, Step]]
    """Name in FIGURE_STEPS -> steps that only the figures and remarks of the report need."""

    @cached_property
    @garbage_collection_off()
    def steps(self) -> list[Step]:
        """The distinct steps of figures, then those of cells. Each step comes after its inputs."""
        ordered: dict[str, Step] = {}  # id -> step

        def visit(steps: Iterable[Step | None]) -> None:
            for step in steps:
                if step and step.id not in ordered:
                    visit(step.needs)
                    ordered[step.id] = step

        for figure_steps in self.figures.values():
            visit(figure_steps.values())
        for cell in self.cells:
            # `statistics` and `finetune` are only visited as inputs of other steps
            visit(
                step
                for name, step in cell.by_field().items()
                if name not in ("statistics", "finetune")
            )
            visit(cell.evaluate.values())
        return list(ordered.values())


def unresolved_names(steps: Iterable[Step]) -> list[str]:
    """Distinct hub names of the models and texts in `steps` whose files have no known hash."""
    names: dict[str, None] = {}
    for step in steps:
        if isinstance(step, (BenchmarkRun, Grade)):  # the data of benchmarks is checked elsewhere
            continue
        for entry in step.collect_entries().values():
            names |= dict.fromkeys(_hub_names(entry.value))
    return list(names)


def _hub_names(identity: Any) -> Iterator[str]:
    """Hub names in the JSON-ready identity of a setting. In the identity of a model or a text,
    "path" is {UNRESOLVED: hub name, ...} if the hash of the files is not known. The identity of a
    mixture of texts has such identities in "sources"."""
    if not isinstance(identity, dict):
        return
    for part in (identity, *identity.get("sources", ())):
        path = part.get("path")
        if isinstance(path, dict) and UNRESOLVED in path:
            yield path[UNRESOLVED]


class _Resolver:
    """Resolves the cells of a study. A group of settings that several cells share is resolved
    once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._results: dict[tuple[Any, ...], Any] = {}
        """Key of a call of `cached` -> (arguments, result). The arguments are kept alive, because
        the key contains their object ids."""

    def cached(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of `function(*arguments)`, computed in the first call and then remembered. An
        integer argument is recognised by its value, any other argument by its object identity."""
        key = (function, *[value if isinstance(value, int) else id(value) for value in arguments])
        if key not in self._results:
            self._results[key] = arguments, function(*arguments)
        result: Result = self._results[key][1]
        return result

    def resolve_cell(self, cell: Cell) -> Cell:
        """The cell with device and dtype resolved, and engine, number of parts, batch_tokens and
        seeds of texts."""
        model = self.cached(StepModel.of, self.cached(resolved_device, cell.model, self.config))

        def resolve_text(text: CalibrationConfig) -> IdentifiedText:
            return self.cached(resolved_text, text, cell.seed, model, self.config)

        return replace(
            cell,
            model=model,
            criterion=self.cached(IdentifiedCriterion.of, cell.criterion),
            allocation=self.cached(IdentifiedAllocation.of, cell.allocation),
            calibration=resolve_text(cell.calibration),
            texts={role: resolve_text(text) for role, text in cell.texts.items()},
        )


def _cell_steps(
    cell: Cell,
    tasks: Iterable[Task],
    resolver: _Resolver,
    evaluations_of: dict[Any, dict[Task, Any]],
) -> CellSteps:
    """All steps of one cell. `evaluations_of`: identity of a pruned model -> task -> evaluation
    steps. Missing evaluation steps are added to `evaluations_of`."""
    config = resolver.config
    resolved_cell = resolver.resolve_cell(cell)
    model = resolved_cell.model
    # Any: it is an IdentifiedText, but the annotation of `texts` is less specific
    flops_text: Any = resolved_cell.texts["flops"]
    pruned = unpruned = resolver.cached(unpruned_model, model)
    scores = statistics = export = timing = None
    cost = resolver.cached(Cost.of, unpruned, flops_text)
    if cell.criterion is not NO_CRITERION:
        pruned = pruned_of(resolved_cell)
        # the scores that the plan reads; figures need scores even if the plan reads none
        scores = getattr(pruned.plan, "scores", None) or Scores.of(resolved_cell)
        if reads_text(cell):
            statistics = scores.sums.get("statistics") or Pass.of(resolved_cell, "statistics")
        if config.export.shape:
            export = export_of(pruned, config.export, config.verify)
        cost = Cost.of(pruned, flops_text, cost)
    if config.timing:
        timed = resolver.cached(timing_of, config.timed, model)
        timing = Timing(pruned, flops_text, timed, model.threads)
    identity = tuple([entry.line for entry in pruned.identity_entries.values()])
    evaluations = evaluations_of.setdefault(identity, {})
    evaluate: dict[str, Evaluate | Grade] = {}
    for task in tasks:
        if task not in evaluations:
            evaluations[task] = task(pruned)
        evaluate |= evaluations[task]
    return CellSteps(
        cell=cell,
        model=pruned.loaded.facts,
        statistics=statistics,
        scores=scores,
        plan=pruned.plan,
        finetune=pruned.finetune,
        export=export,
        cost=cost,
        profile=Profile(pruned.loaded, flops_text, pruned.plan) if config.profile else None,
        timing=timing,
        evaluate=evaluate,
    )


def normalized(cell: Cell) -> Cell:
    """The cell, with NO_CALIBRATION in place of its calibration set if nothing in the cell reads
    the set."""
    return cell if reads_text(cell) else replace(cell, calibration=NO_CALIBRATION)


def unpruned(cell: Cell) -> Cell:
    """The cell of the unpruned model with which the pruned model of `cell` is compared."""
    return replace(
        cell,
        criterion=NO_CRITERION,
        calibration=NO_CALIBRATION,
        allocation=NO_ALLOCATION,
        recovery=NO_RECOVERY,
        ratio=0.0,
        gate="none",
        seed=0,
        texts={"flops": cell.texts["flops"]},
    )


@garbage_collection_off()
def build(config: Config, requests: Iterable[Request]) -> Graph:
    """The graph of a study. A cell in several requests is in the graph once, with the benchmarks of
    all these requests. For each cell, the cell of the unpruned model is added."""
    resolver = _Resolver(config)
    requests = list(requests)
    tasks_of: dict[Cell, dict[Task, None]] = {}
    for cells, benchmarks in requests:
        tasks = dict.fromkeys(resolver.cached(evaluation_tasks, benchmarks, config))
        for cell in cells:
            for graph_cell in (unpruned(cell), normalized(cell)):
                tasks_of.setdefault(graph_cell, {}).update(tasks)
    evaluations_of: dict[Any, dict[Task, Any]] = {}
    steps = [_cell_steps(cell, tasks, resolver, evaluations_of) for cell, tasks in tasks_of.items()]
    return Graph(steps, _figure_steps(resolver, requests))


def _figure_steps(
    resolver: _Resolver, requests: Iterable[Request]
) -> dict[str, dict[FigureKey, Step]]:
    """The steps that only figures and remarks of the report need: name in FIGURE_STEPS -> key ->
    step. Each combination of calibration set, model and gate has one step in a figure, with the
    seed of the first cell of the combination."""
    figures: dict[str, dict[FigureKey, Step]] = {figure: {} for figure in FIGURE_STEPS}
    first_cells: dict[tuple[str, str, str], Cell] = {}  # combination -> its first cell
    benchmarks_of = defaultdict[Any, dict[str, BenchmarkConfig]](dict)
    for cells, benchmarks in requests:
        for cell in cells:
            if reads_text(cell):
                combination = (cell.calibration.name, cell.model.name, cell.gate)
                if first_cells.setdefault(combination, cell).seed == cell.seed:
                    named_benchmarks = {benchmark.name: benchmark for benchmark in benchmarks}
                    benchmarks_of[combination].update(named_benchmarks)
    for combination, cell in first_cells.items():
        key = FigureKey(*combination, cell.seed)
        resolved_cell = resolver.resolve_cell(cell)
        if resolver.config.overlap:
            figures["families"][key] = Family.of(resolved_cell)
            figures["damages"][key] = Scores.of(replace(resolved_cell, criterion=EXACT_DAMAGE))
        if named_benchmarks := benchmarks_of[combination]:
            figures["contaminations"][key] = Contamination.of(
                resolved_cell.model, resolved_cell.calibration, named_benchmarks.values()
            )
    return figures
