"""The plan of a cell; and steps that match the channels of merged experts, after a plan has said which are merged."""

from __future__ import annotations

from typing import Any

from moe_lab import allocation
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.grid import Cell
from moe_lab.models.config_json import Size
from moe_lab.study.step import KINDS
from moe_lab.study.steps.files import Files, loaded
from moe_lab.study.steps.passes import OnText, loaded_as
from moe_lab.study.steps.plans import Asked, MakesPlan


def plan_of(cell: Cell) -> Any:
    """The step that makes the cell's plan, of the kind that its allocation needs, with its merged experts aligned."""
    kind: Any = KINDS[allocation.get(cell.allocation.name).step]
    plan = kind.of(cell)
    grouping = GROUPINGS.get(cell.allocation.replacement)
    if grouping is None or grouping.align is None:
        return plan
    how = {"weights": Alignment, "activations_and_weights": ActivationAlignment}[grouping.align]
    return how(loaded_as(cell.model), cell.calibration, plan)


class AlignsChannels(OnText):
    """A step that matches the channels of experts that a plan merges."""

    streams = True
    plan: MakesPlan

    def label(self) -> str:
        return self.plan.label()

    @property
    def asked(self) -> Asked:
        """What the cell asks of its plan."""
        return self.plan.asked


class ActivationAlignment(AlignsChannels):
    """A plan with the channels of merged experts matched by their weights and their activations on a text."""

    kind = "activation_alignment"
    small = True
    reads_text = True

    def work(self, files: Files) -> None:
        from moe_lab.pruning.alignment import align_by_activations, alignment_tap

        plan = files.plan(self.plan)
        sums = self.engine(files).read(alignment_tap(plan))
        align_by_activations(plan, sums.layers).save(files.out / "plan.json")

    def layer_memory(self, size: Size) -> float:
        """Products of channels, in fp64 for at most every expert."""
        return 8.0 * size.experts * size.width**2

    def memory(self, size: Size) -> float:
        """With the weights of one layer's channels in fp32."""
        return super().memory(size) + 4.0 * size.experts * size.expert


class Alignment(AlignsChannels):
    """A plan with the channels of merged experts matched by their weights. Its text only says which engine is used."""

    kind = "alignment"
    small = True
    runtime = frozenset({"text"})

    def work(self, files: Files) -> None:
        from moe_lab.models.discover import moe_layers
        from moe_lab.models.streamed import open_streamed
        from moe_lab.pruning.alignment import align_by_weights
        from moe_lab.pruning.prune import check_fit

        plan = files.plan(self.plan)
        if self.is_layered:
            streamed, _ = open_streamed(self.loaded.model)
            check_fit(plan, list(streamed.moe.values()))
            layers = streamed.each_layer()
        else:
            resident = moe_layers(loaded(self.loaded.model)[0])
            check_fit(plan, resident)
            layers = iter(resident)
        align_by_weights(plan, layers).save(files.out / "plan.json")
