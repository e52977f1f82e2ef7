"""Evaluations of a study's cells: scores, outcomes of items, and how the evaluations were made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from analysis import names
from analysis.load.reader import Reader, groups, records, steps_behind
from moe_lab.results import SCALES, STEPS
from moe_lab.results import SCHEMA as RESULT_SCHEMA

_SAMPLES = ("benchmark", "item", "outcome")
_LOSS = "answer_loss"
_UNITS = "units"
"""Optional columns of samples.parquet: missing without reference answers, and where all items count
alike."""
_RESULT = ("benchmark", "metric", "score", "scale", "unit", "stderr", "n", "expected")
_OTHER_STEPS = ("cost", "profile")
"""Other steps of a cell whose errors are recorded."""
_LEFT_OUT = {
    "too_long": "whose prompt and answer exceed its limit (counted as empty answers)",
    "unfinished_thoughts": "whose reasoning does not end within the limit (counted as wrong)",
}
"""Items without an answer, by their name in a protocol -> the reason."""
_ORIGIN = ("host", "machine", "python", "moe_lab", "commit", "sandbox", *_LEFT_OUT)


def evaluations(
    entries: Mapping[int, Mapping[str, Any]], labels: Mapping[int, str], reader: Reader
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Read results, samples and origins (see `Study`) of every evaluation that can be read, each
    result once.

    entries: cell -> its entry in the record; labels: cell -> its label in gaps.
    """
    rows: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    origins: dict[str, dict[str, Any]] = {}
    _compare_suites(entries, labels, reader)
    for cell, words in labels.items():
        entry = entries[cell]
        errors = entry.get("errors") or {}
        for kind in _OTHER_STEPS:
            if kind in errors and not entry.get(kind):
                reader.step(None, f"{kind} of {words}", errors[kind])
        for task, name in (entry.get("evaluate") or {}).items():
            folder = reader.step(name, f"{task} of {words}", errors.get(task))
            result = reader.json(folder, "result.json")
            if folder is None or result is None:
                continue
            if problem := _unreadable(result):
                reader.gap(problem, name)
                continue
            rows += [
                {"cell": cell, "task": task, "folder": name, **found} for found in result["results"]
            ]
            if name not in origins:
                origins[name] = _origin(name, result, reader.provenance(folder))
            table = reader.table(folder, "samples.parquet", _SAMPLES, optional=(_LOSS, _UNITS))
            if table is not None:
                tables.append(
                    table.append_column("cell", pa.array(np.full(len(table), cell, np.int64)))
                )
    samples = _samples(tables)
    results = pd.DataFrame(rows, columns=["cell", "task", *_RESULT, "folder"])
    numbers = ["score", "stderr", "n", "expected"]
    results[numbers] = results[numbers].apply(pd.to_numeric, errors="coerce")
    _compare_reports(results, labels, reader)
    results = _without_duplicates(_without_nan(results, reader), reader)
    return (
        results,
        samples,
        pd.DataFrame(list(origins.values()), columns=["folder", "seconds", *_ORIGIN, "versions"]),
    )


def _unreadable(result: Mapping[str, Any]) -> str:
    """Why the results in a result.json cannot be read; "" if they can."""
    reported = result.get("results")
    if not (isinstance(reported, list) and all(isinstance(found, dict) for found in reported)):
        return "result.json is damaged"
    if int(result.get("schema", RESULT_SCHEMA)) > RESULT_SCHEMA:
        return "written by a newer moe_lab: upgrade to read it"
    if not all(found.get("scale") in SCALES for found in reported):
        return (
            "written by an older moe_lab, which does not tell losses from scores: run the "
            "study again"
        )
    return ""


def _samples(tables: list[pa.Table]) -> pd.DataFrame:
    empty = pd.DataFrame(columns=["cell", *_SAMPLES])
    samples = (
        pa.concat_tables(tables, promote_options="permissive").to_pandas() if tables else empty
    )
    for column in (_LOSS, _UNITS):
        samples[column] = pd.to_numeric(samples[column]) if column in samples else np.nan
    return samples


