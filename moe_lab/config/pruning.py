"""Settings of pruning: model, criterion, calibration set, allocation and recovery, and the grid
over them."""

from __future__ import annotations

import math
from dataclasses import field, fields
from datetime import date as calendar_date
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, Strict, model_validator

from moe_lab.config.base import (
    Above0,
    Count,
    From2,
    Group,
    Name,
    Positive,
    Share,
    Text,
    group,
    matching,
)

Gate = Literal["model", "renormalized", "full_softmax", "double_softmax"]
GATES: tuple[str, ...] = get_args(Gate)
Shape = Literal["natural", "masked", "padded"]
"""Values of export.shape."""
Precision = Literal["auto", "float32", "bfloat16", "float16"]
DEVICE_MAPS = ("balanced", "balanced_low_0", "sequential")
"""Names of transformers' device maps, which spread a model over the devices of a machine."""
DEVICES = ("auto", "cpu", "cuda", "cuda:N", *DEVICE_MAPS)
Device = Annotated[
    str, matching("|".join(DEVICES).replace("N", r"\d+"), f"expected one of {', '.join(DEVICES)}")
]


def _iso_date(text: str) -> str:
    """The date in `text`, in the form YYYY-MM-DD."""
    try:
        return calendar_date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("expected a date such as 2026-01-01") from None


Date = Annotated[str, AfterValidator(_iso_date)]


@group
class ExpectedConfig(Group):
    """The expected architecture of a model, so that it is known before the model is downloaded."""

    parameters: Positive
    """All parameters, embeddings included."""
    layers: Positive
    """Decoder layers."""
    moe_layers: Positive
    """Decoder layers with routed experts."""
    experts: Positive
    """Routed experts of an MoE layer."""
    top_k: Positive
    """Routed experts per token."""
    hidden: Positive
    """Hidden size: values per token in the residual stream."""
    width: Positive
    """Channels of a routed expert."""
    shared_width: Count = 0
    """Channels of all shared experts of a layer together; 0 without them."""


@group
class ModelConfig(Group):
    """A causal language model with routed experts."""

    basic = ("path", "revision", "dtype", "device", "top_k")
    runtime = (
        "name",
        "revision",
        "dtype",
        "device",
        "threads",
        "trust_remote_code",
        "expected",
        "template_arguments",
        "thinking",
        "thinking_marks",
        "search",
    )
    references = ("path", "tokenizer")

    name: Name
    """Name of the model in tables, file names and the report."""
    path: Text
    """A folder with a transformers checkpoint, a hub id, or `pocket:NAME` for a model shipped with
    moe_lab."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: Text | None = None
    """Folder, hub id or `pocket:NAME` of another tokenizer, with its chat templates, by which the
    model reads and writes texts; null is that of `path`. Exports get its files."""
    dtype: Precision = "auto"
    """Precision of the loaded weights: auto (as stored on CUDA, float32 on the CPU), float32,
    bfloat16 or float16. Routers and correction biases that are stored in a higher precision keep
    it."""
    device: Device = "auto"
    """Where the model runs: auto, cpu, cuda, cuda:N, or a transformers device map such as
    balanced."""
    threads: Annotated[int, Strict(), Field(ge=1, le=4096)] | None = None
    """CPU threads of one process; null leaves it to torch. The shipped models are fastest with
    1."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint. Off unless you trust the author."""
    top_k: Positive | None = None
    """Routed experts per token, in scoring and evaluation; null is as trained. With a number N, the
    model's name ends in _topN."""
    expected: ExpectedConfig | None = None
    """The architecture of the model. Costs are estimated from these numbers before the model is
    downloaded, and a checkpoint with other numbers is refused."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template besides the messages, such as enable_thinking: false."""
    thinking: bool | None = None
    """Whether the model writes thoughts; null: if its chat template writes marks of thoughts."""
    thinking_marks: tuple[tuple[Text, Text], ...] = ()
    """Opening and closing marks of thoughts, such as [["<plan>","</plan>"]], besides those that
    moe_lab knows and those of the tokenizer's response template."""
    date: Date = "2026-01-01"
    """Date that chat templates write as today's, in calibration, recovery and evaluation."""
    search: dict[str, Any] = field(default_factory=dict)
    """Parameters of allocation=evolutionary published for this model; allocation.parameters take
    precedence."""

    def __post_init__(self) -> None:
        """If `top_k` is a number N, append _topN to the name."""
        ending = f"_top{self.top_k}"
        if self.top_k is not None and not self.name.endswith(ending):
            object.__setattr__(self, "name", self.name + ending)


