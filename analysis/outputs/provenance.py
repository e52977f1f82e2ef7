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
    # cell -> folders
    evaluation_folders = study.results.groupby("cell")["folder"].unique()
    cells = study.cells.fillna({f"{kind}_folder": "" for kind in ("plan", "scores", "statistics")})
    cells = cells.assign(
        removed_text=removed_share_texts(cells),
        evaluations=[" ".join(evaluation_folders.get(cell, [])) for cell in cells.index],
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
        frame=display_frame(cells, text_columns),
        formats={},
    )


@output("gaps", chapter="gaps")
def gap_table(results: Results) -> Table:
    """Missing results: a row per reason, with all folders and cells to which it applies."""
    # reason -> folders, and labels of cells
    locations_by_reason: dict[str, list[str]] = {}
    for gap in results.study.gaps:
        locations_by_reason.setdefault(gap.reason, []).append(gap.location)
    rows = [
        (reason, len(locations), "; ".join(locations))
        for reason, locations in locations_by_reason.items()
    ]
    return Table(
        title="Gaps",
        caption=(
            "Missing results are shown as – in every table and left out of averages, ranks and "
            "tests."
        ),
        frame=pd.DataFrame(rows, columns=["What", "Times", "Where"]),
        formats={"Times": "{:.0f}"},
    )
