"""lm-eval's tasks, prompts, filters and metrics with moe_lab's data, generation and likelihoods."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.api import metrics
from lm_eval.api.instance import Instance
from lm_eval.utils import handle_non_serializable, hash_string

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known
from moe_lab.evaluation.adapters.lm_eval_tasks import (
    check_weights,
    indices_to_evaluate,
    label_of,
    tasks_and_groups,
)
from moe_lab.evaluation.harness import (
    Graded,
    mean_result,
    parsed_metric,
    with_item_outcomes,
)
from moe_lab.evaluation.items import Answer, Item, Pair, Reply, Text
from moe_lab.json_files import fits
from moe_lab.result_files import Result, Sample, Scale


@dataclass(frozen=True)
class _Question:
    """An item of a task, with its row of the data (`doc`) and lm-eval's requests."""

    name: str
    task: Any
    doc: Mapping[str, Any]
    requests: Sequence[Instance]


@dataclass(frozen=True)
class _Row:
    """lm-eval's metrics of an answer to which a filter of the task was applied."""

    question: _Question
    answer: Answer
    filter: str
    extracted: Sequence[Any]
    """The reply to each request, after the filter."""
    metrics: Mapping[str, Any]


def items(benchmark: BenchmarkConfig) -> Iterator[Item]:
    """Yield the items of a task, or of a group of tasks.

    Raises UserError for a metric that is no mean over items, for a task of documents, and for a
    task that needs sampling, runs programs or shows images.
    """
    check_weights(benchmark)
    for metric in benchmark.reports.values():
        _check_metric(metric, benchmark)
    for question in _questions(benchmark):
        requests = [_request(request, question, benchmark) for request in question.requests]
        right_answer = _right_answer(question)
        yield Item(question.name, tuple(requests), right_answer, _doc_hash(question.doc))


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig) -> Graded:
    """The results and samples of a benchmark. An answer whose thought does not end counts as
    wrong."""
    questions = _questions(benchmark)
    rows: list[_Row] = []
    # the answers to an item one after another, as lm-eval has one response to a request
    for replicate in sorted({answer.replicate for answer in answers}):
        by_item = {answer.item: answer for answer in answers if answer.replicate == replicate}
        rows += _graded_rows(questions, by_item)
    samples: list[Sample] = []
    results: list[Result] = []
    for result_name, metric in benchmark.reports.items():
        result, result_samples = _result(result_name, metric, rows, benchmark)
        results.append(result)
        samples += result_samples
    return Graded(results, samples)


# Requests and replies.


def _questions(benchmark: BenchmarkConfig) -> list[_Question]:
    """The questions of all tasks, task by task."""
    tasks_by_name = tasks_and_groups(benchmark)["tasks"]
    questions: list[_Question] = []
    for task_name in indices_to_evaluate(tasks_by_name, benchmark.limit):
        task = tasks_by_name[task_name]
        requests_by_doc: dict[int, list[Instance]] = {}
        for request in task.instances:
            requests_by_doc.setdefault(request.doc_id, []).append(request)
        for number, requests in requests_by_doc.items():
            name = str(requests[0].doc.get("id", number))
            if len(tasks_by_name) > 1:
                name = f"{task_name}/{name}"
            requests = sorted(requests, key=lambda request: request.idx)
            questions.append(_Question(name, task, requests[0].doc, requests))
    return questions


def _request(request: Instance, question: _Question, benchmark: BenchmarkConfig) -> Text | Pair:
    """Convert a request of lm-eval into a request of moe_lab."""
    context, continuation_or_settings = request.args[:2]
    if request.request_type != "generate_until":
        return Pair(context, continuation_or_settings)
    if benchmark.chat:  # the context is a conversation in JSON
        context = json.loads(context)
    max_tokens, stop = _limit_and_stop(
        continuation_or_settings, question.task.config.task, benchmark
    )
    target = question.task.doc_to_target(question.doc)
    reference = None
    if isinstance(target, str) and not benchmark.chat:
        # the text that a right answer adds to the prompt: a delimiter, then the target
        reference = f"{question.task.config.target_delimiter}{target}"
    return Text(context, max_tokens, stop, reference)


def _right_answer(question: _Question) -> str:
    """The right answer of an item as a text; several are a list in JSON."""
    task = question.task
    label = label_of(task, question.doc)
    if task.OUTPUT_TYPE == "multiple_choice" and isinstance(label, int):
        label = task.doc_to_choice(question.doc)[label]
    return label if isinstance(label, str) else json.dumps(label, default=str)


