"""Texts and rows on which tiny models are trained."""

from pathlib import Path

import tiny
import torch

from moe_lab.config import CalibrationConfig
from moe_lab.recovery.finetune import Row


def text(folder: Path, name: str = "text", tokens: int = 96) -> CalibrationConfig:
    """Settings of a text in rows of 12 tokens, some of which are padding."""
    path = str(folder / f"{name}.jsonl")
    return CalibrationConfig(
        name=name, path=path, packing="none", length=12, tokens=tokens, batch_tokens=48, seed=0
    )


def rows(count: int = 6, length: int = 16, first_learnt: int = 0) -> list[Row]:
    """Random rows (ids, valid, learnt), of which the tokens from number `first_learnt` on are
    learnt. The last two tokens of every other row are padding."""
    rows = []
    for number, ids in enumerate(tiny.tokens(count, length)):
        valid = torch.arange(length) < length - 2 * (number % 2)
        rows.append((ids, valid, valid & (torch.arange(length) >= first_learnt)))
    return rows
