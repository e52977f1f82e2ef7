"""The fitness spec_dec: the share of drafted tokens that the full model accepts, in real
speculative decoding.

At a context x the candidate drafts y ~ q(.|x); the full model accepts it with probability min(1,
p_y / q_y) and then adds a token of its own, z ~ p(.|x, y). If it rejects y, the next token is drawn
from max(p - q, 0). The text is distributed as the full model's at temperature 1, whatever the
candidate. The fitness of a row is accepted / proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from moe_lab.calibration.batches import AnswerBatch
from moe_lab.errors import UserError
from moe_lab.pruning.mask import mask
from moe_lab.search.candidates import Decoder, Plans
from moe_lab.search.evolution import Schedule, SearchSettings
from moe_lab.search.fitness import average, draw_tokens

Probabilities = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""ids (B, S), valid (B, S), is_evaluated (B, S) bool -> next-token probabilities (N, V) at the
evaluated positions, fp64 on the CPU."""


class DraftingCandidates:
    """The fitness "spec_dec" of schedules. The model under the mask of a schedule drafts tokens,
    and the model without the mask verifies the drafts.

    `rows`: batches with one task and its answer in each row. `ends`: ids of the tokens that end a
    text.
    """

    def __init__(
        self,
        model: Any,
        plans: Plans,
        rows: Sequence[AnswerBatch],
        settings: SearchSettings,
        ends: frozenset[int],
    ) -> None:
        """UserError if a row has several tasks, if no row has an answer after a task, and if the
        longest task and `settings.max_new_tokens` new tokens do not fit the model."""
        self.model = model
        self.plans = plans
        self.settings = settings
        self.ends = ends
        self.decoder = Decoder(model)
        texts = [prompts(*batch) for batch in rows]  # batch -> row -> tokens of the task
        sizes = list(map(len, texts))  # number of rows of each batch
        generator = torch.Generator().manual_seed(settings.seed)
        # three for each row and step, see `accepted_and_proposed`
        draws = torch.rand(
            sum(sizes), settings.max_new_tokens, 3, generator=generator, dtype=torch.float64
        )
        self.batches = list(zip(texts, draws.split(sizes), strict=True))
        self.n_rows = sum(sizes)
        self.forwards = 0.0
        """Forward passes over all rows so far; a pass over some rows counts as their share."""
        longest = max(len(text) for batch in texts for text in batch)
        if not longest:
            raise UserError(
                "allocation.search holds no answer with a task before it: expected tasks with "
                "answers"
            )
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and longest + settings.max_new_tokens > limit:
            raise UserError(
                f"allocation.parameters.max_new_tokens={settings.max_new_tokens} and a task of "
                f"{longest} tokens do not fit the model's {limit} tokens: {limit - longest} would"
            )

    def evaluate(self, schedules: Sequence[Schedule]) -> list[float]:
        """The fitness of each schedule: accepted tokens / proposed tokens, averaged over the rows
        as `settings.averaging` says."""
        return [self._evaluate(schedule) for schedule in schedules]

    def _evaluate(self, schedule: Schedule) -> float:
        """The fitness of one schedule."""
        plan = self.plans.plan(schedule)

        def candidate(*batch: torch.Tensor) -> torch.Tensor:
            with mask(self.model, plan):
                return self._probabilities(*batch)

        counts: list[tuple[int, int]] = []
        for texts, draws in self.batches:
            counts += accepted_and_proposed(
                texts, draws, candidate, self._probabilities, ends=self.ends
            )
        accepted, proposed = zip(*counts, strict=True)
        return average(accepted, proposed, self.settings.averaging)

    def _probabilities(
        self, ids: torch.Tensor, valid: torch.Tensor, is_evaluated: torch.Tensor
    ) -> torch.Tensor:
        """Next-token probabilities (N, V), fp64 on the CPU, at the N positions that `is_evaluated`
        (B, S) selects."""
        self.forwards += len(ids) / self.n_rows
        # `schedule` () and `states` {}: all decoder layers run, and no hidden states are stored
        logits, _ = self.decoder.logits(ids, valid, is_evaluated, (), {})
        return logits.float().softmax(-1).double().cpu()


