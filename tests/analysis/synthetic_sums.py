"""Made-up sums of passes, ablations, channel scores and what steps took, put into a synthetic store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from synthetic import record_path, write_json
from synthetic_plans import EXPERTS, LAYERS, WIDTH, channel_masks, rng

from moe_lab import results
from moe_lab.study.steps import tables
from moe_lab.study.steps.files import write_table

SILENT = 7
"""The expert that no token reaches."""
MIB = 2**20


def sums() -> dict[int, dict[str, np.ndarray]]:
    """Sums of a pass, layer by layer; one expert got no token."""
    found = {}
    for layer in range(LAYERS):
        drawn = rng("sums", layer)
        one: dict[str, Any] = {"tokens": drawn.integers(1, 900, EXPERTS).astype(float)}
        one |= {"ala_first": drawn.integers(-9, 40, EXPERTS) / 8, "ala_second": drawn.integers(0, 40, EXPERTS) / 8}
        one |= {"sums_model": drawn.integers(0, 99, (EXPERTS, 3, 3)) / 8, "layer_loss": np.array(70.0 + layer)}
        one |= {name: drawn.integers(0, 32, (EXPERTS, WIDTH)) / 8 for name in ("channel_square", "channel_max")}
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
        found[layer] = {"abs_sum": drawn.sum(axis=1), "square_sum": squares, "count": np.array(64.0)}
    return found


def ablations() -> dict[int, dict[str, np.ndarray]]:
    """What the loss gains without each expert, layer by layer."""
    return {layer: {"ablation": rng("ablation", layer).integers(-9, 60, EXPERTS) / 512} for layer in range(LAYERS)}


def scores() -> np.ndarray:
    """Scores of channels (layers, experts, channels)."""
    return np.square(rng("channel scores").integers(0, 16, (LAYERS, EXPERTS, WIDTH))) / 8


def best_channels(cell: dict[str, Any]) -> np.ndarray:
    """As many channels of each expert as the synthetic plan keeps, those of the highest scores (layers, experts,
    channels)."""
    places = np.argsort(np.argsort(-scores(), axis=-1, kind="stable"), axis=-1)
    return places < channel_masks(cell).sum(axis=-1, keepdims=True)


def add(root: Path, study: str, ablated: str, reads: tuple[str, ...] = ()) -> None:
    """Give every cell of channels in `study` its sums and scores, and all their steps a time; plans with the allocation
    `ablated` rest on an ablation too, and plans by the criteria `reads` on weights and gradients."""
    document = json.loads(record_path(root, study).read_text())
    for entry in document["cells"]:
        if entry["cell"]["granularity"] != "channel":
            continue
        model, statistics, scored = entry["model"], entry["statistics"], entry["scores"]
        _save(root / statistics, sums())
        write_table(root / statistics / "experts.parquet", results.EXPERTS, tables.experts(sums()))
        write_table(root / statistics / "layers.parquet", results.LOSSES, tables.losses(sums()))
        write_table(root / statistics / "entropy.parquet", results.ENTROPIES, tables.entropies(sums()))
        _describe(root, statistics, {"model": model}, 2.5, 300)
        (root / scored).mkdir(parents=True, exist_ok=True)
        layers = dict(enumerate(scores()))
        save_file({str(at): values for at, values in layers.items()}, root / scored / "scores.safetensors")
        write_table(root / scored / "expert_concentration.parquet", results.CONCENTRATION, tables.concentration(layers))
        kept = dict(enumerate(best_channels(entry["cell"])))
        write_table(root / entry["plan"] / "budgets.parquet", results.BUDGETS, tables.budgets(layers, kept))
        _describe(root, scored, {"model": model, "statistics": statistics}, 0.25, 200)
        inputs = {"model": model, "statistics": statistics, "scores": scored}
        if entry["cell"]["allocation"] == ablated:
            inputs["ablation"] = "ablation/made-up-0123456789ab"
            folder = root / inputs["ablation"]
            _save(folder, ablations())
            write_table(folder / "ablation.parquet", results.ABLATIONS, tables.ablations(ablations()))
            _describe(root, inputs["ablation"], {"model": model}, 40.0, 100)
        if entry["cell"]["criterion"] in reads:
            inputs |= _other_readings(root, model)
        _describe(root, entry["plan"], inputs, 0.5, 1)


def _other_readings(root: Path, model: str) -> dict[str, str]:
    """Steps that read weights and gradients, as inputs of a plan."""
    made = {"weights": "weights/made-up-0123456789ab", "gradients": "gradients/made-up-0123456789ab"}
    _save(root / made["weights"], weights())
    write_table(root / made["weights"] / "weights.parquet", results.WEIGHTS, tables.weights(weights()))
    _save(root / made["gradients"], sums())
    write_table(root / made["gradients"] / "gradients.parquet", results.GRADIENTS, tables.gradients(sums()))
    for name in made.values():
        _describe(root, name, {"model": model}, 1.0, 100)
    return made


def _save(folder: Path, layers: dict[int, dict[str, np.ndarray]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"{layer}/{name}": values for layer, named in layers.items() for name, values in named.items()}
    save_file(arrays, folder / "statistics.safetensors", {"moe_lab": json.dumps({"schema": 1})})


def _describe(root: Path, name: str, inputs: dict[str, str], seconds: float, mebibytes: int) -> None:
    about = {"seconds": seconds, "peak_memory_bytes": mebibytes * MIB, "machine": "imagined, 2 cores"}
    write_json(root / name / "step.json", {"files": {}, "inputs": inputs, "provenance": about})
