"""Replace and hook the experts modules of a model, and run its decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, is_divided, whole
from moe_lab.models.rows import at_least_fp32

ExpertsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""hidden states (T, H), expert ids (T, K), gates (T, K) -> gated sum of expert outputs (T, H)."""


def dense_gates(index: torch.Tensor, weights: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Gates (T, E), at least fp32: `weights` (T, K) for the experts `index` (T, K), 0 for all
    others."""
    gates = at_least_fp32(weights)
    return gates.new_zeros(len(index), n_experts).scatter_(1, index, gates)


def replace_experts(
    layer: MoELayer, make: Callable[[ExpertsFunction], ExpertsFunction], undo: ExitStack
) -> None:
    """Replace the function that computes the experts of `layer`, until `undo` is closed. `make`:
    current function -> new function."""
    name = _forward_name(layer.experts)
    current = getattr(layer.experts, name)
    if is_divided(layer):
        # not the forward of the plan, which computes the weights of this process only
        current = type(layer.experts).forward.__get__(layer.experts)
    function = make(current)

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        with whole_experts(layer):
            # models that pass keyword arguments pass them in the order of `ExpertsFunction`
            return function(*args, *kwargs.values())

    forward.replaces_experts = True  # type: ignore[attr-defined]
    undo.enter_context(patch.object(layer.experts, name, forward))


@contextmanager
def whole_experts(layer: MoELayer) -> Iterator[None]:
    """While it is open, each process holds all weights of the experts of `layer`, also those that a
    parallel plan of transformers keeps in other processes. All processes must open it."""
    if not is_divided(layer):
        yield
        return
    experts: Any = layer.experts
    weights = {name: whole(weight) for name, weight in experts._parameters.items()}
    # an expert-parallel plan has set num_experts to the number of experts of this process
    with patch.dict(vars(experts), _parameters=weights, num_experts=layer.n_experts):
        yield


def are_replaced(layer: MoELayer) -> bool:
    """Whether `replace_experts` is in effect for `layer`."""
    return hasattr(vars(layer.experts).get(_forward_name(layer.experts)), "replaces_experts")


def _forward_name(module: nn.Module) -> str:
    """Name of the attribute that holds the forward function of a module. A hook of accelerate loads
    offloaded weights, then calls `_old_forward`."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, the device of a model. The host does not wait for a copy to a GPU."""
    # a GPU computes during a copy only if the source is pinned
    source = tensor.pin_memory() if tensor.is_cpu and device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


def run(model: PreTrainedModel, input_ids: torch.Tensor, valid: torch.Tensor) -> Any:
    """The output of the decoder for one batch, without vocabulary logits or cache. `valid`: the
    attention mask (B, S). The output's last_hidden_state is (B, S, H)."""
    embeddings: Any = model.get_input_embeddings()
    device = embeddings.weight.device
    # No token attends to later tokens, so padding on the right needs no mask. Without a mask,
    # attention is faster and needs less memory.
    is_padded_right = bool((valid[:, 1:] <= valid[:, :-1]).all())
    mask = None if is_padded_right else to_device(valid.long(), device)
    return model.base_model(
        input_ids=to_device(input_ids, device), attention_mask=mask, use_cache=False
    )


def replace_output(layer: nn.Module, state: Any, undo: ExitStack) -> None:
    """Make a decoder `layer` return `state`, until `undo` is closed."""
    undo.enter_context(patch.object(layer, "forward", lambda *inputs, **named: state))


def check_output(layer: nn.Module, inputs: Any, output: Any) -> None:
    """A hook of decoder layers: raise UserError unless the layer's output is a bare tensor."""
    if not isinstance(output, torch.Tensor):
        raise UserError(
            f"{type(layer).__name__} gives {type(output).__name__} instead of hidden states, so "
            "its layers cannot be run one by one, as searches, ablation and "
            "calibration.engine=streamed do: this model is not supported"
        )


def output_of(layer: nn.Module, run: Callable[[], Any]) -> torch.Tensor:
    """The output of a decoder `layer` when `run()` runs the model. Later layers are not computed.
    UserError unless the output is a bare tensor, RuntimeError if `run()` does not run the layer."""

    def stop(module: nn.Module, inputs: Any, output: Any) -> None:
        check_output(module, inputs, output)
        raise _Reached(output)

    hook = layer.register_forward_hook(stop)
    try:
        run()
    except _Reached as reached:
        output: torch.Tensor = reached.args[0]
        return output
    finally:
        hook.remove()
    raise RuntimeError(f"{type(layer).__name__} was not run")


class _Reached(Exception):
    """Raised with the output of a layer, to skip the layers after it."""
