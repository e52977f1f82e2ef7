"""Loading memory (000 Table 3): exact bytes of a model in bfloat16 before and after pruning, from its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.frames import records
from analysis.load import Study

BYTES = 2
"""Of one parameter in bfloat16."""


def removed_parameters(layers: Mapping[str, Mapping[str, int]], removed: Mapping[str, int]) -> int:
    """Parameters that go with the removed experts: their matrices and their rows of the router.

    layers: layer -> {expert_parameters, router_parameters_per_expert}; removed: layer -> number of removed experts. The
    papers leave the router rows out, which is less than 0.01 GiB for their models.
    """
    return sum(
        count * (layers[layer]["expert_parameters"] + layers[layer].get("router_parameters_per_expert", 0))
        for layer, count in removed.items()
    )


def loading_memory(study: Study) -> pd.DataFrame:
    """One row per model and ratio: parameters and bytes before and after. Empty without facts about the models."""
    rows = []
    pruned = study.cells[study.cells["plan_folder"].notna()].drop_duplicates(["model", "ratio", "allocation"])
    for cell in records(pruned):
        facts = study.models.get(cell["model"])
        removed = _removed(study.store / cell["plan_folder"] / "plan.json")
        if facts is None or removed is None:
            continue
        before = int(facts["parameters"])
        after = before - removed_parameters(facts["layers"], removed)
        rows.append(
            {
                "model": cell["model"],
                "ratio": cell["ratio"],
                "allocation": cell["allocation"],
                "parameters": before,
                "parameters_after": after,
                "bytes": before * BYTES,
                "bytes_after": after * BYTES,
                "saved": 1 - after / before,
            }
        )
    return pd.DataFrame(rows)


def _removed(path: Path) -> dict[str, int] | None:
    """Layer -> number of experts a plan removes; None when the plan cannot be read."""
    try:
        plan: dict[str, Any] = json.loads(path.read_bytes())
        return {layer: int(plan["n_experts"][layer]) - len(kept) for layer, kept in plan["experts"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
