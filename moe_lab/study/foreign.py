"""Import results that other programs have measured into a store: the files of lm-eval, EvalPlus and
EvalScope, and those that moe_lab exports in lm-eval's format."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab import criteria
from moe_lab.arguments import Parser
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known, reason_in
from moe_lab.evaluation.adapters.evalscope_worker import item_name
from moe_lab.evaluation.harness import mean_result
from moe_lab.evaluation.harnesses.evalplus import dataset_of
from moe_lab.evaluation.items import Answer, Item, Reply, Text
from moe_lab.evaluation.mirror import shipped_settings
from moe_lab.paths import check_name
from moe_lab.result_files import (
    FIGURE_STEPS,
    RECORD,
    SCHEMA,
    STEPS,
    Result,
    Sample,
    Scale,
    document_keys,
)
from moe_lab.study.runs import create_run
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.foreign import Foreign, ForeignTask
from moe_lab.study.store import Store

NONE = ("criterion", "granularity", "calibration", "allocation", "replacement", "recovery", "gate")
"""Axes that are `none` for an unpruned model."""
UNPRUNED = {**dict.fromkeys(NONE, "none"), "protect": None, "ratio": 0.0, "seed": 0}
PRUNED = {"allocation": "uniform", "gate": "model", "seed": 42}
"""Axis in a record -> its default for an imported cell, if it is pruned or not."""


def import_results(
    path: str | Path, store: str | Path = "store", study: str = "imported", **axes: Any
) -> str:
    """Add results of lm-eval, EvalPlus or EvalScope to a study of a store, as one cell. Returns a
    sentence about what was imported.

    path: a file or folder, see `read`. axes: those of the cell, of which the
    model is needed, and for a pruned model criterion and ratio. Files that moe_lab has exported
    have their axes. The axis `source` of the cell is the program. The cell is compared with cells
    of other studies as study=A,B, and its items are paired with theirs by the hashes of documents.

    Raises UserError for files that cannot be read, for unknown axes, and without a model.
    """
    check_name("study", study)
    for axis in axes:
        check_known("import: axis", axis, ["model", *UNPRUNED])
    tasks = read(Path(path))
    defaults = PRUNED if "criterion" in axes else {}
    cell = {**UNPRUNED, **defaults, **tasks[0].cell, **axes, "source": tasks[0].source}
    if "model" not in cell:
        raise UserError("import: the model is unknown, expected model=NAME as in your studies")
    try:
        cell |= {"ratio": float(cell["ratio"]), "seed": int(cell["seed"])}
    except ValueError:
        raise UserError(
            f"import: ratio={cell['ratio']} seed={cell['seed']}: expected numbers"
        ) from None
    if known := criteria.CRITERIA.get(cell["criterion"]):
        cell["granularity"] = known.granularity
    steps = {task.name: Foreign.of(task) for task in tasks}
    entry = {
        "cell": cell,
        "protocol": tasks[0].source,
        **dict.fromkeys(STEPS),
        "evaluate": {name: step.folder for name, step in steps.items()},
        "errors": {},
    }
    record = {
        "schema": SCHEMA,
        "study": study,
        "created": time.time(),
        "moe_lab": moe_lab.__version__,
        "replaces": [],  # earlier imports stay
        "config": {"study": study},
        "cells": [entry],
        **{figure: [] for figure in FIGURE_STEPS},
    }
    target = Store(store).create()
    with target.errors_as_sentences(), create_run(target, study, list(steps.values())) as run:
        for step in steps.values():
            with target.claim(step) as scratch:
                if scratch:  # None if the same results were imported before
                    step.work(Files.of(step, target, scratch))
        target.write(run.folder / RECORD, record)
    names = [result["benchmark"] for task in tasks for result in task.results]
    return (
        f"{path}: results of {tasks[0].source} on {', '.join(names)} are in study={study} of "
        f"store={target.root}"
    )


def main(arguments: Sequence[str]) -> int:
    """`moe-lab import PATH model=NAME [AXIS=VALUE ...]`. Returns the exit code."""
    parser = Parser(prog="moe-lab import", description=import_results.__doc__)
    parser.add_argument("path", help="a file of lm-eval, EvalPlus or EvalScope, or a folder")
    for name in ("store", "study", "model", *UNPRUNED):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    print(import_results(**vars(parser.read(arguments))))
    return 0


# Files of other programs.


def read(path: Path) -> list[ForeignTask]:
    """The results in a file, or in all files of a folder. Raises UserError when there are none,
    when a file cannot be read, and when two files have the same task."""
    tasks: dict[str, ForeignTask] = {}
    for pattern, read_file in _READERS.items():
        for file in sorted(path.rglob(pattern)) if path.is_dir() else [path]:
            if not file.match(pattern):
                continue
            try:
                file_tasks = list(read_file(file))
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{file} cannot be read ({reason_in(error)}): expected the file "
                    "as its program wrote it"
                ) from error
            for task in file_tasks:
                if task.name in tasks:
                    raise UserError(f"{path} has {task.name} twice: name one of the files")
                tasks[task.name] = task
    if not tasks:
        raise UserError(
            f"{path} has no results: expected a file {', '.join(_READERS)}, or a folder with one"
        )
    return list(tasks.values())


def _document(file: Path) -> Any:
    return _parse(file.read_text(encoding="utf-8"))


def _parse(text: str) -> Any:
    """The JSON document in `text`, with None for NaN and infinity."""
    return json.loads(text, parse_constant=lambda _: None)


def _lines(file: Path) -> list[Any]:
    """The documents of a file of JSON lines."""
    return [_parse(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


@dataclass(frozen=True)
class _Graded:
    """A graded answer to an item."""

    item: Item
    outcomes: Mapping[str, float]
    """Metric -> outcome."""
    output: str
    extracted: str = ""
    replicate: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)
    """Metric of log-likelihoods -> weight of the item."""

    def sample(self, result_name: str, metric: str) -> Sample:
        """The row of samples.parquet in the result `result_name`."""
        request: Any = self.item.requests[0]
        answer = Answer(self.item.name, str(request.prompt), (Reply(self.output),), self.replicate)
        sample = answer.sample(result_name, self.outcomes[metric], self.extracted)
        return {**sample, "units": self.weights.get(metric)}


def _task(
    source: str, name: str, graded: Sequence[_Graded], results: Mapping[str, Result]
) -> ForeignTask:
    """A task with `results`: metric of `graded` -> result."""
    samples = [
        row.sample(result["benchmark"], metric)
        for metric, result in results.items()
        for row in graded
        if metric in row.outcomes
    ]
    items = {row.item.name: row.item for row in graded}
    return ForeignTask(source, name, list(results.values()), samples, list(items.values()), {})


def _result_name(harness: str, task: str, metric: str, *, alone: bool) -> str:
    """Name of a result: that of the shipped benchmark with this task and metric; otherwise the
    task, with the metric unless it is the task's only one (`alone`)."""
    for settings in shipped_settings("benchmark").values():
        if settings["harness"] == harness and task in (settings["name"], settings["task"]):
            for name, reported in settings["reports"].items():
                if reported == metric:
                    return str(name)
    return task if alone else f"{task}_{metric}"


