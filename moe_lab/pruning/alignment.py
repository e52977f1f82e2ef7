"""Match the channels of merged experts before the weights of the experts are added, by an optimal
assignment (Hungarian method) for each expert and its owner. The order of its channels does not
change what an expert computes, but it changes the sum of two experts' weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import ClassVar

import numpy
import torch
from scipy.optimize import linear_sum_assignment

from moe_lab.models.discover import MoELayer, check_in_memory
from moe_lab.models.experts import to_device
from moe_lab.models.rows import DENSE_TOKENS, at_least_fp32, dense_weights
from moe_lab.pruning.layer_plan import Alignment
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import Layers
from moe_lab.statistics.observe import StatisticsHook

ORDER = "order"
"""Name of the result of `AlignmentHook`."""
COMPONENTS = 64
"""Principal components of the weights that REAM compares."""


def align_by_weights(plan: Plan, layers: Iterable[MoELayer]) -> Plan:
    """A copy of `plan` in which the channels of merged experts are matched by the channels'
    weights, as in M-SMoE (arXiv 2310.01334).

    For an expert m that is merged into an expert o, the order p of the channels of m maximises the
    sum over channels i of <gate_o[i], gate_m[p(i)]> + <up_o[i], up_m[p(i)]> + <down_o[:, i],
    down_m[:, p(i)]>. The weights of a layer are read before the next layer is requested."""
    alignments = {}
    for layer in layers:
        layer_plan = plan.layers[layer.index]
        if layer_plan.merged:
            costs = (
                -(channel_weights(layer, owner) @ channel_weights(layer, member).T)
                for owner, member in layer_plan.merged_pairs
            )
            alignments[layer.index] = match_channels(costs, layer.width)
    return with_alignments(plan, alignments)


def with_alignments(plan: Plan, alignments: Mapping[int, Alignment]) -> Plan:
    """A copy of `plan` with the `alignments` (number of a layer -> alignment), marked as
    aligned."""
    layers = {
        number: replace(plan.layers[number], alignment=alignment)
        for number, alignment in alignments.items()
    }
    return replace(plan, layers={**plan.layers, **layers}, aligned=True)


def match_channels(costs: Iterable[torch.Tensor], width: int) -> Alignment:
    """(M, I): entry (m, i) is the channel of the merged expert m that is added to channel i of its
    owner, for experts of I = `width` channels. The matching of the channels has the least total
    cost. `costs`: for each of the M merged experts, the cost (I, I) of adding channel j (column) to
    channel i (row) of its owner."""
    orders = []
    for cost in costs:
        _, order = linear_sum_assignment(cost.double().cpu().numpy())
        orders.append(order)
    # the shape is (0, I) if no expert is merged
    return numpy.array(orders, dtype=numpy.int32).reshape(-1, width)


def channel_weights(layer: MoELayer, expert: int) -> torch.Tensor:
    """(I, 3 H) in at least fp32: for each channel, its row of gate, its row of up and its column of
    down."""
    check_in_memory(layer)
    projections = layer.projections(expert)  # channels are rows, also in down
    return torch.cat(
        [at_least_fp32(projections[role].detach()) for role in ("gate", "up", "down")], dim=1
    )


class AlignmentHook(StatisticsHook):
    """Matches the channels of merged experts by activations and weights, as the code of REAM (arXiv
    2604.04356) does.

    The cost of adding channel j of expert m to channel i of expert o is the sum of two Euclidean
    distances, |a - b| + |v - w|. The vectors a and b are the activations of the two channels, with
    one entry for each valid token. The vectors v and w are the coordinates of the two channels that
    `principal_components` returns. Each of the four vectors is divided by its norm."""

    kind = "alignment"
    resumes = False
    plan: ClassVar[Plan]

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H).

        Adds sums over all valid tokens, routed to an expert or not. `squares` (E, I): the squared
        activations of owners and merged experts; other experts have any values. `products` (M,
        I, I): the products of the activations of an owner (rows) and of its merged expert
        (columns), for the M `merged_members`."""
        pairs = self.plan.layers[self.layer.index].merged_pairs
        if pairs:
            needed = set(chain.from_iterable(pairs))
            owners, members = to_device(torch.tensor(pairs), hidden.device).T
            for tokens in self.valid_indices(hidden).split(DENSE_TOKENS):
                states = hidden[tokens]
                # the activations, which are the input of the down projection; 0 if not needed
                shape = (self.layer.n_experts, len(states), self.layer.width)
                phi = at_least_fp32(states.new_empty(0)).new_zeros(shape)
                for experts, expert_weights in dense_weights(self.layer, needed):
                    phi[experts] = self.layer.phi(states, expert_weights)
                products = phi[owners].mT @ phi[members]
                self.add({"squares": phi.square().sum(1), "products": products})
        return self.unobserved(hidden, index, weights)

    def result(self) -> dict[str, torch.Tensor]:
        """{ORDER: the result (M, I) of `match_channels`}."""
        if not self.plan.layers[self.layer.index].merged:
            return {ORDER: torch.zeros(0, self.layer.width)}
        return {ORDER: torch.from_numpy(match_channels(self._costs(), self.layer.width))}

    def _costs(self) -> Iterator[torch.Tensor]:
        """For each merged expert, the cost (I, I) of adding its channels (columns) to those of its
        owner (rows)."""
        components = principal_components(self.layer)
        squares = self.sums["squares"]
        pairs = self.plan.layers[self.layer.index].merged_pairs
        for (owner, member), products in zip(pairs, self.sums["products"], strict=True):
            first = components[owner]
            second = components[member]
            weight_cost = normalised_distance(
                first @ second.T, first.square().sum(1), second.square().sum(1)
            )
            yield normalised_distance(products, squares[owner], squares[member]) + weight_cost


