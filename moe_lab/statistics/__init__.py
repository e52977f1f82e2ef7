"""Names, shapes and files of the statistics: sums over tokens, a set of tensors per MoE layer. Reading needs no torch.

Names and shapes for a layer of E experts, hidden size H and I channels per expert; t runs over the valid tokens that
the router sent to expert j, f is the expert's output before the gate, g the gate, phi the input of down_proj:

    tokens               (E,)      N_j, the number of such tokens
    sums_model           (E, 3, 3) sum_t g^alpha * ||f||^beta at [j, alpha, beta], g as the model multiplies with it
    sums_renormalized    (E, 3, 3) the same with g divided by its sum over the token's top-k
    sums_full_softmax    (E, 3, 3) the same with g = p_j of p = softmax(logits) over all experts, of softmax routers
    sums_double_softmax  (E, 3, 3) the same with g = softmax(p)_j over all experts, of softmax routers
    output_sum           (E, H)    sum_t f
    output_abs_max       (E,)      max over t and the entries of f of |f|
    shift_weighted       (E,)      sum_t max(0, 1 - cos(x, x + m)) g ||f||, m the routed output, x the residual stream
                                   before the MoE block: the input of the norm whose output the block reads
    ala_first            (E,)      sum_t g <f, m> / (||y||^2 + eps), m the routed output, y the residual stream after
    ala_second           (E,)      sum_t g^2 ||f||^2 / (||y||^2 + eps)
    layer_loss           ()        sum over all valid tokens of ||m||^2 / (||y||^2 + eps)
    router_entropy       (B,)      valid tokens by the entropy of softmax(logits) over all experts, in B equal bins
                                   from 0 to ln E, of routers that give logits
    channel_square       (E, I)    sum_t phi^2
    channel_max          (E, I)    max_t |phi|
    gate_channel_square  (E, I)    sum_t (g phi)^2
    gate_channel_max     (E, I)    max_t |g phi|
    renormalized_channel_square, renormalized_channel_max  (E, I) the same with g divided by its sum over the top-k

Sums over a forward and a backward pass (gradients.py), L the next-token cross-entropy summed over the calibration set;
such a pass also gives tokens and the first four channel sums above:

    channel_gradient_square  (E, I) sum_t (dL/dphi)^2
    channel_product          (E, I) sum_t phi dL/dphi; over all channels that is sum_t <f, dL/df>, if experts have
                                    neither biases nor a norm after down_proj
    channel_product_abs      (E, I) sum_t |phi dL/dphi|

From passes of their own, and from weights alone:

    dense_output_sum     (E, H)    sum of f over all valid tokens, routed to it or not                 (damage.py)
    dense_gated_output_sum  (E, H) sum of p_j f over all valid tokens, p = softmax(z)             (damage.py)
    router_gram          (E, E)    sum over all valid tokens of z z^T, z the router's logits            (damage.py)
    damage               (E,)      sum_t ||y - y without j||                                             (damage.py)
    ablation             (E,)      rise of the mean loss without j, nats per token             (search/ablation.py)
    scaling              ()        rise of the mean loss with m times 0.9, nats per token      (search/ablation.py)
    snip_down            (E, I)    sum over a channel's weights in down_proj of |w dL/dw|              (gradients.py)
    snip_gate, snip_up   (E, I)    the same of gate_proj and up_proj                                   (gradients.py)
    abs_sum, square_sum  (E,)      sum |w| and sum w^2 over gate, up and down weights                   (weights.py)
    count                ()        number of those weights per expert                                   (weights.py)
    channel_down_square  (E, I)    sum_o w_oc^2 over the outputs o of down_proj                         (weights.py)
    channel_down_abs     (E, I)    sum_o |w_oc| over the outputs o of down_proj                         (weights.py)
    channel_gate_square  (E, I)    sum over inputs of the squared weights of gate_proj                  (weights.py)
    channel_up_square    (E, I)    the same of up_proj                                                  (weights.py)
    weight_distance_square  (E, E) sum over gate and up weights of the squared difference of two experts (weights.py)
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

from moe_lab.errors import UserError

if TYPE_CHECKING:
    import torch

Layers: TypeAlias = "dict[int, dict[str, torch.Tensor]]"


@dataclass
class Statistics:
    """Sums per MoE layer, with a header that says what was summed. `layers`: decoder layer number -> tensor name ->
    fp64 tensor on the CPU. `header`: JSON data with `kind` (forward, damage, similarity, gradients, weight_gradients,
    weights, channel_weights or weight_distances) and `fingerprint` (model, data and settings)."""

    layers: Layers
    header: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path | str) -> None:
        """Write one safetensors file, with the header as JSON in its metadata, atomically."""
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {}
        for layer, sums in self.layers.items():
            for name, part in sums.items():
                # safetensors takes neither views nor tensors that share memory
                tensors[f"{layer}/{name}"] = part.clone().contiguous()
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
        save_file(tensors, beside, {"moe_lab": json.dumps(self.header, sort_keys=True)})
        beside.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> Statistics:
        """Read a file of `save`. UserError when it is missing, damaged or not statistics."""
        return cls(read(path, framework="pt"), header(path))


def read(path: Path | str, framework: str = "np", only: str | None = None) -> dict[int, dict[str, Any]]:
    """Read statistics: layer -> name -> array (fp64 numpy; torch tensors with framework="pt"), names as above. `only`:
    the one name to read; None reads all. UserError when the file is missing, damaged or not statistics."""
    header(path)
    layers: dict[int, dict[str, Any]] = {}
    with safe_open(path, framework=framework) as file:
        for key in file.keys():  # noqa: SIM118 (a safetensors file is not iterable)
            layer, name = key.split("/")
            arrays = layers.setdefault(int(layer), {})
            if only in (None, name):
                arrays[name] = file.get_tensor(key)
    return dict(sorted(layers.items()))


def by_layer(passes: Iterable[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Merge the arrays of several passes over one model: layer -> name -> array."""
    merged: dict[int, dict[str, Any]] = {}
    for layers in passes:
        for layer, arrays in layers.items():
            merged.setdefault(layer, {}).update(arrays)
    return merged


