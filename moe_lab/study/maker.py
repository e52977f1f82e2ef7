"""Steps from typed settings; what cells share is made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from moe_lab import allocation, criteria
from moe_lab.allocation import listed
from moe_lab.calibration import settings as calibrations
from moe_lab.config import (
    AllocationConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    CriterionConfig,
    ModelConfig,
    RecoveryConfig,
)
from moe_lab.evaluation import suite
from moe_lab.grid import Cell, plain
from moe_lab.models import files
from moe_lab.paths import resolve
from moe_lab.recovery import settings as recoveries
from moe_lab.study.identity import Part, Step, digest

Made = TypeVar("Made")
PLAIN = (str, int, float)
NO_RECOVERY = RecoveryConfig()
FROM_WEIGHTS = ("weights", "channel_weights")
"""Evidence that no text is read for."""


def reads_text(cell: Cell) -> bool:
    """Whether the cell's criterion, or what its allocation asks besides it, needs the calibration set."""
    by = cell.allocation.by
    return (
        criteria.reads_text(cell.criterion.name)
        or not set(evidence_of(cell)) <= {"by", *FROM_WEIGHTS}
        or (by is not None and criteria.reads_text(by))
        or allocation.get(cell.allocation.name).step == "reconstruction"
    )


def evidence_of(cell: Cell) -> tuple[str, ...]:
    """What the cell's allocation reads besides the scores."""
    settings = cell.allocation
    return allocation.needs({"name": settings.name, "by": settings.by, "parameters": settings.parameters})


def allocation_identity(settings: AllocationConfig, ratio: float) -> dict[str, Any]:
    """What changes a plan, and nothing else: the settings, the ratio, and the content of the file they name."""
    found = {**plain(settings), "ratio": ratio}
    del found["label"]
    if settings.path is not None:
        found["path"] = digest(listed.read(settings.path))
    return found


