"""Keep routing tensors in the precision of the files, whatever precision the model is loaded in."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from moe_lab.exported_code.ragged import replace_tensor
from moe_lab.models.checkpoint import Checkpoint, bits_of
from moe_lab.models.discover import MoELayer, RoutingTensor
from moe_lab.models.transformers_private import NameMapping

UNQUANTISED = ("F64", "F32", "F16", "BF16")
"""Types of numbers without a scale."""
LINEAR = ("weight", "bias")
"""Names of the routing tensors of a linear map: hidden states are multiplied with the weight, and
the bias is added to the product."""


class StoredRouting:
    """The routing tensors of a model, as they are in the files of its checkpoint."""

    def __init__(self, model: Any, checkpoint: Checkpoint, names: NameMapping) -> None:
        """`names`: the mapping from the checkpoint's tensors to the tensors of `model`."""
        self.checkpoint = checkpoint
        self.names = names
        self.paths = {module: path for path, module in model.named_modules()}
        self.usual_bits = _usual_bits(checkpoint)
        """Bits of a number in most weights of the checkpoint."""

    def restore(self, layer: MoELayer) -> None:
        """Replace the routing tensors of a loaded layer, in place, by those in the files.

        In some families, transformers rounds routing tensors to the precision of the model. Biases
        that differ by little then become equal, and tokens are routed to other experts. So vectors
        that are added to scores get at least their precision in the files. The linear map of a
        router gets at least its precision in the files only if most weights in the files have a
        lower precision. Otherwise, the linear map keeps the precision of the loaded model.
        """
        stored = self._stored_tensors(layer)
        linear = {
            part: stored.get(part, part.tensor) for part in layer.routing if part.name in LINEAR
        }
        router, loaded_dtype = next((part.module, part.tensor.dtype) for part in linear)
        # the weight and the bias must have the same type
        linear_dtype = loaded_dtype
        for tensor in linear.values():
            if 8 * tensor.element_size() > self.usual_bits:
                linear_dtype = torch.promote_types(linear_dtype, tensor.dtype)
        # `linear` also has tensors of the linear map that are not in `stored`
        for part, tensor in (linear | stored).items():
            dtype = (
                linear_dtype
                if part in linear
                else torch.promote_types(part.tensor.dtype, tensor.dtype)
            )
            numbers = tensor.to(part.tensor.device, dtype).reshape(part.tensor.shape)
            replace_tensor(part.module, part.name, numbers)
        if linear_dtype != loaded_dtype:
            router.register_forward_pre_hook(_in_precision_of_weight)

    def _stored_tensors(self, layer: MoELayer) -> dict[RoutingTensor, torch.Tensor]:
        """Routing tensor of a layer -> its numbers in the files. Tensors that are stored quantised
        or in another layout than the model's are left out. Numbers in fp64 are converted to fp32,
        because scores in fp64 would need experts and statistics in fp64."""
        names = {}
        for part in layer.routing:
            name = self.names.copied.get(f"{self.paths[part.module]}.{part.name}")
            if name is not None and self.checkpoint.tensors[name].dtype in UNQUANTISED:
                names[part] = name
        tensors = {}
        with ExitStack() as files:
            slices = self.checkpoint.slices(names.values(), files)
            for part, name in names.items():
                tensor = slices[name][:]
                tensors[part] = tensor.float() if tensor.dtype == torch.float64 else tensor
        return tensors


def _usual_bits(checkpoint: Checkpoint) -> int:
    """Bits per number of the most common floating-point type in a checkpoint, by the bytes of all
    tensors of the type. Packed quantised weights are stored as integers and do not count."""
    sizes: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        if entry.dtype.startswith(("F", "BF")):
            sizes[entry.dtype] += entry.size
    return bits_of(max(sizes, key=lambda dtype: sizes[dtype]))


def _in_precision_of_weight(
    module: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """A forward pre-hook that converts the inputs of a router to the dtype of the router's
    weight."""
    weight: Any = module.weight
    return tuple(tensor.to(weight.dtype) for tensor in inputs)