def _doc_hash(doc: Mapping[str, Any]) -> str:
    """The `doc_hash` with which lm-eval logs a row of the data."""
    content = json.dumps(doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return str(hash_string(content))


_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the setting with the largest number of tokens. The first that is set counts, as in
lm-eval."""
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")
_NEUTRAL_VALUES = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
}
"""Setting -> its only value that greedy generation can follow."""


def _limit_and_stop(
    settings: Mapping[str, Any], task: str, benchmark: BenchmarkConfig
) -> tuple[int, tuple[str, ...]]:
    """The largest number of new tokens, and the stop texts, by lm-eval's rules. `settings`: the
    task's generation_kwargs; `task`: name of the task."""
    settings = {name: value for name, value in settings.items() if value is not None}
    field = f"benchmark {benchmark.name}: {task}: generation_kwargs"
    # without do_sample, lm-eval samples at temperatures above 0
    is_sampled = settings.get("do_sample", float(settings.get("temperature", 0)) > 0)
    if is_sampled and benchmark.sampling.temperature is None:
        raise UserError(
            f"{field} {settings} request sampling: expected do_sample=false, or the benchmark's "
            "own settings, such as sampling.temperature=1.0, which take precedence"
        )
    for name, value in settings.items():
        check_known(field, name, ("until", *_LIMITS, *_SAMPLING, *_NEUTRAL_VALUES))
        # settings without a neutral value, such as top_p, may have any value
        if value != _NEUTRAL_VALUES.get(name, value):
            raise UserError(
                f"{field}.{name}={value}: only greedy generation is done, expected "
                f"{_NEUTRAL_VALUES[name]}"
            )
    # 256 is lm-eval's default
    max_tokens = next((settings[name] for name in _LIMITS if name in settings), 256)
    # an int, or digits in a str
    if not str(max_tokens).isdigit() or int(max_tokens) < 1:
        raise UserError(
            f"{field}.max_gen_toks={max_tokens}: expected a number of tokens, 1 or more"
        )
    sampling = benchmark.sampling
    if not benchmark.max_new_tokens and (sampling.samples > 1 or sampling.temperature):
        raise UserError(
            f"benchmark {benchmark.name}: max_new_tokens=0: expected max_new_tokens={max_tokens}, "
            f"the limit of {task}, for texts that are sampled"
        )
    until = settings.get("until", [])
    texts = [until] if isinstance(until, str) else until
    if not fits(texts, [str]):
        raise UserError(f"{field}.until={until}: expected a text, or a list of texts")
    # lm-eval ignores empty stop texts too
    return int(max_tokens), tuple(text for text in texts if text)


def _graded_rows(questions: Sequence[_Question], answers: Mapping[str, Answer]) -> Iterator[_Row]:
    """Yield a row for each question and each filter of its task. `answers`: name of a question ->
    answer."""
    for question in questions:
        replies = answers[question.name].replies
        for request, reply in zip(question.requests, replies, strict=True):
            # a task's own repeats of a request have the same response
            request.resps = [_response(request.request_type, reply)] * (request.repeats or 1)
            request.filtered_resps = {}
    for task in dict.fromkeys(question.task for question in questions):
        task.apply_filters()
    for question in questions:
        answer = answers[question.name]
        # name of a filter -> response after the filter; the names are the same for each request
        for filter_name in question.requests[0].filtered_resps:
            extracted = [request.filtered_resps[filter_name] for request in question.requests]
            values = question.task.process_results(question.doc, extracted)
            # lm-eval has graded an unfinished thought as "", which some metrics count as right
            if answer.reply.text is None:
                higher_is_better = question.task.higher_is_better()
                for metric, value in values.items():
                    if isinstance(value, int | float) and higher_is_better.get(metric, True):
                        values[metric] = 0.0
            yield _Row(question, answer, filter_name, extracted, values)


def _response(request_type: str, reply: Reply) -> Any:
    """A reply as lm-eval's response to a request."""
    if request_type == "generate_until":
        return reply.text or ""
    (likelihood,) = reply.windows
    return likelihood.nats, likelihood.likeliest


def _rows_of_metric(metric: str, rows: Sequence[_Row], benchmark: BenchmarkConfig) -> list[_Row]:
    """The rows of the filter of `metric`. `metric` is METRIC,FILTER or, if the task has only one
    filter, METRIC."""
    metric_name, _, requested_filter = metric.partition(",")
    filters = list(dict.fromkeys(row.filter for row in rows))
    filter_name = requested_filter
    if not requested_filter and len(filters) == 1:
        (filter_name,) = filters
    check_known(f"benchmark {benchmark.name}: filter of {metric_name}", filter_name, filters)
    check_known(f"benchmark {benchmark.name}: metric", metric_name, rows[0].metrics)
    return [row for row in rows if row.filter == filter_name]


_MEANS = (metrics.mean, metrics.nanmean)
"""lm-eval's functions whose result is a mean over items."""


def _check_metric(metric: str, benchmark: BenchmarkConfig) -> None:
    """Raise UserError for a metric that lm-eval computes from all items together, such as mcc, f1
    or BLEU, because an item has no outcome then."""
    single, *_ = parsed_metric(metric)
    for name, task in tasks_and_groups(benchmark)["tasks"].items():
        aggregation = task.aggregation().get(single.partition(",")[0], metrics.mean)
        if aggregation not in _MEANS:
            raise UserError(
                f"benchmark {benchmark.name}: metric={metric} of {name} is a "
                f"{aggregation.__name__}, which has no outcome of an item: expected another "
                f"metric, such as {', '.join(task.aggregation())}"
            )


def _result(
    result_name: str, metric: str, all_rows: Sequence[_Row], benchmark: BenchmarkConfig
) -> tuple[Result, list[Sample]]:
    """The result named `result_name` and its samples. `all_rows`: the rows of all filters."""
    single, *_ = parsed_metric(metric)  # the metric of one answer
    rows = _rows_of_metric(single, all_rows, benchmark)
    metric_name = single.partition(",")[0]
    samples = with_item_outcomes([_sample(result_name, metric_name, row) for row in rows], metric)
    higher_is_better = rows[0].question.task.higher_is_better().get(metric_name, True)
    scale: Scale = "score" if higher_is_better else "loss"
    return mean_result(result_name, metric, samples, benchmark, scale), samples


def _sample(result_name: str, metric: str, row: _Row) -> Sample:
    """The sample of a row. Without a generated text, the sample's output is the log-likelihoods as
    JSON. `metric`: name of the metric in lm-eval."""
    outcome = float(row.metrics[metric])
    request_type = row.question.requests[0].request_type
    if request_type == "generate_until":
        # lm-eval has graded an unfinished thought as ""
        extracted = "" if row.answer.reply.text is None else str(row.extracted[0])
        return row.answer.sample(result_name, outcome, extracted)
    nats = [reply.windows[0].nats for reply in row.answer.replies]
    sample = row.answer.sample(
        result_name,
        outcome,
        _choice_taken(metric, row),
        json.dumps([round(value, 4) for value in nats]),
    )
    return {**sample, "answer_loss": _loss_of_right_choice(row.question, nats)}


def _choice_taken(metric: str, row: _Row) -> str:
    """The index of the choice that lm-eval's metric takes as the answer; "" for a task without
    choices or with a function of its own that grades, and for metrics with other rules."""
    task = row.question.task
    has_choices = task.OUTPUT_TYPE == "multiple_choice" and task.config.process_results is None
    if not has_choices or metric in _OTHER_RULES:
        return ""
    choices = task.doc_to_choice(row.question.doc)
    # further likelihoods, without the question, are for acc_mutual_info
    scores = np.array([nats for nats, _ in row.extracted[: len(choices)]])
    if metric == "acc_norm":
        scores = scores / [len(choice) for choice in choices]
    return str(np.argmax(scores))


_OTHER_RULES = ("acc_bytes", "acc_mutual_info", "exact_match")
"""Metrics whose choice is neither the likeliest nor that of acc_norm."""


def _loss_of_right_choice(question: _Question, nats: Sequence[float]) -> float | None:
    """Loss on the right choice, in bits per byte. None unless exactly one choice is right. `nats`:
    log-likelihood of each choice."""
    task = question.task
    doc = question.doc
    right_index: Any = 0  # a question without choices has one continuation
    if task.OUTPUT_TYPE == "multiple_choice":
        right_index = label_of(task, doc)
        if isinstance(right_index, str):
            choices = task.doc_to_choice(doc)
            right_index = choices.index(right_index) if right_index in choices else None
    if not isinstance(right_index, int) or not 0 <= right_index < len(nats):
        return None
    return -nats[right_index] / math.log(2) / len(question.requests[right_index].args[1].encode())
