"""Apply a recovery to a copy of a model: prune it, load its fine-tuned tensors, quantise it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, pad

from moe_lab.errors import check_installed
from moe_lab.exported_code.ragged import replace_tensor
from moe_lab.json_files import write_json
from moe_lab.models.discover import is_ragged, linear_modules, routed_layers
from moe_lab.pruning.cost import NF4_BLOCK
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune

TENSORS = "tuned.safetensors"
REPORT = "finetune.json"


def recovered(model: Any, plan: Plan, *, modules: Iterable[str], tuned: Path | None) -> Any:
    """A copy of `model`, pruned by `plan`, with the tensors of a fine-tuning or fit, and quantised.
    The copy shares unchanged tensors with `model`.

    tuned: output folder of the fine-tuning or fit; modules: parts of the model, as in `quantize`,
    whose weights are stored as NF4.
    """
    result = prune(model, plan)
    if tuned is not None:
        load_tuned(result, tuned / TENSORS)
    quantize(result, modules)
    return result


def save_tuned(out: Path, tensors: Mapping[str, torch.Tensor], report: Mapping[str, Any]) -> None:
    """Write the changed tensors and the report of a fine-tuning or fit to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, out / TENSORS
    )
    write_json(out / REPORT, report)


def tuned_names(file: Path) -> list[str]:
    """Names of the tensors in `file`."""
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def load_tuned(model: nn.Module, file: Path, prefix: str = "") -> list[str]:
    """Replace parameters of `model` by the tensors in `file` whose names begin with `prefix`.
    Returns these names."""
    with safe_open(file, framework="pt") as tensors:
        names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118
        for name in names:
            original = model.get_parameter(name)
            # The copy is needed because rows of the memory-mapped file may not be aligned, and
            # matrix products of such rows round differently.
            tensor = tensors.get_tensor(name).to(original.device, original.dtype, copy=True)
            owner, _, attribute = name.rpartition(".")
            replace_tensor(
                model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False)
            )
    return names


# Below: weights in NF4 with double quantisation. A matrix is dequantised each time it is used.


def storage_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers of `module`. Tensors that share memory count once."""
    sizes = {
        (tensor.device, tensor.data_ptr()): tensor.nbytes
        for tensor in (*module.parameters(), *module.buffers())
        # an empty tensor may have the address of another tensor
        if tensor.numel()
    }
    return sum(sizes.values())


def quantize(model: Any, modules: Iterable[str]) -> None:
    """Store the weights of some parts of `model` as NF4 with double quantisation, in place.

    modules: names of the parts (experts, shared_experts, attention). Tensors are replaced and not
    overwritten, because other models may share them. UserError when bitsandbytes is missing.
    """
    for part in modules:
        if part == "experts":
            _quantize_experts(model)
        else:
            for name, module in list(linear_modules(model, part)):
                model.set_submodule(name, FourBitLinear(module))


def _quantize_experts(model: Any) -> None:
    """Store the weights of all routed experts as NF4."""
    for layer in routed_layers(model):
        experts: Any = layer.experts
        for name, matrices in expert_matrices(experts).items():
            stack = FourBitMatrices(map(FourBitMatrix, matrices))
            delattr(experts, name)
            setattr(experts, name, stack)
        if is_ragged(experts):  # RaggedExperts.forward calls `weights` for the weights of an expert
            experts.weights = partial(_ragged_weights, experts.gate_up_packed, experts.down_packed)
    model.set_experts_implementation("eager")  # grouped kernels need all matrices at once


def _ragged_weights(
    gate_up: FourBitMatrices, down: FourBitMatrices, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replacement of `RaggedExperts.weights`: (gate and up, down) of one expert, dequantised."""
    return gate_up[expert], down[expert]


def expert_matrices(experts: Any) -> dict[str, Sequence[torch.Tensor]]:
    """Name of a stack of weights -> the matrix (rows, columns) of each expert. Stacks of biases,
    which have only two axes, are left out."""
    if is_ragged(experts):
        gate_up, down = zip(*map(experts.weights, range(experts.num_experts)), strict=True)
        return {"gate_up_packed": gate_up, "down_packed": down}
    return {
        name: stack.detach().unbind()
        for name, stack in experts.named_parameters(recurse=False)
        if stack.dim() == 3
    }


def rounded_experts(experts: Any) -> dict[str, torch.Tensor]:
    """Name of a stack of weights -> a stack of the same shape with the numbers to which `quantize`
    rounds the weights."""
    return {
        name: torch.cat([FourBitMatrix(matrix)() for matrix in matrices]).view_as(
            getattr(experts, name)
        )
        for name, matrices in expert_matrices(experts).items()
    }


class FourBitMatrix(nn.Module):
    """A matrix in NF4 with double quantisation. A call of the module returns the matrix,
    dequantised to its original dtype.

    The matrix is cut row by row into blocks of 64 weights. A weight is stored in 4 bits, relative
    to the scale of its block. A scale, the largest magnitude in the block, is stored in 8 bits. In
    all, this makes 4.127 bits per weight.
    """

    packed: torch.Tensor
    """uint8 (blocks * 32, 1), with two weights in a byte."""

    def __init__(self, matrix: torch.Tensor) -> None:
        """`matrix` (rows, columns): float32, bfloat16 or float16."""
        super().__init__()
        self.shape = matrix.shape
        flat = matrix.detach().reshape(-1)
        # Each block is made a row, because bitsandbytes 0.50 on the CPU dequantises rows that end
        # inside a block wrongly.
        packed, self.state = bitsandbytes_functional().quantize_4bit(
            pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK),
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            compress_statistics=True,
        )
        if not len(flat):
            self.state.offset.zero_()  # the mean of no scales would be NaN
        # As buffers, the tensors of the state move with the model, and `storage_bytes` counts them.
        self.register_buffer("packed", packed)
        self.register_buffer("scales", self.state.absmax)
        # the scales are quantised too, and `state2` has their own scales
        self.register_buffer("nested", self.state.state2.absmax)
        self.register_buffer("mean", self.state.offset)

    def forward(self) -> torch.Tensor:
        self.state.to(self.packed.device)  # the model may have been moved
        blocks = bitsandbytes_functional().dequantize_4bit(self.packed, self.state)
        matrix: torch.Tensor = blocks.reshape(-1)[: self.shape.numel()].view(self.shape)
        return matrix


class FourBitMatrices(nn.ModuleList):
    """A stack of matrices in NF4 that replaces a stack of weights in an experts module.
    `matrices[e]` is the dequantised matrix e."""

    def __getitem__(self, expert: Any) -> Any:
        """`expert`: a number, or a tensor with one number."""
        return super().__getitem__(int(expert))()


class FourBitLinear(nn.Module):
    """A linear map that replaces the linear map `original`, with the weight in 4 bits."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.weight = FourBitMatrix(original.weight)
        self.bias = original.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), computed in the dtype of `rows`."""
        return linear(rows, self.weight(), self.bias)


@cache
def bitsandbytes_functional() -> Any:
    """The module bitsandbytes.functional. UserError if bitsandbytes is not installed."""
    check_installed("bitsandbytes", "recovery.bits=4")
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # without a GPU, the import logs a warning
    try:
        return import_module("bitsandbytes.functional")
    finally:
        log.setLevel(level)
