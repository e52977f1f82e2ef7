"""The model card of a pruned checkpoint. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from moe_lab.pruning.plan import Plan

CARD = "README.md"
FENCE = "---\n"
FRONT_MATTER = re.compile(r"\s*---\n(?P<front>.*?)\n---[ \t]*(?:\n|\Z)", re.S)
"""As the hub reads it (huggingface_hub.repocard, which would take 20 MB to import)."""
ORIGINAL = "# Card of the original model\n"
"""Heading between the pruned model's card and the card of the original."""
OF_ORIGINAL = ("model-index", "base_model", "base_model_relation", "new_version")
"""Fields of the original's front matter that are not true of the pruned model, such as its
results."""
TRANSFORMERS = "```python\nAutoModelForCausalLM.from_pretrained(folder{})\n```"
LOADING = {
    "stock": "It has the layout of the original and loads like it:",
    "ported": (
        "It has the layout of the original. transformers has no code for this family and cannot "
        "import the original's; the code beside the weights is used instead, and moe_lab needs "
        "none:"
    ),
    "uneven": (
        "Its layers differ in shape, as `pruned` in config.json says; experts of unequal width "
        "are packed. It has a model type of its own, which the code beside the weights defines:"
    ),
    "constants": (
        "It is made for vLLM, from version 0.33, which reads the constants of replaced experts "
        "(`approximate_experts` in config.json). Older versions of vLLM give wrong results without "
        "an error, and transformers refuses the folder:"
    ),
}
FILLED = {
    "masked": "Dropped channels and experts are zeros in tensors of the original shape; experts, "
    "where any were dropped, have a routing bias with which they are never chosen.",
    "padded": "Experts are filled with zero channels up to the widest expert of their layer.",
}
PREDICTING = (
    "{} predict further tokens (multi-token prediction). They have as many experts as all other "
    "layers: those whose router rows have the largest sums of absolute weights, as no pass gathers "
    "statistics of these layers."
)


def model_card(
    plan: Plan,
    name: str,
    original: str,
    *,
    shape: str,
    kind: str,
    unpruned_bytes: int,
    written: int,
    predicting: Sequence[str],
) -> str:
    """The model card in Markdown. Its front matter (licence and so on) is that of `original`, the
    card of the original model, without the fields in `OF_ORIGINAL`.

    `name`: name of the original model. `kind`: a key of `LOADING`. `written`: bytes of all weights
    of the export. `predicting`: names of the pruned experts of layers that predict further
    tokens."""
    front, body = split_card(original)
    front = _inherited_fields(front)
    command = TRANSFORMERS.format("" if kind == "stock" else ", trust_remote_code=True")
    if kind == "constants":
        command = "```\nvllm serve folder\n```"
    size = f"Its weights take {written:,} bytes, {written / unpruned_bytes:.1%} of the original's."
    if shape in FILLED:
        size += f" {FILLED[shape]} export=natural leaves the zeros out."
    sections = [
        f"{FENCE}{front}{FENCE}\n" if front else "",
        f"# {name}, pruned\n\n",
        (
            f"{_summary(plan)}; pruning left all other weights as they are in the original, byte "
            "for byte.\n\n"
        ),
        f"{LOADING[kind]}\n\n{command}\n\n{size}\n\n",
        f"{PREDICTING.format(', '.join(predicting))}\n\n" if predicting else "",
        "What is retained is listed in `plan.json`. Where the plan comes from:\n\n",
        f"```json\n{json.dumps({**plan.provenance, 'plan': plan.digest}, indent=2)}\n```\n",
        f"\n{ORIGINAL}\n{body.lstrip()}" if body.strip() else "",
    ]
    return "".join(sections)


def add_section(folder: Path, heading: str, text: str) -> None:
    """Add a section to the model card of the export in `folder`, before the original model's
    card."""
    card = folder / CARD
    pruned, marker, original = card.read_text(encoding="utf-8").partition(ORIGINAL)
    extended = f"{pruned.rstrip()}\n\n## {heading}\n\n{text}\n"
    if marker:
        extended += f"\n{marker}{original}"
    card.write_text(extended, encoding="utf-8")


def _summary(plan: Plan) -> str:
    """A text for the card, without a full stop: how many experts and channels are retained, and
    what replaces dropped experts."""
    layers = plan.layers.values()
    n_experts = sum(layer.n_experts for layer in layers)
    n_constants = sum(len(layer.null_experts) for layer in layers if layer.constants is not None)
    if n_constants:
        return (
            f"{n_experts - n_constants} of {n_experts} routed experts are retained. The other "
            f"{n_constants} are replaced by constants: the router stays whole, and a token that is "
            "routed to one of them gets its constant times its gate"
        )
    if plan.merged_layers:
        groups = sum(len(layer.merged) for layer in layers)  # each group has one owner
        n_merged = sum(len(layer.merged_members) for layer in layers)
        is_matched = any(layer.alignment is not None for layer in layers)
        matched = "with matched channels" if is_matched else "channel by channel"
        router = "stays whole" if plan.shares_experts else "has the rows of the remaining experts"
        return (
            f"{n_experts - n_merged} of {n_experts} routed experts remain: "
            f"{groups + n_merged} were merged into {groups} weighted sums of their weights, "
            f"{matched}. The router {router}"
        )
    counts = [len(layer.retained) for layer in layers]
    # "16 to 32", or a single number if all layers retain equally many experts
    range_of_counts = " to ".join(map(str, sorted({min(counts), max(counts)})))
    experts = (
        f"{sum(counts)} of {n_experts} routed experts are retained: {range_of_counts} in each of "
        f"{len(layers)} layers. "
    )
    masks = [layer.channels for layer in layers if layer.channels is not None]
    if not masks:
        return f"{experts}Whole experts were removed, with their rows of the router"
    total = sum(mask.size for mask in masks)
    channels = sum(int(mask.sum()) for mask in masks)
    return (
        f"{experts}Of their channels {channels} of {total} ({channels / total:.1%} of the "
        "original's) were retained"
    )


def _inherited_fields(front: str) -> str:
    """`front`, the front matter of the original's card, without the fields in `OF_ORIGINAL`."""
    try:
        fields = yaml.safe_load(front)
    except yaml.YAMLError:
        return front
    if not isinstance(fields, dict) or not any(name in fields for name in OF_ORIGINAL):
        return front
    inherited = {name: value for name, value in fields.items() if name not in OF_ORIGINAL}
    return yaml.safe_dump(inherited, sort_keys=False, allow_unicode=True) if inherited else ""


def split_card(card: str) -> tuple[str, str]:
    """(front matter of the card without its fences, or ""; text after the front matter)."""
    match = FRONT_MATTER.match(card)
    return (f"{match['front']}\n", card[match.end() :]) if match else ("", card)
