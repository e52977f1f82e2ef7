"""Experts of unequal width, packed one after the other into two matrices, and how a layer's tensors
are replaced.

Needs nothing but torch: this file lies beside the weights of exported checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

COUNTS = ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts", "out_features")
"""Attributes of modules that hold the number of experts of a layer."""


class RaggedExperts(nn.Module):
    """Takes the place of a family's own experts module, for gated experts without biases; each has
    its own width. `gate_up_packed` (sum of 2 I_e, H) holds, expert after expert, I_e rows of the
    gate projection and I_e rows of the up projection, `down_packed` (sum of I_e, H) the transposed
    down projections. An expert of width 0 gives the output of its owner, if that is another one.
    The N others give 0 or their row of `constants` (N, H), if there are any."""

    # marks experts; a search for stacked ones refuses it
    is_concatenated, is_transposed, has_gate = True, False, True

    constants: nn.Parameter | None

    def __init__(
        self,
        experts: nn.Module,
        widths: Sequence[int],
        constants: bool = False,
        owners: Sequence[int] | None = None,
    ) -> None:
        """Room for experts of `widths` (E',), uninitialised, with the activation, dtype and device
        of `experts`. `owners` (E',): whose weights each expert is computed with; None for its
        own."""
        super().__init__()
        self.widths = tuple(widths)
        self.num_experts = len(self.widths)
        ends = accumulate(self.widths)
        # of down_packed
        self.spans = [slice(end - width, end) for end, width in zip(ends, self.widths, strict=True)]
        family: Any = copy.copy(experts)
        family._parameters = {}  # the activation needs its settings, not its weights
        self._apply_gate = family._apply_gate
        down: Any = experts.down_proj  # (E, H, I)
        self.gate_up_packed = nn.Parameter(
            down.new_empty(2 * sum(self.widths), down.shape[1]), down.requires_grad
        )
        self.down_packed = nn.Parameter(
            down.new_empty(sum(self.widths), down.shape[1]), down.requires_grad
        )
        self.owners = tuple(range(self.num_experts)) if owners is None else tuple(owners)
        self.null = [e for e, owner in enumerate(self.owners) if owner == e and not self.widths[e]]
        self.constants = None
        if constants:
            self.constants = nn.Parameter(
                down.new_empty(len(self.null), down.shape[1]), down.requires_grad
            )

    def weights(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up (2 I_e, H) and transposed down (I_e, H) projection of one expert: views of
        the packed ones."""
        span = self.spans[expert]
        return self.gate_up_packed[2 * span.start : 2 * span.stop], self.down_packed[span]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Gated sum (T, H) of the outputs of experts `top_k_index` (T, K) with gates
        `top_k_weights` (T, K), added in the order of the eager forward of transformers."""
        expert, order = torch.sort(top_k_index.t().reshape(-1), stable=True)
        token = order % len(hidden_states)
        gates = top_k_weights.t().reshape(-1)[order, None]
        mixed = torch.zeros_like(hidden_states)
        start = 0
        for e, end in enumerate(
            torch.bincount(expert, minlength=self.num_experts).cumsum(0).tolist()
        ):
            owner = self.owners[e]
            if end > start and self.widths[owner]:
                gate_up, down = self.weights(owner)
                rows = token[start:end]
                phi = self._apply_gate(linear(hidden_states[rows], gate_up))
                mixed.index_add_(0, rows, ((phi @ down) * gates[start:end]).to(mixed.dtype))
            start = end
        if self.constants is not None:
            mixed += constant_output(
                top_k_index, top_k_weights, self.num_experts, self.null, self.constants
            )
        return mixed


def constant_output(
    index: torch.Tensor,
    gates: torch.Tensor,
    n_experts: int,
    experts: Sequence[int],
    constants: torch.Tensor,
) -> torch.Tensor:
    """What `experts` (N) that put out `constants` (N, H) add to the routed output (T, H): the sum
    of g_j c_j. `index` and `gates` (T, K): the experts of each token, of `n_experts`, and their
    gates."""
    spread = gates.new_zeros(len(index), n_experts).scatter_add_(1, index, gates)
    return (spread[:, experts] @ constants.to(gates.dtype)).to(constants.dtype)


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer of `module` by `tensor`, whose shape may differ."""
    if name not in module._parameters:
        module._buffers[name] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, getattr(module, name).requires_grad)


def count_attributes(module: nn.Module, n_experts: int) -> list[str]:
    """Names of a module's own attributes that hold its number of experts, such as `out_features` of
    a router."""
    return [name for name in COUNTS if vars(module).get(name) == n_experts]


def set_counts(modules: Iterable[nn.Module], before: int, after: int) -> None:
    """Set the number of experts that modules hold."""
    for module in modules:
        for name in count_attributes(module, before):
            setattr(module, name, after)
