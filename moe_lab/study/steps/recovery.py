"""`Pruned`, a model with its plan and recovery, and the steps that align merged experts, fine-tune
a pruned model and export it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe_lab import allocation
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.calibration import IdentifiedText
from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.config.pruning import Shape
from moe_lab.grid import Cell
from moe_lab.json_files import write_json
from moe_lab.models.files import local_folder, tokenizer_folder
from moe_lab.study import resources
from moe_lab.study.resources import Resources, channel_product_bytes, expert_weight_bytes, text_pass
from moe_lab.study.step import KINDS, Step, StepFields
from moe_lab.study.steps.files import Files, text_passes
from moe_lab.study.steps.passes import Facts, ModelIdentity, loaded_field
from moe_lab.study.steps.plans import CellPlan, PlanSetup, Sequential, drops_whole_experts

NO_RECOVERY = RecoveryConfig()


def plan_of(cell: Cell) -> PlanStep:
    """The step whose result is the cell's plan. It is an `AlignedPlan` if the allocation merges
    experts whose channels must be aligned, and does not align them itself."""
    step_class: Any = KINDS[allocation.get(cell.allocation.name).step]
    plan: PlanStep = step_class.of(cell)
    grouping = GROUPINGS.get(cell.allocation.replacement)
    if grouping is None or grouping.align is None or isinstance(plan, Sequential):
        return plan
    model = loaded_field(cell.model)
    text = IdentifiedText.of(cell.calibration)
    if grouping.align == "weights":
        return Alignment(model, text, plan)
    return ActivationAlignment(model, text, plan)


class AlignedPlan(Step):
    """The plan of the input step `plan`, after the channels of merged experts are matched to each
    other."""

    small = True
    loaded: ModelIdentity
    text: IdentifiedText
    plan: PlanStep

    def label(self) -> str:
        return self.plan.label()

    @property
    def setup(self) -> PlanSetup:
        return self.plan.setup


class Alignment(AlignedPlan):
    """A plan whose channels are matched by their weights. Of `text`, only the engine is used."""

    kind = "alignment"
    runtime = ("text",)

    def resources(self) -> Resources:
        return text_pass(self.loaded.model, self.text)

    def work(self, files: Files) -> None:
        from moe_lab.models.discover import moe_layers
        from moe_lab.models.streamed import open_streamed
        from moe_lab.pruning.alignment import align_by_weights

        plan = files.plan(self.plan)
        if self.text.engine == "streamed":
            streamed, _ = open_streamed(self.loaded.model)
            plan.check_model(list(streamed.moe_layers.values()))
            layers = streamed.loaded_moe_layers()
        else:
            network, _ = files.models.load(self.loaded.model)
            resident = moe_layers(network)
            plan.check_model(resident)
            layers = iter(resident)
        align_by_weights(plan, layers).save(files.out / "plan.json")


class ActivationAlignment(AlignedPlan):
    """A plan whose channels are matched by their weights and by their activations on the text."""

    kind = "activation_alignment"
    reads_text = True

    def resources(self) -> Resources:
        return text_pass(
            self.loaded.model,
            self.text,
            per_layer=channel_product_bytes,
            extra_bytes=expert_weight_bytes,
        )

    def work(self, files: Files) -> None:
        from moe_lab.pruning.alignment import align_by_activations, alignment_hook

        plan = files.plan(self.plan)
        sums = text_passes(self.loaded.model, self.text, files).collect_statistics(
            alignment_hook(plan)
        )
        align_by_activations(plan, sums.layers).save(files.out / "plan.json")


PlanStep = CellPlan | AlignedPlan
"""A step that makes the plan of a cell."""


@dataclass(frozen=True)
class Storage:
    """How the weights of a recovered model are stored."""

    bits: int
    """Bits of a weight in `modules`."""
    modules: tuple[str, ...]
    """Names of the modules that are stored in fewer than 16 bits."""


def storage_of(recovery: RecoveryConfig) -> Storage | None:
    """How a recovery stores weights. None if it leaves all weights as they are loaded."""
    if recovery.bits != 4:
        return None
    # sorted, as the order of the modules must not change the id of a step
    return Storage(4, tuple(sorted(set(recovery.modules))))


class Finetune(Step):
    """The weights that are changed by fine-tuning a pruned model, or by fitting its merged
    experts."""

    kind = "finetune"
    whole_model = True
    loaded: ModelIdentity
    text: IdentifiedText
    plan: PlanStep
    recovery: RecoveryConfig
    seed: int

    def label(self) -> str:
        return f"{self.plan.label()}-{self.recovery.name}"

    def resources(self) -> Resources:
        # a loaded model that is only masked needs no second copy
        copies = 2 if self.recovery.train == "adapters" or self.plan.setup.merges_experts else 1
        return resources.finetuning(self.loaded.model, self.text, self.recovery, copies=copies)

    def work(self, files: Files) -> None:
        from moe_lab.recovery.finetune import finetune
        from moe_lab.recovery.merge_fit import fit

        network, tokenizer = files.models.load(self.loaded.model)
        arguments = (network, tokenizer, files.plan(self.plan), self.recovery, self.text)
        if self.recovery.fit is not None:
            fit(*arguments, out=files.out, partial=files.partial)
        else:
            finetune(*arguments, out=files.out, partial=files.partial, seed=self.seed)


class Pruned(StepFields):
    """A model with the plan by which it is pruned and the recovery that follows."""

    loaded: ModelIdentity
    plan: PlanStep | None = None
    finetune: Finetune | None = None
    storage: Storage | None = None
    recovery: RecoveryConfig = NO_RECOVERY
    drops_whole_experts: bool = True
    """Whether the plan drops whole experts and does nothing else; True without a plan."""
    runtime = ("recovery", "drops_whole_experts")

    @property
    def model(self) -> ModelConfig:
        return self.loaded.model

    @property
    def label(self) -> str:
        return self.plan.label() if self.plan else self.model.name

    @property
    def recovered_label(self) -> str:
        recovery = self.recovery.name
        return self.label if recovery == NO_RECOVERY.name else f"{self.label}-{recovery}"

    @property
    def is_recovered(self) -> bool:
        """Whether the weights were fine-tuned or quantised."""
        return self.finetune is not None or self.storage is not None

    @property
    def is_changed(self) -> bool:
        """Whether weights differ from those of the unpruned model."""
        return self.is_recovered or (self.plan is not None and self.plan.setup.merges_experts)

    @contextmanager
    def open(self, files: Files) -> Iterator[tuple[Any, Any]]:
        """Yield (model, tokenizer). With a recovery, the model is a changed copy of the loaded
        model. Without a recovery, it is the loaded model, masked by the plan until the context
        ends."""
        from moe_lab.pruning.mask import mask

        network, tokenizer = files.models.load(self.model)
        plan = files.plan(self.plan)
        if self.is_recovered:
            yield (
                files.models.recover(self.model, plan, **self.recovery_arguments(files)),
                tokenizer,
            )
        elif plan:
            with mask(network, plan):
                yield network, tokenizer
        else:
            yield network, tokenizer

    def recovery_arguments(self, files: Files) -> dict[str, Any]:
        """Keyword arguments of `recovery.apply.recovered`: "modules" and "tuned". The value of
        "tuned" is the folder with the result of the step `finetune`."""
        tuned = files.folders[self.finetune.id] if self.finetune else None
        return {"modules": self.storage.modules if self.storage else (), "tuned": tuned}


def pruned_of(cell: Cell) -> Pruned:
    """The model of a cell with its plan and recovery."""
    plan = plan_of(cell)
    model = loaded_field(cell.model)
    finetune = None
    # None if the recovery reads no text
    if role := cell.recovery.text_setting:
        finetune = Finetune(
            model, IdentifiedText.of(cell.texts[role]), plan, cell.recovery, cell.seed
        )
    return Pruned(
        model,
        plan=plan,
        finetune=finetune,
        storage=storage_of(cell.recovery),
        recovery=cell.recovery,
        drops_whole_experts=drops_whole_experts(cell),
    )


def unpruned_model(model: ModelConfig) -> Pruned:
    return Pruned(loaded_field(model))


class Export(Step):
    """The checkpoint of a pruned and recovered model. If `verify` is set and the model is not
    recovered, the checkpoint is compared with the masked model."""

    kind = "export"
    facts: Facts
    plan: PlanStep | None
    finetune: Finetune | None
    storage: Storage | None
    dtype: str | None
    """The precision in which a recovered model is evaluated; None without a recovery."""
    shape: ExportConfig
    """All settings of the export, such as its format and its shape."""
    verify: bool | None
    pruned: Pruned
    runtime = ("pruned",)

    def label(self) -> str:
        return self.pruned.recovered_label

    def resources(self) -> Resources:
        pruned = self.pruned
        is_converted = self.shape.format == "gguf"
        export_resources = resources.checkpoint_export(
            pruned.model, is_changed=pruned.is_changed, is_converted=is_converted
        )
        if not is_converted:
            return export_resources
        from moe_lab.pruning.export import gguf

        return export_resources._replace(installation_checks=[(gguf.converter, self.shape)])

    def work(self, files: Files) -> None:
        """Write up to three checkpoints, each from the one before: the pruned model, the recovered
        model, and the model converted to GGUF. The last checkpoint is the result."""
        from moe_lab.pruning.export import export as write_pruned

        model = self.pruned.model
        source = local_folder(model)
        plan = files.plan(self.plan)
        out = files.out / "checkpoint"
        is_recovered = self.pruned.is_recovered
        is_converted = self.shape.format == "gguf"
        with TemporaryDirectory(dir=files.out) as scratch:
            pruned_folder = Path(scratch, "pruned") if is_recovered or is_converted else out
            write_pruned(
                source,
                plan,
                pruned_folder,
                shape=str(self.shape.shape),
                trust_remote_code=model.trust_remote_code,
                tokenizer=tokenizer_folder(model, source),
            )
            if self.verify and not is_recovered:
                from moe_lab.pruning.export.verify import verify  # loads torch

                # on the CPU, because outputs on GPUs need not be equal bit for bit
                trust = model.trust_remote_code
                difference = verify(source, plan, pruned_folder, trust_remote_code=trust)
                write_json(files.out / "verified.json", {"difference": difference})
            recovered_folder = pruned_folder
            if is_recovered:
                recovered_folder = Path(scratch, "recovered") if is_converted else out
                self._write_recovered(pruned_folder, recovered_folder, files)
            if is_converted:
                from moe_lab.pruning.export import gguf

                gguf.convert(
                    recovered_folder, out, gguf.converter(self.shape), f"{model.name}, pruned"
                )

    def _write_recovered(self, pruned_folder: Path, out: Path, files: Files) -> None:
        """Write a copy of the checkpoint in `pruned_folder` to `out`, with the weights of the
        recovered model."""
        from moe_lab.recovery import training_sentence
        from moe_lab.recovery.export import write_recovered

        dtype = self._evaluation_dtype(pruned_folder)
        text_name = self.finetune.text.name if self.finetune else None
        sentence = training_sentence(self.pruned.recovery, text_name)
        arguments = self.pruned.recovery_arguments(files)
        write_recovered(pruned_folder, out, dtype=dtype, sentence=sentence, **arguments)

    def _evaluation_dtype(self, folder: Path) -> Any:
        """The torch dtype in which the recovered model is evaluated: `self.dtype`, or the dtype of
        the checkpoint in `folder` if `self.dtype` is "stored"."""
        from moe_lab.models.load import DTYPES, stored_dtype

        return DTYPES.get(str(self.dtype)) or stored_dtype(folder)


def export_of(
    pruned: Pruned, export: ExportConfig, verify: bool, default: Shape = "natural"
) -> Export:
    """The step that writes `pruned` as a checkpoint. `verify`: whether the checkpoint is compared
    with the masked model. `default`: shape of the checkpoint if `export.shape` is not set."""
    settings = replace(export, shape=export.shape or default)
    return Export(
        pruned.loaded.facts,
        pruned.plan,
        pruned.finetune,
        pruned.storage,
        pruned.loaded.arithmetic.dtype if pruned.is_recovered else None,
        settings,
        verify or None,  # fields that are None do not change the id of the step
        pruned,
    )
