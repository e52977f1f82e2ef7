"""Build lm-eval's tasks on moe_lab's data by lm-eval's public `TaskManager`, and check the tasks.

Tasks get their data from `datasets.load_dataset`. This function is replaced while tasks are built,
so that neither the hub nor a cache on disk nor the current folder is used.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval.api.task
from lm_eval.api.registry import metric_registry
from lm_eval.tasks import TaskManager

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known
from moe_lab.evaluation import mirror
from moe_lab.evaluation.harness import harness_of

SEED = 1234
"""Default of parameters.fewshot_seed, by which examples are chosen: that of lm-eval."""
TasksAndGroups = Mapping[str, Any]
"""{"tasks": name -> lm-eval's task, "groups": name -> group of tasks; a requested group comes
first}."""
_tasks_by_identity: dict[str, TasksAndGroups] = {}
"""Identity of a benchmark's questions, as JSON -> its tasks and groups."""
logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()


def tasks_and_groups(benchmark: BenchmarkConfig) -> TasksAndGroups:
    """The tasks, with their requests, and groups of a benchmark. A benchmark has one task, or all
    tasks of a group such as mmlu.

    UserError when the task evaluates a split other than `benchmark.split`, when the task has fewer
    few-shot examples than it shows, and when an item to evaluate has no right answer.
    """
    key = json.dumps(harness_of(benchmark).question_identity(benchmark))
    if key not in _tasks_by_identity:
        # only items of a published data set have `data`
        load = _load_defined if benchmark.data is None else _load_published
        _tasks_by_identity[key] = load(benchmark)
    return _tasks_by_identity[key]


def check_weights(benchmark: BenchmarkConfig) -> None:
    """Raise UserError for a group whose tasks weigh the same (weight_by_size: false), because a
    score is the mean over the items of all tasks."""
    loaded = tasks_and_groups(benchmark)
    # the requested group; further groups are its subgroups
    for group in list(loaded["groups"].values())[:1]:
        if not all(rule.weight_by_size for rule in group.aggregate_metric_list or ()):
            raise UserError(
                f"benchmark {benchmark.name}: the tasks of {group.name} weigh the same, whatever "
                f"their size: expected one of its tasks, such as {next(iter(loaded['tasks']))}"
            )


def _load_published(benchmark: BenchmarkConfig) -> TasksAndGroups:
    """Load a task or group of lm-eval with data from the benchmark's mirror."""
    subsets = mirror.subsets(benchmark)  # subset -> split -> files

    # replaces datasets.load_dataset, which takes the subset as `name`
    def load_from_mirror(path: str, name: str | None = None, **_: Any) -> _Splits:
        subset = benchmark.subset or name or "default"
        check_known(f"benchmark {benchmark.name}: subset of the mirror", subset, subsets)
        return _Splits(defaultdict(list, subsets[subset]))

    harness: Any = harness_of(benchmark)
    return _load(benchmark, benchmark.task, load_from_mirror, str(harness.task_folder(benchmark)))


def _load_defined(benchmark: BenchmarkConfig) -> TasksAndGroups:
    """Load a task with items from a local file. Every split of the task has all items. UserError
    for a metric that lm-eval does not have, because code from elsewhere would compute it."""
    harness: Any = harness_of(benchmark)
    definition = harness.definition(benchmark)
    for metric in definition.get("metric_list", ()):
        field = f"benchmark {benchmark.name}: metric_list.metric"
        check_known(field, metric["metric"], metric_registry)
        if metric.get("hf_evaluate"):
            raise UserError(f"{field}={metric['metric']} with hf_evaluate=true: expected false")
    items_file = harness.paths(benchmark)[-1]
    return _load(benchmark, definition, lambda *_, **__: _Splits(defaultdict(lambda: [items_file])))


