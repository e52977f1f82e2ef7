"""The benchmarks as files: lm-eval tasks and data, EvalPlus problems, story prompts with
checklists, function calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tools.pocket import functions
from tools.pocket.corpus import sampler
from tools.pocket.examples import END_OF_TEXT, Example, draw, generator
from tools.pocket.functions import Program, base_inputs, plus_inputs
from tools.pocket.world import World

SEED = 101
COUNTS = {
    "arc_challenge": 112, "arc_easy": 112, "boolq": 112, "hellaswag": 112, "mmlu": 112,
    "openbookqa": 112, "rte": 112,
    "winogrande": 112, "gsm8k": 72, "math500": 72, "humaneval": 60, "mbpp": 60, "livecodebench": 50,
    "wildbench": 40,
    "function_calls": 160,
}  # fmt: skip
NORMALISED = ("arc_challenge", "arc_easy", "hellaswag", "openbookqa")
MULTIPLE_CHOICE = (*NORMALISED, "boolq", "mmlu", "rte", "winogrande")
# Benchmark -> kind of its documents, where the kind has another name. A model this small knows the
# right option long before it can name the option's letter, so mmlu prints the letters and asks for
# the option.
KINDS = {"mmlu": "options"}
# Text before the number that is graded; as in GSM8K, the target is the whole worked answer.
NUMBER = {"gsm8k": "#### ", "math500": "The answer is "}
PROGRAMS = ("humaneval", "mbpp", "livecodebench")
# EvalPlus treats some task ids of the published benchmarks specially, but none from this number on.
FIRST_TASK_NUMBER = 1001


def held_out_examples(world: World, skill: str) -> list[Example]:
    """The items of a benchmark: held-out examples, no two with the same prompt and choices."""
    random = generator(SEED, "benchmark", skill)
    examples: dict[tuple[str, tuple[str, ...]], Example] = {}
    while len(examples) < COUNTS[skill]:
        example = draw(sampler(world, KINDS.get(skill, skill)), random, benchmark=True)
        examples.setdefault((example.prompt, tuple(sorted(example.choices))), example)
    return list(examples.values())


def program_examples(skill: str) -> list[Example]:
    """The items of a benchmark of programs: held-out functions, all operations equally likely, no
    two with the same composition."""
    random = generator(SEED, "benchmark", skill)
    examples: dict[tuple[object, ...], Example] = {}
    while len(examples) < COUNTS[skill]:
        program = functions.program_for(random, skill, decay=0.0)
        if skill == "mbpp":
            example = functions.as_description(program, random)
        else:
            example = functions.as_completion(program, skill)
        examples.setdefault(example.key, example)
    return list(examples.values())


def _row(example: Example, number: int) -> dict[str, Any]:
    """One line of an lm-eval data file or of the story prompts."""
    row: dict[str, Any] = {"id": f"{example.skill}/{number}"}
    if example.skill == "winogrande":
        return row | {
            "contexts": list(example.choices),
            "ending": example.answer.strip(),
            "label": example.label,
        }
    row["prompt"] = example.prompt
    if example.choices:
        row |= {"choices": list(example.choices), "label": example.label}
    return row | example.details


def _problem(example: Example, number: int, random: Random) -> dict[str, Any]:
    """One EvalPlus problem. All tests of livecodebench are base tests, since it has a single set of
    tests."""
    program: Program = example.details["program"]
    base = base_inputs(program.domain, random, 2)
    plus = plus_inputs(program.domain, random, 24)
    single_set = example.skill == "livecodebench"
    family = "Mbpp" if example.skill == "mbpp" else "HumanEval"
    problem = {
        "task_id": f"{family}/{FIRST_TASK_NUMBER + number}",
        "prompt": example.prompt,
        "entry_point": program.name,
        "contract": "",
        "canonical_solution": example.answer + "\n",
        "base_input": base + plus if single_set else base,
        "plus_input": [] if single_set else plus,
        "atol": 0,
    }
    if "assertion" in example.details:
        problem["assertion"] = example.details["assertion"]
    return problem


def _question(example: Example, number: int) -> dict[str, Any]:
    """One question in BFCL's format, with the functions that may be called."""
    schemas = []
    for tool in example.details["tools"]:
        schema = tool["function"]
        schemas.append({**schema, "parameters": {**schema["parameters"], "type": "dict"}})
    return {
        "id": _call_id(example, number),
        "question": [example.details["messages"][:1]],
        "function": schemas,
    }


def _right_calls(example: Example, number: int) -> dict[str, Any]:
    """The calls of the right answer in BFCL's format, with one allowed value for each argument."""
    calls = []
    for tool_call in example.details["messages"][1].get("tool_calls", ()):
        call = tool_call["function"]
        allowed = {name: [value] for name, value in call["arguments"].items()}
        calls.append({call["name"]: allowed})
    return {"id": _call_id(example, number), "ground_truth": calls}


def _call_id(example: Example, number: int) -> str:
    return f"{example.details['kind']}_{number}"


def task_definition(skill: str) -> dict[str, Any]:
    """The definition of an lm-eval task of the split `test`; the caller adds the path of its
    data."""
    task: dict[str, Any] = {"task": f"pocket_{skill}", "test_split": "test", "num_fewshot": 0}
    fields = ("prompt", "choices", "label")
    if skill in MULTIPLE_CHOICE:
        # as in lm-eval's own: two contexts are compared by the ending they share
        if skill == "winogrande":
            fields = ("label", "contexts", "ending")
        task |= {"output_type": "multiple_choice"}
        task |= dict(zip(("doc_to_text", "doc_to_choice", "doc_to_target"), fields, strict=True))
        metrics = ["acc", "acc_norm"] if skill in NORMALISED else ["acc"]
    else:
        stopping = {"until": [END_OF_TEXT], "do_sample": False, "max_gen_toks": 48}
        pick = {
            "name": "strict-match",
            "filter": [
                {"function": "regex", "regex_pattern": rf"{NUMBER[skill]}(-?\d+)"},
                {"function": "take_first"},
            ],
        }
        task |= {
            "output_type": "generate_until",
            "doc_to_text": "prompt",
            "doc_to_target": "target",
        }
        task |= {"generation_kwargs": stopping, "filter_list": [pick]}
        metrics = ["exact_match"]
    options = {"regexes_to_ignore": [f"(?s).*{NUMBER[skill]}", r"\.$"]} if skill in NUMBER else {}
    task["metric_list"] = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True, **options}
        for name in metrics
    ]
    return task | {"metadata": {"version": 1}}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_benchmarks(world: World, folder: Path) -> None:
    """Write all benchmark files; they have the same bytes on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for skill in COUNTS:
        if skill in PROGRAMS:
            random = generator(SEED, "inputs", skill)
            rows = [
                _problem(example, number, random)
                for number, example in enumerate(program_examples(skill))
            ]
        elif skill == "function_calls":
            examples = held_out_examples(world, skill)
            rows = [_question(example, number) for number, example in enumerate(examples)]
            answers = [_right_calls(example, number) for number, example in enumerate(examples)]
            write_lines(folder / f"{skill}_answers.jsonl", answers)
        else:
            rows = [
                _row(example, number)
                for number, example in enumerate(held_out_examples(world, skill))
            ]
        write_lines(folder / f"{skill}.jsonl", rows)
        if skill in MULTIPLE_CHOICE or skill in NUMBER:
            text = yaml.safe_dump(task_definition(skill), sort_keys=False)
            (folder / f"{skill}.yaml").write_text(text, encoding="utf-8")
