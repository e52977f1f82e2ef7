"""Exceptions by model family: everything that moe_lab has to know about a family by name. No torch.

Everything else is found by looking at the modules of a model. Model names appear only in this file, in the ports named
below and in conf/model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REGISTRY = "does not hand its experts to transformers' experts registry, so moe_lab cannot observe or prune them"
CROSS = "is an encoder-decoder model; moe_lab handles causal language models"

UNSUPPORTED = {
    "bamba": "has no routed experts",
    "dbrx": REGISTRY,
    "deepseek_v4": "routes tokens by a hash table in its first layers",
    "doge": "retrieves its experts by product keys instead of routing to them",
    "gemma4": "keeps its experts beside a dense block in one layer",
    "gemma4_text": "keeps its experts beside a dense block in one layer",
    "inkling": "has a router without one row per expert",
    "inkling_text": "has a router without one row per expert",
    "jetmoe": REGISTRY,
    "llama4": REGISTRY,
    "llama4_text": REGISTRY,
    "longcat_flash": "routes to identity experts, which have no weights; " + REGISTRY,
    "nllb-moe": CROSS,
    "step3p7": REGISTRY,
    "switch_transformers": CROSS,
    "zaya": "has a router with one class more than experts",
}
"""model_type -> why it is refused. A family that is not listed is judged by its modules."""
COUNT_FIELDS = ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")
"""Configuration fields that hold the number of routed experts; which one is canonical differs by family."""
TOP_K_FIELDS = ("num_experts_per_tok", "moe_k", "moe_topk")
"""Configuration fields that hold the number of experts a token is routed to."""
WIDTH_FIELDS = ("moe_intermediate_size", "intermediate_size")
"""Configuration fields that hold the number of channels of a routed expert; the first one present counts."""
ALSO_COUNTS = {"qwen3_moe": ("num_experts", "num_local_experts")}
"""model_type -> all count fields that programs look up in its config.json: transformers 5 writes num_local_experts, but
transformers 4 and servers read num_experts and would use its default."""
UNGROUPED_METHODS = ("greedy",)
"""Values of a router's topk_method that ignore its groups."""
ROUTING_VECTORS = ("bias", "e_score_correction_bias", "expert_bias")
"""Names of routing tensors with one entry per expert, in memory and on disk, besides the router's weight."""
ROUTERS = ("gate", "router")
"""Attribute names of the router of a MoE block."""
DISK_ROUTER_WEIGHTS = (
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.gate.weight",
    "gate.wg.weight",
)
"""Names of router weights in checkpoints, relative to the MoE block."""
DISK_ROUTING_VECTORS = (
    "router.bias",
    "gate.e_score_correction_bias",
    "router.e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
    "e_score_correction_bias",
    "expert_bias",
)
"""Names of routing vectors in checkpoints, relative to the MoE block."""
DISK_FUSED_EXPERTS = (
    *(
        f"experts.{name}{suffix}"
        for name in ("gate_up_proj", "up_proj", "down_proj")
        for suffix in ("", "_bias", "_blocks", "_scales")
    ),
    "input_linear.weight",
    "output_linear.weight",
)
"""Names of tensors that hold all experts of a block along their first axis, relative to the MoE block."""
DISK_SHARED = ("shared_expert.", "shared_experts.", "shared_mlp.", "shared_expert_gate.")
"""Prefixes of the tensors of a MoE block that pruning does not change."""
EXTRA_PREDICTION_BLOCKS = ("mtp.", "model.mtp.")
"""Prefixes of the tensors of extra prediction layers, which have a numbering of their own."""
PREDICTION_PROJECTION = ".eh_proj."
"""Part of the names of a tensor that numbered decoder layers have if, and only if, they predict several tokens: it
projects an embedding and a hidden state together to the input of the layer."""
EXTRA_PREDICTION = re.compile(rf"(?:^|\.)mtp(?:_\w+)?\.|{re.escape(PREDICTION_PROJECTION)}")
"""In the name of a tensor: it belongs to a layer that predicts several tokens."""
NOT_LOADED = re.compile(
    rf"{EXTRA_PREDICTION.pattern}|rotary_emb\.inv_freq$|\.(?:[qkv]|kv|kv_cache|prob|input|output|activation)_scale$"
)
"""Tensors that a checkpoint may have beyond those of its model: of extra prediction layers, frequencies that the
configuration determines, and scales by which programs that compute in fewer bits round activations and caches."""
EXTRA_PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Configuration fields that count layers for predicting several tokens, which transformers does not load."""
CAUSAL_MODELS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
"""Name of the table in transformers that maps model types to the classes of their causal language models."""
ROOT = "PreTrainedConfig"
"""The base class of configurations, from which no attribute_map (alternative field names) is inherited."""


@dataclass(frozen=True)
class Port:
    """Code for a family that transformers cannot load."""

    file: str
    """Its file name in moe_lab/models/ports, without suffix; exports contain it as modeling_<file>.py."""
    base: str
    """Prefix of its class names: <base>Config and <base>ForCausalLM."""


PORTS = {"deepseek": Port("deepseek_moe", "Deepseek")}
"""model_type -> the port that is used for it, even if the checkpoint brings code of its own."""


@dataclass(frozen=True)
class Family:
    """Names of the classes and configuration fields of a family."""

    base: str
    """Prefix of its class names: its causal language model is <base>ForCausalLM."""
    config: str
    """Name of its configuration class."""
    canonical: dict[str, str]
    """Alternative name of a configuration field -> the name under which the class stores it."""


def port_of(kind: str) -> dict[str, str]:
    """File name -> source code of the port of a family that transformers cannot load; empty for all other families."""
    return {f"modeling_{PORTS[kind].file}.py": _port(kind).read_text(encoding="utf-8")} if kind in PORTS else {}


def prediction_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the numbered decoder layers that predict several tokens, from the `names` of all tensors."""
    prefixes = {name.partition(PREDICTION_PROJECTION)[0] for name in names if PREDICTION_PROJECTION in name}
    return tuple(sorted(f"{prefix}." for prefix in prefixes))


