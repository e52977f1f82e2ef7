"""Tiny checkpoints in quantised formats, and the plain checkpoints of the numbers that they stand
for.

`save(name, kind, folder)` writes both. `dequantised(tensors, kind)` is the naive reference: whole
matrices in torch, one after the other. Where only the layout matters, the codes are random, and
nobody asks for what they stand for.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file

from tests.campaign.models import reconfigure

Parts = dict[str, torch.Tensor]
"""What is stored for one matrix: suffix of its name -> tensor."""
GROUP = 8
"""Inputs of a matrix that share a scale."""
FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PART = re.compile(r"(.+?_proj)\.(.+)")
"""Name of a tensor of a projection: the projection, and what is stored."""


@dataclass(frozen=True)
class Format:
    """How a matrix (N, K) is stored."""

    config: dict[str, Any]
    """The content of quantization_config."""
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts], torch.Tensor] | None = None
    """None where only the layout matters: then the plain checkpoint is not of these numbers."""


def draws(shape: tuple[int, ...], least: int, end: int) -> torch.Tensor:
    """Random whole numbers that depend on the shape and on how many were drawn before."""
    return torch.randint(least, end, shape, dtype=torch.int64)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes (N, K), eight to a number: (N, K / 8) int32, the first code in the lowest
    bits."""
    eight = codes.view(len(codes), -1, 8) << torch.arange(0, 32, 4)
    return eight.sum(-1).to(torch.int32)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`."""
    return (words.long()[..., None] >> torch.arange(0, 32, 4) & 15).flatten(-2)


def fp8_blocks(weight: torch.Tensor) -> Parts:
    """Blocks of 8 by 8 weights; the last ones of a row or column of blocks may be smaller."""
    bands = [band.split(8, dim=1) for band in weight.abs().split(8)]
    largest = torch.stack([torch.stack([block.max() for block in band]) for band in bands])
    parts = {"weight": torch.ones_like(weight), "weight_scale_inv": largest / 448}
    return {**parts, "weight": (weight / from_fp8_blocks(parts)).to(torch.float8_e4m3fn)}


def from_fp8_blocks(parts: Parts) -> torch.Tensor:
    rows, columns = parts["weight"].shape
    scale = parts["weight_scale_inv"].repeat_interleave(8, 0).repeat_interleave(8, 1)
    return parts["weight"].float() * scale[:rows, :columns]


def fp8_matrix(weight: torch.Tensor) -> Parts:
    """One scale for all numbers, and one for the inputs."""
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.rand(()),
    }


def fp8_rows(weight: torch.Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def from_fp8(parts: Parts) -> torch.Tensor:
    return parts["weight"].float() * parts["weight_scale"]


def w4a16(weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    return {
        "weight_packed": packed(draws((rows, columns), 0, 16)),
        "weight_scale": torch.rand(rows, columns // GROUP).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def w4a16_asymmetric(weight: torch.Tensor) -> Parts:
    """With zero points, packed along the rows, and groups of inputs that are not neighbours."""
    rows, columns = weight.shape
    zeros = packed(draws((columns // GROUP, rows), 0, 16)).T.contiguous()
    groups = torch.arange(columns)[torch.randperm(columns)] // GROUP
    return {**w4a16(weight), "weight_zero_point": zeros, "weight_g_idx": groups.to(torch.int32)}


def from_w4a16(parts: Parts) -> torch.Tensor:
    codes = unpacked(parts["weight_packed"])
    assert list(codes.shape) == parts["weight_shape"].tolist()
    return (codes - 8) * parts["weight_scale"].float().repeat_interleave(GROUP, 1)


def gptq(weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    groups = torch.arange(columns)[torch.randperm(columns)] // GROUP
    return {
        "qweight": packed(draws((rows, columns), 0, 16)).T.contiguous(),
        "qzeros": packed(draws((columns // GROUP, rows), 0, 16)),
        "scales": torch.rand(columns // GROUP, rows).half(),
        "g_idx": groups.to(torch.int32),
    }


def nf4(weight: torch.Tensor) -> Parts:
    """Of bitsandbytes: two codes to a byte, a scale for 64 of them."""
    parts = {
        "": draws((weight.numel() // 2, 1), 0, 256).to(torch.uint8),
        ".absmax": torch.rand(weight.numel() // 64),
    }
    parts |= {
        ".quant_map": torch.rand(16),
        ".quant_state.bitsandbytes__nf4": draws((90,), 0, 256).to(torch.uint8),
    }
    return {f"weight{suffix}": part for suffix, part in parts.items()}


def compressed(layout: str, weights: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors, for projections of the format `layout`."""
    about = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
    }
    ignored = ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]
    group = {"targets": ["Linear"], "weights": weights, **inputs}
    return {**about, "ignore": ignored, "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8"}
EIGHT_BITS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "channel",
}
INPUTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
INTEGERS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": GROUP,
}
UNEVEN = {**INTEGERS, "symmetric": False, "actorder": "group"}
FORMATS = {
    "fp8": Format(
        {**FP8, "weight_block_size": [8, 8], "activation_scheme": "dynamic"},
        fp8_blocks,
        from_fp8_blocks,
    ),
    "fp8_matrix": Format({**FP8, "activation_scheme": "static"}, fp8_matrix, from_fp8),
    "compressed_fp8": Format(
        compressed("float-quantized", EIGHT_BITS, input_activations=INPUTS), fp8_rows, from_fp8
    ),
    "w4a16": Format(
        compressed("pack-quantized", {**INTEGERS, "symmetric": True}), w4a16, from_w4a16
    ),
    "w4a16_asymmetric": Format(compressed("pack-quantized", UNEVEN), w4a16_asymmetric),
    "gptq": Format({"quant_method": "gptq", "bits": 4}, gptq),
    "nf4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"],
}


def dequantised(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The numbers that the tensors of a checkpoint stand for, under the names of a plain
    checkpoint."""
    if kind == "mxfp4":
        return from_mxfp4(tensors)
    decode = FORMATS[kind].decode
    assert decode is not None
    plain: dict[str, torch.Tensor] = {}
    stored: dict[str, Parts] = defaultdict(dict)
    for name, tensor in tensors.items():
        if (match := PART.fullmatch(name)) and match[2] != "bias":
            stored[match[1]][match[2]] = tensor
        else:
            plain[name] = tensor
    for stem, parts in stored.items():
        plain[f"{stem}.weight"] = parts["weight"] if parts.keys() == {"weight"} else decode(parts)
    return plain


def to_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random codes for the packed experts of gpt-oss: pairs of four-bit numbers, the low half
    first, 32 to a scale."""
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = stored.pop(name).shape
        stored[f"{name}_blocks"] = draws((experts, outputs, inputs // 32, 16), 0, 256).to(
            torch.uint8
        )
        stored[f"{name}_scales"] = draws((experts, outputs, inputs // 32), 121, 125).to(torch.uint8)
    return stored


def from_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts lie transposed in a plain checkpoint; a scale is a power of two."""
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("_blocks", "_scales"))
    }
    for name in (name for name in tensors if name.endswith("_blocks")):
        blocks = tensors[name]
        stem = name.removesuffix("_blocks")
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
        scales = 2.0 ** (tensors[f"{stem}_scales"].double() - 127)
        numbers = FOUR_BITS[codes % 8] * (1 - 2 * (codes // 8)) * scales[..., None]
        plain[stem] = numbers.flatten(-2).transpose(1, 2).to(torch.bfloat16).contiguous()
    return plain


def save(name: str, kind: str, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a tiny model in a quantised format, and as the plain numbers it stands for; returns the
    two folders."""
    if kind == "mxfp4":
        changes = {"hidden_size": 64, "intermediate_size": 32, "dtype": torch.bfloat16, **changes}
    plain = folder / "plain"
    stored = folder / kind
    tiny.save(name, plain, **changes)
    shutil.copytree(plain, stored)
    file = "model.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tensors = encoded(load_file(plain / file), kind)
    save_file(tensors, stored / file, {"format": "pt"})
    if kind == "mxfp4" or FORMATS[kind].decode:
        save_file(dequantised(tensors, kind), plain / file, {"format": "pt"})
    about = MXFP4 if kind == "mxfp4" else FORMATS[kind].config
    reconfigure(stored, quantization_config=about)
    return plain, stored


def encoded(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint with all of its projections quantised."""
    if kind == "mxfp4":
        return to_mxfp4(tensors)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if (match := PART.fullmatch(name)) and match[2] == "weight":
            parts = FORMATS[kind].encode(weight)
            stored.update(
                {f"{match[1]}.{suffix}": part.contiguous() for suffix, part in parts.items()}
            )
        else:
            stored[name] = weight
    return stored
