"""config.json of an exported checkpoint: the original one, edited. No torch unless all experts get
one new width."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import read_json
from moe_lab.models.config_json import LAYERS_FIELD
from moe_lab.models.families import (
    ALSO_COUNTS,
    COUNT_FIELDS,
    EXTRA_PREDICTION,
    EXTRA_PREDICTION_LAYERS,
    PORTS,
    PRUNED,
    TOP_K_FIELDS,
    UNGROUPED_METHODS,
    WIDTH_FIELDS,
    has_causal_model,
    port_of,
)
from moe_lab.pruning import Form
from moe_lab.pruning.plan import Plan

FORMAT = 2
"""Version of the content of `LAYERS_FIELD`. It is raised when a program that reads the older
version, such as the plugin of vLLM, would misread the newer one."""

FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
"""Files beside the weights in which some programs read the quantisation that others read in
config.json."""
DOT = r"\\?\."
EXPERT_NAME = re.compile(
    rf"\blayers{DOT}(?P<layer>\d+){DOT}(?:\w+{DOT})*?experts{DOT}(?P<expert>\d+)(?={DOT}(?![*+?])|\$?$)"
)
"""A numbered expert of a numbered layer, in the name of a module or in a regular expression that
names one."""
OTHER_NUMBER = re.compile(rf"\bexperts{DOT}[^.\\]*?\d")
"""Any other mention of experts by number, such as `re:.*experts.(0|1).*`."""
ANY_DIGIT = "[0-9]"


def check_routing(config: dict[str, Any], plan: Plan) -> None:
    """Raise UserError unless the router that config.json describes can work with the plan."""
    text = config.get("text_config", config)
    # a field holds a number, or a list with a number for each layer
    top_k = int(max(numpy.max(text.get(field, 1)) for field in TOP_K_FIELDS))
    n_group = text.get("n_group") or 1
    if text.get("topk_method") in UNGROUPED_METHODS:
        n_group = 1
    router = {"top_k": top_k, "n_group": n_group, "topk_group": text.get("topk_group")}
    plan.check(dict.fromkeys(plan.layers, router))


def describe_export(
    config: dict[str, Any], form: Form, names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """config.json for `form`, and the code needed to load the export: file name -> text; empty for
    a stock checkpoint. `config`: the original's config.json. `names`: names of the written tensors;
    without tensors of layers that predict several tokens, the new config.json counts no such
    layers. A quantised model's lists of modules name experts by their new numbers. UserError when
    `config` is of a pruned model whose layers differ, or transformers has no class to build on."""
    if LAYERS_FIELD in config:
        raise UserError(
            "the source is a pruned checkpoint whose layers differ already "
            f"(model_type={config.get('model_type')}, {LAYERS_FIELD} in config.json): export from "
            "the original model"
        )
    edited: dict[str, Any] = renumbered(
        config, {index: layer.experts for index, layer in form.items()}
    )
    text = edited.get("text_config", edited)
    if not any(map(EXTRA_PREDICTION.search, names)):
        text.update({field: 0 for field in EXTRA_PREDICTION_LAYERS if text.get(field)})
    kind = str(config.get("model_type", ""))
    if port := port_of(kind):
        module = f"modeling_{PORTS[kind].file}.{PORTS[kind].base}"
        edited["auto_map"] = {
            "AutoConfig": f"{module}Config",
            "AutoModelForCausalLM": f"{module}ForCausalLM",
        }
    counts = {len(layer.experts) for layer in form.values()}
    widths = {layer.width for layer in form.values()}
    if len(counts) == 1:
        (count,) = counts
        text.update(dict.fromkeys((field for field in COUNT_FIELDS if field in text), count))
        text.update(dict.fromkeys(ALSO_COUNTS.get(text.get("model_type", ""), ()), count))
    elif edited.get("output_router_logits"):
        # the balancing loss needs layers with equal numbers of experts
        edited["output_router_logits"] = False
    # all layers have equally many experts of the same width, and none are packed
    if (
        len(counts) == 1
        and len(widths) == 1
        and all(layer.widths is None for layer in form.values())
    ):
        width = widths.pop()
        stock_config = edited if width is None else narrowed(edited, width)
        if stock_config is not None:
            return stock_config, port
    return _uneven_config(edited, form), _code(kind)


def _uneven_config(config: dict[str, Any], form: Form) -> dict[str, Any]:
    """`config`, edited for a checkpoint whose layers differ, or that the family's configuration
    cannot describe. The export has a model type of its own, so that no stock class fills missing
    weights with random numbers. `LAYERS_FIELD` has the shape of each layer, and the original values
    of the replaced fields, which a program restores to load the checkpoint by a family's class."""
    kind = config.get("model_type", "")
    check_causal(kind)
    replaced_fields = ("model_type", "architectures", *(["auto_map"] if kind in PORTS else []))
    stock: dict[str, Any] = {name: config[name] for name in replaced_fields if name in config}
    layers = {}
    for index, layer in form.items():
        fields = {"width": layer.width, "widths": layer.widths, "owners": layer.owners}
        fields["constants"] = True if layer.constants is not None else None
        stated = {name: value for name, value in fields.items() if value is not None}
        layers[str(index)] = {"experts": len(layer.experts), **stated}
    config["model_type"] = f"{PRUNED}{kind}"
    config["architectures"] = ["PrunedForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "pruned.PrunedConfig",
        "AutoModelForCausalLM": "pruned.PrunedForCausalLM",
    }
    config[LAYERS_FIELD] = {"format": FORMAT, "stock": stock, "layers": layers}
    return config


