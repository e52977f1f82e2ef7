"""A calibration set as the model reads it: batches of token ids with a validity mask, and a
report."""

from __future__ import annotations

import hashlib
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any

import torch

from moe_lab.calibration import (
    local_tokenizer,
    order_documents,
    order_seed,
    plain_text,
    shares_and_sets,
)
from moe_lab.calibration.documents import (
    BLANK_LINE,
    Chat,
    Document,
    Documents,
    Text,
    document_text,
    is_content,
    render,
    tokenize,
)
from moe_lab.calibration.sources import is_own_text, local_files, read
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.errors import UserError

GAP = -1
"""Stands for the filler token in rows of positions, where other numbers are indices of tokens."""
TOLERANCE = 0.01
"""Largest allowed difference between the share of a set in the tokens of a mixture and the share in
the settings."""
FIRST_PLACES = 5
"""Most locations that the report lists of records that were left out for the same reason."""


# Packing: a stream of documents becomes a stream of rows. A document is a non-empty list of token
# ids. A row has `length` ids, and is yielded as soon as it is full, so that no more documents are
# read than the rows need.


def reap(documents: Iterable[list[int]], length: int, gap: int | None) -> Iterator[list[int]]:
    """Pack documents like the code of REAP and EvoESAP. A document that does not fit into the rest
    of a row is cut, and its remainder is dropped. An unfinished last row is dropped.

    `gap`: token after a document that does not fill its row; None for no token.
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
    """Join all documents, and cut the stream of tokens every `length` tokens. An unfinished last
    row is dropped. `gap`: token after each document; None for no token."""
    gaps = [] if gap is None else [gap]
    stream = chain.from_iterable([*document, *gaps] for document in documents)
    while len(row := list(islice(stream, length))) == length:
        yield row


def one_per_row(documents: Iterable[list[int]], length: int, padding: int) -> Iterator[list[int]]:
    """Pack one document into each row: cut to `length` tokens, or padded on the right with
    `padding`."""
    for document in documents:
        # a list times a negative number is empty, so a longer document gets no padding
        yield document[:length] + [padding] * (length - len(document))


PACKINGS: dict[str, Callable[..., Iterator[list[int]]]] = {
    "reap": reap,
    "chunk": chunk,
    "none": one_per_row,
}
"""calibration.packing -> function (documents, length, filler)."""


def check_held_out(settings: CalibrationConfig, model: ModelConfig) -> None:
    """Raise UserError if a calibration set that is read by `model` reaches the half of its text
    from which `held_out_text` is taken. Only sets in local files, and models in local folders, are
    checked, and that rows are not taken from the whole text."""
    if settings.order in ("rows", "longest"):
        raise UserError(
            f"calibration.order={settings.order} takes rows from the whole of {settings.name}, so "
            "that no half is held out for a benchmark: expected calibration.order=first, or "
            "suite.path=FILE"
        )
    tokenizer = local_tokenizer(model)
    if tokenizer is None:
        return
    for share, part in shares_and_sets(settings):
        if not local_files(part):
            continue
        documents = order_documents(read(part).documents, part)
        half = len(plain_text(documents, part)) // 2
        # few tokens have more than 6 bytes, so that a longer document fills all rows
        first_half = _beginning(documents, half, longest=6 * settings.tokens)
        tokens = (tokenize(document, tokenizer, part.special_tokens) for document in first_half)
        filler = None if settings.gap == "none" else 0
        needed_rows = math.ceil(share * settings.rows)
        rows = islice(PACKINGS[settings.packing](tokens, settings.length, filler), needed_rows)
        row_count = sum(1 for _ in rows)
        if row_count < needed_rows:
            most = int(row_count / share) * settings.length
            raise UserError(
                f"calibration.tokens={settings.tokens} is more than half of {part.name}, whose "
                f"second half is held out for a benchmark: expected calibration.tokens={most} or "
                "less, or suite.path=FILE"
            )


def _beginning(documents: Iterable[Document], characters: int, longest: int) -> Iterator[Document]:
    """Yield the documents in the first `characters` of their joined `plain_text`. Documents that
    are longer than `longest` characters are cut."""
    for document in documents:
        if characters <= 0:
            return
        text = document.plain.text if document.plain else ""
        most = min(characters, longest)
        yield document if len(text) <= most else Text(text[:most])
        characters -= len(text) + len(BLANK_LINE)


@dataclass(frozen=True)
class Calibration:
    """The batches of a calibration set, and a report about them."""

    batches: list[tuple[torch.Tensor, torch.Tensor]]
    """Batches (ids, valid): token ids (B, S) int64, and valid (B, S) bool. valid is False at gaps
    and padding. The last batch may have fewer rows."""
    report: dict[str, Any]
    """See `_report`."""


@dataclass
class Source:
    """One set of documents, with counts of what was packed so far."""

    settings: CalibrationConfig
    share: float
    read: Documents
    """The documents, in the order of the source, and what was left out."""
    documents_used: int = 0
    """Number of documents that were tokenised."""
    tokens_used: int = 0
    """Number of tokens of these documents."""
    tokens_assigned: int = 0
    """Number of tokens that are in rows or wait for the next row."""
    tokens_retained: int = 0
    """Number of tokens in finished rows."""

    def report(self) -> dict[str, Any]:
        """JSON-ready. "forms" has the forms of the records and their numbers. "left_out" has why
        records and turns were left out, with their number and the locations of the first.
        "documents_used" is the number of documents that were tokenised."""
        return {
            "name": self.settings.name,
            "share": self.share,
            "documents_read": len(self.read.documents),
            "documents_used": self.documents_used,
            "forms": dict(self.read.forms),
            "left_out": {
                reason: {"number": len(places), "first": places[:FIRST_PLACES]}
                for reason, places in self.read.left_out.items()
            },
        }


class PackedRows:
    """Rows of a calibration set, or of a mixture of sets. A row is a list of positions. A position
    is the index of a token in `ids`, or GAP (-1) where the row has a gap or padding.

    The next document always comes from the set that, in proportion to its share, has the fewest
    tokens so far.
    """

    def __init__(
        self, settings: CalibrationConfig, tokenizer: Any, header: bool | None = None
    ) -> None:
        """Read the documents, and pack them into rows.

        header: see `answer_batches`; None: no answers are marked. UserError for rows longer than
        the model reads, for a source that cannot be read or is too short, and for a mixture whose
        shares of tokens differ from the settings by more than TOLERANCE.
        """
        if settings.length > tokenizer.model_max_length:
            raise UserError(
                f"calibration.length={settings.length} is more than the model reads at once: "
                f"expected at most {tokenizer.model_max_length}"
            )
        self.settings = settings
        self.tokenizer = tokenizer
        self.header = header
        self.sources = [
            Source(part, share, read(part)) for share, part in shares_and_sets(settings)
        ]
        self.ids: list[int] = []
        self.is_answer: list[bool] = []
        self._sources_of_positions: list[Source] = []
        self._exhausted_source: Source | None = None
        self.filler_id = _filler_id(settings, tokenizer)
        self.rows = self._pack()
        # of a text of the user, calibration.tokens is the most that is read
        needed_rows = 1 if is_own_text(settings) else settings.rows
        if len(self.rows) < needed_rows:
            raise self._too_short_error()
        self._check_shares()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the batches as (token ids (B, S) int64, valid (B, S) bool, answers (B, S) bool).
        valid is False at gaps and padding. answers is True at the tokens of marked answers."""
        ids = torch.tensor(self.ids)
        answers = torch.tensor(self.is_answer)
        size = self.settings.batch_rows
        for start in range(0, len(self.rows), size):
            positions = torch.tensor(self.rows[start : start + size])
            valid = positions != GAP
            # GAP is -1, so ids[GAP] is the last id, which the filler id replaces. If filler_id is
            # None, all positions are valid.
            batch = ids[positions].masked_fill(~valid, self.filler_id or 0)
            yield batch, valid, answers[positions] & valid

    def _pack(self) -> list[list[int]]:
        """Rows of positions: as many as the settings require, or fewer if a set has too few
        documents.

        Unless the order is one of rows (rows or longest), a row is only packed when the loop below
        takes it. `_documents` chooses the set of the next document by the counts that the loop has
        updated so far.
        """
        packing = PACKINGS[self.settings.packing]
        # what `packing` writes into gaps and padding; None if rows have neither
        filler = None if self.filler_id is None else GAP
        all_rows = packing(self._documents(), self.settings.length, filler)
        if self.settings.order == "rows":
            packed = list(all_rows)
            all_rows = iter(random.Random(order_seed(self.settings)).sample(packed, len(packed)))
        elif self.settings.order == "longest":
            all_rows = iter(sorted(all_rows, key=lambda row: row.count(GAP)))
        rows = []
        for row in islice(all_rows, self.settings.rows):
            rows.append(row)
            for position in row:
                if position != GAP:
                    self._sources_of_positions[position].tokens_retained += 1
            # Tokens that were cut off do not count for the share of their set. packing=chunk cuts
            # no tokens off.
            if self.settings.packing != "chunk":
                for source in self.sources:
                    source.tokens_assigned = source.tokens_retained
        return rows

    def _documents(self) -> Iterator[list[int]]:
        """For each document of all sets, in the order of packing, yield the positions of its
        tokens. Ends when the next document must come from a set that has no more documents."""
        streams = {id(source): self._documents_of(source) for source in self.sources}
        while True:
            source = min(self.sources, key=lambda source: source.tokens_assigned / source.share)
            positions = next(streams[id(source)], None)
            if positions is None:
                self._exhausted_source = source
                return
            source.tokens_assigned += len(positions)
            yield positions

    def _documents_of(self, source: Source) -> Iterator[list[int]]:
        """For each document of one set, yield the positions of its tokens. With packing=chunk, a
        document of a mixture is yielded in pieces of at most `length` positions. So a long document
        does not take its set far beyond the set's share."""
        yields_pieces = len(self.sources) > 1 and self.settings.packing == "chunk"
        for document in order_documents(source.read.documents, source.settings):
            ids, is_answer = self._encode(document, source.settings.special_tokens)
            if not ids:
                continue
            positions = list(range(len(self.ids), len(self.ids) + len(ids)))
            self.ids += ids
            self.is_answer += is_answer
            self._sources_of_positions += [source] * len(ids)
            source.documents_used += 1
            source.tokens_used += len(ids)
            step = self.settings.length if yields_pieces else len(positions)
            yield from (positions[start : start + step] for start in range(0, len(positions), step))

    def _encode(self, document: Document, special_tokens: bool) -> tuple[list[int], list[bool]]:
        """(token ids of a document, for each id whether the token belongs to a marked answer)."""
        if self.header is None:
            ids = tokenize(document, self.tokenizer, special_tokens)
            return ids, [False] * len(ids)
        text, adds_special = document_text(document, self.tokenizer, special_tokens)
        encoding = self.tokenizer(
            text, add_special_tokens=adds_special, verbose=False, return_offsets_mapping=True
        )
        spans = list(_answer_spans(document, text, self.tokenizer, self.header))
        # A token belongs to an answer if the two have a character in common.
        is_answer = [
            any(max(token_start, start) < min(token_end, end) for start, end in spans)
            for token_start, token_end in encoding["offset_mapping"]
        ]
        return encoding["input_ids"], is_answer

    def _too_short_error(self) -> UserError:
        """The error for a set that has too few documents to fill all rows."""
        settings = self.settings
        filled_rows = len(self.rows)
        source = self._exhausted_source
        assert source is not None  # rows are only missing after a set had no more documents
        expected = f"at most calibration.tokens={filled_rows * settings.length}"
        if not filled_rows:
            expected = f"a longer text, or at most calibration.length={source.tokens_used}"
        set_label = source.settings.path
        if settings.sources:
            set_label = (
                f"{source.settings.name}, for its share of {source.share:g} of "
                f"calibration={settings.name},"
            )
        return UserError(
            f"calibration.path={set_label} is too short: its {source.tokens_used} tokens are read "
            f"when {filled_rows} of the {settings.rows} rows of calibration.length="
            f"{settings.length} in calibration.tokens={settings.tokens} are filled: expected "
            f"{expected}"
        )

    def _check_shares(self) -> None:
        """Raise UserError when a set's share of the tokens differs by more than TOLERANCE from its
        share in the settings."""
        total = sum(source.tokens_retained for source in self.sources)
        for source in self.sources:
            share = source.tokens_retained / total
            if abs(share - source.share) > TOLERANCE:
                raise UserError(
                    f"calibration={self.settings.name}: {source.settings.name} makes {share:.1%} "
                    f"of the tokens and not {source.share:.1%}, because documents are long beside "
                    f"calibration.tokens={self.settings.tokens}: expected more tokens"
                )


