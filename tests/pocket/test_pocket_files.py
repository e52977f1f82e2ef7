"""The shipped benchmark and calibration files are what the code writes, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by another process with other string hashes."""
    folder = tmp_path_factory.mktemp("rebuilt")
    environment = os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", "tools.pocket.build", "--output", folder], check=True, env=environment)
    return folder


@pytest.mark.parametrize("kind", ["benchmarks", "calibration", "search"])
def test_shipped_files_are_regenerated_byte_for_byte(kind: str, rebuilt: Path, data: Path) -> None:
    shipped = {path.name: path.read_bytes() for path in (data / kind).iterdir()}
    again = {path.name: path.read_bytes() for path in (rebuilt / kind).iterdir()}
    assert sorted(again) == sorted(shipped)
    assert [name for name in shipped if shipped[name] != again[name]] == []


@pytest.mark.parametrize("domain", ["general", "stories", "code", "math"])
def test_calibration_sets_fill_64_rows_of_512(domain: str, data: Path, tokenizer: Any) -> None:
    rows = [json.loads(line) for line in (data / "calibration" / f"{domain}.jsonl").read_text().splitlines()]
    tokens = sum(len(tokenizer.encode(row["text"])) + 1 for row in rows)
    assert 60_000 <= tokens <= 80_000
