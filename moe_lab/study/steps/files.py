"""Objects that the work of steps uses: `Files`, the `Models` in memory, and passes over a text.

Passes have the same methods with the whole model in memory (`Resident`) and with one decoder layer
at a time (`Streamed`).
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
ROLES_WITHOUT_SUMS = ("facts", "scores", "by")
"""Roles of input steps whose results are not sums."""


class Models:
    """Cache of the models of a process, so that the next step need not load the same model again.
    The cache has at most one loaded model, one recovered copy, one skeleton and one engine."""

    def __init__(self) -> None:
        # slots: loaded, recovered and skeleton
        self._keys: dict[str, Any] = {}
        """Slot -> what the object in the slot was made from."""
        self._objects: dict[str, Any] = {}
        """Slot -> object."""
        self._engine: OpenEngine | None = None

    def _cached(self, slot: str, key: Any, make: Callable[[], Any]) -> Any:
        """The object in `slot` if it was made for an equal `key`. Otherwise, the result of `make`
        replaces it and is returned."""
        if self._keys.get(slot) != key:
            self._free(slot)  # before `make`, as memory may not be enough for both objects
            self._objects[slot] = make()
            self._keys[slot] = key
        return self._objects[slot]

    def _free(self, slot: str) -> None:
        """Drop the object in a slot, if any."""
        self._keys.pop(slot, None)
        self._objects.pop(slot, None)

    def load(self, model: ModelConfig) -> tuple[Any, Any]:
        """Load a model, unless it is in the cache, and return (model, tokenizer). An open engine is
        closed first, as the engine and the model may each need all the memory of a device."""
        from moe_lab.models.load import load_model

        if self._engine:
            self._engine.close()
        if self._keys.get("loaded", model) != model:
            self._free("recovered")  # a copy of the model that is about to be replaced
        pair: tuple[Any, Any] = self._cached("loaded", model, lambda: load_model(model))
        return pair

    def recover(self, model: ModelConfig, plan: Any, **changes: Any) -> Any:
        """Copy the loaded model with the changes of a plan and a recovery, unless the copy is in
        the cache, and return the copy. `changes`: arguments of `recovery.apply.recovered`."""
        from moe_lab.recovery.apply import recovered

        network, _ = self.load(model)
        return self._cached(
            "recovered", (model, plan, changes), lambda: recovered(network, plan, **changes)
        )

    def skeleton(self, model: ModelConfig) -> Any:
        """The model on the meta device, without weights, in eval mode and with the top_k of its
        config."""
        from moe_lab.models import load
        from moe_lab.models.files import local_folder

        def make() -> Any:
            """The model, newly made from its config.json."""
            folder = local_folder(model)
            network = load.skeleton(folder, trust_remote_code=model.trust_remote_code).eval()
            load.set_top_k(network, model.top_k)
            return network

        return self._cached("skeleton", model, make)

    def engine(
        self, checkpoint: Path, backend: BackendConfig, model: ModelConfig, plan: Any
    ) -> VllmModel:
        """An engine of vLLM with the model in `checkpoint`, masked by `plan` unless `plan` is None.
        All models of the cache are freed first."""
        from moe_lab.evaluation.engines.vllm import OpenEngine

        self._keys.clear()
        self._objects.clear()
        release_memory()
        self._engine = self._engine or OpenEngine()
        return self._engine.open(checkpoint, backend, model, plan)


@dataclass(frozen=True)
class Files:
    """Paths for the work of one step, its inputs, and the models in memory."""

    out: Path
    """Folder of the result."""
    partial: Path
    """Folder of files from which an interrupted step resumes."""
    folders: Mapping[str, Path]
    """Id of an input step -> folder of its result."""
    log: Path
    """File for the output of the step in a worker process."""
    store: Path
    """Folder of the store."""
    models: Models = field(default_factory=Models, compare=False)
    """Models that earlier steps of this process have loaded."""

    @classmethod
    def of(cls, step: Step, store: Store, scratch: Path, models: Models | None = None) -> Files:
        """The files of a step that writes its result to the folder `scratch`, and whose inputs, log
        and partial results are in `store`. `models`: the cache of this process; None for an empty
        cache."""
        folders = {needed.id: store.path(needed).absolute() for needed in step.needs}
        log = store.log(step.folder).absolute()
        partial = store.partial(step).absolute()
        root = store.root.absolute()
        return cls(scratch.absolute(), partial, folders, log, root, models or Models())

    def path(self, step: Step, name: str) -> Path:
        """Path of a file of a finished step. The step must not be `small`, since results of small
        steps may move to a pack."""
        return self.folders[step.id] / name

    def read(self, step: Step, name: str) -> bytes:
        """Content of a file of a finished step, read from the step's folder or from a pack, to
        which the result may move at any time."""
        try:
            return (self.folders[step.id] / name).read_bytes()
        except FileNotFoundError:
            # packs name a result by the first digits of its id
            return packs_in(self.store).read(step.id[:DIGITS], name)

    def facts(self, step: Step) -> dict[str, Any]:
        """The result of a `Facts` step, with layer numbers as int instead of JSON's strings."""
        content: dict[str, Any] = json.loads(self.read(step, "facts.json"))
        layers = {int(layer): facts for layer, facts in content["layers"].items()}
        return {**content, "layers": layers}

    def sums(self, steps: Mapping[str, Step]) -> dict[str, dict[int, dict[str, Any]]]:
        """Role -> layer -> name -> array: the sums of the steps, except for the roles in
        ROLES_WITHOUT_SUMS. `steps`: role -> input step."""
        from moe_lab.statistics import read

        return {
            role: read(self.path(steps[role], STATISTICS))
            for role in sorted(steps)
            if role not in ROLES_WITHOUT_SUMS
        }

    def evidence(self, steps: Mapping[str, Step]) -> dict[int, dict[str, Any]]:
        """Layer -> name -> array: the sums of all steps, merged. `steps`: role -> input step."""
        from moe_lab.statistics import merge_passes

        return merge_passes(self.sums(steps).values())

    def expert_scores(self, step: Step) -> dict[int, list[float]]:
        """Layer -> scores of its experts, from the result of a `Scores` step."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        table = parquet.read_table(arrow.BufferReader(self.read(step, "scores.parquet")))
        scores: dict[int, list[float]] = {}
        for row in table.to_pylist():
            scores.setdefault(row["layer"], []).append(row["score"])
        return scores

    def plan(self, step: Step | None) -> Any:
        """The plan that `step` has made. None if `step` is None, as for the unpruned model."""
        from moe_lab.pruning.plan import Plan

        if step is None:
            return None
        return Plan.read(lambda suffix: self.read(step, f"plan{suffix}"), step.folder)

    def table(self, name: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """Write `rows` as a Parquet table to the file `name` of the result. `columns`: names of the
        values of a row."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        # a table without rows still has all columns
        values = list(zip(*rows, strict=True)) or [()] * len(columns)
        parquet.write_table(
            arrow.table(dict(zip(columns, map(list, values), strict=True))), self.out / name
        )


