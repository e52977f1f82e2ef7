"""Tiny checkpoints in quantised formats, and plain checkpoints of the dequantised numbers.

`save(name, kind, folder)` writes both. `dequantise(tensors, kind)` is the naive reference: it
dequantises whole matrices in torch, one after the other. For a format whose layout alone matters,
the codes are random, and the plain checkpoint has other numbers.
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
"""The stored tensors of one matrix: suffix of the matrix's name -> tensor."""
GROUP_SIZE = 8
"""Number of inputs of a matrix that share a scale."""
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TENSOR_NAME = re.compile(r"(.+?_proj)\.(.+)")
"""Name of a tensor of a projection: the name of the projection, and the suffix."""


@dataclass(frozen=True)
class Format:
    """The format in which a matrix (N, K) is stored."""

    config: dict[str, Any]
    """The content of quantization_config."""
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts], torch.Tensor] | None = None
    """None where only the layout matters: then the plain checkpoint has other numbers."""


def random_integers(shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    """Random integers from `low` to below `high`, from torch's global generator."""
    return torch.randint(low, high, shape, dtype=torch.int64)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes (N, K), eight to a number: (N, K / 8) int32, the first code in the lowest
    bits."""
    shifted_codes = codes.view(len(codes), -1, 8) << torch.arange(0, 32, 4)
    return shifted_codes.sum(-1).to(torch.int32)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    return (packed.long()[..., None] >> torch.arange(0, 32, 4) & 15).flatten(-2)


def encode_fp8_blocks(weight: torch.Tensor) -> Parts:
    """A scale for each block of 8 by 8 weights; the last blocks of a row or column may be
    smaller."""
    bands = [band.split(8, dim=1) for band in weight.abs().split(8)]
    largest = torch.stack([torch.stack([block.max() for block in band]) for band in bands])
    parts = {"weight": torch.ones_like(weight), "weight_scale_inv": largest / 448}
    return {**parts, "weight": (weight / decode_fp8_blocks(parts)).to(torch.float8_e4m3fn)}


def decode_fp8_blocks(parts: Parts) -> torch.Tensor:
    rows, columns = parts["weight"].shape
    scale = parts["weight_scale_inv"].repeat_interleave(8, 0).repeat_interleave(8, 1)
    return parts["weight"].float() * scale[:rows, :columns]


def encode_fp8_matrix(weight: torch.Tensor) -> Parts:
    """One scale for all numbers, and one for the inputs."""
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.rand(()),
    }


def encode_fp8_rows(weight: torch.Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def decode_fp8(parts: Parts) -> torch.Tensor:
    return parts["weight"].float() * parts["weight_scale"]


def encode_w4a16(weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    return {
        "weight_packed": pack_codes(random_integers((rows, columns), 0, 16)),
        "weight_scale": torch.rand(rows, columns // GROUP_SIZE).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def encode_w4a16_asymmetric(weight: torch.Tensor) -> Parts:
    """With zero points, packed along the rows, and groups of inputs that are not neighbours."""
    rows, columns = weight.shape
    zeros = pack_codes(random_integers((columns // GROUP_SIZE, rows), 0, 16)).T.contiguous()
    groups = torch.arange(columns)[torch.randperm(columns)] // GROUP_SIZE
    return {
        **encode_w4a16(weight),
        "weight_zero_point": zeros,
        "weight_g_idx": groups.to(torch.int32),
    }


def decode_w4a16(parts: Parts) -> torch.Tensor:
    codes = unpack_codes(parts["weight_packed"])
    assert list(codes.shape) == parts["weight_shape"].tolist()
    return (codes - 8) * parts["weight_scale"].float().repeat_interleave(GROUP_SIZE, 1)


def encode_fp4(weight: torch.Tensor) -> torch.Tensor:
    """Random pairs of four-bit floats."""
    return random_integers((weight.shape[0], weight.shape[1] // 2), 0, 256).to(torch.uint8)


def decode_fp4(pairs: torch.Tensor) -> torch.Tensor:
    """(..., n) bytes -> (..., 2 n) numbers, the low half of a byte first."""
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).long()
    return FP4_VALUES[codes % 8] * (1 - 2 * (codes // 8))


def decode_fp4_groups(pairs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return decode_fp4(pairs) * scales.repeat_interleave(2 * pairs.shape[1] // scales.shape[1], 1)


def encode_nvfp4(weight: torch.Tensor) -> Parts:
    """Of ModelOpt: a scale in FP8 for 16 numbers, times one for all."""
    return {
        "weight": encode_fp4(weight),
        "weight_scale": torch.rand(weight.shape[0], weight.shape[1] // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.rand(()) / 10,
        "input_scale": torch.rand(()),
    }


def decode_nvfp4(parts: Parts) -> torch.Tensor:
    scales = parts["weight_scale"].float() * parts["weight_scale_2"]
    return decode_fp4_groups(parts["weight"], scales)


def encode_compressed_nvfp4(weight: torch.Tensor) -> Parts:
    """Scales are divided by one for all."""
    parts = encode_nvfp4(weight)
    return {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": 10 + torch.rand(1),
        "input_global_scale": torch.rand(1),
    }


def decode_compressed_nvfp4(parts: Parts) -> torch.Tensor:
    scales = parts["weight_scale"].float() / parts["weight_global_scale"]
    return decode_fp4_groups(parts["weight_packed"], scales)


def encode_compressed_mxfp4(weight: torch.Tensor) -> Parts:
    """Scales are exponents."""
    exponents = random_integers((weight.shape[0], weight.shape[1] // 32), 120, 125)
    return {"weight_packed": encode_fp4(weight), "weight_scale": exponents.to(torch.uint8)}


def decode_compressed_mxfp4(parts: Parts) -> torch.Tensor:
    scales = torch.exp2(parts["weight_scale"].float() - 127)
    return decode_fp4_groups(parts["weight_packed"], scales)


def encode_gptq(weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    groups = torch.arange(columns)[torch.randperm(columns)] // GROUP_SIZE
    return {
        "qweight": pack_codes(random_integers((rows, columns), 0, 16)).T.contiguous(),
        "qzeros": pack_codes(random_integers((columns // GROUP_SIZE, rows), 0, 16)),
        "scales": torch.rand(columns // GROUP_SIZE, rows).half(),
        "g_idx": groups.to(torch.int32),
    }


def encode_nf4(weight: torch.Tensor) -> Parts:
    """Of bitsandbytes: two codes to a byte, a scale for 64 of them."""
    parts = {
        "": random_integers((weight.numel() // 2, 1), 0, 256).to(torch.uint8),
        ".absmax": torch.rand(weight.numel() // 64),
    }
    parts |= {
        ".quant_map": torch.rand(16),
        ".quant_state.bitsandbytes__nf4": random_integers((90,), 0, 256).to(torch.uint8),
    }
    return {f"weight{suffix}": part for suffix, part in parts.items()}


def compressed_tensors_config(
    layout: str, weights: dict[str, Any], **inputs: Any
) -> dict[str, Any]:
    """quantization_config of compressed-tensors, for projections of the format `layout`."""
    fields = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
    }
    ignore = ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]
    group = {"targets": ["Linear"], "weights": weights, **inputs}
    return {**fields, "ignore": ignore, "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8"}
FP8_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "channel",
}
FP8_INPUTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": GROUP_SIZE,
}
ASYMMETRIC_WEIGHTS = {**INT4_WEIGHTS, "symmetric": False, "actorder": "group"}
FP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FORMATS = {
    "fp8": Format(
        {**FP8, "weight_block_size": [8, 8], "activation_scheme": "dynamic"},
        encode_fp8_blocks,
        decode_fp8_blocks,
    ),
    "fp8_matrix": Format({**FP8, "activation_scheme": "static"}, encode_fp8_matrix, decode_fp8),
    "compressed_fp8": Format(
        compressed_tensors_config("float-quantized", FP8_WEIGHTS, input_activations=FP8_INPUTS),
        encode_fp8_rows,
        decode_fp8,
    ),
    "w4a16": Format(
        compressed_tensors_config("pack-quantized", {**INT4_WEIGHTS, "symmetric": True}),
        encode_w4a16,
        decode_w4a16,
    ),
    "w4a16_asymmetric": Format(
        compressed_tensors_config("pack-quantized", ASYMMETRIC_WEIGHTS), encode_w4a16_asymmetric
    ),
    "nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, encode_nvfp4, decode_nvfp4
    ),
    "compressed_nvfp4": Format(
        compressed_tensors_config("nvfp4-pack-quantized", FP4_WEIGHTS),
        encode_compressed_nvfp4,
        decode_compressed_nvfp4,
    ),
    "compressed_mxfp4": Format(
        compressed_tensors_config("mxfp4-pack-quantized", {**FP4_WEIGHTS, "group_size": 32}),
        encode_compressed_mxfp4,
        decode_compressed_mxfp4,
    ),
    "gptq": Format({"quant_method": "gptq", "bits": 4}, encode_gptq),
    "nf4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, encode_nf4),
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"],
}


def dequantise(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The dequantised tensors of a checkpoint, with the names of a plain checkpoint."""
    if kind == "mxfp4":
        return decode_mxfp4(tensors)
    decode = FORMATS[kind].decode
    assert decode is not None
    plain: dict[str, torch.Tensor] = {}
    stored: dict[str, Parts] = defaultdict(dict)
    for name, tensor in tensors.items():
        if (match := TENSOR_NAME.fullmatch(name)) and match[2] != "bias":
            stored[match[1]][match[2]] = tensor
        else:
            plain[name] = tensor
    for stem, parts in stored.items():
        plain[f"{stem}.weight"] = parts["weight"] if parts.keys() == {"weight"} else decode(parts)
    return plain


def encode_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with random codes for the packed experts of gpt-oss: pairs of four-bit numbers,
    the low half first, and a scale for 32 numbers."""
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = stored.pop(name).shape
        stored[f"{name}_blocks"] = random_integers((experts, outputs, inputs // 32, 16), 0, 256).to(
            torch.uint8
        )
        stored[f"{name}_scales"] = random_integers((experts, outputs, inputs // 32), 121, 125).to(
            torch.uint8
        )
    return stored


def decode_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The dequantised tensors of gpt-oss. Experts are transposed in a plain checkpoint; a scale is
    a power of two."""
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("_blocks", "_scales"))
    }
    for name in (name for name in tensors if name.endswith("_blocks")):
        stem = name.removesuffix("_blocks")
        scales = 2.0 ** (tensors[f"{stem}_scales"].double() - 127)
        numbers = decode_fp4(tensors[name]) * scales[..., None]
        plain[stem] = numbers.flatten(-2).transpose(1, 2).to(torch.bfloat16).contiguous()
    return plain


