"""`moe-lab cite [STUDY] [store=store]` prints BibTeX entries for moe_lab and for the papers of the
criteria of a study; without STUDY, of all criteria."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from moe_lab import __version__
from moe_lab.arguments import Parser
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError
from moe_lab.paths import store_folder
from moe_lab.result_files import read_record

_NUMBER = re.compile(r"arXiv (\d{4}\.\d{5})")


def main(arguments: Sequence[str]) -> int:
    """Print the entries. Returns the exit code."""
    parser = Parser(prog="moe-lab cite", description=__doc__)
    parser.add_argument("study", nargs="?", help="by default, all criteria are cited")
    parser.add_argument("--store", default="store", help="the folder a run wrote to")
    request = parser.read(arguments)
    names: Iterable[str] = CRITERIA
    if request.study:
        record = read_record(store_folder(request.store), request.study)
        if record is None:
            raise UserError(f"study={request.study} has no record in store={request.store}")
        # such as s_family(alpha=0,b=1)
        names = [entry["cell"]["criterion"].partition("(")[0] for entry in record["cells"]]
    print("\n".join(entries(names)))
    return 0


def entries(criteria: Iterable[str]) -> Iterator[str]:
    """A BibTeX entry for moe_lab, and for each paper of the registered `criteria`. Other names are
    skipped."""
    yield f"@software{{moe_lab,\n  title = {{moe_lab}},\n  version = {{{__version__}}},\n}}"
    titles: dict[str, str] = {}  # number on arXiv -> title
    for criterion in CRITERIA.values():
        title, comma, number = criterion.reference.partition(", arXiv ")
        if comma:
            titles[number] = title
    references = {CRITERIA[name].reference for name in criteria if name in CRITERIA}
    numbers = {number for reference in references for number in _NUMBER.findall(reference)}
    for number in sorted(numbers):
        yield (
            f"@misc{{arxiv_{number},\n  title = {{{{{titles.get(number, number)}}}}},\n"
            f"  eprint = {{{number}}},\n  archivePrefix = {{arXiv}},\n}}"
        )
    for title in sorted(references):
        if not _NUMBER.search(title) and not title.startswith("docs/"):
            key = re.sub(r"\W+", "_", title.lower())
            yield f"@misc{{{key},\n  title = {{{{{title}}}}},\n}}"
