"""What moe_lab uses of transformers beyond its public interface is in one module, and the versions allowed have it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import tiny
import transformers
from packaging.requirements import Requirement
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_lab
from moe_lab.models import transformers_private

ROOT = Path(moe_lab.__file__).parent
ONE_PLACE = Path("models/transformers_private.py")
SHIPPED = {
    *(Path("exported_code") / name for name in ("deepseek_moe.py", "pruned.py", "ragged.py")),
}
"""Written beside the weights of exports, so they cannot import moe_lab; the exports' tests run them."""
PUBLIC = {
    "transformers": None,
    "transformers.cache_utils": {"DynamicLayer"},
    "transformers.integrations.moe": {"ALL_EXPERTS_FUNCTIONS", "ExpertsInterface"},
    "transformers.utils": {"logging"},
    "transformers.utils.quantization_config": {"CompressedTensorsConfig", "FineGrainedFP8Config", "Mxfp4Config"},
}
"""Module -> documented names; None for all that the package offers at the top."""
ATTRIBUTES = {
    "_adjust_missing_and_unexpected_keys",
    "_apply_gate",
    "_attn_implementation",
    "_can_set_experts_implementation",
    "_dequantize_one",
    "_experts_implementation",
    "_get_dtype_plan",
    "_gradient_checkpointing_func",
    "_init_weights",
    "_is_expert_parallel",
    "_load_pretrained_model",
    "_update_model_kwargs_for_generation",
    "_weight_conversions",
}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that is imported from transformers, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("transformers."))


def private(tree: ast.AST) -> set[str]:
    """Names that are not public: imported from transformers, or attributes (as text too) of its models."""
    found = {
        f"{module}.{name}"
        for module, name in imported(tree)
        if module not in PUBLIC or name.startswith("_") or name not in (PUBLIC[module] or {name})
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
            found.add(node.value)
    return found


def test_no_other_module_uses_what_is_not_public() -> None:
    used = {file.relative_to(ROOT): private(ast.parse(file.read_text())) for file in sorted(ROOT.rglob("*.py"))}
    assert len(used[ONE_PLACE]) > 10
    assert {file for file, names in used.items() if names} == {ONE_PLACE, *SHIPPED}


def test_every_name_is_there() -> None:
    tree = ast.parse((ROOT / ONE_PLACE).read_text())
    for module, name in imported(tree):
        assert hasattr(__import__(module, fromlist=[name]), name), f"{module}.{name}"
    model = tiny.build("olmoe")
    experts = model.model.layers[0].mlp.experts
    layer = model.model.layers[0]
    owners = {
        "_adjust_missing_and_unexpected_keys": model,
        "_apply_gate": experts,
        "_attn_implementation": model.config,
        "_dequantize_one": transformers_private.Fp8Dequantize,
        "_experts_implementation": experts.config,
        "_get_dtype_plan": model,
        "_init_weights": model,
        "_is_expert_parallel": experts,
        "_load_pretrained_model": model,
        "_update_model_kwargs_for_generation": model,
    }
    for name, owner in owners.items():
        assert hasattr(owner, name), name
    assert isinstance(layer, transformers.GradientCheckpointingLayer) and hasattr(layer, "gradient_checkpointing")
    assert callable(ALL_EXPERTS_FUNCTIONS["grouped_mm"])
    quantizer = transformers_private.FineGrainedFP8HfQuantizer
    assert quantizer.get_load_operations(None) == {"dequantize": transformers_private.Fp8Dequantize}


def test_versions_that_were_not_tested_are_refused_when_moe_lab_is_installed() -> None:
    stated = re.findall(r'"(transformers\b[^"]*)"', (ROOT.parent / "pyproject.toml").read_text())
    allowed = [Requirement(text).specifier for text in stated]
    assert len(allowed) == 3 and len(set(allowed)) == 1
    assert {clause.operator for clause in allowed[0]} == {"<", ">="}
    pinned = re.search(r"^transformers==([\d.]+)", (ROOT.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] in allowed[0] and version("transformers") in allowed[0]
