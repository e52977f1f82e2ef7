"""Decoder layers that compute nothing, so that a model can be run from the middle, or up to it, by its own code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn


def stand_in(layer: nn.Module, state: torch.Tensor, undo: ExitStack) -> None:
    """`layer` gives `state` instead of computing anything, until `undo` is closed."""
    own = vars(layer).get("forward")
    vars(layer)["forward"] = lambda *inputs, **named: state

    def restore() -> None:
        del vars(layer)["forward"]
        if own is not None:  # such as that of a model spread over devices
            vars(layer)["forward"] = own

    undo.callback(restore)


def output_of(layer: nn.Module, run: Callable[[], Any]) -> torch.Tensor:
    """What `layer` gives while `run()` runs the model it is in, which is left as soon as it has; its other hooks come
    first. TypeError where that is no tensor of hidden states."""

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        raise _Reached(output)

    hook = layer.register_forward_hook(leave)
    try:
        run()
    except _Reached as reached:
        if not isinstance(reached.output, torch.Tensor):
            raise TypeError(f"{type(layer).__name__} gives {type(reached.output).__name__}") from None
        return reached.output
    finally:
        hook.remove()
    raise RuntimeError(f"{type(layer).__name__} was not run")


class _Reached(Exception):
    """The layer has run; the rest of the model need not."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output
