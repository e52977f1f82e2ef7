"""Where the steps of a study run a model. Device and precision are resolved before steps are named."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moe_lab.config import Config, ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.config_json import Size, size_of
from moe_lab.start import command

GPU_FROM = 2**30
"""Bytes of weights from which Slurm's jobs are asked to put a model on a GPU."""


def resolved(model: ModelConfig, config: Config) -> ModelConfig:
    """The model with the device and the precision that `auto` stands for where the steps of a study run.

    A login node without a GPU names the device that its jobs ask for. On a GPU, dtype=auto is the precision of the
    files, which the hash of these identifies.
    """
    device = model.device
    if device == "auto":
        on_gpu = _jobs_have_gpu(model, config) if config.launcher.name == "slurm" else has_gpu()
        device = "cuda" if on_gpu else "cpu"
    dtype = "float32" if device == "cpu" and model.dtype == "auto" else model.dtype
    return replace(model, device=device, dtype=dtype)


def _jobs_have_gpu(model: ModelConfig, config: Config) -> bool:
    """Whether Slurm's jobs that run a model get a GPU: as the settings of all its jobs say, or by its size."""
    jobs = config.resources.models.get(model.name, config.resources.every)
    stated = config.resources.every.gpus if jobs.gpus is None else jobs.gpus
    size = size_of(model)
    return bool(stated) if stated is not None else size is None or on_gpu(model, size)


def on_gpu(model: ModelConfig, size: Size) -> bool:
    """Whether a model of this size is put on a GPU, where there may be one."""
    return size.bytes >= GPU_FROM if model.device == "auto" else model.device != "cpu"


def has_gpu() -> bool:
    """Whether torch finds a GPU in this process, without importing it, which takes seconds."""
    try:
        built_for_cpu = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
    return not built_for_cpu and (bool(visible_gpus()) or Path("/dev/kfd").exists())


def visible_gpus() -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES, one per GPU this process may use; empty without the NVIDIA driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
    cards = "/proc/driver/nvidia/gpus"
    return [str(number) for number in range(len(os.listdir(cards)))] if os.path.isdir(cards) else []


def check_device(name: str) -> None:
    """Raise UserError when the CUDA device of model.device is not on this machine.

    torch takes seconds to import, so it is used only when the driver does not list the device. Device maps are not
    checked: they spread a model over whatever devices there are, the CPU included.
    """
    kind, _, number = name.partition(":")
    if kind == "cuda" and (number or "0").isdigit() and int(number or 0) >= len(visible_gpus()):
        device_here(name)


def device_here(device: str) -> str:
    """Name of the device that `model.device` selects on this machine. Raises UserError when there is none.

    Runs in another process, because torch takes seconds to import.
    """
    answer = subprocess.run(command("moe_lab.models.load", device), capture_output=True, text=True)
    if answer.returncode:
        reason = answer.stderr.strip().splitlines()[-1].partition(": ")[2]
        raise UserError(reason if reason.startswith("model.device=") else f"model.device={device}: {reason}")
    return answer.stdout.strip().splitlines()[-1]
