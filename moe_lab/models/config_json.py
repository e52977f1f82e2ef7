"""What config.json and the settings state about a model, before it is loaded: experts, size, quantisation. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint, read_json, stated_dtype
from moe_lab.models.families import COUNT_FIELDS, TOP_K_FIELDS, WIDTH_FIELDS
from moe_lab.paths import local

LAYERS_FIELD = "pruned"
"""Field of config.json of an export whose layers differ: their shapes."""
UNPACKED = ("fp8", "mxfp4", "compressed-tensors")
"""Quantised formats that are dequantised on loading. On a GPU, transformers would run experts in FP8 and MXFP4 by
kernels that cannot be observed; experts of compressed-tensors it always dequantises, and the other weights follow."""
FIELDS = {
    "layers": ("num_hidden_layers",),
    "experts": COUNT_FIELDS,
    "top_k": TOP_K_FIELDS,
    "hidden": ("hidden_size",),
    "width": WIDTH_FIELDS,
}
"""Name in model.expected -> fields of config.json that may state it; the first one present counts."""
EXPERTS = re.compile(r"\.(\d+)\.(?:\w+\.)*(?:experts|input_linear)\b")
"""Name of a tensor of routed experts in a checkpoint; the group is the number of its decoder layer."""
FP8_BLOCK = [128, 128]
"""weight_block_size of a checkpoint in FP8 that states none."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_numbers(folder: Path) -> None:
    """Raise UserError for a number in config.json that no model has, or with which building it would never end."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    numbers = _numbers(inner if isinstance(inner, dict) else config, FIELDS)
    largest = {**dict.fromkeys(FIELDS, 1 << 20), "layers": 1000, "top_k": numbers.get("experts", 1 << 20)}
    for name, number in numbers.items():
        if not 1 <= number <= largest[name]:
            fields = " or ".join(FIELDS[name])
            raise UserError(f"{folder / 'config.json'} has {fields}={number}: expected 1 to {largest[name]}")


def expert_shape(settings: ModelConfig) -> dict[str, int] | None:
    """n_experts, top_k and width (channels per expert) of a layer; None when n_experts or top_k is not known.

    Read from config.json, or from `model.expected` for a model that is not on this machine. `model.top_k` overrides
    both.
    """
    folder = local(settings.path)
    if not folder.is_dir():
        if (expected := settings.expected) is None:
            return None
        return {"n_experts": expected.experts, "top_k": settings.top_k or expected.top_k, "width": expected.width}
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    fields = {"n_experts": COUNT_FIELDS, "top_k": TOP_K_FIELDS, "width": WIDTH_FIELDS}
    numbers = _numbers(text, fields)
    if settings.top_k:
        numbers["top_k"] = settings.top_k
    return numbers if {"n_experts", "top_k"} <= set(numbers) else None


def _numbers(text: Mapping[str, Any], fields: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Name -> whole number in the first of its fields that config.json has."""
    numbers = {}
    for name, alternatives in fields.items():
        stated = next((text[field] for field in alternatives if field in text), None)
        if isinstance(stated, int):
            numbers[name] = stated
    return numbers


def fewest_experts(router: Mapping[str, Any]) -> int:
    """The smallest number of experts that a layer can keep. `router`: its facts top_k, n_group and topk_group.

    A router needs `top_k` experts to choose from. A group-limited one keeps the same number in each of its `n_group`
    groups; the `topk_group` groups a token reaches (None: all) must hold `top_k` experts together, and groups are
    ranked by their two best experts.
    """
    top_k, n_group = int(router["top_k"]), int(router["n_group"])
    if n_group == 1:
        return top_k
    return n_group * max(2, ceil(top_k / (router["topk_group"] or n_group)))


def has_uneven_layers(settings: ModelConfig) -> bool:
    """Whether config.json lists layers whose experts differ in width; False for a model that is not on this machine."""
    return has_packed_experts(_config(settings))


