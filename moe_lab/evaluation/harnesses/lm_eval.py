"""lm-eval on the loaded model: its tasks, prompts, filters and metrics; our data, batches and generation."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval.models.huggingface
import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.harness import Graded, mean_result, prompt_hash, weighted_loss
from moe_lab.evaluation.harnesses.lm_eval_tasks import tasks
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.evaluation.suite import check_count
from moe_lab.results import Result, Sample

Row = dict[str, Any]


def evaluate(model: LocalModel, benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Run a task, or a group whose items all count the same. Both of lm-eval's caches stay off: neither is keyed by the
    model or the data.

    Raises UserError for a metric the task does not have, another number of items than expected, a task that samples, an
    item that the model cannot read whole.
    """
    with _quiet(), _random_state_kept():
        by_name = tasks(benchmark)
        check_count(benchmark, sum(len(task.task_docs) for task in by_name.values()))
        items = first_items(by_name, benchmark.limit)
        results = evaluator.evaluate(
            lm=LoadedLM(model, benchmark),
            task_dict={"tasks": {name: by_name[name] for name in items}, "groups": {}},
            samples=items,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=benchmark.chat,
            fewshot_as_multiturn=benchmark.chat,
        )
    several = len(by_name) > 1
    rows = []
    for name in items:
        logged = _named(results["samples"][name], name if several else "")
        losses = _answer_losses(logged, by_name[name], model, benchmark)
        rows += [{**row, "answer_loss": loss} for row, loss in zip(logged, losses, strict=True)]
    samples, scores = [], []
    for result, metric in benchmark.reports.items():
        of_metric = _rows_with(metric, rows, benchmark)
        own = [_sample(result, metric, row) for row in of_metric]
        samples += own
        scores.append(_result(result, metric, of_metric, own, benchmark))
    protocol = {
        "task": benchmark.task if benchmark.data is not None else next(iter(items)),
        "task_version": ", ".join(sorted({str(results["versions"].get(name)) for name in items})),
        "num_fewshot": by_name[next(iter(items))].config.num_fewshot,
        "prompt": rows[0]["arguments"][0][0],
    }
    return Graded(scores, samples, protocol)


def first_items(by_name: Mapping[str, Any], limit: int | None) -> dict[str, list[int]]:
    """Task -> which of its items: all, or `limit` altogether, the first of every task before the second of any."""
    sizes = {name: len(task.task_docs) for name, task in by_name.items()}
    places = sorted((number, name) for name, size in sizes.items() for number in range(size))[:limit]
    counts = Counter(name for _, name in places)
    return {name: list(range(counts[name])) for name in by_name if counts[name]}


# The model as lm-eval sees it.


