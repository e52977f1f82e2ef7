"""The choices of configuration groups as Hydra has them, read without Hydra: files, and criteria,
which need none."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from moe_lab import grid
from moe_lab.config import Config
from moe_lab.config.base import validated
from moe_lab.criteria import CRITERIA

CONF = Path(__file__).parents[1] / "conf"
OWN = {
    "model": {"name": "m", "path": "p"},
    "criterion": {"name": "man"},
    "calibration": {"name": "c", "path": "p"},
    "allocation": {"name": "uniform"},
    "recovery": {"name": "none"},
    "protocol": {"name": "unified"},
}
"""Axis -> the configuration's own choice in these tests."""


class Files:
    """The groups in a folder; `reads` counts how often each file is read."""

    def __init__(self, folder: Path = CONF) -> None:
        self.folder = folder
        self.reads: list[str] = []
        self._read: dict[grid.Choice, dict[str, Any]] = {}

    def names(self, group: str) -> list[str]:
        shipped = CRITERIA if group == "criterion" and self.folder == CONF else ()
        return sorted({file.stem for file in (self.folder / group).glob("*.yaml")} | set(shipped))

    def load(self, choices: Iterable[grid.Choice]) -> dict[grid.Choice, dict[str, Any]]:
        choices = list(choices)
        for group, name in choices:
            if (group, name) not in self._read:
                self.reads.append(f"{group}/{name}")
                self._read[group, name] = content(group, name, self.folder)
        return {choice: self._read[choice] for choice in choices}


def content(group: str, name: str, folder: Path = CONF) -> dict[str, Any]:
    """The content of a file of a group, without values that a user must give."""
    file = folder / group / f"{name}.yaml"
    settings: Any = (
        OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {"name": name}
    )
    return {key: value for key, value in settings.items() if value != "???"}


def choose(kind: Any, group: str, name: str) -> Any:
    """A file of conf/ as an object."""
    return validated(kind, content(group, name), group)


def cells(
    config: Config | None = None,
    lists: Mapping[str, Any] | None = None,
    *more: Mapping[str, Any],
    files: grid.Files | None = None,
    settings: Sequence[tuple[str, Any]] = (),
    typed: Mapping[str, Sequence[Any]] | None = None,
    **choices: Any,
) -> list[grid.Cell]:
    """The cells of a study in one list; `own`: the configuration's own choices."""
    files = files or Files()
    draft = grid.Draft({**OWN, **choices}, {}, typed or {}, settings, [lists or {}, *more])
    grid_cells = grid.requests(config or Config(), grid.points(draft, files), files)
    return [cell for part, _ in grid_cells for cell in part]
