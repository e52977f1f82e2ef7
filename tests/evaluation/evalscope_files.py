"""Miniatures of what EvalScope reads, in the schema of the hub, and answers to them."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation.mirror import make

DATES = {"start_date": "2025-01-01", "end_date": "2025-04-30"}
_STARTER = "class Solution:\n    def largest(self, numbers: List[int], times: int) -> List[int]:\n        "


def pickled(tests: Any) -> str:
    """Tests as the column private_test_cases holds them."""
    return base64.b64encode(zlib.compress(pickle.dumps(tests))).decode()


def problem(number: int, day: str, *, function: bool = False, **changes: Any) -> dict[str, Any]:
    """A row of LiveCodeBench: read lines and print the sum of each, or return numbers in a new order."""
    if function:
        tests = [(f"[3, 1, {n}]\n2", json.dumps(sorted([3, 1, n], reverse=True)[:2])) for n in range(6)]
    else:
        tests = [(f"2\n1 {n}\n{n} 5\n", f"{1 + n}\n{n + 5}.0\n") for n in range(6)]
    cases = [
        {"input": given, "output": wanted, "testtype": "functional" if function else "stdin"} for given, wanted in tests
    ]
    return {
        "question_title": f"Problem {number}",
        "question_content": f"Problem {number}: add the numbers of each line.",
        "platform": "leetcode" if function else "atcoder",
        "question_id": f"q{number}",
        "contest_id": f"c{number}",
        "contest_date": day,
        "starter_code": _STARTER if function else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases[:2]),
        "private_test_cases": pickled(json.dumps(cases[2:])),
        "metadata": json.dumps({"func_name": "largest"} if function else {}),
        **changes,
    }


def benchmark(task: str, root: Path, **changes: Any) -> BenchmarkConfig:
    """A benchmark of EvalScope on data below `root`."""
    code = task == "live_code_bench"
    plain = BenchmarkConfig(
        name=task,
        harness="evalscope",
        task=task,
        data="miniature/data",
        split="test",
        reports={task: "acc"},
        chat=True,
        max_new_tokens=64,
        parameters={**DATES, "seconds": 1.0, "processes": 2} if code else {},
        root=str(root),
    )
    return replace(plain, **changes)


def write(of: BenchmarkConfig, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """The mirror of the benchmark's data: split -> its rows."""
    assert of.root is not None
    source = Path(of.root, "source")
    source.mkdir(parents=True, exist_ok=True)
    for split, each in rows.items():
        parquet.write_table(arrow.Table.from_pylist(list(each)), source / f"{split}.parquet")
    make(of, source)
