"""The base class of harnesses: items, grading, checks, identity and requirements. Also the identity
of the benchmarks of a study.

Imports neither torch nor the package of a harness.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import fmean, mode
from types import MappingProxyType
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.config.base import as_typed
from moe_lab.errors import UserError, check_known, user_errors
from moe_lab.evaluation import Policy
from moe_lab.evaluation.items import Answer, Item
from moe_lab.machine import package_version
from moe_lab.paths import local_path
from moe_lab.result_files import Result, Sample, Scale

Fields = dict[str, Any]
"""Name -> value, as JSON."""
_OF_ANSWERS = re.compile(r"(?:(\w+)_)?(pass|maj|avg)@([1-9]\d*)(,.*)?")
"""Name of a metric for several answers to an item. A filter of lm-eval may follow."""


def harness_of(benchmark: BenchmarkConfig) -> Harness:
    """The harness with the name benchmark.harness."""
    module = importlib.import_module(f"moe_lab.evaluation.harnesses.{benchmark.harness}")
    harness: Harness = module.HARNESS
    return harness


@dataclass(frozen=True)
class Graded:
    """Results of one benchmark on one model."""

    results: list[Result]
    """One result per entry of the benchmark's reports."""
    samples: list[Sample]
    """One sample per item and result."""
    protocol: Fields = field(default_factory=dict)
    """Settings of the harness, as JSON."""
    max_unscored: int = 0
    """Number of items that may have no outcome."""


