"""Objects that the work of steps uses: `Files`, the `Models` in memory, and passes over a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moe_lab.config import BackendConfig, CalibrationConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.json_files import write_json
from moe_lab.machine import release_memory
from moe_lab.models.files import local_folder
from moe_lab.packs import packs_in
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import merge_passes, read
from moe_lab.study.step import Step
from moe_lab.study.store import Store

if TYPE_CHECKING:
    from moe_lab.evaluation.engines.vllm import OpenEngine, VllmModel

STATISTICS = "statistics.safetensors"
REPORT = "calibration.json"
ROLES_WITHOUT_SUMS = ("facts", "scores", "by")
"""Roles of input steps whose results are not sums."""


class Models:
    """Cache of the models in this process. It has at most one loaded model, one copy of this model
    that is pruned and recovered, one skeleton (a model without weights), and one engine of vLLM."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[Any, Any]] = {}
        """loaded, recovered or skeleton -> (settings from which an object was made, object)."""
        self._engine: OpenEngine | None = None
        self.experts: str | None = None
        """Implementation of the experts of the model that was used last."""

    def _cached(self, slot: str, key: Any, make: Callable[[], Any]) -> Any:
        """The object in `slot`, made first unless the slot was filled for `key`."""
        if self._key(slot) != key:
            # before `make`, as memory may not be enough for both objects
            self._slots.pop(slot, None)
            self._slots[slot] = (key, make())
        return self._slots[slot][1]

    def _key(self, slot: str) -> Any:
        return self._slots.get(slot, (None,))[0]

    def load(self, model: ModelConfig) -> tuple[Any, Any]:
        """The loaded (model, tokenizer)."""
        from moe_lab.models.load import load_model

        if self._engine:
            # the engine and the model may each need all the memory of a device
            self._engine.close()
        if self._key("loaded") != model:
            # the recovered copy shares tensors with the loaded model, which is about to be replaced
            self._slots.pop("recovered", None)
        pair: tuple[Any, Any] = self._cached("loaded", model, lambda: load_model(model))
        self.use(pair[0])
        return pair

    def use(self, network: Any) -> None:
        """Set `experts` to the implementation of a model, or to "ragged" if it has ragged experts,
        followed by +triton if sums are Triton kernels."""
        from moe_lab.models.discover import is_ragged
        from moe_lab.models.rows import triton_kernels
        from moe_lab.models.transformers_private import experts_implementation

        has_ragged = any(map(is_ragged, network.modules()))
        self.experts = "ragged" if has_ragged else experts_implementation(network)
        if triton_kernels(network.device):
            self.experts = f"{self.experts}+triton"

    def recover(self, model: ModelConfig, plan: Any, **changes: Any) -> Any:
        """A copy of the loaded model that is pruned by `plan` and recovered. `changes`: arguments
        of `recovery.apply.recovered`."""
        from moe_lab.recovery.apply import recovered

        network, _ = self.load(model)
        copy = self._cached(
            "recovered", (model, plan, changes), lambda: recovered(network, plan, **changes)
        )
        self.use(copy)
        return copy

    def skeleton(self, model: ModelConfig) -> Any:
        """The model on the meta device, that is, without weights, in eval mode."""
        from moe_lab.models import load

        def make() -> Any:
            folder = local_folder(model)
            network = load.skeleton(folder, trust_remote_code=model.trust_remote_code).eval()
            load.set_top_k(network, model.top_k)
            return network

        return self._cached("skeleton", model, make)

    def engine(
        self, checkpoint: Path, backend: BackendConfig, model: ModelConfig, plan: Any
    ) -> VllmModel:
        """An engine of vLLM that runs `checkpoint`, masked by `plan` unless `plan` is None.
        `model`: settings with which the engine loads the checkpoint, such as the dtype."""
        from moe_lab.evaluation.engines.vllm import OpenEngine

        self._slots.clear()
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
    models: ClassVar[Models] = Models()
    """The models of this process, which all its steps share."""

    @classmethod
    def of(cls, step: Step, store: Store, scratch: Path) -> Files:
        """The `Files` of `step`. `scratch`: folder to which the step writes its result."""
        return cls(
            out=scratch.absolute(),
            partial=store.partial(step).absolute(),
            folders={needed.id: store.path(needed).absolute() for needed in step.needs},
            log=store.log(step.folder).absolute(),
            store=store.root.absolute(),
        )

    def path(self, step: Step, name: str) -> Path:
        """Path of the file `name` of the input step `step`. The class of the step must have
        small=False, as files of small steps may be in a pack."""
        return self.folders[step.id] / name

    def read(self, step: Step, name: str) -> bytes:
        """Content of the file `name` of the input step `step`, from the step's folder or from a
        pack."""
        # the step may be moved to a pack at any time
        return packs_in(self.store).read_from(self.folders[step.id], name)

    def facts(self, step: Step) -> dict[str, Any]:
        """The result of a `Facts` step. The keys of "layers" are numbers."""
        content: dict[str, Any] = json.loads(self.read(step, "facts.json"))
        layers = {int(layer): facts for layer, facts in content["layers"].items()}
        return {**content, "layers": layers}

    def sums(self, steps: Mapping[str, Step]) -> dict[str, dict[int, dict[str, Any]]]:
        """Role -> layer -> name of a sum -> array: the sums that input steps have computed.
        `steps`: role (such as "statistics") -> input step."""
        return {
            role: read(self.path(steps[role], STATISTICS))
            for role in sorted(steps)
            if role not in ROLES_WITHOUT_SUMS
        }

    def evidence(self, steps: Mapping[str, Step]) -> dict[int, dict[str, Any]]:
        """Layer -> name of a sum -> array: the result of `sums`, merged over roles."""
        return merge_passes(self.sums(steps).values())

    def expert_scores(self, step: Step) -> dict[int, list[float]]:
        """Layer -> score of each expert, from the result of a `Scores` step."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        table = parquet.read_table(arrow.BufferReader(self.read(step, "scores.parquet")))
        scores: dict[int, list[float]] = {}
        for row in table.to_pylist():
            scores.setdefault(row["layer"], []).append(row["score"])
        return scores

    def plan(self, step: Step | None) -> Any:
        """The plan that `step` has made; None for the unpruned model."""
        if step is None:
            return None
        # plan.json and, if the plan has arrays, plan.npz
        return Plan.read(lambda suffix: self.read(step, f"plan{suffix}"), step.folder)

    def table(self, name: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """Write a Parquet table to the file `name` of this step's result. `rows`: values in the
        order of `columns`."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        values = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        parquet.write_table(arrow.table(values), self.out / name)


