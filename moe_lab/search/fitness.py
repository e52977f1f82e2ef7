"""Fitness of a candidate: how close its next-token distribution is to the full model's, position by
position.

p is the full model's distribution and q the candidate's at one position, y the token that follows
the position. Higher is always better: divergences are negated. Log-probabilities are fp32, sums
over tokens and positions fp64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

import torch
from torch.nn.functional import pad

CHUNK = 512
"""Positions whose (N, V) log-probabilities are computed at once."""


@dataclass(frozen=True)
class Positions:
    """The positions of a batch at which the fitness is computed, in row-major order."""

    is_evaluated: torch.Tensor
    """(B, S) bool: whether a position is one of these N."""
    targets: torch.Tensor
    """(N,) token that follows each position; 0 at the last position of a row."""
    draws: torch.Tensor
    """(N,) fp64 in [0, 1): the random number of each position, the same for all candidates."""


def esap(log_p: torch.Tensor, log_q: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Expected speculative acceptance, sum_v min(p_v, q_v) = 1 - TV(p, q), at N positions: (N,)
    fp64. `log_p` (N, V): of the unpruned model; `log_q` (N, V): of a candidate."""
    return torch.minimum(log_p, log_q).exp_().sum(-1, dtype=torch.float64)


def sap(log_p: torch.Tensor, log_q: torch.Tensor, positions: Positions) -> torch.Tensor:
    """The probability min(1, p_y / q_y) that speculative decoding accepts a token y, at N
    `positions`: (N,) fp64. y is drawn from q by the random number of the position. `log_p` (N, V):
    of the unpruned model; `log_q` (N, V): of a candidate."""
    y = draw_tokens(log_q.exp(), positions.draws)[:, None]
    ratio = log_p.gather(1, y).double() - log_q.gather(1, y).double()
    return ratio.clamp(max=0).exp()[:, 0]


def kl(log_p: torch.Tensor, log_q: torch.Tensor, positions: Positions) -> torch.Tensor:
    """-KL(p || q) at N positions, (N,) fp64. `log_p` (N, V): of the unpruned model; `log_q` (N, V):
    of a candidate."""
    return -(log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)


def kl_reversed(log_p: torch.Tensor, log_q: torch.Tensor, positions: Positions) -> torch.Tensor:
    """-KL(q || p) at N positions, (N,) fp64. `log_p` (N, V): of the unpruned model; `log_q` (N, V):
    of a candidate."""
    return kl(log_q, log_p, positions)


def nll(log_p: torch.Tensor, log_q: torch.Tensor, positions: Positions) -> torch.Tensor:
    """log q_y at N `positions`, (N,) fp64: y is the token that follows the position in the text.
    `log_q` (N, V): of a candidate."""
    return log_q.gather(1, positions.targets[:, None]).double()[:, 0]


POSITION_FITNESS = {function.__name__: function for function in (esap, sap, kl, kl_reversed, nll)}
"""Name -> function whose result is higher for better candidates. spec_dec is not defined by
position, see speculative_decoding.py."""


def draw_tokens(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Tokens (N,), drawn from `probabilities` (N, V). `draws` (N,): random numbers, uniform on
    [0, 1). Rows of `probabilities` need not sum to 1."""
    cumulative = probabilities.double().cumsum(-1)  # ordered: within a row, unless it is alone
    thresholds = draws * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]
    # rounding may make a threshold equal to the last cumulative number
    return tokens.clamp(max=cumulative.shape[1] - 1)


def evaluated_positions(
    ids: torch.Tensor, answers: torch.Tensor, *, shift: bool, generator: torch.Generator
) -> Positions:
    """The positions at which to compute the fitness, in a batch of `ids` (B, S). `answers` (B, S)
    is True at answer tokens.

    With `shift`, a position is evaluated if the next token is an answer token. Without `shift`, a
    position is evaluated if its own token is an answer token, as in the released code of
    EvoESAP."""
    is_evaluated = pad(answers[:, 1:], (0, 1)) if shift else answers.clone()
    draws = torch.rand(int(is_evaluated.sum()), generator=generator, dtype=torch.float64)
    targets = pad(ids[:, 1:], (0, 1))[is_evaluated]
    return Positions(is_evaluated, targets, draws)


def fitness_row_sums(
    name: str, log_p: torch.Tensor | None, logits: torch.Tensor, positions: Positions
) -> torch.Tensor:
    """(B,) fp64 on the CPU: the fitness `name` of a candidate, summed over the `positions` of each
    row. `log_p` (N, V) fp32: log-probabilities of the unpruned model at the N positions; None for a
    fitness that does not use them. `logits` (N, V): logits of the candidate at these positions."""
    function = POSITION_FITNESS[name]
    device = logits.device
    values = []
    for indices in torch.arange(len(positions.targets)).split(CHUNK):
        log_q = log_probabilities(logits[indices.to(device)])
        # without `log_p`, the function ignores its first argument, so any tensor will do
        chunk_log_p = log_q if log_p is None else log_p[indices].to(device)
        chunk = Positions(
            positions.is_evaluated,
            positions.targets[indices].to(device),
            positions.draws[indices].to(device),
        )
        values.append(function(chunk_log_p, log_q, chunk).cpu())
    rows = positions.is_evaluated.nonzero()[:, 0]  # of each position
    return torch.zeros(len(positions.is_evaluated), dtype=torch.float64).index_add_(  # ordered: CPU
        0, rows, torch.cat(values)
    )


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """log softmax over the last axis, in fp32."""
    return logits.float().log_softmax(-1)


def average(sums: Iterable[float], counts: Iterable[int], averaging: str) -> float:
    """The average fitness. `sums`: for each row, the fitness summed over the positions of the row
    (for spec_dec: number of accepted tokens). `counts`: for each row, the number of positions (for
    spec_dec: number of proposed tokens). `averaging`: macro is the mean of the means of the rows,
    micro the mean over all positions."""
    # fsum rounds once: results of `sum` differ between versions of Python
    rows = [(total, count) for total, count in zip(sums, counts, strict=True) if count]
    if averaging == "macro":
        return fsum(total / count for total, count in rows) / len(rows)
    return fsum(total for total, _ in rows) / sum(count for _, count in rows)
