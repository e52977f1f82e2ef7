"""Tables of the folders from which numbers come, and of missing results."""

from __future__ import annotations

import pandas as pd

from moe_lab.analysis.load.settings import removed_share_texts
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render.table import CELL_COLUMNS, Table, display_frame


@output("artefacts", chapter="provenance")
def artefact_table(results: Results) -> Table:
    """Folders of the store from which each cell's numbers come."""
    study = results.study
    evaluations = study.results.drop_duplicates(["cell", "folder"]).groupby("cell")["folder"]
    cells = study.cells.assign(
        removed_text=removed_share_texts(study.cells), evaluations=evaluations.agg(" ".join)
    )
    text_columns = {
        **CELL_COLUMNS,
        "Plan": "plan_folder",
        "Scores": "scores_folder",
        "Statistics": "statistics_folder",
        "Evaluations": "evaluations",
    }
    return Table(
        title="Files behind each row",
        caption=f"Folders of steps in {study.store} or its packs. step.json has the step's "
        "identity, provenance and checksums; evaluations also have every item (samples.parquet).",
        frame=display_frame(cells, text_columns).fillna(""),
        formats={},
    )


@output("gaps", chapter="gaps")
def gap_table(results: Results) -> Table:
    """Missing results: a row per reason, with all folders and cells to which it applies."""
    gaps = pd.DataFrame(results.study.gaps, columns=["reason", "location"])
    rows = gaps.groupby("reason", sort=False)["location"].agg(["size", "; ".join]).reset_index()
    return Table(
        title="Gaps",
        caption=(
            "Missing results are shown as – in every table and left out of averages, ranks and "
            "tests."
        ),
        frame=rows.set_axis(["What", "Times", "Where"], axis=1),
        formats={"Times": "{:.0f}"},
    )
