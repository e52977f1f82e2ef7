"""`moe-lab cite [STUDY] [store=store]` prints BibTeX entries for moe_lab and for the papers of the
methods of a study; without STUDY, of all methods."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from moe_lab import __version__
from moe_lab.allocation import ALLOCATIONS
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.arguments import Parser
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError
from moe_lab.paths import store_folder
from moe_lab.result_files import read_record

REGISTRIES: Mapping[str, Mapping[str, Any]] = {
    "criterion": CRITERIA,
    "allocation": ALLOCATIONS,
    "replacement": GROUPINGS,
}
"""Axis of a cell -> its methods, each with a field `reference`."""


def main(arguments: Sequence[str]) -> int:
    """Print the entries. Returns the exit code."""
    parser = Parser(prog="moe-lab cite", description=__doc__)
    parser.add_argument("study", nargs="?", help="by default, all methods are cited")
    parser.add_argument("--store", default="store", help="the folder a run wrote to")
    request = parser.read(arguments)
    references = {
        method.reference for registry in REGISTRIES.values() for method in registry.values()
    }
    if request.study:
        record = read_record(store_folder(request.store), request.study)
        if record is None:
            raise UserError(f"study={request.study} has no record in store={request.store}")
        references = {
            registry[name].reference
            for entry in record["cells"]
            for axis, registry in REGISTRIES.items()
            # a name comes before its parameters, as in s_family(alpha=0) or coverage aligned 128
            if (name := re.split(r"[(, ]", str(entry["cell"].get(axis)))[0]) in registry
        }
    print("\n".join(entries(references - {""})))
    return 0


def entries(references: Iterable[str]) -> Iterator[str]:
    """A BibTeX entry for moe_lab, and for each paper of `references`, which are titles with or
    without a number on arXiv."""
    yield f"@software{{moe_lab,\n  title = {{moe_lab}},\n  version = {{{__version__}}},\n}}"
    for reference in sorted(references):
        title, _, number = reference.partition(", arXiv ")
        if number:
            yield (
                f"@misc{{arxiv_{number},\n  title = {{{{{title}}}}},\n"
                f"  eprint = {{{number}}},\n  archivePrefix = {{arXiv}},\n}}"
            )
        elif not title.startswith("docs/"):
            key = re.sub(r"\W+", "_", title.lower())
            yield f"@misc{{{key},\n  title = {{{{{title}}}}},\n}}"
