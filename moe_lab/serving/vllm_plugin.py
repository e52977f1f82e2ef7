"""A plugin by which vLLM serves exports whose layers differ. It also repairs two faults of vLLM's
CPU build.

vLLM calls `register` in each of its processes, through the entry point group vllm.general_plugins.
This module needs vLLM alone, and none of moe_lab's dependencies, because vLLM and moe_lab often
need different versions of transformers.

vLLM's classes read one number of experts and one width for all layers. moe_lab writes uneven
exports under a model type of their own. `parse` gives vLLM the configuration of the family instead,
with the largest number of experts and the largest width, and with the architecture
`Pruned<Stock>ForCausalLM`. This module has a class of that name for every architecture <Stock> of
vLLM. The class sets the fields of each layer while the layer is built, so that families need no
code of their own. The class also compares the experts in the files with the experts that were
built, because vLLM notices neither missing nor surplus experts.

Private names of vLLM that are used, tested with 0.32: HFConfigParser.parse, `make_layers` in the
modules of models, utils.extract_layer_index, ModelRegistry.models, MoERunner.router and its
global_num_experts, CPURouter._compute_routing, RotaryEmbedding.forward_cpu.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

PREFIX = "Pruned"
"""Prefix of the names of this module's classes; the name of a class of vLLM follows."""
EXPORT_FIELD = "pruned"
"""Field of config.json with the shapes of an uneven export, written by
moe_lab/pruning/export/config.py."""
NOVICES = "approximate_experts"
"""Field of config.json of an export with constants in place of experts."""
NOVICES_MODULE = "vllm.model_executor.layers.fused_moe.expert_substitution"
"""The module by which vLLM reads them. vLLM 0.32 and older have none, and serve these exports
wrongly, without an error."""
FORMAT = 2
"""The format of the field `EXPORT_FIELD` that this module reads."""
LAYERS = "moe_lab_layers"
"""Attribute of a configuration: layer -> field -> value, for the fields that differ between
layers."""
# Names of the fields with the number of routed experts, and with their width.
COUNT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
WIDTH_FIELDS = ("moe_intermediate_size", "intermediate_size")
SHARED_COUNT_FIELDS = ("n_shared_experts", "moe_num_shared_experts")
"""Fields with the number of shared experts, whose width vLLM derives from the width of routed
experts."""
UNIFORM_ARCHITECTURES = ("GptOssForCausalLM",)
"""Architectures of vLLM that read weights with the same number of experts for all layers."""
EXPERT = re.compile(r"\b(?<!mtp\.)layers\.(\d+)\..*\bexperts\.(\d+)\.(.+)$")
"""Name of an expert's tensor: layer, expert, and name of the tensor in the expert. Layers that
predict further tokens are numbered by themselves if their names have mtp."""

Layers = Mapping[int, Mapping[str, Any]]
ExpertsOfTensor = dict[tuple[int, str], set[int]]
"""(layer, name of a tensor in an expert) -> ids of the experts that have this tensor."""


def register() -> None:
    """Register with vLLM a class of this module for each architecture of vLLM, and patch vLLM."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    for name in list(ModelRegistry.models):
        if not name.startswith(PREFIX):
            ModelRegistry.register_model(PREFIX + name, f"{__name__}:{PREFIX}{name}")
    _patch_config_parser()
    if current_platform.is_cpu():
        _repair_rotary_embedding()
        _repair_bias()


def __getattr__(name: str) -> type:
    """The class `name`, which is `PREFIX` followed by the name of a class of vLLM."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return _uneven_class(name.removeprefix(PREFIX))


