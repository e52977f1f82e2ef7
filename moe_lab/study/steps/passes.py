"""Steps that measure the model: passes over a calibration set, and sums over its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any, ClassVar, Self

from moe_lab import results
from moe_lab.calibration import settings as calibrations
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.grid import Cell
from moe_lab.models.config_json import Size
from moe_lab.study import memory
from moe_lab.study.step import Loads, Step
from moe_lab.study.steps import tables
from moe_lab.study.steps.engine import engine
from moe_lab.study.steps.files import REPORT, STATISTICS, Files, loaded, read_text
from moe_lab.study.steps.model import Facts, Loaded, loaded_as

Table = tuple[str, tuple[str, ...], list[tuple[Any, ...]]]
"""Name of a file, its columns, its rows."""


@dataclass(frozen=True, eq=False)
class OnText(Step):
    """A step that runs a model over a text."""

    loads = Loads.MODEL
    backward: ClassVar[bool] = False
    """Whether gradients come back through the layers."""

    loaded: Loaded
    text: CalibrationConfig
    rows: tuple[int, int] | None = field(default=None, kw_only=True)
    """The first row of a share of the text, and its end; None for all rows."""

    @property
    def about(self) -> ModelConfig:
        return self.loaded.model

    @property
    def is_layered(self) -> bool:
        return self.streams and self.text.engine == "streamed" and not self.merges

    def memory(self, size: Size) -> float:
        if self.merges:
            return memory.BASE + memory.merging(size)
        if self.is_layered:
            states = min(self.text.activation_budget * 2**30, self.disk(size))
            batch = memory.batch_tokens(self.text, self.rows) * memory.activations(size)
            held = memory.layer_weights(size) + self.layer_memory(size)
            return memory.BASE + held + self.buffers(size) + batch + states
        held = memory.weights(size, self.models) + size.moe_layers * self.layer_memory(size)
        return memory.BASE + held + self.buffers(size) + self.batch_memory(size)

    @property
    def models(self) -> int:
        """How many copies of the weights are held."""
        return 1

    def layer_memory(self, size: Size) -> float:
        """Bytes held for every layer whose weights are in memory, in addition to the weights."""
        return 0.0

    def buffers(self, size: Size) -> float:
        """Bytes held for one layer at a time, however many have their weights in memory."""
        return 0.0

    def batch_memory(self, size: Size) -> float:
        """Bytes of a batch with the whole model loaded: its logits, and the activations that the pass keeps."""
        kept = memory.activations(size)
        if self.backward:
            kept = memory.kept_for_gradients(size, recomputed=self.text.checkpointing)
        return memory.batch_tokens(self.text, self.rows) * (memory.logits(size) + kept)

    def disk(self, size: Size) -> float:
        if not self.is_layered:
            return 0.0
        return memory.hidden_states(size, memory.tokens_of(self.text, self.rows), backward=self.backward)

    def units(self) -> float:
        return float(memory.tokens_of(self.text, self.rows))

    def pace(self) -> list[Any]:
        return [self.loaded.facts.id, self.loaded.model.device]


@dataclass(frozen=True, eq=False)
class LeavesSums(Step):
    """A step that leaves sums for each layer, and small tables that figures need of them."""

    def sums(self, files: Files) -> Any:
        """The sums."""
        raise NotImplementedError

    def tables(self, sums: Any) -> Iterator[Table]:
        """The tables; none for most kinds."""
        return iter(())

    def work(self, files: Files) -> None:
        sums = self.sums(files)
        sums.save(files.out / STATISTICS)
        for name, columns, rows in self.tables(sums):
            files.table(name, columns, rows)


@dataclass(frozen=True, eq=False)
class Pass(LeavesSums, OnText):
    """A pass over the calibration set."""

    reads_text = True
    divides: ClassVar[bool] = True
    """Whether sums over rows can be added up, so that calibration.parts divides the pass into steps."""

    def label(self) -> str:
        rows = f"-rows{self.rows[0]}-{self.rows[1]}" if self.rows else ""
        return f"{self.loaded.model.name}-{self.text.name}{rows}"

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The pass over the calibration set of a cell."""
        model, text = loaded_as(cell.model), cell.calibration
        shares = calibrations.shares(text) if cls.divides else []
        return cls(model, text, merges=tuple(cls(model, text, rows=rows) for rows in shares))

    def sums(self, files: Files) -> Any:
        return self._merged(files) if self.merges else self.gather(files)

    def gather(self, files: Files) -> Any:
        """The sums of this pass."""
        raise NotImplementedError

    def engine(self, files: Files) -> Any:
        """The model and the text, opened by the engine that calibration.engine names."""
        return engine(self.loaded.model, self.text, files, {"step": self.id}, self.rows)

    def merge(self, shares: list[Path]) -> Any:
        """The sums of the shares in these files together: layer -> name -> tensor."""
        from moe_lab.statistics.sums import merged, read

        return merged(read(file, framework="pt") for file in shares)

    def _merged(self, files: Files) -> Any:
        """The sums of all shares. Raises UserError unless all have the same."""
        from moe_lab.statistics.sums import Statistics, header

        shares = [files.path(step, STATISTICS) for step in self.merges]
        copyfile(files.path(self.merges[0], REPORT), files.out / REPORT)  # each share has the report on the whole text
        return Statistics(self.merge(shares), {"kind": header(shares[0])["kind"], "fingerprint": {"step": self.id}})


