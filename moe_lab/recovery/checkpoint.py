"""Where a fine-tuning stands, in one file that an interrupted one goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

NAME = "finetune.safetensors"
OPTIMIZER = "optimizer"


def save(
    folder: Path,
    about: Mapping[str, Any],
    losses: list[float],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write adapters, optimiser and losses (one per step done); `about` says whose they are. Whole or not at all."""
    tensors = {name: parameter.detach().contiguous() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
            tensors[f"{OPTIMIZER}.{key}.{name}"] = value.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{NAME}.part"
    # one entry: safetensors writes several in an order that changes from run to run
    save_file(tensors, beside, {"moe_lab": json.dumps({"about": about, "losses": losses}, sort_keys=True)})
    beside.replace(folder / NAME)


def load(
    folder: Path,
    about: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    """Put adapters and optimiser back as they were saved; returns the losses of the steps done.

    [] and nothing changed when there is no such file, it is damaged, or another fine-tuning's.
    """
    try:
        with safe_open(folder / NAME, framework="pt") as file:
            found = json.loads(file.metadata()["moe_lab"])
            if found["about"] != json.loads(json.dumps(about)):
                return []
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError, ValueError, KeyError, TypeError):
        return []
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{OPTIMIZER}.{key}.{name}" in tensors]
            if keys:
                state = {key: tensors[f"{OPTIMIZER}.{key}.{name}"] for key in keys}
                optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
                }
    losses: list[float] = found["losses"]
    return losses
