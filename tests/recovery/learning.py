"""Texts and rows from which tiny models learn."""

from pathlib import Path

import tiny
import torch

from moe_lab.config import CalibrationConfig
from moe_lab.recovery.finetune import Row


def text(folder: Path, name: str = "text", tokens: int = 96) -> CalibrationConfig:
    """Rows of 12 tokens, some of them padding."""
    path = str(folder / f"{name}.jsonl")
    return CalibrationConfig(
        name=name, path=path, packing="none", length=12, tokens=tokens, batch_size=4, seed=0
    )


def rows(count: int = 6, length: int = 16, first: int = 0) -> list[Row]:
    """Random rows of which the tokens from `first` on are learnt; the last two of every other row
    are padding."""
    found = []
    for number, ids in enumerate(tiny.tokens(count, length)):
        valid = torch.arange(length) < length - 2 * (number % 2)
        found.append((ids, valid, valid & (torch.arange(length) >= first)))
    return found
