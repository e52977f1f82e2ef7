"""From cells to distinct steps: work that cells share stands in the graph once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from moe_lab import criteria
from moe_lab.calibration import settings as calibrations
from moe_lab.config import AllocationConfig, BenchmarkConfig, CalibrationConfig, Config, CriterionConfig, ModelConfig
from moe_lab.evaluation import suite
from moe_lab.grid import Cell, plain
from moe_lab.models import files
from moe_lab.paths import resolve
from moe_lab.study.identity import Part, Step

Made = TypeVar("Made")
PLAIN = (str, int, float)

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
    export: Step | None
    evaluate: Mapping[str, Step]


@dataclass(frozen=True)
class Graph:
    """All steps of a study. `families` and `damages` feed the overlap figures, by "calibration@model"."""

    cells: Sequence[CellSteps]
    families: Mapping[str, Step]
    damages: Mapping[str, Step]

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
        for cell in self.cells:
            yield cell.model
            yield from (step for step in (cell.scores, cell.plan, cell.export) if step)
            yield from cell.evaluate.values()


class Maker:
    """Makes steps from typed settings; what was made for an object once is given again."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._made: dict[Hashable, Any] = {}
        self._kept: list[object] = []  # ids stay valid while the objects live

    def _once(self, key: Sequence[object], make: Callable[[], Made]) -> Made:
        name = tuple([part if part.__class__ in PLAIN else id(part) for part in key])
        if name not in self._made:
            self._kept.extend(key)
            self._made[name] = make()
        found: Made = self._made[name]
        return found

    def _model_part(self, model: ModelConfig) -> Part:
        def make() -> Part:
            folder = Path(resolve(model.path)).expanduser()
            what = {"sha256": files.fingerprint(model.path)} if folder.is_dir() else {"hub": model.path}
            return Part({**what, "revision": model.revision, "dtype": model.dtype})

        return self._once(("model part", model), make)

    def model(self, model: ModelConfig) -> Step:
        """Facts about the model's layers, experts and parameters, from its configuration."""

        def make() -> Step:
            return Step("model", model.name, {"model": self._model_part(model)}, runtime={"model": plain(model)})

        return self._once(("model", model), make)

    def _reading(self, kind: str, model: ModelConfig, calibration: CalibrationConfig, seed: int) -> Step:
        """A pass over a calibration set; `kind` says which sums it leaves."""

        def make() -> Step:
            text = calibration if calibration.seed is not None else replace(calibration, seed=seed)
            return Step(
                kind,
                f"{model.name}-{calibration.name}",
                {"model": self._model_part(model), "calibration": Part(calibrations.identity(text))},
                {"model": self.model(model)},
                {"model": plain(model), "calibration": plain(text)},
            )

        return self._once((kind, model, calibration, seed), make)

    def weights(self, model: ModelConfig) -> Step:
        """Sums over the weights of each expert."""

        def make() -> Step:
            parts = {"model": self._model_part(model)}
            return Step("weights", model.name, parts, {"model": self.model(model)}, {"model": plain(model)})

        return self._once(("weights", model), make)

    def evidence(self, needs: str, model: ModelConfig, calibration: CalibrationConfig, seed: int) -> Step | None:
        """The step a criterion reads from, by what it `needs`; None for one that needs nothing."""
        if needs in ("statistics", "damage"):
            return self._reading(needs, model, calibration, seed)
        return self.weights(model) if needs == "weights" else None

    def scores(self, cell: Cell) -> Step:
        """A score per expert and layer."""
        criterion = criteria.get(cell.criterion.name)
        evidence = self.evidence(criterion.needs, cell.model, cell.calibration, cell.seed)
        settings: dict[str, Any] = {"criterion": criterion.name, "parameters": dict(cell.criterion.parameters)}
        if criterion.uses_gate:
            settings["gate"] = cell.gate
        if criterion.uses_seed:
            settings["seed"] = cell.seed

        def make() -> Step:
            inputs = {"model": self.model(cell.model), **({"evidence": evidence} if evidence else {})}
            label = f"{cell.model.name}-{cell.calibration.name}-{criterion.name}"
            return Step("scores", label, {"criterion": Part(settings)}, inputs)

        return self._once(("scores", cell.model, cell.calibration, cell.criterion, cell.gate, cell.seed), make)

    def family(self, model: ModelConfig, calibration: CalibrationConfig, gate: str, seed: int) -> Step:
        """Every S(b, alpha, beta) at once, for the overlap figures."""

        def make() -> Step:
            inputs = {"evidence": self._reading("statistics", model, calibration, seed)}
            return Step("family", f"{model.name}-{calibration.name}", {"family": Part({"gate": gate})}, inputs)

        return self._once(("family", model, calibration, gate, seed), make)

    def plan(self, cell: Cell) -> Step:
        """Which experts to keep."""
        scores = self.scores(cell)
        settings = {**plain(cell.allocation), "ratio": cell.ratio}
        part = self._once(("allocation", cell.allocation, cell.ratio), lambda: Part(settings))
        return Step(
            "plan",
            f"{scores.label}-{cell.ratio:g}",
            {"allocation": part},
            {"scores": scores, "model": self.model(cell.model)},
        )

    def evaluate(self, model: ModelConfig, plan: Step | None, benchmark: BenchmarkConfig) -> Step:
        """One benchmark on the model under one plan."""

        def make() -> tuple[Mapping[str, Part], Mapping[str, Any], Step]:
            policy = {"allow_code_execution": self.config.allow_code_execution, "sandbox": self.config.sandbox}
            runtime = {"model": plain(model), "benchmark": plain(benchmark), "policy": policy}
            return {"benchmark": Part(suite.identity(benchmark))}, runtime, self.model(model)

        parts, runtime, facts = self._once(("benchmark", model, benchmark), make)
        inputs = {"model": facts, "plan": plan} if plan else {"model": facts}
        return Step("evaluate", f"{plan.label if plan else model.name}-{benchmark.name}", parts, inputs, runtime)

    def export(self, model: ModelConfig, plan: Step) -> Step:
        """The pruned model as a checkpoint."""
        return Step("export", plan.label, {}, {"model": self.model(model), "plan": plan}, {"model": plain(model)})

    def cell(self, cell: Cell, benchmarks: Sequence[BenchmarkConfig]) -> CellSteps:
        """All steps of one cell; criterion "none" is the unpruned model."""
        pruned = cell.criterion is not NO_CRITERION
        plan = self.plan(cell) if pruned else None
        reads = pruned and criteria.reads_text(cell.criterion.name)
        return CellSteps(
            cell=cell,
            model=self.model(cell.model),
            statistics=self._reading("statistics", cell.model, cell.calibration, cell.seed) if reads else None,
            scores=self.scores(cell) if pruned else None,
            plan=plan,
            export=self.export(cell.model, plan) if plan and self.config.export else None,
            evaluate={benchmark.name: self.evaluate(cell.model, plan, benchmark) for benchmark in benchmarks},
        )


