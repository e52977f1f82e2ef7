"""Choose by exhaustive search the experts whose removal changes the output of their layer least
(NAEE).

    retained = argmin over S, |S| = n - r, of || F(x) - F_S(x) ||_F

x are the inputs of the layer in the unpruned model at the valid calibration tokens, F is the
layer's routed output, and F_S its routed output when the model's own routing rule chooses among the
experts S only. Shared experts cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from moe_lab.allocation.shapes import MAX_SUBSETS, removals_within_limit, retained_subsets
from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import dense_gates
from moe_lab.models.rows import at_least_fp32
from moe_lab.pruning.mask import sliced_router
from moe_lab.statistics import Layers, Statistics
from moe_lab.statistics.observe import StatisticsHook

BUDGET = 1 << 28
"""Bytes for the outputs of all experts at the tokens of one chunk, and as many for the products
between these outputs."""
COLUMNS = ("layer", "retained", "error", "relative", "chosen")


@dataclass(frozen=True)
class Reconstruction:
    """The retained experts, and the error of each choice."""

    retained: dict[int, tuple[int, ...]]
    """Layer -> ids of the experts to retain, ascending."""
    errors: list[tuple[int, list[int], float, float, bool]]
    """A row per choice, with the columns COLUMNS: layer, retained ids, error = || F - F_S ||_F,
    error / || F ||_F, whether this choice is the layer's best."""


def reconstruct(
    read: Callable[[type[StatisticsHook]], Statistics],
    *,
    facts: Mapping[str, Any],
    ratio: float,
    limit: int = MAX_SUBSETS,
    multiple_of: int = 1,
) -> Reconstruction:
    """Find the best choice of retained experts in each layer, in a single forward pass.

    Each layer loses the share `ratio` of its experts, as with allocation=uniform. Of choices with
    equal errors, the choice that drops the lower ids is best.

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
    return _best_choices(choices, read(hook).layers)


def _best_choices(choices: Mapping[int, Sequence[tuple[int, ...]]], sums: Layers) -> Reconstruction:
    """The choice of least error in each layer, and the errors of all choices. `choices`: layer ->
    retained ids of each choice."""
    retained: dict[int, tuple[int, ...]] = {}
    table = []
    for layer, subsets in choices.items():
        errors = sums[layer]["error"].sqrt().tolist()
        norm = sqrt(float(sums[layer]["square"]))  # Frobenius norm of the routed output
        best = subsets[errors.index(min(errors))]
        retained[layer] = best
        for subset, error in zip(subsets, errors, strict=True):
            relative_error = error / norm if norm else 0.0
            table.append((layer, list(subset), error, relative_error, subset == best))
    return Reconstruction(retained, table)


class SubsetHook(StatisticsHook):
    """Gathers two sums over the valid tokens:

    error   (C,)  || F - F_S ||^2 for each of C choices of retained experts S
    square  ()    || F ||^2

    F is the routed output, and F_S the routed output if the router chooses among the experts S
    only.
    """

    kind = "reconstruction"
    subsets: Mapping[int, Sequence[tuple[int, ...]]]
    """Layer -> the choices, each as the ids of the retained experts."""

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Record the router's arguments, to call the router again for each choice."""
        self.call = args, kwargs

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Add the tokens to the sums. Returns the routed output (T, H). hidden: hidden states
        (T, H); index: expert ids (T, K); weights: gates. UserError when a second call of the router
        gives other gates."""
        n = self.layer.n_experts
        subsets = self.subsets[self.layer.index]
        gates = dense_gates(index, weights, n)
        # a second call that retains all experts must give the gates of the first call
        if not torch.equal(route(self.layer, tuple(range(n)), *self.call), gates):
            raise UserError(
                f"allocation=reconstruction cannot repeat the router of {self.layer.name}: this "
                "model is not supported"
            )
        valid = self.valid_tokens(hidden)
        if valid is None:
            valid = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        output = torch.empty_like(hidden)
        errors = torch.zeros(len(subsets), dtype=torch.float64, device=hidden.device)
        square = errors.new_zeros(())
        for tokens in torch.arange(len(hidden), device=hidden.device).split(
            max(1, BUDGET // (8 * n * n))  # a token's inner products have 8 n^2 bytes
        ):
            output[tokens], products = self._products(hidden[tokens], gates[tokens])
            is_valid = valid[tokens]
            products = products[is_valid]
            full_gates = gates[tokens][is_valid].double()
            # || F ||^2: as if the only choice were to retain all experts
            square += _squares(full_gates[:, None], products)[0]
            # n choices at a time, because their gates take as much memory as the products
            for first in range(0, len(subsets), n):
                subset_gates = [
                    route(self.layer, retained, *self.call)[tokens][is_valid]
                    for retained in subsets[first : first + n]
                ]
                # F - F_S is the sum of the experts' outputs, times the differences of the gates
                errors[first : first + n] += _squares(
                    full_gates[:, None] - torch.stack(subset_gates, 1), products
                )
        # rounding may make an error slightly negative
        self.add({"error": errors.clamp(min=0), "square": square})
        return output

    def _products(
        self, hidden: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (routed output (t, H), inner products (t, E, E) fp64 of all experts' outputs) for
        t tokens. hidden: (t, H); gates: (t, E)."""
        n = self.layer.n_experts
        width = hidden.shape[1]
        outputs = []
        products = []
        for tokens in torch.arange(len(hidden), device=hidden.device).split(
            max(1, BUDGET // (8 * n * width))  # a token's outputs have 8 n H bytes in fp64
        ):
            # (tokens, E, H): outputs of all experts
            f = torch.stack(
                [
                    at_least_fp32(self.layer.expert_output(hidden[tokens], expert))
                    for expert in range(n)
                ],
                1,
            )
            if not bool(f.isfinite().all()):
                # the lowest id of an expert with an output that is not finite
                expert = int((~f.isfinite()).any(-1).any(0).nonzero()[0, 0])
                raise UserError(
                    f"NaN or Inf in layer {self.layer.index}, expert {expert}: its output is not "
                    "finite"
                )
            outputs.append(torch.bmm(gates[tokens][:, None].to(f.dtype), f)[:, 0])
            f64 = f.double()
            products.append(torch.bmm(f64, f64.transpose(1, 2)))
        return torch.cat(outputs).to(hidden.dtype), torch.cat(products)


def route(
    layer: MoELayer, retained: tuple[int, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Gates (T, E) when the router of `layer` chooses among the experts `retained` only, as in a
    pruned model; 0 for all other experts. `args` and `kwargs`: arguments of the router."""
    with sliced_router(layer, retained) as slices:
        # some models pass the router's bias as an argument: pass the slice of the bias instead
        sliced_args = [slices.get(id(value), value) for value in args]
        sliced_kwargs = {name: slices.get(id(value), value) for name, value in kwargs.items()}
        # `forward` runs no hooks, unlike a call of the module
        _, weights, chosen = layer.router.forward(*sliced_args, **sliced_kwargs)
    # `chosen` has positions in `retained`: map them to ids
    return dense_gates(
        torch.tensor(retained, device=chosen.device)[chosen], weights, layer.n_experts
    )


def _squares(gates: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """(C,) fp64: || sum_j gates_j f_j ||^2 for each of C choices, summed over the tokens. `gates`
    (t, C, E): gates of each choice. `products` (t, E, E): inner products of the outputs f_j of all
    experts."""
    return (torch.bmm(gates, products) * gates).sum((0, 2))
