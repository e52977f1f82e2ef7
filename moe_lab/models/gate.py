"""How a router turns logits into gates, found out by running it on numbers of our own."""

from __future__ import annotations

import copy
from typing import Any

import torch

from moe_lab.models.discover import MoELayer

_TOKENS = 64
_SAME = 1e-4
"""Spread of the ratios of gates to a rule's, relative to their mean, up to which they are the rule's."""
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")


def gate_rule(layer: MoELayer) -> str:
    """The rule of a router in words, such as "softmax of all experts, the best 8, renormalized".

    A copy of the router with random weights routes random tokens on the CPU, so a model on the meta device will do. Its
    gates are compared with the softmax and the sigmoid of its logits, as they are or renormalized over the chosen
    experts, times a constant; "a rule of its own" where neither fits.
    """
    draws = torch.Generator().manual_seed(0)
    router = copy.deepcopy(layer.router).to_empty(device="cpu").float().eval()
    for tensor in [*router.parameters(), *router.buffers()]:
        tensor.data.normal_(generator=draws)
    passed = [torch.randn(part.tensor.shape, generator=draws) for part in layer.routing if part.module is layer.block]
    hidden = torch.randn(_TOKENS, layer.hidden, generator=draws) / layer.hidden**0.5
    with torch.no_grad():
        gates, chosen = _route(router, hidden, passed)
        logits = _logits(layer, router, hidden)
    words = [_formula(gates, chosen, logits), f"the best {layer.top_k}"]
    if any(part.name in _CORRECTIONS for part in layer.routing):
        words.append("chosen with a correction bias")
    if layer.n_group > 1:
        words.append(f"from {layer.topk_group} of {layer.n_group} groups")
    return ", ".join(words)


def _route(router: Any, hidden: torch.Tensor, passed: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ids, (T, K) each; routers differ in whether they take a batch."""
    try:
        _, gates, chosen = router(hidden, *passed)
    except ValueError:
        _, gates, chosen = router(hidden[None], *passed)
    return gates.reshape(_TOKENS, -1).double(), chosen.reshape(_TOKENS, -1)


def _logits(layer: MoELayer, router: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the router's linear map gives, (T, E)."""
    named = dict(router.named_parameters())
    paths = {id(module): path for path, module in layer.router.named_modules()}
    own = {
        part.name: named[f"{paths[id(part.module)]}.{part.name}".lstrip(".")]
        for part in layer.routing
        if part.name in ("weight", "bias") and part.module is not layer.block
    }
    return torch.nn.functional.linear(hidden, own["weight"], own.get("bias")).double()


def _formula(gates: torch.Tensor, chosen: torch.Tensor, logits: torch.Tensor) -> str:
    for name, weights in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        plain = weights.gather(1, chosen)
        for words, found in ((name, plain), (f"renormalized {name}", plain / plain.sum(-1, keepdim=True))):
            ratio = gates / found
            factor = float(ratio.mean())
            if float(ratio.std()) <= _SAME * abs(factor):
                return words if abs(factor - 1) < _SAME else f"{words} times {factor:.4g}"
    return "a rule of its own"
