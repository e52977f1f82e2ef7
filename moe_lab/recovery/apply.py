"""Apply a recovery to a copy of a model: prune it, load its fine-tuned tensors, quantise it."""

from __future__ import annotations

import json
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
from moe_lab.models.discover import is_ragged, linear_modules, part_of, routed_layers
from moe_lab.pruning.cost import NF4_BLOCK
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune, share_copy

TENSORS = "tuned.safetensors"
REPORT = "finetune.json"


def recovered(
    model: Any, plan: Plan | None, *, bits: int, modules: Sequence[str], tuned: Path | None
) -> Any:
    """A copy of `model` to which a recovery was applied. The copy is pruned by `plan`, then gets
    the tensors of a fine-tuning or fit, and then is quantised.

    plan: None to prune nothing; tuned: output folder of the fine-tuning or fit, None if there was
    none; bits: 4 to store the weights of `modules` as NF4, any other number to leave them.
    `model` is not changed. Both models share the tensors that stay the same.
    """
    result = pruned(model, plan)
    if tuned is not None:
        load_tuned(result, tuned / TENSORS)
    if bits == 4:
        quantize(result, modules)
    return result


def pruned(model: Any, plan: Plan | None) -> Any:
    """A copy of `model`, pruned by `plan`, or not pruned if `plan` is None. The copy and `model`
    share the tensors that stay the same."""
    return share_copy(model) if plan is None else prune(model, plan)


def save_tuned(out: Path, tensors: Mapping[str, torch.Tensor], report: Mapping[str, Any]) -> None:
    """Write the changed tensors of a fine-tuning or fit, and the report about it, to the folder
    `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, out / TENSORS
    )
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n")


def load_tuned(model: nn.Module, file: Path, prefix: str = "") -> list[str]:
    """Replace parameters of `model` by the tensors of the same names in `file`. Returns the names.
    Only tensors whose names begin with `prefix` are read."""
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


def storage_bytes(model: nn.Module) -> dict[str, int]:
    """Part of `model` (experts, shared_experts, attention, rest, total) -> bytes of the part's
    parameters and buffers. Tensors that share memory count once."""
    sizes = {"experts": 0, "shared_experts": 0, "attention": 0, "rest": 0}
    addresses: set[tuple[torch.device, int]] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        address = (tensor.device, tensor.data_ptr())
        # an empty tensor has no bytes, and may have the address of another tensor
        if tensor.numel() and address not in addresses:
            addresses.add(address)
            sizes[part_of(name)] += tensor.numel() * tensor.element_size()
    return {**sizes, "total": sum(sizes.values())}


def quantize(model: Any, modules: Iterable[str]) -> None:
    """Store the weights of some parts of `model` as NF4 with double quantisation, in place.

    modules: names of the parts (experts, shared_experts, attention). A matrix is dequantised to its
    original dtype when it is used. Experts run one after another, because grouped kernels would
    need the matrices of all experts at once. Tensors are replaced and not overwritten, because
    other models may share them. UserError when bitsandbytes is missing.
    """
    for part in modules:
        if part == "experts":
            _quantize_experts(model)
        else:
            for name, module in list(linear_modules(model, part)):
                model.set_submodule(name, FourBitLinear(module))


def _quantize_experts(model: Any) -> None:
    """Store the weights of all routed experts as NF4, see `quantize`."""
    for layer in routed_layers(model):
        experts: Any = layer.experts
        for name, matrices in _matrices(experts).items():
            stack = FourBitMatrices(map(FourBitMatrix, matrices))
            delattr(experts, name)
            setattr(experts, name, stack)
        if is_ragged(experts):  # RaggedExperts.forward calls `weights` for the weights of an expert
            experts.weights = partial(_ragged_weights, experts.gate_up_packed, experts.down_packed)
    model.set_experts_implementation("eager")  # one expert after another


def _ragged_weights(
    gate_up: FourBitMatrices, down: FourBitMatrices, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate and up, down): the dequantised weights of one expert. This function replaces
    `RaggedExperts.weights`."""
    return gate_up[expert], down[expert]


def _matrices(experts: Any) -> dict[str, Sequence[torch.Tensor]]:
    """Name of a stack of weights in an experts module -> the matrix (rows, columns) of each
    expert. Stacks of biases, which have only two axes, are left out."""
    if is_ragged(experts):
        # each expert has a pair (gate and up, down)
        gate_up, down = zip(*map(experts.weights, range(experts.num_experts)), strict=True)
        return {"gate_up_packed": gate_up, "down_packed": down}
    return {
        name: stack.detach().unbind()
        for name, stack in experts.named_parameters(recurse=False)
        if stack.dim() == 3
    }