def header(path: Path | str) -> dict[str, Any]:
    """Read the header of a file of statistics: kind and fingerprint of the sums. Same errors as `read`."""
    try:
        with safe_open(path, framework="np") as file:
            return dict(json.loads(file.metadata()["moe_lab"]))
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"statistics={path} cannot be read, expected a file of statistics: {error}") from error


def plus(name: str, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The statistic `name` of two disjoint sets of tokens together: the maximum where it ends in _max, else the sum."""
    return total.maximum(part) if name.endswith("_max") else total + part


def merged(parts: Iterable[Layers]) -> Layers:
    """The statistics of disjoint sets of tokens together. UserError when they are not of the same names."""
    total: Layers = {}
    for layers in parts:
        if total and {n: total[n].keys() for n in total} != {n: layers[n].keys() for n in layers}:
            raise UserError(
                "calibration.parts: parts of one pass have different statistics: remove the older from the store"
            )
        for layer, named in layers.items():
            here = total.setdefault(layer, {})
            for name, part in named.items():
                here[name] = plus(name, here[name], part) if name in here else part
    return total


def merged_means(parts: Sequence[Statistics]) -> Layers:
    """Means over the tokens of all `parts`, from the mean of each and header["predicted"], its number of tokens."""
    counts = [int(part.header["predicted"]) for part in parts]
    sums = [
        {layer: {name: mean * count for name, mean in named.items()} for layer, named in part.layers.items()}
        for part, count in zip(parts, counts, strict=True)
    ]
    total = merged(sums)
    return {layer: {name: part / sum(counts) for name, part in named.items()} for layer, named in total.items()}


def check_finite(layers: Mapping[int, Mapping[str, torch.Tensor]], where: str) -> None:
    """Raise UserError naming layer and expert when a statistic is NaN or infinite; `where` names what was read."""
    for layer, named in layers.items():
        for name, tensor in named.items():
            if tensor.isfinite().all():
                continue
            bad = (~tensor.isfinite()).nonzero()[0].tolist()
            expert = f", expert {bad[0]}" if bad else ""
            raise UserError(f"NaN or Inf in layer {layer}{expert}: {name} of {where} is not finite")


def mean_output(sums: Mapping[str, Any]) -> NDArray[numpy.float64]:
    """(E, H): the mean output of each expert of a layer over the tokens routed to it, before the gate; 0 without any.
    It is the constant nearest to those outputs in the mean square, the novice of MoNE (arXiv 2507.00390)."""
    tokens = numpy.maximum(numpy.asarray(sums["tokens"], dtype=float), 1)
    means: NDArray[numpy.float64] = numpy.asarray(sums["output_sum"], dtype=float) / tokens[:, None]
    return means