@dataclass(frozen=True, eq=False)
class StatisticsPass(Pass):
    """One forward pass over the calibration set: all sums, tokens per expert, and tables for figures."""

    kind = "statistics"
    streams = True

    def gather(self, files: Files) -> Any:
        from moe_lab.statistics.forward import ForwardTap

        return self.engine(files).read(ForwardTap)

    def tables(self, sums: Any) -> Iterator[Table]:
        from moe_lab.statistics.sums import coverage

        yield "coverage.parquet", results.COVERAGE, coverage(sums)
        yield "experts.parquet", results.EXPERTS, tables.experts(sums.layers)
        yield "layers.parquet", results.LOSSES, tables.losses(sums.layers)
        yield "entropy.parquet", results.ENTROPIES, tables.entropies(sums.layers)


@dataclass(frozen=True, eq=False)
class Gradients(Pass):
    """A forward and a backward pass: sums for each channel, of activations and of the loss's gradients."""

    kind = "gradients"
    streams = True
    backward = True

    def gather(self, files: Files) -> Any:
        return self.engine(files).gradients()

    def tables(self, sums: Any) -> Iterator[Table]:
        yield "gradients.parquet", results.GRADIENTS, tables.gradients(sums.layers)


@dataclass(frozen=True, eq=False)
class WeightGradients(Pass):
    """A forward and a backward pass: gradients of the experts' weights, reduced to a number per channel."""

    kind = "weight_gradients"
    streams = True
    backward = True
    divides = False

    def gather(self, files: Files) -> Any:
        return self.engine(files).weight_gradients()

    def layer_memory(self, size: Size) -> float:
        return memory.expert_gradients(size)


@dataclass(frozen=True, eq=False)
class Damage(Pass):
    """The exact damage of removing each expert alone, in a forward pass with one more expert per token."""

    kind = "damage"
    streams = True

    def gather(self, files: Files) -> Any:
        from moe_lab.statistics.damage import DamageTap

        return self.engine(files).read(DamageTap)


@dataclass(frozen=True, eq=False)
class Similarity(Pass):
    """One forward pass in which every expert reads every token, for groupings of similar experts."""

    kind = "similarity"
    streams = True

    def gather(self, files: Files) -> Any:
        from moe_lab.statistics.damage import SimilarityTap

        return self.engine(files).read(SimilarityTap)


@dataclass(frozen=True, eq=False)
class LossRises(Pass):
    """How much the loss rises when a part of the model is changed: one pass for each part, from its layer on."""

    def gather(self, files: Files) -> Any:
        from moe_lab.search.ablation import loss_rises

        network, tokenizer = loaded(self.loaded.model)
        text = read_text(self.text, tokenizer, files, self.rows)
        return loss_rises(network, self.kind, text, fingerprint={"step": self.id}, out=files.partial)

    def merge(self, shares: list[Path]) -> Any:
        from moe_lab.statistics.sums import Statistics, merged_means

        return merged_means([Statistics.load(file) for file in shares])


@dataclass(frozen=True, eq=False)
class Ablation(LossRises):
    """The rise of the loss when one expert's output is set to 0."""

    kind = "ablation"

    def tables(self, sums: Any) -> Iterator[Table]:
        yield "ablation.parquet", results.ABLATIONS, tables.ablations(sums.layers)


@dataclass(frozen=True, eq=False)
class Scaling(LossRises):
    """The rise of the loss when the routed output of one layer is scaled."""

    kind = "scaling"


@dataclass(frozen=True, eq=False)
class OnWeights(LeavesSums):
    """Sums over the weights of a model, read from the checkpoint without building the model."""

    loads = Loads.CHECKPOINT
    facts: Facts
    model: ModelConfig
    runtime = frozenset({"model"})

    def label(self) -> str:
        return self.model.name

    @property
    def about(self) -> ModelConfig:
        return self.model

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The sums over the weights of a cell's model."""
        return cls(Facts(cell.model), cell.model)

    def sums(self, files: Files) -> Any:
        import torch

        from moe_lab.config.pruning import DEVICE_MAPS
        from moe_lab.models.device import place
        from moe_lab.models.files import local_folder

        device = place(self.model) if torch.cuda.is_available() else "cpu"  # its Slurm jobs have no GPU
        return self.weigh(local_folder(self.model), "cuda" if device in DEVICE_MAPS else device)

    def weigh(self, folder: Path, device: str) -> Any:
        """Sums over the weights in a folder, added up on a device."""
        raise NotImplementedError

    def memory(self, size: Size) -> float:
        return 2 * memory.BASE

    def pace(self) -> list[Any]:
        return [self.facts.id]


@dataclass(frozen=True, eq=False)
class Weights(OnWeights):
    """Sums over the weights of each expert."""

    kind = "weights"

    def weigh(self, folder: Path, device: str) -> Any:
        from moe_lab.statistics.weights import weigh_experts

        return weigh_experts(folder, fingerprint={"step": self.id}, device=device)

    def tables(self, sums: Any) -> Iterator[Table]:
        yield "weights.parquet", results.WEIGHTS, tables.weights(sums.layers)


@dataclass(frozen=True, eq=False)
class ChannelWeights(OnWeights):
    """Sums over the weights of each channel."""

    kind = "channel_weights"

    def weigh(self, folder: Path, device: str) -> Any:
        from moe_lab.statistics.weights import weigh_channels

        return weigh_channels(folder, fingerprint={"step": self.id}, device=device)


@dataclass(frozen=True, eq=False)
class WeightDistances(OnWeights):
    """How far the weights of experts are from each other."""

    kind = "weight_distances"

    def weigh(self, folder: Path, device: str) -> Any:
        from moe_lab.statistics.weights import compare_experts

        return compare_experts(folder, fingerprint={"step": self.id}, device=device)
