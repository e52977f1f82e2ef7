"""Write the code file of a pruned checkpoint: texts of this package put together, with the family's names filled in."""

from __future__ import annotations

import ast
from pathlib import Path

import moe_lab.pruning

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


def code(*, base: str, config: str, home: str, model_type: str, count: str, width: str, own_type: bool) -> str:
    """The text of the code file for a family with classes `base`ForCausalLM and `config` in the module `home`.

    `count` and `width` name the configuration fields of experts per layer and channels per expert. The classes are
    named as the family's with `Pruned` before them. With `own_type` the checkpoint has the model type
    `pruned_<model_type>`, and its layers may be ragged.
    """
    folder = Path(moe_lab.pruning.__file__).parent
    sources = [folder / "remote" / "shapes.py", *([folder / "ragged.py"] if own_type else [])]
    imports, bodies = zip(*map(_split, sources), strict=True)
    wanted = [f"from {home} import {base}ForCausalLM"]
    if own_type:
        wanted = [
            f"from {home} import {config}, {base}ForCausalLM",
            "from transformers.conversion_mapping import (",
            "    get_checkpoint_conversion_mapping,",
            "    register_checkpoint_conversion_mapping,",
            ")",
        ]
    found = sorted({line for lines in imports for line in lines}, key=lambda line: (line.startswith("from"), line))
    tail = (OWN_TYPE if own_type else PER_LAYER).format(
        base=base, config=config, model_type=model_type, count=count, width=width
    )
    return HEAD.format(base=base) + "\n".join([*found, *wanted]) + "\n" + "".join(bodies) + tail


def _split(path: Path) -> tuple[list[str], str]:
    """The import lines of a module, and what follows them; its docstring stays behind."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    nodes = ast.parse(text).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    start = max(node.end_lineno or 0 for node in imports)
    kept = [node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    return [ast.unparse(node) for node in kept], "".join(lines[start:])
