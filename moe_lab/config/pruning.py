"""Settings of pruning: model, criterion, calibration set, allocation and recovery, and the grid over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"
"""OmegaConf's mark of a value that must be given. OmegaConf is not imported here, since workers do without it."""
GATES = ("model", "renormalized", "full_softmax", "double_softmax")


@dataclass
class ExpectedConfig:
    """The expected architecture of a model, so that it is known before the model is downloaded."""

    parameters: int = MISSING
    """All parameters, embeddings included."""
    layers: int = MISSING
    """Decoder layers."""
    moe_layers: int = MISSING
    """Decoder layers with routed experts."""
    experts: int = MISSING
    """Routed experts of an MoE layer."""
    top_k: int = MISSING
    """Routed experts per token."""
    hidden: int = MISSING
    """Hidden size: values per token in the residual stream."""
    width: int = MISSING
    """Channels of a routed expert."""
    shared_width: int = 0
    """Channels of all shared experts of a layer together; 0 without them."""


@dataclass
class ModelConfig:
    """A causal language model with routed experts."""

    runtime = frozenset(
        {
            "name",
            "revision",
            "dtype",
            "device",
            "threads",
            "trust_remote_code",
            "expected",
            "template_arguments",
            "search",
        }
    )

    name: str = MISSING
    """Name of the model in tables, file names and the report."""
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
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint. Off unless you trust the author."""
    top_k: int | None = None
    """Routed experts per token, in scoring and evaluation; null is as trained. Otherwise the name ends in _topN."""
    expected: ExpectedConfig | None = None
    """The architecture: costs are estimated from it without the model, and a checkpoint that differs is refused."""

    def __post_init__(self) -> None:
        if isinstance(self.expected, dict):  # from the JSON of a job
            self.expected = ExpectedConfig(**self.expected)
        if self.top_k is not None and not self.name.endswith(ending := f"_top{self.top_k}"):
            self.name += ending

    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template besides the messages, such as enable_thinking: false."""
    search: dict[str, Any] = field(default_factory=dict)
    """Parameters of allocation=evolutionary published for this model; those of the allocation take precedence."""


@dataclass
class CriterionConfig:
    """How experts are scored; higher always means keep."""

    name: str = MISSING
    """Name in the criteria registry, as the papers call it."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the criterion function, such as b, alpha and beta of s_family."""


@dataclass
class SourceConfig:
    """One set of a mixture of calibration sets."""

    runtime = frozenset({"calibration", "path"})

    calibration: str = MISSING
    """Name of a file in conf/calibration: where documents come from, and how each is read."""
    share: float = MISSING
    """Share of the mixture's tokens, in (0, 1); the shares of a mixture add up to 1."""
    path: str | None = None
    """Read this instead of the set's own path, as in {calibration: text, path: notes.txt, share: 0.5}."""
    settings: Any = None
    """The settings of the set; filled in from `calibration` and `path`."""

    def __post_init__(self) -> None:
        if isinstance(self.settings, dict):  # from the JSON of a job
            self.settings = CalibrationConfig(**self.settings)


@dataclass
class CalibrationConfig:
    """The text a model reads while statistics are gathered."""

    runtime = frozenset({"name", "checkpointing", "engine", "activation_budget"})

    name: str = MISSING
    """Name of the calibration set in tables and file names."""
    path: str = ""
    """A text file, JSON lines with a text field or chat messages, a hub id, or `pocket:calibration/NAME.jsonl`."""
    sources: list[SourceConfig] = field(default_factory=list)
    """A mixture of sets, instead of a path: {calibration: NAME, share: 0.5} for each."""

    def __post_init__(self) -> None:
        self.sources = [SourceConfig(**source) if isinstance(source, dict) else source for source in self.sources]

    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    field: str | None = None
    """Field of a JSON line to read; null takes text, messages, instruction and output, or question and answer."""
    template: str | None = None
    """Text made of a JSON line's fields, such as "Question: {question}", instead of one field."""
    joined: bool = False
    """Join all records by blank lines, empty ones included, into one document, as papers read WikiText."""
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
    """Seed of the document order; null takes the cell's seed."""
    gap: str = "none"
    """Separator between packed documents: none, eos, or zero (token id 0, as in the REAP and EvoESAP code)."""
    special_tokens: bool = True
    """Let the tokenizer add its special tokens; never applies with a chat template, which has its own."""
    parts: int = 1
    """Steps that divide the rows of a pass among processes, GPUs or jobs; their sums are merged. The step of the merged
    sums is that of one pass."""
    checkpointing: bool = False
    """Compute activations again in backward passes instead of keeping them: slower, but takes less memory."""
    engine: str = "resident"
    """resident (the whole model is loaded) or streamed (one decoder layer at a time, for models larger than memory)."""
    activation_budget: float = 8.0
    """GiB of activations that engine=streamed keeps in memory; during a pass all of them are on disk, in the store."""


