"""Hooks that also run experts that the router did not choose: exact damage, and similarity.

Exact damage of an expert is how much the layer's output changes when that expert alone is removed:

    D_j = sum over valid tokens t with j in their top-k of || y_t - y_t without j ||

y is the routed output. Without j, the model's own routing rule chooses again among the other
experts and computes new gates. Shared experts cancel; tokens that are not routed to j do not
change.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from moe_lab.errors import UserError
from moe_lab.models.experts import dense_gates
from moe_lab.models.rows import DENSE_TOKENS, Part, at_least_fp32, dense_weights, sort_by_expert
from moe_lab.statistics.observe import StatisticsHook

TOKENS = 2048
"""Tokens of which DamageHook has the outputs of their top-k + 1 experts in memory at once."""


class ReroutingHook(StatisticsHook):
    """A hook that calls the layer's router again, without some of the experts."""

    setting: ClassVar[str]
    """What the user asked for, such as criterion=exact_damage."""
    call: tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]
    """Arguments and keyword arguments of the router's last call, and its logits (T, E)."""

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Record the router's arguments and logits."""
        self.call = args, kwargs, result[0].reshape(-1, self.layer.n_experts)

    def reroute(self, tokens: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
        """The gates (R, E) that the router gives R tokens. `tokens` (R,): indices of the tokens.
        `removed` (R, N): the N experts that each of them cannot use."""
        args, kwargs, logits = self.call
        # deleting experts from the router's weights would change the groups of some routers
        logits = logits[tokens].scatter(1, removed, float("-inf"))
        hidden = args[0] if args else kwargs["hidden_states"]
        # only the number of these hidden states matters, because the logits are replayed
        rows = hidden.flatten(0, -2)[:1].expand(len(tokens), -1)
        rows = rows if hidden.dim() == 2 else rows[None]
        if args:
            args = (rows, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": rows}
        with _Replay(logits, removed):
            _logits, gates, experts = self.layer.router.forward(*args, **kwargs)
        return dense_gates(experts, gates, self.layer.n_experts)

    def check_gates(
        self, index: torch.Tensor, weights: torch.Tensor, repeated: torch.Tensor
    ) -> None:
        """UserError unless `repeated` (T, E), the gates of a second call of the router with all
        experts, are the gates `weights` (T, K) of the experts `index` (T, K) in the first call.
        Only in the first batch of a pass, because a device waits for the comparison."""
        if self.sums:
            return
        gates = dense_gates(index, weights, self.layer.n_experts)
        if not torch.equal(repeated.nan_to_num(), gates.nan_to_num()):
            raise UserError(
                f"{self.setting} cannot repeat the router of {self.layer.name}: this model is not "
                "supported"
            )


class DamageHook(ReroutingHook):
    """Adds the statistic `damage` (E,): the exact damage of each expert. The routed output equals
    the output of eager experts up to rounding."""

    kind = "damage"
    setting = "criterion=exact_damage"

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H). Adds `damage`. UserError if repeating the router's call in the
        first batch of a pass gives other gates than the router gave."""
        ignored = self.ignored_tokens(hidden)
        damage = torch.zeros(self.layer.n_experts, dtype=torch.float64, device=hidden.device)
        routed = torch.empty_like(hidden)
        for tokens in torch.arange(len(hidden), device=hidden.device).split(TOKENS):
            factors = self._factors(tokens, index[tokens])
            # row 0 repeats the router's call without removing an expert
            self.check_gates(index[tokens], weights[tokens], factors[:, 0])
            # (t, 1 + K, H): the routed output, then its change by each of the token's experts
            mixes = self._mix_outputs(hidden[tokens], factors)
            routed[tokens] = mixes[:, 0].to(routed.dtype)
            # (t, K): norm of the change by the k-th expert of each token
            changes = torch.linalg.vector_norm(mixes[:, 1:], dim=-1).double()
            if ignored is not None:
                changes = changes.masked_fill(ignored[tokens, None], 0)
            rows = sort_by_expert(self.layer, index[tokens])
            damage += rows.sum(changes[rows.token, rows.column])
        del self.call
        self.add({"damage": damage})
        return routed

    def _mix_outputs(self, hidden: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Sums (t, R, H) of expert outputs, weighted by `factors` (t, R, E), in at least fp32.
        `hidden`: (t, H)."""
        is_used = (factors != 0).any(1)  # (t, E): whether an expert of the token has a factor
        # the sort puts the used experts of each token first
        ordered = is_used.int().sort(dim=1, descending=True, stable=True)
        n = most_used(is_used)
        is_used = ordered.values[:, :n].bool()
        experts = ordered.indices[:, :n]

        def compute(part: Part, states: torch.Tensor) -> torch.Tensor:
            expert_weights = part.weights(self.layer)
            phi = self.layer.phi(states, expert_weights)
            return at_least_fp32(self.layer.output(phi, expert_weights))

        outputs = sort_by_expert(self.layer, experts).outputs(hidden, compute)
        # an expert that the token does not use may overflow, and 0 x Inf is NaN
        outputs = outputs.masked_fill(~is_used[:, :, None], 0)
        used_factors = factors.gather(2, experts[:, None].expand(-1, factors.shape[1], -1))
        return torch.bmm(used_factors.to(outputs.dtype), outputs)

    def _factors(self, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Factors (t, 1 + K, E) of the outputs of all E experts. `tokens` (t,): indices of the
        tokens. `index` (t, K): ids of their experts. Row 0 of a token gives its routed output y.
        Row 1 + k gives y minus the routed output without the token's k-th expert."""
        t, k = index.shape
        n_experts = self.layer.n_experts
        gates = self.reroute(tokens, index.new_empty(t, 0))[:, None]
        # K rows for each token: row k has the token's gates without its k-th expert
        remaining = self.reroute(tokens.repeat_interleave(k), index.reshape(-1, 1))
        return torch.cat((gates, gates - remaining.view(t, k, n_experts)), 1)


def most_used(is_used: torch.Tensor) -> int:
    """The largest number of experts that a token uses. `is_used`: (t, E) bool. A GPU is waited for.
    Mostly it is top-k + 1, but more if logits are equal, or if the router has groups or a
    correction bias."""
    return int(is_used.sum(1).max())


class _Replay(TorchFunctionMode):
    """A context in which the router's linear map returns given logits, and some experts of each
    token have the score minus infinity when the router chooses among all experts."""

    def __init__(self, logits: torch.Tensor, removed: torch.Tensor) -> None:
        """`logits` (R, E): what the router's linear map returns. `removed` (R, N): the experts that
        each token cannot use."""
        super().__init__()
        self.logits = logits
        self.removed = removed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a linear map with one output for each expert
        if func is torch.nn.functional.linear and args[1].shape[0] == self.logits.shape[1]:
            return self.logits
        # topk of the scores of all experts: (R, E), or (R, groups, experts of a group)
        is_choice = (
            func in (torch.topk, torch.Tensor.topk) and args[0].numel() == self.logits.numel()
        )
        # a correction bias could bring a removed expert back
        if is_choice and self.removed.shape[1]:
            return self._topk_without_removed(args[0], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _topk_without_removed(self, scores: torch.Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of topk for `scores` without the removed experts. If topk selects a removed
        expert nevertheless, its value is 0, so that a sum of the values stays finite."""
        remaining = (
            scores.reshape(self.logits.shape)
            .scatter(1, self.removed, float("-inf"))
            .reshape(scores.shape)
        )
        values, indices = func(remaining, *args[1:], **kwargs)
        # the removed expert is -inf in `remaining`, but not in `scores`
        is_removed = values.isneginf() & ~scores.gather(-1, indices).isneginf()
        return torch.return_types.topk((values.masked_fill(is_removed, 0.0), indices))


class SimilarityHook(StatisticsHook):
    """Adds `dense_output_sum`. If the router returns the logits of all experts, adds also
    `router_gram`, `router_absolute` and `dense_gated_output_sum`. All E experts run on all
    tokens."""

    kind = "similarity"
    probabilities: torch.Tensor | None = None
    """Softmax (V, E) fp64 of the logits of the V valid tokens in the router's last call; None
    without logits."""

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Add `router_gram` (E, E): the products of the logits of every two experts, summed over
        valid tokens, and `router_absolute` (2, E): the sums of their absolute values, and the
        number of tokens. Set `probabilities`."""
        self.probabilities = None
        logits = self.router_logits(result)
        if logits is None:
            return
        logits = logits[self.valid_indices(logits)].double()
        self.probabilities = logits.softmax(-1)
        absolute = torch.stack([logits.abs(), torch.ones_like(logits)]).sum(1)
        self.add({"router_gram": logits.T @ logits, "router_absolute": absolute})

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H). Adds `dense_output_sum` (E, H): the outputs of each expert,
        summed over all valid tokens. Adds `dense_gated_output_sum` (E, H): the same sum, weighted
        by `probabilities`."""
        tokens = self.valid_indices(hidden)
        factors = [hidden.new_ones(self.layer.n_experts, len(tokens), dtype=torch.float64)]
        if self.probabilities is not None:
            factors.append(self.probabilities.T.to(hidden.device))
        # (E, 1 or 2, V): factors of the outputs of each expert in its sums
        factors_of_experts = torch.stack(factors, 1)
        sums = factors_of_experts.new_zeros(*factors_of_experts.shape[:2], hidden.shape[1])
        parts = factors_of_experts.split(DENSE_TOKENS, 2)
        for part, factors_of_part in zip(tokens.split(DENSE_TOKENS), parts, strict=True):
            states = hidden[part]
            for experts, expert_weights in dense_weights(self.layer):
                phi = self.layer.phi(states, expert_weights)
                outputs = at_least_fp32(self.layer.output(phi, expert_weights))  # (experts, v, H)
                sums[experts] += factors_of_part[experts].to(outputs.dtype) @ outputs
        names = ("dense_output_sum", "dense_gated_output_sum")
        self.add(dict(zip(names, sums.unbind(1), strict=False)))  # without logits only the first
        # the routed output of the model's own code
        return self.unobserved(hidden, index, weights)
