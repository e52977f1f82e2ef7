"""Loading memory (000 Table 3): exact bytes of a model in bfloat16 before and after pruning, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.load import Study

BYTES = 2
"""Of one parameter in bfloat16."""


def removed_parameters(
    layers: Mapping[str, Mapping[str, int]], removed: Mapping[str, float], dropped: Mapping[str, int]
) -> int:
    """Parameters that go with what a plan removes: matrices of experts or channels, and rows of the router.

    layers: layer -> {expert_parameters, router_parameters_per_expert}; removed: layer -> experts removed, parts of one
    counted by their channels; dropped: layer -> experts that are not routed to any more. The papers leave the router
    rows out, which is less than 0.01 GiB for their models.
    """
    matrices = sum(count * layers[layer]["expert_parameters"] for layer, count in removed.items())
    rows = sum(count * layers[layer].get("router_parameters_per_expert", 0) for layer, count in dropped.items())
    return round(matrices + rows)


def loading_memory(study: Study) -> pd.DataFrame:
    """One row per model, ratio, granularity and allocation: parameters and bytes before and after. Empty without facts
    about the models. Criteria that remove different numbers under one allocation have a row each."""
    rows = []
    for cell, plan in study.kept.groupby("cell", sort=False):
        axes = study.cells.loc[int(str(cell))]
        facts = study.models.get(str(axes["model"]))
        if facts is None:
            continue
        by_layer = plan.assign(gone=1 - plan["share"], dropped=(plan["share"] == 0) & ~plan["null"]).groupby("layer")
        removed = {str(layer): float(gone) for layer, gone in by_layer["gone"].sum().items()}
        dropped = {str(layer): int(count) for layer, count in by_layer["dropped"].sum().items()}
        before = int(facts["parameters"])
        after = before - removed_parameters(facts["layers"], removed, dropped)
        named = {name: axes[name] for name in ("model", "ratio", "granularity", "allocation")}
        found = {"parameters": before, "parameters_after": after, "bytes": before * BYTES, "bytes_after": after * BYTES}
        rows.append({**named, **found, "saved": 1 - after / before})
    return pd.DataFrame(rows).drop_duplicates(ignore_index=True) if rows else pd.DataFrame()
