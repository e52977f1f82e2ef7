"""Tables and figures about how sure rankings are, and about what passes over a text show, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis.load.study import Study
from analysis.made import Made, of_model, unless_empty
from analysis.outputs import calibration_size, convergence, profile, ranks
from analysis.stats.comparison import Comparison
from analysis.stats.rank_tests import BENCHMARKS, COLUMNS


def _rank_differences(study: Study, comparisons: Sequence[Comparison]) -> Made:
    name = "ranks.cd"
    drawn = [
        ranks.rank_figure(comparison, over, name=of_model(comparisons, stem, comparison))
        for comparison in comparisons
        for over, stem in ((COLUMNS, name), (BENCHMARKS, f"{name}.benchmarks"))
    ]
    table = ranks.rank_test_table(study, comparisons, name=name)
    return [*(figure for figure in drawn if figure), *unless_empty(table)]


def _convergence(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return convergence.outputs(study)


def _calibration_sets(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(calibration_size.calibration_table(study, comparisons, name="coverage.table18"))


def _sizes(study: Study, comparisons: Sequence[Comparison]) -> Made:
    name = "heapr.fig3"
    drawn = (
        calibration_size.size_figure(study, comparison, name=of_model(comparisons, name, comparison))
        for comparison in comparisons
    )
    return [figure for figure in drawn if figure]


def _variance(study: Study, comparisons: Sequence[Comparison]) -> Made:
    table = profile.profile_table(study, comparisons, name="aimer.fig6")
    return [*_profiles(study, comparisons, profile.VARIANCE, "aimer.fig6"), *unless_empty(table)]


def _entropy(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return _profiles(study, comparisons, profile.ENTROPY, "coverage.fig11")


def _profiles(study: Study, comparisons: Sequence[Comparison], measure: str, name: str) -> Made:
    drawn = [
        profile.profile_figure(study, comparison, measure, name=of_model(comparisons, name, comparison))
        for comparison in comparisons
    ]
    return [figure for figure in drawn if figure]


OUTPUTS: Mapping[str, Callable[[Study, Sequence[Comparison]], Made]] = {
    "ranks.cd": _rank_differences,
    "convergence": _convergence,
    "coverage.table18": _calibration_sets,
    "heapr.fig3": _sizes,
    "aimer.fig1": calibration_size.changes,
    "aimer.fig6": _variance,
    "coverage.fig11": _entropy,
}
"""Name -> what makes its tables and figures; an empty list when the study has no data for them."""
