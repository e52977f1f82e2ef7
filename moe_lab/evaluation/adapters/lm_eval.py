"""lm-eval with its own tasks, prompts, filters and metrics, and with moe_lab's data, generation and
likelihoods.

Tasks give what lm-eval's own `evaluate` uses: requests, filters, and the metrics of each item.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from lm_eval.api import metrics
from lm_eval.api.instance import Instance

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known
from moe_lab.evaluation.adapters.lm_eval_tasks import (
    first_items,
    label_of,
    tasks,
    weights_tasks_equally,
)
from moe_lab.evaluation.harness import Graded, loss_result, mean_result
from moe_lab.evaluation.items import Answer, Document, Item, Pair, Text
from moe_lab.results import Result, Sample, Scale

Aggregation = Callable[[Any], Any]


@dataclass(frozen=True)
class _Question:
    """An item of a task with lm-eval's requests."""

    name: str
    task: Any
    doc: Mapping[str, Any]
    requests: Sequence[Instance]


@dataclass(frozen=True)
class _Row:
    """lm-eval's metrics of an answer after one of the task's filters."""

    question: _Question
    answer: Answer
    filter: str
    extracted: Sequence[Any]
    """The reply to each request, as the filter leaves it."""
    metrics: Mapping[str, Any]


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """The items of a task, or of a group of tasks, with their requests.

    Raises UserError for a metric that the task does not have or that has no outcome of an item, and
    a task that samples, runs programs or shows images.
    """
    by_name = tasks(benchmark)
    for metric in benchmark.reports.values():
        _aggregation(metric, by_name, benchmark)
        weights_tasks_equally(benchmark, metric)
    return [
        Item(
            question.name,
            tuple(_request(request, question, benchmark) for request in question.requests),
        )
        for of_task in _questions(by_name, benchmark)
        for question in of_task
    ]


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig) -> Graded:
    """Filter and grade the replies as lm-eval does. A thought that does not end gets no credit."""
    by_name = tasks(benchmark)
    questions = _questions(by_name, benchmark)
    rows = _rows(questions, {answer.item: answer for answer in answers})
    samples: list[Sample] = []
    scores: list[Result] = []
    for name, metric in benchmark.reports.items():
        aggregation = _aggregation(metric, by_name, benchmark)
        score, of_score = _result(
            name, metric, aggregation, _rows_with(metric, rows, benchmark), benchmark
        )
        scores.append(score)
        samples += of_score
    evaluated = [of_task[0].task for of_task in questions]
    protocol = {
        "task": benchmark.task if benchmark.data is not None else next(iter(by_name)),
        "task_version": ", ".join(sorted({str(task.VERSION) for task in evaluated})),
        "num_fewshot": evaluated[0].config.num_fewshot,
    }
    return Graded(scores, samples, protocol)


# Requests and replies.


def _questions(by_name: Mapping[str, Any], benchmark: BenchmarkConfig) -> list[list[_Question]]:
    """The items that are evaluated, task by task, called by their ids if these are unique, else by
    numbers; where there are several tasks, after the task's name."""
    questions: list[list[_Question]] = []
    for task_name in first_items(by_name, benchmark.limit):
        task = by_name[task_name]
        by_doc: dict[int, list[Instance]] = {}
        for request in task.instances:
            by_doc.setdefault(request.doc_id, []).append(request)
        names = {
            number: str(requests[0].doc.get("id", number)) for number, requests in by_doc.items()
        }
        unique = len(set(names.values())) == len(names)
        questions.append([])
        for number, requests in by_doc.items():
            name = names[number] if unique else str(number)
            whole = f"{task_name}/{name}" if len(by_name) > 1 else name
            requests = sorted(requests, key=lambda request: request.idx)
            questions[-1].append(_Question(whole, task, requests[0].doc, requests))
    return questions


def _request(
    request: Instance, question: _Question, benchmark: BenchmarkConfig
) -> Text | Pair | Document:
    if request.request_type == "loglikelihood_rolling":
        return Document(request.args[0], from_nothing=True)
    context, other = request.args[:2]
    if benchmark.chat:
        context = json.loads(context)
    if request.request_type != "generate_until":
        return Pair(context, other)
    max_tokens, stop = _limit_and_stop(other, question.task.config.task, benchmark)
    target = question.task.doc_to_target(question.doc)
    reference = None
    if isinstance(target, str) and not benchmark.chat:  # the right answer as it follows the prompt
        reference = f"{question.task.config.target_delimiter}{target}"
    return Text(context, max_tokens, stop, reference)


_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the largest number of tokens, by lm-eval's priority."""
_OF_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
}
"""Settings that greedy generation follows at one value alone."""


