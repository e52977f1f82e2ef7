"""Sums over the weights of every expert, read once from a checkpoint's shards: no model, no whole tensor in fp32."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, open_checkpoint, read_json
from moe_lab.statistics.sums import Layers, Statistics

CHUNK = 1 << 16
"""Weights that are summed in fp32 at once: they fit the cache, and sums of so few lose nothing that matters."""
PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

DECODER = r"^(?!mtp\.)(?:\w+\.)*layers\.(\d+)\.(?:\w+\.)*"
ONE_EXPERT = re.compile(DECODER + r"experts\.(\d+)\.\w+\.weight$")
ALL_EXPERTS = re.compile(DECODER + r"(?:experts\.(?:gate_up_proj|up_proj|down_proj)|(?:input|output)_linear\.weight)$")


def weigh(folder: Path | str, *, fingerprint: Mapping[str, Any]) -> Statistics:
    """abs_sum (E,), square_sum (E,) and count () of every layer: sum |w|, sum w^2 and the number of an expert's
    weights.

    `folder` is a checkpoint in safetensors; an expert's gate, up and down weights count, biases, routers and shared
    experts do not. Sums are fp32 within a chunk and fp64 across. UserError for a folder without experts, quantised
    experts, damaged shards, and weights that are NaN or infinite (naming layer, expert and tensor).
    """
    folder = Path(folder)
    last = decoder_layers(folder)
    totals = _Totals()
    for layer, expert, name, weights in expert_weights(open_checkpoint(folder)):
        if layer < last:
            totals.add(layer, expert, name, weights)
    return Statistics(totals.layers(folder), {"kind": "weights", "fingerprint": dict(fingerprint)})


def decoder_layers(folder: Path) -> int:
    """Number of decoder layers; what is numbered beyond predicts several tokens at once and is not loaded."""
    config = read_json(folder / "config.json")
    return int(config.get("text_config", config).get("num_hidden_layers", 1 << 30))


def absolute_and_square(weights: torch.Tensor) -> tuple[float, float]:
    """sum |w| and sum w^2 of a tensor of any shape."""
    flat = weights.reshape(-1)
    absolute = square = 0.0
    buffer = torch.empty(min(CHUNK, flat.numel()), dtype=torch.float32, device=flat.device)
    for chunk in flat.split(CHUNK):
        part = buffer[: chunk.numel()].copy_(chunk).abs_()
        absolute += part.sum().item()
        square += part.square_().sum().item()  # as fast as a dot product, which rounds to 4e-6 at this length
    return absolute, square


class _Totals:
    """Sums per (layer, expert) as tensors come along, in any order."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], list[float]] = {}

    def add(self, layer: int, expert: int, name: str, weights: torch.Tensor) -> None:
        absolute, square = absolute_and_square(weights)
        if not math.isfinite(square):
            raise UserError(f"NaN or Inf in layer {layer}, expert {expert}: weights {name}")
        total = self.sums.setdefault((layer, expert), [0.0, 0.0, 0.0])
        for at, value in enumerate((absolute, square, weights.numel())):
            total[at] += value

    def layers(self, folder: Path) -> Layers:
        if not self.sums:
            raise UserError(
                f"model.path={folder} has no weights of routed experts, expected a mixture-of-experts checkpoint"
            )
        layers: Layers = {}
        for layer in sorted({layer for layer, _ in self.sums}):
            experts = sorted(expert for other, expert in self.sums if other == layer)
            counts = {self.sums[layer, expert][2] for expert in experts}
            if experts != list(range(len(experts))) or len(counts) > 1:
                raise UserError(
                    f"model.path={folder} lacks weights of some experts of layer {layer}: a shard is missing"
                )
            columns = torch.tensor([self.sums[layer, expert] for expert in experts], dtype=torch.float64).unbind(1)
            layers[layer] = {"abs_sum": columns[0], "square_sum": columns[1], "count": columns[2][0]}
        return layers


def expert_weights(checkpoint: Checkpoint) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """(layer, expert, name, weights) of every weight of a routed expert, one tensor in memory at a time.

    UserError for shards that cannot be read and for quantised weights.
    """
    for shard in checkpoint.shards:
        try:
            with safe_open(checkpoint.folder / shard, framework="pt") as file:
                for name in (name for name, entry in checkpoint.tensors.items() if entry.shard == shard):
                    if one := ONE_EXPERT.match(name):
                        yield int(one[1]), int(one[2]), name, _plain(name, file.get_tensor(name))
                    elif (fused := ALL_EXPERTS.match(name)) and len(checkpoint.tensors[name].shape) == 3:
                        for expert, weights in enumerate(_plain(name, file.get_tensor(name))):
                            yield int(fused[1]), expert, name, weights
        except (OSError, SafetensorError) as error:
            raise UserError(f"shard {checkpoint.folder / shard} cannot be read: {error}") from error


def _plain(name: str, weights: torch.Tensor) -> torch.Tensor:
    if weights.dtype not in PLAIN:
        raise UserError(f"{name} is stored as {weights.dtype}, expected plain weights: load and save it dequantised")
    return weights
