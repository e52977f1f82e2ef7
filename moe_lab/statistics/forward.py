"""Every forward statistic of routed experts, at about the cost of a plain forward pass.

Experts compute what the model's own experts compute: logits have the bits of eager experts on the
CPU, and of grouped_mm on other devices. Gates are those of the model's own router, so no routing
rule is implemented here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moe_lab.models.discover import MoELayer
from moe_lab.models.rows import (
    Part,
    Rows,
    in_kernels,
    inner_products,
    sort_by_expert,
)
from moe_lab.statistics.observe import Observer, StatisticsHook, hidden_states

ENTROPY_BINS = 50
"""Bins of the histogram of router entropies, from 0 to the logarithm of the number of experts."""
CHANNEL_PREFIXES = ("", "gate_", "renormalized_")
"""Prefixes of the statistics of channels, by the factor of phi^2: 1, the square of the gate, and
the square of the renormalised gate."""
SOFTMAX_GATES = ("full_softmax", "double_softmax")
"""Kinds of gates that only routers have that are a softmax over all experts."""
EPSILON = 1e-6
"""Added to ||y||^2 in the denominators of the ala sums and the layer loss, as in the released code
of MoE-Slimming."""


class ForwardHook(StatisticsHook):
    """Adds the statistics of a forward pass, which docs/new_criterion.md defines."""

    kind = "forward"
    residual: torch.Tensor | None = None
    """(T, H) residual stream before the MoE block, until the block's experts have run."""
    logits: torch.Tensor | None = None
    """(T, E) logits of the router's last call; None if it returns none."""
    call: ExpertsCall | None = None
    """The last call of the experts, until the decoder layer returns."""

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        """`start`: name -> sum over the batches that were read before; {} for a new pass."""
        super().__init__(observer, layer, start)
        self.is_softmax_router = "sums_double_softmax" in start if start else None
        """Whether the router is a softmax over all experts; None before the first batch."""
        self.module_inputs_and_outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a module of the decoder layer, other than the MoE block -> (input, output) of the
        module."""

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Set `logits` to the router's logits of all experts, or to None."""
        self.logits = self.router_logits(result)

    def register_hooks(self, decoder_layer: torch.nn.Module) -> Iterable[RemovableHandle]:
        """Yield hooks that record the residual stream before the MoE block. The stream is the
        input of the norm before the block. All modules beside the block are hooked: this norm is
        the one whose output is the block's input."""
        for child in decoder_layer.children():
            if child is not self.layer.block:
                yield child.register_forward_hook(self._after_child)
        yield self.layer.block.register_forward_pre_hook(self._before_block)

    def _after_child(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Record the input and the output of `module`, which may be the norm before the block."""
        if (
            len(args) == 1
            and isinstance(args[0], torch.Tensor)
            and isinstance(result, torch.Tensor)
        ):
            self.module_inputs_and_outputs[id(module)] = (args[0].detach(), result)

    def _before_block(self, module: torch.nn.Module, args: Any) -> None:
        """Set `residual` to the input of the norm before the block. The norm is the recorded module
        that returned the block's input."""
        block_input = args[0] if args else None
        inputs = [
            state
            for state, result in self.module_inputs_and_outputs.values()
            if result is block_input
        ]
        # experts may work in a narrower space, to which the block projects
        self.residual = None
        if len(inputs) == 1 and inputs[0].shape[-1] == self.layer.hidden:
            self.residual = inputs[0].flatten(0, -2)
        self.module_inputs_and_outputs.clear()

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output m (T, H). Adds the statistics of this call."""
        layer = self.layer
        rows = sort_by_expert(layer, index)
        gates = weights.detach()
        ignored = self.ignored_tokens(hidden)
        further_gates: dict[str, torch.Tensor] = {}
        if self.logits is not None:
            of_kinds, entropies = softmax_gates(self.logits, index, ignored)
            if self.is_softmax_router is None:  # not in each batch, because a device is waited for
                self.is_softmax_router = is_softmax(self.logits, index, gates)
            if self.is_softmax_router:
                further_gates = dict(zip(SOFTMAX_GATES, of_kinds, strict=True))
        call = ExpertsCall(rows, gates, further_gates, ignored)

        def compute(part: Part, states: torch.Tensor) -> torch.Tensor:
            """The outputs f (n, H) of the experts of a part for the `states` (n, H) of its rows."""
            expert_weights = part.weights(layer)
            phi = layer.phi(states, expert_weights)
            f = layer.output(phi, expert_weights)
            call.add(part, phi.detach(), f.detach())
            return f

        routed = rows.output(hidden, weights, compute)
        m = routed.detach()
        sums = call.finish(m)
        if self.residual is not None:
            sums["shift_weighted"] = call.weigh_shifts(self.residual, m)
        if self.logits is not None:
            sums["router_entropy"] = entropies
        self.add(sums)
        self.call = call
        self.residual = None
        return routed

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Add the statistics of the last call that need the output of the decoder layer."""
        if self.call is not None:
            self.add(self.call.normalize(hidden_states(result).detach()))
            self.call = None
        self.module_inputs_and_outputs.clear()  # modules after the block were recorded, too


def softmax_gates(
    logits: torch.Tensor, index: torch.Tensor, ignored: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gates, entropies) of a router with the `logits` (T, E) that chose the experts `index` (T,
    K). Gates (2, T, K) fp64, of the kinds SOFTMAX_GATES: the softmax p of the logits, and the
    softmax of p. Entropies of p: a histogram (ENTROPY_BINS,) of numbers of tokens, in equal bins
    from 0 to ln E, without the tokens `ignored` (T,) bool; None: of all."""
    probabilities = logits.double().softmax(-1)
    both = torch.stack([probabilities, probabilities.softmax(-1)])
    # divided by ln 2 if there is only one expert, because ln 1 is 0
    entropies: torch.Tensor = torch.special.entr(probabilities).sum(-1) / math.log(
        max(2, probabilities.shape[-1])
    )
    entropies = entropies.clamp(max=1)  # rounding may make it larger
    if ignored is not None:
        entropies = entropies.masked_fill(ignored, -1)  # in no bin
    return both.gather(-1, index.expand(2, *index.shape)), entropies.histc(ENTROPY_BINS, 0, 1)


def is_softmax(logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether the gates g = `weights` (T, K) of a router are softmax probabilities p of `logits`
    (T, E), renormalised or not. `index` (T, K): ids of the chosen experts. The test is whether log
    g - log p is the same for all chosen experts of a token. If only one expert is chosen, it must
    be the same for all tokens."""
    # gates in half precision are rounded
    tolerance = 1e-3 if weights.dtype in (torch.float32, torch.float64) else 0.05
    log_probabilities = logits.double().log_softmax(-1).gather(-1, index)
    log_gates = weights.double().clamp(min=torch.finfo(torch.float64).tiny).log()
    log_ratios = log_gates - log_probabilities
    axis = 1 if index.shape[1] > 1 else 0
    spread = log_ratios.amax(axis) - log_ratios.amin(axis)
    return bool((spread <= tolerance).all())


@in_kernels
def shifts(xx: torch.Tensor, xa: torch.Tensor, aa: torch.Tensor) -> torch.Tensor:
    """1 - cos(x, x + a) of every token, (T,) fp64, at least 0; 1 where x or x + a is 0. `xx`, `xa`,
    `aa` (T,): the inner products of x and a."""
    sum_square = (xx + 2 * xa + aa).clamp(min=0)
    squares = xx * sum_square
    cosine = (xx + xa) / squares.sqrt()
    sine_square = (xx * aa - xa.square()).clamp(min=0) / squares
    # 1 - cos = sin^2 / (1 + cos), which does not cancel for small angles
    shift = torch.where(cosine > 0, sine_square / (1 + cosine), 1 - cosine)
    return torch.where(squares > 0, shift, 1.0)


class ExpertsCall:
    """The statistics of one call of a layer's experts. Call `add` for each part of the rows, then
    `finish`, then `normalize`.

    `rows`: the routed (token, expert) pairs. `weights` (T, K): the gates of the model.
    `further_gates`: kind of gate -> gates (T, K). `ignored` (T,) bool: which tokens do not count;
    None: all count.
    """

    def __init__(
        self,
        rows: Rows,
        weights: torch.Tensor,
        further_gates: Mapping[str, torch.Tensor],
        ignored: torch.Tensor | None,
    ) -> None:
        self.rows = rows
        gates = weights.double()
        kinds = {"model": gates, "renormalized": gates / gates.sum(-1, keepdim=True)}
        kinds |= further_gates
        self.kinds = tuple(kinds)
        """Names of the kinds of gates."""
        gates = torch.stack([*kinds.values()], -1)[rows.token, rows.column]
        self.gate_powers = torch.stack([torch.ones_like(gates), gates, gates.square()], -1)
        """(S, kinds, 3) fp64: 1, g and g^2 for the gates g of all `rows`."""
        self.ones, self.gate, self.gate_square = self.gate_powers[:, 0].unbind(-1)
        """(S,) each: those of the first kind of gate."""
        self.channel_factors = torch.stack([self.ones, self.gate_square, self.gate_powers[:, 1, 2]])
        """(3, S): factors of `channel_sums`."""
        self.ignored = ignored
        self.ignored_rows = None if ignored is None else ignored[rows.token]
        self.norm_square = torch.empty_like(self.channel_factors[0])
        """(S,): ||f||^2 of the outputs f of experts, which `add` computes."""
        self.statistics: list[tuple[Part, dict[str, torch.Tensor]]] = []
        """(part, name of a statistic -> its values for the experts of the part)."""
        self.outputs: list[tuple[slice, torch.Tensor]] = []
        """(rows of a part, outputs (n, H) of these rows), until `finish`."""

    def add(self, part: Part, phi: torch.Tensor, f: torch.Tensor) -> None:
        """Add the rows of a part. `phi` (n, I): the input of down_proj. `f` (n, H): the outputs of
        the experts."""
        self.outputs.append((part.rows, f))
        self.norm_square[part.rows] = inner_products(f, f)
        # on the CPU much faster than the norm or than both at once
        largest = torch.maximum(f.amax(-1), -f.amin(-1))
        statistics = {
            "output_sum": part.sum(f, self.ignored_rows),
            "output_abs_max": part.amax(largest, self.ignored_rows),
            **channel_sums(part, phi, self.channel_factors, self.ignored_rows),
        }
        self.statistics.append((part, statistics))

    def finish(self, routed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> sum, for all statistics that do not need the decoder layer's output. `routed` (T,
        H): the routed output m."""
        self.norm = self.norm_square.sqrt()
        norm_powers = torch.stack([self.ones, self.norm, self.norm_square])
        # sums of g^alpha ||f||^beta: (beta, E, kinds, alpha)
        moments = self._sums(norm_powers, self.gate_powers.flatten(1)).unflatten(-1, (-1, 3))
        names = [f"sums_{kind}" for kind in self.kinds]
        self._compute_numerators(routed)
        return {
            **self.rows.assemble(self.statistics),
            # with alpha = beta = 0, each token adds 1
            "tokens": moments[0, :, 0, 0],
            **dict(zip(names, moments.permute(2, 1, 3, 0), strict=True)),
        }

    def weigh_shifts(self, stream: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """The statistic `shift_weighted` (E,): s g ||f||, summed over the valid tokens of each
        expert. s is the token's value of `shifts`, g the gate, and f the output of the expert.
        `stream` (T, H): the residual stream before the MoE block. `routed` (T, H): the routed
        output m."""
        shift = shifts(inner_products(stream, stream), inner_products(stream, routed), self.loss)
        return self._sums((self.gate * self.norm)[None], shift[self.rows.token, None])[0, :, 0]

    def normalize(self, stream: torch.Tensor) -> dict[str, torch.Tensor]:
        """Statistic -> its sum over valid tokens: "ala_first" (E,), "ala_second" (E,) and
        "layer_loss" (). Each token's term is divided by ||y||^2 + EPSILON. y = `stream` (T, H): the
        residual stream after the decoder layer."""
        factor = (inner_products(stream, stream) + EPSILON).reciprocal()
        loss = self.loss * factor
        loss = loss if self.ignored is None else loss.masked_fill(self.ignored, 0)
        first, second = self._sums(self.numerators, factor[self.rows.token, None])[:, :, 0]
        return {"layer_loss": loss.sum(), "ala_first": first, "ala_second": second}

    def _sums(self, factors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Sums (F, E, C) of the products of `factors` (F, S) and `values` (S, C) over each expert's
        valid tokens."""
        return self.rows.product_sums(factors, values, self.ignored_rows)

    def _compute_numerators(self, routed: torch.Tensor) -> None:
        """Compute the numerators that `normalize` divides. f is the output of an expert for a
        token, g is its gate, and m is the token's row of `routed` (T, H). `numerators` (2, S) are g
        <f, m> and g^2 ||f||^2. `loss` (T,) is ||m||^2."""
        products = torch.empty_like(self.norm_square)  # <f, m>
        for rows, f in self.outputs:
            products[rows] = inner_products(f, routed, self.rows.token[rows])
        # frees the memory of all f, which are T x K x H numbers
        self.outputs.clear()
        self.numerators = torch.stack([self.gate * products, self.gate_square * self.norm_square])
        self.loss = inner_products(routed, routed)


def channel_sums(
    part: Part, phi: torch.Tensor, factors: torch.Tensor, ignored: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Statistics of the activations `phi` (n, I), the input of down_proj, of the rows of a part:
    (I,) for one expert, (E, I) for all, in at least fp32. "channel_square" is the sum of a phi^2
    over an expert's rows, and "channel_max" the square root of its maximum, for each of `factors` a
    (F, S), whose names have the first F of CHANNEL_PREFIXES. `ignored` (S,) bool: the rows that do
    not count; None: all count."""
    sums, maxima = part.square_sums(phi, factors, ignored)
    statistics = {}
    for number, prefix in enumerate(CHANNEL_PREFIXES[: len(factors)]):
        statistics[f"{prefix}channel_square"] = sums[number]
        statistics[f"{prefix}channel_max"] = maxima[number]
    return statistics
