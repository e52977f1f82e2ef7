"""Steps for tests of stores, schedules and estimates."""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from moe_lab.allocation import IdentifiedAllocation
from moe_lab.calibration import IdentifiedText, with_batch_tokens
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
    Contamination,
    Evaluate,
    Grading,
    Items,
    SharedInputs,
    evaluation_tasks,
)
from moe_lab.study.steps.files import Files
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
"""Kind of Slurm jobs -> its steps that share a job, see `Resources.steps_per_job`."""


class Example(Step):
    """A step of any kind, identified by its kind, its number and its inputs."""

    kind: str = "plan"
    name: str = "example"
    number: int = 0
    input_steps: dict[str, Step] = field(default_factory=dict)
    model: ModelConfig | None = None
    job_kind: str | None = None
    """The kind of the Slurm jobs that perform the step; None for the kind of the step."""
    resource_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of its resources that differ from the defaults."""
    runtime = frozenset({"name", "model", "job_kind", "resource_fields"})
    setup = PlanSetup(IdentifiedAllocation.of(AllocationConfig()), 0.25, {}, "example")

    def label(self) -> str:
        return self.name

    def resources(self) -> Resources:
        job = self.job_kind or self.kind
        resources = Resources(
            model=self.model, pace=[self.id], job=job, steps_per_job=STEPS_PER_JOB.get(job, "one")
        )
        return resources._replace(**self.resource_fields)


def perform_with_inputs(store: Store, step: Step) -> Path:
    """Perform a step, after all of its inputs that are missing in the store. Returns the folder of
    its result."""
    for input_step in step.needs:
        perform_with_inputs(store, input_step)
    with store.claim(step) as scratch:
        if scratch is not None:
            perform(step, Files.of(step, store, scratch))
    return store.path(step)


def export_step_and_files(
    model: Path, folder: Path, export: ExportConfig, recovery: RecoveryConfig | None = None
) -> tuple[Export, Files]:
    """(step that exports a model under the plan in `folder`/plan, files of the step). With a
    recovery, the model is fine-tuned as in `folder`/finetune."""
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
    """A cell that reads one text in all roles, in the order of the text."""
    text = with_batch_tokens(text, model.device)
    roles = dict.fromkeys(("search", "instructions", "distill", "fit", "flops"), text)
    fields = {
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
    return Cell(model, **fields)


def step_of(
    kind: str, cell: Cell, config: Config | None = None, benchmark: BenchmarkConfig | None = None
) -> Step:
    """A step of the kind `kind` for a cell."""
    config = config or Config(timed=TimingConfig(device="a GPU"))
    if kind in ("alignment", "activation_alignment"):
        grouping = {"alignment": "m_smoe", "activation_alignment": "ream"}[kind]
        return plan_of(replace(cell, allocation=replace(cell.allocation, replacement=grouping)))  # type: ignore[no-any-return]
    changes = plan_of(cell), None, storage_of(cell.recovery)
    pruned = Pruned(loaded_field(cell.model), *changes, cell.recovery, drops_whole_experts(cell))
    text = IdentifiedText.of(cell.texts["flops"])

    def results_step() -> Any:
        assert benchmark
        (task,) = evaluation_tasks([benchmark], config)
        return task(pruned)[benchmark.name]

    step_functions: dict[str, Callable[[], Any]] = {
        "model": lambda: loaded_field(cell.model).facts,
        "contamination": lambda: Contamination.of(cell.model, cell.calibration, [benchmark]),  # type: ignore[list-item]
        "items": lambda: Items.of(benchmark),  # type: ignore[arg-type]
        "finetune": lambda: pruned_of(cell).finetune,
        "export": lambda: export_of(pruned, config.export, config.verify),
        "cost": lambda: Cost.of(pruned, text, Cost.of(unpruned_model(cell.model), text)),
        "profile": lambda: Profile(pruned.loaded, text, pruned.plan),
        "timing": lambda: Timing(pruned, text, config.timed, cell.model.threads),
        **dict.fromkeys(("evaluate", "generate", "grade"), results_step),
    }
    step_class: Any = KINDS[kind]
    step: Any = (
        step_functions[kind]()
        if kind in step_functions
        else step_class.of(cell, *([kind] if hasattr(step_class, "kinds") else []))
    )
    return step.generate if kind == "generate" else step  # type: ignore[no-any-return]


def evaluation_step(
    model: ModelConfig, benchmark: BenchmarkConfig, plan: Step | None = None, **changes: Any
) -> Evaluate:
    """The step that evaluates a model, pruned by a plan, on a benchmark."""
    pruned = Pruned(loaded_field(model), plan, None, None, RecoveryConfig(), True)
    grading = Grading(IdentifiedBenchmark.of(benchmark), Policy())
    backend = changes.pop("backend", BackendConfig())
    items = {f"items of {benchmark.name}": Items.of(benchmark)}
    shared = SharedInputs(backend, items, questions={})
    return Evaluate(shared, pruned, None, None, grading, **{"reference": None, **changes})
