"""What one call of a layer's experts adds to its sums.

Columns (channels, hidden units) are summed in fp32 within a call, to be added to fp64 accumulators; scalars are fp64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moe_lab.models.experts import Rows, parts

EPSILON = 1e-6
"""Added to ||y||^2 in the denominators of the ala sums and the layer loss, as in the released code of MoE-Slimming."""


class Call:
    """The statistics of one call, names as in sums.py; `add` for each expert, then `finish`, then `normalize`.

    `rows`: the routed pairs. `weights` (T, K): gates as the model multiplies with them. `others`: further gates (T, K)
    by name. `valid`: (T,) bool, which tokens count, None for all.
    """

    def __init__(
        self,
        n_experts: int,
        rows: Rows,
        weights: torch.Tensor,
        others: Mapping[str, torch.Tensor],
        valid: torch.Tensor | None,
    ) -> None:
        self.n_experts = n_experts
        self.rows = rows
        self.gates = {"model": weights.double()}
        self.gates["renormalized"] = self.gates["model"] / self.gates["model"].sum(-1, keepdim=True)
        self.gates |= {name: gates.double() for name, gates in others.items()}
        self.valid = valid
        self.valid_rows = None if valid is None else valid[rows.token]
        self.gate_square = wide(weights)[rows.token, rows.column].square()
        renormalized = self.gates["renormalized"][rows.token, rows.column]
        self.gate_squares = (self.gate_square, renormalized.to(self.gate_square.dtype).square())
        self.norm_square = torch.empty_like(self.gate_square)
        self.columns: dict[str, torch.Tensor] = {}
        self.outputs: list[tuple[slice, torch.Tensor]] = []

    def add(self, expert: int, part: slice, phi: torch.Tensor, f: torch.Tensor) -> None:
        """The rows `part` of one expert: phi (n, I) enters down_proj, f (n, H) leaves the expert."""
        phi, f = wide(phi), wide(f)
        self.outputs.append((part, f))
        torch.sum(f.square(), -1, out=self.norm_square[part])
        if not self.columns:
            self._allocate(phi, f)
        gate_squares = [square[part] for square in self.gate_squares]
        if self.valid_rows is not None:
            keep = self.valid_rows[part]
            phi, f, gate_squares = phi[keep], f[keep], [square[keep] for square in gate_squares]
            if len(f) == 0:
                return
        torch.sum(f, 0, out=self.columns["output_sum"][expert])
        self.channels.add(expert, phi, *gate_squares)

    def finish(self, mixed: torch.Tensor) -> dict[str, torch.Tensor]:
        """All sums that do not need the layer's output; `mixed` (T, H) is the routed output m of the call."""
        self._align(wide(mixed))
        moments = self._moments()
        names = [f"sums_{gate}" for gate in self.gates]
        return {
            **self.columns,
            **self.channels.finish(),
            "tokens": moments[:, 0, 0].clone(),
            **dict(zip(names, moments.split(3, 1), strict=True)),
        }

    def normalize(self, stream: torch.Tensor) -> dict[str, torch.Tensor]:
        """The ala sums and the layer loss; `stream` (T, H) is the residual stream y after the decoder layer."""
        share = 1 / (wide(stream).square().sum(-1).double() + EPSILON)
        loss = self.loss * share
        if self.valid is not None:
            share, loss = torch.where(self.valid, share, 0), loss[self.valid]
        summed = {"layer_loss": loss.sum()}
        token, expert = self.rows.token, self.rows.expert
        for name, terms in (("ala_first", self.first), ("ala_second", self.second)):
            rows = terms * share[token]
            rows = rows if self.valid_rows is None else torch.where(self.valid_rows, rows, 0)
            summed[name] = torch.bincount(expert, rows, self.n_experts)
        return summed

    def _align(self, mixed: torch.Tensor) -> None:
        """What the ala sums need of every row and token; it waits for the layer's output.

        f is kept for this until m is known, T x K x H numbers, and let go here.
        """
        aligned = torch.empty_like(self.norm_square)
        for part, f in self.outputs:
            torch.sum(f * mixed[self.rows.token[part]], -1, out=aligned[part])
        self.outputs.clear()
        self.first = self.gates["model"][self.rows.token, self.rows.column] * aligned
        self.second = self.gate_square.double() * self.norm_square
        self.loss = mixed.square().sum(-1).double()

    def _moments(self) -> torch.Tensor:
        """sum_t g^alpha ||f||^beta (E, 3 x gates, 3), the gates one after the other; [:, 0, 0] counts tokens."""
        token, column, ends, norm_square = self.rows.token, self.rows.column, self.rows.ends, self.norm_square.double()
        if self.valid_rows is not None:
            token, column, norm_square = token[self.valid_rows], column[self.valid_rows], norm_square[self.valid_rows]
            counts = torch.bincount(self.rows.expert[self.valid_rows], minlength=self.n_experts)
            ends = counts.cumsum(0).tolist()
        one = torch.ones_like(norm_square)
        norms = torch.stack((one, norm_square.sqrt(), norm_square), 1)
        picked = [gates[token, column] for gates in self.gates.values()]
        gates = torch.stack([power for gate in picked for power in (one, gate, gate.square())], 1)
        moments = norms.new_zeros(self.n_experts, gates.shape[1], 3)
        for expert, part in parts(ends):
            torch.mm(gates[part].t(), norms[part], out=moments[expert])
        return moments

    def _allocate(self, phi: torch.Tensor, f: torch.Tensor) -> None:
        self.columns["output_sum"] = f.new_zeros(self.n_experts, f.shape[1])
        self.channels = Channels(self.n_experts, phi.shape[1], phi, ("gate", "renormalized"))


class Channels:
    """channel_square, channel_max and the same weighed with one or several `gates`, (E, I) each, of one call; names as
    in sums.py."""

    def __init__(self, n_experts: int, width: int, like: torch.Tensor, gates: Sequence[str] = ("gate",)) -> None:
        self.gates = gates
        self.columns = {
            f"{weight}channel_{what}": wide(like.new_zeros(n_experts, width))
            for weight in ("", *(f"{gate}_" for gate in gates))
            for what in ("square", "max")
        }

    def add(self, expert: int, phi: torch.Tensor, *gate_squares: torch.Tensor) -> None:
        """The tokens of one expert that count: phi (n, I) and, of every gate, g^2 (n,), at least fp32."""
        if len(phi) == 0:
            return
        square = phi.square()
        torch.sum(square, 0, out=self.columns["channel_square"][expert])
        torch.amax(square, 0, out=self.columns["channel_max"][expert])
        for gate, gate_square in zip(self.gates, gate_squares, strict=True):
            weighed = square * gate_square[:, None]
            torch.sum(weighed, 0, out=self.columns[f"{gate}_channel_square"][expert])
            torch.amax(weighed, 0, out=self.columns[f"{gate}_channel_max"][expert])

    def finish(self) -> dict[str, torch.Tensor]:
        """The columns, once every expert was added."""
        for name, column in self.columns.items():
            if name.endswith("_max"):  # maxima of squares until here
                column.sqrt_()
        return self.columns


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """At least fp32: sums and squares of half precision numbers are not taken in half precision."""
    return tensor.float() if tensor.element_size() < 4 else tensor
