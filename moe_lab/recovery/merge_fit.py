"""Fit the down projection of each merged expert to the outputs of its members by least squares, the
method of MergeMoE (arXiv 2510.14436). docs/recovery.md has the formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_lab.calibration.batches import batches
from moe_lab.config import CalibrationConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import Weights, routed_layers
from moe_lab.models.rows import (
    GroupedRows,
    inner_products,
    is_grouped,
    outer_products,
)
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.recovery.apply import save_tuned
from moe_lab.statistics.observe import StatisticsHook, collect_statistics

RIDGE = 1e-6
"""Weight of the penalty on differences from the average of the members' projections, as a share of
the mean square of the inputs. The weight is large enough to keep the average for channels that are
never active, and too small to matter for other channels."""


def fit(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    settings: RecoveryConfig,
    text: CalibrationConfig,
    *,
    out: Path,
    partial: Path,
) -> dict[str, Any]:
    """Fit the down projection of each merged expert of `plan` to the outputs of the expert's
    members on `text`. Returns the report: number of experts that stay averaged, and the
    result of `_fit_expert` for each merged expert.

    The folder `out` gets two files. tuned.safetensors has the weights of all experts in layers with
    merged experts, under their names in the pruned model's state dict. finetune.json has the
    report. A stopped fit resumes from the sums in the folder `partial`; no other fit may use this
    folder. UserError for a plan without merged experts, for outputs that are not finite, and for a
    text in which no merged expert has enough tokens.
    """
    if not plan.merged_layers:
        raise UserError(
            "recovery.fit needs merged experts, and the plan has none: expected a larger ratio"
        )
    pruned = prune(model, plan)
    weights_by_layer = merged_weights(pruned, plan)
    # `collect_statistics` makes a hook of this class for each layer
    hook = type("FitHook", (MergeHook,), {"plan": plan, "merged": weights_by_layer})
    sums = collect_statistics(model, hook, batches(text, tokenizer).batches, out=partial).layers
    summaries = []
    for layer, weights_by_expert in weights_by_layer.items():
        for expert, weights in weights_by_expert.items():
            result = _fit_expert(weights.down, expert, sums[layer])
            summaries.append({"layer": layer, "expert": expert, **result})
    n_averaged = sum(summary["error_fitted"] is None for summary in summaries)
    if n_averaged == len(summaries):
        most_tokens = max(summary["tokens"] for summary in summaries)
        raise UserError(
            f"recovery.fit={settings.fit}: each of {len(summaries)} merged experts saw fewer "
            f"tokens than it has channels (at most {most_tokens}): expected a longer text"
        )
    fitted_tensors = {
        f"{layer.name}.{name}": weight
        for layer in routed_layers(pruned)
        if layer.index in weights_by_layer
        for name, weight in layer.experts.named_parameters()
    }
    report = {"averaged": n_averaged, "experts": summaries}
    save_tuned(out, fitted_tensors, report)
    return report


def merged_weights(pruned: Any, plan: Plan) -> dict[int, dict[int, Weights]]:
    """Layer -> id of a merged expert -> weights of the merged expert in the model `pruned`, which
    `plan` pruned. Writing to the weights changes the model."""
    by_layer: dict[int, dict[int, Weights]] = {}
    for layer in routed_layers(pruned):
        layer_plan = plan.layers[layer.index]
        if layer_plan.merged:
            # the experts of the pruned layer are numbered by their positions in `retained`
            by_layer[layer.index] = {
                expert: layer.weights(layer_plan.retained.index(expert))
                for expert in sorted(layer_plan.merged)
            }
    return by_layer


class MergeHook(StatisticsHook):
    """Gathers sums for the fit of each merged expert j, over the valid tokens that the router sends
    to at least one member of j:

    tokens.j  ()      number of tokens
    square.j  ()      sum of ||y||^2
    error.j   ()      sum of ||y - W_D phi||^2
    gram.j    (I, I)  sum of phi phi^T
    cross.j   (H, I)  sum of (y - W_D phi) phi^T

    y (H,) is the sum of the members' outputs, weighted by the members' shares in the plan. W_D
    (H, I) is the down projection of merged expert j before the fit, and phi (I,) the input of W_D.
    """

    kind = "merge_fit"
    plan: ClassVar[Plan]
    merged: ClassVar[Mapping[int, Mapping[int, Weights]]]
    """The result of `merged_weights`."""

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Add the tokens to the sums of each merged expert. Returns the routed output (T, H) of the
        unpruned layer. hidden: hidden states (T, H); index: expert ids (T, K); weights: gates."""
        if self.layer.index in self.merged:
            add = self._add_all if is_grouped(self.layer) else self._add_each
            add(hidden, index)
        return self.unobserved(hidden, index, weights)

    def _add_each(self, hidden: torch.Tensor, index: torch.Tensor) -> None:
        """Add the tokens to the sums of one merged expert after the other, in fp64. Arguments as in
        `experts`."""
        ignored = self.ignored_tokens(hidden)  # None if all tokens count
        for j, weights_of_j in self.merged[self.layer.index].items():
            members = self.plan.layers[self.layer.index].merged[j]  # id -> share
            is_routed = torch.isin(index, torch.tensor(list(members), device=index.device)).any(1)
            states = hidden[is_routed if ignored is None else is_routed & ~ignored]
            y = hidden.new_zeros(states.shape, dtype=torch.float64)
            for member, share in members.items():
                y += share * self.layer.expert_output(states, member).double()
            phi = self.layer.phi(states, weights_of_j).double()
            residual = y - phi @ weights_of_j.down.detach().double().T
            self.add(
                {
                    f"tokens.{j}": y.new_tensor(len(states)),
                    f"square.{j}": y.square().sum(),
                    f"error.{j}": residual.square().sum(),
                    f"gram.{j}": phi.T @ phi,
                    f"cross.{j}": residual.T @ phi,
                }
            )

    def _add_all(self, hidden: torch.Tensor, index: torch.Tensor) -> None:
        """Add the tokens to the sums of all merged experts at once, with products in at least fp32.
        Arguments as in `experts`."""
        ignored = self.ignored_tokens(hidden)
        merged = self.merged[self.layer.index]
        groups = self._groups[0][index]
        if ignored is not None:
            groups = groups.masked_fill(ignored[:, None], len(merged))
        groups = groups.sort(1).values
        # a token counts once for a group
        groups[:, 1:].masked_fill_(groups[:, 1:] == groups[:, :-1], len(merged))
        rows = GroupedRows(groups, len(merged))
        states = rows.gather(hidden)
        y = self._targets(states, rows)
        # experts with biases cannot be merged
        weights = Weights(
            inward=torch.stack([expert.inward for expert in merged.values()]),
            down=torch.stack([expert.down for expert in merged.values()]),
            product=rows.linear,
        )
        phi = self.layer.phi(states, weights)
        residual = y - rows.linear(phi, weights.down)
        sums = {
            "tokens": rows.sum(y.new_ones(len(y))),
            "square": rows.sum(inner_products(y, y)),
            "error": rows.sum(inner_products(residual, residual)),
            "gram": outer_products(phi, phi, rows),
            "cross": outer_products(residual, phi, rows),
        }
        self.add(
            {
                f"{name}.{j}": value
                for name, values in sums.items()
                for j, value in zip(merged, values.double(), strict=True)
            }
        )

    def _targets(self, states: torch.Tensor, rows: GroupedRows) -> Any:
        """y (S, H), in at least fp32, of the `states` (S, H) of `rows`: the first
        members of all groups, then the second ones, and so on."""
        _, members, shares = self._groups
        y: Any = 0
        for experts, share in zip(members.T, shares.T, strict=True):
            stacks = self.layer.tensors(slice(None)).items()
            weights = rows.weights(
                self.layer, {name: stack[experts[:-1]] for name, stack in stacks}
            )
            f = self.layer.output(self.layer.phi(states, weights), weights)
            y += f * share[rows.expert, None]
        return y

    @cached_property
    def _groups(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(number (E,) of the group of each expert, G without a group; members (G + 1, M) of the
        groups, the owner after the last member; their shares, then 0)."""
        plan = self.plan.layers[self.layer.index]
        owners = list(self.merged[self.layer.index])
        numbers = [owners.index(owner) if owner in owners else len(owners) for owner in plan.owners]
        size = max(len(group) for group in plan.merged.values())
        members = [[*plan.merged[owner].items(), *[(owner, 0.0)] * size][:size] for owner in owners]
        device = self.layer.routing[0].tensor.device
        experts, shares = torch.tensor([*members, [(0, 0.0)] * size], device=device).unbind(-1)
        return torch.tensor(numbers, device=device), experts.long(), shares


@torch.no_grad()
def _fit_expert(
    down: torch.Tensor, expert: int, sums: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Fit the down projection `down` of the merged expert with id `expert` in place, if the expert
    has at least as many tokens as channels. sums: the layer's sums of `MergeHook`, which defines y,
    phi and W_D. Returns:

    tokens          number of tokens
    error_averaged  sum ||y - W_D phi||^2 / sum ||y||^2
    error_fitted    the same with the fitted projection; None without a fit
    """
    tokens, square, error = (
        float(sums[f"{name}.{expert}"]) for name in ("tokens", "square", "error")
    )
    gram = sums[f"gram.{expert}"]
    cross = sums[f"cross.{expert}"]
    scale = square or math.inf  # relative errors are 0 if all outputs are 0
    summary = {"tokens": int(tokens), "error_averaged": error / scale, "error_fitted": None}
    if tokens >= len(gram):
        average = down.double().cpu()
        fitted_weights = (average + _correction(gram, cross)).to(down.dtype)
        change = fitted_weights.double() - average
        # sum ||y - (W_D + change) phi||^2 - sum ||y - W_D phi||^2
        change_of_error = ((change @ gram) * change).sum() - 2 * (change * cross).sum()
        # rounding may make the sum slightly negative
        summary["error_fitted"] = max(0.0, error + float(change_of_error)) / scale
        down.copy_(fitted_weights)
    return summary


def _correction(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """The fitted down projection minus W_D, (H, I) fp64:

    (Y - W_D P) P^T (P P^T + r I)^-1

    The columns of P and Y are the phi and y of all tokens, as defined in `MergeHook`. gram is
    P P^T, and cross is (Y - W_D P) P^T. r is RIDGE times the mean of the diagonal of gram.
    """
    # r must not be 0 if no channel is active
    ridge = (RIDGE * gram.diagonal().mean()).clamp(min=torch.finfo(torch.float64).tiny)
    damped_gram = gram + ridge * torch.eye(len(gram), dtype=torch.float64)
    # cross damped_gram^-1 is the transpose of damped_gram^-1 cross^T
    return torch.cholesky_solve(cross.T, torch.linalg.cholesky(damped_gram)).T
