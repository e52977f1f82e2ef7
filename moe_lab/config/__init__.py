"""Settings of a study as typed dataclasses, with a sentence under each field. Imports nothing
heavy."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict

from moe_lab.config.base import (
    Above0,
    Count,
    Group,
    Name,
    Positive,
    Ratio,
    Text,
    group,
    matching,
)
from moe_lab.config.evaluation import (
    GREEDY,
    BackendConfig,
    BenchmarkConfig,
    JudgeConfig,
    ProtocolConfig,
    Sampling,
    SuiteConfig,
)
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

Project = Annotated[
    str, matching(r"[^/\\#?%:]{1,128}", "expected 1 to 128 characters without / \\ # ? % or :")
]
Study = Annotated[
    Name, matching("(?!all$).*", "all means every study: expected another name, such as all_1")
]


SET_BY_MOE_LAB = {
    "time": "minutes",
    "mem": "memory",
    "cpus-per-task": "cpus",
    "cpus-per-gpu": "cpus",
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"), "gpus and gpu_type"
    ),
    "tres-per-task": "gpus, gpu_type and cpus",
    "partition": "partition",
    "signal": "launcher.signal_seconds",
    "array": "launcher.parallel",
    **dict.fromkeys(
        (
            "job-name",
            "dependency",
            "output",
            "error",
            "requeue",
            "no-requeue",
            "open-mode",
            "nodes",
            "ntasks",
            "ntasks-per-node",
            "export",
            "clusters",
            "kill-on-invalid-dep",
            "wait",
            "parsable",
            "test-only",
            "chdir",
        )
    ),
}
"""Option of sbatch that moe_lab sets itself -> the setting that decides it, if any."""


def _further_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of sbatch (name -> value), with hyphens instead of underscores in their names.
    ValueError for an option in SET_BY_MOE_LAB, and for GPUs in `gres`."""
    options = {name.replace("_", "-"): value for name, value in options.items()}
    for name in options:
        if name in SET_BY_MOE_LAB:
            raise ValueError(
                f"{name} is set by moe_lab: expected {SET_BY_MOE_LAB[name] or 'other options'}"
            )
    if re.search(r"\bgpu\b", str(options.get("gres"))):
        raise ValueError(f"gres={options['gres']} requests GPUs: expected gpus and gpu_type")
    return options


@group
class LauncherConfig(Group):
    """Where the steps of a study run."""

    basic = ("processes",)

    name: Literal["inline", "local", "slurm"] = "local"
    """inline (this process), local (several processes) or slurm."""
    processes: Annotated[int, Strict(), Field(ge=1, le=1024)] | None = None
    """Processes of launcher=local; null: one for each GPU, or for each group of GPUs that a step
    needs; without GPUs, one for each CPU core, as far as memory allows."""
    cells_per_job: Positive = 16
    """Pruned models that one Slurm job evaluates after loading the weights once."""
    parallel: Positive = 64
    """Jobs of one array that may run at the same time."""
    max_requeues: Count = 3
    """How often a job that reaches its time limit or is preempted is put back into the queue."""
    signal_seconds: Positive = 120
    """Seconds before its time limit at which a job is told to stop."""
    stale_minutes: Above0 = 30
    """Minutes without a heartbeat of a process after which processes on other machines take over
    its step, unless Slurm shows its job."""
    python: str | None = None
    """Command that starts Python in a job, such as `apptainer exec image.sif python`; null takes
    the interpreter that runs now."""


@group
class JobConfig(Group):
    """Resources of a Slurm job; null takes the next more general setting, or an estimate if all of
    these are null."""

    basic = ("gpus", "minutes", "partition", "setup")

    gpus: Count | None = None
    """GPUs; null takes as many as the model and the work need for their memory."""
    gpu_type: str | None = None
    """Type of the GPUs, as `sinfo --format=%G` names it, such as a100; null takes any."""
    cpus: Positive | None = None
    """CPU cores."""
    memory: Annotated[float, Strict(), Field(ge=0)] | None = None
    """Main memory in GiB; 0 requests none, for clusters that assign it with cores or GPUs."""
    minutes: Positive | None = None
    """Time limit; interrupted work resumes where it stopped."""
    partition: str | None = None
    """Partition, as sinfo names it."""
    sbatch: Annotated[dict[str, Any], AfterValidator(_further_options)] = field(
        default_factory=dict
    )
    """Further options of sbatch by their long names, such as account: ours, qos: long, constraint:
    h100. mem-per-cpu and mem-per-gpu stand for `memory`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before Python starts, such as module load cuda."""


@group
class ResourcesConfig(Group):
    """Resources of Slurm jobs by model and kind of step; the most specific setting counts."""

    basic = ("gpu_memory",)

    gpu_memory: Above0 = 80.0
    """GiB of one GPU, of the cluster or of this machine."""
    longest: Positive = 1440
    """Largest time limit of a job in minutes, and the limit of a job of unknown time, as far as the
    partition allows; longer work is requeued and resumes."""
    every: JobConfig = field(default_factory=JobConfig)
    """All jobs."""
    jobs: dict[str, JobConfig] = field(default_factory=dict)
    """Kind of step -> fields of `every`, for jobs of that kind."""
    models: dict[str, JobConfig] = field(default_factory=dict)
    """Name of a model, without _topN -> fields of `every`, for jobs that read its weights; they
    take precedence over `jobs`."""

    def of_model(self, model: ModelConfig) -> JobConfig | None:
        """The entry of `models` for `model.name` or, if there is none, for this name without the
        ending _topN."""
        return self.models.get(
            model.name, self.models.get(model.name.removesuffix(f"_top{model.top_k}"))
        )


