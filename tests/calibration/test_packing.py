"""What every packing keeps, and what each one drops."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.calibration.batches import PACKINGS, chunk, one_a_row, reap

FILLER = -1

lengths, gaps = st.integers(2, 12), st.sampled_from([None, FILLER])


@st.composite
def numbered(draw: st.DrawFn) -> list[list[int]]:
    """Documents whose tokens are numbered through, so that every token tells where it came from."""
    sizes = draw(st.lists(st.integers(1, 25), max_size=12))
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def tokens(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row if token != FILLER]


@given(numbered(), lengths, gaps)
def test_chunk_loses_only_the_tail(documents: list[list[int]], length: int, gap: int | None) -> None:
    rows = list(chunk(documents, length, gap))
    stream = [token for document in documents for token in (*document, *([] if gap is None else [gap]))]
    assert [token for row in rows for token in row] == stream[: len(rows) * length]
    assert len(rows) == len(stream) // length


@given(numbered(), lengths, gaps)
def test_reap_rows_begin_with_the_beginning_of_a_document_and_drop_only_overflow(
    documents: list[list[int]], length: int, gap: int | None
) -> None:
    rows = list(reap(documents, length, gap))
    first = {document[0]: document for document in documents}
    for row in rows:
        assert row[0] in first
        begun = [first[token] for token in row if token in first]
        room = length - sum(len(document) + (gap is not None) for document in begun[:-1])
        assert tokens([row]) == [*chain.from_iterable(begun[:-1]), *begun[-1][:room]]
    begun_in_rows = [token for token in tokens(rows) if token in first]
    assert begun_in_rows == [document[0] for document in documents][: len(begun_in_rows)], "no document is skipped"


@given(numbered(), lengths)
def test_one_a_row_keeps_each_beginning(documents: list[list[int]], length: int) -> None:
    rows = list(one_a_row(documents, length, FILLER))
    assert rows == [(document + [FILLER] * length)[:length] for document in documents]


def test_reap_by_hand() -> None:
    """The overflowing document is cut; one that leaves a single position leaves it to the gap."""
    documents = [[1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [14]]
    assert list(reap(documents, 4, 0)) == [[1, 2, 0, 3], [7, 8, 9, 0], [10, 11, 12, 13]]
    assert list(reap(documents, 4, None)) == [[1, 2, 3, 4], [7, 8, 9, 10]]


@pytest.mark.parametrize("packing", sorted(PACKINGS))
def test_only_as_many_documents_are_taken_as_the_rows_need(packing: str) -> None:
    taken: list[int] = []

    def stream():  # type: ignore[no-untyped-def]
        for number in range(100):
            taken.append(number)
            yield [number] * 4

    next(iter(PACKINGS[packing](stream(), 4, 0)))
    assert taken == [0]
