"""Where tokens go in a model larger than the memory: each decoder layer is run while it has its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.experts import watch_routing
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.flops import Routed, Routing, check_batches
from moe_lab.pruning.mask import mask_layer
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.surgery import check_fit
from moe_lab.statistics.gather import Batch
from moe_lab.statistics.states import States


def layered_routing(
    streamed: StreamedModel, plan: Plan | None, batches: Sequence[Batch], *, out: Path, budget: float
) -> Routing:
    """What `measured_routing` gives, from one reading of the checkpoint with one decoder layer, masked by `plan`, in
    memory. Hidden states between layers are kept in the folder `out`, and in memory up to `budget` bytes.

    UserError as there, and for damaged weights and layers that cannot be run one by one.
    """
    check_batches(batches)
    if plan is not None:
        check_fit(plan, moe_layers(streamed.model))
    layers = routed_layers(streamed.model)
    routed = Routed(layers)
    states = States(out / "states", budget)
    last = max(streamed.moe)
    with watch_routing(layers, routed.add), torch.no_grad():
        for number in range(last + 1):
            if number < last:
                streamed.prefetch(number + 1)
            with _masked(streamed, number, plan):
                for index, (ids, valid) in enumerate(batches):
                    routed.valid = valid.flatten()
                    state = states.get(number, index, streamed.device) if number else None
                    result = streamed.through(number, ids, valid, state)
                    if number < last:
                        states.put(number + 1, index, result)
            states.drop(number)
    return routed.under(plan, batches)


def _masked(streamed: StreamedModel, number: int, plan: Plan | None) -> ExitStack:
    """A decoder layer with its weights, and the plan's mask on it if it has routed experts."""
    with ExitStack() as stack:
        stack.enter_context(streamed.layer(number))
        if plan is not None and number in streamed.moe:
            stack.enter_context(mask_layer(streamed.model, streamed.moe[number], plan))
        return stack.pop_all()
