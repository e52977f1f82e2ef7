"""The code file and config.json of an exported checkpoint whose layers differ in shape. No torch."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.families import COUNT_FIELDS, WIDTH_FIELDS, ClassNames, port_of, read_family
from moe_lab.pruning.form import CONSTANT_FIELD, OWNERS_FIELD, RAGGED_FIELD, Form

FORMAT = {"pruned_format": 1}
"""Field of config.json with the number of the format in which the layers are described. To be raised when a program
that reads an older one, such as the plugin of vLLM, would read the new one wrong."""
HEAD = '''"""A pruned {base}: its MoE layers differ in shape. Made by moe_lab; needs torch and transformers >= 5.21.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Weights are read as those of {base}. transformers lets the experts implementation be chosen where the text
@use_experts_implementation stands in the file of the model class.
"""

from __future__ import annotations

'''
PER_LAYER = """

class Pruned{base}ForCausalLM({base}ForCausalLM):
    \"\"\"{base}ForCausalLM with layers of different shape.\"\"\"

    def __init__(self, config):
        build_stock(super().__init__, config)
        shape_layers(self, config, "{count}", "{width}")
        self.post_init()
"""
OWN_TYPE = """

class Pruned{config}({config}):
    \"\"\"A type of its own, so that nothing else takes this checkpoint for one of its kind.\"\"\"

    model_type = "pruned_{model_type}"


class Pruned{base}ForCausalLM({base}ForCausalLM):
    \"\"\"{base}ForCausalLM with layers, and maybe experts, of different shape.\"\"\"

    config_class = Pruned{config}

    def __init__(self, config):
        build_stock(super().__init__, config)
        shape_layers(self, config, "{count}", "{width}", RaggedExperts)
        self.post_init()


register_checkpoint_conversion_mapping(
    "pruned_{model_type}", get_checkpoint_conversion_mapping("{model_type}") or [], overwrite=True
)
"""


def differing(config: dict[str, Any], form: Form) -> tuple[dict[str, Any], str, dict[str, str]]:
    """config.json, kind and code files for layers that differ, or that the family's configuration cannot describe.

    What differs between layers goes into `per_layer_config`, under the canonical names of the fields. A stock class
    that reads such a field then raises an error; under another name it would build all layers alike. A checkpoint with
    ragged experts gets a model type of its own, because no stock class reads their widths; so does a family that
    moe_lab has ported, because transformers prefers a port to code beside the weights.
    """
    family, kind = native_family(config), config["model_type"]
    stated = next(field for field in COUNT_FIELDS if field in config)
    count, width = family.canonical.get(stated, stated), width_field(config)
    if isinstance(config[stated], list):
        config[stated] = max(config[stated])
    name = f"modeling_pruned_{kind}"
    model = f"{name}.Pruned{family.base}ForCausalLM"
    config["architectures"] = [f"Pruned{family.base}ForCausalLM"]
    port = port_of(kind)
    own_type = form.ragged or bool(port)
    described = {"AutoConfig": f"{name}.Pruned{family.config}"} if own_type else {}
    config["auto_map"] = {**described, "AutoModelForCausalLM": model}
    config["per_layer_config"] = _per_layer(config, form, count, width)
    config.update(FORMAT)
    if form.count is None and config.get("output_router_logits"):
        config["output_router_logits"] = False  # the balancing loss needs layers with equal numbers of experts
    if own_type:
        config["model_type"] = f"pruned_{kind}"
    if form.ragged:
        config[RAGGED_FIELD] = {str(index): list(layer.widths) for index, layer in form.layers.items() if layer.ragged}
        if constant := [index for index, layer in form.layers.items() if layer.constants is not None]:
            config[CONSTANT_FIELD] = constant
        if owners := {str(index): list(layer.owners) for index, layer in form.layers.items() if layer.owners}:
            config[OWNERS_FIELD] = owners
    home = next((f".{file.removesuffix('.py')}" for file in port), "transformers")
    names = {"base": family.base, "config": family.config, "model_type": kind, "count": count, "width": width}
    text = generate_code(**names, home=home, own_type=own_type)
    return config, "ragged" if form.ragged else "per_layer", {f"{name}.py": text, **port}


def native_family(config: dict[str, Any]) -> ClassNames:
    """The class names of the model type in `config`.

    Raises UserError when its causal language model does not exist, or needs code from the checkpoint's folder.
    """
    kind = config.get("model_type", "")
    family = read_family(kind)
    if family is None:
        from moe_lab.models.ports import ask_family  # loads torch, so only for families that cannot be read

        family = ask_family(kind)
    if family is None:
        raise UserError(
            f"model_type={kind}: layers and experts of another shape can be exported for causal language models that "
            "transformers knows itself only, evaluate the plan with a mask"
        )
    return family


def _per_layer(config: dict[str, Any], form: Form, count: str, width: str) -> dict[str, dict[str, int]]:
    """Layer -> the fields in which it differs from the model. A ragged layer is as wide as its widest expert."""
    per_layer: dict[str, dict[str, int]] = {}
    for index, layer in form.layers.items():
        differing_fields = {count: len(layer.experts)} if form.count is None else {}
        if form.width_of(index) != form.width:
            differing_fields[width] = form.width_of(index) or 0
        if differing_fields:
            per_layer[str(index)] = differing_fields
    return per_layer


def width_field(config: dict[str, Any]) -> str:
    """The field of config.json that holds the channels per expert. Raises UserError when there is none."""
    field = next((field for field in WIDTH_FIELDS if isinstance(config.get(field), int)), None)
    if field is None:
        raise UserError(f"config.json has no width of experts: expected one of {', '.join(WIDTH_FIELDS)}")
    return field


def generate_code(*, base: str, config: str, home: str, model_type: str, count: str, width: str, own_type: bool) -> str:
    """The text of the code file for a family with classes `base`ForCausalLM and `config` in the module `home`.

    `count` and `width` name the configuration fields of experts per layer and channels per expert. The classes are
    named as the family's with `Pruned` before them. With `own_type` the checkpoint has the model type
    `pruned_<model_type>`, and its layers may be ragged.
    """
    folder = Path(__file__).parent.parent
    sources = [folder / "uneven_layers.py", *([folder / "ragged.py"] if own_type else [])]
    imports, bodies = zip(*map(_split, sources), strict=True)
    family_imports = [f"from {home} import {base}ForCausalLM"]
    if own_type:
        family_imports = [
            f"from {home} import {config}, {base}ForCausalLM",
            "from transformers.conversion_mapping import (",
            "    get_checkpoint_conversion_mapping,",
            "    register_checkpoint_conversion_mapping,",
            ")",
        ]
    distinct = {line for lines in imports for line in lines}
    import_lines = sorted(distinct, key=lambda line: (line.startswith("from"), line))
    tail = (OWN_TYPE if own_type else PER_LAYER).format(
        base=base, config=config, model_type=model_type, count=count, width=width
    )
    return HEAD.format(base=base) + "\n".join([*import_lines, *family_imports]) + "\n" + "".join(bodies) + tail


def _split(path: Path) -> tuple[list[str], str]:
    """The import lines of a module, and the text after them; without its docstring."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    nodes = ast.parse(text).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    start = max(node.end_lineno or 0 for node in imports)
    kept = [node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    return [ast.unparse(node) for node in kept], "".join(lines[start:])
