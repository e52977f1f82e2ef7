"""A pruned model: its plan with merged experts aligned, the model itself in a worker, its recovery,
its checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_lab import allocation
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.calibration import IdentifiedText
from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.config.pruning import Shape
from moe_lab.grid import Cell
from moe_lab.json_files import write_json
from moe_lab.paths import is_of_group
from moe_lab.study import resources
from moe_lab.study.resources import Resources, channel_products, expert_weights, text_pass
from moe_lab.study.step import KINDS, Step, StepFields
from moe_lab.study.steps.files import Files, engine
from moe_lab.study.steps.passes import Facts, Loaded, loaded_as
from moe_lab.study.steps.plans import (
    FromScores,
    PlanRequest,
    Reconstruction,
    Search,
    Sequential,
    drops_whole_experts,
)

NO_RECOVERY = RecoveryConfig()


def plan_of(cell: Cell) -> PlanStep:
    """The step that makes the cell's plan, of the kind that its allocation needs, with its merged
    experts aligned."""
    kind: Any = KINDS[allocation.get(cell.allocation.name).step]
    plan: PlanStep = kind.of(cell)
    grouping = GROUPINGS.get(cell.allocation.replacement)
    if grouping is None or grouping.align is None:
        return plan
    model = loaded_as(cell.model)
    text = IdentifiedText.of(cell.calibration)
    if grouping.align == "weights":
        return Alignment(model, text, plan)
    return ActivationAlignment(model, text, plan)


class Alignment(Step):
    """A plan with the channels of merged experts matched by their weights. Its text only says which
    engine is used."""

    kind = "alignment"
    small = True
    loaded: Loaded
    text: IdentifiedText
    plan: PlanStep
    runtime = frozenset({"text"})

    def label(self) -> str:
        return self.plan.label()

    @property
    def request(self) -> PlanRequest:
        """The plan that the cell wants."""
        return self.plan.request

    def resources(self) -> Resources:
        return text_pass(self.loaded.model, self.text, self.loaded.pace)

    def work(self, files: Files) -> None:
        from moe_lab.models.discover import moe_layers
        from moe_lab.models.streamed import open_streamed
        from moe_lab.pruning.alignment import align_by_weights

        plan = files.plan(self.plan)
        if self.text.engine == "streamed":
            streamed, _ = open_streamed(self.loaded.model)
            plan.check_model(list(streamed.moe.values()))
            layers = streamed.each_layer()
        else:
            resident = moe_layers(files.models.loaded(self.loaded.model)[0])
            plan.check_model(resident)
            layers = iter(resident)
        align_by_weights(plan, layers).save(files.out / "plan.json")


class ActivationAlignment(Step):
    """A plan with the channels of merged experts matched by their weights and their activations on
    a text."""

    kind = "activation_alignment"
    small = True
    reads_text = True
    loaded: Loaded
    text: IdentifiedText
    plan: PlanStep

    def label(self) -> str:
        return self.plan.label()

    @property
    def request(self) -> PlanRequest:
        """The plan that the cell wants."""
        return self.plan.request

    def resources(self) -> Resources:
        """With products of channels for each layer, and the weights of one layer's channels in
        fp32."""
        model = self.loaded.model
        pace = self.loaded.pace
        return text_pass(
            model, self.text, pace, per_layer=channel_products, extra_bytes=expert_weights
        )

    def work(self, files: Files) -> None:
        from moe_lab.pruning.alignment import align_by_activations, alignment_hook

        plan = files.plan(self.plan)
        sums = engine(self.loaded.model, self.text, files).read(alignment_hook(plan))
        align_by_activations(plan, sums.layers).save(files.out / "plan.json")


PlanStep = FromScores | Search | Reconstruction | Sequential | Alignment | ActivationAlignment
"""A step that makes the plan of a cell."""


@dataclass(frozen=True)
class Storage:
    """How the weights of a recovered model are stored."""

    bits: int = 16
    modules: tuple[str, ...] = ()
    """Modules that are stored in fewer than 16 bits."""


def storage_of(recovery: RecoveryConfig) -> Storage | None:
    """How a recovery stores weights; None when they stay as they are."""
    return Storage(4, tuple(sorted(set(recovery.modules)))) if recovery.bits == 4 else None


class Finetune(Step):
    """Weights that change in fine-tuning a pruned model, or in fitting its merged experts."""

    kind = "finetune"
    whole_model = True
    loaded: Loaded
    text: IdentifiedText
    plan: PlanStep
    recovery: RecoveryConfig
    seed: int

    def label(self) -> str:
        return f"{self.plan.label()}-{self.recovery.name}"

    def resources(self) -> Resources:
        """Adapters change a copy of the model. Routers are trained under a mask, which copies
        merged experts only."""
        copies = 2 if self.recovery.train == "adapters" or self.plan.request.merges_experts else 1
        model = self.loaded.model
        pace = self.loaded.pace
        return resources.finetuning(model, self.text, self.recovery, pace, copies=copies)

    def work(self, files: Files) -> None:
        from moe_lab.recovery.finetune import finetune
        from moe_lab.recovery.merge_fit import fit

        given = (
            *files.models.loaded(self.loaded.model),
            files.plan(self.plan),
            self.recovery,
            self.text,
        )
        if self.recovery.fit is not None:
            fit(*given, out=files.out, partial=files.partial)
        else:
            finetune(*given, out=files.out, partial=files.partial, seed=self.seed)


class Pruned(StepFields):
    """A cell's model under its plan and recovery; without a plan, the unpruned model."""

    loaded: Loaded
    plan: PlanStep | None
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
        return self.is_recovered or (self.plan is not None and self.plan.request.merges_experts)

    @contextmanager
    def open(self, files: Files) -> Iterator[tuple[Any, Any]]:
        """The model and its tokenizer. A plan is a mask on the loaded model; a recovered model is a
        copy. Benchmarks of one recovered model share the copy. Masks cost nothing to make again."""
        from moe_lab.pruning.mask import mask

        network, tokenizer = files.models.loaded(self.model)
        plan = files.plan(self.plan)
        if self.is_recovered:
            yield files.models.recovered(self.model, plan, **self.changes(files)), tokenizer
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
    model = loaded_as(cell.model)
    finetune = None
    if role := cell.recovery.text_role:
        finetune = Finetune(
            model, IdentifiedText.of(cell.texts[role]), plan, cell.recovery, cell.seed
        )
    return Pruned(
        model, plan, finetune, storage_of(cell.recovery), cell.recovery, drops_whole_experts(cell)
    )


