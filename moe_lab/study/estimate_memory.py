"""About how much memory a step takes, with the whole model loaded or one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lab.models.config_json import Size
from moe_lab.study.identity import Step

BASE = 600 * 2**20
"""Bytes of Python with torch and transformers loaded."""
ROOM = 1.1
"""Sums, buffers and fragments, as a factor on the weights."""
LOGITS = 2**19
"""Bytes of the logits of one token, at most: about 130,000 words in fp32."""
CACHE = 4
"""Bytes of keys and values of one token and layer, as a multiple of the hidden size; less where heads share them."""
PROMPT = 128
"""Tokens of a prompt, or of a question with one of its answers."""
LAYERED = {
    "statistics": 1,
    "damage": 1,
    "reconstruction": 1,
    "sequential": 1,
    "cost": 1,
    "gradients": 2,
    "weight_gradients": 2,
}
"""Kinds of step that can have one decoder layer in memory at a time -> how often they read the checkpoint then."""


def text_of(step: Step) -> Mapping[str, Any]:
    """The text that a step reads; {} for one that reads none."""
    found: Mapping[str, Any] = step.runtime.get("calibration") or step.runtime.get("text", {})
    return found


def is_layered(step: Step) -> bool:
    """Whether a step has one decoder layer in memory at a time, as calibration.engine=streamed asks."""
    return step.kind in LAYERED and bool(text_of(step).get("engine") == "streamed")


def resident_memory(step: Step, size: Size) -> float:
    """Weights; a second model where weights are changed; and what the tokens of a batch leave behind."""
    stored = "storage" in step.parts and step.kind != "cost"  # which counts what it would take
    changed = step.kind in ("finetune", "timing") or "finetune" in step.inputs or stored
    weights = ROOM * size.bytes * (2 if changed else 1)
    if step.kind in ("evaluate", "generate"):
        benchmark = step.runtime["benchmark"]
        written = int(benchmark["max_new_tokens"])
        row = (PROMPT + written) * CACHE * size.hidden * size.moe_layers if written else PROMPT * _logits(size)
        return BASE + weights + int(benchmark["batch_size"]) * row
    kept = _kept(size)
    if _comes_back(step):
        kept = kept + size.hidden * size.moe_layers if text_of(step)["checkpointing"] else kept * size.moe_layers
    tokens = _batch(step) * (_logits(size) + size.bytes_per_parameter * kept)
    return BASE + weights + size.moe_layers * _gradients(step, size) + tokens


def layered_memory(step: Step, size: Size) -> float:
    """A decoder layer, embeddings and the vocabulary head; what a batch leaves behind in a layer; and hidden states as
    far as calibration.activation_budget goes, which stay where the layers are. Logits are few at a time."""
    routed = size.experts * size.expert
    rest = size.parameters - size.moe_layers * routed
    ends = min(rest, 2 * LOGITS // 4 * size.hidden)
    weights = ROOM * size.bytes_per_parameter * (routed + ends + (rest - ends) / size.moe_layers)
    states = min(float(text_of(step)["activation_budget"]) * 2**30, states_of(step, size))
    tokens = _batch(step) * size.bytes_per_parameter * _kept(size)
    return BASE + weights + _gradients(step, size) + tokens + states


def states_of(step: Step, size: Size) -> float:
    """Bytes of what enters each decoder layer in a layered pass: of two layers at a time forward; where gradients come
    back, of all of them, and of the gradients of two."""
    layers = size.moe_layers + 2 if _comes_back(step) else 2
    return float(text_of(step)["tokens"]) * size.hidden * size.bytes_per_parameter * layers


def _logits(size: Size) -> float:
    """Bytes of the logits of a token; a vocabulary has no more words than parameters allow."""
    return min(LOGITS, 4 * size.parameters / size.hidden)


def _batch(step: Step) -> int:
    """Tokens of a batch."""
    text = text_of(step)
    return int(min(text["batch_size"] * text["length"], text["tokens"]))


def _comes_back(step: Step) -> bool:
    """Whether gradients come back through the layers."""
    return step.kind in ("gradients", "weight_gradients", "finetune") or "gradients" in step.inputs


def _kept(size: Size) -> float:
    """Numbers of a token that a pass keeps of one layer."""
    return 20 * size.hidden + 6 * size.top_k * size.width


def _gradients(step: Step, size: Size) -> float:
    """Bytes of the gradients, in fp32, of the weights of a layer's experts, where they are asked for."""
    return 4.0 * size.experts * size.expert if step.kind == "weight_gradients" else 0.0
