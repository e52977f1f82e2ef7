"""Whether a model fits where it is to be loaded, judged before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.files import UNPACKED, has_pickles_only, quantization
from moe_lab.models.memory import free_memory

GIB = 2**30


def check_room(skeleton: Any, folder: Path, settings: ModelConfig, dtype: torch.dtype | str, device: str) -> None:
    """UserError, with what is needed, what is free and what to change, when the weights of a model alone are larger
    than the free memory of the CUDA devices, or the main memory, it is to be loaded into.

    `skeleton` is the model on the meta device, `folder` its files, `dtype` and `device` what `settings` come to; a
    `device` that is neither the CPU nor one CUDA device is a way to spread over all of those.
    """
    free, where = _free(device, settings.device)
    needed = _bytes(skeleton, folder, settings, dtype)
    if needed <= free:
        return
    ways = list(_ways(dtype, device))
    raise UserError(
        f"model={settings.name} takes {needed / GIB:.1f} GiB for its weights alone, and {where} has {free / GIB:.1f} "
        f"GiB free: set {' or '.join([', '.join(ways[:-1]), ways[-1]] if ways[1:] else ways)}"
    )


def _free(device: str, asked: str) -> tuple[float, str]:
    """Bytes that can be had on a device, and the words for it."""
    if device == "cpu":
        return free_memory(), "main memory"
    numbers = [int(device.partition(":")[2] or 0)] if _is_one(device) else range(torch.cuda.device_count())
    return sum(torch.cuda.mem_get_info(number)[0] for number in numbers), f"model.device={asked}"


def _is_one(device: str) -> bool:
    return device.startswith("cuda")


def _ways(dtype: torch.dtype | str, device: str) -> Iterator[str]:
    """What can be set where a model does not fit."""
    if dtype == torch.float32:
        yield "model.dtype=bfloat16"
    if _is_one(device) and torch.cuda.device_count() > 1:
        yield "model.device=balanced to use all devices"
    yield "calibration.engine=streamed to hold one layer at a time (which benchmarks cannot)"
    if device != "cpu":
        yield "model.device=cpu"


def _bytes(skeleton: Any, folder: Path, settings: ModelConfig, dtype: torch.dtype | str) -> int:
    """Bytes of the weights once loaded: as stored, or in another precision."""
    method = quantization(settings)
    if not has_pickles_only(folder) and (isinstance(dtype, str) or method) and method not in UNPACKED:
        return sum(entry.size for entry in open_checkpoint(folder).tensors.values())
    count: int = sum(weight.numel() for weight in skeleton.parameters())
    return count * (dtype if isinstance(dtype, torch.dtype) else torch.bfloat16).itemsize
