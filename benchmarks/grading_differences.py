"""Differences between moe_lab's grading and that of other graders:
`python -m benchmarks.grading_differences DATA`.

DATA is a folder with HumanEvalPlus.jsonl.gz, MbppPlus.jsonl.gz, gsm8k_test.jsonl and
math500_test.jsonl. Right and wrong answers to problems that a seed chooses are written in all forms
of benchmarks/answer_texts.py, and the shipped models write more. moe_lab grades all texts. EvalPlus
grades programs; EvalScope, Math-Verify and lm-eval grade mathematical answers. moe_lab's adapter of
lm-eval grades the latter too.

A text that moe_lab and another grader judge differently needs a row in the table "Differences from
other graders" of docs/evaluation.md. Exit code 1 for a difference without a row, for a row without
a difference, and for a wrong text that moe_lab alone accepts.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from lm_eval import evaluator
from lm_eval.api.model import LM

from benchmarks import mathematical_verdicts
from benchmarks.answer_texts import (
    AnswerText,
    Row,
    mathematical_texts,
    program_texts,
    reference,
    solution,
)
from benchmarks.data_sets import write_data_set
from benchmarks.measure import parser, program_isolation
from moe_lab.config import BenchmarkConfig, ModelConfig
from moe_lab.evaluation import Policy
from moe_lab.evaluation.adapters.evalplus_rules import read_problems
from moe_lab.evaluation.adapters.lm_eval_tasks import tasks_and_groups
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import harness_of
from moe_lab.evaluation.items import Answer, Reply, answer_after_thought
from moe_lab.evaluation.mirror import benchmarks, make, read_rows
from moe_lab.machine import interpreter
from moe_lab.models.load import load_model
from moe_lab.paths import conf, resolve

POLICY = Policy(allow_code_execution=True, sandbox=program_isolation())
FILES = {
    "humaneval": "HumanEvalPlus.jsonl.gz",
    "mbpp": "MbppPlus.jsonl.gz",
    "gsm8k": "gsm8k_test.jsonl",
    "math500": "math500_test.jsonl",
}
"""Data set -> name of its file."""
PROBLEMS = 12
"""Problems of HumanEval+ and of MBPP+ that are solved; EvalPlus computes their outputs."""
MODELS = ("olmoe", "qwen3_moe", "deepseek_v2", "ernie4_5_moe")
"""Shipped models that write texts."""
ITEMS = 4
"""Items of each shipped benchmark that each of them answers."""
MODEL_TEXT = "shipped model"
"""Form of these texts."""
OURS = "moe_lab"
SAME_TASK = "lm-eval (same task)"
"""Grader whose verdicts moe_lab's adapter of lm-eval must have."""
DOCUMENTATION = Path(__file__).parents[1] / "docs" / "evaluation.md"
HEADING = "### Differences from other graders"


@dataclass(frozen=True)
class Judged:
    """A text with the verdicts of several graders."""

    text: AnswerText
    verdicts: Mapping[str, bool]
    """Grader -> whether it accepts the text. That of moe_lab is OURS."""


def published_texts(data: Path, dataset: str, seed: int) -> Iterator[AnswerText]:
    """Yield right and wrong texts of all forms for problems of a data set, whose file is in the
    folder `data`."""
    chance = random.Random(f"{seed} {dataset}")
    rows = read_rows(data / FILES[dataset])
    if dataset in LM_EVAL:
        yield from mathematical_texts(rows, dataset, chance)
        return
    evalplus = EvalPlusProblems(dataset)
    tasks = {row["task_id"] for row in chance.sample(rows, PROBLEMS)}
    problems = read_problems(dataset, str(data / FILES[dataset]))
    chosen = [row for task, row in problems.items() if task in tasks]
    # with some versions of Python, a canonical solution fails
    chosen = [row for row in chosen if evalplus.accepts(row, solution(row))]
    yield from program_texts(chosen, dataset, chance, evalplus.accepts)


# Verdicts.