def _limit_and_stop(
    settings: Mapping[str, Any], task: str, benchmark: BenchmarkConfig
) -> tuple[int, tuple[str, ...]]:
    """The largest number of tokens and the stop texts of a task's generation_kwargs, read as by
    lm-eval. UserError for settings that greedy generation does not follow."""
    settings = {name: value for name, value in settings.items() if value is not None}
    field = f"benchmark {benchmark.name}: {task}: generation_kwargs"
    if settings.get("do_sample", float(settings.get("temperature", 0)) > 0):
        raise UserError(
            f"{field} {settings} request sampling: expected do_sample=false, as generation is "
            "greedy"
        )
    for name, value in settings.items():
        check_known(field, name, ("until", *_LIMITS, *_OF_SAMPLING, *_NEUTRAL))
        if value != _NEUTRAL.get(name, value):
            raise UserError(
                f"{field}.{name}={value}: only greedy generation is done, expected {_NEUTRAL[name]}"
            )
    max_tokens = next((settings[name] for name in _LIMITS if name in settings), 256)
    if not str(max_tokens).isdigit() or int(max_tokens) < 1:
        raise UserError(
            f"{field}.max_gen_toks={max_tokens}: expected a number of tokens, 1 or more"
        )
    until = settings.get("until", [])
    texts = [until] if isinstance(until, str) else until
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{field}.until={until}: expected a text, or a list of texts")
    # as in lm-eval, an empty stop text ends nothing
    return int(max_tokens), tuple(text for text in texts if text)


def _rows(questions: Sequence[Sequence[_Question]], answers: Mapping[str, Answer]) -> list[_Row]:
    """lm-eval's metrics of each answer, task by task and filter by filter."""
    rows = []
    for of_task in questions:
        for question in of_task:
            for request, reply in zip(
                question.requests, answers[question.name].replies, strict=True
            ):
                response: Any = reply.nats
                if request.request_type == "generate_until":
                    response = reply.text or ""
                elif request.request_type == "loglikelihood":
                    response = (reply.nats, reply.windows[0].likeliest)
                request.resps = [response] * (request.repeats or 1)
                request.filtered_resps = {}
        of_task[0].task.apply_filters()
        for name, question in product(of_task[0].requests[0].filtered_resps, of_task):
            answer = answers[question.name]
            extracted = [request.filtered_resps[name] for request in question.requests]
            values = question.task.process_results(question.doc, extracted)
            # lm-eval has graded an empty answer, which some metrics find right
            if answer.reply.text is None:
                higher = question.task.higher_is_better()
                numbers = [
                    metric for metric, value in values.items() if isinstance(value, int | float)
                ]
                values |= {metric: 0.0 for metric in numbers if higher.get(metric, True)}
            rows.append(_Row(question, answer, name, extracted, values))
    return rows


def _rows_with(metric: str, rows: Sequence[_Row], benchmark: BenchmarkConfig) -> list[_Row]:
    """The rows that report `metric`, or `metric,filter` where a task has several filters."""
    name, _, wanted = metric.partition(",")
    filters = list(dict.fromkeys(row.filter for row in rows))
    chosen = wanted or filters[0]
    check_known(f"benchmark {benchmark.name}: filter", chosen, filters)
    if not wanted and len(filters) > 1:
        raise UserError(
            f"benchmark {benchmark.name}: {metric} has several filters: add one of "
            f"{', '.join(filters)}"
        )
    check_known(f"benchmark {benchmark.name}: metric", name, rows[0].metrics)
    return [row for row in rows if row.filter == chosen]


_OF_LOSSES: Mapping[Aggregation, tuple[Scale, str, float]] = {
    metrics.perplexity: ("perplexity", "nats per answer", 1.0),
    metrics.weighted_perplexity: ("perplexity", "", 1.0),
    metrics.bits_per_byte: ("loss", "bits per byte", 1 / math.log(2)),
}
"""lm-eval's aggregations of log-likelihoods -> scale, unit, and the unit's number in a nat. A
weighted perplexity is of words or bytes, by which lm-eval calls it: word_perplexity."""
_BY_ITEM = (metrics.mean, metrics.nanmean, *_OF_LOSSES)


