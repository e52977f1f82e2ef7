"""docs/evaluation.md#adding-a-benchmark works as it is written, in a copy of the repository."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from pathlib import Path

import preloaded
import pytest
from asking import samples

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^`([\w/.]+)`[^\n]*:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "moe_lab/pocket/data/olmoe/model.safetensors").exists(), reason="no shipped model")
def test_it_is_asked_graded_and_in_the_tables_of_the_report(tmp_path: Path) -> None:
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    section = page.partition("### Adding a benchmark\n")[2].partition("\n## ")[0]
    blocks = dict(BLOCK.findall(section))
    assert list(blocks) == ["colours.jsonl", "conf/benchmark/colours.yaml"]
    for file, text in blocks.items():
        assert not (tmp_path / file).exists()
        (tmp_path / file).write_text(text, encoding="utf-8")

    def started(*words: str) -> None:
        command, environment = preloaded.command("-m", *words), {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    small = ("calibration.tokens=2048", "calibration.length=128", "suite.limit=4", "launcher=inline", "report=false")
    started("moe_lab", "suite.benchmarks=[colours,pocket_rte]", "criterion=frequency,man", *small, "store=store")
    for criterion in ("frequency", "man"):
        (folder,) = (tmp_path / "store" / "evaluate").glob(f"*-{criterion}-*-colours-*")
        assert [sample["item"] for sample in samples(folder)] == ["grass", "blood", "snow"]
        assert {sample["outcome"] for sample in samples(folder)} <= {0.0, 1.0}
    started("analysis", "unified.table1", "winners", "store=store", "out=tables")
    for name, column in (("unified.table1", None), ("winners", "Column")):
        with next((tmp_path / "tables").rglob(f"{name}.csv")).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert "colours" in ([row[column] for row in rows] if column else rows[0]), name
