"""What can be set: typed groups, a sentence under each field. Checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

GATES = ("model", "renormalized", "double_softmax")


@dataclass
class ExpectedConfig:
    """What the architecture of a model must be, so that it is known before the model is there."""

    parameters: int = MISSING
    """All parameters, embeddings included."""
    layers: int = MISSING
    """Decoder layers."""
    moe_layers: int = MISSING
    """Decoder layers with routed experts."""
    experts: int = MISSING
    """Routed experts of such a layer."""
    top_k: int = MISSING
    """Routed experts a token is given to."""
    hidden: int = MISSING
    """Numbers in the residual stream of a token."""
    width: int = MISSING
    """Channels of a routed expert."""
    shared_width: int = 0
    """Channels of all shared experts of a layer together; 0 without them."""


@dataclass
class ModelConfig:
    """A causal language model with routed experts."""

    name: str = MISSING
    """The word used for the model in tables, file names and the report."""
    path: str = MISSING
    """A folder with a transformers checkpoint, a hub id, or `pocket:NAME` for a model shipped with moe_lab."""
    revision: str | None = None
    """Branch, tag or commit on the hub; part of the identity of every step."""
    dtype: str = "auto"
    """Weight precision once loaded: auto (as stored on CUDA, float32 on CPU), float32, bfloat16 or float16."""
    device: str = "auto"
    """Where the model runs: auto, cpu, cuda, cuda:N, or a transformers device map such as balanced."""
    threads: int | None = None
    """CPU threads of one process; null leaves it to torch. The shipped models are fastest with 1."""
    allow_pickle: bool = False
    """Load .bin checkpoints, which run code when unpickled. Off unless you trust the author."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint. Off unless you trust the author."""
    expected: ExpectedConfig | None = None
    """The architecture: costs are estimated from it without the model, and a checkpoint that differs is refused."""

    def __post_init__(self) -> None:
        if isinstance(self.expected, dict):  # as it comes back from a job's JSON
            self.expected = ExpectedConfig(**self.expected)

    search: dict[str, Any] = field(default_factory=dict)
    """Parameters of allocation=evolutionary published for this model; what the allocation sets goes before."""


@dataclass
class CriterionConfig:
    """How experts are scored; higher always means keep."""

    name: str = MISSING
    """Name in the criteria registry, as the papers call it."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the criterion function, such as b, alpha and beta of s_family."""


@dataclass
class CalibrationConfig:
    """The text a model reads while statistics are gathered."""

    name: str = MISSING
    """The word used for the calibration set in tables and file names."""
    path: str = MISSING
    """A text file, JSON lines with a text field or chat messages, a hub id, or `pocket:calibration/NAME.jsonl`."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    field: str | None = None
    """Field of a JSON line to read; null takes text, messages, instruction and output, or question and answer."""
    packing: str = "reap"
    """How documents fill rows: reap (cut at the row end, rest dropped), chunk (one stream), none (one each)."""
    length: int = 2048
    """Tokens in a row."""
    tokens: int = 524288
    """Tokens to read, padding and gaps included; tokens / length is the number of rows."""
    batch_size: int = 4
    """Rows in one forward pass; changes speed and memory, never the sums beyond rounding."""
    order: str = "random"
    """Which documents come first: random (without replacement, by seed) or first (as in the file)."""
    seed: int | None = None
    """Seed of the document order; null takes the cell's."""
    gap: str = "none"
    """What stands between packed documents: none, eos, or zero (token id 0, as the REAP and EvoESAP code)."""
    special_tokens: bool = True
    """Let the tokenizer add its special tokens; never after a chat template, which has its own."""
    checkpointing: bool = False
    """Compute activations again in backward passes instead of keeping them: slower, and fits large models."""


@dataclass
class AllocationConfig:
    """How many experts, or channels, each layer and expert loses."""

    name: str = "uniform"
    """Name in the allocation registry."""
    label: str | None = None
    """The word used in tables; null takes the name and the parameters."""
    multiple_of: int = 1
    """Kept experts per layer are a multiple of this, as expert-parallel servers need."""
    ratio_basis: str = "routed"
    """What `ratio` is a share of: routed (the routed experts' parameters) or model (all parameters)."""
    by: str | None = None
    """Another criterion that allocation=global compares layers with; null takes the cell's own."""
    search: str | None = None
    """Name of the file in conf/calibration that allocation=evolutionary searches on; it needs answers."""
    path: str | None = None
    """The plan or schedule file of allocation=list."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the allocation."""


