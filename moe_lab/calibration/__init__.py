"""Calibration sets: sources of documents, packing into rows, batches with a validity mask.

Here: checks of a set before it is read, and what identifies it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import Chat, Text, unread_texts, written
from moe_lab.calibration.sources import (
    file_format,
    first_record,
    hub_file,
    is_hub_file,
    locate,
    read,
)
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.config.base import counting_fields
from moe_lab.config.pruning import OF_DOCUMENTS
from moe_lab.errors import UserError
from moe_lab.models import config_json
from moe_lab.models.files import UNRESOLVED, data_file, data_files, sha256_of
from moe_lab.paths import local


def parts(settings: CalibrationConfig) -> list[tuple[float, CalibrationConfig]]:
    """(share, settings) of each set of a mixture; a set that is no mixture is its own only part. A
    set without a seed gets that of the mixture."""
    sets = [
        (source.share, source.settings)
        for source in settings.sources
        if source.settings is not None
    ]
    seeded = [
        (share, replace(part, seed=settings.seed) if part.seed is None else part)
        for share, part in sets
    ]
    return seeded or [(1.0, settings)]


def check_chat_template(settings: CalibrationConfig, model: ModelConfig) -> None:
    """Raise UserError when a set begins with chat messages and the model, on this machine, has no
    template that reads all of them."""
    other = ", or a set of plain texts, or of instructions and outputs"
    for _, part in parts(settings):
        for document in first_record(part):
            if isinstance(document, Chat) and document.plain is None:
                user = f"calibration={settings.name}"
                config_json.check_chat_template(
                    model, user, bool(document.arguments.get("tools")), other
                )
                if (local(model.path) / "tokenizer.json").is_file():
                    from moe_lab.models.load import load_tokenizer

                    written(document, load_tokenizer(local(model.path), model), part.special_tokens)


def unread_keys(settings: CalibrationConfig, model: ModelConfig) -> list[str]:
    """Keys of texts in the first record of each set that the model, in a folder, does not read; see
    `unread_texts`."""
    documents = [document for _, part in parts(settings) for document in first_record(part)]
    tokenizer = None
    if any(unread_texts(document, None) for document in documents):
        if not (local(model.path) / "tokenizer.json").is_file():
            return []
        from moe_lab.models.load import load_tokenizer

        tokenizer = load_tokenizer(local(model.path), model)
    return sorted({key for document in documents for key in unread_texts(document, tokenizer)})


def check_length(settings: CalibrationConfig, model: ModelConfig) -> None:
    """Raise UserError when plain texts in a file surely do not fill the rows of calibration.tokens.
    They are counted up to what is needed, by the tokenizer.json of a model in a folder; other
    sources are too short when they are read."""
    file = None if settings.sources else locate(settings.path)
    tokens = local(model.path) / "tokenizer.json"
    # few tokens are so long
    if file is None or not tokens.is_file() or file.stat().st_size > 6 * settings.tokens:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokens))
    rows = 0.0
    tokenizer.no_truncation()
    for document in read(settings):
        if rows >= settings.rows or not isinstance(document, Text):
            return
        ids = tokenizer.encode(document.text, add_special_tokens=settings.special_tokens).ids
        rows += (
            1
            if settings.packing == "none"
            else (len(ids) + (settings.gap != "none")) / settings.length
        )
    if (filled := int(rows + 1e-9)) < settings.rows:
        fitting = (
            f"at most calibration.tokens={filled * settings.length}" if filled else "a longer text"
        )
        raise UserError(
            f"calibration.tokens={settings.tokens} is more than {settings.path} has, which fills "
            f"{filled} of "
            f"{settings.rows} rows of calibration.length={settings.length}: expected {fitting}"
        )


def shares(settings: CalibrationConfig) -> list[tuple[int, int]]:
    """First row, and end, of each of calibration.parts shares of the rows; empty for one pass over
    all of them. A share has whole batches of that pass, and so the same numbers for each."""
    if settings.parts in (None, 1):
        return []
    bounds = [settings.batches * part // settings.parts for part in range(settings.parts + 1)]
    return [
        (first * settings.batch_size, min(end * settings.batch_size, settings.rows))
        for first, end in pairwise(bounds)
    ]


def order_seed(settings: CalibrationConfig) -> int | None:
    """The seed by which documents are shuffled; None for order=first. UserError for order=random
    without a seed."""
    if settings.order == "first":
        return None
    if settings.seed is None:
        raise UserError(
            "calibration.seed is not set: calibration.order=random needs the seed of the cell"
        )
    return settings.seed


class IdentifiedText(CalibrationConfig):
    """A calibration set that is identified by all that changes what is read and in which batches:
    of a path the content, of a mixture its sets and their shares, of the tokens how many rows they
    fill. The seed counts only where documents are shuffled."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        document = {**counting_fields(self, "sources", "tokens"), "rows": self.rows}
        if not self.sources:
            return {**document, **_documents(self)}
        sources = [{"share": share, **_documents(part)} for share, part in parts(self)]
        # each set has the seed of the mixture, or its own
        return {**document, "sources": sources, "seed": None}


def _documents(settings: CalibrationConfig) -> dict[str, Any]:
    """What names the documents of one set, and how each is read."""
    document = {name: getattr(settings, name) for name in OF_DOCUMENTS}
    return {**document, "path": _content(settings.path), "seed": order_seed(settings)}


def _content(path: str) -> dict[str, Any]:
    """The content that a path names: that of a file, here or on the hub, or of a data set there;
    its name where the hub cannot be asked."""
    if (file := locate(path)) is not None:
        return {"sha256": sha256_of(file), "format": file_format(path, file)}
    if is_hub_file(path):
        name, file_name = hub_file(path)
        known = {"sha256": data_file(name, file_name), "format": file_format(path, Path(file_name))}
    else:
        known = {"data": data_files(path)}
    return known if all(known.values()) else {UNRESOLVED: path}
