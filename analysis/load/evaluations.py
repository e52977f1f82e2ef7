"""Evaluations of a study's cells: scores, outcomes of items, and the origin of each evaluation
(machine, versions, settings)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from moe_lab.analysis import names
from moe_lab.analysis.load.items import with_own_names
from moe_lab.analysis.load.reader import Reader, records, steps_with_inputs
from moe_lab.result_files import SCHEMA as RESULT_SCHEMA
from moe_lab.result_files import SHAREABLE, STEPS, Result, TextMeasures

_OPTIONAL = ("replicate", "answer_loss", "units", *TextMeasures.__annotations__)
"""Columns of samples.parquet that are missing or empty for some benchmarks: those without reference
answers, with items of equal weights, or without generated texts."""
_SAMPLES = ("benchmark", "item", "outcome", *_OPTIONAL)
"""Columns that are read of samples.parquet."""
_NUMBERS = ["score", "stderr", "n", "expected"]
_OTHER_STEPS = ("cost", "profile")
"""Steps of a cell, besides its evaluations, whose errors are recorded."""
_UNANSWERED = {
    "too_long": "whose prompt and answer exceed its limit (counted as empty answers)",
    "unfinished_thoughts": "whose reasoning does not end within the limit (counted as wrong)",
}
"""Field of a protocol that lists items without an answer -> the reason why they have no answer."""
_ORIGIN = ("host", "machine", "python", "moe_lab", "commit", "sandbox", *_UNANSWERED, "protocol")
"""Columns of `Study.origins`, besides folder."""

Entries = Mapping[int, Mapping[str, Any]]
"""Cell -> the cell's entry in the study's record."""


def evaluations(
    entries: Entries, labels: Mapping[int, str], reader: Reader
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Read all evaluations of a study. Returns (`Study.results`, `Study.samples`, `Study.origins`).

    A gap is recorded for every evaluation that is missing or cannot be read, for every cell that
    was not evaluated on all tasks of its suite, and for every step in _OTHER_STEPS that failed.

    labels: cell -> text that names the cell in gaps.
    """
    rows: list[dict[str, Any]] = []
    sample_tables: list[pa.Table] = []
    origins: dict[str, dict[str, Any]] = {}
    for cell, label in labels.items():
        entry = entries[cell]
        errors = entry["errors"]
        # suite: all tasks on which the study evaluated any cell of the same model
        missing_tasks = [task for task in entry["suite"] if task not in entry["evaluate"]]
        if missing_tasks:
            reader.record_gap(
                f"not evaluated on {names.enumeration(missing_tasks)}, unlike other cells of the "
                "study",
                label,
            )
        for kind in _OTHER_STEPS:
            # when a cell is in several studies, one study may have the error of a step, and another
            # study the finished step
            if kind in errors and not entry.get(kind):
                # records a gap
                reader.step(None, f"{kind} of {label}", errors[kind])
        for task, step_name in entry["evaluate"].items():
            folder = reader.step(step_name, f"{task} of {label}", errors.get(task))
            result = reader.json(folder, "result.json")
            if folder is None or result is None:
                continue
            if result["schema"] > RESULT_SCHEMA:
                reader.record_gap("written by a newer moe_lab: upgrade to read it", step_name)
                continue
            is_shareable = result["protocol"].get(SHAREABLE, True)
            of_step = {"cell": cell, "task": task, "folder": step_name, SHAREABLE: is_shareable}
            rows += [{**of_step, **row} for row in result["results"]]
            if step_name not in origins:  # several cells can share an evaluation
                origins[step_name] = _origin(step_name, result, reader.provenance(folder))
            table = reader.table(folder, "samples.parquet", _SAMPLES)
            if table is not None:
                sample_tables.append(
                    table.append_column("cell", pa.array(np.full(len(table), cell, np.int64)))
                )
    columns = ["cell", "task", *Result.__annotations__, "folder", SHAREABLE]
    results = pd.DataFrame(rows, columns=columns)
    results[_NUMBERS] = results[_NUMBERS].apply(pd.to_numeric, errors="coerce")
    # float, because an empty column has no type
    is_infinite = ~np.isfinite(results["score"].to_numpy(float))
    results = _drop(results, is_infinite, "has no finite score", reader)
    is_repeated = results.duplicated(["cell", "benchmark"]).to_numpy()
    results = _drop(results, is_repeated, "is reported twice, the first counts", reader)
    samples = with_own_names(_samples(sample_tables), results, reader)
    return results, samples, pd.DataFrame(list(origins.values()), columns=["folder", *_ORIGIN])


