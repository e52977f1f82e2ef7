"""The slow and obvious way, in fp64: each expert alone on its own tokens, by transformers' own
eager code.

`forward(name)` runs one batch through a tiny model and returns, for each layer and expert, the
tokens of the expert with their gates and outputs. `backward(name)` returns the gradients of the
loss over all logits, computed by autograd. Tests compare the sums of moe_lab with sums over these
tokens.
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
class ExpertTokens:
    """The valid tokens of one expert: tensors (N,), (N, K), (N, H) and (N, I), all fp64."""

    token: torch.Tensor
    gate: torch.Tensor
    """Factor by which the model multiplies the output of the expert."""
    gates: torch.Tensor
    """Gates of all experts of the token."""
    probability: torch.Tensor
    """softmax(logits) over all experts, at this one."""
    softmax_gate: torch.Tensor
    """softmax(softmax(logits)) at this expert."""
    f: torch.Tensor
    phi: torch.Tensor
    shift: torch.Tensor
    """1 - cos between the residual stream before the block, and that plus all gated outputs of the
    token."""

    def gate_of_kind(self, gate: str) -> torch.Tensor:
        """The gates (N,) of the kind `gate`, one of `moe_lab.config.GATES`."""
        if gate == "renormalized":
            return self.gate / self.gates.sum(-1)
        others = {"full_softmax": self.probability, "double_softmax": self.softmax_gate}
        return others.get(gate, self.gate)


@dataclass
class LayerTokens:
    """The tokens of one layer in a batch of T tokens, of which some are not valid."""

    experts: list[ExpertTokens]
    routed_output: torch.Tensor
    """(T, H) sum of gated outputs."""
    stream: torch.Tensor
    """(T, H) output of the decoder layer."""
    valid: torch.Tensor
    """(T,) bool."""
    block_input: torch.Tensor
    """(B, S, H) input of the MoE block."""
    index: torch.Tensor
    """(T, K) expert ids."""
    hidden: torch.Tensor
    """(T, H) input of the experts."""
    logits: torch.Tensor
    """(T, E) logits of the router."""


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
    """The tiny model of an architecture, which tests must not change."""
    return tiny.build(name, dtype=dtype)


@cache
def forward(name: str, dtype: torch.dtype = torch.float32) -> dict[int, LayerTokens]:
    """Layer -> its tokens in `batch()`: outputs in fp64, from inputs and gates that the model
    computed in `dtype`."""
    network = model(name, dtype)
    ids, valid = batch()
    calls: dict[int, dict[str, Any]] = {}
    hooks = []
    for layer in moe_layers(network):
        layer_calls = calls.setdefault(layer.index, {})
        decoder_layer = network.get_submodule(
            layer.name[: layer.name.index(f".{layer.index}.") + len(f".{layer.index}")]
        )

        def recorder(
            name: str, value_of: Callable[..., Any], layer_calls: dict[str, Any] = layer_calls
        ) -> Callable[..., None]:
            def hook(_: Any, inputs: Any, *result: Any) -> None:
                layer_calls[name] = value_of(inputs, *result)

            return hook

        norms = [getattr(decoder_layer, name) for name in NORMS if hasattr(decoder_layer, name)]
        hooks += [
            norms[0].register_forward_pre_hook(
                recorder("before", lambda inputs: inputs[0].flatten(0, -2))
            ),
            layer.experts.register_forward_pre_hook(recorder("experts", lambda inputs: inputs)),
            layer.block.register_forward_pre_hook(recorder("block", lambda inputs: inputs[0])),
            layer.router.register_forward_hook(recorder("logits", lambda _, result: result[0])),
            decoder_layer.register_forward_hook(
                recorder("stream", lambda _, out: out[0] if isinstance(out, tuple) else out)
            ),
        ]
    with torch.no_grad():
        network(input_ids=ids, attention_mask=valid.long(), use_cache=False)
        for hook in hooks:
            hook.remove()
        return {
            layer.index: _layer_tokens(layer, calls[layer.index], valid.flatten())
            for layer in moe_layers(network)
        }


@torch.no_grad()
def hook_sums(network: Any, hook: type[StatisticsHook]) -> Layers:
    """The sums of a hook over `batch()`. Asserts that the logits of the model are bitwise the same
    with the hook and after it."""
    ids, valid = batch()
    inputs: Any = {"input_ids": ids, "attention_mask": valid.long()}
    plain = network(**inputs).logits
    with Observer(network, hook) as observer:
        observer.valid = valid
        assert torch.equal(network(**inputs).logits, plain)
    assert torch.equal(network(**inputs).logits, plain)
    return observer.layers()


def _layer_tokens(layer: MoELayer, call: dict[str, Any], valid: torch.Tensor) -> LayerTokens:
    hidden, index, weights = (part.clone() for part in call["experts"])
    hidden = hidden.double()
    weights = weights.double()
    logits = call["logits"].double().reshape(-1, layer.n_experts)
    probabilities = logits.softmax(-1)
    module = copy.deepcopy(layer.experts).double()
    experts = []
    routed_output = torch.zeros_like(hidden)
    for expert in range(layer.n_experts):
        token, column = (index == expert).nonzero(as_tuple=True)
        f = module(
            hidden[token], torch.full((len(token), 1), expert), torch.ones(len(token), 1).double()
        )
        routed_output.index_add_(0, token, f * weights[token, column, None])
        is_valid = valid[token]
        expert_tokens = ExpertTokens(
            token[is_valid],
            weights[token, column][is_valid],
            weights[token][is_valid],
            probabilities[token, expert][is_valid],
            probabilities.softmax(-1)[token, expert][is_valid],
            f[is_valid],
            _channels(module, hidden[token[is_valid]], expert),
            torch.empty(0),
        )
        experts.append(expert_tokens)
    stream = call["stream"].double().flatten(0, -2)
    before = call["before"].double()
    for expert_tokens in experts:
        x = before[expert_tokens.token]
        y = (before + routed_output)[expert_tokens.token]
        expert_tokens.shift = 1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return LayerTokens(
        experts, routed_output, stream, valid, call["block"].clone(), index, hidden, logits
    )


def _channels(module: Any, hidden: torch.Tensor, expert: int) -> torch.Tensor:
    """phi (N, I) of an expert, computed by hand for the two kinds of experts of the tiny models."""
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
    """Of the valid tokens of one expert: phi (N, I), dL/dphi (N, I), dL/df (N, H) and the gate
    (N,)."""

    phi: torch.Tensor
    phi_gradient: torch.Tensor
    f_gradient: torch.Tensor
    gate: torch.Tensor


def down_projection(layer: MoELayer, expert: int) -> torch.Tensor:
    """down_proj of one expert, (H, I)."""
    module: Any = layer.experts
    weight: torch.Tensor = module.down_proj[expert]
    return weight.T if module.is_transposed else weight


def block_output(layer: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    """Output (T, H) of the MoE block for the input `hidden` (B, S, H)."""
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
    """Layer -> activations and gradients of its experts on `batch()`. Autograd ends at the gated
    outputs of the experts."""
    network = tiny.build(name, dtype=torch.float64)
    network.enable_input_require_grads()
    gated_outputs: dict[int, torch.Tensor] = {}
    for layer in moe_layers(network):

        def keep_gradient(_: Any, inputs: Any, out: torch.Tensor, index: int = layer.index) -> None:
            gated_outputs[index] = out
            out.retain_grad()

        layer.experts.register_forward_hook(keep_gradient)
    loss(network, *batch()).backward()
    layers = {}
    for layer in moe_layers(network):
        gradient = gated_outputs[layer.index].grad
        layer_tokens = forward(name, torch.float64)[layer.index]
        assert gradient is not None
        f_gradients = [
            expert.gate[:, None] * gradient[expert.token] for expert in layer_tokens.experts
        ]
        layers[layer.index] = [
            Backward(expert.phi, g @ down_projection(layer, number).detach(), g, expert.gate)
            for number, (expert, g) in enumerate(
                zip(layer_tokens.experts, f_gradients, strict=True)
            )
        ]
    return layers


def relative_error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |measured - expected| / |expected|; 0 where both are 0."""
    measured = torch.as_tensor(measured).double()
    expected = torch.as_tensor(expected).double()
    assert measured.shape == expected.shape
    error = (measured - expected).abs() / expected.abs()
    return float(torch.where(measured == expected, 0, error).max())


def assert_sums_close(actual: Layers, expected: Layers, tolerance: float = 0.0) -> None:
    """Assert that both have the same layers and sums, and that sums differ by at most `tolerance`
    times the largest number of the tensor."""
    assert actual.keys() == expected.keys()
    for layer, sums in expected.items():
        assert actual[layer].keys() == sums.keys()
        for name, values in sums.items():
            assert (actual[layer][name] - values).abs().max() <= tolerance * values.abs().max(), (
                layer,
                name,
            )
