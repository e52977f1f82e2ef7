"""DoRA adapters (arXiv 2402.09353) on a model's MoE blocks: routed experts, shared experts,
routers."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.functional import dropout, one_hot
from torch.nn.utils import parametrize

from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import ALIGNMENT, replace_tensor
from moe_lab.models.discover import MoELayer, is_ragged, linear_modules, routed_layers
from moe_lab.models.experts import to_device
from moe_lab.models.families import GATE_UP, split
from moe_lab.models.rows import (
    GroupedRows,
    OneExpert,
    Part,
    at_least_fp32,
    is_grouped,
    sort_by_expert,
)
from moe_lab.models.transformers_private import activation

SCALING = 4.0
"""The scaling s of adapters (alpha / rank), as in MoE-Slimming."""
ONE_MAP = OneExpert(0, slice(None))
"""The part of rows that all have the same linear map."""


class Dora(nn.Module):
    """The adapter of a linear map W (out, in). The adapted map W' has the rows
    m (W + s B A) / ||W + s B A||, with the norm of each row.

    A (rank, in), B (out, rank) and m (out,) are trained in at least fp32; s is SCALING. Before
    training, W' = W. As in peft, no gradient flows into the norm, and the output W' x is computed
    as W x + (W' - W) x, where dropout only acts on the x of the second term.

    W can also be several maps with the same input, such as gate and up, whose rows it has: each map
    has its own A and B, and the maps drop the same inputs. And W can be (E, out, in), the maps of
    all experts, which are computed at once. An expert without tokens then has gradients of 0, with
    which an optimizer may still change its adapters.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        rank: int,
        dropout: float = 0.0,
        maps: int = 1,
        is_concatenated: bool = True,
    ) -> None:
        """`weight`: W. `dropout`: share of the inputs of W' - W that are set to 0. `maps`: number
        of maps. `is_concatenated`: whether the rows of the maps come one after the other, not in
        turns."""
        super().__init__()
        matrix = at_least_fp32(weight.detach())
        *experts, n_rows, n_inputs = matrix.shape
        # products of all experts at once need an aligned rank
        n_columns = math.ceil(rank / ALIGNMENT) * ALIGNMENT if experts else rank
        a = matrix.new_empty(*experts, maps * n_columns, n_inputs)
        nn.init.kaiming_uniform_(a.flatten(0, -2), a=math.sqrt(5))  # as in peft and in nn.Linear
        # inputs by which experts are filled up to one width must not add to the norm
        a *= (matrix != 0).any(-2, keepdim=True)
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(matrix.new_zeros(*experts, n_rows, n_columns))
        self.magnitude = nn.Parameter(matrix.norm(dim=-1))
        self.dropout = dropout
        rows = torch.arange(n_rows, device=weight.device)
        map_of_row = rows // (n_rows // maps) if is_concatenated else rows % maps
        is_used = torch.arange(n_columns, device=weight.device) < rank
        # (out, maps, columns): 1 for the entries of B that are used
        self.blocks = one_hot(map_of_row, maps)[:, :, None] * is_used

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The adapted weight W' in the dtype of `weight`, which is W."""
        adapted = self._adapted(weight, self._b())
        return (self._factor(adapted)[..., None] * adapted).to(weight.dtype)

    def forward(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        part: Part = ONE_MAP,
    ) -> torch.Tensor:
        """The output (n, out) of the map W' with `bias` for `rows` (n, in). `weight`: W. `part`:
        to which the rows belong."""
        output = part.linear(rows, weight)
        # products of all experts at once are in the dtype of W
        dtype = self.a.dtype if weight.dim() == 2 else weight.dtype
        # x, the input of W' - W, and W x
        inputs = rows.to(dtype)
        plain_output = output
        if self.training and self.dropout:
            inputs = dropout(inputs, self.dropout)
            plain_output = part.linear(inputs, weight.to(dtype))
        b = self._b()
        with torch.no_grad():  # so that W + s B A is not kept for the backward pass
            adapted = self._adapted(weight, b)
        factor = self._factor(adapted)
        del adapted
        # W' is factor (W + s B A), so (W' - W) x is (factor - 1) W x + (factor s B) A x
        scaled_b = (SCALING * factor[..., None] * b).to(dtype)
        low_rank_output = part.linear(part.linear(inputs, self.a.to(dtype)), scaled_b)
        addition = part.spread(factor - 1).to(dtype) * plain_output + low_rank_output
        output = (output + addition).to(output.dtype)
        return output if bias is None else output + part.spread(bias)

    def _b(self) -> torch.Tensor:
        """B (..., out, maps rank), with a block for each map."""
        return (self.b[..., None, :] * self.blocks).flatten(-2)

    def _adapted(self, weight: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """W + s B A in at least fp32. `weight`: W. `b`: B."""
        return weight.to(self.a.dtype) + SCALING * (b @ self.a)

    def _factor(self, adapted: torch.Tensor) -> torch.Tensor:
        """The factor m / ||adapted|| of each row. `adapted`: W + s B A."""
        norm = adapted.detach().norm(dim=-1).clamp(min=torch.finfo(adapted.dtype).tiny)
        factor: torch.Tensor = self.magnitude / norm
        return factor


class DoraLinear(nn.Module):
    """The linear map `plain` with an adapter."""

    plain: nn.Linear
    """The map without adapter; no submodule, because it is frozen."""

    def __init__(self, plain: nn.Linear, settings: RecoveryConfig) -> None:
        super().__init__()
        self.__dict__["plain"] = plain  # self.plain = plain would make a submodule
        self.adapter = Dora(plain.weight, settings.rank, settings.dropout)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        output: torch.Tensor = self.adapter(rows, self.plain.weight, self.plain.bias)
        return output


class DoraWeight(nn.Module):
    """Parametrisation (`torch.nn.utils.parametrize`) by which a router's forward reads the adapted
    weight."""

    def __init__(self, weight: torch.Tensor, settings: RecoveryConfig) -> None:
        super().__init__()
        self.adapter = Dora(weight, settings.router_rank)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The adapted weight (E, H)."""
        return self.adapter.weight(weight)


class DoraExperts(nn.Module):
    """The experts of a layer with adapters. `adapters[e]` has the adapters inward and down of
    expert e. If the model computes all experts at once, `adapters[0]` has those of all experts;
    experts of unequal width have adapters for the largest width."""

    def __init__(self, layer: MoELayer, settings: RecoveryConfig) -> None:
        super().__init__()
        self.layer = layer
        self.parts: list[Any] = [slice(None)] if is_grouped(layer) else [*range(layer.n_experts)]
        self.adapters = nn.ModuleList()
        module: Any = layer.experts
        for experts in self.parts:
            adapters = nn.ModuleDict()
            for name, (weight, _) in linear_maps(layer, experts).items():
                maps = 2 if name == "inward" and module.has_gate else 1
                adapters[name] = Dora(
                    weight, settings.rank, settings.dropout, maps, module.is_concatenated
                )
            self.adapters.append(adapters)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum (T, H) of the outputs of experts `top_k_index` (T, K), weighted by the gates
        `top_k_weights` (T, K)."""
        original: Any = self.layer.experts
        index = top_k_index
        if is_ragged(original):
            # a merged expert is computed with the weights of its owner
            index = to_device(torch.tensor(original.owners), index.device)[index]
        rows = sort_by_expert(self.layer, index)
        output = rows.output(hidden_states, top_k_weights, self._part_output)
        if is_ragged(original):
            output = original.with_constants(output, top_k_index, top_k_weights)
        return output

    def _part_output(self, part: Part, states: torch.Tensor) -> torch.Tensor | None:
        """The outputs (n, H) of the experts of `part` for the hidden states (n, H) of its rows,
        without gates of the router. None for an expert without channels, which has no adapters."""
        adapters: Any = self.adapters[0 if isinstance(part, GroupedRows) else part.experts]
        maps = linear_maps(self.layer, part.experts)
        if not maps:
            return None
        phi = activation(self.layer.experts)(adapters["inward"](states, *maps["inward"], part))
        output: torch.Tensor = adapters["down"](phi, *maps["down"], part)
        return output

    def merge(self) -> dict[str, torch.Tensor]:
        """Put stacks of adapted weights into the layer's original experts module. Returns name ->
        new stack. The old stacks are not changed, because other models may share them."""
        module = self.layer.experts
        stacks = {}
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not name.endswith("_bias") and name != "constants":  # biases and constants stay
                stacks[name] = parameter.detach().clone()
                replace_tensor(module, name, nn.Parameter(stacks[name], requires_grad=False))
        for experts, adapters in zip(self.parts, self.adapters, strict=True):
            maps = linear_maps(self.layer, experts)
            for name, (weight, _) in maps.items():
                weight.copy_(adapters[name].weight(weight))  # type: ignore[index]
            if isinstance(experts, slice) and is_ragged(module):  # `maps` are copies
                for expert, width in enumerate(self.layer.widths):
                    inward, down = (weight[expert] for weight, _ in maps.values())
                    for role, view in self.layer.projections(expert).items():
                        view.copy_({**split(inward, GATE_UP), "down": down.mT}[role][:width])
        return stacks


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
            for name, parameter in module.named_parameters(path):
                if parameter.requires_grad:
                    parameters[part][name] = parameter
    return parameters


@torch.no_grad()
def merge(model: nn.Module, adapted: Adapted) -> dict[str, torch.Tensor]:
    """Merge the adapters into new weights, and put the original modules with these weights back
    into `model`. Returns name in the model's state dict -> new weight. UserError for a weight that
    is not finite."""
    merged_tensors: dict[str, torch.Tensor] = {}
    for path, experts in adapted["experts"].items():
        merged_tensors |= {f"{path}.{name}": tensor for name, tensor in experts.merge().items()}
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


def linear_maps(
    layer: MoELayer, experts: int | slice
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """The linear maps of one expert, or of all experts with a first axis of experts: inward (gate
    and up, in the order that the activation expects) and down -> (weight (..., out, in), bias
    (..., out) or None). {} for an expert without channels. The tensors are views into the experts
    module, but for all experts of unequal width."""
    weights = layer.weights(experts)
    if not weights.inward.numel():
        return {}
    return {
        "inward": (weights.inward, weights.inward_bias),
        "down": (weights.down, weights.down_bias),
    }
