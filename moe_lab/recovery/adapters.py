"""DoRA adapters of peft on a model's MoE blocks (routed experts, shared experts, routers), and their way back into its
tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import decoder_layer, linears
from moe_lab.pruning.prune import replace_tensor
from moe_lab.recovery.imports import peft
from moe_lab.recovery.parts import Experts, experts_of
from moe_lab.recovery.unfused import EffectiveWeight, UnfusedExperts, linear_on, projections


@dataclass(frozen=True)
class Adapted:
    """One MoE layer with adapters on it."""

    experts: Experts
    unfused: UnfusedExperts
    router: nn.Module | None
    """The module that owns the router's weight, parametrised; None where routers are left alone."""
    shared: nn.ModuleDict
    """The adapted linear maps of the layer's shared experts; empty where it has none, or they are left alone."""
    plain: dict[str, nn.Linear]
    """Path -> the map that each of `shared` stands in for, in the same order."""


def attach(model: nn.Module, settings: RecoveryConfig, seed: int) -> list[Adapted]:
    """Put DoRA adapters on all routed experts of `model`, on its shared experts unless recovery.shared_experts=false,
    and on its routers unless recovery.router_rank=0, in place; everything else is frozen. They start as the identity:
    the model computes what it did.

    peft's adapters for bare parameters have no DoRA (0.21 refuses use_dora there), so experts are taken apart into
    linear maps on the same memory, and a router's weight becomes what its adapted map stands for. `seed` draws the
    first of an adapter's two matrices.
    """
    model.requires_grad_(False)
    layers = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for experts in experts_of(model):
            unfused = UnfusedExperts(experts.module, experts.count)
            _inject(unfused, ["gate", "up", "down"], settings.rank, settings.scaling, settings.dropout)
            _put(model, experts.name, unfused)
            router = _adapt_router(experts, settings) if settings.router_rank else None
            plain = _shared(model, experts.layer) if settings.shared_experts else {}
            layers.append(Adapted(experts, unfused.train(), router, _adapt_shared(model, plain, settings), plain))
    return layers


def _shared(model: nn.Module, layer: int) -> dict[str, nn.Linear]:
    """Path -> linear map, of the shared experts of one decoder layer."""
    found = linears(model, "shared_experts")
    return {name: module for name, module in found if decoder_layer(name) == layer}


def _adapt_shared(model: nn.Module, plain: Mapping[str, nn.Linear], settings: RecoveryConfig) -> nn.ModuleDict:
    """Adapted maps on the memory of the `plain` ones, put into their places in `model`."""
    maps = nn.ModuleDict({str(at): linear_on(map.weight, map.bias) for at, map in enumerate(plain.values())})
    if plain:
        _inject(maps, list(maps), settings.rank, settings.scaling, settings.dropout)
    for name, adapted in zip(plain, maps.values(), strict=True):
        _put(model, name, adapted)
    return maps.train()


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


def _adapt_router(experts: Experts, settings: RecoveryConfig) -> nn.Module:
    owner = router_weight(experts)
    effective = EffectiveWeight(owner.weight)  # type: ignore[arg-type]
    # no dropout: inputs of this map are unit vectors, and dropping one would take a column out of the weight
    _inject(effective, ["map"], settings.router_rank, settings.scaling, dropout=0.0)
    parametrize.register_parametrization(owner, "weight", effective, unsafe=True)
    return owner


def router_weight(experts: Experts) -> nn.Module:
    """The module, the router or a child of it, whose `weight` has one row per expert."""
    for module in experts.router.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and len(weight) == experts.count:
            return module
    raise UserError(f"the router beside {experts.name} has no weight of one row per expert: use recovery.router_rank=0")


def _inject(module: nn.Module, targets: list[str], rank: int, scaling: float, dropout: float) -> None:
    adapter = peft().LoraConfig(
        r=rank, lora_alpha=rank * scaling, lora_dropout=dropout, target_modules=targets, use_dora=True
    )
    peft().inject_adapter_in_model(adapter, module)
    for parameter in module.parameters():
        if parameter.requires_grad:  # in the dtype of the weights, small steps would be rounded away
            parameter.data = parameter.data.float()


def trainable(layers: list[Adapted]) -> dict[str, dict[str, nn.Parameter]]:
    """{"experts": name -> parameter, "routers": ..., "shared_experts": ...}: what is trained, by names that are the
    same in every run."""
    found: dict[str, dict[str, nn.Parameter]] = {"experts": {}, "routers": {}, "shared_experts": {}}
    for layer in layers:
        for part, module in (("experts", layer.unfused), ("routers", layer.router), ("shared_experts", layer.shared)):
            for name, parameter in module.named_parameters() if module is not None else ():
                if parameter.requires_grad:
                    found[part][f"{part}.{layer.experts.layer}.{name}"] = parameter
    return found


@torch.no_grad()
def merge(model: nn.Module, layers: list[Adapted]) -> dict[str, torch.Tensor]:
    """Put the original modules back into `model`, with the adapters' effect in new tensors; the old ones, which other
    models may share, are not written to. Returns the new ones by their names in the model's state dict.

    UserError naming layer and expert when one is not finite.
    """
    changed: dict[str, torch.Tensor] = {}
    for layer in layers:
        experts = layer.experts
        _fuse(layer)
        _put(model, experts.name, experts.module)
        changed |= {
            f"{experts.name}.{name}": getattr(experts.module, name).detach() for name in _weights(experts.module)
        }
        if layer.router is not None:
            merged = layer.router.weight.detach().clone(memory_format=torch.contiguous_format)  # type: ignore[operator]
            parametrize.remove_parametrizations(layer.router, "weight", leave_parametrized=False)
            replace_tensor(layer.router, "weight", nn.Parameter(merged, requires_grad=False))
            name = next(name for name, module in model.named_modules() if module is layer.router)
            changed[f"{name}.weight"] = merged
        for (name, plain), adapter in zip(layer.plain.items(), layer.shared.values(), strict=True):
            merged = _merged(adapter, f"{name} in layer {experts.layer}").clone()
            replace_tensor(plain, "weight", nn.Parameter(merged, requires_grad=False))
            _put(model, name, plain)
            changed[f"{name}.weight"] = merged
    return changed


def _fuse(layer: Adapted) -> None:
    """Give the experts module of a layer new tensors, with the merged linear maps written into them."""
    module = layer.experts.module
    for name in _weights(module):
        copied = getattr(module, name).detach().clone()
        replace_tensor(module, name, nn.Parameter(copied, requires_grad=False))
    for expert, maps in enumerate(layer.unfused.maps):
        for name, weight, _ in projections(module, expert):
            adapter = maps[name]  # type: ignore[index]
            weight.copy_(_merged(adapter, f"{name} of expert {expert} in layer {layer.experts.layer}"))


def _merged(adapter: Any, what: str) -> torch.Tensor:
    """The weight that an adapted map stands for. UserError naming `what` it is of when that is not finite."""
    adapter.merge()
    weight: torch.Tensor = adapter.get_base_layer().weight.detach()
    if not bool(weight.isfinite().all()):
        raise UserError(f"fine-tuning made {what} not finite: lower recovery.learning_rate")
    return weight


def _weights(experts: nn.Module) -> list[str]:
    """Names of the stacks of weights of an experts module; biases are not adapted."""
    return [name for name, _ in experts.named_parameters(recurse=False) if not name.endswith("_bias")]
