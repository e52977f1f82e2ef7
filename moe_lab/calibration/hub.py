"""Calibration sets on the Hugging Face hub: a whole split, or one file of a data set's repository.

The libraries are imported when a set is read, never before: checking a configuration must not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError

FILE_PREFIX = "hf://datasets/"
"""How a file on the hub is written: hf://datasets/OWNER/NAME/FILE. C4 is read so: its split is 300 GB, one file 0.3."""


def is_file(path: str) -> bool:
    """Whether `path` names one file of a data set on the hub."""
    return path.startswith(FILE_PREFIX)


def download(path: str) -> Path:
    """The local copy of hf://datasets/OWNER/NAME/FILE, downloaded once."""
    from huggingface_hub import hf_hub_download

    parts = path.removeprefix(FILE_PREFIX).split("/", 2)
    if len(parts) < 3:
        raise UserError(f"calibration.path={path} is incomplete: expected {FILE_PREFIX}OWNER/NAME/FILE")
    owner, name, file = parts
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise _unreachable(path, error) from error


def rows(settings: CalibrationConfig) -> Iterator[tuple[int, Any]]:
    """(number, record) for each row of a split."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        split = load_dataset(settings.path, settings.subset, split=settings.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise _unreachable(settings.path, error) from error
    yield from enumerate(split, start=1)


def _unreachable(path: str, error: Exception) -> UserError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return UserError(
        f"calibration.path={path} is no file here and could not be had from the hub ({reason}): "
        "expected a file, or a data set's id while the hub can be reached"
    )
