"""Settings of a study as typed dataclasses, with a sentence under each field. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from moe_lab.config.base import SETTINGS, Count, Name, Ratio, Text
from moe_lab.config.evaluation import BackendConfig, BenchmarkConfig, JudgeConfig, ProtocolConfig, SuiteConfig
from moe_lab.config.pruning import (
    GATES,
    AllocationConfig,
    CalibrationConfig,
    CriterionConfig,
    ExpectedConfig,
    ExportConfig,
    Gate,
    ModelConfig,
    RecoveryConfig,
    SourceConfig,
)
from moe_lab.config.running import JobConfig, LauncherConfig, ResourcesConfig, TimingConfig, TrackerConfig

__all__ = [
    "GATES",
    "AllocationConfig",
    "BackendConfig",
    "BenchmarkConfig",
    "CalibrationConfig",
    "Config",
    "CriterionConfig",
    "ExpectedConfig",
    "ExportConfig",
    "JobConfig",
    "JudgeConfig",
    "LauncherConfig",
    "ModelConfig",
    "ProtocolConfig",
    "RecoveryConfig",
    "ResourcesConfig",
    "SourceConfig",
    "SuiteConfig",
    "TimingConfig",
    "TrackerConfig",
]


def _not_all(study: str) -> str:
    if study == "all":
        raise ValueError("all means every study: expected another name, such as all_1")
    return study


@dataclass(config=SETTINGS, frozen=True)
class Config:
    """One study: what is asked of its cells, and how it runs."""

    basic = frozenset(
        {
            "study",
            "store",
            "plugins",
            "dry_run",
            "retry",
            "wait",
            "verify",
            "push",
            "allow_code_execution",
            "allow_judge",
            "data_root",
        }
    )

    export: ExportConfig = field(default_factory=ExportConfig)
    """Whether and how each pruned model is also written as a checkpoint."""
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    """What pruned models are evaluated on."""
    judge: JudgeConfig | None = None
    """The language model that grades answers where a program cannot."""
    backend: BackendConfig = field(default_factory=BackendConfig)
    """What generates the texts of benchmarks."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Where steps run."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    """Resources of Slurm jobs."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Experiment tracker that gets a copy of the results."""
    study: Annotated[Name, AfterValidator(_not_all)] = "study"
    """Name of the study: its list of cells and its report are stored under it."""
    plugins: list[str] = field(default_factory=list)
    """Modules with criteria or allocations of your own, such as my_package.my_module. Set them on the command line, so
    that their criteria and allocations can be chosen there."""
    store: Text = "store"
    """Folder of all steps and results; or the URL of a folder that machines share, such as s3://bucket/path, whose copy
    on this machine is in the user's cache."""
    overlap: bool = False
    """Also score every S(b, alpha, beta) and the exact damage, for the overlap figures."""
    profile: bool = False
    """Also measure hidden states and routing of each pruned model layer by layer, and how much pruning each layer alone
    changes its output, on flops_text."""
    timing: bool = False
    """Also measure how fast each model reads prompts and generates, and its memory, on the device it runs on, with
    prompts from flops_text."""
    timed: TimingConfig = field(default_factory=TimingConfig)
    """The requests that are timed."""
    report: bool = True
    """Write tables, figures and the HTML report at the end."""
    dry_run: bool = False
    """Print the graph of steps and stop."""
    verify: bool = False
    """Run some tokens through each exported checkpoint and the masked model, and refuse a checkpoint that differs."""
    push: str | None = None
    """OWNER/NAME on the hub: upload the exported model there when the study has ended, with its results, scores and
    statistics. The study exports one pruned model."""
    objective: str | None = None
    """What a sweeper of Hydra is told of each job: Avg (the mean of all benchmarks in which more is better), or a
    result such as arc_easy or perplexity. hydra/sweeper=basic, a plain grid, needs none."""
    flops_text: str = "pocket_excerpt"
    """Name of the file in conf/calibration whose tokens are routed to count the FLOPs of each pruned model."""
    allow_code_execution: bool = False
    """Let benchmarks run programs the model wrote, in a sandbox."""
    sandbox: Literal["namespaces", "none"] = "namespaces"
    """Where such programs run: in Linux namespaces, or in a subprocess that only has limits (none)."""
    allow_judge: bool = False
    """Send the model's answers to the judge's endpoint."""
    allow_pickled_data: bool = False
    """Read data sets that hold pickles, which can run code when read (LiveCodeBench's hidden tests)."""
    data_root: Text = "~/.cache/moe_lab/data"
    """Folder of the mirrors of benchmark data; `python -m moe_lab.evaluation.mirror` fills it."""
    interpreters: dict[Literal["vllm", "evalscope"], str | None] = field(default_factory=dict)
    """Harness, or vllm -> the Python that runs it, if its packages conflict with those here; `make evalscope` and
    `make vllm` make one."""
    wait: bool = False
    """With launcher=slurm: follow the jobs until they end, instead of returning when they are submitted."""
    retry: Literal["failed"] | None = None
    """failed: run failed steps again; null keeps their errors."""


@dataclass(config=SETTINGS, frozen=True)
class CellConfig:
    """What one cell is, and the choice of each axis that no list is given for."""

    basic = frozenset({"ratio", "seed", "gate"})

    model: ModelConfig
    """The model."""
    criterion: CriterionConfig
    """How experts are scored."""
    calibration: CalibrationConfig
    """The text on which statistics for scoring are gathered."""
    allocation: AllocationConfig = field(default_factory=AllocationConfig)
    """How many experts, or channels, each layer and expert loses."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """What is done to a pruned model before it is evaluated."""
    ratio: Ratio = 0.25
    """Share of the routed experts, or of their channels, to remove, in [0, 1)."""
    gate: Gate = "model"
    """The weight that multiplies an expert's output: model (the model's own), renormalized (the papers' equation),
    full_softmax (the expert's probability among all experts), double_softmax (the softmax of these probabilities)."""
    seed: Count = 42
    """Seed of the calibration order and of random choices."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """How the benchmarks are asked, where a paper differs from their files."""
