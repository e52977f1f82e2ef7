"""Correctness and speed of lm-eval's adapter on real benchmarks:
`python -m benchmarks.evaluation --data FOLDER`.

FOLDER holds ARC, OpenBookQA, WinoGrande, PIQA, MMLU and WikiText-2 as files
(`benchmarks.data_sets`). A mirror is made from them, and lm-eval's own tasks run from it on a
random model of OLMoE's architecture with a context of 4,096 tokens.

1. equal: acc and acc_norm of every item of the six benchmarks are compared with one unpadded
   forward pass per answer (benchmarks/choices.py). Bar: no item differs. Perplexities of WikiText-2
   are compared with an independent computation. Bar: 1e-4.
2. speed: CPU seconds of the same tasks through the adapter and through lm-eval's own evaluate() on
   the same loaded model, one after the other in each round; the ratio is the median over rounds.
   Bar: 1.05. The second ratio includes building the tasks, which lm-eval builds from the same
   mirror by its `dataset_path`.

Exit code 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import choices
from benchmarks.data_sets import mirror_files
from benchmarks.measure import parser, ratios, rounds
from benchmarks.models import random_model
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror, run
from moe_lab.evaluation.adapters import lm_eval_tasks
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import Graded, harness_of
from moe_lab.evaluation.harnesses.lm_eval import HARNESS
from moe_lab.evaluation.mirror import benchmarks
from moe_lab.paths import resolve

CHOICES = ("arc_challenge", "arc_easy", "openbookqa", "winogrande", "piqa", "mmlu")
TEXT = "wikitext2"
BAR_SPEED = 1.05
BAR_PERPLEXITY = 1e-4


def main() -> int:
    """Make the mirror, measure, print, compare with the bars; returns 1 when a bar fails."""
    arguments = _arguments()
    torch.set_num_threads(1)
    shape = argparse.Namespace(hidden=64, width=32, layers=2, top_k=2)
    engine = LoadedModel(
        random_model(8, shape), AutoTokenizer.from_pretrained(resolve("pocket:olmoe"))
    )
    failed = False
    with tempfile.TemporaryDirectory() as root:
        configs = benchmarks([*CHOICES, TEXT], root)
        for benchmark in configs:
            mirror_files(benchmark, arguments.data, Path(root, "source"))
        configs = [replace(config, limit=arguments.limit, batch_size=16) for config in configs]
        if "equal" in arguments.parts:
            for benchmark in configs:
                differs = _text_differs if benchmark.name == TEXT else _items_differ
                failed |= differs(engine, benchmark)
        if "speed" in arguments.parts:
            limited = [
                replace(benchmark, limit=arguments.items)
                for benchmark in configs
                if benchmark.name in CHOICES
            ]
            failed |= _is_slower(engine, limited, arguments.rounds)
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("evaluation", __doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="a folder with the benchmarks' files"
    )
    options.add_argument(
        "--parts", nargs="+", choices=("equal", "speed"), default=["equal", "speed"]
    )
    options.add_argument("--limit", type=int, help="part 1: the first items of each benchmark only")
    options.add_argument("--items", type=int, default=200, help="part 2: items of each benchmark")
    options.add_argument(
        "--rounds", type=int, default=7, help="part 2: rounds measured, after one that is not"
    )
    return options.parse_args()


# 1. Equality.


def _items_differ(engine: LoadedModel, benchmark: BenchmarkConfig) -> bool:
    """Print the number of items whose outcome differs from the reference; True when one does."""
    metrics = ["acc"] if benchmark.name in ("mmlu", "winogrande") else ["acc", "acc_norm"]
    graded = _graded(engine, replace(benchmark, reports={metric: metric for metric in metrics}))
    questions = [choices.CHOICES[benchmark.name](row) for row in _rows(benchmark)]
    scores = [choices.likelihoods(engine.model, engine.tokenizer, choice) for choice in questions]
    failed = False
    for metric, result in zip(metrics, graded.results, strict=True):
        outcomes = {
            sample["item"]: sample["outcome"]
            for sample in graded.samples
            if sample["benchmark"] == metric
        }
        references = [
            choices.outcome(score, choice, metric)
            for score, choice in zip(scores, questions, strict=True)
        ]
        pairs = zip(outcomes.values(), references, strict=True)
        differing = sum(outcome != reference for outcome, reference in pairs)
        failed |= differing > 0
        print(
            f"{benchmark.name} {metric}: {len(references)} items, {result['score']:.4f}, "
            f"{differing} differ",
            flush=True,
        )
    return failed


def _graded(engine: LoadedModel, benchmark: BenchmarkConfig) -> Graded:
    """Answer and grade a benchmark through its adapter."""
    (answers,) = collect_answers(engine, [(benchmark, run.list_items(benchmark))])
    return harness_of(benchmark).grade(answers, benchmark, Policy())


def _rows(benchmark: BenchmarkConfig) -> list[dict[str, Any]]:
    """Rows in the order in which the adapter reports them: by subset, each up to the limit."""
    from moe_lab.evaluation.adapters.lm_eval_tasks import indices_to_evaluate

    items_of_tasks = indices_to_evaluate(
        lm_eval_tasks.tasks_and_groups(benchmark)["tasks"], benchmark.limit
    )
    by_subset = mirror.subsets(benchmark)
    rows: list[dict[str, Any]] = []
    for task, items in items_of_tasks.items():
        subset = benchmark.subset or (
            task.removeprefix("mmlu_") if len(by_subset) > 1 else "default"
        )
        of_subset: list[dict[str, Any]] = []
        for file in by_subset[subset][str(benchmark.split)]:
            of_subset += mirror.read_rows(file)
        rows += of_subset[: len(items)]
    return rows


def _text_differs(engine: LoadedModel, benchmark: BenchmarkConfig) -> bool:
    """Print a perplexity and the reference; True when their ratio differs from 1 by more than
    BAR_PERPLEXITY."""
    text = "\n\n".join(row["text"] for row in mirror.rows(benchmark))
    reference = choices.perplexity(
        engine.model, engine.tokenizer, text, benchmark.parameters["length"], benchmark.limit
    )
    (result,) = _graded(engine, benchmark).results
    deviation = abs(result["score"] / reference - 1)
    print(
        f"{benchmark.name}: {result['score']:.6f}, independently {reference:.6f}, "
        f"{deviation:.1e} apart",
        flush=True,
    )
    return deviation > BAR_PERPLEXITY


# 2. Speed.


def _is_slower(engine: LoadedModel, configs: Sequence[BenchmarkConfig], count: int) -> bool:
    """Print the ratios of CPU seconds of the adapter to those of lm-eval's evaluate(); True when
    one is above BAR_SPEED. count: number of rounds."""
    comparisons: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        (
            "evaluating",
            lambda: _run_adapter(engine, configs),
            lambda: _run_lm_eval(engine, configs),
        ),
        (
            "building the tasks and evaluating",
            lambda: _build_and_run_adapter(engine, configs),
            lambda: _build_and_run_lm_eval(engine, configs),
        ),
    ]
    failed = False
    for name, adapter, lm_eval in comparisons:
        pair = {"adapter": adapter, "lm-eval": lm_eval}
        with contextlib.redirect_stderr(io.StringIO()):
            rounds(pair, 1)  # the first round is slower
            seconds = rounds(pair, count)
        ratio = statistics.median(ratios(seconds["adapter"], seconds["lm-eval"]))
        medians = {way: statistics.median(times) for way, times in seconds.items()}
        print(
            f"{name}: adapter {medians['adapter']:.2f} s, lm-eval's own "
            f"{medians['lm-eval']:.2f} s, ratio {ratio:.3f} (bar {BAR_SPEED})"
        )
        failed |= ratio > BAR_SPEED
    return failed


def _run_adapter(engine: LoadedModel, configs: Sequence[BenchmarkConfig]) -> None:
    for benchmark in configs:
        _graded(engine, benchmark)


def _run_lm_eval(engine: LoadedModel, configs: Sequence[BenchmarkConfig]) -> None:
    """Run lm-eval's evaluate() on the same tasks and items."""
    for benchmark in configs:
        _evaluate(engine, lm_eval_tasks.tasks_and_groups(benchmark)["tasks"], benchmark)


