"""The class of all tables, and their output as CSV, Markdown, LaTeX and HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import names

SCORE = "{:.3f}"
RANK = "{:.2f}"
PERCENT = "{:.0%}"
_PRECISION = re.compile(r"\.(\d)([f%])")
"""Digits and unit in a format."""


@dataclass(frozen=True, eq=False)
class Table:
    """A data frame that is printed as a table. NaN is a missing number, called a gap."""

    name: str
    """Stem of the table's files, such as unified.table1."""
    title: str
    caption: str
    frame: pd.DataFrame
    """Columns have display names; text columns come first, then numbers."""
    formats: Mapping[str, str]
    """Number column -> format of its numbers; all other columns are text."""
    best: Mapping[str, str] = field(default_factory=dict)
    """Number column in which the best number of each block is bold -> "max" or "min"."""
    blocks: Sequence[str] = ()
    """Text columns that identify a block: the rows that are compared with each other."""
    low: pd.DataFrame | None = None
    """Lower ends of 95 % intervals, for the columns that have intervals."""
    high: pd.DataFrame | None = None
    """Upper ends of 95 % intervals."""
    footnotes: Sequence[str] = ()
    optional: Sequence[str] = ()
    """Number columns in which a missing number is not a gap, because not every row has one."""

    @cached_property
    def texts(self) -> dict[str, str]:
        """File suffix (csv, md, tex, html) -> the table as text in this format."""
        return {suffix: render(self) for suffix, render in RENDERERS.items()}


GAP = "–"
"""Text of a missing number."""
GAP_NOTE = "– marks a result that is missing; it counts as missing, not as zero."
UNPRUNED = "Unpruned"
STICKY_COLUMN = "Criterion"
"""The column that stays visible when a table is scrolled sideways."""
WRAP_LENGTH = 60
"""The page may wrap texts with more characters than this."""


_DISPLAY_NAMES: Mapping[str, Callable[..., str]] = {
    "ratio": names.ratio,
    "calibration": names.calibration,
    "criterion": names.criterion,
    "method": names.method,
    "allocation": names.allocation_name,
    "column": names.benchmark,
}
"""Column of a study's frames -> function that returns the display name of a value."""


