"""Resolve `model.device` and `model.dtype` on this machine.

`python -m moe_lab.models.device DEVICE` prints the name of a device.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from moe_lab.config import ModelConfig
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.errors import UserError
from moe_lab.models import processor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PASS_TOKENS = 4096
"""Tokens of one forward pass at most, where several rows share one: more would only take memory."""
LOGITS = 1 << 30
"""Bytes of the logits of one forward pass at most, unless a single row has more."""


def tokens_with_logits(model: Any) -> int:
    """After how many tokens one forward pass of `model` may give logits."""
    return LOGITS // (4 * int(model.get_output_embeddings().weight.shape[0]))


def place(settings: ModelConfig) -> str:
    """Resolve `model.device` to a device or a device map; UserError for a device that this machine does not have."""
    device = settings.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UserError(
            f"model.device={device}: this machine has {torch.cuda.device_count()} CUDA devices, cpu is there"
        )
    return device


def precision(settings: ModelConfig) -> torch.dtype | str:
    """The dtype of the weights once loaded; "auto" stands for that of the checkpoint."""
    if settings.dtype == "auto":
        return torch.float32 if place(settings) == "cpu" else "auto"
    return DTYPES[settings.dtype]


def device_name(device: str) -> str:
    """Name of the hardware that `model.device` selects: GPU, number and name of GPUs for a device map, or processor.

    UserError for a device that this machine does not have.
    """
    target = place(ModelConfig(name="any", path="any", device=device))
    if target in DEVICE_MAPS:
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    if target.startswith("cuda"):
        return torch.cuda.get_device_name(target)
    return processor()


if __name__ == "__main__":
    print(device_name(sys.argv[1]))
