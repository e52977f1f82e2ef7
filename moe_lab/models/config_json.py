"""Experts, size and quantisation of a model that is not loaded, from config.json and the settings.
No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import (
    INDEX,
    Checkpoint,
    open_checkpoint,
    read_json,
    read_json_if_there,
    shards_in,
    stated_dtype,
)
from moe_lab.models.families import COUNT_FIELDS, TOP_K_FIELDS, WIDTH_FIELDS, Family
from moe_lab.models.files import cached_folder, hub_json, stated_files, tokenizer_path
from moe_lab.paths import local_path

LAYERS_FIELD = "pruned"
"""Field of config.json that holds the shapes of layers, in an export whose layers differ."""
DEQUANTISED = ("fp8", "mxfp8", "mxfp4", "nvfp4", "modelopt", "compressed-tensors")
"""Quantised formats whose weights moe_lab dequantises, by `models.stored_weights`."""
UNQUANTISED = ("F64", "F32", "F16", "BF16", "BOOL", "I64")
"""Types in safetensors that hold no quantised weights."""
PACKED = {"F8_E4M3": 1, "F8_E5M2": 1, "U8": 2, "I32": 8}
"""Type of stored numbers -> how many quantised numbers each holds: FP8, FP4, four-bit integers. The
first is in the lowest bits."""
QUANTISATION_FIELDS = ("quantization_config", "compression_config", "quantization")
"""Sections of config.json that describe quantised weights, the last as MLX writes it."""
QUANTISATION_FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
"""Files beside the weights in which some programs read the quantisation that others read in
config.json."""
FIELDS = {
    "layers": ("num_hidden_layers",),
    "experts": COUNT_FIELDS,
    "top_k": TOP_K_FIELDS,
    "hidden": ("hidden_size",),
    "width": WIDTH_FIELDS,
}
"""Name in model.expected -> fields of config.json that may state its value; the first that is
present counts."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GPU_COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs, at most those of a node, among which a model is divided."""


def config_of(settings: ModelConfig) -> dict[str, Any]:
    """config.json of a model, from its folder or the hub; {} if neither has the file."""
    file = local_path(settings.path) / "config.json"
    return read_json(file) if file.is_file() else hub_json(settings.path, settings.revision)


def tensor_parallel_sizes(config: Mapping[str, Any]) -> list[int]:
    """The numbers of GPUs, out of GPU_COUNTS, among which vLLM can divide each layer of a model.
    All of GPU_COUNTS if config.json does not state the attention heads."""
    heads = config.get("text_config", config).get("num_attention_heads") or 0
    return [count for count in GPU_COUNTS if heads % count == 0]


def stated_numbers(config: Mapping[str, Any]) -> dict[str, int]:
    """Name in FIELDS -> number, for the numbers that config.json states."""
    text_config = config.get("text_config", config)
    numbers = {}
    for name, fields in FIELDS.items():
        value = next((text_config[field] for field in fields if field in text_config), None)
        if isinstance(value, int):
            numbers[name] = value
    return numbers


def expert_shape(settings: ModelConfig) -> dict[str, int] | None:
    """{"n_experts": experts per MoE layer, "top_k": experts per token, "width": channels per
    expert}. "width" is left out if it is not known; the result is None if another number is not
    known."""
    numbers = stated_numbers(config_of(settings)) or expected_numbers(settings)
    if settings.top_k:
        numbers["top_k"] = settings.top_k
    # name in model.expected -> key of the result
    keys = {"experts": "n_experts", "top_k": "top_k", "width": "width"}
    shape = {key: numbers[name] for name, key in keys.items() if name in numbers}
    return shape if {"n_experts", "top_k"} <= shape.keys() else None


def expected_numbers(settings: ModelConfig) -> dict[str, int]:
    """The fields of model.expected."""
    return dict(vars(settings.expected)) if settings.expected else {}


def experts_implementation(device: str) -> str:
    """Name of the experts implementation of transformers to load a model with. `device`: a device
    or a device map."""
    # on the CPU, grouped_mm would convert the weights on every call
    return "eager" if device == "cpu" else "grouped_mm"


