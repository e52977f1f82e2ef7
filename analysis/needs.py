"""What a run must have had for an output to have numbers: said when it has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from analysis.items import ALSO
from moe_lab.errors import UserError, nearest

_SEARCH = "cells with allocation=evolutionary"
_WEIGHTS = "cells with criterion=aimer"
_SUMS = "the sums of a pass over a text in the store"
_TIMED = "a run with timing=true"
_HEAPR = "some of HEAPr's seven benchmarks"
_SLIMMING = "some of MoE-Slimming's benchmarks"
_BOTH_TASKS = "a calibration set about code and one about mathematics"

NEEDS: Mapping[str, str] = {
    "convergence": "a run with calibration.snapshots=8",
    "coverage.table18": f"one criterion on several calibration sets, and {_SLIMMING}",
    "heapr.fig3": f"calibration sets that read different numbers of tokens of one text, and {_HEAPR}",
    "aimer.fig1": "calibration sets that read different numbers of tokens of one text",
    "coverage.table8": f"several of coverage_aligned_* of sweeps (coverage_table8), and {_SLIMMING}",
    "coverage.table9": "cells with grid.top_k=[null,2,1] (coverage_table9 of sweeps)",
    "coverage.table16": f"coverage_aligned_128 and coverage_min_* of sweeps (coverage_table16), and {_SLIMMING}",
    "coverage.table3": "cells with a recovery (coverage_table3 and coverage_table5 of sweeps)",
    "coverage.table4": "cells with a recovery, and reasoning benchmarks, such as gsm8k",
    "coverage.table2": _TIMED,
    "coverage.fig6": _TIMED,
    "coverage.fig10": f"{_TIMED}, of several aligned allocations (coverage_table2 of sweeps)",
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
    "evoesap.table3": _SEARCH,
    "evoesap.table4": f"{_SEARCH}, and coding benchmarks, WildBench or multiple choice",
    "evoesap.table5": f"{_SEARCH} and several settings of the search (evoesap_table5 of sweeps)",
    "evoesap.table6": f"{_SEARCH}, fitness=esap and fitness=spec_dec (evoesap_table6 of sweeps)",
    "evoesap.table7": f"{_SEARCH}, calibrated on general text (evoesap_table7 of sweeps)",
    "evoesap.table8": f"{_SEARCH}, and coding benchmarks",
    "evoesap.table9": f"{_SEARCH}, and WildBench, gsm8k or math500",
    "evoesap.table10": f"{_SEARCH}, and multiple-choice benchmarks",
    "heapr.fig2": f"HEAPr or CAMERA at three ratios, and {_HEAPR}",
    "heapr.table1": f"HEAPr or CAMERA with allocation=global or layerwise, and {_HEAPR}",
    "heapr.table2": f"CAMERA with allocation=sequential or layerwise, HEAPr with layerwise or global, and {_HEAPR}",
    "coverage.table6": f"one channel criterion under allocation=coverage and others, and {_SLIMMING}",
    "coverage.table7": f"allocation=coverage and its coverage_smoothing_* variants, and {_SLIMMING}",
    "coverage.table13": f"several channel criteria under allocation=coverage, and {_SLIMMING}",
    "coverage.table11": f"cells with a recovery, and {_SLIMMING}",
    "coverage.fig8": f"cells with recovery=nf4, and {_SLIMMING}",
    "aimer.table2": _WEIGHTS,
    "aimer.table5": f"{_WEIGHTS}, and WildBench, gsm8k or math500",
    "aimer.table6": f"{_WEIGHTS}, and coding benchmarks",
    "aimer.table7": f"{_WEIGHTS}, and multiple-choice benchmarks",
    "aimer.fig3": "three columns",
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
    "winners.loss": "samples with answer_loss: benchmarks with reference answers, evaluated with likelihoods",
    "ranks.loss": "samples with answer_loss: benchmarks with reference answers, evaluated with likelihoods",
    "unified.table5": "results",
    "ranks.cd": "three criteria and three columns",
}
"""Output -> what it needs; those that are not here need results of pruned models, or a gap."""
DEFAULT = "results of pruned models"


def needs(name: str) -> str:
    """What the output `name` needs, in words."""
    return NEEDS.get(ALSO.get(name, name), DEFAULT)


def unknown_name(name: str, known: Iterable[str]) -> UserError:
    """The error for a name that no output has: the nearest one, and where all of them are listed."""
    close = nearest(name, [*known, *ALSO, "all", "report", "diff"])
    hint = f": did you mean {close}?" if close else ""
    return UserError(f"name={name} is unknown{hint} (`python -m analysis help` lists all names)")
