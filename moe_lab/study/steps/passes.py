"""Steps that measure the model: its facts, passes over a calibration set, and sums over its
weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from shutil import copyfile
from typing import Any, ClassVar, Self

from moe_lab import calibration as calibrations
from moe_lab import results
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.grid import Cell
from moe_lab.json_files import write_json
from moe_lab.models.config_json import ROOM, Size, experts_implementation
from moe_lab.study.step import BASE, Parts, Step, once
from moe_lab.study.steps import tables
from moe_lab.study.steps.files import REPORT, STATISTICS, Files, Rows, engine, loaded, read_text

CHANNEL_SUMS = 7
"""Sums of each channel that a pass gathers, at most."""
Table = tuple[str, tuple[str, ...], Callable[[tables.Layers], list[tables.Row]]]
"""Name of a file, its columns, and the function that makes its rows from sums of layers."""


class Facts(Step):
    """Layers, experts and parameters of a model, from its configuration alone, and a hash of its
    files."""

    kind = "model"
    small = True
    per_job = "steps"
    model: ModelConfig

    def label(self) -> str:
        return self.model.name

    def work(self, files: Files) -> None:
        from moe_lab.models.facts import facts
        from moe_lab.models.files import fingerprint, local_folder

        folder = local_folder(self.model)
        # of the hub's cache
        commit = folder.resolve().name if folder.resolve().parent.name == "snapshots" else None
        about = {**facts(self.model), "sha256": fingerprint(folder), "commit": commit}
        write_json(files.out / "facts.json", about)


@dataclass(frozen=True)
class Arithmetic:
    """How a model's numbers are computed, where that changes bits."""

    device: str
    """cpu or cuda."""
    dtype: str
    """Precision of the loaded weights; "stored" for that of the files."""
    experts: str
    """The implementation of experts."""


class Loaded(Parts):
    """A model as it is loaded. Which one it is the step with its facts identifies."""

    facts: Facts
    arithmetic: Arithmetic
    model: ModelConfig
    runtime = frozenset({"model"})


@once
def loaded_as(model: ModelConfig) -> Loaded:
    """The model, whose device is resolved, as steps load it."""
    device, usual = ("cpu", "float32") if model.device == "cpu" else ("cuda", "stored")
    dtype = usual if model.dtype == "auto" else model.dtype
    return Loaded(
        Facts(model), Arithmetic(device, dtype, experts_implementation(model.device)), model
    )


class OnText(Step):
    """A step that runs a model over a text."""

    loads = "model"
    backward: ClassVar[bool] = False
    """Whether gradients come back through the layers."""

    loaded: Loaded
    text: CalibrationConfig
    rows: Rows = field(default=None, kw_only=True)
    """The first row of a share of the text, and its end; None for all rows."""

    @property
    def about(self) -> ModelConfig:
        return self.loaded.model

    @property
    def is_layered(self) -> bool:
        return self.streams and self.text.engine == "streamed" and not self.merges

    def memory(self, size: Size) -> float:
        if self.merges:
            sums = 8.0 * size.moe_layers * size.experts * (CHANNEL_SUMS * size.width + size.hidden)
            return BASE + 3 * sums  # two sets in memory, and the file that is written
        if self.is_layered:
            held = (
                BASE
                + size.layer_weights()
                + self.layer_memory(size)
                + self._batch_tokens * size.activations()
            )
            # hidden states take at most half of the main memory, and are written beyond that
            return held + (
                min(held, self.disk(size)) if self.loaded.arithmetic.device == "cpu" else 0.0
            )
        held = ROOM * size.bytes * self.models + size.moe_layers * self.layer_memory(size)
        return BASE + held + self.batch_memory(size)

    @property
    def models(self) -> int:
        """How many copies of the weights are held."""
        return 1

    def engine(self, files: Files) -> Any:
        """The model and the text, opened for passes; see `files.engine`."""
        return engine(self.loaded.model, self.text, files, self.rows)

    def layer_memory(self, size: Size) -> float:
        """Bytes held for every layer whose weights are in memory, in addition to the weights."""
        return 0.0

    def batch_memory(self, size: Size) -> float:
        """Bytes of a batch with the whole model loaded: its logits, and the activations that the
        pass keeps."""
        layers = size.moe_layers if self.backward else 1
        return self._batch_tokens * (size.logits + size.activations(layers))

    @property
    def _tokens(self) -> int:
        """Tokens of the text, or of its rows: of the first up to the end."""
        return (self.rows[1] - self.rows[0]) * self.text.length if self.rows else self.text.tokens

    @property
    def _batch_tokens(self) -> int:
        return min(self.text.batch_size * self.text.length, self._tokens)

    def disk(self, size: Size) -> float:
        if not self.is_layered:
            return 0.0
        return size.hidden_states(self._tokens, backward=self.backward)

    def units(self) -> float:
        return float(self._tokens)

    def pace(self) -> list[Any]:
        return [self.loaded.facts.id, self.loaded.model.device]


class LeavesSums(Step):
    """A step that leaves sums for each layer, and small tables that figures need of them."""

    figures: ClassVar[tuple[Table, ...]] = ()
    """The tables."""

    def sums(self, files: Files) -> Any:
        """The sums."""
        raise NotImplementedError

    def work(self, files: Files) -> None:
        sums = self.sums(files)
        sums.save(files.out / STATISTICS)
        for name, columns, rows in self.figures:
            files.table(name, columns, rows(sums.layers))


