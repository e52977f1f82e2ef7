"""Statistics: sums over tokens, a set of tensors per MoE layer, and their files. Reading needs no
torch.

docs/new_criterion.md lists the names, shapes and formulas of all statistics.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from moe_lab.errors import UserError, overflow_hint

if TYPE_CHECKING:
    import torch

Layers: TypeAlias = "dict[int, dict[str, torch.Tensor]]"
"""Decoder layer number -> name of a statistic -> fp64 tensor on the CPU."""


FROM_TEXT = {
    # hooks of a forward pass
    "statistics": "moe_lab.statistics.forward:ForwardHook",
    "damage": "moe_lab.statistics.damage:DamageHook",
    "similarity": "moe_lab.statistics.damage:SimilarityHook",
    "layer_loss_gradients": "moe_lab.papers.moe_slimming_passes:ActivationHook",
    "layer_loss_weight_gradients": "moe_lab.papers.moe_slimming_passes:WeightHook",
    "moving_averages": "moe_lab.papers.moe_slimming_passes:MovingAverageHook",
    # hooks of a forward and a backward pass
    "gradients": "moe_lab.statistics.gradients:GradientHook",
    "weight_gradients": "moe_lab.statistics.gradients:WeightGradientHook",
}
"""Name of statistics over a calibration set -> MODULE:NAME of the hook that computes them."""
FUNCTIONS = {
    **FROM_TEXT,
    # functions of a model or a checkpoint
    "weights": "moe_lab.statistics.weights:expert_weight_sums",
    "channel_weights": "moe_lab.statistics.weights:channel_weight_sums",
    "weight_distances": "moe_lab.statistics.weights:compare_experts",
}
"""Name of statistics -> MODULE:NAME of what computes them."""
WITH_BACKWARD = ("gradients", "weight_gradients")
"""Statistics whose hooks need a backward pass."""


@dataclass
class Statistics:
    """Sums per MoE layer. `header`: JSON data with `kind`, such as weights or gradients, and
    `batches`, a digest of the text, for sums over a text."""

    layers: Layers
    header: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path | str) -> None:
        """Write the safetensors file `path` atomically."""
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {}
        for layer, sums in self.layers.items():
            for name, part in sums.items():
                # safetensors takes neither views nor tensors that share memory
                tensors[f"{layer}/{name}"] = part.clone().contiguous()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        save_file(tensors, partial, {"moe_lab": json.dumps(self.header, sort_keys=True)})
        # everybody who may write into the folder may resume from the file
        partial.chmod(path.parent.stat().st_mode & 0o666)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> Statistics:
        """Read a file that `save` wrote. UserError when the file is missing, damaged or not
        statistics."""
        return cls(read(path, framework="pt"), header(path))


def read(
    path: Path | str, framework: str = "np", only: str | None = None
) -> dict[int, dict[str, Any]]:
    """Read a file of statistics: layer -> name -> fp64 array of numpy, or tensor of torch if
    `framework` is "pt". `only`: the only name to read, or None for all names; a layer without this
    name has an empty dict. UserError when the file is missing, damaged or not statistics."""
    header(path)  # raises UserError for a file that cannot be read
    layers: dict[int, dict[str, Any]] = {}
    with safe_open(path, framework=framework) as file:
        for key in file.keys():  # noqa: SIM118 (a safetensors file is not iterable)
            layer, name = key.split("/")
            arrays = layers.setdefault(int(layer), {})
            if only is None or name == only:
                arrays[name] = file.get_tensor(key)
    return dict(sorted(layers.items()))


def merge_passes(passes: Iterable[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Layer -> name -> array, with the arrays of all `passes` over one model. If passes have an
    array of the same name, the last one is taken."""
    merged: dict[int, dict[str, Any]] = {}
    for layers in passes:
        for layer, arrays in layers.items():
            merged.setdefault(layer, {}).update(arrays)
    return merged


def header(path: Path | str) -> dict[str, Any]:
    """Read the header of a file of statistics. UserError when the file is missing, damaged or not
    statistics."""
    try:
        with safe_open(path, framework="np") as file:
            return dict(json.loads(file.metadata()["moe_lab"]))
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"statistics={path} cannot be read, expected a file of statistics: {error}"
        ) from error


def combine(
    totals: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Name -> statistic over two disjoint sets of tokens. `totals` and `parts` are the statistics
    over one set each; a name may be missing in `totals`."""
    import torch

    combined = dict(parts)
    # all at once: on a GPU one operation for each name would take longer than the sums
    for is_maximum, function in ((False, torch._foreach_add), (True, torch._foreach_maximum)):
        names = [name for name in parts if name in totals and name.endswith("_max") == is_maximum]
        if names:
            values = function([totals[name] for name in names], [parts[name] for name in names])
            combined |= zip(names, values, strict=True)
    return combined


def merge(parts: Iterable[Layers]) -> Layers:
    """The statistics over all tokens. The sets of tokens of the `parts` are disjoint. UserError
    when the names of the parts' statistics differ."""
    total: Layers = {}
    for layers in parts:
        if total and {n: total[n].keys() for n in total} != {n: layers[n].keys() for n in layers}:
            raise UserError(
                "calibration.parts: parts of one pass have different statistics: remove the older "
                "from the store"
            )
        for layer, statistics_of_layer in layers.items():
            total[layer] = combine(total.get(layer, {}), statistics_of_layer)
    return total


def merge_means(parts: Sequence[Statistics]) -> Layers:
    """Layer -> name -> mean over the tokens of all `parts`. Each part has the means over its own
    tokens."""
    counts = [int(part.header["predicted"]) for part in parts]
    sums = [
        {
            layer: {name: mean * count for name, mean in means.items()}
            for layer, means in part.layers.items()
        }
        for part, count in zip(parts, counts, strict=True)
    ]
    return {
        layer: {name: total / sum(counts) for name, total in totals.items()}
        for layer, totals in merge(sums).items()
    }


def check_finite(
    layers: Mapping[int, Mapping[str, torch.Tensor]], source: str, dtype: torch.dtype
) -> None:
    """UserError when a value in `layers` (layer -> name -> tensor) is NaN or infinite. `source`
    says in the message what batches were read. `dtype`: the dtype of the model."""
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            if tensor.isfinite().all():
                continue
            position = (~tensor.isfinite()).nonzero()[0].tolist()
            expert = f", expert {position[0]}" if position else ""  # a scalar has no expert
            raise UserError(
                f"NaN or Inf in layer {layer}{expert}: {name} of {source} is not finite"
                f"{overflow_hint(dtype)}"
            )


def mean_output(sums: Mapping[str, Any]) -> NDArray[numpy.float64]:
    """The mean output (E, H) of each expert of a layer, over the tokens routed to the expert and
    without the gate; 0 for an expert without tokens. MoNE (arXiv 2507.00390) calls it the expert's
    novice. `sums`: name -> statistic of the layer."""
    tokens = numpy.maximum(numpy.asarray(sums["tokens"], dtype=float), 1)
    means: NDArray[numpy.float64] = numpy.asarray(sums["output_sum"], dtype=float) / tokens[:, None]
    return means
