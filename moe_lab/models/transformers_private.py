"""Everything that moe_lab uses of transformers beyond its public interface.

Tested with transformers 5.23 and 5.24, which pyproject.toml allows. A version that renames one of
the private names that are imported or called here fails in tests/test_repository.py.

Files that are written beside the weights of an export cannot import this module (exported_code).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.moe import _grouped_mm
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.chat_template_utils import _compile_jinja_template, _get_template_variables

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
"""Name of the cache of keys and values in arguments and outputs of models, which transformers 5.24
renamed."""

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Outputs of the gate and up projections (n, 2 I), or of the up projection (n, I) -> input of
down_proj (n, I)."""


def configuration(content: Mapping[str, Any]) -> Any:
    """The configuration that `content`, that of a config.json, describes. In it, transformers
    writes infinity as an object. Kernels that it names, at any depth, are left out, because
    transformers might fetch them from the hub and run them."""
    kernels = ("attn_implementation", "experts_implementation")  # endings of names

    def without_kernels(section: dict[str, Any]) -> dict[str, Any]:
        return {name: section[name] for name in section if not name.endswith(kernels)}

    copied = json.loads(json.dumps(content), object_hook=without_kernels)
    decoded = PreTrainedConfig._decode_special_floats(copied)
    return CONFIG_MAPPING[content["model_type"]].from_dict(decoded)


def activation(experts: Any) -> Activation:
    """The activation function between the projections of an experts module."""
    function: Activation = experts._apply_gate if experts.has_gate else experts.act_fn
    return function


def attention_implementation(model: Any) -> str | None:
    """Registered name of the function that computes attention, such as sdpa."""
    name: str | None = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return name


def experts_implementation(experts: Any) -> str | None:
    """Registered name of the function that computes an experts module, or those of a model."""
    name: str | None = getattr(experts.config, "_experts_implementation", None)
    return name


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products (S, N) of each of `rows` (S, M) with the matrix of its group. `weights` (G, M, N).
    `ends` (G,) int32: the end of each group's rows."""
    products: torch.Tensor = _grouped_mm(rows, weights, ends)
    return products


def next_inputs(model: Any, output: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the next forward pass when text is generated token by token. `inputs`:
    keyword arguments of the last pass."""
    extended: dict[str, Any] = model._update_model_kwargs_for_generation(output, inputs)
    return extended


def template_variables(template: str) -> frozenset[str]:
    """Names of the variables that a chat template reads but does not set itself."""
    variables: frozenset[str] = _get_template_variables(template)
    return variables


def with_date(day: datetime, template: str) -> AbstractContextManager[Any]:
    """A context in which `template`, a chat template, writes `day` as today's date."""
    # the function strftime_now cannot be passed to the template as an argument, because
    # transformers only passes plain data on
    return patch.dict(
        _compile_jinja_template(template).environment.globals, strftime_now=day.strftime
    )


def compute_buffers(model: PreTrainedModel, root: nn.Module, device: str) -> None:
    """Compute the non-persistent buffers, such as rotary frequencies, of `root` and of all modules
    in it, on `device`."""
    for module in root.modules():
        buffers = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        tensors = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        if any(buffer.is_meta for buffer in tensors.values()):
            for name, buffer in tensors.items():
                module._buffers[name] = torch.empty_like(buffer, device=device)
            model._init_weights(module)  # fills the buffers


def load_tensors(
    model: PreTrainedModel, tensors: Mapping[str, Any], *, dtype: torch.dtype, device: str
) -> Iterable[tuple[str, Any, Any]]:
    """Put `tensors` into `model`, as from_pretrained does: name in the checkpoint -> tensor, or an
    object that gives a tensor when it is indexed. Returns (name, stored shape, shape in the model)
    of each tensor whose shape does not fit."""
    mapping: Any = get_model_conversion_mapping(model)
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=dict(model._get_dtype_plan(dtype)),
        weight_mapping=mapping,
        ignore_mismatched_sizes=True,
    )
    # [] for the expected names: for these, transformers would reserve memory on the device
    report, _ = model._load_pretrained_model(model, dict(tensors), None, settings, [])
    mismatched: Iterable[tuple[str, Any, Any]] = report.mismatched_keys
    return mismatched


