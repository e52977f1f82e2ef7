"""Sums over the weights of experts, channels and pairs of experts, from the shards of a checkpoint,
without loading a model, or from a model in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.linalg import vector_norm

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, open_checkpoint, read_json
from moe_lab.models.config_json import UNQUANTISED
from moe_lab.models.discover import check_in_memory, moe_layers
from moe_lab.models.families import Axes, ExpertTensor, family_of, split
from moe_lab.models.rows import at_least_fp32
from moe_lab.statistics import Layers, Statistics

BLOCK = 1 << 23
"""Number of weights, of all experts of a layer together, that are compared at once: 64 MiB in
fp64."""
Source: TypeAlias = Path | str | nn.Module
"""A folder with a checkpoint in safetensors, or a model in memory with its present weights."""


class Matrices(NamedTuple):
    """A tensor with projections of one expert, or of all experts of a layer."""

    name: str
    axes: Axes
    expert: int | None
    """None for a stack of all experts."""
    shape: tuple[int, ...]
    tensor: Any
    """The tensor, or a slice of safetensors: its numbers are read when it is indexed."""


def _layers(source: Source) -> Iterator[tuple[int, list[Matrices]]]:
    """Yield (number, matrices) of each layer with routed experts. The matrices can be read until
    the iterator advances. UserError for a source without routed experts, for quantised or offloaded
    experts, and for damaged shards."""
    if isinstance(source, nn.Module):
        for moe_layer in moe_layers(source):
            check_in_memory(moe_layer)
            matrices = []
            for stack, axes in moe_layer.family.stacks.items():
                if not axes.is_bias:
                    tensor = getattr(moe_layer.experts, stack).detach()
                    name = f"{moe_layer.name}.{stack}"
                    matrices.append(Matrices(name, axes, None, tuple(tensor.shape), tensor))
            yield moe_layer.index, matrices
        return
    checkpoint = open_checkpoint(Path(source))
    tensors_of: dict[int, dict[str, ExpertTensor]] = defaultdict(dict)
    for name, expert_tensor in projections(checkpoint).items():
        tensors_of[expert_tensor.layer][name] = expert_tensor
    for layer, expert_tensors in sorted(tensors_of.items()):
        with ExitStack() as files:
            slices = checkpoint.slices(expert_tensors, files)
            matrices = []
            for name, part in expert_tensors.items():
                assert part.axes is not None
                shape = checkpoint.tensors[name].shape
                matrices.append(Matrices(name, part.axes, part.expert, shape, slices[name]))
            yield layer, matrices


def expert_weight_sums(source: Source, *, device: str = "cpu") -> Statistics:
    """Three statistics of each layer: "abs_sum" (E,) and "square_sum" (E,), the sums of |w| and w^2
    over the weights w of each expert, and "count" (), the number of weights of one expert.

    The weights of an expert are its gate, up and down projections, without biases. The sums are
    computed on `device` (cpu or cuda[:N]). UserError as from `_layers`, and for weights that are
    not finite (the message names the tensor).
    """

    def measure(_: Axes, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        (absolute,), (square,) = rows_absolute_and_square(weights[None])
        return {"abs_sum": absolute, "square_sum": square, "count": torch.tensor(weights.numel())}

    layers = sum_matrices(source, device, measure)
    for layer, sums in layers.items():
        if len(set(sums["count"].tolist())) > 1:
            raise _missing_weights(source, layer)
        sums["count"] = sums["count"][0]
    return Statistics(layers, {"kind": "weights"})


Measure = Callable[[Axes, torch.Tensor], dict[str, torch.Tensor]]
"""Axes of a tensor, and the weights of one expert in it -> statistics that are added to those of
the expert."""


def sum_matrices(source: Source, device: str, measure: Measure) -> Layers:
    """Layer -> name of a statistic -> (E, ...) fp64. The statistic of an expert is the sum of what
    `measure` returns for its matrices."""
    layers: Layers = {}
    for layer, matrices in _layers(source):
        # name of a statistic -> expert -> sum
        sums: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        for name, axes, expert, _, tensor in matrices:
            weights = tensor[...].to(device)
            stack = weights if expert is None else weights[None]
            for number, matrix in enumerate(stack, start=expert or 0):
                for statistic, measured in measure(axes, matrix).items():
                    values = measured.double().cpu()
                    if not bool(values.isfinite().all()):
                        raise UserError(
                            f"NaN or Inf in layer {layer}, expert {number}: weights {name}"
                        )
                    sums[statistic][number] = values + sums[statistic].get(number, 0)
        experts = range(1 + max(map(max, sums.values())))
        if any(len(by_expert) != len(experts) for by_expert in sums.values()):
            raise _missing_weights(source, layer)
        # (), or (I,) for experts of width I
        shapes = {values.shape for by_expert in sums.values() for values in by_expert.values()}
        if len(shapes) > 1:
            raise UserError(
                f"model.path={source}: experts of layer {layer} have unequal widths, expected one "
                "width"
            )
        layers[layer] = {
            statistic: torch.stack([by_expert[expert] for expert in experts])
            for statistic, by_expert in sums.items()
        }
    return layers


def _missing_weights(source: Source, layer: int) -> UserError:
    return UserError(
        f"model.path={source} lacks weights of some experts of layer {layer}: a shard is missing"
    )


def rows_absolute_and_square(experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum |w|, sum w^2) over the weights of each expert, (E,) fp64 each. `experts`: the stacked
    weights (E, rows, columns). The sums are computed from the norms of the rows in fp32, because
    norms need no temporary tensor of the size of the weights."""
    dtype = torch.promote_types(experts.dtype, torch.float32)
    l1_norms, l2_norms = (
        vector_norm(experts, order, dim=-1, dtype=dtype).double() for order in (1, 2)
    )
    return l1_norms.sum(-1), l2_norms.square().sum(-1)