def batches(settings: CalibrationConfig, tokenizer: Any) -> Calibration:
    """The batches of a calibration set or mixture, with a report. The same settings and tokenizer
    give the same tensors. Raises the errors of `PackedRows`."""
    packed = PackedRows(settings, tokenizer)
    unmarked_batches = [(ids, valid) for ids, valid, _ in packed.batches()]
    return Calibration(unmarked_batches, _report(packed, *unmarked_batches[0]))


def _filler_id(settings: CalibrationConfig, tokenizer: Any) -> int | None:
    """The token id for gaps between documents or, with packing=none, padding; None if rows have
    neither. UserError for calibration.gap=eos if the tokenizer has no end-of-text token."""
    if settings.packing == "none" or settings.gap == "zero":
        # As padding, any id would do: causal attention hides padding on the right from all tokens,
        # and no statistic counts it.
        return 0
    if settings.gap == "none":
        return None
    if tokenizer.eos_token_id is None:
        raise UserError(
            "calibration.gap=eos: the model's tokenizer has no end-of-text token; use none or zero"
        )
    return int(tokenizer.eos_token_id)


def _report(packed: PackedRows, ids: torch.Tensor, valid: torch.Tensor) -> dict[str, Any]:
    """JSON-ready report on packed rows. `ids`, `valid`: the first batch. "sha256" identifies the
    documents, and "sources" has the `Source.report` of each set. "tokens_cut" is the number of
    tokens of tokenised documents that are in no row."""
    settings = packed.settings
    sources = packed.sources
    digest = hashlib.sha256()
    for source in sources:
        for document in source.read.documents:
            digest.update(repr(document).encode())
    # without padding, or a gap at the end
    first_row = ids[0, : int(valid[0].nonzero().max()) + 1]
    return {
        "name": settings.name,
        "sha256": digest.hexdigest(),
        "sources": [source.report() for source in sources],
        "rows": len(packed.rows),
        "length": settings.length,
        "packing": settings.packing,
        "valid_tokens": {source.settings.name: source.tokens_retained for source in sources},
        "tokens_cut": sum(source.tokens_used - source.tokens_retained for source in sources),
        "first_row": packed.tokenizer.decode(first_row),
    }