def replace_method(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the method `name` of `owner` by make(original method). A second call changes
    nothing."""
    original = getattr(owner, name)
    if not hasattr(original, "moe_lab"):
        replacement = make(original)
        replacement.moe_lab = True  # marks the method as replaced
        setattr(owner, name, replacement)


def family_config(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration by which vLLM loads the model in `folder`. `config`: the content of
    config.json in `folder`. The result is a copy of `config`, unless the model is an uneven export.

    For an uneven export, the result has the model type of the original model. Where layers differ,
    a field has the largest value of any layer. The new field `LAYERS` has the values of each layer.
    ValueError for an export that this module cannot read.
    """
    if NOVICES in config.get("text_config", config) and find_spec(NOVICES_MODULE) is None:
        raise ValueError(
            f"{folder} has constants in place of experts ({NOVICES} in config.json), which this "
            "version of vLLM does not read: expected vLLM 0.33 or newer"
        )
    if EXPORT_FIELD not in config:
        return dict(config)
    export_settings = config[EXPORT_FIELD]
    if (format_number := export_settings.get("format")) != FORMAT:
        raise ValueError(
            f"{folder}: config.json has {EXPORT_FIELD}.format={format_number}, and this version of "
            f"moe_lab's plugin reads {FORMAT}: install the version of moe_lab that wrote the "
            "export, or export again"
        )
    layers: Mapping[str, Mapping[str, Any]] = export_settings["layers"]
    # vLLM stores all experts of a layer in one tensor
    if any("widths" in layer for layer in layers.values()):
        raise ValueError(
            f"{folder}: the experts of a layer have different widths, and vLLM has one width for "
            "each layer: export with export=padded"
        )
    width_field = next((name for name in WIDTH_FIELDS if isinstance(config.get(name), int)), "")
    # layer -> field -> value
    changes: dict[str, dict[str, Any]] = {}
    for index, layer in layers.items():
        changes[index] = {name: layer["experts"] for name in COUNT_FIELDS if name in config}
        if "width" in layer:
            changes[index][width_field] = layer["width"]
    # names of the fields that differ between layers
    names = {name for changed_fields in changes.values() for name in changed_fields}
    # for fields that the export does not change in a layer
    default_fields = {name: config[name] for name in names}
    fields = {index: {**default_fields, **changed} for index, changed in changes.items()}
    maxima = {name: max(layer_fields[name] for layer_fields in fields.values()) for name in names}
    family_fields = {
        name: value
        for name, value in config.items()
        if name not in (EXPORT_FIELD, "auto_map", "per_layer_config")
    }
    # the original values of fields that the export has replaced, such as the model type
    stock_fields = export_settings["stock"]
    architectures = [f"{PREFIX}{name}" for name in stock_fields.get("architectures", ())]
    return {
        **family_fields,
        **maxima,
        **stock_fields,
        "architectures": architectures,
        LAYERS: fields,
    }


def _patch_config_parser() -> None:
    """Make vLLM's parser of config.json apply `family_config`."""
    from transformers import PreTrainedConfig
    from vllm.transformers_utils.config import HFConfigParser

    def make(original: Any) -> Any:
        def parse(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            # the original parser reads the file through PreTrainedConfig.get_config_dict
            read_config = PreTrainedConfig.get_config_dict

            def get_config_dict(name: Any, **options: Any) -> Any:
                config, unused_options = read_config(name, **options)
                return family_config(str(name), config), unused_options

            with patch.object(PreTrainedConfig, "get_config_dict", get_config_dict):
                return original(self, model, *args, **kwargs)

        return parse

    replace_method(HFConfigParser, "parse", make)


@cache
def _uneven_class(name: str) -> type:
    """A subclass of vLLM's class `name`, for models whose layers differ. It builds each layer with
    the values that `LAYERS` has for the layer."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.utils import extract_layer_index

    vllm_class = ModelRegistry.models[name].load_model_cls()
    module = sys.modules[vllm_class.__module__]

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        config = vllm_config.model_config.hf_text_config
        layers = {int(index): fields for index, fields in getattr(config, LAYERS, {}).items()}
        _check_support(name, module, vllm_config, layers)
        make_layers = module.make_layers

        # make_layers calls layer_fn(prefix=...) for each layer; the prefix has the layer's index
        def make_uneven_layers(n_layers: int, layer_fn: Any, prefix: str) -> Any:
            def build_layer(prefix: str) -> Any:
                with _field_values(config, layers.get(extract_layer_index(prefix), {})):
                    return layer_fn(prefix=prefix)

            return make_layers(n_layers, build_layer, prefix=prefix)

        with patch.object(module, "make_layers", make_uneven_layers):
            vllm_class.__init__(self, vllm_config=vllm_config, prefix=prefix, **kwargs)

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        experts: ExpertsOfTensor = defaultdict(set)
        # _record_experts fills `experts` while vLLM reads the weights
        names_of_weights = vllm_class.load_weights(self, _record_experts(weights, experts))
        _check_files({layer: router.global_num_experts for layer, router in routers(self)}, experts)
        return names_of_weights

    # vLLM finds the class by this name in this module, see `__getattr__`
    return type(
        PREFIX + name,
        (vllm_class,),
        {"__init__": __init__, "load_weights": load_weights, "__module__": __name__},
    )


def _check_support(name: str, module: Any, vllm_config: Any, layers: Layers) -> None:
    """ValueError if vLLM would serve the export wrongly. `module`: the module of vLLM that defines
    the architecture `name`. `layers`: layer -> field -> value, as in `LAYERS`."""
    import vllm

    if name in UNIFORM_ARCHITECTURES or not hasattr(module, "make_layers"):
        raise ValueError(
            f"{name}: vLLM {vllm.__version__} reads one number of experts for all layers: export "
            "with export=masked"
        )
    config = vllm_config.model_config.hf_text_config
    shared_fields = [field for field in SHARED_COUNT_FIELDS if getattr(config, field, None)]
    widths = {
        fields[field] for fields in layers.values() for field in WIDTH_FIELDS if field in fields
    }
    if shared_fields and len(widths) > 1:
        raise ValueError(
            f"{name}: vLLM makes shared experts ({shared_fields[0]}) as wide as the routed ones of "
            f"their layer, and these are {sorted(widths)} wide: export with export=masked"
        )
    for setting in ("enable_eplb", "enable_ep_weight_filter"):
        if getattr(vllm_config.parallel_config, setting, False):
            raise ValueError(
                f"{setting}=True takes one number of experts for all layers: expected False"
            )


@contextmanager
def _field_values(config: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """A context in which the fields of `config` have the `values` (field -> value). `config` is
    changed and not copied, because some classes of vLLM keep a reference to it."""
    original = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in original.items():
            setattr(config, name, value)


def routers(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield (index of the layer, router) of every MoE layer that was built in this process."""
    from vllm.model_executor.models.utils import extract_layer_index

    for name, module in model.named_modules():
        router = getattr(getattr(module, "experts", None), "router", None)
        if router is not None:
            yield extract_layer_index(name), router


def _record_experts(
    weights: Iterable[tuple[str, torch.Tensor]], experts: ExpertsOfTensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` unchanged, and add their experts to `experts`."""
    for name, tensor in weights:
        if match := EXPERT.search(name):
            layer, expert, name_in_expert = match.groups()
            experts[int(layer), name_in_expert].add(int(expert))
        yield name, tensor


def _check_files(counts: Mapping[int, int], experts: ExpertsOfTensor) -> None:
    """ValueError when the experts in the files are not the experts that vLLM has built. `counts`:
    layer -> number of built experts. `experts`: what `_record_experts` found in the files."""
    for (layer, name), ids in experts.items():
        expected = set(range(counts.get(layer, 0)))
        if layer in counts and ids != expected:
            missing_experts = sorted(expected - ids)
            surplus_experts = sorted(ids - expected)
            raise ValueError(
                f"vLLM built {len(expected)} experts in layer {layer} by config.json, and the "
                f"files lack {name} of experts {missing_experts or 'none'} and have it of "
                f"{surplus_experts or 'none'} beyond: export again"
            )
    if missing_layers := sorted(set(counts) - {layer for layer, _ in experts}):
        raise ValueError(f"the files have no experts of layers {missing_layers}: export again")


def _repair_rotary_embedding() -> None:
    """On the CPU, compute interleaved rotary embeddings (DeepSeek) with vLLM's torch code. The
    values of vLLM's CPU kernel have errors of up to 6.9."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def make(original: Any) -> Any:
        def forward_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
            # embeddings in NeoX style are not interleaved
            forward = original if self.is_neox_style else type(self).forward_native
            return forward(self, *args, **kwargs)

        return forward_cpu

    replace_method(RotaryEmbedding, "forward_cpu", make)


def _repair_bias() -> None:
    """On the CPU, let softmax routers without groups (ERNIE-4.5) use their correction bias, which
    vLLM's CPU router ignores."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    def make(original: Any) -> Any:
        def _compute_routing(
            self: Any, hidden_states: Any, router_logits: Any, indices_type: Any, **kwargs: Any
        ) -> Any:
            """(gates, ids) of the experts of each token, both (T, K)."""
            bias = self.e_score_correction_bias
            is_softmax = self.custom_routing_function is None and self.scoring_func == "softmax"
            if bias is None or self.use_grouped_topk or not is_softmax:
                return original(self, hidden_states, router_logits, indices_type, **kwargs)
            scores = torch.softmax(router_logits.float(), dim=-1)
            index = (scores + bias).topk(self.top_k, dim=-1).indices
            weights = scores.gather(1, index)
            if self.renormalize:
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)
            return weights, index.to(torch.int32)

        return _compute_routing

    replace_method(CPURouter, "_compute_routing", make)
