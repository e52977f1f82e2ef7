"""`Pruned`, a model with its plan and recovery, and the steps that align merged experts, fine-tune
a pruned model and export it."""

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
from moe_lab.study.resources import Resources, channel_product_bytes, expert_weight_bytes, text_pass
from moe_lab.study.step import KINDS, Step, StepFields
from moe_lab.study.steps.files import Files, text_passes
from moe_lab.study.steps.passes import Facts, ModelIdentity, loaded_field
from moe_lab.study.steps.plans import CellPlan, PlanSetup, drops_whole_experts

NO_RECOVERY = RecoveryConfig()


def plan_of(cell: Cell) -> PlanStep:
    """The step whose result is the cell's plan. The kind of this step depends on the allocation. If
    the allocation merges experts whose channels must be aligned, an `AlignedPlan` is returned: a
    step that aligns the plan of its input step."""
    step_class: Any = KINDS[allocation.get(cell.allocation.name).step]
    plan: PlanStep = step_class.of(cell)
    grouping = GROUPINGS.get(cell.allocation.replacement)
    if grouping is None or grouping.align is None:
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
        """Settings and inputs of the plan."""
        return self.plan.setup


class Alignment(AlignedPlan):
    """A plan whose channels are matched by their weights. Of `text`, only the engine is used: it
    determines whether the model is streamed."""

    kind = "alignment"
    runtime = frozenset({"text"})

    def resources(self) -> Resources:
        return text_pass(self.loaded.model, self.text, self.loaded.pace)

    def work(self, files: Files) -> None:
        """Match the channels of merged experts by weights, and write the aligned plan."""
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
        """Resources of a pass over the text. It also needs memory for products between activations
        of channels, in each layer that is loaded, and for the weights of one layer's experts in
        fp32."""
        return text_pass(
            self.loaded.model,
            self.text,
            self.loaded.pace,
            per_layer=channel_product_bytes,
            extra_bytes=expert_weight_bytes,
        )

    def work(self, files: Files) -> None:
        """Match the channels of merged experts by weights and by activations on the text, and write
        the aligned plan."""
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

    bits: int = 16
    """Bits of a weight in `modules`."""
    modules: tuple[str, ...] = ()
    """Names of the modules that are stored in fewer than 16 bits."""


def storage_of(recovery: RecoveryConfig) -> Storage | None:
    """How a recovery with bits=4 stores weights. None with bits=16, which leaves all weights as
    they are loaded."""
    if recovery.bits != 4:
        return None
    # sorted, as the order of the modules in the settings must not change the id of a step
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
        """Resources of fine-tuning or fitting. Memory holds two copies of the model's weights if
        adapters are trained or experts are merged. Otherwise the loaded model is masked, and memory
        holds its weights once."""
        copies = 2 if self.recovery.train == "adapters" or self.plan.setup.merges_experts else 1
        return resources.finetuning(
            self.loaded.model, self.text, self.recovery, self.loaded.pace, copies=copies
        )

    def work(self, files: Files) -> None:
        """Fit the merged experts if `recovery.fit` is set, else fine-tune the pruned model, and
        write the weights that have changed."""
        from moe_lab.recovery.finetune import finetune
        from moe_lab.recovery.merge_fit import fit

        network, tokenizer = files.models.load(self.loaded.model)
        arguments = (network, tokenizer, files.plan(self.plan), self.recovery, self.text)
        if self.recovery.fit is not None:
            fit(*arguments, out=files.out, partial=files.partial)
        else:
            finetune(*arguments, out=files.out, partial=files.partial, seed=self.seed)