LAYOUT = {
    "has_bias": (True, "have biases"),
    "has_gate": (False, "have no gate projection"),
    "is_transposed": (True, "are stored transposed"),
    "is_concatenated": (False, "interleave gate and up projection"),
    "has_post_expert_norm": (True, "are followed by a norm"),
}
"""Argument of transformers' decorator of experts -> the value with which their channels cannot be removed or put in
another order, and the reason, worded to follow "its experts"."""


def refusal(layout: Mapping[str, bool]) -> str | None:
    """The reason why channels of experts of a layout (arguments as in LAYOUT) cannot be removed; None if they can."""
    return next((reason for name, (unfit, reason) in LAYOUT.items() if layout.get(name) == unfit), None)


@cache
def layout(kind: str) -> dict[str, bool]:
    """What transformers' source says of the layout of a model type's experts, where it is not the usual one.

    {} for types that transformers does not have, or that have no such experts.
    """
    folder = Path(str(getattr(find_spec("transformers"), "origin", ""))).with_name("models") / kind.replace("-", "_")
    for file in folder.glob("modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        for stated in re.findall(r"^@use_experts_implementation(\(.*?\))\nclass", text, re.M | re.S):
            call = ast.parse(f"f{stated}", mode="eval").body
            assert isinstance(call, ast.Call)
            return {str(given.arg): bool(_literal(given.value)) for given in call.keywords}
    return {}


@cache
def read_family(kind: str) -> Family | None:
    """The family of a model type with a causal language model in the installed transformers or among our ports.

    None when the type is unknown, or when their source files do not state its names in plain literals.
    """
    if kind in PORTS:
        base, files = PORTS[kind].base, [_port(kind)]
    else:
        models = Path(str(getattr(find_spec("transformers"), "origin", ""))).with_name("models")
        base, files = _base(models / "auto" / "modeling_auto.py", kind), [*models.glob("*/configuration_*.py")]
    texts = (file.read_text(encoding="utf-8") for file in files)
    classes = [named for text in texts if f'"{kind}"' in text for named in _configurations(text, kind)]
    return Family(base, *classes[0]) if base and len(classes) == 1 else None


def _port(kind: str) -> Path:
    return Path(__file__).with_name("ports") / f"{PORTS[kind].file}.py"


def _base(file: Path, kind: str) -> str:
    """Prefix of the class names of a model type; empty if transformers has no causal language model of that type."""
    # parse this statement alone: the syntax tree of the whole file takes 7 MB, a tenth of what an export needs
    statement = re.search(rf"^{CAUSAL_MODELS}\b.*?(?=^[^\s)]|\Z)", file.read_text(encoding="utf-8"), re.M | re.S)
    listed = _assigned(ast.parse(statement[0]).body).get(CAUSAL_MODELS) if statement else None
    pairs = _literal(listed.args[0]) if isinstance(listed, ast.Call) and listed.args else None
    return str(dict(pairs or ()).get(kind, "")).removesuffix("ForCausalLM")


def _configurations(text: str, kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(class name, canonical names of fields) of each configuration class of a model type."""
    for node in ast.parse(text).body:
        assigned = _assigned(node.body) if isinstance(node, ast.ClassDef) else {}
        if isinstance(node, ast.ClassDef) and _literal(assigned.get("model_type")) == kind:
            plain = [ast.unparse(base) for base in node.bases] == [ROOT]
            canonical = _literal(assigned["attribute_map"]) if "attribute_map" in assigned else {} if plain else None
            if canonical is not None:
                yield node.name, canonical


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Name -> value of the assignments in the body of a module or class."""
    assigned: dict[str, ast.expr] = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None:
            assigned.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return assigned


def _literal(node: ast.expr | None) -> Any:
    """The value of an expression of literals; None for any other expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
