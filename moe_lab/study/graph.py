"""The graph of a study: the distinct steps of all its cells; cells share steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from moe_lab.config import (
    AllocationConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    CriterionConfig,
)
from moe_lab.evaluation.harness import harness_of
from moe_lab.grid import Cell, Request
from moe_lab.models.files import UNRESOLVED
from moe_lab.results import FIGURES, STEPS
from moe_lab.study.estimates import divided, resolved
from moe_lab.study.step import Identified, Step, once, uncollected
from moe_lab.study.steps.costs import Cost, Profile, Timing
from moe_lab.study.steps.evaluation import (
    Contamination,
    Evaluate,
    Grade,
    OnBenchmark,
    Task,
    task_of,
)
from moe_lab.study.steps.passes import StatisticsPass
from moe_lab.study.steps.recovery import NO_RECOVERY, export_of, pruned_of
from moe_lab.study.steps.recovery import unpruned as unpruned_model
from moe_lab.study.steps.scores import Family, Scores, reads_text

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
    evaluate: Mapping[str, Evaluate | Grade]

    def named(self) -> dict[str, Step | None]:
        """Field -> step, without the benchmarks."""
        return {name: getattr(self, name) for name in STEPS}


FigureKey = tuple[str, str, str, int]
"""Names of the calibration set and the model, gate and seed."""


@dataclass(frozen=True)
class Graph:
    """All steps of a study. The statistics and the fine-tuning of a cell are only done if another
    step needs them."""

    cells: Sequence[CellSteps]
    figures: Mapping[str, Mapping[FigureKey, Step]]
    """Families, damages and contaminations: steps for figures and remarks alone."""

    @cached_property
    @uncollected()
    def steps(self) -> list[Step]:
        """Distinct steps, each after its inputs."""
        ordered: dict[str, Step] = {}

        def visit(steps: Iterable[Step | None]) -> None:
            for step in steps:
                if step and step.id not in ordered:
                    visit(step.needs)
                    ordered[step.id] = step

        for steps in self.figures.values():
            visit(steps.values())
        for cell in self.cells:
            visit(
                step
                for name, step in cell.named().items()
                if name not in ("statistics", "finetune")
            )
            visit(cell.evaluate.values())
        return list(ordered.values())


def unresolved(steps: Iterable[Step]) -> list[str]:
    """Models and texts on the hub whose files are not known, so that steps are named by their names
    there."""
    # which have data of their own
    others = (step for step in steps if not isinstance(step, OnBenchmark))
    parts = {
        id(part): part
        for step in others
        for part, _ in step.said.values()
        if isinstance(part, Identified)
    }
    groups = [part.document for part in parts.values() if isinstance(part.document, dict)]
    groups += [source for group in groups for source in group.get("sources", ())]
    paths = [group["path"] for group in groups if isinstance(group.get("path"), dict)]
    return list(dict.fromkeys(path[UNRESOLVED] for path in paths if UNRESOLVED in path))


@once
def _seeded(text: CalibrationConfig, seed: int) -> CalibrationConfig:
    """The text with the cell's seed, which determines its order, unless the text has a seed of its
    own."""
    return text if text.seed is not None else replace(text, seed=seed)


_located = once(resolved)
_divided = once(divided)
_unpruned_cost = once(lambda model, text: Cost.of(unpruned_model(model), text))


def _resolved(cell: Cell, config: Config) -> Cell:
    """The cell with all that its steps are named by, and divided by: the device and the precision
    of its model, the seed, engine and parts of its texts."""
    model = _located(cell.model, config)

    def text(given: CalibrationConfig) -> CalibrationConfig:
        return _divided(_seeded(given, cell.seed), model, config)

    texts = {role: text(given) for role, given in cell.texts.items()}
    return replace(cell, model=model, calibration=text(cell.calibration), texts=texts)


def _steps(
    cell: Cell, tasks: Mapping[str, Task], config: Config, evaluated: dict[Any, dict[Task, Any]]
) -> CellSteps:
    """All steps of one cell; criterion "none" is the unpruned model. `evaluated`: what identifies a
    pruned model -> its evaluations, as cells may have one plan."""
    named = _resolved(cell, config)
    text = named.texts["flops"]
    is_pruned = cell.criterion is not NO_CRITERION
    pruned = pruned_of(named) if is_pruned else unpruned_model(named.model)
    scores = (getattr(pruned.plan, "scores", None) or Scores.of(named)) if is_pruned else None
    statistics = None
    if scores and reads_text(cell):
        statistics = scores.sums.get("statistics") or StatisticsPass.of(named)
    cost = _unpruned_cost(named.model, text)
    made = evaluated.setdefault(tuple([line for _, line in pruned.said.values()]), {})
    for task in tasks.values():
        if task not in made:
            made[task] = task(pruned)
    return CellSteps(
        cell=cell,
        model=pruned.loaded.facts,
        statistics=statistics,
        scores=scores,
        plan=pruned.plan,
        finetune=pruned.finetune,
        export=export_of(pruned, config.export, config.verify)
        if is_pruned and config.export.shape
        else None,
        cost=Cost.of(pruned, text, cost) if is_pruned else cost,
        profile=Profile(pruned.loaded, text, pruned.plan) if config.profile else None,
        timing=Timing.of(pruned, text, config.timed) if config.timing else None,
        evaluate={name: made[task] for name, task in tasks.items()},
    )


def normalized(cell: Cell) -> Cell:
    """The cell without its calibration set if nothing in the cell reads it, so that cells for
    several sets coincide."""
    return cell if reads_text(cell) else replace(cell, calibration=NO_CALIBRATION)


def unpruned(cell: Cell) -> Cell:
    """The cell of the unpruned model, with which the cell is compared."""
    texts = {"flops": cell.texts["flops"]}
    return Cell(
        cell.model,
        NO_CRITERION,
        NO_CALIBRATION,
        NO_ALLOCATION,
        NO_RECOVERY,
        0.0,
        "none",
        0,
        texts,
        cell.protocol,
    )


@uncollected()
def build(config: Config, requests: Iterable[Request]) -> Graph:
    """The graph of a study: its cells, each once with all its benchmarks, and the unpruned models.
    `config` has the settings that hold for all requests, such as permissions, exports and
    overlap."""
    tasks_of: dict[Cell, dict[str, Task]] = {}
    figures: dict[str, dict[FigureKey, Step]] = {figure: {} for figure in FIGURES}
    seeds: dict[tuple[str, ...], int] = {}
    texts: dict[FigureKey, tuple[Cell, dict[str, BenchmarkConfig]]] = {}
    for cells, benchmarks in requests:
        tasks = {benchmark.name: task_of(benchmark, config) for benchmark in benchmarks}
        listed = {
            benchmark.name: benchmark
            for benchmark in benchmarks
            if harness_of(benchmark).lists_items
        }
        for cell in cells:
            key = (cell.calibration.name, cell.model.name, cell.gate, cell.seed)
            # Figures are of texts that are read, and of one seed.
            shown = reads_text(cell) and seeds.setdefault(key[:3], cell.seed) == cell.seed
            if shown and listed:
                texts.setdefault(key, (cell, {}))[1].update(listed)
            for candidate in (unpruned(cell), normalized(cell)):
                tasks_of.setdefault(candidate, {}).update(tasks)
            if shown and config.overlap:
                named = _resolved(cell, config)
                figures["families"][key] = Family.of(named)
                figures["damages"][key] = Scores.of(replace(named, criterion=EXACT_DAMAGE))
    for key, (cell, asked) in texts.items():
        named = _resolved(cell, config)
        figures["contaminations"][key] = Contamination.of(named.model, named.calibration, asked)
    evaluated: dict[Any, dict[Task, Any]] = {}
    steps = [_steps(cell, tasks, config, evaluated) for cell, tasks in tasks_of.items()]
    return Graph(steps, figures)
