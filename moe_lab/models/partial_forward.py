"""Run the decoder of a model by its own code: all of it, from some layer on, or up to some layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_lab.errors import UserError


def run(model: PreTrainedModel, input_ids: torch.Tensor, valid: torch.Tensor) -> Any:
    """Run the decoder once, without vocabulary logits or cache; `valid` (B, S) is the attention mask.

    Returns the decoder's output, whose last_hidden_state (B, S, H) is the input of the vocabulary head.
    """
    embeddings: Any = model.get_input_embeddings()
    device = embeddings.weight.device
    # No token sees those after it, so padding on the right needs no mask. Without one, attention is faster and needs no
    # memory for each pair of tokens.
    is_padded_right = bool((valid[:, 1:] <= valid[:, :-1]).all())
    mask = None if is_padded_right else valid.to(device, torch.int64)
    return model.base_model(input_ids=input_ids.to(device), attention_mask=mask, use_cache=False)


def stand_in(layer: nn.Module, state: Any, undo: ExitStack) -> None:
    """Make `layer` return `state` without computing anything, until `undo` is closed."""
    replace_forward(layer, lambda *inputs, **named: state, undo)


def replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack, name: str = "forward") -> None:
    """Replace the forward of `module` by `forward` until `undo` is closed; `name` is the attribute that holds it."""
    own = vars(module).get(name)

    def restore() -> None:
        del vars(module)[name]
        if own is not None:  # such as that of a model spread over devices
            vars(module)[name] = own

    vars(module)[name] = forward
    undo.callback(restore)


def output_of(layer: nn.Module, run: Callable[[], Any]) -> torch.Tensor:
    """Run the model by `run()` up to `layer`, and return that layer's output.

    Other hooks of the layer run first. UserError when the output is not a tensor of hidden states.
    """

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        raise _Reached(output)

    hook = layer.register_forward_hook(leave)
    try:
        run()
    except _Reached as reached:
        if not isinstance(reached.output, torch.Tensor):
            raise UserError(
                f"{type(layer).__name__} gives {type(reached.output).__name__} instead of hidden states, so its layers "
                "cannot be run one by one: set calibration.engine=resident"
            ) from None
        return reached.output
    finally:
        hook.remove()
    raise RuntimeError(f"{type(layer).__name__} was not run")


class _Reached(Exception):
    """Raised when the model has run as far as is needed, to skip the layers after that."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output
