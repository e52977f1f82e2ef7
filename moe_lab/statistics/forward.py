"""Every forward statistic of routed experts, at about the cost of a plain forward pass.

Experts compute what the eager forward computes, in the same order: logits are bit-identical to it
on the CPU. Gates are those of the model's own router, so no routing rule is implemented here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import Rows, at_least_fp32, expert_slices, routed_output, sort_by_expert
from moe_lab.statistics.observe import Observer, StatisticsHook

ENTROPY_BINS = 50
"""Bins of the histogram of router entropies, from 0 to the logarithm of the number of experts."""
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
        """Whether the router is a softmax over all experts; None until the first call of a new
        pass."""
        self.module_inputs_and_outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a module of the decoder layer, other than the MoE block -> (input, output) of the
        module."""

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Set `logits` to the router's logits of all experts, or to None."""
        logits = result[0] if isinstance(result, tuple) else None
        self.logits = None
        if isinstance(logits, torch.Tensor) and logits.shape[-1] == self.layer.n_experts:
            self.logits = logits.detach().reshape(-1, self.layer.n_experts)

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
        self.residual = inputs[0].flatten(0, -2) if len(inputs) == 1 else None
        self.module_inputs_and_outputs.clear()

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output m (T, H). Adds the statistics of this call."""
        layer = self.layer
        rows = sort_by_expert(index, layer.n_experts)
        gates = weights.detach()
        call = ExpertsCall(
            layer.n_experts,
            rows,
            gates,
            self._softmax_gates(index, gates),
            self.valid_tokens(hidden),
        )

        def compute(expert: int, part: slice, states: torch.Tensor) -> torch.Tensor:
            """The output f (n, H) of an expert for the `states` (n, H). `part`: the slice of the
            expert's `rows`."""
            expert_weights = layer.weights(expert)
            phi = layer.phi(states, expert_weights)
            f = layer.output(phi, expert_weights)
            call.add(expert, part, phi.detach(), f.detach())
            return f

        routed = routed_output(hidden, rows, weights, compute)
        for name, sums in call.finish(routed.detach()).items():
            self.add(name, sums)
        if self.residual is not None:
            self.add("shift_weighted", call.weigh_shifts(self.residual, routed.detach()))
        if self.logits is not None:
            self.add("router_entropy", entropy_histogram(self.logits, call.valid))
        self.call = call
        self.residual = None
        return routed

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Add the statistics of the last call that need the output of the decoder layer."""
        if self.call is not None:
            stream = result[0] if isinstance(result, tuple) else result
            for name, sums in self.call.normalize(stream.detach().flatten(0, -2)).items():
                self.add(name, sums)
            self.call = None
        self.module_inputs_and_outputs.clear()  # modules after the block were recorded, too

    def _softmax_gates(self, index: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Kind of gate -> gates (T, K), for the kinds "full_softmax" and "double_softmax"; {} if
        the router is not a softmax over all experts."""
        if self.is_softmax_router is None:
            self.is_softmax_router = self.logits is not None and is_softmax(
                self.logits, index, weights
            )
        if not self.is_softmax_router or self.logits is None:
            return {}
        probabilities = self.logits.double().softmax(-1)
        return {
            "full_softmax": probabilities.gather(-1, index),
            "double_softmax": probabilities.softmax(-1).gather(-1, index),
        }


