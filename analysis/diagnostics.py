"""Tables and figures about how sure rankings are, and about what passes over a text show, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis import calibration_outputs, convergence, profile_outputs, rank_outputs, size_change
from analysis.comparison import Comparison
from analysis.load import Study
from analysis.made import Made, of_model, unless_empty
from analysis.rank_tests import BENCHMARKS, COLUMNS


def _rank_differences(study: Study, comparisons: Sequence[Comparison]) -> Made:
    name = "ranks.cd"
    drawn = [
        rank_outputs.rank_figure(comparison, over, name=of_model(comparisons, stem, comparison))
        for comparison in comparisons
        for over, stem in ((COLUMNS, name), (BENCHMARKS, f"{name}.benchmarks"))
    ]
    table = rank_outputs.rank_test_table(study, comparisons, name=name)
    return [*(figure for figure in drawn if figure), *unless_empty(table)]


def _convergence(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return convergence.outputs(study)


def _calibration_sets(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return unless_empty(calibration_outputs.calibration_table(study, comparisons, name="coverage.table18"))


def _sizes(study: Study, comparisons: Sequence[Comparison]) -> Made:
    name = "heapr.fig3"
    drawn = (
        calibration_outputs.size_figure(study, comparison, name=of_model(comparisons, name, comparison))
        for comparison in comparisons
    )
    return [figure for figure in drawn if figure]


def _variance(study: Study, comparisons: Sequence[Comparison]) -> Made:
    table = profile_outputs.profile_table(study, comparisons, name="aimer.fig6")
    return [*_profiles(study, comparisons, profile_outputs.VARIANCE, "aimer.fig6"), *unless_empty(table)]


def _entropy(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return _profiles(study, comparisons, profile_outputs.ENTROPY, "coverage.fig11")


def _profiles(study: Study, comparisons: Sequence[Comparison], measure: str, name: str) -> Made:
    drawn = [
        profile_outputs.profile_figure(study, comparison, measure, name=of_model(comparisons, name, comparison))
        for comparison in comparisons
    ]
    return [figure for figure in drawn if figure]


OUTPUTS: Mapping[str, Callable[[Study, Sequence[Comparison]], Made]] = {
    "ranks.cd": _rank_differences,
    "convergence": _convergence,
    "coverage.table18": _calibration_sets,
    "heapr.fig3": _sizes,
    "aimer.fig1": size_change.changes,
    "aimer.fig6": _variance,
    "coverage.fig11": _entropy,
}
"""Name -> what makes its tables and figures; an empty list when the study has no data for them."""
