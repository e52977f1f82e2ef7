"""A loaded model under several plans at once: the rows of one batch belong to different plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moe_lab.evaluation.generation import AnswerRow, GenSpec, Likelihood, cut, fitting
from moe_lab.evaluation.likelihoods import log_likelihoods
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.models.device import OUT_OF_MEMORY, PASS_TOKENS
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.row_masks import row_masks

CPU_MEMORY = 1.0
"""GiB of keys and values in a batch on a CPU."""
GPU_SHARE = 0.5
"""Share of a GPU's free memory for keys and values."""


class PlansModel:
    """A loaded model that answers for several plans at once, None for the unpruned model.

    An answer is that of the model under the plan alone, up to rounding. `memory` is the most GiB that keys and values
    of a batch may take; None for 1 on a CPU, and for half of what is free on a GPU. A batch that runs out of memory is
    halved, and so are those after it; the error is raised when a single row does not fit.
    """

    def __init__(self, local: LocalModel, plans: Sequence[Plan | None], memory: float | None = None) -> None:
        self.local, self.plans, self.memory = local, list(plans), memory

    def complete(
        self, requests: Sequence[tuple[int, str, AnswerRow | None]], spec: GenSpec
    ) -> Iterator[tuple[int, str, Likelihood | None]]:
        """(number of the request, text, likelihood of the answer, if it was read with the prompt) of each request.

        A request is the number of its plan, a prompt and a right answer after it. They are done batch after batch.
        `spec.batch_size` is that of one plan: a batch has as many rows for each of the plans, if memory allows.
        """
        distinct = list(dict.fromkeys(prompt for _, prompt, _ in requests))
        encoded = dict(zip(distinct, self.local.encoded(distinct, spec) if distinct else [], strict=True))
        order = fitting([len(encoded[prompt]) for _, prompt, _ in requests], spec, self.local.max_length)
        if not order:
            return
        with row_masks(self.local.model, self.plans) as masks:
            masks.set([0])
            answers = (len(row.tokens) for _, _, row in requests if row)
            longest = max(len(encoded[requests[order[0]][1]]) + spec.max_new_tokens, *answers, 0)
            fits = int(self._budget() // _row_bytes(self.local.model, longest))
            size = max(1, min(spec.batch_size * len(self.plans), fits))

            def of_batch(batch: list[int]) -> list[tuple[str, Likelihood | None]]:
                prompts = [encoded[requests[number][1]] for number in batch]
                rows = [requests[number][2] for number in batch]
                read = [row.tokens if row else prompt for prompt, row in zip(prompts, rows, strict=True)]

                def before(rows: Sequence[int]) -> None:
                    masks.set([requests[batch[row]][0] for row in rows])

                return self.local.batch(prompts, rows, spec, before, _rows_of_pass(read))

            while order:
                batch = order[:size]
                try:
                    found = of_batch(batch)
                except OUT_OF_MEMORY:
                    if len(batch) == 1:
                        raise
                    found = []
                if found:
                    for number, (text, likelihood) in zip(batch, found, strict=True):
                        yield number, cut(text, spec.stop, requests[number][1], chat=spec.chat), likelihood
                    order = order[size:]
                else:
                    size = _halved(len(batch))

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], plans: Sequence[int], batch_size: int
    ) -> list[Likelihood]:
        """As `LanguageModel.log_likelihoods`, each row under the plan with its number in `plans`."""
        size = min(batch_size, _rows_of_pass(rows))
        with row_masks(self.local.model, self.plans) as masks:
            while True:
                try:
                    return log_likelihoods(self.local.model, rows, starts, size, plans, masks.set)
                except OUT_OF_MEMORY:
                    if size == 1:
                        raise
                size = _halved(size)

    def _budget(self) -> float:
        """Bytes that keys and values of a batch may take."""
        device = self.local.model.device
        if self.memory is None and device.type == "cuda":
            return GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        return (CPU_MEMORY if self.memory is None else self.memory) * 2**30


def _halved(size: int) -> int:
    """Half of a batch size, after memory has run out."""
    torch.cuda.empty_cache()
    return max(1, size // 2)


@torch.inference_mode()
def _row_bytes(model: Any, tokens: int) -> int:
    """Bytes of the cache of a row of so many tokens: keys and values, and states of layers without these."""
    cache = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True).past_key_values
    size = 1
    for layer in getattr(cache, "layers", []):
        for name, state in vars(layer).items():
            if isinstance(state, torch.Tensor):
                size += state.nbytes * (tokens if name in ("keys", "values") else 1)
    return size


def _rows_of_pass(rows: Sequence[Sequence[int]]) -> int:
    """How many rows of token ids have at most `PASS_TOKENS` tokens together."""
    return max(1, PASS_TOKENS // max(map(len, rows), default=1))
