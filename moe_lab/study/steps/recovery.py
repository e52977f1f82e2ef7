"""A pruned model: its plan with merged experts aligned, the model itself in a worker, its recovery,
its checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_lab import allocation
from moe_lab import recovery as recoveries
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.config import ExportConfig, LauncherConfig, ModelConfig, RecoveryConfig
from moe_lab.config.pruning import Shape
from moe_lab.grid import Cell
from moe_lab.json_files import write_json
from moe_lab.machine import release_memory
from moe_lab.models.config_json import Size
from moe_lab.study.step import BASE, KINDS, Parts, Step
from moe_lab.study.steps.files import Files, forget_loaded, loaded
from moe_lab.study.steps.passes import Facts, Loaded, OnText, loaded_as
from moe_lab.study.steps.plans import Asked, MakesPlan, drops_whole_experts
from moe_lab.study.store import SHARED

DISTILLED = 4
"""fp32 tensors of the size of a batch's logits that a distillation holds at once, besides the
logits; measured."""
NO_RECOVERY = RecoveryConfig()


def plan_of(cell: Cell) -> Any:
    """The step that makes the cell's plan, of the kind that its allocation needs, with its merged
    experts aligned."""
    kind: Any = KINDS[allocation.get(cell.allocation.name).step]
    plan = kind.of(cell)
    grouping = GROUPINGS.get(cell.allocation.replacement)
    if grouping is None or grouping.align is None:
        return plan
    how = {"weights": Alignment, "activations_and_weights": ActivationAlignment}[grouping.align]
    return how(loaded_as(cell.model), cell.calibration, plan)


class AlignsChannels(OnText):
    """A step that matches the channels of experts that a plan merges."""

    small = True
    streams = True
    plan: MakesPlan

    def label(self) -> str:
        return self.plan.label()

    @property
    def asked(self) -> Asked:
        """What the cell asks of its plan."""
        return self.plan.asked


class ActivationAlignment(AlignsChannels):
    """A plan with the channels of merged experts matched by their weights and their activations on
    a text."""

    kind = "activation_alignment"
    reads_text = True

    def work(self, files: Files) -> None:
        from moe_lab.pruning.alignment import align_by_activations, alignment_hook

        plan = files.plan(self.plan)
        sums = self.engine(files).read(alignment_hook(plan))
        align_by_activations(plan, sums.layers).save(files.out / "plan.json")

    def layer_memory(self, size: Size) -> float:
        """Products of channels, in fp64 for at most every expert."""
        return 8.0 * size.experts * size.width**2

    def memory(self, size: Size) -> float:
        """With the weights of one layer's channels in fp32."""
        return super().memory(size) + 4.0 * size.experts * size.expert


class Alignment(AlignsChannels):
    """A plan with the channels of merged experts matched by their weights. Its text only says which
    engine is used."""

    kind = "alignment"
    runtime = frozenset({"text"})

    def work(self, files: Files) -> None:
        from moe_lab.models.discover import moe_layers
        from moe_lab.models.streamed import open_streamed
        from moe_lab.pruning.alignment import align_by_weights

        plan = files.plan(self.plan)
        if self.is_layered:
            streamed, _ = open_streamed(self.loaded.model)
            plan.check_model(list(streamed.moe.values()))
            layers = streamed.each_layer()
        else:
            resident = moe_layers(loaded(self.loaded.model)[0])
            plan.check_model(resident)
            layers = iter(resident)
        align_by_weights(plan, layers).save(files.out / "plan.json")


@dataclass(frozen=True)
class Storage:
    """How the weights of a recovered model are stored."""

    bits: int = 16
    modules: tuple[str, ...] = ()
    """Modules that are stored in fewer than 16 bits."""


def storage_of(recovery: RecoveryConfig) -> Storage | None:
    """How a recovery stores weights; None when they stay as they are."""
    return Storage(4, tuple(sorted(set(recovery.modules)))) if recovery.bits == 4 else None