def save(name: str, kind: str, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a tiny model in a quantised format, and its dequantised numbers as a plain checkpoint.
    Returns (folder of the plain checkpoint, folder of the quantised one)."""
    if kind == "mxfp4":
        changes = {"hidden_size": 64, "intermediate_size": 32, "dtype": torch.bfloat16, **changes}
    elif kind.endswith("fp4"):  # rows are groups of 16 or 32 numbers
        widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        changes = {**dict.fromkeys(("hidden_size", *widths), 32), **changes}
    plain = folder / "plain"
    stored = folder / kind
    tiny.save(name, plain, **changes)
    shutil.copytree(plain, stored)
    file = "model.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tensors = quantise(load_file(plain / file), kind)
    save_file(tensors, stored / file, {"format": "pt"})
    if kind == "mxfp4" or FORMATS[kind].decode:
        save_file(dequantise(tensors, kind), plain / file, {"format": "pt"})
    config = MXFP4 if kind == "mxfp4" else FORMATS[kind].config
    reconfigure(stored, quantization_config=config)
    return plain, stored


def quantise(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with all projections quantised."""
    if kind == "mxfp4":
        return encode_mxfp4(tensors)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if (match := TENSOR_NAME.fullmatch(name)) and match[2] == "weight":
            parts = FORMATS[kind].encode(weight)
            stored.update(
                {f"{match[1]}.{suffix}": part.contiguous() for suffix, part in parts.items()}
            )
        else:
            stored[name] = weight
    return stored