def unpruned(model: ModelConfig) -> Pruned:
    """A model as it is."""
    return Pruned(loaded_as(model), None, None, None, NO_RECOVERY, True)


class Export(Step):
    """The pruned model as a checkpoint, with its recovery, quantised if `export.format` says so. A
    model whose weights are not changed is compared with the masked model if `verify` is set."""

    kind = "export"
    facts: Facts
    plan: PlanStep | None
    finetune: Finetune | None
    storage: Storage | None
    dtype: str | None
    """The precision in which a recovered model is evaluated; None without a recovery."""
    shape: ExportConfig
    verify: bool | None
    pruned: Pruned
    runtime = frozenset({"pruned"})

    def label(self) -> str:
        return self.pruned.recovered_label

    def resources(self) -> Resources:
        pruned = self.pruned
        is_converted = self.shape.format == "gguf"
        pace = [self.facts.id, self.shape.format]
        needed = resources.export(
            pruned.model, pace, is_changed=pruned.is_changed, is_converted=is_converted
        )
        if not is_converted:
            return needed
        from moe_lab.pruning.export import gguf

        return needed._replace(programs=[(gguf.converter, self.shape)])

    def work(self, files: Files) -> None:
        """Write the checkpoint in stages: pruned, with changed weights, converted. Each is made
        from the one before; all but the last are in the folder of partial results, and are not made
        again but in a store of a group."""
        from moe_lab.models.files import local_folder
        from moe_lab.pruning.export import export as write

        source = local_folder(self.pruned.model)
        plan = files.plan(self.plan)
        shape = str(self.shape.shape)
        out = files.out / "checkpoint"
        is_rewritten = self.pruned.is_recovered
        is_converted = self.shape.format == "gguf"
        if is_rewritten:
            from moe_lab.recovery.export import check_widths

            check_widths(source, plan, self._evaluated_dtype(source))
        # code there would be run
        if is_of_group(files.partial):
            for leftover in files.partial.glob("*/"):
                shutil.rmtree(leftover)
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

                gguf.convert(
                    plain, out, gguf.converter(self.shape), f"{self.pruned.model.name}, pruned"
                )
        except Exception:  # but not when the process is told to stop: then it resumes
            shutil.rmtree(files.partial, ignore_errors=True)
            raise

    def _compare(self, source: Path, natural: Path, files: Files) -> None:
        """Compare the checkpoint with the masked model, on the CPU: only there are both equal bit
        for bit."""
        from moe_lab.pruning.export.verify import verify

        trust = self.pruned.model.trust_remote_code
        difference = verify(
            source, files.plan(self.plan), natural, device="cpu", trust_remote_code=trust
        )
        write_json(files.out / "verified.json", {"difference": difference})

    def _write_changed(self, natural: Path, out: Path, files: Files) -> None:
        """Write the pruned checkpoint again, with the weights of the recovered model."""
        from moe_lab.pruning.export.rewrite import rewrite
        from moe_lab.recovery import training_sentence
        from moe_lab.recovery.export import recovery_changes

        dtype = self._evaluated_dtype(natural)
        text = self.finetune.text.name if self.finetune else None
        sentence = training_sentence(self.pruned.recovery, text)
        rewrite(
            natural,
            recovery_changes(natural, dtype=dtype, sentence=sentence, **self.pruned.changes(files)),
            out,
        )

    def _evaluated_dtype(self, folder: Path) -> Any:
        """The precision in which the model is evaluated. This step itself runs on the CPU, maybe on
        another machine."""
        from moe_lab.models.load import DTYPES
        from moe_lab.models.streamed import stored_dtype

        return DTYPES.get(str(self.dtype)) or stored_dtype(folder)


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