class Finetune(OnText):
    """Weights that change in fine-tuning a pruned model, or in fitting its merged experts."""

    kind = "finetune"
    plan: Any
    recovery: RecoveryConfig
    seed: int

    def label(self) -> str:
        return f"{self.plan.label()}-{self.recovery.name}"

    def work(self, files: Files) -> None:
        from moe_lab.recovery.finetune import finetune
        from moe_lab.recovery.merge_fit import fit

        given = *loaded(self.loaded.model), files.plan(self.plan), self.recovery, self.text
        if self.recovery.fit is not None:
            fit(*given, out=files.out, partial=files.partial)
        else:
            finetune(*given, out=files.out, partial=files.partial, seed=self.seed)

    @property
    def backward(self) -> bool:  # type: ignore[override]
        """Whether gradients come back through the layers: not for a fit."""
        return self.recovery.fit is None

    @property
    def models(self) -> int:
        """Two with experts of its own; routers are trained under a mask, which copies merged
        experts only."""
        return 2 if self.recovery.train == "adapters" or self.plan.asked.merges_experts else 1

    def batch_memory(self, size: Size) -> float:
        teacher = (
            DISTILLED * self._batch_tokens * size.logits
            if self.recovery.distill is not None
            else 0.0
        )
        return super().batch_memory(size) + teacher + self.disk(size)

    def disk(self, size: Size) -> float:
        """Upper bound of a fit's sums: an expert in fp64 for two that are merged; 0 for other
        recoveries."""
        if self.backward:
            return 0.0
        return 8.0 * size.moe_layers * size.experts / 2 * size.width * (size.width + size.hidden)

    def units(self) -> float:
        return self.recovery.epochs * super().units() if self.backward else super().units()

    def pace(self) -> list[Any]:
        tuned = self.recovery
        return [*super().pace(), tuned.train, tuned.distill is not None, tuned.fit is not None]


class Pruned(Parts):
    """A cell's model under its plan and recovery; without a plan, the unpruned model."""

    loaded: Loaded
    plan: Any
    """The step of its plan, or None."""
    finetune: Finetune | None
    storage: Storage | None
    recovery: RecoveryConfig
    drops_whole_experts: bool
    """Whether the plan removes experts from the router and keeps all channels of the others."""
    runtime = frozenset({"recovery", "drops_whole_experts"})

    @property
    def model(self) -> ModelConfig:
        """The model that is pruned."""
        return self.loaded.model

    @property
    def label(self) -> str:
        """Label of the plan, or the model's name."""
        return self.plan.label() if self.plan else self.model.name

    @property
    def recovered_label(self) -> str:
        """Label with the name of the recovery."""
        recovery = self.recovery.name
        return self.label if recovery == NO_RECOVERY.name else f"{self.label}-{recovery}"

    @property
    def is_recovered(self) -> bool:
        """Whether its weights were fine-tuned or quantised."""
        return self.finetune is not None or self.storage is not None

    @property
    def is_changed(self) -> bool:
        """Whether it has weights of its own: it was fine-tuned or quantised, or its experts are
        merged."""
        return self.is_recovered or (self.plan is not None and self.plan.asked.merges_experts)

    @contextmanager
    def open(self, files: Files) -> Iterator[tuple[Any, Any]]:
        """The model and its tokenizer. A plan is a mask on the loaded model; a recovered model is a
        copy. Benchmarks of one recovered model share the copy. Masks cost nothing to make again."""
        from moe_lab.pruning.mask import mask

        network, tokenizer = loaded(self.model)
        plan = files.plan(self.plan)
        if self.is_recovered:
            yield _recovered(network, plan, **self.changes(files)), tokenizer
        elif plan:
            with mask(network, plan):
                yield network, tokenizer
        else:
            yield network, tokenizer

    def changes(self, files: Files) -> dict[str, Any]:
        """How weights are stored, and `tuned`, the folder with those that fine-tuning changed; None
        without it."""
        tuned = files.folders[self.finetune.id] if self.finetune else None
        return {**vars(self.storage or Storage()), "tuned": tuned}


def pruned_of(cell: Cell) -> Pruned:
    """The model of a cell, pruned and recovered."""
    plan = plan_of(cell)
    role = recoveries.text_role(cell.recovery)
    model = loaded_as(cell.model)
    finetune = Finetune(model, cell.texts[role], plan, cell.recovery, cell.seed) if role else None
    return Pruned(
        model, plan, finetune, storage_of(cell.recovery), cell.recovery, drops_whole_experts(cell)
    )


def unpruned(model: ModelConfig) -> Pruned:
    """A model as it is."""
    return Pruned(loaded_as(model), None, None, None, NO_RECOVERY, True)


@lru_cache(maxsize=1)
def _recovered(
    network: Any, plan: Any, bits: int, modules: tuple[str, ...], tuned: Path | None
) -> Any:
    from moe_lab.recovery.apply import recovered

    return recovered(network, plan, bits=bits, modules=modules, tuned=tuned)


def forget_models() -> None:
    """Free the memory of models that are kept for further steps."""
    _recovered.cache_clear()
    forget_loaded()
    release_memory()


class AboutPruned:
    """A step about a pruned model, which is its field of that name."""

    pruned: Pruned

    def label(self) -> str:
        return self.pruned.recovered_label

    @property
    def about(self) -> ModelConfig:
        return self.pruned.model


