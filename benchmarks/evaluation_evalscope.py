"""EvalScope's grading, through the adapter:
`python -m benchmarks.evaluation_evalscope --data FOLDER`.

answers: FOLDER holds GSM8K and MATH-500 as files (`benchmarks.data_sets`), from which a mirror is
made. EvalScope's own process asks all 1,319 and 500 questions and then grades three sets of
answers, each in \\boxed{} as the prompt demands: the data's own answer, the answer plus one, and
the answer to another question. Bars: own answers all right, answers plus one all wrong. Another
question's answer may mean the same (x=5 and 5); all that are judged right are listed.

programs: benchmarks/contest_programs.py in EvalScope's interpreter: programs judged by EvalScope's
own function, which runs them in the process that holds the expected outputs, and by moe_lab's
sandbox. Bar: the same tests pass.

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
from benchmarks.measure import namespaces_missing, parser, timed
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harnesses.evalscope import HARNESS
from moe_lab.evaluation.items import Answer, Item, Reply
from moe_lab.evaluation.mirror import benchmarks
from moe_lab.machine import interpreter

PARTS = ("answers", "programs")
NAMES = ("gsm8k", "math500")
Change = Callable[[Sequence[str], int], str]
"""The data's answers and the index of one of them -> the answer to grade in its place."""


def main() -> int:
    """Ask, answer, grade, print."""
    arguments = _arguments()
    failed = False
    if "programs" in arguments.parts:
        python = interpreter("evalscope", None, "benchmarks.contest_programs")
        sandbox = "limits" if namespaces_missing() else "namespaces"
        program = Path(__file__).with_name("contest_programs.py")
        failed |= subprocess.run([python, "-s", str(program), sandbox], check=False).returncode != 0
    if "answers" in arguments.parts:
        failed |= _check_answers(arguments)
    return int(failed)


def _check_answers(arguments: argparse.Namespace) -> bool:
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for benchmark in benchmarks(arguments.benchmarks, root):
            mirror_files(benchmark, arguments.data, Path(root, "source"))
            failed |= _check(replace(benchmark, limit=arguments.limit))
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


def _check(benchmark: BenchmarkConfig) -> bool:
    questions, wall, used = timed(lambda: HARNESS.items(benchmark))
    print(
        f"{benchmark.name}: {len(questions)} questions, {wall:.0f} s, {used:.0f} s of processor "
        "time",
        flush=True,
    )
    own = own_answers(benchmark, questions)
    failed = False
    for kind, change, right in (
        ("own answers", _own, 1.0),
        ("plus one", _plus_one, 0.0),
        ("others'", _others, 0.0),
    ):
        given = [change(own, number) for number in range(len(own))]
        answers = [
            Answer(q.name, "", (Reply(boxed(text)),))
            for q, text in zip(questions, given, strict=True)
        ]
        graded, wall, used = timed(partial(HARNESS.grade, answers, benchmark, Policy()))
        score = round(sum(sample["outcome"] for sample in graded.samples))
        seconds = f"{wall:.0f} s, {used:.0f} s of processor time"
        print(f"{benchmark.name}: {kind}: {score}/{len(questions)} right, {seconds}", flush=True)
        for sample, wanted, text in zip(graded.samples, own, given, strict=True):
            if sample["outcome"] != right:
                failed |= change is not _others
                print(
                    f"  {sample['item']}: answer {wanted!r}, given {text!r}, read "
                    f"{sample['extracted']!r}",
                    flush=True,
                )
    return failed


def own_answers(benchmark: BenchmarkConfig, questions: Sequence[Item]) -> list[str]:
    """The data's answer to each question, looked up by the question's text in EvalScope's
    prompt."""
    of_text = {
        _question(row): row["answer"].split("####")[-1].strip() for row in mirror.rows(benchmark)
    }
    conversations: list[Any] = [question.requests[0].prompt for question in questions]  # type: ignore[union-attr]
    texts = [messages[-1]["content"] for messages in conversations]
    return [of_text[text.rsplit("\nPlease reason step by step", 1)[0]] for text in texts]


def _question(row: Mapping[str, Any]) -> str:
    return str(row["question"] if "question" in row else row["problem"])


def boxed(answer: str) -> str:
    """An answer in the form that the prompts demand."""
    return f"Step by step, this is what comes out.\n\nThe answer is \\boxed{{{answer}}}."


def _own(answers: Sequence[str], number: int) -> str:
    return answers[number]


def _plus_one(answers: Sequence[str], number: int) -> str:
    """The answer plus one: the sum for a whole number, an expression with +1 for anything else."""
    text = answers[number].replace(",", "")
    return str(int(text) + 1) if text.lstrip("-").isdigit() else f"{answers[number]}+1"


def _others(answers: Sequence[str], number: int) -> str:
    """The next question's answer that is spelled differently."""
    following = [*answers[number + 1 :], *answers[:number]]
    return next(text for text in following if text != answers[number])


if __name__ == "__main__":
    sys.exit(main())
