"""Keep what decides where tokens go in the precision of the files, whatever that of the loaded
model is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import reduce
from typing import Any

import torch
from torch import nn

from moe_lab.exported_code.ragged import replace_tensor
from moe_lab.models.checkpoint import Checkpoint, bits_of
from moe_lab.models.discover import MoELayer, RoutingTensor
from moe_lab.models.transformers_private import copied_tensors

PLAIN = ("F64", "F32", "F16", "BF16")
"""Types of numbers that stand for themselves, without a scale."""
LINEAR = ("weight", "bias")
"""Names of the routing tensors that hidden states are multiplied with, and that are added to the
product."""


def restore_routing(
    model: Any, layers: Iterable[MoELayer], checkpoint: Checkpoint, names: Iterable[str]
) -> None:
    """Give the routing tensors of loaded `layers`, in place, the numbers of `names`, tensors of
    their checkpoint.

    In some families transformers rounds them to the precision of the model: biases that differ by
    little become equal, and tokens go to other experts. Vectors that are added to scores get at
    least the precision of the files. So does the linear map of a router, but only where the files
    have most other weights in a lower precision, because a checkpoint of one precision is meant to
    be loaded in that of the model.
    """
    sources = copied_tensors(
        model, (name for name in names if checkpoint.tensors[name].dtype in PLAIN)
    )
    paths = {
        id(tensor): path for path, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    usual = _usual_bits(checkpoint)
    for layer in layers:
        named = {part: sources.get(paths[id(part.tensor)]) for part in layer.routing}
        with ExitStack() as files:
            slices = checkpoint.slices(filter(None, named.values()), files)
            stored = {part: _read(slices[name]) for part, name in named.items() if name in slices}
        _restore(layer, stored, usual)


def _read(stored: Any) -> torch.Tensor:
    """A slice of a file, fp32 at most: scores in fp64 would need experts and statistics in fp64."""
    tensor: torch.Tensor = stored[:]
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _usual_bits(checkpoint: Checkpoint) -> int:
    """Bits of the numbers that most bytes of a checkpoint are of; packed ones, which are stored as
    integers, do not count."""
    sizes: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        if entry.dtype.startswith(("F", "BF")):
            sizes[entry.dtype] += entry.size
    return bits_of(max(sizes, key=lambda dtype: sizes[dtype]))


def _restore(layer: MoELayer, stored: Mapping[RoutingTensor, torch.Tensor], usual: int) -> None:
    """As `restore_routing`, for one layer. `stored`: its routing tensors as they are in the files.
    `usual`: bits of most numbers there."""
    linear = {part: stored.get(part, part.tensor) for part in layer.routing if part.name in LINEAR}
    module, loaded = next((part.module, part.tensor.dtype) for part in linear)
    above = [tensor.dtype for tensor in linear.values() if 8 * tensor.element_size() > usual]
    of_linear = reduce(torch.promote_types, above, loaded)  # a product takes one precision
    for part, tensor in (linear | dict(stored)).items():
        dtype = (
            of_linear if part in linear else torch.promote_types(part.tensor.dtype, tensor.dtype)
        )
        numbers = tensor.to(part.tensor.device, dtype).reshape(part.tensor.shape)
        replace_tensor(part.module, part.name, numbers)
    if of_linear != loaded:
        module.register_forward_pre_hook(_in_precision_of_weight)


def _in_precision_of_weight(
    module: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """The inputs of a router whose weight has a higher precision than hidden states."""
    weight: Any = module.weight
    return tuple(tensor.to(weight.dtype) for tensor in inputs)
