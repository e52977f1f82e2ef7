"""The model card of a pruned checkpoint. No torch."""

from __future__ import annotations

import json

from moe_lab.pruning.plan import Plan

FENCE = "---\n"


def model_card(plan: Plan, name: str, original: str | None) -> str:
    """Markdown: what was pruned and how, then the card of the original model, whose front matter (licence and so on)
    stays."""
    front, body = _split(original or "")
    before, after = sum(plan.n_experts.values()), sum(map(len, plan.experts.values()))
    counts = sorted({len(kept) for kept in plan.experts.values()})
    sections = [
        f"{FENCE}{front}{FENCE}\n" if front else "",
        f"# {name}, pruned\n\n",
        f"{after} of {before} routed experts are kept: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} "
        f"in each of {len(plan.experts)} layers. Whole experts were removed, with their rows of the router; all other "
        "weights are those of the original model, byte for byte. Nothing was trained afterwards.\n\n",
        "Kept experts are listed in `plan.json`. Where the plan comes from:\n\n",
        f"```json\n{json.dumps({**plan.provenance, 'plan': plan.digest}, indent=2)}\n```\n",
        f"\n# Card of the original model\n\n{body.lstrip()}" if body.strip() else "",
    ]
    return "".join(sections)


def _split(card: str) -> tuple[str, str]:
    """Front matter without its fences, and the rest."""
    if not card.startswith(FENCE) or f"\n{FENCE}" not in card[len(FENCE) - 1 :]:
        return "", card
    front, _, body = card[len(FENCE) :].partition(f"\n{FENCE}")
    return f"{front}\n", body
