"""What identifies a model: its files, and how its numbers are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.config.base import counting_fields, identity
from moe_lab.models.files import fingerprint_of
from moe_lab.models.hub import UNRESOLVED

EAGER, GROUPED = "eager", "grouped_mm"


@identity.register
def _(model: ModelConfig) -> Any:
    """The content of its files, and how many experts a token gets, if that is changed.

    A model on the hub whose files are not known is its name there.
    """
    sha256 = fingerprint_of(model)
    files = {"sha256": sha256} if sha256 else {UNRESOLVED: model.path, "revision": model.revision}
    return {**counting_fields(model, "path"), "path": files}


@dataclass(frozen=True)
class Arithmetic:
    """How a model's numbers are computed, where that changes bits."""

    device: str
    """cpu or cuda."""
    dtype: str
    """Precision of the loaded weights; "stored" for that of the files."""
    experts: str
    """The implementation of experts."""


@cache
def _arithmetic(device: str, dtype: str) -> Arithmetic:
    kind = "cpu" if device == "cpu" else "cuda"
    usual = "float32" if kind == "cpu" else "stored"
    return Arithmetic(kind, usual if dtype == "auto" else dtype, experts_implementation(device))


def arithmetic(model: ModelConfig) -> Arithmetic:
    """How the numbers of a model are computed whose device is resolved; the same object for equal settings."""
    return _arithmetic(model.device, model.dtype)


def experts_implementation(device: str) -> str:
    """The function of transformers that runs experts on a device or a device map.

    grouped_mm on the CPU would convert weights on every call; cpu_experts replaces `eager` there, with equal bits.
    """
    return EAGER if device == "cpu" else GROUPED