def accepted(
    benchmark: BenchmarkConfig, texts: Sequence[AnswerText], items: Sequence[str]
) -> list[bool]:
    """Whether moe_lab accepts each text as the answer to an item of the benchmark. The names of the
    items may repeat."""
    counts: Counter[str] = Counter()
    answers = []
    for text, item in zip(texts, items, strict=True):
        # the prompt is read only where a model continues it
        reply = Reply(answer_after_thought(text.text))
        answers.append(Answer(item, str(text.row.get("prompt", "")), (reply,), counts[item]))
        counts[item] += 1
    samples = harness_of(benchmark).grade(answers, benchmark, POLICY).samples
    outcomes = {(sample["item"], sample["replicate"]): sample["outcome"] for sample in samples}
    return [outcomes[answer.item, answer.replicate] == 1 for answer in answers]


@cache
def evalplus_sanitizer() -> ModuleType:
    """EvalPlus's sanitizer without the change that moe_lab makes to it."""
    spec = importlib.util.find_spec("evalplus.sanitize")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class EvalPlusProblems:
    """Problems of one data set, with the outputs that EvalPlus expects."""

    def __init__(self, dataset: str) -> None:
        self.dataset = dataset
        self._expected: dict[str, Any] = {}

    def accepts(self, row: Row, program: str) -> bool:
        """Whether EvalPlus passes a program on all tests of a problem."""
        from evalplus.eval import untrusted_check
        from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
        from evalplus.gen.util import trusted_exec

        name, task = row["entry_point"], row["task_id"]
        inputs = [*row["base_input"], *row["plus_input"]]
        if task not in self._expected:
            program_of_row = row["prompt"] + row["canonical_solution"]
            not_none = name in MBPP_OUTPUT_NOT_NONE_TASKS
            self._expected[task] = trusted_exec(program_of_row, inputs, name, True, not_none)
        expected, seconds = self._expected[task]
        arguments = (inputs, name, expected, row["atol"], seconds)
        status, _ = untrusted_check(self.dataset, program, *arguments, fast_check=True)
        return bool(status == "pass")

    def accepts_text(self, row: Row, text: str) -> bool:
        """Whether EvalPlus passes the program that its sanitizer finds in a text."""
        return self.accepts(row, evalplus_sanitizer().sanitize(text, row["entry_point"]))


def judged_programs(
    texts: Sequence[AnswerText], dataset: str, file: Path, folder: Path
) -> Iterator[Judged]:
    """Yield each text with the verdicts of moe_lab and EvalPlus on all tests of its problem.
    `file`: the problems of the data set."""
    (benchmark,) = benchmarks([dataset], str(folder))
    benchmark = replace(benchmark, reports={dataset: "plus"})
    make(benchmark, file.resolve())
    tasks = [text.row["task_id"] for text in texts]
    evalplus = EvalPlusProblems(dataset)
    for text, ours in zip(texts, accepted(benchmark, texts, tasks), strict=True):
        yield Judged(text, {OURS: ours, "EvalPlus": evalplus.accepts_text(text.row, text.text)})


def judged_mathematics(texts: Sequence[AnswerText], dataset: str, folder: Path) -> Iterator[Judged]:
    """Yield each text with the verdicts of moe_lab, EvalScope, Math-Verify and lm-eval, and with
    those of lm-eval and of moe_lab's adapter of lm-eval."""
    (benchmark,) = benchmarks([dataset], str(folder))
    benchmark = replace(benchmark, expected=len(texts))
    rows = [{**text.row, "level": 1} for text in texts]  # EvalScope would sort the items by level
    parts = {(benchmark.subset or "default", str(benchmark.split)): rows}
    make(benchmark, write_data_set(folder / "source", parts))
    ours = accepted(benchmark, texts, _item_names(benchmark))
    others = _mathematical_verdicts(benchmark.task, texts)
    task, tasks_folder, metric = LM_EVAL[dataset]
    same_data = replace(
        benchmark,
        harness="lm_eval",
        task=task,
        chat=False,
        parameters={"folder": tasks_folder},
        reports={dataset: metric},
    )
    by_adapter = accepted(same_data, texts, _item_names(same_data))
    by_lm_eval = accepted_by_lm_eval(same_data, [text.text for text in texts])
    for number, text in enumerate(texts):
        verdict = {f"lm-eval {task}": by_lm_eval[number]}
        yield Judged(text, {OURS: ours[number], **others[number], **verdict})
        yield Judged(text, {OURS: by_adapter[number], SAME_TASK: by_lm_eval[number]})


