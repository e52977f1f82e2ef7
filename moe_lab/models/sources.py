"""What the code of a model family says, read as text: importing it would load torch. No torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import moe_lab.models
from moe_lab.models.families import PORTS

CAUSAL_MODELS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
"""transformers' list of model types and the classes of their causal language models."""
ROOT = "PreTrainedConfig"
"""The configuration class from which no other names of fields are inherited."""


@dataclass(frozen=True)
class Family:
    """How a family is named in code."""

    base: str
    """How its classes begin: its causal language model is <base>ForCausalLM."""
    config: str
    """Its configuration class."""
    canonical: dict[str, str]
    """Other name of a configuration field -> the one under which the class holds it."""


def port_of(kind: str) -> dict[str, str]:
    """Name -> text of the code file that a family needs which transformers cannot load; empty for all others."""
    return {f"modeling_{PORTS[kind].file}.py": _port(kind).read_text(encoding="utf-8")} if kind in PORTS else {}


@cache
def read_family(kind: str) -> Family | None:
    """The family of a model type with a causal language model in the installed transformers or among our ports.

    None where their files do not say it in plain literals, as for a type that they do not know.
    """
    if kind in PORTS:
        base, files = PORTS[kind].base, [_port(kind)]
    else:
        models = Path(str(getattr(find_spec("transformers"), "origin", ""))).with_name("models")
        base, files = _base(models / "auto" / "modeling_auto.py", kind), [*models.glob("*/configuration_*.py")]
    texts = (file.read_text(encoding="utf-8") for file in files)
    found = [named for text in texts if f'"{kind}"' in text for named in _configurations(text, kind)]
    return Family(base, *found[0]) if base and len(found) == 1 else None


def _port(kind: str) -> Path:
    return Path(moe_lab.models.__file__).with_name(f"{PORTS[kind].file}.py")


def _base(file: Path, kind: str) -> str:
    """How the classes of a model type begin; empty where transformers has no causal language model of it."""
    listed = _assigned(ast.parse(file.read_text(encoding="utf-8")).body).get(CAUSAL_MODELS)
    pairs = _literal(listed.args[0]) if isinstance(listed, ast.Call) and listed.args else None
    return str(dict(pairs or ()).get(kind, "")).removesuffix("ForCausalLM")


def _configurations(text: str, kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Name, and canonical names of fields, of each configuration class of a model type."""
    for node in ast.parse(text).body:
        said = _assigned(node.body) if isinstance(node, ast.ClassDef) else {}
        if isinstance(node, ast.ClassDef) and _literal(said.get("model_type")) == kind:
            plain = [ast.unparse(base) for base in node.bases] == [ROOT]
            canonical = _literal(said["attribute_map"]) if "attribute_map" in said else {} if plain else None
            if canonical is not None:
                yield node.name, canonical


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Name -> value of the assignments that stand in a module or class."""
    found: dict[str, ast.expr] = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None:
            found.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return found


def _literal(node: ast.expr | None) -> Any:
    """The value of an expression of literals; None for any other."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
