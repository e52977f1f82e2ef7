"""`moe-lab report [NAME ...|all|report] [store=store] [study=NAME] [out=FOLDER] [format=svg]`."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import argparse
import gc
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lab.arguments import Parser
from moe_lab.errors import UserError, check_known, run_and_exit
from moe_lab.paths import is_of_group, shorten, store_folder
from moe_lab.source_code import plugin_modules

if TYPE_CHECKING:
    from moe_lab.analysis.load.study import Study
    from moe_lab.analysis.report import Publisher

FIGURE_FORMATS = ("svg", "pdf", "png")
"""File formats of figures; the first is the default."""
EXIT_CODES = (
    "Ends with 0, with 1 when something is missing from the results (what is there is written), "
    "with 2 for a mistake."
)
GARBAGE = 100_000
"""Number of new objects after which Python collects garbage. Python's default of 700 takes a tenth
of a report's time."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. The result has an attribute `names`, and one for each option.

    Raises UserError for an unknown option or format.
    """
    wants_help = {"-h", "--help", "help"} & set(arguments)
    parser = Parser(
        prog="moe-lab report",
        description=_names_in_help() if wants_help else None,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=["report"],
        help="what to write, by default report",
        metavar="NAME",
    )
    parser.add_argument("--store", default="store", help="the folder a run wrote to")
    parser.add_argument(
        "--study",
        help="study in the store, several separated by commas, or all; by default the newest",
    )
    parser.add_argument("--out", type=Path, help="where to write; by default STORE/reports/STUDY")
    parser.add_argument(
        "--format",
        default=FIGURE_FORMATS[0],
        help="file format of figures: svg (the default), pdf or png",
    )
    request = parser.read(["--help"] if wants_help else arguments)
    check_known("format", request.format, FIGURE_FORMATS)
    request.store = store_folder(request.store)
    return request


def _names_in_help() -> str:
    """The part of the help with the names and titles of all tables and figures."""
    from moe_lab.analysis.registry import outputs

    lines = [
        (
            "NAME is report (the page with everything; the default), all (every table and figure), "
            "or one of:"
        ),
        "",
    ]
    for output in outputs().values():
        aliases = f" ({', '.join(output.aliases)} too)" if output.aliases else ""
        lines.append(f"  {output.name:25} {output.title}{aliases}")
    return "\n".join(lines)


def _report(message: str) -> None:
    """Print a message to stderr."""
    print(f"analysis: {message}", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Write the requested tables and figures. Returns the exit code: 0 if the study has results, no
    gaps, and data for everything that is requested by name; otherwise 1. Raises UserError for a
    mistake."""
    request = parse(arguments)
    gc.set_threshold(GARBAGE)
    from moe_lab.analysis.load.studies import studies
    from moe_lab.analysis.load.study import load
    from moe_lab.analysis.registry import Results, find
    from moe_lab.analysis.report import Publisher

    # the first study is the newest
    study = load(request.store, request.study or studies(request.store)[0])
    _import_plugins(study)
    for name in set(request.names) - {"all", "report"}:
        find(name)
    out = request.out or request.store / "reports" / shorten(study.name)
    if request.out is None and is_of_group(request.store):
        os.umask(0o002)  # when other members of the group run the study, they rewrite the report
    # the page draws its charts itself
    figure_format = None if "report" in request.names else request.format
    publisher = Publisher(Results(study), out, figure_format)
    try:
        has_all_data = _write(request.names, publisher)
    except BrokenPipeError:  # the reader of stdout went away, `out` is fine
        raise
    except OSError as error:
        raise UserError(
            f"out={out} cannot be written ({error.strerror}): make room, or name a folder you own"
        ) from None
    for note in study.notes:
        _report(note)
    for gap in study.gaps:
        _report(f"{gap.location}: {gap.reason}")
    if study.results.empty:
        _report(f"study={study.name} has no results yet: what there is was written")
    return 0 if has_all_data and not study.gaps and not study.results.empty else 1


def _import_plugins(study: Study) -> None:
    """Import the plugins of a study, whose outputs are then registered. Prints those that cannot be
    imported here."""
    config = study.document.get("config") or {}
    # the record of several studies has the config of each under its name
    configs = [part for part in (config, *config.values()) if isinstance(part, dict)]
    listed = chain.from_iterable(part.get("plugins") or () for part in configs)
    for module in plugin_modules(listed):
        try:
            import_module(module)
        except Exception as error:  # noqa: BLE001 - a foreign module may raise anything
            _report(f"plugins: {module} cannot be imported here ({error}): its tables are missing")


def _write(requested: Sequence[str], publisher: Publisher) -> bool:
    """Write the report, or the requested tables and figures. Returns whether the study has data for
    every output that is requested by name, and not by `all`."""
    from moe_lab.analysis.registry import find, outputs
    from moe_lab.analysis.report import GAPS, write_report

    study = publisher.results.study
    if "report" in requested:
        print(write_report(publisher))
        return True
    # items: tables and figures of the output, none if the study has no data
    items_by_name, paths = publisher.publish(outputs() if "all" in requested else requested)
    for path in paths:
        print(path)
    # the output `gaps` has no items if no results are missing
    without_data = [
        name
        for name, items in items_by_name.items()
        if not items and name not in (*publisher.failed, GAPS)
    ]
    if "all" in requested:
        if without_data:
            listed = ", ".join(without_data)
            _report(f"no data for these (name one to see what it needs): {listed}")
        return True
    for name in without_data:
        _report(f"{name} needs {find(name).needs}, which study={study.name} does not have")
    return not without_data


if __name__ == "__main__":
    run_and_exit(partial(main, sys.argv[1:]))
