"""FLOPs of a model larger than the memory: each decoder layer is counted while it has its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_lab.models.decoder import run, stand_in
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.models.watch import watched
from moe_lab.pruning.flops import Counts, Routed, check_batches, counted, paths, per_token, places
from moe_lab.pruning.mask import mask_layer
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.surgery import check_fit
from moe_lab.statistics.gather import Batch
from moe_lab.statistics.states import States


def layered_flops_per_token(
    streamed: StreamedModel, plan: Plan | None, batches: Sequence[Batch], *, out: Path, budget: float
) -> dict[str, float]:
    """What `flops_per_token` gives, from one reading of the checkpoint with one decoder layer, masked by `plan`, in
    memory. Hidden states between layers are kept in the folder `out`, and in memory up to `budget` bytes.

    UserError as there, and for damaged weights and layers that cannot be run one by one.
    """
    check_batches(batches)
    if plan is not None:
        check_fit(plan, moe_layers(streamed.model))
    layers = routed_layers(streamed.model)
    counts = _Counts(streamed)
    routed = Routed(layers)
    states = States(out / "states", budget)
    last = len(streamed.layers) - 1
    with watched(layers, routed.add), torch.no_grad():
        for number in range(last + 1):
            streamed.prefetch(number + 1)
            with _masked(streamed, number, plan):
                for index, (ids, valid) in enumerate(batches):
                    routed.valid = valid.flatten()
                    state = states.get(number, index, streamed.device) if number else None
                    result = counts.through(number, ids, valid, state)
                    if number == last:
                        counts.around(ids, valid, result)
                    else:
                        states.put(number + 1, index, result)
            states.drop(number)
    return per_token(streamed.model, plan, batches, counts.found, routed)


def _masked(streamed: StreamedModel, number: int, plan: Plan | None) -> ExitStack:
    """A decoder layer with its weights, and the plan's mask on it if it has routed experts."""
    with ExitStack() as stack:
        stack.enter_context(streamed.layer(number))
        if plan is not None and number in streamed.moe:
            stack.enter_context(mask_layer(streamed.model, streamed.moe[number], plan))
        return stack.pop_all()


class _Counts:
    """What torch counts of one batch of each shape: of each layer in the pass through it, the rest in a pass of its
    own, because every pass through a layer computes things beside it anew, such as positions."""

    def __init__(self, streamed: StreamedModel) -> None:
        self.streamed = streamed
        self.container, _ = places(next(iter(streamed.moe.values())), paths(streamed.model))
        self.found: dict[torch.Size, dict[str, Counter[Any]]] = {}
        self._seen: set[tuple[int, torch.Size]] = set()
        self._around: set[torch.Size] = set()

    def through(self, number: int, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """What a layer makes of a batch; counted the first time for its shape."""
        read = partial(self.streamed.through, number, ids, valid, state)
        if (number, ids.shape) in self._seen:
            return read()
        self._seen.add((number, ids.shape))
        result, counts = counted(read)
        path = f"{self.container}.{number}"
        of_layer = {name: found for name, found in counts.items() if name == path or name.startswith(f"{path}.")}
        self._add(ids.shape, {**of_layer, "Global": counts.get(path, {})})
        return result

    def around(self, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor) -> None:
        """Count what no layer does, the first time for a shape; `state` stands for what all layers give."""
        if ids.shape in self._around:
            return
        self._around.add(ids.shape)
        with ExitStack() as undo:
            for layer in self.streamed.layers:
                stand_in(layer, state, undo)
            _, counts = counted(partial(run, self.streamed.model, ids, valid))
        self._add(ids.shape, {"Global": counts.get("Global", {})})

    def _add(self, shape: torch.Size, counts: Counts) -> None:
        found = self.found.setdefault(shape, {})
        for path, operations in counts.items():
            found.setdefault(path, Counter()).update(operations)
