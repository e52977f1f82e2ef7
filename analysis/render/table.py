"""The class of all tables, and their output as CSV, Markdown, LaTeX and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from moe_lab.analysis import names

SCORE = "{:.3f}"
RANK = "{:.2f}"
PERCENT = "{:.0%}"


@dataclass(frozen=True, eq=False)
class Table:
    """A data frame that is printed as a table. NaN is a missing number, called a gap."""

    title: str
    caption: str
    frame: pd.DataFrame
    """Columns have display names; text columns come first, then numbers. `X low` and `X high` are
    no columns of their own, but the ends of the 95 % interval of a column `X`."""
    formats: Mapping[str, str]
    """Number column -> format of its numbers; all other columns are text. Here and below, columns
    that are not in `frame` mean nothing."""
    lower_is_better: Collection[str] = ()
    """Number columns in which less is better."""
    bold: pd.DataFrame | None = None
    """Booleans: numbers that are separated by a test from what they stand together with."""
    footnotes: Sequence[str] = ()
    optional: Sequence[str] = ()
    """Number columns in which a missing number is not a gap, because not every row has one."""
    name: str = ""
    """Stem of the table's files, such as unified.table1; see `Output.items`."""


def printed_columns(frame: pd.DataFrame) -> list[str]:
    """The columns of a `Table.frame` without the ends of intervals."""
    ends = {f"{column} {end}" for column in frame for end in ("low", "high")}
    return [str(column) for column in frame if column not in ends]


GAP = "–"
"""Text of a missing number."""
GAP_NOTE = "– marks a result that is missing; it counts as missing, not as zero."
UNPRUNED = "Unpruned"


_DISPLAY_NAMES: Mapping[str, Callable[..., str]] = {
    "ratio": names.ratio,
    "calibration": names.calibration,
    "criterion": names.criterion,
    "method": names.method,
    "allocation": names.allocation_name,
    "column": names.benchmark,
}
"""Column of a study's frames -> function that returns the display name of a value."""


CELL_COLUMNS = {
    "Model": "model",
    "Pruned": "removed_text",
    "Calibration": "calibration",
    "Criterion": "method",
}
"""Displayed column -> column of a study's cells: the columns that tables begin with."""


