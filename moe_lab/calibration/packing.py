"""How documents fill rows: pure functions on lists of token ids.

Every function turns a stream of documents (token ids, none of them empty) into a stream of rows. A row is a pair
(ids, valid) of lists of exactly `length` entries; `valid` is False where a filler stands: a gap between documents or
padding. Rows come as soon as they are full, so only as many documents are taken from the stream as the rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

Row = tuple[list[int], list[bool]]


def reap(documents: Iterable[list[int]], length: int, gap: int | None) -> Iterator[Row]:
    """Rows as the REAP and EvoESAP code fills them: a document that overflows is cut at the row end, its rest dropped.

    After a document that leaves room the cursor moves one past it: that position holds the `gap` token (invalid).
    `gap` None leaves no such position. Every row starts with the beginning of a document; a last row that the
    documents do not fill is dropped.
    """
    ids: list[int] = []
    valid: list[bool] = []
    for document in documents:
        kept = document[: length - len(ids)]
        ids += kept
        valid += [True] * len(kept)
        if gap is not None and len(ids) < length:
            ids.append(gap)
            valid.append(False)
        if len(ids) == length:
            yield ids, valid
            ids, valid = [], []


def chunk(documents: Iterable[list[int]], length: int, gap: int | None) -> Iterator[Row]:
    """One stream of all documents, a `gap` token (invalid) after each unless None, cut every `length` tokens.

    Only the tail that fills no row is lost.
    """
    ids: list[int] = []
    valid: list[bool] = []
    for document in documents:
        ids += document
        valid += [True] * len(document)
        if gap is not None:
            ids.append(gap)
            valid.append(False)
        start = 0
        while len(ids) - start >= length:
            yield ids[start : start + length], valid[start : start + length]
            start += length
        ids, valid = ids[start:], valid[start:]


def one_a_row(documents: Iterable[list[int]], length: int, padding: int) -> Iterator[Row]:
    """One document a row: what is longer than `length` is cut, what is shorter is padded on the right (invalid)."""
    for document in documents:
        kept = document[:length]
        missing = length - len(kept)
        yield kept + [padding] * missing, [True] * len(kept) + [False] * missing


PACKINGS: dict[str, Callable[..., Iterator[Row]]] = {"reap": reap, "chunk": chunk, "none": one_a_row}
"""calibration.packing -> function (documents, length, filler token)."""