def _code(kind: str) -> dict[str, str]:
    """Name -> text of the files that build a model whose layers differ, with the classes of the
    model type `kind`: those of its port in this package, or of transformers without a port."""
    folder = Path(__file__).parents[2] / "exported_code"
    port = port_of(kind)
    texts = {
        name: (folder / name).read_text(encoding="utf-8") for name in ("pruned.py", "ragged.py")
    }
    text = texts["pruned.py"].replace('KIND = "olmoe"', f'KIND = "{kind}"')
    if port:
        module = f".modeling_{PORTS[kind].file}"
        base = PORTS[kind].base
        text = text.replace(
            "Config: Any = CONFIG_MAPPING[KIND]", f"from {module} import {base}Config as Config"
        )
        text = text.replace(
            "Model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[Config]",
            f"from {module} import {base}ForCausalLM as Model",
        )
    return {**texts, "pruned.py": text, **port}


def check_causal(kind: str) -> None:
    """Raise UserError unless transformers has code for causal language models of the model type
    `kind`."""
    if not has_causal_model(kind):
        raise UserError(
            f"model_type={kind}: layers and experts of another shape can only be exported for "
            "causal language models that transformers has code for: evaluate the plan with a mask"
        )


def narrowed(config: dict[str, Any], width: int) -> dict[str, Any] | None:
    """A copy of `config` with experts of `width` channels. None if a stock model cannot have such
    experts: no field of `config` sets the width, or the field also sets another size, such as the
    width of shared experts."""
    check_causal(config.get("model_type", ""))
    field = next((field for field in WIDTH_FIELDS if isinstance(config.get(field), int)), None)
    if field is None:  # the width is the default of the model's class
        return None
    edited = {**config, field: width}
    return edited if _shapes(config) == _shapes(edited) else None


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each parameter of the model that `config` describes, except the parameters
    of routed experts."""
    # imported late: most exports need neither torch nor transformers, whose import takes seconds
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    import moe_lab.exported_code  # noqa: F401  families that transformers lacks
    from moe_lab.models.discover import moe_layers

    # from a deep copy, so that building the configuration cannot change `config`
    built = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    experts = {id(weight) for layer in moe_layers(model) for weight in layer.experts.parameters()}
    return {
        name: tuple(weight.shape)
        for name, weight in model.named_parameters()
        if id(weight) not in experts
    }


# Lists of modules in the description of a quantised checkpoint, which name experts.


def renumbered(content: Any, written: Mapping[int, Sequence[int]]) -> Any:
    """A copy of `content`, the content of a JSON file, in which names of modules have the new
    numbers of experts, as in a quantisation's lists of modules that are not quantised. `written`:
    layer -> original ids of its written experts, in order. List items and fields that name an
    expert that is not written are left out. UserError for a name of experts in several layers."""
    if isinstance(content, dict):
        renamed = {
            _renumbered_name(key, written): renumbered(value, written)
            for key, value in content.items()
        }
        renamed.pop(None, None)  # the fields of experts that are not written
        return renamed
    if isinstance(content, list):
        items = [
            _renumbered_name(item, written) if isinstance(item, str) else renumbered(item, written)
            for item in content
        ]
        return [
            item
            for item, original in zip(items, content, strict=True)
            if item is not None or original is None
        ]
    return content


def renumbered_files(
    folder: Path, written: Mapping[int, Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """Name -> new content, for each of `FILES` that `folder` has."""
    return {
        name: renumbered(read_json(folder / name), written)
        for name in FILES
        if (folder / name).is_file()
    }


def _renumbered_name(name: str, written: Mapping[int, Sequence[int]]) -> str | None:
    """The name with the expert's new number; the same name if it names no expert of a layer in
    `written`; None for an expert that is not written. UserError as for `renumbered`."""
    match = EXPERT_NAME.search(name)
    # the name without the numbers that are understood: another number is of several layers
    unmatched = f"{name[: match.start()]} {name[match.end() :]}" if match else name
    if OTHER_NUMBER.search(unmatched.replace(ANY_DIGIT, "")):
        raise UserError(
            f"quantization_config has {name}, which names experts by number in several layers, but "
            "pruning gives them other numbers in each: expected one name for each layer and "
            "expert, such as model.layers.0.mlp.experts.3"
        )
    if match is None or int(match["layer"]) not in written:
        return name
    experts = written[int(match["layer"])]
    expert = int(match["expert"])
    if expert not in experts:
        return None
    start, end = match.span("expert")
    return f"{name[:start]}{experts.index(expert)}{name[end:]}"
