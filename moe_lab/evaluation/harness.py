"""Properties of benchmark harnesses, known without importing them; their items, answers and
results. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import Tools
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.paths import resolve
from moe_lab.results import Result, Sample, Scale


@dataclass(frozen=True)
class Harness:
    """Properties of a harness."""

    package: str | None = None
    """Package that grades, if it is not moe_lab itself and is installed in this interpreter."""
    metrics: tuple[str, ...] | None = None
    """Metrics it can report; None: those that the task defines."""
    question_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters that change the model's input."""
    grading_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters that change only how answers are graded."""
    two_phases: bool = False
    """Texts are graded without the model, so that generating and grading are separate steps."""
    scores: bool = False
    """It may compute likelihoods alone, so that max_new_tokens may be 0."""
    continues_text: bool = False
    """The model continues a text, so a chat template cannot be used."""
    shows_examples: bool = False
    """It can put solved examples before a question."""
    judged: bool = False
    """A judge scores the answers."""
    gives_tools: bool = False
    """Its questions come with tools, which the chat template must read."""
    reads_path: bool = False
    """suite.path names its data: the folder of the benchmark's task, or the file of one without a
    task."""
    lists_items: bool = True
    """Its items are listed in this interpreter."""


_LIMITS = ("seconds", "memory_mib", "processes")
HARNESSES: Mapping[str, Harness] = {
    "lm_eval": Harness(
        package="lm-eval",
        question_parameters=("folder", "definition"),
        scores=True,
        shows_examples=True,
    ),
    "evalplus": Harness(
        package="evalplus", metrics=("base", "plus"), grading_parameters=_LIMITS, two_phases=True
    ),
    "evalscope": Harness(  # in an interpreter of its own
        metrics=("acc",),
        question_parameters=("start_date", "end_date"),
        grading_parameters=_LIMITS,
        two_phases=True,
        shows_examples=True,
        lists_items=False,
    ),
    "wildbench": Harness(
        metrics=("score",),
        question_parameters=("tag",),
        grading_parameters=("template",),
        two_phases=True,
        judged=True,
    ),
    "function_calls": Harness(
        metrics=("acc",),
        question_parameters=("answers",),
        two_phases=True,
        gives_tools=True,
        reads_path=True,
    ),
    "stories": Harness(metrics=("score",), continues_text=True),
    "perplexity": Harness(
        metrics=("perplexity", "bits_per_byte", "loss"),
        question_parameters=("length",),
        scores=True,
        continues_text=True,
        reads_path=True,
    ),
}
"""Harnesses by name, which is also the name of their module in `harnesses/`. Each module has

    items(benchmark) -> list[Item]                       what is asked; the same in every process
    grade(answers, benchmark, policy) -> Graded          without a model

and imports no torch.
"""


# What is asked, and what a model says.


Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""


@dataclass(frozen=True)
class Text:
    """A text to be written."""

    prompt: str | Messages
    """Text to continue, or a conversation for the model's chat template."""
    most: int
    """Largest number of tokens of the text."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends; they are cut off. Only the answer is searched for them: no
    prompt, no thought."""
    reference: str | None = None
    """A right answer, with exactly the text that follows the prompt."""
    tools: Tools = ()
    """Functions that the model may call in a conversation."""
    skip_long: bool = False
    """Write nothing after a prompt that leaves too little room; otherwise it is an error."""


@dataclass(frozen=True)
class Pair:
    """How likely is the continuation after the context?"""

    context: str | Messages
    continuation: str


@dataclass(frozen=True)
class Document:
    """How likely is a whole text, window by window?

    By default windows do not overlap, and the first token of each is not predicted. `from_nothing`
    predicts every token, each but the first after another one, as lm-eval does.
    """

    text: str
    length: int | None = None
    """Tokens of a window; None for 2048, or what the model can read."""
    from_nothing: bool = False
    windows: int | None = None
    """Only so many windows."""


@dataclass(frozen=True)
class Item:
    """One item of a benchmark."""

    name: str
    """Unique in its benchmark."""
    requests: tuple[Text | Pair | Document, ...]


@dataclass(frozen=True)
class Window:
    """The likelihood of a part of a text."""

    nats: float
    """Summed log-likelihood of its tokens."""
    tokens: int
    """Number of these tokens."""
    likeliest: bool
    """Whether each of them was the likeliest."""


