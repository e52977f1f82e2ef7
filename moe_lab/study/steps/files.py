"""What the work of a step needs: `Files`, the `Models` in memory, and passes over a text.

Passes have the whole model in memory (`Resident`) or one decoder layer at a time (`Streamed`), with
the same methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lab.config import BackendConfig, CalibrationConfig, ModelConfig
from moe_lab.json_files import write_json
from moe_lab.machine import release_memory
from moe_lab.packs import packs_in
from moe_lab.results import DIGITS
from moe_lab.study.step import Step
from moe_lab.study.store import Store

if TYPE_CHECKING:
    from moe_lab.evaluation.engines.vllm import OpenEngine, VllmModel

STATISTICS = "statistics.safetensors"
REPORT = "calibration.json"
NO_SUMS = ("facts", "scores", "by")
"""Roles of inputs that hold no sums."""


class Models:
    """The models that a process holds, at most one of each sort: loaded, recovered, without
    weights, and in an engine. Steps get them with their files, and the next step with the same
    model takes what is there."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Any]] = {}
        self._engine: OpenEngine | None = None

    def _hold(self, sort: str, key: Any, make: Callable[[], Any]) -> Any:
        """The object of a sort, which is made if another one, or none, is held."""
        if sort not in self._held or self._held[sort][0] != key:
            self._held.pop(sort, None)  # before the next one, as memory may not be enough for both
            self._held[sort] = (key, make())
        return self._held[sort][1]

    def loaded(self, model: ModelConfig) -> tuple[Any, Any]:
        """The model and its tokenizer. An engine is ended, as both may need all the memory of a
        device."""
        from moe_lab.models.load import load_model

        if self._engine:
            self._engine.close()
        if self._held.get("loaded", (model,))[0] != model:
            self._held.pop("recovered", None)
        pair: tuple[Any, Any] = self._hold("loaded", model, lambda: load_model(model))
        return pair

    def recovered(self, model: ModelConfig, plan: Any, **changes: Any) -> Any:
        """A copy of the loaded model under a plan, with the changes of a recovery: arguments of
        `recovery.apply.recovered`."""
        from moe_lab.recovery.apply import recovered

        network, _ = self.loaded(model)
        return self._hold(
            "recovered", (model, plan, changes), lambda: recovered(network, plan, **changes)
        )

    def skeleton(self, model: ModelConfig) -> Any:
        """The model on the meta device, without weights."""
        from moe_lab.models import load
        from moe_lab.models.files import local_folder

        def make() -> Any:
            folder = local_folder(model)
            network = load.skeleton(folder, trust_remote_code=model.trust_remote_code).eval()
            load.set_top_k(network, model.top_k)
            return network

        return self._hold("skeleton", model, make)

    def engine(
        self, checkpoint: Path, backend: BackendConfig, model: ModelConfig, plan: Any
    ) -> VllmModel:
        """The model in `checkpoint` in vLLM, with `plan` as its mask. Loaded models are freed."""
        from moe_lab.evaluation.engines.vllm import OpenEngine

        self._held.clear()
        release_memory()
        self._engine = self._engine or OpenEngine()
        return self._engine.open(checkpoint, backend, model, plan)


