"""config.json of an exported checkpoint: the original one, edited. No torch unless all experts get
one new width."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import read_json_if_there
from moe_lab.models.config_json import LAYERS_FIELD, QUANTISATION_FILES
from moe_lab.models.families import (
    ALSO_COUNTS,
    COUNT_FIELDS,
    NOVICES,
    PORTS,
    PRUNED,
    WIDTH_FIELDS,
    Family,
    port_files,
)
from moe_lab.pruning import Form

FORMAT = 2
"""Version of the content of `LAYERS_FIELD`. It is raised when a program that reads the older
version, such as the plugin of vLLM, would misread the newer one."""

NUMBERED_EXPERT = re.compile(r'[^"]*\bexperts\\*\.(?:\[0-9\]|[^".\\\d])*+\d[^"]*')
"""A text in JSON that names an expert by its number: the name of a module, or a regular expression,
in which [0-9] is no number."""
SHARED_FIELDS = ("dtype", "torch_dtype", "quantization_config")
"""Fields of a model of texts and images that are also those of its text model."""


def describe_export(
    config: dict[str, Any], fields: Mapping[str, Any], form: Form, names: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """(config.json of the export, file name -> source code of the files that load the export).
    There are no such files if transformers alone can load the export.

    `config`: config.json of the original. `fields`: name -> value of each field for the numbers of
    experts and layers and the width of experts, and of architectures, also of those that `config`
    leaves to their defaults; of these, the export states those that change. `names`: names of the
    original's tensors. UserError when `config` is of a pruned model whose layers differ."""
    if LAYERS_FIELD in config:
        raise UserError(
            "the source is a pruned checkpoint whose layers differ already "
            f"(model_type={config.get('model_type')}, {LAYERS_FIELD} in config.json): export from "
            "the original model"
        )
    edited = deepcopy(config)
    text_config = edited.get("text_config", edited)
    defaults = {name: value for name, value in fields.items() if name not in text_config}
    text_config.update(defaults)
    kind = config.get("model_type", "")
    text_kind = text_config.get("model_type", "")
    if ported_code := port_files(kind):
        module = f"modeling_{PORTS[kind].file}.{PORTS[kind].base}"
        edited["auto_map"] = {
            "AutoConfig": f"{module}Config",
            "AutoModelForCausalLM": f"{module}ForCausalLM",
        }
    counts = {len(layer.experts) for layer in form.values()}
    if len(counts) == 1:
        count_fields = [field for field in COUNT_FIELDS if field in text_config]
        count_fields += ALSO_COUNTS.get(text_kind, ())
        text_config.update(dict.fromkeys(count_fields, *counts))
    elif text_config.get("output_router_logits"):
        # these logits are for the balancing loss, which needs equal numbers of experts
        text_config["output_router_logits"] = False
    stock_config = _stock_config(edited, form, names) if len(counts) == 1 else None
    new_config = stock_config or _uneven_config(edited, form)
    new_text_config = new_config.get("text_config", new_config)
    for name, value in defaults.items():
        if new_text_config[name] == value:
            del new_text_config[name]
    novices = {str(number): [*layer.novices] for number, layer in form.items() if layer.novices}
    if novices:
        new_text_config[NOVICES] = novices
    return new_config, ported_code if stock_config else _uneven_code(text_kind)


def _stock_config(
    config: dict[str, Any], form: Form, names: Collection[str]
) -> dict[str, Any] | None:
    """`config` with the width of the experts in `form`, of which all layers have the same number;
    None if the family's own configuration cannot describe `form`. `names`: names of the original's
    tensors."""
    widths = {layer.width for layer in form.values()}
    # any family will do: the names of tensors do not depend on it
    if Family().prediction_experts(names):
        widths.add(None)  # these experts keep their width
    # packed experts have `widths`
    if len(widths) > 1 or any(layer.widths for layer in form.values()):
        return None
    (width,) = widths
    return config if width is None else narrowed(config, width)


