"""The benchmark files mean to lm-eval and EvalPlus what they should: right answers score 1, wrong ones less."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pytest
import yaml
from evalplus.eval import PASS, untrusted_check
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from tools.pocket.benchmarks import MULTIPLE_CHOICE, NUMBER
from tools.pocket.examples import Example
from tools.pocket.functions import Program, plus_inputs

# Mistakes a model makes: the boundary, the empty case, a forgotten step.
SLIPS = (
    (" >= ", " > "), (" <= ", " < "), (" > ", " >= "), (" < ", " <= "), (", default=0", ""), ("abs(x)", "x"),
)  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Oracle(LM):  # type: ignore[misc]
    """Knows the texts that are right: prefers them, and writes them. `wrong` turns it round."""

    def __init__(self, examples: list[Example], wrong: bool) -> None:
        super().__init__()
        self.right = {example.text for example in examples}
        self.answers = {example.prompt: example.answer for example in examples}
        self.wrong = wrong

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        known = [any(text.startswith("".join(one.args)) for text in self.right) for one in requests]
        return [(0.0, True) if is_known != self.wrong else (-100.0, False) for is_known in known]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any]) -> list[str]:
        return ["#### x. The answer is x." if self.wrong else self.answers[one.args[0]] for one in requests]


def run(skill: str, folder: Path, model: LM) -> dict[str, float]:
    rows = datasets.DatasetDict({"test": datasets.Dataset.from_list(lines(folder / f"{skill}.jsonl"))})
    definition = yaml.safe_load((folder / f"{skill}.yaml").read_text())
    task = ConfigurableTask(config={**definition, "custom_dataset": lambda **_: rows})
    results: dict[str, float] = evaluate(lm=model, task_dict={skill: task}, bootstrap_iters=0)["results"][skill]
    return results


@pytest.mark.parametrize("skill", [*MULTIPLE_CHOICE, *NUMBER])
def test_lm_eval_scores_right_answers_one_and_wrong_ones_zero(
    skill: str, items: dict[str, list[Example]], data: Path
) -> None:
    right = run(skill, data / "benchmarks", Oracle(items[skill], wrong=False))
    wrong = run(skill, data / "benchmarks", Oracle(items[skill], wrong=True))
    metrics = ("acc,none", "acc_norm,none", "exact_match,strict-match")
    assert [right[metric] for metric in metrics if metric in right]
    for metric in metrics:
        if metric in right:
            assert (right[metric], wrong[metric]) == (1.0, 0.0)


@pytest.mark.parametrize("skill", MULTIPLE_CHOICE)
def test_the_right_choice_has_no_favourite_place(skill: str, data: Path) -> None:
    rows = lines(data / "benchmarks" / f"{skill}.jsonl")
    labels = [row["label"] for row in rows]
    places = len(rows[0].get("choices") or rows[0]["contexts"])
    assert max(labels.count(place) for place in range(places)) < len(rows) / places * 1.45


def expected(problem: dict[str, Any], part: str) -> list[Any]:
    namespace: dict[str, Any] = {}
    exec(problem["prompt"] + problem["canonical_solution"], namespace)
    return [namespace[problem["entry_point"]](*arguments) for arguments in problem[part]]


def passes(skill: str, problem: dict[str, Any], solution: str, part: str) -> bool:
    """EvalPlus's own verdict on one part of a problem's tests."""
    wanted = expected(problem, part)
    status, _ = untrusted_check(
        "mbpp" if skill == "mbpp" else "humaneval", problem["prompt"] + solution, problem[part], problem["entry_point"],
        expected=wanted, atol=problem["atol"], ref_time=[0.01] * len(wanted), fast_check=True,
    )  # fmt: skip
    return bool(status == PASS)


def is_real(program: Program, slip: Program) -> bool:
    """Whether the slip shows on any of many arguments; x >= 0 instead of x > 0 in a sum, say, never does."""

    def outcome(one: Program, arguments: list[Any]) -> Any:
        try:
            return one.run(arguments)
        except (ValueError, IndexError) as error:
            return repr(error)

    arguments = plus_inputs(program.domain, Random(5), 200)
    return any(outcome(program, one) != outcome(slip, one) for one in arguments)


@pytest.mark.parametrize("skill", ["humaneval", "mbpp"])
def test_plus_tests_catch_slips_that_base_tests_let_through(
    skill: str, items: dict[str, list[Example]], data: Path
) -> None:
    slipped = caught = 0
    for problem, example in zip(lines(data / "benchmarks" / f"{skill}.jsonl"), items[skill], strict=True):
        program, solution = example.details["program"], problem["canonical_solution"]
        for right, wrong in SLIPS:
            if right not in program.body:
                continue
            slip = replace(program, body=program.body.replace(right, wrong, 1))
            bad = solution.replace(right, wrong, 1)
            if is_real(program, slip) and passes(skill, problem, bad, "base_input"):
                slipped += 1
                caught += not passes(skill, problem, bad, "plus_input")
    assert slipped >= 8
    assert caught >= 0.9 * slipped


def test_livecodebench_has_one_set_of_tests(data: Path) -> None:
    problems = lines(data / "benchmarks" / "livecodebench.jsonl")
    assert all(problem["plus_input"] == [] and len(problem["base_input"]) > 10 for problem in problems)
