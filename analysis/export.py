"""Write the results of a study as logs of lm-eval and of Inspect, one folder for each cell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pandas as pd

from moe_lab.analysis.load.items import answers
from moe_lab.analysis.load.reader import records
from moe_lab.analysis.load.settings import AXES, labels
from moe_lab.analysis.load.study import Study
from moe_lab.paths import shorten, valid_name
from moe_lab.result_files import Result, Sample


def export(study: Study, out: Path) -> list[Path]:
    """For each cell of a study, write results_TIME.json and, for each benchmark,
    samples_BENCHMARK_TIME.jsonl (both as lm-eval) and BENCHMARK_TIME.eval (as Inspect) to a folder
    of `out`. Returns the folders.

    The key "moe_lab" of the first two has what lm-eval has no name for, so that moe_lab can import
    the cell again. Texts of benchmarks that are not shareable are left out.
    """
    created = datetime.fromtimestamp(float(study.document["created"]), UTC)
    time = created.strftime("%Y-%m-%dT%H-%M-%S.%f")
    folders = []
    for cell, label in labels(study.cells).items():
        folder = out / shorten(valid_name(label))
        folder.mkdir(parents=True, exist_ok=True)
        results = records(study.results[study.results["cell"] == cell])
        (axes,) = records(study.cells.loc[[cell], list(AXES)])
        for row in results:
            name = row["benchmark"]
            frame = answers(pd.DataFrame([row]), study.reader)
            samples = records(frame[frame["benchmark"] == name])
            lines = [json.dumps(line) + "\n" for line in _samples(samples, row["metric"])]
            file = folder / f"samples_{name}_{time}.jsonl"
            file.write_text("".join(lines), encoding="utf-8")
            log = _inspect_log(row, samples, {**axes, "label": label}, created.isoformat())
            with ZipFile(folder / f"{name}_{time}.eval", "w", ZIP_DEFLATED) as archive:
                for member, content in log.items():
                    archive.writestr(member, json.dumps(content))
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


def _samples(samples: Sequence[Mapping[str, Any]], metric: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of samples_BENCHMARK_TIME.jsonl. samples: rows of `answers`. metric: that of
    the result."""
    metric, _, filter_name = metric.partition(",")
    for number, row in enumerate(samples):
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


STOP_REASONS = {"end": "stop", "stop": "stop", "limit": "max_tokens", "too_long": "model_length"}
"""`Sample.ended` -> the reason in Inspect's logs."""


def _inspect_log(
    result: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    axes: Mapping[str, Any],
    created: str,
) -> dict[str, Any]:
    """Member of an archive .eval -> its content. result: a row of `Study.results`, of a cell with
    `axes`. samples: rows of `answers`."""
    name, model = result["benchmark"], f"moe_lab/{axes['label']}"
    metric = {"name": result["metric"], "value": result["score"]}
    summaries: list[dict[str, Any]] = []
    log: dict[str, Any] = {
        "header.json": {
            "version": 2,
            "status": "success",
            "eval": {
                "eval_id": f"{model} {name}",
                "created": created,
                "task": name,
                "dataset": {"name": name, "samples": result["n"]},
                "model": model,
                "config": {},
                "metadata": axes,
            },
            "results": {
                "total_samples": len(samples),
                "completed_samples": len(samples),
                "scores": [
                    {"name": "moe_lab", "scorer": "moe_lab", "metrics": {metric["name"]: metric}}
                ],
            },
        },
        "summaries.json": summaries,
    }
    for row in samples:
        epoch = int(row["replicate"]) + 1
        message = {"role": "assistant", "content": row["thought"] + (row["output"] or "")}
        reason = STOP_REASONS.get(row["ended"], "unknown")
        summary = {
            "id": row["item"],
            "epoch": epoch,
            "input": row["prompt"],
            "target": row["right_answer"],
            "scores": {"moe_lab": {"value": row["outcome"], "answer": row["extracted"]}},
        }
        summaries.append(summary)
        log[f"samples/{row['item']}_epoch_{epoch}.json"] = {
            **summary,
            "output": {"model": model, "choices": [{"message": message, "stop_reason": reason}]},
        }
    return log


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with None for NaN, which JSON lacks."""
    return {key: None if pd.isna(value) else value for key, value in values.items()}
