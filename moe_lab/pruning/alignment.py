"""Match the channels of merged experts before the weights of the experts are added, by an optimal
assignment (Hungarian method) for each expert and its owner. The order of its channels does not
change what an expert computes, but it changes the sum of two experts' weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy
import torch
from scipy.optimize import linear_sum_assignment

from moe_lab.models.discover import MoELayer, check_in_memory
from moe_lab.models.experts import wide
from moe_lab.pruning.layer_plan import Alignment, LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import Layers
from moe_lab.statistics.observe import StatisticsHook

COMPONENTS = 64
"""Principal components of the weights that REAM compares."""


def align_by_weights(plan: Plan, layers: Iterable[MoELayer]) -> Plan:
    """The aligned plan: the channels of the experts that `plan` merges are matched by the weights
    of the channels, as in M-SMoE (arXiv 2310.01334).

    The order p of an expert m that is merged into an expert o maximises the sum over channels i of
    <gate_o[i], gate_m[p(i)]> + <up_o[i], up_m[p(i)]> + <down_o[:, i], down_m[:, p(i)]>. `layers`:
    the model's MoE layers. The weights of a layer are read before the next layer is requested.
    """
    alignments = {}
    for layer in layers:
        layer_plan = plan.layers[layer.index]
        if layer_plan.merged:
            alignments[layer.index] = match_channels(
                layer_plan, layer, partial(_weight_cost, layer)
            )
    return with_alignments(plan, alignments)


def _weight_cost(layer: MoELayer, owner: int, member: int) -> torch.Tensor:
    """(I, I): the negative inner product of the weights of each channel of `owner` (row) and each
    channel of `member` (column)."""
    return -(channel_weights(layer, owner) @ channel_weights(layer, member).T)


def with_alignments(plan: Plan, alignments: Mapping[int, Alignment]) -> Plan:
    """A copy of `plan`, marked as aligned, with the `alignments`: layer -> alignment."""
    layers = {
        number: replace(plan.layers[number], alignment=order)
        for number, order in alignments.items()
    }
    return replace(plan.with_layers(layers), aligned=True)


def match_channels(
    plan: LayerPlan, layer: MoELayer, cost: Callable[[int, int], torch.Tensor]
) -> Alignment:
    """(M, I) for the M experts that `plan` merges into an owner: entry (m, i) is the channel of
    merged expert m that is added to channel i of its owner. The channels of an expert are assigned
    with the least total cost. `cost(o, m)` (I, I): entry (i, j) is the cost of adding channel j of
    expert m to channel i of expert o."""
    orders = []
    for member in plan.merged_away:
        matrix = cost(plan.owners[member], member).double().cpu().numpy()
        _, order = linear_sum_assignment(matrix)
        orders.append(order)
    return numpy.array(orders, dtype=numpy.int32).reshape(-1, layer.width)


def channel_weights(layer: MoELayer, expert: int) -> torch.Tensor:
    """(I, 3 H) in at least fp32: the weights of each channel, which are its rows of gate and up and
    its column of down."""
    check_in_memory(layer)
    roles = layer.projections(expert)
    return torch.cat([wide(roles[role].detach()) for role in ("gate", "up", "down")], dim=1)


class AlignmentHook(StatisticsHook):
    """Matches the channels of merged experts by activations and weights, as REAM does (arXiv
    2604.04356, its code).

    The cost of adding channel j of expert m to channel i of expert o is |a - b| + |v - w|. a and b
    are the activations of the two channels over all tokens, each divided by its norm. v and w are
    the weights of the two channels, in COMPONENTS principal components of the normalised weights of
    all channels of the layer. Each component is multiplied by its singular value, and v and w are
    divided by their norms. All members of groups run on all tokens. `result` returns the alignment
    under the name "order".
    """

    kind = "alignment"
    resumes = False
    plan: ClassVar[Plan]

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H). Adds the sums over valid tokens of the squared activations (I,)
        of each expert in a group, and of the products (I, I) of an owner's activations with the
        activations of each other member."""
        layer = self.layer
        valid = self.valid(hidden)
        states = hidden if valid is None else hidden[valid]
        for owner, group in self.plan.layers[layer.index].merged.items():
            owner_phi = wide(layer.phi(states, layer.weights(owner)))
            self.add(f"squares.{owner}", owner_phi.square().sum(0))
            for member in sorted(set(group) - {owner}):
                member_phi = wide(layer.phi(states, layer.weights(member)))
                self.add(f"squares.{member}", member_phi.square().sum(0))
                self.add(f"products.{member}", owner_phi.T @ member_phi)
        return self.unobserved(hidden, index, weights)

    def result(self) -> dict[str, torch.Tensor]:
        """{"order": (M, I)}, as `match_channels` gives it. The cost of two channels is the distance
        of their normalised activations over all tokens plus the distance of their normalised
        principal components."""
        plan = self.plan.layers[self.layer.index]
        if not plan.merged:
            return {"order": torch.zeros(0, self.layer.width)}
        weights = principal_components(self.layer)

        def cost(owner: int, member: int) -> torch.Tensor:
            """(I, I): the cost of adding each channel of `member` to each channel of `owner`."""
            squares = self.sums[f"squares.{owner}"], self.sums[f"squares.{member}"]
            activation_cost = normalised_distance(self.sums[f"products.{member}"], *squares)
            owner_weights = weights[owner]
            member_weights = weights[member]
            products = owner_weights @ member_weights.T
            return activation_cost + normalised_distance(
                products, owner_weights.square().sum(1), member_weights.square().sum(1)
            )

        return {"order": torch.from_numpy(match_channels(plan, self.layer, cost))}