def prompts(ids: torch.Tensor, valid: torch.Tensor, answers: torch.Tensor) -> list[list[int]]:
    """The prompt of each row of `ids` (B, S): the tokens before the first answer token. [] for a
    row without an answer. `valid`, `answers`: (B, S) bool. UserError for rows with several
    documents."""
    texts = []
    for row, is_valid, is_answer in zip(ids, valid, answers, strict=True):
        # index of the first answer token; an invalid token before it separates two documents
        first = int(is_answer.int().argmax()) if bool(is_answer.any()) else 0
        if not bool(is_valid[:first].all()):
            raise UserError(
                "allocation.parameters.fitness=spec_dec needs one task a row: set packing=none in "
                "the set"
            )
        texts.append(row[:first].tolist())
    return texts


def accepted_and_proposed(
    texts: Sequence[Sequence[int]],
    draws: torch.Tensor,
    candidate: Probabilities,
    full: Probabilities,
    *,
    ends: frozenset[int],
) -> list[tuple[int, int]]:
    """(number of accepted tokens, number of proposed tokens) of each text; (0, 0) for an empty
    text.

    `candidate` computes the distribution q of the drafts. `full` computes the distribution p of the
    full model. `draws` (texts, steps, 3): random numbers for the draft, the acceptance and the next
    token. A text ends with one of the tokens `ends`, or when it has `steps` new tokens.
    """
    ids = [list(text) for text in texts]
    max_lengths = [len(text) + draws.shape[1] for text in texts]
    accepted = [0] * len(ids)
    proposed = [0] * len(ids)
    unfinished = [row for row, text in enumerate(texts) if text]  # indices of texts
    while unfinished:
        # proposed[row] is also the number of steps that the text has taken
        uniform = torch.stack([draws[row, proposed[row]] for row in unfinished])
        q = candidate(*_pad_right([ids[row] for row in unfinished], n_evaluated=1))
        draft = draw_tokens(q, uniform[:, 0])
        drafted_texts = [
            [*ids[row], int(token)] for row, token in zip(unfinished, draft, strict=True)
        ]
        # two rows for each text: at the position before the draft, and at the draft
        full_probabilities = full(*_pad_right(drafted_texts, n_evaluated=2))
        p = full_probabilities[0::2]
        p_after_draft = full_probabilities[1::2]
        column = draft[:, None]
        # u < p_y / q_y for the draft y and a random number u, without a division
        is_accepted = uniform[:, 1] * q.gather(1, column)[:, 0] < p.gather(1, column)[:, 0]
        residual = (p - q).clamp(min=0)
        next_tokens = draw_tokens(
            torch.where(is_accepted[:, None], p_after_draft, residual), uniform[:, 2]
        )
        for index, row in enumerate(list(unfinished)):
            proposed[row] += 1
            accepted[row] += int(is_accepted[index])
            tokens = [int(next_tokens[index])]
            if is_accepted[index]:
                tokens.insert(0, int(draft[index]))
            for token in tokens:
                # an accepted draft may end the text; then the next token is dropped
                if row in unfinished:
                    ids[row].append(token)
                    if token in ends or len(ids[row]) == max_lengths[row]:
                        unfinished.remove(row)
    return list(zip(accepted, proposed, strict=True))


def _pad_right(
    texts: Sequence[Sequence[int]], n_evaluated: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, valid, is_evaluated), each (B, S), of the `texts`, padded on the right."""
    ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    position = torch.arange(ids.shape[1])[None]
    length = torch.tensor([[len(text)] for text in texts])
    valid = position < length
    return ids, valid, valid & (position >= length - n_evaluated)
