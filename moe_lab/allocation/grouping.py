"""Which experts are merged, and with which weights: sums of one layer in, groups of experts out. No
torch.

An allocation decides how many experts a layer keeps, and a grouping which experts share each of
them. A new one is an entry of `GROUPINGS`: how different two experts are, how groups are made of
that, and how a group becomes one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from moe_lab.allocation.problem import keywords, own
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
    """The passes whose sums it reads."""
    distances: Callable[[Sums], Array]
    """Sums -> (E, E), how different two experts are."""
    cluster: Callable[..., Groups]
    """Distances (E, E), ids of the experts that are kept, the one of highest score first, and
    parameters by keyword -> as many groups as experts are kept."""
    weights: Literal["tokens", "scores"] = "tokens"
    """What members are weighted by: routing frequency, N_j / sum N, or the criterion's scores, of
    which negative ones count as 0. Where the sum is 0, all members weigh the same."""
    rows: Literal["all", "kept"] = "all"
    """Rows of the router that stay: all, so that the gates of a token's merged experts add up, or
    only those of the experts that are kept, each of which stands for its group."""
    align: Literal["weights", "activations_and_weights"] | None = None
    """By what the channels of the members are matched before they are averaged; None leaves them as
    they are."""


def of_logits(sums: Sums) -> Array:
    """1 - cos of the router's logits z_i and z_j over all tokens, from sum_t z z^T."""
    return 1 - _cosine(numpy.asarray(sums["router_gram"], dtype=float))


def of_outputs(sums: Sums) -> Array:
    """Euclidean distance of the experts' mean outputs over all tokens."""
    # the means times one number
    return _euclidean(numpy.asarray(sums["dense_output_sum"], dtype=float))


def of_routed_outputs(sums: Sums) -> Array:
    """Euclidean distance of the experts' mean outputs, each over the tokens routed to it."""
    from moe_lab.statistics import mean_output

    return _euclidean(mean_output(sums))


def of_outputs_and_logits(sums: Sums) -> Array:
    """1 - (s + r) / 2 of REAM's code: s from gated outputs, r from the router's logits, both in [0,
    1]. s = (cos + 1) / 2 of the sums over all tokens of p_j f_j, p = softmax(logits). r = 1 - d /
    max d with d = sqrt(2 - 2 cos) of the logits over all tokens, the Euclidean distance of their
    normalised columns."""
    apart = numpy.sqrt(numpy.maximum(2 * of_logits(sums), 0))
    logits = 1 - apart / max(float(apart.max()), numpy.finfo(float).tiny)
    gated = numpy.asarray(sums["dense_gated_output_sum"], dtype=float)
    outputs = (_cosine(gated @ gated.T) + 1) / 2
    similarity: Array = (outputs + logits) / 2
    return 1 - similarity


def of_weights(sums: Sums) -> Array:
    """Euclidean distance of the experts' weights in gate_proj and up_proj."""
    distances: Array = numpy.sqrt(numpy.asarray(sums["weight_distance_square"], dtype=float))
    return distances


def nearest(distances: Array, kept: Sequence[int]) -> Groups:
    """Each other expert joins the kept one nearest to it; of equally near ones, that of the lower
    id."""
    groups = {owner: [owner] for owner in sorted(kept)}
    owners = list(groups)
    for expert in range(len(distances)):
        if expert not in groups:
            groups[owners[int(distances[expert, owners].argmin())]].append(expert)
    return list(groups.values())


def average_linkage(distances: Array, kept: Sequence[int]) -> Groups:
    """Hierarchical clusters, as many as experts are kept; which ones these are does not matter."""
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    if len(kept) >= len(distances):
        return [[expert] for expert in range(len(distances))]
    labels = cut_tree(linkage(squareform(distances), method="average"), n_clusters=len(kept))[:, 0]
    return [numpy.flatnonzero(labels == label).tolist() for label in range(len(kept))]


def by_salience(distances: Array, kept: Sequence[int], *, group_size: int = GROUP_SIZE) -> Groups:
    """From the kept expert of highest score on, each takes the experts nearest to it of those that
    are still free, of equally near ones that of the lower id, up to a group of `group_size`.
    UserError when groups cannot hold all."""
    check_capacity(len(distances), len(kept), group_size=group_size)
    free = [expert for expert in range(len(distances)) if expert not in kept]
    groups = []
    for owner in kept:
        taken = sorted(free, key=lambda expert: float(distances[owner, expert]))[: group_size - 1]
        groups.append([owner, *taken])
        free = [expert for expert in free if expert not in taken]
    return groups


def check_capacity(count: int, kept: int, *, group_size: int = GROUP_SIZE) -> None:
    """Raise UserError when `kept` groups of at most `group_size` experts cannot hold `count`."""
    if kept * group_size < count:
        raise UserError(
            f"allocation.parameters.group_size={group_size}: {kept} groups of that size cannot "
            f"hold {count} "
            f"unprotected experts of a layer: expected at least {ceil(count / kept)}, or a "
            "smaller ratio"
        )


