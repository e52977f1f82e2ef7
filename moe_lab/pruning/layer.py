"""What a layer of a plan may say, in memory and in plan.json. No torch."""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray

from moe_lab.errors import UserError

Mask = NDArray[numpy.bool_]
"""(E, I): which channels of which experts are kept."""


def check_ids(layer: int, kept: tuple[int, ...], count: int) -> None:
    """UserError unless `kept` are ids of `count` experts, ascending, at least one."""
    if not kept:
        raise UserError(f"plan: layer {layer} keeps no expert of {count}: keep at least 1")
    for expert in kept:
        if not 0 <= expert < count:
            raise UserError(f"plan: layer {layer} keeps expert {expert}: expected an id from 0 to {count - 1}")
    if list(kept) != sorted(set(kept)):
        raise UserError(
            f"plan: layer {layer} keeps {list(kept)}: expected {sorted(set(kept))}, ascending and each once"
        )


def check_mask(layer: int, mask: Mask, kept: tuple[int, ...], count: int) -> None:
    """UserError unless `mask` is (count, I) bool and only keeps channels of kept experts."""
    if mask.ndim != 2 or mask.shape[0] != count or mask.dtype != numpy.bool_:
        raise UserError(
            f"plan: layer {layer} has a mask of {mask.dtype} {mask.shape}: expected bool ({count}, channels)"
        )
    if strange := sorted(set(numpy.flatnonzero(mask.any(1)).tolist()) - set(kept)):
        raise UserError(f"plan: layer {layer} keeps channels of expert {strange[0]}, which it does not keep")


def check_groups(layer: int, kept: tuple[int, ...], count: int, n_group: int) -> None:
    """UserError unless every group of adjacent experts keeps equally many."""
    if count % n_group:
        raise UserError(f"plan: layer {layer} has {count} experts, which do not fall into {n_group} equal groups")
    size = count // n_group
    survivors = [sum(1 for expert in kept if expert // size == group) for group in range(n_group)]
    if len(set(survivors)) > 1:
        raise UserError(
            f"plan: layer {layer} keeps {survivors} experts of the {n_group} groups of its router, which must keep "
            f"equally many: {max(1, round(len(kept) / n_group))} each is nearest"
        )


def is_layer(key: str, layer: Any) -> bool:
    """Whether `layer` is the content of a layer in plan.json."""
    return (
        key.isdigit()
        and isinstance(layer, dict)
        and set(layer) in ({"experts", "keep"}, {"experts", "keep", "width", "channels"})
        and type(layer["experts"]) is int
        and isinstance(layer["keep"], list)
        and all(type(expert) is int for expert in layer["keep"])
        and ("channels" not in layer or are_masks(layer))
    )


def are_masks(layer: dict[str, Any]) -> bool:
    """Whether the channels of a layer in plan.json are one bit mask per kept expert, of the right length."""
    width, masks = layer["width"], layer["channels"]
    if type(width) is not int or width < 1 or not isinstance(masks, list) or not isinstance(layer["keep"], list):
        return False
    if not all(type(expert) is int and 0 <= expert < layer["experts"] for expert in layer["keep"]):
        return False
    digits = 2 * ((width + 7) // 8)
    return len(masks) == len(layer["keep"]) and all(
        isinstance(mask, str) and len(mask) == digits and set(mask) <= set("0123456789abcdef") for mask in masks
    )


def unpacked(layer: dict[str, Any]) -> Mask:
    """The mask (E, I) of a layer of plan.json."""
    mask: Mask = numpy.zeros((layer["experts"], layer["width"]), dtype=numpy.bool_)
    for expert, text in zip(layer["keep"], layer["channels"], strict=True):
        bits = numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8)
        mask[expert] = numpy.unpackbits(bits, count=layer["width"], bitorder="little")
    return mask