class Pass(LeavesSums, OnText):
    """A pass over the calibration set."""

    reads_text = True
    streams = True
    hook: ClassVar[str] = ""
    """Module and name of the hook that gathers the sums."""
    divides: ClassVar[bool] = True
    """Whether sums over rows can be added up, so that calibration.parts divides the pass into
    steps."""

    def label(self) -> str:
        rows = f"-rows{self.rows[0]}-{self.rows[1]}" if self.rows else ""
        return f"{self.loaded.model.name}-{self.text.name}{rows}"

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The pass over the calibration set of a cell."""
        model = loaded_as(cell.model)
        text = cell.calibration
        whole = text.engine == "streamed" and not cls.streams  # on several GPUs already
        shares = calibrations.shares(text) if cls.divides and not whole else []
        return cls(model, text, merges=tuple(cls(model, text, rows=rows) for rows in shares))

    def sums(self, files: Files) -> Any:
        from moe_lab.statistics import Statistics, header

        if not self.merges:
            return self.gather(files)
        shares = [files.path(step, STATISTICS) for step in self.merges]
        # each share has the report on the whole text
        copyfile(files.path(self.merges[0], REPORT), files.out / REPORT)
        return Statistics(self.merge(shares), {"kind": header(shares[0])["kind"]})

    def gather(self, files: Files) -> Any:
        """The sums of this pass."""
        passes = self.engine(files)
        return (passes.read_back if self.backward else passes.read)(resolve_name(self.hook))

    def merge(self, shares: list[Path]) -> Any:
        """The sums of the shares in these files together: layer -> name -> tensor."""
        from moe_lab.statistics import merged, read

        return merged(read(file, framework="pt") for file in shares)


class StatisticsPass(Pass):
    """One forward pass over the calibration set: all sums, tokens per expert, and tables for
    figures."""

    kind = "statistics"
    hook = "moe_lab.statistics.forward:ForwardHook"
    figures = (
        ("coverage.parquet", results.COVERAGE, tables.coverage),
        ("experts.parquet", results.EXPERTS, tables.experts),
        ("layers.parquet", results.LOSSES, tables.losses),
        ("entropy.parquet", results.ENTROPIES, tables.entropies),
    )


class Gradients(Pass):
    """A forward and a backward pass: sums for each channel, of activations and of the loss's
    gradients."""

    kind = "gradients"
    backward = True
    hook = "moe_lab.statistics.gradients:GradientHook"
    figures = (("gradients.parquet", results.GRADIENTS, tables.gradients),)


class WeightGradients(Pass):
    """A forward and a backward pass: gradients of the experts' weights, reduced to a number per
    channel."""

    kind = "weight_gradients"
    backward = True
    divides = False
    hook = "moe_lab.statistics.gradients:WeightGradientHook"

    def layer_memory(self, size: Size) -> float:
        """The gradients of the weights of all experts, in fp32."""
        return 4.0 * size.experts * size.expert


class Damage(Pass):
    """The exact damage of removing each expert alone, in a forward pass with one more expert per
    token."""

    kind = "damage"
    hook = "moe_lab.statistics.damage:DamageHook"


class Similarity(Pass):
    """One forward pass in which every expert reads every token, for groupings of similar
    experts."""

    kind = "similarity"
    hook = "moe_lab.statistics.damage:SimilarityHook"


class LossRises(Pass):
    """How much the loss rises when a part of the model is changed: one pass for each part, from its
    layer on."""

    streams = False

    def gather(self, files: Files) -> Any:
        from moe_lab.search.ablation import loss_rises

        network, tokenizer = loaded(self.loaded.model)
        text = read_text(self.text, tokenizer, files, self.rows)
        return loss_rises(network, self.kind, text, out=files.partial)

    def merge(self, shares: list[Path]) -> Any:
        from moe_lab.statistics import Statistics, merged_means

        return merged_means([Statistics.load(file) for file in shares])


class Ablation(LossRises):
    """The rise of the loss when one expert's output is set to 0."""

    kind = "ablation"
    figures = (("ablation.parquet", results.ABLATIONS, tables.ablations),)


class Scaling(LossRises):
    """The rise of the loss when the routed output of one layer is scaled."""

    kind = "scaling"


class OnWeights(LeavesSums):
    """Sums over the weights of a model, read from the checkpoint without building the model."""

    loads = "checkpoint"
    weigher: ClassVar[str] = ""
    """Module and name of the function that adds them up."""
    facts: Facts

    def label(self) -> str:
        return self.about.name

    @property
    def about(self) -> ModelConfig:
        return self.facts.model

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The sums over the weights of a cell's model."""
        return cls(loaded_as(cell.model).facts)

    def sums(self, files: Files) -> Any:
        import torch

        from moe_lab.config.pruning import DEVICE_MAPS
        from moe_lab.models.files import local_folder
        from moe_lab.models.load import resolve_device

        # its Slurm jobs have no GPU
        device = resolve_device(self.about) if torch.cuda.is_available() else "cpu"
        return self.weigh(local_folder(self.about), "cuda" if device in DEVICE_MAPS else device)

    def weigh(self, folder: Path, device: str) -> Any:
        """Sums over the weights in a folder, added up on a device."""
        return resolve_name(self.weigher)(folder, device=device)

    def memory(self, size: Size) -> float:
        return 2 * BASE

    def pace(self) -> list[Any]:
        return [self.facts.id]


class Weights(OnWeights):
    """Sums over the weights of each expert."""

    kind = "weights"
    weigher = "moe_lab.statistics.weights:weigh_experts"
    figures = (("weights.parquet", results.WEIGHTS, tables.weights),)


class ChannelWeights(OnWeights):
    """Sums over the weights of each channel."""

    kind = "channel_weights"
    weigher = "moe_lab.statistics.weights:weigh_channels"


class WeightDistances(OnWeights):
    """How far the weights of experts are from each other."""

    kind = "weight_distances"
    weigher = "moe_lab.statistics.weights:compare_experts"
