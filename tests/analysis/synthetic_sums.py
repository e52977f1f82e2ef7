"""Made-up sums of passes, ablations, channel scores and what steps took, put into a synthetic
store."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from synthetic import record_path, write_json
from synthetic_plans import EXPERTS, LAYERS, WIDTH, channel_masks, rng

from moe_lab import results
from moe_lab.study.steps import tables

SILENT = 7
"""The expert that no token reaches."""
MIB = 2**20


def sums() -> dict[int, dict[str, np.ndarray]]:
    """Sums of a pass, layer by layer; one expert got no token."""
    found = {}
    for layer in range(LAYERS):
        drawn = rng("sums", layer)
        one: dict[str, Any] = {"tokens": drawn.integers(1, 900, EXPERTS).astype(float)}
        one |= {
            "ala_first": drawn.integers(-9, 40, EXPERTS) / 8,
            "ala_second": drawn.integers(0, 40, EXPERTS) / 8,
        }
        one |= {
            "sums_model": drawn.integers(0, 99, (EXPERTS, 3, 3)) / 8,
            "layer_loss": np.array(70.0 + layer),
        }
        one |= {
            name: drawn.integers(0, 32, (EXPERTS, WIDTH)) / 8
            for name in ("channel_square", "channel_max")
        }
        one |= {"channel_gradient_square": drawn.integers(0, 32, (EXPERTS, WIDTH)) / 512}
        one |= {"router_entropy": drawn.integers(0, 9, 50)}
        for name, values in one.items():
            if name not in ("layer_loss", "router_entropy"):
                values[SILENT] = 0
        found[layer] = one
    return found


def weights() -> dict[int, dict[str, np.ndarray]]:
    """Sums over the weights of each expert, layer by layer, of 64 weights each."""
    found = {}
    for layer in range(LAYERS):
        drawn = np.abs(rng("weights", layer).normal(0, 1 + layer / 4, (EXPERTS, 64)))
        squares = np.square(drawn).sum(axis=1)
        found[layer] = {
            "abs_sum": drawn.sum(axis=1),
            "square_sum": squares,
            "count": np.array(64.0),
        }
    return found


def ablations() -> dict[int, dict[str, np.ndarray]]:
    """What the loss gains without each expert, layer by layer."""
    return {
        layer: {"ablation": rng("ablation", layer).integers(-9, 60, EXPERTS) / 512}
        for layer in range(LAYERS)
    }


def scores() -> np.ndarray:
    """Scores of channels (layers, experts, channels)."""
    return np.square(rng("channel scores").integers(0, 16, (LAYERS, EXPERTS, WIDTH))) / 8


def best_channels(cell: dict[str, Any]) -> np.ndarray:
    """As many channels of each expert as the synthetic plan keeps, those of the highest scores
    (layers, experts, channels)."""
    places = np.argsort(np.argsort(-scores(), axis=-1, kind="stable"), axis=-1)
    return places < channel_masks(cell).sum(axis=-1, keepdims=True)


def add(root: Path, study: str, ablated: str) -> None:
    """Give every cell of channels in `study` its sums and scores, and all their steps a time; plans
    with the allocation `ablated` rest on an ablation, weights and gradients too."""
    document = json.loads(record_path(root, study).read_text())
    layers = dict(enumerate(scores()))
    for entry in document["cells"]:
        if entry["cell"]["granularity"] != "channel":
            continue
        model = {"model": entry["model"]}
        statistics = entry["statistics"]
        scored = entry["scores"]
        _step(root, statistics, model, 2.5, 300, "experts", results.EXPERTS, tables.experts(sums()))
        place = root / statistics
        pd.DataFrame(tables.losses(sums()), columns=results.LOSSES).to_parquet(
            place / "layers.parquet"
        )
        pd.DataFrame(tables.entropies(sums()), columns=results.ENTROPIES).to_parquet(
            place / "entropy.parquet"
        )
        inputs = {**model, "statistics": statistics}
        curves = tables.concentration(layers)
        _step(
            root, scored, inputs, 0.25, 200, "expert_concentration", results.CONCENTRATION, curves
        )
        inputs["scores"] = scored
        if entry["cell"]["allocation"] == ablated:
            others = {
                name: f"{name}/made-up-0123456789ab"
                for name in ("ablation", "weights", "gradients")
            }
            made = results.ABLATIONS, tables.ablations(ablations())
            _step(root, others["ablation"], model, 40.0, 100, "ablation", *made)
            _step(
                root,
                others["weights"],
                model,
                1.0,
                100,
                "weights",
                results.WEIGHTS,
                tables.weights(weights()),
            )
            _step(
                root,
                others["gradients"],
                model,
                1.0,
                100,
                "gradients",
                results.GRADIENTS,
                tables.gradients(sums()),
            )
            inputs |= others
        kept = dict(enumerate(best_channels(entry["cell"])))
        _step(
            root,
            entry["plan"],
            inputs,
            0.5,
            1,
            "budgets",
            results.BUDGETS,
            tables.budgets(layers, kept),
        )


def _step(
    root: Path,
    folder: str,
    inputs: dict[str, str],
    seconds: float,
    mebibytes: int,
    name: str,
    columns: Any,
    rows: Any,
) -> None:
    """Write a step with one table, the machine and the time that it took."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=columns).to_parquet(root / folder / f"{name}.parquet")
    about = {
        "seconds": seconds,
        "peak_memory_bytes": mebibytes * MIB,
        "machine": "imagined, 2 cores",
    }
    write_json(root / folder / "step.json", {"files": {}, "inputs": inputs, "provenance": about})