def _aggregation(
    metric: str, by_name: Mapping[str, Any], benchmark: BenchmarkConfig
) -> Aggregation:
    """lm-eval's function that makes the score of a metric. UserError for any but means and
    perplexities: f1 and BLEU, computed from all items together, give no outcome of an item, on
    which errors and comparisons of models rest."""
    aggregation: Aggregation = metrics.mean
    for task, functions in ((task, of_task.aggregation()) for task, of_task in by_name.items()):
        aggregation = functions.get(metric.partition(",")[0], metrics.mean)
        if aggregation not in _BY_ITEM:
            how = getattr(aggregation, "__name__", aggregation)
            possible = ", ".join(
                name for name, function in functions.items() if function in _BY_ITEM
            )
            raise UserError(
                f"benchmark {benchmark.name}: metric={metric} of {task} is computed from all items "
                f"together, by {how}: expected a mean over items or a perplexity (the task has "
                f"{possible or 'none'})"
            )
    if aggregation in _OF_LOSSES and len(by_name) > 1:
        raise UserError(
            f"benchmark {benchmark.name}: metric={metric} of {len(by_name)} tasks together: "
            "lm-eval takes the mean of their perplexities, which has no outcome of an item, "
            f"expected one task, such as {next(iter(by_name))}"
        )
    return aggregation


def _result(
    result: str,
    metric: str,
    aggregation: Aggregation,
    rows: Sequence[_Row],
    benchmark: BenchmarkConfig,
) -> tuple[Result, list[Sample]]:
    name = metric.partition(",")[0]
    if aggregation not in _OF_LOSSES:
        samples = [_sample(result, name, row, float(row.metrics[name])) for row in rows]
        scale: Scale = (
            "score" if rows[0].question.task.higher_is_better().get(name, True) else "loss"
        )
        if not weights_tasks_equally(benchmark, metric):
            return mean_result(result, metric, samples, benchmark, scale), samples
        of_tasks = _by_task(rows, samples)
        means = [mean_result(result, metric, of_task, benchmark, scale) for of_task in of_tasks]
        return _mean_of_tasks(means), [sample for of_task in of_tasks for sample in of_task]
    scale, unit, per_nat = _OF_LOSSES[aggregation]
    sums = [
        value if isinstance(value := row.metrics[name], tuple) else (value, 1.0) for row in rows
    ]
    weights = [units for _, units in sums]
    losses = [-value / units * per_nat for value, units in sums]
    samples = [_sample(result, name, row, loss) for row, loss in zip(rows, losses, strict=True)]
    samples = [{**sample, "units": units} for sample, units in zip(samples, weights, strict=True)]
    unit = unit or f"nats per {name.partition('_')[0]}"
    return loss_result(result, metric, scale, unit, losses, weights, benchmark), samples


def _by_task(rows: Sequence[_Row], samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each task, weighted so that tasks count alike and the weights sum to the
    number of samples."""
    of_tasks: dict[str, list[Sample]] = {}
    for row, sample in zip(rows, samples, strict=True):
        of_tasks.setdefault(row.question.task.config.task, []).append(sample)
    share = len(samples) / len(of_tasks)
    weighted: list[list[Sample]] = []
    for of_task in of_tasks.values():
        units = share / len(of_task)
        weighted.append([{**sample, "units": units} for sample in of_task])
    return weighted


def _mean_of_tasks(results: Sequence[Result]) -> Result:
    """The mean of the scores of several tasks, with its standard error, as in lm-eval's
    `unweighted_mean_stderr`."""
    errors = [result["stderr"] for result in results if result["stderr"] is not None]
    stderr = math.hypot(*errors) / len(results) if len(errors) == len(results) else None
    score = math.fsum(result["score"] for result in results) / len(results)
    return {
        **results[0],
        "score": score,
        "stderr": stderr,
        "n": sum(result["n"] for result in results),
    }


def _sample(result: str, metric: str, row: _Row, outcome: float) -> Sample:
    kind = row.question.requests[0].request_type
    nats = [reply.nats for reply in row.answer.replies]
    if kind == "generate_until":
        return row.answer.sample(result, outcome, str(row.extracted[0]))
    if kind == "loglikelihood_rolling":
        return row.answer.sample(result, outcome, "", json.dumps(round(nats[0], 4)))
    # lm-eval does not count the space in front of an answer.
    lengths = [
        len(request.args[1]) - 1 if metric == "acc_norm" else 1 for request in row.question.requests
    ]
    chosen = int(np.argmax(np.array(nats) / lengths))
    sample = row.answer.sample(
        result, outcome, str(chosen), json.dumps([round(value, 4) for value in nats])
    )
    return {**sample, "answer_loss": _loss_of_right_choice(row.question, nats)}


def _loss_of_right_choice(question: _Question, nats: Sequence[float]) -> float | None:
    """Loss on lm-eval's right choice in bits per byte; None if there is not exactly one."""
    task = question.task
    doc = question.doc
    right: Any = 0
    if task.OUTPUT_TYPE == "multiple_choice":
        right = label_of(task, doc)
        if isinstance(right, str):
            choices = task.doc_to_choice(doc)
            right = choices.index(right) if right in choices else None
    if not isinstance(right, int) or not 0 <= right < len(nats):
        return None
    return -nats[right] / math.log(2) / len(question.requests[right].args[1].encode())
