"""Loading memory (Unified Expert Pruning Table 3): bytes in bfloat16 before and after pruning."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.outputs.captions import BYTES, MEBIBYTE
from analysis.registry import Results, output
from analysis.render.table import Table


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


@output("unified.table3", chapter="memory")
def memory_table(results: Results, name: str) -> Table:
    """Bytes of the model in bfloat16 before and after pruning, exact from configurations and plans."""
    study = results.study
    memory = loading_memory(study)
    columns = ["Model", "Pruned", "Before (MiB)", "After (MiB)", "Saved", "Before (bytes)", "After (bytes)"]
    frame = pd.DataFrame(columns=columns)
    if len(memory):
        values = [
            memory["model"],
            memory["ratio"].map(names.ratio),
            memory["bytes"] / MEBIBYTE,
            memory["bytes_after"] / MEBIBYTE,
            memory["saved"],
            memory["bytes"],
            memory["bytes_after"],
        ]
        frame = pd.DataFrame(dict(zip(columns, values, strict=True)))
    return Table(
        name=name,
        title="Loading memory",
        caption="Parameters of the whole model in bfloat16, exact from its configuration and the plans.",
        frame=frame,
        formats=dict(zip(columns[2:], ("{:,.2f}", "{:,.2f}", "{:.1%}", "{:,.0f}", "{:,.0f}"), strict=True)),
    )


@output("unified.table4", chapter="memory", needs="the facts of its models in the store")
def architecture_table(results: Results, name: str) -> Table:
    """Unified Expert Pruning's Table 4: layers, experts and parameters, from configurations alone."""
    study = results.study
    rows = []
    for model, facts in study.models.items():
        layers = list(facts["layers"].values())
        decoder = facts.get("decoder_layers", np.nan)
        one = {key: max(layer[key] for layer in layers) for key in ("n_experts", "top_k", "hidden", "width")}
        inactive = sum((each["n_experts"] - each["top_k"]) * each["expert_parameters"] for each in layers)
        counts = {
            "Parameters (M)": facts["parameters"] / 1e6,
            "Active (M)": (facts["parameters"] - inactive) / 1e6,
            "Experts": one["n_experts"],
            "Top-k": one["top_k"],
            "Shared experts": facts.get("shared_width", np.nan) / one["width"],
            "MoE layers": len(layers),
            "Dense layers": decoder - len(layers),
            "Hidden size": one["hidden"],
            "Channels": one["width"],
        }
        rows.append({"Model": model, "Type": str(facts.get("model_type", "")), **counts})
    formats = {"Parameters (M)": "{:,.2f}", "Active (M)": "{:,.2f}", "Shared experts": "{:g}"}
    counted = ("Experts", "Top-k", "MoE layers", "Dense layers", "Hidden size", "Channels")
    formats |= dict.fromkeys(counted, "{:,.0f}")
    columns = list(rows[0]) if rows else ["Model", "Type"]
    return Table(
        name=name,
        title="Architectures",
        caption="From configurations alone. Parameters: of the whole model; active: without the routed experts that a "
        "token does not go to. Experts, top-k and channels (the width of an expert): of a layer, the most where layers "
        "differ. Shared experts: in experts of that width.",
        frame=pd.DataFrame(rows, columns=columns),
        formats={column: formats[column] for column in columns if column in formats},
        optional=("Shared experts", "Dense layers"),
    )
