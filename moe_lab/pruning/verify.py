"""Does an exported checkpoint compute what the masked model computes? Layer after layer, at any size."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from moe_lab.errors import UserError
from moe_lab.models.streamed import StreamedModel, stored_dtype
from moe_lab.pruning.mask import mask_layer
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.surgery import check_fit

TOKENS = 64
"""Tokens that are read."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference of outputs, as a share of the largest: channels are added up in another order."""


def verify(source: Path, plan: Plan, exported: Path, *, device: str = "cpu", trust_remote_code: bool = False) -> float:
    """Read TOKENS random tokens with the model in `source` masked by `plan`, and with the checkpoint in `exported`, one
    decoder layer of each in memory, in the precision they are stored in. Gives the largest difference of their logits
    as a share of the largest.

    The code of an export with uneven layers is moe_lab's own and is run. UserError naming the first decoder layer whose
    output differs by more than TOLERANCE.
    """
    dtype = stored_dtype(source)
    masked = StreamedModel(source, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    pruned = StreamedModel(exported, dtype=dtype, device=device, trust_remote_code=True)
    check_fit(plan, list(masked.moe.values()))
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(masked.model.config.get_text_config().vocab_size, (1, TOKENS), generator=draws)
    valid = torch.ones_like(ids, dtype=torch.bool)
    states: list[torch.Tensor | None] = [None, None]
    with torch.no_grad():
        for number in range(len(masked.layers)):
            with ExitStack() as stack:
                stack.enter_context(masked.layer(number))
                stack.enter_context(pruned.layer(number))
                for model in (masked, pruned):
                    model.prefetch(number + 1)
                if number in masked.moe:
                    stack.enter_context(mask_layer(masked.model, masked.moe[number], plan))
                pair = [m.through(number, ids, valid, s) for m, s in zip((masked, pruned), states, strict=True)]
            if not (difference := _difference(*pair)) <= TOLERANCE[dtype]:
                raise UserError(
                    f"export: decoder layer {number} of {exported} gives something else than the masked model: "
                    f"{difference:.1e} of its largest output, expected {TOLERANCE[dtype]:.0e} at most"
                )
            states = [*pair]
        return _difference(*(m.logits(ids, valid, s) for m, s in zip((masked, pruned), pair, strict=True)))


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-30))
