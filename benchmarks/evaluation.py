"""Real benchmarks through the adapters: `python -m benchmarks.evaluation --data FOLDER`.

FOLDER holds ARC, OpenBookQA, WinoGrande, PIQA, MMLU and WikiText-2 as files
(`benchmarks.data_sets`). A mirror is made from them, and lm-eval's own tasks run from it on a
random model of OLMoE's architecture with a context of 4,096 tokens.

1. equal: every item of the six benchmarks, acc and acc_norm, against one unpadded forward pass per
   answer (benchmarks/choices.py). Bar: no item differs. Perplexities of WikiText-2: within 1e-4 of
   an independent computation.
2. speed: CPU seconds of the same tasks through the adapter and through lm-eval's own evaluate() on
   the same loaded model, one after the other in each round; the ratio is the median over rounds.
   Bar: 1.05. The second line includes building the tasks, which lm-eval does from the same mirror
   by its `dataset_path`.

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
from moe_lab.evaluation.adapters.lm_eval_files import task_folder
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import Graded, harness_of
from moe_lab.evaluation.mirror import benchmarks
from moe_lab.paths import resolve

CHOICES = ("arc_challenge", "arc_easy", "openbookqa", "winogrande", "piqa", "mmlu")
TEXTS = ("wikitext2", "wikitext2_word")
BAR_SPEED = 1.05
BAR_PERPLEXITY = 1e-4


def main() -> int:
    """Make the mirror, measure, print, compare with the bars."""
    arguments = _arguments()
    torch.set_num_threads(1)
    shape = argparse.Namespace(hidden=64, width=32, layers=2, top_k=2)
    subject = LoadedModel(
        random_model(8, shape), AutoTokenizer.from_pretrained(resolve("pocket:olmoe"))
    )
    failed = False
    with tempfile.TemporaryDirectory() as root:
        wanted = benchmarks([*CHOICES, *TEXTS], root)
        for benchmark in wanted:
            mirror_files(benchmark, arguments.data, Path(root, "source"))
        chosen = [replace(benchmark, limit=arguments.limit, batch_size=16) for benchmark in wanted]
        if "equal" in arguments.parts:
            for benchmark in chosen:
                compare = _same_text if benchmark.name in TEXTS else _same_items
                failed |= compare(subject, benchmark)
        if "speed" in arguments.parts:
            few = [
                replace(benchmark, limit=arguments.items)
                for benchmark in chosen
                if benchmark.name in CHOICES
            ]
            failed |= _speed(subject, few, arguments.rounds)
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


def _same_items(subject: LoadedModel, benchmark: BenchmarkConfig) -> bool:
    metrics = ["acc"] if benchmark.name in ("mmlu", "winogrande") else ["acc", "acc_norm"]
    graded = _graded(subject, replace(benchmark, reports={metric: metric for metric in metrics}))
    found = [
        {s["item"]: s["outcome"] for s in graded.samples if s["benchmark"] == metric}
        for metric in metrics
    ]
    asked = [choices.CHOICES[benchmark.name](row) for row in _rows(benchmark)]
    scores = [choices.likelihoods(subject.model, subject.tokenizer, choice) for choice in asked]
    differing = 0
    for metric, outcomes, result in zip(metrics, found, graded.results, strict=True):
        naive = [
            choices.outcome(score, choice, metric)
            for score, choice in zip(scores, asked, strict=True)
        ]
        different = sum(own != other for own, other in zip(outcomes.values(), naive, strict=True))
        differing += different
        print(
            f"{benchmark.name} {metric}: {len(naive)} items, {result['score']:.4f}, {different} "
            "differ",
            flush=True,
        )
    return differing > 0


def _graded(subject: LoadedModel, benchmark: BenchmarkConfig) -> Graded:
    return harness_of(benchmark).grade(run.answer(subject, benchmark), benchmark, Policy())


def _rows(benchmark: BenchmarkConfig) -> list[dict[str, Any]]:
    """Rows in the order in which the adapter reports them: by subset, each up to the limit."""
    counts = {name: len(numbers) for name, numbers in _numbers(benchmark).items()}
    by_subset = mirror.subsets(benchmark)
    rows = []
    for task, count in counts.items():
        subset = benchmark.subset or (
            task.removeprefix("mmlu_") if len(by_subset) > 1 else "default"
        )
        rows += [
            row
            for file in by_subset[subset][str(benchmark.split)]
            for row in mirror.read_rows(file)
        ][:count]
    return rows


def _numbers(benchmark: BenchmarkConfig) -> dict[str, list[int]]:
    from moe_lab.evaluation.adapters.lm_eval_tasks import first_items

    return first_items(lm_eval_tasks.tasks(benchmark), benchmark.limit)


def _same_text(subject: LoadedModel, benchmark: BenchmarkConfig) -> bool:
    model = subject.model
    tokenizer = subject.tokenizer
    if benchmark.harness == "perplexity":
        text = "\n\n".join(row["text"] for row in mirror.rows(benchmark))
        naive = choices.perplexity(
            model, tokenizer, text, benchmark.parameters["length"], benchmark.limit
        )
    else:
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        pages = [
            (wikitext_detokenizer(row), row["page"])
            for row in mirror.rows(benchmark)[: benchmark.limit]
        ]
        naive = choices.word_perplexity(model, tokenizer, pages, subject.max_length or 0)
    (result,) = _graded(subject, benchmark).results
    apart = abs(result["score"] / naive - 1)
    print(
        f"{benchmark.name}: {result['score']:.6f}, independently {naive:.6f}, {apart:.1e} apart",
        flush=True,
    )
    return apart > BAR_PERPLEXITY


# 2. Speed.


def _speed(subject: LoadedModel, few: Sequence[BenchmarkConfig], count: int) -> bool:
    ways: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        ("evaluating", lambda: _adapter(subject, few), lambda: _plain(subject, few)),
        (
            "building the tasks and evaluating",
            lambda: _fresh(subject, few),
            lambda: _plain_fresh(subject, few),
        ),
    ]
    failed = False
    for name, own, other in ways:
        pair = {"adapter": own, "lm-eval": other}
        with contextlib.redirect_stderr(io.StringIO()):
            rounds(pair, 1)  # the first round is slower
            seconds = rounds(pair, count)
        ratio = statistics.median(ratios(seconds["adapter"], seconds["lm-eval"]))
        first, second = (statistics.median(times) for times in seconds.values())
        print(
            f"{name}: adapter {first:.2f} s, lm-eval's own {second:.2f} s, ratio {ratio:.3f} (bar "
            f"{BAR_SPEED})"
        )
        failed |= ratio > BAR_SPEED
    return failed


def _adapter(subject: LoadedModel, few: Sequence[BenchmarkConfig]) -> None:
    for benchmark in few:
        _graded(subject, benchmark)


def _plain(subject: LoadedModel, few: Sequence[BenchmarkConfig]) -> None:
    """lm-eval's evaluate() on the same tasks and items."""
    for benchmark in few:
        _evaluate(subject, lm_eval_tasks.tasks(benchmark), benchmark)


