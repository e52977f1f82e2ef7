"""`python -m analysis [NAME ...|all|report] [store=store] [study=NAME] [out=FOLDER] [--compare]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from analysis.catalogue import Material
from analysis.render.table import Table
from moe_lab.errors import DISK_FULL, UserError, end_with, unknown
from moe_lab.paths import shortened

USAGE = """python -m analysis [NAME ...] [store=store] [study=NAME] [out=FOLDER] [--compare]
python -m analysis diff A B [store=store] [out=FOLDER]

NAME   report (the page with everything; the default), all (every table and figure), or any of
       {names};
       and, with the same numbers as what stands in brackets, {also}
store  the folder a run wrote to
study  which study in it, several with commas between, or all; by default the newest
out    where to write; by default STORE/reports/STUDY
--compare (or compare=true)
       beside each table NAME.published: the papers' numbers, deviations, and whether the two agree
diff   what changed from A to B: two studies of the store, two stores (or STORE:STUDY), or two plan.json files

Ends with 0, with 1 when something is missing from the results (what is there is written), with 2 for a mistake."""

COMPARE = "--compare"
OPTIONS = ("store", "study", "out", "compare")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    names: list[str]
    store: Path
    study: str | None
    out: Path | None
    compare: bool = False


def parse(words: Sequence[str]) -> Request:
    """The command line as a request. UserError for an unknown option."""
    options: dict[str, str] = {}
    wanted: list[str] = []
    for word in words:
        key, equals, value = ("compare=true" if word == COMPARE else word).partition("=")
        if not equals:
            wanted.append(word)
        elif key not in OPTIONS:
            raise unknown("option", key, OPTIONS)
        elif not value:
            raise UserError(f"{key}= has no value: write {key}=VALUE")
        else:
            options[key] = value
    if options.get("compare", "true") not in ("true", "false"):
        raise UserError(f"compare={options['compare']}: expected true or false")
    return Request(
        names=wanted or ["report"],
        store=Path(options.get("store", "store")),
        study=options.get("study"),
        out=Path(options["out"]) if "out" in options else None,
        compare=options.get("compare") == "true",
    )


def main(words: Sequence[str]) -> int:
    """Do what the command line asks; returns the exit code."""
    if {"-h", "--help", "help"} & set(words):
        from analysis.catalogue import CATALOGUE
        from analysis.items import ALSO

        print(USAGE.format(names=", ".join(CATALOGUE), also=", ".join(f"{name} ({of})" for name, of in ALSO.items())))
        return 0
    try:
        return _run(parse(words))
    except UserError as error:
        print(f"analysis: {error}", file=sys.stderr)
        return 2


def _diff(request: Request) -> int:
    """A page, tables, figures and sentences about what changed; 1 when something stands on one side only."""
    from analysis.diff import report as differences

    if request.compare:
        raise UserError("--compare sets a study beside the papers, diff two studies beside each other: ask for one")
    found = differences.diff(request.names[1:], request.store)
    out = request.out or found.folder
    try:
        for path in differences.write(found, out):
            print(path)
    except OSError as error:
        raise _unwritable(out, error) from None
    print("\n".join(sentence for _, sentence in found.findings))
    return 0 if found.complete else 1


def _unwritable(out: Path, error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):  # of whoever reads what is printed
        return error
    way = "make room, or name another folder" if error.errno in DISK_FULL else "name a folder you own"
    return UserError(f"out={out} cannot be written ({error.strerror}): {way}")


def _compare(request: Request, material: Material, out: Path) -> bool:
    """Published numbers beside measured ones; whether every table that was named has some."""
    from analysis import catalogue
    from analysis.published.tables import published_tables

    study = material.study
    made: dict[str, Table] = {}
    for name in _comparable(request):
        compare = partial(published_tables, study, material.comparisons, [name])
        made |= material.attempt(f"{name}.published", compare) or {}
    catalogue.log_failures(material, out)
    for path in catalogue.write((table for table in made.values() if len(table.frame)), out):
        print(path)
    lacking = [name for name in request.names if name in made and made[name].frame.empty]
    for name in lacking:
        print(f"analysis: {name}: no cell of study={study.name} has published numbers", file=sys.stderr)
    return not lacking


def _comparable(request: Request) -> list[str]:
    """The tables asked for that the papers print too. UserError when there is none."""
    from analysis.published.numbers import TABLES

    wanted = TABLES if {"all", "report"} & set(request.names) else request.names
    found = [name for name in wanted if name in TABLES]
    if not found:
        raise UserError(f"--compare: {', '.join(request.names)}: no published numbers, expected {', '.join(TABLES)}")
    return found


def _run(request: Request) -> int:
    if request.names[0] == "diff":
        return _diff(request)
    from analysis import catalogue
    from analysis.items import ALSO
    from analysis.load.studies import studies
    from analysis.load.study import load
    from analysis.needs import unknown_name

    for name in request.names:
        if name not in (*catalogue.CATALOGUE, *ALSO, "all", "report"):
            raise unknown_name(name, catalogue.CATALOGUE)
    if request.compare:
        _comparable(request)
    newest = studies(request.store)[0]
    study = load(request.store, request.study or newest)
    material = catalogue.Material(study)
    out = request.out or request.store / "reports" / shortened(study.name)
    try:
        complete = _write(request, material, out)
        if request.compare:
            complete = _compare(request, material, out) and complete
    except OSError as error:
        raise _unwritable(out, error) from None
    for note in study.notes:
        print(f"analysis: {note}", file=sys.stderr)
    for gap in study.gaps:
        print(f"analysis: {gap.where}: {gap.what}", file=sys.stderr)
    if study.results.empty:
        print(f"analysis: study={study.name} has no results yet: what there is was written", file=sys.stderr)
    return 0 if complete and not study.gaps and not study.results.empty else 1


def _write(request: Request, material: Material, out: Path) -> bool:
    """The report, or the tables and figures asked for; whether there are results for each."""
    from analysis import catalogue, report
    from analysis.items import ALSO
    from analysis.needs import needs

    if "report" in request.names:
        print(report.write_report(material.study, out))
        return True
    wanted = catalogue.CATALOGUE if "all" in request.names else request.names
    made, written = catalogue.publish(wanted, material, out)
    catalogue.log_failures(material, out)
    for path in written:
        print(path)
    made = {name: outputs for name, outputs in made.items() if name not in material.failed}
    lacking = [name for name in request.names if made.get(ALSO.get(name, name)) == []]
    for name in lacking:
        print(f"analysis: {name} needs {needs(name)}, which study={material.study.name} does not have", file=sys.stderr)
    if "all" in request.names and (
        without := [name for name, outputs in made.items() if not outputs and name != "gaps"]
    ):
        words = "nothing to be made of (asked for by name, each says what it needs)"
        print(f"analysis: {words}: {', '.join(without)}", file=sys.stderr)
    return not lacking


if __name__ == "__main__":
    end_with(partial(main, sys.argv[1:]))