def _evaluate(engine: LoadedModel, tasks: dict[str, Any], benchmark: BenchmarkConfig) -> None:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from moe_lab.evaluation.adapters.lm_eval_tasks import indices_to_evaluate

    evaluator.evaluate(
        lm=HFLM(
            pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=benchmark.batch_size
        ),
        task_dict={
            "tasks": {name: tasks[name] for name in indices_to_evaluate(tasks, benchmark.limit)},
            "groups": {},
        },
        samples=indices_to_evaluate(tasks, benchmark.limit),
        bootstrap_iters=0,
    )


def _build_and_run_adapter(engine: LoadedModel, configs: Sequence[BenchmarkConfig]) -> None:
    lm_eval_tasks._tasks_by_identity.clear()
    _run_adapter(engine, configs)


def _build_and_run_lm_eval(engine: LoadedModel, configs: Sequence[BenchmarkConfig]) -> None:
    """Run lm-eval's evaluate() with tasks that it builds from the mirror, without an index of all
    its task definitions."""
    from lm_eval.tasks import TaskManager

    for benchmark in configs:
        manager = TaskManager(
            include_path=str(HARNESS.task_folder(benchmark)), include_defaults=False
        )
        data = {
            "dataset_path": str(mirror.folder(benchmark)),
            "training_split": None,
            "fewshot_split": None,
        }
        split = {"test_split": benchmark.split, "validation_split": None, "num_fewshot": 0}
        built = manager._factory.build(
            manager.task_index[benchmark.task],
            overrides={**data, **split},
            registry=manager.task_index,
        )
        _evaluate(engine, manager.load([built])["tasks"], benchmark)


if __name__ == "__main__":
    sys.exit(main())
