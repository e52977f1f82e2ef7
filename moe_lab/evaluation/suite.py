"""Data, identity and checks of benchmarks, without importing anything heavy."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_lab.calibration.sources import whole_text
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, UserError, check_known, unknown, user_errors
from moe_lab.evaluation import LIMITED, Policy
from moe_lab.evaluation.harness import HARNESSES, Harness, check_count, data_files, installed
from moe_lab.evaluation.harnesses.lm_eval_files import definition_files
from moe_lab.paths import PREFIX

_TASK = re.compile(r"^[\"']?(?:task|group)[\"']?: *[\"']?([\w-]+)[\"']? *$", re.MULTILINE)
"""The name in a file of lm-eval's own task definitions."""
_NUMBERS = {"seconds", "memory_mib", "processes", "length"}
_RUNNING = ("processes", "template", "answers")
"""Parameters that are not part of the identity; a template and answers are identified by their
content."""


def adapter(benchmark: BenchmarkConfig) -> Any:
    """The module of the benchmark's harness, with `items` and `grade`."""
    return importlib.import_module(f"moe_lab.evaluation.harnesses.{benchmark.harness}")


def data_digest(benchmark: BenchmarkConfig) -> str:
    """sha256 over the benchmark's files, all that define a task included, or over their digests in
    its mirror.

    If the mirror is missing, a text with the name of the data is returned, so that costs can be
    estimated without it.
    """
    if benchmark.data is not None:
        from moe_lab.evaluation import mirror

        try:
            return mirror.digest(benchmark)
        except UserError:  # which `lacking` reports
            return f"no mirror of {benchmark.data}"
    files, versions = _files_and_versions(benchmark)
    digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode() if versions else b"")
    for file in files:
        content = file.read_bytes()
        digest.update(f"{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _files_and_versions(benchmark: BenchmarkConfig) -> tuple[list[Path], dict[str, str]]:
    """The files of a benchmark without a mirror, that of its items last, and versions of what code
    in them imports."""
    *definition, items = data_files(benchmark)
    versions: dict[str, str] = {}
    if benchmark.harness == "lm_eval" and definition:
        definition, versions = definition_files(*definition)
    return [*definition, items], versions


@dataclass(frozen=True)
class Questions:
    """What a model is asked in a benchmark, however the answers are graded."""

    benchmark: BenchmarkConfig

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All settings of the benchmark that can change what a model answers."""
        return question_identity(self.benchmark)


def question_identity(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """All settings of a benchmark that can change what a model answers, such as the batch size,
    which changes bits."""
    harness = HARNESSES[benchmark.harness]
    named = ("task", "subset", "split") if benchmark.data is not None else ()
    asking = (*named, "shots", "chat", "max_new_tokens", "max_length", "limit", "batch_size")
    return {
        "harness": benchmark.harness,
        "version": _version(benchmark),
        "data": data_digest(benchmark),
        **{name: getattr(benchmark, name) for name in asking},
        "parameters": _parameters(benchmark, harness.question_parameters),
    }


def _version(benchmark: BenchmarkConfig) -> str | None:
    """The version of the package that asks and grades; None for moe_lab itself, or if it is not
    installed."""
    package = HARNESSES[benchmark.harness].package
    own: str | None = (
        adapter(benchmark).installed(benchmark) if benchmark.harness == "evalscope" else None
    )
    return installed(package) if package else own


class IdentifiedBenchmark(BenchmarkConfig):
    """A benchmark that is identified by all that can change its results."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        return identity(self)


def identity(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """All settings of a benchmark that can change its results, so without the address of a
    judge."""
    harness = HARNESSES[benchmark.harness]
    judged = {}
    if benchmark.judge:
        from moe_lab.evaluation.harnesses import wildbench

        judged = wildbench.identity(benchmark)
    return {
        **question_identity(benchmark),
        "reports": dict(benchmark.reports),
        "expected": benchmark.expected,
        "parameters": _parameters(
            benchmark, harness.question_parameters + harness.grading_parameters
        ),
        **judged,
    }


def _parameters(benchmark: BenchmarkConfig, names: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in benchmark.parameters.items()
        if name in names and name not in _RUNNING
    }


def preflight(benchmarks: Sequence[BenchmarkConfig], policy: Policy) -> list[str]:
    """All problems of the benchmarks, one sentence each, without importing a harness or torch."""
    missing = [sentence for benchmark in benchmarks for sentence in lacking(benchmark, policy)]
    return list(dict.fromkeys(wrong(benchmarks) + missing))


def wrong(benchmarks: Sequence[BenchmarkConfig]) -> list[str]:
    """Problems with settings that would be wrong on any machine."""
    sentences = [sentence for benchmark in benchmarks for sentence in _wrong(benchmark)]
    reported: dict[str, str] = {}
    for benchmark in benchmarks:
        for name in benchmark.reports:  # results of one name would be confused
            if (other := reported.setdefault(name, benchmark.name)) != benchmark.name:
                sentences.append(
                    f"benchmarks {other} and {benchmark.name} both report {name}: evaluate them "
                    "in two studies, or "
                    f"rename one by protocol.benchmarks.{benchmark.name}.reports"
                )
    return list(dict.fromkeys(sentences))


def _wrong(benchmark: BenchmarkConfig) -> Iterator[str]:
    harness = HARNESSES[benchmark.harness]
    if harness.gives_tools:
        yield from adapter(benchmark).wrong(benchmark)
    elif benchmark.data is None:
        yield from user_errors(_check_items, benchmark)
    yield from (
        f"benchmark {benchmark.name}: {mistake}" for mistake in _mistakes(benchmark, harness)
    )
    if benchmark.harness == "evalscope":
        yield from adapter(benchmark).wrong(benchmark)


def _mistakes(benchmark: BenchmarkConfig, harness: Harness) -> Iterator[str]:
    """What is wrong with settings, whatever the data."""
    scored = (
        benchmark.harness == "lm_eval"
        and benchmark.data is not None
        and not benchmark.max_new_tokens
    )
    rules = {
        "reports is empty, so nothing would be reported: expected result name -> metric": (
            not benchmark.reports
        ),
        f"chat=true, but {benchmark.harness} goes on with a text: expected chat=false": (
            benchmark.chat and harness.continues_text
        ),
        (
            "chat=false, but conversations and tools are put to the model through its chat "
            "template: "
            "expected chat=true"
        ): (not benchmark.chat and (harness.gives_tools or harness.judged)),
        "chat=true, but max_new_tokens=0 says that answers are scored, not generated, and a chat "
        "template would move "
        "them: expected chat=false": benchmark.chat and scored,
        f"max_new_tokens={benchmark.max_new_tokens}, but it generates text: expected 1 or more": (
            not harness.scores and benchmark.max_new_tokens < 1
        ),
        f"shots={benchmark.shots}: expected 0": benchmark.shots and not harness.shows_examples,
    }
    yield from (sentence for sentence, is_broken in rules.items() if is_broken)
    for metric in benchmark.reports.values():
        if harness.metrics is not None and metric not in harness.metrics:
            yield str(unknown("metric", metric, harness.metrics))
    parameters = harness.question_parameters + harness.grading_parameters
    for parameter, value in benchmark.parameters.items():
        if parameter not in parameters:
            yield str(unknown("parameter", parameter, parameters))
        elif parameter in _NUMBERS and (not isinstance(value, (int, float)) or value < 0):
            yield f"parameters.{parameter}={value}: expected a number, 0 or more"


def _check_items(benchmark: BenchmarkConfig) -> None:
    files, _ = _files_and_versions(benchmark)
    items = files[-1]
    definition = benchmark.parameters.get("definition", {})
    if not isinstance(definition, dict):
        raise UserError(
            f"benchmark {benchmark.name}: parameters.definition={definition}: expected a task in "
            "lm-eval's format, "
            "such as {doc_to_text: question}"
        )
    if benchmark.harness == "perplexity":
        whole_text(items, "suite.path")
    elif items.suffix == ".jsonl":
        check_count(benchmark, sum(1 for line in items.read_bytes().splitlines() if line.strip()))


def lacking(benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
    """Problems with this machine or with permissions: missing packages, data, sandbox for programs,
    or judge."""
    package = HARNESSES[benchmark.harness].package
    if package and installed(package) is None:
        yield f"benchmark {benchmark.name} needs the package {package}: pip install {package}"
        return
    if benchmark.data is not None:
        from moe_lab.evaluation import mirror

        yield from user_errors(mirror.check, benchmark)
    if benchmark.harness == "lm_eval" and benchmark.data is not None:
        yield from user_errors(task_folder, benchmark)
    if benchmark.harness in ("wildbench", "evalscope"):
        yield from adapter(benchmark).lacking(benchmark, policy)
    if benchmark.harness == "evalplus":
        yield from user_errors(lambda: policy.protection(closed_world=is_closed_world(benchmark)))


def task_folder(benchmark: BenchmarkConfig) -> Path:
    """The folder of lm-eval that defines benchmark.task: parameters.folder, or the one with the
    task's name.

    Only this folder is indexed, as indexing all of lm-eval's 14,000 files takes ten seconds. Raises
    UserError when the folder or the task does not exist.
    """
    package = find_spec("lm_eval")
    assert package is not None and package.origin is not None  # `lacking` has reported it
    tasks = Path(package.origin).parent / "tasks"
    name = str(benchmark.parameters.get("folder", benchmark.task))
    place = tasks / name
    if not place.is_dir() or place == tasks:
        beside = place.parent if place.parent.is_dir() and place != tasks else tasks
        folders = [str(folder.relative_to(tasks)) for folder in beside.iterdir() if folder.is_dir()]
        raise unknown(f"benchmark {benchmark.name}: parameters.folder", name, folders)
    defined = {
        match
        for file in place.rglob("*.yaml")
        for match in _TASK.findall(file.read_text(encoding="utf-8"))
    }
    check_known(f"benchmark {benchmark.name}: task", benchmark.task, defined)
    return place


def is_closed_world(benchmark: BenchmarkConfig) -> bool:
    """Whether right programs need no import and no private attribute, as in the benchmarks that
    moe_lab ships."""
    return benchmark.task.startswith(PREFIX)


def runs_limited(benchmark: BenchmarkConfig, policy: Policy) -> bool:
    """Whether programs that are not closed-world count as wrong, because this machine has no
    namespaces."""
    try:
        return (
            benchmark.harness == "evalplus"
            and policy.protection(closed_world=is_closed_world(benchmark)) == LIMITED
        )
    except (UserError, Unavailable):  # which `lacking` reports
        return False
