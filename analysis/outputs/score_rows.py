"""A table of scores whose rows are any cells: blocks of cells that compete, measured against one of them if wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import names
from analysis.load.settings import joined, settings
from analysis.load.study import Study
from analysis.outputs.captions import setting
from analysis.render.table import SCORE, Table
from analysis.stats import uncertainty
from analysis.stats.cell_scores import COMMON, GROUPS, MEAN, column_targets, cost, differences, scores
from analysis.stats.comparison import Comparison


@dataclass(frozen=True)
class Cost:
    """A column of costs: offset + scale x a number of cost.json, and how it is shown."""

    source: str
    form: str
    scale: float = 1.0
    offset: float = 0.0


KEPT = {"Kept": Cost("routed_kept", "{:.1%}")}
COSTS = {**KEPT, "FLOPs saved": Cost("flops_ratio", "{:.1%}", scale=-1, offset=1)}
TEXT = ("Model", "Pruned")
AVERAGES = ("Avg", MEAN)
"""Averages that stand behind all other scores."""
DIFFERENCE, P = "Difference", "p (Holm)"
UNPRUNED = names.CRITERIA["none"]
_EMPTY = pd.DataFrame(columns=[*TEXT, "Criterion"])


@dataclass(frozen=True, eq=False)
class Block:
    """Rows that compete: cells of one model with their labels, and the one that the others are compared with."""

    comparison: Comparison
    pruned: str
    labels: Mapping[int, str]
    """Cell -> label, in the order of the rows."""
    base: int | None = None


def block_table(
    study: Study,
    blocks: Sequence[Block],
    *,
    name: str,
    title: str,
    caption: str,
    columns: Sequence[str],
    costs: Mapping[str, Cost] = COSTS,
) -> Table:
    """One row per cell of each block: those of `columns` (benchmarks and averages) that were run, the difference of the
    last one to the base with a Holm-corrected p-value (where a block has a base), and the columns of `costs`.

    The unpruned model comes first in every block. Intervals stand beside scores and differences.
    """
    run = [block for block in blocks if column_targets(block.comparison, list(block.labels), columns)]
    parts = [_rows(study, block, columns, costs) for block in run] or [(_EMPTY, _EMPTY, _EMPTY)]
    frame, low, high = (pd.concat(found, ignore_index=True) for found in zip(*parts, strict=True))
    if P in frame:
        frame[P] = uncertainty.holm(frame[P].to_numpy(float))
    last = [column for column in (*AVERAGES, DIFFERENCE, P, *costs) if column in frame]
    shown = [str(column) for column in frame if column not in (*TEXT, "Criterion", *last)]
    ranked = {column: "max" for column in (*shown, *AVERAGES) if column in frame}
    formats = {
        **dict.fromkeys((*shown, *AVERAGES, DIFFERENCE), SCORE),
        P: "{:.4f}",
        **{column: about.form for column, about in costs.items()},
    }
    return Table(
        name=name,
        title=title,
        caption=f"{caption} {setting(study)}",
        frame=frame[[*TEXT, "Criterion", *shown, *last]],
        formats={column: formats[column] for column in (*shown, *last)},
        best=ranked,
        blocks=TEXT,
        optional=(DIFFERENCE, P),
        low=low,
        high=high,
        footnotes=_not_run(run, columns),
    )


def _not_run(blocks: Sequence[Block], columns: Sequence[str]) -> list[str]:
    """A note on the benchmarks of `columns` that MEAN lacks because no model was evaluated on them."""
    listed = [name for name in columns if name not in (*GROUPS, *names.COLUMNS, COMMON, MEAN)]
    run = {name for block in blocks for name in block.comparison.benchmarks}
    lacking = [names.benchmark(name) for name in listed if name not in run]
    if MEAN not in columns or not lacking:
        return []
    return [
        f"{MEAN}: of {len(listed) - len(lacking)} of the paper's {len(listed)}; {names.listing(lacking)} were not run."
    ]


def _told(block: Block) -> tuple[str, dict[int, str]]:
    """What is pruned, and the labels of the rows: gate and seed stand with the first where all rows share them, with
    those labels that do not say them already where they do not."""
    told = settings(block.comparison.cells)[list(block.labels)]
    if told.nunique() == 1:
        return joined(block.pruned, str(told.iloc[0])), dict(block.labels)
    twice = [word for word, times in Counter(block.labels.values()).items() if times > 1]
    return block.pruned, {
        cell: joined(word, str(told[cell])) if word in twice else word for cell, word in block.labels.items()
    }


def _rows(
    study: Study, block: Block, columns: Sequence[str], costs: Mapping[str, Cost]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    comparison, full = block.comparison, block.comparison.unpruned
    removed, words = _told(block)
    labels = {**({full: UNPRUNED} if full is not None else {}), **words}
    pruned = list(block.labels)
    targets = column_targets(comparison, pruned, columns)
    text = pd.DataFrame(
        {"Model": comparison.model, "Pruned": removed, "Criterion": pd.Series(labels)}, index=list(labels)
    )
    numbers = scores(comparison, list(labels), targets)
    frame, low, high = pd.concat([text, numbers.frame], axis=1), numbers.low, numbers.high
    if block.base is not None and targets:
        against = {cell: block.base for cell in pruned if cell != block.base}
        found = differences(comparison, list(targets.values())[-1], against).reindex(list(labels))
        frame = frame.assign(**{DIFFERENCE: found["difference"], P: found["p"]})
        low, high = low.assign(**{DIFFERENCE: found["low"]}), high.assign(**{DIFFERENCE: found["high"]})
    if len(study.costs):
        values = {
            name: about.offset + about.scale * cost(study, list(labels), about.source) for name, about in costs.items()
        }
        frame = frame.assign(**values)
    return frame, low, high