@dataclass
class RecoveryConfig:
    """What is done to a pruned model before it is evaluated: fine-tuning, then quantising."""

    name: str = "none"
    """The word used in tables and file names."""
    bits: int = 16
    """16 leaves weights as they are loaded, 4 stores them as NF4 with double quantisation."""
    modules: list[str] = field(default_factory=lambda: ["experts", "shared_experts"])
    """What bits=4 quantises: experts, shared_experts, attention; never routers, embeddings or lm_head."""
    instructions: str | None = None
    """Name of the file in conf/calibration to fine-tune on; it needs answers. null does not fine-tune."""
    epochs: float = 2.0
    """Passes over the instruction set."""
    rows_per_step: int = 16
    """Rows of the instruction set in one step of the optimiser; how many fit in memory is the set's batch_size."""
    rank: int = 32
    """Rank of the DoRA adapters on the routed experts."""
    learning_rate: float = 1e-4
    """Peak learning rate of the experts' adapters."""
    router_rank: int = 4
    """Rank of the DoRA adapters on the routers; 0 leaves routers alone."""
    router_learning_rate: float = 1e-6
    """Peak learning rate of the routers' adapters."""
    scaling: float = 4.0
    """What multiplies the product of an adapter's two matrices, alpha / rank of other programs."""
    dropout: float = 0.05
    """Share of an expert adapter's inputs that are set to 0 while training."""
    schedule: str = "cosine"
    """How learning rates fall to 0 after the warm-up: cosine or linear."""
    warmup: float = 0.1
    """Share of the steps in which learning rates rise from 0 to their peak."""
    clip: float = 0.5
    """Largest norm of the gradient of one step."""
    save_every: int = 50
    """Steps between two saves that an interrupted fine-tuning goes on from; changes nothing in the result."""


@dataclass
class BenchmarkConfig:
    """One run of one harness; it may report several results (HumanEval and HumanEval+ share their programs)."""

    name: str = MISSING
    """The word used for this run in file names."""
    harness: str = MISSING
    """Who asks and grades: lm_eval, evalplus, stories or perplexity."""
    task: str = MISSING
    """The harness's task: a task file, a data file, or `pocket:benchmarks/FILE`."""
    reports: dict[str, str] = field(default_factory=dict)
    """Result name -> the harness's metric, such as arc_challenge: acc_norm."""
    expected: int | None = None
    """Number of items the benchmark has; another number is an error unless `limit` is set."""
    max_new_tokens: int = 0
    """Generation limit; 0 for benchmarks that generate nothing."""
    batch_size: int = 64
    """Sequences in one forward pass."""
    executes_code: bool = False
    """Whether grading runs what the model wrote; needs allow_code_execution=true."""
    limit: int | None = None
    """Only the first N items; suite.limit sets it for all benchmarks of the suite."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Anything else the harness takes."""


@dataclass
class SuiteConfig:
    """A list of benchmarks."""

    name: str = MISSING
    """The word used for the suite."""
    benchmarks: list[str] = field(default_factory=list)
    """Names of files in conf/benchmark."""
    path: str | None = None
    """The text file of suite=perplexity."""
    limit: int | None = None
    """Evaluate only the first N items of each benchmark; the report says so."""


@dataclass
class LauncherConfig:
    """Where the steps of a study run."""

    name: str = "local"
    """inline (this process), local (one process per GPU, or several on CPU) or slurm."""
    processes: int | None = None
    """Processes of launcher=local; null takes one per GPU, or one per CPU core at most."""
    cells_per_job: int = 16
    """Pruned models that one Slurm job evaluates on weights it loads once."""
    steps_per_job: int = 256
    """Small steps, such as scores and plans, that one Slurm job does."""
    parallel: int = 64
    """Jobs of one array that may run at the same time."""
    max_requeues: int = 3
    """How often a job that is interrupted, by its time limit or for another job, is put back into the queue."""
    signal_seconds: int = 120
    """Seconds before its time limit at which a job is told to stop."""
    python: str | None = None
    """What starts Python in a job, such as `apptainer exec image.sif python`; null takes the interpreter of now."""


@dataclass
class JobConfig:
    """What a Slurm job asks for; null takes what stands further up, and at last an estimate."""

    gpus: int | None = None
    """GPUs; null takes as many as hold the model and the work."""
    cpus: int | None = None
    """CPU cores."""
    memory: float | None = None
    """Main memory in GiB."""
    minutes: int | None = None
    """Time limit; what is interrupted by it goes on from where it was."""
    partition: str | None = None
    """Partition, as sinfo names it."""
    account: str | None = None
    """Account the time is charged to."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features a node must have, such as h100."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch, such as nodelist: node7, exclusive: true."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before Python starts, such as module load cuda."""


