"""The shipped files of benchmarks, calibration and search are what the code writes, and mean what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from moe_lab.calibration.batches import answer_batches
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError
from moe_lab.evaluation.harnesses.stories import rules_kept
from tools.pocket.benchmarks import COUNTS, MULTIPLE_CHOICE, NUMBER
from tools.pocket.build import SEARCH_COUNT, calibration_examples, search_examples
from tools.pocket.examples import Example
from tools.pocket.world import World

Items = dict[str, list[Example]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_shipped_files_are_regenerated_byte_for_byte(tmp_path: Path, data: Path) -> None:
    """Written by another process with other string hashes."""
    environment = os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", "tools.pocket.build", "--output", tmp_path], check=True, env=environment)
    for kind in ("benchmarks", "calibration", "search"):
        shipped = {path.name: path.read_bytes() for path in (data / kind).iterdir()}
        again = {path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()}
        assert sorted(again) == sorted(shipped)
        assert [name for name in shipped if shipped[name] != again[name]] == []


# Tokens.


@pytest.mark.parametrize("domain", ["general", "stories", "code", "math"])
def test_calibration_sets_fill_64_rows_of_512(domain: str, data: Path, tokenizer: Any) -> None:
    rows = lines(data / "calibration" / f"{domain}.jsonl")
    assert 60_000 <= sum(len(tokenizer.encode(row["text"])) + 1 for row in rows) <= 80_000


def continuations(example: Example) -> list[tuple[str, str]]:
    """What a harness puts together from the item: each context with what may follow it."""
    if example.skill == "winogrande":
        return [(context, example.answer) for context in example.choices]
    wanted = [(example.prompt, example.answer)]
    return wanted + [(example.prompt, f" {choice}") for choice in example.choices]


@pytest.mark.parametrize("skill", COUNTS)
def test_a_prompt_tokenizes_alone_as_it_does_with_its_answer(skill: str, items: Items, tokenizer: Any) -> None:
    """Prompts end where the training text has token boundaries; otherwise a model meets tokens it never saw there."""
    for example in items[skill]:
        for prompt, answer in continuations(example):
            assert tokenizer.encode(prompt + answer) == tokenizer.encode(prompt) + tokenizer.encode(answer)


def test_any_text_comes_back(tokenizer: Any) -> None:
    text = "Zoë paid 42 €\n\n\tfor  two … or three? 茶"
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Tasks of the search.


@pytest.mark.parametrize("name", ["code", "math"])
def test_no_task_is_in_a_benchmark_or_in_the_calibration_set(name: str, world: World, items: Items) -> None:
    tasks = search_examples(world, name)
    keys = {(task.skill, task.key) for task in tasks}
    assert len(keys) == len(tasks) == SEARCH_COUNT
    assert not keys & {(example.skill, example.key) for skill in items.values() for example in skill}
    assert not keys & {(example.skill, example.key) for example in calibration_examples(world, name)}


@pytest.mark.parametrize("name", ["code", "math"])
def test_the_answers_of_tasks_are_what_is_marked(name: str, data: Path, tokenizer: Any) -> None:
    text = CalibrationConfig(
        name,
        f"pocket:search/{name}.jsonl",
        packing="none",
        length=112,
        tokens=112 * SEARCH_COUNT,
        batch_size=SEARCH_COUNT,
        order="first",
    )
    [(ids, valid, answers)] = answer_batches(text, tokenizer)
    found = [
        (tokenizer.decode(row[flags & ~marks]), tokenizer.decode(row[marks]))
        for row, flags, marks in zip(ids, valid, answers, strict=True)
    ]
    assert found == [(task["prompt"], task["completion"]) for task in lines(data / "search" / f"{name}.jsonl")]


# What the files of benchmarks mean to lm-eval; test_grading.py asks EvalPlus of its own.


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


@pytest.mark.slow
@pytest.mark.parametrize("skill", [*MULTIPLE_CHOICE, *NUMBER])
def test_lm_eval_scores_right_answers_one_and_wrong_ones_zero(skill: str, items: Items, data: Path) -> None:
    rows = datasets.DatasetDict({"test": datasets.Dataset.from_list(lines(data / f"benchmarks/{skill}.jsonl"))})
    definition = yaml.safe_load((data / f"benchmarks/{skill}.yaml").read_text())
    for wrong in (False, True):
        task = ConfigurableTask(config={**definition, "custom_dataset": lambda **_: rows})
        found = evaluate(lm=Oracle(items[skill], wrong), task_dict={skill: task}, bootstrap_iters=0)["results"][skill]
        metrics = ("acc,none", "acc_norm,none", "exact_match,strict-match")
        scores = [found[metric] for metric in metrics if metric in found]
        assert scores and set(scores) == {0.0 if wrong else 1.0}


# Rules of stories.

STORY = "One day Mira walked to the mill. There she found a lamp. Mira felt happy. They all went home."
HOME = {"rule": "ends_with", "text": "They all went home."}


@pytest.mark.parametrize(
    ("rule", "story", "kept"),
    [
        ({"rule": "mentions", "text": "lamp"}, STORY, True),
        ({"rule": "mentions", "text": "amp"}, STORY, False),
        ({"rule": "mentions", "text": "lamp"}, "Two lamps.", False),
        ({"rule": "opens_with", "text": "Mira"}, STORY, True),
        ({"rule": "opens_with", "text": "lamp"}, STORY, False),
        ({"rule": "opens_with", "text": "Mira"}, "", False),
        (HOME, STORY + "\n", True),
        (HOME, STORY + " Then", False),
        ({"rule": "sentences", "least": 4}, STORY, True),
        ({"rule": "sentences", "least": 5}, STORY, False),
        ({"rule": "sentences", "least": 5}, STORY + " And then", False),
        ({"rule": "no_repeats"}, STORY, True),
        ({"rule": "no_repeats"}, STORY + " There she found a lamp.", False),
        ({"rule": "no_repeats"}, "lamp lamp lamp", False),
    ],
)
def test_rules(rule: dict[str, Any], story: str, kept: bool) -> None:
    assert rules_kept(story, [rule]) == [kept]


def test_mistakes_in_a_checklist_are_named() -> None:
    with pytest.raises(UserError, match="did you mean mentions"):
        rules_kept(STORY, [{"rule": "mention", "text": "Tom"}])
    with pytest.raises(UserError, match="sentences does not take"):
        rules_kept(STORY, [{"rule": "sentences", "most": 3}])


def test_the_stories_of_the_world_keep_all_rules(items: Items) -> None:
    for example in items["wildbench"]:
        assert all(rules_kept(example.answer, example.details["checklist"]))
        assert not any(rules_kept("", example.details["checklist"]))