@dataclass(frozen=True)
class Reply:
    """What the model said to one request."""

    text: str | None = ""
    """The answer that it wrote, without the thought before it; None where the thought does not
    end."""
    thought: str = ""
    """What it wrote before the answer."""
    ended: str | None = None
    """Why a text ended: end (an end token), stop (a stop text), limit (too many tokens), or
    too_long: nothing was written, because prompt and limit together are too long. None where
    nothing was to be written. A server does not tell the first two apart."""
    loss: float | None = None
    """Loss on the reference, in bits per byte."""
    windows: tuple[Window, ...] = ()
    """Likelihood of a Pair's continuation, or of each window of a Document."""
    tokens: int = 0
    """Number of tokens of a Document."""

    @property
    def nats(self) -> float:
        """Summed log-likelihood of all windows."""
        return sum(window.nats for window in self.windows)


@dataclass(frozen=True)
class Answer:
    """A model's answer to an item."""

    item: str
    prompt: str
    """The prompt of the first request as the model read it."""
    replies: tuple[Reply, ...]
    """One for each request of the item."""
    replicate: int = 0
    """Number of this answer among several to the same item."""

    @property
    def reply(self) -> Reply:
        """The reply to the first request, which is the only one where texts are written."""
        return self.replies[0]

    def sample(
        self, result: str, outcome: float, extracted: str, output: str | None = None
    ) -> Sample:
        """The row of samples.parquet for this answer and a result. `output` stands for an answer
        that is no text."""
        return Sample(
            benchmark=result,
            item=self.item,
            replicate=self.replicate,
            outcome=outcome,
            prompt_hash=hashlib.sha256(self.prompt.encode("utf-8", "surrogatepass")).hexdigest()[
                :16
            ],
            thought=self.reply.thought,
            output=self.reply.text if output is None else output,
            ended=self.reply.ended,
            extracted=extracted,
            answer_loss=self.reply.loss,
        )


def replace_surrogates(text: str) -> str:
    """Replace what cannot be written as UTF-8: a model, or its server, may send half of a surrogate
    pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def write_answers(answers: Sequence[Answer], file: Path) -> None:
    """Write one JSON line per answer."""
    file.write_text(
        "".join(json.dumps(asdict(answer)) + "\n" for answer in answers), encoding="utf-8"
    )


def read_answers(content: bytes) -> list[Answer]:
    """The answers in the content of a file that `write_answers` wrote."""
    answers = []
    for line in content.splitlines():
        row = json.loads(line)
        windows = [
            tuple(Window(**window) for window in reply["windows"]) for reply in row["replies"]
        ]
        replies = [
            Reply(**{**reply, "windows": own})
            for reply, own in zip(row["replies"], windows, strict=True)
        ]
        answers.append(Answer(**{**row, "replies": tuple(replies)}))
    return answers


# Results.


@dataclass(frozen=True)
class Graded:
    """Results of one benchmark on one model."""

    results: list[Result]
    """One result per entry of the benchmark's reports."""
    samples: list[Sample]
    """One sample per item and result."""
    protocol: dict[str, Any] = field(default_factory=dict)
    """Settings of the harness, as JSON."""
    tolerated: int = 0
    """Number of items that may lack an outcome; the protocol names them."""


def data_files(benchmark: BenchmarkConfig) -> list[Path]:
    """The files of a benchmark without a mirror; the last one has the items. Raises UserError
    naming a missing file.

    A task of lm-eval's format is a file beside its items, or the benchmark's own
    parameters.definition.
    """
    if not benchmark.task:
        raise UserError(
            f"benchmark {benchmark.name} has no data: name its file, such as suite.path=FILE"
        )
    task = Path(resolve(benchmark.task)).expanduser().absolute()
    is_defined = benchmark.harness != "lm_eval" or "definition" in benchmark.parameters
    files = [task] if is_defined else [task, task.with_suffix(".jsonl")]
    if answers := benchmark.parameters.get("answers"):
        files.insert(0, task.parent / str(answers))
    for file in files:
        if not file.is_file():
            hint = (
                ": name its folder by suite.path=FOLDER"
                if HARNESSES[benchmark.harness].gives_tools
                else ""
            )
            raise UserError(
                f"benchmark {benchmark.name} needs {file}, and there is no such file{hint}"
            )
    return files


def check_count(benchmark: BenchmarkConfig, count: int) -> None:
    """Raise UserError unless `count`, the items in the benchmark's data, is the expected number."""
    if benchmark.expected is not None and count != benchmark.expected:
        raise UserError(
            f"benchmark {benchmark.name} has {count} items and should have {benchmark.expected}: "
            "its data is not the "
            f"published set, or expected is wrong"
        )


