"""Items of benchmarks whose words occur in a text.

Words are maximal runs of letters and digits, in lower case. An item is found where LENGTH words in a row of its prompt
or its answer are in the text, which is how GPT-3 (arXiv 2005.14165, appendix C) compared its training text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set

from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.evaluation.harness import Document, Item, Text

LENGTH, SHARED = 13, 10
"""Words of a run, and most items of a benchmark that may have one: others belong to its instruction or template."""
_WORD = re.compile(r"[^\W_]+")


def runs(text: str) -> Iterator[str]:
    """Each LENGTH words in a row of a text."""
    words = _WORD.findall(text.lower())
    return (" ".join(words[start : start + LENGTH]) for start in range(len(words) - LENGTH + 1))


def contaminated(items: Iterable[Item], text: Set[str]) -> dict[str, int]:
    """How many items can be found, as they have LENGTH words in a row (comparable), and how many have a run of `text`,
    the runs of a text (found). A document whose likelihood is measured counts as its paragraphs."""
    pieces = [{run for text in texts for run in runs(text)} for item in items for texts in _pieces(item)]
    found = [piece & text for piece in pieces]
    shared = Counter(run for piece in found for run in piece)
    hits = sum(any(shared[run] <= SHARED for run in piece) for piece in found)
    return {"comparable": sum(map(bool, pieces)), "found": hits}


def _pieces(item: Item) -> Iterator[list[str]]:
    """The texts of an item: prompts with the answer, where one is known, and of a conversation each message."""
    texts: list[str] = []
    for request in item.requests:
        if isinstance(request, Document):
            yield from ([paragraph] for paragraph in request.text.split(BLANK_LINE) if paragraph.strip())
            continue
        answer = (request.reference or "") if isinstance(request, Text) else request.continuation
        prompt = request.prompt if isinstance(request, Text) else request.context
        texts += [prompt + answer] if isinstance(prompt, str) else [*(turn["content"] for turn in prompt), answer]
    if texts:
        yield texts
