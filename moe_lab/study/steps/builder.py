"""`Builder`: makes and caches the parts and steps of one study; and the inputs that a cell's allocation needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moe_lab import allocation, criteria, plugins
from moe_lab.calibration import settings as calibrations
from moe_lab.config import CalibrationConfig, Config, CriterionConfig, ModelConfig
from moe_lab.grid import Cell
from moe_lab.models import files
from moe_lab.paths import resolve
from moe_lab.study.step import Part, Step
from moe_lab.study.steps.kind import KINDS, needed_kind

T = TypeVar("T")
PLAIN = (str, int, float)


def evidence_of(cell: Cell) -> tuple[str, ...]:
    """Inputs of the cell's allocation besides the scores: kinds of steps, and "by" for scores of another criterion."""
    return allocation.needs(vars(cell.allocation))


def reads_text(cell: Cell) -> bool:
    """Whether the cell's criterion, or what its allocation reads besides scores, depends on the calibration set."""
    needs = [*criteria.get(cell.criterion.name).needs, *(need for need in evidence_of(cell) if need != "by")]
    if cell.allocation.by is not None:
        needs += criteria.get(cell.allocation.by).needs
    if any(needed_kind(need).reads_text for need in needs):
        return True
    return KINDS[allocation.get(cell.allocation.name).step].reads_text


def scoring(cell: Cell) -> tuple[Part, dict[str, Any]]:
    """Settings that identify the scores of the cell's criterion, and runtime settings: its plugin, if it is in one."""
    criterion = criteria.get(cell.criterion.name)
    settings: dict[str, Any] = {"criterion": criterion.name, "parameters": dict(cell.criterion.parameters)}
    if criterion.uses_gate:
        settings["gate"] = cell.gate
    if criterion.uses_seed:
        settings["seed"] = cell.seed
    if not criterion.source:
        return Part(settings), {}
    return Part({**settings, "source": criterion.source}), {"plugins": [plugins.place(criterion.function)]}


class Builder:
    """Makes the steps of one study. Parts and steps are cached, so that cells share them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._cache: dict[Hashable, Any] = {}
        self._alive: list[object] = []  # keeps objects whose ids are keys: no id is reused

    def once(self, key: Sequence[object], make: Callable[[], T]) -> T:
        """The value of `make`, called once per `key`. Words and numbers in it count by value, objects by identity."""
        name = tuple([part if part.__class__ in PLAIN else id(part) for part in key])
        if name not in self._cache:
            self._alive.extend(key)
            self._cache[name] = make()
        value: T = self._cache[name]
        return value

    def runtime(self, **settings: Any) -> dict[str, Any]:
        """Runtime settings of a step, which are not part of its identity: each dataclass as a dictionary."""
        return {name: self.once(("plain", part), partial(asdict, part)) for name, part in settings.items()}

    def model_part(self, model: ModelConfig) -> Part:
        """What identifies a model: a hash of its files, or its name on the hub."""

        def make() -> Part:
            folder = Path(resolve(model.path)).expanduser()
            source = {"sha256": files.fingerprint(model.path)} if folder.is_dir() else {"hub": model.path}
            settings: dict[str, Any] = {**source, "revision": model.revision, "dtype": model.dtype}
            if model.top_k is not None:
                settings["top_k"] = model.top_k
            return Part(settings)

        return self.once(("model part", model), make)

    def text_part(self, text: CalibrationConfig) -> Part:
        """What identifies a text."""
        return self.once(("text part", text), lambda: Part(calibrations.identity(text)))

    def seeded(self, text: CalibrationConfig, seed: int) -> CalibrationConfig:
        """The text with the cell's seed, which determines its order, unless the text has a seed of its own."""
        if text.seed is not None:
            return text
        return self.once(("seeded", text, seed), lambda: replace(text, seed=seed))

    def model(self, model: ModelConfig) -> Step:
        """The step that reads facts about the model's layers, experts and parameters from its configuration."""

        def make() -> Step:
            return Step("model", model.name, {"model": self.model_part(model)}, runtime=self.runtime(model=model))

        return self.once(("model", model), make)

    def evidence(self, need: str, cell: Cell) -> Step:
        """The input step that `need` names: a kind of step, or "by" for scores of the criterion in allocation.by."""
        if need != "by":
            return needed_kind(need).step(self, cell)
        name = str(cell.allocation.by)
        other = self.once(("criterion", name), lambda: CriterionConfig(name=name))
        return KINDS["scores"].step(self, replace(cell, criterion=other))
