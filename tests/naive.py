"""The slow and obvious way, in fp64: each expert alone on its own tokens, by transformers' own
eager code.

`routed(name)` gives what happened in one batch of a tiny model: per layer and expert the tokens it
served with their gates and outputs; `backward(name)` what happened on the way back, the loss over
all logits and gradients as autograd gives them. Whatever moe_lab sums on the way is compared with
what these lists give.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import tiny
import torch
from torch.nn.functional import cross_entropy

from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.statistics import Layers
from moe_lab.statistics.observe import Observer, StatisticsHook


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
    """1 - cos between the residual stream before the block, and that plus all gated outputs of the
    token."""

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
    valid: torch.Tensor
    """(T,) bool."""
    block_input: torch.Tensor
    """(B, S, H) what enters the MoE block."""
    index: torch.Tensor
    """(T, K) expert ids."""
    hidden: torch.Tensor
    """(T, H) what enters the experts."""
    logits: torch.Tensor
    """(T, E) of the router."""


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
    """Layer -> what its experts did on `batch()`: in fp64, of inputs and gates that the model
    computed in `dtype`."""
    network = model(name, dtype)
    ids, valid = batch()
    calls: dict[int, dict[str, Any]] = {}
    hooks = []
    for layer in moe_layers(network):
        kept = calls.setdefault(layer.index, {})
        around = network.get_submodule(
            layer.name[: layer.name.index(f".{layer.index}.") + len(f".{layer.index}")]
        )

        def note(
            name: str, pick: Callable[..., Any], kept: dict[str, Any] = kept
        ) -> Callable[..., None]:
            def hook(_: Any, inputs: Any, *result: Any) -> None:
                kept[name] = pick(inputs, *result)

            return hook

        norms = [getattr(around, name) for name in NORMS if hasattr(around, name)]
        hooks += [
            norms[0].register_forward_pre_hook(
                note("before", lambda inputs: inputs[0].flatten(0, -2))
            ),
            layer.experts.register_forward_pre_hook(note("experts", lambda inputs: inputs)),
            layer.block.register_forward_pre_hook(note("block", lambda inputs: inputs[0])),
            layer.router.register_forward_hook(note("logits", lambda _, result: result[0])),
            around.register_forward_hook(
                note("stream", lambda _, out: out[0] if isinstance(out, tuple) else out)
            ),
        ]
    with torch.no_grad():
        network(input_ids=ids, attention_mask=valid.long(), use_cache=False)
        for hook in hooks:
            hook.remove()
        return {
            layer.index: _seen(layer, calls[layer.index], valid.flatten())
            for layer in moe_layers(network)
        }


@torch.no_grad()
def observed(network: Any, hook: type[StatisticsHook]) -> Layers:
    """The sums of a hook over `batch()`; to the bit, the model computes the same while it is
    observed and afterwards."""
    ids, valid = batch()
    inputs: Any = {"input_ids": ids, "attention_mask": valid.long()}
    plain = network(**inputs).logits
    with Observer(network, hook) as observer:
        observer.valid = valid
        assert torch.equal(network(**inputs).logits, plain)
    assert torch.equal(network(**inputs).logits, plain)
    return observer.layers()


def _seen(layer: MoELayer, call: dict[str, Any], valid: torch.Tensor) -> Seen:
    hidden, index, weights = (part.clone() for part in call["experts"])
    hidden = hidden.double()
    weights = weights.double()
    logits = call["logits"].double().reshape(-1, layer.n_experts)
    full = logits.softmax(-1)
    module = copy.deepcopy(layer.experts).double()
    experts = []
    mixed = torch.zeros_like(hidden)
    for expert in range(layer.n_experts):
        token, column = (index == expert).nonzero(as_tuple=True)
        f = module(
            hidden[token], torch.full((len(token), 1), expert), torch.ones(len(token), 1).double()
        )
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
    stream = call["stream"].double().flatten(0, -2)
    before = call["before"].double()
    for served in experts:
        x = before[served.token]
        y = (before + mixed)[served.token]
        served.shift = 1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return Seen(experts, mixed, stream, valid, call["block"].clone(), index, hidden, logits)


def _channels(module: Any, hidden: torch.Tensor, expert: int) -> torch.Tensor:
    """phi by hand, for the two kinds of experts the tiny models have."""
    weight = module.gate_up_proj[expert]
    gate_up = hidden @ (weight if module.is_transposed else weight.T)
    if module.has_bias:
        gate_up = gate_up + module.gate_up_proj_bias[expert]
    if not module.is_concatenated:  # gpt_oss: interleaved, clamped
        gate = gate_up[:, 0::2].clamp(max=module.limit)
        up = gate_up[:, 1::2].clamp(-module.limit, module.limit)
        return (up + 1) * gate * torch.sigmoid(module.alpha * gate)
    gate, up = gate_up.chunk(2, -1)
    return module.act_fn(gate) * up


class Backward(NamedTuple):
    """On the valid tokens that one expert served: phi (N, I), dL/dphi (N, I), dL/df (N, H) and the
    gate (N,)."""

    phi: torch.Tensor
    phi_gradient: torch.Tensor
    f_gradient: torch.Tensor
    gate: torch.Tensor


def down(layer: MoELayer, expert: int) -> torch.Tensor:
    """down_proj of one expert, (H, I)."""
    module: Any = layer.experts
    weight: torch.Tensor = module.down_proj[expert]
    return weight.T if module.is_transposed else weight


def block(layer: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    """What the MoE block gives for `hidden` (B, S, H), (T, H)."""
    result = layer.block(hidden)
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output.flatten(0, -2)


def loss(network: Any, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the next token over pairs of valid tokens, one after the other."""
    logits = network(input_ids=ids, attention_mask=valid.long(), use_cache=False).logits
    terms = [
        cross_entropy(logits[row, t], ids[row, t + 1])
        for row in range(ids.shape[0])
        for t in range(ids.shape[1] - 1)
        if valid[row, t] and valid[row, t + 1]
    ]
    return torch.stack(terms).sum()


