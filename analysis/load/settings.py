"""Gate and seed: what tells cells of one model, ratio, calibration set and method apart, where a study has several.

Scores stand beside each other for every gate and seed. What a pass over a text leaves is shown for one of them: the
first that a model's cells have, if the pass was made with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import names
from analysis.load.reader import records

WORDS = {"gate": "gate {}", "seed": "seed {}"}
"""Axis -> how its value is said."""


def gate_and_seed(cells: pd.DataFrame) -> pd.Series:
    """For each cell its gate and seed in words, if its model's pruned cells have several of them: `seed 43`, or ""."""
    words_of = pd.Series("", cells.index, dtype=object)
    for _, own in cells[cells["criterion"] != "none"].groupby("model", sort=False):
        for axis, words in WORDS.items():
            if own[axis].nunique() > 1:
                joined_words = map(joined, words_of[own.index], own[axis].map(words.format))
                words_of.update(pd.Series(list(joined_words), own.index, dtype=object))
    return words_of


def pruned(cells: pd.DataFrame) -> pd.Series:
    """For each cell how much of the model is removed, with its setting where there are several: `50 %, seed 43`."""
    return pd.Series(
        list(map(joined, cells["ratio"].map(names.ratio), gate_and_seed(cells))), cells.index, dtype=object
    )


def passes(cells: pd.DataFrame) -> pd.DataFrame:
    """Of the cells whose pass is known one for each model and calibration set, the shown gate and seed preferred."""
    with_pass = cells[cells["statistics_folder"].notna()]
    usual = shown(cells)
    pairs = zip(with_pass["model"], with_pass["gate"], with_pass["seed"], strict=True)
    other = pd.Series([usual.get(model) != (gate, seed) for model, gate, seed in pairs], with_pass.index, dtype=bool)
    first = other.sort_values(kind="stable").index
    return with_pass.loc[first].drop_duplicates(["model", "calibration"]).sort_index()


def shown(cells: pd.DataFrame) -> dict[str, tuple[Any, Any]]:
    """Model -> the gate and seed of its first pruned cell with a pass."""
    pruned = cells[(cells["criterion"] != "none") & cells["statistics_folder"].notna()].drop_duplicates("model")
    return {str(row.model): (row.gate, row.seed) for row in pruned.itertuples()}


def of_passes(
    steps: Mapping[str, str | None] | None, usual: Mapping[str, tuple[Any, Any]]
) -> dict[tuple[str, str], str | None]:
    """(Calibration, model) -> its step, from a record's steps by "calibration@model@gate@seed".

    Of several gates and seeds that of `usual` (of the model) is taken, or the first. Older records, by
    "calibration@model", kept one without saying which: it is taken where there is no other.
    """
    ranked: dict[tuple[str, str], tuple[int, str | None]] = {}
    for key, step in (steps or {}).items():
        calibration, model, *setting = key.split("@")
        gate, seed = usual.get(model, ("", ""))
        rank = 2 if not setting else 0 if setting == [str(gate), str(seed)] else 1
        if (calibration, model) not in ranked or rank < ranked[calibration, model][0]:
            ranked[calibration, model] = rank, step
    return {key: step for key, (_, step) in ranked.items()}


def joined(first: str, second: str) -> str:
    """Two words that say something, or the one that does."""
    return ", ".join(filter(None, (first, second)))


NAMESPACES = "namespaces"
"""The sandbox that needs no remark."""