def _uneven_config(config: dict[str, Any], form: Form) -> dict[str, Any]:
    """`config`, edited for an export that the family's own configuration cannot describe. Of a
    model of texts and images, it describes the text model, which transformers builds of it.

    The export gets a new model type: the family's own class would fill missing weights with random
    numbers. In the field `LAYERS_FIELD`, "layers" has the shape of each layer, and "stock" the
    original values of the fields that are replaced here. For other programs, "per_layer_config" has
    the fields that differ in a layer, as transformers writes them, and the configuration of
    compressed-tensors has "moe_sparsity_config", with the number of experts of each layer."""
    if "text_config" in config:
        shared = {name: config[name] for name in SHARED_FIELDS if name in config}
        config = {**shared, **config["text_config"]}
    kind = config.get("model_type", "")
    replaced_fields = ("model_type", "architectures", *(["auto_map"] if kind in PORTS else []))
    original_fields: dict[str, Any] = {
        name: config[name] for name in replaced_fields if name in config
    }
    count_fields = list(filter(config.__contains__, COUNT_FIELDS))
    width_field = next(filter(config.__contains__, WIDTH_FIELDS), "")
    layers = {}
    overrides = {}
    for number, layer in form.items():
        fields = {"width": layer.width, "widths": layer.widths, "owners": layer.owners}
        fields["constants"] = layer.constants is not None or None
        present_fields = {name: value for name, value in fields.items() if value is not None}
        layers[str(number)] = {"experts": len(layer.experts), **present_fields}
        values = dict.fromkeys(count_fields, len(layer.experts))
        if layer.width:
            values[width_field] = layer.width
        differing = {name: value for name, value in values.items() if config[name] != value}
        if differing and not layer.widths:  # no field describes packed experts
            overrides[str(number)] = differing
    if overrides:
        config["per_layer_config"] = overrides
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "compressed-tensors":
        numbers = range(config["num_hidden_layers"])
        counts = [len(form[number].experts) if number in form else None for number in numbers]
        quantization["moe_sparsity_config"] = {"method": "prune", "num_experts": counts}
    config["model_type"] = f"{PRUNED}{kind}"
    config["architectures"] = ["PrunedForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "pruned.PrunedConfig",
        "AutoModelForCausalLM": "pruned.PrunedForCausalLM",
    }
    config[LAYERS_FIELD] = {"format": FORMAT, "stock": original_fields, "layers": layers}
    return config


def _uneven_code(kind: str) -> dict[str, str]:
    """File name -> source code of the files that build a model whose layers differ. `kind`: model
    type of the original."""
    folder = Path(__file__).parents[2] / "exported_code"
    ported_code = port_files(kind)
    files = {
        name: (folder / name).read_text(encoding="utf-8") for name in ("pruned.py", "ragged.py")
    }
    # pruned.py is written for olmoe: the lines that name its classes are replaced
    pruned_code = files["pruned.py"].replace('KIND = "olmoe"', f'KIND = "{kind}"')
    if ported_code:
        module = f".modeling_{PORTS[kind].file}"
        base = PORTS[kind].base
        pruned_code = pruned_code.replace(
            "Config: Any = CONFIG_MAPPING[KIND]", f"from {module} import {base}Config as Config"
        )
        pruned_code = pruned_code.replace(
            "Model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[Config]",
            f"from {module} import {base}ForCausalLM as Model",
        )
    return {**files, "pruned.py": pruned_code, **ported_code}


def narrowed(config: dict[str, Any], width: int) -> dict[str, Any] | None:
    """A copy of `config` whose routed experts have `width` channels. None if no field of `config`
    sets the width of routed experts alone, or transformers has no class for it."""
    # imported late: most exports need neither torch nor transformers, whose import takes seconds
    from moe_lab.models.load import has_causal_model

    edited = deepcopy(config)
    text_config = edited.get("text_config", edited)
    field = next((field for field in WIDTH_FIELDS if isinstance(text_config.get(field), int)), None)
    if field is None or not has_causal_model(config["model_type"]):
        return None
    text_config[field] = width
    # other parameters keep their sizes only if the field sets no other size
    return edited if _unrouted_parameters(config) == _unrouted_parameters(edited) else None


def _unrouted_parameters(config: dict[str, Any]) -> int:
    """Number of parameters, except those of routed experts, of the model that `config`
    describes."""
    import torch
    from transformers import AutoModelForCausalLM

    from moe_lab.models.facts import model_facts
    from moe_lab.models.transformers_private import configuration

    with torch.device("meta"):
        facts = model_facts(AutoModelForCausalLM.from_config(configuration(config)))
    unrouted: int = facts["parameters"]
    for layer in facts["layers"].values():
        unrouted -= layer["n_experts"] * layer["expert_parameters"]
    return unrouted


def check_numbers(folder: Path, form: Form) -> None:
    """Raise UserError if a file that describes the quantisation of the model in `folder` names
    experts by number, and experts have other numbers in an export of `form`."""
    if all(layer.experts == tuple(range(len(layer.experts))) for layer in form.values()):
        return
    for name in ("config.json", *QUANTISATION_FILES):
        if match := NUMBERED_EXPERT.search(json.dumps(read_json_if_there(folder / name))):
            raise UserError(
                f"{folder / name} has {match[0]}, which names experts by number, and pruning gives "
                "them other numbers: expected names that are true of all experts"
            )
