"""Sums over the weights of every expert and channel, read once from a checkpoint's shards: no model is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.linalg import vector_norm

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry, open_checkpoint, read_json
from moe_lab.models.checkpoint_reader import read_tensors
from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import wide
from moe_lab.models.load import skeleton
from moe_lab.statistics.sums import Layers, Statistics

CHUNK = 1 << 16
"""Weights that are summed in fp32 at once: they fit the cache, and sums of so few lose nothing that matters."""
PENDING = 256
"""Tensors whose sums a device is left to work on before anybody waits for it."""

DECODER = r"^(?!mtp\.)(?:\w+\.)*layers\.(\d+)\.(?:\w+\.)*"
ONE_EXPERT = re.compile(DECODER + r"experts\.(\d+)\.\w+\.weight$")
ALL_EXPERTS = re.compile(
    DECODER + r"(?:experts\.(?:gate_up_proj|up_proj|down_proj)(?:_blocks)?|(?:input|output)_linear\.weight)$"
)
PROJECTIONS = {
    **dict.fromkeys(("down_proj", "w2"), "down"),
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3"), "up"),
}
"""What one expert's weight is by its name on disk."""
ONE = re.compile(r"experts\.\d+\.(\w+)\.weight$")
DOWN_OF_ALL = re.compile(r"(?:down_proj|output_linear\.weight)$")


def weigh_experts(folder: Path | str, *, fingerprint: Mapping[str, Any], device: str = "cpu") -> Statistics:
    """abs_sum (E,), square_sum (E,) and count () of every layer: sum |w|, sum w^2 and number of an expert's weights.

    `folder` is a checkpoint in safetensors; an expert's gate, up and down weights count, biases, routers and shared
    experts do not. Sums are taken on `device`, cpu or cuda[:N], in fp32 within a chunk and fp64 across. UserError for a
    folder without experts, quantised experts, damaged shards, and weights that are NaN or infinite (naming layer,
    expert and tensor).
    """
    folder = Path(folder)
    last = decoder_layers(folder)
    totals = _Totals()
    for layer, expert, name, weights in expert_weights(open_checkpoint(folder), device):
        if layer < last:
            totals.add(layer, expert, name, weights)
    return Statistics(totals.layers(folder), {"kind": "weights", "fingerprint": dict(fingerprint)})


def decoder_layers(folder: Path) -> int:
    """Number of decoder layers; what is numbered beyond predicts several tokens at once and is not loaded."""
    config = read_json(folder / "config.json")
    return int(config.get("text_config", config).get("num_hidden_layers", 1 << 30))


def absolute_and_square(weights: torch.Tensor) -> torch.Tensor:
    """sum |w| and sum w^2 of a tensor of any shape: (2,) fp64, on its device."""
    if weights.device.type != "cpu":
        return torch.stack(rows_absolute_and_square(weights.reshape(1, -1, weights.shape[-1]))).flatten()
    flat = weights.reshape(-1)
    absolute = square = 0.0
    buffer = torch.empty(min(CHUNK, flat.numel()), dtype=torch.float32)
    for chunk in flat.split(CHUNK):
        part = buffer[: chunk.numel()].copy_(chunk).abs_()
        absolute += part.sum().item()
        square += part.square_().sum().item()  # as fast as a dot product, which rounds to 4e-6 at this length
    return torch.tensor([absolute, square], dtype=torch.float64)


