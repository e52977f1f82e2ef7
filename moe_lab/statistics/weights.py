"""Sums over the weights of experts, channels and pairs of experts, from the shards of a checkpoint,
without loading a model, or from a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open
from torch import nn
from torch.linalg import vector_norm

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, open_checkpoint, read_json
from moe_lab.models.config_json import UNQUANTISED
from moe_lab.models.discover import check_in_memory, moe_layers
from moe_lab.models.families import ExpertTensor, family_of, split
from moe_lab.models.rows import at_least_fp32
from moe_lab.statistics import Layers, Statistics

BLOCK = 1 << 23
"""Number of weights, of all experts of a layer together, that are compared at once: 64 MiB in
fp64."""
Source: TypeAlias = Path | str | nn.Module
"""A folder with a checkpoint in safetensors, or a model in memory with its present weights."""


def expert_weight_sums(source: Source, *, device: str = "cpu") -> Statistics:
    """Three statistics of each layer: "abs_sum" (E,) and "square_sum" (E,), the sums of |w| and w^2
    over the weights w of each expert, and "count" (), the number of weights of one expert.

    The weights of an expert are its gate, up and down projections, without biases. A checkpoint is
    read to `device` (cpu or cuda[:N]); a model in memory stays on its device. UserError for a
    source without routed experts, quantised experts, damaged shards, and weights that are not
    finite (the message names the tensor).
    """

    def measure(_: ExpertTensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        (absolute,), (square,) = rows_absolute_and_square(weights[None])
        return {"abs_sum": absolute, "square_sum": square, "count": torch.tensor(weights.numel())}

    layers = _sum_matrices(source, device, measure)
    for layer, sums in layers.items():
        if len(set(sums["count"].tolist())) > 1:
            raise _missing_weights(source, layer)
        sums["count"] = sums["count"][0]
    return Statistics(layers, {"kind": "weights"})


Measure = Callable[[ExpertTensor, torch.Tensor], dict[str, torch.Tensor]]
"""ExpertTensor of a tensor, and the weights of one expert in it -> statistics that are added to
those of the expert."""


def _sum_matrices(source: Source, device: str, measure: Measure) -> Layers:
    """Layer -> name of a statistic -> (E, ...) fp64. The statistic of an expert is the sum of what
    `measure` returns for its matrices."""
    # layer -> name of a statistic -> expert -> sum
    sums: dict[int, dict[str, dict[int, torch.Tensor]]] = {}
    for name, expert_tensor, expert, weights in _open_experts(source, device).matrices():
        for statistic, values in measure(expert_tensor, weights).items():
            values = values.double().cpu()
            if not bool(values.isfinite().all()):
                raise UserError(
                    f"NaN or Inf in layer {expert_tensor.layer}, expert {expert}: weights {name}"
                )
            expert_sums = sums.setdefault(expert_tensor.layer, {}).setdefault(statistic, {})
            if expert in expert_sums:
                values = expert_sums[expert] + values
            expert_sums[expert] = values
    layers: Layers = {}
    for layer, statistics in sorted(sums.items()):
        experts = range(1 + max(max(expert_sums) for expert_sums in statistics.values()))
        if any(len(expert_sums) != len(experts) for expert_sums in statistics.values()):
            raise _missing_weights(source, layer)
        # (), or (I,) for experts of width I
        shapes = {
            values.shape for expert_sums in statistics.values() for values in expert_sums.values()
        }
        if len(shapes) > 1:
            raise UserError(
                f"model.path={source}: experts of layer {layer} have unequal widths, expected one "
                "width"
            )
        layers[layer] = {
            name: torch.stack([expert_sums[expert] for expert in experts])
            for name, expert_sums in statistics.items()
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


class LoadedExperts:
    """The stacked matrices of the routed experts of a model in memory.

    `tensors`: name of a stack -> its weights (E, rows, columns). `expert_tensors`: name of a stack
    -> its ExpertTensor.
    """

    def __init__(self, model: nn.Module) -> None:
        """UserError for a model whose experts are not supported, and for offloaded weights."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.expert_tensors: dict[str, ExpertTensor] = {}
        for layer in moe_layers(model):
            check_in_memory(layer)
            for stack, axes in layer.family.stacks.items():
                if not axes.is_bias:
                    name = f"{layer.name}.{stack}"
                    self.tensors[name] = getattr(layer.experts, stack).detach()
                    self.expert_tensors[name] = ExpertTensor(layer.name, layer.index, axes=axes)

    def matrices(self) -> Iterator[tuple[str, ExpertTensor, int, torch.Tensor]]:
        """(name of the stack, ExpertTensor of the stack, expert, weights (rows, columns)) for every
        matrix of every expert."""
        for name, stack in self.tensors.items():
            for expert, weights in enumerate(stack):
                yield name, self.expert_tensors[name], expert, weights

    def slices(self, names: Iterable[str], files: ExitStack) -> dict[str, torch.Tensor]:
        """Name of a stack -> its weights. The arguments are those of `Checkpoint.slices`."""
        return {name: self.tensors[name] for name in names}


