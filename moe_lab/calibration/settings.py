"""What can be said of a calibration set before it is read: whether its settings hold together, and its identity."""

from __future__ import annotations

from typing import Any

from moe_lab.calibration.packing import PACKINGS
from moe_lab.calibration.sources import digest, file_format, locate
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError, unknown

ORDERS = ("random", "first")
GAPS = ("none", "eos", "zero")
ENGINES = ("resident", "streamed")


def check(settings: CalibrationConfig) -> None:
    """UserError for a value that cannot work. Looks at the file's name and size, never into it."""
    if settings.path in ("", "???"):
        raise UserError("calibration.path is not set: give a text file, a JSON lines file, or a hub id")
    for name, value, known in (
        ("packing", settings.packing, PACKINGS),
        ("order", settings.order, ORDERS),
        ("gap", settings.gap, GAPS),
        ("engine", settings.engine, ENGINES),
    ):
        if value not in known:
            raise unknown(f"calibration.{name}", value, known)
    _check_numbers(settings)
    locate(settings.path)


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
    if settings.activation_budget < 0:
        raise UserError(
            f"calibration.activation_budget={settings.activation_budget} is negative: expected GiB, 0 or more"
        )
    if settings.snapshots and settings.engine == "streamed":
        raise UserError(
            f"calibration.snapshots={settings.snapshots}: engine=streamed reads all of the text layer after layer, so "
            "there is no part of the pass to take one of: set engine=resident, or snapshots=0"
        )
    if settings.snapshots < 0:
        raise UserError(f"calibration.snapshots={settings.snapshots} is negative: expected 0 or more")
    if settings.seed is not None and settings.seed < 0:
        raise UserError(f"calibration.seed={settings.seed} is negative: expected 0 or more")


def row_count(settings: CalibrationConfig) -> int:
    """Rows to fill: calibration.tokens / calibration.length, rounded down."""
    return settings.tokens // settings.length


def order_seed(settings: CalibrationConfig) -> int | None:
    """The seed documents are shuffled by; None for order=first, which has no chance in it."""
    if settings.order == "first":
        return None
    if settings.seed is None:
        raise UserError("calibration.seed is not set: calibration.order=random needs the seed of the cell")
    return settings.seed


def identity(settings: CalibrationConfig) -> dict[str, Any]:
    """The settings that change what is read, in one canonical form, JSON-ready.

    A file counts by the sha256 of its bytes and its format, wherever it lies; a hub set by its id, subset
    and split. Left out is what makes no difference: name and batch size, the seed of an order that is not random,
    the gap of a packing that has none, tokens that fill no row.
    """
    check(settings)
    seed = order_seed(settings)
    file = locate(settings.path)
    if file is None:
        source: dict[str, Any] = {"hub": settings.path, "subset": settings.subset, "split": settings.split}
    else:
        source = {"sha256": digest(file), "format": file_format(settings.path, file)}
    return {
        "source": source,
        "field": settings.field,
        "packing": settings.packing,
        "length": settings.length,
        "rows": row_count(settings),
        "order": settings.order,
        "seed": seed,
        "gap": settings.gap if settings.packing != "none" else None,
        "special_tokens": settings.special_tokens,
    }