def entropy_histogram(logits: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Histogram (ENTROPY_BINS,) of router entropies: numbers of valid tokens in equal bins from 0
    to ln E. `logits` (T, E). `valid` (T,): which tokens count; None: all."""
    logits = logits if valid is None else logits[valid]
    # divided by ln 2 if there is only one expert, because ln 1 is 0
    entropies = torch.special.entr(logits.double().softmax(-1)).sum(-1) / math.log(
        max(2, logits.shape[-1])
    )
    bins = (entropies * ENTROPY_BINS).long().clamp(0, ENTROPY_BINS - 1)
    return torch.bincount(bins, minlength=ENTROPY_BINS)


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
    return bool(((log_ratios.amax(axis) - log_ratios.amin(axis)) <= tolerance).all())


def shifts(stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """1 - cos(x, x + a) of every token, (T,) fp64, at least 0, for x = `stream` (T, H) and a =
    `added` (T, H); 1 where x or x + a is 0."""
    x = at_least_fp32(stream)
    a = at_least_fp32(added)
    xx, xa, aa = (
        (left_vector * right_vector).sum(-1).double()
        for left_vector, right_vector in ((x, x), (x, a), (a, a))
    )
    sum_square = (xx + 2 * xa + aa).clamp(min=0)
    squares = xx * sum_square
    cosine = (xx + xa) / squares.sqrt()
    sine_square = (xx * aa - xa.square()).clamp(min=0) / squares
    # 1 - cos = sin^2 / (1 + cos), which does not cancel for small angles
    shift = torch.where(cosine > 0, sine_square / (1 + cosine), 1 - cosine)
    return torch.where(squares > 0, shift, 1.0)


class ExpertsCall:
    """The statistics of one call of a layer's experts. Call `add` for each expert, then `finish`,
    then `normalize`.

    `rows`: the routed (token, expert) pairs. `weights` (T, K): the gates of the model.
    `further_gates`: kind of gate -> gates (T, K). `valid` (T,) bool: which tokens count; None: all.
    """

    def __init__(
        self,
        n_experts: int,
        rows: Rows,
        weights: torch.Tensor,
        further_gates: Mapping[str, torch.Tensor],
        valid: torch.Tensor | None,
    ) -> None:
        self.n_experts = n_experts
        self.rows = rows
        self.gates = {"model": weights.double()}
        self.gates["renormalized"] = self.gates["model"] / self.gates["model"].sum(-1, keepdim=True)
        self.gates |= {name: gates.double() for name, gates in further_gates.items()}
        self.valid = valid
        self.valid_rows = None if valid is None else valid[rows.token]
        # the next tensors have one entry for each of `rows`
        self.gate_square = at_least_fp32(weights)[rows.token, rows.column].square()
        renormalized = self.gates["renormalized"][rows.token, rows.column]
        self.gate_squares = (self.gate_square, renormalized.to(self.gate_square.dtype).square())
        # ||f||^2 of the outputs f of experts, which `add` computes
        self.norm_square = torch.empty_like(self.gate_square)
        self.statistics: dict[str, torch.Tensor] = {}
        """Name of a statistic of the outputs -> (E, ...)."""
        self.outputs: list[tuple[slice, torch.Tensor]] = []
        """(slice of the expert's rows, outputs (n, H) of these rows) for each expert, until
        `finish`."""

    def add(self, expert: int, part: slice, phi: torch.Tensor, f: torch.Tensor) -> None:
        """Add one expert. `part`: the slice of the expert's rows. `phi` (n, I): the input of
        down_proj. `f` (n, H): the output of the expert."""
        phi = at_least_fp32(phi)
        f = at_least_fp32(f)
        self.outputs.append((part, f))
        torch.sum(f.square(), -1, out=self.norm_square[part])
        if not self.statistics:
            self.statistics["output_sum"] = f.new_zeros(self.n_experts, f.shape[1])
            self.statistics["output_abs_max"] = f.new_zeros(self.n_experts)
            self.channels = Channels(self.n_experts, phi.shape[1], phi, ("gate", "renormalized"))
        gate_squares = [square[part] for square in self.gate_squares]
        if self.valid_rows is not None:
            valid_rows = self.valid_rows[part]
            phi = phi[valid_rows]
            f = f[valid_rows]
            gate_squares = [square[valid_rows] for square in gate_squares]
            if len(f) == 0:  # a maximum of no rows would fail
                return
        torch.sum(f, 0, out=self.statistics["output_sum"][expert])
        lowest, highest = torch.aminmax(f)
        torch.maximum(-lowest, highest, out=self.statistics["output_abs_max"][expert])
        self.channels.add(expert, phi, *gate_squares)

    def finish(self, routed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> sum, for all statistics that do not need the decoder layer's output. `routed` (T,
        H): the routed output m."""
        self._compute_numerators(at_least_fp32(routed))
        moments = self._moments()
        names = [f"sums_{gate}" for gate in self.gates]
        return {
            **self.statistics,
            **self.channels.finish(),
            # moments are sums of g^alpha ||f||^beta; with alpha = beta = 0, each token adds 1
            "tokens": moments[:, 0, 0].clone(),
            # along axis 1, each kind of gate has three entries: alpha = 0, 1 and 2
            **dict(zip(names, moments.split(3, 1), strict=True)),
        }

    def weigh_shifts(self, stream: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """The statistic `shift_weighted` (E,): s g ||f||, summed over the valid tokens of each
        expert. s is the token's value of `shifts`, g the gate, and f the output of the expert.
        `stream` (T, H): the residual stream before the MoE block. `routed` (T, H): the routed
        output m."""
        token = self.rows.token
        column = self.rows.column
        terms = (
            shifts(stream, routed)[token]
            * self.gates["model"][token, column]
            * self.norm_square.double().sqrt()
        )
        terms = terms if self.valid_rows is None else torch.where(self.valid_rows, terms, 0)
        return torch.bincount(self.rows.expert, terms, self.n_experts)

    def normalize(self, stream: torch.Tensor) -> dict[str, torch.Tensor]:
        """Statistic -> its sum over valid tokens: "ala_first" (E,), "ala_second" (E,) and
        "layer_loss" (). Each token's term is divided by ||y||^2 + EPSILON. y = `stream` (T, H): the
        residual stream after the decoder layer."""
        factor = 1 / (at_least_fp32(stream).square().sum(-1).double() + EPSILON)
        loss = self.loss * factor
        loss = loss if self.valid is None else loss[self.valid]
        sums = {"layer_loss": loss.sum()}
        token = self.rows.token
        expert = self.rows.expert
        for name, numerators in (("ala_first", self.ala_first), ("ala_second", self.ala_second)):
            terms = numerators * factor[token]
            terms = terms if self.valid_rows is None else torch.where(self.valid_rows, terms, 0)
            sums[name] = torch.bincount(expert, terms, self.n_experts)
        return sums

    def _compute_numerators(self, routed: torch.Tensor) -> None:
        """Compute the numerators that `normalize` divides. f is the output of an expert for a
        token, g is its gate, and m is the token's row of `routed` (T, H). For each of `rows`,
        `ala_first` is g <f, m> and `ala_second` is g^2 ||f||^2. `loss` (T,) is ||m||^2."""
        inner_products = torch.empty_like(self.norm_square)  # <f, m>
        for part, f in self.outputs:
            torch.sum(f * routed[self.rows.token[part]], -1, out=inner_products[part])
        # frees the memory of all f, which are T x K x H numbers
        self.outputs.clear()
        self.ala_first = self.gates["model"][self.rows.token, self.rows.column] * inner_products
        self.ala_second = self.gate_square.double() * self.norm_square
        self.loss = routed.square().sum(-1).double()

    def _moments(self) -> torch.Tensor:
        """Sums of g^alpha ||f||^beta over each expert's valid tokens, for gates g and outputs f.
        Axis 0: the expert. Axis 1: alpha = 0, 1, 2 for the first kind of gate, then 0, 1, 2 for the
        second, and so on. Axis 2: beta = 0, 1, 2."""
        rows = self.rows
        valid_rows = self.valid_rows
        token = rows.token
        column = rows.column
        ends = rows.ends
        norm_square = self.norm_square.double()
        if valid_rows is not None:
            token = token[valid_rows]
            column = column[valid_rows]
            norm_square = norm_square[valid_rows]
            # the end of each expert's rows, among the valid rows
            ends = (
                torch.bincount(rows.expert[valid_rows], minlength=self.n_experts).cumsum(0).tolist()
            )
        ones = torch.ones_like(norm_square)
        norm_powers = torch.stack((ones, norm_square.sqrt(), norm_square), 1)
        columns = []
        for gates_of_kind in self.gates.values():
            gate = gates_of_kind[token, column]
            columns += [ones, gate, gate.square()]
        gate_powers = torch.stack(columns, 1)
        moments = norm_powers.new_zeros(self.n_experts, gate_powers.shape[1], 3)
        for expert, part in expert_slices(ends):
            torch.mm(gate_powers[part].t(), norm_powers[part], out=moments[expert])
        return moments


class Channels:
    """Statistics (E, I) of the activations phi, the input of down_proj, in one call of a layer's
    experts. "channel_square": the sum of phi^2 over an expert's tokens. "channel_max": the maximum
    of |phi|. For each kind of gate g in `gates`, both are also taken of g phi. Their names begin
    with the kind, as in "gate_channel_max"."""

    def __init__(
        self, n_experts: int, width: int, like: torch.Tensor, gates: Sequence[str] = ("gate",)
    ) -> None:
        self.gates = gates
        self.statistics = {}
        for prefix in ("", *(f"{gate}_" for gate in gates)):
            for statistic in ("square", "max"):
                zeros = like.new_zeros(n_experts, width)
                self.statistics[f"{prefix}channel_{statistic}"] = at_least_fp32(zeros)

    def add(self, expert: int, phi: torch.Tensor, *gate_squares: torch.Tensor) -> None:
        """Add one expert. `phi` (n, I): the activations for the expert's valid tokens.
        `gate_squares`: for each kind in `gates`, the squares (n,) of the tokens' gates. All are in
        at least fp32."""
        if len(phi) == 0:
            return
        square = phi.square()
        torch.sum(square, 0, out=self.statistics["channel_square"][expert])
        torch.amax(square, 0, out=self.statistics["channel_max"][expert])
        for gate, gate_square in zip(self.gates, gate_squares, strict=True):
            weighted = square * gate_square[:, None]
            torch.sum(weighted, 0, out=self.statistics[f"{gate}_channel_square"][expert])
            torch.amax(weighted, 0, out=self.statistics[f"{gate}_channel_max"][expert])

    def finish(self) -> dict[str, torch.Tensor]:
        """Name -> statistic (E, I). Call it once, after all experts have been added."""
        for name, statistic in self.statistics.items():
            if name.endswith("_max"):  # `add` took the maxima of squares
                statistic.sqrt_()
        return self.statistics
