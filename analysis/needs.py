"""What a run must have had for an output to have numbers: said when it has none."""

from __future__ import annotations

from collections.abc import Mapping

_SEARCH = "cells with allocation=evolutionary"
_SUMS = "the sums of a pass over a text in the store"
_BOTH_TASKS = "a calibration set about code and one about mathematics"

NEEDS: Mapping[str, str] = {
    "convergence": "a run with calibration.snapshots=8",
    "coverage.table18": "one criterion on several calibration sets",
    "heapr.fig3": "calibration sets that read different numbers of tokens of one text",
    "coverage.table16": "several of the allocations coverage_aligned_* and coverage_min_* of sweeps",
    "aimer.fig6": "a run with profile=true",
    "coverage.fig11": "a run with profile=true",
    "unified.fig3": "a run with overlap=true",
    "unified.fig4": "a run with overlap=true and two calibration sets",
    "unified.fig5": "a run with overlap=true and two calibration sets",
    "task_specific": _BOTH_TASKS,
    "unified.table2": _BOTH_TASKS,
    "evoesap.table1": _SEARCH,
    "evoesap.fig1": _SEARCH,
    "evoesap.fig3": _SEARCH,
    "evoesap.search": _SEARCH,
    "heapr.fig2": "HEAPr or CAMERA at three ratios",
    "heapr.table1": "HEAPr or CAMERA with allocation=global or layerwise",
    "heapr.table2": "CAMERA and HEAPr with allocation=layerwise or global",
    "coverage.table6": "one channel criterion under allocation=coverage and others",
    "coverage.table7": "allocation=coverage and its coverage_smoothing_* variants",
    "coverage.table13": "several channel criteria under allocation=coverage",
    "coverage.table11": "cells with a recovery",
    "coverage.fig8": "cells with recovery=nf4",
    "aimer.table2": "cells with criterion=aimer",
    "aimer.fig2": "cells with criterion=magnitude or aimer",
    "unified.table4": "the facts of its models in the store",
    "unified.table6": "registered criteria",
    "aimer.table1": "registered criteria",
    "aimer.table4": "the scores of its criteria in the store, with the steps they are from",
    "coverage.table1": "channel plans in the store, with the steps they are from",
    "coverage.fig2": "cells with allocation=coverage and allocation.parameters.prior=loss, which reads the ablation",
    "coverage.table14": _SUMS,
    "coverage.fig3": _SUMS,
    "coverage.fig4": "scores of channels in the store; for losses, a perplexity at three ratios",
    "coverage.fig7": "cells of channels with allocation=coverage",
    "coverage.fig12": _SUMS,
    "coverage.fig13": _SUMS,
    "coverage.fig14": "cells of channels with allocation=coverage, and the sums of their pass in the store",
    "ranks.cd": "three criteria and three columns",
}
"""Output -> what it needs; those that are not here need results, or a gap."""
DEFAULT = "results"


def needs(name: str) -> str:
    """What the output `name` needs, in words."""
    return NEEDS.get(name, DEFAULT)