def _origin(
    folder: str, result: Mapping[str, Any], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    versions = {**(provenance.get("versions") or {}), **(result.get("versions") or {})}
    code = provenance.get("code") or {}
    protocol = result.get("protocol") or {}
    edits = str(code.get("edits") or "")
    return {
        "folder": folder,
        "seconds": provenance.get("seconds"),
        **{key: provenance.get(key) for key in ("host", "machine", "python")},
        "moe_lab": code.get("version"),
        "commit": f"{code['commit']}{f' (edits {edits[:7]})' if edits else ''}"
        if code.get("commit")
        else None,
        "sandbox": protocol.get("sandbox"),
        **{key: len(protocol.get(key) or ()) for key in _LEFT_OUT},
        "versions": {
            str(library): str(version) for library, version in versions.items() if version
        },
    }


def _compare_suites(
    entries: Mapping[int, Mapping[str, Any]], labels: Mapping[int, str], reader: Reader
) -> None:
    """Record a gap for every cell that lacks a task which other cells of its model and study
    have."""
    for cell, words in labels.items():
        entry = entries[cell]
        lacking = [task for task in entry["suite"] if task not in (entry.get("evaluate") or {})]
        if lacking:
            reader.gap(
                f"never asked for {names.listing(lacking)}, unlike other cells of the study", words
            )


def _compare_reports(results: pd.DataFrame, labels: Mapping[int, str], reader: Reader) -> None:
    """Record a gap for every benchmark that a task reports for some cells but not for all."""
    for key, found in groups(results, ["task"]):
        reported = found.groupby("cell")["benchmark"].agg(set)
        every = set(found["benchmark"])
        for cell, benchmarks in reported.items():
            for benchmark in sorted(every - benchmarks):
                reader.gap(
                    f"{benchmark} is not among the results of {key['task']}", labels[int(str(cell))]
                )


def _without_nan(results: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    bad = ~results["score"].astype(float).between(-np.inf, np.inf, inclusive="neither")
    for row in records(results[bad]):
        reader.gap(f"{row['benchmark']} has no finite score", row["folder"])
    return results[~bad]


def _without_duplicates(results: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    twice = results.duplicated(["cell", "benchmark"])
    for row in records(results[twice]):
        reader.gap(f"{row['benchmark']} is reported twice, the first counts", row["folder"])
    return results[~twice].reset_index(drop=True)


ROUNDING = 1e-3
"""A score counts as the mean of its outcomes when it differs from that mean by less than this."""


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of one model's cells, one row per cell; the row is NaN when a cell's score is not
    their mean."""

    matrices: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> outcomes (cells, items), NaN where a cell did not get an item."""
    units: dict[str, np.ndarray] = field(default_factory=dict)
    """Benchmark -> weights (items,) of its items; benchmarks whose items count alike are not in
    it."""
    odd: list[tuple[int, str]] = field(default_factory=list)
    """(cell, benchmark) whose score is not the mean of its outcomes although other cells' scores
    are."""


def outcome_matrices(samples: pd.DataFrame, scores: pd.DataFrame) -> Outcomes:
    """Arrange the samples of some cells as matrices of outcomes; scores: (these cells, benchmarks).

    A benchmark is left out when most of its scores are not means of outcomes.
    """
    found = Outcomes()
    unique = samples.drop_duplicates(["cell", "benchmark", "item"])
    for benchmark, rows in unique.groupby("benchmark", sort=False):
        if benchmark not in scores.columns:
            continue
        name = str(benchmark)
        places, items = pd.factorize(rows["item"], sort=True, use_na_sentinel=False)
        matrix = np.full((len(scores), len(items)), np.nan)
        matrix[scores.index.get_indexer(pd.Index(rows["cell"])), places] = rows["outcome"]
        units = np.ones(len(items))
        units[places] = rows["units"].fillna(1.0)
        counts = np.isfinite(matrix).sum(axis=1)
        score = scores[name].to_numpy()
        totals = np.isfinite(matrix) @ units
        explained = (
            np.abs(np.nansum(matrix * units, axis=1) / np.maximum(totals, 1) - score) < ROUNDING
        )
        explained &= counts > 0
        if not explained.any() or 2 * explained.sum() < (counts[~np.isnan(score)] > 0).sum():
            continue
        odd = (counts > 0) & ~np.isnan(score) & ~explained
        found.odd.extend((int(str(cell)), name) for cell in scores.index[odd])
        matrix[~explained] = np.nan
        found.matrices[name] = matrix
        if (units != 1).any():
            found.units[name] = units
    return found


def binary(outcomes: np.ndarray) -> bool:
    """Whether all outcomes are 0 or 1, without partial credit."""
    return bool(np.isin(outcomes[~np.isnan(outcomes)], (0.0, 1.0)).all())


NAMESPACES = "namespaces"
"""The sandbox that isolates programs fully; results made with it need no remark."""


def remarks(
    results: pd.DataFrame, origins: pd.DataFrame, cells: pd.DataFrame, reader: Reader
) -> list[str]:
    """Sentences about differences between results, and about programs that ran without a
    sandbox."""
    notes = mixed_versions(origins, cells, reader)
    commits = [str(commit) for commit in origins["commit"].dropna().unique()]
    if len(commits) > 1:
        notes.append(
            f"Results were made with different commits of moe_lab: {', '.join(sorted(commits))}."
        )
    by_benchmark = results.groupby("benchmark", sort=True)
    for name, sizes in by_benchmark["n"].unique().items():
        if len(sizes) > 1:
            counts = ", ".join(f"{n:g}" for n in sorted(sizes))
            notes.append(
                f"{name} was evaluated on different numbers of items ({counts}); tests use those "
                "in common."
            )
    notes += mixed_metrics(results, cells)
    short = results[results["expected"].notna() & (results["n"] < results["expected"])]
    if len(short):
        few = short["benchmark"].nunique()
        noun = "benchmark" if few == 1 else "benchmarks"
        notes.append(f"A limit was set: {few} {noun} ran on part of the items only.")
    for key, reason in _LEFT_OUT.items():
        of_benchmark = (
            results.merge(origins[["folder", key]], on="folder")
            .groupby("benchmark", sort=True)[key]
            .max()
        )
        for name, count in of_benchmark[of_benchmark > 0].items():
            notes.append(f"{name}: items of a model {reason}: up to {count}.")
    if results.groupby("cell")["task"].agg(frozenset).nunique() > 1:
        notes.append(
            "Cells were evaluated on different sets of benchmarks; averages are over those a "
            "group has in common."
        )
    for sandbox in sorted(set(origins["sandbox"].dropna()) - {NAMESPACES}):
        notes.append(
            f"Programs the model wrote ran without namespaces around them (sandbox: {sandbox})."
        )
    return notes


def mixed_versions(origins: pd.DataFrame, cells: pd.DataFrame, reader: Reader) -> list[str]:
    """A sentence for every library of which the steps of the cells, with all their inputs, had
    different versions."""
    steps = list(origins["folder"])
    for kind in STEPS:
        steps.extend(cells[f"{kind}_folder"].dropna())
    evaluated = dict(zip(origins["folder"], origins["versions"], strict=True))
    libraries: dict[str, dict[str, list[str]]] = {}
    for name, folder in steps_behind(steps, reader).items():
        versions_of_step = evaluated.get(name) or reader.provenance(folder).get("versions") or {}
        for library, version in versions_of_step.items():
            if version:
                libraries.setdefault(library, {}).setdefault(str(version), []).append(name)
    sentences = []
    for library, by_version in sorted(libraries.items()):
        if len(by_version) > 1:
            listed = ", ".join(
                f"{version} ({_some(names)})" for version, names in sorted(by_version.items())
            )
            sentences.append(f"Steps were made with different versions of {library}: {listed}.")
    return sentences


def _some(steps: list[str]) -> str:
    first, *others = sorted(steps)
    return f"{first} and {len(others)} more" if others else first


def mixed_metrics(results: pd.DataFrame, cells: pd.DataFrame) -> list[str]:
    """A sentence for every benchmark whose metric differs between cells of one model, so that
    scores do not compare."""
    models = results["cell"].map(cells["model"])
    by_model = results.groupby([results["benchmark"], models], sort=True)["metric"]
    mixed = by_model.transform("nunique") > 1
    return [
        f"{name} was measured by different metrics ({', '.join(sorted(map(str, metrics)))}): "
        "its scores are not comparable."
        for name, metrics in results[mixed]
        .groupby("benchmark", sort=True)["metric"]
        .unique()
        .items()
    ]


def versions(origins: pd.DataFrame) -> dict[str, list[str]]:
    """Library -> the versions results were made with."""
    by_library: dict[str, set[str]] = {}
    for row in origins["versions"]:
        for library, version in row.items():
            by_library.setdefault(library, set()).add(version)
    return {library: sorted(values) for library, values in sorted(by_library.items())}
