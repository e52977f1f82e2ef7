"""EvalPlus: problems with EvalPlus's own prompts, graded by its rules in a sandbox.

A model either completes a problem's prompt, as base models do in EvalPlus, or writes a program in
answer to one message through its chat template. The answer has no prefilled start, as with
EvalPlus's models behind an API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Graded, ProgramHarness, graded_by_mean
from moe_lab.evaluation.items import Answer, Item, Text

_INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)


class EvalPlus(ProgramHarness):
    """HumanEval+ and MBPP+, and problems in their format."""

    package = "evalplus"
    metrics = ("base", "plus")

    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield an item for each problem. A chat has no reference, because the canonical solution
        is only the text after the prompt."""
        from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

        max_tokens = benchmark.max_new_tokens
        problems = self.problems(benchmark)
        stop = (*EOS, *extra_eos_for_direct_completion(dataset_of(problems)))
        for task, problem in problems.items():
            prompt = problem["prompt"].strip()
            if benchmark.chat:
                message = {"role": "user", "content": f"{_INSTRUCTION}\n```python\n{prompt}\n```"}
                request = Text([message], max_tokens)
            else:
                request = Text(f"{prompt}\n", max_tokens, stop, problem["canonical_solution"])
            yield Item(task, (request,), problem["canonical_solution"])

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """Grade programs. For the metric `base`, a program must pass EvalPlus's base tests. For the
        metric `plus`, it must pass all tests, the base tests included.

        An answer in a chat, or to a published problem, is a text that contains a program. It passes
        if EvalPlus passes it, or if the program as it stands passes. With the parameter
        `as_harness`, only EvalPlus's verdict counts.

        UserError if programs may not be run, RuntimeError for a canonical solution that does not
        run.
        """
        from moe_lab.evaluation.adapters import evalplus

        problems = self.problems(benchmark)
        request = evalplus.GradeRequest(
            dataset=dataset_of(problems),
            data=str(self.data_file(benchmark)),
            programs=[(answer.item, _program(answer, chat=benchmark.chat)) for answer in answers],
            isolation=policy.program_sandbox(),
            extract=benchmark.chat or benchmark.data is not None,
            **benchmark.parameters,
        )
        graded = evalplus.GRADER.grade(request)
        protocol = {
            "seconds": request.seconds,
            "memory_mib": request.memory_mib,
            "sandbox": request.isolation,
            "unlike_harness": [
                answer.item
                for answer, verdict in zip(answers, graded, strict=True)
                if verdict.unlike_harness
            ],
        }
        verdicts = {
            metric: [verdict.outcome(metric) for verdict in graded] for metric in self.metrics
        }
        return graded_by_mean(answers, benchmark, verdicts, protocol)

    def runs_programs(self, benchmark: BenchmarkConfig) -> bool:
        """True, because every answer is a program."""
        return True

    def problems(self, benchmark: BenchmarkConfig) -> dict[str, dict[str, Any]]:
        """Task id -> problem, for the first benchmark.limit problems."""
        rows = mirror.read_rows(self.data_file(benchmark))
        return {row["task_id"]: row for row in rows[: benchmark.limit]}

    def data_file(self, benchmark: BenchmarkConfig) -> Path:
        """The file of the benchmark's problems."""
        read_files = self.data_files if benchmark.data is None else mirror.files
        (file,) = read_files(benchmark)
        return file


HARNESS = EvalPlus()


def _program(answer: Answer, *, chat: bool) -> str:
    """The text of an answer that contains its program; "" if the answer's thought does not end."""
    text = answer.reply.text
    if text is None or chat:
        return text or ""
    return answer.prompt + text.replace("\t", "    ")


def dataset_of(problems: Mapping[str, Any]) -> str:
    """The data set by whose rules EvalPlus grades the problems: mbpp if their ids are Mbpp/N,
    otherwise humaneval. UserError if only some ids are Mbpp/N."""
    datasets = {"mbpp" if task.startswith("Mbpp/") else "humaneval" for task in problems}
    if len(datasets) != 1:
        raise UserError("task_id: a data file has either only ids Mbpp/N or none")
    return datasets.pop()