def loaded_from(tensors: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A context in which from_pretrained takes `tensors` in place of those in the files of a
    checkpoint. They are as for `load_tensors`."""
    load = PreTrainedModel._load_pretrained_model

    def load_tensors(model: Any, _: Any, files: Any, settings: Any) -> Any:
        return load(model, dict(tensors), files, settings)

    return patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(load_tensors))


def unpack_fp4(pairs: torch.Tensor) -> torch.Tensor:
    """The FP4 numbers (..., 2 n), as fp32, in the bytes `pairs` (..., n)."""
    numbers: torch.Tensor = Fp8Dequantize(None)._unpack_fp4(pairs)
    return numbers


class NameMapping:
    """Mapping from the tensors of a checkpoint to the tensors of a model, as in from_pretrained."""

    def __init__(self, model: PreTrainedModel, names: Collection[str]) -> None:
        """`model`: may be on the meta device. `names`: names of all tensors of the checkpoint."""
        self.model = model
        self.names = names
        self.transforms: list[Any] = get_model_conversion_mapping(model)
        """Renamings and converters of transformers; `renamed` marks those that it uses."""

    @cached_property
    def renamed(self) -> list[tuple[str, str, str | None]]:
        """(name in the checkpoint, name in the model, converter) for each tensor of the checkpoint,
        and for each of the tensors into which it is divided.
        `converter`: the pattern of names whose tensors change their layout together; None for a
        tensor that keeps its layout."""
        renamings = [entry for entry in self.transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self.transforms if isinstance(entry, WeightConverter)]
        expected = self.model.state_dict()
        prefix = self.model.base_model_prefix
        targets = {
            pattern: entry.target_patterns
            for entry in converters
            for pattern in entry.source_patterns
        }
        renamed = []
        # some renamings only start after a certain name, so the order is that of from_pretrained
        for name in sorted(self.names, key=dot_natural_key):
            new_name, converter = rename_source_key(name, renamings, converters, prefix, expected)
            # a converter with several targets divides a tensor; `new_name` is of the first target
            first, *others = targets.get(converter or "", [""])
            for target in (first, *others):
                renamed.append((name, new_name.replace(first, target), converter))
        return renamed

    @cached_property
    def copied(self) -> dict[str, str]:
        """Name in the model -> name in the checkpoint, for tensors that keep their layout."""
        return {renamed: name for name, renamed, converter in self.renamed if converter is None}

    def unmatched(self) -> tuple[list[str], list[str]]:
        """(unused, missing) for an unquantised checkpoint. `unused`: names in the checkpoint of
        tensors that the model does not have. `missing`: names in the model of tensors that the
        checkpoint does not have."""
        expected = self.model.state_dict()
        unused = {}  # name after renaming -> name in the checkpoint
        for name, renamed, _ in self.renamed:
            # if the model lacks the new name, transformers looks for the name in the checkpoint
            if renamed not in expected and name not in expected:
                unused[renamed] = name
        missing = expected.keys() - set(self.names) - {renamed for _, renamed, _ in self.renamed}
        # from `report`, transformers removes the names that the model's class ignores
        report: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unused))
        self.model._adjust_missing_and_unexpected_keys(report)
        missing = report.missing_keys - self.model.all_tied_weights_keys.keys()
        return [unused[renamed] for renamed in report.unexpected_keys], list(missing)

    def to_checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name in the checkpoint -> tensor in the checkpoint's layout; without names of a
        checkpoint, as save_pretrained would write a new one. `tensors`: name in the model ->
        tensor."""
        used = [entry for entry in self.transforms if self.renamed and entry.was_used()]
        model: Any = self.model
        model._weight_conversions = used if self.names else None
        return dict(revert_weight_conversion(model, dict(tensors)))
