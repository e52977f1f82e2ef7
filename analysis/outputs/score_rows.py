"""Tables of scores from blocks of cells that are compared with each other, selections of cells for
such blocks, and drawing of scores."""

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
    """A column of costs: offset + scale x the number `source` of cost.json, in the format
    `form`."""

    source: str
    form: str
    scale: float = 1.0
    offset: float = 0.0


RETAINED = {"Kept": Cost("routed_kept", "{:.1%}")}
COSTS = {**RETAINED, "FLOPs saved": Cost("flops_ratio", "{:.1%}", scale=-1, offset=1)}
STORAGE = "Storage (MiB)"
STORED = {**RETAINED, STORAGE: Cost("storage_bytes", "{:,.2f}", scale=1 / MEBIBYTE)}
"""RETAINED, COSTS, STORED: displayed column -> its cost."""
TEXT = ("Model", "Pruned")
DIFFERENCE = "Difference"
P = "p (Holm)"
_P_MEANS = f"{P}: two-sided, where both methods have several seeds, corrected over the table."
UNPRUNED = names.CRITERIA["none"]

SMOOTHING = ("layer_smoothing", "smoothing")
"""Settings that choose the smoothing of layer losses, which MoE-Slimming's Table 7 varies."""
DEFAULT_SMOOTHING = "sqrt"
FEWEST_RATIOS = 3
"""Fewest ratios of a method for which a line over ratios is drawn."""
COVERAGE = "coverage"
"""The allocation with coverage budgets (MoE-Slimming)."""
HALF = 0.5
"""The ratio in the papers' figures."""
BUDGETED = "cells of channels with allocation=coverage"


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of a table that are compared with each other: cells of one model with their labels."""

    comparison: Comparison
    pruned: str
    """Text with the removed share."""
    labels: Mapping[int, str]
    """Cell -> label, in the order of the rows."""
    base: int | None = None
    """The reference cell of differences; None for a block without differences."""


Blocks = Callable[[Results, Comparison], Iterable[Block]]
"""Function that returns the blocks of one model."""


def score_table(
    title: str, columns: Sequence[str], caption: str, costs: Mapping[str, Cost] = COSTS
) -> Callable[[Blocks], Callable[[Results, str], Table | None]]:
    """Decorator: turn a function that yields the blocks of one model into one that makes a
    `block_table` of all models with results."""

    def decorate(blocks_of: Blocks) -> Callable[[Results, str], Table | None]:
        @wraps(blocks_of)
        def make(results: Results, name: str) -> Table | None:
            blocks: list[Block] = []
            for comparison in results.comparisons:
                blocks += blocks_of(results, comparison)
            return block_table(
                results.study, blocks, columns, costs, name=name, title=title, caption=caption
            )

        return make

    return decorate


def block_table(
    study: Study,
    blocks: Sequence[Block],
    columns: Sequence[str],
    costs: Mapping[str, Cost] = COSTS,
    *,
    name: str,
    title: str,
    caption: str,
) -> Table | None:
    """A table with one row per cell of each block; None when none of `columns` was run.

    Columns: those of `columns` (benchmarks and averages) that were run; for blocks with a base, the
    difference in the last of these to the base, with a Holm-corrected p-value where both cells have
    several seeds; and `costs`. The unpruned model is the first row of every block. Scores and
    differences have intervals.
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
    benchmarks = [str(column) for column in frame if column not in (*TEXT, "Criterion", *last)]
    sentences = [caption, _P_MEANS if P in frame else "", score_setup(study)]
    return numbers_table(
        rows,
        [*TEXT, "Criterion", *benchmarks, *last],
        {P: "{:.4f}", **{column: cost.form for column, cost in costs.items()}},
        name=name,
        title=title,
        caption=" ".join(filter(None, sentences)),
        blocks=TEXT,
        optional=(DIFFERENCE, P),
        footnotes=_not_run(run, columns),
    )


