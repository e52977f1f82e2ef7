"""Small files in the harnesses' formats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
