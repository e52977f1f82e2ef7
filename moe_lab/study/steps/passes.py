"""Steps that measure the unpruned model: facts, passes over a calibration set, and sums over
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from shutil import copyfile
from typing import Any, ClassVar, Self

from moe_lab import calibration as calibrations
from moe_lab import result_files
from moe_lab.calibration import IdentifiedText
from moe_lab.config import ModelConfig
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.grid import Cell
from moe_lab.json_files import write_json
from moe_lab.models.config_json import experts_implementation
from moe_lab.models.files import IdentifiedModel, fingerprint, local_folder
from moe_lab.statistics import (
    FUNCTIONS,
    WITH_BACKWARD,
    Statistics,
    header,
    merge,
    merge_means,
    read,
)
from moe_lab.study.resources import (
    Bytes,
    Resources,
    expert_weight_bytes,
    file_reading,
    merged_sums,
    no_bytes,
    text_pass,
)
from moe_lab.study.step import Step, StepFields
from moe_lab.study.steps import tables
from moe_lab.study.steps.files import REPORT, STATISTICS, Files, Rows, read_text, text_passes

Table = tuple[str, tuple[str, ...], Callable[[tables.Layers], list[tables.Row]]]
"""Name of a file, its columns, and the function that computes its rows from the sums of layers."""


class Facts(Step):
    """Layers, experts and parameters of a model, read from its configuration without weights, and
    the hash of its files."""

    kind = "model"
    small = True
    model: IdentifiedModel

    def label(self) -> str:
        return self.model.name

    def work(self, files: Files) -> None:
        """Write facts.json. Its "commit" on the Hugging Face hub is None for a model outside the
        hub's cache."""
        from moe_lab.models.facts import facts

        folder = local_folder(self.model)
        commit = None
        # in the hub's cache, the folder of a model is snapshots/COMMIT
        if folder.resolve().parent.name == "snapshots":
            commit = folder.resolve().name
        hashes = {"sha256": fingerprint(folder), "commit": commit}
        write_json(files.out / "facts.json", {**facts(self.model), **hashes})


@dataclass(frozen=True)
class Arithmetic:
    """Settings on which the exact bits of a model's results depend."""

    device: str
    """cpu or cuda."""
    dtype: str
    """Precision of the loaded weights; "stored" for the precision in the model's files."""
    experts: str
    """Name of the implementation of experts."""


class ModelIdentity(StepFields):
    """The model that a step will load, identified by `facts` and `arithmetic`."""

    facts: Facts
    arithmetic: Arithmetic
    model: ModelConfig
    runtime = ("model",)


class StepModel(IdentifiedModel):
    """The config of a model whose device is resolved, that is, not auto."""

    @cached_property
    def loaded_field(self) -> ModelIdentity:
        """The `ModelIdentity` that all steps which load the model share."""
        device = "cpu"
        auto_dtype = "float32"
        if self.device != "cpu":
            device = "cuda"
            auto_dtype = "stored"
        dtype = auto_dtype if self.dtype == "auto" else self.dtype
        arithmetic = Arithmetic(device, dtype, experts_implementation(self.device))
        return ModelIdentity(Facts(self), arithmetic, self)


def loaded_field(model: ModelConfig) -> ModelIdentity:
    """The `ModelIdentity` of `model`, for the field `loaded` of steps. The device in `model` must
    be resolved (not auto)."""
    return StepModel.of(model).loaded_field


def save_sums(sums: Any, tables: Iterable[Table], files: Files) -> None:
    """Write `sums`, a `Statistics`, to the file STATISTICS, and small tables for figures."""
    sums.save(files.out / STATISTICS)
    for name, columns, compute_rows in tables:
        files.table(name, columns, compute_rows(sums.layers))


@dataclass(frozen=True)
class Measurement:
    """Settings of one kind of steps that compute sums."""

    tables: tuple[Table, ...] = ()
    """Small tables for figures."""
    can_divide: bool = True
    """Whether sums of several rows can be added, so that calibration.parts divides the pass."""
    per_layer: Bytes = no_bytes
    """Function for the bytes that a layer in memory needs besides its weights."""


