"""Loading memory (Unified Expert Pruning Table 3): bytes in bfloat16 before and after pruning."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import names
from analysis.outputs.captions import MEBIBYTE
from analysis.registry import Results, output
from analysis.render.table import Table


@output("unified.table3", chapter="memory")
def memory_table(results: Results, name: str) -> Table:
    """Bytes of the model in bfloat16 before and after pruning, exact from configurations and plans."""
    study = results.study
    memory = study.memory
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
