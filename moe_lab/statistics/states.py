"""Hidden states of all batches between two decoder layers, on disk and, as far as a budget goes, in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


class States:
    """(place, batch) -> a tensor. Every one is in a file, so that a pass can go on after it was killed; those that fit
    into `budget` bytes are kept in memory as well and are not read back."""

    def __init__(self, folder: Path, budget: float) -> None:
        self.folder, self.budget = folder, budget
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def put(self, place: int, batch: int, state: torch.Tensor) -> None:
        """Keep `state`, detached, on its device if there is room."""
        state = state.detach()
        file = self._file(place, batch)
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".partial")
        save_file({"state": state.cpu().contiguous()}, beside)
        beside.replace(file)
        if sum(kept.nbytes for kept in self._kept.values()) + state.nbytes <= self.budget:
            self._kept[place, batch] = state

    def get(self, place: int, batch: int, device: str) -> torch.Tensor:
        """The state as it was put, on `device`."""
        kept = self._kept.get((place, batch))
        return (load_file(self._file(place, batch))["state"] if kept is None else kept).to(device)

    def drop(self, place: int) -> None:
        """Forget all batches at a place."""
        self._kept = {key: state for key, state in self._kept.items() if key[0] != place}
        shutil.rmtree(self.folder / str(place), ignore_errors=True)

    def _file(self, place: int, batch: int) -> Path:
        return self.folder / str(place) / f"{batch}.safetensors"
