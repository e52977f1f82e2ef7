"""The choices of configuration groups, read without Hydra: the files of a group, and criteria,
which need no file."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from moe_lab import grid
from moe_lab.config import Config
from moe_lab.config.base import validated
from moe_lab.criteria import CRITERIA

CONF = Path(__file__).parents[1] / "conf"
COMPOSED_CHOICES = {
    "model": {"name": "m", "path": "p"},
    "criterion": {"name": "man"},
    "calibration": {"name": "c", "path": "p"},
    "allocation": {"name": "uniform"},
    "recovery": {"name": "none"},
    "protocol": {"name": "unified"},
}
"""Axis -> its content in the composed configuration of these tests."""


class Files:
    """The groups in a folder; `reads` lists every reading of a file, as `group/name`."""

    def __init__(self, folder: Path = CONF) -> None:
        self.folder = folder
        self.reads: list[str] = []
        self._contents: dict[grid.Choice, dict[str, Any]] = {}

    def names(self, group: str) -> list[str]:
        criteria = CRITERIA if group == "criterion" and self.folder == CONF else ()
        return sorted({file.stem for file in (self.folder / group).glob("*.yaml")} | set(criteria))

    def load(self, choices: Iterable[grid.Choice]) -> dict[grid.Choice, dict[str, Any]]:
        choices = list(choices)
        for group, name in choices:
            if (group, name) not in self._contents:
                self.reads.append(f"{group}/{name}")
                self._contents[group, name] = content(group, name, self.folder)
        return {choice: self._contents[choice] for choice in choices}


def content(group: str, name: str, folder: Path = CONF) -> dict[str, Any]:
    """The content of a file of a group, without values that a user must give."""
    file = folder / group / f"{name}.yaml"
    settings: Any = (
        OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {"name": name}
    )
    return {key: value for key, value in settings.items() if value != "???"}


def read_choice(kind: Any, group: str, name: str) -> Any:
    """Read a file of a group in conf/ as an object of the class `kind`."""
    return validated(kind, content(group, name), group)


def cells(
    config: Config | None = None,
    lists: Mapping[str, Any] | None = None,
    *further_lists: Mapping[str, Any],
    files: grid.Files | None = None,
    overrides: Sequence[tuple[str, Any]] = (),
    command_lists: Mapping[str, Sequence[Any]] | None = None,
    **composed: Any,
) -> list[grid.Cell]:
    """The cells of a study in one list.

    lists, further_lists, overrides, command_lists, composed: see `grid.Draft`; COMPOSED_CHOICES are
    the defaults of `composed`."""
    files = files or Files()
    draft = grid.Draft(
        {**COMPOSED_CHOICES, **composed},
        {},
        command_lists or {},
        overrides,
        [lists or {}, *further_lists],
    )
    grid_cells = grid.requests(config or Config(), grid.product_cells(draft, files), files)
    return [cell for part, _ in grid_cells for cell in part]