class StoredExperts:
    """The matrices of the routed experts of a checkpoint in safetensors.

    `tensors`: name of each tensor of the checkpoint -> its shard, dtype and shape.
    `expert_tensors`: name of a tensor with matrices of experts -> its ExpertTensor.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """`device`: the device to which `matrices` reads. UserError for a checkpoint that is
        damaged, has no routed experts, or has quantised experts."""
        self.checkpoint = open_checkpoint(folder)
        self.tensors = self.checkpoint.tensors
        self.slices = self.checkpoint.slices
        self.expert_tensors = projections(self.checkpoint)
        self.device = device

    def matrices(self) -> Iterator[tuple[str, ExpertTensor, int, torch.Tensor]]:
        """(name of the tensor, ExpertTensor of the tensor, expert, weights (rows, columns)) for
        every matrix of every expert, shard by shard. One tensor at a time is in memory."""
        for shard in self.checkpoint.shards:
            names = [name for name in self.expert_tensors if self.tensors[name].shard == shard]
            with safe_open(
                self.checkpoint.folder / shard, framework="pt", device=self.device
            ) as file:
                for name in names:
                    expert_tensor = self.expert_tensors[name]
                    weights = file.get_tensor(name)
                    if expert_tensor.expert is not None:
                        yield name, expert_tensor, expert_tensor.expert, weights
                        continue
                    for expert, matrix in enumerate(weights):
                        yield name, expert_tensor, expert, matrix


def _open_experts(source: Source, device: str) -> LoadedExperts | StoredExperts:
    if isinstance(source, nn.Module):
        return LoadedExperts(source)
    return StoredExperts(Path(source), device)


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
    experts = _open_experts(source, device)
    # layer -> roles -> expert -> name of the tensor. Roles are the projections in a tensor, such as
    # ("gate", "up"). A stack of all experts is entered as expert 0.
    layer_names: dict[int, dict[tuple[str, ...], dict[int, str]]] = {}
    for name, expert_tensor in experts.expert_tensors.items():
        if expert_tensor.axes is not None and expert_tensor.axes.roles != ("down",):
            names_by_role = layer_names.setdefault(expert_tensor.layer, {})
            names_by_role.setdefault(expert_tensor.axes.roles, {})[expert_tensor.expert or 0] = name
    layers: Layers = {}
    for layer, names_by_role in sorted(layer_names.items()):
        ids = range(max(map(len, names_by_role.values())))
        if any(sorted(names) != list(ids) for names in names_by_role.values()):
            raise _missing_weights(source, layer)
        # inner products (E, E) of the weights of every two experts
        products = torch.zeros((), dtype=torch.float64)
        for names in names_by_role.values():
            for block in _blocks(experts, layer, [names[expert] for expert in ids], device):
                products = products + (block @ block.T).cpu()
        squares = products.diag()
        # ||v - w||^2 = ||v||^2 + ||w||^2 - <v, w> - <w, v>
        layers[layer] = {
            "weight_distance_square": (squares[:, None] + squares - products - products.T).clamp(
                min=0
            )
        }
    return Statistics(layers, {"kind": "weight_distances"})


def _blocks(
    experts: LoadedExperts | StoredExperts, layer: int, names: Sequence[str], device: str
) -> Iterator[torch.Tensor]:
    """One matrix of every expert of a layer, in blocks (E, n) fp64 on `device`. A block has the
    same few rows of every expert's matrix, flattened to n numbers. `names`: either the names of the
    experts' tensors (rows, columns), or one name, of the stack (E, rows, columns) of all
    experts."""
    # `stacked`: [E] if `names` is the name of a stack, otherwise []
    *stacked, rows, columns = experts.tensors[names[0]].shape
    n_experts = stacked[0] if stacked else len(names)
    step = max(1, BLOCK // (n_experts * columns))
    with ExitStack() as files:
        slices = list(experts.slices(names, files).values())
        for first in range(0, rows, step):
            part = slice(first, first + step)
            # only here are the weights read from the shards
            matrices = (
                slices[0][:, part] if stacked else torch.stack([matrix[part] for matrix in slices])
            )
            block = matrices.to(device).double().flatten(1)
            if damaged := (~block.isfinite().all(1)).nonzero().flatten().tolist():
                expert = damaged[0]
                name = names[0] if stacked else names[expert]
                raise UserError(f"NaN or Inf in layer {layer}, expert {expert}: weights {name}")
            yield block


def channel_weight_sums(source: Source, *, device: str = "cpu") -> Statistics:
    """Statistics (E, I) of each layer: sums over the weights w of every channel, in fp32.
    "channel_down_square", "channel_up_square" and, for gated experts, "channel_gate_square" are
    sums of w^2 in one projection. "channel_down_abs" is the sum of |w| in down_proj. The weights of
    a channel are a column of down_proj, and a row of gate_proj and of up_proj. Arguments and errors
    are those of `expert_weight_sums`."""

    def measure(expert_tensor: ExpertTensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        assert expert_tensor.axes is not None
        channel_sums = {}
        # `matrix` (I, H) has a row for each channel, also for down_proj
        for role, matrix in split(at_least_fp32(weights), expert_tensor.axes).items():
            channel_sums[f"channel_{role}_square"] = matrix.square().sum(1)
            if role == "down":
                channel_sums["channel_down_abs"] = matrix.abs().sum(1)
        return channel_sums

    layers = _sum_matrices(source, device, measure)
    for layer, sums in layers.items():
        if not {"channel_down_square", "channel_up_square"} <= sums.keys():
            raise _missing_weights(source, layer)
    return Statistics(layers, {"kind": "channel_weights"})