def display_frame(rows: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """Select columns of `rows` and rename them. The values of columns in `_DISPLAY_NAMES` are
    replaced by their display names.

    columns: new name -> name in `rows`. A column that `rows` lacks is filled with NaN.
    """
    displayed = {}
    for column, source in columns.items():
        # an empty series becomes a column of NaN in the result
        values = rows[source] if source in rows else pd.Series(dtype=object)
        to_display_name = _DISPLAY_NAMES.get(source)
        displayed[column] = values.map(to_display_name) if to_display_name else values
    return pd.DataFrame(displayed, columns=list(columns))


def frame_and_formats(
    rows: pd.DataFrame, text: Mapping[str, str], numbers: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """The arguments `frame` and `formats` of a `Table`, as a dictionary.

    text: text column of the table -> column of `rows`; numbers: number column of the table ->
    (column of `rows`, format).
    """
    columns = {**text, **{name: source for name, (source, _) in numbers.items()}}
    return {
        "frame": display_frame(rows, columns),
        "formats": {name: form for name, (_, form) in numbers.items()},
    }


def with_minus_signs(number: str) -> str:
    """`number` with minus signs (−) in place of hyphens."""
    return number.replace("-", "−")


def format_number(value: object, form: str) -> str:
    """A number as text; GAP for None and NaN. form: the number's format, such as `{:.3f}`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return GAP
    return with_minus_signs(form.format(value)).replace("%", " %")


def is_gap(table: Table, row: Mapping[Any, object], column: str) -> bool:
    """Whether `row` has no number in `column` but should have one."""
    is_unranked = row.get("Criterion") == UNPRUNED and column == "Avg Rank"
    is_expected = not is_unranked and column not in table.optional
    # in any format, GAP is the text of None and NaN
    return is_expected and format_number(row[column], "{}") == GAP


@lru_cache(maxsize=128)
def footnotes(table: Table) -> list[str]:
    """`Table.footnotes`, between a note on the columns in which less is better and one on gaps."""
    rows = table.frame.to_dict("records")
    has_gap = any(is_gap(table, row, column) for row in rows for column in table.formats)
    return [*_footnotes_on_direction(table), *table.footnotes, *([GAP_NOTE] if has_gap else [])]


def _footnotes_on_direction(table: Table) -> list[str]:
    """At most one sentence, which names the columns in which less is better."""
    lower_is_better = [
        column
        for column, direction in table.best.items()
        if direction == "min" and column in table.frame
    ]
    return [f"Less is better: {names.enumeration(lower_is_better)}."] if lower_is_better else []


@lru_cache(maxsize=128)
def best_marks(table: Table) -> pd.DataFrame:
    """Booleans in the shape of `table.frame`: whether a number is the best one of its column among
    the rows of its block.

    Numbers are compared as they are printed, so several can be the best. The unpruned model is not
    compared.
    """
    marks = pd.DataFrame(False, index=table.frame.index, columns=table.frame.columns)
    if not table.best or table.frame.empty:
        return marks
    is_competing = (
        table.frame["Criterion"].to_numpy() != UNPRUNED if "Criterion" in table.frame else True
    )
    blocks: list[Any] = [np.arange(len(table.frame))]  # row numbers of each block
    if table.blocks:
        blocks = list(table.frame.groupby(list(table.blocks), sort=False).indices.values())
    for column, direction in table.best.items():
        precision = _PRECISION.search(table.formats[column])
        # n decimals of a per cent are n + 2 of the fraction
        decimals = int(precision[1]) + 2 * (precision[2] == "%") if precision else 3
        values = np.where(is_competing, table.frame[column].astype(float).round(decimals), np.nan)
        is_best = np.zeros(len(values), bool)
        for rows in blocks:
            if np.count_nonzero(~np.isnan(values[rows])) > 1:
                top = np.nanmin(values[rows]) if direction == "min" else np.nanmax(values[rows])
                is_best[rows] = values[rows] == top
        marks[column] = is_best
    return marks


def printed_frame(table: Table) -> pd.DataFrame:
    """The frame as it is printed: the unpruned model has 0 % in the column `Pruned`. In
    `Table.frame`, it has the ratio of its block, by which the page filters the rows."""
    if not {"Criterion", "Pruned"} <= set(table.frame):
        return table.frame
    return table.frame.assign(
        Pruned=table.frame["Pruned"].mask(table.frame["Criterion"] == UNPRUNED, names.ratio(0))
    )


@lru_cache(maxsize=128)
def printed_texts(table: Table) -> pd.DataFrame:
    """`printed_frame` with its numbers as formatted texts."""
    columns = {
        str(column): [
            format_number(value, table.formats[str(column)]) if column in table.formats else value
            for value in values
        ]
        for column, values in printed_frame(table).items()
    }
    return pd.DataFrame(columns, index=table.frame.index)


def csv(table: Table) -> str:
    """The table as CSV. Numbers have six significant digits, and a gap is an empty field. The ends
    of intervals are in columns such as `Avg low`."""
    frame = printed_frame(table).copy()
    for end, values in (("low", table.low), ("high", table.high)):
        if values is not None:
            for column in values.columns:
                frame[f"{column} {end}"] = values[column].to_numpy()
    return str(frame.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


def markdown(table: Table) -> str:
    """The table as Markdown. The numbers marked by `best_marks` are bold."""
    align = [("---:" if column in table.formats else ":---") for column in table.frame]
    lines = [[str(column) for column in table.frame], align, *_lines(table, "**{}**", str)]
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    notes = "".join(f"\n{note}\n" for note in footnotes(table))
    return f"## {table.title}\n\n{body}\n\n{table.caption}\n{notes}"


def latex(table: Table) -> str:
    """The table as LaTeX for the package booktabs. The numbers marked by `best_marks` are bold."""
    layout = "".join("r" if column in table.formats else "l" for column in table.frame)
    caption = _tex(" ".join([f"{table.title}.", table.caption, *footnotes(table)]))
    head = " & ".join(_tex(column) for column in table.frame)
    lines = [f"{' & '.join(line)} \\\\" for line in _lines(table, r"\textbf{{{}}}", _tex)]
    parts = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}[t]",
        f"\\caption{{{caption}}}",
        f"\\label{{tab:{table.name}}}",
        f"\\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        f"{head} \\\\",
        r"\midrule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(parts) + "\n"


def _lines(table: Table, bold: str, escape_value: Callable[[object], str]) -> list[list[str]]:
    """Texts of the cells of every row. bold: format of the best numbers, such as `**{}**`."""
    lines = []
    for row, marks in zip(
        printed_texts(table).to_numpy(), best_marks(table).to_numpy(), strict=True
    ):
        cells = list(map(escape_value, row))
        lines.append(
            [bold.format(cell) if mark else cell for cell, mark in zip(cells, marks, strict=True)]
        )
    return lines


_TEX = {"\\": r"\textbackslash{}", "–": "--", "α": r"$\alpha$", "β": r"$\beta$"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}
"""Special character -> its LaTeX."""


def _tex(value: object) -> str:
    """The value as text with LaTeX's special characters escaped."""
    return "".join(_TEX.get(character, character) for character in str(value))


def html(table: Table) -> str:
    """The table as an HTML element that the page can sort. Numbers have their intervals below."""
    head = "".join(_head(table, str(column)) for column in table.frame)
    marks = best_marks(table).to_numpy()
    texts = printed_texts(table).to_numpy()
    is_block_start = _block_starts(table)
    interval_ends = _interval_ends(table)
    rows = []
    for row_number, record in enumerate(table.frame.to_dict("records")):
        classes = ["first"] if is_block_start[row_number] else []
        if record.get("Criterion") == UNPRUNED:
            classes.append("unpruned")
        cells = []
        for column_number, column in enumerate(map(str, table.frame)):
            cells.append(
                _cell(
                    table,
                    column,
                    record[column],
                    str(texts[row_number, column_number]),
                    bool(marks[row_number, column_number]),
                )
            )
            if column in interval_ends:
                cells.append(_interval(table, column, *interval_ends[column][row_number]))
            cells.append("</td>")
        attributes = f' class="{" ".join(classes)}"' if classes else ""
        rows.append(f"<tr{attributes}>{''.join(cells)}</tr>")
    body = "".join(rows)
    return f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _head(table: Table, column: str) -> str:
    """The HTML head cell of a column, with a button that sorts the rows."""
    kind = "number" if column in table.formats else "text"
    return (
        f"<th scope=col class={kind} aria-sort=none><button "
        f"type=button>{escape(column)}</button></th>"
    )


def _cell(table: Table, column: str, value: object, printed: str, is_bold: bool) -> str:
    """An HTML cell without its closing tag, because an interval may follow.

    value: value in the frame; printed: text that the cell shows.

    The page's script sorts numbers by `data-key`. It filters rows by `data-block`, or by the text
    of a cell without it. `--v` is the length of a bar in the background.
    """
    content = f"<b>{escape(printed)}</b>" if is_bold else escape(printed)
    if column not in table.formats:
        css_class = (
            " class=key"
            if column == STICKY_COLUMN
            else " class=wrap"
            if len(printed) > WRAP_LENGTH
            else ""
        )
        block = "" if printed == value else f' data-block="{escape(str(value))}"'
        return f"<td{css_class}{block}>{content}"
    if printed == GAP:
        return '<td class=number data-key="">' + GAP
    number = float(str(value))  # through str, because a frame has values of any type
    form = table.formats[column]
    bar = (
        f' style="--v:{number:.3f}"'
        if form == SCORE and column in table.best and 0 <= number <= 1
        else ""
    )
    return f'<td class=number data-key="{number:.9g}"{bar}>{content}'


def _interval_ends(table: Table) -> dict[str, list[tuple[float, float]]]:
    """Column with intervals -> the low and high end of each row's interval."""
    ends: dict[str, list[tuple[float, float]]] = {}
    if table.low is None or table.high is None:
        return ends
    for column in table.low:
        if column in table.frame:
            low = table.low[column].astype(float)
            high = table.high[column].astype(float)
            ends[str(column)] = list(zip(low, high, strict=True))
    return ends


def _interval(table: Table, column: str, low: float, high: float) -> str:
    """The HTML of an interval, with fewer decimals than the numbers of its column."""
    if math.isnan(low) or math.isnan(high):
        return ""
    short = "{:.2f}" if table.formats[column] == SCORE else "{:.1f}"
    interval = with_minus_signs(f"{short.format(low)} to {short.format(high)}")
    return f"<small>{interval}</small>"


def _block_starts(table: Table) -> list[bool]:
    """Whether each row is the first of its block."""
    if not table.blocks or table.frame.empty:
        return [False] * len(table.frame)
    keys = table.frame[list(table.blocks)].to_numpy(str).tolist()
    # strict=False: the second list has one key more
    return [key != previous for key, previous in zip(keys, [None, *keys], strict=False)]


RENDERERS: dict[str, Callable[[Table], str]] = {
    "csv": csv,
    "md": markdown,
    "tex": latex,
    "html": html,
}
"""Suffix of a file -> function that returns the file's text."""


def write(table: Table, folder: Path) -> list[Path]:
    """Write the table as NAME.csv, NAME.md, NAME.tex and NAME.html; returns the files' paths. An
    error in rendering leaves no files."""
    paths = [folder / f"{table.name}.{suffix}" for suffix in table.texts]
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, table.texts.values(), strict=True):
        path.write_text(content, encoding="utf-8")
    return paths