def mean_result(
    name: str,
    metric: str,
    samples: Sequence[Sample],
    benchmark: BenchmarkConfig,
    scale: Scale = "score",
) -> Result:
    """The mean outcome of the samples of one result, with its standard error s / sqrt(n)."""
    outcomes = [sample["outcome"] for sample in samples if sample["benchmark"] == name]
    n = len(outcomes)
    mean = math.fsum(outcomes) / n
    spread = math.fsum((outcome - mean) ** 2 for outcome in outcomes)
    stderr = math.sqrt(spread / (n - 1) / n) if n > 1 else None
    return Result(
        benchmark=name,
        metric=metric,
        score=mean,
        scale=scale,
        unit="",
        stderr=stderr,
        n=n,
        expected=benchmark.expected,
    )


def graded_by_mean(
    answers: Sequence[Answer],
    benchmark: BenchmarkConfig,
    verdict: Callable[[Answer, str], tuple[float, str]],
    protocol: dict[str, Any] | None = None,
    tolerated: int = 0,
) -> Graded:
    """Results that are mean outcomes; `verdict` gives an answer's outcome for a metric, and a text
    about it."""
    reports = benchmark.reports.items()
    samples = [
        answer.sample(name, *verdict(answer, metric))
        for name, metric in reports
        for answer in answers
    ]
    results = [mean_result(name, metric, samples, benchmark) for name, metric in reports]
    return Graded(results, samples, protocol or {}, tolerated)


def loss_result(
    name: str,
    metric: str,
    scale: Scale,
    unit: str,
    losses: Sequence[float],
    weights: Sequence[float],
    benchmark: BenchmarkConfig,
) -> Result:
    """The mean loss or its perplexity exp(mean), with the standard error of the loss over items
    times the slope.

    `losses` of the items are in `unit`, `weights` are their numbers of tokens, words or bytes.
    """
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    mean = math.fsum(share * loss for share, loss in zip(shares, losses, strict=True))
    spread = math.fsum(
        (share * (loss - mean)) ** 2 for share, loss in zip(shares, losses, strict=True)
    )
    slope = math.exp(mean) if scale == "perplexity" else 1.0
    return Result(
        benchmark=name,
        metric=metric,
        score=slope if scale == "perplexity" else mean,
        scale=scale,
        unit=unit,
        stderr=math.sqrt(spread) * slope if len(losses) > 1 else None,
        n=len(losses),
        expected=benchmark.expected,
    )


@cache
def installed(package: str) -> str | None:
    """The version of `package`, None if it is not installed. Cached, because reading metadata takes
    milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_ROOT = Path(__file__).resolve().parents[2]


def interpreter(module: str, named: str | None, user: str) -> str:
    """The Python that has `module`: interpreters.MODULE (`named`), or that of `make MODULE`, or
    this one.

    Raises UserError, for the `user` that needs it, when there is none.
    """
    if named is not None:
        python = Path(named).expanduser()
        if not python.is_file():
            raise UserError(
                f"interpreters.{module}={named}, and there is no such file: run make {module}"
            )
        return str(python.absolute())
    # The folder that a link names: torch compiles nothing below a path with a space, which vLLM
    # needs.
    own = (_ROOT / f".venv-{module}").resolve() / "bin" / "python"
    if own.is_file():
        return str(own)
    if find_spec(module) is not None:
        return sys.executable
    raise UserError(
        f"{user} needs {module}, which is not here: run make {module}, or name an interpreter "
        "that has it, "
        f"interpreters.{module}=PYTHON"
    )


@lru_cache(maxsize=8)
def installed_in(python: str, package: str) -> str | None:
    """The version of `package` in another interpreter; None if it or the interpreter is not
    there."""
    return (
        _printed(python, f"from importlib.metadata import version; print(version({package!r}))")
        or None
    )


def check_has(module: str, python: str) -> None:
    """Raise UserError when the interpreter lacks `module`, or there is none in that file."""
    # a module, not a package: builds of vLLM have several names
    if not _printed(
        python, f"from importlib.util import find_spec; print(find_spec({module!r}) or '')"
    ):
        raise UserError(
            f"interpreters.{module}={python} has no {module}: run make {module}, or name another"
        )


def _printed(python: str, program: str) -> str:
    """What a program prints in another interpreter; "" if it fails, or there is no such
    interpreter."""
    try:
        return subprocess.run(
            [python, "-I", "-c", program], capture_output=True, text=True, env={}
        ).stdout.strip()
    except OSError:
        return ""
