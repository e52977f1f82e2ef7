"""A table: numbers with what a reader needs beside them; and the tables that are not about scores."""

from __future__ import annotations

import pandas as pd

from analysis import names
from analysis.load.settings import pruned
from analysis.registry import Results, output
from analysis.render.table import Table


@output("artefacts", chapter="provenance", filters="Model|Pruned|Calibration|Criterion")
def artefact_table(results: Results, name: str) -> Table:
    """Which folders of the store a cell's numbers come from."""
    study = results.study
    evaluations = study.results.groupby("cell")["folder"].unique()
    text = {
        "Model": study.cells["model"],
        "Pruned": pruned(study.cells),
        "Calibration": study.cells["calibration"].map(names.calibration),
        "Criterion": study.cells["method"].map(names.method),
        "Plan": study.cells["plan_folder"].fillna(""),
        "Scores": study.cells["scores_folder"].fillna(""),
        "Statistics": study.cells["statistics_folder"].fillna(""),
        "Evaluations": [" ".join(evaluations.get(cell, [])) for cell in study.cells.index],
    }
    return Table(
        name=name,
        title="Files behind each row",
        caption=f"Folders inside {study.store}. Each holds its identity (step.json), how it came about "
        "(provenance.json) and checksums (manifest.json); evaluations also hold every item (samples.parquet).",
        frame=pd.DataFrame(text),
        formats={},
    )


@output("gaps", chapter="gaps")
def gap_table(results: Results, name: str) -> Table:
    """What is missing: each reason once, with the places where it holds."""
    study = results.study
    places: dict[str, list[str]] = {}
    for gap in study.gaps:
        places.setdefault(gap.what, []).append(gap.where)
    rows = [(what, len(where), "; ".join(where)) for what, where in places.items()]
    return Table(
        name=name,
        title="Gaps",
        caption="Missing results stand as – in every table and are left out of averages, ranks and tests.",
        frame=pd.DataFrame(rows, columns=["What", "Times", "Where"]),
        formats={"Times": "{:.0f}"},
    )