class Pruned(StepFields):
    """A model with the plan by which it is pruned and the recovery that follows. If `plan` is None,
    the model is not pruned."""

    loaded: ModelIdentity
    plan: PlanStep | None = None
    finetune: Finetune | None = None
    storage: Storage | None = None
    recovery: RecoveryConfig = NO_RECOVERY
    drops_whole_experts: bool = True
    """Whether the plan removes experts from the router, and retained experts keep all channels;
    True without a plan."""
    runtime = frozenset({"recovery", "drops_whole_experts"})

    @property
    def model(self) -> ModelConfig:
        """The config of the model."""
        return self.loaded.model

    @property
    def label(self) -> str:
        """Label of the plan, or the model's name."""
        return self.plan.label() if self.plan else self.model.name

    @property
    def recovered_label(self) -> str:
        """`label`, followed by the name of the recovery if there is one."""
        recovery = self.recovery.name
        return self.label if recovery == NO_RECOVERY.name else f"{self.label}-{recovery}"

    @property
    def is_recovered(self) -> bool:
        """Whether the weights were fine-tuned or quantised."""
        return self.finetune is not None or self.storage is not None

    @property
    def is_changed(self) -> bool:
        """Whether weights differ from the unpruned model, because they were fine-tuned or
        quantised, or because experts were merged."""
        return self.is_recovered or (self.plan is not None and self.plan.setup.merges_experts)

    @contextmanager
    def open(self, files: Files) -> Iterator[tuple[Any, Any]]:
        """Yield (model, tokenizer). With a recovery, the yielded model is a changed copy of the
        loaded model, and stays in the cache for the next benchmark. Without a recovery, it is the
        loaded model, which is masked by the plan, if any, until the context ends."""
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
        """Keyword arguments of `recovery.apply.recovered`: "bits", "modules" and "tuned". The value
        of "tuned" is the folder with the result of the step `finetune`, or None without this
        step."""
        # the fields of `Storage` are "bits" and "modules"; by default, it quantises nothing
        tuned = files.folders[self.finetune.id] if self.finetune else None
        return {**vars(self.storage or Storage()), "tuned": tuned}


def pruned_of(cell: Cell) -> Pruned:
    """The model of a cell with its plan and recovery. If the recovery trains or fits weights on a
    text, the field `finetune` is the step that does so."""
    plan = plan_of(cell)
    model = loaded_field(cell.model)
    finetune = None
    # the key of the text of the recovery in `cell.texts`; None if the recovery reads no text
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
    """A `Pruned` of `model` without a plan and a recovery."""
    return Pruned(loaded_field(model))


