"""Calibration sets: sources of documents, packing into rows, batches with a validity mask.

This module checks a calibration set before a step reads it, and computes its identity.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import (
    BLANK_LINE,
    Chat,
    Document,
    document_text,
)
from moe_lab.calibration.sources import (
    HUB_FILE,
    DataFile,
    first_document,
    joined_texts,
    local_files,
    read,
)
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.config.base import identity_fields
from moe_lab.config.pruning import DOCUMENT_SETTINGS
from moe_lab.errors import UserError
from moe_lab.models.files import (
    UNRESOLVED,
    data_file_sha256,
    data_set_digest,
    sha256_of,
    tokenizer_path,
)

CPU_BATCH = 8192
GPU_BATCH = 16384
"""Most tokens in one forward pass on the CPU, and on GPUs, where calibration.batch_tokens is
null."""


def with_batch_tokens(settings: CalibrationConfig, device: str) -> CalibrationConfig:
    """The settings of a text with batch_tokens=null resolved, for a model on `device`: "cpu", or
    any name of GPUs."""
    default = CPU_BATCH if device == "cpu" else GPU_BATCH
    return replace(settings, batch_tokens=settings.batch_tokens or default)


def shares_and_sets(settings: CalibrationConfig) -> list[tuple[float, CalibrationConfig]]:
    """(share of the tokens, settings) of each set of a mixture; [(1, settings)] for a single
    set."""
    entries = []
    for source in settings.sources:
        if part := source.settings:  # None only before the settings are composed
            seeded_part = replace(part, seed=settings.seed) if part.seed is None else part
            entries.append((source.share, seeded_part))
    return entries or [(1.0, settings)]


def check_first_document(settings: CalibrationConfig, model: ModelConfig) -> None:
    """Raise UserError when a local set cannot be read, or when its first document is a conversation
    that a model in a local folder does not read, or not as a whole."""
    for document in first_document(settings):  # one document, or none
        needs_template = isinstance(document, Chat) and document.plain is None
        if needs_template and (tokenizer := local_tokenizer(model)) is not None:
            document_text(document, tokenizer, settings.special_tokens)


def local_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of a model if it is in a local folder, or None."""
    folder = tokenizer_path(model)
    if not (folder / "tokenizer.json").is_file():
        return None
    from moe_lab.models.load import load_tokenizer

    return load_tokenizer(folder, model)


def part_bounds(settings: CalibrationConfig) -> list[tuple[int, int]]:
    """(start row, end row) of each of the parts into which calibration.parts divides the rows. The
    end row is not in the part. Every part consists of whole batches, so the batches are the same as
    in a single pass over all rows."""
    if settings.parts in (None, 1):
        return []
    # the first batch of each part and, at the end, the number of all batches
    bounds = [settings.batches * part // settings.parts for part in range(settings.parts + 1)]
    return [
        (start_batch * settings.batch_rows, min(end_batch * settings.batch_rows, settings.rows))
        for start_batch, end_batch in pairwise(bounds)
    ]


def order_seed(settings: CalibrationConfig) -> int | None:
    """The seed by which documents are shuffled, or rows are drawn; None for an order without
    chance. UserError for another order without a seed."""
    if settings.order in ("first", "longest"):
        return None
    if settings.seed is None:
        raise UserError(
            f"calibration.seed is not set: calibration.order={settings.order} needs the cell's seed"
        )
    return settings.seed


def order_documents(documents: list[Document], settings: CalibrationConfig) -> list[Document]:
    """The documents in the order in which they are packed."""
    if settings.order != "random":
        return documents
    return random.Random(order_seed(settings)).sample(documents, len(documents))


def held_out_text(settings: CalibrationConfig, characters: int) -> str:
    """About `characters` of the second half of a set, by share of each set of a mixture. Documents
    are in the order in which they are packed, joined by blank lines. UserError for
    conversations."""
    parts = []
    for share, part in shares_and_sets(settings):
        text = plain_text(order_documents(read(part).documents, part), part)
        start = len(text) // 2
        parts.append(text[start : start + int(share * characters)])
    return BLANK_LINE.join(parts)


def plain_text(documents: Sequence[Document], settings: CalibrationConfig) -> str:
    """The texts of documents of a set, joined by blank lines. UserError for conversations."""
    return joined_texts(documents, f"suite.path is null and calibration={settings.name}")


class IdentifiedText(CalibrationConfig):
    """A calibration set or mixture with an `identity`."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """JSON-ready fields that identify the documents and batches: the settings, by name, and
        "rows", the number of rows. "path" has fields that identify the content of the file or data
        set. "sources" has the share and the identity of each set of a mixture."""
        # all settings that change a result, except `sources` and `tokens`
        fields = {**identity_fields(self, "sources", "tokens"), "rows": self.rows}
        if not self.sources:
            return {**fields, **_documents_identity(self)}
        sources = [
            {"share": share, **_documents_identity(part)} for share, part in shares_and_sets(self)
        ]
        # The seed of the mixture does not count, because each of its sets has a seed.
        return {**fields, "sources": sources, "seed": None}


def _documents_identity(settings: CalibrationConfig) -> dict[str, Any]:
    """Fields that identify the documents of one set, their order, and how each becomes text."""
    fields = {name: getattr(settings, name) for name in DOCUMENT_SETTINGS}
    return {**fields, "path": _content_identity(settings), "seed": order_seed(settings)}


def _content_identity(settings: CalibrationConfig) -> dict[str, Any]:
    """Fields that identify the content at calibration.path. For files: "sha256" and "suffix". For a
    data set on the hub: "data", a digest of all its data files. If the hub cannot be reached:
    {UNRESOLVED: path}."""
    path = settings.path
    if files := local_files(settings):
        return {"sha256": [sha256_of(file.path) for file in files], "suffix": files[0].suffix}
    if hub_path := HUB_FILE.fullmatch(path):
        fields = {
            "sha256": data_file_sha256(*hub_path.groups()),
            "suffix": DataFile(Path(path), path).suffix,
        }
    else:
        fields = {"data": data_set_digest(path)}
    # a hash is None if the hub cannot be reached
    return fields if all(fields.values()) else {UNRESOLVED: path}
