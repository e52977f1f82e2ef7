"""lm-eval with its own tasks, prompts, filters and metrics, and with moe_lab's data, generation and likelihoods.

Tasks are built by lm-eval's public `TaskManager`. While it runs, `datasets.load_dataset`, from which tasks get their
data, is replaced, so that neither the hub nor a cache on disk nor the current folder is used.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval.models.huggingface
import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api import metrics
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown
from moe_lab.evaluation import mirror
from moe_lab.evaluation.generation import Answer, GenSpec, LanguageModel
from moe_lab.evaluation.harness import Graded, loss_result, mean_result, prompt_hash
from moe_lab.evaluation.harnesses import lm_eval_folders
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.evaluation.suite import check_count, data_digest, data_files
from moe_lab.results import Result, Sample

Row = dict[str, Any]
Aggregation = Callable[[Any], Any]


def evaluate(model: LanguageModel, benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Run a task, or a group of tasks whose items have equal weight.

    Both caches of lm-eval are off, because their keys contain neither the model nor the data. Raises UserError for a
    metric that the task lacks or that has no outcome of an item, an unexpected number of items, a task that samples,
    and an item longer than the model can read.
    """
    with _quiet(), _random_state_kept():
        by_name = tasks(benchmark)
        check_count(benchmark, sum(len(task.task_docs) for task in by_name.values()))
        items = first_items(by_name, benchmark.limit)
        aggregations = {metric: _aggregation(metric, by_name, benchmark) for metric in benchmark.reports.values()}
        lm = MoeLabLM(model, benchmark, by_name)
        results = evaluator.evaluate(
            lm=lm,
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
        for row, loss in zip(logged, losses, strict=True):
            written = lm.written.get((name, row["doc_id"]))
            rows.append({**row, "answer_loss": loss, **_of_written(written, row, by_name[name], benchmark)})
    samples: list[Sample] = []
    scores: list[Result] = []
    for result, metric in benchmark.reports.items():
        of_metric = _rows_with(metric, rows, benchmark)
        of_loss = _OF_LOSSES.get(aggregations[metric])
        outcomes = [_outcome_and_units(row[metric.partition(",")[0]], loss=of_loss is not None) for row in of_metric]
        own = [_sample(result, metric, row, outcome) for row, (outcome, _) in zip(of_metric, outcomes, strict=True)]
        samples += own
        if of_loss is not None:
            nats, units = zip(*outcomes, strict=True)
            scores.append({**loss_result(result, of_loss, nats, units, benchmark), "metric": metric})
        else:
            scores.append(mean_result(result, metric, own, benchmark))
    protocol = {
        "task": benchmark.task if benchmark.data is not None else next(iter(items)),
        "task_version": ", ".join(sorted({str(results["versions"].get(name)) for name in items})),
        "num_fewshot": by_name[next(iter(items))].config.num_fewshot,
        "prompt": rows[0]["arguments"][0][0],
    }
    if unfinished := list(dict.fromkeys(row["item"] for row in rows if row.get("unfinished"))):
        protocol["unfinished_thoughts"] = unfinished
    return Graded(scores, samples, protocol)


def first_items(by_name: Mapping[str, Any], limit: int | None) -> dict[str, list[int]]:
    """Task -> numbers of its items to evaluate: all, or `limit` in total, taken from the tasks in turn."""
    sizes = {name: len(task.task_docs) for name, task in by_name.items()}
    places = sorted((number, name) for name, size in sizes.items() for number in range(size))[:limit]
    counts = Counter(name for _, name in places)
    return {name: list(range(counts[name])) for name in by_name if counts[name]}


# Tasks and their data.

_SEED = 1234
"""The default of lm-eval's own command line."""
_built: dict[str, dict[str, Any]] = {}


def tasks(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """Name -> task; several for a group such as mmlu. Built once per process for the same data and settings.

    Examples are drawn anew in each call, as in a new process. Raises UserError when the task's split is not the
    benchmark's, when the task lacks examples to show, or when an item to evaluate has no right answer.
    """
    settings = (benchmark.task, benchmark.parameters, benchmark.subset, benchmark.split, benchmark.shots)
    key = f"{data_digest(benchmark)} {settings} {benchmark.max_new_tokens} {benchmark.limit}"
    if key not in _built:
        by_name = _stock(benchmark) if benchmark.data is not None else _own(benchmark)
        for name, task in by_name.items():
            _set(task, name, benchmark)
        for name, numbers in first_items(by_name, benchmark.limit).items():
            _check_labels(by_name[name], name, numbers, benchmark)
        _built[key] = by_name
    for task in _built[key].values():
        task.set_fewshot_seed(seed=_SEED)
    return _built[key]


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
    if count <= 0:
        raise UserError(
            f"benchmark {benchmark.name}: shots={shots}, but {name} has no examples to show: its data has only the "
            f"split {split}"
        )
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
        label = task.doc_to_text(doc) if getattr(task, "multiple_input", 0) else task.doc_to_target(doc)
        labels = label if isinstance(label, list) else [label]
        choices = None if task.config.doc_to_choice is None else task.doc_to_choice(doc)
        if labels and all(_is_answer(each, choices) for each in labels):
            continue
        expected = "a text" if choices is None else f"a number from 0 to {len(choices) - 1} or the text of a choice"
        raise UserError(
            f"benchmark {benchmark.name}: item {doc.get('id', number)} of {name} has label={label!r}, so no answer is "
            f"right: expected {expected}"
        )


def _is_answer(label: Any, choices: Sequence[str] | None) -> bool:
    return label is not None if choices is None else label in range(len(choices)) or label in choices


# The model.


class MoeLabLM(HFLM):
    """A language model for lm-eval: lm-eval makes the tokens of questions and answers, the model does the rest."""

    def __init__(self, model: LanguageModel, benchmark: BenchmarkConfig, by_name: Mapping[str, Any]) -> None:
        lengths = [length for length in (model.max_length, benchmark.max_length) if length is not None]
        super().__init__(
            pretrained=_Network(model.config),
            tokenizer=model.tokenizer,
            batch_size=benchmark.batch_size,
            max_length=min(lengths, default=None),
            chat_template_args=dict(model.template_arguments),
        )
        self.language_model, self.benchmark, self.by_name = model, benchmark, by_name
        self._tokens = _tokens_of(model.tokenizer, benchmark.name)
        self.written: dict[tuple[str, int], Answer] = {}
        """(task, number of the item) -> what the model wrote, of which lm-eval gets the answer alone."""

    def tok_encode(self, string: str, *settings: Any, **named: Any) -> list[int]:
        """Tokens as by lm-eval. Those of a benchmark's texts are kept for its next evaluation, under another plan."""
        key = (string, settings, tuple(named.items()))
        if key not in self._tokens:
            self._tokens[key] = super().tok_encode(string, *settings, **named)
        return self._tokens[key]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihoods without progress bar. Raises UserError for a text that lm-eval would truncate."""
        self._check_room([request.args[0] + request.args[1] for request in requests])
        likelihoods: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        for request, (likelihood, _) in zip(requests, likelihoods, strict=True):
            if not math.isfinite(likelihood):
                raise FloatingPointError(
                    f"benchmark {self.benchmark.name}: a log-likelihood of item {request.doc_id} is {likelihood}"
                )
        return likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], *_: Any, **__: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the likeliest) of each answer's tokens after those of its question.

        Raises UserError for an answer, or a question, without a token: its likelihood of 1 would beat all others.
        """
        for texts, question, answer in requests:
            if not question or not answer:
                raise UserError(
                    f"benchmark {self.benchmark.name}: the {'answer' if question else 'question'} has no token of its "
                    f"own in question={texts[0][-40:]!r} answer={texts[1]!r}: expected an answer that adds tokens"
                )
        rows = [[*question, *answer][-(self.max_length + 1) :] for _, question, answer in requests]
        starts = [len(row) - len(answer) for row, (_, _, answer) in zip(rows, requests, strict=True)]
        return self.language_model.log_likelihoods(rows, starts, self.benchmark.batch_size)

    def _check_room(self, texts: list[str]) -> None:
        """Raise UserError for a text that has more tokens than are read."""
        # A text has at most as many tokens as bytes, plus a few special ones, so shorter texts need not be tokenized.
        long = [text for text in dict.fromkeys(texts) if len(text.encode()) > self.max_length - 8]
        longest = max((len(ids) for ids in self.tokenizer(long, verbose=False).input_ids), default=0) if long else 0
        if longest > self.max_length + 1:  # the last token is never read
            limit = "model" if self.max_length == self.language_model.max_length else "max_length"
            raise UserError(
                f"benchmark {self.benchmark.name}: a question with its answer has {longest} tokens, and "
                f"{self.max_length} are read: expected a {limit} of {longest - 1} tokens or more, to read it whole"
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate answers to requests (prompt, settings); requests with equal settings are generated together.

        Thoughts are left out; one that does not end is an empty answer.
        """
        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for settings, numbers in groups.items():
            spec = _spec(json.loads(settings), self.benchmark)
            prompts = [requests[number].args[0] for number in numbers]
            answers = [self._right_answer(requests[number]) for number in numbers]
            for number, text in zip(numbers, self.language_model.generate(prompts, spec, answers), strict=True):
                request = requests[number]
                answer = Answer(str(request.doc_id), request.args[0], text)
                self.written[request.task_name, request.doc_id] = answer
                texts[number] = answer.without_thought(chat=self.benchmark.chat) or ""
        return texts

    def _right_answer(self, request: Instance) -> str | None:
        task = self.by_name[request.task_name]
        return _right_text(task.doc_to_target(request.doc), task, self.benchmark)


@lru_cache(maxsize=1)
def _tokens_of(tokenizer: Any, benchmark: str) -> dict[Any, list[int]]:
    """What a tokenizer has made of the texts of a benchmark so far."""
    return {}


@dataclass(frozen=True)
class _Network:
    """What lm-eval asks of a model that it does not run."""

    config: Any
    device: str = "cpu"


def _spec(settings: Mapping[str, Any], benchmark: BenchmarkConfig) -> GenSpec:
    if settings.get("do_sample") or float(settings.get("temperature") or 0) > 0:
        raise UserError(
            f"the task's generation_kwargs {dict(settings)} ask for sampling: only greedy generation is done"
        )
    until = settings.get("until") or []
    # As in lm-eval, an empty stop text ends nothing.
    stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    most = int(settings.get("max_gen_toks", 256))
    return GenSpec(most, stop, benchmark.batch_size, benchmark.max_length, special_tokens=not benchmark.chat)


# Rows of lm-eval's log as samples.


def _answer_losses(
    rows: Sequence[Row], task: Any, model: LanguageModel, benchmark: BenchmarkConfig
) -> Sequence[float | None]:
    """The loss on each row's right answer in bits per byte; None without a right answer, as for a whole document.

    For choices, the likelihoods are in the rows. For generated texts, the loss is computed if the task's target is a
    text that follows the prompt, which it does not in a chat.
    """
    if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
        return [_loss_of_right_choice(row, task) for row in rows]
    if task.OUTPUT_TYPE != "generate_until":
        return [None] * len(rows)
    references = [_right_text(row["target"], task, benchmark) for row in rows]
    prompts = [row["arguments"][0][0] for row in rows]
    spec = GenSpec(benchmark.max_new_tokens, batch_size=benchmark.batch_size, max_length=benchmark.max_length)
    return model.answer_losses(prompts, references, spec)


def _of_written(answer: Answer | None, row: Row, task: Any, benchmark: BenchmarkConfig) -> Row:
    """What a row gets of a generated text: all of it, and no credit for a thought that does not end.

    lm-eval has graded an empty answer then, which some metrics find right.
    """
    if answer is None:
        return {}
    if answer.without_thought(chat=benchmark.chat) is not None:
        return {"written": answer.output}
    higher = task.higher_is_better()
    earned = {name: 0.0 for name in row["metrics"] if higher.get(name, True) and isinstance(row[name], int | float)}
    return {"written": answer.output, "unfinished": True, **earned}


def _right_text(target: Any, task: Any, benchmark: BenchmarkConfig) -> str | None:
    """The text of a right answer as it follows the prompt; None where there is none, as in a chat."""
    return None if benchmark.chat or not isinstance(target, str) else f"{task.config.target_delimiter}{target}"


def _loss_of_right_choice(row: Row, task: Any) -> float | None:
    """Loss on lm-eval's right choice in bits per byte; None if there is not exactly one."""
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
    """The rows of a task with the name of their item: its id if the ids are unique, else its number."""
    ids = {row["doc_id"]: str(row["doc"].get("id", row["doc_id"])) for row in rows}
    unique = len(set(ids.values())) == len(ids)
    named = []
    for row in rows:
        name = ids[row["doc_id"]] if unique else str(row["doc_id"])
        named.append({**row, "item": f"{task}/{name}" if task else name})
    return named


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


def _sample(result: str, metric: str, row: Row, outcome: float) -> Sample:
    first = row["resps"][0][0]
    if isinstance(first, str):
        output, extracted = row["written"], str(row["filtered_resps"][0])
    elif isinstance(first, float):  # the log-likelihood of a whole document
        output, extracted = json.dumps(round(first, 4)), ""
    else:
        likelihoods = [float(answer[0][0]) for answer in row["resps"]]
        # lm-eval does not count the space in front of an answer.
        lengths = [len(answer) - 1 if metric == "acc_norm" else 1 for _, answer in row["arguments"]]
        output = json.dumps([round(likelihood, 4) for likelihood in likelihoods])
        extracted = str(int(np.argmax(np.array(likelihoods) / lengths)))
    return Sample(
        benchmark=result,
        item=row["item"],
        outcome=outcome,
        prompt_hash=prompt_hash("\0".join(str(arguments[0]) for arguments in row["arguments"])),
        output=output,
        extracted=extracted,
        answer_loss=row["answer_loss"],
    )


# Suppress or undo side effects of lm-eval.


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without progress bars, and without messages of lm-eval other than errors."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()

    def no_bar(*arguments: Any, **settings: Any) -> Any:
        return tqdm(*arguments, **{**settings, "disable": True})

    with ExitStack() as stack:
        for module in (lm_eval.api.task, lm_eval.models.huggingface):
            stack.enter_context(patch.object(module, "tqdm", no_bar))
        stack.callback(logger.setLevel, level)
        if bars:
            stack.callback(datasets.enable_progress_bars)
        yield


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """A context after which the random states of Python, numpy and torch are restored."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