def _samples(tables: list[pa.Table]) -> pd.DataFrame:
    """Concatenate the samples of all evaluations. Of repeated items, the first counts. Several
    answers to an item become one row with their means."""
    item = ["cell", "benchmark", "item"]
    samples = pd.DataFrame(columns=[*item, "outcome"])
    if tables:
        samples = pa.concat_tables(tables, promote_options="permissive").to_pandas()
    for column in _OPTIONAL:
        samples[column] = pd.to_numeric(samples[column]) if column in samples else np.nan
    samples = samples.fillna({"replicate": 0})
    samples = samples.drop_duplicates([*item, "replicate"], ignore_index=True)
    if samples["replicate"].any():
        samples = samples.groupby(item, sort=False, as_index=False).mean()
    return samples.drop(columns="replicate")


def _origin(
    folder: str, result: Mapping[str, Any], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of an evaluation in `Study.origins`.

    folder: name of the evaluation's step.
    result: content of its result.json.
    provenance: how the step was computed, from its step.json.
    """
    code = provenance.get("code", {})
    protocol = result["protocol"]
    commit = code.get("commit")
    # "edits" is a checksum of the changes to the code that were not committed
    if commit and code.get("edits"):
        commit = f"{commit} (edits {code['edits'][:7]})"
    return {
        "folder": folder,
        **{key: provenance.get(key) for key in ("host", "machine", "python")},
        "moe_lab": code.get("version"),
        "commit": commit,
        "sandbox": protocol.get("sandbox"),
        # numbers of items without an answer
        **{key: len(protocol.get(key) or ()) for key in _UNANSWERED},
        "protocol": protocol,
    }


def _drop(
    results: pd.DataFrame, is_dropped: np.ndarray, reason: str, reader: Reader
) -> pd.DataFrame:
    """The results that are not dropped. A gap with the benchmark and `reason` is recorded for each
    of the others."""
    for row in records(results[is_dropped]):
        reader.record_gap(f"{row['benchmark']} {reason}", row["folder"])
    return results[~is_dropped].reset_index(drop=True)


ROUNDING = 1e-3
"""A score counts as the mean of its items' outcomes when it differs by less than this."""


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of the items of each benchmark, for the cells of one model."""

    matrices: dict[str, np.ndarray]
    """Benchmark -> outcomes (cells, items), NaN where a cell was not asked an item. All outcomes of
    a cell are NaN if its score is not their mean."""
    units: dict[str, np.ndarray]
    """Benchmark -> weights (items,), for benchmarks whose items have different weights."""
    unexplained_scores: list[tuple[int, str]]
    """Pairs (cell, benchmark) whose score is not the mean of its outcomes, for benchmarks in
    `matrices`."""


def outcome_matrices(samples: pd.DataFrame, scores: pd.DataFrame) -> Outcomes:
    """Arrange the outcomes in `samples` as one matrix for each benchmark. A matrix has a row for
    each row of `scores`, and a column for each item.

    samples: `Study.samples` for cells in `scores`.
    scores: score of each cell (row) on each benchmark (column), NaN if missing.

    A score is explained if it is the weighted mean of the cell's outcomes, up to ROUNDING. A
    benchmark is left out if no score is explained, or if more scores are unexplained than
    explained.
    """
    outcomes = Outcomes({}, {}, [])
    for benchmark, rows in samples.groupby("benchmark", sort=False):
        if benchmark not in scores.columns:
            continue
        name = str(benchmark)
        score = scores[benchmark].to_numpy()
        item_indices, items = pd.factorize(rows["item"], sort=True, use_na_sentinel=False)
        matrix = np.full((len(scores), len(items)), np.nan)
        matrix[scores.index.get_indexer(pd.Index(rows["cell"])), item_indices] = rows["outcome"]
        units = np.ones(len(items))
        units[item_indices] = rows["units"].fillna(1.0)
        has_outcome = np.isfinite(matrix)
        is_comparable = has_outcome.any(axis=1) & ~np.isnan(score)
        # the maximum avoids a division by 0
        means = np.nansum(matrix * units, axis=1) / np.maximum(has_outcome @ units, 1)
        is_explained = is_comparable & (np.abs(means - score) < ROUNDING)
        if not is_explained.any() or 2 * is_explained.sum() < is_comparable.sum():
            continue
        unexplained_cells = scores.index[is_comparable & ~is_explained]
        outcomes.unexplained_scores.extend((cell, name) for cell in unexplained_cells.tolist())
        matrix[~is_explained] = np.nan
        outcomes.matrices[name] = matrix
        if (units != 1).any():
            outcomes.units[name] = units
    return outcomes


def remarks(
    results: pd.DataFrame,
    origins: pd.DataFrame,
    cells: pd.DataFrame,
    libraries: Mapping[str, list[str]],
) -> list[str]:
    """Sentences about results that are hard to compare, and about programs written by models that
    ran without isolation. libraries: those of `versions_of_libraries`."""
    sentences = [
        f"Steps were made with different versions of {library}: {', '.join(versions)}."
        for library, versions in libraries.items()
        if len(versions) > 1
    ]
    commits = [str(commit) for commit in origins["commit"].dropna().unique()]
    if len(commits) > 1:
        sentences.append(
            f"Results were made with different commits of moe_lab: {', '.join(sorted(commits))}."
        )
    for benchmark, item_counts in results.groupby("benchmark")["n"].unique().items():
        if len(item_counts) > 1:
            counts_text = ", ".join(f"{n:g}" for n in sorted(item_counts))
            sentences.append(
                f"{benchmark} was evaluated on different numbers of items ({counts_text}); tests "
                "use those in common."
            )
    sentences += mixed_metrics(results, cells)
    # expected: number of items of the whole benchmark
    limited_benchmarks = results.loc[
        results["expected"].notna() & (results["n"] < results["expected"]), "benchmark"
    ].nunique()
    if limited_benchmarks:
        sentences.append(
            f"A limit was set: {names.count(limited_benchmarks, 'benchmark')} ran on part of the "
            "items only."
        )
    for column, reason in _UNANSWERED.items():
        # benchmark -> largest number of unanswered items in one evaluation
        largest_counts = (
            results.merge(origins[["folder", column]], on="folder")
            .groupby("benchmark")[column]
            .max()
        )
        for benchmark, count in largest_counts[largest_counts > 0].items():
            sentences.append(f"{benchmark}: items of a model {reason}: up to {count}.")
    if results.groupby("cell")["task"].agg(frozenset).nunique() > 1:
        sentences.append(
            "Cells were evaluated on different sets of benchmarks; averages are over those a group "
            "has in common."
        )
    if (origins["sandbox"] == "none").any():
        sentences.append("Programs written by models ran without isolation (sandbox=none).")
    return sentences


def mixed_metrics(results: pd.DataFrame, cells: pd.DataFrame) -> list[str]:
    """A sentence for every benchmark that was measured by different metrics on cells of the same
    model."""
    models = results["cell"].map(cells["model"])
    is_mixed = results.groupby([results["benchmark"], models])["metric"].transform("nunique") > 1
    sentences = []
    for benchmark, metrics in results[is_mixed].groupby("benchmark")["metric"].unique().items():
        metrics_text = ", ".join(sorted(map(str, metrics)))
        sentences.append(
            f"{benchmark} was measured by different metrics ({metrics_text}): its scores are not "
            "comparable."
        )
    return sentences


def versions_of_libraries(
    origins: pd.DataFrame, cells: pd.DataFrame, reader: Reader
) -> dict[str, list[str]]:
    """Library -> all versions of the library with which the results, and the steps behind them,
    were computed; both sorted."""
    folders = cells[[f"{kind}_folder" for kind in STEPS]].to_numpy().ravel()
    steps = [*origins["folder"], *pd.Series(folders).dropna()]
    versions_of_library: dict[str, set[str]] = {}
    for folder in steps_with_inputs(steps, reader).values():
        for library, version in reader.provenance(folder).get("versions", {}).items():
            if version:
                versions_of_library.setdefault(library, set()).add(version)
    return {library: sorted(versions) for library, versions in sorted(versions_of_library.items())}
