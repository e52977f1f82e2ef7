"""Tables of scores from blocks of cells that are compared with each other, and selections of cells
for such blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import names
from analysis.load import settings
from analysis.load.reader import groups
from analysis.load.settings import comma_joined, gate_and_seed
from analysis.load.study import Study
from analysis.outputs.captions import MEBIBYTE, score_setup
from analysis.registry import Results
from analysis.render import style
from analysis.render.table import SCORE, Table
from analysis.stats import uncertainty
from analysis.stats.cell_scores import (
    COMMON,
    GROUPS,
    MEAN,
    Numbers,
    column_targets,
    cost,
    differences,
    mean_target,
    scores,
)
from analysis.stats.chance import chance_of
from analysis.stats.comparison import Comparison, Kind, Target, means, random_scores
from moe_lab.results import RANDOM


@dataclass(frozen=True)
class Cost:
    """A column of costs: offset + scale x the number `source` of cost.json, shown in the format
    `form`."""

    source: str
    form: str
    scale: float = 1.0
    offset: float = 0.0


KEPT = {"Kept": Cost("routed_kept", "{:.1%}")}
COSTS = {**KEPT, "FLOPs saved": Cost("flops_ratio", "{:.1%}", scale=-1, offset=1)}
STORAGE = "Storage (MiB)"
STORED = {**KEPT, STORAGE: Cost("storage_bytes", "{:,.2f}", scale=1 / MEBIBYTE)}
TEXT = ("Model", "Pruned")
DIFFERENCE = "Difference"
P = "p (Holm)"
_P_MEANS = f"{P}: two-sided, where both methods have several seeds, corrected over the table."
UNPRUNED = names.CRITERIA["none"]

SMOOTHING = ("layer_smoothing", "smoothing")
"""Settings that choose the smoothing of layer losses, which MoE-Slimming's Table 7 varies."""
DEFAULT_SMOOTHING = "sqrt"
FEWEST_RATIOS = 3
"""Least number of ratios of a method for a line over ratios."""
COVERAGE = "coverage"
"""The allocation with coverage budgets (MoE-Slimming)."""
HALF = 0.5
"""The ratio in the papers' figures."""
BUDGETED = "cells of channels with allocation=coverage"


@dataclass(frozen=True, eq=False)
class Block:
    """Rows that are compared with each other: cells of one model with their labels, and `base`, the
    reference cell."""

    comparison: Comparison
    pruned: str
    labels: Mapping[int, str]
    """Cell -> label, in the order of the rows."""
    base: int | None = None


Blocks = Callable[[Results, Comparison], Iterable[Block]]


def score_table(
    title: str, columns: Sequence[str], caption: str, costs: Mapping[str, Cost] = COSTS
) -> Callable[[Blocks], Callable[[Results, str], Table | None]]:
    """Make a `block_table` from the blocks that the decorated function yields for each model with
    results."""

    def of_blocks(blocks_of: Blocks) -> Callable[[Results, str], Table | None]:
        @wraps(blocks_of)
        def make(results: Results, name: str) -> Table | None:
            blocks = [
                block
                for comparison in results.comparisons
                for block in blocks_of(results, comparison)
            ]
            about = {"name": name, "title": title, "caption": caption}
            return block_table(results.study, blocks, columns, costs, **about)

        return make

    return of_blocks


