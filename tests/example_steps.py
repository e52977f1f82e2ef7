"""Steps for tests of stores, schedules and estimates."""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from moe_lab.allocation import IdentifiedAllocation
from moe_lab.calibration import IdentifiedText
from moe_lab.config import (
    AllocationConfig,
    BackendConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    CriterionConfig,
    ExportConfig,
    ModelConfig,
    RecoveryConfig,
    TimingConfig,
)
from moe_lab.evaluation import Policy
from moe_lab.evaluation.harness import IdentifiedBenchmark
from moe_lab.grid import Cell
from moe_lab.study.resources import Resources
from moe_lab.study.step import Step
from moe_lab.study.steps import KINDS, perform
from moe_lab.study.steps.costs import Cost, Profile, Timing
from moe_lab.study.steps.evaluation import (
    BenchmarkSetup,
    Contamination,
    Evaluate,
    Grading,
    results_step_of,
)
from moe_lab.study.steps.files import Files, Models
from moe_lab.study.steps.passes import loaded_field
from moe_lab.study.steps.plans import PlanSetup, drops_whole_experts
from moe_lab.study.steps.recovery import (
    Export,
    Finetune,
    Pruned,
    export_of,
    plan_of,
    pruned_of,
    storage_of,
    unpruned_model,
)
from moe_lab.study.store import Store

STEPS_PER_JOB: Mapping[str, Any] = {
    "model": "short",
    "scores": "short",
    "plan": "short",
    "grade": "cells",
    "evaluate": "models",
}
"""Kind of Slurm jobs -> which of its steps share one."""


class Example(Step):
    """A step of any kind, identified by that, a number and its inputs."""

    kind: str = "plan"
    name: str = "example"
    number: int = 0
    needed: dict[str, Step] = field(default_factory=dict)
    model: ModelConfig | None = None
    done_in: str | None = None
    """The kind of Slurm jobs that do it, if it is another."""
    machine: dict[str, Any] = field(default_factory=dict)
    """Fields of its resources that are not as usual."""
    runtime = frozenset({"name", "model", "done_in", "machine"})
    setup = PlanSetup(IdentifiedAllocation.of(AllocationConfig()), 0.25, {}, "example")

    def label(self) -> str:
        return self.name

    def resources(self) -> Resources:
        job = self.done_in or self.kind
        usual = Resources(
            model=self.model, pace=[self.id], job=job, steps_per_job=STEPS_PER_JOB.get(job, "one")
        )
        return usual._replace(**self.machine)


MODELS = Models()
"""Those of this process."""


def perform_with_inputs(store: Store, step: Step) -> Path:
    """Do a step, and before it those it needs that are missing in the store; the folder of its
    result."""
    for needed in step.needs:
        perform_with_inputs(store, needed)
    with store.claim(step) as scratch:
        if scratch is not None:
            perform(step, Files.of(step, store, scratch, MODELS))
    return store.path(step)


def export_step_and_files(
    model: Path, folder: Path, export: ExportConfig, recovery: RecoveryConfig | None = None
) -> tuple[Export, Files]:
    """The step that exports a model under the plan in `folder`/plan, fine-tuned as in
    `folder`/finetune if there is a recovery; and its files."""
    (folder / "scratch").mkdir(exist_ok=True)
    text = IdentifiedText.of(CalibrationConfig(name="x", path="owner/x", seed=1))
    plan = Example()
    loaded = loaded_field(ModelConfig(name="m", path=str(model), device="cpu"))
    finetune = Finetune(loaded, text, plan, recovery, 1) if recovery else None
    pruned = Pruned(loaded, plan, finetune, None, recovery or RecoveryConfig(), True)
    folders = {plan.id: folder / "plan"} | ({finetune.id: folder / "finetune"} if finetune else {})
    files = Files(folder / "scratch", folder / "partial", folders, folder / "log", folder)
    return export_of(pruned, export, False), files


def cell_of(model: ModelConfig, text: CalibrationConfig, **changes: Any) -> Cell:
    """A cell that reads one text for everything, in its order."""
    roles = dict.fromkeys(("search", "instructions", "distill", "fit", "flops"), text)
    given = {
        "criterion": CriterionConfig(name="reap"),
        "calibration": text,
        "allocation": AllocationConfig(),
        "recovery": RecoveryConfig(),
        "ratio": 0.25,
        "gate": "model",
        "seed": 1,
        "texts": roles,
        **changes,
    }
    return Cell(model, **given)


def step_of(
    kind: str, cell: Cell, config: Config | None = None, benchmark: BenchmarkConfig | None = None
) -> Step:
    """A step of a kind, about a cell."""
    config = config or Config(timed=TimingConfig(device="a GPU"))
    if kind in ("alignment", "activation_alignment"):
        grouping = {"alignment": "m_smoe", "activation_alignment": "ream"}[kind]
        return plan_of(replace(cell, allocation=replace(cell.allocation, replacement=grouping)))  # type: ignore[no-any-return]
    changes = plan_of(cell), None, storage_of(cell.recovery)
    pruned = Pruned(loaded_field(cell.model), *changes, cell.recovery, drops_whole_experts(cell))
    text = IdentifiedText.of(cell.texts["flops"])
    made: dict[str, Callable[[], Any]] = {
        "model": lambda: loaded_field(cell.model).facts,
        "contamination": lambda: Contamination.of(cell.model, cell.calibration, {"b": benchmark}),  # type: ignore[dict-item]
        "finetune": lambda: pruned_of(cell).finetune,
        "export": lambda: export_of(pruned, config.export, config.verify),
        "cost": lambda: Cost.of(pruned, text, Cost.of(unpruned_model(cell.model), text)),
        "profile": lambda: Profile(pruned.loaded, text, pruned.plan),
        "timing": lambda: Timing.of(pruned, text, config.timed),
        **dict.fromkeys(
            ("evaluate", "generate", "grade"), lambda: results_step_of(benchmark, config)(pruned)
        ),
    }
    step_class: Any = KINDS[kind]
    step: Any = (
        made[kind]()
        if kind in made
        else step_class.of(cell, *([kind] if hasattr(step_class, "kinds") else []))
    )
    return step.generate if kind == "generate" else step  # type: ignore[no-any-return]


def evaluation_step(
    model: ModelConfig, benchmark: BenchmarkConfig, plan: Step | None = None, **changes: Any
) -> Evaluate:
    """The step that evaluates a model under a plan on a benchmark."""
    pruned = Pruned(loaded_field(model), plan, None, None, RecoveryConfig(), True)
    grading = Grading(IdentifiedBenchmark.of(benchmark), Policy(), None)
    asking = BenchmarkSetup(benchmark, None, changes.pop("backend", BackendConfig()))
    return Evaluate(asking, pruned, None, None, grading, **changes)
