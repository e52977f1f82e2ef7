"""Small files in the harnesses' formats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from moe_lab.config import BenchmarkConfig
from moe_lab.paths import resolve


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(number: int, name: str, body: str, base: list[Any], plus: list[Any], **changes: Any) -> dict[str, Any]:
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
GENERATED = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "label",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def own_task(folder: Path, items: list[dict[str, Any]], definition: dict[str, Any], **settings: Any) -> BenchmarkConfig:
    """A benchmark of lm-eval with a task and items of its own."""
    (folder / "own.yaml").write_text(yaml.safe_dump({"task": "own", "test_split": "test", **definition}))
    write_lines(folder / "own.jsonl", items)
    metric = "exact_match" if definition["output_type"] == "generate_until" else "acc"
    task = BenchmarkConfig(name="own", harness="lm_eval", task=str(folder / "own.yaml"), reports={"own": metric})
    return replace(task, **settings)