def fewest_experts(router: Mapping[str, Any]) -> int:
    """The smallest number of experts that a layer can retain. `router`: "top_k", "n_group" (1: no
    groups) and "topk_group" (None: all groups) of the layer's router.

    Each group retains equally many experts. Two are needed, because groups are ranked by their two
    best experts. A token must find `top_k` experts in `topk_group` groups."""
    top_k = int(router["top_k"])
    n_group = int(router["n_group"])
    if n_group == 1:
        return top_k
    return n_group * max(2, ceil(top_k / (router["topk_group"] or n_group)))


def has_packed_experts(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a layer with packed experts."""
    layers = config.get(LAYERS_FIELD, {}).get("layers", {})
    return any("widths" in layer for layer in layers.values())


def quantization(settings: ModelConfig) -> str | None:
    """The method by which the weights of a model are quantised, such as fp8. None for plain
    weights, or without a config.json. UserError as for `quantization_of`."""
    folder = local_path(settings.path)
    if any(folder.glob("*.safetensors")):
        return quantization_of(open_checkpoint(folder))
    return quantization_section(config_of(settings), folder).get("method")


def quantization_of(checkpoint: Checkpoint) -> str | None:
    """The method by which the weights of a checkpoint are quantised; None for plain weights.
    UserError if a method is stated and no tensor is quantised."""
    folder = checkpoint.folder
    method = quantization_section(read_json(folder / "config.json"), folder).get("method")
    types = {entry.dtype for entry in checkpoint.tensors.values()}
    if method and types <= {*UNQUANTISED}:
        raise UserError(
            f"{folder} states quantization_config={method}, but has no quantised weights: expected "
            f"none in config.json and in {', '.join(QUANTISATION_FILES)}"
        )
    return method


def quantization_section(
    config: Mapping[str, Any], folder: Path | None = None
) -> Mapping[str, Any]:
    """The description of quantised weights in `config`, the config.json of a model, or else in
    QUANTISATION_FILES in `folder`, with the method, such as fp8, as "method". {} for plain
    weights."""
    documents = [config, config.get("text_config", {})]
    if folder is not None:
        files = [read_json_if_there(folder / name) for name in QUANTISATION_FILES]
        # GPTQ's and AWQ's files have the section alone
        documents += [file if "quantization" in file else {"quantization": file} for file in files]
    for section in (document.get(name) for document in documents for name in QUANTISATION_FIELDS):
        if isinstance(section, dict) and section:
            default = "quantised weights"
            method = section.get("quant_method", section.get("quant_algo", default))
            if method:  # None if only caches are quantised
                return {**section, "method": str(method).lower()}
    return {}


def chat_templates(settings: ModelConfig) -> dict[str, str]:
    """Name -> text of each chat template in the folder of a model's tokenizer, as transformers
    reads them. The name is "default" if there is only one."""
    folder = tokenizer_path(settings)
    named_files = (folder / "additional_chat_templates").glob("*.jinja")
    templates = {file.stem: file.read_text(encoding="utf-8") for file in named_files}
    default_file = folder / "chat_template.jinja"
    if default_file.is_file():
        return {**templates, "default": default_file.read_text(encoding="utf-8")}
    configured = read_json_if_there(folder / "tokenizer_config.json").get("chat_template") or []
    if isinstance(configured, str):
        configured = [{"name": "default", "template": configured}]
    return {**templates, **{entry["name"]: entry["template"] for entry in configured}}


def selected_template(templates: Mapping[str, str], tools: bool, owner: str) -> str:
    """The text of the chat template that transformers takes of several, by name. `tools`: whether a
    conversation has tools. `owner`: what has the templates, for the UserError if none fits."""
    names = ("tool_use", "default") if tools else ("default",)
    for name in names:
        if name in templates:
            return templates[name]
    raise UserError(
        f"{owner} has the chat templates {', '.join(sorted(templates))}: expected one that is "
        "named default"
    )


def check_chat_template(
    settings: ModelConfig, setting: str, tools: bool, alternative: str = ""
) -> None:
    """Raise UserError when a model has no chat template. With `tools`, raise UserError also when
    the chat template does not accept tools.

    `setting`: the setting or benchmark that needs the template, for the message. `alternative`: the
    end of the message, such as ", or a set of plain texts"."""
    if not tokenizer_path(settings).is_dir():
        return
    templates = chat_templates(settings)
    if not any(templates.values()):
        raise UserError(
            f"{setting} needs a chat template, and model={settings.name} has none: expected an "
            f"instruction-tuned model{alternative}"
        )
    template = selected_template(templates, tools, f"model={settings.name}")
    if tools and "tools" not in template:
        raise UserError(
            f"{setting} gives the chat template tools, and that of model={settings.name} knows "
            "none: expected a model that was trained to call functions"
        )


def eos_tokens(configured: int | list[int] | None, tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a text, ascending: the `configured` ids and the end token of the
    tokenizer."""
    tokens = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*tokens, tokenizer.eos_token_id) if token is not None})


