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
from moe_lab.results import ID_DIGITS
from moe_lab.study.step import Step
from moe_lab.study.store import Store

if TYPE_CHECKING:
    from moe_lab.evaluation.engines.vllm import OpenEngine, VllmModel

STATISTICS = "statistics.safetensors"
REPORT = "calibration.json"
ROLES_WITHOUT_SUMS = ("facts", "scores", "by")
"""Roles of input steps whose results are not sums."""


class Models:
    """Cache of the models in this process, so that the next step need not load a model again. The
    cache has at most one loaded model, one copy of this model that is pruned and recovered, one
    skeleton (a model without weights), and one engine of vLLM."""

    def __init__(self) -> None:
        # slots: loaded, recovered and skeleton
        self._keys: dict[str, Any] = {}
        """Slot -> settings from which the object in the slot was made."""
        self._objects: dict[str, Any] = {}
        """Slot -> object."""
        self._engine: OpenEngine | None = None

    def _cached(self, slot: str, key: Any, make: Callable[[], Any]) -> Any:
        """The object in `slot`. If the slot is empty, or was filled for another key, the result
        of `make` is put into the slot first."""
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
        if self._keys.get("loaded") != model:
            # the recovered copy shares tensors with the loaded model, which is about to be replaced
            self._free("recovered")
        pair: tuple[Any, Any] = self._cached("loaded", model, lambda: load_model(model))
        return pair

    def recover(self, model: ModelConfig, plan: Any, **changes: Any) -> Any:
        """A copy of the loaded model that is pruned by `plan` and changed by a recovery. It is only
        made if the cache does not have it. `changes`: settings of the recovery, which are arguments
        of `recovery.apply.recovered`."""
        from moe_lab.recovery.apply import recovered

        network, _ = self.load(model)
        return self._cached(
            "recovered", (model, plan, changes), lambda: recovered(network, plan, **changes)
        )

    def skeleton(self, model: ModelConfig) -> Any:
        """The model on the meta device, that is, without weights, in eval mode. Its routers select
        `model.top_k` experts if this setting is set."""
        from moe_lab.models import load
        from moe_lab.models.files import local_folder

        def make() -> Any:
            """A new skeleton, made from config.json."""
            folder = local_folder(model)
            network = load.skeleton(folder, trust_remote_code=model.trust_remote_code).eval()
            load.set_top_k(network, model.top_k)
            return network

        return self._cached("skeleton", model, make)

    def engine(
        self, checkpoint: Path, backend: BackendConfig, model: ModelConfig, plan: Any
    ) -> VllmModel:
        """An engine of vLLM that runs the checkpoint in the folder `checkpoint`, masked by `plan`
        unless `plan` is None. All cached models are dropped first, as the engine needs the memory.
        `model`: settings with which the engine loads the checkpoint, such as the dtype."""
        from moe_lab.evaluation.engines.vllm import OpenEngine

        self._keys.clear()
        self._objects.clear()
        release_memory()
        self._engine = self._engine or OpenEngine()
        return self._engine.open(checkpoint, backend, model, plan)


@dataclass(frozen=True)
class Files:
    """What the work of one step uses: folders to write to, the results of the step's inputs, and
    the models in memory."""

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
        """The `Files` of `step`. `scratch`: folder to which the step writes its result. `store`:
        has the results of the inputs, and the log and the partial results of `step`. `models`: the
        cache of this process; None for an empty cache."""
        return cls(
            out=scratch.absolute(),
            partial=store.partial(step).absolute(),
            folders={needed.id: store.path(needed).absolute() for needed in step.needs},
            log=store.log(step.folder).absolute(),
            store=store.root.absolute(),
            models=models or Models(),
        )

    def path(self, step: Step, name: str) -> Path:
        """Path of the file `name` of the input step `step`. The class of the step must have
        small=False. Files of small steps may be in a pack, a database, and then have no path."""
        return self.folders[step.id] / name

    def read(self, step: Step, name: str) -> bytes:
        """Content of the file `name` of the input step `step`. The file is in the folder of the
        step or, for a small step, in a pack: a database with the results of many steps."""
        try:
            return (self.folders[step.id] / name).read_bytes()
        except FileNotFoundError:  # the step may be moved to a pack at any time
            # in a pack, a step is found by the first digits of its id
            return packs_in(self.store).read(step.id[:ID_DIGITS], name)

    def facts(self, step: Step) -> dict[str, Any]:
        """The result of a `Facts` step. The keys of "layers" are numbers, which in JSON are
        strings."""
        content: dict[str, Any] = json.loads(self.read(step, "facts.json"))
        layers = {int(layer): facts for layer, facts in content["layers"].items()}
        return {**content, "layers": layers}

    def sums(self, steps: Mapping[str, Step]) -> dict[str, dict[int, dict[str, Any]]]:
        """Role -> layer -> name of a sum -> array: the sums that input steps have computed.
        `steps`: role -> input step. The role is the name of the input, such as "statistics". Inputs
        without sums (ROLES_WITHOUT_SUMS) are left out."""
        from moe_lab.statistics import read

        return {
            role: read(self.path(steps[role], STATISTICS))
            for role in sorted(steps)
            if role not in ROLES_WITHOUT_SUMS
        }

    def evidence(self, steps: Mapping[str, Step]) -> dict[int, dict[str, Any]]:
        """Layer -> name of a sum -> array: the result of `sums`, with the arrays of all roles in
        one dictionary for each layer. `steps`: role -> input step."""
        from moe_lab.statistics import merge_passes

        return merge_passes(self.sums(steps).values())

    def expert_scores(self, step: Step) -> dict[int, list[float]]:
        """Layer -> score of each expert of the layer, from the result of a `Scores` step."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        table = parquet.read_table(arrow.BufferReader(self.read(step, "scores.parquet")))
        scores: dict[int, list[float]] = {}
        for row in table.to_pylist():
            scores.setdefault(row["layer"], []).append(row["score"])
        return scores

    def plan(self, step: Step | None) -> Any:
        """The plan that `step` has made. None if `step` is None, which stands for the unpruned
        model."""
        from moe_lab.pruning.plan import Plan

        if step is None:
            return None
        # the files of a plan are plan.json and, if the plan has arrays, plan.npz
        return Plan.read(lambda suffix: self.read(step, f"plan{suffix}"), step.folder)

    def table(self, name: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """Write a Parquet table to the file `name` of this step's result. `columns`: names of the
        columns. `rows`: the values of each row, in the order of `columns`."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        # the values of each column; without rows, zip gives nothing, and each column is empty
        column_values = list(zip(*rows, strict=True)) or [()] * len(columns)
        parquet.write_table(
            arrow.table(dict(zip(columns, map(list, column_values), strict=True))), self.out / name
        )


