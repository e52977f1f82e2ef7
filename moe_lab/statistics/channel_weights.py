"""Sums over the weights of every channel of every expert, read once from a checkpoint's shards: no model is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.discover import moe_layers
from moe_lab.models.load import skeleton
from moe_lab.statistics.accumulate import wide
from moe_lab.statistics.sums import Layers, Statistics
from moe_lab.statistics.weights import decoder_layers, expert_weights

PROJECTIONS = {
    **dict.fromkeys(("down_proj", "w2"), "down"),
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3"), "up"),
}
"""What one expert's weight is by its name on disk."""
ONE = re.compile(r"experts\.\d+\.(\w+)\.weight$")
DOWN_OF_ALL = re.compile(r"(?:down_proj|output_linear\.weight)$")


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
            self.modules = {found.index: found.experts for found in moe_layers(model)}
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
        layers[layer] = {name: torch.stack([rows[e] for e in range(n_experts)]) for name, rows in named.items()}
    return layers
