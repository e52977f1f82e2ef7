"""What a reader should know about how results were made before comparing them."""

from __future__ import annotations

import pandas as pd

from analysis import names

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
    known = cells.dropna(subset=["protocol"]).drop_duplicates(["model", "protocol"])
    if known["protocol"].nunique() < 2:
        return ""
    return names.listing(f"{row.model} by {row.protocol}" for row in known.itertuples())


def versions(origins: pd.DataFrame) -> dict[str, list[str]]:
    """Library -> the versions results were made with."""
    found: dict[str, set[str]] = {}
    for row in origins["versions"]:
        for library, version in row.items():
            found.setdefault(library, set()).add(version)
    return {library: sorted(values) for library, values in sorted(found.items())}