# Batches of tasks with solutions, in which the tokens of answers are marked.

AnswerBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(ids (B, S) int64, valid (B, S) bool, answers (B, S) bool): ids and valid as in `Calibration`;
answers is True at the tokens of answers."""


def answer_batches(
    settings: CalibrationConfig, tokenizer: Any, *, header: bool = False
) -> list[AnswerBatch]:
    """The batches of `batches(settings, tokenizer)`, with the tokens of answers.

    An answer is the output, answer or completion of a record, or a turn of the assistant. Its
    tokens themselves are marked, not the positions that predict them.

    header: whether the text that the chat template writes around an answer (the name of the speaker
    and the end of the turn) is marked too, as in the released code of EvoESAP. Without a chat
    template, this text is the blank line between an instruction and its answer.

    Raises the errors of `batches`. UserError also for a set without answers, for rows that contain
    no token of an answer, and for a tokenizer that does not say which characters a token stands
    for.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "the model's tokenizer does not say which characters a token stands for, so answers "
            "cannot be marked: expected a fast tokenizer (a tokenizer.json)"
        )
    marked_batches = list(PackedRows(settings, tokenizer, header).batches())
    if not any(bool(answers.any()) for _, _, answers in marked_batches):
        raise UserError(
            f"calibration.length={settings.length}: no row of {settings.name} has words of an "
            "answer: expected tasks with answers, or longer rows"
        )
    return marked_batches


