"""EvalPlus: problems with EvalPlus's own prompts, graded by its rules in a sandbox.

A model either completes a problem's prompt, as base models do in EvalPlus, or writes a program in
answer to one message through its chat template. The answer has no prefilled start, as with
EvalPlus's models behind an API.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Graded, Harness, graded_by_mean
from moe_lab.evaluation.items import Answer, Item, Text

# A fenced block, with or without a closing fence; the group is its content.
_BLOCK = re.compile(r"^[ \t]*```.*(?:\n|\Z)((?s:.*?))\n?(?:^[ \t]*```|\Z)", re.MULTILINE)
_INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)


class EvalPlus(Harness):
    """HumanEval+ and MBPP+, and problems in their format."""

    package = "evalplus"
    metrics = ("base", "plus")
    grading_parameters = ("seconds", "memory_mib")
    other_parameters = ("processes",)
    numeric_parameters = grading_parameters + other_parameters
    two_phases = True

    def items(self, benchmark: BenchmarkConfig) -> list[Item]:
        """An item for each problem. A chat has no reference, because the canonical solution is only
        the text after the prompt."""
        max_tokens = benchmark.max_new_tokens
        stop = self.stop_texts(benchmark)
        items = []
        for task, problem in self.problems(benchmark).items():
            prompt = problem["prompt"].strip()
            if benchmark.chat:
                message = {"role": "user", "content": f"{_INSTRUCTION}\n```python\n{prompt}\n```"}
                request = Text([message], max_tokens)
            else:
                request = Text(f"{prompt}\n", max_tokens, stop, problem["canonical_solution"])
            items.append(Item(task, (request,), problem["canonical_solution"]))
        return items

    def stop_texts(self, benchmark: BenchmarkConfig) -> tuple[str, ...]:
        """Stop texts of a completion; () for answers in a chat."""
        from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

        if benchmark.chat:
            return ()
        return (*EOS, *extra_eos_for_direct_completion(dataset_of(self.problems(benchmark))))

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """Grade programs. For the metric `base`, a program must pass EvalPlus's base tests. For the
        metric `plus`, it must pass all tests, the base tests included.

        For a benchmark with a mirror, EvalPlus's sanitizer extracts the programs from the answers.

        UserError if programs may not be run, RuntimeError for a canonical solution that does not
        run.
        """
        from moe_lab.evaluation.adapters import evalplus

        problems = self.problems(benchmark)
        # replicate -> task id -> program
        programs: dict[int, dict[str, str]] = {}
        for answer in answers:
            program = _program(answer, problems[answer.item], chat=benchmark.chat)
            programs.setdefault(answer.replicate, {})[answer.item] = program
        request = evalplus.GradeRequest(
            dataset=dataset_of(problems),
            data=str(self.data_file(benchmark)),
            programs={},
            isolation=policy.program_sandbox(),
            sanitize=benchmark.data is not None,
            **benchmark.parameters,
        )
        verdicts: dict[tuple[str, int], evalplus.Verdict] = {}
        for replicate, programs_of_replicate in programs.items():
            graded = evalplus.GRADER.grade(replace(request, programs=programs_of_replicate))
            verdicts |= {(task, replicate): verdict for task, verdict in graded.items()}
        protocol = {
            "dataset": request.dataset,
            "sanitize": request.sanitize,
            "seconds": request.seconds,
            "memory_mib": request.memory_mib,
            "sandbox": request.isolation,
            "stop": list(self.stop_texts(benchmark)),
        }
        return graded_by_mean(
            answers,
            benchmark,
            lambda answer, metric: verdicts[answer.key].outcome(metric),
            protocol,
        )

    def runs_programs(self, benchmark: BenchmarkConfig) -> bool:
        """True, because every answer is a program."""
        return True

    def problems(self, benchmark: BenchmarkConfig) -> dict[str, dict[str, Any]]:
        """Task id -> problem, for the first benchmark.limit problems."""
        rows = mirror.read_rows(self.data_file(benchmark))
        problems = {row["task_id"]: row for row in rows}
        return dict(list(problems.items())[: benchmark.limit])

    def data_file(self, benchmark: BenchmarkConfig) -> Path:
        """The file of the benchmark's problems."""
        if benchmark.data is None:
            return self.data_files(benchmark)[-1]
        # the mirror has one subset, with one file for the split
        (splits,) = mirror.subsets(benchmark).values()
        (file,) = splits[str(benchmark.split)]
        return file


HARNESS = EvalPlus()


def _program(answer: Answer, problem: Mapping[str, Any], *, chat: bool) -> str:
    """The complete program of an answer; "" if the answer's thought does not end."""
    text = answer.reply.text
    if text is None:
        return ""
    if chat:
        return fenced_program(text, problem["entry_point"])
    return answer.prompt + text.replace("\t", "    ")


def fenced_program(text: str, entry_point: str) -> str:
    """The last fenced block of `text` that defines the function `entry_point`. If no block defines
    it, the longest block; if there is no block, all of the text."""
    blocks = [textwrap.dedent(block) for block in _BLOCK.findall(text)]
    definition = re.compile(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    defining_blocks = [block for block in blocks if definition.search(block)]
    return defining_blocks[-1] if defining_blocks else max(blocks, key=len, default=text)


def dataset_of(problems: Mapping[str, Any]) -> str:
    """The data set by whose rules EvalPlus grades the problems: mbpp if their ids are Mbpp/N,
    otherwise humaneval. UserError if only some ids are Mbpp/N."""
    datasets = {"mbpp" if task.startswith("Mbpp/") else "humaneval" for task in problems}
    if len(datasets) != 1:
        raise UserError("task_id: a data file has either only ids Mbpp/N or none")
    return datasets.pop()
