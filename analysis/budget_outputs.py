"""Tables and figures about channels, budgets, bits and weights by name, and what each needs of a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis import names
from analysis.load.study import Study
from analysis.made import Made, of_model, unless_empty
from analysis.outputs import budgets, channels, claims, recovery, weights
from analysis.stats.comparison import Comparison


def _claims(study: Study, comparisons: Sequence[Comparison]) -> Made:
    found = claims.claims(comparisons, study.costs, study.family)
    return [claims.claim_table(study, found)] if len(found) else []


def _ratio_figures(study: Study, comparisons: Sequence[Comparison]) -> Made:
    drawn = [
        channels.ratio_figure(study, one, name=of_model(comparisons, "heapr.fig2", one))
        for one in filter(_of_heapr, comparisons)
    ]
    return [figure for figure in drawn if figure]


def _methods(study: Study, comparisons: Sequence[Comparison]) -> Made:
    both = [comparison for comparison in comparisons if _of_heapr(comparison)]
    return unless_empty(channels.method_table(study, both))


def _channel_choice(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(channels.channel_choice_table(study, comparisons))


def _allocators(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(channels.allocator_table(study, comparisons))


def _smoothing(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(channels.smoothing_table(study, comparisons))


def _channel_scores(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(channels.channel_score_table(study, comparisons))


def _budgets(study: Study, comparisons: Sequence[Comparison]) -> Made:
    drawn = []
    for comparison in comparisons:
        name = of_model(comparisons, "coverage.fig", comparison)
        drawn.append(budgets.layer_figure(comparison, study.kept, name=name))
        drawn.append(budgets.expert_figure(comparison, study.kept, name=f"{name}.experts"))
    return [figure for figure in drawn if figure is not None]


def _bits(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(recovery.recovery_table(study, comparisons))


def _storage(study: Study, comparisons: Sequence[Comparison]) -> Made:
    found = [(comparison, recovery.storage_points(study, comparison)) for comparison in comparisons]
    return [
        recovery.storage_figure(comparison, points, name=of_model(comparisons, "coverage.fig8", comparison))
        for comparison, points in found
        if points[["storage", "score"]].notna().all(axis=1).any()
    ]


def _profiles(study: Study, comparisons: Sequence[Comparison]) -> Made:
    scores = weights.weight_scores(study)
    return [weights.profile_figure(weights.profiles(scores), name="aimer.fig2")] if len(scores) else []


def _of_heapr(comparison: Comparison) -> bool:
    """Whether a method of HEAPr's tables was run."""
    pairs = zip(comparison.cells["criterion"], comparison.cells["allocation"], strict=True)
    return any(pair in names.METHODS for pair in pairs)


OUTPUTS: Mapping[str, Callable[[Study, Sequence[Comparison]], Made]] = {
    "claims": _claims,
    "heapr.fig2": _ratio_figures,
    "heapr.table1": _methods,
    "heapr.table2": _channel_choice,
    "coverage.table6": _allocators,
    "coverage.table7": _smoothing,
    "coverage.table13": _channel_scores,
    "coverage.fig": _budgets,
    "coverage.table11": _bits,
    "coverage.fig8": _storage,
    "aimer.fig2": _profiles,
}
"""Name -> what makes its tables and figures; an empty list when the study has no cells for them."""