def rounded_experts(experts: Any) -> dict[str, torch.Tensor]:
    """Name of a stack of weights in an experts module -> a stack of the same shape with the numbers
    to which `quantize` rounds the weights."""
    return {
        name: torch.cat([nf4_rounded(matrix) for matrix in matrices]).view_as(
            getattr(experts, name)
        )
        for name, matrices in _matrices(experts).items()
    }


def nf4_rounded(weight: torch.Tensor) -> torch.Tensor:
    """A copy of the matrix `weight` with the numbers to which `quantize` rounds the weights."""
    values: torch.Tensor = FourBitMatrix(weight)()
    return values


def nf4_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrix `weight` (rows, columns) in NF4, as bitsandbytes stores it in a checkpoint: suffix
    of the weight's name -> tensor. The suffix of the packed weights is "". The tensors encode the
    numbers that `nf4_rounded` returns if the number of columns is a multiple of NF4_BLOCK, so that
    no block has parts of two rows."""
    packed, state = _to_nf4(weight.detach())
    return {
        "": packed,
        **{f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()},
    }


class FourBitMatrix(nn.Module):
    """A matrix in NF4 with double quantisation. A call of the module returns the matrix,
    dequantised to its original dtype.

    The matrix is cut row by row into blocks of 64 weights; the last block is padded with zeros. The
    scale of a block is the largest magnitude of its weights. A weight is stored in 4 bits, as the
    index of one of 16 quantiles of the normal distribution. The quantile times the scale is the
    rounded weight. A scale is stored in 8 bits, as the difference between this scale and the mean
    of all scales. Each 256 differences are stored relative to the largest of them, which takes 32
    bits. In all, this makes 4.127 bits per weight.
    """

    packed: torch.Tensor
    """uint8 (blocks * 32, 1), with two weights in a byte. Further buffers: `scales` has the scales
    of the blocks, `nested` the scales of these scales, and `mean` the mean of the scales."""

    def __init__(self, matrix: torch.Tensor) -> None:
        """Quantise `matrix` (rows, columns) of float32, bfloat16 or float16."""
        super().__init__()
        self.shape = matrix.shape
        flat = matrix.detach().reshape(-1)
        # Zeros fill up the last block. Each block is made a row, because bitsandbytes 0.50 on the
        # CPU dequantises rows that end inside a block wrongly.
        packed, self.state = _to_nf4(pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK))
        if not len(flat):
            self.state.offset.zero_()  # the mean of no scales would be NaN
        # As buffers, the tensors of the state move with the model, and `storage_bytes` counts them.
        self.register_buffer("packed", packed)
        self.register_buffer("scales", self.state.absmax)
        # the scales are quantised too, and `state2` has their own scales
        self.register_buffer("nested", self.state.state2.absmax)
        self.register_buffer("mean", self.state.offset)

    def forward(self) -> torch.Tensor:
        """The matrix (rows, columns)."""
        self.state.to(self.packed.device)  # the model may have been moved
        blocks = bitsandbytes_functional().dequantize_4bit(self.packed, self.state)
        matrix: torch.Tensor = blocks.reshape(-1)[: self.shape.numel()].view(self.shape)
        return matrix


class FourBitMatrices(nn.ModuleList):
    """A stack of matrices in NF4 that replaces a stack of weights in an experts module.

    `matrices[e]` dequantises matrix e, where e is a number or a tensor with one number. So the
    eager forward of the experts module dequantises one expert after another.
    """

    def __getitem__(self, expert: Any) -> Any:
        """The dequantised matrix (rows, columns) of an expert. `expert`: id of the expert; the
        forward of an experts module passes a tensor with one number."""
        return super().__getitem__(int(expert))()


class FourBitLinear(nn.Module):
    """A linear map that replaces the linear map `original`. The weight is stored in 4 bits, the
    bias is shared with `original`."""

    def __init__(self, original: nn.Linear) -> None:
        """Quantise the weight of `original`; the bias is not quantised."""
        super().__init__()
        self.in_features = original.in_features
        self.out_features = original.out_features
        self.weight = FourBitMatrix(original.weight)
        self.bias = original.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features), computed in the dtype of `rows`."""
        return linear(rows, self.weight(), self.bias)


def _to_nf4(matrix: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Convert a matrix to the NF4 format of bitsandbytes. Returns (packed weights, state with the
    scales and the mean of the scales)."""
    packed, state = bitsandbytes_functional().quantize_4bit(
        matrix, blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=True
    )
    return packed, state


@cache
def bitsandbytes_functional() -> Any:
    """The module bitsandbytes.functional. If bitsandbytes is not installed, raise a UserError with
    the command that installs bitsandbytes."""
    check_installed("bitsandbytes", "quantisation", "recovery.bits=4")
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # without a GPU, the import logs a warning
    try:
        return import_module("bitsandbytes.functional")
    finally:
        log.setLevel(level)