def read_text(text: CalibrationConfig, tokenizer: Any, files: Files, rows: Rows = None) -> Any:
    """The batches (ids, valid) of `text`, or only those of the share `rows` of its rows. Also
    writes the report, which is on the whole text."""
    from moe_lab.calibration.batches import batches

    tokenised = batches(text, tokenizer)
    write_json(files.out / REPORT, tokenised.report)
    if rows is None:
        return tokenised.rows
    start, end = rows
    # from rows to batches; the end is rounded up, as the last batch may be shorter
    return tokenised.rows[start // text.batch_size : -(-end // text.batch_size)]


Rows = tuple[int, int] | None
"""(first row, end) of a share of a text, at bounds of batches; None for all rows."""


@dataclass(frozen=True)
class Resident:
    """Passes of a model over a text, with the whole model in memory. `text`: batches (ids, valid).
    `out`: folder of the files from which an interrupted pass resumes."""

    model: Any
    text: Any
    out: Path

    def gather(self, hook: type) -> Any:
        """The sums that hooks of class `hook` compute in a forward pass."""
        from moe_lab.statistics.observe import gather

        return gather(self.model, hook, self.text, out=self.out)

    def gather_gradients(self, hook: type) -> Any:
        """The sums that hooks of class `hook` compute in a forward and a backward pass."""
        from moe_lab.statistics.gradients import gather_gradients

        return gather_gradients(self.model, hook, self.text, out=self.out)

    def routing(self, plan: Any, pruned: Any) -> Any:
        """The routing of the text's tokens under a plan, measured in a pass. `pruned`: the layers
        of the pruned model."""
        from moe_lab.pruning.cost import measured_routing

        return measured_routing(self.model, plan, pruned, self.text)


class Streamed(Resident):
    """The same passes with one decoder layer in memory at a time."""

    def gather(self, hook: type) -> Any:
        """The sums of a forward pass, as in `Resident`."""
        from moe_lab.statistics.streaming import stream

        return stream(self.model, hook, self.text, out=self.out)

    def gather_gradients(self, hook: type) -> Any:
        """The sums of a forward and a backward pass, as in `Resident`."""
        from moe_lab.statistics.streaming import stream_back

        return stream_back(self.model, hook, self.text, out=self.out)

    def routing(self, plan: Any, pruned: Any) -> Any:
        """The routing of the text's tokens under a plan, as in `Resident`."""
        from moe_lab.pruning.cost import layered_routing

        return layered_routing(self.model, plan, pruned, self.text, out=self.out)


def engine(
    model: ModelConfig, text: CalibrationConfig, files: Files, rows: Rows = None
) -> Resident:
    """The object whose methods run `model` over `text`, or over the share `rows` of its rows. It is
    a `Streamed` if `text.engine` is streamed. Otherwise it is a `Resident`, for which the whole
    model is loaded. Also writes the report on the text."""
    if text.engine != "streamed":
        network, tokenizer = files.models.load(model)
        return Resident(network, read_text(text, tokenizer, files, rows), files.partial)
    from moe_lab.models.streamed import open_streamed

    network, tokenizer = open_streamed(model)
    return Streamed(network, read_text(text, tokenizer, files, rows), files.partial)
