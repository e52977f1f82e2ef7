"""Sums of a pass before it is done: how scores change with more of the calibration text.

Sums are additive, so the sums after the first batches are those of a smaller calibration set. Sums over channels, which
are a hundred times as large as those of whole experts, are kept in single precision: their order is all that is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.statistics.file import header, read
from moe_lab.statistics.sums import Layers, Statistics

INDEX = "snapshots.json"
"""Which snapshots a finished pass has: {"asked": how many parts, "files": [name, ...]}, the first part first."""
_OF_CHANNELS = "channel_"


def points(batches: int, parts: int) -> list[int]:
    """Batches after which to look, the end left out: `parts` parts as equal as whole batches allow, each once."""
    return sorted({-(-batches * part // parts) for part in range(1, parts)} - {0, batches})


class Snapshots:
    """Saves the sums of one pass at its points into a folder."""

    def __init__(self, folder: Path, batches: Sequence[Any], parts: int) -> None:
        self.folder = folder
        self.parts = parts
        self.points = points(len(batches), parts) if parts > 1 else []
        self.batches = batches

    def file(self, done: int) -> Path:
        """Where the sums after so many batches are."""
        return self.folder / f"snapshot-{self.points.index(done) + 1}-of-{self.parts}.safetensors"

    def save(self, layers: Layers, about: Mapping[str, Any], done: int) -> None:
        """Keep the sums after `done` batches, one of `points`."""
        named = {
            layer: {name: part.float() if _OF_CHANNELS in name else part for name, part in sums.items()}
            for layer, sums in layers.items()
        }
        seen = sum(int(valid.sum()) for _, valid in self.batches[:done])
        Statistics(named, {**about, "done": done, "valid_tokens": seen}).save(self.file(done))

    def publish(self, folder: Path) -> bool:
        """Move all snapshots into `folder` with their index; False, and nothing moved, when one is missing, as when
        the pass was begun without."""
        files = [self.file(done) for done in self.points]
        if not all(file.exists() for file in files):
            return False
        for file in files:
            file.replace(folder / file.name)
        index = {"asked": self.parts, "files": [file.name for file in files]}
        (folder / INDEX).write_text(json.dumps(index))
        return True


def taken(folder: Path, parts: int) -> list[tuple[int, dict[int, dict[str, Any]]]] | None:
    """(valid tokens, layer -> arrays) of each snapshot in `folder`, the least first; None where no pass left snapshots
    of so many parts there."""
    index = folder / INDEX
    if not index.exists() or (found := json.loads(index.read_text()))["asked"] != parts:
        return None
    return [(int(header(folder / name)["valid_tokens"]), read(folder / name)) for name in found["files"]]
