"""Sequential pruning: each layer is scored on the output of the pruned layers below it, as in
CAMERA-P's released code. One-shot criteria score on the activations of the unpruned model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask_layers
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import Layers
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.observe import Batch
from moe_lab.statistics.streaming import LayerPass

Sums = Mapping[str, torch.Tensor]
"""Forward statistics of one layer by name, fp64."""


def prune_sequentially(
    streamed: StreamedModel,
    batches: Sequence[Batch],
    choose: Callable[[int, Sums], Plan],
    *,
    out: Path,
    provenance: Mapping[str, Any],
) -> Plan:
    """Plan all MoE layers from the first to the last, with one decoder layer in memory at a time.

    `choose(number, sums)` returns a plan of layer `number` alone, the same plan for the same sums.
    `sums` are the forward statistics of this layer, collected when all earlier layers are pruned.
    `out`: folder of checkpoints, from which an interrupted run resumes.
    """
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
                    sums = layer_pass.run(number, ForwardHook, keep=False)
                    plan = choose(number, sums[number])
                    masks.enter_context(mask_layers([streamed.moe_layers[number]], plan))
                if number + 1 < len(streamed.layers):
                    # without a hook: computes the input of the next layer
                    layer_pass.run(number, None, keep=True)
            layer_pass.finish(sums, [number + 1])  # only the input of the next layer is kept
    layers: dict[int, LayerPlan] = {}
    # a resumed pass has the sums of all layers, but not the plans that it made before
    for number, sums_of_layer in layer_pass.result().layers.items():
        layers |= choose(number, sums_of_layer).layers
    return Plan(layers, dict(provenance))
