"""What the model's loss gains when one expert falls silent, or the routed experts of one layer speak more softly.

    ablation_j = (NLL with g_j f_j = 0 - NLL) / N               the truth that attribution scores stand for
    scaling    = (NLL with m = SCALE sum_j g_j f_j - NLL) / N   the layer loss of MoE-Slimming's Appendix A.1, step 3

over the N valid tokens that have a valid one before them in their row. Gates stay as they are: nothing is routed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.experts import chosen_experts, watch_routing
from moe_lab.search.fitness import Contexts, row_sums
from moe_lab.search.prefix import Decoder, States
from moe_lab.statistics.file import header
from moe_lab.statistics.observe import CHECKPOINT, Batch, description
from moe_lab.statistics.sums import Layers, Statistics, check_finite

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Expert ids and gates (T, K) -> other gates (T, K)."""

TOKENS = 4096
"""Tokens of one forward pass: short rows are read several times side by side, each time without another expert."""
SCALE = 0.9
"""What the routed output of one layer is multiplied by. The paper only says that it is scaled, as noise; its code takes
0.9, for a layer loss of another kind."""
LOGITS = 1 << 30
"""Bytes of the logits of one forward pass, unless a single row has more."""


def ablate(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    fingerprint: Mapping[str, Any],
    out: Path | None = None,
    groups: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """`ablation` (E,) fp64 of every layer: the rise of the mean loss, in nats per token, without that expert's output.

    A few rows are read at a time. The hidden states before every MoE layer are kept, and the layers from there on are
    run again for each expert that got a token: at most E (L + 1) / 2 layers for L MoE layers, instead of E L. After
    every `groups` layers the sums are saved in the folder `out`, if there is one; a pass that finds its own sums there
    goes on from them. `progress` is called with (layers done, of how many), where every few rows count all layers anew.

    UserError for no batches, for a text without two adjacent tokens, for losses that are not finite (naming layer and
    expert), and for models whose layers cannot be run one by one. The result holds means and cannot be merged.
    """
    return _rises(model, batches, "ablation", fingerprint, out, groups, progress)


def scale_layers(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    fingerprint: Mapping[str, Any],
    out: Path | None = None,
    groups: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """`scaling` () fp64 of every layer: the rise of the mean loss, in nats per token, with its routed output times
    SCALE, shared experts and all other layers as they are.

    As `ablate`, with one run of the layers from each MoE layer on: (L + 1) / 2 times all L of them.
    """
    return _rises(model, batches, "scaling", fingerprint, out, groups, progress)


def _rises(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    kind: str,
    fingerprint: Mapping[str, Any],
    out: Path | None,
    groups: int,
    progress: Callable[[int, int], None] | None,
) -> Statistics:
    """The rises of the loss that the function `kind` of `RISES` gives, layer by layer, as means over all tokens."""
    rows = _few_rows(model, batches)
    about = {**description(batches, kind, fingerprint, 0), "pieces": len(rows)}
    predicted = sum(int(_predicting(valid).sum()) for _, valid in rows)
    if not predicted:
        raise UserError("calibration gives no two adjacent tokens: expected rows in which a token follows another")
    layers = moe_layers(model)
    checkpoint = None if out is None else out / CHECKPOINT
    done, sums = _resume(checkpoint, about)
    reader = None
    for step in range(done, len(rows) * len(layers)):
        number, place = divmod(step, len(layers))
        if reader is None or place == 0:
            reader = _Reader(model, layers, *rows[number])
        index = layers[place].index
        rise = RISES[kind](reader, place)
        sums[index] = {kind: sums[index][kind] + rise if index in sums else rise}
        check_finite({index: sums[index]}, "the changed loss")
        if checkpoint is not None and (step + 1) % groups == 0:
            Statistics(sums, {**about, "done": step + 1}).save(checkpoint)
        if progress is not None:
            progress(step + 1, len(rows) * len(layers))
    return Statistics({index: {kind: named[kind] / predicted} for index, named in sums.items()}, about)


class _Reader:
    """The unpruned model on a few rows, ready to be run again from any MoE layer on with other gates in it."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[MoELayer], ids: torch.Tensor, valid: torch.Tensor):
        self.decoder = Decoder(model)
        self.layers = layers
        self.ids, self.valid = ids, valid
        self.copies = max(1, _tokens_at_once(model) // ids.numel())
        self.states: States = {}
        self.used: dict[int, torch.Tensor] = {}
        with watch_routing(layers, self._note):
            self.whole = self._likelihood(1, (0,) * len(layers), self.states)
        if not bool(self.whole.isfinite().all()):
            raise UserError("the loss of the unpruned model is NaN or infinite on this text: expected finite numbers")

    def _note(self, layer: MoELayer, index: torch.Tensor) -> None:
        """Remember which experts got a token, ascending."""
        self.used[layer.index] = index.unique().cpu()

    def without_each(self, place: int) -> torch.Tensor:
        """(E,) fp64: what the summed loss gains without each expert of the MoE layer number `place`, 0 for those that
        got no token."""
        rises = torch.zeros(self.layers[place].n_experts, dtype=torch.float64)
        for some in self.used[self.layers[place].index].split(self.copies):
            rises[some] = self._rises(place, len(some), partial(_silence, some))
        return rises

    def scaled(self, place: int) -> torch.Tensor:
        """() fp64: what the summed loss gains with the routed output of the MoE layer number `place` times SCALE."""
        return self._rises(place, 1, lambda index, weights: weights * SCALE)[0]

    def _rises(self, place: int, copies: int, change: Change) -> torch.Tensor:
        """(copies,) fp64: what the summed loss gains when `change` is done to the layer's gates, the rows repeated
        `copies` times."""
        start = (0,) * place
        states = {start: self.states[start].repeat(copies, 1, 1)}
        changed = (*start, 1, *(0,) * (len(self.layers) - place - 1))
        with _gated(self.layers[place], change):
            likelihood = self._likelihood(copies, changed, states)
        return self.whole.sum() - likelihood.view(copies, -1).sum(1)

    def _likelihood(self, copies: int, schedule: tuple[int, ...], states: States) -> torch.Tensor:
        """(copies * B,) fp64: the summed log-likelihood of each row, the rows repeated `copies` times."""
        ids, valid = self.ids.repeat(copies, 1), self.valid.repeat(copies, 1)
        where = _predicting(valid)
        logits, _ = self.decoder.logits(ids, valid, where, schedule, states)
        places = where.nonzero()
        targets = ids.roll(-1, 1)[where]
        return row_sums("nll", None, logits, Contexts(where, places[:, 0], targets, torch.zeros(len(places))))


RISES = {"ablation": _Reader.without_each, "scaling": _Reader.scaled}
"""Name of a sum, and kind of its step -> what it is of a few rows."""


def _silence(experts: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gates of tokens that come in len(experts) equal parts, of which part c gets nothing from expert experts[c]."""
    owner = experts.repeat_interleave(len(index) // len(experts))[:, None].to(index.device)
    return weights.masked_fill(index == owner, 0)


@contextmanager
def _gated(layer: MoELayer, change: Change) -> Iterator[None]:
    """While open, the gates (T, K) of the layer's experts are what `change` makes of ids and gates."""

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        index = chosen_experts(inputs, named)
        if "top_k_weights" in named:
            return inputs, {**named, "top_k_weights": change(index, named["top_k_weights"])}
        return (*inputs[:2], change(index, inputs[2]), *inputs[3:]), named

    hook = layer.experts.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _predicting(valid: torch.Tensor) -> torch.Tensor:
    """(B, S) bool: valid tokens that a valid one follows in their row."""
    where = torch.zeros_like(valid)
    where[:, :-1] = valid[:, :-1] & valid[:, 1:]
    return where


def _tokens_at_once(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    return min(TOKENS, LOGITS // (4 * int(head.weight.shape[0])))


def _few_rows(model: PreTrainedModel, batches: Sequence[Batch]) -> list[Batch]:
    """The batches in parts of no more than one forward pass, but at least a row."""
    most = _tokens_at_once(model)
    return [
        part
        for ids, valid in batches
        for part in zip(ids.split(max(1, most // ids.shape[1])), valid.split(max(1, most // ids.shape[1])), strict=True)
    ]


def _resume(checkpoint: Path | None, about: Mapping[str, Any]) -> tuple[int, Layers]:
    """(layers done, sums) of this very pass from a checkpoint; (0, {}) when there is none."""
    if checkpoint is None or not checkpoint.exists():
        return 0, {}
    try:
        saved = header(checkpoint)
        done = saved.pop("done", 0)
        same = saved == json.loads(json.dumps(about))
        return (done, Statistics.load(checkpoint).layers) if same else (0, {})
    except UserError:  # damaged: what it held is computed again
        return 0, {}
