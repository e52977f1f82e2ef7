"""The benchmark files mean to lm-eval what they should; test_grading.py asks EvalPlus of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from tools.pocket.benchmarks import MULTIPLE_CHOICE, NUMBER
from tools.pocket.examples import Example

pytestmark = pytest.mark.slow


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