def alignment_hook(plan: Plan) -> type[AlignmentHook]:
    """A subclass of `AlignmentHook` for the merged experts of `plan`."""
    # a class, because an observer makes the hooks itself, one per layer
    return type("AlignmentHook", (AlignmentHook,), {"plan": plan})


def align_by_activations(plan: Plan, sums: Layers) -> Plan:
    """The aligned plan, from `plan` and `sums`, the results of an `AlignmentHook`: layer ->
    {"order": (M, I)}."""
    return with_alignments(
        plan,
        {layer: sums[layer]["order"].numpy().astype(numpy.int32) for layer in plan.merged_layers},
    )


def principal_components(layer: MoELayer) -> torch.Tensor:
    """(E, I, R): the coordinates of each channel of a layer in the R principal components of all
    channels, each multiplied by its singular value. A channel's weights are normalised and then
    centred over all channels before the decomposition, which is randomised with a fixed seed. R is
    COMPONENTS, or less in small models."""
    first = torch.nn.functional.normalize(channel_weights(layer, 0))
    # filled expert by expert, so that there is only one copy of the weights of all experts
    flat = first.new_empty(layer.n_experts * layer.width, first.shape[1])
    for expert, rows in enumerate(flat.split(layer.width)):
        rows.copy_(torch.nn.functional.normalize(channel_weights(layer, expert)))
    flat -= flat.mean(0)
    with torch.random.fork_rng(devices=[flat.device] if flat.device.type == "cuda" else []):
        torch.manual_seed(0)
        _, singular, vectors = torch.pca_lowrank(flat, q=min(COMPONENTS, *flat.shape), center=False)
    components: torch.Tensor = flat @ (vectors * singular)
    return components.reshape(layer.n_experts, layer.width, -1)


def normalised_distance(
    products: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """(I, I): the Euclidean distance of each vector of a first set (rows) and each vector of a
    second set (columns), all normalised. `products` (I, I): their inner products. `first` (I,) and
    `second` (I,): the squared norms of the vectors of each set. A vector of zeros stays zero, and
    has distance 1 to normalised vectors."""
    cosine = products / (first.sqrt()[:, None] * second.sqrt()).clamp_min(
        torch.finfo(products.dtype).tiny
    )
    # sums of two squared lengths, each 1 after normalisation, or 0 for a vector of zeros
    lengths = (first > 0).to(cosine)[:, None] + (second > 0).to(cosine)
    distances: torch.Tensor = (lengths - 2 * cosine).clamp_min(0).sqrt()
    return distances
