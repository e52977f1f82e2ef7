"""Store a model's experts as NF4 with double quantisation, in place; a matrix is dequantised when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from moe_lab.errors import UserError
from moe_lab.models.discover import is_ragged, linears, part_of, routed_layers
from moe_lab.pruning.cost import NF4_BLOCK, SCALE_BLOCK
from moe_lab.recovery.settings import bitsandbytes_functional, check_modules

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def storage(model: nn.Module) -> dict[str, int]:
    """Bytes of the parameters and buffers of `model`: experts, shared_experts, attention, rest, and their total.

    All tensors count, including the constants of quantised weights; tensors that share memory count once.
    """
    held = {"experts": 0, "shared_experts": 0, "attention": 0, "rest": 0}
    seen: set[tuple[torch.device, int]] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = (tensor.device, tensor.data_ptr())
        if tensor.numel() and place not in seen:
            seen.add(place)
            held[part_of(name)] += tensor.numel() * tensor.element_size()
    return {**held, "total": sum(held.values())}


def quantize(model: Any, modules: Sequence[str]) -> dict[str, Any]:
    """Store the weights of `modules` of `model` as NF4 with double quantisation, in place.

    `modules` are some of experts, shared_experts, attention. Each matrix is dequantised when it is used, one at a time,
    to the model's own dtype. Experts may be stacked or ragged. Routers, the gates of shared experts, biases, norms,
    embeddings and lm_head are not quantised. Tensors that `model` shares with another model are replaced, not written
    to. Experts run eagerly afterwards, because grouped kernels need all of them at once. The same weights give the same
    bits every time.

    Returns {"weights": module -> number of quantised weights (0 if the model has none, e.g. no shared experts),
    "bytes": {"before": ..., "after": ...}}, both as `storage`. UserError for a model that already holds quantised
    weights, an unknown module, a dtype without NF4, and when bitsandbytes is missing.
    """
    check_modules(list(modules))
    check_unquantized(model)
    before = storage(model)
    weights = {}
    for part in dict.fromkeys(modules):
        weights[part] = _experts(model) if part == "experts" else _linears(model, part)
    model.save_pretrained = _refuse_to_save
    return {"weights": weights, "bytes": {"before": before, "after": storage(model)}}


def check_unquantized(model: Any) -> None:
    """Raise UserError when `model` holds quantised weights, whether from `quantize` or from its checkpoint."""
    ours = any(isinstance(module, FourBitMatrix) for module in model.modules())
    foreign = getattr(model, "is_quantized", False) or any(tensor.element_size() < 2 for tensor in model.parameters())
    if ours or foreign:
        source = "NF4 by recovery.bits=4" if ours else "its checkpoint"
        raise UserError(f"the model's weights are quantised already ({source}): expected weights of 16 or 32 bits")


def _experts(model: Any) -> int:
    """Quantise all routed experts, and return the number of their weights."""
    count = 0
    for layer in routed_layers(model):
        for name, matrices in _matrices(layer.experts).items():
            count += sum(matrix.numel() for matrix in matrices)
            stack = FourBitMatrices(matrices)
            delattr(layer.experts, name)
            setattr(layer.experts, name, stack)
    model.set_experts_implementation("eager")
    return count


def _matrices(experts: Any) -> dict[str, list[torch.Tensor]]:
    """Name of each stack of weights of an experts module -> its matrices, one per expert, as stored in memory."""
    if is_ragged(experts):
        pairs = [experts.weights(expert) for expert in range(experts.num_experts)]
        return {"gate_up_packed": [pair[0] for pair in pairs], "down_packed": [pair[1] for pair in pairs]}
    stacks = {name: tensor for name, tensor in experts.named_parameters(recurse=False) if tensor.dim() == 3}
    return {name: list(stack.detach().unbind()) for name, stack in stacks.items()}


def rounded_experts(experts: Any) -> dict[str, torch.Tensor]:
    """Name -> each stack of weights of an experts module, as the numbers that `quantize` rounds it to."""
    rounded_stacks = {}
    for name, matrices in _matrices(experts).items():
        stack = FourBitMatrices(matrices)
        values = torch.cat([stack[expert] for expert in range(len(stack))])
        rounded_stacks[name] = values.view_as(getattr(experts, name))
    return rounded_stacks


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The numbers that `quantize` rounds the weight of a linear map to."""
    values: torch.Tensor = FourBitMatrix(weight)()
    return values


def nf4_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ending of a name -> tensor: a weight (rows, columns) in the NF4 format of bitsandbytes.

    It stands for the same numbers as `rounded` if the columns are a multiple of NF4_BLOCK.
    """
    packed, state = bitsandbytes_functional().quantize_4bit(
        weight.detach(), blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=True
    )
    return {"": packed, **{f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()}}


def _linears(model: nn.Module, part: str) -> int:
    """Quantise the linear maps of a part, and return the number of their weights."""
    maps = list(linears(model, part))
    for name, module in maps:
        model.set_submodule(name, FourBitLinear(module))
    return sum(module.weight.numel() for _, module in maps)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Replaces save_pretrained, which would write files that nothing can load."""
    raise UserError(
        "a model with recovery.bits=4 cannot be saved by save_pretrained: export its plan, quantise on loading"
    )