class Export(Step):
    """The checkpoint of a pruned and recovered model. `shape` has all settings of the export, such
    as its format (safetensors or gguf) and its shape (natural, masked or padded). If `verify` is
    set and the model is not recovered, the checkpoint is compared with the masked model."""

    kind = "export"
    facts: Facts
    plan: PlanStep | None
    finetune: Finetune | None
    storage: Storage | None
    dtype: str | None
    """The precision in which a recovered model is evaluated; None without a recovery."""
    shape: ExportConfig
    """Settings of the export, with format and shape."""
    verify: bool | None
    pruned: Pruned
    runtime = frozenset({"pruned"})

    def label(self) -> str:
        return self.pruned.recovered_label

    def resources(self) -> Resources:
        """Resources of writing the checkpoint. For the format GGUF, they have a check that
        llama.cpp's converter is installed."""
        pruned = self.pruned
        is_converted = self.shape.format == "gguf"
        pace = [self.facts.id, self.shape.format]
        export_resources = resources.checkpoint_export(
            pruned.model, pace, is_changed=pruned.is_changed, is_converted=is_converted
        )
        if not is_converted:
            return export_resources
        from moe_lab.pruning.export import gguf

        return export_resources._replace(installation_checks=[(gguf.converter, self.shape)])

    def work(self, files: Files) -> None:
        """Write up to three checkpoints, each from the one before: the pruned model; with a
        recovery, the recovered model; for the format GGUF, the converted model. The last checkpoint
        is the result. Earlier checkpoints are in `files.partial`, from which an interrupted step
        resumes. If a group of users shares the store, `files.partial` is emptied first. After an
        error in recovery or conversion, `files.partial` is removed."""
        from moe_lab.models.files import local_folder
        from moe_lab.pruning.export import export as write_pruned

        source = local_folder(self.pruned.model)
        plan = files.plan(self.plan)
        out = files.out / "checkpoint"
        is_recovered = self.pruned.is_recovered
        is_converted = self.shape.format == "gguf"
        if is_recovered:
            from moe_lab.recovery.export import check_widths

            # before any work, as this raises UserError for numbers of retained channels for which
            # the exported model would compute its experts in another way than the recovered model
            check_widths(source, plan, self._evaluation_dtype(source))
        # another member of the group may have written code into a checkpoint, and that code would
        # be run
        if is_of_group(files.partial):
            for leftover in files.partial.glob("*/"):
                shutil.rmtree(leftover)
        # in `out` if the pruned model is the last checkpoint
        pruned_folder = files.partial / "natural" if is_recovered or is_converted else out
        if not pruned_folder.exists():
            write_pruned(source, plan, pruned_folder, shape=str(self.shape.shape))
        if self.verify and not is_recovered:
            self._compare(source, pruned_folder, files)
        recovered_folder = pruned_folder
        try:
            if is_recovered:
                recovered_folder = files.partial / "plain" if is_converted else out
                if not recovered_folder.exists():
                    self._write_recovered(pruned_folder, recovered_folder, files)
            if is_converted:
                from moe_lab.pruning.export import gguf

                gguf.convert(
                    recovered_folder,
                    out,
                    gguf.converter(self.shape),
                    f"{self.pruned.model.name}, pruned",
                )
        except Exception:  # an interrupted step (KeyboardInterrupt, SystemExit) can resume
            shutil.rmtree(files.partial, ignore_errors=True)
            raise

    def _compare(self, source: Path, pruned_folder: Path, files: Files) -> None:
        """Compare outputs of the checkpoint in `pruned_folder` with outputs of the model in
        `source`, masked by the plan. Write the largest relative difference to verified.json.
        `verify` raises UserError if the difference is too large. Both models run on the CPU,
        because outputs on GPUs need not be equal bit for bit."""
        from moe_lab.pruning.export.verify import verify

        trust = self.pruned.model.trust_remote_code
        difference = verify(
            source, files.plan(self.plan), pruned_folder, device="cpu", trust_remote_code=trust
        )
        write_json(files.out / "verified.json", {"difference": difference})

    def _write_recovered(self, pruned_folder: Path, out: Path, files: Files) -> None:
        """Write a copy of the checkpoint in `pruned_folder` to the folder `out`, with the weights
        of the recovered model and, in the model card, a sentence about the training."""
        from moe_lab.pruning.export.rewrite import rewrite
        from moe_lab.recovery import training_sentence
        from moe_lab.recovery.export import recovery_changes

        dtype = self._evaluation_dtype(pruned_folder)
        text_name = self.finetune.text.name if self.finetune else None
        sentence = training_sentence(self.pruned.recovery, text_name)
        changes = recovery_changes(
            pruned_folder, dtype=dtype, sentence=sentence, **self.pruned.recovery_arguments(files)
        )
        rewrite(pruned_folder, changes, out)

    def _evaluation_dtype(self, folder: Path) -> Any:
        """The torch dtype in which the recovered model is evaluated: the dtype that `self.dtype`
        names, or the dtype of the checkpoint in `folder` if `self.dtype` is "stored". The default
        dtype of this machine is not used, since evaluations may run on another machine."""
        from moe_lab.models.load import DTYPES
        from moe_lab.models.streamed import stored_dtype

        return DTYPES.get(str(self.dtype)) or stored_dtype(folder)


def export_of(
    pruned: Pruned, export: ExportConfig, verify: bool, default: Shape = "natural"
) -> Export:
    """The step that writes the model `pruned` as a checkpoint. `export`: settings of the export.
    `verify`: whether the checkpoint is compared with the masked model. `default`: shape of the
    checkpoint (natural, masked or padded) if `export.shape` is not set."""
    settings = replace(export, shape=export.shape or default)
    return Export(
        pruned.loaded.facts,
        pruned.plan,
        pruned.finetune,
        pruned.storage,
        # the precision in which the recovered model is evaluated
        pruned.loaded.arithmetic.dtype if pruned.is_recovered else None,
        settings,
        verify or None,  # fields that are None do not change the id of the step
        pruned,
    )
