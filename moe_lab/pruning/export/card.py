"""The model card of a pruned checkpoint. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import yaml

from moe_lab.pruning.plan import Plan

FENCE = "---\n"
FRONT_MATTER = re.compile(r"\s*---\n(?P<front>.*?)\n---[ \t]*(?:\n|\Z)", re.S)
"""As the hub reads it (huggingface_hub.repocard, which would take 20 MB to import)."""
ORIGINAL = "# Card of the original model\n"
"""Heading between the pruned model's card and the card of the original."""
OF_ORIGINAL = ("model-index", "base_model", "base_model_relation", "new_version")
"""Fields of the original's front matter that are not true of the pruned model, such as its results."""
LOADING = {
    "stock": "It has the layout of the original and loads like it:",
    "ported": (
        "It has the layout of the original. transformers has no code for this family and cannot import the original's; "
        "the code beside the weights is used instead, and moe_lab needs none:"
    ),
    "uneven": (
        "Its layers differ in shape, as `pruned` in config.json says; experts of unequal width are packed. It has a "
        "model type of its own, which the code beside the weights defines:"
    ),
}
UNCHANGED = "all other weights are those of the original model, byte for byte. Nothing was trained afterwards."
SIZE = re.compile(r"Weights take [\d,]+ bytes, [\d.]+% of the original's ([\d,]+)\.")
ZEROS = re.compile(r"[\d,]+ bytes \(([\d.]+%)\) are such zeros")
FILLED = {
    "masked": "Dropped channels and experts are zeros in tensors of the original shape; experts, where any were "
    "dropped, have a routing bias with which they are never chosen.",
    "padded": "Experts are filled with zero channels up to the widest expert of their layer.",
}


LEFT_OUT = (
    "Left out: {}. These layers of the original predict further tokens (multi-token prediction). They have experts of "
    "their own, and transformers does not load them, so that there are no statistics to prune them by. The model "
    "generates without them, but cannot draft tokens for speculative decoding."
)


@dataclass(frozen=True)
class Cost:
    """Size of an exported checkpoint, in bytes of weights."""

    shape: str
    kind: str
    """stock, ported or uneven: what is needed to load it."""
    original: int
    written: int
    zeros: int
    """Bytes of `written` that are padding zeros."""
    left_out: tuple[str, ...] = ()
    """Names of the layers that predict extra tokens and were left out."""


def model_card(plan: Plan, name: str, original: str | None, cost: Cost) -> str:
    """The model card in Markdown.

    It says what was pruned and how, how to load the model and how large it is. The card of the original model follows,
    whose front matter (licence and so on) is kept, but for the fields in `OF_ORIGINAL`.
    """
    front, body = split_card(original or "")
    front = _inherited(front)
    sections = [
        f"{FENCE}{front}{FENCE}\n" if front else "",
        f"# {name}, pruned\n\n",
        f"{_kept(plan)}; {UNCHANGED}\n\n",
        f"{_loading(cost.kind)}\n\n{_cost(cost)}\n\n",
        f"{LEFT_OUT.format(', '.join(f'`{name}`' for name in cost.left_out))}\n\n" if cost.left_out else "",
        "What is kept is listed in `plan.json`. Where the plan comes from:\n\n",
        f"```json\n{json.dumps({**plan.provenance, 'plan': plan.digest}, indent=2)}\n```\n",
        f"\n{ORIGINAL}\n{body.lstrip()}" if body.strip() else "",
    ]
    return "".join(sections)


def changed_card(card: str, words: str, written: int) -> str:
    """The model card of an export whose tensors were changed afterwards, as the sentence `words` says.

    `written`: bytes of its weights.
    """
    own, heading, original = card.partition(ORIGINAL)
    size = SIZE.search(own)
    assert size is not None
    own = own.replace(size[0], _size(written, int(size[1].replace(",", ""))))
    own = ZEROS.sub(r"Before the changes, \1 of the bytes were such zeros", own)
    own = own.replace(UNCHANGED, f"all other weights were first copied from the original model. {words}")
    return f"{own}{heading}{original}"


def gguf_card(card: str, file: str, size: int) -> str:
    """The model card of a stock checkpoint after its conversion to GGUF, into a file of `size` bytes."""
    loading = (
        f"Its weights are in `{file}` ({size:,} bytes), converted by llama.cpp's own converter without rounding. Load "
        "it with llama.cpp, or, for architectures that transformers reads from GGUF, with\n\n"
        "```python\n"
        "config = AutoConfig.from_pretrained(folder)  # transformers does not read all of it from the file\n"
        f'AutoModelForCausalLM.from_pretrained(folder, gguf_file="{file}", config=config)\n'
        "```"
    )
    for kind in ("stock", "ported"):
        card = card.replace(_loading(kind), loading, 1)
    return card


def _loading(kind: str) -> str:
    trust = "" if kind == "stock" else ", trust_remote_code=True"
    return f"{LOADING[kind]}\n\n```python\nAutoModelForCausalLM.from_pretrained(folder{trust})\n```"


def _kept(plan: Plan) -> str:
    before, after = sum(plan.n_experts.values()), sum(map(len, plan.experts.values()))
    if constant := sum(map(len, plan.constants.values())):
        return (
            f"{before - constant} of {before} routed experts are kept. The other {constant} are replaced by constants: "
            "the router stays whole, and a token that is routed to one of them gets its constant times its gate"
        )
    if merged := [group for of_layer in plan.merged.values() for group in of_layer.values()]:
        members = sum(map(len, merged))
        matched = "with matched channels" if plan.alignments else "channel by channel"
        router = (
            "The router stays whole, and gates of merged experts add up"
            if plan.shares_experts
            else "The router keeps the rows of the experts that are left"
        )
        return (
            f"{before - members + len(merged)} of {before} routed experts are left: {members} were merged into "
            f"{len(merged)} weighted sums of their weights, {matched}. {router}"
        )
    counts = sorted({len(kept) for kept in plan.experts.values()})
    experts = (
        f"{after} of {before} routed experts are kept: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} "
        f"in each of {len(plan.experts)} layers. "
    )
    if not plan.channels:
        return f"{experts}Whole experts were removed, with their rows of the router"
    channels = sum(mask.size for mask in plan.channels.values())
    kept = sum(int(mask.sum()) for mask in plan.channels.values())
    return f"{experts}Of their channels {kept} of {channels} ({kept / channels:.1%} of the original's) were kept"


def _cost(cost: Cost) -> str:
    text = _size(cost.written, cost.original)
    if cost.shape not in FILLED:
        return text
    return (
        f"{text} {FILLED[cost.shape]} {cost.zeros:,} bytes ({cost.zeros / cost.written:.1%}) are such zeros; "
        "export=natural leaves them out."
    )


def _size(written: int, original: int) -> str:
    return f"Weights take {written:,} bytes, {written / original:.1%} of the original's {original:,}."


def _inherited(front: str) -> str:
    """The original's front matter without the fields in `OF_ORIGINAL`; unchanged if it has none of them."""
    try:
        fields = yaml.safe_load(front)
    except yaml.YAMLError:
        return front
    if not isinstance(fields, dict) or not any(name in fields for name in OF_ORIGINAL):
        return front
    kept = {name: value for name, value in fields.items() if name not in OF_ORIGINAL}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True) if kept else ""


def split_card(card: str) -> tuple[str, str]:
    """The front matter of a card without its fences, and the text after it."""
    match = FRONT_MATTER.match(card)
    return (f"{match['front']}\n", card[match.end() :]) if match else ("", card)