class Export(AboutPruned, Step):
    """The pruned model as a checkpoint, with its recovery, quantised if `export.format` says so. A
    model whose weights are not changed is compared with the masked model if `verify` is set."""

    kind = "export"
    loads = "checkpoint"
    facts: Facts
    plan: Any
    finetune: Finetune | None
    storage: Storage | None
    dtype: str | None
    """The precision in which a recovered model is evaluated; None without a recovery."""
    shape: ExportConfig
    verify: bool | None
    pruned: Pruned
    runtime = frozenset({"pruned"})

    def conditions(self, launcher: LauncherConfig) -> Iterator[tuple[Any, ...]]:
        if self.shape.format == "gguf" and launcher.python is None:
            from moe_lab.pruning.export import gguf

            yield gguf.converter, self.shape

    def work(self, files: Files) -> None:
        """Write the checkpoint in stages: pruned, with changed weights, converted. Each is made
        from the one before; all but the last are in the folder of partial results, and are not made
        again but in a store of a group."""
        from moe_lab.models.files import local_folder
        from moe_lab.pruning.export import export as write

        source = local_folder(self.about)
        plan = files.plan(self.plan)
        shape = str(self.shape.shape)
        out = files.out / "checkpoint"
        is_rewritten = self.pruned.is_recovered
        is_converted = self.shape.format == "gguf"
        if is_rewritten:
            from moe_lab.recovery.export import check_widths

            check_widths(source, plan, self._evaluated_dtype(source))
        # code there would be run
        if files.partial.exists() and files.partial.stat().st_mode & SHARED == SHARED:
            for left in files.partial.glob("*/"):
                shutil.rmtree(left)
        natural = files.partial / "natural" if is_rewritten or is_converted else out
        if not natural.exists():
            write(source, plan, natural, shape=shape)
        if self.verify and not is_rewritten:
            self._compare(source, natural, files)
        plain = natural
        try:
            if is_rewritten:
                plain = files.partial / "plain" if is_converted else out
                if not plain.exists():
                    self._write_changed(natural, plain, files)
            if is_converted:
                from moe_lab.pruning.export import gguf

                gguf.convert(plain, out, gguf.converter(self.shape), f"{self.about.name}, pruned")
        except Exception:  # but not when the process is told to stop: then it resumes
            shutil.rmtree(files.partial, ignore_errors=True)
            raise

    def _compare(self, source: Path, natural: Path, files: Files) -> None:
        """Compare the checkpoint with the masked model, on the CPU: only there are both equal bit
        for bit."""
        from moe_lab.pruning.export.verify import verify

        trust = self.about.trust_remote_code
        difference = verify(
            source, files.plan(self.plan), natural, device="cpu", trust_remote_code=trust
        )
        write_json(files.out / "verified.json", {"difference": difference})

    def _write_changed(self, natural: Path, out: Path, files: Files) -> None:
        """Write the pruned checkpoint again, with the weights of the recovered model."""
        from moe_lab.pruning.export.rewrite import rewrite
        from moe_lab.recovery.export import recovery_changes

        dtype = self._evaluated_dtype(natural)
        text = self.finetune.text.name if self.finetune else None
        words = recoveries.finetune_words(self.pruned.recovery, text)
        rewrite(
            natural,
            recovery_changes(natural, dtype=dtype, words=words, **self.pruned.changes(files)),
            out,
        )

    def _evaluated_dtype(self, folder: Path) -> Any:
        """The precision in which the model is evaluated. This step itself runs on the CPU, maybe on
        another machine."""
        from moe_lab.models.load import DTYPES
        from moe_lab.models.streamed import stored_dtype

        return DTYPES.get(str(self.dtype)) or stored_dtype(folder)

    def memory(self, size: Size) -> float:
        """Where weights are changed or converted, a decoder layer three times in fp32."""
        changed = self.pruned.is_changed or self.shape.format == "gguf"
        return 2 * BASE + changed * 4 / size.bytes_per_parameter * size.layer_weights(3)

    def disk(self, size: Size) -> float:
        """The checkpoint, with those that it is made from: one whose weights are changed is written
        first without the changes, and one in GGUF is converted from another."""
        return float(size.bytes) * (1 + self.pruned.is_changed + (self.shape.format == "gguf"))

    def pace(self) -> list[Any]:
        return [self.facts.id, self.shape.format]


def export_of(
    pruned: Pruned, export: ExportConfig, verify: bool, usual: Shape = "natural"
) -> Export:
    """The step that writes the pruned and recovered model as a checkpoint; `usual` is its shape if
    none is set."""
    shape = replace(export, shape=export.shape or usual)
    return Export(
        pruned.loaded.facts,
        pruned.plan,
        pruned.finetune,
        pruned.storage,
        pruned.loaded.arithmetic.dtype if pruned.is_recovered else None,
        shape,
        verify or None,
        pruned,
    )
