"""Routing tensors in the files of a checkpoint: their names, and their precision, which is kept
whatever precision the model is loaded in."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import replace_tensor
from moe_lab.models.checkpoint import Checkpoint, bits_of
from moe_lab.models.config_json import UNQUANTISED
from moe_lab.models.discover import MoELayer, RoutingTensor, is_ragged, routed_layers
from moe_lab.models.transformers_private import NameMapping

LINEAR = ("weight", "bias")
"""Names of the routing tensors of a linear map."""


def stored_routing(names: NameMapping) -> dict[str, int]:
    """Name in the checkpoint of each routing tensor -> number of its layer. `names`: the mapping
    from the checkpoint to its model. UserError if a routing tensor is not stored, and for a tensor
    of a MoE block that pruning could neither slice nor keep."""
    layers = routed_layers(names.model)
    paths = {module: path for path, module in names.model.named_modules()}
    state = names.model.state_dict()
    routing = {
        f"{paths[part.module]}.{part.name}": layer.index
        for layer in layers
        for part in layer.routing
    }
    # modules whose tensors have an entry for each expert; packed experts are only evaluated
    owners = {
        paths[module]
        for layer in layers
        for module in (layer.block, layer.experts, *layer.router.modules())
        if not is_ragged(module)
    }
    expert_tensors = layers[0].family.expert_tensors(names.names)
    stored = {}
    missing = routing.keys() & state.keys()
    for name, renamed, _ in names.renamed:
        if renamed in routing:
            stored[name] = routing[renamed]
            missing.discard(renamed)
        elif renamed.rpartition(".")[0] in owners and name not in expert_tensors:
            raise UserError(
                f"{name} belongs to a MoE block, but moe_lab does not know how to prune it"
            )
    if missing:
        raise UserError(f"weights are missing that config.json asks for: {min(missing)}")
    return stored


class StoredRouting:
    """The routing tensors of a model, as they are in the files of its checkpoint."""

    def __init__(self, model: Any, checkpoint: Checkpoint, names: NameMapping) -> None:
        self.checkpoint = checkpoint
        self.names = names
        self.paths = {module: path for path, module in model.named_modules()}
        self.usual_bits = _usual_bits(checkpoint)
        """Bits per number in most weights of the checkpoint."""

    def restore(self, layer: MoELayer) -> None:
        """Replace the routing tensors of `layer` by those in the files.

        In some families, transformers rounds routing tensors to the precision of the model. Biases
        that differ by little then become equal, and tokens are routed to other experts.

        The weight and the bias of the router keep the precision of the loaded model, unless they
        are stored in a higher precision than most weights in the files.
        """
        stored = self._stored_tensors(layer)
        linear = {
            part: stored.get(part, part.tensor) for part in layer.routing if part.name in LINEAR
        }
        router, loaded_dtype = next((part.module, part.tensor.dtype) for part in linear)
        # torch's `linear` requires one dtype for the weight and the bias
        linear_dtype = loaded_dtype
        for tensor in linear.values():
            if 8 * tensor.element_size() > self.usual_bits:
                linear_dtype = torch.promote_types(linear_dtype, tensor.dtype)
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
        """Routing tensor of `layer` -> its numbers in the files. Tensors that are stored quantised
        or in another layout are left out. Numbers in fp64 are converted to fp32, because scores in
        fp64 would only work with experts and statistics in fp64."""
        stored_names = {}
        for part in layer.routing:
            name = self.names.copied.get(f"{self.paths[part.module]}.{part.name}")
            if name is not None and self.checkpoint.tensors[name].dtype in UNQUANTISED:
                stored_names[part] = name
        tensors = {}
        with ExitStack() as files:
            slices = self.checkpoint.slices(stored_names.values(), files)
            for part, name in stored_names.items():
                tensor = slices[name][:]
                tensors[part] = tensor.float() if tensor.dtype == torch.float64 else tensor
        return tensors


def _usual_bits(checkpoint: Checkpoint) -> int:
    """Bits per number in the floating-point dtype that takes the most bytes of a checkpoint. Packed
    quantised weights are stored as integers, so they do not count."""
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