class Pass(Step):
    """Sums over the tokens of a calibration set, or of a share of its rows. A step with
    `merged_steps` adds the sums of these steps."""

    kinds: ClassVar[Mapping[str, Measurement]] = {
        # one forward pass: all sums, tokens per expert, and tables for figures
        "statistics": Measurement(
            tables=(
                ("experts.parquet", result_files.EXPERTS, tables.experts),
                ("layers.parquet", result_files.LOSSES, tables.losses),
                ("entropy.parquet", result_files.ENTROPIES, tables.entropies),
            ),
        ),
        # sums for each channel, of activations and of gradients of the loss
        "gradients": Measurement(
            tables=(("gradients.parquet", result_files.GRADIENTS, tables.gradients),)
        ),
        # gradients of the experts' weights, reduced to a number per channel
        "weight_gradients": Measurement(can_divide=False, per_layer=expert_weight_bytes),
        # the exact damage of removing each expert alone, when the next expert of each token
        # replaces it
        "damage": Measurement(),
        # similarity of experts, from the outputs of every expert for every token
        "similarity": Measurement(),
        # gradients of the relative error of one layer
        "layer_loss_gradients": Measurement(),
        "layer_loss_weight_gradients": Measurement(can_divide=False, per_layer=expert_weight_bytes),
        # moving averages over batches, which depend on the order of the batches
        "moving_averages": Measurement(can_divide=False),
    }
    reads_text = True
    kind: str = field()
    loaded: ModelIdentity
    text: IdentifiedText
    rows: Rows = field(default=None, kw_only=True)

    def label(self) -> str:
        rows = f"-rows{self.rows[0]}-{self.rows[1]}" if self.rows else ""
        return f"{self.loaded.model.name}-{self.text.name}{rows}"

    @classmethod
    def of(cls, cell: Cell, kind: str) -> Self:
        """The step that computes sums over the calibration set of `cell`, or merges them from parts
        of the set. `kind`: which sums, a key of `kinds`."""
        model = loaded_field(cell.model)
        text = IdentifiedText.of(cell.calibration)
        # the engine is "streamed" if one GPU does not hold the model, but a step with
        # `whole_model` cannot stream
        needs_several_gpus = cls.whole_model and text.engine == "streamed"
        shares: tuple[Self, ...] = ()
        if cls.kinds[kind].can_divide and not needs_several_gpus:
            bounds = calibrations.part_bounds(text)
            shares = tuple(cls(kind, model, text, rows=rows) for rows in bounds)
        return cls(kind, model, text, merged_steps=shares)

    def resources(self) -> Resources:
        model = self.loaded.model
        if self.merged_steps:
            return merged_sums(model, self.text)
        measurement = self.kinds[self.kind]
        return text_pass(
            model,
            self.text,
            rows=self.rows,
            engine="resident" if self.whole_model else self.text.engine,
            backward=self.kind in WITH_BACKWARD,
            per_layer=measurement.per_layer,
        )

    def work(self, files: Files) -> None:
        if self.merged_steps:
            shares = [files.path(step, STATISTICS) for step in self.merged_steps]
            # each share has the report on the whole text
            copyfile(files.path(self.merged_steps[0], REPORT), files.out / REPORT)
            # the other entries of the header of a share are about its own rows
            sums = Statistics(self.merge(shares), {"kind": header(shares[0])["kind"]})
        else:
            sums = self.collect_statistics(files)
        save_sums(sums, self.kinds[self.kind].tables, files)

    def collect_statistics(self, files: Files) -> Any:
        """The sums over the rows of this step, as a `Statistics`."""
        passes = text_passes(self.loaded.model, self.text, files, self.rows)
        hook = resolve_name(FUNCTIONS[self.kind])
        return passes.collect_statistics(hook, backward=self.kind in WITH_BACKWARD)

    def merge(self, shares: list[Path]) -> Any:
        """Layer -> name of a sum -> tensor: the totals of the sums in the files `shares`."""
        return merge(read(file, framework="pt") for file in shares)


class LossRise(Pass):
    """The rise of the model's loss when an expert is left out, or when the routed output of a layer
    is scaled. Rises are means over tokens, so those of shares are averaged."""

    kinds: ClassVar[Mapping[str, Measurement]] = {
        # the output of one expert is set to 0
        "ablation": Measurement(
            tables=(("ablation.parquet", result_files.ABLATIONS, tables.ablations),)
        ),
        # the routed output of one layer is scaled
        "scaling": Measurement(),
    }
    whole_model = True

    def resources(self) -> Resources:
        return super().resources()._replace(runs_layers=True)

    def collect_statistics(self, files: Files) -> Any:
        from moe_lab.search.ablation import loss_rises

        network, tokenizer = files.models.load(self.loaded.model)
        text = read_text(self.text, tokenizer, files, self.rows)
        return loss_rises(network, self.kind, text, out=files.partial)

    def merge(self, shares: list[Path]) -> Any:
        """Layer -> name of a mean -> tensor: means over the tokens of all files in `shares`."""
        return merge_means([Statistics.load(file) for file in shares])


class WeightSums(Step):
    """Sums over the weights of a model, read from the checkpoint without building the model."""

    kinds: ClassVar[Mapping[str, Measurement]] = {
        "weights": Measurement(
            tables=(("weights.parquet", result_files.WEIGHTS, tables.weights),),
        ),
        "channel_weights": Measurement(),
        "weight_distances": Measurement(),
    }
    kind: str = field()
    facts: Facts

    def label(self) -> str:
        return self.facts.model.name

    @classmethod
    def of(cls, cell: Cell, kind: str) -> Self:
        """The step for the weights of the model of `cell`. `kind`: which sums, a key of `kinds`."""
        return cls(kind, loaded_field(cell.model).facts)

    def resources(self) -> Resources:
        return file_reading(self.facts.model)

    def work(self, files: Files) -> None:
        model = self.facts.model
        compute_sums = resolve_name(FUNCTIONS[self.kind])
        sums = compute_sums(local_folder(model), device=device_for_sums(model))
        save_sums(sums, self.kinds[self.kind].tables, files)


def device_for_sums(model: ModelConfig) -> str:
    """The device on which sums over the weights of a checkpoint are computed."""
    import torch

    from moe_lab.models.load import resolve_device

    # Slurm jobs for these sums have no GPU
    device = resolve_device(model) if torch.cuda.is_available() else "cpu"
    return "cuda" if device in DEVICE_MAPS else device
