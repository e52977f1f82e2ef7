"""The slow and obvious way, in fp64: each expert alone on its own tokens, by transformers' own eager code.

`routed(name)` gives what happened in one batch of a tiny model: per layer and expert the tokens it served with their
gates and outputs. Whatever moe_lab sums on the way is compared with what these lists give.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import tiny
import torch

from moe_lab.models.discover import MoELayer, moe_layers


@dataclass
class Served:
    """The valid tokens one expert served: (N,), (N, K), (N, H) and (N, I), all fp64."""

    token: torch.Tensor
    gate: torch.Tensor
    """What the model multiplies with."""
    gates: torch.Tensor
    """Those of all experts of the token."""
    probability: torch.Tensor
    """softmax(logits) over all experts, at this one."""
    softmax_gate: torch.Tensor
    """softmax(softmax(logits)) at this expert."""
    f: torch.Tensor
    phi: torch.Tensor
    shift: torch.Tensor
    """1 - cos between the residual stream before the block, and that plus all gated outputs of the token."""

    def by(self, gate: str) -> torch.Tensor:
        """The gate (N,) of that name."""
        if gate == "renormalized":
            return self.gate / self.gates.sum(-1)
        others = {"full_softmax": self.probability, "double_softmax": self.softmax_gate}
        return others.get(gate, self.gate)


@dataclass
class Seen:
    """One layer in one batch of T tokens, T' of them valid."""

    experts: list[Served]
    mixed: torch.Tensor
    """(T, H) sum of gated outputs."""
    stream: torch.Tensor
    """(T, H) output of the decoder layer."""
    before: torch.Tensor
    """(T, H) residual stream before the MoE block."""
    valid: torch.Tensor
    """(T,) bool."""
    block_input: torch.Tensor
    """(B, S, H) what enters the MoE block."""
    index: torch.Tensor
    """(T, K) expert ids."""


NORMS = ("pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm", "post_attention_layernorm")
"""Names of the norm that the MoE block reads; the first that a layer has."""


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask, the first rows padded on the left."""
    ids = tiny.tokens()
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, :7] = False
    valid[1, :1] = False
    return ids, valid


@cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model of an architecture; nobody changes it."""
    return tiny.build(name, dtype=dtype)


@cache
def routed(name: str, dtype: torch.dtype = torch.float32) -> dict[int, Seen]:
    """Layer -> what its experts did on `batch()`: in fp64, of inputs and gates that the model computed in `dtype`."""
    network = model(name, dtype)
    ids, valid = batch()
    calls: dict[int, dict[str, Any]] = {}
    hooks = []
    for layer in moe_layers(network):
        kept = calls.setdefault(layer.index, {})
        around = network.get_submodule(layer.name[: layer.name.index(f".{layer.index}.") + len(f".{layer.index}")])

        def keep(*given: Any, kept: dict[str, Any] = kept) -> None:
            kept["experts"] = given[1]

        def keep_block(*given: Any, kept: dict[str, Any] = kept) -> None:
            kept["block"] = given[1][0]

        def keep_router(*given: Any, kept: dict[str, Any] = kept) -> None:
            kept["logits"] = given[2][0]

        def keep_layer(*given: Any, kept: dict[str, Any] = kept) -> None:
            kept["stream"] = given[2][0] if isinstance(given[2], tuple) else given[2]

        def keep_before(*given: Any, kept: dict[str, Any] = kept) -> None:
            kept["before"] = given[1][0].flatten(0, -2)

        norms = [getattr(around, name) for name in NORMS if hasattr(around, name)]
        hooks.append(norms[0].register_forward_pre_hook(keep_before))
        hooks.append(layer.experts.register_forward_pre_hook(keep))
        hooks.append(layer.block.register_forward_pre_hook(keep_block))
        hooks.append(layer.router.register_forward_hook(keep_router))
        hooks.append(around.register_forward_hook(keep_layer))
    with torch.no_grad():
        network(input_ids=ids, attention_mask=valid.long(), use_cache=False)
        for hook in hooks:
            hook.remove()
        return {layer.index: _seen(layer, calls[layer.index], valid.flatten()) for layer in moe_layers(network)}


def _seen(layer: MoELayer, call: dict[str, Any], valid: torch.Tensor) -> Seen:
    hidden, index, weights = (part.clone() for part in call["experts"])
    hidden, weights = hidden.double(), weights.double()
    full = call["logits"].double().reshape(-1, layer.n_experts).softmax(-1)
    module = copy.deepcopy(layer.experts).double()
    experts = []
    mixed = torch.zeros_like(hidden)
    for expert in range(layer.n_experts):
        token, column = (index == expert).nonzero(as_tuple=True)
        f = module(hidden[token], torch.full((len(token), 1), expert), torch.ones(len(token), 1).double())
        mixed.index_add_(0, token, f * weights[token, column, None])
        keep = valid[token]
        served = Served(
            token[keep],
            weights[token, column][keep],
            weights[token][keep],
            full[token, expert][keep],
            full.softmax(-1)[token, expert][keep],
            f[keep],
            _channels(module, hidden[token[keep]], expert),
            torch.empty(0),
        )
        experts.append(served)
    stream, before = call["stream"].double().flatten(0, -2), call["before"].double()
    for served in experts:
        x, y = before[served.token], (before + mixed)[served.token]
        served.shift = 1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return Seen(experts, mixed, stream, before, valid, call["block"].clone(), index)


def _channels(module: Any, hidden: torch.Tensor, expert: int) -> torch.Tensor:
    """phi by hand, for the two kinds of experts the tiny models have."""
    weight = module.gate_up_proj[expert]
    gate_up = hidden @ (weight if module.is_transposed else weight.T)
    if module.has_bias:
        gate_up = gate_up + module.gate_up_proj_bias[expert]
    if not module.is_concatenated:  # gpt_oss: interleaved, clamped
        gate, up = gate_up[:, 0::2].clamp(max=module.limit), gate_up[:, 1::2].clamp(-module.limit, module.limit)
        return (up + 1) * gate * torch.sigmoid(module.alpha * gate)
    gate, up = gate_up.chunk(2, -1)
    return module.act_fn(gate) * up


def relative(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |measured - expected| / |expected|; 0 where both are 0."""
    measured, expected = torch.as_tensor(measured).double(), torch.as_tensor(expected).double()
    assert measured.shape == expected.shape
    error = (measured - expected).abs() / expected.abs()
    return float(torch.where(measured == expected, 0, error).max())