def check_plain_weights(model: ModelConfig, setting: str) -> None:
    """Raise UserError when the model's weights are quantised. `setting`: the setting that needs
    plain weights, for the message."""
    if (method := quantization(model)) is not None:
        raise UserError(
            f"{setting} needs plain weights, but model={model.name} is stored as {method}: "
            "expected a checkpoint in bfloat16 or float32"
        )


def check_dequantised(model: ModelConfig) -> None:
    """Like `check_plain_weights` for calibration.engine=streamed, but weights in one of the formats
    DEQUANTISED are fine."""
    if not is_readable(model):
        check_plain_weights(model, "calibration.engine=streamed")


def is_readable(model: ModelConfig) -> bool:
    """Whether the weights of a model are plain, or quantised in one of the formats DEQUANTISED."""
    return quantization(model) in (None, *DEQUANTISED)


def check_trained_top_k(model: ModelConfig, setting: str) -> None:
    """Raise UserError when model.top_k is set. `setting`: the setting that gives a checkpoint, such
    as export=natural, for the message."""
    if model.top_k is not None:
        raise UserError(
            f"{setting} gives a checkpoint that routes as it was trained, not by "
            f"model.top_k={model.top_k}: expected null"
        )


def check_expected(numbers: Mapping[str, int], settings: ModelConfig) -> None:
    """Raise UserError for the first number that differs from `model.expected`. `numbers`: name in
    model.expected -> actual number."""
    # the number of parameters, which comes last then, says least about the cause
    for name, expected in reversed(expected_numbers(settings).items()):
        if (actual := numbers.get(name, expected)) != expected:
            raise UserError(
                f"model={settings.name}: {settings.path} has {name}={actual}, but "
                f"model.expected.{name}={expected}: give the path and revision of that model, or "
                "model=local, which expects nothing"
            )


WEIGHT_OVERHEAD = 1.1
"""Factor on the weights for sums, buffers and fragmentation."""
LOGITS = 2**19
"""Upper bound of the bytes of one token's logits: fp32, for a vocabulary of about 130,000."""
CACHE = 4
"""Bytes of keys and values of one token and layer, as a multiple of the hidden size; an upper bound
if heads share keys and values."""