def projections(checkpoint: Checkpoint) -> dict[str, ExpertTensor]:
    """Name of a tensor -> its ExpertTensor, for every tensor with projections of routed experts.
    Biases and layers for multi-token prediction are left out. UserError if experts are quantised,
    or if there are no routed experts."""
    config = read_json(checkpoint.folder / "config.json")
    family = family_of(config.get("text_config", config).get("model_type"))
    expert_tensors = {}
    for name, expert_tensor in family.expert_tensors(checkpoint.tensors).items():
        dtype = checkpoint.tensors[name].dtype
        # `axes` is None for scales and for packed numbers of a quantised format
        if expert_tensor.axes is None or (
            dtype not in UNQUANTISED and not expert_tensor.axes.is_bias
        ):
            raise UserError(
                f"{name} is stored as {dtype}, expected plain projections: load and save it "
                "dequantised"
            )
        if not expert_tensor.axes.is_bias:
            expert_tensors[name] = expert_tensor
    if not expert_tensors:
        raise UserError(
            f"model.path={checkpoint.folder} has no weights of routed experts, expected a "
            "mixture-of-experts checkpoint"
        )
    return expert_tensors


def compare_experts(source: Source, *, device: str = "cpu") -> Statistics:
    """One statistic of each layer: "weight_distance_square" (E, E) fp64, the squared Euclidean
    distance between the weights of every two experts. Only the weights of gate_proj and up_proj are
    compared, as in MergeMoE (arXiv 2510.14436). They are compared on `device`, in fp64 because
    small distances are differences of large sums. Arguments and errors are those of
    `expert_weight_sums`."""
    layers: Layers = {}
    for layer, matrices in _layers(source):
        # roles, the projections in a tensor, such as ("gate", "up") -> expert -> matrices. A stack
        # of all experts is entered as expert 0.
        by_roles: dict[tuple[str, ...], dict[int, Matrices]] = defaultdict(dict)
        for part in matrices:
            if part.axes.roles != ("down",):
                by_roles[part.axes.roles][part.expert or 0] = part
        ids = range(max(map(len, by_roles.values())))
        # inner products (E, E) of the weights of every two experts
        products = torch.zeros((), dtype=torch.float64)
        for by_expert in by_roles.values():
            if sorted(by_expert) != list(ids):
                raise _missing_weights(source, layer)
            for block in _blocks(layer, [by_expert[expert] for expert in ids], device):
                products = products + (block @ block.T).cpu()
        squares = products.diag()
        # ||v - w||^2 = ||v||^2 + ||w||^2 - <v, w> - <w, v>
        layers[layer] = {
            "weight_distance_square": (squares[:, None] + squares - products - products.T).clamp(
                min=0
            )
        }
    return Statistics(layers, {"kind": "weight_distances"})


def _blocks(layer: int, matrices: Sequence[Matrices], device: str) -> Iterator[torch.Tensor]:
    """One matrix of every expert of a layer, in blocks (E, n) fp64 on `device`. A block has the
    same few rows of every expert's matrix, flattened to n numbers. `matrices`: those (rows,
    columns) of the experts, or one stack (E, rows, columns) of all experts."""
    # `stacked`: [E] for a stack, otherwise []
    *stacked, rows, columns = matrices[0].shape
    n_experts = stacked[0] if stacked else len(matrices)
    step = max(1, BLOCK // (n_experts * columns))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        # only here are the weights read from the shards
        if stacked:
            numbers = matrices[0].tensor[:, part]
        else:
            numbers = torch.stack([matrix.tensor[part] for matrix in matrices])
        block = numbers.to(device).double().flatten(1)
        if damaged := (~block.isfinite().all(1)).nonzero().flatten().tolist():
            expert = damaged[0]
            name = matrices[0 if stacked else expert].name
            raise UserError(f"NaN or Inf in layer {layer}, expert {expert}: weights {name}")
        yield block


def channel_weight_sums(source: Source, *, device: str = "cpu") -> Statistics:
    """Statistics (E, I) of each layer: sums over the weights w of every channel, in fp32.
    "channel_down_square", "channel_up_square" and, for gated experts, "channel_gate_square" are
    sums of w^2 in one projection. "channel_down_abs" is the sum of |w| in down_proj. The weights of
    a channel are a column of down_proj, and a row of gate_proj and of up_proj. Arguments and errors
    are those of `expert_weight_sums`."""

    def measure(axes: Axes, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        channel_sums = {}
        # `matrix` (I, H) has a row for each channel, also for down_proj
        for role, matrix in split(at_least_fp32(weights), axes).items():
            channel_sums[f"channel_{role}_square"] = matrix.square().sum(1)
            if role == "down":
                channel_sums["channel_down_abs"] = matrix.abs().sum(1)
        return channel_sums

    layers = sum_matrices(source, device, measure)
    for layer, sums in layers.items():
        if not {"channel_down_square", "channel_up_square"} <= sums.keys():
            raise _missing_weights(source, layer)
    return Statistics(layers, {"kind": "channel_weights"})
