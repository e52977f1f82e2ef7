"""Groups of experts to merge, and the weights of their members, from the sums of one layer. No
torch.

A grouping decides which experts are merged into each retained expert. A new grouping is an entry of
`GROUPINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from moe_lab.allocation.problem import accepted_parameters, keyword_types
from moe_lab.errors import UserError, check_known

Array = NDArray[numpy.float64]
Sums = Mapping[str, Any]
"""Sums of a layer by name, as in moe_lab/statistics."""
Groups = list[list[int]]
"""Ids of experts; every expert is in one group."""
GROUP_SIZE = 16
"""Most experts of a group of REAM, unless the parameter group_size says otherwise."""


@dataclass(frozen=True)
class Grouping:
    """A named way of merging experts."""

    passes: tuple[str, ...]
    """The passes whose sums the grouping reads."""
    distances: Callable[[Sums], Array]
    """Sums -> distance between each two experts (E, E)."""
    cluster: Callable[..., Groups]
    """Distances (E, E), ids of the retained experts by descending score, and parameters by keyword
    -> groups, as many as retained experts."""
    weights: Literal["tokens", "scores"] = "tokens"
    """Weights of a group's members: numbers of routed tokens, or the criterion's scores, negative
    scores as 0."""
    rows: Literal["all", "retained"] = "all"
    """Rows of the router that are retained: all, so that the gates of a token's merged experts add
    up, or only the rows of the retained experts, each of which owns a group."""
    align: Literal["weights", "activations_and_weights"] | None = None
    """Features by which channels of the members are matched before averaging."""
    reference: str = ""
    """The paper that introduces the grouping, with its number on arXiv."""


def logit_distances(sums: Sums) -> Array:
    """Distances (E, E) of experts: 1 - cos(z_i, z_j), where z_i has the router's logits of expert i
    for all tokens."""
    return 1 - _cosine(numpy.asarray(sums["router_gram"], dtype=float))


def output_distances(sums: Sums) -> Array:
    """Distances (E, E) of experts: Euclidean, between the sums of the experts' outputs over all
    tokens, routed to the expert or not. Means instead of sums would give the same groups."""
    return _euclidean(numpy.asarray(sums["dense_output_sum"], dtype=float))


def output_and_logit_distances(sums: Sums) -> Array:
    """Distances (E, E) of experts: 1 - (s + r) / 2, as in REAM's code. s and r are two similarities
    of experts i and j, both in [0, 1]:

    s = (cos(u_i, u_j) + 1) / 2
    r = 1 - d_ij / max(d)

    u_i is the sum of the outputs of expert i over all tokens, each weighted by the softmax of the
    router's logits. d_ij is sqrt(2 - 2 cos(z_i, z_j)), with z_i as in `logit_distances`.
    """
    distances = numpy.sqrt(numpy.maximum(2 * logit_distances(sums), 0))
    logit_similarity = 1 - distances / max(float(distances.max()), numpy.finfo(float).tiny)
    gated = numpy.asarray(sums["dense_gated_output_sum"], dtype=float)
    output_similarity = (_cosine(gated @ gated.T) + 1) / 2
    similarity: Array = (output_similarity + logit_similarity) / 2
    return 1 - similarity


def weight_distances(sums: Sums) -> Array:
    """Distances (E, E) of experts: Euclidean, between the experts' weights in gate_proj and
    up_proj."""
    distances: Array = numpy.sqrt(numpy.asarray(sums["weight_distance_square"], dtype=float))
    return distances


def nearest_groups(distances: Array, retained: Sequence[int]) -> Groups:
    """One group per retained expert: each dropped expert joins the group of the retained expert at
    the smallest distance. `distances`: (E, E)."""
    groups = {owner: [owner] for owner in sorted(retained)}
    owners = list(groups)
    for expert in range(len(distances)):
        if expert not in groups:
            groups[owners[int(distances[expert, owners].argmin())]].append(expert)
    return list(groups.values())


def average_linkage(distances: Array, retained: Sequence[int]) -> Groups:
    """Hierarchical clusters of experts by average linkage, as many clusters as retained experts.
    `distances`: (E, E)."""
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    if len(retained) >= len(distances):
        return [[expert] for expert in range(len(distances))]
    # cut_tree returns one column of labels per number of clusters, here a single column
    labels = cut_tree(linkage(squareform(distances), method="average"), n_clusters=len(retained))[
        :, 0
    ]
    return [numpy.flatnonzero(labels == label).tolist() for label in range(len(retained))]


def salience_groups(
    distances: Array, retained: Sequence[int], *, group_size: int = GROUP_SIZE
) -> Groups:
    """One group per retained expert. The groups are filled one after another, in the order of
    `retained` (ids by descending score). Each group gets the nearest dropped experts that are in no
    group yet, until it has `group_size` members. `distances`: (E, E)."""
    check_capacity(len(distances), len(retained), group_size=group_size)
    free = [expert for expert in range(len(distances)) if expert not in retained]
    groups = []
    for owner in retained:
        members = sorted(free, key=lambda expert: float(distances[owner, expert]))[: group_size - 1]
        groups.append([owner, *members])
        free = [expert for expert in free if expert not in members]
    return groups


def check_capacity(count: int, retained: int, *, group_size: int = GROUP_SIZE) -> None:
    """Raise UserError when `retained` groups of at most `group_size` experts cannot hold `count`
    experts."""
    if retained * group_size < count:
        raise UserError(
            f"allocation.parameters.group_size={group_size}: {retained} groups of that size cannot "
            f"hold {count} unprotected experts of a layer: expected at least "
            f"{ceil(count / retained)}, or a smaller ratio"
        )


M_SMOE = "M-SMoE, arXiv 2310.01334"
GROUPINGS = {
    "m_smoe": Grouping(
        ("statistics", "similarity"),
        logit_distances,
        nearest_groups,
        align="weights",
        reference=M_SMOE,
    ),
    # as in the authors' code for Mixtral
    "m_smoe_unaligned": Grouping(
        ("statistics", "similarity"), logit_distances, nearest_groups, reference=M_SMOE
    ),
    "hc_smoe": Grouping(
        ("statistics", "similarity"),
        output_distances,
        average_linkage,
        reference="HC-SMoE, arXiv 2410.08589",
    ),
    "ream": Grouping(
        ("similarity",),
        output_and_logit_distances,
        salience_groups,
        weights="scores",
        rows="retained",
        align="activations_and_weights",
        reference="REAM, arXiv 2604.04356",
    ),
    "merge_moe": Grouping(
        ("statistics", "weight_distances"),
        weight_distances,
        nearest_groups,
        reference="MergeMoE, arXiv 2510.14436",
    ),
}
"""Value of allocation.replacement -> the way of merging experts."""
REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "mean_output": ("statistics",),
    **{name: grouping.passes for name, grouping in GROUPINGS.items()},
}
"""Value of allocation.replacement, which replaces dropped experts -> the passes whose sums it
reads."""


def required_passes(replacement: str) -> tuple[str, ...]:
    """Names of the passes whose sums `replacement`, a value of allocation.replacement, reads."""
    check_known("allocation.replacement", replacement, REPLACEMENTS)
    return REPLACEMENTS[replacement]


def parameters(replacement: str) -> dict[str, Any]:
    """Name -> type, for each parameter of `replacement`, a value of allocation.replacement."""
    return keyword_types(GROUPINGS[replacement].cluster) if replacement in GROUPINGS else {}


def check_groups(settings: Mapping[str, Any], count: int, retained: int, protected: int) -> None:
    """Raise UserError when the groups of a layer cannot hold all experts of the layer. `count`,
    `retained`, `protected`: numbers of experts of the layer. `settings`: fields of
    AllocationConfig."""
    grouping = GROUPINGS.get(settings.get("replacement", "none"))
    # if only protected experts are retained, `groups` raises the error
    if (
        grouping is not None
        and grouping.cluster is salience_groups
        and protected < retained < count
    ):
        check_capacity(
            count - protected,
            retained - protected,
            **accepted_parameters(check_capacity, settings["parameters"]),
        )


def groups(
    settings: Mapping[str, Any],
    sums: Sums,
    scores: Array,
    retained: Sequence[int],
    protected: Sequence[int] = (),
) -> Groups:
    """Groups of the experts of one layer, by the method settings["replacement"]: one group per
    retained expert. The ids in each group are sorted, and the groups are sorted by their first ids.

    Each protected expert is alone in its group. `settings`: fields of AllocationConfig. `scores`:
    the criterion's scores (E,). `retained`, `protected`: ids of experts.
    """
    name = settings["replacement"]
    grouping = GROUPINGS[name]
    unprotected = [expert for expert in range(len(scores)) if expert not in protected]
    all_groups = [[expert] for expert in protected]
    if not unprotected:
        return all_groups
    owners = sorted(
        (expert for expert in retained if expert not in protected),
        key=lambda expert: -scores[expert],
    )
    if not owners:
        raise UserError(
            f"allocation.replacement={name}: all {len(retained)} retained experts of a layer are "
            "protected, so that no others can be merged into them: expected a smaller ratio"
        )
    if "router_gram" not in sums and grouping.distances in (
        logit_distances,
        output_and_logit_distances,
    ):
        raise UserError(
            f"allocation.replacement={name} compares the router's logits, and this router gives "
            "none: expected hc_smoe, which compares outputs"
        )
    distances = grouping.distances(sums)[numpy.ix_(unprotected, unprotected)]
    # `distances` has only unprotected experts, so an expert is given by its index in `unprotected`
    positions = [unprotected.index(expert) for expert in owners]
    clusters = grouping.cluster(
        distances, positions, **accepted_parameters(grouping.cluster, settings["parameters"])
    )
    all_groups += [sorted(unprotected[position] for position in cluster) for cluster in clusters]
    return sorted(all_groups)


def member_weights(
    name: str, groups: Groups, sums: Sums, scores: Array, retained: Sequence[int]
) -> dict[int, dict[int, float]]:
    """Id of the owner -> {id of the member: weight}, for each group of experts of one layer. The
    members are merged into the owner, which is a member itself. `scores`: the criterion's scores
    (E,). `retained`: ids of the retained experts, one per group.

    The weights of a group sum to 1. The owner is the member in `retained`, or the member with the
    largest weight, as GROUPINGS[name].rows says.
    """
    grouping = GROUPINGS[name]
    values = numpy.asarray(
        sums["tokens"] if grouping.weights == "tokens" else numpy.maximum(scores, 0), dtype=float
    )
    merged = {}
    for group in groups:
        group_values = values[group]
        total = group_values.sum()
        weights = group_values / total if total > 0 else numpy.full(len(group), 1 / len(group))
        # argmax selects the owner; `group` is sorted, so the lowest id wins ties
        priority = numpy.isin(group, retained) if grouping.rows == "retained" else group_values
        owner = group[int(priority.argmax())]
        merged[owner] = dict(zip(group, weights.tolist(), strict=True))
    return dict(sorted(merged.items()))


def _cosine(gram: Array) -> Array:
    """Cosines (E, E) of E vectors, 0 for a vector of zeros. `gram`: the inner products of the
    vectors (E, E)."""
    norms = numpy.sqrt(numpy.maximum(numpy.diag(gram), numpy.finfo(float).tiny))
    return gram / norms[:, None] / norms


def _euclidean(features: Array) -> Array:
    """Euclidean distances (E, E) between the rows of `features` (E, H)."""
    from scipy.spatial.distance import pdist, squareform

    distances: Array = squareform(pdist(features))
    return distances