@dataclass(frozen=True)
class Files:
    """Where a step writes its result and what it resumes from, and the folders of the finished
    steps it reads."""

    out: Path
    partial: Path
    folders: Mapping[str, Path]
    """Id of a finished step -> its folder."""
    log: Path
    """Where a worker keeps what is printed meanwhile."""
    store: Path
    models: Models = field(default_factory=Models, compare=False)
    """Models that earlier steps of this process have left in memory."""

    @classmethod
    def of(cls, step: Step, store: Store, scratch: Path, models: Models | None = None) -> Files:
        """Those of a step that fills `scratch`. `models`: those of this process."""
        folders = {needed.id: store.path(needed).absolute() for needed in step.needs}
        log = store.log(step.folder).absolute()
        partial = store.partial(step).absolute()
        root = store.root.absolute()
        return cls(scratch.absolute(), partial, folders, log, root, models or Models())

    def path(self, step: Step, name: str) -> Path:
        """A file of a finished step that is not `small`."""
        return self.folders[step.id] / name

    def read(self, step: Step, name: str) -> bytes:
        """The content of a file of a finished step, which may be put into a pack at any time."""
        try:
            return (self.folders[step.id] / name).read_bytes()
        except FileNotFoundError:
            return packs_in(self.store).read(step.id[:DIGITS], name)

    def facts(self, step: Step) -> dict[str, Any]:
        """Facts about a model that its step wrote: layers by number, parameters."""
        content: dict[str, Any] = json.loads(self.read(step, "facts.json"))
        return {
            **content,
            "layers": {int(layer): about for layer, about in content["layers"].items()},
        }

    def sums(self, steps: Mapping[str, Step]) -> dict[str, dict[int, dict[str, Any]]]:
        """Role -> layer -> arrays by name, of the steps that hold sums."""
        from moe_lab.statistics import read

        return {
            role: read(self.path(steps[role], STATISTICS))
            for role in sorted(steps)
            if role not in NO_SUMS
        }

    def evidence(self, steps: Mapping[str, Step]) -> dict[int, dict[str, Any]]:
        """Layer -> the arrays of all sums of the steps, by name."""
        from moe_lab.statistics import merge_passes

        return merge_passes(self.sums(steps).values())

    def expert_scores(self, step: Step) -> dict[int, list[float]]:
        """Layer -> a score per expert."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        table = parquet.read_table(arrow.BufferReader(self.read(step, "scores.parquet")))
        scores: dict[int, list[float]] = {}
        for row in table.to_pylist():
            scores.setdefault(row["layer"], []).append(row["score"])
        return scores

    def plan(self, step: Step | None) -> Any:
        """The plan that a step made; None for the unpruned model."""
        from moe_lab.pruning.plan import Plan

        return (
            Plan.read(lambda ending: self.read(step, f"plan{ending}"), step.folder)
            if step
            else None
        )

    def table(self, name: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """Write rows as a Parquet table of the result."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        values = list(zip(*rows, strict=True)) or [()] * len(columns)
        parquet.write_table(
            arrow.table(dict(zip(columns, map(list, values), strict=True))), self.out / name
        )


def read_text(text: CalibrationConfig, tokenizer: Any, files: Files, rows: Rows = None) -> Any:
    """Batches (ids, valid) of a text, or of some of its rows: of the first up to the end, which are
    whole batches.

    Also writes the report on the whole text.
    """
    from moe_lab.calibration.batches import batches

    read = batches(text, tokenizer)
    write_json(files.out / REPORT, read.report)
    return (
        read.rows[rows[0] // text.batch_size : -(-rows[1] // text.batch_size)]
        if rows
        else read.rows
    )


Rows = tuple[int, int] | None
"""The first row of a share of a text, and its end; None for all rows."""


@dataclass(frozen=True)
class Resident:
    """Passes of a model over a text, with the whole model in memory. Interrupted ones are resumed
    from the folder `out`."""

    model: Any
    text: Any
    out: Path

    def read(self, hook: type) -> Any:
        """Sums that `hook` gathers in a forward pass."""
        from moe_lab.statistics.observe import gather

        return gather(self.model, hook, self.text, out=self.out)

    def read_back(self, hook: type) -> Any:
        """Sums that `hook` gathers in a forward and a backward pass."""
        from moe_lab.statistics.gradients import gather_gradients

        return gather_gradients(self.model, hook, self.text, out=self.out)

    def routing(self, plan: Any, pruned: Any) -> Any:
        """The measured routing of the text under a plan. `pruned`: the layers that the plan makes
        of those it finds."""
        from moe_lab.pruning.cost import measured_routing

        return measured_routing(self.model, plan, pruned, self.text)


class Streamed(Resident):
    """The same passes with one decoder layer in memory at a time."""

    def read(self, hook: type) -> Any:
        from moe_lab.statistics.streaming import stream

        return stream(self.model, hook, self.text, out=self.out)

    def read_back(self, hook: type) -> Any:
        from moe_lab.statistics.streaming import stream_back

        return stream_back(self.model, hook, self.text, out=self.out)

    def routing(self, plan: Any, pruned: Any) -> Any:
        from moe_lab.pruning.cost import layered_routing

        return layered_routing(self.model, plan, pruned, self.text, out=self.out)


def engine(
    model: ModelConfig, text: CalibrationConfig, files: Files, rows: Rows = None
) -> Resident:
    """Open a model and a text for passes, as calibration.engine says."""
    if text.engine != "streamed":
        network, tokenizer = files.models.loaded(model)
        return Resident(network, read_text(text, tokenizer, files, rows), files.partial)
    from moe_lab.models.streamed import open_streamed

    network, tokenizer = open_streamed(model)
    return Streamed(network, read_text(text, tokenizer, files, rows), files.partial)
