"""Increase of the model's loss without the output of one expert, or with the routed output of one
layer scaled down.

    ablation_j = (NLL with g_j f_j = 0 - NLL) / N
    scaling    = (NLL with m = SCALE sum_j g_j f_j - NLL) / N

over the N valid tokens that follow a valid token in their row. The scaling is the layer loss of
MoE-Slimming's Appendix A.1, step 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from moe_lab import progress
from moe_lab.errors import UserError
from moe_lab.models import load as device
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.experts import ExpertsFunction, replace_experts
from moe_lab.search.candidates import Decoder, States
from moe_lab.search.fitness import Positions, fitness_row_sums
from moe_lab.statistics import Statistics, check_finite
from moe_lab.statistics.gradients import check_loss
from moe_lab.statistics.observe import Batch, load_checkpoint, pass_header, save_checkpoint

SCALE = 0.9
"""Factor of the routed output of one layer. The paper gives no value; its code uses 0.9."""


def loss_rises(
    model: PreTrainedModel, kind: str, batches: Sequence[Batch], *, out: Path | None = None
) -> Statistics:
    """For each MoE layer, the increase of the model's loss after a change in this layer alone: mean
    over the predicted tokens in nats, fp64. `kind` names the change, and the result of each layer:

    ablation  (E,): increase without the output of one expert, for each expert
    scaling   (): increase when the routed output, without shared experts, is multiplied by SCALE

    Sums are saved in the folder `out` (None: nowhere) after every layer, and an interrupted run
    resumes from these sums. UserError when no two valid tokens are adjacent, and for a loss that is
    not finite, with the layer and expert.
    """
    check_loss(batches)
    pieces = _small_batches(model, batches)
    metadata = {**pass_header(model, batches, kind), "pieces": len(pieces)}
    predicted = sum(int(_is_predictor(valid).sum()) for _, valid in pieces)
    layers = moe_layers(model)
    done, sums = load_checkpoint(out, metadata)
    piece_losses = None
    for step in range(done, len(pieces) * len(layers)):  # a step is for one piece and one layer
        piece, position = divmod(step, len(layers))
        # an interrupted run may resume in the middle of a piece
        if piece_losses is None or position == 0:
            piece_losses = _BatchLosses(model, layers, *pieces[piece])
        index = layers[position].index
        rise = KINDS[kind](piece_losses, position)
        sums[index] = {kind: sums[index][kind] + rise if index in sums else rise}
        check_finite({index: sums[index]}, "the changed loss", model.dtype)
        save_checkpoint(out, sums, metadata, step + 1)
        progress.update(step + 1, len(pieces) * len(layers), "layers")
    means = {index: {kind: arrays[kind] / predicted} for index, arrays in sums.items()}
    return Statistics(means, {**metadata, "predicted": predicted})


class _BatchLosses:
    """Losses of the model on one small batch: of the unchanged model, and after changes of the
    gates in one MoE layer. A changed model only runs from the changed layer on."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        ids: torch.Tensor,
        valid: torch.Tensor,
    ):
        """Run the unchanged model on `ids` (B, S). `layers`: all MoE layers of the model."""
        self.decoder = Decoder(model)
        self.layers = layers
        self.ids = ids
        self.valid = valid
        self.states: States = {}
        # this also stores the inputs of all MoE layers in `states`
        self.log_likelihood = self._log_likelihood(self.states)
        """() fp64: log-likelihood of the batch under the unchanged model."""
        if not bool(self.log_likelihood.isfinite()):
            raise UserError(
                "the loss of the unpruned model is NaN or infinite on this text: expected finite "
                "numbers"
            )

    def ablation_rises(self, position: int) -> torch.Tensor:
        """(E,) fp64: for each expert of the MoE layer number `position`, the increase of the summed
        loss without this expert."""

        def rise(expert: int) -> torch.Tensor:
            return self._rise(position, lambda index, gates: gates.masked_fill(index == expert, 0))

        return torch.stack([rise(expert) for expert in range(self.layers[position].n_experts)])

    def scaling_rise(self, position: int) -> torch.Tensor:
        """() fp64: increase of the summed loss when the routed output of the MoE layer number
        `position` is multiplied by SCALE."""
        return self._rise(position, lambda index, gates: gates * SCALE)

    def _rise(
        self, position: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """() fp64: increase of the summed loss when the gates of the MoE layer number `position`
        are changed. `change`: function of the expert ids (T, K) and the gates (T, K) that returns
        the new gates."""
        # key of this layer's input in `states`: the layers before it lose no experts
        prefix = (0,) * position

        def with_change(experts: ExpertsFunction) -> ExpertsFunction:
            return lambda hidden, index, gates: experts(hidden, index, change(index, gates))

        with ExitStack() as undo:
            replace_experts(self.layers[position], with_change, undo)
            # the decoder runs from this layer on, because it gets no input of a later layer
            changed = self._log_likelihood({prefix: self.states[prefix]})
        return self.log_likelihood - changed  # the summed loss is minus the log-likelihood

    def _log_likelihood(self, states: States) -> torch.Tensor:
        """() fp64: the log-likelihood of the batch, summed over the predicted tokens. `states`: as
        in `Decoder.logits`."""
        unpruned = (0,) * len(self.layers)  # the schedule in which no layer loses experts
        is_evaluated = _is_predictor(self.valid)
        logits, _ = self.decoder.logits(self.ids, self.valid, is_evaluated, unpruned, states)
        # the token after each position; the last position of a row is never evaluated
        targets = self.ids.roll(-1, 1)[is_evaluated]
        # "nll" does not use the random numbers of the positions, so zeros will do
        positions = Positions(is_evaluated, targets, torch.zeros(len(targets)))
        return fitness_row_sums("nll", None, logits, positions).sum()


KINDS = {"ablation": _BatchLosses.ablation_rises, "scaling": _BatchLosses.scaling_rise}
"""Name of a sum -> method that computes the sum over a few rows."""


def _is_predictor(valid: torch.Tensor) -> torch.Tensor:
    """(B, S) bool: whether a token and the next token in the row are both valid."""
    return pad(valid[:, :-1] & valid[:, 1:], (0, 1))


def _small_batches(model: PreTrainedModel, batches: Sequence[Batch]) -> list[Batch]:
    """The batches, split into smaller batches whose logits fit into memory."""
    max_tokens = min(device.PASS_TOKENS, device.max_logit_tokens(model))
    parts: list[Batch] = []
    for ids, valid in batches:
        n_rows = max(1, max_tokens // ids.shape[1])
        parts += zip(ids.split(n_rows), valid.split(n_rows), strict=True)
    return parts
