"""Correctness of EvalScope's grading through the adapter:
`python -m benchmarks.evaluation_evalscope --data FOLDER`.

answers: FOLDER holds GSM8K and MATH-500 as files (`benchmarks.data_sets`), from which a mirror is
made. EvalScope's process formats all 1,319 and 500 questions. It then grades three sets of answers,
each in \\boxed{} as the prompt demands: the reference answer, the reference answer plus one, and
the reference answer of another question. Bars: all reference answers are right, all answers plus
one are wrong. The answer of another question may mean the same (x=5 and 5), so those that are
judged right are only listed.

programs: benchmarks/contest_programs.py runs in EvalScope's interpreter. Programs are judged by
EvalScope's own function, which runs them in the process that holds the expected outputs, and by
moe_lab's sandbox. Bar: the same number of tests passes.

Exit code 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data_sets import mirror_files
from benchmarks.measure import parser, program_isolation, timed
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harnesses.evalscope import HARNESS
from moe_lab.evaluation.items import Answer, Item, Reply
from moe_lab.evaluation.mirror import benchmarks
from moe_lab.machine import interpreter

PARTS = ("answers", "programs")
NAMES = ("gsm8k", "math500")
Change = Callable[[Sequence[str], int], str]
"""Function (reference answers, number of a question) that returns the answer to grade."""


def main() -> int:
    """Run the parts and print their results; returns 1 when a bar fails."""
    arguments = _arguments()
    failed = False
    if "programs" in arguments.parts:
        python = interpreter("evalscope", None, "benchmarks.contest_programs")
        program = Path(__file__).with_name("contest_programs.py")
        line = [python, "-s", str(program), program_isolation()]
        failed |= subprocess.run(line, check=False).returncode != 0
    if "answers" in arguments.parts:
        failed |= _answers_fail(arguments)
    return int(failed)


def _answers_fail(arguments: argparse.Namespace) -> bool:
    """Run the part answers; True when a bar fails."""
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for benchmark in benchmarks(arguments.benchmarks, root):
            mirror_files(benchmark, arguments.data, Path(root, "source"))
            failed |= _benchmark_fails(replace(benchmark, limit=arguments.limit))
    return failed


def _arguments() -> argparse.Namespace:
    options = parser("evaluation_evalscope", __doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="folder with gsm8k_test.jsonl, math500_test.jsonl"
    )
    options.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options.add_argument("--benchmarks", nargs="+", default=NAMES, choices=NAMES)
    options.add_argument("--limit", type=int, help="only so many items")
    return options.parse_args()


def _benchmark_fails(benchmark: BenchmarkConfig) -> bool:
    """Grade the three sets of answers of a benchmark and print the results; True when a bar
    fails."""
    questions, wall, cpu = timed(lambda: list(HARNESS.items(benchmark)))
    print(
        f"{benchmark.name}: {len(questions)} questions, {wall:.0f} s, {cpu:.0f} s of processor "
        "time",
        flush=True,
    )
    references = reference_answers(benchmark, questions)
    changes: tuple[tuple[str, Change, float], ...] = (
        ("own answers", _reference, 1.0),
        ("plus one", _plus_one, 0.0),
        ("others'", _of_another_question, 0.0),
    )
    failed = False
    for name, change, expected in changes:
        texts = [change(references, number) for number in range(len(references))]
        answers = [
            Answer(question.name, "", (Reply(boxed(text)),))
            for question, text in zip(questions, texts, strict=True)
        ]
        graded, wall, cpu = timed(partial(HARNESS.grade, answers, benchmark, Policy()))
        score = round(sum(sample["outcome"] for sample in graded.samples))
        seconds = f"{wall:.0f} s, {cpu:.0f} s of processor time"
        print(f"{benchmark.name}: {name}: {score}/{len(questions)} right, {seconds}", flush=True)
        for sample, reference, text in zip(graded.samples, references, texts, strict=True):
            if sample["outcome"] != expected:
                failed |= change is not _of_another_question
                print(
                    f"  {sample['item']}: answer {reference!r}, given {text!r}, read "
                    f"{sample['extracted']!r}",
                    flush=True,
                )
    return failed


def reference_answers(benchmark: BenchmarkConfig, questions: Sequence[Item]) -> list[str]:
    """The reference answer to each question, looked up by the question's text in EvalScope's
    prompt."""
    answer_of = {
        _question(row): row["answer"].split("####")[-1].strip() for row in mirror.rows(benchmark)
    }
    conversations: list[Any] = [question.requests[0].prompt for question in questions]  # type: ignore[union-attr]
    prompts = [messages[-1]["content"] for messages in conversations]
    return [answer_of[prompt.rsplit("\nPlease reason step by step", 1)[0]] for prompt in prompts]


def _question(row: Mapping[str, Any]) -> str:
    """The text of the question in a row of GSM8K or MATH-500."""
    return str(row["question"] if "question" in row else row["problem"])


def boxed(answer: str) -> str:
    """An answer in the form that the prompts demand."""
    return f"Step by step, this is what comes out.\n\nThe answer is \\boxed{{{answer}}}."


def _reference(answers: Sequence[str], number: int) -> str:
    return answers[number]


def _plus_one(answers: Sequence[str], number: int) -> str:
    """The answer plus one: the sum for an integer, an expression with +1 for anything else."""
    text = answers[number].replace(",", "")
    return str(int(text) + 1) if text.lstrip("-").isdigit() else f"{answers[number]}+1"


def _of_another_question(answers: Sequence[str], number: int) -> str:
    """The first answer of the following questions that is spelled differently."""
    following = [*answers[number + 1 :], *answers[:number]]
    return next(text for text in following if text != answers[number])


if __name__ == "__main__":
    sys.exit(main())
