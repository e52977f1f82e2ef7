"""lm-eval with its own tasks, prompts, filters and metrics, and with moe_lab's data, generation and likelihoods.

Tasks are built by lm-eval's public `TaskManager` and asked what lm-eval's own `evaluate` asks them: for requests,
filters, and the metrics of each item. While they are built, `datasets.load_dataset`, from which they get their data, is
replaced, so that neither the hub nor a cache on disk nor the current folder is used.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval.api.task
import numpy as np
from lm_eval.api import metrics
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown
from moe_lab.evaluation import mirror
from moe_lab.evaluation.harness import (
    Answer,
    Document,
    Graded,
    Item,
    Pair,
    Reply,
    Text,
    check_count,
    data_files,
    loss_result,
    mean_result,
)
from moe_lab.evaluation.harnesses import lm_eval_folders
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.evaluation.suite import data_digest
from moe_lab.results import Result, Sample

Aggregation = Callable[[Any], Any]
logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()


@dataclass(frozen=True)
class _Question:
    """An item of a task, and what lm-eval asks about it."""

    name: str
    task: Any
    doc: Mapping[str, Any]
    requests: Sequence[Instance]


@dataclass(frozen=True)
class _Row:
    """What lm-eval says of an answer after one of the task's filters."""

    question: _Question
    answer: Answer
    filter: str
    extracted: Sequence[Any]
    """The reply to each request, as the filter leaves it."""
    metrics: Mapping[str, Any]


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """What a task asks about its items, or a group of tasks whose items have equal weight.

    Raises UserError for a metric that the task lacks or that has no outcome of an item, an unexpected number of items,
    and a task that samples, runs programs or shows images.
    """
    by_name = tasks(benchmark)
    check_count(benchmark, sum(len(task.task_docs) for task in by_name.values()))
    for metric in benchmark.reports.values():
        _aggregation(metric, by_name, benchmark)
    return [
        Item(question.name, tuple(_request(request, question, benchmark) for request in question.requests))
        for question in _questions(by_name, benchmark)
    ]


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Filter and grade the replies as lm-eval does. A thought that does not end gets no credit."""
    by_name = tasks(benchmark)
    questions = _questions(by_name, benchmark)
    rows = _rows(questions, {answer.item: answer for answer in answers})
    samples: list[Sample] = []
    scores: list[Result] = []
    for result, metric in benchmark.reports.items():
        of_metric = _rows_with(metric, rows, benchmark)
        of_loss = _OF_LOSSES.get(_aggregation(metric, by_name, benchmark))
        name = metric.partition(",")[0]
        outcomes = [_outcome_and_units(row.metrics[name], loss=of_loss is not None) for row in of_metric]
        own = [_sample(result, name, row, outcome) for row, (outcome, _) in zip(of_metric, outcomes, strict=True)]
        samples += own
        if of_loss is not None:
            nats, units = zip(*outcomes, strict=True)
            scores.append({**loss_result(result, of_loss, nats, units, benchmark), "metric": metric})
        else:
            scores.append(mean_result(result, metric, own, benchmark))
    asked = list({id(question.task): question.task for question in questions}.values())
    protocol = {
        "task": benchmark.task if benchmark.data is not None else next(iter(by_name)),
        "task_version": ", ".join(sorted({str(task.VERSION) for task in asked})),
        "num_fewshot": asked[0].config.num_fewshot,
    }
    return Graded(scores, samples, protocol)


# Tasks and their data.

_SEED = 1234
"""The default of lm-eval's own command line."""
_built: dict[str, dict[str, Any]] = {}


