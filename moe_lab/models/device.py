"""What a model runs on, by name: `python -m moe_lab.models.device DEVICE` prints it."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import torch

from moe_lab.config import ModelConfig
from moe_lab.models.files import DEVICE_MAPS
from moe_lab.models.load import place

_PROCESSOR = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)


def device_name(device: str) -> str:
    """The name of what `model.device` stands for here: that of the GPU, with how many a device map spreads a model
    over, or of the processor. UserError for a device that is not there."""
    found = place(ModelConfig(name="any", path="any", device=device))
    if found in DEVICE_MAPS:
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    if found.startswith("cuda"):
        return torch.cuda.get_device_name(found)
    return _processor()


def _processor() -> str:
    stated = Path("/proc/cpuinfo")
    named = _PROCESSOR.search(stated.read_text()) if stated.is_file() else None
    return (named[1] if named else platform.processor() or platform.machine()).strip()


if __name__ == "__main__":
    print(device_name(sys.argv[1]))
