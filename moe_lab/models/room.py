"""Whether a model fits where it is to be loaded, judged before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.files import UNPACKED, has_pickles_only, quantization

GIB = 2**30


def check_room(skeleton: Any, folder: Path, settings: ModelConfig, dtype: torch.dtype | str, device: str) -> None:
    """UserError, with what is needed, what is free and what to change, when the weights of a model alone are larger
    than the free memory of the CUDA devices it is to be loaded on.

    `skeleton` is the model on the meta device, `folder` its files, `dtype` and `device` what `settings` come to; a
    `device` that is neither the CPU nor one CUDA device is a way to spread over all of those.
    """
    if device == "cpu":
        return
    one = device.startswith("cuda")
    number = int(device.partition(":")[2] or 0)
    free = sum(torch.cuda.mem_get_info(at)[0] for at in ([number] if one else range(torch.cuda.device_count())))
    needed = _bytes(skeleton, folder, settings, dtype)
    if needed <= free:
        return
    ways = ["calibration.engine=streamed to hold one layer at a time", "model.device=cpu"]
    if one and torch.cuda.device_count() > 1:
        ways.insert(0, "model.device=balanced to use all devices")
    if dtype == torch.float32:
        ways.insert(0, "model.dtype=bfloat16")
    raise UserError(
        f"model={settings.name} takes {needed / GIB:.1f} GiB for its weights alone, and model.device={settings.device} "
        f"has {free / GIB:.1f} GiB free: set {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _bytes(skeleton: Any, folder: Path, settings: ModelConfig, dtype: torch.dtype | str) -> int:
    """Bytes of the weights once loaded: as stored, or in another precision."""
    method = quantization(settings)
    if not has_pickles_only(folder) and (isinstance(dtype, str) or method) and method not in UNPACKED:
        return sum(entry.size for entry in open_checkpoint(folder).tensors.values())
    count: int = sum(weight.numel() for weight in skeleton.parameters())
    return count * (dtype if isinstance(dtype, torch.dtype) else torch.bfloat16).itemsize
