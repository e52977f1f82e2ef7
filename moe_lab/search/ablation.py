"""Increase of the model's loss without the output of one expert, or with the routed output of one
layer scaled down.

    ablation_j = (NLL with g_j f_j = 0 - NLL) / N
    scaling    = (NLL with m = SCALE sum_j g_j f_j - NLL) / N

over the N valid tokens that follow a valid token in their row. Attribution scores approximate the
ablation; the scaling is the layer loss of MoE-Slimming's Appendix A.1, step 3. The ablation changes
no other gate of the layer.
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
from moe_lab.search.fitness import Contexts, row_sums
from moe_lab.statistics import Statistics, check_finite
from moe_lab.statistics.gradients import check_loss
from moe_lab.statistics.observe import Batch, pass_header, resume, save_checkpoint

SCALE = 0.9
"""Factor of the routed output of one layer. The paper gives no value; its code uses 0.9, for
another kind of layer loss."""


def loss_rises(
    model: PreTrainedModel, kind: str, batches: Sequence[Batch], *, out: Path | None = None
) -> Statistics:
    """Increase of the mean loss in nats per token, fp64, for each layer. `kind` is one of KINDS:

    ablation (E,)  without the output of each expert
    scaling ()     with the routed output times SCALE; shared experts and other layers unchanged

    A few rows are read at a time. The hidden states before every MoE layer are stored, so after a
    change in a layer the model only runs from this layer on. Of L MoE layers, (L + 1) / 2 run on
    average for each scaled layer or ablated expert. Sums are saved in the folder `out` after every
    layer, and an interrupted pass resumes from these sums. UserError when no two valid tokens are
    adjacent, and when losses are not finite (naming layer and expert).
    """
    check_loss(batches)
    pieces = _small_batches(model, batches)
    metadata = {**pass_header(model, batches, kind), "pieces": len(pieces)}
    predicted = sum(int(_is_predictor(valid).sum()) for _, valid in pieces)
    layers = moe_layers(model)
    done, sums = resume(out, metadata)
    reader = None
    for step in range(done, len(pieces) * len(layers)):  # a step is for one layer and piece
        number, position = divmod(step, len(layers))
        # a reader is for one batch; a resumed pass may begin in the middle of a batch
        if reader is None or position == 0:
            reader = _Reader(model, layers, *pieces[number])
        index = layers[position].index
        rise = KINDS[kind](reader, position)
        sums[index] = {kind: sums[index][kind] + rise if index in sums else rise}
        check_finite({index: sums[index]}, "the changed loss")
        save_checkpoint(out, sums, metadata, step + 1)
        progress.update(step + 1, len(pieces) * len(layers), "layers")
    means = {index: {kind: arrays[kind] / predicted} for index, arrays in sums.items()}
    return Statistics(means, {**metadata, "predicted": predicted})


class _Reader:
    """Runs the model on a few rows: first unchanged, and then again from any MoE layer on, with
    other gates in that layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        ids: torch.Tensor,
        valid: torch.Tensor,
    ):
        """Run the unchanged model on the rows `ids` (B, S), whose tokens are real where `valid`
        (B, S). UserError when its loss is not finite. layers: all MoE layers of the model."""
        self.decoder = Decoder(model)
        self.layers = layers
        self.ids = ids
        self.valid = valid
        self.states: States = {}
        self.log_likelihood = self._log_likelihood((0,) * len(layers), self.states)
        """() fp64: log-likelihood of the rows under the unpruned model. Computing it fills
        `states`."""
        if not bool(self.log_likelihood.isfinite()):
            raise UserError(
                "the loss of the unpruned model is NaN or infinite on this text: expected finite "
                "numbers"
            )

    def ablation_rises(self, position: int) -> torch.Tensor:
        """(E,) fp64: increase of the summed loss without each expert of the MoE layer number
        `position`."""

        def rise(expert: int) -> torch.Tensor:
            """() fp64: the increase without one expert, whose gates become 0."""
            return self._rise(position, lambda index, gates: gates.masked_fill(index == expert, 0))

        return torch.stack([rise(expert) for expert in range(self.layers[position].n_experts)])

    def scaling_rise(self, position: int) -> torch.Tensor:
        """() fp64: increase of the summed loss with the routed output of the MoE layer number
        `position` times SCALE."""
        return self._rise(position, lambda index, weights: weights * SCALE)

    def _rise(
        self, position: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """() fp64: increase of the summed loss when the gates (T, K) of the MoE layer number
        `position` are `change(expert ids, gates)`."""
        start = (0,) * position
        # any schedule will do that differs from the unpruned schedule at this layer: it makes the
        # decoder start here, from the stored states
        schedule = (*start, 1, *(0,) * (len(self.layers) - position - 1))

        def with_change(experts: ExpertsFunction) -> ExpertsFunction:
            """The function `experts`, called with the changed gates."""
            return lambda hidden, index, weights: experts(hidden, index, change(index, weights))

        with ExitStack() as undo:
            replace_experts(self.layers[position], with_change, undo)
            # the summed loss is minus the log-likelihood
            return self.log_likelihood - self._log_likelihood(schedule, {start: self.states[start]})

    def _log_likelihood(self, schedule: tuple[int, ...], states: States) -> torch.Tensor:
        """() fp64: the summed log-likelihood of the rows, with `schedule` and `states` as in
        `Decoder.logits`."""
        is_evaluated = _is_predictor(self.valid)
        logits, _ = self.decoder.logits(self.ids, self.valid, is_evaluated, schedule, states)
        positions = is_evaluated.nonzero()
        targets = self.ids.roll(-1, 1)[is_evaluated]
        # random numbers, which "nll" does not read, are set to 0
        contexts = Contexts(is_evaluated, positions[:, 0], targets, torch.zeros(len(positions)))
        return row_sums("nll", None, logits, contexts).sum()


KINDS = {"ablation": _Reader.ablation_rises, "scaling": _Reader.scaling_rise}
"""Name of a sum, which is also the kind of its step -> method that computes the sum over a few
rows."""


def _is_predictor(valid: torch.Tensor) -> torch.Tensor:
    """(B, S) bool: valid tokens that are followed by a valid token in their row."""
    return pad(valid[:, :-1] & valid[:, 1:], (0, 1))


def _small_batches(model: PreTrainedModel, batches: Sequence[Batch]) -> list[Batch]:
    """The batches, split into smaller batches of at least one row. The logits of such a batch fit
    into memory, unless it has one row."""
    tokens = min(device.PASS_TOKENS, device.tokens_with_logits(model))
    parts: list[Batch] = []
    for ids, valid in batches:
        n_rows = max(1, tokens // ids.shape[1])
        parts += zip(ids.split(n_rows), valid.split(n_rows), strict=True)
    return parts
