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

COUNT_ATTRIBUTES = (
    "n_routed_experts",
    "moe_num_experts",
    "num_local_experts",
    "num_experts",
    "out_features",
)
"""Attributes of modules that hold the number of experts of a layer."""
ALIGNMENT = 8
"""Numbers. torch's grouped_mm takes rows of a multiple of 16 bytes."""


class RaggedExperts(nn.Module):
    """Gated experts without biases, each with its own width I_e.

    `gate_up_packed` (sum of 2 I_e, H): for each expert, I_e rows of the gate projection, then I_e
    rows of the up projection. `down_packed` (sum of I_e, H): the transposed down projections.

    An expert of width 0 may have another expert as its owner: then its output is computed with the
    weights of the owner. Otherwise it is a null expert. `constants` (N, H) has the outputs of
    the N null experts; if `constants` is None, these outputs are 0.

    With the experts implementation grouped_mm of transformers, all experts are computed at once.
    Their weights are padded for this in each call, which takes memory for as many experts of the
    largest width, but only while the layer is computed.
    """

    # attributes by which experts are recognised
    is_concatenated, is_transposed, has_gate = True, False, True

    constants: nn.Parameter | None

    def __init__(
        self,
        experts: nn.Module,
        widths: Sequence[int],
        constants: bool = False,
        owners: Sequence[int] | None = None,
    ) -> None:
        """Create uninitialised experts. `experts`: the module to replace, which gives activation,
        dtype and device. `widths` (E',): width of each new expert. `constants`: whether null
        experts have outputs other than 0. `owners` (E',): for each new expert, the number of its
        owner."""
        super().__init__()
        self.config: Any = experts.config
        self.widths = tuple(widths)
        self.num_experts = len(self.widths)
        ends = accumulate(self.widths)
        # the rows of each expert in down_packed
        self.spans = [slice(end - width, end) for end, width in zip(ends, self.widths, strict=True)]
        # `_apply_gate` needs the settings of the replaced module, but not its weights
        without_weights: Any = copy.copy(experts)
        without_weights._parameters = {}
        self._apply_gate = without_weights._apply_gate
        down: Any = experts.down_proj  # (E, H, I)
        self.gate_up_packed = nn.Parameter(
            down.new_empty(2 * sum(self.widths), down.shape[1]), down.requires_grad
        )
        self.down_packed = nn.Parameter(
            down.new_empty(sum(self.widths), down.shape[1]), down.requires_grad
        )
        self.owners = tuple(range(self.num_experts)) if owners is None else tuple(owners)
        self.null_experts = [
            e for e, owner in enumerate(self.owners) if owner == e and not self.widths[e]
        ]
        self.constants = None
        if constants:
            self.constants = nn.Parameter(
                down.new_empty(len(self.null_experts), down.shape[1]), down.requires_grad
            )

    def weights(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate and up projection (2 I_e, H), transposed down projection (I_e, H)) of one expert,
        as views of the packed tensors."""
        span = self.spans[expert]
        return self.gate_up_packed[2 * span.start : 2 * span.stop], self.down_packed[span]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The output (T, H): for each token, the sum of gate times output over its K experts.
        `top_k_index` (T, K) has the numbers of the experts, `top_k_weights` (T, K) their gates."""
        # for a few tokens, as in generation, it takes longer to pad all weights
        is_large = top_k_index.numel() >= self.num_experts and not hidden_states.is_cpu
        if is_large and self.config._experts_implementation == "grouped_mm":
            owners = on_device(self.owners, top_k_index.device)
            experts: Any = copy.copy(self._apply_gate.__self__)  # the replaced module
            gate_up, down = self.padded()
            experts._parameters = {"gate_up_proj": gate_up, "down_proj": down.mT}
            experts.num_experts = self.num_experts
            output = experts.forward(hidden_states, owners[top_k_index], top_k_weights)
        else:
            output = self._sequential_output(hidden_states, top_k_index, top_k_weights)
        return self.with_constants(output, top_k_index, top_k_weights)

    def with_constants(
        self, output: torch.Tensor, index: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """`output` (T, H) plus the gated outputs of null experts. `index` and `gates`, (T, K): as
        in `forward`."""
        if self.constants is None:
            return output
        return output + constant_output(
            index, gates, self.num_experts, self.null_experts, self.constants
        )

    def _sequential_output(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The output (T, H) without constants, one expert after the other. The summands are added
        in the same order as in the eager forward of transformers."""
        # All pairs of a token and one of its experts, sorted by expert. Before sorting, the T first
        # experts come first, then the T second experts, ...: pair i belongs to token i modulo T.
        experts, order = torch.sort(top_k_index.t().reshape(-1), stable=True)
        tokens = order % len(hidden_states)
        gates = top_k_weights.t().reshape(-1)[order, None]
        output = torch.zeros_like(hidden_states)
        counts = torch.bincount(experts, minlength=self.num_experts)
        ends = counts.cumsum(0).tolist()  # ordered: integers
        start = 0
        for owner, end in zip(self.owners, ends, strict=True):
            if end > start and self.widths[owner]:
                gate_up, down = self.weights(owner)
                rows = tokens[start:end]
                activations = self._apply_gate(linear(hidden_states[rows], gate_up))
                output.index_add_(  # ordered: an expert has a token once
                    0, rows, ((activations @ down) * gates[start:end]).to(output.dtype)
                )
            start = end
        return output

    def padded(self) -> list[torch.Tensor]:
        """[gate and up projections (E', 2 W, H), transposed down projections (E', W, H)] with
        weights of 0 after the channels of an expert. W is the largest width, rounded up to a
        multiple of ALIGNMENT."""
        widths = on_device(self.widths, self.down_packed.device)
        width = -(-max(1, *self.widths) // ALIGNMENT) * ALIGNMENT
        is_channel = torch.arange(width, device=widths.device) < widths[:, None]
        stacks = []
        for packed, parts in ((self.gate_up_packed, 2), (self.down_packed, 1)):
            is_row = is_channel.repeat(1, parts)
            # with the number of rows given, a GPU is not waited for
            rows = is_row.flatten().nonzero_static(size=len(packed))[:, 0]
            stack = packed.new_zeros(is_row.numel(), packed.shape[1]).index_copy(0, rows, packed)
            stacks.append(stack.view(*is_row.shape, -1))
        return stacks


def on_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The integers `numbers`, also nested, as a tensor on `device`, which is not waited for."""
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=True)


def constant_output(
    index: torch.Tensor,
    gates: torch.Tensor,
    n_experts: int,
    experts: Sequence[int],
    constants: torch.Tensor,
) -> torch.Tensor:
    """The sum (T, H), for each token, of gate times output over those of its K experts that have a
    constant output. `index` (T, K): numbers of the experts of each token. `gates` (T, K): gates of
    these experts. `experts`: numbers of the N experts with a constant output. `constants` (N, H):
    these outputs."""
    gate_of_expert = gates.new_zeros(len(index), n_experts).scatter(1, index, gates)  # (T, E)
    columns = on_device(experts, index.device)
    return (gate_of_expert[:, columns] @ constants.to(gates.dtype)).to(constants.dtype)


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer of `module` by `tensor`, whose shape may differ."""
    if name not in module._parameters:
        module._buffers[name] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, getattr(module, name).requires_grad)


def count_attributes(module: nn.Module, n_experts: int) -> list[str]:
    """Names of the attributes of `module` that hold its number of experts, `n_experts`."""
    return [name for name in COUNT_ATTRIBUTES if vars(module).get(name) == n_experts]


def set_counts(modules: Iterable[nn.Module], before: int, after: int) -> None:
    """Change the attributes of `modules` that hold the number of experts."""
    for module in modules:
        for name in count_attributes(module, before):
            setattr(module, name, after)