@dataclass
class ResourcesConfig:
    """What Slurm jobs ask for, by model and kind of step; the most particular that is set counts."""

    name: str = "default"
    """The word used for the cluster."""
    gpu_memory: float = 80.0
    """GiB of one GPU of the cluster."""
    cpus_per_gpu: int = 8
    """CPU cores that are asked for with each GPU."""
    margin: float = 2.0
    """Time asked for, as a multiple of the estimate."""
    longest: int = 1440
    """Minutes that are asked for at most; longer work is requeued and goes on."""
    every: JobConfig = field(default_factory=JobConfig)
    """All jobs."""
    jobs: dict[str, Any] = field(default_factory=dict)
    """KIND, MODEL/every or MODEL/KIND -> fields of `every`, for jobs with steps of that kind, or with that model."""


@dataclass
class TrackerConfig:
    """Who else is told about results; the store always is."""

    name: str = "none"
    """none or wandb."""
    project: str = "moe_lab"
    """Project of the tracker."""
    mode: str | None = None
    """online or offline; null is online when a key is configured, offline otherwise."""


@dataclass
class GridConfig:
    """A list per axis; cells are their product. An axis left empty takes the group's own choice."""

    model: list[str] = field(default_factory=list)
    """Names of files in conf/model."""
    criterion: list[str] = field(default_factory=list)
    """Names of files in conf/criterion; glob(*) takes all."""
    calibration: list[str] = field(default_factory=list)
    """Names of files in conf/calibration."""
    allocation: list[str] = field(default_factory=list)
    """Names of files in conf/allocation."""
    recovery: list[str] = field(default_factory=list)
    """Names of files in conf/recovery."""
    ratio: list[float] = field(default_factory=list)
    """Ratios of experts, or channels, to remove."""
    gate: list[str] = field(default_factory=list)
    """Gates to weigh expert outputs with."""
    seed: list[int] = field(default_factory=list)
    """Seeds."""


@dataclass
class Config:
    """One study: the default cell, the grid around it, and how it runs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    criterion: CriterionConfig = field(default_factory=CriterionConfig)
    """How experts are scored."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """What the model reads while it is scored."""
    allocation: AllocationConfig = field(default_factory=AllocationConfig)
    """How many experts, or channels, each layer and expert loses."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """What is done to a pruned model before it is evaluated."""
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    """What pruned models are evaluated on."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Where steps run."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    """What Slurm jobs ask for."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Who else is told."""
    grid: GridConfig = field(default_factory=GridConfig)
    """Lists per axis; cells are their product."""
    more: list[GridConfig] = field(default_factory=list)
    """Further grids of the same study; an axis left empty takes the list of `grid`."""
    ratio: float = 0.25
    """Share of the routed experts, or of their channels, to remove, in [0, 1)."""
    seed: int = 42
    """Seed of the calibration order and of random choices."""
    gate: str = "model"
    """What multiplies an expert's output: model (its own), renormalized (the papers' equation), double_softmax."""
    study: str = "study"
    """Name of the study: its list of cells and its report are stored under it."""
    store: str = "store"
    """Folder of all steps and results."""
    overlap: bool = False
    """Also score every S(b, alpha, beta) and the exact damage, for the overlap figures."""
    report: bool = True
    """Write tables, figures and the HTML report at the end."""
    dry_run: bool = False
    """Print the graph of steps and stop."""
    export: str | None = None
    """Also write each pruned model as a checkpoint: natural (what is kept), masked, padded or padded_stock."""
    flops_text: str = "pocket_excerpt"
    """Name of the file in conf/calibration whose tokens are routed to count the FLOPs of each pruned model."""
    allow_code_execution: bool = False
    """Let benchmarks run programs the model wrote, in a sandbox."""
    sandbox: str = "auto"
    """auto (namespaces, or a limited subprocess for the shipped model's programs), namespaces, or none."""
    wait: bool = False
    """With launcher=slurm: follow the jobs until they end, instead of returning when they are submitted."""
    snapshot: bool = False
    """With launcher=slurm: jobs run a copy of the code as it is now, whatever is edited meanwhile."""
    retry: str | None = None
    """failed: run steps again that ended with an error; null leaves their error standing."""