class LoadedLM(HFLM):
    """lm-eval's own log-likelihoods on the loaded model; generation through `LocalModel`, like everybody else's."""

    def __init__(self, model: LocalModel, benchmark: BenchmarkConfig) -> None:
        lengths = [length for length in (model.max_length, benchmark.max_length) if length is not None]
        super().__init__(
            pretrained=model.model,
            tokenizer=model.tokenizer,
            batch_size=benchmark.batch_size,
            max_length=min(lengths, default=None),
            chat_template_args=dict(model.template_arguments),
        )
        self.local_model, self.benchmark = model, benchmark

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval's, longest first, without its progress bar; what it would cut off is an error."""
        self._check_room([request.args[0] + request.args[1] for request in requests])
        likelihoods: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        for request, (likelihood, _) in zip(requests, likelihoods, strict=True):
            if not math.isfinite(likelihood):
                raise FloatingPointError(
                    f"benchmark {self.benchmark.name}: a log-likelihood of item {request.doc_id} is {likelihood}"
                )
        return likelihoods

    def _check_room(self, texts: list[str]) -> None:
        """UserError when one has more tokens than fit; those with fewer bytes than that are not looked at."""
        long = [text for text in dict.fromkeys(texts) if len(text.encode()) > self.max_length - 8]
        longest = max((len(ids) for ids in self.tokenizer(long, verbose=False).input_ids), default=0) if long else 0
        if longest > self.max_length + 1:  # the last token is never read
            limit = "model" if self.max_length == self.local_model.max_length else "max_length"
            raise UserError(
                f"benchmark {self.benchmark.name}: a question with its answer has {longest} tokens, and "
                f"{self.max_length} are read: expected a {limit} of {longest - 1} tokens or more, to read it whole"
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Texts for (prompt, settings) requests; requests of equal settings are generated together."""
        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for settings, numbers in groups.items():
            spec = _spec(json.loads(settings), self.benchmark)
            prompts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self.local_model.generate(prompts, spec), strict=True):
                texts[number] = text
        return texts


def _spec(settings: Mapping[str, Any], benchmark: BenchmarkConfig) -> GenSpec:
    if settings.get("do_sample") or float(settings.get("temperature") or 0) > 0:
        raise UserError(
            f"the task's generation_kwargs {dict(settings)} ask for sampling: only greedy generation is done"
        )
    until = settings.get("until") or []
    stop = tuple([until] if isinstance(until, str) else until)
    most = int(settings.get("max_gen_toks", 256))
    return GenSpec(most, stop, benchmark.batch_size, benchmark.max_length, special_tokens=not benchmark.chat)


# Rows of its log as samples and results.


def _answer_losses(
    rows: Sequence[Row], task: Any, model: LocalModel, benchmark: BenchmarkConfig
) -> Sequence[float | None]:
    """The loss on each row's right answer in bits per byte; None for what has none, such as a document's likelihood.

    Of choices it is at hand. A text that is generated has one where the task's target is a text that may follow the
    prompt; in a chat it is not.
    """
    if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
        return [_loss_of_right_choice(row, task) for row in rows]
    if task.OUTPUT_TYPE != "generate_until" or benchmark.chat:
        return [None] * len(rows)
    delimiter = task.config.target_delimiter
    references = [f"{delimiter}{row['target']}" if isinstance(row["target"], str) else None for row in rows]
    prompts = [row["arguments"][0][0] for row in rows]
    spec = GenSpec(benchmark.max_new_tokens, batch_size=benchmark.batch_size, max_length=benchmark.max_length)
    return model.answer_losses(prompts, references, spec)


def _loss_of_right_choice(row: Row, task: Any) -> float | None:
    """Bits per byte of the choice that lm-eval takes for the right one; None where it is none or several."""
    right: Any = 0
    if task.OUTPUT_TYPE == "multiple_choice":
        right = task.doc_to_text(row["doc"]) if getattr(task, "multiple_input", 0) else row["target"]
        if isinstance(right, str):
            choices = task.doc_to_choice(row["doc"])
            right = choices.index(right) if right in choices else None
    if not isinstance(right, int) or not 0 <= right < len(row["resps"]):
        return None
    likelihood, answer = float(row["resps"][right][0][0]), row["arguments"][right][1]
    return -likelihood / math.log(2) / len(answer.encode())


def _named(rows: Sequence[Row], task: str) -> list[Row]:
    """The rows of a task with the item's name: its id where every item has one of its own, or its number."""
    ids = {row["doc_id"]: str(row["doc"].get("id", row["doc_id"])) for row in rows}
    own = ids if len(set(ids.values())) == len(ids) else {number: str(number) for number in ids}
    return [{**row, "item": f"{task}/{own[row['doc_id']]}" if task else own[row["doc_id"]]} for row in rows]


def _rows_with(metric: str, rows: Sequence[Row], benchmark: BenchmarkConfig) -> list[Row]:
    """The rows that report `metric`, or `metric,filter` where a task has several filters."""
    name, _, wanted = metric.partition(",")
    filters = list(dict.fromkeys(row["filter"] for row in rows))
    chosen = wanted or filters[0]
    if chosen not in filters:
        raise unknown(f"benchmark {benchmark.name}: filter", chosen, filters)
    if not wanted and len(filters) > 1:
        raise UserError(f"benchmark {benchmark.name}: {metric} has several filters: add one of {', '.join(filters)}")
    if name not in rows[0]["metrics"]:
        raise unknown(f"benchmark {benchmark.name}: metric", name, rows[0]["metrics"])
    return [row for row in rows if row["filter"] == chosen]


def _sample(result: str, metric: str, row: Row) -> Sample:
    first, value = row["resps"][0][0], row[metric.partition(",")[0]]
    if isinstance(first, str):
        output, extracted = first, str(row["filtered_resps"][0])
    elif isinstance(first, float):  # the likelihood of a whole document
        output, extracted = json.dumps(round(first, 4)), ""
        value = -value[0] / value[1]
    else:
        likelihoods = [float(answer[0][0]) for answer in row["resps"]]
        # The space in front of an answer does not count.
        lengths = [len(answer) - 1 if metric == "acc_norm" else 1 for _, answer in row["arguments"]]
        output = json.dumps([round(likelihood, 4) for likelihood in likelihoods])
        extracted = str(int(np.argmax(np.array(likelihoods) / lengths)))
    return Sample(
        benchmark=result,
        item=row["item"],
        outcome=float(value),
        prompt_hash=prompt_hash("\0".join(str(arguments[0]) for arguments in row["arguments"])),
        output=output,
        extracted=extracted,
        answer_loss=row["answer_loss"],
    )


def _result(
    name: str, metric: str, rows: Sequence[Row], samples: Sequence[Sample], benchmark: BenchmarkConfig
) -> Result:
    """The mean outcome; for documents, whose outcome is nats per word or byte, what lm-eval makes of their mean."""
    if not isinstance(rows[0][metric.partition(",")[0]], tuple):
        return mean_result(name, metric, samples, benchmark)
    loss, error = weighted_loss([sample["outcome"] for sample in samples], [row[metric][1] for row in rows])
    bits = metric == "bits_per_byte"
    value = loss / math.log(2) if bits else math.exp(loss)
    slope = 1 / math.log(2) if bits else value
    stderr = None if error is None else error * slope
    return Result(
        benchmark=name, metric=metric, score=value, stderr=stderr, n=len(samples), expected=benchmark.expected
    )


# What lm-eval would do to the process around it.


def _no_bar(*arguments: Any, **settings: Any) -> Any:
    return tqdm(*arguments, **{**settings, "disable": True})


@contextmanager
def _quiet() -> Iterator[None]:
    """Only errors from lm-eval, and no progress bars."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with ExitStack() as stack:
        for module in (lm_eval.api.task, lm_eval.models.huggingface):
            stack.enter_context(patch.object(module, "tqdm", _no_bar))
        stack.callback(logger.setLevel, level)
        if bars:
            stack.callback(datasets.enable_progress_bars)
        yield


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Python's, numpy's and torch's generators are afterwards as they were."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
