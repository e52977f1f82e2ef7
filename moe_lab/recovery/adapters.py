"""Put DoRA adapters of peft on a model's MoE blocks (routed experts, shared experts, routers), and merge them into its
tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import (
    MoELayer,
    decoder_layer,
    is_ragged,
    linears,
    post_expert_norm,
    routed_layers,
)
from moe_lab.models.experts import routed_output, sort_by_expert
from moe_lab.models.transformers_private import activation
from moe_lab.pruning.exported_code.ragged import constant_output, replace_tensor
from moe_lab.recovery.settings import peft

Projection = tuple[str, torch.Tensor, torch.Tensor | None]
"""Name (gate, up or down), weight (out, in), bias (out,) or None: views of the tensors of an experts module."""


@dataclass(frozen=True)
class Adapted:
    """One MoE layer with adapters on it."""

    layer: MoELayer
    unfused: UnfusedExperts
    router: nn.Module | None
    """The module that owns the router's weight, parametrised; None if routers are not adapted."""
    shared: nn.ModuleDict
    """The adapted linear maps of the layer's shared experts; empty if it has none, or they are not adapted."""
    plain: dict[str, nn.Linear]
    """Path -> the original map that each of `shared` replaces, in the same order."""


def attach(model: nn.Module, settings: RecoveryConfig, seed: int) -> list[Adapted]:
    """Put DoRA adapters on the MoE blocks of `model`, in place; everything else is frozen.

    They are put on all routed experts, on shared experts unless recovery.shared_experts=false, and on routers unless
    recovery.router_rank=0. At first they do not change the output of the model.

    peft's adapters for bare parameters have no DoRA (0.21 refuses use_dora there). So experts are split into linear
    maps on the same memory, and a router's weight is parametrised by an adapted linear map. `seed` determines the
    random first matrix of each adapter.
    """
    model.requires_grad_(False)
    adapted = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in routed_layers(model):
            unfused = UnfusedExperts(layer.experts, layer.n_experts)
            _inject(unfused, ["gate", "up", "down"], settings.rank, settings.scaling, settings.dropout)
            model.set_submodule(layer.name, unfused)
            router = _adapt_router(layer, settings) if settings.router_rank else None
            plain = _shared(model, layer.index) if settings.shared_experts else {}
            adapted.append(Adapted(layer, unfused.train(), router, _adapt_shared(model, plain, settings), plain))
    return adapted


def _shared(model: nn.Module, layer: int) -> dict[str, nn.Linear]:
    """Path -> linear map, of the shared experts of one decoder layer."""
    shared = linears(model, "shared_experts")
    return {name: module for name, module in shared if decoder_layer(name) == layer}


def _adapt_shared(model: nn.Module, plain: Mapping[str, nn.Linear], settings: RecoveryConfig) -> nn.ModuleDict:
    """Replace the `plain` linear maps of `model` by adapted ones on the same memory, and return these."""
    maps = nn.ModuleDict({str(at): linear_on(map.weight, map.bias) for at, map in enumerate(plain.values())})
    if plain:
        _inject(maps, list(maps), settings.rank, settings.scaling, settings.dropout)
    for name, adapted in zip(plain, maps.values(), strict=True):
        model.set_submodule(name, adapted)
    return maps.train()


def _adapt_router(layer: MoELayer, settings: RecoveryConfig) -> nn.Module:
    owner = router_weight(layer)
    effective = EffectiveWeight(owner.weight)  # type: ignore[arg-type]
    # no dropout: inputs of this map are unit vectors, and dropping one would remove a column of the weight
    _inject(effective, ["map"], settings.router_rank, settings.scaling, dropout=0.0)
    parametrize.register_parametrization(owner, "weight", effective, unsafe=True)
    return owner


def router_weight(layer: MoELayer) -> nn.Module:
    """The module, the router or a child of it, whose `weight` has one row per expert."""
    for module in layer.router.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and len(weight) == layer.n_experts:
            return module
    raise UserError(f"the router beside {layer.name} has no weight of one row per expert: use recovery.router_rank=0")


def _inject(module: nn.Module, targets: list[str], rank: int, scaling: float, dropout: float) -> None:
    adapter = peft().LoraConfig(
        r=rank, lora_alpha=rank * scaling, lora_dropout=dropout, target_modules=targets, use_dora=True
    )
    peft().inject_adapter_in_model(adapter, module)
    for parameter in module.parameters():
        if parameter.requires_grad:  # in the dtype of the weights, small steps would be rounded away
            parameter.data = parameter.data.float()


