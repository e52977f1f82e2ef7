"""One forward and one backward pass of a frozen model: gradients of the loss with respect to activations.

The loss is the summed cross-entropy of the next tokens, over pairs of neighbouring tokens that both count. Sums, unlike
means, do not depend on how rows are cut into batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.partial_forward import run
from moe_lab.models.transformers_private import recomputed

SCALE = 2.0**8
"""Gradients that flow back are those of the loss times this, so that half precision does not round small ones to zero;
a power of two, so that dividing by it loses nothing."""
LOGITS = 1 << 26
"""Vocabulary logits that exist at once: 256 MB in fp32."""


def forward_and_backward(model: PreTrainedModel, input_ids: torch.Tensor, valid: torch.Tensor) -> None:
    """Read one batch, `input_ids` (B, S) and `valid` (B, S), and send SCALE times the loss's gradient back through it.

    To be called within `differentiable(model)`.
    """
    output = run(model, input_ids, valid)
    states: torch.Tensor = output.last_hidden_state
    gradient = loss_gradient(model, output, input_ids, valid)
    states.backward(gradient)


def loss_gradient(model: PreTrainedModel, output: Any, input_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """SCALE times the gradient (B, S, H) of the summed next-token loss at the decoder's `output`.

    Only positions whose token and next token both count reach the vocabulary, LOGITS numbers at a time.
    """
    states: torch.Tensor = output.last_hidden_state.detach()
    gradient = torch.zeros_like(states)
    row, column = (valid[:, :-1] & valid[:, 1:]).to(states.device).nonzero(as_tuple=True)
    targets = input_ids.to(states.device)[row, column + 1]
    vocabulary = int(model.config.get_text_config().vocab_size)
    for part in torch.arange(len(row), device=states.device).split(max(1, LOGITS // vocabulary)):
        some = states[row[part], column[part]][None].requires_grad_()
        logits = head(model, some, output)[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = cross_entropy(logits, targets[part].to(logits.device), reduction="sum") * SCALE
        (gradient[row[part], column[part]],) = (part[0] for part in torch.autograd.grad(loss, some))
    return gradient


def head(model: PreTrainedModel, states: torch.Tensor, output: Any) -> torch.Tensor:
    """Logits (B, n, V) the model reads from `states` (B, n, H), whatever it does on the way (scaling, capping).

    The model's own forward is called, its decoder standing still: it gives `states` in the place of `output`.
    """
    decoder = model.base_model
    before = decoder.__dict__.get("forward")
    still = type(output)(last_hidden_state=states)
    decoder.__dict__["forward"] = lambda *given, **named: still
    try:
        logits: torch.Tensor = model(inputs_embeds=states, use_cache=False).logits
        return logits
    finally:
        del decoder.__dict__["forward"]
        if before is not None:
            decoder.__dict__["forward"] = before


@contextmanager
def differentiable(model: PreTrainedModel, *, checkpointing: bool = False) -> Iterator[None]:
    """While open, no weight of `model` takes part in gradients and its embedded tokens do.

    With `checkpointing` each decoder layer keeps only its input and is computed again in the backward pass; the modules
    stay in eval mode. UserError for a model whose layers cannot do that.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    embeddings: Any = model.get_input_embeddings()
    with ExitStack() as stack, torch.enable_grad():
        for weight in trained:
            stack.callback(weight.requires_grad_, True)
            weight.requires_grad_(False)
        stack.callback(embeddings.register_forward_hook(lambda module, given, out: out.requires_grad_()).remove)
        if checkpointing:
            try:
                stack.enter_context(recomputed(model))
            except ValueError as error:
                raise UserError(f"checkpointing=true: {error}, set false") from None
        yield
