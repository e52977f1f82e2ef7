"""Settings of a calibration set: checks before it is read, and what identifies it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import Chat
from moe_lab.calibration.packing import PACKINGS
from moe_lab.calibration.sources import file_format, first_record, hub_file, is_hub_file, locate
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.config.identity import counting_fields, identity
from moe_lab.errors import UserError, unknown, user_errors
from moe_lab.models import config_json
from moe_lab.models.hub import UNRESOLVED, data_file, data_files, sha256_of

ORDERS = ("random", "first")
GAPS = ("none", "eos", "zero")
ENGINES = ("resident", "streamed")
OF_DOCUMENTS = ("path", "subset", "split", "field", "template", "joined", "order", "special_tokens")
"""Settings of where documents come from and how each is read. In a mixture, every set has its own."""


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
    ] or [(1.0, settings)]


def check(settings: CalibrationConfig) -> None:
    """Raise UserError for an invalid setting. Reads names, sizes and first bytes of files."""
    for name, value, choices in (
        ("packing", settings.packing, PACKINGS),
        ("gap", settings.gap, GAPS),
        ("engine", settings.engine, ENGINES),
    ):
        if value not in choices:
            raise unknown(f"calibration.{name}", value, choices)
    _check_numbers(settings)
    if settings.sources:
        _check_mixture(settings)
    for _, part in parts(settings):
        _check_documents(part)


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


def _check_documents(settings: CalibrationConfig) -> None:
    """Raise UserError for invalid settings of a source, or of how its documents are read."""
    if settings.path in ("", "???"):
        raise UserError(
            "calibration.path is not set: give a text file, a JSON lines file, or a hub id; or, for a mixture, "
            "calibration.sources=[{calibration: NAME, share: 0.5}, ...]"
        )
    if settings.order not in ORDERS:
        raise unknown("calibration.order", settings.order, ORDERS)
    if settings.field is not None and settings.template is not None:
        raise UserError(
            f"calibration.field={settings.field} and calibration.template are both set: expected one, for a template "
            "names its fields itself"
        )
    locate(settings.path)


def _check_mixture(settings: CalibrationConfig) -> None:
    """Raise UserError for invalid shares, a set that is named twice, and settings that belong to the single sets."""
    usual = CalibrationConfig(name=settings.name)
    for name in OF_DOCUMENTS:
        if (value := getattr(settings, name)) != getattr(usual, name):
            raise UserError(
                f"calibration.{name}={value} beside calibration.sources: each set of a mixture is read by its own "
                f"{name}, expected it in the file of that set"
            )
    for source in settings.sources:
        if not 0 < source.share < 1:
            raise UserError(
                f"calibration.sources: share={source.share} of {source.calibration} must be in (0, 1), such as 0.5"
            )
    total = math.fsum(source.share for source in settings.sources)
    if abs(total - 1) > 1e-6:
        raise UserError(f"calibration.sources: the shares add up to {total:g}: expected 1")
    names = [source.settings.name for source in settings.sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"calibration.sources names {twice} twice: expected each set once")


def _check_numbers(settings: CalibrationConfig) -> None:
    if settings.length < 2:
        raise UserError(f"calibration.length={settings.length} is too short: expected at least 2 tokens a row")
    if settings.tokens < settings.length:
        raise UserError(
            f"calibration.tokens={settings.tokens} is less than one row of calibration.length={settings.length}: "
            f"expected at least {settings.length}"
        )
    if settings.batch_size < 1:
        raise UserError(f"calibration.batch_size={settings.batch_size} is no batch: expected at least 1 row")
    if not 0 <= settings.activation_budget < math.inf:
        raise UserError(f"calibration.activation_budget={settings.activation_budget}: expected GiB, 0 or more")
    _check_parts(settings)
    if settings.seed is not None and settings.seed < 0:
        raise UserError(f"calibration.seed={settings.seed} is negative: expected 0 or more")


def _check_parts(settings: CalibrationConfig) -> None:
    if settings.parts < 1:
        raise UserError(f"calibration.parts={settings.parts}: expected at least 1, which is one pass over all rows")
    rows, batches = row_count(settings), batch_count(settings)
    if settings.parts > rows:
        raise UserError(
            f"calibration.parts={settings.parts} is more than the {rows} rows of calibration.length={settings.length} "
            f"in calibration.tokens={settings.tokens}: expected at most {rows}"
        )
    if settings.parts > batches:
        raise UserError(
            f"calibration.parts={settings.parts} is more than the {batches} batches of "
            f"calibration.batch_size={settings.batch_size} in {rows} rows: expected at most {batches}, or "
            f"calibration.batch_size={rows // settings.parts}"
        )


def row_count(settings: CalibrationConfig) -> int:
    """Rows to fill: calibration.tokens / calibration.length, rounded down."""
    return settings.tokens // settings.length


def batch_count(settings: CalibrationConfig) -> int:
    """Batches of the rows, of which the last may have fewer rows."""
    return -(-row_count(settings) // settings.batch_size)


def shares(settings: CalibrationConfig) -> list[tuple[int, int]]:
    """First row, and end, of each of calibration.parts shares of the rows; empty for one pass over all of them.

    A share has whole batches of one pass, so that both read the same batches and get the same numbers for each.
    """
    if settings.parts == 1:
        return []
    bounds = [batch_count(settings) * part // settings.parts for part in range(settings.parts + 1)]
    return [
        (first * settings.batch_size, min(end * settings.batch_size, row_count(settings)))
        for first, end in pairwise(bounds)
    ]


def order_seed(settings: CalibrationConfig) -> int | None:
    """The seed by which documents are shuffled; None for order=first. UserError for order=random without a seed."""
    if settings.order == "first":
        return None
    if settings.seed is None:
        raise UserError("calibration.seed is not set: calibration.order=random needs the seed of the cell")
    return settings.seed


@identity.register
def _(settings: CalibrationConfig) -> Any:
    """All that changes what is read and in which batches.

    A file counts by the sha256 of its bytes and its format, wherever it is; a hub set by its id, subset and split; a
    mixture by its sets and their shares. The seed counts only where documents are shuffled, and of the tokens only how
    many rows they fill.
    """
    check(settings)
    document = {**counting_fields(settings, "sources", "tokens"), "rows": row_count(settings)}
    if not settings.sources:
        return {**document, **_documents(settings)}
    sources = [{"share": share, **_documents(part)} for share, part in parts(settings)]
    return {**document, "sources": sources, "seed": None}  # each set has the seed of the mixture, or its own


def _documents(settings: CalibrationConfig) -> dict[str, Any]:
    """What names the documents of one set, and how each is read."""
    document = {name: getattr(settings, name) for name in OF_DOCUMENTS}
    return {**document, "path": _content(settings.path), "seed": order_seed(settings)}


def _content(path: str) -> dict[str, Any]:
    """The content that a path names: that of a file, here or on the hub, or of a data set there; its name where the hub
    cannot be asked."""
    file = locate(path)
    if file is not None:
        return {"sha256": sha256_of(file), "format": file_format(path, file)}
    if is_hub_file(path):
        name, found = hub_file(path)
        sha256 = data_file(name, found)
        known = {"sha256": sha256, "format": file_format(path, Path(found))} if sha256 else {}
    else:
        sha256 = data_files(path)
        known = {"data": sha256} if sha256 else {}
    return known or {UNRESOLVED: path}
