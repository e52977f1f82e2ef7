"""Choose by exhaustive search the experts whose removal changes the output of their layer least
(NAEE).

    retained = argmin over S, |S| = n - r, of || F(x) - F_S(x) ||_F

x are the inputs of the layer in the unpruned model at the valid calibration tokens, F is the
layer's routed output, and F_S its routed output when the model's own routing rule chooses among the
experts S only. Shared experts cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from moe_lab.allocation.shapes import MAX_SUBSETS, removals_within_limit, retained_subsets
from moe_lab.models.experts import to_device
from moe_lab.models.rows import DENSE_TOKENS, dense_weights
from moe_lab.statistics import Statistics
from moe_lab.statistics.damage import ReroutingHook
from moe_lab.statistics.observe import StatisticsHook

TOKENS = 4096
"""Tokens of which the inner products of the outputs of all experts are in memory at once."""


def choice_errors(
    read: Callable[[type[StatisticsHook]], Statistics],
    *,
    facts: Mapping[str, Any],
    ratio: float,
    limit: int = MAX_SUBSETS,
    multiple_of: int = 1,
) -> dict[int, dict[tuple[int, ...], float]]:
    """Layer -> ids of the retained experts, ascending -> || F - F_S ||_F, for each choice of the
    retained experts. All choices are compared in a single forward pass.

    Each layer loses the share `ratio` of its experts, as with allocation=uniform. Choices that drop
    lower ids come first.

    `read(hook)` makes the pass and returns the sums that `hook` collects. `limit`: the most choices
    that a layer may have. `multiple_of`: each layer retains a multiple of this number. UserError
    for an infeasible ratio, for more than `limit` choices, for routers that cannot be called again,
    and for outputs that are not finite.
    """
    layers = {int(layer): router for layer, router in facts["layers"].items()}
    removed = removals_within_limit(layers, ratio, limit=limit, multiple_of=multiple_of)
    choices = {}
    for layer, router in layers.items():
        protected = router.get("protected", ())
        choices[layer] = retained_subsets(
            router["n_experts"], removed[layer], router["n_group"], protected
        )
    # `read` makes a hook of this class for each layer
    hook = type("Choices", (SubsetHook,), {"subsets": choices})
    sums = read(hook).layers
    return {
        layer: dict(zip(subsets, sums[layer]["error"].sqrt().tolist(), strict=True))
        for layer, subsets in choices.items()
    }


class SubsetHook(ReroutingHook):
    """Gathers sums over the valid tokens:

    output_square  (E,)  || f_j ||^2 of the output f_j of each expert, which shows where it is NaN
    error          (C,)  || F - F_S ||^2 for each of C choices of retained experts S

    F is the routed output, and F_S the routed output if the router chooses among the experts S
    only.
    """

    kind = "reconstruction"
    setting = "allocation=reconstruction"
    subsets: ClassVar[Mapping[int, Sequence[tuple[int, ...]]]]
    """Layer -> the choices, each as the ids of the retained experts."""

    @cached_property
    def removed(self) -> torch.Tensor:
        """(C, N): the experts that each choice drops, on the CPU."""
        experts = range(self.layer.n_experts)
        choices = [
            [expert for expert in experts if expert not in retained]
            for retained in self.subsets[self.layer.index]
        ]
        return torch.tensor(choices, dtype=torch.int64)

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Add the tokens to the sums. Returns the routed output (T, H). hidden: hidden states
        (T, H); index: expert ids (T, K); weights: gates. UserError when a second call of the router
        gives other gates."""
        n = self.layer.n_experts
        all_tokens = torch.arange(len(hidden), device=hidden.device)
        gates = self.reroute(all_tokens, index.new_empty(len(hidden), 0))
        self.check_gates(index, weights, gates)
        removed = to_device(self.removed, hidden.device)
        errors = torch.zeros(len(removed), dtype=torch.float64, device=hidden.device)
        output_square = errors.new_zeros(n)
        for tokens in self.valid_indices(hidden).split(TOKENS):
            products = torch.cat(
                [self._products(hidden[part]) for part in tokens.split(DENSE_TOKENS)]
            )
            output_square += products.diagonal(dim1=1, dim2=2).sum(0)
            full_gates = gates[tokens, None].double()
            # n choices at a time, because their gates take as much memory as the products
            for sums, choices in zip(errors.split(n), removed.split(n), strict=True):
                subset_gates = self.reroute(
                    tokens.repeat_interleave(len(choices)), choices.repeat(len(tokens), 1)
                )
                # F - F_S is the sum of the experts' outputs, times the differences of the gates
                differences = full_gates - subset_gates.view(len(tokens), len(choices), n)
                sums += (torch.bmm(differences, products) * differences).sum((0, 2))
        # rounding may make an error slightly negative
        self.add({"output_square": output_square, "error": errors.clamp(min=0)})
        return self.unobserved(hidden, index, weights)

    def _products(self, states: torch.Tensor) -> torch.Tensor:
        """The inner products (t, E, E) fp64 of the outputs of all experts for `states` (t, H)."""
        outputs = [
            self.layer.output(self.layer.phi(states, weights), weights)
            for _, weights in dense_weights(self.layer)
        ]
        f = torch.cat(outputs).double().transpose(0, 1)
        return f @ f.mT
