"""Settings of a calibration set: checks before it is read, and what identifies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from moe_lab.calibration.documents import Chat
from moe_lab.calibration.sources import digest, file_format, first_record, locate
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.errors import UserError, user_errors
from moe_lab.models import config_json


def parts(settings: CalibrationConfig) -> list[tuple[float, CalibrationConfig]]:
    """(share, settings) of each set of a mixture; a set that is no mixture is its own only part.

    A set without a seed gets that of the mixture.
    """
    return [
        (
            source.share,
            source.settings if source.settings.seed is not None else replace(source.settings, seed=settings.seed),
        )
        for source in settings.sources
        if source.settings is not None
    ] or [(1.0, settings)]


def check(settings: CalibrationConfig) -> None:
    """Raise UserError for a text that cannot be found. Reads names, sizes and first bytes of files."""
    for _, part in parts(settings):
        locate(part.path)


def wrong(settings: CalibrationConfig, look: Callable[[CalibrationConfig], object] | None = None) -> list[str]:
    """Error messages of `check`; if there are none, those of `look` for each set of a mixture."""
    sentences = list(user_errors(check, settings))
    if sentences or look is None:
        return sentences
    return [sentence for _, part in parts(settings) for sentence in user_errors(look, part)]


def check_chat_template(settings: CalibrationConfig, model: ModelConfig) -> None:
    """Raise UserError when the set begins with chat messages that the model, on this machine, has no chat template for.

    Reads the first record of each set of a mixture. Settings that are `wrong` are left to that check.
    """
    if wrong(settings, first_record):
        return
    other = ", or a set of plain texts, or of instructions and outputs"
    for _, part in parts(settings):
        for document in first_record(part):
            if isinstance(document, Chat):
                user = f"calibration={settings.name}"
                config_json.check_chat_template(model, user, bool(document.tools), other)


def shares(settings: CalibrationConfig) -> list[tuple[int, int]]:
    """First row, and end, of each of calibration.parts shares of the rows; empty for one pass over all of them.

    A share has whole batches of one pass, so that both read the same batches and get the same numbers for each.
    """
    if settings.parts == 1:
        return []
    bounds = [settings.batches * part // settings.parts for part in range(settings.parts + 1)]
    return [
        (first * settings.batch_size, min(end * settings.batch_size, settings.rows)) for first, end in pairwise(bounds)
    ]


def order_seed(settings: CalibrationConfig) -> int | None:
    """The seed by which documents are shuffled; None for order=first. UserError for order=random without a seed."""
    if settings.order == "first":
        return None
    if settings.seed is None:
        raise UserError("calibration.seed is not set: calibration.order=random needs the seed of the cell")
    return settings.seed


def identity(settings: CalibrationConfig) -> dict[str, Any]:
    """The settings that change what is read, in one canonical form, JSON-ready.

    A file is identified by the sha256 of its bytes and its format, wherever it is; a hub set by its id, subset and
    split; a mixture by those of its sets and their shares. Settings that make no difference are left out: name and
    batch size, the seed of an order that is not random, the gap of a packing that has none, tokens that fill no row.
    """
    check(settings)
    filling = {
        "packing": settings.packing,
        "length": settings.length,
        "rows": settings.rows,
        "gap": settings.gap if settings.packing != "none" else None,
    }
    if settings.sources:
        return {"sources": [{"share": share, **_documents(part)} for share, part in parts(settings)], **filling}
    return {**_documents(settings), **filling}


def _documents(settings: CalibrationConfig) -> dict[str, Any]:
    """The part of the identity that names the documents of one set, and how each is read."""
    file = locate(settings.path)
    if file is None:
        source: dict[str, Any] = {"hub": settings.path, "subset": settings.subset, "split": settings.split}
    else:
        source = {"sha256": digest(file), "format": file_format(settings.path, file)}
    template = {"template": settings.template} if settings.template is not None else {}
    joined = {"joined": True} if settings.joined else {}
    return {
        "source": source,
        "field": settings.field,
        **template,
        **joined,
        "order": settings.order,
        "seed": order_seed(settings),
        "special_tokens": settings.special_tokens,
    }
