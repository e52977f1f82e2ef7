"""Write the results of a study in the format of lm-eval's logs, one folder for each cell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from moe_lab.analysis.load.items import answers
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.settings import AXES, labels
from moe_lab.analysis.load.study import Study
from moe_lab.paths import shorten, valid_name
from moe_lab.result_files import Result, Sample


def export(study: Study, out: Path) -> list[Path]:
    """Write results_TIME.json, and samples_BENCHMARK_TIME.jsonl for each benchmark, to a folder of
    `out` for each cell of a study. Returns the folders.

    The key "moe_lab" of these files has what lm-eval has no name for, so that moe_lab can import
    the cell again. Texts of benchmarks that are not shareable are left out.
    """
    created = datetime.fromtimestamp(float(study.document["created"]), UTC)
    time = created.strftime("%Y-%m-%dT%H-%M-%S.%f")
    folders = []
    for cell, label in labels(study.cells).items():
        folder = out / shorten(valid_name(label))
        folder.mkdir(parents=True, exist_ok=True)
        results = records(study.results[study.results["cell"] == cell])
        for row in results:
            lines = [json.dumps(line) + "\n" for line in _samples(study, row)]
            file = folder / f"samples_{row['benchmark']}_{time}.jsonl"
            file.write_text("".join(lines), encoding="utf-8")
        (axes,) = records(study.cells.loc[[cell], list(AXES)])
        document = _document(axes, results)
        (folder / f"results_{time}.json").write_text(json.dumps(document, indent=1))
        folders.append(folder)
    return folders


def _document(axes: Mapping[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of results_TIME.json for a cell with `axes`. results: its rows of
    `Study.results`."""
    document: dict[str, Any] = {
        "results": {},
        "group_subtasks": {},
        "configs": {},
        "versions": {},
        "n-shot": {},
        "higher_is_better": {},
        "n-samples": {},
        "config": {"model": "moe_lab", "model_args": axes},
        "moe_lab": {"cell": axes, "results": {}},
    }
    for row in results:
        name = row["benchmark"]
        metric, _, filter_name = row["metric"].partition(",")
        filter_name = filter_name or "none"
        result = _without_nan({field: row[field] for field in Result.__annotations__})
        error = "N/A" if result["stderr"] is None else result["stderr"]
        document["results"][name] = {
            "alias": name,
            f"{metric},{filter_name}": row["score"],
            f"{metric}_stderr,{filter_name}": error,
        }
        document["configs"][name] = {"task": name, "output_type": "generate_until"}
        document["higher_is_better"][name] = {metric: row["scale"] == "score"}
        document["n-samples"][name] = {
            "original": result["expected"] or row["n"],
            "effective": row["n"],
        }
        document["moe_lab"]["results"][name] = result
    return document


def _samples(study: Study, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of samples_BENCHMARK_TIME.jsonl for a row of `Study.results`."""
    frame = answers(pd.DataFrame([result]), study.reader)
    frame = frame[frame["benchmark"] == result["benchmark"]]
    metric, _, filter_name = result["metric"].partition(",")
    for number, row in enumerate(records(frame)):
        target = row["right_answer"]
        yield {
            "doc_id": number,
            "doc": {},
            "target": target,
            "arguments": {"gen_args_0": {"arg_0": row["prompt"]}},
            "resps": [[row["output"]]],
            "filtered_resps": [row["extracted"]],
            "filter": filter_name or "none",
            "metrics": [metric],
            "doc_hash": row["key"],
            "prompt_hash": row["prompt_hash"],
            "target_hash": sha256(target.encode()).hexdigest(),
            metric: row["outcome"],
            "moe_lab": _without_nan({name: row[name] for name in Sample.__annotations__}),
        }


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with None for NaN, which JSON lacks."""
    return {key: None if pd.isna(value) else value for key, value in values.items()}