class FourBitMatrix(nn.Module):
    """A matrix in NF4 with double quantisation; calling it gives the matrix, dequantised to its original dtype.

    A weight takes 4 bits: the nearest of 16 quantiles of the normal distribution, times the scale of its block of 64,
    their largest magnitude. A scale takes 8 bits: the mean of all scales is subtracted, and the result is stored
    relative to the largest of 256. That is 4.127 bits per weight in all. The matrix is cut into blocks row by row; its
    last block is padded with zeros.
    """

    packed: torch.Tensor
    """uint8 (blocks * 32, 1): two weights a byte."""
    scales: torch.Tensor
    """uint8 (blocks,): quantised scales of the blocks."""
    nested: torch.Tensor
    """fp32: scales of the scales."""
    mean: torch.Tensor
    """fp32 (): mean that was subtracted from the scales before they were quantised."""

    def __init__(self, matrix: torch.Tensor) -> None:
        """Quantise `matrix` (rows, columns) of float32, bfloat16 or float16."""
        super().__init__()
        packed, state = _quantized(matrix)
        self.shape, self.dtype = matrix.shape, matrix.dtype
        self.register_buffer("packed", packed)
        self.register_buffer("scales", state.absmax)
        self.register_buffer("nested", state.state2.absmax)
        self.register_buffer("mean", state.offset if matrix.numel() else torch.zeros_like(state.offset))

    def forward(self) -> torch.Tensor:
        """The matrix (rows, columns)."""
        functional = bitsandbytes_functional()
        # As rows of one block each: on the CPU, bitsandbytes 0.50 dequantises rows that end inside a block wrongly.
        code, code_of_scales = _codes(self.packed.device)
        of_scales = functional.QuantState(
            absmax=self.nested, code=code_of_scales, blocksize=SCALE_BLOCK, dtype=torch.float32
        )
        state = functional.QuantState(
            absmax=self.scales,
            shape=torch.Size((len(self.scales), NF4_BLOCK)),
            code=code,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=self.dtype,
            offset=self.mean,
            state2=of_scales,
        )
        blocks = functional.dequantize_4bit(self.packed, state)
        matrix: torch.Tensor = blocks.reshape(-1)[: self.shape.numel()].view(self.shape)
        return matrix


class FourBitMatrices(nn.Module):
    """Replaces a stack of matrices by NF4 weights: indexing returns one matrix, dequantised to its original dtype.

    `matrices[e]`, with a number or a tensor that holds one, is matrix e; so the eager forward of an experts module
    reads one expert after the other and never holds more than one in full. `matrices[start:stop]` is the matrix that
    begins at row `start` of all matrices concatenated by rows, which is how packed experts are read.
    """

    def __init__(self, matrices: Sequence[torch.Tensor]) -> None:
        """Quantise `matrices`, each (rows, columns), of one dtype (float32, bfloat16 or float16) and device."""
        super().__init__()
        self.each = nn.ModuleList(map(FourBitMatrix, matrices))
        starts = accumulate((len(matrix) for matrix in matrices[:-1]), initial=0)
        self.numbers = {start: e for e, start in enumerate(starts) if len(matrices[e])}

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, key: int | torch.Tensor | slice) -> torch.Tensor:
        """One matrix (rows, columns), dequantised."""
        if isinstance(key, slice) and key.start == key.stop:
            first: Any = self.each[0]
            none: torch.Tensor = first.nested.new_zeros((0, first.shape[1]), dtype=first.dtype)
            return none
        matrix: torch.Tensor = self.each[self.numbers[key.start] if isinstance(key, slice) else int(key)]()
        return matrix


class FourBitLinear(nn.Module):
    """Replaces a linear map: its weight is held in 4 bits, its bias is unchanged."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight = FourBitMatrix(original.weight)
        self.bias = original.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features), computed in the dtype of `rows`."""
        return linear(rows, self.weight(), self.bias)


@cache
def _codes(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the 4-bit codes of weights (16,) and of the 8-bit codes of scales (256,), same for every matrix."""
    _, state = _quantized(torch.zeros(1, NF4_BLOCK, device=device))
    return state.code, state.state2.code


def _quantized(matrix: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Quantise a matrix as rows of one block each, the last padded with zeros: (packed, state of bitsandbytes)."""
    if matrix.dtype not in DTYPES:
        name = str(matrix.dtype).removeprefix("torch.")
        raise UserError(f"model.dtype={name} has no NF4: expected float32, bfloat16 or float16")
    flat = matrix.detach().reshape(-1)
    blocks = pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    packed, state = bitsandbytes_functional().quantize_4bit(
        blocks, blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=True
    )
    return packed, state