def _load(
    benchmark: BenchmarkConfig,
    task: str | dict[str, Any],
    load_dataset: Callable[..., Mapping[str, Any]],
    folder: str | None = None,
) -> TasksAndGroups:
    """The tasks with their requests. `task`: name of a task or group in `folder`, or the
    definition of a task. `load_dataset` replaces `datasets.load_dataset`."""
    # lm-eval would need ten seconds to index all its tasks
    manager = TaskManager(include_path=folder, include_defaults=False)
    with (
        patch.object(datasets, "load_dataset", load_dataset),
        patch.object(lm_eval.api.task, "tqdm", lambda iterable, **_: iterable),
    ):
        try:
            loaded: TasksAndGroups = manager.load([task])
        except IndexError as error:  # lm-eval reads the first item when it builds a task
            raise UserError(
                f"benchmark {benchmark.name}: the first item cannot be read: expected one or more "
                "items, a label that is one of the choices, and no empty choice"
            ) from error
        _add_requests(loaded["tasks"], benchmark)
    return loaded


def _add_requests(tasks_by_name: Mapping[str, Any], benchmark: BenchmarkConfig) -> None:
    """Configure the tasks, and build the requests of the items to evaluate. `tasks_by_name`: name
    of a task -> task."""
    for name, task in tasks_by_name.items():
        if benchmark.data is None and _fewshot_split(task) is not None:
            # lm-eval excludes an item from its own examples only if both splits have the same name
            task.config.test_split = task.config.fewshot_config.split = _evaluated_split(task)
        _configure(task, name, benchmark)
    for name, numbers in indices_to_evaluate(tasks_by_name, benchmark.limit).items():
        task = tasks_by_name[name]
        _check_labels(task, name, numbers, benchmark)
        task.set_fewshot_seed(seed=benchmark.parameters.get("fewshot_seed", SEED))
        task.build_all_requests(
            samples=numbers,
            apply_chat_template=benchmark.chat,
            fewshot_as_multiturn=benchmark.chat,
            # lm-eval expects a text from a chat template; `lm_eval._request` decodes the JSON
            chat_template=(lambda messages, **_: json.dumps(messages)) if benchmark.chat else None,
        )


class _Splits(dict[str, Any]):
    """Name of a split -> its rows, which are read when the split is first used. `files`: name of a
    split -> files."""

    def __init__(self, files: defaultdict[str, list[Path]]) -> None:
        super().__init__()
        self.files = files

    def __missing__(self, split: str) -> Any:
        """Read the rows of a split from its files, and keep them."""
        self[split] = datasets.Dataset.from_list(
            [row for file in self.files[split] for row in mirror.read_rows(file)]
        )
        return self[split]


def _configure(task: Any, name: str, benchmark: BenchmarkConfig) -> None:
    """Apply the benchmark's settings to a task, and check the task."""
    for feature in ("UNSAFE_CODE", "MULTIMODAL"):
        if getattr(task, feature, False):
            raise UserError(
                f"benchmark {benchmark.name}: {name} is {feature}, which is not supported: "
                "expected another"
            )
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise UserError(
            f"benchmark {benchmark.name}: {name} scores whole documents: expected another task, or "
            "harness=perplexity"
        )
    if benchmark.chat and task.OUTPUT_TYPE != "generate_until":
        raise UserError(
            f"benchmark {benchmark.name}: chat=true, and {name} computes likelihoods: expected "
            "chat=false, as a chat template would move the answers"
        )
    split = _evaluated_split(task)
    if benchmark.split is not None and split != benchmark.split:
        raise UserError(
            f"benchmark {benchmark.name}: split={benchmark.split}, but {name} evaluates {split}"
        )
    # a task with items from a local file keeps its own num_fewshot if the benchmark has shots=0
    if benchmark.shots or benchmark.data is not None or task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=benchmark.shots)
    if task.config.num_fewshot:
        _check_examples(task, name, benchmark)
    if benchmark.max_new_tokens and task.OUTPUT_TYPE == "generate_until":
        task.set_config(
            key="generation_kwargs", value={"max_gen_toks": benchmark.max_new_tokens}, update=True
        )


