"""Store a model's experts as NF4, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.discover import linears
from moe_lab.pruning.ragged import RaggedExperts
from moe_lab.recovery.fourbit import FourBitLinear, FourBitMatrices
from moe_lab.recovery.parts import experts_of, storage
from moe_lab.recovery.settings import check_modules


def quantize(model: Any, modules: Sequence[str]) -> dict[str, Any]:
    """Store the weights of `modules` (out of experts, shared_experts, attention) of `model` as NF4 with double
    quantisation, in place; what computes with them reads them one matrix at a time, in the model's own dtype.

    Stacked and ragged experts alike. Routers, the gates of shared experts, biases, norms, embeddings and lm_head stay
    as they are. Tensors that `model` shares with another one are replaced, not written to. Experts run eagerly
    afterwards, because grouped kernels need all of them at once. The same weights give the same bits every time.

    Returns {"weights": module -> how many were quantised (0 where the model has none, as of shared experts),
    "bytes": {"before": ..., "after": ...}}, both as `storage`. UserError for a model that holds quantised weights
    already, an unknown module, a dtype without NF4, and when bitsandbytes is missing.
    """
    check_modules(list(modules))
    check_unquantized(model)
    before = storage(model)
    weights = {part: _experts(model) if part == "experts" else _linears(model, part) for part in dict.fromkeys(modules)}
    model.save_pretrained = _refuse_to_save
    return {"weights": weights, "bytes": {"before": before, "after": storage(model)}}


def check_unquantized(model: Any) -> None:
    """UserError when `model` holds weights that are quantised: by this file, or by the checkpoint it came from."""
    ours = any(isinstance(module, FourBitMatrices) for module in model.modules())
    foreign = getattr(model, "is_quantized", False) or any(tensor.element_size() < 2 for tensor in model.parameters())
    if ours or foreign:
        source = "NF4 by recovery.bits=4" if ours else "its checkpoint"
        raise UserError(f"the model's weights are quantised already ({source}): expected weights of 16 or 32 bits")


def _experts(model: Any) -> int:
    """Quantise all routed experts; how many weights they have."""
    count = 0
    for experts in experts_of(model):
        for name, matrices in _matrices(experts.module).items():
            count += sum(matrix.numel() for matrix in matrices)
            stack = FourBitMatrices(matrices)
            delattr(experts.module, name)
            setattr(experts.module, name, stack)
    model.set_experts_implementation("eager")
    return count


def _matrices(experts: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Name of each stack of weights of an experts module -> its matrices, one per expert, as they lie in memory."""
    if isinstance(experts, RaggedExperts):
        pairs = [experts.weights(expert) for expert in range(experts.num_experts)]
        return {"gate_up_packed": [pair[0] for pair in pairs], "down_packed": [pair[1] for pair in pairs]}
    stacks = {name: tensor for name, tensor in experts.named_parameters(recurse=False) if tensor.dim() == 3}
    return {name: list(stack.detach().unbind()) for name, stack in stacks.items()}


def _linears(model: nn.Module, part: str) -> int:
    """Quantise the linear maps of a part; how many weights they have."""
    found = list(linears(model, part))
    for name, module in found:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, FourBitLinear(module))
    return sum(module.weight.numel() for _, module in found)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Stands in for save_pretrained: what it would write, nothing could load."""
    raise UserError(
        "a model with recovery.bits=4 cannot be saved by save_pretrained: export its plan, quantise on loading"
    )
