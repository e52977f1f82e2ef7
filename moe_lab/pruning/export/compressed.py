"""Quantise an exported checkpoint in the formats of compressed-tensors, each weight rounded to the nearest value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, open_checkpoint, read_json
from moe_lab.models.config_json import has_packed_experts
from moe_lab.models.discover import routed_layers
from moe_lab.models.families import Family
from moe_lab.models.load import skeleton
from moe_lab.models.streamed import stored_dtype
from moe_lab.models.transformers_private import to_checkpoint
from moe_lab.pruning.export.layout import check_stored_apart
from moe_lab.pruning.export.rewrite import Changes

PRESETS = {"fp8": ("FP8_DYNAMIC", "float-quantized"), "w4a16": ("W4A16", "pack-quantized")}
"""export.format -> the library's names of the scheme and of the format in which its weights are stored."""
GROUPS = (128, 64, 32)
"""Numbers of weights that may share a scale in w4a16, best first."""
WORDS = {
    "fp8": "FP8 (e4m3, a scale per row; activations are rounded to FP8 token by token when the model is run)",
    "w4a16": "4-bit integers (W4A16, a scale per {group} weights)",
}


def compression_changes(folder: Path, scheme: str) -> Changes:
    """The changes that quantise the exported checkpoint in `folder` by `scheme`, fp8 or w4a16, on the CPU. All linear
    maps of decoder layers and all routed experts are quantised. Routers, gates of shared experts, lm_head, embeddings
    and norms stay, and in w4a16 also maps whose rows do not divide into the groups of the experts. Raises UserError for
    experts that are ragged or that are stored in one tensor, and for widths that no group divides."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    if has_packed_experts(read_json(folder / "config.json")):
        raise UserError(
            f"export.format={scheme}: experts of different widths in one layer are packed into two tensors, "
            "which this format cannot store: expected export=padded"
        )
    preset, stored_as = PRESETS[scheme]
    checkpoint = open_checkpoint(folder)
    check_stored_apart(checkpoint.tensors, folder)
    places = Family().places(checkpoint.tensors)
    experts = [name for name, place in places.items() if place.kind == "expert" and place.axes is not None]
    described: Any = preset_name_to_scheme(preset, ["Linear"])
    weights = described.weights
    if scheme == "w4a16":
        weights.group_size = _group_size({checkpoint.tensors[name].shape[1] for name in experts})
    maps, ignored = _linear_maps(folder, checkpoint, weights.group_size or 1)
    chosen = {*experts, *maps}
    # transformers 5.23 dequantises experts to the precision of their scales, whatever that of the model is
    dtype = stored_dtype(folder)
    compressor: Any = BaseCompressor.get_value_from_registry(stored_as)

    def quantised(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if name not in chosen:
            return {name: tensor}
        groups = tensor.unflatten(1, (-1, weights.group_size or tensor.shape[1]))  # (rows, groups, weights)
        scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), weights)
        written = compressor.compress({"weight": tensor, "weight_scale": scale.to(dtype)}, described)
        return {f"{name.removesuffix('weight')}{part}": value for part, value in written.items()}

    config = QuantizationConfig(
        config_groups={"group_0": described}, format=stored_as, quantization_status="compressed", ignore=ignored
    )
    words = (
        f"Weights of experts and of {len(maps)} other linear maps in decoder layers were rounded to the nearest value "
        f"of {WORDS[scheme].format(group=weights.group_size)}, in the format of compressed-tensors, without "
        "calibration. Routers, lm_head, embeddings and norms were not."
    )
    return Changes(quantised, words, {"quantization_config": config.model_dump(mode="json")})


def _group_size(widths: Collection[int]) -> int:
    """The largest group that divides the rows of all experts."""
    if (size := next((size for size in GROUPS if all(width % size == 0 for width in widths)), None)) is not None:
        return size
    raise UserError(
        f"export.format=w4a16 needs experts whose rows are multiples of {GROUPS[-1]} weights, and there are rows of "
        f"{' and '.join(map(str, sorted(widths)))}: expected export.format=fp8, or a plan with such widths"
    )


def _linear_maps(folder: Path, checkpoint: Checkpoint, multiple: int) -> tuple[list[str], list[str]]:
    """Names of the weights of linear maps to quantise, whose rows are multiples of `multiple`; modules to leave out.
    Modules have the names that transformers gives them, and those of the checkpoint, which servers read."""
    model = skeleton(folder, trust_remote_code=True)
    routers = {id(module) for layer in routed_layers(model) for module in layer.router.modules()}
    chosen, ignored = [], set()
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or not (type(module) is nn.Linear or id(module) in routers):
            continue
        names = list(to_checkpoint(model, {f"{path}.weight": weight}))
        in_layer = any(part.isdigit() for part in path.split("."))
        whole = len(names) == 1 and names[0] in checkpoint.tensors and weight.shape[1] % multiple == 0
        if in_layer and whole and len(weight) > 1 and id(module) not in routers:
            chosen += names
        else:
            ignored |= {path, *(name.removesuffix(".weight") for name in names)}
    return chosen, sorted(ignored)
