"""Import the optional libraries without the notes that bitsandbytes logs about kernels of other packages."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

from moe_lab.recovery.settings import need


@cache
def bitsandbytes_functional() -> Any:
    """The module bitsandbytes.functional; UserError with the command that installs it."""
    need("bitsandbytes", "quantisation", "recovery.bits=4")
    return _import("bitsandbytes.functional")


@cache
def peft() -> Any:
    """The module peft, which imports bitsandbytes when that is there; UserError with the command that installs it."""
    need("peft", "fine-tuning", "fine-tuning")
    return _import("peft")


def _import(name: str) -> Any:
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return import_module(name)
    finally:
        log.setLevel(level)
