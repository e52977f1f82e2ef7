"""Resolve `model.device` and `model.dtype` on this machine, and check that a model fits into the memory.

`python -m moe_lab.models.device DEVICE` prints the name of a device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from moe_lab.config import ModelConfig
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.config_json import UNPACKED, quantization
from moe_lab.models.memory import free_memory, processor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 2**30
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


def check_room(skeleton: Any, folder: Path, settings: ModelConfig, dtype: torch.dtype | str, device: str) -> None:
    """Raise UserError when the weights of a model alone are larger than the free memory of its device.

    The error states what is needed, what is free and what to change. `skeleton` is the model on the meta device,
    `folder` its files; `dtype` and `device` are resolved from `settings`. A `device` that is neither the CPU nor one
    CUDA device spreads the model over all CUDA devices.
    """
    free, where = _free(device, settings.device)
    needed = _bytes(skeleton, folder, settings, dtype)
    if needed <= free:
        return
    raise UserError(
        f"model={settings.name} takes {needed / GIB:.1f} GiB for its weights alone, and {where} has {free / GIB:.1f} "
        "GiB free: expected model.dtype=bfloat16, all devices (model.device=balanced), model.device=cpu, or, for "
        "calibration alone, one layer at a time (calibration.engine=streamed)"
    )


def _free(device: str, setting: str) -> tuple[float, str]:
    """Free bytes of a device, and its name for the error message."""
    if device == "cpu":
        return free_memory(), "main memory"
    numbers = [int(device.partition(":")[2] or 0)] if device.startswith("cuda") else range(torch.cuda.device_count())
    return sum(torch.cuda.mem_get_info(number)[0] for number in numbers), f"model.device={setting}"


def _bytes(skeleton: Any, folder: Path, settings: ModelConfig, dtype: torch.dtype | str) -> int:
    """Bytes of the weights once loaded: as stored, or in another precision."""
    method = quantization(settings)
    if (isinstance(dtype, str) or method) and method not in UNPACKED:
        return sum(entry.size for entry in open_checkpoint(folder).tensors.values())
    count: int = sum(weight.numel() for weight in skeleton.parameters())
    return count * (dtype if isinstance(dtype, torch.dtype) else torch.bfloat16).itemsize