class Maker:
    """Makes steps; what was made for an object once is given again."""

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

    def _text_part(self, text: CalibrationConfig) -> Part:
        return self._once(("text part", text), lambda: Part(calibrations.identity(text)))

    def _seeded(self, text: CalibrationConfig, seed: int) -> CalibrationConfig:
        """The text in the order of the cell's seed, unless it has its own."""
        if text.seed is not None:
            return text
        return self._once(("seeded", text, seed), lambda: replace(text, seed=seed))

    def model(self, model: ModelConfig) -> Step:
        """Facts about the model's layers, experts and parameters, from its configuration."""

        def make() -> Step:
            return Step("model", model.name, {"model": self._model_part(model)}, runtime={"model": plain(model)})

        return self._once(("model", model), make)

    def reading(self, kind: str, model: ModelConfig, calibration: CalibrationConfig, seed: int) -> Step:
        """A pass over a calibration set; `kind` says which sums it leaves."""

        def make() -> Step:
            text = self._seeded(calibration, seed)
            return Step(
                kind,
                f"{model.name}-{calibration.name}",
                {"model": self._model_part(model), "calibration": self._text_part(text)},
                {"model": self.model(model)},
                {"model": plain(model), "calibration": plain(text)},
            )

        return self._once((kind, model, calibration, seed), make)

    def _weighing(self, kind: str, model: ModelConfig) -> Step:
        """Sums over the weights of each expert, or of each channel."""

        def make() -> Step:
            parts = {"model": self._model_part(model)}
            return Step(kind, model.name, parts, {"model": self.model(model)}, {"model": plain(model)})

        return self._once((kind, model), make)

    def evidence(self, need: str, cell: Cell) -> Step:
        """The step that leaves what a criterion or an allocation `need`s."""
        if need == "by":
            return self.scores(replace(cell, criterion=self._other_criterion(str(cell.allocation.by))))
        if need in FROM_WEIGHTS:
            return self._weighing(need, cell.model)
        return self.reading(need, cell.model, cell.calibration, cell.seed)

    def _other_criterion(self, name: str) -> CriterionConfig:
        return self._once(("criterion", name), lambda: CriterionConfig(name=name))

    def statistics(self, cell: Cell) -> Step | None:
        """The forward pass over the cell's calibration set, which tells what every expert was given; None where no
        text is read."""
        return self.evidence("statistics", cell) if reads_text(cell) else None

    def scores(self, cell: Cell) -> Step:
        """A score per expert, or per channel, and layer."""
        criterion = criteria.get(cell.criterion.name)
        settings: dict[str, Any] = {"criterion": criterion.name, "parameters": dict(cell.criterion.parameters)}
        if criterion.uses_gate:
            settings["gate"] = cell.gate
        if criterion.uses_seed:
            settings["seed"] = cell.seed

        def make() -> Step:
            inputs: dict[str, Step] = {need: self.evidence(need, cell) for need in criterion.needs}
            label = f"{cell.model.name}-{cell.calibration.name}-{criterion.name}"
            return Step("scores", label, {"criterion": Part(settings)}, {"model": self.model(cell.model), **inputs})

        return self._once(("scores", cell.model, cell.calibration, cell.criterion, cell.gate, cell.seed), make)

    def family(self, model: ModelConfig, calibration: CalibrationConfig, gate: str, seed: int) -> Step:
        """Every S(b, alpha, beta) at once, for the overlap figures."""

        def make() -> Step:
            inputs = {"statistics": self.reading("statistics", model, calibration, seed)}
            return Step("family", f"{model.name}-{calibration.name}", {"family": Part({"gate": gate})}, inputs)

        return self._once(("family", model, calibration, gate, seed), make)

    def convergence(self, model: ModelConfig, calibration: CalibrationConfig, gate: str, seed: int) -> Step:
        """Scores from more and more of the calibration set."""

        def make() -> Step:
            reading = self.reading("statistics", model, calibration, seed)
            asked = Part({"gate": gate, "snapshots": calibration.snapshots})
            inputs = {"model": self.model(model), "statistics": reading}
            return Step("convergence", reading.label, {**reading.parts, "convergence": asked}, inputs, reading.runtime)

        return self._once(("convergence", model, calibration, gate, seed), make)

    def profile(self, cell: Cell, plan: Step | None) -> Step:
        """Hidden states and routing of the pruned model, layer by layer; what recovery changes is not in it."""
        text = self._seeded(cell.texts["flops"], cell.seed)
        label, parts, inputs = self._pruned(cell.model, plan, None, NO_RECOVERY)
        parts = {**parts, "model": self._model_part(cell.model), "text": self._text_part(text)}
        return Step("profile", label, parts, inputs, {"model": plain(cell.model), "text": plain(text)})

    def plan(self, cell: Cell) -> Step:
        """Which experts, and which of their channels, to keep: straight from the scores, or by a search."""
        key = ("allocation", cell.allocation, cell.ratio)
        part = self._once(key, lambda: Part(allocation_identity(cell.allocation, cell.ratio)))
        chosen = allocation.get(cell.allocation.name)
        inputs = {"model": self.model(cell.model), **{need: self.evidence(need, cell) for need in evidence_of(cell)}}
        where = "" if chosen.name == "uniform" else f"-{chosen.name}"
        label = f"{cell.model.name}-{cell.calibration.name}-{cell.criterion.name}{where}-{cell.ratio:g}"
        if chosen.step == "plan":
            runtime = {"path": cell.allocation.path}
            return Step("plan", label, {"allocation": part}, {"scores": self.scores(cell), **inputs}, runtime)
        searching = chosen.step == "search"
        text = self._seeded(cell.texts["search"] if searching else cell.calibration, cell.seed)
        seed = self._once(("seed", cell.seed), lambda: Part({"seed": cell.seed}))
        return Step(
            chosen.step,
            label,
            {"allocation": part, "text": self._text_part(text), "seed": seed},
            {"scores": self.scores(cell), **inputs} if searching else inputs,
            {"model": plain(cell.model), "text": plain(text)},
        )

    def finetune(self, cell: Cell, plan: Step) -> Step | None:
        """The pruned model's weights after fine-tuning; None when the recovery has none."""
        if cell.recovery.instructions is None:
            return None
        text = self._seeded(cell.texts["instructions"], cell.seed)
        settings = {**recoveries.finetune_identity(cell.recovery), "seed": cell.seed}
        return Step(
            "finetune",
            f"{plan.label}-{cell.recovery.name}",
            {"recovery": Part(settings), "text": self._text_part(text)},
            {"model": self.model(cell.model), "plan": plan},
            {"model": plain(cell.model), "recovery": plain(cell.recovery), "text": plain(text)},
        )

    def _pruned(
        self, model: ModelConfig, plan: Step | None, tuned: Step | None, recovery: RecoveryConfig
    ) -> tuple[str, dict[str, Part], dict[str, Step]]:
        """What a step about one pruned model starts from: its label, its storage, and its steps."""
        inputs = {"model": self.model(model)}
        inputs |= {role: step for role, step in (("plan", plan), ("finetune", tuned)) if step}
        storage = recoveries.storage_identity(recovery)
        parts = {"storage": self._once(("storage", recovery), lambda: Part(storage))} if storage else {}
        label = plan.label if plan else model.name
        return (label if recovery.name == "none" else f"{label}-{recovery.name}"), parts, inputs

    def evaluate(
        self,
        model: ModelConfig,
        plan: Step | None,
        benchmark: BenchmarkConfig,
        tuned: Step | None,
        recovery: RecoveryConfig,
    ) -> Step:
        """One benchmark on the model under one plan, recovered if that is asked for: the step that has its results.

        Where texts are graded without the model, generating them is a step of its own before it.
        """

        def make() -> tuple[Part, Mapping[str, Any]]:
            runtime = {"benchmark": plain(benchmark), "policy": asdict(suite.policy(self.config))}
            return Part(suite.identity(benchmark)), runtime

        part, runtime = self._once(("benchmark", benchmark), make)
        if benchmark.harness in suite.TWO_PHASES:
            generate = self.generate(model, plan, benchmark, tuned, recovery)
            return Step("grade", generate.label, {"benchmark": part}, {"generate": generate}, runtime)
        label, storage, inputs = self._pruned(model, plan, tuned, recovery)
        return Step(
            "evaluate",
            f"{label}-{benchmark.name}",
            {"benchmark": part, **storage},
            inputs,
            self._once(("evaluate", model, benchmark), lambda: {"model": plain(model), **runtime}),
        )

    def generate(
        self,
        model: ModelConfig,
        plan: Step | None,
        benchmark: BenchmarkConfig,
        tuned: Step | None,
        recovery: RecoveryConfig,
    ) -> Step:
        """The texts that answer one benchmark, by the model that is loaded or by a server of its checkpoint."""

        def make() -> tuple[Mapping[str, Part], Mapping[str, Any]]:
            asked = suite.asked(benchmark)
            if benchmark.chat:
                asked["template_arguments"] = dict(model.template_arguments)
            parts = {"benchmark": Part(asked)}
            if backend.name == "server":
                parts["backend"] = Part({"name": backend.name, "command": backend.command})
            runtime = {"model": plain(model), "benchmark": plain(benchmark), "backend": plain(backend)}
            return parts, runtime

        backend = self.config.backend
        parts, runtime = self._once(("generate", model, benchmark), make)
        label, storage, inputs = self._pruned(model, plan, tuned, recovery)
        if backend.name == "server" and plan:
            inputs["checkpoint"] = self.export(model, plan)
        return Step("generate", f"{label}-{benchmark.name}", {**parts, **storage}, inputs, runtime)

    def cost(self, cell: Cell, plan: Step | None) -> Step:
        """Parameters, storage, and FLOPs with the routing that the pruned model really has."""
        text = self._seeded(cell.texts["flops"], cell.seed)
        label, storage, inputs = self._pruned(cell.model, plan, None, cell.recovery)
        parts = {"text": self._text_part(text), **storage}
        if plan:
            inputs["unpruned"] = self.cost(replace(cell, recovery=NO_RECOVERY), None)
        return Step("cost", label, parts, inputs, {"model": plain(cell.model), "text": plain(text)})

    def export(self, model: ModelConfig, plan: Step) -> Step:
        """The pruned model as a checkpoint."""
        shape = {"export": self.config.export or "natural", **({"verify": True} if self.config.verify else {})}
        parts = {"shape": Part(shape)}
        return Step("export", plan.label, parts, {"model": self.model(model), "plan": plan}, {"model": plain(model)})
