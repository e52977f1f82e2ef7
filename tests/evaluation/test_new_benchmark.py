"""docs/evaluation.md#adding-a-benchmark works as it is written, in a copy of the repository."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from pathlib import Path

import preloaded
import pyarrow.parquet as parquet
import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^`([\w/.]+)`[^\n]*:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "moe_lab/pocket/data/olmoe/model.safetensors").exists(), reason="no shipped model"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository after somebody followed the page."""
    copied = tmp_path_factory.mktemp("copy")
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    section = page.partition("### Adding a benchmark\n")[2].partition("\n## ")[0]
    blocks = dict(BLOCK.findall(section))
    assert list(blocks) == ["colours.jsonl", "conf/benchmark/colours.yaml"]
    for file, text in blocks.items():
        assert not (copied / file).exists()
        (copied / file).parent.mkdir(exist_ok=True)
        (copied / file).write_text(text, encoding="utf-8")
    return copied


def started(copy: Path, *words: str) -> None:
    command = preloaded.command("-m", *words)
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_asked_graded_and_in_the_tables_of_the_report(copy: Path) -> None:
    small = ("calibration.tokens=2048", "calibration.length=128", "suite.limit=4", "launcher=inline", "report=false")
    started(copy, "moe_lab", "suite.benchmarks=[colours,pocket_rte]", "criterion=frequency,man", *small, "store=store")
    for criterion in ("frequency", "man"):
        (folder,) = (copy / "store" / "evaluate").glob(f"*-{criterion}-*-colours-*")
        samples = parquet.read_table(folder / "samples.parquet").to_pylist()
        assert [sample["item"] for sample in samples] == ["grass", "blood", "snow"]
        assert {sample["outcome"] for sample in samples} <= {0.0, 1.0}
    started(copy, "analysis", "unified.table1", "winners", "store=store", "out=tables")
    for name, column in (("unified.table1", None), ("winners", "Column")):
        with next((copy / "tables").rglob(f"{name}.csv")).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert "colours" in ([row[column] for row in rows] if column else rows[0]), name
