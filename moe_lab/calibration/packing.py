"""Pack documents into rows: pure functions on lists of token ids.

Every function turns a stream of documents (token ids, none of them empty) into a stream of rows of exactly `length`
ids, some of which may be a filler: a gap between documents or padding. A row is yielded as soon as it is full, so only
as many documents are taken from the stream as the rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


def reap(documents: Iterable[list[int]], length: int, gap: int | None) -> Iterator[list[int]]:
    """Pack as the code of REAP and EvoESAP: a document that overflows a row is cut there, and its remainder dropped.

    After a document that leaves room in the row, one position holds the `gap` token; there is none if `gap` is None.
    Every row starts with the beginning of a document; a last row that the documents do not fill is dropped.
    """
    row: list[int] = []
    for document in documents:
        row += document[: length - len(row)]
        if gap is not None and len(row) < length:
            row.append(gap)
        if len(row) == length:
            yield row
            row = []


def chunk(documents: Iterable[list[int]], length: int, gap: int | None) -> Iterator[list[int]]:
    """Join all documents, with a `gap` token after each unless it is None, and cut the stream every `length` tokens.

    Only the last tokens, which fill no row, are lost.
    """
    stream: list[int] = []
    for document in documents:
        stream += document
        if gap is not None:
            stream.append(gap)
        start = 0
        while len(stream) - start >= length:
            yield stream[start : start + length]
            start += length
        stream = stream[start:]


def one_a_row(documents: Iterable[list[int]], length: int, padding: int) -> Iterator[list[int]]:
    """Pack one document per row: those longer than `length` are cut, shorter ones are padded on the right."""
    for document in documents:
        yield document[:length] + [padding] * (length - len(document))


PACKINGS: dict[str, Callable[..., Iterator[list[int]]]] = {"reap": reap, "chunk": chunk, "none": one_a_row}
"""calibration.packing -> function (documents, length, filler token)."""
