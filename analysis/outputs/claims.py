"""Test the papers' claims on a study: a paired difference, its interval, and a verdict for each.

Searched allocations beat uniform ones (EvoESAP); channels beat experts at equal routed parameters
(HEAPr); scores that do not count tokens depend less on the calibration set (Unified Expert
Pruning). A claim is tested only when the study has the cells for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.reader import groups, records
from analysis.load.settings import is_searched, replaces
from analysis.outputs.captions import score_setup
from analysis.outputs.score_rows import by_ratio
from analysis.registry import Results, output
from analysis.render.table import SCORE, Table, spelled
from analysis.stats import overlap, uncertainty
from analysis.stats.cell_scores import pooled_difference
from analysis.stats.comparison import Comparison, group_targets, means, overall
from analysis.stats.uncertainty import LEVEL, Estimate
from moe_lab.results import RANDOM

SEARCHED, CHANNELS, INVARIANT = "searched allocation", "channels", "invariant scores"
"""The three claims, named by what is claimed to be better."""
BY_CHANCE = "channels by chance"
"""Control of the second claim, without any criterion: random channels against random experts."""
ALL = "all"
"""In place of a ratio: the mean over all ratios."""
EQUAL = 0.035
"""Kept shares of routed parameters count as equal when they differ by less: whole experts cannot
match more closely."""
PAIR = ["criterion", "calibration", "recovery", "gate"]
"""Columns in which a searched cell and its uniform partner agree, besides the ratio."""

TESTED = ["difference", "low", "high", "detectable", "p"]
COLUMNS = ["claim", "model", "ratio", "compared", *TESTED, "p_holm", "verdict", "parts"]

Pairs = Sequence[tuple[int, int]]
"""Pairs of compared cells: first the one that the claim says is better, then the other."""


def claims(
    comparisons: Sequence[Comparison], costs: pd.DataFrame, family: pd.DataFrame
) -> pd.DataFrame:
    """Test the claims: one row per claim, model and ratio, and one over all ratios; columns
    COLUMNS.

    Empty when no claim can be tested. costs: cell, routed_kept; family: scores of the S family, as
    in a study. `difference` is of Avg; for the third claim, of the share of experts that all
    calibration sets agree on. p_holm is corrected by Holm's method over all rows. `detectable`: the
    difference that this study would find in 80 % of cases. `parts` maps each group average to its
    difference. verdict: see `verdict`; p is NaN for methods with one seed.
    """
    rows = [
        row
        for comparison in comparisons
        for row in (*_searched(comparison), *_channels(comparison, costs))
    ]
    ratios = {
        comparison.model: sorted({float(ratio) for ratio in comparison.cells["ratio"] if ratio > 0})
        for comparison in comparisons
    }
    rows_of_claims = pd.DataFrame([*rows, *_invariant(family, ratios)], columns=COLUMNS)
    rows_of_claims["p_holm"] = (
        uncertainty.holm(rows_of_claims["p"].to_numpy(float)) if len(rows_of_claims) else np.nan
    )
    rows_of_claims["verdict"] = [
        verdict(row["low"], row["high"], row["p_holm"]) for row in records(rows_of_claims)
    ]
    return rows_of_claims


def verdict(low: float, high: float, p_holm: float) -> str:
    """Verdict on the claim that a difference is above 0; decided where the interval and the
    corrected p agree."""
    if np.isnan(low + high + p_holm):
        return "not tested"
    if p_holm >= LEVEL or low <= 0 <= high:
        return "undecided"
    return "holds" if low > 0 else "does not hold"


def _searched(comparison: Comparison) -> list[dict[str, object]]:
    """Rows that compare searched with uniform allocations of the same criterion and calibration
    set."""
    cells = comparison.cells
    searched = cells[cells["allocation"].map(is_searched).astype(bool)]
    uniform = cells[(cells["allocation"] == "uniform") & (cells["granularity"] == "expert")]
    paired = searched.reset_index().merge(
        uniform.reset_index(), on=[*PAIR, "ratio"], suffixes=("", "_uniform")
    )
    pairs = {
        ratio: list(zip(at_ratio["cell"], at_ratio["cell_uniform"], strict=True))
        for ratio, at_ratio in by_ratio(paired)
    }
    return [_row(comparison, SEARCHED, ratio, [each]) for ratio, each in pairs.items()]


def _channels(comparison: Comparison, costs: pd.DataFrame) -> list[dict[str, object]]:
    """Rows that compare channels with whole experts: by criteria, then at random for the effect of
    granularity."""
    retained = costs.set_index("cell")["routed_kept"].astype(float).reindex(comparison.cells.index)
    cells = comparison.cells.assign(kept=retained)
    cells = cells[(cells["recovery"] == "none") & (cells["ratio"] > 0)]
    chance = cells["criterion"].isin(RANDOM)
    return [
        *_granularities(comparison, CHANNELS, cells[~chance]),
        *_granularities(comparison, BY_CHANCE, cells[chance]),
    ]


def _granularities(
    comparison: Comparison, claim: str, cells: pd.DataFrame
) -> list[dict[str, object]]:
    """Rows that compare every channel method with every expert method that keeps as many routed
    parameters.

    Methods that replace the experts they drop are left out: the claim is about removing them."""
    cells = cells[~cells["allocation"].map(replaces).astype(bool)]
    pairs = {}
    for ratio, at_ratio in by_ratio(cells):
        channels, experts = (
            at_ratio.loc[at_ratio["granularity"] == kind, "kept"] for kind in ("channel", "expert")
        )
        equal = [
            (int(str(channel_cell)), int(str(expert_cell)))
            for channel_cell, channel_share in channels.items()
            for expert_cell, expert_share in experts.items()
            if abs(channel_share - expert_share) < EQUAL
        ]
        if equal:
            pairs[ratio] = equal
    rows = [_row(comparison, claim, ratio, [each]) for ratio, each in pairs.items()]
    return [*rows, _row(comparison, claim, ALL, list(pairs.values()))] if len(pairs) > 1 else rows


def _row(
    comparison: Comparison, claim: str, ratio: float | str, ratios: Sequence[Pairs]
) -> dict[str, object]:
    cells = sorted({cell for pairs in ratios for pair in pairs for cell in pair})
    mean = overall(comparison, cells)
    targets = group_targets(comparison, cells)
    targets.pop(comparison.quantity(mean).mean, None)
    sign = comparison.quantity(mean).sign
    parts = {
        name: pooled_difference(comparison, target, ratios)[1].value
        for name, target in targets.items()
    }
    compared, estimate = pooled_difference(comparison, mean, ratios)
    tested = _tested(replace(estimate, value=sign * estimate.value))
    if not comparison.have_several_seeds(cells):
        tested["p"] = np.nan
    return {
        "claim": claim,
        "model": comparison.model,
        "ratio": ratio,
        "compared": compared,
        "parts": parts,
        **tested,
    }


def _tested(estimate: Estimate) -> dict[str, float]:
    numbers = (estimate.value, *estimate.interval, estimate.detectable, estimate.p)
    return dict(zip(TESTED, numbers, strict=True))


def _invariant(
    family: pd.DataFrame, ratios: Mapping[str, Sequence[float]]
) -> list[dict[str, object]]:
    """Rows on the overlap across calibration sets of S(1, alpha, beta) minus that of S(0, alpha,
    beta), by layer.

    ratios: model -> the ratios that its plans have."""
    rows: list[dict[str, object]] = []
    for key, scores in groups(family, ["model"]):
        if scores["calibration"].nunique() < 2:
            continue
        layers = [overlap.scores_by_variant(layer) for _, layer in scores.groupby("layer")]
        differences = {
            ratio: layer_differences(layers, ratio)
            for ratio in ratios.get(key["model"], overlap.RATIOS)
        }
        mean = np.mean(list(differences.values()), axis=0)
        for ratio, shares in (
            *differences.items(),
            *([(ALL, mean)] if len(differences) > 1 else []),
        ):
            estimate = (
                uncertainty.mean_estimate(shares)
                if np.ptp(shares) > 0
                else Estimate(float(np.mean(shares)))
            )
            labels = {"claim": INVARIANT, **key, "ratio": ratio, "parts": {}}
            rows.append({**labels, **_tested(estimate), "compared": len(_PARTNERS)})
    return rows


_PARTNERS = [
    (alpha, beta)
    for alpha in (0, 1, 2)
    for beta in (0, 1, 2)
    if (1, alpha, beta) != overlap.DEGENERATE
]


def layer_differences(
    layers: Sequence[Mapping[tuple[int, ...], np.ndarray]], ratio: float
) -> np.ndarray:
    """Difference per layer (layers,) in the share of lowest-scored experts common to all
    calibration sets.

    layers: `overlap.scores_by_variant` of each. b = 1 minus b = 0, the mean over (alpha, beta)."""
    differences = []
    for layer in layers:
        shares = {
            variant: overlap.agreement(overlap.bottom(scores, ratio)[:, None, :])["triple"]
            for variant, scores in layer.items()
        }
        pairs = [
            shares[(1, *rest)] - shares[(0, *rest)]
            for rest in _PARTNERS
            if {(1, *rest), (0, *rest)} <= set(shares)
        ]
        differences.append(np.mean(pairs) if pairs else np.nan)
    return np.asarray(differences, float)


STATEMENTS = {
    SEARCHED: "Searched allocations beat uniform ones",
    CHANNELS: "Removing channels beats removing whole experts at equal routed parameters",
    BY_CHANCE: "Removing channels beats removing whole experts even at random",
    INVARIANT: "Scores divided by the token count depend less on the calibration set than sums",
}


def _of_losses(results: Results) -> str:
    """A sentence for the caption about differences of losses; "" without any."""
    units = dict.fromkeys(q.unit for q in means(results.comparisons).values() if q.lower_is_better)
    listed = f" ({names.listing(filter(None, units))})" if any(units) else ""
    return (
        f"Differences of losses{listed}, also those of perplexities, are falls of the loss. "
        if units
        else ""
    )


@output("claims", chapter="claims", needs="methods that a claim of a paper compares")
def claim_table(results: Results, name: str) -> Table | None:
    """The papers' claims, tested on this study: paired differences, per ratio and over all
    ratios."""
    rows = claims(results.comparisons, results.study.costs, results.study.family)
    if rows.empty:
        return None
    parts = pd.DataFrame(list(rows["parts"]), index=rows.index, dtype=float)
    text = {"Model": "model", "Claim": "statement", "Pruned": "pruned"}
    numbers = {
        "Pairs": "compared",
        "Difference": "difference",
        "Detectable": "detectable",
        "p": "p",
        "p (Holm)": "p_holm",
    }
    cells = results.study.cells
    removed = dict(
        zip(zip(cells["model"], cells["ratio"], strict=True), cells["removed_words"], strict=True)
    )
    keys = zip(rows["model"], rows["ratio"], strict=True)
    pruned = [
        ratio if ratio == ALL else removed.get((model, ratio), names.ratio(ratio))
        for model, ratio in keys
    ]
    worded = rows.assign(statement=rows["claim"].map(STATEMENTS), pruned=pruned)
    frame = pd.concat([spelled(worded, {**text, **numbers, "Verdict": "verdict"}), parts], axis=1)
    return Table(
        name=name,
        title="What the papers claim",
        caption="Difference: for the first two claims, of the average, the mean over pairs of "
        "plans, paired by seed and item; channels and whole experts are paired when the shares of "
        f"routed parameters that they keep differ by less than {EQUAL:g}. For calibration sets, of "
        "the share of the lowest-scored experts that all sets have in common, the mean over "
        "layers. A claim is decided where the 95 % interval is on one side of 0 and p is below "
        f"{LEVEL} after Holm's correction over all rows; methods with one seed are not tested. "
        "Detectable: the difference that this study would find in 80 % of cases. The last columns "
        f"are differences of group averages. {_of_losses(results)}{score_setup(results.study)}",
        frame=frame,
        formats={
            "Pairs": "{:.0f}",
            "Difference": SCORE,
            "Detectable": SCORE,
            "p": "{:.4f}",
            "p (Holm)": "{:.4f}",
            **dict.fromkeys(map(str, parts), SCORE),
        },
        optional=tuple(map(str, parts)),
        low=rows[["low"]].set_axis(["Difference"], axis=1),
        high=rows[["high"]].set_axis(["Difference"], axis=1),
    )
