"""DoRA adapters (arXiv 2402.09353) on a model's MoE blocks: routed experts, shared experts,
routers."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.functional import dropout, linear
from torch.nn.utils import parametrize

from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import constant_output, replace_tensor
from moe_lab.models.discover import (
    MoELayer,
    is_ragged,
    linear_modules,
    post_expert_norm,
    routed_layers,
)
from moe_lab.models.rows import OneExpert, Part, Rows, at_least_fp32
from moe_lab.models.transformers_private import activation

SCALING = 4.0
"""The scaling s of adapters (alpha / rank), as in MoE-Slimming."""


class Dora(nn.Module):
    """The adapter of a linear map W (out, in). The adapted map W' has the rows
    m (W + s B A) / ||W + s B A||, with the norm of each row.

    A (rank, in), B (out, rank) and m (out,) are trained in at least fp32; s is the constant
    `scaling`. Before training, W' = W. As in peft, no gradient flows into the norm, and the output
    W' x is computed as W x + (W' - W) x, where dropout only acts on the x of the second term.
    """

    def __init__(
        self, weight: torch.Tensor, rank: int, scaling: float, dropout: float = 0.0
    ) -> None:
        """`weight`: W. `scaling`: s. `dropout`: share of the inputs of W' - W that are set to 0."""
        super().__init__()
        matrix = at_least_fp32(weight.detach())
        self.a = nn.Parameter(matrix.new_empty(rank, matrix.shape[1]))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as in peft and in nn.Linear
        self.b = nn.Parameter(matrix.new_zeros(len(matrix), rank))
        self.magnitude = nn.Parameter(matrix.norm(dim=1))
        self.scaling = scaling
        self.dropout = dropout

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The adapted weight W' (out, in) in the dtype of `weight`, which is W."""
        adapted = weight.to(self.a.dtype) + self.scaling * (self.b @ self.a)
        return (self._factor(adapted.detach())[:, None] * adapted).to(weight.dtype)

    def forward(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output (n, out) of the map W' with `bias` for `rows` (n, in). `weight`: W."""
        output = linear(rows, weight)
        wide_weight = weight.to(self.a.dtype)  # wide: in at least fp32, like the adapter
        # x, the input of W' - W, and W x
        wide_rows = rows.to(self.a.dtype)
        plain_output = output
        if self.training and self.dropout:
            wide_rows = dropout(wide_rows, self.dropout)
            plain_output = linear(wide_rows, wide_weight)
        factor = self._factor((wide_weight + self.scaling * (self.b @ self.a)).detach())
        # W' is factor (W + s B A), so (W' - W) x is (factor - 1) W x + factor s B A x
        addition = (factor - 1) * plain_output + factor * self.scaling * linear(
            linear(wide_rows, self.a), self.b
        )
        output = (output + addition).to(output.dtype)
        return output if bias is None else output + bias

    def _factor(self, adapted: torch.Tensor) -> torch.Tensor:
        """The factor m / ||adapted|| of each row (out,). `adapted`: W + s B A."""
        norm = adapted.norm(dim=1).clamp(min=torch.finfo(adapted.dtype).tiny)
        factor: torch.Tensor = self.magnitude / norm
        return factor


class DoraLinear(nn.Module):
    """The linear map `plain` with an adapter."""

    plain: nn.Linear
    """The map without adapter; no submodule, because it is frozen."""

    def __init__(self, plain: nn.Linear, settings: RecoveryConfig) -> None:
        super().__init__()
        self.__dict__["plain"] = plain  # self.plain = plain would make a submodule
        self.adapter = Dora(plain.weight, settings.rank, SCALING, settings.dropout)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        output: torch.Tensor = self.adapter(rows, self.plain.weight, self.plain.bias)
        return output


class DoraWeight(nn.Module):
    """Parametrisation (`torch.nn.utils.parametrize`) by which a router's forward reads the adapted
    weight."""

    def __init__(self, weight: torch.Tensor, settings: RecoveryConfig) -> None:
        super().__init__()
        self.adapter = Dora(weight, settings.router_rank, SCALING)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The adapted weight (E, H)."""
        return self.adapter.weight(weight)


class DoraExperts(nn.Module):
    """The experts of a layer with adapters. `adapters[e]` has the adapters gate, up and down of
    expert e."""

    def __init__(self, layer: MoELayer, settings: RecoveryConfig) -> None:
        super().__init__()
        self.layer = layer
        self.adapters = nn.ModuleList()
        for expert in range(layer.n_experts):
            maps = linear_maps(layer, expert).items()
            adapters = {
                name: Dora(weight, settings.rank, SCALING, settings.dropout)
                for name, (weight, _) in maps
            }
            self.adapters.append(nn.ModuleDict(adapters))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum (T, H) of the outputs of experts `top_k_index` (T, K), weighted by the gates
        `top_k_weights` (T, K)."""

        def expert_output(part: Part, states: torch.Tensor) -> torch.Tensor | None:
            """The output of one expert. None for an expert without channels, which has no
            adapters."""
            assert isinstance(part, OneExpert)
            has_channels = len(self.adapters[part.experts])  # type: ignore[arg-type]
            return self._expert_output(part.experts, states) if has_channels else None

        original: Any = self.layer.experts
        # a merged expert is computed with the weights of its owner
        index = top_k_index
        if is_ragged(original):
            index = torch.tensor(original.owners, device=index.device)[index]
        rows = Rows(index, len(self.adapters))
        output = rows.output(hidden_states, top_k_weights, expert_output)
        if is_ragged(original) and original.constants is not None:
            output = output + constant_output(
                top_k_index,
                top_k_weights,
                original.num_experts,
                original.null_experts,
                original.constants,
            )
        return output

    def _expert_output(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output (n, H) of one expert for hidden states (n, H), without gates of the router."""
        experts: Any = self.layer.experts
        adapters: Any = self.adapters[expert]
        maps = linear_maps(self.layer, expert)
        parts = [adapters[name](hidden, *maps[name]) for name in maps if name != "down"]
        # the activation expects gate and up on one axis, one after the other or interleaved
        gate_up = (
            torch.cat(parts, -1) if experts.is_concatenated else torch.stack(parts, -1).flatten(-2)
        )
        output: torch.Tensor = adapters["down"](activation(experts)(gate_up), *maps["down"])
        norm = post_expert_norm(experts)
        return output if norm is None else norm(output)


Adapted: TypeAlias = dict[str, dict[str, Any]]
"""Part of the model -> path -> module with adapters: a DoraExperts for the part experts, a module
with a DoraWeight for routers, a DoraLinear for shared_experts."""


def attach(model: nn.Module, settings: RecoveryConfig, seed: int) -> Adapted:
    """Put adapters on all routed and shared experts of `model`, in place. Routers get adapters
    unless recovery.router_rank=0. Returns part of the model -> path -> module with adapters.

    All other parameters of the model are frozen. `seed` determines the random initial A of each
    adapter.
    """
    model.requires_grad_(False)
    paths = {module: path for path, module in model.named_modules()}
    shared_maps = list(linear_modules(model, "shared_experts"))
    adapted: Adapted = {"experts": {}, "routers": {}, "shared_experts": {}}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in routed_layers(model):
            adapted["experts"][layer.name] = DoraExperts(layer, settings)
            if settings.router_rank:
                router = router_weight(layer)
                adapter = DoraWeight(router.weight, settings)  # type: ignore[arg-type]
                # unsafe: torch does not check that the adapted weight has the same shape and dtype
                parametrize.register_parametrization(router, "weight", adapter, unsafe=True)
                adapted["routers"][paths[router]] = router
            for path, plain in shared_maps:
                if path.startswith(f"{layer.stack}.{layer.index}."):
                    adapted["shared_experts"][path] = DoraLinear(plain, settings)
    for path, module in (adapted["experts"] | adapted["shared_experts"]).items():
        model.set_submodule(path, module)
    return adapted


def router_weight(layer: MoELayer) -> nn.Module:
    """The router, or the child of it, whose `weight` has one row for each expert."""
    return next(part.module for part in layer.routing if part.name == "weight")


def trainable(adapted: Adapted) -> dict[str, dict[str, nn.Parameter]]:
    """Part of the model -> name -> parameter to train."""
    parameters: dict[str, dict[str, nn.Parameter]] = {part: {} for part in adapted}
    for part, modules in adapted.items():
        for path, module in modules.items():
            named = module.named_parameters(path)
            parameters[part] |= {
                name: parameter for name, parameter in named if parameter.requires_grad
            }
    return parameters


@torch.no_grad()
def merge(model: nn.Module, adapted: Adapted) -> dict[str, torch.Tensor]:
    """Merge the adapters into new weights, and put the original modules with these weights back
    into `model`. Returns name in the model's state dict -> new weight. UserError for a weight that
    is not finite."""
    merged_tensors: dict[str, torch.Tensor] = {}
    for path, experts in adapted["experts"].items():
        merged_tensors |= {
            f"{path}.{name}": tensor for name, tensor in _merge_experts(experts).items()
        }
        model.set_submodule(path, experts.layer.experts)
    for path, router in adapted["routers"].items():
        # until the parametrisation is removed, router.weight is the adapted weight
        merged_tensors[f"{path}.weight"] = router.weight.detach().clone(
            memory_format=torch.contiguous_format
        )
        parametrize.remove_parametrizations(router, "weight", leave_parametrized=False)
    for path, module in adapted["shared_experts"].items():
        merged_tensors[f"{path}.weight"] = module.adapter.weight(module.plain.weight)
        model.set_submodule(path, module.plain)
    for name, tensor in merged_tensors.items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"fine-tuning made {name} not finite: lower recovery.learning_rate")
        owner, _, attribute = name.rpartition(".")
        replace_tensor(
            model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False)
        )
    return merged_tensors


def _merge_experts(adapted: DoraExperts) -> dict[str, torch.Tensor]:
    """Put stacks of merged weights into the layer's original experts module. Returns name -> new
    stack. The old stacks are not changed, because other models may share them."""
    module = adapted.layer.experts
    stacks = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not name.endswith("_bias") and name != "constants":  # biases and constants stay
            stacks[name] = parameter.detach().clone()
            replace_tensor(module, name, nn.Parameter(stacks[name], requires_grad=False))
    for expert, adapters in enumerate(adapted.adapters):
        for name, (weight, _) in linear_maps(adapted.layer, expert).items():
            # `weight` is a view of a new stack
            weight.copy_(adapters[name].weight(weight))  # type: ignore[index]
    return stacks


def linear_maps(
    layer: MoELayer, expert: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """The linear maps of one expert: name (gate, up or down) -> (weight (out, in), bias (out,) or
    None). {} for an expert without channels. The tensors are views into the experts module."""
    views = layer.projections(expert)  # with channels as rows
    maps: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for name in ("gate", "up", "down"):
        if name in views and len(views[name]):
            maps[name] = (
                views[name].T if name == "down" else views[name],
                views.get(f"{name}_bias"),
            )
    return maps
