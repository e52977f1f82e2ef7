"""Steps from typed settings; what cells share is made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moe_lab import allocation, criteria, plugins
from moe_lab.allocation import listed
from moe_lab.calibration import settings as calibrations
from moe_lab.config import AllocationConfig, CalibrationConfig, Config, CriterionConfig, ModelConfig
from moe_lab.grid import Cell, plain
from moe_lab.models import files
from moe_lab.paths import resolve
from moe_lab.study.identity import Part, Step, digest

Made = TypeVar("Made")
PLAIN = (str, int, float)
FROM_WEIGHTS = ("weights", "channel_weights")
"""Evidence that no text is read for."""
VERSIONS = {"weight_gradients": 2}
"""Kinds of passes whose files hold other sums than they once did: with a new id, old files are not taken for them."""


def reads_text(cell: Cell) -> bool:
    """Whether the cell's criterion, or what its allocation asks besides it, needs the calibration set."""
    by = cell.allocation.by
    return (
        criteria.reads_text(cell.criterion.name)
        or not set(evidence_of(cell)) <= {"by", *FROM_WEIGHTS}
        or (by is not None and criteria.reads_text(by))
        or allocation.get(cell.allocation.name).step == "reconstruction"
    )


def evidence_of(cell: Cell) -> tuple[str, ...]:
    """What the cell's allocation reads besides the scores."""
    settings = cell.allocation
    return allocation.needs({"name": settings.name, "by": settings.by, "parameters": settings.parameters})


def allocation_identity(settings: AllocationConfig, ratio: float) -> dict[str, Any]:
    """What changes a plan, and nothing else: the settings, the ratio, and the content of the file they name."""
    found = {**plain(settings), "ratio": ratio}
    del found["label"]
    if source := allocation.get(settings.name).source:
        found["source"] = source
    if settings.path is not None:
        found["path"] = digest(listed.read(settings.path))
    return found


def _scoring(cell: Cell) -> tuple[Part, dict[str, Any]]:
    """What identifies how the cell's criterion scores, and the plugins that it runs with."""
    criterion = criteria.get(cell.criterion.name)
    settings: dict[str, Any] = {"criterion": criterion.name, "parameters": dict(cell.criterion.parameters)}
    if criterion.uses_gate:
        settings["gate"] = cell.gate
    if criterion.uses_seed:
        settings["seed"] = cell.seed
    if not criterion.source:
        return Part(settings), {}
    return Part({**settings, "source": criterion.source}), {"plugins": [plugins.place(criterion.function)]}


