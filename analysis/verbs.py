"""The verbs `table`, `export` and `compare` of the command moe-lab."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_lab.analysis.differences import compare
from moe_lab.analysis.export import export
from moe_lab.analysis.load.study import load
from moe_lab.analysis.load.table import table, write_table
from moe_lab.arguments import Parser
from moe_lab.errors import UserError
from moe_lab.paths import store_folder

PRINTED_ROWS = 40
"""Most rows of a frame that `compare` prints."""


STUDY = "one study, several separated by commas, or all"


def _parser(verb: str, function: Callable[..., object]) -> Parser:
    """The parser of a verb that calls `function`."""
    parser = Parser(prog=f"moe-lab {verb}", description=function.__doc__)
    parser.add_argument("--store", default="store", help="the folder a run wrote to")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the verb that the first argument names. Returns the exit code, 2 after an error that is
    printed as a sentence."""
    verb, *words = arguments
    try:
        {"table": _table, "export": _export, "compare": _compare}[verb](words)
    except (UserError, OSError) as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2
    return 0


def _table(words: Sequence[str]) -> None:
    """Write the table of results of a study."""
    parser = _parser("table", table)
    parser.add_argument("study", help=STUDY)
    parser.add_argument("--rows", default="item", help="item (the default), or cell")
    parser.add_argument("--out", type=Path, required=True, help="a file .parquet or .csv")
    request = parser.read(words)
    write_table(table(request.store, request.study, request.rows), request.out)
    print(request.out)


def _export(words: Sequence[str]) -> None:
    """Write the results of a study as logs of lm-eval and of Inspect."""
    parser = _parser("export", export)
    parser.add_argument("study", help=STUDY)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    request = parser.read(words)
    for folder in export(load(store_folder(request.store), request.study), request.out):
        print(folder)


def _compare(words: Sequence[str]) -> None:
    """Print the differences between the cells that the first two words select."""
    parser = _parser("compare", compare)
    parser.add_argument("a", help="cells, such as reap or criterion=reap,ratio=0.25")
    parser.add_argument("b", help="the cells that A is compared with")
    parser.add_argument("--study", help="study of A and B, by default the newest")
    # placeholders, because criterion=reap is no option
    request = parser.read(["A", "B", *words[2:]] if len(words) > 1 else words)
    differences = compare(words[0], words[1], request.store, request.study)
    for name, frame in vars(differences).items():
        for (a, b), rows in frame.groupby(["a", "b"], sort=False):
            text = rows.drop(columns=["a", "b"]).to_string(
                index=False,
                max_rows=PRINTED_ROWS,
                max_colwidth=40,
                float_format="{:.4g}".format,
            )
            print(f"{name} ({len(rows)} rows), A = {a}, B = {b}\n{text}\n")