def _evaluate(subject: LoadedModel, tasks: dict[str, Any], benchmark: BenchmarkConfig) -> None:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from moe_lab.evaluation.adapters.lm_eval_tasks import first_items

    evaluator.evaluate(
        lm=HFLM(
            pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=benchmark.batch_size
        ),
        task_dict={
            "tasks": {name: tasks[name] for name in first_items(tasks, benchmark.limit)},
            "groups": {},
        },
        samples=first_items(tasks, benchmark.limit),
        bootstrap_iters=0,
    )


def _fresh(subject: LoadedModel, few: Sequence[BenchmarkConfig]) -> None:
    lm_eval_tasks._built.clear()
    _adapter(subject, few)


def _plain_fresh(subject: LoadedModel, few: Sequence[BenchmarkConfig]) -> None:
    """lm-eval's evaluate() with tasks that it builds from the mirror, without an index of all its
    task definitions."""
    from lm_eval.tasks import TaskManager

    for benchmark in few:
        manager = TaskManager(include_path=str(task_folder(benchmark)), include_defaults=False)
        place = {
            "dataset_path": str(mirror.folder(benchmark)),
            "training_split": None,
            "fewshot_split": None,
        }
        split = {"test_split": benchmark.split, "validation_split": None, "num_fewshot": 0}
        built = manager._factory.build(
            manager.task_index[benchmark.task],
            overrides={**place, **split},
            registry=manager.task_index,
        )
        _evaluate(subject, manager.load([built])["tasks"], benchmark)


if __name__ == "__main__":
    sys.exit(main())
