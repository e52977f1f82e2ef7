"""The sums of one MoE layer, and how one call of its experts adds to them.

Columns (channels, hidden units) are summed in fp32 within a call and added to fp64 accumulators; scalars are fp64 throughout.
"""

from __future__ import annotations

import torch

from moe_lab.statistics.experts import Rows, parts
from moe_lab.statistics.sums import combine

EPSILON = 1e-6
"""Added to ||y||^2 in the denominators of the ala sums and the layer loss, as in the released code of MoE-Slimming."""


class LayerSums:
    """Accumulators of one layer, allocated by the first call on the device of its activations; names as in sums.py."""

    def __init__(self, n_experts: int) -> None:
        self.n_experts = n_experts
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, part: torch.Tensor) -> None:
        """Add `part` to the statistic `name` (or take the maximum), in fp64."""
        part = part.double()
        known = self.tensors.get(name)
        self.tensors[name] = part if known is None else combine(name, known.to(part.device), part)


class Call:
    """What one call of the experts of a layer adds to its sums.

    `rows`: the routed pairs; `weights` (T, K): gates as the model multiplies with them; `softmax_gates`: None, or what
    double_softmax uses (T, K); `valid`: (T,) bool or None for all. `add` once per expert, then `finish`, then `normalize`.
    """

    def __init__(
        self,
        sums: LayerSums,
        rows: Rows,
        weights: torch.Tensor,
        softmax_gates: torch.Tensor | None,
        valid: torch.Tensor | None,
    ) -> None:
        self.sums = sums
        self.rows = rows
        self.gates = {"model": weights.double()}
        self.gates["renormalized"] = self.gates["model"] / self.gates["model"].sum(-1, keepdim=True)
        if softmax_gates is not None:
            self.gates["double_softmax"] = softmax_gates.double()
        self.valid = valid
        self.valid_rows = None if valid is None else valid[rows.token]
        self.gate_square = _wide(weights)[rows.token, rows.column].square()
        self.norm_square = torch.empty_like(self.gate_square)
        self.columns: dict[str, torch.Tensor] = {}
        self.outputs: list[tuple[slice, torch.Tensor]] = []

    def add(self, expert: int, part: slice, phi: torch.Tensor, f: torch.Tensor) -> None:
        """The rows `part` of one expert: phi (n, I) enters down_proj, f (n, H) leaves the expert."""
        phi, f = _wide(phi), _wide(f)
        self.outputs.append((part, f))
        torch.sum(f.square(), -1, out=self.norm_square[part])
        gate_square = self.gate_square[part]
        if self.valid_rows is not None:
            keep = self.valid_rows[part]
            phi, f, gate_square = phi[keep], f[keep], gate_square[keep]
            if len(f) == 0:
                return
        if not self.columns:
            self._allocate(phi, f)
        torch.sum(f, 0, out=self.columns["output_sum"][expert])
        square = phi.square()
        torch.sum(square, 0, out=self.columns["channel_square"][expert])
        torch.amax(square, 0, out=self.columns["channel_max"][expert])
        square.mul_(gate_square[:, None])
        torch.sum(square, 0, out=self.columns["gate_channel_square"][expert])
        torch.amax(square, 0, out=self.columns["gate_channel_max"][expert])

    def finish(self, mixed: torch.Tensor) -> None:
        """Add everything that does not need the layer's output to the sums; `mixed` (T, H) is the routed output m."""
        for name, columns in self.columns.items():
            self.sums.add(name, columns.sqrt_() if name.endswith("_max") else columns)
        self._ala(mixed)
        rows, ends, norm_square = self.rows, self.rows.ends, self.norm_square.double()
        token, column, expert = rows.token, rows.column, rows.expert
        if self.valid_rows is not None:
            token, column, expert = token[self.valid_rows], column[self.valid_rows], expert[self.valid_rows]
            norm_square = norm_square[self.valid_rows]
            ends = torch.bincount(expert, minlength=self.sums.n_experts).cumsum(0).tolist()
        norms = torch.stack((torch.ones_like(norm_square), norm_square.sqrt(), norm_square), 1)
        powers = [_powers(gates[token, column]) for gates in self.gates.values()]
        moments = norms.new_zeros(self.sums.n_experts, 3 * len(powers), 3)
        gates = torch.cat(powers, 1)
        for j, part in parts(ends):
            torch.mm(gates[part].t(), norms[part], out=moments[j])
        self.sums.add("tokens", moments[:, 0, 0])
        for name, moment in zip(self.gates, moments.split(3, 1), strict=True):
            self.sums.add(f"sums_{name}", moment)

    def _ala(self, mixed: torch.Tensor) -> None:
        """Numerators of the ala sums, per row and per token: they wait for the layer's output."""
        mixed = _wide(mixed)
        aligned = torch.empty_like(self.norm_square)
        for part, f in self.outputs:
            torch.sum(f * mixed[self.rows.token[part]], -1, out=aligned[part])
        self.outputs.clear()
        self.first = self.gates["model"][self.rows.token, self.rows.column] * aligned
        self.second = self.gate_square.double() * self.norm_square
        self.loss = mixed.square().sum(-1)

    def normalize(self, output: torch.Tensor) -> None:
        """Add the ala sums and the layer loss; `output` (T, H) is the residual stream y after the decoder layer."""
        share = 1 / (_wide(output).square().sum(-1).double() + EPSILON)
        if self.valid is not None:
            share = torch.where(self.valid, share, 0)
        rows, n_experts = self.rows, self.sums.n_experts
        for name, terms in (("ala_first", self.first), ("ala_second", self.second)):
            self.sums.add(name, torch.bincount(rows.expert, terms * share[rows.token], n_experts))
        self.sums.add("layer_loss", (self.loss * share).sum())

    def _allocate(self, phi: torch.Tensor, f: torch.Tensor) -> None:
        n_experts = self.sums.n_experts
        self.columns["output_sum"] = f.new_zeros(n_experts, f.shape[1])
        for name in ("channel_square", "channel_max", "gate_channel_square", "gate_channel_max"):
            self.columns[name] = phi.new_zeros(n_experts, phi.shape[1])


def _powers(gate: torch.Tensor) -> torch.Tensor:
    """g^0, g^1, g^2 (S, 3)."""
    return torch.stack((torch.ones_like(gate), gate, gate.square()), 1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """At least fp32: sums and squares of half precision numbers are not taken in half precision."""
    return tensor.float() if tensor.element_size() < 4 else tensor