@group
class CriterionConfig(Group):
    """How experts are scored; higher always means keep."""

    basic = ("parameters",)
    references = ("name",)

    name: str
    """Name in the criteria registry, as the papers call it."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the criterion function, such as b, alpha and beta of s_family."""


@group
class SourceConfig(Group):
    """One set of a mixture of calibration sets."""

    internal = ("settings",)
    runtime = ("calibration", "path")

    calibration: str
    """Name of a file in conf/calibration, which says where documents come from and how each
    document is read."""
    share: Annotated[float, Strict(), Field(gt=0, lt=1)]
    """Share of the mixture's tokens, in (0, 1); the shares of a mixture add up to 1."""
    path: str | None = None
    """Path to read instead of the set's own, as in {calibration: text, path: notes.txt, share:
    0.5}."""
    settings: CalibrationConfig | None = None
    """The settings of the set; filled in from `calibration` and `path`."""


DOCUMENT_SETTINGS = (
    "path",
    "subset",
    "split",
    "field",
    "template",
    "ignored",
    "joined",
    "order",
    "special_tokens",
)
"""Settings that say where documents come from and how each document is read. Every set of a mixture
has its own values."""


@group
class CalibrationConfig(Group):
    """The text a model reads while statistics are gathered."""

    basic = ("path", "sources", "tokens", "length", "batch_tokens", "engine")
    internal = ("is_default",)
    runtime = ("name", "parts", "engine", "is_default")
    references = ("path", "sources")

    name: Name
    """Name of the calibration set in tables and file names."""
    path: str = ""
    """A file or folder of texts, JSON, CSV or Parquet, a hub id, or
    `pocket:calibration/NAME.jsonl`."""
    sources: list[SourceConfig] = field(default_factory=list)
    """A mixture of sets, instead of a path: {calibration: NAME, share: 0.5} for each."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    field: str | tuple[str, ...] | None = None
    """The only field of a record that is read, or the fields of a task and its answer, such as
    [problem,solution]; null: those that docs/calibration.md lists."""
    template: str | None = None
    """Text made of a record's fields, such as "Question: {question}", instead of one field."""
    ignored: tuple[str, ...] = ()
    """Keys of records and of their messages that are metadata, such as [license], and are not
    read."""
    joined: bool = False
    """Join all records by blank lines, empty ones included, into one document, as papers read
    WikiText."""
    packing: Literal["reap", "chunk", "none"] = "reap"
    """How documents fill rows: reap (cut at the row end, rest dropped), chunk (one stream), none
    (one each)."""
    length: From2 = 2048
    """Tokens in a row."""
    tokens: Positive = 524288
    """Tokens to read, padding and gaps included; tokens / length is the number of rows. Of files of
    your own, the most that is read."""
    batch_tokens: Positive | None = None
    """Most tokens in one forward pass, which reads at least one row; null: 8192 on the CPU, 16384
    on GPUs. It changes speed and memory, and sums only by rounding."""
    order: Literal["random", "first", "rows", "longest"] = "random"
    """Which documents come first: random (without replacement, by seed), first (as in the file),
    rows (as in the file, and rows are drawn from all of the text without replacement, by seed), or
    longest (as in the file, and the rows with the most tokens are taken)."""
    seed: Count | None = None
    """Seed of the document order; null takes the cell's seed."""
    gap: Literal["none", "eos", "zero"] = "none"
    """Separator between packed documents: none, eos, or zero (token id 0, as in the REAP and
    EvoESAP code)."""
    special_tokens: bool = True
    """Let the tokenizer add its special tokens; never applies with a chat template, which has its
    own."""
    parts: Positive | None = None
    """Number of steps among which the rows of a pass are divided, for several processes, GPUs or
    jobs; the sums of these steps are merged. null: one for each GPU if engine=auto streams,
    otherwise 1."""
    engine: Literal["auto", "resident", "streamed"] = "auto"
    """resident (the whole model is loaded), streamed (one decoder layer at a time, for models
    larger than memory), or auto (streamed if one GPU does not hold the model)."""
    is_default: bool = False
    """Whether no text is named; only the shipped models read the default."""

    @property
    def rows(self) -> int:
        """Number of rows of the calibration set."""
        return self.tokens // self.length

    @property
    def batch_rows(self) -> int:
        """Number of rows in one forward pass, at least 1. `batch_tokens` must be resolved."""
        assert self.batch_tokens is not None
        return max(1, self.batch_tokens // self.length)

    @property
    def batches(self) -> int:
        """Number of batches of `batch_rows` rows."""
        return -(-self.rows // self.batch_rows)  # rounded up

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        """Raise ValueError if `tokens` is less than one row (`length`)."""
        if self.tokens < self.length:
            raise ValueError(
                f"tokens={self.tokens} is less than one row of length={self.length}: expected at "
                f"least {self.length}"
            )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        """Raise ValueError if there is neither a path nor a mixture (`sources`), and if both a
        field and a template are set. Raise ValueError for a mixture if its shares do not add up to
        1, or if a setting in DOCUMENT_SETTINGS is set."""
        if self.sources:
            self.check_default(DOCUMENT_SETTINGS, "beside sources, each of which has its own")
            total = math.fsum(source.share for source in self.sources)
            if abs(total - 1) > 1e-6:
                raise ValueError(f"sources: the shares add up to {total:g}: expected 1")
        elif not self.path:
            raise ValueError(
                "path is not set: expected a text file, a JSON lines file, or a hub id; or, for a "
                "mixture, sources=[{calibration: NAME, share: 0.5}, ...]"
            )
        if self.field is not None and self.template is not None:
            raise ValueError(
                f"field={self.field} and template={self.template} are both set: expected one, for "
                "a template names its fields itself"
            )
        return self


ONLY_FOR = {"by": "global", "search": "evolutionary", "path": "list"}
"""Setting of an allocation -> the one allocation that reads it."""


@group
class AllocationConfig(Group):
    """How many experts, or channels, each layer and expert loses."""

    basic = ("path", "protect", "parameters")
    runtime = ("label", "search")
    references = ("name", "path")

    name: str = "uniform"
    """Name in the allocation registry."""
    label: str | None = None
    """Name in tables; null takes `name` and the parameters."""
    multiple_of: Positive = 1
    """The number of retained experts of a layer is a multiple of this, as expert-parallel servers
    need."""
    by: str | None = None
    """Another criterion by which allocation=global compares layers; null: the cell's criterion."""
    search: str | None = None
    """Name of the file in conf/calibration that allocation=evolutionary searches on; it needs
    answers."""
    path: str | None = None
    """The plan or schedule file of allocation=list."""
    replacement: str = "none"
    """What dropped experts become: none (removed with their router rows), mean_output (a constant),
    or a way of merging them into retained experts, such as m_smoe; docs/allocations.md lists
    them."""
    protect: str | None = None
    """Experts that every plan retains with all their channels: super (super experts);
    docs/allocations.md has another form."""
    protect_layers: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.75
    """Share of the decoder layers, from the first on, in which `protect` looks for super experts;
    1 for all."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the allocation and of the replacement."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Raise ValueError for settings that the allocation does not read, and for a missing
        `search`."""
        for name, reader in ONLY_FOR.items():
            if self.name != reader:
                self.check_default([name], f"is for allocation={reader}, not for {self.name}")
        if self.name == "evolutionary" and self.search is None:
            raise ValueError("search is not set: expected the name of a text with answers")
        if self.protect is None:
            self.check_default(["protect_layers"], "is for protect=super, which is not set")
        return self


Module = Literal["experts", "shared_experts", "attention"]
"""Modules that bits=4 can quantise; routers, embeddings and lm_head are never quantised."""
TEXTS = ("instructions", "distill", "fit")
"""Settings that name the text of a recovery."""
OF_ADAPTERS = ("rank", "learning_rate", "router_rank", "dropout")
"""Settings that train=routers does not read."""
OF_FIT = ("name", "bits", "modules", "fit")
"""Settings that a recovery with `fit` reads, which trains nothing."""


@group
class RecoveryConfig(Group):
    """Changes of a pruned model before it is evaluated: fine-tuning or fitting, then quantising."""

    basic = ("bits", "instructions", "distill", "epochs", "rank", "learning_rate")
    runtime = ("name", "bits", "modules", "instructions", "distill", "fit")

    name: Name = "none"
    """Name in tables and file names."""
    bits: Literal[4, 16] = 16
    """16 leaves weights as they are loaded, 4 stores them as NF4 with double quantisation."""
    modules: Annotated[list[Module], Field(min_length=1)] = field(
        default_factory=lambda: ["experts", "shared_experts"]
    )
    """Modules that bits=4 quantises: experts, shared_experts, attention; never routers, embeddings
    or lm_head."""
    instructions: str | None = None
    """Name of the file in conf/calibration whose answers are learnt. At most one of instructions,
    distill and fit can be set."""
    distill: str | None = None
    """Name of the file in conf/calibration, of any text, on which the predictions of the unpruned
    model are learnt."""
    temperature: Above0 = 1.0
    """With distill: the number by which the logits of both models are divided; the loss is
    multiplied by its square."""
    fit: str | None = None
    """Name of the file in conf/calibration, of any text, on which the down projections of merged
    experts are fitted (MergeMoE). Nothing is trained then, and no setting below applies."""
    train: Literal["adapters", "routers"] = "adapters"
    """Weights that are trained: adapters (DoRA on experts and routers) or routers (the routers' own
    weights alone)."""
    epochs: Above0 = 2.0
    """Passes over the text that is trained on."""
    rows_per_step: Positive = 16
    """Rows of the text in one step of the optimiser; batch_tokens of the text limits the rows in
    one forward pass."""
    rank: Positive = 32
    """Rank of the DoRA adapters on the experts."""
    learning_rate: Above0 = 1e-4
    """Peak learning rate of the experts' adapters."""
    router_rank: Count = 4
    """Rank of the DoRA adapters on the routers; 0: routers are not trained."""
    router_learning_rate: Above0 = 1e-6
    """Peak learning rate of the adapters of routers or, with train=routers, of their weights."""
    dropout: Share = 0.05
    """Share of an expert adapter's inputs that are set to 0 while training."""

    @property
    def text_setting(self) -> str | None:
        """Which setting names the text of the recovery: "instructions", "distill" or "fit". None if
        weights are neither trained nor fitted."""
        return next((role for role in TEXTS if getattr(self, role) is not None), None)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that change the trained or fitted weights, and `text_setting`. `bits` and
        `modules` are left out, because weights are quantised after the training or fitting."""
        return {**super().identity, "text": self.text_setting}

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Raise ValueError for several texts, for train=routers without a text, and for settings
        that the recovery does not read."""
        texts = [
            f"{role}={getattr(self, role)}" for role in TEXTS if getattr(self, role) is not None
        ]
        if len(texts) > 1:
            raise ValueError(
                f"{texts[0]} and {texts[1]} are both set: expected one of {', '.join(TEXTS)}"
            )
        if self.fit is not None:
            self.check_default(
                (setting.name for setting in fields(self) if setting.name not in OF_FIT),
                f"is about training, and fit={self.fit} trains nothing",
            )
        if self.distill is None:
            self.check_default(["temperature"], "is for distill=NAME, which is not set")
        if self.train == "routers":
            if not texts:
                raise ValueError("train=routers has no text to train on: expected distill=NAME")
            self.check_default(OF_ADAPTERS, "is about adapters, which train=routers does not have")
        return self


@group
class ExportConfig(Group):
    """The checkpoint that is written of each pruned model."""

    basic = ("shape", "format")
    runtime = ("converter",)

    shape: Shape | None = None
    """natural (what the plan retains), masked or padded, as in docs/export.md; null writes no
    checkpoint."""
    format: Literal["safetensors", "gguf"] = "safetensors"
    """How the tensors are stored: safetensors (as in the original), or gguf (by llama.cpp's
    converter)."""
    converter: str | None = None
    """llama.cpp's convert_hf_to_gguf.py, for format=gguf; null takes the one that `make llama`
    fetches."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        """Raise ValueError for format=gguf without a shape."""
        if self.shape is None and self.format != "safetensors":
            raise ValueError(
                f"format={self.format} without a shape writes nothing: add export=natural"
            )
        return self