class Harness(ABC):
    """Asks the questions of benchmarks and grades the answers."""

    package: str | None = None
    """Package that the harness needs in this interpreter."""
    metrics: tuple[str, ...] | None = None
    """Metrics that the harness can report; None: those that the task defines."""
    question_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters that change the model's input."""
    grading_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters that change only how answers are graded."""
    other_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters that change no result, or that name a file whose content counts
    instead of its name."""
    numeric_parameters: Mapping[str, float] = MappingProxyType({})
    """Keys of benchmark.parameters whose values are numbers -> the smallest value. Values are whole
    numbers if it is an int."""
    boolean_parameters: tuple[str, ...] = ()
    """Keys of benchmark.parameters whose values are true or false."""
    data: bool | None = None
    """Whether benchmark.data must be set, so that a mirror is read (True), or must not be set, so
    that the files of suite.path or task are read (False); None: both are supported."""
    chat: bool | None = None
    """As `data`, for benchmark.chat."""
    max_new_tokens: bool | None = True
    """As `data`, for benchmark.max_new_tokens."""
    shots: bool | None = False
    """As `data`, for benchmark.shots."""
    judged = False
    """Whether a judge scores the answers."""
    votes = False
    """Whether "extracted" of a sample is an answer, of which maj@K takes the most frequent."""
    gives_tools = False
    """Whether questions come with tools, which the chat template must read."""
    reads_path = False
    """Whether suite.path names the data: the folder that has the file benchmark.task or, without a
    task, the file itself."""
    counts_items = True
    """Whether benchmark.expected is the number of items. False for a text, which is one item with
    many windows."""

    @abstractmethod
    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield the items of a benchmark; the same in every process."""

    @abstractmethod
    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """The results of the answers, of which an item may have several, computed without a model.
        `policy`: what grading may run and send."""

    # Data and identity.

    def version(self, benchmark: BenchmarkConfig) -> str | None:
        """Version of the harness's package; None without an installed package."""
        return package_version(self.package) if self.package else None

    def paths(self, benchmark: BenchmarkConfig) -> list[Path]:
        """Paths of the data files of a benchmark without a mirror, the file of the items last."""
        return [local_path(benchmark.task).absolute()]

    def data_files(self, benchmark: BenchmarkConfig) -> list[Path]:
        """The `paths` of a benchmark without a mirror. UserError if a file does not exist or
        benchmark.task is not set."""
        if not benchmark.task:
            raise UserError(
                f"benchmark {benchmark.name} has no data: name its file, such as suite.path=FILE"
            )
        paths = self.paths(benchmark)
        for path in paths:
            if not path.is_file():
                # the data of a harness with tools are several files in one folder
                hint = ": name its folder by suite.path=FOLDER" if self.gives_tools else ""
                raise UserError(
                    f"benchmark {benchmark.name} needs {path}, and there is no such file{hint}"
                )
        return paths

    def data_digest(self, benchmark: BenchmarkConfig) -> str:
        """sha256 over the data of a benchmark. If its mirror does not exist, a text with the name
        of the data. Costs can then be estimated before the mirror is made."""
        if benchmark.data is not None:
            from moe_lab.evaluation import mirror

            try:
                return mirror.digest(benchmark)
            except UserError:  # `missing_requirements` reports the error
                return f"no mirror of {benchmark.data}"
        digest = hashlib.sha256()
        for file in self.data_files(benchmark):
            content = file.read_bytes()
            digest.update(f"{len(content)}\n".encode() + content)
        return digest.hexdigest()

    def item_identity(self, benchmark: BenchmarkConfig) -> Fields:
        """All settings that determine the items: name -> value."""
        # without a mirror, `data_digest` covers the file that benchmark.task names
        mirror_settings = ("task", "subset", "split") if benchmark.data is not None else ()
        names = (*mirror_settings, "shots", "chat", "max_new_tokens", "limit")
        return {
            "harness": benchmark.harness,
            "version": self.version(benchmark),
            "data": self.data_digest(benchmark),
            **{name: getattr(benchmark, name) for name in names},
            "parameters": _parameters(benchmark, self.question_parameters),
        }

    def question_identity(self, benchmark: BenchmarkConfig) -> Fields:
        """All settings that can change an answer: name -> value. The batch size can change answers,
        because it changes how sums are rounded."""
        identity = {
            **self.item_identity(benchmark),
            "max_length": benchmark.max_length,
            "batch_size": benchmark.batch_size,
        }
        sampling = benchmark.sampling
        may_sample = benchmark.chat if sampling.temperature is None else sampling.temperature > 0
        if benchmark.max_new_tokens and may_sample:  # not if generation is greedy for every model
            identity["sampling"] = sampling.identity
        if benchmark.longest_text > benchmark.max_new_tokens:
            identity["thinking_tokens"] = benchmark.thinking_tokens
        if benchmark.system_prompt:
            identity["system_prompt"] = benchmark.system_prompt
        return identity

    def identity(self, benchmark: BenchmarkConfig) -> Fields:
        """All settings that can change a result: name -> value."""
        keys = self.question_parameters + self.grading_parameters
        judge = {"judge": benchmark.judge.identity} if benchmark.judge else {}
        return {
            **self.question_identity(benchmark),
            "reports": dict(benchmark.reports),
            "expected": benchmark.expected,
            "parameters": _parameters(benchmark, keys),
            **judge,
        }

    # Checks.

    def setting_errors(self, benchmark: BenchmarkConfig) -> Iterator[str]:
        """Yield a sentence for each setting or file of the benchmark that is wrong on every
        machine."""
        # a harness that reads only mirrors has no files to check
        if benchmark.data is None and not self.data:
            yield from user_errors(self.check_data, benchmark)
        name = f"benchmark {benchmark.name}"
        yield from (f"{name}: {problem}" for problem in self._wrong_settings(benchmark))
        for metric in benchmark.reports.values():
            single, estimate, count = parsed_metric(metric)
            if self.metrics is not None and single:
                yield from user_errors(check_known, f"{name}: metric", single, self.metrics)
            elif not single.partition(",")[0] and self.metrics is None:
                yield f"{name}: metric={metric}: expected the metric of an answer and _{metric}"
            if count > (benchmark.sampling.samples if benchmark.max_new_tokens else 1):
                yield (
                    f"{name}: metric={metric} needs {count} answers to an item: expected "
                    f"max_new_tokens, and sampling.samples={count} or more"
                )
            if estimate == "maj" and (not self.votes or self.runs_programs(benchmark)):
                yield (
                    f"{name}: metric={metric}: expected pass@{count} or avg@{count}, as only short "
                    "answers cast votes"
                )
        keys = self.question_parameters + self.grading_parameters + self.other_parameters
        for key, value in benchmark.parameters.items():
            yield from user_errors(check_known, f"{name}: parameter", key, keys)
            least = self.numeric_parameters.get(key)
            # `type` instead of `isinstance`: true is an int
            if least is not None and not (type(value) in (int, type(least)) and value >= least):
                number = "a whole number" if type(least) is int else "a number"
                yield f"{name}: parameters.{key}={value}: expected {number}, {least} or more"
            if key in self.boolean_parameters and not isinstance(value, bool):
                yield f"{name}: parameters.{key}={value}: expected true or false"

    def _wrong_settings(self, benchmark: BenchmarkConfig) -> Iterator[str]:
        """Yield a sentence, without the benchmark's name, for each setting that the harness does
        not support."""
        if not benchmark.reports:
            yield "reports is empty: expected result name -> metric"
        for name in ("data", "chat", "max_new_tokens", "shots"):
            value = getattr(benchmark, name)
            must_be_set = getattr(self, name)
            if must_be_set not in (None, bool(value)):
                verb = "needs" if must_be_set else "has no"
                yield f"{name}={as_typed(value)}: {benchmark.harness} {verb} {name}"
        if benchmark.system_prompt and not benchmark.chat:
            yield "system_prompt is set and chat=false: expected chat=true, or no system prompt"

    def check_data(self, benchmark: BenchmarkConfig) -> None:
        """Check the files of a benchmark without a mirror. UserError if a file is missing, or if a
        .jsonl file of items does not have benchmark.expected items."""
        *_, items_file = self.data_files(benchmark)
        if items_file.suffix == ".jsonl":
            lines = items_file.read_bytes().splitlines()
            check_count(benchmark, sum(1 for line in lines if line.strip()))

    def missing_requirements(self, benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
        """Yield a sentence for each package, mirror, permission, judge or sandbox that is missing
        on this machine."""
        if self.package and package_version(self.package) is None:
            yield (
                f"benchmark {benchmark.name} needs the package {self.package}: pip install "
                f"{self.package}"
            )
            return
        if benchmark.data is not None:
            from moe_lab.evaluation import mirror

            yield from user_errors(mirror.check, benchmark)
        if self.runs_programs(benchmark):
            yield from user_errors(policy.program_sandbox)
        yield from self.further_requirements(benchmark, policy)

    def further_requirements(self, benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
        """Yield a sentence for each other requirement of the harness that is missing on this
        machine. Called only if `package` is installed."""
        yield from ()

    def runs_programs(self, benchmark: BenchmarkConfig) -> bool:
        """Whether grading runs programs that the model wrote."""
        return False


def _parameters(benchmark: BenchmarkConfig, keys: Sequence[str]) -> Fields:
    """The benchmark's parameters whose key is among `keys`."""
    return {key: value for key, value in benchmark.parameters.items() if key in keys}


def check_count(benchmark: BenchmarkConfig, count: int) -> None:
    """Raise UserError unless `count`, the number of items in the benchmark's data, equals
    benchmark.expected."""
    if benchmark.expected is not None and count != benchmark.expected:
        raise UserError(
            f"benchmark {benchmark.name} has {count} items and should have {benchmark.expected}: "
            "its data is not the published set, or expected is wrong"
        )


class ProgramHarness(Harness):
    """A harness that can grade programs which a model wrote."""

    numeric_parameters: Mapping[str, float] = {"seconds": 0.1, "memory_mib": 1, "processes": 1}
    boolean_parameters = ("as_harness",)
    grading_parameters = ("seconds", "memory_mib", "as_harness")
    other_parameters = ("processes",)


# Results.


def mean_result(
    name: str,
    metric: str,
    samples: Sequence[Sample],
    benchmark: BenchmarkConfig,
    scale: Scale = "score",
) -> Result:
    """The result `name`: the mean outcome of the items in the `samples` of this result. The outcome
    of an item is the mean over its answers. The standard error is the standard deviation over items
    (with n - 1) over sqrt(n)."""
    outcomes = [
        fmean(sample["outcome"] for sample in of_item) for of_item in _by_item(samples).values()
    ]
    n = len(outcomes)
    mean = fmean(outcomes)
    squares = math.fsum((outcome - mean) ** 2 for outcome in outcomes)
    stderr = math.sqrt(squares / (n - 1) / n) if n > 1 else None
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
    verdicts: Mapping[str, Sequence[tuple[float, str]]],
    protocol: Fields | None = None,
    max_unscored: int = 0,
) -> Graded:
    """Grade answers so that each result is a mean outcome. `verdicts`: metric of one answer ->
    (outcome, text that explains the outcome) of each answer.

    A reported metric may be pass@K, maj@K or avg@K, or METRIC_pass@K with a metric other than the
    first. All answers to an item then have its outcome, see `_outcome_of_item`.
    """
    first_metric = next(iter(verdicts))
    samples = []
    results = []
    for name, metric in benchmark.reports.items():
        single, *_ = parsed_metric(metric)
        pairs = zip(answers, verdicts[single or first_metric], strict=True)
        of_result = with_item_outcomes(
            [answer.sample(name, *verdict) for answer, verdict in pairs], metric
        )
        results.append(mean_result(name, metric, of_result, benchmark))
        samples += of_result
    return Graded(results, samples, protocol or {}, max_unscored)


def parsed_metric(metric: str) -> tuple[str, str, int]:
    """(metric of one answer, pass, maj or avg, number K of answers) of a metric for K answers to an
    item; (metric, "", 0) for another metric."""
    parts = _OF_ANSWERS.fullmatch(metric)
    if parts is None:
        return metric, "", 0
    return (parts[1] or "") + (parts[4] or ""), parts[2], int(parts[3])


def with_item_outcomes(samples: Sequence[Sample], metric: str) -> list[Sample]:
    """The samples of one result, each with the outcome of its item if `metric` is a metric for
    several answers to an item."""
    _, estimate, count = parsed_metric(metric)
    if not estimate:
        return list(samples)
    outcomes = {
        item: _outcome_of_item(of_item, estimate, count)
        for item, of_item in _by_item(samples).items()
    }
    return [{**sample, "outcome": outcomes[sample["item"]]} for sample in samples]


def _by_item(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Item -> samples of its answers."""
    by_item: dict[str, list[Sample]] = {}
    for sample in samples:
        by_item.setdefault(sample["item"], []).append(sample)
    return by_item


def _outcome_of_item(samples: Sequence[Sample], estimate: str, count: int) -> float:
    """The outcome of an item from the samples of its answers.

    pass: the probability that one of `count` answers has the outcome 1, estimated without bias from
    all answers (arXiv 2107.03374). maj: the outcome of the answer that is the most frequent among
    the first `count`. avg: the mean of the first `count`. Fewer count if some have no outcome.
    """
    outcomes = [sample["outcome"] for sample in samples]
    if estimate == "pass":
        wrong = sum(outcome < 1 for outcome in outcomes)
        count = min(count, len(samples))
        return 1 - math.comb(wrong, count) / math.comb(len(samples), count)
    if estimate == "avg":
        return fmean(outcomes[:count])
    votes = [_vote(sample) for sample in samples[:count]]
    return outcomes[votes.index(mode([vote for vote in votes if vote != ""] or votes))]


def _vote(sample: Sample) -> str | Fraction:
    """The answer of a sample as a vote; "" if there is no answer. All right answers are equal
    votes, and so are numbers of the same value."""
    if sample["outcome"] == 1:
        return "right"
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", sample["extracted"])
    text = re.sub(r"[ $,%]", "", text)
    if re.fullmatch(r"[-+\d./]+", text):
        with suppress(ValueError, ZeroDivisionError):
            return Fraction(text)
    return text


class ItemSource(BenchmarkConfig):
    """A benchmark that is identified by all that can change its items."""

    identity = cached_property(lambda self: harness_of(self).item_identity(self))


class Questions(BenchmarkConfig):
    """A benchmark that is identified by all that can change what a model answers. Benchmarks that
    differ only in grading have equal identities."""

    identity = cached_property(lambda self: harness_of(self).question_identity(self))


class IdentifiedBenchmark(BenchmarkConfig):
    """A benchmark that is identified by all that can change its results."""

    identity = cached_property(lambda self: harness_of(self).identity(self))


def benchmark_errors(benchmarks: Sequence[BenchmarkConfig]) -> list[str]:
    """A sentence for each setting or file of the benchmarks that is wrong on every machine, and for
    each result name that two benchmarks report."""
    sentences: list[str] = []
    benchmark_of_result: dict[str, str] = {}
    for benchmark in benchmarks:
        sentences += harness_of(benchmark).setting_errors(benchmark)
        for name in benchmark.reports:  # results of the same name would be confused
            first_benchmark = benchmark_of_result.setdefault(name, benchmark.name)
            if first_benchmark != benchmark.name:
                sentences.append(
                    f"benchmarks {first_benchmark} and {benchmark.name} both report {name}: "
                    "evaluate them in two studies, or rename one by "
                    f"protocol.benchmarks.{benchmark.name}.reports"
                )
    return list(dict.fromkeys(sentences))