def stacked(parts: Iterable[Numbers | None]) -> Numbers | None:
    """Concatenate the rows of all parts, with a new index; None when all parts are None."""
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
    rows: Numbers, columns: Sequence[str], formats: Mapping[str, str], **fields: Any
) -> Table:
    """A table of these columns of `rows`, with intervals. A column without an entry in `formats`
    has the format SCORE if it has intervals, and otherwise is text.

    fields: name, title, caption etc. of the table."""
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
        **fields,
    )


def _not_run(blocks: Sequence[Block], columns: Sequence[str]) -> list[str]:
    """A list with a footnote on the benchmarks that MEAN lacks, because no model was evaluated on
    them; empty when MEAN is complete."""
    averages = (*GROUPS, *names.COLUMNS, COMMON, MEAN)
    benchmarks = [name for name in columns if name not in averages]
    run = {name for block in blocks for name in block.comparison.benchmarks}
    missing = [name for name in benchmarks if name not in run]
    if MEAN not in columns or not missing:
        return []
    number = len(benchmarks) - len(missing)
    return [
        f"{MEAN} is over {number} of the paper's {len(benchmarks)} benchmarks: "
        f"{names.not_run(missing)}."
    ]


def _pruned_and_labels(block: Block) -> tuple[str, dict[int, str]]:
    """The text with the removed share, and cell -> label, for the rows of a block.

    If all cells have the same gate and seed, these are added to the text; otherwise they are added
    to labels that several cells share."""
    texts = gate_and_seed(block.comparison.cells)[list(block.labels)]
    if texts.nunique() == 1:
        return comma_joined(block.pruned, str(texts.iloc[0])), dict(block.labels)
    counts = Counter(block.labels.values())
    labels = {
        cell: comma_joined(label, str(texts[cell])) if counts[label] > 1 else label
        for cell, label in block.labels.items()
    }
    return block.pruned, labels


def _rows(study: Study, block: Block, columns: Sequence[str], costs: Mapping[str, Cost]) -> Numbers:
    """The rows of a block in a `block_table`, the unpruned model first."""
    comparison = block.comparison
    unpruned = comparison.unpruned
    removed, labels = _pruned_and_labels(block)
    if unpruned is not None:
        labels = {unpruned: UNPRUNED, **labels}
    cells = list(labels)
    pruned = list(block.labels)
    targets = column_targets(comparison, pruned, columns)
    text = pd.DataFrame(
        {"Model": comparison.model, "Pruned": removed, "Criterion": pd.Series(labels)}, index=cells
    )
    numbers = scores(comparison, cells, targets)
    frame = pd.concat([text, numbers.frame], axis=1)
    low = numbers.low
    high = numbers.high
    if block.base is not None and targets:
        against = {cell: block.base for cell in pruned if cell != block.base}
        last_target = list(targets.values())[-1]
        paired = differences(comparison, last_target, against).reindex(cells)
        tested = [cell for cell in against if comparison.have_several_seeds((cell, block.base))]
        frame = frame.assign(**{DIFFERENCE: paired["difference"], P: paired.loc[tested, "p"]})
        low = low.assign(**{DIFFERENCE: paired["low"]})
        high = high.assign(**{DIFFERENCE: paired["high"]})
    if len(study.costs):
        values = {
            name: column.offset + column.scale * cost(study, cells, column.source)
            for name, column in costs.items()
        }
        frame = frame.assign(**values)
    return Numbers(frame, low, high, numbers.best)


_PATTERNS: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (2, 1)), (0, (4, 1, 1, 1)))


def method_lines(comparison: Comparison) -> dict[str, Line2D]:
    """Method -> its legend entry, whose style its lines have. Methods of one criterion have the
    criterion's colour; all but the first have dashes, and hollow markers of another shape."""
    lines = {"none": style.key(names.method("none"), **style.DASHED)}
    counts: Counter[str] = Counter()
    for method in names.methods_in_order(set(comparison.cells["method"]) - {"none"}):
        criterion, _, _ = names.parts(method)
        number = counts[criterion]
        counts[criterion] += 1
        first = list(names.CRITERIA).index(criterion) if criterion in names.CRITERIA else 0
        shade = style.colour(method)
        lines[method] = style.key(
            names.method(method),
            color=shade,
            linewidth=1.3,
            linestyle=_PATTERNS[number % len(_PATTERNS)],
            marker=style.MARKERS[(first + number) % len(style.MARKERS)],
            markersize=3.5,
            markerfacecolor=style.SURFACE if number else shade,
        )
    return lines


