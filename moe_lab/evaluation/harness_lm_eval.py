"""lm-eval on the loaded model: its tasks, prompts, filters and metrics; our data, batches and generation.

Private names of lm-eval 0.4.13 are used in one place, `_build_task`.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval.api.task
import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml
from tqdm import tqdm

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.graded import Graded, mean_result, prompt_hash
from moe_lab.evaluation.policy import Policy
from moe_lab.evaluation.subject import Subject
from moe_lab.evaluation.suite import check_count, data_digest, data_files
from moe_lab.results import Sample

_tasks: dict[str, Any] = {}


def evaluate(subject: Subject, benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Run one task file. Both of lm-eval's caches stay off: neither is keyed by the model or the data.

    Raises UserError for a metric the task does not have, another number of items than expected, a task that samples.
    """
    with _quiet(), _random_state_kept():
        task = _task(benchmark)
        check_count(benchmark, len(task.eval_docs))
        model = SubjectLM(subject, benchmark)
        name = task.config.task
        found = evaluator.evaluate(
            lm=model,
            task_dict={"tasks": {name: task}, "groups": {}},
            limit=benchmark.limit,
            bootstrap_iters=0,
            log_samples=True,
        )
    rows = found["samples"][name]
    samples = [
        _sample(result, metric, row)
        for result, metric in benchmark.reports.items()
        for row in _rows_with(metric, rows, benchmark)
    ]
    results = [mean_result(result, metric, samples, benchmark) for result, metric in benchmark.reports.items()]
    protocol = {
        "task": name,
        "task_version": found["versions"].get(name),
        "num_fewshot": task.config.num_fewshot,
        "prompt": rows[0]["arguments"][0][0],
    }
    return Graded(results, samples, protocol)


# Tasks: built once a process, from a YAML file in lm-eval's format and the JSON lines beside it.


def _task(benchmark: BenchmarkConfig) -> Any:
    key = f"{data_digest(benchmark)} {benchmark.max_new_tokens}"
    if key not in _tasks:
        definition, items = data_files(benchmark)
        _tasks[key] = _build_task(definition, items, benchmark.max_new_tokens)
    return _tasks[key]


def _build_task(definition: Path, items: Path, max_new_tokens: int) -> Any:
    """A task whose data is read from `items` into memory: no cache on disk, no hub, no look at the working folder."""
    rows = [json.loads(line) for line in items.read_text(encoding="utf-8").splitlines() if line.strip()]
    config = load_yaml(definition)
    split = config.get("test_split") or config.get("validation_split") or "test"
    config["custom_dataset"] = lambda **_: datasets.DatasetDict({split: datasets.Dataset.from_list(rows)})
    config.setdefault("num_fewshot", 0)
    if max_new_tokens:
        config["generation_kwargs"] = {**config.get("generation_kwargs", {}), "max_gen_toks": max_new_tokens}
    task = lm_eval.api.task.ConfigurableTask(config=config)
    task.set_fewshot_seed(seed=0)
    return task


# The model as lm-eval sees it.


class SubjectLM(HFLM):
    """lm-eval's own log-likelihoods on the loaded model; generation through the subject, like everybody else's."""

    def __init__(self, subject: Subject, benchmark: BenchmarkConfig) -> None:
        super().__init__(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=benchmark.batch_size)
        self.subject = subject

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval's, without its progress bar."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Texts for (prompt, settings) requests; requests of equal settings are generated together."""
        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for settings, numbers in groups.items():
            spec = _spec(json.loads(settings), self.batch_size)
            prompts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self.subject.generate(prompts, spec), strict=True):
                texts[number] = text
        return texts


def _spec(settings: Mapping[str, Any], batch_size: int) -> GenSpec:
    if settings.get("do_sample") or float(settings.get("temperature") or 0) > 0:
        raise UserError(
            f"the task's generation_kwargs {dict(settings)} ask for sampling: only greedy generation is done"
        )
    until = settings.get("until") or []
    stop = tuple([until] if isinstance(until, str) else until)
    return GenSpec(int(settings.get("max_gen_toks", 256)), stop, batch_size)


# Rows of its log as samples.


def _rows_with(metric: str, rows: Sequence[dict[str, Any]], benchmark: BenchmarkConfig) -> list[dict[str, Any]]:
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


def _sample(result: str, metric: str, row: dict[str, Any]) -> Sample:
    first = row["resps"][0][0]
    if isinstance(first, str):
        output, extracted = first, str(row["filtered_resps"][0])
    else:
        likelihoods = [round(float(answer[0][0]), 4) for answer in row["resps"]]
        output, extracted = json.dumps(likelihoods), str(int(np.argmax(likelihoods)))
    return Sample(
        benchmark=result,
        item=str(row["doc"].get("id", row["doc_id"])),
        outcome=float(row[metric.partition(",")[0]]),
        prompt_hash=prompt_hash("\0".join(str(arguments[0]) for arguments in row["arguments"])),
        output=output,
        extracted=extracted,
    )


# What lm-eval would do to the process around it.


@contextmanager
def _quiet() -> Iterator[None]:
    """Only errors from lm-eval, and no progress bars."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.enter_context(patch.object(lm_eval.api.task, "tqdm", partial(tqdm, disable=True)))
        stack.callback(logger.setLevel, level)
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