def read_text(text: CalibrationConfig, tokenizer: Any, files: Files, rows: Rows = None) -> Any:
    """The batches of `text`: a list of (ids, valid), where ids are token ids (B, S), and valid
    (B, S) is False at gaps and padding. `rows`: (first row, end) of the rows whose batches are
    returned, at bounds of batches; None for all rows. Also writes the report on the whole text to
    the file REPORT of the result."""
    from moe_lab.calibration.batches import batches

    tokenised = batches(text, tokenizer)
    write_json(files.out / REPORT, tokenised.report)
    if rows is None:
        return tokenised.batches
    start, end = rows
    # indices of batches; the end is rounded up, as the last batch of the text may have fewer rows
    return tokenised.batches[start // text.batch_size : -(-end // text.batch_size)]


Rows = tuple[int, int] | None
"""(first row, end) of a share of a text, at bounds of batches; None for all rows."""


@dataclass(frozen=True)
class Resident:
    """Runs a model over a text, with the whole model in memory. `text`: batches (ids, valid).
    `out`: folder of the files from which an interrupted pass over the text resumes."""

    model: Any
    text: Any
    out: Path

    def collect_statistics(self, hook: type) -> Any:
        """The sums that hooks of class `hook` compute in a forward pass, as a `Statistics`."""
        from moe_lab.statistics.observe import collect_statistics

        return collect_statistics(self.model, hook, self.text, out=self.out)

    def collect_gradient_statistics(self, hook: type) -> Any:
        """The sums that hooks of class `hook` compute in a forward and a backward pass, as a
        `Statistics`."""
        from moe_lab.statistics.gradients import collect_gradient_statistics

        return collect_gradient_statistics(self.model, hook, self.text, out=self.out)

    def routing(self, plan: Any, pruned: Any) -> Any:
        """How many channels the text's tokens use in each MoE layer, as a `pruning.cost.Routing`.
        `plan`: the `Plan` by which the model is masked while it runs; None for no mask. `pruned`:
        the MoE layers of the pruned model, which have the widths of the experts."""
        from moe_lab.pruning.cost import measured_routing

        return measured_routing(self.model, plan, pruned, self.text)


class Streamed(Resident):
    """Runs a model over a text as `Resident` does, but with one decoder layer in memory at a
    time."""

    def collect_statistics(self, hook: type) -> Any:
        """The sums that hooks of class `hook` compute in a forward pass, as a `Statistics`."""
        from moe_lab.statistics.streaming import stream

        return stream(self.model, hook, self.text, out=self.out)

    def collect_gradient_statistics(self, hook: type) -> Any:
        """The sums that hooks of class `hook` compute in a forward and a backward pass, as a
        `Statistics`."""
        from moe_lab.statistics.streaming import stream_gradients

        return stream_gradients(self.model, hook, self.text, out=self.out)

    def routing(self, plan: Any, pruned: Any) -> Any:
        """How many channels the text's tokens use in each MoE layer, as a `pruning.cost.Routing`.
        `plan`: the `Plan` by which the model is masked while it runs; None for no mask. `pruned`:
        the MoE layers of the pruned model, which have the widths of the experts."""
        from moe_lab.pruning.cost import layered_routing

        return layered_routing(self.model, plan, pruned, self.text, out=self.out)


def text_passes(
    model: ModelConfig, text: CalibrationConfig, files: Files, rows: Rows = None
) -> Resident:
    """An object whose methods run `model` over `text`: a `Streamed` if `text.engine` is "streamed",
    otherwise a `Resident`, for which the whole model is loaded here. `rows`: (first row, end) of
    the rows that are run; None for all rows. `read_text`, called here, also writes the report on
    the whole text."""
    if text.engine != "streamed":
        network, tokenizer = files.models.load(model)
        return Resident(network, read_text(text, tokenizer, files, rows), files.partial)
    from moe_lab.models.streamed import open_streamed

    network, tokenizer = open_streamed(model)
    return Streamed(network, read_text(text, tokenizer, files, rows), files.partial)