def rows_absolute_and_square(experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum |w| and sum w^2 of each expert (E,), in fp64, of stacked weights (E, rows, columns).

    Each weight is read twice and nothing of that size is written: norms of rows in fp32, their sums in fp64. Nothing
    waits for the device.
    """
    dtype = torch.promote_types(experts.dtype, torch.float32)
    absolute, length = (vector_norm(experts, order, dim=-1, dtype=dtype).double() for order in (1, 2))
    return absolute.sum(-1), length.square().sum(-1)


class _Totals:
    """Sums per (layer, expert) as tensors come along, in any order."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], list[float]] = {}
        self.pending: list[tuple[int, int, str, int, torch.Tensor]] = []
        """What a device may still be summing: layer, expert, name, number of weights, sums."""

    def add(self, layer: int, expert: int, name: str, weights: torch.Tensor) -> None:
        self.pending.append((layer, expert, name, weights.numel(), absolute_and_square(weights)))
        if len(self.pending) >= PENDING:
            self._settle()

    def _settle(self) -> None:
        """Wait for all that is pending, in one go."""
        totals = torch.stack([sums for *_, sums in self.pending]).tolist() if self.pending else []
        for (layer, expert, name, count, _), (absolute, square) in zip(self.pending, totals, strict=True):
            if not math.isfinite(square):
                raise UserError(f"NaN or Inf in layer {layer}, expert {expert}: weights {name}")
            total = self.sums.setdefault((layer, expert), [0.0, 0.0, 0.0])
            for at, value in enumerate((absolute, square, count)):
                total[at] += value
        self.pending.clear()

    def layers(self, folder: Path) -> Layers:
        self._settle()
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


def expert_weights(checkpoint: Checkpoint, device: str = "cpu") -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """(layer, expert, name, weights) of every weight of a routed expert, on `device`, one tensor in memory at a time.

    UserError for shards that cannot be read and for quantised weights.
    """
    for shard in checkpoint.shards:
        names = [name for name, entry in checkpoint.tensors.items() if entry.shard == shard and _is_weight(name, entry)]
        for name, weights in zip(names, read_tensors(checkpoint, shard, names, device), strict=True):
            if one := ONE_EXPERT.match(name):
                yield int(one[1]), int(one[2]), name, weights
            elif fused := ALL_EXPERTS.match(name):
                for expert, part in enumerate(weights):
                    yield int(fused[1]), expert, name, part


def _is_weight(name: str, entry: Entry) -> bool:
    return bool(ONE_EXPERT.match(name)) or (bool(ALL_EXPERTS.match(name)) and len(entry.shape) >= 3)


def weigh_channels(
    folder: Path | str, *, fingerprint: Mapping[str, Any], trust_remote_code: bool = False, device: str = "cpu"
) -> Statistics:
    """channel_down_square, channel_down_abs, channel_up_square and, where experts have one, channel_gate_square.

    (E, I) each, per layer: sums over the weights that belong to channel c of a projection, so a column of down_proj
    and a row of gate_proj and up_proj. `folder` is a checkpoint in safetensors; one tensor is in memory at a time,
    sums are fp32 and taken on `device`, cpu or cuda[:N]. `trust_remote_code` is needed only for experts that are fused
    on disk and computed by code beside the checkpoint.

    UserError for a folder without experts, quantised experts, damaged or missing shards, projections of unknown names,
    and weights that are NaN or infinite (naming layer, expert and tensor).
    """
    folder = Path(folder)
    layouts = _Layouts(folder, trust_remote_code)
    last = decoder_layers(folder)
    sums: dict[int, dict[str, dict[int, torch.Tensor]]] = {}
    for layer, expert, name, weights in expert_weights(open_checkpoint(folder), device):
        if layer >= last:
            continue
        for statistic, values in _sums(layouts, layer, name, wide(weights)):
            if not bool(torch.isfinite(values).all()):
                raise UserError(f"NaN or Inf in layer {layer}, expert {expert}: weights {name}")
            sums.setdefault(layer, {}).setdefault(statistic, {})[expert] = values.double().cpu()
    return Statistics(_stacked(sums, folder), {"kind": "channel_weights", "fingerprint": dict(fingerprint)})


class _Layouts:
    """How fused experts lie in memory and on disk, by layer; the model is looked at only when there are some."""

    def __init__(self, folder: Path, trust_remote_code: bool) -> None:
        self.folder = folder
        self.trust_remote_code = trust_remote_code
        self.modules: dict[int, Any] = {}

    def module(self, layer: int) -> Any:
        """The experts module of a layer, on the meta device."""
        if not self.modules:
            model = skeleton(self.folder, trust_remote_code=self.trust_remote_code)
            self.modules = {moe_layer.index: moe_layer.experts for moe_layer in moe_layers(model)}
        return self.modules[layer]


def _sums(layouts: _Layouts, layer: int, name: str, weights: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(statistic, values (I,)) of one expert's part of the tensor `name`, a matrix."""
    if one := ONE.search(name):
        if one[1] not in PROJECTIONS:
            raise UserError(f"{name} is no projection moe_lab knows, expected one of {', '.join(PROJECTIONS)}")
        # matrices of one expert are those of linear modules: (out, in)
        yield from _projection(PROJECTIONS[one[1]], weights)
        return
    module = layouts.module(layer)
    down = DOWN_OF_ALL.search(name) is not None
    memory = module.down_proj if down else module.gate_up_proj if module.has_gate else module.up_proj
    if tuple(memory.shape[1:]) != tuple(weights.shape):
        raise UserError(
            f"{name} has shape {tuple(weights.shape)} per expert, but is {tuple(memory.shape[1:])} in memory: this "
            "layout is not supported"
        )
    linear = weights.t() if module.is_transposed else weights
    if down or not module.has_gate:
        yield from _projection("down" if down else "up", linear)
    else:
        halves = linear.chunk(2) if module.is_concatenated else (linear[0::2], linear[1::2])
        for projection, half in zip(("gate", "up"), halves, strict=True):
            yield from _projection(projection, half)


def _projection(projection: str, weights: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Sums over one projection (out, in) of one expert."""
    axis = 0 if projection == "down" else 1
    yield f"channel_{projection}_square", weights.square().sum(axis)
    if projection == "down":
        yield "channel_down_abs", weights.abs().sum(axis)


def _stacked(sums: Mapping[int, Mapping[str, Mapping[int, torch.Tensor]]], folder: Path) -> Layers:
    """Layer -> statistic -> (E, I). UserError when something is missing."""
    if not sums:
        raise UserError(
            f"model.path={folder} has no weights of routed experts, expected a mixture-of-experts checkpoint"
        )
    layers: Layers = {}
    for layer, named in sorted(sums.items()):
        n_experts = 1 + max(expert for rows in named.values() for expert in rows)
        whole = all(len(rows) == n_experts for rows in named.values())
        if not whole or not {"channel_down_square", "channel_up_square"} <= named.keys():
            raise UserError(f"model.path={folder} lacks weights of some experts of layer {layer}: a shard is missing")
        widths = {len(row) for rows in named.values() for row in rows.values()}
        if len(widths) > 1:
            raise UserError(
                f"model.path={folder}: experts of layer {layer} have {sorted(widths)} channels, expected one width"
            )
        layers[layer] = {}
        for name, rows in named.items():
            layers[layer][name] = torch.stack([rows[e] for e in range(n_experts)])
    return layers
