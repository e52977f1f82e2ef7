"""The router of a layer, cut down to the experts that are retained: for good, or while a context is
open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from moe_lab.exported_code.ragged import count_attributes, replace_tensor, set_counts
from moe_lab.models.discover import MoELayer, check_in_memory


def slice_router(layer: MoELayer, retained: Sequence[int]) -> None:
    """Cut the router of one layer down to the experts `retained`, in place: its routing tensors,
    and all counts."""
    ids = torch.tensor(retained)
    for part in layer.routing:
        replace_tensor(part.module, part.name, rows_of(part.tensor, part.axis, ids))
    set_counts((layer.block, layer.experts, *layer.router.modules()), layer.n_experts, len(ids))


@contextmanager
def sliced_router(layer: MoELayer, retained: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """While open, the router of `layer` has the rows and biases of the experts `retained`
    (ascending ids) only, and returns positions in `retained`. Yields the id of each whole tensor ->
    its slice, for blocks that pass biases to their router."""
    check_in_memory(layer)
    ids = torch.tensor(retained)
    slices = {}
    with ExitStack() as undo:
        for part in layer.routing:
            whole = part.tensor
            slices[id(whole)] = rows_of(whole, part.axis, ids)
            undo.callback(replace_tensor, part.module, part.name, whole)
            replace_tensor(part.module, part.name, slices[id(whole)])
        for module in layer.router.modules():
            for name in count_attributes(module, layer.n_experts):
                undo.enter_context(patch.object(module, name, len(retained)))
        yield slices


@contextmanager
def masked_router(layer: MoELayer, retained: tuple[int, ...]) -> Iterator[None]:
    """Cut the router of `layer` down to the experts `retained`, and map the ids it returns back to
    the original ids. RuntimeError when the experts are called with others, as by a block that does
    not call its router."""
    ids = torch.tensor(retained, device=layer.routing[0].tensor.device)
    issued: list[torch.Tensor] = []

    def after_router(
        router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits, gates, chosen = output
        issued[:] = [ids[chosen]]
        return logits, gates, issued[0]

    def before_experts(experts: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        _, index, _ = (*inputs, *named.values())
        if not issued or index is not issued[0]:
            raise RuntimeError(
                f"the mask has no effect: {layer.name} got a routing that its masked router did "
                "not return"
            )

    with sliced_router(layer, retained), ExitStack() as hooks:
        # the router's hook is prepended, so that all other hooks see original ids
        hooks.callback(layer.router.register_forward_hook(after_router, prepend=True).remove)
        hooks.callback(
            layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True).remove
        )
        yield


def rows_of(tensor: torch.Tensor, axis: int, ids: torch.Tensor) -> torch.Tensor:
    """The entries `ids` of `tensor` along `axis`, as a copy of the same kind (parameter or plain
    tensor)."""
    chosen = tensor.detach().index_select(axis, ids.to(tensor.device))
    return (
        nn.Parameter(chosen, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else chosen
    )
