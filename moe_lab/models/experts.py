"""Compute routed experts: tokens sorted by expert, hooks on experts modules, a faster forward on
the CPU.

`cpu_experts` gives the same bits as the eager loop of transformers: each matrix product has the
same rows in the same order, and outputs are added in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from moe_lab.errors import UserError
from moe_lab.models.discover import (
    MoELayer,
    is_divided,
    routed_layers,
    whole,
)
from moe_lab.models.rows import Part, Rows, at_least_fp32
from moe_lab.models.transformers_private import activation

ExpertsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""hidden states (T, H), expert ids (T, K), gates (T, K) -> gated sum of expert outputs (T, H)."""
CPU_EXPERTS = "moe_lab_cpu"
TRIAL_TOKENS = 16
"""Number of tokens on which `cpu_experts` is compared with the model's own experts."""


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


def cpu_experts(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The gated sum of expert outputs (T, H); arguments as in `ExpertsFunction`. The experts of
    `module` must have a gate projection and no biases, and must not be transposed."""
    rows = Rows(index, len(module.down_proj))

    def compute(part: Part, states: torch.Tensor) -> torch.Tensor:
        return linear(
            activation(module)(linear(states, module.gate_up_proj[part.experts])),
            module.down_proj[part.experts],
        )

    return rows.output(hidden, weights, compute)


ExpertsInterface.register(CPU_EXPERTS, cpu_experts)


def use_cpu_experts(model: PreTrainedModel, layers: Sequence[MoELayer]) -> None:
    """Switch a `model` that was loaded with eager experts to `cpu_experts`, if outputs stay the
    same bit for bit. Equality is tried in the first layer only."""
    if layers and all(_is_plain(layer.experts) for layer in layers) and _has_eager_bits(layers[0]):
        model.set_experts_implementation(CPU_EXPERTS)


def _is_plain(module: Any) -> bool:
    """Whether the experts `module` are fp32 and of the form that `cpu_experts` computes."""
    if any(weight.dtype != torch.float32 for weight in module.parameters()):
        return False
    return module.has_gate and not (module.has_bias or module.is_transposed)


def _has_eager_bits(layer: MoELayer) -> bool:
    """Whether `cpu_experts` gives the bits of the experts' own forward, for random tokens."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TRIAL_TOKENS, layer.hidden, generator=random)
    weights, index = torch.rand(TRIAL_TOKENS, layer.n_experts, generator=random).topk(layer.top_k)
    with torch.no_grad():
        expected = layer.experts(hidden, index, weights)
        return torch.equal(cpu_experts(layer.experts, hidden, index, weights), expected)


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
            "its layers cannot be run one by one: expected no search, no ablation and "
            "calibration.engine=resident"
        )


def check_first_layer(model: PreTrainedModel) -> None:
    """Raise UserError if the first decoder layer of `model`, which may be on the meta device, gives
    something else than hidden states. Computes shapes only."""
    layers = routed_layers(model)
    first, *_ = model.get_submodule(layers[0].stack).children()
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    # RuntimeError: what follows depends on numbers, so that only a run can tell
    with ExitStack() as undo, suppress(RuntimeError):
        for layer in layers:
            replace_experts(layer, lambda _: lambda states, *_: states, undo)
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        output_of(first, partial(model.base_model, ids, use_cache=False))


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
