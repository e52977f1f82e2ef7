"""Which experts are merged, and with which weights: sums of one layer in, groups of experts out. No torch.

Merging takes the place of dropping: an allocation decides how many experts a layer keeps, and a grouping which experts
share each of them. Group weights are routing frequencies, N_j / sum N of the group; where no member of a group saw a
token, all its members weigh the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from moe_lab.errors import UserError, unknown

Array = NDArray[numpy.float64]
Sums = Mapping[str, Any]
"""Sums of a layer by name, as in statistics/sums.py."""
Grouping = Callable[[Sums, Sequence[int]], list[list[int]]]
"""Sums and ids of the experts that would be kept -> groups of ids, as many as these, with every expert in one."""


def m_smoe(sums: Sums, kept: Sequence[int]) -> list[list[int]]:
    """M-SMoE (arXiv 2310.01334): each dropped expert joins the kept one whose router logits are most similar.

    Similarity of i and j is the cosine of their logits z_i and z_j over all tokens, from sum_t z z^T. Of equally
    similar experts, the one of the lower id. UserError for routers that give no logits.
    """
    if "router_gram" not in sums:
        raise UserError(
            "allocation.replacement=m_smoe compares the router's logits, and this router gives none: expected hc_smoe, "
            "which compares outputs"
        )
    gram = numpy.asarray(sums["router_gram"], dtype=float)
    norms = numpy.sqrt(numpy.maximum(numpy.diag(gram), numpy.finfo(float).tiny))
    cosine = gram / norms[:, None] / norms
    groups = {owner: [owner] for owner in kept}
    for expert in (one for one in range(len(gram)) if one not in groups):
        nearest = list(kept)[int(cosine[expert, list(kept)].argmax())]
        groups[nearest].append(expert)
    return [sorted(group) for group in groups.values()]


def hc_smoe(sums: Sums, kept: Sequence[int]) -> list[list[int]]:
    """HC-SMoE (arXiv 2410.08589): hierarchical clusters of the experts' mean outputs over all tokens.

    Euclidean distances, average linkage, as many clusters as experts are kept; which ones are kept does not matter.
    """
    return _clusters(numpy.asarray(sums["dense_output_sum"], dtype=float), len(kept))  # the means times one number


def hc_smoe_routed(sums: Sums, kept: Sequence[int]) -> list[list[int]]:
    """As `hc_smoe`, with the mean output of each expert over the tokens routed to it, which costs no pass of its own.

    Experts are then compared on different tokens, which HC-SMoE avoids.
    """
    from moe_lab.statistics.sums import mean_output

    return _clusters(mean_output(sums), len(kept))


_PASSES: dict[Grouping, tuple[str, ...]] = {
    m_smoe: ("statistics", "similarity"),
    hc_smoe: ("statistics", "similarity"),
    hc_smoe_routed: ("statistics",),
}
"""Grouping -> the passes whose sums it reads, with the tokens of each expert, which weigh the groups."""
GROUPINGS = {function.__name__: function for function in _PASSES}
REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "mean_output": ("statistics",),
    **{function.__name__: passes for function, passes in _PASSES.items()},
}
"""What can take the place of the experts that an allocation drops -> the passes whose sums it reads."""
BY_EXPERT = {"router_gram": 2, "dense_output_sum": 1, "output_sum": 1, "tokens": 1}
"""Sums that groupings read -> how many of their axes are experts."""


def needs(replacement: str) -> tuple[str, ...]:
    """The passes whose sums a replacement of dropped experts reads. UserError for an unknown one."""
    if replacement not in REPLACEMENTS:
        raise unknown("allocation.replacement", replacement, REPLACEMENTS)
    return REPLACEMENTS[replacement]


def groups(name: str, sums: Sums, kept: Sequence[int], protected: Sequence[int] = ()) -> list[list[int]]:
    """The groups of the grouping `name`, as many as experts are `kept`; each of `protected` is one by itself.

    UserError when all kept experts are protected and there are others, which nothing could be merged into.
    """
    count = len(sums["tokens"])
    others = [expert for expert in range(count) if expert not in protected]
    free = [others.index(expert) for expert in kept if expert not in protected]
    alone = [[expert] for expert in protected]
    if not others:
        return alone
    if not free:
        raise UserError(
            f"allocation.replacement={name}: a layer keeps {len(kept)} experts, which are all protected, so that no "
            "others can be merged into them: expected a smaller ratio"
        )
    of_others = {
        key: numpy.asarray(sums[key])[numpy.ix_(*[others] * axes)] for key, axes in BY_EXPERT.items() if key in sums
    }
    found = GROUPINGS[name](of_others, free)
    return sorted(alone + [[others[place] for place in group] for group in found])


def weighted(groups: Sequence[Sequence[int]], tokens: Array) -> dict[int, dict[int, float]]:
    """The expert that stands for each group, its most used one (of equals the lowest id) -> {expert: weight}.

    `tokens` (E,): tokens routed to each expert.
    """
    merged = {}
    for group in groups:
        counts = tokens[list(group)]
        shares = counts / counts.sum() if counts.sum() > 0 else numpy.full(len(group), 1 / len(group))
        owner = group[int(counts.argmax())]
        merged[owner] = {expert: float(share) for expert, share in zip(group, shares, strict=True)}
    return dict(sorted(merged.items()))


def _clusters(features: Array, count: int) -> list[list[int]]:
    """`count` clusters of the rows of `features` (E, H), by average linkage of Euclidean distances."""
    from scipy.cluster.hierarchy import cut_tree, linkage

    if count >= len(features):
        return [[expert] for expert in range(len(features))]
    labels = cut_tree(linkage(features, method="average"), n_clusters=count)[:, 0]
    return [numpy.flatnonzero(labels == label).tolist() for label in range(count)]
