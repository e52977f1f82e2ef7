"""A calibration set as the model reads it: batches of token ids with a validity mask, and a report."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from moe_lab.calibration.documents import Document, rendering, tokenize
from moe_lab.calibration.packing import PACKINGS, Row
from moe_lab.calibration.settings import check, order_seed, row_count
from moe_lab.calibration.sources import digest, locate, read
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError


@dataclass(frozen=True)
class Calibration:
    """What the model reads."""

    rows: list[tuple[torch.Tensor, torch.Tensor]]
    """Batches (ids, valid): (B, S) int64 token ids and (B, S) bool, False at gaps and padding, which no statistic
    counts. The last batch may have fewer rows."""
    report: dict[str, Any]
    """What was read, JSON-ready; `calibration.json` of the statistics step."""


@dataclass
class _Reader:
    """Turns documents into token ids as rows ask for them, and counts what was taken."""

    tokenizer: Any
    special_tokens: bool
    documents: int = 0
    tokens: int = 0
    renderings: set[str] = field(default_factory=set)

    def read(self, documents: list[Document]) -> Iterator[list[int]]:
        for document in documents:
            ids = tokenize(document, self.tokenizer, self.special_tokens)
            if ids:
                self.documents += 1
                self.tokens += len(ids)
                self.renderings.add(rendering(document, self.tokenizer))
                yield ids


def batches(settings: CalibrationConfig, tokenizer: Any) -> Calibration:
    """Read, order, tokenise and pack a calibration set; the same settings and tokenizer give the same tensors.

    Raises UserError for settings that cannot work, a source that cannot be read, and one that is too short.
    """
    check(settings)
    check_context(settings, tokenizer)
    documents = read(settings)
    reader = _Reader(tokenizer, settings.special_tokens)
    stream = reader.read(ordered(documents, settings))
    rows = PACKINGS[settings.packing](stream, settings.length, filler(settings, tokenizer))
    filled = list(islice(rows, row_count(settings)))
    if len(filled) < row_count(settings):
        raise too_short(settings, len(filled), reader.tokens)
    return Calibration(
        rows=[_tensors(filled[at : at + settings.batch_size]) for at in range(0, len(filled), settings.batch_size)],
        report=_report(settings, documents, reader, filled),
    )


def check_context(settings: CalibrationConfig, tokenizer: Any) -> None:
    """Rows longer than the tokenizer's limit would be read at positions the model was never trained on."""
    if settings.length > tokenizer.model_max_length:
        raise UserError(
            f"calibration.length={settings.length} is more than the model reads at once: "
            f"expected at most {tokenizer.model_max_length}"
        )


def ordered(documents: list[Document], settings: CalibrationConfig) -> list[Document]:
    """The order documents are read in: as they come, or shuffled by the seed (drawn without replacement)."""
    seed = order_seed(settings)
    return documents if seed is None else random.Random(seed).sample(documents, len(documents))


def filler(settings: CalibrationConfig, tokenizer: Any) -> int | None:
    """The token id at invalid positions: what stands in gaps, or, for packing=none, the padding."""
    if settings.packing == "none":
        # Right padding is invisible to the causal tokens before it: any id the embedding has will do.
        return 0
    if settings.gap == "eos":
        if tokenizer.eos_token_id is None:
            raise UserError("calibration.gap=eos: the model's tokenizer has no end-of-text token; use none or zero")
        return int(tokenizer.eos_token_id)
    return 0 if settings.gap == "zero" else None


def _tensors(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows -> (ids (B, S) int64, valid (B, S) bool)."""
    ids = torch.tensor([ids for ids, _ in rows], dtype=torch.int64)
    return ids, torch.tensor([valid for _, valid in rows], dtype=torch.bool)


def too_short(settings: CalibrationConfig, filled: int, tokens: int) -> UserError:
    """The source gives `filled` rows, fewer than asked for, out of `tokens` tokens."""
    if filled:
        fitting = f"calibration.tokens={filled * settings.length} would fit"
    elif tokens > 1:
        fitting = f"calibration.length={tokens} calibration.tokens={tokens} would fit"
    else:
        fitting = "expected a longer text"
    return UserError(
        f"calibration.path={settings.path} is too short: its {tokens} tokens fill {filled} of the "
        f"{row_count(settings)} rows of calibration.length={settings.length} in "
        f"calibration.tokens={settings.tokens}; {fitting}"
    )


def _report(settings: CalibrationConfig, documents: list[Document], reader: _Reader, rows: list[Row]) -> dict[str, Any]:
    """What was read: the source and its digest, how much of it, and the first row as the model sees it."""
    valid = sum(sum(flags) for _, flags in rows)
    ids, flags = rows[0]
    end = max(at for at, is_token in enumerate(flags) if is_token) + 1
    file = locate(settings.path)
    return {
        "name": settings.name,
        "source": settings.path,
        "sha256": digest(file) if file else _digest(documents),
        "documents_read": len(documents),
        "documents_used": reader.documents,
        "rendered": sorted(reader.renderings),
        "rows": len(rows),
        "length": settings.length,
        "packing": settings.packing,
        "valid_tokens": {settings.name: valid},
        "tokens_cut": reader.tokens - valid,
        "first_row": reader.tokenizer.decode(ids[:end]),
    }


def _digest(documents: list[Document]) -> str:
    """sha256 of the documents of a hub set, which has no one file."""
    total = hashlib.sha256()
    for document in documents:
        total.update(repr(document).encode())
    return total.hexdigest()
