"""Convert published data sets from plain files to folders in the layout of a data set on the
hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.calibration.sources import wikitext_lines
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation.mirror import make, read_rows

Rows = Sequence[Mapping[str, Any]]
FILES = {
    "winogrande": "winogrande_xl_validation",
    "piqa": "piqa_valid",
    "gsm8k_8shot": "gsm8k_test",
}
"""Benchmark -> stem of its file, where this is not BENCHMARK_SPLIT."""


def write_data_set(folder: Path, parts: Mapping[tuple[str, str], Rows]) -> Path:
    """Write the rows of each (subset, split) as JSON lines, and the card README.md that lists the
    files; returns `folder`."""
    configs: dict[str, str] = {}
    for (subset, split), rows in parts.items():
        file = folder / subset / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = configs.get(subset, f"- config_name: {subset}\n  data_files:\n")
        configs[subset] = f"{config}  - split: {split}\n    path: {subset}/{split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(configs.values())}---\n")
    return folder


def file_name(benchmark: BenchmarkConfig) -> str:
    """Name of the file with the evaluated split of a benchmark, such as arc_easy_test.jsonl."""
    stem = FILES.get(benchmark.name, f"{benchmark.name}_{benchmark.split}")
    return f"{stem}.txt" if benchmark.name == "wikitext2" else f"{stem}.jsonl"


def mirror_files(benchmark: BenchmarkConfig, data: Path, scratch: Path) -> None:
    """Make the mirror of a benchmark's evaluated split from its file in the folder `data`;
    temporary files go to `scratch`."""
    split = str(benchmark.split)
    file = data / file_name(benchmark)
    if file.suffix == ".txt":
        text = file.read_text(encoding="utf-8")
        rows: list[dict[str, Any]] = [{"text": line} for line in wikitext_lines(text)]  # as on hub
    else:
        rows = read_rows(file)
    labels = file.with_name(f"{file.stem}_labels.lst")
    if labels.is_file():
        rows = [
            {**row, "label": int(n)}
            for row, n in zip(rows, labels.read_text().split(), strict=True)
        ]
    parts: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        subset = benchmark.subset or (row["subject"] if benchmark.name == "mmlu" else "default")
        parts.setdefault((subset, split), []).append(row)
    make(benchmark, write_data_set(scratch / benchmark.name, parts))