@dataclass(frozen=True)
class Size:
    """The numbers of a model from which memory and time are estimated (see ExpectedConfig)."""

    parameters: int
    layers: int
    """Decoder layers, with and without experts."""
    moe_layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    bytes_per_parameter: int

    @property
    def expert(self) -> int:
        """Number of parameters of a routed expert: gate, up and down, without biases."""
        return 3 * self.hidden * self.width

    @property
    def bytes(self) -> int:
        """Bytes of the weights once loaded."""
        return self.parameters * self.bytes_per_parameter

    @property
    def logit_bytes(self) -> float:
        """Upper bound of the bytes of one token's logits in fp32. Each logit takes `hidden`
        parameters of the vocabulary head."""
        return min(LOGITS, 4 * self.parameters / self.hidden)

    def layer_weights(self, layers: int) -> float:
        """Estimated bytes of the weights of `layers` decoder layers, of the embeddings and of the
        vocabulary head."""
        # the values of the variables are numbers of parameters
        routed = self.experts * self.expert
        unrouted = self.parameters - self.moe_layers * routed
        # Embeddings and head are two matrices, with a row of `hidden` parameters for each logit.
        # LOGITS is in bytes, and a logit takes 4 bytes.
        vocabulary = min(unrouted, 2 * LOGITS // 4 * self.hidden)
        layer = routed + (unrouted - vocabulary) / self.moe_layers
        return WEIGHT_OVERHEAD * self.bytes_per_parameter * (layers * layer + vocabulary)

    def activations(self, layers: float = 1) -> float:
        """Estimated bytes per token of the activations of `layers` decoder layers."""
        # a layer has about 20 vectors of the hidden size, and for each of the top_k experts of a
        # token 6 vectors of the expert's width
        return self.bytes_per_parameter * layers * (20 * self.hidden + 6 * self.top_k * self.width)

    def kv_cache_bytes(self, tokens: int) -> float:
        """Estimated bytes of the KV cache of `tokens` tokens."""
        return float(tokens * CACHE * self.hidden * self.layers)

    def hidden_states(self, tokens: int, *, backward: bool) -> float:
        """Upper bound of the bytes of the hidden states that a layer by layer pass over `tokens`
        tokens stores."""
        # Three states of each token: before and after the current layer, and a copy from which the
        # next process resumes a killed pass. A backward pass also needs the states of all layers.
        states = self.layers + 3 if backward else 3
        return float(tokens) * self.hidden * self.bytes_per_parameter * states


def size_of(settings: ModelConfig) -> Size | None:
    """The size of a model, from `model.expected` or else from the model's files. None if a number
    is missing."""
    numbers = expected_numbers(settings)
    if not numbers:
        numbers |= _numbers_from_files(settings.path, settings.revision)
    numbers["bytes_per_parameter"] = BYTES.get(
        settings.dtype, numbers.get("bytes_per_parameter", 2)
    )
    if settings.top_k:
        numbers["top_k"] = settings.top_k
    try:
        return Size(**{name: numbers[name] for name in Size.__dataclass_fields__})
    except KeyError:
        return None


@lru_cache(maxsize=64)
def _numbers_from_files(path: str, revision: str | None) -> dict[str, int]:
    """Name in `Size` -> number, with the bytes of a parameter in the precision that config.json
    states. If the model is not downloaded, its number of parameters is estimated from the size of
    its weight files."""
    folder = local_path(path) if local_path(path).is_dir() else cached_folder(path, revision)
    config = read_json(folder / "config.json") if folder else hub_json(path, revision)
    numbers = stated_numbers(config)
    numbers["bytes_per_parameter"] = BYTES.get(stated_dtype(config.get("text_config", config)), 4)
    if folder:
        tensors = open_checkpoint(folder).tensors
        is_packed = quantization_section(config, folder).get("method") in DEQUANTISED
        packed = PACKED if is_packed else {}
        numbers["parameters"] = sum(
            packed.get(entry.dtype, 1) * prod(entry.shape) for entry in tensors.values()
        )
        # any family will do: the names of tensors do not depend on it
        expert_tensors = Family().expert_tensors(tensors)
        numbers["moe_layers"] = len({tensor.layer for tensor in expert_tensors.values()})
    elif "layers" in numbers and (files := stated_files(path, revision, "model")):
        shards = shards_in(files, hub_json(path, revision, INDEX))
        size = sum(files[name][0] for name in shards if name in files)
        # about one byte for each quantised weight
        weight_bytes = 1 if quantization_section(config) else numbers["bytes_per_parameter"]
        if size:
            numbers |= {"parameters": size // weight_bytes, "moe_layers": numbers["layers"]}
    return numbers