def normalized(cell: Cell) -> Cell:
    """The cell without a calibration set, if its criterion reads none: one cell instead of one per set."""
    return cell if criteria.reads_text(cell.criterion.name) else replace(cell, calibration=NO_CALIBRATION)


def unpruned(cell: Cell) -> Cell:
    """The cell everything is compared with."""
    return Cell(cell.model, NO_CRITERION, NO_CALIBRATION, NO_ALLOCATION, 0.0, "none", 0)


def build(config: Config, requests: Iterable[tuple[Sequence[Cell], Sequence[BenchmarkConfig]]]) -> Graph:
    """The graph of a study: its cells, each once with all benchmarks asked of it, and the unpruned models.

    `config` says what holds for all requests: permissions, exports, whether overlaps are wanted.
    """
    maker = Maker(config)
    asked: dict[Cell, dict[str, BenchmarkConfig]] = {}
    families: dict[str, Step] = {}
    damages: dict[str, Step] = {}
    for cells, benchmarks in requests:
        named = {benchmark.name: benchmark for benchmark in benchmarks}
        for cell in cells:
            for candidate in (unpruned(cell), normalized(cell)):
                asked.setdefault(candidate, {}).update(named)
            if config.overlap:
                name = f"{cell.calibration.name}@{cell.model.name}"
                families[name] = maker.family(cell.model, cell.calibration, cell.gate, cell.seed)
                damages[name] = maker.scores(replace(cell, criterion=EXACT_DAMAGE))
    return Graph([maker.cell(cell, list(named.values())) for cell, named in asked.items()], families, damages)