@group
class TimingConfig(Group):
    """The requests that timing=true measures: how many prompts each has, and how long they are."""

    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = field(
        default_factory=lambda: [1, 8]
    )
    """Prompts per request."""
    prompt_lengths: Annotated[list[Positive], Field(min_length=1)] = field(
        default_factory=lambda: [128]
    )
    """Tokens of each prompt."""
    new_tokens: Positive = 32
    """Tokens that are generated after the first token, for each prompt."""
    device: str | None = None
    """Name of the GPU or processor to measure on, such as `NVIDIA H100 80GB HBM3`; null takes
    the device of this machine."""


@group
class TrackerConfig(Group):
    """Experiment tracker that gets a copy of the results; the store always has them."""

    basic = ("project",)

    name: Literal["none", "wandb"] = "none"
    """none or wandb."""
    project: Project | None = None
    """Project of the tracker; null: the project in wandb's own settings, such as WANDB_PROJECT."""


@group
class Config(Group):
    """One study: how its cells are evaluated, and how it runs."""

    basic = (
        "study",
        "store",
        "also",
        "plugins",
        "dry_run",
        "retry",
        "wait",
        "verify",
        "allow_code_execution",
        "allow_judge",
        "data_root",
    )

    export: ExportConfig = field(default_factory=ExportConfig)
    """Whether and how each pruned model is also written as a checkpoint."""
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    """Benchmarks on which pruned models are evaluated."""
    judge: JudgeConfig | None = None
    """The language model that grades answers where a program cannot."""
    backend: BackendConfig = field(default_factory=BackendConfig)
    """Engine that generates the completions of benchmarks."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Where steps run."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    """Resources of Slurm jobs."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Experiment tracker that gets a copy of the results."""
    study: Study = "study"
    """Name of the study, under which its list of cells and its report are stored."""
    plugins: list[str] = field(default_factory=list)
    """Modules with criteria or allocations of your own, such as my_package.my_module. Set them on
    the command line, so that their criteria and allocations can be chosen there."""
    store: Text = "store"
    """Folder of all steps and results."""
    also: list[Text] = field(default_factory=list)
    """Stores that are only read: their finished steps are taken over before anything is
    computed."""
    overlap: bool = False
    """Also compute every S(b, alpha, beta) and the exact damage on each calibration set, for the
    overlap figures."""
    profile: bool = False
    """Also measure hidden states of each pruned model layer by layer, and how much pruning each
    layer alone changes its output, on flops_text."""
    timing: bool = False
    """Also measure the speed of each model in reading prompts and generating, and its memory, with
    prompts from flops_text."""
    timed: TimingConfig = field(default_factory=TimingConfig)
    """The requests that are timed."""
    report: bool = True
    """Write tables, figures and the HTML report at the end."""
    dry_run: bool = False
    """Print the graph of steps and stop."""
    verify: bool = False
    """Run some tokens through each exported checkpoint and the masked model, and refuse a
    checkpoint that differs."""
    objective: str | None = None
    """The value of each job for a sweeper of Hydra: Avg (the mean of all higher-is-better
    benchmarks), or the name of a result such as arc_easy or perplexity. A plain grid needs
    none."""
    flops_text: str = "pocket_excerpt"
    """Name of the file in conf/calibration whose text is used to count FLOPs, and for profile and
    timing."""
    allow_code_execution: bool = False
    """Let benchmarks run programs that the model wrote, in a sandbox."""
    sandbox: Literal["auto", "landlock", "bubblewrap", "none"] = "auto"
    """How programs that the model wrote are isolated: landlock (Linux 5.13 or later), bubblewrap,
    auto (the first of these that the machine has), or none."""
    allow_judge: bool = False
    """Send the model's answers to the judge's endpoint."""
    allow_pickled_data: bool = False
    """Read data sets that contain pickles, which can run code when read: the hidden tests of
    LiveCodeBench."""
    data_root: Text = "~/.cache/moe_lab/data"
    """Folder of the mirrors of benchmark data, made by `moe-lab mirror`."""
    interpreters: dict[Literal["vllm", "evalscope"], str | None] = field(default_factory=dict)
    """evalscope or vllm -> the Python interpreter that runs it, since its packages conflict with
    those of moe_lab; `make evalscope` and `make vllm` make one."""
    wait: bool = False
    """With launcher=slurm: follow the jobs until they end, instead of returning when they are
    submitted."""
    retry: Literal["failed"] | None = None
    """failed: run failed steps again; null: keep their errors."""


@group
class CellConfig(Group):
    """Settings of one cell, and the value of each axis that has no list of values."""

    basic = ("ratio", "seed", "gate")

    model: ModelConfig
    """The model."""
    criterion: CriterionConfig
    """How experts are scored."""
    calibration: CalibrationConfig
    """The text on which statistics for scoring are gathered."""
    allocation: AllocationConfig = field(default_factory=AllocationConfig)
    """How many experts, or channels, each layer and expert loses."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """Training or fitting of a pruned model before it is evaluated."""
    ratio: Ratio = 0.25
    """Share of the routed experts, or of their channels, to remove, in [0, 1); see `ratio_of`."""
    ratio_of: Literal["routed", "model"] = "routed"
    """What `ratio` is a share of: routed (the routed experts, or their channels) or model (all
    parameters of the model)."""
    gate: Gate = "model"
    """The weight that multiplies an expert's output: model (the model's own), renormalized (the
    papers' equation), full_softmax (the expert's probability among all experts), double_softmax
    (the softmax of these probabilities)."""
    seed: Count = 42
    """Seed of the calibration order and of random choices."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """The evaluation settings of a paper that differ from the benchmarks' files."""