def _answer_spans(
    document: Document, text: str, tokenizer: Any, header: bool
) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each answer in `text`, the document as the model reads it. header: see
    `answer_batches`."""
    if isinstance(document, Chat) and tokenizer.chat_template:
        yield from _turn_spans(document, text, tokenizer, header)
    elif (plain := document.plain) and plain.answer_start is not None:
        # A Chat without a chat template is an instruction and its answer, with a blank line between
        # them.
        separator = BLANK_LINE if header and isinstance(document, Chat) else ""
        yield plain.answer_start - len(separator), len(text)


def _turn_spans(
    document: Chat, text: str, tokenizer: Any, header: bool
) -> Iterator[tuple[int, int]]:
    """Yield the spans of `_answer_spans`, for a conversation that a chat template rendered to
    `text`.

    With `header`, a span is a whole turn of the assistant. A turn begins where `text` first differs
    from the rendering of only the messages before the turn. This is true also if the template
    writes something at the end of every conversation.

    Without `header`, a span is the content of a turn. UserError for a content that the template
    rewrites, and for a turn with more than a content, such as tool calls.
    """
    turns = document.messages
    for number, message in enumerate(turns):
        if message["role"] != "assistant":
            continue
        turn_start = _common_prefix_length(document, number, text, tokenizer)
        other_keys = [key for key in message if key != "content" and is_content(message[key])]
        if header and number + 1 == len(turns):
            yield turn_start, len(text)
        elif header:
            yield turn_start, _common_prefix_length(document, number + 1, text, tokenizer)
        elif other_keys:
            raise UserError(
                f"calibration.path: the chat template writes {other_keys[0]} of the assistant, so "
                f"its tokens cannot be told: expected a set without {other_keys[0]}, or "
                "header=true to take the whole turn"
            )
        elif content := message["content"].strip():
            content_start = text.find(content, turn_start)
            if content_start < 0:
                raise UserError(
                    f"calibration.path: the chat template rewrites the answer {content[:40]!r}, "
                    "so its tokens cannot be told: expected a set of plain answers, or "
                    "header=true to take the whole turn"
                )
            yield content_start, content_start + len(content)


def _common_prefix_length(document: Chat, count: int, text: str, tokenizer: Any) -> int:
    """Number of characters before the first difference between `text` and the rendering of only the
    first `count` messages of the document."""
    prefix_text = render(document.messages[:count], document.arguments, tokenizer) if count else ""
    matches = map(operator.eq, prefix_text, text)
    return sum(takewhile(bool, matches))
