"""Experts that a checkpoint holds one by one become the stacked tensors of a layer, in memory that is used again.

transformers casts every expert, stacks all experts of a projection, then joins projections, each time in fresh memory,
which the system hands out zeroed and page by page: that takes ten times as long as to copy the numbers. Here they are
copied once, from the mapped file to where they stay, and one layer after the other uses the same memory.

Private names of transformers 5.23 are used: its conversion operations, and how they are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter


class Memory:
    """Tensors on a device that are lent, and those that can be lent again."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._free: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with any content."""
        for place, tensor in enumerate(self._free):
            if tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype:
                self._lent.append(self._free.pop(place))
                return self._lent[-1]
        self._lent.append(torch.empty(tuple(shape), dtype=dtype, device=self.device))
        return self._lent[-1]

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nobody needs `tensors` any more, some of which may be lent. What is free until now is let go."""
        places = {tensor.data_ptr() for tensor in tensors}
        self._free = [tensor for tensor in self._lent if tensor.data_ptr() in places]
        self._lent = [tensor for tensor in self._lent if tensor.data_ptr() not in places]


def assemble(mapping: Iterable[Any], memory: Memory, plan: dict[str, Any]) -> list[Any]:
    """The conversion `mapping` of a model, changed so that its stacks of experts are made in `memory`.

    `plan` says in which precision tensors are read, by pattern of their names. It learns that experts are read as they
    are stored, to be cast when they are copied, where it said nothing of them.
    """
    found = list(mapping)
    for converter in found:
        if isinstance(converter, WeightConverter) and _stacks(converter.operations):
            (target,) = converter.target_patterns
            if not any(re.search(pattern.replace("*", ".*"), f"layers.0.{target}") for pattern in plan):
                converter.operations = [_Assemble(converter.operations, memory)]
                converter.force_cpu = True  # until it is copied to the memory's device
                plan[target] = None
    return found


def _stacks(operations: Sequence[Any]) -> bool:
    kinds = [type(operation) for operation in operations]
    return kinds in ([MergeModulelist], [MergeModulelist, Concatenate]) and operations[0].dim == 0


class _Assemble(ConversionOps):
    """What MergeModulelist along the first axis, perhaps followed by Concatenate along another one, gives."""

    def __init__(self, operations: list[Any], memory: Memory) -> None:
        self.operations, self.memory = operations, memory

    def __deepcopy__(self, memo: Any) -> _Assemble:
        return self  # converters are copied for every tensor they make, and all use one memory

    @torch.no_grad()
    def convert(  # type: ignore[override]  # its operations give tensors too
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Any,
        **named: Any,
    ) -> dict[str, torch.Tensor]:
        """Target -> experts (E, ...) from source -> a tensor per expert."""
        parts = [input_dict[source] for source in source_patterns if source in input_dict]
        dtype = model.get_parameter(full_layer_name).dtype
        if not _fit(parts):
            return self._by_transformers(input_dict, source_patterns, target_patterns, dtype)
        axis = self.operations[1].dim if len(self.operations) > 1 else 1
        shape = [len(parts[0]), *parts[0][0].shape]
        shape[axis] *= len(parts)
        whole = self.memory.take(shape, dtype)
        for part, target in zip(parts, whole.chunk(len(parts), axis), strict=True):
            for expert, tensor in enumerate(part):
                target[expert].copy_(tensor)
        return {target_patterns[0]: whole}

    def _by_transformers(
        self, tensors: Any, sources: list[str], targets: list[str], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Experts that differ in shape or number get what its operations make of them, mostly an error."""
        for operation in self.operations:
            tensors = operation.convert(tensors, sources, targets)
        return {name: tensor.to(self.memory.device, dtype) for name, tensor in tensors.items()}


def _fit(parts: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all parts hold equally many tensors of one shape."""
    shapes = {tuple(tensor.shape) for part in parts for tensor in part}
    return len(shapes) == 1 and len({len(part) for part in parts}) == 1