# lm-eval.


_LOSSES: Mapping[str, tuple[Scale, str, float]] = {
    "perplexity": ("perplexity", "nats per answer", 1.0),
    "word_perplexity": ("perplexity", "nats per word", 1.0),
    "byte_perplexity": ("perplexity", "nats per byte", 1.0),
    "bits_per_byte": ("loss", "bits per byte", 1 / math.log(2)),
}
"""lm-eval's metric of log-likelihoods -> (scale, unit of the loss, factor from nats to this
unit)."""


def _lm_eval(file: Path) -> Iterator[ForeignTask]:
    """The tasks of a file results_TIME.json, with the samples of the files samples_TASK_TIME.jsonl
    beside it. A group of tasks that has a score is one task."""
    document = _document(file)
    own = document.get("moe_lab")
    groups = document.get("groups", {})
    subtasks = document.get("group_subtasks", {})
    members = {task for group in groups for task in subtasks[group]}
    scores = {**document["results"], **groups}
    for name in scores:
        if name in members:
            continue
        leaves = _leaves(name, subtasks)
        rows = []
        for leaf in leaves:
            samples_file = file.with_name(file.name.replace("results", f"samples_{leaf}") + "l")
            if samples_file.exists():  # lm-eval only writes it with --log_samples
                rows += _lines(samples_file)
        if own:
            samples = [row["moe_lab"] for row in rows]
            # an item with several answers occurs several times
            items = {row["moe_lab"]["item"]: _item(row["moe_lab"]["item"], row) for row in rows}
            results = [own["results"][name]]
            yield ForeignTask("imported", name, results, samples, list(items.values()), own["cell"])
        else:
            yield _lm_eval_task(document, name, scores[name], leaves, rows)


