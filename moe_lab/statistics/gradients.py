"""What the loss says about every channel, at about the cost of a plain forward and backward pass.

Two vectors per expert replace HEAPr's (H, H) matrix, because the gradient at the input of down_proj is that matrix's
factor already multiplied with the channel's weights: memory grows with the number of channels, and one pass does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.experts import intermediate, output, sort_by_expert
from moe_lab.statistics.accumulate import Channels, wide
from moe_lab.statistics.backward import SCALE, differentiable, forward_and_backward
from moe_lab.statistics.forward import inside_backward
from moe_lab.statistics.gather import Batch, read_all
from moe_lab.statistics.observe import Tap
from moe_lab.statistics.snapshots import Snapshots
from moe_lab.statistics.sums import Statistics

GRADIENT_SUMS = ("channel_gradient_square", "channel_product", "channel_product_abs")


def gather_gradients(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    out: Path | None,
    fingerprint: Mapping[str, Any],
    groups: int,
    first_row: int = 0,
    progress: Callable[[int, int], None] | None = None,
    checkpointing: bool = False,
    snapshots: Snapshots | None = None,
) -> Statistics:
    """Channel sums of a forward and a backward pass of `model` over `batches`; see sums.py for the names.

    L is the next-token cross-entropy summed over pairs of neighbouring valid tokens, in nats. Weights stay frozen, the
    model in eval mode. Arguments, resuming and errors are those of `gather`; `checkpointing` keeps the activations of
    one decoder layer at a time and costs one more forward pass, with the same sums. UserError when no valid token
    follows another.
    """
    check_loss(batches)
    with differentiable(model, checkpointing=checkpointing):
        return read_all(
            model,
            GradientTap,
            batches,
            kind="gradients",
            fingerprint=fingerprint,
            out=out,
            groups=groups,
            first_row=first_row,
            progress=progress,
            reading=forward_and_backward,
            snapshots=snapshots,
        )


def check_loss(batches: Sequence[Batch]) -> None:
    """UserError when no valid token follows another, so that there is nothing to predict."""
    if batches and not any(bool((valid[:, :-1] & valid[:, 1:]).any()) for _, valid in batches):
        raise UserError("calibration has no token that follows another one, so there is no loss: expected longer rows")


class GradientTap(Tap):
    """Adds channel sums of the forward pass, once, and of the backward pass when it comes along.

    Experts compute what the eager forward computes, in the same order. Gradients are taken to be SCALE times those of
    the loss.
    """

    def experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed output (T, H), observed on the way there and back."""
        module, n_experts = self.layer.experts, self.layer.n_experts
        rows = sort_by_expert(index, n_experts)
        valid = self.valid(hidden)
        keep = None if valid is None else valid[rows.token]
        channels = None if inside_backward() else Channels(n_experts, self.layer.width, hidden)
        gate_square = wide(weights.detach())[rows.token, rows.column].square()
        mixed = torch.zeros_like(hidden)
        for expert, part in rows.parts():
            token = rows.token[part]
            counted = None if keep is None else keep[part]
            phi = intermediate(module, hidden[token], expert)
            if channels is not None:
                some, gates = wide(phi.detach()), gate_square[part]
                channels.add(expert, *((some, gates) if counted is None else (some[counted], gates[counted])))
            f = output(module, _Watch.apply(phi, counted, self, expert), expert)
            mixed.index_add_(0, token, (f * weights[token, rows.column[part], None]).to(mixed.dtype))
        if channels is not None:
            counts = torch.bincount(rows.expert if keep is None else rows.expert[keep], minlength=n_experts)
            self._add_forward({**channels.finish(), "tokens": counts})
        return mixed

    def add_gradient(self, expert: int, phi: torch.Tensor, gradient: torch.Tensor) -> None:
        """The tokens of one expert that count: phi and SCALE * dL/dphi, (n, I) each."""
        gradient = wide(gradient)
        product = gradient * wide(phi)
        parts = (gradient.square().sum(0), product.sum(0), product.abs_().sum(0))
        for name, part, scale in zip(GRADIENT_SUMS, parts, (SCALE**2, SCALE, SCALE), strict=True):
            self.sums[name][expert] += part.double() / scale

    def _add_forward(self, sums: Mapping[str, torch.Tensor]) -> None:
        for name, part in sums.items():
            self.add(name, part)
        for name in GRADIENT_SUMS:  # new tensors for the backward pass to add to, where the activations are
            self.add(name, torch.zeros_like(sums["channel_square"], dtype=torch.float64))


class _Watch(torch.autograd.Function):
    """The identity. phi is saved the way autograd saves things, so gradient checkpointing lets go of it too."""

    @staticmethod
    def forward(
        ctx: Any, phi: torch.Tensor, counted: torch.Tensor | None, tap: GradientTap, expert: int
    ) -> torch.Tensor:
        ctx.save_for_backward(phi, counted)
        ctx.tap, ctx.expert = tap, expert
        return phi.view_as(phi)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        phi, counted = ctx.saved_tensors
        rows = (phi, gradient) if counted is None else (phi[counted], gradient[counted])
        ctx.tap.add_gradient(ctx.expert, *rows)
        return gradient, None, None, None