def block_table(
    study: Study,
    blocks: Sequence[Block],
    columns: Sequence[str],
    costs: Mapping[str, Cost] = COSTS,
    *,
    caption: str,
    **about: str,
) -> Table | None:
    """Make a table with one row per cell of each block; None when none of `columns` was run.

    Columns: those of `columns` (benchmarks and averages) that were run; for blocks with a base, the
    difference of the last one to the base, with a Holm-corrected p-value where both have several
    seeds; and `costs`. The unpruned model comes first in every block. Scores and differences have
    intervals.
    """
    run = [
        block for block in blocks if column_targets(block.comparison, list(block.labels), columns)
    ]
    rows = stacked(_rows(study, block, columns, costs) for block in run)
    if rows is None:
        return None
    frame = rows.frame
    if P in frame:
        frame[P] = uncertainty.holm(frame[P].to_numpy(float))
        if frame[P].isna().all():
            del frame[P]
    averages = [*means(block.comparison for block in run), MEAN]
    last = [column for column in (*averages, DIFFERENCE, P, *costs) if column in frame]
    shown = [str(column) for column in frame if column not in (*TEXT, "Criterion", *last)]
    return numbers_table(
        rows,
        [*TEXT, "Criterion", *shown, *last],
        {P: "{:.4f}", **{column: cost.form for column, cost in costs.items()}},
        caption=" ".join([caption, *([_P_MEANS] if P in frame else []), score_setup(study)]),
        blocks=TEXT,
        optional=(DIFFERENCE, P),
        footnotes=_not_run(run, columns),
        **about,
    )