def _leaves(name: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group and of its groups; for a task, the task."""
    if not subtasks.get(name):
        return [name]
    return [leaf for task in subtasks[name] for leaf in _leaves(task, subtasks)]


def _lm_eval_task(
    document: Mapping[str, Any],
    name: str,
    scores: Mapping[str, Any],
    leaves: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> ForeignTask:
    """A task with `scores` and with `rows`, the lines of its files of samples. `leaves`: the task,
    or the tasks of a group."""
    counts = [document["n-samples"][leaf] for leaf in leaves]
    # METRIC,FILTER
    keys = [
        key
        for key, value in scores.items()
        if "," in key and "_stderr," not in key and isinstance(value, float)
    ]
    results = {}
    for key in keys:
        metric, _, filter_name = key.partition(",")
        higher_is_better = document["higher_is_better"].get(name, {}).get(metric)
        default: Scale = "loss" if higher_is_better is False else "score"
        scale, unit, _ = _LOSSES.get(metric, (default, "", 1.0))
        # as in conf/benchmark, a filter is named only beside another one
        full_metric = key if sum(other.startswith(f"{metric},") for other in keys) > 1 else metric
        error = scores.get(f"{metric}_stderr,{filter_name}")
        results[key] = Result(
            benchmark=_result_name("lm_eval", name, full_metric, alone=len(keys) == 1),
            metric=full_metric,
            score=scores[key],
            scale=scale,
            unit=unit,
            stderr=error if isinstance(error, float) else None,
            n=sum(count["effective"] for count in counts),
            expected=sum(count["original"] for count in counts),
        )
    return _task("lm-eval", name, list(_graded_rows(rows)), results)


def _graded_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Graded]:
    """Yield the graded answers in lines of lm-eval, each to one item after one filter."""
    for filter_name in dict.fromkeys(row["filter"] for row in rows):
        filter_rows = [row for row in rows if row["filter"] == filter_name]
        keys = document_keys(row["doc_hash"] for row in filter_rows)
        for key, row in zip(keys, filter_rows, strict=True):
            outcomes = {}
            weights = {}
            for metric in row["metrics"]:
                name = f"{metric},{filter_name}"
                value = row[metric]
                if metric in _LOSSES:
                    # a log-likelihood, or a pair of it and a number of words or bytes
                    nats, weight = value if isinstance(value, list) else (value, 1.0)
                    outcomes[name] = -nats / weight * _LOSSES[metric][2]
                    weights[name] = float(weight)
                elif isinstance(value, int | float):  # otherwise a metric of the whole set
                    outcomes[name] = float(value)
            output = row["resps"][0][0]
            extracted = ""
            if isinstance(output, list):  # the first of a pair is the likelihood of a choice
                output = json.dumps([float(pair[0]) for (pair,) in row["resps"]])
            else:
                extracted = str(row["filtered_resps"][0])
            yield _Graded(_item(key, row), outcomes, str(output), extracted, weights=weights)


def _item(name: str, row: Mapping[str, Any]) -> Item:
    """The item of a line of lm-eval."""
    prompt = row["arguments"]["gen_args_0"]["arg_0"] if row["arguments"] else ""
    return Item(name, (Text(prompt, 0),), row["target"], row["doc_hash"])


# EvalPlus and EvalScope, whose scores are means of outcomes.


def _task_of_means(source: str, name: str, graded: Sequence[_Graded]) -> ForeignTask:
    """A task whose results are the means of outcomes."""
    harness = source.lower()
    benchmark = BenchmarkConfig(name=name, harness=harness, task=name)
    results = {}
    metrics = graded[0].outcomes.keys()
    for metric in metrics:
        result_name = _result_name(harness, name, metric, alone=len(metrics) == 1)
        samples = [row.sample(result_name, metric) for row in graded]
        results[metric] = mean_result(result_name, metric, samples, benchmark)
    return _task(source, name, graded, results)


def _evalplus(file: Path) -> Iterator[ForeignTask]:
    """The task of a file SAMPLES_eval_results.json, which has no prompts."""
    programs_by_task = _document(file)["eval"]
    graded = []
    for task_id, programs in programs_by_task.items():
        item = Item(task_id, (Text("", 0),))
        for replicate, program in enumerate(programs):
            # all tests are passed only with the base tests
            base = float(program["base_status"] == "pass")
            plus = base * (program["plus_status"] == "pass")
            outcomes = {"base": base, "plus": plus}
            if program["plus_status"] is None:
                del outcomes["plus"]
            graded.append(_Graded(item, outcomes, program["solution"], replicate=replicate))
    yield _task_of_means("EvalPlus", dataset_of(programs_by_task), graded)


def _evalscope(file: Path) -> Iterator[ForeignTask]:
    """The task of a file reports/MODEL/TASK.json, from reviews/MODEL/TASK_SUBSET.jsonl."""
    name = file.stem
    graded = []
    for reviews in sorted((file.parents[2] / "reviews" / file.parent.name).glob(f"{name}_*.jsonl")):
        subset = reviews.stem.removeprefix(f"{name}_")
        for row in _lines(reviews):
            score = row["sample_score"]["score"]
            messages = [
                {"role": message["role"], "content": message["content"]}
                for message in row["messages"]
                if message["role"] != "assistant"
            ]
            item = Item(
                item_name(subset, row["index"], messages),
                (Text(messages, 0),),
                ", ".join(row["target"]),
            )
            outcomes = {metric: float(value) for metric, value in score["value"].items()}
            graded.append(
                _Graded(item, outcomes, score["prediction"], score["extracted_prediction"])
            )
    yield _task_of_means("EvalScope", name, graded)


_READERS = {
    "results_*.json": _lm_eval,
    "*eval_results.json": _evalplus,
    "reports/*/*.json": _evalscope,
}
"""Pattern of a file's path -> the function that yields the tasks in the file."""