def has_packed_experts(config: Mapping[str, Any]) -> bool:
    """The same for the content of a config.json."""
    layers = config.get(LAYERS_FIELD, {}).get("layers", {})
    return any("widths" in layer for layer in layers.values())


def quantization(settings: ModelConfig) -> str | None:
    """The quantisation method of the weights that config.json states, such as fp8 or gptq.

    None for plain weights, and for a model that is not on this machine.
    """
    return quantization_method(_config(settings))


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The same for the content of a config.json."""
    stated = _stated_quantization(config)
    return None if stated is None else str(stated.get("quant_method", "quantised weights"))


def _stated_quantization(config: Mapping[str, Any]) -> dict[str, Any] | None:
    stated = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    return stated if isinstance(stated, dict) else None


@dataclass(frozen=True)
class BlockScaled:
    """A matrix in FP8 with a scale per block; those at the end of a row or column may be smaller than the others."""

    name: str
    shape: tuple[int, ...]
    scales: tuple[int, ...]
    """The shape of its scales."""
    block: tuple[int, int]
    """Rows and columns of a whole block."""

    @property
    def expected_scales(self) -> tuple[int, ...]:
        """The shape that its scales should have."""
        rows, columns = self.shape[-2:]
        return (*self.shape[:-2], ceil(rows / self.block[0]), ceil(columns / self.block[1]))


def block_scaled(folder: Path) -> Iterator[BlockScaled]:
    """The matrices of a checkpoint in FP8 that have a scale per block; none for any other checkpoint.

    UserError for a weight_block_size in config.json that is no size.
    """
    config = read_json(folder / "config.json")
    stated = _stated_quantization(config)
    if stated is None or quantization_method(config) != "fp8":
        return
    block = stated.get("weight_block_size", FP8_BLOCK)
    if block is None:  # a scale per matrix
        return
    if not isinstance(block, list) or [type(side) for side in block] != [int, int] or min(block) < 1:
        raise UserError(
            f"{folder / 'config.json'} has weight_block_size={block!r:.40}: expected two whole numbers from 1, such as "
            f"{FP8_BLOCK}"
        )
    tensors = open_checkpoint(folder).tensors
    for name, entry in tensors.items():
        scales = tensors.get(f"{name}_scale_inv")
        if scales is not None and entry.dtype.startswith("F8") and prod(scales.shape) > 1:
            yield BlockScaled(name, entry.shape, scales.shape, (block[0], block[1]))


def _config(settings: ModelConfig) -> dict[str, Any]:
    """config.json of a model on this machine; empty for any other."""
    file = local(settings.path) / "config.json"
    return read_json(file) if file.is_file() else {}


def model_type(settings: ModelConfig) -> str | None:
    """`model_type` of config.json; None if the model is not on this machine."""
    return _config(settings).get("model_type")


def check_chat_template(settings: ModelConfig, user: str, tools: bool, other: str = "") -> None:
    """Raise UserError when a model on this machine has no chat template, or none that knows `tools`.

    `user` is what needs them, and `other` what to expect beside an instruction-tuned model.
    """
    folder = local(settings.path)
    if not folder.is_dir():
        return
    file, described = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    else:
        template = str(read_json(described).get("chat_template") or "") if described.is_file() else ""
    if not template:
        raise UserError(
            f"{user} needs a chat template, and model={settings.name} has none: expected an instruction-tuned "
            f"model{other}"
        )
    for_tools = folder / "additional_chat_templates" / "tool_use.jinja"  # which is then used instead
    if tools and "tools" not in template and not for_tools.is_file():
        raise UserError(
            f"{user} gives the chat template tools, and that of model={settings.name} knows none: "
            "expected a model that was trained to call functions"
        )


def check_plain_weights(settings: ModelConfig, user: str) -> None:
    """Raise UserError when the weights are quantised: such a model can be run, but `user` needs plain weights."""
    if (method := quantization(settings)) is not None:
        raise UserError(
            f"{user} needs plain weights, but model={settings.name} is stored as {method}: expected a checkpoint "
            "in bfloat16 or float32"
        )


def check_top_k(settings: ModelConfig) -> None:
    """Raise UserError when model.top_k is not between 1 and the number of experts of a layer, if that is known."""
    shape = expert_shape(settings)
    if settings.top_k is not None and shape and not 1 <= settings.top_k <= shape["n_experts"]:
        raise UserError(
            f"model.top_k={settings.top_k}: {settings.path} has {shape['n_experts']} experts in a layer to choose from"
        )


def check_trained_top_k(settings: ModelConfig, user: str) -> None:
    """Raise UserError when model.top_k is set: it only changes a loaded model, and `user` works with files."""
    if settings.top_k is not None:
        raise UserError(
            f"{user} gives a checkpoint that routes as it was trained, not by model.top_k={settings.top_k}: "
            "expected null"
        )


def check_expected(settings: ModelConfig) -> None:
    """Raise UserError if the config.json of a model on this machine states another number than `model.expected`."""
    config = _config(settings)
    compare(_numbers(config.get("text_config", config), FIELDS), settings)


def compare(numbers: Mapping[str, int], settings: ModelConfig) -> None:
    """Raise UserError naming the first of `numbers` that differs from `model.expected`.

    The number of parameters is compared last, because it says least about the cause.
    """
    expected = {} if settings.expected is None else asdict(settings.expected)
    for name, value in sorted(expected.items(), key=lambda item: item[0] == "parameters"):
        if (actual := numbers.get(name, value)) != value:
            raise UserError(
                f"model={settings.name}: {settings.path} has {name}={actual}, but model.expected.{name}={value}: "
                "give the path and revision of that model, or model=local, which expects nothing"
            )


@dataclass(frozen=True)
class Size:
    """The numbers from which memory and time are estimated."""

    parameters: int
    """All parameters."""
    moe_layers: int
    """Decoder layers with routed experts."""
    experts: int
    """Routed experts of such a layer."""
    top_k: int
    """Routed experts that process a token."""
    hidden: int
    """Hidden size: width of the residual stream."""
    width: int
    """Channels of a routed expert."""
    bytes_per_parameter: int
    """Bytes of a parameter in the precision in which the model is loaded."""

    @property
    def expert(self) -> int:
        """Parameters of a routed expert; biases are left out."""
        return 3 * self.hidden * self.width

    @property
    def active(self) -> int:
        """Parameters that one token uses, with all embeddings; biases of experts are left out."""
        return self.parameters - self.moe_layers * (self.experts - self.top_k) * self.expert

    @property
    def bytes(self) -> int:
        """Bytes of the weights once loaded."""
        return self.parameters * self.bytes_per_parameter


def size_of(settings: ModelConfig) -> Size | None:
    """The size of a model; None when it is neither on this machine nor described by `model.expected`.

    `model.expected` takes precedence over the folder, since a folder that differs from it is refused
    (`check_expected`).
    """
    if (expected := settings.expected) is None:
        return _size_of_folder(settings.path, settings.dtype)
    return Size(
        parameters=expected.parameters,
        moe_layers=expected.moe_layers,
        experts=expected.experts,
        top_k=settings.top_k or expected.top_k,
        hidden=expected.hidden,
        width=expected.width,
        bytes_per_parameter=BYTES.get(settings.dtype, 2),
    )


@lru_cache(maxsize=64)
def _size_of_folder(path: str, dtype: str) -> Size | None:
    shape = expert_shape(ModelConfig(name="any", path=path))
    folder = local(path)
    if shape is None or "width" not in shape:
        return None
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    if not isinstance(hidden := config.get("hidden_size"), int):
        return None
    tensors = open_checkpoint(folder).tensors
    stored = BYTES.get(stated_dtype(config), 4)
    return Size(
        parameters=sum(prod(entry.shape) for entry in tensors.values()),
        moe_layers=len({match[1] for name in tensors if (match := EXPERTS.search(name))}),
        experts=shape["n_experts"],
        top_k=shape["top_k"],
        hidden=hidden,
        width=shape["width"],
        bytes_per_parameter=BYTES.get(dtype, stored),
    )
