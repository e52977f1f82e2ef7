"""Weights as a checkpoint stores them: quantised weights are dequantised one by one, and routing
tensors keep the precision of the files, whatever precision the model is loaded in."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import replace_tensor
from moe_lab.models.checkpoint import Checkpoint, Entry, bits_of, read_json
from moe_lab.models.config_json import (
    DEQUANTISED,
    PACKED,
    UNQUANTISED,
    quantization_of,
    quantization_section,
)
from moe_lab.models.discover import MoELayer, RoutingTensor, is_ragged, routed_layers
from moe_lab.models.transformers_private import NameMapping, unpack_fp4

NUMBERS = "numbers"
PARTS = {
    "packed": NUMBERS,
    "blocks": NUMBERS,
    "scale": "scale",
    "scale_inv": "scale",
    "scales": "scale",
    "scale_2": "factor",
    "global_scale": "divisor",
}
"""Ending of the name of a tensor, after the name of a weight -> the part of the weight that the
tensor holds. Scales are multiplied by the factor of ModelOpt, or divided by the divisor of
compressed-tensors. Numbers may also have the name of the weight."""
_PART = re.compile(rf"(?P<weight>.+(?:weight|_proj))_(?P<part>{'|'.join(PARTS)})")
FP4_GROUPS = {"F8_E4M3": 16, "U8": 32}
"""Type of the scales of FP4 numbers -> how many numbers of a row share one: NVFP4 and MXFP4."""


class Layout(NamedTuple):
    """How a weight is stored."""

    parts: Mapping[str, str]
    """Part, a value of PARTS -> name of the stored tensor."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    block: tuple[int, int] | None = None
    """(rows, columns) of the numbers that share a scale; None for a plain weight."""


@dataclass(frozen=True)
class Weight:
    """A weight that is read when it is indexed, like a slice of safetensors: a plain one as it is
    stored, a quantised one dequantised to `dtype`, rounded once from fp32."""

    layout: Layout
    read: Callable[[str], torch.Tensor]
    """Name of a stored tensor -> the tensor."""
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> torch.Tensor:
        parts = {part: self.read(name) for part, name in self.layout.parts.items()}
        if self.layout.block is None:
            return parts[NUMBERS]
        is_stack = parts[NUMBERS].dim() == 4  # experts of gpt-oss: (E, outputs, groups, 16 bytes)
        numbers = _unpacked(parts[NUMBERS].flatten(2) if is_stack else parts[NUMBERS])
        scale = parts["scale"].float()
        if parts["scale"].dtype == torch.uint8:  # an exponent
            scale = torch.exp2(scale - 127)
        scale = scale * parts.get("factor", 1) / parts.get("divisor", 1)
        if scale.numel() > 1:
            rows, columns = self.layout.block
            if rows == 1:
                scale = scale.reshape(*numbers.shape[:-1], -1)
            # blocks at the edges may be smaller
            scale = scale.repeat_interleave(rows, -2)[..., : numbers.shape[-2], :]
            scale = scale.repeat_interleave(columns, -1)[..., : numbers.shape[-1]]
        weight = (numbers * scale).to(self.dtype)
        return weight.mT.contiguous() if is_stack else weight


def _unpacked(numbers: torch.Tensor) -> torch.Tensor:
    """The quantised numbers in `numbers`, which are of one of the types PACKED, as fp32."""
    if numbers.dtype == torch.uint8:
        return unpack_fp4(numbers)
    if numbers.dtype == torch.int32:
        shifts = torch.arange(0, 32, 4, device=numbers.device)
        return ((numbers[..., None] >> shifts & 15) - 8).flatten(-2).float()
    return numbers.float()