def stacked(parts: Iterable[Numbers | None]) -> Numbers | None:
    """Concatenate the rows of all parts, with a new index; None without any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    best: dict[str, str] = {}
    for part in known:
        best |= part.best
    return Numbers(
        frame=pd.concat([part.frame for part in known], ignore_index=True),
        low=pd.concat([part.low for part in known], ignore_index=True),
        high=pd.concat([part.high for part in known], ignore_index=True),
        best=best,
    )


def numbers_table(
    rows: Numbers, columns: Sequence[str], formats: Mapping[str, str], **about: Any
) -> Table:
    """Make a table of these columns of `rows`, with intervals. Columns that have them are scores if
    `formats` does not name them; the others that are not in it are text."""
    frame, low, high = (
        part.rename(columns=names.benchmark)
        for part in (rows.frame[list(columns)], rows.low, rows.high)
    )
    every_format = {**dict.fromkeys(map(str, low), SCORE), **formats}
    return Table(
        frame=frame,
        formats={
            column: every_format[column] for column in map(str, frame) if column in every_format
        },
        best=rows.best,
        low=low,
        high=high,
        **about,
    )


def _not_run(blocks: Sequence[Block], columns: Sequence[str]) -> list[str]:
    """A note on the benchmarks of `columns` that MEAN lacks because no model was evaluated on
    them."""
    listed = [name for name in columns if name not in (*GROUPS, *names.COLUMNS, COMMON, MEAN)]
    run = {name for block in blocks for name in block.comparison.benchmarks}
    missing = [name for name in listed if name not in run]
    if MEAN not in columns or not missing:
        return []
    over = f"{len(listed) - len(missing)} of the paper's {len(listed)} benchmarks"
    return [f"{MEAN} is over {over}: {names.not_run(missing)}."]


def _pruned_and_labels(block: Block) -> tuple[str, dict[int, str]]:
    """The text on what is pruned, and the labels of the rows, with gate and seed added to one of
    them.

    Gate and seed are added to the text when all rows share them, and otherwise to labels that occur
    twice."""
    varying = gate_and_seed(block.comparison.cells)[list(block.labels)]
    if varying.nunique() == 1:
        return comma_joined(block.pruned, str(varying.iloc[0])), dict(block.labels)
    twice = [label for label, times in Counter(block.labels.values()).items() if times > 1]
    return block.pruned, {
        cell: comma_joined(label, str(varying[cell])) if label in twice else label
        for cell, label in block.labels.items()
    }


def _rows(study: Study, block: Block, columns: Sequence[str], costs: Mapping[str, Cost]) -> Numbers:
    comparison = block.comparison
    full = block.comparison.unpruned
    removed, label_of_cell = _pruned_and_labels(block)
    labels = {**({full: UNPRUNED} if full is not None else {}), **label_of_cell}
    pruned = list(block.labels)
    targets = column_targets(comparison, pruned, columns)
    text = pd.DataFrame(
        {"Model": comparison.model, "Pruned": removed, "Criterion": pd.Series(labels)},
        index=list(labels),
    )
    numbers = scores(comparison, list(labels), targets)
    frame = pd.concat([text, numbers.frame], axis=1)
    low = numbers.low
    high = numbers.high
    if block.base is not None and targets:
        against = {cell: block.base for cell in pruned if cell != block.base}
        paired = differences(comparison, list(targets.values())[-1], against).reindex(list(labels))
        tested = [cell for cell in against if comparison.have_several_seeds((cell, block.base))]
        frame = frame.assign(**{DIFFERENCE: paired["difference"], P: paired.loc[tested, "p"]})
        low = low.assign(**{DIFFERENCE: paired["low"]})
        high = high.assign(**{DIFFERENCE: paired["high"]})
    if len(study.costs):
        values = {
            name: column.offset + column.scale * cost(study, list(labels), column.source)
            for name, column in costs.items()
        }
        frame = frame.assign(**values)
    return Numbers(frame, low, high, numbers.best)


_PATTERNS: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (2, 1)), (0, (4, 1, 1, 1)))


def method_lines(comparison: Comparison) -> dict[str, Line2D]:
    """Method -> its line style: the criterion's colour; further methods of a criterion have hollow,
    other markers and dashes."""
    lines = {"none": style.key(names.method("none"), **style.DASHED)}
    counts: dict[str, int] = {}
    for method in names.methods_in_order(set(comparison.cells["method"]) - {"none"}):
        criterion = names.parts(method)[0]
        position = counts[criterion] = counts.get(criterion, -1) + 1
        first = list(names.CRITERIA).index(criterion) if criterion in names.CRITERIA else 0
        shade = style.colour(method)
        lines[method] = style.key(
            names.method(method),
            color=shade,
            linewidth=1.3,
            linestyle=_PATTERNS[position % len(_PATTERNS)],
            marker=style.MARKERS[(first + position) % len(style.MARKERS)],
            markersize=3.5,
            markerfacecolor=style.SURFACE if position else shade,
        )
    return lines


def draw_unpruned(axes: Axes, comparison: Comparison, target: Target) -> Line2D:
    """Draw the unpruned model's score as a horizontal line with its 95 % interval; returns the line
    for the legend."""
    full = comparison.unpruned
    if full is not None:
        score, low, high = comparison.displayed(target)
        axes.axhspan(low[full], high[full], color=style.RULE, alpha=0.5, linewidth=0)
        axes.axhline(score[full], **style.DASHED)
    return style.key(UNPRUNED, **style.DASHED)


def draw_chance(axes: Axes, comparison: Comparison, target: Target) -> list[Patch]:
    """Draw the bands of chance over ratios, in per cent, behind lines: one for each kind of random
    plans.

    Returns the legend's patch; none where no band has two ratios, as there is nothing to see
    then."""
    bands: dict[Kind, dict[float, tuple[float, float]]] = {}
    for _, cells in by_ratio(comparison.cells):
        for kind, plans in random_scores(comparison, cells, target).items():
            removed = cells.loc[cells["criterion"].isin(RANDOM), "removed"].mean()
            bands.setdefault(kind, {})[100 * removed] = chance_of(plans).band
    patches: list[Patch] = []
    for band in bands.values():
        if len(band) > 1:
            low, high = zip(*map(comparison.quantity(target).displayed, band.values()), strict=True)
            axes.fill_between(
                list(band), low, high, color=style.RULE, alpha=0.6, linewidth=0, zorder=0
            )
            patches = [Patch(facecolor=style.RULE, alpha=0.6, label="band of chance")]
    return patches


def shallow_middle_deep(layers: Sequence[int]) -> list[int]:
    """The first, the middle and the last of `layers`; fewer when there are fewer layers."""
    distinct = sorted(set(layers))
    return (
        sorted({distinct[0], distinct[(len(distinct) - 1) // 2], distinct[-1]}) if distinct else []
    )


def by_criterion(cells: pd.DataFrame, *first: str) -> pd.DataFrame:
    """Cells sorted by the columns `first`, then by criterion in the order of tables."""
    order = names.in_order(cells["criterion"], names.CRITERIA)
    position = cells["criterion"].map(order.index).astype(int)
    return (
        cells.assign(place=position)
        .sort_values([*first, "place"], kind="stable")
        .drop(columns="place")
    )


def plain(comparison: Comparison, granularity: str = "") -> pd.DataFrame:
    """Pruned cells that were neither quantised nor fine-tuned, in the order of tables; of
    `granularity` if given."""
    cells = comparison.cells
    pruned = cells[
        (cells["criterion"] != "none") & (cells["recovery"] == "none") & (cells["ratio"] > 0)
    ]
    selected = pruned[pruned["granularity"] == granularity] if granularity else pruned
    return by_criterion(selected, "ratio")


def by_ratio(cells: pd.DataFrame) -> Iterator[tuple[float, pd.DataFrame]]:
    """Yield each ratio, lowest first, with its cells."""
    for key, at_ratio in groups(cells.sort_values("ratio", kind="stable"), ["ratio"]):
        yield float(key["ratio"]), at_ratio


def only_cell(cells: pd.DataFrame | pd.Series) -> int | None:
    """The cell when there is exactly one; None otherwise."""
    return int(cells.index[0]) if len(cells) == 1 else None


def ratio_block(
    comparison: Comparison, ratio: float, labels: pd.Series, base: int | None = None
) -> Block:
    """A block of the cells in `labels` (cell -> label), all pruned by `ratio`."""
    label_of_cell = {int(str(cell)): str(label) for cell, label in labels.items()}
    return Block(comparison, comparison.removed(ratio), label_of_cell, base)


def ratio_lines(cells: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Label -> cells of one method, sorted by ratio; only methods that were run at three or more
    ratios."""
    lines = [
        line
        for _, line in groups(cells, settings.METHOD)
        if line["ratio"].nunique() >= FEWEST_RATIOS
    ]
    if not lines:
        return {}
    labels = settings.method_labels(pd.concat(lines))
    return {str(labels[line.index[0]]): line.sort_values("ratio") for line in lines}


