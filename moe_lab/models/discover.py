"""Find the MoE layers of a model by the shape of its modules, and report why a model cannot be
handled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_lab.errors import UserError
from moe_lab.models.families import (
    DISK_SHARED,
    GATE_UP,
    ROUTERS,
    Family,
    family_of,
    split,
)
from moe_lab.models.transformers_private import activation

ATTENTION = ("attn", "attention")
"""Parts of the names of attention modules."""


@dataclass(frozen=True)
class RoutingTensor:
    """A tensor from which the router computes where tokens go. It has one row or entry per expert
    along `axis`."""

    module: nn.Module
    """The module that owns the tensor: the router, a child of it, or the MoE block."""
    name: str
    axis: int

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that `module` has now: pruning replaces it by a slice."""
        tensor: torch.Tensor = getattr(self.module, self.name)
        return tensor


@dataclass(frozen=True)
class Weights:
    """The weights of one expert, in the layout in which they are multiplied: views of the experts'
    stacks."""

    inward: torch.Tensor
    """(2 I, H), or (I, H) without a gate projection; rows in the order that the activation
    expects."""
    down: torch.Tensor
    """(H, I)."""
    inward_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.linear
    """Function that multiplies states (n, ...) with one of the weights."""
    spread: Callable[[torch.Tensor], torch.Tensor] = lambda bias: bias
    """Function from a bias to what is added to a product."""

    def linear(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The map with `weight` and `bias`, which are among these weights, of `states` (n, ...)."""
        product = self.product(states, weight)
        return product if bias is None else product + self.spread(bias)


@dataclass(frozen=True)
class MoELayer:
    """One decoder layer with routed experts."""

    family: Family
    name: str
    """Module path of the experts, such as model.layers.3.mlp.experts."""
    index: int
    """Number of the decoder layer."""
    experts: nn.Module
    router: nn.Module
    block: nn.Module
    n_experts: int
    top_k: int
    hidden: int
    widths: tuple[int, ...]
    """Channels of each expert."""
    n_group: int
    """Groups into which a group-limited router divides its experts; 1 for other routers."""
    topk_group: int
    """Groups that a token can be routed to; 1 if there are no groups."""
    routing: tuple[RoutingTensor, ...]
    """The tensors that pruning has to slice besides the experts' own weights."""

    @property
    def stack(self) -> str:
        """Module path of the list of all decoder layers, such as model.layers."""
        path = self.name.split(".")
        return ".".join(path[: path.index(str(self.index))])

    @property
    def width(self) -> int:
        """Number of channels of the widest expert."""
        return max(self.widths)

    def tensors(self, expert: int | slice) -> dict[str, torch.Tensor]:
        """Name of a tensor with the weights of all experts, such as gate_up_proj -> view of the
        part that belongs to one expert, or to a slice of experts. Not for ragged experts."""
        return {name: getattr(self.experts, name)[expert] for name in self.family.stacks}

    def projections(self, expert: int) -> dict[str, torch.Tensor]:
        """Role (gate, up, down, gate_bias, up_bias or down_bias) -> view of one expert's projection
        or bias. Every projection is (I, H), also that of down."""
        if is_ragged(self.experts):
            gate_up, down = self.experts.weights(expert)  # type: ignore[operator]
            return {**split(gate_up, GATE_UP), "down": down}
        return self.family.split(self.tensors(expert))

    def weights(
        self, expert: int | slice, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Weights:
        """The weights of one expert, or of a slice of experts. `tensors`: name -> tensor, by
        default those of `self.tensors(expert)`. Ignored for ragged experts, whose slice must be
        that of all experts: they are copied to one width."""
        if is_ragged(self.experts):
            experts: Any = self.experts
            inward, down = (
                experts.padded() if isinstance(expert, slice) else experts.weights(expert)
            )
            return Weights(inward, down.mT)
        if tensors is None:
            tensors = self.tensors(expert)
        # the first stack holds the projections before the activation
        inward_name = next(iter(self.family.stacks))
        inward = tensors[inward_name]
        down = tensors["down_proj"]
        # only transposed experts have channels along the last axis of the first stack
        if self.family.stacks[inward_name].channels == -1:
            inward = inward.mT
            down = down.mT
        return Weights(
            inward, down, tensors.get(f"{inward_name}_bias"), tensors.get("down_proj_bias")
        )

    def phi(self, states: torch.Tensor, weights: Weights) -> torch.Tensor:
        """phi (n, I), the input of an expert's down projection, for hidden states (n, H)."""
        return activation(self.experts)(weights.linear(states, weights.inward, weights.inward_bias))

    def output(self, phi: torch.Tensor, weights: Weights) -> torch.Tensor:
        """f (n, H), the output of an expert for `phi` (n, I), not multiplied by the gates."""
        return weights.linear(phi, weights.down, weights.down_bias)

    def expert_output(self, states: torch.Tensor, expert: int) -> torch.Tensor:
        """f (n, H), the output of `expert` for hidden states (n, H), not multiplied by the
        gates."""
        weights = self.weights(expert)
        return self.output(self.phi(states, weights), weights)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the parts that other processes hold, if a parallel plan of transformers has
    divided it. All processes must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_divided(layer: MoELayer) -> bool:
    """Whether a parallel plan of transformers has divided the experts over several processes."""
    return any(isinstance(weight, DTensor) for weight in layer.experts.parameters())


def check_in_memory(layer: MoELayer) -> None:
    """Raise UserError when weights of the layer are offloaded, as accelerate loads them only while
    their module runs, or divided over several processes."""
    if is_divided(layer):
        raise UserError(
            f"{layer.name}: weights are divided over processes by a parallel plan: expected all of "
            "them in this process, load the model without the plan"
        )
    if any(weight.is_meta for weight in layer.block.parameters()):
        raise UserError(
            f"{layer.name}: weights are offloaded: expected them in memory, load the model without "
            "offloading"
        )


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """All layers of `model` with routed experts, in decoder order. UserError for a model that is
    not supported, and for ragged experts."""
    layers = routed_layers(model)
    for layer in layers:
        if is_ragged(layer.experts):
            raise UserError(
                f"model_type={_model_type(model)} can be evaluated, but neither scored nor pruned: "
                f"{layer.name} is not a stack of experts of one width"
            )
    return layers


def routed_layers(model: nn.Module) -> list[MoELayer]:
    """All layers of `model` with routed experts, also ragged ones, in decoder order. UserError for
    a model that is not supported."""
    kind = _model_type(model)
    names = [name for name, module in model.named_modules() if is_experts(module)]
    reason = None
    config = _text_config(model)
    # hyper-connections
    streams = getattr(config, "hc_mult", 1)
    if streams > 1:
        reason = f"keeps hc_mult={streams} residual streams, and statistics are of one"
    # transformers has this field if some decoder layers run several times
    runs = getattr(config, "total_num_hidden_layers", None)
    if runs is not None and runs != config.num_hidden_layers:
        reason = (
            f"runs {runs} decoder layers with the weights of {config.num_hidden_layers}, and "
            "statistics are of one run of a layer"
        )
    if not names:
        parts = [name.rpartition(".")[2] for name, _ in model.named_modules()]
        reason = "has no routed experts"
        if any(part == "experts" or "router" in part for part in parts):
            reason = (
                "does not hand its experts to transformers' experts registry, so moe_lab cannot "
                "observe or prune them"
            )
    if reason is not None:
        raise UserError(f"model_type={kind} is not supported: it {reason}")
    layers = [_moe_layer(model, name, kind) for name in names]
    indices = [layer.index for layer in layers]
    if len(set(indices)) != len(indices):
        raise UserError(
            f"model_type={kind} is not supported: it has several experts modules in one decoder "
            "layer"
        )
    return sorted(layers, key=lambda layer: layer.index)


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds the routed experts of a layer."""
    # the decorator @use_experts_implementation of transformers sets these attributes; ragged
    # experts set them themselves
    attributes = ("is_concatenated", "is_transposed", "has_gate")
    return all(hasattr(module, name) for name in attributes)


def is_ragged(module: nn.Module) -> bool:
    """Whether the experts are ragged: of unequal width, packed into two matrices."""
    return hasattr(module, "gate_up_packed")


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _text_config(model: nn.Module) -> Any:
    """The configuration of the text part of a model, which has a model_type of its own if the model
    also reads images. None for a module without configuration."""
    config: Any = getattr(model, "config", None)
    return config and config.get_text_config()


def _moe_layer(model: nn.Module, name: str, kind: str) -> MoELayer:
    """The MoE layer whose experts module has the path `name`. `kind`: model_type."""
    experts = model.get_submodule(name)
    block = model.get_submodule(name.rpartition(".")[0])

    def refusal(reason: str) -> UserError:
        return UserError(f"model_type={kind} is not supported: {name} {reason}")

    numbers = [part for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise refusal("is not in a numbered decoder layer")
    if name.split(".")[-2:-1] == numbers:
        raise refusal("is not in a MoE block, but beside a dense block of its decoder layer")
    family = family_of(getattr(_text_config(model), "model_type", kind))
    widths, hidden = _widths_and_hidden(experts, family, refusal)
    n_experts = len(widths)
    routers = [
        child
        for attribute in ROUTERS
        if isinstance(child := getattr(block, attribute, None), nn.Module)
    ]
    if len(routers) != 1:
        raise refusal(
            f"has {len(routers)} routers beside it instead of one named {' or '.join(ROUTERS)}"
        )
    router = routers[0]
    top_k = getattr(router, "top_k", None)
    if not (isinstance(top_k, int) and 1 <= top_k <= n_experts):
        raise refusal(f"has a router that gives a token {top_k} of {n_experts} experts")
    n_group, topk_group = _group_counts(router)
    return MoELayer(
        family=family,
        name=name,
        index=int(numbers[0]),
        experts=experts,
        router=router,
        block=block,
        n_experts=n_experts,
        top_k=top_k,
        hidden=hidden,
        widths=widths,
        n_group=n_group,
        topk_group=topk_group,
        routing=_routing_tensors(router, block, n_experts, refusal),
    )


def _widths_and_hidden(experts: Any, family: Family, refusal: Any) -> tuple[tuple[int, ...], int]:
    """(number of channels of each expert, hidden size). `refusal`: a function from a reason to an
    error."""
    if is_ragged(experts):
        return tuple(experts.widths), experts.down_packed.shape[1]
    # the first stack holds the projections before the activation
    inward_axes = next(iter(family.stacks.values()))
    expected = {
        "is_transposed": inward_axes.channels == -1,
        "is_concatenated": not inward_axes.interleaved,
        "has_gate": "gate" in inward_axes.roles,
        "has_bias": "down_bias" in family.roles,
        "has_post_expert_norm": False,
    }
    if any(getattr(experts, name, False) != value for name, value in expected.items()):
        raise refusal(
            f"({type(experts).__name__}) has experts of a form that moe_lab does not know"
        )
    down = getattr(experts, "down_proj", None)
    if not isinstance(down, torch.Tensor) or down.dim() != 3:
        raise refusal("is not a stack of experts (experts, rows, columns)")
    count = down.shape[0]
    for name, tensor in experts.named_parameters():
        if tensor.dim() < 2 or tensor.shape[0] != count:
            raise refusal(
                f"holds {name} {tuple(tensor.shape)}, which has no first axis of {count} experts"
            )
    # `down` is (E, I, H) if experts are transposed, otherwise (E, H, I)
    width, hidden = down.shape[1:] if experts.is_transposed else (down.shape[2], down.shape[1])
    return (width,) * count, hidden


def _group_counts(router: nn.Module) -> tuple[int, int]:
    """(number of groups of experts, number of groups that a token can be routed to) of a router;
    (1, 1) without groups."""
    n_group: Any = getattr(router, "num_group", None) or 1
    topk_group: Any = getattr(router, "topk_group", None) or 1
    # DeepSeek-V2-Lite states groups, which its method ignores
    if n_group == 1 or getattr(router, "topk_method", None) == "greedy":
        return 1, 1
    return int(n_group), int(topk_group)


def _routing_tensors(
    router: nn.Module, block: nn.Module, n_experts: int, refusal: Any
) -> tuple[RoutingTensor, ...]:
    """All tensors of the router, and those of the block outside its submodules. `refusal`: a
    function from a reason to an error.

    The name of a tensor decides which axis is that of experts, because the number of experts may
    equal the hidden size."""
    routing: list[RoutingTensor] = []
    for owner in (*router.modules(), block):
        for name, tensor in [
            *owner.named_parameters(recurse=False),
            *owner.named_buffers(recurse=False),
        ]:
            shape = tuple(tensor.shape)
            if (
                name == "weight"
                and owner is not block
                and len(shape) == 2
                and shape[0] == n_experts
            ):
                routing.append(RoutingTensor(owner, name, 0))
            elif name.endswith("bias") and shape in ((n_experts,), (1, n_experts)):
                routing.append(RoutingTensor(owner, name, len(shape) - 1))
            else:
                raise refusal(f"is routed by {name} {shape}, a tensor moe_lab does not know")
    if (weights := sum(part.name == "weight" for part in routing)) != 1:
        raise refusal(f"has a router with {weights} weights of one row per expert instead of one")
    return tuple(routing)


def part_of(model: nn.Module, name: str) -> str:
    """The part of `model` to which its module or tensor `name` belongs: experts, shared_experts,
    attention or rest."""
    path = name.split(".")
    # outside the numbered decoder layers, such as embeddings
    if not any(name_part.isdigit() for name_part in path):
        return "rest"
    if "experts" in path:
        return "experts"
    # the names in DISK_SHARED end in a dot
    if any(f"{name_part}." in DISK_SHARED for name_part in path):
        return "shared_experts"
    owner: Any = model
    for name_part in path:
        owner = getattr(owner, name_part)
        # hybrids call all modules that mix tokens alike, such as `mixer`
        is_attention = type(owner).__name__.endswith("Attention")
        if is_attention or any(mark in name_part for mark in ATTENTION):
            return "attention"
    return "rest"


def linear_modules(model: nn.Module, part: str) -> Iterator[tuple[str, nn.Linear]]:
    """(path, module) of each nn.Linear in `part`, which is shared_experts or attention. Gates of
    shared experts, which have a single output, are left out."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.out_features > 1 and part_of(model, name) == part:
            yield name, module