LM_EVAL = {
    "gsm8k": ("gsm8k_cot", "gsm8k", "exact_match,flexible-extract"),
    "math500": ("hendrycks_math500", "hendrycks_math", "exact_match"),
}
"""Data set -> lm-eval's task, the folder of the task, and the metric."""


def _item_names(benchmark: BenchmarkConfig) -> list[str]:
    return [item.name for item in harness_of(benchmark).items(benchmark)]


def _mathematical_verdicts(task: str, texts: Sequence[AnswerText]) -> list[dict[str, bool]]:
    """For each text, grader -> its verdict, from benchmarks/mathematical_verdicts.py."""
    lines = [json.dumps([task, reference(text.row), text.text]) + "\n" for text in texts]
    python = interpreter("evalscope", None, "benchmarks.grading_differences")
    # -P: the modules of this folder must not replace others of the same name
    process = subprocess.run(
        [python, "-P", str(mathematical_verdicts.__file__)],
        input="".join(lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


class GivenTexts(LM):
    """A model of lm-eval that answers items by given texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.texts = texts

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        """The text for the item of each request."""
        return [self.texts[request.doc_id] for request in requests]

    def loglikelihood(self, requests: Any, **_: Any) -> Any:
        """Not needed."""
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def accepted_by_lm_eval(benchmark: BenchmarkConfig, texts: Sequence[str]) -> list[bool]:
    """Whether lm-eval's own evaluation accepts each text as the answer to the item of the same
    number."""
    tasks = tasks_and_groups(benchmark)["tasks"]
    (name,) = tasks
    results = evaluator.evaluate(
        lm=GivenTexts(texts),
        task_dict={"tasks": tasks, "groups": {}},
        bootstrap_iters=0,
        log_samples=True,
        limit=benchmark.limit,
    )
    metric, _, filter_name = next(iter(benchmark.reports.values())).partition(",")
    verdicts = {
        row["doc_id"]: row[metric] == 1
        for row in results["samples"][name]
        if row["filter"] == (filter_name or row["filter"])
    }
    return [verdicts[number] for number in range(len(texts))]


def judged_texts_of_models() -> Iterator[Judged]:
    """Yield texts that the shipped models write to the shipped benchmarks, with the verdicts of
    moe_lab and of EvalPlus or lm-eval."""
    for model in MODELS:
        config = ModelConfig(name=model, path=f"pocket:{model}", threads=1)
        engine = LoadedModel(*load_model(config))
        for dataset in FILES:
            settings = yaml.safe_load((conf() / f"benchmark/pocket_{dataset}.yaml").read_text())
            metric = list(settings["reports"].values())[-1]
            benchmark = BenchmarkConfig(
                **{**settings, "reports": {dataset: metric}, "limit": ITEMS}
            )
            yield from _judged_answers(engine, benchmark, dataset)


def _judged_answers(
    engine: LoadedModel, benchmark: BenchmarkConfig, dataset: str
) -> Iterator[Judged]:
    """Yield the engine's answers to the items of a shipped benchmark, judged."""
    items = list(harness_of(benchmark).items(benchmark))
    (answers,) = collect_answers(engine, [(benchmark, items)])
    outcomes = [
        sample["outcome"] == 1
        for sample in harness_of(benchmark).grade(answers, benchmark, POLICY).samples
    ]
    texts = [answer.reply.text or "" for answer in answers]
    rows: list[Row] = [{"prompt": answer.prompt} for answer in answers]
    if benchmark.harness == "lm_eval":
        grader, verdicts = SAME_TASK, accepted_by_lm_eval(benchmark, texts)
    else:
        grader = "EvalPlus"
        problems = read_problems(dataset, str(resolve(benchmark.task)))
        rows = [problems[answer.item] for answer in answers]
        texts = [answer.prompt + text for answer, text in zip(answers, texts, strict=True)]
        evalplus = EvalPlusProblems(dataset)
        verdicts = list(map(evalplus.accepts_text, rows, texts))
    for row, text, ours, theirs in zip(rows, texts, outcomes, verdicts, strict=True):
        answer = AnswerText(dataset, row, (MODEL_TEXT,), None, text)
        yield Judged(answer, {OURS: ours, grader: theirs})


# Explanations.


ANY = "any"
"""Stands for all forms in a row of the table."""


@dataclass(frozen=True)
class Explanation:
    """A row of the table: why graders judge texts of some forms otherwise than moe_lab."""

    graders: frozenset[str]
    accepts: bool
    """Their verdict."""
    forms: frozenset[str]

    def explains(self, difference: Difference) -> bool:
        """Whether the row is about the grader, the verdict and the form of a difference. A form is
        named by the spelling of the answer, by its place, or by both."""
        form = difference.text.form
        return (
            difference.grader in self.graders
            and difference.accepts == self.accepts
            and not self.forms.isdisjoint({*form, ", ".join(form), ANY})
        )


@dataclass(frozen=True)
class Difference:
    """A text that a grader judges otherwise than moe_lab."""

    grader: str
    accepts: bool
    """The verdict of the grader."""
    text: AnswerText


def explanations() -> list[Explanation]:
    """The rows of the table in docs/evaluation.md."""
    _, _, section = DOCUMENTATION.read_text(encoding="utf-8").partition(f"{HEADING}\n")
    rows = []
    for line in section.partition("\n#")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[1] in ("accepts", "rejects"):
            graders, forms = frozenset(cells[0].split(", ")), frozenset(cells[2].split("; "))
            rows.append(Explanation(graders, cells[1] == "accepts", forms))
    return rows


def differences(judged: Sequence[Judged]) -> list[Difference]:
    """The differences between moe_lab and the other graders."""
    return [
        Difference(grader, verdict, each.text)
        for each in judged
        for grader, verdict in each.verdicts.items()
        if verdict != each.verdicts[OURS]
    ]


def unexplained(found: Sequence[Difference]) -> list[str]:
    """A sentence for each difference without a row in the table, and for each wrong text that
    moe_lab accepts and another grader rejects."""
    rows = explanations()
    sentences = []
    for difference in found:
        text = difference.text
        is_fault = text.is_right is False and not difference.accepts
        if is_fault or not any(row.explains(difference) for row in rows):
            verdict = "accepts" if difference.accepts else "rejects"
            answer = {True: "right", False: "wrong", None: "unknown"}[text.is_right]
            sentences.append(
                f"{difference.grader} {verdict} a {answer} answer to {text.dataset} in the form "
                f"{', '.join(text.form)!r}, and moe_lab does not: {text.text!r}"
            )
    return sentences


def unused(found: Sequence[Difference]) -> list[str]:
    """A sentence for each row of the table without a difference."""
    return [
        f"the table has a row without a difference: {row}"
        for row in explanations()
        if not any(map(row.explains, found))
    ]


def judged_texts(data: Path, dataset: str, seed: int, share: int = 1) -> list[Judged]:
    """One in `share` of the published texts of a data set, with the verdicts."""
    texts = list(published_texts(data, dataset, seed))[::share]
    with tempfile.TemporaryDirectory() as folder:
        if dataset in LM_EVAL:
            return list(judged_mathematics(texts, dataset, Path(folder)))
        return list(judged_programs(texts, dataset, data / FILES[dataset], Path(folder)))


def main() -> int:
    """Print the differences; returns 1 when one has no explanation."""
    options = parser("grading_differences", __doc__)
    options.add_argument("data", type=Path)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    judged = list(judged_texts_of_models())
    for dataset in FILES:
        judged += judged_texts(arguments.data, dataset, arguments.seed)
    found = differences(judged)
    counts = Counter(
        (each.grader, each.accepts, ", ".join(each.text.form), str(each.text.is_right))
        for each in found
    )
    for (grader, accepts, form, is_right), count in sorted(counts.items()):
        print(f"{grader} {'accepts' if accepts else 'rejects'} {form}, right={is_right}: {count}")
    rejected = {
        f"{', '.join(each.text.form)} ({each.text.dataset})"
        for each in judged
        if each.text.is_right and SAME_TASK not in each.verdicts and not any(each.verdicts.values())
    }
    texts = len({id(each.text) for each in judged})
    print(f"{texts} texts, {len(found)} differences of {len(counts)} kinds")
    print(f"right texts that no grader accepts: {'; '.join(sorted(rejected)) or 'none'}")
    faults = [*unexplained(found), *unused(found)]
    print(*faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
