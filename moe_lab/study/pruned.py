"""The steps about one pruned model, once its plan is a step: recover it, ask it, count its cost, write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from moe_lab import criteria
from moe_lab.config import BenchmarkConfig, CalibrationConfig, RecoveryConfig
from moe_lab.evaluation import suite
from moe_lab.evaluation.sandbox.policy import LIMITED
from moe_lab.grid import Cell, plain
from moe_lab.masking import identified
from moe_lab.models.config_json import has_uneven_layers
from moe_lab.recovery import settings as recoveries
from moe_lab.study.device import here
from moe_lab.study.identity import Part, Step
from moe_lab.study.maker import Maker

NO_RECOVERY = RecoveryConfig()


class Pruned:
    """A cell's model under a plan, recovered as the cell says; without a plan, the model as it is.

    Each step takes what it is called by from here: the label, how weights are stored, and the steps it comes from.
    """

    def __init__(self, maker: Maker, cell: Cell, plan: Step | None) -> None:
        self.maker, self.cell, self.plan = maker, cell, plan
        self.finetune = self._finetune(plan) if plan and cell.recovery.instructions is not None else None
        storage = recoveries.storage_identity(cell.recovery)
        self.storage = {"storage": maker.once(("storage", cell.recovery), lambda: Part(storage))} if storage else {}
        named = plan.label if plan else cell.model.name
        self.label = named if cell.recovery.name == "none" else f"{named}-{cell.recovery.name}"

    def _inputs(self, **more: Step | None) -> dict[str, Step]:
        steps = {"model": self.maker.model(self.cell.model), "plan": self.plan, **more}
        return {role: step for role, step in steps.items() if step}

    def _finetune(self, plan: Step) -> Step:
        """The model's weights after fine-tuning."""
        cell = self.cell
        text = self.maker.seeded(cell.texts["instructions"], cell.seed)
        settings = {**recoveries.finetune_identity(cell.recovery), "seed": cell.seed}
        return Step(
            "finetune",
            f"{plan.label}-{cell.recovery.name}",
            {"recovery": Part(settings), "text": self.maker.text_part(text)},
            {"model": self.maker.model(cell.model), "plan": plan},
            self.maker.runtime(model=cell.model, recovery=cell.recovery, text=text),
        )

    def evaluate(self, benchmark: BenchmarkConfig) -> Step:
        """One benchmark: the step that has its results.

        Where texts are graded without the model, generating them is a step of its own before it.
        """

        model = self.cell.model
        part, runtime = self.maker.once(("benchmark", benchmark), lambda: self._graded(benchmark))
        if suite.has_two_phases(benchmark):
            generate = self.generate(benchmark)
            return Step("grade", generate.label, {"benchmark": part}, {"generate": generate}, runtime)
        part = self.maker.once(("asked", model, benchmark), lambda: Part(self._rendered(benchmark, part.settings)))
        with_model = self.maker.once(
            ("evaluate", model, benchmark), lambda: {**self.maker.runtime(model=model), **runtime}
        )
        parts = {"benchmark": part, **self.storage}
        return Step(
            "evaluate", f"{self.label}-{benchmark.name}", parts, self._inputs(finetune=self.finetune), with_model
        )

    def _graded(self, benchmark: BenchmarkConfig) -> tuple[Part, Mapping[str, Any]]:
        """What identifies a benchmark's results, and what else grading needs. Without namespaces some programs are not
        run, so their results are others."""
        policy = suite.policy(self.maker.config)
        limited = {"sandbox": LIMITED} if suite.runs_limited(benchmark, policy) else {}
        return Part({**suite.identity(benchmark), **limited}), {
            **self.maker.runtime(benchmark=benchmark),
            "policy": asdict(policy),
        }

    def _rendered(self, benchmark: BenchmarkConfig, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked, with what the model's chat template is given."""
        given = {"template_arguments": dict(self.cell.model.template_arguments)} if benchmark.chat else {}
        return {**asked, **given}

    def generate(self, benchmark: BenchmarkConfig) -> Step:
        """The texts that answer one benchmark, by the model that is loaded or by a server of its checkpoint."""
        model, backend = self.cell.model, self.maker.config.backend

        def make() -> tuple[Mapping[str, Part], Mapping[str, Any]]:
            parts = {"benchmark": Part(self._rendered(benchmark, suite.asked(benchmark)))}
            if backend.name == "server":
                parts["backend"] = Part({"name": backend.name, "command": identified(backend.command)})
            elif backend.continuous:  # which may decide a near tie otherwise
                parts["backend"] = Part({"continuous": True})
            return parts, self.maker.runtime(model=model, benchmark=benchmark, backend=backend)

        parts, runtime = self.maker.once(("generate", model, benchmark), make)
        checkpoint = self.export() if backend.name == "server" and self.plan else None
        inputs = self._inputs(finetune=self.finetune, checkpoint=checkpoint)
        return Step("generate", f"{self.label}-{benchmark.name}", {**parts, **self.storage}, inputs, runtime)

    def cost(self) -> Step:
        """Parameters, storage, and FLOPs in a row as long as those of the text. The text itself is read only where a
        layer may keep experts of different widths, so that FLOPs depend on where tokens go."""
        text = self._by_engine()
        before = Pruned(self.maker, replace(self.cell, recovery=NO_RECOVERY), None).cost() if self.plan else None
        row = self.maker.once(("row", text), lambda: Part({"length": text.length}))
        parts, inputs = {"row": row, **self.storage}, self._inputs(unpruned=before)
        if self._has_uneven_layers():
            return self._reading("cost", self.label, parts, inputs, text)
        return Step("cost", self.label, parts, inputs, self.maker.runtime(model=self.cell.model))

    def _has_uneven_layers(self) -> bool:
        """Whether experts of one layer may differ in width."""
        if self.plan is None:
            return self.maker.once(("uneven", self.cell.model), lambda: has_uneven_layers(self.cell.model))
        return criteria.get(self.cell.criterion.name).granularity == "channel"

    def _by_engine(self) -> CalibrationConfig:
        """The text that FLOPs are counted on, to be read by the engine of the study's calibration."""
        text, asked = self.cell.texts["flops"], self.maker.config.calibration
        return self.maker.once(
            ("by engine", text),
            lambda: replace(text, engine=asked.engine, activation_budget=asked.activation_budget),
        )

    def profile(self) -> Step:
        """Hidden states and routing, layer by layer; what recovery changes is not in it."""
        named = self.plan.label if self.plan else self.cell.model.name
        return self._reading("profile", named, {}, self._inputs(), self.cell.texts["flops"])

    def timing(self) -> Step:
        """Seconds and memory of the model as it would be deployed, on one device, which is in its identity."""
        model, config = self.cell.model, self.maker.config
        text = self.maker.seeded(self.cell.texts["flops"], self.cell.seed)

        def make() -> Part:
            device = config.timed.device or here(model.device)
            return Part({**plain(config.timed), "device": device, "threads": model.threads})

        parts = {"timing": self.maker.once(("timing", model), make), "text": self.maker.text_part(text)}
        runtime = self.maker.runtime(model=model, text=text)
        return Step("timing", self.label, {**parts, **self.storage}, self._inputs(finetune=self.finetune), runtime)

    def _reading(
        self, kind: str, label: str, parts: Mapping[str, Part], inputs: Mapping[str, Step], text: CalibrationConfig
    ) -> Step:
        """A pass over a text, in the order of the cell's seed."""
        text = self.maker.seeded(text, self.cell.seed)
        runtime = self.maker.runtime(model=self.cell.model, text=text)
        return Step(kind, label, {"text": self.maker.text_part(text), **parts}, inputs, runtime)

    def export(self) -> Step:
        """The pruned model as a checkpoint."""
        assert self.plan is not None
        config = self.maker.config
        shape = {"export": config.export or "natural", **({"verify": True} if config.verify else {})}
        return Step(
            "export", self.plan.label, {"shape": Part(shape)}, self._inputs(), self.maker.runtime(model=self.cell.model)
        )