def remarks(results: pd.DataFrame, origins: pd.DataFrame, cells: pd.DataFrame) -> list[str]:
    """Sentences about differences between results, and about programs that ran without walls."""
    notes = [
        f"Results were made with different versions of {library}: {', '.join(found)}."
        for library, found in versions(origins).items()
        if len(found) > 1
    ]
    by_benchmark = results.groupby("benchmark", sort=True)
    for name, sizes in by_benchmark["n"].unique().items():
        if len(sizes) > 1:
            counts = ", ".join(f"{n:g}" for n in sorted(sizes))
            notes.append(f"{name} was counted on different numbers of items ({counts}); tests use the common ones.")
    notes += mixed_metrics(results, cells)
    short = results[results["expected"].notna() & (results["n"] < results["expected"])]
    if len(short):
        few = short["benchmark"].nunique()
        noun = "benchmark" if few == 1 else "benchmarks"
        notes.append(f"A limit was set: {few} {noun} ran on part of the items only.")
    unasked = (
        results.merge(origins[["folder", "too_long"]], on="folder").groupby("benchmark", sort=True)["too_long"].max()
    )
    for name, count in unasked[unasked > 0].items():
        notes.append(
            f"{name}: up to {count} items of a model were not asked, because prompt and answer do not fit its limit; "
            "they count as nothing written."
        )
    if results.groupby("cell")["task"].agg(frozenset).nunique() > 1:
        notes.append(
            "Cells were evaluated on different sets of benchmarks; averages are over those a group has in common."
        )
    for walls in sorted(set(origins["sandbox"].dropna()) - {NAMESPACES}):
        notes.append(f"Programs the model wrote ran without namespaces around them (sandbox: {walls}).")
    return notes


def mixed_metrics(results: pd.DataFrame, cells: pd.DataFrame) -> list[str]:
    """A sentence for every benchmark whose scores are not comparable, because its metrics differ in a model's cells."""
    models = results["cell"].map(cells["model"])
    by_model = results.groupby([results["benchmark"], models], sort=True)["metric"]
    mixed = by_model.transform("nunique") > 1
    return [
        f"{name} was measured by different metrics ({', '.join(sorted(map(str, metrics)))}): "
        "its scores are not comparable."
        for name, metrics in results[mixed].groupby("benchmark", sort=True)["metric"].unique().items()
    ]


def protocols(cells: pd.DataFrame) -> str:
    """How each model was asked, where models were asked differently: `qwen by heapr, deepseek by heapr_norm`; or ""."""
    if cells["protocol"].nunique() < 2:
        return ""
    by_protocol = cells.dropna(subset=["protocol"]).drop_duplicates(["model", "protocol"])
    return names.listing(f"{row.model} by {row.protocol}" for row in by_protocol.itertuples())


def versions(origins: pd.DataFrame) -> dict[str, list[str]]:
    """Library -> the versions results were made with."""
    by_library: dict[str, set[str]] = {}
    for row in origins["versions"]:
        for library, version in row.items():
            by_library.setdefault(library, set()).add(version)
    return {library: sorted(values) for library, values in sorted(by_library.items())}


METHOD = ["method", "calibration", "gate", "seed"]
"""Cells of one model that agree in these differ only in how much they remove."""

_CALLED = re.compile(r"(?P<name>[^,(]+)(\((?P<inside>.*)\)|, (?P<after>.*))?")


def allocation(word: str) -> tuple[str, dict[str, str]]:
    """The allocation's name and its settings from the word of a study's record.

    `coverage, prior usage` and `coverage(prior=usage)` are both ("coverage", {"prior": "usage"}); a setting without a
    value, such as `coverage, aligned`, has "". A word of another form is a name without settings.
    """
    match = _CALLED.fullmatch(word)
    if match is None:
        return word, {}
    separator, text = ("=", match["inside"]) if match["inside"] else (" ", match["after"] or "")
    parts = (part.strip().partition(separator) for part in text.split(",") if part.strip())
    return match["name"], {key: value for key, _, value in parts}


def method_labels(cells: pd.DataFrame) -> pd.Series:
    """A label per cell: its method, and the calibration set, gate and seed where these differ between pruned cells."""
    pruned = cells[cells["criterion"] != "none"]
    varying = [axis for axis in METHOD[1:] if pruned[axis].replace("none", None).nunique() > 1]
    return pd.Series([_method_label(row, varying) for row in records(cells)], cells.index, dtype=object)


def _method_label(row: dict[str, object], varying: list[str]) -> str:
    spelled = {"calibration": names.calibration(str(row["calibration"])), "seed": f"seed {row['seed']}"}
    extra = [spelled.get(axis, str(row[axis])) for axis in varying if row[axis] != "none"]
    return ", ".join([names.method(str(row["method"])), *(extra if row["criterion"] != "none" else [])])


SEARCHED = "evolutionary"
"""What the allocations of searches are called, possibly with settings behind it."""


def is_searched(allocation: str) -> bool:
    """Whether an allocation of a study's record was searched for."""
    return allocation.startswith(SEARCHED)