def read_text(text: CalibrationConfig, tokenizer: Any, files: Files, rows: Rows = None) -> Any:
    """The batches of `rows` of `text`: a list of (ids, valid), where ids are token ids (B, S), and
    valid (B, S) is False at gaps and padding. Also writes the report on the whole text to the file
    REPORT."""
    from moe_lab.calibration.batches import batches

    tokenised = batches(text, tokenizer)
    write_json(files.out / REPORT, tokenised.report)
    if rows is None:
        return tokenised.batches
    start, end = rows
    # the end is rounded up, as the last batch of the text may have fewer rows
    batches_of_rows = tokenised.batches[start // text.batch_rows : -(-end // text.batch_rows)]
    if not batches_of_rows:
        count = len(tokenised.batches)
        raise UserError(
            f"calibration.parts={text.parts} is more than {text.path} has batches: expected at "
            f"most calibration.parts={count}"
        )
    return batches_of_rows


Rows = tuple[int, int] | None
"""(first row, end) of a share of a text, at bounds of batches; None for all rows."""


@dataclass(frozen=True)
class Resident:
    """Runs a model over a text, with the whole model in memory. `text`: batches (ids, valid).
    `out`: folder of the files from which an interrupted pass over the text resumes."""

    model: Any
    text: Any
    out: Path

    def collect_statistics(self, hook: type, *, backward: bool = False, plan: Any = None) -> Any:
        """The sums that hooks of class `hook` compute in a forward pass and, with `backward`, a
        backward pass, as a `Statistics`. `plan`: the `Plan` by which the model is masked in a
        forward pass; None for no mask."""
        if backward:
            from moe_lab.statistics.gradients import collect_gradient_statistics

            return collect_gradient_statistics(self.model, hook, self.text, out=self.out)
        from moe_lab.pruning.mask import mask
        from moe_lab.statistics.observe import collect_statistics

        context = mask(self.model, plan)
        return collect_statistics(self.model, hook, self.text, out=self.out, context=context)


class Streamed(Resident):
    """Runs a model over a text as `Resident` does, but with one decoder layer in memory at a
    time."""

    def collect_statistics(self, hook: type, *, backward: bool = False, plan: Any = None) -> Any:
        from moe_lab.pruning.mask import mask_layers
        from moe_lab.statistics.streaming import stream, stream_gradients

        if backward:
            return stream_gradients(self.model, hook, self.text, out=self.out)

        def masked(layer: Any) -> Any:
            return mask_layers([layer] if plan else [], plan)

        return stream(self.model, hook, self.text, out=self.out, layer_context=masked)


def text_passes(
    model: ModelConfig, text: CalibrationConfig, files: Files, rows: Rows = None
) -> Resident:
    """An object whose methods run `model` over `rows` of `text`. Also writes the report of
    `read_text`."""
    if text.engine != "streamed":
        network, tokenizer = files.models.load(model)
        return Resident(network, read_text(text, tokenizer, files, rows), files.partial)
    from moe_lab.models.streamed import open_streamed

    network, tokenizer = open_streamed(model)
    files.models.use(network.model)
    return Streamed(network, read_text(text, tokenizer, files, rows), files.partial)
