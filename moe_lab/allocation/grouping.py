"""Groups of experts to merge, and the weights of their members, from the sums of one layer. No
torch.

An allocation decides how many experts a layer retains. A grouping decides which experts are merged
into each retained expert. A new grouping is an entry of `GROUPINGS`: a distance between experts, a
clustering by distance, and the weights of the members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from moe_lab.allocation.problem import accepted, keywords
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
    """Weights of a group's members, which are divided by their sum: routed tokens N_j, or the
    criterion's scores, negative scores as 0. If the sum is 0, the weights are equal."""
    rows: Literal["all", "retained"] = "all"
    """Rows of the router that are retained: all, so that the gates of a token's merged experts add
    up, or only the rows of the retained experts, each of which owns a group."""
    align: Literal["weights", "activations_and_weights"] | None = None
    """Features by which channels of the members are matched before averaging; None: no
    matching."""


def logit_distances(sums: Sums) -> Array:
    """1 - cos of the router's logits z_i and z_j over all tokens, from sum_t z z^T."""
    return 1 - _cosine(numpy.asarray(sums["router_gram"], dtype=float))


def output_distances(sums: Sums) -> Array:
    """Euclidean distance of the experts' mean outputs over all tokens."""
    # sums instead of means only scale all distances by one factor
    return _euclidean(numpy.asarray(sums["dense_output_sum"], dtype=float))


def routed_output_distances(sums: Sums) -> Array:
    """Euclidean distance of the experts' mean outputs, each over the tokens routed to it."""
    from moe_lab.statistics import mean_output

    return _euclidean(mean_output(sums))


def output_and_logit_distances(sums: Sums) -> Array:
    """The distance 1 - (s + r) / 2 of REAM's code, from two similarities of experts in [0, 1].

    s = (cos + 1) / 2   cos is that of the two experts' gated outputs, summed over all tokens:
                        sum_t p_j f_j with p = softmax(logits)
    r = 1 - d / max d   d = sqrt(2 - 2 cos) is the Euclidean distance of the two experts' columns of
                        router logits over all tokens, after normalisation
    """
    distances = numpy.sqrt(numpy.maximum(2 * logit_distances(sums), 0))
    logit_similarity = 1 - distances / max(float(distances.max()), numpy.finfo(float).tiny)
    gated = numpy.asarray(sums["dense_gated_output_sum"], dtype=float)
    output_similarity = (_cosine(gated @ gated.T) + 1) / 2
    similarity: Array = (output_similarity + logit_similarity) / 2
    return 1 - similarity


def weight_distances(sums: Sums) -> Array:
    """Euclidean distance of the experts' weights in gate_proj and up_proj."""
    distances: Array = numpy.sqrt(numpy.asarray(sums["weight_distance_square"], dtype=float))
    return distances


def nearest(distances: Array, retained: Sequence[int]) -> Groups:
    """Groups in which each dropped expert joins the nearest retained expert. Of equally near
    experts, it joins the expert with the lower id."""
    groups = {owner: [owner] for owner in sorted(retained)}
    owners = list(groups)
    for expert in range(len(distances)):
        if expert not in groups:
            groups[owners[int(distances[expert, owners].argmin())]].append(expert)
    return list(groups.values())


def average_linkage(distances: Array, retained: Sequence[int]) -> Groups:
    """Hierarchical clusters by average linkage, as many as `retained` has ids. Only the number of
    these ids matters. If it is that of all experts, each expert is alone."""
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    if len(retained) >= len(distances):
        return [[expert] for expert in range(len(distances))]
    # cut_tree returns one column of labels per number of clusters, here a single column
    labels = cut_tree(linkage(squareform(distances), method="average"), n_clusters=len(retained))[
        :, 0
    ]
    return [numpy.flatnonzero(labels == label).tolist() for label in range(len(retained))]


def by_salience(
    distances: Array, retained: Sequence[int], *, group_size: int = GROUP_SIZE
) -> Groups:
    """Groups that the retained experts fill in turn. `retained`: ids by descending score. Each
    retained expert takes the nearest experts that no group has yet, until its group has
    `group_size` members or no expert is free. Of equally near experts, the lower id comes first.
    UserError when the groups cannot hold all experts."""
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


