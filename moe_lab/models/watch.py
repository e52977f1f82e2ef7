"""See which experts tokens are given to, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from moe_lab.models.discover import MoELayer


@contextmanager
def watched(layers: Sequence[MoELayer], see: Callable[[MoELayer, torch.Tensor], None]) -> Iterator[None]:
    """While open, each call of a layer's experts is told to `see`: the layer, and the ids (T, K) its tokens go to."""

    def before(layer: MoELayer, module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        see(layer, chosen_experts(inputs, named))

    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.experts.register_forward_pre_hook(partial(before, layer), with_kwargs=True)
            hooks.callback(hook.remove)
        yield


def chosen_experts(inputs: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor:
    """The expert ids (T, K) in the arguments that an experts module is called with."""
    index: torch.Tensor = named["top_k_index"] if "top_k_index" in named else inputs[1]
    return index