def alignment_hook(plan: Plan) -> type[AlignmentHook]:
    """A subclass of `AlignmentHook` for the merged experts of `plan`."""
    # a class, not an object, because an Observer makes one hook for each layer itself
    return type("AlignmentHook", (AlignmentHook,), {"plan": plan})


def align_by_activations(plan: Plan, sums: Layers) -> Plan:
    """A copy of `plan` in which the channels of merged experts are matched as `AlignmentHook`
    describes. `sums`: number of a layer -> result of the hook."""
    return with_alignments(
        plan,
        {layer: sums[layer][ORDER].numpy().astype(numpy.int32) for layer in plan.merged_layers},
    )


def principal_components(layer: MoELayer) -> torch.Tensor:
    """(E, I, R): the coordinates of each channel of each expert in R principal components of all
    channels of the layer. A coordinate is multiplied by the singular value of its component. Before
    the decomposition, the weights of each channel are divided by their norm, and the mean over all
    channels is subtracted. R is at most COMPONENTS."""
    first = channel_weights(layer, 0)
    # filled expert by expert, so that there is only one copy of the weights of all experts
    flat = first.new_empty(layer.n_experts * layer.width, first.shape[1])
    for expert, rows in enumerate(flat.split(layer.width)):
        rows.copy_(torch.nn.functional.normalize(channel_weights(layer, expert)))
    flat -= flat.mean(0)
    with torch.random.fork_rng(devices=[flat.device] if flat.device.type == "cuda" else []):
        torch.manual_seed(0)
        # more components and iterations than needed: with fewer, the components of a flat spectrum
        # depend on the random start
        _, singular, vectors = torch.pca_lowrank(
            flat, q=min(3 * COMPONENTS, *flat.shape), center=False, niter=8
        )
    components: torch.Tensor = flat @ (vectors * singular)[:, :COMPONENTS]
    return components.reshape(layer.n_experts, layer.width, -1)


def normalised_distance(
    products: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """(I, I): the Euclidean distance of each vector of a first set (rows) and each vector of a
    second set (columns), after each vector is divided by its norm.

    `products` (I, I): the inner products of the vectors. `first` (I,) and `second` (I,): the
    squared norms of the two sets."""
    cosine = products / (first.sqrt()[:, None] * second.sqrt()).clamp_min(
        torch.finfo(products.dtype).tiny
    )
    # |a - b|² = |a|² + |b|² - 2 <a, b>. Normalised, |a|² is 1, or 0 for a vector of zeros.
    sums_of_squares = (first > 0).to(cosine)[:, None] + (second > 0).to(cosine)
    distances: torch.Tensor = (sums_of_squares - 2 * cosine).clamp_min(0).sqrt()
    return distances