def trainable(layers: list[Adapted]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters to train: {"experts": name -> parameter, "routers": ..., "shared_experts": ...}.

    Names are the same in every run.
    """
    parameters: dict[str, dict[str, nn.Parameter]] = {"experts": {}, "routers": {}, "shared_experts": {}}
    for adapted in layers:
        modules = {"experts": adapted.unfused, "routers": adapted.router, "shared_experts": adapted.shared}
        for part, module in modules.items():
            if module is None:
                continue
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameters[part][f"{part}.{adapted.layer.index}.{name}"] = parameter
    return parameters


@torch.no_grad()
def merge(model: nn.Module, layers: list[Adapted]) -> dict[str, torch.Tensor]:
    """Merge the adapters into new tensors, and put the original modules, which hold these, back into `model`.

    The old tensors, which other models may share, are not written to. Returns the new tensors by their names in the
    model's state dict. UserError naming layer and expert when one is not finite.
    """
    changed: dict[str, torch.Tensor] = {}
    for adapted in layers:
        layer, router = adapted.layer, adapted.router
        _fuse(adapted)
        model.set_submodule(layer.name, layer.experts)
        for name in _weights(layer.experts):
            changed[f"{layer.name}.{name}"] = getattr(layer.experts, name).detach()
        if router is not None:
            merged = router.weight.detach().clone(memory_format=torch.contiguous_format)  # type: ignore[operator]
            parametrize.remove_parametrizations(router, "weight", leave_parametrized=False)
            replace_tensor(router, "weight", nn.Parameter(merged, requires_grad=False))
            name = next(name for name, module in model.named_modules() if module is router)
            changed[f"{name}.weight"] = merged
        for (name, plain), adapter in zip(adapted.plain.items(), adapted.shared.values(), strict=True):
            merged = _merged(adapter, f"{name} in layer {layer.index}").clone()
            replace_tensor(plain, "weight", nn.Parameter(merged, requires_grad=False))
            model.set_submodule(name, plain)
            changed[f"{name}.weight"] = merged
    return changed


def _fuse(adapted: Adapted) -> None:
    """Give the experts module of a layer new tensors, with the merged linear maps written into them."""
    module = adapted.layer.experts
    for name in _weights(module):
        copied = getattr(module, name).detach().clone()
        replace_tensor(module, name, nn.Parameter(copied, requires_grad=False))
    for expert, maps in enumerate(adapted.unfused.maps):
        for name, weight, _ in projections(module, expert):
            adapter = maps[name]  # type: ignore[index]
            weight.copy_(_merged(adapter, f"{name} of expert {expert} in layer {adapted.layer.index}"))


def _merged(adapter: Any, what: str) -> torch.Tensor:
    """Merge an adapted map and return its weight. UserError naming `what` it belongs to when it is not finite."""
    adapter.merge()
    weight: torch.Tensor = adapter.get_base_layer().weight.detach()
    if not bool(weight.isfinite().all()):
        raise UserError(f"fine-tuning made {what} not finite: lower recovery.learning_rate")
    return weight


def _weights(experts: nn.Module) -> list[str]:
    """Names of the stacks of weights of an experts module; biases and constants are not adapted."""
    names = [name for name, _ in experts.named_parameters(recurse=False)]
    return [name for name in names if not name.endswith("_bias") and name != "constants"]


def projections(experts: Any, expert: int) -> Iterator[Projection]:
    """The linear maps of one expert, as views of the memory of its stacked or ragged module.

    Writing to them writes to the module. Nothing for an expert without channels.
    """
    if is_ragged(experts):
        gate_up, down = experts.weights(expert)
        if len(down):
            yield from _halves(gate_up, None, interleaved=False)
            yield "down", down.T, None
        return
    if experts.has_gate:
        weight, bias = _projection(experts, "gate_up_proj", expert)
        yield from _halves(weight, bias, interleaved=not experts.is_concatenated)
    else:
        yield "up", *_projection(experts, "up_proj", expert)
    yield "down", *_projection(experts, "down_proj", expert)


def _projection(experts: Any, name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return (weight.T if experts.is_transposed else weight), bias


def _halves(weight: torch.Tensor, bias: torch.Tensor | None, *, interleaved: bool) -> Iterator[Projection]:
    """Split one tensor into gate and up projection: its two halves, or its alternating rows if `interleaved`."""
    half = len(weight) // 2
    rows = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    for name, part in zip(("gate", "up"), rows, strict=True):
        yield name, weight[part], None if bias is None else bias[part]


class UnfusedExperts(nn.Module):
    """Replaces the experts module of a layer by linear maps on the same memory, so that adapters can be put on them.

    It computes the same function. `maps[e]` holds the maps of expert e by name.
    """

    def __init__(self, experts: Any, count: int) -> None:
        """Split the `count` experts of `experts`, which is kept for its activation, but not as a submodule."""
        super().__init__()
        self.__dict__["original"] = experts
        self.maps = nn.ModuleList()
        for expert in range(count):
            maps = nn.ModuleDict()
            for name, weight, bias in projections(experts, expert):
                maps[name] = linear_on(weight, bias)
            self.maps.append(maps)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Gated sum (T, H) of the outputs of experts `top_k_index` (T, K) with gates `top_k_weights` (T, K)."""

        def of_expert(expert: int, _: slice, states: torch.Tensor) -> torch.Tensor | None:
            return self._expert(expert, states) if len(self.maps[expert]) else None  # type: ignore[arg-type]

        original: Any = self.__dict__["original"]
        index = top_k_index
        if is_ragged(original):  # merged experts are computed with the maps of their owner
            index = torch.tensor(original.owners, device=index.device)[index]
        rows = sort_by_expert(index, len(self.maps))
        mixed = routed_output(hidden_states, rows, top_k_weights, of_expert)
        if is_ragged(original) and original.constants is not None:
            arguments = (top_k_index, top_k_weights, original.num_experts, original.null, original.constants)
            mixed = mixed + constant_output(*arguments)
        return mixed

    def _expert(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output (n, H) of one expert for its rows (n, H) of the hidden states, before the gate."""
        maps: Any = self.maps[expert]
        experts: Any = self.__dict__["original"]
        if not experts.has_gate:
            phi = experts.act_fn(maps["up"](hidden))
        else:
            halves = maps["gate"](hidden), maps["up"](hidden)
            joined = torch.cat(halves, -1) if experts.is_concatenated else torch.stack(halves, -1).flatten(-2)
            phi = activation(experts)(joined)
        output: torch.Tensor = maps["down"](phi)
        norm = post_expert_norm(experts)
        return output if norm is None else norm(output)


class EffectiveWeight(nn.Module):
    """Parametrises a router's weight by an adapted linear map, which works for every formula of a router."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.map = linear_on(weight, None)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight (E, H): outputs of `map`, which shares the memory of `weight`, for the unit vectors."""
        effective: torch.Tensor = self.map(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))
        return effective.T


def linear_on(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A frozen linear map on the memory of `weight` (out, in) and `bias`."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
