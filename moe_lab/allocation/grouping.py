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
    """The passes whose sums it reads."""
    distances: Callable[[Sums], Array]
    """Sums -> (E, E), how different two experts are."""
    cluster: Callable[..., Groups]
    """Distances (E, E), ids of the retained experts, that of highest score first, and parameters by
    keyword -> as many groups as experts are retained."""
    weights: Literal["tokens", "scores"] = "tokens"
    """What members are weighted by: routing frequency, N_j / sum N, or the criterion's scores, of
    which negative ones count as 0. Where the sum is 0, all members weigh the same."""
    rows: Literal["all", "retained"] = "all"
    """Rows of the router that are retained: all, so that the gates of a token's merged experts add
    up, or only those of the retained experts, each the owner of a group."""
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


def nearest(distances: Array, retained: Sequence[int]) -> Groups:
    """Each other expert joins the nearest retained one; of equally near ones, that of the lower
    id."""
    groups = {owner: [owner] for owner in sorted(retained)}
    owners = list(groups)
    for expert in range(len(distances)):
        if expert not in groups:
            groups[owners[int(distances[expert, owners].argmin())]].append(expert)
    return list(groups.values())


def average_linkage(distances: Array, retained: Sequence[int]) -> Groups:
    """Hierarchical clusters, as many as experts are retained; which ones these are does not
    matter."""
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    if len(retained) >= len(distances):
        return [[expert] for expert in range(len(distances))]
    labels = cut_tree(linkage(squareform(distances), method="average"), n_clusters=len(retained))[
        :, 0
    ]
    return [numpy.flatnonzero(labels == label).tolist() for label in range(len(retained))]


def by_salience(
    distances: Array, retained: Sequence[int], *, group_size: int = GROUP_SIZE
) -> Groups:
    """From the retained expert of highest score on, each takes the nearest experts that are still
    free, of equally near ones that of the lower id, up to a group of `group_size`. UserError when
    groups cannot hold all."""
    check_capacity(len(distances), len(retained), group_size=group_size)
    free = [expert for expert in range(len(distances)) if expert not in retained]
    groups = []
    for owner in retained:
        members = sorted(free, key=lambda expert: float(distances[owner, expert]))[: group_size - 1]
        groups.append([owner, *members])
        free = [expert for expert in free if expert not in members]
    return groups


def check_capacity(count: int, retained: int, *, group_size: int = GROUP_SIZE) -> None:
    """Raise UserError when `retained` groups of at most `group_size` experts cannot hold
    `count`."""
    if retained * group_size < count:
        raise UserError(
            f"allocation.parameters.group_size={group_size}: {retained} groups of that size "
            f"cannot hold {count} "
            f"unprotected experts of a layer: expected at least {ceil(count / retained)}, or a "
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
        rows="retained",
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
"""What can replace the experts that an allocation drops -> the passes whose sums it reads."""


def needs(replacement: str) -> tuple[str, ...]:
    """The passes whose sums a replacement of dropped experts reads. UserError for an unknown
    one."""
    check_known("allocation.replacement", replacement, REPLACEMENTS)
    return REPLACEMENTS[replacement]


def parameters(replacement: str) -> dict[str, Any]:
    """Parameter of a replacement -> its type; {} for one that has none."""
    return keywords(GROUPINGS[replacement].cluster) if replacement in GROUPINGS else {}


def fits(settings: Mapping[str, Any], count: int, retained: int, protected: int) -> None:
    """Raise UserError when the `retained` of `count` experts of a layer cannot own all; `protected`
    ones own only themselves."""
    grouping = GROUPINGS.get(settings.get("replacement", "none"))
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
    """The groups of the grouping settings["replacement"], as many as experts are `retained`, in the
    order of their ids. Each of `protected` has a group of its own. `settings`: fields of
    AllocationConfig. `scores` (E,): those of the criterion. UserError when all retained experts are
    protected, and for missing sums."""
    name = settings["replacement"]
    grouping = GROUPINGS[name]
    others = [expert for expert in range(len(scores)) if expert not in protected]
    groups = [[expert] for expert in protected]
    if not others:
        return groups
    owners = sorted(
        (expert for expert in retained if expert not in protected),
        key=lambda expert: -scores[expert],
    )
    if not owners:
        raise UserError(
            f"allocation.replacement={name}: all {len(retained)} retained experts of a layer are "
            "protected, so that no "
            "others can be merged into them: expected a smaller ratio"
        )
    if "router_gram" not in sums and grouping.distances in (of_logits, of_outputs_and_logits):
        raise UserError(
            f"allocation.replacement={name} compares the router's logits, and this router gives "
            "none: expected "
            "hc_smoe, which compares outputs"
        )
    distances = grouping.distances(sums)[numpy.ix_(others, others)]
    positions = [others.index(expert) for expert in owners]
    clusters = grouping.cluster(
        distances, positions, **accepted(grouping.cluster, settings["parameters"])
    )
    for cluster in clusters:
        groups.append(sorted(others[position] for position in cluster))
    return sorted(groups)


def weighted(
    name: str, groups: Groups, sums: Sums, scores: Array, retained: Sequence[int]
) -> dict[int, dict[int, float]]:
    """The owner of each group -> {expert: weight}, for the grouping `name`: the retained expert
    where only the router's rows of retained experts stay, and otherwise the member of largest
    weight (of equals the lowest id)."""
    grouping = GROUPINGS[name]
    values = numpy.asarray(
        sums["tokens"] if grouping.weights == "tokens" else numpy.maximum(scores, 0), dtype=float
    )
    merged = {}
    for group in groups:
        of_group = values[group]
        total = of_group.sum()
        weights = of_group / total if total > 0 else numpy.full(len(group), 1 / len(group))
        rank = numpy.isin(group, retained) if grouping.rows == "retained" else of_group
        owner = group[int(rank.argmax())]
        merged[owner] = {
            expert: float(weight) for expert, weight in zip(group, weights, strict=True)
        }
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