GROUPINGS = {
    "m_smoe": Grouping(("statistics", "similarity"), of_logits, nearest, align="weights"),
    "m_smoe_unaligned": Grouping(("statistics", "similarity"), of_logits, nearest),
    "hc_smoe": Grouping(("statistics", "similarity"), of_outputs, average_linkage),
    "hc_smoe_routed": Grouping(("statistics",), of_routed_outputs, average_linkage),
    "ream": Grouping(
        ("similarity",),
        of_outputs_and_logits,
        by_salience,
        weights="scores",
        rows="kept",
        align="activations_and_weights",
    ),
    "merge_moe": Grouping(("statistics", "weight_distances"), of_weights, nearest),
}
"""M-SMoE (arXiv 2310.01334; unaligned as in its code for Mixtral), HC-SMoE (2410.08589; routed:
with the mean outputs over routed tokens), REAM (2604.04356) and the groups of MergeMoE
(2510.14436)."""
REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "mean_output": ("statistics",),
    **{name: grouping.passes for name, grouping in GROUPINGS.items()},
}
"""What can take the place of the experts that an allocation drops -> the passes whose sums it
reads."""


def needs(replacement: str) -> tuple[str, ...]:
    """The passes whose sums a replacement of dropped experts reads. UserError for an unknown
    one."""
    check_known("allocation.replacement", replacement, REPLACEMENTS)
    return REPLACEMENTS[replacement]


def parameters(replacement: str) -> dict[str, Any]:
    """Parameter of a replacement -> its type; {} for one that has none."""
    return keywords(GROUPINGS[replacement].cluster) if replacement in GROUPINGS else {}


def fits(settings: Mapping[str, Any], count: int, kept: int, protected: int) -> None:
    """Raise UserError when the `kept` of `count` experts of a layer cannot stand for all,
    `protected` of them alone."""
    grouping = GROUPINGS.get(settings.get("replacement", "none"))
    if grouping is not None and grouping.cluster is by_salience and protected < kept < count:
        check_capacity(
            count - protected, kept - protected, **own(check_capacity, settings["parameters"])
        )


def groups(
    settings: Mapping[str, Any],
    sums: Sums,
    scores: Array,
    kept: Sequence[int],
    protected: Sequence[int] = (),
) -> Groups:
    """The groups of the grouping settings["replacement"], as many as experts are `kept`, in the
    order of their ids. Each of `protected` is one by itself. `settings`: fields of
    AllocationConfig. `scores` (E,) are the criterion's. UserError when there is nothing that the
    others could be merged into, and for sums that are lacking."""
    name = settings["replacement"]
    grouping = GROUPINGS[settings["replacement"]]
    others = [expert for expert in range(len(scores)) if expert not in protected]
    free = sorted(
        (expert for expert in kept if expert not in protected), key=lambda expert: -scores[expert]
    )
    alone = [[expert] for expert in protected]
    if not others:
        return alone
    if not free:
        raise UserError(
            f"allocation.replacement={name}: a layer keeps {len(kept)} experts, which are all "
            "protected, so that no "
            "others can be merged into them: expected a smaller ratio"
        )
    if "router_gram" not in sums and grouping.distances in (of_logits, of_outputs_and_logits):
        raise UserError(
            f"allocation.replacement={name} compares the router's logits, and this router gives "
            "none: expected "
            "hc_smoe, which compares outputs"
        )
    distances = grouping.distances(sums)
    places = [others.index(expert) for expert in free]
    between = distances[numpy.ix_(others, others)]
    clusters = grouping.cluster(between, places, **own(grouping.cluster, settings["parameters"]))
    return sorted(alone + [sorted(others[place] for place in cluster) for cluster in clusters])


def weighted(
    name: str, groups: Groups, sums: Sums, scores: Array, kept: Sequence[int]
) -> dict[int, dict[int, float]]:
    """The expert that stands for each group -> {expert: weight}, for the grouping `name`: the kept
    one where only the router's rows of kept experts stay, and otherwise the member of largest
    weight (of equals the lowest id)."""
    grouping = GROUPINGS[name]
    values = numpy.asarray(
        sums["tokens"] if grouping.weights == "tokens" else numpy.maximum(scores, 0), dtype=float
    )
    merged = {}
    for group in groups:
        own_values = values[group]
        total = own_values.sum()
        shares = own_values / total if total > 0 else numpy.full(len(group), 1 / len(group))
        places = numpy.isin(group, kept) if grouping.rows == "kept" else own_values
        owner = group[int(places.argmax())]
        merged[owner] = {expert: float(share) for expert, share in zip(group, shares, strict=True)}
    return dict(sorted(merged.items()))


def _cosine(gram: Array) -> Array:
    """(E, E) cosines of vectors, from their products (E, E); 0 for a vector of zeros."""
    norms = numpy.sqrt(numpy.maximum(numpy.diag(gram), numpy.finfo(float).tiny))
    return gram / norms[:, None] / norms


def _euclidean(features: Array) -> Array:
    """(E, E) distances of the rows of `features` (E, H)."""
    from scipy.spatial.distance import pdist, squareform

    distances: Array = squareform(pdist(features))
    return distances
