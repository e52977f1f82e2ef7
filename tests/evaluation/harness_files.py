"""Small files in the harnesses' formats, and miniature data sets with those columns of the hub's
data sets that are read."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from benchmarks.data_sets import write_data_set
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation.mirror import benchmarks, make
from moe_lab.paths import resolve

GARBAGE_TEXTS = [
    *("", "\ud800", "\0", "9" * 400, "[" * 9000, "(" * 9000, "1e999", "\\boxed{" * 99),
    *("\\boxed{}", "\\frac{1" * 99, "ANSWER: " * 99, "ANSWER: ABCD", "</reply>" * 99),
    *("```python\n" * 99, "<tool_call>" * 99, '{"name": "f", "arguments": ' * 999),
    '<tool_call>{"name": "give", "arguments": {"giver": 1e999, "present": NaN}}</tool_call>',
    f"```python\ndef f(x): return {'-' * 9000}x\n```",
    "```python\nwhile True: print(1)\n```",
    "```python\nclass Solution: 1 / 0\n```",
]
GARBAGE = st.text() | st.sampled_from(GARBAGE_TEXTS)
"""Texts that a model may write, none of which is right."""


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(
    number: int, name: str, body: str, base: list[Any], plus: list[Any], **changes: Any
) -> dict[str, Any]:
    """A HumanEval problem whose function takes x."""
    row = {
        "task_id": f"HumanEval/{number}",
        "entry_point": name,
        "prompt": f'def {name}(x):\n    """What it does."""\n',
        "canonical_solution": f"    {body}\n",
        "contract": "",
        "base_input": base,
        "plus_input": plus,
        "atol": 0,
    }
    return {**row, **changes}


def shipped_items(name: str, count: int | None = None) -> list[dict[str, Any]]:
    """The first items of a shipped benchmark."""
    lines = Path(resolve(f"pocket:benchmarks/{name}.jsonl")).read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_choice": "{{c}}",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}],
}
GENERATION = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "label",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def custom_task(
    folder: Path, items: list[dict[str, Any]], definition: dict[str, Any], **settings: Any
) -> BenchmarkConfig:
    """A benchmark of lm-eval with a custom task and items, named `own`."""
    (folder / "own.yaml").write_text(
        yaml.safe_dump({"task": "own", "test_split": "test", **definition})
    )
    write_lines(folder / "own.jsonl", items)
    metric = "exact_match" if definition["output_type"] == "generate_until" else "acc"
    task = BenchmarkConfig(
        name="own", harness="lm_eval", task=str(folder / "own.yaml"), reports={"own": metric}
    )
    return replace(task, **settings)


Rows = list[dict[str, Any]]

BOOLQ: Rows = [
    {
        "question": "is the sea salt",
        "passage": "Sea -- The sea is salt water.",
        "idx": 0,
        "label": 1,
    },
    {
        "question": "can a stone swim",
        "passage": "Stone -- A stone sinks.\nIt is heavy.",
        "idx": 1,
        "label": 0,
    },
    {"question": "do owls fly", "passage": "Owl -- Owls fly at night.", "idx": 2, "label": 1},
]
_CUBE = ["is using wrap.", "is tiles.", "holds a cube.", "pulls."]
_BARK = ["They bark loudly at cars.", "They", "fly.", "sleep on."]
HELLASWAG: Rows = [
    {"activity_label": label, "ctx_a": first, "ctx_b": second, "endings": endings, "label": answer}
    for label, first, second, endings, answer in [
        ("Roof", "A man sits on a roof.", "he", _CUBE, "3"),
        (
            "Tea",
            "[header] How to make tea [title] Boil.",
            "you",
            ["[step] pour", "wait  long", "x", "y"],
            "0",
        ),
        ("Dogs", "Two dogs run.", "", _BARK, "1"),
    ]
]
RTE: Rows = [
    {"sentence1": "Ann lives in Rome.", "sentence2": "Ann lives in Italy.", "label": 0, "idx": 0},
    {"sentence1": "It rained.", "sentence2": "It was dry.", "label": 1, "idx": 1},
    {"sentence1": "He has two cats.", "sentence2": "He has a cat.", "label": 0, "idx": 2},
]
MATHQA: Rows = [
    {"Problem": problem, "options": options, "correct": correct}
    for problem, options, correct in [
        (
            "two and three is ?",
            "a ) 38 , b ) 27.675 , c ) 5 , d ) data inadequate , e ) none of these",
            "c",
        ),
        ("a train runs 10 km in 2 h", "a ) 5 , b ) 50 , c ) 1,000 , d ) 7 , e ) 12 km", "a"),
        ("half of 9 is ?", "a ) rs . 4 , b ) 4.5 , c ) 5 , d ) 9 , e ) 18", "b"),
    ]
]
MINIATURES: dict[str, Rows] = {
    "boolq": BOOLQ,
    "hellaswag": HELLASWAG,
    "rte": RTE,
    "mathqa": MATHQA,
}


def subject_rows(subject: str, count: int) -> Rows:
    """MMLU questions of one subject."""
    return [
        {
            "question": f" {subject} {n} ?",
            "subject": subject,
            "choices": [f"{n}", f"{n + 1}", "x", "y"],
            "answer": n % 4,
        }
        for n in range(count)
    ]


def write_mirror(folder: Path, name: str, rows: Rows, **further_splits: Rows) -> BenchmarkConfig:
    """Write a mirror of a benchmark under folder/data: `rows` for the benchmark's split, and
    `further_splits`. Returns the benchmark."""
    (benchmark,) = benchmarks([name], str(folder / "data"))
    benchmark = replace(benchmark, expected=len(rows))
    rows_by_subset: dict[tuple[str, str], Rows] = {}
    for split, content in {str(benchmark.split): rows, **further_splits}.items():
        for row in content:
            subset = benchmark.subset or (row["subject"] if name == "mmlu" else "default")
            rows_by_subset.setdefault((subset, split), []).append(row)
    make(benchmark, write_data_set(folder / f"{name}_source", rows_by_subset))
    return benchmark