@dataclass
class AllocationConfig:
    """How many experts, or channels, each layer and expert loses."""

    runtime = frozenset({"label", "search"})

    name: str = "uniform"
    """Name in the allocation registry."""
    label: str | None = None
    """Name in tables; null takes `name` and the parameters."""
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
    replacement: str = "none"
    """What takes the place of dropped experts: none (they go with their router rows), mean_output (the mean of the
    expert's outputs on the calibration set, a constant), or kept experts that they are merged into, by a name of
    docs/allocations.md, such as m_smoe, hc_smoe or ream."""
    protect: str | None = None
    """Experts that every plan keeps whole: super (super experts), or a JSON file such as {"1": [68]} (layer: ids)."""
    protect_layers: float = 0.75
    """Share of the decoder layers, from the first on, in which protect=super looks for super experts; 1 for all."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the allocation and of the replacement."""


@dataclass
class RecoveryConfig:
    """What is done to a pruned model before it is evaluated: fine-tuning or fitting, then quantising."""

    runtime = frozenset({"name", "bits", "modules", "instructions", "distill", "fit", "save_every"})

    name: str = "none"
    """Name in tables and file names."""
    bits: int = 16
    """16 leaves weights as they are loaded, 4 stores them as NF4 with double quantisation."""
    modules: list[str] = field(default_factory=lambda: ["experts", "shared_experts"])
    """What bits=4 quantises: experts, shared_experts, attention; never routers, embeddings or lm_head."""
    instructions: str | None = None
    """Name of the file in conf/calibration whose answers are learnt. One of instructions, distill and fit at most."""
    distill: str | None = None
    """Name of the file in conf/calibration, of any text, on which the unpruned model's predictions are learnt."""
    temperature: float = 1.0
    """With distill: what the logits of both models are divided by; the loss is multiplied by its square."""
    fit: str | None = None
    """Name of the file in conf/calibration, of any text, on which the down projections of merged experts are fitted to
    the outputs of their members (MergeMoE). Nothing is trained then: of the settings below, only save_every applies."""
    train: str = "adapters"
    """What is trained: adapters (DoRA on experts and routers) or routers (their weights, and nothing else)."""
    epochs: float = 2.0
    """Passes over the text that is trained on."""
    rows_per_step: int = 16
    """Rows of that text in one step of the optimiser; batch_size of the text is how many run at once."""
    shared_experts: bool = True
    """Fine-tune shared experts like routed ones, where the model has them."""
    rank: int = 32
    """Rank of the DoRA adapters on the experts."""
    learning_rate: float = 1e-4
    """Peak learning rate of the experts' adapters."""
    router_rank: int = 4
    """Rank of the DoRA adapters on the routers; 0 leaves routers alone."""
    router_learning_rate: float = 1e-6
    """Peak learning rate of the routers: of their adapters, or of their weights with train=routers."""
    scaling: float = 4.0
    """Factor on the product of an adapter's two matrices: alpha / rank of other programs."""
    dropout: float = 0.05
    """Share of an expert adapter's inputs that are set to 0 while training."""
    schedule: str = "cosine"
    """How learning rates fall to 0 after the warm-up: cosine or linear."""
    warmup: float = 0.1
    """Share of the steps in which learning rates rise from 0 to their peak."""
    clip: float = 0.5
    """Largest norm of the gradient of one step."""
    save_every: int = 50
    """Steps, or batches of a fit, between two checkpoints for resuming; does not change the result."""


@dataclass
class ExportConfig:
    """The checkpoint that is written of each pruned model."""

    runtime = frozenset({"converter"})

    shape: str | None = None
    """natural (what the plan keeps), masked or padded, as in docs/export.md; null writes none."""
    format: str = "safetensors"
    """How the tensors are stored: safetensors (as in the original), compressed_tensors (in FP8 or 4 bits), or gguf (by
    llama.cpp's converter)."""
    converter: str | None = None
    """llama.cpp's convert_hf_to_gguf.py, for format=gguf; null takes the one that `make llama` fetches."""
    scheme: str = "fp8"
    """For format=compressed_tensors: fp8, or w4a16 (4-bit weights)."""


@dataclass
class GridConfig:
    """A list per axis; cells are their product. An axis left empty takes the group's own choice."""

    model: list[str] = field(default_factory=list)
    """Names of files in conf/model."""
    top_k: list[int | None] = field(default_factory=list)
    """Routed experts per token, null as trained; every model of the axis `model` is taken with each of them."""
    criterion: list[str] = field(default_factory=list)
    """Names of files in conf/criterion; glob(*) takes all."""
    calibration: list[str] = field(default_factory=list)
    """Names of files in conf/calibration."""
    allocation: list[str] = field(default_factory=list)
    """Names of files in conf/allocation."""
    recovery: list[str] = field(default_factory=list)
    """Names of files in conf/recovery."""
    protocol: list[str] = field(default_factory=list)
    """Names of files in conf/protocol; with them, a grid of `more` can ask its models by another protocol."""
    ratio: list[float] = field(default_factory=list)
    """Ratios of experts, or channels, to remove."""
    gate: list[str] = field(default_factory=list)
    """Weights that multiply expert outputs; see `Config.gate`."""
    seed: list[int] = field(default_factory=list)
    """Seeds."""