GROUPINGS = {
    "m_smoe": Grouping(("statistics", "similarity"), logit_distances, nearest, align="weights"),
    "m_smoe_unaligned": Grouping(("statistics", "similarity"), logit_distances, nearest),
    "hc_smoe": Grouping(("statistics", "similarity"), output_distances, average_linkage),
    "hc_smoe_routed": Grouping(("statistics",), routed_output_distances, average_linkage),
    "ream": Grouping(
        ("similarity",),
        output_and_logit_distances,
        by_salience,
        weights="scores",
        rows="retained",
        align="activations_and_weights",
    ),
    "merge_moe": Grouping(("statistics", "weight_distances"), weight_distances, nearest),
}
"""M-SMoE (arXiv 2310.01334; unaligned as in its code for Mixtral), HC-SMoE (2410.08589; routed:
with the mean outputs over routed tokens), REAM (2604.04356) and the groups of MergeMoE
(2510.14436)."""
REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "mean_output": ("statistics",),
    **{name: grouping.passes for name, grouping in GROUPINGS.items()},
}
"""Value of allocation.replacement, which replaces dropped experts -> the passes whose sums it
reads."""


def needs(replacement: str) -> tuple[str, ...]:
    """Names of the passes whose sums the replacement reads. UserError for an unknown
    replacement."""
    check_known("allocation.replacement", replacement, REPLACEMENTS)
    return REPLACEMENTS[replacement]


def parameters(replacement: str) -> dict[str, Any]:
    """Parameter of the replacement -> its type; {} for a replacement without parameters."""
    return keywords(GROUPINGS[replacement].cluster) if replacement in GROUPINGS else {}


def check_groups(settings: Mapping[str, Any], count: int, retained: int, protected: int) -> None:
    """Raise UserError when the groups of a layer that retains `retained` of its `count` experts
    cannot hold all `count` experts. `protected`: number of retained experts whose groups have no
    other members."""
    grouping = GROUPINGS.get(settings.get("replacement", "none"))
    # Only the groups of by_salience have a limited size. Nothing is merged if no expert is dropped,
    # and `groups` refuses a layer that retains only protected experts.
    if grouping is not None and grouping.cluster is by_salience and protected < retained < count:
        check_capacity(
            count - protected,
            retained - protected,
            **accepted(check_capacity, settings["parameters"]),
        )


def groups(
    settings: Mapping[str, Any],
    sums: Sums,
    scores: Array,
    retained: Sequence[int],
    protected: Sequence[int] = (),
) -> Groups:
    """One group per retained expert, by the method settings["replacement"]. The groups, and the
    ids in each group, are sorted.

    Each protected expert is alone in its group. `settings`: fields of AllocationConfig. `sums`: the
    sums of the layer. `scores`: (E,), from the criterion. UserError when all retained experts are
    protected but other experts are dropped, and when the router gives no logits to compare.
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
    # the grouping sees only unprotected experts, by their positions among these
    positions = [unprotected.index(expert) for expert in owners]
    clusters = grouping.cluster(
        distances, positions, **accepted(grouping.cluster, settings["parameters"])
    )
    for cluster in clusters:
        all_groups.append(sorted(unprotected[position] for position in cluster))
    return sorted(all_groups)


def member_weights(
    name: str, groups: Groups, sums: Sums, scores: Array, retained: Sequence[int]
) -> dict[int, dict[int, float]]:
    """Owner of each group of one layer -> {member: weight}, for the grouping `name`; the weights of
    a group sum to 1. They are in proportion to the routed tokens in `sums` or to `scores` (E,), as
    the grouping says, and equal if all of these are 0. If the grouping only retains the router rows
    of retained experts, the owner is the retained member of the group. Otherwise the owner is the
    member of largest weight, and of equal weights the lowest id."""
    grouping = GROUPINGS[name]
    values = numpy.asarray(
        sums["tokens"] if grouping.weights == "tokens" else numpy.maximum(scores, 0), dtype=float
    )
    merged = {}
    for group in groups:
        group_values = values[group]
        total = group_values.sum()
        weights = group_values / total if total > 0 else numpy.full(len(group), 1 / len(group))
        priority = numpy.isin(group, retained) if grouping.rows == "retained" else group_values
        owner = group[int(priority.argmax())]
        merged[owner] = {
            expert: float(weight) for expert, weight in zip(group, weights, strict=True)
        }
    return dict(sorted(merged.items()))


def _cosine(gram: Array) -> Array:
    """(E, E) cosines of vectors, from their inner products (E, E); 0 for a vector of zeros."""
    norms = numpy.sqrt(numpy.maximum(numpy.diag(gram), numpy.finfo(float).tiny))
    return gram / norms[:, None] / norms


def _euclidean(features: Array) -> Array:
    """(E, E) Euclidean distances of the rows of `features` (E, H)."""
    from scipy.spatial.distance import pdist, squareform

    distances: Array = squareform(pdist(features))
    return distances