class StoredWeights:
    """The weights of a checkpoint by the names that they have in a plain checkpoint.

    Weights in one of the formats DEQUANTISED are dequantised when they are read. Those in other
    quantised formats are left as they are, and `is_opaque` is True."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """UserError for a weight in one of the formats DEQUANTISED whose layout is not known."""
        self.stored = checkpoint
        self.method = quantization_of(checkpoint)
        self.is_opaque = self.method not in (None, *DEQUANTISED)
        self.layouts = {
            name: Layout({NUMBERS: name}, entry.shape) for name, entry in checkpoint.tensors.items()
        }
        """Name of a weight -> its layout."""
        if self.method and not self.is_opaque:
            self._find_quantised()
        tensors = {
            name: replace(checkpoint.tensors[layout.parts[NUMBERS]], shape=layout.shape)
            for name, layout in self.layouts.items()
        }
        self.plain = replace(checkpoint, tensors=tensors)
        """The checkpoint with the names and shapes of dequantised weights, but the stored types."""

    def _find_quantised(self) -> None:
        """Set the layouts of all quantised weights, in place of those of their parts."""
        folder = self.stored.folder
        section = quantization_section(read_json(folder / "config.json"), folder)
        parts_of: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self.stored.tensors:
            match = _PART.fullmatch(name)
            weight, part = (match["weight"], PARTS[match["part"]]) if match else (name, NUMBERS)
            parts_of[weight][part] = name
        for weight, parts in parts_of.items():
            entries = {part: self.stored.tensors[name] for part, name in parts.items()}
            if NUMBERS not in parts or entries[NUMBERS].dtype in UNQUANTISED:
                continue  # what looks like parts of it are tensors of their own
            layout = _layout(parts, entries, section)
            if layout is None:
                found = [f"{part} {entry.dtype} {entry.shape}" for part, entry in entries.items()]
                raise UserError(
                    f"{folder}: {weight} is stored as {', '.join(found)}: expected a layout that "
                    "docs/export.md lists"
                )
            for name in parts.values():
                del self.layouts[name]
            self.layouts[weight] = layout

    def tensors(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, Weight]:
        """Name -> weight, for the weights `names`. Other arguments: see `Weight`."""
        return {name: Weight(self.layouts[name], read, dtype) for name in names}


def _layout(
    parts: Mapping[str, str], entries: Mapping[str, Entry], section: Mapping[str, Any]
) -> Layout | None:
    """The layout of a quantised weight; None if it is not known. `parts`: as in `Layout`.
    `entries`: part -> entry. `section`: as from `quantization_section`."""
    numbers, scale = entries[NUMBERS], entries.get("scale")
    groups = [group.get("weights") or {} for group in section.get("config_groups", {}).values()]
    integer_bits = {group["num_bits"] for group in groups if group.get("type") == "int"}
    if scale is None or (numbers.dtype == "I32" and integer_bits != {4}):
        return None
    rows = numbers.shape[:-1][:2]  # of a matrix or a stack
    shape = (*rows, PACKED.get(numbers.dtype, 0) * prod(numbers.shape[len(rows) :]))
    sizes = [section.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
    block = _block(shape, scale.shape, sizes)
    is_fp4 = numbers.dtype == "U8"
    # only NVFP4 has a second scale
    n_scales = len(entries.keys() & {"scale", "factor", "divisor"})
    if n_scales != 1 + (is_fp4 and scale.dtype == "F8_E4M3"):
        return None
    if block is None or (is_fp4 and block != (1, FP4_GROUPS.get(scale.dtype))):
        return None
    is_transposed = len(numbers.shape) == 4  # experts of gpt-oss, see `Weight`
    return Layout(parts, (shape[0], *shape[:0:-1]) if is_transposed else shape, block)


def _block(
    shape: tuple[int, ...], scales: tuple[int, ...], stated: Iterable[Any]
) -> tuple[int, int] | None:
    """(rows, columns) of the numbers that share a scale: all of a matrix, a row, equal parts of a
    row, or a block as config.json states. None if none of these fits. `shape`, `scales`: shapes.
    `stated`: values of fields for the size of a block."""
    *outer, rows, columns = shape
    if prod(scales) == 1:
        return rows, columns
    if scales == (*outer, rows):
        return 1, columns
    for size in ([1, columns // max(1, scales[-1])], *stated):
        match size:
            case [int(height), int(width)] if min(height, width) > 0 and scales == (
                *outer,
                ceil(rows / height),
                ceil(columns / width),
            ):
                return height, width
    return None


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