def display_frame(rows: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """Select columns of `rows` and rename them. The values of columns in `_DISPLAY_NAMES` are
    replaced by their display names.

    columns: new name -> name in `rows`. A column that `rows` lacks is filled with NaN.
    """
    frame = rows.reindex(columns=list(columns.values())).set_axis(list(columns), axis="columns")
    for column, source in columns.items():
        if source in _DISPLAY_NAMES:
            frame[column] = frame[column].map(_DISPLAY_NAMES[source])
    return frame


Columns = Mapping[str, str | tuple[str, str]]
"""Column of a table -> its source: a column of a frame, for numbers with their format."""


def frame_and_formats(rows: pd.DataFrame, columns: Columns) -> dict[str, Any]:
    """The arguments `frame` and `formats` of a `Table`, as a dictionary."""
    sources = {}
    formats = {}
    for name, source in columns.items():
        if isinstance(source, tuple):
            source, formats[name] = source
        sources[name] = source
    return {"frame": display_frame(rows, sources), "formats": formats}


def _with_minus_signs(number: str) -> str:
    """`number` with minus signs (−) in place of hyphens."""
    return number.replace("-", "−")


def format_number(value: object, form: str) -> str:
    """A number as text; GAP for None and NaN. form: the number's format, such as `{:.3f}`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return GAP
    return _with_minus_signs(form.format(value)).replace("%", " %")


@lru_cache(maxsize=128)
def footnotes(table: Table) -> list[str]:
    """`Table.footnotes`, between a note on the columns in which less is better and one on gaps."""
    columns = printed_columns(table.frame)
    lower_is_better = [column for column in columns if column in table.lower_is_better]
    # the unpruned model has no rank, and other rows lack it only beside a gap
    required = [name for name in table.formats if name not in (*table.optional, "Avg Rank")]
    is_gap = table.frame[table.frame.columns.intersection(required)].isna()
    notes = list(table.footnotes)
    if lower_is_better:
        notes.insert(0, f"Less is better: {names.enumeration(lower_is_better)}.")
    return [*notes, GAP_NOTE] if is_gap.any(axis=None) else notes


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
    """The printed columns of `printed_frame`, with numbers as formatted texts."""
    frame = printed_frame(table)[printed_columns(table.frame)]
    for column in frame.columns.intersection(list(table.formats)):
        form = table.formats[column]
        frame[column] = [format_number(value, form) for value in frame[column]]
    return frame


def csv(table: Table) -> str:
    """The table as CSV. Numbers have six significant digits, and a gap is an empty field. The ends
    of intervals are in columns such as `Avg low`."""
    frame = printed_frame(table)
    return str(frame.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


def markdown(table: Table) -> str:
    """The table as Markdown. Numbers that a test separates are bold."""
    texts = _marked_frame(table, "**{}**", str)
    align = [("---:" if column in table.formats else ":---") for column in texts]
    lines: list[Any] = [list(texts), align, *texts.itertuples(index=False)]
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    notes = "".join(f"\n{note}\n" for note in footnotes(table))
    return f"## {table.title}\n\n{body}\n\n{table.caption}\n{notes}"


def latex(table: Table) -> str:
    """The table as LaTeX for the package booktabs. Numbers that a test separates are bold."""
    texts = _marked_frame(table, r"\textbf{{{}}}", _tex)
    caption = _tex(" ".join([f"{table.title}.", table.caption, *footnotes(table)]))
    align = "".join("r" if column in table.formats else "l" for column in printed_texts(table))
    # Styler.to_latex would take a tenth of a report's time
    header, *body = (" & ".join(row) for row in [list(texts), *texts.to_numpy().tolist()])
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{align}}}",
        rf"\toprule {header} \\ \midrule",
        *(rf"{row} \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _marked_frame(table: Table, bold: str, escape_value: Callable[[Any], str]) -> pd.DataFrame:
    """The texts of all cells and columns. bold: format of bold numbers, such as `**{}**`."""
    texts = printed_texts(table).map(escape_value)
    if table.bold is not None:
        for column in table.bold:
            texts[column] = texts[column].mask(table.bold[column], texts[column].map(bold.format))
    return texts.rename(columns=escape_value)


_TEX = str.maketrans(
    {"\\": r"\textbackslash{}", "–": "--", "α": r"$\alpha$", "β": r"$\beta$"}
    | {character: f"\\{character}" for character in "&%$#_{}"}
)
"""Special character -> its LaTeX, for `str.translate`."""


def _tex(value: object) -> str:
    """The value as text with LaTeX's special characters escaped."""
    return str(value).translate(_TEX)


def content(table: Table) -> dict[str, Any]:
    """The table for the page's script: rows with the HTML of their cells, and, by number of a row,
    the ratio by which the page filters the row of an unpruned model."""
    rows = _marked_frame(table, "<b>{}</b>", html.escape)
    for column, form in table.formats.items():
        if f"{column} low" in table.frame:
            form = "{:.2f} to {:.2f}" if form == SCORE else "{:.1f} to {:.1f}"
            ends = zip(table.frame[f"{column} low"], table.frame[f"{column} high"], strict=True)
            rows[html.escape(column)] += [
                "" if pd.isna(low + high) else f"<small>{_with_minus_signs(form.format(low, high))}"
                for low, high in ends
            ]
    pruned: dict[int, str] = {}
    if "Pruned" in table.frame:
        ratios = zip(table.frame["Pruned"], printed_frame(table)["Pruned"], strict=True)
        for row, (ratio, printed) in enumerate(ratios):
            if ratio != printed:
                pruned[row] = ratio
    return {"rows": rows.to_numpy().tolist(), "pruned": pruned}


RENDERERS: dict[str, Callable[[Table], str]] = {
    "csv": csv,
    "md": markdown,
    "tex": latex,
}
"""Suffix of a file -> function that returns the file's text."""


def write(table: Table, folder: Path) -> list[Path]:
    """Write the table as NAME.csv, NAME.md and NAME.tex; returns the files' paths. An error in
    rendering leaves no files."""
    texts = {
        folder / f"{table.name}.{suffix}": render(table) for suffix, render in RENDERERS.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