class Maker:
    """Makes steps; what was made for an object once is given again."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._made: dict[Hashable, Any] = {}
        self._kept: list[object] = []  # ids stay valid while the objects live

    def once(self, key: Sequence[object], make: Callable[[], Made]) -> Made:
        """What `make` makes, made once for the objects and words in `key`."""
        name = tuple([part if part.__class__ in PLAIN else id(part) for part in key])
        if name not in self._made:
            self._kept.extend(key)
            self._made[name] = make()
        found: Made = self._made[name]
        return found

    def runtime(self, **settings: object) -> dict[str, Any]:
        """What a step runs with but is not identified by: each of the settings as plain JSON."""
        return {name: self.once(("plain", part), partial(plain, part)) for name, part in settings.items()}

    def _model_part(self, model: ModelConfig) -> Part:
        def make() -> Part:
            folder = Path(resolve(model.path)).expanduser()
            what = {"sha256": files.fingerprint(model.path)} if folder.is_dir() else {"hub": model.path}
            routed = {} if model.top_k is None else {"top_k": model.top_k}
            return Part({**what, "revision": model.revision, "dtype": model.dtype, **routed})

        return self.once(("model part", model), make)

    def text_part(self, text: CalibrationConfig) -> Part:
        """What identifies a text."""
        return self.once(("text part", text), lambda: Part(calibrations.identity(text)))

    def seeded(self, text: CalibrationConfig, seed: int) -> CalibrationConfig:
        """The text in the order of the cell's seed, unless it has its own."""
        if text.seed is not None:
            return text
        return self.once(("seeded", text, seed), lambda: replace(text, seed=seed))

    def model(self, model: ModelConfig) -> Step:
        """Facts about the model's layers, experts and parameters, from its configuration."""

        def make() -> Step:
            return Step("model", model.name, {"model": self._model_part(model)}, runtime=self.runtime(model=model))

        return self.once(("model", model), make)

    def reading(self, kind: str, model: ModelConfig, calibration: CalibrationConfig, seed: int) -> Step:
        """A pass over a calibration set; `kind` says which sums it leaves."""

        def make() -> Step:
            text = self.seeded(calibration, seed)
            version = {"version": Part({"version": VERSIONS[kind]})} if kind in VERSIONS else {}
            return Step(
                kind,
                f"{model.name}-{calibration.name}",
                {"model": self._model_part(model), "calibration": self.text_part(text), **version},
                {"model": self.model(model)},
                self.runtime(model=model, calibration=text),
            )

        return self.once((kind, model, calibration, seed), make)

    def _weighing(self, kind: str, model: ModelConfig) -> Step:
        """Sums over the weights of each expert, or of each channel."""

        def make() -> Step:
            parts = {"model": self._model_part(model)}
            return Step(kind, model.name, parts, {"model": self.model(model)}, self.runtime(model=model))

        return self.once((kind, model), make)

    def evidence(self, need: str, cell: Cell) -> Step:
        """The step that leaves what a criterion or an allocation `need`s."""
        if need == "by":
            return self.scores(replace(cell, criterion=self._other_criterion(str(cell.allocation.by))))
        if need in FROM_WEIGHTS:
            return self._weighing(need, cell.model)
        return self.reading(need, cell.model, cell.calibration, cell.seed)

    def _other_criterion(self, name: str) -> CriterionConfig:
        return self.once(("criterion", name), lambda: CriterionConfig(name=name))

    def statistics(self, cell: Cell) -> Step | None:
        """The forward pass over the cell's calibration set, which tells what every expert was given; None where no
        text is read."""
        return self.evidence("statistics", cell) if reads_text(cell) else None

    def scores(self, cell: Cell) -> Step:
        """A score per expert, or per channel, and layer."""
        criterion = criteria.get(cell.criterion.name)

        def make() -> Step:
            settings, runtime = _scoring(cell)
            inputs: dict[str, Step] = {need: self.evidence(need, cell) for need in criterion.needs}
            label = f"{cell.model.name}-{cell.calibration.name}-{criterion.name}"
            return Step("scores", label, {"criterion": settings}, {"model": self.model(cell.model), **inputs}, runtime)

        return self.once(("scores", cell.model, cell.calibration, cell.criterion, cell.gate, cell.seed), make)

    def family(self, model: ModelConfig, calibration: CalibrationConfig, gate: str, seed: int) -> Step:
        """Every S(b, alpha, beta) at once, for the overlap figures."""

        def make() -> Step:
            inputs = {"statistics": self.reading("statistics", model, calibration, seed)}
            return Step("family", f"{model.name}-{calibration.name}", {"family": Part({"gate": gate})}, inputs)

        return self.once(("family", model, calibration, gate, seed), make)

    def convergence(self, model: ModelConfig, calibration: CalibrationConfig, gate: str, seed: int) -> Step:
        """Scores from more and more of the calibration set."""

        def make() -> Step:
            reading = self.reading("statistics", model, calibration, seed)
            asked = Part({"gate": gate, "snapshots": calibration.snapshots})
            inputs = {"model": self.model(model), "statistics": reading}
            return Step("convergence", reading.label, {**reading.parts, "convergence": asked}, inputs, reading.runtime)

        return self.once(("convergence", model, calibration, gate, seed), make)

    def channel_convergence(self, cell: Cell) -> Step:
        """How the channels that the cell's criterion keeps change with more and more of the calibration set."""

        def make() -> Step:
            chosen = criteria.get(cell.criterion.name)
            reading = self.reading(str(criteria.summed_over(chosen.name)), cell.model, cell.calibration, cell.seed)
            asked: dict[str, Any] = {
                "criterion": chosen.name,
                "parameters": dict(cell.criterion.parameters),
                "gate": cell.gate if chosen.uses_gate else None,
                "snapshots": cell.calibration.snapshots,
            }
            inputs: dict[str, Step] = {
                "model": self.model(cell.model),
                **{need: self.evidence(need, cell) for need in chosen.needs},
            }
            runtime = dict(reading.runtime)
            if chosen.source:
                asked["source"], runtime["plugins"] = chosen.source, [plugins.place(chosen.function)]
            label = f"{reading.label}-{chosen.name}"
            parts = {**reading.parts, "convergence": Part(asked)}
            return Step("channel_convergence", label, parts, inputs, runtime)

        key = ("channel convergence", cell.model, cell.calibration, cell.criterion, cell.gate, cell.seed)
        return self.once(key, make)

    def plan(self, cell: Cell) -> Step:
        """Which experts, and which of their channels, to keep: straight from the scores, or by a search."""
        key = ("allocation", cell.allocation, cell.ratio)
        part = self.once(key, lambda: Part(allocation_identity(cell.allocation, cell.ratio)))
        chosen = allocation.get(cell.allocation.name)
        inputs = {"model": self.model(cell.model), **{need: self.evidence(need, cell) for need in evidence_of(cell)}}
        where = "" if chosen.name == "uniform" else f"-{chosen.name}"
        label = f"{cell.model.name}-{cell.calibration.name}-{cell.criterion.name}{where}-{cell.ratio:g}"
        if chosen.step == "plan":
            runtime: dict[str, Any] = {"path": cell.allocation.path}
            if chosen.source:
                runtime["plugins"] = [plugins.place(one) for one in chosen.functions.values() if one]
            return Step("plan", label, {"allocation": part}, {"scores": self.scores(cell), **inputs}, runtime)
        if chosen.step == "sequential":
            return self._sequential(cell, label, part)
        searching = chosen.step == "search"
        text = self.seeded(cell.texts["search"] if searching else cell.calibration, cell.seed)
        seed = self.once(("seed", cell.seed), lambda: Part({"seed": cell.seed}))
        return Step(
            chosen.step,
            label,
            {"allocation": part, "text": self.text_part(text), "seed": seed},
            {"scores": self.scores(cell), **inputs} if searching else inputs,
            self.runtime(model=cell.model, text=text),
        )

    def _sequential(self, cell: Cell, label: str, allocation: Part) -> Step:
        """A plan made layer after layer; always streamed, since it never needs more than one layer."""
        criterion, plugged = _scoring(cell)
        text = replace(self.seeded(cell.calibration, cell.seed), engine="streamed")
        weights: dict[str, Step] = {
            need: self.evidence(need, cell) for need in criteria.get(cell.criterion.name).needs if need in FROM_WEIGHTS
        }
        return Step(
            "sequential",
            label,
            {"allocation": allocation, "criterion": criterion, "text": self.text_part(text)},
            {"model": self.model(cell.model), **weights},
            {**self.runtime(model=cell.model, text=text), **plugged},
        )
