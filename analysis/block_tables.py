"""A table of scores whose rows are any cells: blocks of cells that compete, measured against one of them if wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import names
from analysis.chosen import benchmark_targets, cost, differences, group_targets, scores
from analysis.comparison import Comparison
from analysis.load import Study
from analysis.tables import SCORE, Table, setting

COSTS = {"Kept": ("routed_kept", "{:.1%}"), "FLOPs saved": ("flops_ratio", "{:.1%}")}
"""Column -> its number in cost.json and its format; what is saved is 1 - ratio."""
TEXT = ("Model", "Pruned")
DIFFERENCE, P = "Difference", "p (Holm)"
UNPRUNED = names.CRITERIA["none"]
_EMPTY = pd.DataFrame(columns=[*TEXT, "Criterion"])


@dataclass(frozen=True, eq=False)
class Block:
    """Rows that compete: cells of one model with their labels, and the one whose Avg the others are compared with."""

    comparison: Comparison
    pruned: str
    labels: Mapping[int, str]
    """Cell -> label, in the order of the rows."""
    base: int | None = None


def block_table(
    study: Study, blocks: Sequence[Block], *, benchmarks: Sequence[str] = (), name: str, title: str, caption: str
) -> Table:
    """One row per cell of each block: `benchmarks` one by one, the group averages, Avg, its difference to the base with
    a Holm-corrected p-value (where a block has a base), the share of routed parameters kept and of FLOPs saved.

    The unpruned model comes first in every block. Intervals stand beside scores and differences.
    """
    parts = [_rows(study, block, benchmarks) for block in blocks] or [(_EMPTY, _EMPTY, _EMPTY)]
    frame, low, high = (pd.concat(found, ignore_index=True) for found in zip(*parts, strict=True))
    last = [column for column in ("Avg", DIFFERENCE, P, *COSTS) if column in frame]
    shown = [str(column) for column in frame if column not in (*TEXT, "Criterion", *last)]
    ranked = {column: "max" for column in (*shown, "Avg") if column in frame}
    formats = {
        **dict.fromkeys((*shown, "Avg", DIFFERENCE), SCORE),
        P: "{:.4f}",
        **{key: form for key, (_, form) in COSTS.items()},
    }
    return Table(
        name=name,
        title=title,
        caption=f"{caption} {setting(study)}",
        frame=frame[[*TEXT, "Criterion", *shown, *last]],
        formats={column: formats[column] for column in (*shown, *last)},
        best={**ranked, "FLOPs saved": "max"} if "FLOPs saved" in frame else ranked,
        blocks=TEXT,
        low=low,
        high=high,
    )


def _rows(study: Study, block: Block, benchmarks: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    comparison, full = block.comparison, block.comparison.unpruned
    labels = {**({full: UNPRUNED} if full is not None else {}), **block.labels}
    pruned = list(block.labels)
    targets = {**benchmark_targets(comparison, benchmarks), **group_targets(comparison, pruned)}
    text = pd.DataFrame(
        {"Model": comparison.model, "Pruned": block.pruned, "Criterion": pd.Series(labels)}, index=list(labels)
    )
    numbers = scores(comparison, list(labels), targets)
    frame, low, high = pd.concat([text, numbers.frame], axis=1), numbers.low, numbers.high
    if block.base is not None and "Avg" in targets:
        against = {cell: block.base for cell in pruned if cell != block.base}
        found = differences(comparison, targets["Avg"], against).reindex(list(labels))
        frame = frame.assign(**{DIFFERENCE: found["difference"], P: found["p_holm"]})
        low, high = low.assign(**{DIFFERENCE: found["low"]}), high.assign(**{DIFFERENCE: found["high"]})
    if len(study.costs):
        kept, saved = (cost(study, list(labels), COSTS[column][0]) for column in COSTS)
        frame = frame.assign(**dict(zip(COSTS, (kept, 1 - saved), strict=True)))
    return frame, low, high
