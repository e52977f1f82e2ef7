"""Sequential pruning: each layer is scored on the output of the pruned layers below it, as in
CAMERA-P's released code, or of the layers whose experts are merged already, as in REAM. One-shot
criteria score on the activations of the unpruned model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.alignment import (
    ORDER,
    align_by_activations,
    align_by_weights,
    alignment_hook,
)
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask_layers
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import Layers, merge_passes
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.observe import Batch, StatisticsHook
from moe_lab.statistics.streaming import LayerPass

Sums = dict[str, torch.Tensor]
"""Sums of one layer by name, fp64, and the ORDER of the channels of merged experts."""


def prune_sequentially(
    streamed: StreamedModel,
    batches: Sequence[Batch],
    choose: Callable[[int, Sums], Plan],
    *,
    hooks: Sequence[type[StatisticsHook]] = (ForwardHook,),
    align: Literal["weights", "activations_and_weights"] | None = None,
    out: Path,
    provenance: Mapping[str, Any],
) -> Plan:
    """Plan all MoE layers from the first to the last, with one decoder layer in memory at a time.

    `choose(number, sums)` returns a plan of layer `number` alone, the same plan for the same sums.
    `sums` are what `hooks` collect in this layer when all earlier layers are pruned. `align`:
    features by which the channels of merged experts are matched. `out`: folder of checkpoints, from
    which an interrupted run resumes.
    """

    def aligned(plan: Plan, sums: Layers) -> Plan:
        has_order = any(ORDER in sums_of_layer for sums_of_layer in sums.values())
        return align_by_activations(plan, sums) if has_order else plan

    layer_pass = LayerPass(
        streamed,
        batches,
        "sequential",
        len(streamed.layers),  # parts of the pass
        out,
    )
    with layer_pass.running():
        for number in range(layer_pass.done, len(streamed.layers)):
            sums: Layers = {}
            with (
                streamed.layer(number, next_number=number + 1),
                torch.no_grad(),
                ExitStack() as masks,
            ):
                if number in streamed.moe_layers:
                    layer = streamed.moe_layers[number]
                    sums = merge_passes(layer_pass.run(number, hook, keep=False) for hook in hooks)
                    plan = choose(number, sums[number])
                    if plan.merged_layers and align == "weights":
                        alignment = align_by_weights(plan, [layer]).layers[number].alignment
                        sums[number][ORDER] = torch.as_tensor(alignment)
                    elif plan.merged_layers and align is not None:
                        order = layer_pass.run(number, alignment_hook(plan), keep=False)
                        sums = merge_passes([sums, order])
                    masks.enter_context(mask_layers([layer], aligned(plan, sums)))
                if number + 1 < len(streamed.layers):
                    # without a hook: computes the input of the next layer
                    layer_pass.run(number, None, keep=True)
            layer_pass.finish(sums, [number + 1])  # only the input of the next layer is kept
    layers: dict[int, LayerPlan] = {}
    # a resumed pass has the sums of all layers, but not the plans that it made before
    for number, sums_of_layer in layer_pass.result().layers.items():
        plan = choose(number, sums_of_layer)
        layers |= aligned(plan, {number: sums_of_layer}).layers
    return Plan(layers, dict(provenance))
