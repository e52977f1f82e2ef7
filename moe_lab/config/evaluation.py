"""Settings of evaluation: benchmarks, suites, protocols, the backend that generates completions,
and the judge that grades them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, Self

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
from moe_lab.config.pruning import CalibrationConfig
from moe_lab.errors import UnknownName, UserError
from moe_lab.json_files import fits

RESERVED_ARGUMENTS = (
    "model",
    "dtype",
    "trust_remote_code",
    "worker_extension_cls",
    "generation_config",
    "skip_tokenizer_init",
)
"""Arguments of vllm.LLM that backend.arguments must not have."""
PLACEMENT = (
    "cpu_offload_gb",
    "data_parallel_size",
    "disable_log_stats",
    "gpu_memory_utilization",
    "max_parallel_loading_workers",
    "pipeline_parallel_size",
    "swap_space",
    "tensor_parallel_size",
)
"""Arguments of vllm.LLM that place a model on devices and limit its memory; they change no
result."""


@group
class JudgeConfig(Group):
    """A language model that grades texts, behind an OpenAI-compatible endpoint."""

    basic = ("model", "url", "key_variable")
    runtime = ("url", "key_variable")

    model: Text
    """The model's name at the endpoint."""
    url: Annotated[
        str,
        matching(
            r"(?i)https?://[^/?#:@\s].*", "expected an address such as http://localhost:8000/v1"
        ),
    ]
    """Base address of the endpoint, such as http://localhost:8000/v1."""
    key_variable: Annotated[
        str,
        matching(
            r"[A-Za-z_]\w*", "expected the name of an environment variable, such as OPENAI_API_KEY"
        ),
    ] = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key; endpoints without keys need none."""
    max_tokens: Positive = 2048
    """Largest number of tokens of a reply."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other fields of a request to the endpoint, such as reasoning_effort: low; the temperature is
    0 unless it is set here. The value null removes a field: OpenAI's reasoning models need
    {temperature: null, max_tokens: null, max_completion_tokens: 4096}."""

    @model_validator(mode="after")
    def _check_extra(self) -> Self:
        """Raise ValueError if `extra` has a field of the request that moe_lab sets itself."""
        for name, value in self.extra.items():
            removes_limit = name == "max_tokens" and value is None
            if name in ("model", "messages", "max_tokens", "stream") and not removes_limit:
                raise ValueError(
                    f"extra.{name} is set by moe_lab: expected other fields of a request"
                )
        return self


@group
class BackendConfig(Group):
    """The engine that generates the completions of benchmarks."""

    basic = ("command", "arguments")
    internal = ("python",)
    runtime = ("ready_seconds", "python")

    name: Literal["hf", "server", "vllm"] = "hf"
    """Engine that generates texts: hf (the loaded model), vllm (an engine of vLLM, which also gives
    likelihoods), or server (a server that is started for an exported checkpoint)."""
    command: str | None = None
    """Command line that starts the server, with {checkpoint}, {port} and {name}."""
    ready_seconds: Above0 = 1800.0
    """Largest number of seconds until the server, or vLLM, answers."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """With name=vllm: arguments of vllm.LLM, such as gpu_memory_utilization: 0.8 or
    tensor_parallel_size: 2."""
    python: str | None = None
    """Set by interpreters.vllm."""

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that change a completion."""
        if self.name == "server":
            return {"name": self.name, "command": self.command}
        if self.name == "vllm":
            arguments = {
                name: value for name, value in self.arguments.items() if name not in PLACEMENT
            }
            return {"name": self.name, "arguments": arguments}
        return {"name": self.name}

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        """Raise ValueError for arguments of a backend other than vllm, for arguments that moe_lab
        sets, and for wrong parallel sizes."""
        if self.name != "vllm":
            self.check_default(["arguments"], f"is for backend=vllm, not for {self.name}")
        for name, value in self.arguments.items():
            if name in RESERVED_ARGUMENTS:
                raise ValueError(
                    f"arguments.{name} is set by moe_lab: expected other arguments of vllm.LLM"
                )
            if name.endswith("parallel_size") and not (fits(value, int) and value > 0):
                raise ValueError(f"arguments.{name}={value} must be a whole number of GPUs")
        return self


HARNESSES = Path(__file__).parents[1] / "evaluation" / "harnesses"
"""The folder of the harnesses, each a module."""


def _validate_harness(name: str) -> str:
    """Return `name`. UnknownName unless it is the name of a module in the folder HARNESSES."""
    names = [module.name for module in iter_modules([str(HARNESSES)])]
    if name not in names:
        raise UnknownName(names)
    return name


GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Name of a field of `Sampling` -> its value in greedy generation."""


@group
class Sampling(Group):
    """How texts are generated. A field that is null is that of the model's generation_config.json
    if the model thinks and the benchmark uses its chat template. Otherwise generation is greedy."""

    temperature: Annotated[float, Strict(), Field(ge=0, le=2)] | None = None
    """Temperature, at most 2; 0 is greedy generation."""
    top_p: Annotated[float, Strict(), Field(gt=0, le=1)] | None = None
    """Smallest total probability of the tokens from which one is drawn."""
    top_k: Count | None = None
    """Number of likeliest tokens from which one is drawn; 0: all."""
    min_p: Share | None = None
    """Least probability of a token that is drawn, as a share of that of the likeliest token."""
    seed: Count = 0
    """Seed of the random numbers. Those of a text depend on the seed, the item and the number of
    the answer."""
    samples: Positive = 1
    """Answers to each item for which a text is generated."""

    @property
    def distribution(self) -> dict[str, Any]:
        """The settings of the distribution from which tokens are drawn."""
        return {name: getattr(self, name) for name in GREEDY}

    def resolved(self, defaults: Mapping[str, Any]) -> Sampling:
        """The settings without nulls. `defaults`: those of a model; if there are none, generation
        is greedy unless `temperature` is set. UserError for several equal answers."""
        own = {name: value for name, value in self.distribution.items() if value is not None}
        values = {**GREEDY, **defaults, **own}
        if self.samples > 1 and not values["temperature"]:
            raise UserError(
                f"sampling.samples={self.samples}, but generation is greedy, so that all answers "
                "would be the same: expected sampling.temperature above 0, as the model has no "
                "sampling settings or does not think"
            )
        return replace(self, **values)


@group
class BenchmarkConfig(Group):
    """One run of one harness; it may report several results (HumanEval and HumanEval+ share their
    programs)."""

    internal = ("limit", "root", "judge", "python", "held_out", "shared_batches")
    runtime = (
        "name",
        "revision",
        "url",
        "root",
        "python",
        "held_out",
        "shared_batches",
        "shareable",
    )
    references = ("task", "data")

    name: Name
    """Name of the benchmark in file names."""
    harness: Annotated[str, AfterValidator(_validate_harness)]
    """The program that makes the prompts and grades the answers: a module of
    moe_lab/evaluation/harnesses, such as lm_eval or perplexity."""
    task: str
    """The task: a name that the harness knows, a task file, a data file, or
    `pocket:benchmarks/FILE`."""
    data: str | None = None
    """Data set on the hub, such as allenai/ai2_arc; it is read from its mirror under data_root."""
    revision: str | None = None
    """Commit of the data set that is mirrored; null takes the newest."""
    url: str | None = None
    """Address of the file that is mirrored, for data that is not on the hub."""
    subset: str | None = None
    """Configuration of the data set, such as ARC-Challenge."""
    split: str | None = None
    """Split of the data set that is evaluated."""
    reports: dict[str, str] = field(default_factory=dict)
    """Result name -> the harness's metric, such as arc_challenge: acc_norm."""
    expected: Positive | None = None
    """Number of items the benchmark has; any other number is an error unless `limit` is set."""
    shots: Count = 0
    """Solved examples in front of each question."""
    chat: bool = False
    """Whether the model's chat template formats the prompts."""
    system_prompt: str | None = None
    """System message of every chat, in place of that of the benchmark."""
    max_new_tokens: Count = 0
    """Generation limit; 0 for benchmarks that generate nothing."""
    thinking_tokens: Count = 8192
    """Tokens that a model which thinks may write in a chat before an answer of max_new_tokens; 0:
    both share max_new_tokens."""
    sampling: Sampling = field(default_factory=Sampling)
    """How texts are generated."""
    max_length: From2 | None = None
    """Largest number of tokens of prompt and answer together; null: the model's limit."""
    batch_size: Positive = 64
    """Sequences in one forward pass."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Further parameters of the harness."""
    shareable: bool = True
    """Whether prompts, right answers and outputs may be shown outside of the store. Scores and
    outcomes always may."""
    limit: Positive | None = None
    """Only the first N items; set by suite.limit."""
    root: str | None = None
    """Set by data_root."""
    judge: JudgeConfig | None = None
    """Set by the group judge if the harness uses a judge."""
    python: str | None = None
    """Set by interpreters.HARNESS."""
    held_out: CalibrationConfig | None = None
    """Set by calibration if the benchmark is a text and names none: a part of this set is read."""
    shared_batches: str | None = None
    """Set by suite.shared_batches: name of the group with which the benchmark shares batches."""

    @property
    def compares_logits(self) -> bool:
        """Whether logits are compared with those of the unpruned model."""
        return not {"kl", "disagreement"}.isdisjoint(self.reports.values())

    @property
    def longest_text(self) -> int:
        """Largest number of generated tokens of a thinking model."""
        is_thought = self.chat and self.max_new_tokens > 0
        return self.max_new_tokens + (self.thinking_tokens if is_thought else 0)


@group
class SharedBatches(Group):
    """Benchmarks whose texts are generated in the same batches, which saves forward passes."""

    benchmarks: list[str]
    """Names of benchmarks that generate texts; those that are not in the suite are ignored."""
    batch_size: Positive
    """Sequences in one forward pass, in place of each benchmark's batch_size."""


@group
class SuiteConfig(Group):
    """A list of benchmarks."""

    basic = ("benchmarks", "path", "limit")

    benchmarks: list[str] | None = None
    """Names of files in conf/benchmark; null: those of suite=pocket_no_code for shipped models,
    none for other models."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """The text file of suite=perplexity, or the folder of suite=bfcl."""
    limit: Positive | None = None
    """Evaluate only the first N items of each benchmark; the report names the limit."""
    shared_batches: dict[str, SharedBatches] = field(default_factory=dict)
    """Name of a group -> benchmarks that share batches."""

    @model_validator(mode="after")
    def _check_shared_batches(self) -> Self:
        """Raise ValueError for a benchmark in two groups."""
        names = [name for group in self.shared_batches.values() for name in group.benchmarks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"shared_batches has {name} twice: expected each benchmark once")
        return self


@group
class ProtocolConfig(Group):
    """The evaluation settings of a paper that differ from the benchmarks' files."""

    name: Name = "unified"
    """Name of the protocol."""
    benchmarks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Benchmark -> the fields that differ; `every` applies to all benchmarks with `data`."""
    sampling: Sampling = field(default_factory=Sampling)
    """How texts are generated for benchmarks whose `sampling` is not set."""
    thinking_tokens: Count = BenchmarkConfig.thinking_tokens
    """The `thinking_tokens` of benchmarks that do not set it."""