def tasks(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """Name -> task with its requests; several for a group such as mmlu. Built once per process for the same data and
    settings.

    Raises UserError when the task's split is not the benchmark's, when the task lacks examples to show, or when an item
    to evaluate has no right answer.
    """
    settings = (benchmark.task, benchmark.parameters, benchmark.subset, benchmark.split, benchmark.shots)
    key = f"{data_digest(benchmark)} {settings} {benchmark.chat} {benchmark.max_new_tokens} {benchmark.limit}"
    if key not in _built:
        with patch.object(lm_eval.api.task, "tqdm", lambda iterable, **_: iterable):
            _built[key] = _with_requests(benchmark)
    return _built[key]


def _with_requests(benchmark: BenchmarkConfig) -> dict[str, Any]:
    by_name = _stock(benchmark) if benchmark.data is not None else _own(benchmark)
    for name, task in by_name.items():
        _set(task, name, benchmark)
    for name, numbers in first_items(by_name, benchmark.limit).items():
        task = by_name[name]
        _check_labels(task, name, numbers, benchmark)
        task.set_fewshot_seed(seed=_SEED)
        task.build_all_requests(
            samples=numbers,
            apply_chat_template=benchmark.chat,
            fewshot_as_multiturn=benchmark.chat,
            chat_template=_as_json if benchmark.chat else None,
        )
    return by_name


def _as_json(messages: Sequence[Mapping[str, str]], **_: Any) -> str:
    """A conversation as a text, which lm-eval wants in place of it; `_request` reads it."""
    return json.dumps(messages)


def _stock(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """A task or group of lm-eval that reads the benchmark's mirror; only its folder is indexed."""
    manager = TaskManager(include_path=str(lm_eval_folders.folder(benchmark)), include_defaults=False)
    subsets = mirror.subsets(benchmark)

    def from_mirror(path: str, name: str | None = None, **_: Any) -> _Splits:
        subset = benchmark.subset or name or "default"
        if subset not in subsets:
            raise UserError(
                f"benchmark {benchmark.name}: {benchmark.task} needs the subset {subset}, and the mirror "
                f"{mirror.folder(benchmark)} has {', '.join(sorted(subsets))}"
            )
        return _Splits(subsets[subset])

    return _load(manager, benchmark.task, from_mirror)


def _own(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """The task in a file of lm-eval's format; all its splits are the JSON lines file with the same name."""
    definition, items = data_files(benchmark)
    manager = TaskManager(include_defaults=False)
    by_name = _load(manager, str(definition), lambda *_, **__: _Splits({}, otherwise=items))
    for task in by_name.values():
        if _source_of_examples(task) is not None:
            # lm-eval leaves an item out of its own examples only where both are of the same, named test split.
            task.config.test_split = task.config.fewshot_config.split = _evaluated_split(task)
    return by_name


def _load(manager: TaskManager, name: str, load_dataset: Callable[..., Mapping[str, Any]]) -> dict[str, Any]:
    with patch.object(datasets, "load_dataset", load_dataset):
        try:
            by_name: dict[str, Any] = manager.load([name])["tasks"]
        except IndexError as error:  # lm-eval tries the first item
            raise UserError(
                f"task={name}: the first item cannot be read: expected one or more items, a label that is one of the "
                f"choices, and no empty choice"
            ) from error
    return by_name


class _Splits(dict[str, Any]):
    """Splits of a data set, each read at its first use; those that the mirror lacks are empty."""

    def __init__(self, files: Mapping[str, list[Path]], otherwise: Path | None = None) -> None:
        super().__init__()
        self.files, self.otherwise = files, otherwise

    def __missing__(self, split: str) -> Any:
        files = [self.otherwise] if self.otherwise else self.files.get(split, [])
        self[split] = datasets.Dataset.from_list([row for file in files for row in mirror.read_rows(file)])
        return self[split]


def _set(task: Any, name: str, benchmark: BenchmarkConfig) -> None:
    for kind in ("UNSAFE_CODE", "MULTIMODAL"):
        if getattr(task, kind, False):
            raise UserError(f"benchmark {benchmark.name}: {name} is {kind}, which is not supported: expected another")
    split = _evaluated_split(task)
    if benchmark.split is not None and split != benchmark.split:
        raise UserError(f"benchmark {benchmark.name}: split={benchmark.split}, but {name} asks {split}")
    if benchmark.shots or benchmark.data is not None or task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=benchmark.shots)
    if task.config.num_fewshot:
        _check_examples(task, name, benchmark)
    if benchmark.max_new_tokens and task.OUTPUT_TYPE == "generate_until":
        task.set_config(key="generation_kwargs", value={"max_gen_toks": benchmark.max_new_tokens}, update=True)


def _evaluated_split(task: Any) -> Any:
    return task.config.test_split or task.config.validation_split


def _source_of_examples(task: Any) -> Any:
    """The split from which lm-eval takes examples, None if the task lists them."""
    config, examples = task.config, task.config.fewshot_config
    if examples.split is None and examples.samples is not None:
        return None
    return examples.split or config.training_split or config.validation_split or config.test_split


def _check_examples(task: Any, name: str, benchmark: BenchmarkConfig) -> None:
    """Raise UserError unless a task has enough examples to show with an item, none of which is the item itself."""
    split, source, shots = _evaluated_split(task), _source_of_examples(task), task.config.num_fewshot
    # By lm-eval's rule, which does not see that a split is the evaluated one where the task names it otherwise.
    without_item = source is not None and task.config.fewshot_config.split == task.config.test_split
    if source == split and not without_item:
        raise UserError(
            f"benchmark {benchmark.name}: shots={shots}, but {name} takes examples from the evaluated split {split}, "
            f"so an item could be shown with its answer: expected shots=0"
        )
    examples = Counter(json.dumps(doc, sort_keys=True, default=str) for doc in task.fewshot_docs())
    count = examples.total() - (max(examples.values(), default=0) if without_item else 0)  # lm-eval drops every copy
    if count < shots:
        raise UserError(
            f"benchmark {benchmark.name}: shots={shots}, but {name} has {count} examples to show with an item: "
            f"expected {count} or fewer"
        )


def _check_labels(task: Any, name: str, numbers: Sequence[int], benchmark: BenchmarkConfig) -> None:
    """Raise UserError for an item whose label is hidden (-1, null) or none of its choices.

    lm-eval grades every answer to it as wrong. A task with its own way of grading may have other labels.
    """
    if task.config.process_results is not None:
        return
    for number in numbers:
        doc = task.task_docs[number]
        label = _label(task, doc)
        labels = label if isinstance(label, list) else [label]
        choices = None if task.config.doc_to_choice is None else task.doc_to_choice(doc)
        if choices is None:
            right = label is not None
        else:
            right = bool(labels) and all(each in range(len(choices)) or each in choices for each in labels)
        if not right:
            expected = "a text" if choices is None else f"a number from 0 to {len(choices) - 1} or the text of a choice"
            raise UserError(
                f"benchmark {benchmark.name}: item {doc.get('id', number)} of {name} has label={label!r}, so no answer "
                f"is right: expected {expected}"
            )


def _label(task: Any, doc: Mapping[str, Any]) -> Any:
    return task.doc_to_text(doc) if getattr(task, "multiple_input", 0) else task.doc_to_target(doc)


def first_items(by_name: Mapping[str, Any], limit: int | None) -> dict[str, list[int]]:
    """Task -> numbers of its items to evaluate: all, or `limit` in total, taken from the tasks in turn."""
    sizes = {name: len(task.task_docs) for name, task in by_name.items()}
    places = sorted((number, name) for name, size in sizes.items() for number in range(size))[:limit]
    counts = Counter(name for _, name in places)
    return {name: list(range(counts[name])) for name in by_name if counts[name]}


# Requests and replies.


def _questions(by_name: Mapping[str, Any], benchmark: BenchmarkConfig) -> list[_Question]:
    """The items of each task that are evaluated.

    Their names are their ids if these are unique, else numbers; where there are several tasks, after the task's name.
    """
    questions = []
    for task_name in first_items(by_name, benchmark.limit):
        task = by_name[task_name]
        by_doc: dict[int, list[Instance]] = {}
        for request in task.instances:
            by_doc.setdefault(request.doc_id, []).append(request)
        names = {number: str(requests[0].doc.get("id", number)) for number, requests in by_doc.items()}
        unique = len(set(names.values())) == len(names)
        for number, requests in by_doc.items():
            name = names[number] if unique else str(number)
            whole = f"{task_name}/{name}" if len(by_name) > 1 else name
            requests = sorted(requests, key=lambda request: request.idx)
            questions.append(_Question(whole, task, requests[0].doc, requests))
    return questions


def _request(request: Instance, question: _Question, benchmark: BenchmarkConfig) -> Text | Pair | Document:
    if request.request_type == "loglikelihood_rolling":
        return Document(request.args[0], from_nothing=True)
    context, other = request.args[:2]
    if benchmark.chat:
        context = json.loads(context)
    if request.request_type != "generate_until":
        return Pair(context, other)
    if other.get("do_sample") or float(other.get("temperature") or 0) > 0:
        raise UserError(f"the task's generation_kwargs {dict(other)} ask for sampling: only greedy generation is done")
    until = other.get("until") or []
    # As in lm-eval, an empty stop text ends nothing.
    stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    target = question.task.doc_to_target(question.doc)
    reference = None
    if isinstance(target, str) and not benchmark.chat:  # the right answer as it follows the prompt
        reference = f"{question.task.config.target_delimiter}{target}"
    return Text(context, int(other.get("max_gen_toks", 256)), stop, reference)


def _rows(questions: Sequence[_Question], answers: Mapping[str, Answer]) -> list[_Row]:
    """What lm-eval says of each answer, task by task and filter by filter."""
    by_task: dict[int, list[_Question]] = {}
    for question in questions:
        by_task.setdefault(id(question.task), []).append(question)
        for request, reply in zip(question.requests, answers[question.name].replies, strict=True):
            request.resps = [_response(request, reply)] * (request.repeats or 1)
            request.filtered_resps = {}
    rows = []
    for of_task in by_task.values():
        of_task[0].task.apply_filters()
        for name in of_task[0].requests[0].filtered_resps:
            rows += [_row(question, answers[question.name], name) for question in of_task]
    return rows


def _response(request: Instance, reply: Reply) -> Any:
    """A reply in lm-eval's form."""
    if request.request_type == "generate_until":
        return reply.text or ""
    return reply.nats if request.request_type == "loglikelihood_rolling" else (reply.nats, reply.windows[0].likeliest)


def _row(question: _Question, answer: Answer, name: str) -> _Row:
    extracted = [request.filtered_resps[name] for request in question.requests]
    found = question.task.process_results(question.doc, extracted)
    if answer.reply.text is None:  # lm-eval has graded an empty answer, which some metrics find right
        higher = question.task.higher_is_better()
        numbers = [metric for metric, value in found.items() if isinstance(value, int | float)]
        found |= {metric: 0.0 for metric in numbers if higher.get(metric, True)}
    return _Row(question, answer, name, extracted, found)


def _rows_with(metric: str, rows: Sequence[_Row], benchmark: BenchmarkConfig) -> list[_Row]:
    """The rows that report `metric`, or `metric,filter` where a task has several filters."""
    name, _, wanted = metric.partition(",")
    filters = list(dict.fromkeys(row.filter for row in rows))
    chosen = wanted or filters[0]
    if chosen not in filters:
        raise unknown(f"benchmark {benchmark.name}: filter", chosen, filters)
    if not wanted and len(filters) > 1:
        raise UserError(f"benchmark {benchmark.name}: {metric} has several filters: add one of {', '.join(filters)}")
    if name not in rows[0].metrics:
        raise unknown(f"benchmark {benchmark.name}: metric", name, rows[0].metrics)
    return [row for row in rows if row.filter == chosen]


_OF_LOSSES: Mapping[Aggregation, str] = {
    metrics.perplexity: "perplexity",
    metrics.weighted_perplexity: "perplexity",
    metrics.bits_per_byte: "bits_per_byte",
}
"""lm-eval's aggregations of log-likelihoods -> the metric of `loss_result` that is the same number."""
_BY_ITEM = (metrics.mean, metrics.nanmean, *_OF_LOSSES)


def _aggregation(metric: str, by_name: Mapping[str, Any], benchmark: BenchmarkConfig) -> Aggregation:
    """lm-eval's function that makes the score of a metric from its values.

    Raises UserError for any but means and perplexities: what is computed from all items together, as f1 and BLEU are,
    has no outcome of an item, on which standard errors and comparisons of models rest.
    """
    aggregation: Aggregation = metrics.mean
    for task, functions in ((task, of_task.aggregation()) for task, of_task in by_name.items()):
        aggregation = functions.get(metric.partition(",")[0], metrics.mean)
        if aggregation not in _BY_ITEM:
            how = getattr(aggregation, "__name__", aggregation)
            possible = ", ".join(name for name, function in functions.items() if function in _BY_ITEM)
            raise UserError(
                f"benchmark {benchmark.name}: metric={metric} of {task} is computed from all items together, by {how}: "
                f"expected a mean over items or a perplexity (the task has {possible or 'none'})"
            )
    return aggregation


def _outcome_and_units(value: Any, *, loss: bool) -> tuple[float, float]:
    """An item's outcome and its number of units. For a loss, that is nats per unit: an answer, a word or a byte."""
    if not loss:
        return float(value), 1.0
    likelihood, units = value if isinstance(value, tuple) else (value, 1.0)
    return -likelihood / units, units


def _sample(result: str, metric: str, row: _Row, outcome: float) -> Sample:
    kind = row.question.requests[0].request_type
    nats = [reply.nats for reply in row.answer.replies]
    if kind == "generate_until":
        return row.answer.sample(result, outcome, str(row.extracted[0]))
    if kind == "loglikelihood_rolling":
        return row.answer.sample(result, outcome, "", json.dumps(round(nats[0], 4)))
    # lm-eval does not count the space in front of an answer.
    lengths = [len(request.args[1]) - 1 if metric == "acc_norm" else 1 for request in row.question.requests]
    chosen = int(np.argmax(np.array(nats) / lengths))
    sample = row.answer.sample(result, outcome, str(chosen), json.dumps([round(value, 4) for value in nats]))
    return Sample(**{**sample, "answer_loss": _loss_of_right_choice(row.question, nats)})


def _loss_of_right_choice(question: _Question, nats: Sequence[float]) -> float | None:
    """Loss on lm-eval's right choice in bits per byte; None if there is not exactly one."""
    task, doc = question.task, question.doc
    right: Any = 0
    if task.OUTPUT_TYPE == "multiple_choice":
        right = _label(task, doc)
        if isinstance(right, str):
            choices = task.doc_to_choice(doc)
            right = choices.index(right) if right in choices else None
    if not isinstance(right, int) or not 0 <= right < len(nats):
        return None
    return -nats[right] / math.log(2) / len(question.requests[right].args[1].encode())
