"""Items of benchmarks whose words occur in a text.

Words are maximal runs of letters and digits, in lower case. An item is found where LENGTH words in a row of its prompt
or its answer are in the text, which is how GPT-3 (arXiv 2005.14165, appendix C) compared its training text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set

from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.evaluation.harness import Document, Item, Pair, Text
from moe_lab.results import Contaminated

LENGTH = 13
"""Words of a run."""
SHARED = 10
"""A run that more items have says nothing of one: it belongs to the instruction or the template of the benchmark."""
_WORD = re.compile(r"[^\W_]+")


def runs(text: str) -> Iterator[str]:
    """Each LENGTH words in a row of a text."""
    words = _WORD.findall(text.lower())
    return (" ".join(words[start : start + LENGTH]) for start in range(len(words) - LENGTH + 1))


def contaminated(items: Iterable[Item], text: Set[str]) -> Contaminated:
    """How many of the items have a run that is in `text`, the runs of a text. Items without LENGTH words in a row cannot
    be found, and are not among `comparable`. A document whose likelihood is measured counts as its paragraphs."""
    pieces = [set(piece) for item in items for piece in _pieces(item)]
    found = [piece & text for piece in pieces]
    shared = Counter(run for piece in found for run in piece)
    return Contaminated(
        items=len(pieces),
        comparable=sum(map(bool, pieces)),
        found=sum(any(shared[run] <= SHARED for run in piece) for piece in found),
    )


def _pieces(item: Item) -> list[Iterator[str]]:
    """The runs of an item, or of each paragraph of one that is a document."""
    documents = [request.text for request in item.requests if isinstance(request, Document)]
    if documents:
        return [runs(paragraph) for text in documents for paragraph in text.split(BLANK_LINE) if paragraph.strip()]
    texts = dict.fromkeys(text for request in item.requests for text in _texts(request))
    return [(run for text in texts for run in runs(text))]


def _texts(request: Text | Pair | Document) -> list[str]:
    """The prompt with the answer, where one is known; of a conversation each message alone."""
    if isinstance(request, Document):
        return [request.text]
    is_text = isinstance(request, Text)
    prompt, answer = (request.prompt, request.reference) if is_text else (request.context, request.continuation)
    return (
        [prompt + (answer or "")] if isinstance(prompt, str) else [*(turn["content"] for turn in prompt), answer or ""]
    )