@cache
def backward(name: str) -> dict[int, list[Backward]]:
    """Layer -> what its experts did on `batch()`, there and back: autograd ends at their gated
    outputs."""
    network = tiny.build(name, dtype=torch.float64)
    network.enable_input_require_grads()
    mixed: dict[int, torch.Tensor] = {}
    for layer in moe_layers(network):

        def keep(_: Any, inputs: Any, out: torch.Tensor, index: int = layer.index) -> None:
            mixed[index] = out
            out.retain_grad()

        layer.experts.register_forward_hook(keep)
    loss(network, *batch()).backward()
    found = {}
    for layer in moe_layers(network):
        gradient = mixed[layer.index].grad
        seen = routed(name, torch.float64)[layer.index]
        assert gradient is not None
        of_f = [expert.gate[:, None] * gradient[expert.token] for expert in seen.experts]
        found[layer.index] = [
            Backward(expert.phi, g @ down(layer, number).detach(), g, expert.gate)
            for number, (expert, g) in enumerate(zip(seen.experts, of_f, strict=True))
        ]
    return found


def relative(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |measured - expected| / |expected|; 0 where both are 0."""
    measured = torch.as_tensor(measured).double()
    expected = torch.as_tensor(expected).double()
    assert measured.shape == expected.shape
    error = (measured - expected).abs() / expected.abs()
    return float(torch.where(measured == expected, 0, error).max())


def assert_alike(found: Layers, expected: Layers, tolerance: float = 0.0) -> None:
    """The same sums of the same layers, within `tolerance` of the largest number of each tensor."""
    assert found.keys() == expected.keys()
    for layer, sums in expected.items():
        assert found[layer].keys() == sums.keys()
        for name, values in sums.items():
            assert (found[layer][name] - values).abs().max() <= tolerance * values.abs().max(), (
                layer,
                name,
            )
