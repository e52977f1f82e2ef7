"""The exact damage of losing one expert: what the layer's output loses when that expert alone is removed.

    D_j = sum over valid tokens t with j in their top-k of || y_t - y_t without j ||

y is the routed output. Without j, the model's own routing rule chooses again among the other experts and gives new
gates, so every other gate of the token changes and a replacement comes in. Shared experts cancel; tokens that j did
not serve lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import intermediate, output, sort_by_expert
from moe_lab.statistics.accumulate import wide
from moe_lab.statistics.gather import Batch, read_all
from moe_lab.statistics.observe import Observer, Tap
from moe_lab.statistics.rerouting import Rerouting
from moe_lab.statistics.sums import Statistics

TOKENS = 2048
"""Tokens handled at once: the outputs of their top-k + 1 experts are held together."""


def measure(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    fingerprint: Mapping[str, Any],
    out: Path | None = None,
    groups: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """`damage` (E,) of every layer over `batches`; arguments and errors as `gather`. Saves nothing if `out` is None.

    Costs (k + 1) / k of the expert work of a forward pass, and little else.
    """
    return read_all(
        model, DamageTap, batches, kind="damage", fingerprint=fingerprint, out=out, groups=groups, progress=progress
    )


class DamageTap(Tap):
    """Adds `damage` (E,) while computing the routed output, the same as the eager one up to rounding."""

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        super().__init__(observer, layer, start)
        self.rerouting: Rerouting | None = None

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Record the call, to be repeated without each of the chosen experts."""
        self.rerouting = Rerouting(self.layer, args, kwargs)

    def experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed output (T, H)."""
        assert self.rerouting is not None
        rerouting, self.rerouting = self.rerouting, None
        valid = self.valid(hidden)
        damage = torch.zeros(self.layer.n_experts, dtype=torch.float64, device=hidden.device)
        mixed = torch.empty_like(hidden)
        for token in torch.arange(len(hidden), device=hidden.device).split(TOKENS):
            _check_rule(self.layer, rerouting, token, index, weights)
            gates = coefficients(rerouting, token, index[token], self.layer.n_experts)
            mixes = self._mix(hidden[token], gates)
            mixed[token] = mixes[:, 0].to(mixed.dtype)
            losses = torch.linalg.vector_norm(mixes[:, 1:], dim=-1).double()
            keep = slice(None) if valid is None else valid[token]
            damage.index_add_(0, index[token][keep].flatten(), losses[keep].flatten())
        self.add("damage", damage)
        return mixed

    def _mix(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Each row of `gates` (t, 1 + K, E) applied to the outputs of the experts for `hidden` (t, H): (t, 1 + K, H).

        Only experts with a gate somewhere are run, about K + 1 a token.
        """
        used = (gates != 0).any(1)
        n = max(int(used.sum(1).max()), 1)
        order = used.int().sort(dim=1, descending=True, stable=True)
        some, chosen = order.values[:, :n].bool(), order.indices[:, :n]
        outputs = torch.zeros(*chosen.shape, hidden.shape[1], dtype=wide(hidden).dtype, device=hidden.device)
        module, n_experts = self.layer.experts, self.layer.n_experts
        rows = sort_by_expert(torch.where(some, chosen, n_experts), n_experts + 1)
        for expert, part in rows.parts():
            if expert < n_experts:
                token = rows.token[part]
                f = output(module, intermediate(module, hidden[token], expert), expert)
                outputs[token, rows.column[part]] = wide(f)
        picked = gates.gather(2, chosen[:, None].expand(-1, gates.shape[1], -1))
        return torch.bmm(picked.to(outputs.dtype), outputs)


def coefficients(rerouting: Rerouting, token: torch.Tensor, index: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Gates (t, 1 + K, E): row 0 gives y from the outputs of all experts, row 1 + k gives y - y without the k-th one.

    `token` (t,) are the tokens, `index` (t, K) the experts they were routed to.
    """
    t, k = index.shape
    full = _spread(*rerouting.rule(token, None), n_experts)
    without = _spread(*rerouting.rule(token.repeat_interleave(k), index.flatten()), n_experts)
    return torch.cat((full[:, None], full[:, None] - without.view(t, k, n_experts)), 1)


def _spread(index: torch.Tensor, weights: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Gates (R, K) at expert ids (R, K) as (R, E), 0 elsewhere."""
    gates = wide(weights)
    return gates.new_zeros(len(index), n_experts).scatter_(1, index, gates)


def _check_rule(
    layer: MoELayer, rerouting: Rerouting, token: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> None:
    """UserError unless repeating the router gives the routing that the experts were called with."""
    given = _spread(index[token], weights[token], layer.n_experts)
    if not torch.equal(_spread(*rerouting.rule(token, None), layer.n_experts), given):
        raise UserError(f"criterion=exact_damage cannot repeat the router of {layer.name}: this model is not supported")
