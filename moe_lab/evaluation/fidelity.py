"""Compare the next-token distributions of a pruned model with those of the unpruned model.

Of the unpruned model, the `top` largest log-probabilities at each token are stored, and the
probability of all other tokens together (the rest). The KL divergence is computed with the rest as
one outcome. By the log-sum inequality this is at most the KL divergence over all tokens, and the
two are equal if `top` is the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save_file

from moe_lab.evaluation.engines import Row
from moe_lab.evaluation.engines.likelihoods import LOGITS
from moe_lab.json_files import digest
from moe_lab.models.experts import to_device

TOP = 256
"""Default of a benchmark's `parameters.top`."""
Distribution = Mapping[str, torch.Tensor]
"""Distributions at N tokens. `ids`: (N, top) int32, the likeliest tokens, the likeliest first.
`log_p`: (N, top + 1) fp32, the log-probabilities of these tokens and of the rest."""


@dataclass(frozen=True)
class Comparison:
    """Function that compares a model with the unpruned model at the scored tokens of a row."""

    top: int
    folder: Path
    """Folder to which the distributions of the unpruned model are written."""
    read: Callable[[str], bytes] | None
    """Function of the name of such a file that returns its content; None for the unpruned model
    itself."""

    def __call__(self, row: Row, logits: torch.Tensor) -> tuple[float, int]:
        """(sum of KL divergences, number of tokens at which the likeliest tokens differ). `logits`:
        (N, V), which predict the N scored tokens."""
        sums = torch.zeros(2, dtype=torch.float64)
        # blocks bound the memory of numbers in fp32
        for number, block in enumerate(logits.split(max(1, LOGITS // logits.shape[1]))):
            log_q = block.log_softmax(-1, dtype=torch.float32)
            file = f"{digest([row.tokens, number])}.safetensors"
            if self.read:
                sums += distances(load(self.read(file)), log_q).sum(0)
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                save_file(top_log_probabilities(log_q, self.top), self.folder / file)
        return float(sums[0]), int(sums[1])


def top_log_probabilities(log_p: torch.Tensor, top: int) -> dict[str, torch.Tensor]:
    """The `Distribution` of log-probabilities (N, V), on the CPU."""
    ids = log_p.topk(min(top, log_p.shape[1])).indices
    return {"ids": ids.int().cpu(), "log_p": _coarse(log_p, ids).cpu()}


def distances(stored: Distribution, log_q: torch.Tensor) -> torch.Tensor:
    """(N, 2) fp64 on the CPU: KL(p || q) with the rest as one outcome, and 1 where the likeliest
    token of p is not the likeliest of q. p: the distribution `stored`. `log_q`: (N, V)."""
    ids = to_device(stored["ids"].long(), log_q.device)
    log_p = to_device(stored["log_p"].double(), log_q.device)
    terms = log_p.exp() * (log_p - _coarse(log_q, ids))
    # if `top` is the size of the vocabulary, the rest has no probability and adds nothing
    kl = terms.where(log_p > -torch.inf, 0).sum(1)
    # several tokens may be equally likely, as logits in bf16 are often equal
    differs = log_q.gather(1, ids[:, :1])[:, 0] < log_q.amax(1)
    return torch.stack([kl, differs.double()], 1).cpu()


def _coarse(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The entries `ids` (N, k) of log-probabilities (N, V), and the log-probability of all other
    tokens: (N, k + 1)."""
    # more exact than 1 minus the probability of `ids`
    rest = log_p.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_p.gather(1, ids), rest], 1)