def _evaluated_split(task: Any) -> Any:
    """The name of the split from which lm-eval takes the items to evaluate."""
    return task.config.test_split or task.config.validation_split


def _fewshot_split(task: Any) -> Any:
    """The name of the split from which lm-eval takes few-shot examples; None if the configuration
    of the task contains the examples."""
    config = task.config
    fewshot = config.fewshot_config
    if fewshot.split is None and fewshot.samples is not None:
        return None
    return fewshot.split or config.training_split or config.validation_split or config.test_split


def _check_examples(task: Any, name: str, benchmark: BenchmarkConfig) -> None:
    """Raise UserError if a task has fewer few-shot examples than it shows with an item, or if
    lm-eval could show an item as its own example."""
    evaluated_split = _evaluated_split(task)
    fewshot_split = _fewshot_split(task)
    config = task.config
    shots = config.num_fewshot
    # lm-eval excludes the item from its own examples if fewshot_config.split equals test_split,
    # also if both are None
    excludes_item = fewshot_split is not None and config.fewshot_config.split == config.test_split
    if fewshot_split == evaluated_split and not excludes_item:
        raise UserError(
            f"benchmark {benchmark.name}: shots={shots}, but {name} takes examples from the "
            f"evaluated split {evaluated_split}, so an item could be shown with its answer: "
            "expected shots=0"
        )
    examples = Counter(json.dumps(doc, sort_keys=True, default=str) for doc in task.fewshot_docs())
    count = examples.total()
    # lm-eval excludes the item with all its copies
    if excludes_item:
        count -= max(examples.values(), default=0)
    if count < shots:
        raise UserError(
            f"benchmark {benchmark.name}: shots={shots}, but {name} has {count} examples to show "
            f"with an item: expected {count} or fewer"
        )


def _check_labels(task: Any, name: str, numbers: Sequence[int], benchmark: BenchmarkConfig) -> None:
    """Raise UserError for an item whose label is hidden (-1, null) or is none of its choices.
    `numbers`: indices of the items to check."""
    if task.config.process_results is not None:  # a function grades
        return
    for number in numbers:
        doc = task.task_docs[number]
        label = label_of(task, doc)
        labels = label if isinstance(label, list) else [label]
        choices = None if task.config.doc_to_choice is None else task.doc_to_choice(doc)
        if choices is None:
            has_right_answer = label is not None
            expected = "a text"
        else:
            valid_labels: list[Any] = list(range(len(choices)))
            if labels is not label:  # lm-eval cannot compare texts in a list
                valid_labels += choices
            has_right_answer = bool(labels) and all(
                isinstance(entry, int | str) and entry in valid_labels for entry in labels
            )
            expected = f"a number from 0 to {len(choices) - 1} or the text of a choice"
        if not has_right_answer:
            raise UserError(
                f"benchmark {benchmark.name}: item {doc.get('id', number)} of {name} has "
                f"label={label!r}, so no answer is right: expected {expected}"
            )


def label_of(task: Any, doc: Mapping[str, Any]) -> Any:
    """The label of an item: the number or text of a choice, a list of numbers of choices, or, for
    an item without choices, the text of the right answer."""
    # if each choice has its own context, lm-eval's doc_to_text returns the label
    return task.doc_to_text(doc) if getattr(task, "multiple_input", 0) else task.doc_to_target(doc)


def indices_to_evaluate(
    tasks_by_name: Mapping[str, Any], limit: int | None
) -> dict[str, list[int]]:
    """Name of a task -> indices of the items to evaluate: 0, 1, ... With a `limit`, each task in
    turn gives its next item, until there are `limit` items in total. `tasks_by_name`: name of a
    task -> task."""
    sizes = {name: len(task.task_docs) for name, task in tasks_by_name.items()}
    items_in_turn = sorted((number, name) for name, size in sizes.items() for number in range(size))
    counts = Counter(name for _, name in items_in_turn[:limit])
    return {name: list(range(counts[name])) for name in tasks_by_name if counts[name]}