def draw_unpruned(axes: Axes, comparison: Comparison, target: Target) -> Line2D:
    """Draw the unpruned model's score as a horizontal line with its 95 % interval; returns the
    legend entry."""
    unpruned = comparison.unpruned
    if unpruned is not None:
        score, low, high = comparison.displayed(target)
        axes.axhspan(low[unpruned], high[unpruned], color=style.RULE, alpha=0.5, linewidth=0)
        axes.axhline(score[unpruned], **style.DASHED)
    return style.key(UNPRUNED, **style.DASHED)


def draw_chance(axes: Axes, comparison: Comparison, target: Target) -> list[Patch]:
    """Draw the band of chance against the removed share in per cent, behind all lines; a band for
    each kind of random plans with at least two ratios.

    Returns a list with the legend entry; empty when no band is drawn."""
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
    if not distinct:
        return []
    return sorted({distinct[0], distinct[(len(distinct) - 1) // 2], distinct[-1]})


def by_criterion(cells: pd.DataFrame, *first: str) -> pd.DataFrame:
    """Sort cells by the columns `first`, then by criterion in the order of tables."""
    order = names.in_order(cells["criterion"], names.CRITERIA)
    position = cells["criterion"].map(order.index).astype(int)
    return (
        cells.assign(position=position)
        .sort_values([*first, "position"], kind="stable")
        .drop(columns="position")
    )


def plain(comparison: Comparison, granularity: str = "") -> pd.DataFrame:
    """Pruned cells that were neither quantised nor fine-tuned, sorted by ratio and criterion; those
    of one granularity if it is given."""
    cells = comparison.cells
    pruned = cells[
        (cells["criterion"] != "none") & (cells["recovery"] == "none") & (cells["ratio"] > 0)
    ]
    selected = pruned[pruned["granularity"] == granularity] if granularity else pruned
    return by_criterion(selected, "ratio")


def by_ratio(cells: pd.DataFrame) -> Iterator[tuple[float, pd.DataFrame]]:
    """Yield (ratio, its cells) for each ratio, lowest first."""
    for key, same_ratio in groups(cells.sort_values("ratio", kind="stable"), ["ratio"]):
        yield float(key["ratio"]), same_ratio


def only_cell(cells: pd.DataFrame | pd.Series) -> int | None:
    """The cell, if there is exactly one; None otherwise."""
    return int(cells.index[0]) if len(cells) == 1 else None


def ratio_block(
    comparison: Comparison, ratio: float, labels: pd.Series, base: int | None = None
) -> Block:
    """A block of the cells in `labels` (cell -> label), all pruned by `ratio`."""
    label_of_cell = {int(str(cell)): str(label) for cell, label in labels.items()}
    return Block(comparison, comparison.removed(ratio), label_of_cell, base)


def ratio_lines(cells: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Label -> cells of one method, sorted by ratio; without methods that were run at fewer than
    FEWEST_RATIOS ratios."""
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
    allocations = cells["allocation"].map(lambda text: settings.allocation(str(text))[0])
    covered = cells[allocations == COVERAGE]
    nearest = min(covered["ratio"].unique(), key=lambda ratio: abs(ratio - HALF), default=HALF)
    return pd.DataFrame(covered[covered["ratio"] == nearest])


def storage_points(
    study: Study, comparison: Comparison, cells: pd.DataFrame, benchmarks: Sequence[str]
) -> pd.DataFrame:
    """Storage and score of each cell: recovery, ratio, storage (MiB), score, low, high, merit.

    score: the mean of those of `benchmarks` that were run; merit: the score, negative where less is
    better. Without rows when no benchmark was run."""
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
    x = line["storage"]
    axes.vlines(x, line["low"], line["high"], color=look["color"], linewidth=1.2, alpha=0.6)
    axes.plot(x, line["score"], linewidth=1.2, markersize=4.5, **look)
    axes.set_xlabel("storage (MiB)")