def coverage_cells(comparison: Comparison) -> pd.DataFrame:
    """Cells of channels with coverage budgets, at the ratio closest to 1/2."""
    cells = plain(comparison, "channel")
    covered = cells[
        cells["allocation"].map(lambda text: settings.allocation(str(text))[0]) == COVERAGE
    ]
    nearest = min(covered["ratio"].unique(), key=lambda ratio: abs(ratio - HALF), default=HALF)
    return pd.DataFrame(covered[covered["ratio"] == nearest])


def storage_points(
    study: Study, comparison: Comparison, cells: pd.DataFrame, benchmarks: Sequence[str]
) -> pd.DataFrame:
    """Storage and score of each cell: recovery, ratio, storage (MiB), score, low, high, merit.

    The score is the mean of those of `benchmarks` that were run, and merit the same, negative where
    less is better; empty when none was run."""
    rows = [int(str(cell)) for cell in cells.index]
    target = mean_target(comparison, rows, benchmarks)
    points = cells[["recovery", "ratio"]]
    if not target:
        return points[:0].reindex(columns=[*points, "storage", "score", "low", "high", "merit"])
    score, low, high = comparison.displayed(target)
    storage = cost(study, rows, "storage_bytes") / MEBIBYTE
    merit = comparison.quantity(target).sign * score[rows]
    return points.assign(
        storage=storage, score=score[rows], low=low[rows], high=high[rows], merit=merit
    )


def draw_storage(axes: Axes, line: pd.DataFrame, **look: Any) -> None:
    """Draw rows of `storage_points` as a line with 95 % intervals in the style `look`."""
    bars = line["storage"], line["low"], line["high"]
    axes.vlines(*bars, color=look["color"], linewidth=1.2, alpha=0.6)
    axes.plot(line["storage"], line["score"], linewidth=1.2, markersize=4.5, **look)
    axes.set_xlabel("storage (MiB)")
