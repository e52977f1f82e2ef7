"""Fit the down projections of merged experts to the outputs of their members, by least squares, as
MergeMoE does (arXiv 2510.14436). docs/recovery.md has the formula, and what the paper leaves
open."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_lab.calibration.batches import batches
from moe_lab.config import CalibrationConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import Weights, routed_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.recovery.apply import save_tuned
from moe_lab.statistics.observe import StatisticsHook, gather

RIDGE = 1e-6
"""Weight of the penalty for differences from the plain average, as a share of the mean square of
the inputs: enough for channels that are never active, and too little to matter for others."""


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
    """Fit the down projections of the merged experts of `plan` to the outputs of their members on
    `text`, and return the report.

    Writes two files to the folder `out`, from which `apply.recovered` makes the fitted model:
    tuned.safetensors, the experts of each layer with merged experts by their names in the pruned
    model's state dict, and finetune.json, the report. Sums are saved in the folder `partial`, which
    no other fit uses; a stopped fit continues from them. UserError for a plan that merges nothing,
    outputs that are not finite, and a text that is too short for every expert.
    """
    if not plan.merged_layers:
        raise UserError(
            "recovery.fit needs merged experts, and the plan has none: expected a larger ratio"
        )
    started = time.monotonic()
    pruned = prune(model, plan)
    merged = merged_weights(pruned, plan)
    hook = type("FitHook", (MergeHook,), {"plan": plan, "merged": merged})
    sums = gather(model, hook, batches(text, tokenizer).rows, out=partial).layers
    experts = []
    for layer, weights_by_owner in merged.items():
        for owner, weights in weights_by_owner.items():
            summary = {
                "layer": layer,
                "expert": owner,
                "members": sorted(plan.layers[layer].merged[owner]),
            }
            experts.append({**summary, **_fit_expert(weights.down, owner, sums[layer])})
    fitted = sum(summary["error_fitted"] is not None for summary in experts)
    if not fitted:
        most = max(summary["tokens"] for summary in experts)
        raise UserError(
            f"recovery.fit={settings.fit}: each of {len(experts)} merged experts saw fewer tokens "
            f"than it has channels (at most {most}): expected a longer text"
        )
    changed = {
        f"{layer.name}.{name}": weight
        for layer in routed_layers(pruned)
        if layer.index in merged
        for name, weight in layer.experts.named_parameters()
    }
    seconds = round(time.monotonic() - started, 1)
    report = {
        "fitted": fitted,
        "averaged": len(experts) - fitted,
        "seconds": seconds,
        "experts": experts,
    }
    save_tuned(out, changed, report)
    return report


def merged_weights(pruned: Any, plan: Plan) -> dict[int, dict[int, Weights]]:
    """Layer -> id of each merged expert -> its weights in the model that was `pruned` by `plan`.
    They are views: writing to them changes the model."""
    merged: dict[int, dict[int, Weights]] = {}
    for layer in routed_layers(pruned):
        layer_plan = plan.layers[layer.index]
        if layer_plan.merged:
            owners = sorted(layer_plan.merged)
            merged[layer.index] = {
                owner: layer.weights(layer_plan.retained.index(owner)) for owner in owners
            }
    return merged


class MergeHook(StatisticsHook):
    """Sums for the fit of each merged expert j, over the valid tokens that are routed to a member:

    tokens.j  ()      number of these tokens
    square.j  ()      sum of ||y||^2, y the weighted sum of the members' outputs
    error.j   ()      sum of ||y - W_D phi||^2, phi the input of the merged down projection W_D
    gram.j    (I, I)  sum of phi phi^T
    cross.j   (H, I)  sum of (y - W_D phi) phi^T
    """

    kind = "merge_fit"
    plan: ClassVar[Plan]
    merged: ClassVar[Mapping[int, Mapping[int, Weights]]]
    """Layer -> id of each merged expert -> its weights."""

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H) of the unpruned layer."""
        valid = self.valid(hidden)
        for owner, owner_weights in self.merged.get(self.layer.index, {}).items():
            members = self.plan.layers[self.layer.index].merged[owner]
            routed = torch.isin(index, torch.tensor(list(members), device=index.device)).any(1)
            states = hidden[routed if valid is None else routed & valid]
            target = hidden.new_zeros(states.shape, dtype=torch.float64)
            for member, share in members.items():
                target += share * self.layer.expert_output(states, member).double()
            phi = self.layer.phi(states, owner_weights).double()
            error = target - phi @ owner_weights.down.detach().double().T
            self.add(f"tokens.{owner}", target.new_tensor(len(states)))
            self.add(f"square.{owner}", target.square().sum())
            self.add(f"error.{owner}", error.square().sum())
            self.add(f"gram.{owner}", phi.T @ phi)
            self.add(f"cross.{owner}", error.T @ phi)
        return self.unobserved(hidden, index, weights)


@torch.no_grad()
def _fit_expert(down: torch.Tensor, owner: int, sums: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Replace the down projection of a merged expert, in place, by the fitted projection, if the
    expert saw enough tokens. `sums` are those of its layer, see `MergeHook`; `owner` is its id.
    Returns its number of tokens, and the relative squared errors of the average and of the fit
    (None without a fit)."""
    tokens, square, error = (
        float(sums[f"{name}.{owner}"]) for name in ("tokens", "square", "error")
    )
    gram = sums[f"gram.{owner}"]
    cross = sums[f"cross.{owner}"]
    scale = square or math.inf
    summary = {"tokens": int(tokens), "error_averaged": error / scale, "error_fitted": None}
    if tokens >= len(gram):
        average = down.double().cpu()
        fitted = (average + _correction(gram, cross)).to(down.dtype)
        change = fitted.double() - average
        change_of_error = ((change @ gram) * change).sum() - 2 * (change * cross).sum()
        summary["error_fitted"] = max(0.0, error + float(change_of_error)) / scale
        down.copy_(fitted)
    return summary


def _correction(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """The difference (H, I) between the fitted and the averaged down projection W_D, in fp64:
    (Y - W_D P) P^T (P P^T + r I)^-1, where the columns of P and Y are the phi and y of tokens."""
    scale = (RIDGE * gram.diagonal().mean()).clamp(min=torch.finfo(torch.float64).tiny)
    damped = gram + scale * torch.eye(len(gram), dtype=torch.float64)
    return torch.cholesky_solve(cross.T, torch.linalg.cholesky(damped)).T
