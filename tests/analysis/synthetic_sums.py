"""Made-up sums of passes, ablations, channel scores, and times of steps, for a synthetic store."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from synthetic import record_path, write_frame, write_json
from synthetic_plans import EXPERTS, LAYERS, WIDTH, channel_masks, rng

from moe_lab.analysis.load import passes
from moe_lab.study.steps import tables

UNUSED_EXPERT = 7
"""Number of the expert in each layer that no token reaches."""
MIB = 2**20


def sums() -> dict[int, dict[str, np.ndarray]]:
    """Layer -> sums of a pass. The sums of UNUSED_EXPERT are 0."""
    layers = {}
    for layer in range(LAYERS):
        random = rng("sums", layer)
        layer_sums: dict[str, Any] = {"tokens": random.integers(1, 900, EXPERTS).astype(float)}
        layer_sums |= {
            "ala_first": random.integers(-9, 40, EXPERTS) / 8,
            "ala_second": random.integers(0, 40, EXPERTS) / 8,
        }
        layer_sums |= {
            "sums_model": random.integers(0, 99, (EXPERTS, 3, 3)) / 8,
            "layer_loss": np.array(70.0 + layer),
        }
        layer_sums |= {"channel_square": random.integers(0, 32, (EXPERTS, WIDTH)) / 8}
        random.integers(0, 32, (EXPERTS, WIDTH))  # the committed store was made with these numbers
        layer_sums |= {"channel_gradient_square": random.integers(0, 32, (EXPERTS, WIDTH)) / 512}
        layer_sums |= {"router_entropy": random.integers(0, 9, 50)}
        for name, values in layer_sums.items():
            if name not in ("layer_loss", "router_entropy"):
                values[UNUSED_EXPERT] = 0
        layers[layer] = layer_sums
    return layers


def weights() -> dict[int, dict[str, np.ndarray]]:
    """Layer -> sums over the weights of each expert. An expert has 64 weights."""
    layers = {}
    for layer in range(LAYERS):
        values = np.abs(rng("weights", layer).normal(0, 1 + layer / 4, (EXPERTS, 64)))
        squares = np.square(values).sum(axis=1)
        layers[layer] = {
            "abs_sum": values.sum(axis=1),
            "square_sum": squares,
            "count": np.array(64.0),
        }
    return layers


def ablations() -> dict[int, dict[str, np.ndarray]]:
    """Layer -> rise of the loss without each expert."""
    return {
        layer: {"ablation": rng("ablation", layer).integers(-9, 60, EXPERTS) / 512}
        for layer in range(LAYERS)
    }


def scores() -> np.ndarray:
    """Scores of channels (layers, experts, channels)."""
    return np.square(rng("channel scores").integers(0, 16, (LAYERS, EXPERTS, WIDTH))) / 8


def best_channels(cell: dict[str, Any]) -> np.ndarray:
    """Masks (layers, experts, channels) of the channels with the highest scores: of each expert as
    many as the synthetic plan retains."""
    ranks = np.argsort(np.argsort(-scores(), axis=-1, kind="stable"), axis=-1)
    return ranks < channel_masks(cell).sum(axis=-1, keepdims=True)


def add_statistics(root: Path, study: str, ablation_allocation: str) -> None:
    """Write the sums and scores of every cell of channels in `study`, with times of their steps.
    Plans with the allocation `ablation_allocation` also have an ablation, sums of weights, and sums
    of gradients as inputs."""
    document = json.loads(record_path(root, study).read_text())
    layers = dict(enumerate(scores()))
    for entry in document["cells"]:
        if entry["cell"]["granularity"] != "channel":
            continue
        model = {"model": entry["model"]}
        statistics_folder = entry["statistics"]
        _step(root, statistics_folder, model, 2.5, 300, experts=tables.experts(sums()))
        _write_table(root / statistics_folder, "layers", tables.losses(sums()))
        _write_table(root / statistics_folder, "entropy", tables.entropies(sums()))
        inputs = {**model, "statistics": statistics_folder}
        curves = tables.concentration(layers)
        _step(root, entry["scores"], inputs, 0.25, 200, expert_concentration=curves)
        inputs["scores"] = entry["scores"]
        if entry["cell"]["allocation"] == ablation_allocation:
            inputs |= _add_ablation_steps(root, model)
        retained = dict(enumerate(best_channels(entry["cell"])))
        _step(root, entry["plan"], inputs, 0.5, 1, budgets=tables.budgets(layers, retained))


def _add_ablation_steps(root: Path, model: dict[str, str]) -> dict[str, str]:
    """Write an ablation, sums of weights, and sums of gradients. Returns their folders, as inputs
    of a plan."""
    folders = {
        name: f"{name}/made-up-0123456789ab" for name in ("ablation", "weights", "gradients")
    }
    _step(root, folders["ablation"], model, 40.0, 100, ablation=tables.ablations(ablations()))
    _step(root, folders["weights"], model, 1.0, 100, weights=tables.weights(weights()))
    _step(root, folders["gradients"], model, 1.0, 100, gradients=tables.gradients(sums()))
    return folders


def _step(
    root: Path, folder: str, inputs: dict[str, str], seconds: float, mebibytes: int, **tables: Any
) -> None:
    """Write a step with `tables` (name -> rows), and with its machine and seconds."""
    for name, rows in tables.items():
        _write_table(root / folder, name, rows)
    provenance = {
        "seconds": seconds,
        "peak_memory_bytes": mebibytes * MIB,
        "machine": "imagined, 2 cores",
    }
    write_json(
        root / folder / "step.json", {"files": {}, "inputs": inputs, "provenance": provenance}
    )


def _write_table(folder: Path, name: str, rows: list[tuple[Any, ...]]) -> None:
    file = f"{name}.parquet"
    write_frame(folder / file, pd.DataFrame(rows, columns=passes.TABLES[file]))
