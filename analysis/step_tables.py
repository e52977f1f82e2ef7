"""What it takes to score (AIMER, Table 4) and to share a budget out (MoE-Slimming, Tables 1 and 12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis import names, steps
from analysis.frames import records
from analysis.load import Study
from analysis.memory import BYTES
from analysis.tables import Table, reading

MIB = 2**20
PASSES = {
    "statistics": "Forward pass (s)",
    "gradients": "Backward pass (s)",
    "weight_gradients": "Weight gradients (s)",
    "ablation": "Ablation (s)",
    "scaling": "Layer scaling (s)",
    "damage": "Exact damage (s)",
    "weights": "Weights (s)",
    "channel_weights": "Channel weights (s)",
    "scores": "Scores (s)",
    "search": "Search (s)",
    "reconstruction": "Search (s)",
    "sequential": "Search (s)",
    "plan": "Plan (s)",
}
"""Kind of step -> the column its seconds are in."""
TIME = "{:,.3f}"
GPU_PEAK = "Peak GPU memory (MiB)"
_MEASURED = "Seconds are of the process that finished a step: what an interrupted one had done before is not in them. "


def scoring_table(study: Study, *, name: str) -> Table:
    """AIMER's Table 4: the time to score a model, the passes before included, and the memory it takes."""
    cells = study.cells[study.cells["scores_folder"].notna()].drop_duplicates("scores_folder")
    rows, machines = [], []
    for cell in _in_order(cells):
        names_of = [each for each in steps.behind(cell["scores_folder"], study.reader) if _counts(each)]
        found = steps.taken(names_of, study.reader)
        if set(found["folder"]) != set(names_of) or not names_of:
            continue
        machines += list(found["machine"])
        facts = study.models.get(cell["model"], {})
        rows.append(
            {
                "Model": cell["model"],
                "Calibration": names.calibration(cell["calibration"]),
                "Criterion": names.criterion(cell["criterion"]),
                "Reads": names.listing(sorted(each.replace("_", " ") for each in set(found["kind"]) - {"scores"})),
                "Scoring time (s)": found["seconds"].sum(),
                "Of these, the scores (s)": found.loc[found["kind"] == "scores", "seconds"].sum(),
                "Peak memory (MiB)": found["peak"].max() / MIB,
                GPU_PEAK: found["gpu_peak"].max() / MIB,
                "Loading memory (MiB)": facts.get("parameters", float("nan")) * BYTES / MIB,
            }
        )
    numbers = {"Scoring time (s)": TIME, "Of these, the scores (s)": TIME, "Peak memory (MiB)": "{:,.0f}"}
    on_gpu = {GPU_PEAK: "{:,.0f}"} if any(pd.notna(row[GPU_PEAK]) for row in rows) else {}
    formats = {**numbers, **on_gpu, "Loading memory (MiB)": "{:,.2f}"}
    return Table(
        name=name,
        title="What scoring takes",
        caption="Scoring time: of the passes over text or weights that the criterion reads, and of the scores. "
        "Criteria that read one pass share it, so a study takes less than the sum. Peak memory: main memory of the "
        "process at most, which may have done other steps before, and beside it that on GPUs, where some were used; "
        "loading memory: the model in bfloat16. "
        f"{_MEASURED}{_machine(machines)}{reading(study)}",
        frame=pd.DataFrame(rows, columns=["Model", "Calibration", "Criterion", "Reads", *formats]),
        formats=formats,
        best=dict.fromkeys(list(numbers)[:1], "min"),
        blocks=("Model",),
        optional=tuple(on_gpu),
    )


def allocation_table(study: Study, *, name: str) -> Table:
    """MoE-Slimming's Tables 1 and 12: seconds of every step that a plan of channels rests on.

    A row per allocation, as its first ratio has it: attributions of the forward pass beside ablation, where both ran.
    """
    cells = study.cells[(study.cells["granularity"] == "channel") & study.cells["plan_folder"].notna()]
    same = ["model", "calibration", "criterion", "allocation", "gate", "seed"]
    rows, machines = [], []
    for cell in _in_order(cells.drop_duplicates(same)):
        names_of = [each for each in steps.behind(cell["plan_folder"], study.reader) if _counts(each)]
        found = steps.taken(names_of, study.reader)
        if set(found["folder"]) != set(names_of) or not names_of:
            continue
        machines += list(found["machine"])
        rows.append({**_cell_words(cell), **_by_pass(found), "Total (s)": found["seconds"].sum()})
    columns = [column for column in dict.fromkeys(PASSES.values()) if any(column in row for row in rows)]
    formats = dict.fromkeys([*columns, "Total (s)"], TIME)
    return Table(
        name=name,
        title="What sharing out a budget of channels takes",
        caption="Seconds of each step behind a plan; – where a plan reads no such step. The forward pass has the "
        "attributions of all experts at once, ablation runs the layers above again for every expert. "
        f"{_MEASURED}{_machine(machines)}{reading(study)}",
        frame=pd.DataFrame(rows, columns=["Model", "Calibration", "Criterion", "Allocation", *formats]),
        formats=formats,
        blocks=("Model", "Calibration"),
        optional=tuple(columns),
    )


def _in_order(cells: pd.DataFrame) -> list[dict[str, Any]]:
    order = names.in_order(cells["criterion"], names.CRITERIA)
    place = cells["criterion"].map(order.index).astype(int)
    return records(cells.assign(place=place).sort_values(["model", "place"], kind="stable"))


def _counts(name: str) -> bool:
    return steps.kind(name) not in steps.TIMELESS


def _cell_words(cell: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Model": str(cell["model"]),
        "Calibration": names.calibration(str(cell["calibration"])),
        "Criterion": names.criterion(str(cell["criterion"])),
        "Allocation": names.allocated(str(cell["allocation"])),
    }


def _by_pass(found: pd.DataFrame) -> dict[str, float]:
    """Column -> seconds; steps of a kind that has no column are in the total only."""
    sums = found.groupby(found["kind"].map(PASSES))["seconds"].sum()
    return {str(column): float(seconds) for column, seconds in sums.items()}


def _machine(machines: Iterable[str]) -> str:
    known = [machine for machine in dict.fromkeys(machines) if machine]
    return f"Measured on {names.listing(known)}. " if known else ""
