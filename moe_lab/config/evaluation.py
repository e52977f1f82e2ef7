"""Settings of evaluation: benchmarks, suites, protocols, the backend that generates, and the judge that grades."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moe_lab.config.pruning import MISSING


@dataclass
class JudgeConfig:
    """A language model that grades texts, behind an OpenAI-compatible endpoint."""

    runtime = frozenset({"name", "url", "key_variable", "attempts", "unparsable_attempts", "parallel", "timeout"})

    name: str = MISSING
    """Name of the judge."""
    model: str = MISSING
    """The model's name at the endpoint."""
    url: str = MISSING
    """Base address of the endpoint, such as http://localhost:8000/v1."""
    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key; endpoints without keys need none."""
    temperature: float = 0.0
    """Temperature of the judge's replies."""
    max_tokens: int = 2048
    """Most tokens of a reply."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else the endpoint takes in a request, such as reasoning_effort: low."""
    attempts: int = 8
    """How often a request is sent while the endpoint is busy, broken or unreachable."""
    unparsable_attempts: int = 3
    """How often a text is sent while its replies hold no score."""
    parallel: int = 8
    """Requests under way at the same time."""
    timeout: float = 120.0
    """Seconds to wait for one reply."""


@dataclass
class BackendConfig:
    """What generates the texts of benchmarks."""

    runtime = frozenset({"ready_seconds", "python"})

    name: str = "hf"
    """hf (the loaded model), vllm (an engine of vLLM that masks what plans drop; it also gives likelihoods), or server
    (an exported checkpoint behind a server that is started and stopped)."""
    command: str | None = None
    """Command line that starts the server, with {checkpoint}, {port} and {name}."""
    ready_seconds: float = 1800.0
    """Seconds the server, or vLLM, may take until it answers."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """With name=vllm: arguments of vllm.LLM, such as gpu_memory_utilization: 0.8 or tensor_parallel_size: 2."""
    python: str | None = None
    """Set by interpreters.vllm."""


@dataclass
class BenchmarkConfig:
    """One run of one harness; it may report several results (HumanEval and HumanEval+ share their programs)."""

    runtime = frozenset({"name", "root", "python", "executes_code"})

    name: str = MISSING
    """Name of this run in file names."""
    harness: str = MISSING
    """The program that asks and grades: lm_eval, evalplus, evalscope, wildbench, function_calls, stories or
    perplexity."""
    task: str = MISSING
    """The harness's task: its own name for it, a task file, a data file, or `pocket:benchmarks/FILE`."""
    data: str | None = None
    """Data set on the hub, such as allenai/ai2_arc; it is read from its mirror under data_root."""
    revision: str | None = None
    """Commit of the data set that is mirrored; null: the newest."""
    url: str | None = None
    """Address of the file that is mirrored, for data that is not on the hub."""
    subset: str | None = None
    """Configuration of the data set, such as ARC-Challenge."""
    split: str | None = None
    """Split of the data set that is evaluated."""
    reports: dict[str, str] = field(default_factory=dict)
    """Result name -> the harness's metric, such as arc_challenge: acc_norm."""
    expected: int | None = None
    """Number of items the benchmark has; another number is an error unless `limit` is set."""
    shots: int = 0
    """Solved examples in front of each question."""
    chat: bool = False
    """Ask through the model's chat template."""
    max_new_tokens: int = 0
    """Generation limit; 0 for benchmarks that generate nothing."""
    max_length: int | None = None
    """Most tokens of prompt and answer together; null takes the model's limit."""
    batch_size: int = 64
    """Sequences in one forward pass."""
    executes_code: bool = False
    """Whether grading runs what the model wrote; needs allow_code_execution=true."""
    limit: int | None = None
    """Only the first N items; suite.limit sets it for all benchmarks of the suite."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Further parameters of the harness."""
    root: str | None = None
    """Set by data_root."""
    judge: JudgeConfig | None = None
    """Set by the group judge if the harness uses a judge."""
    python: str | None = None
    """Set by interpreters.HARNESS."""

    def __post_init__(self) -> None:
        if isinstance(self.judge, dict):  # from the JSON of a job
            self.judge = JudgeConfig(**self.judge)


@dataclass
class SuiteConfig:
    """A list of benchmarks."""

    name: str = MISSING
    """Name of the suite."""
    benchmarks: list[str] = field(default_factory=list)
    """Names of files in conf/benchmark."""
    path: str | None = None
    """The text file of suite=perplexity, or the folder of suite=bfcl."""
    limit: int | None = None
    """Evaluate only the first N items of each benchmark; the report says so."""


@dataclass
class ProtocolConfig:
    """How a paper asks its benchmarks, where that differs from the benchmarks' files."""

    name: str = MISSING
    """Name of the protocol."""
    benchmarks: dict[str, Any] = field(default_factory=dict)
    """Benchmark -> the fields that differ; `every` holds for all that have `data`."""
