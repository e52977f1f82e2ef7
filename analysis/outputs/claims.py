"""Test the papers' claims on a study: a paired difference, its interval, and a verdict for each
claim.

Searched allocations beat uniform ones (EvoESAP); channels beat experts at equal routed parameters
(HEAPr); scores that do not count tokens depend less on the calibration set (Unified Expert
Pruning). A claim is tested only if the study has the cells that the claim compares.
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
"""The three claims, named by the side that should be better."""
BY_CHANCE = "channels by chance"
"""Control of the second claim, without any criterion: random channels against random experts."""
ALL = "all"
"""Value of the column ratio for the mean over all ratios."""
EQUAL = 0.035
"""Retained shares of routed parameters count as equal when they differ by less than this; whole
experts cannot match more closely."""
PAIR = ["criterion", "calibration", "recovery", "gate"]
"""Columns in which a searched cell and its uniform partner agree, besides the ratio."""

ESTIMATES = ["difference", "low", "high", "detectable", "p"]
"""Columns of numbers of an `uncertainty.Estimate`."""
COLUMNS = ["claim", "model", "ratio", "compared", *ESTIMATES, "p_holm", "verdict", "parts"]

Pairs = Sequence[tuple[int, int]]
"""Pairs of compared cells; the first cell of a pair is the one that should be better."""


def claims(
    comparisons: Sequence[Comparison], costs: pd.DataFrame, family: pd.DataFrame
) -> pd.DataFrame:
    """Test the claims: one row per claim, model and ratio, and one over all ratios. Empty when no
    claim can be tested.

    costs: cell, routed_kept; family: scores of the S family, as in `Study`. Returned columns:

    - claim, model, ratio; compared: number of pairs
    - difference, low, high (95 %): of Avg; for the third claim, of the share of experts on which
    all calibration sets agree
    - detectable: the difference that this study would find in 80 % of cases
    - p: NaN for methods with one seed; p_holm: corrected by Holm's method over all rows
    - verdict: see `verdict`
    - parts: name of a group average -> its difference
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
    frame = pd.DataFrame([*rows, *_invariant(family, ratios)], columns=COLUMNS)
    frame["p_holm"] = uncertainty.holm(frame["p"].to_numpy(float))
    frame["verdict"] = [verdict(row["low"], row["high"], row["p_holm"]) for row in records(frame)]
    return frame


def verdict(low: float, high: float, p_holm: float) -> str:
    """Verdict on the claim that a difference is above 0. It is decided only if p_holm is below
    LEVEL and the interval excludes 0."""
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
    rows = []
    for ratio, same_ratio in by_ratio(paired):
        pairs = list(zip(same_ratio["cell"], same_ratio["cell_uniform"], strict=True))
        rows.append(_row(comparison, SEARCHED, ratio, [pairs]))
    return rows


def _channels(comparison: Comparison, costs: pd.DataFrame) -> list[dict[str, object]]:
    """Rows that compare channels with whole experts: chosen by criteria, then chosen at random,
    which shows the effect of granularity alone."""
    retained = costs.set_index("cell")["routed_kept"].astype(float).reindex(comparison.cells.index)
    cells = comparison.cells.assign(kept=retained)
    cells = cells[(cells["recovery"] == "none") & (cells["ratio"] > 0)]
    is_random = cells["criterion"].isin(RANDOM)
    return [
        *_granularities(comparison, CHANNELS, cells[~is_random]),
        *_granularities(comparison, BY_CHANCE, cells[is_random]),
    ]


def _granularities(
    comparison: Comparison, claim: str, cells: pd.DataFrame
) -> list[dict[str, object]]:
    """Rows that compare every channel method with every expert method that retains as many routed
    parameters: one per ratio, and one over all ratios if there are several. cells: pruned cells,
    with a column kept.

    Methods that replace dropped experts are left out: the claim is about removing experts."""
    cells = cells[~cells["allocation"].map(replaces).astype(bool)]
    pairs_by_ratio = {}
    for ratio, same_ratio in by_ratio(cells):
        channels = same_ratio.loc[same_ratio["granularity"] == "channel", "kept"]
        experts = same_ratio.loc[same_ratio["granularity"] == "expert", "kept"]
        pairs = []
        for channel_cell, channel_share in channels.items():
            for expert_cell, expert_share in experts.items():
                if abs(channel_share - expert_share) < EQUAL:
                    pairs.append((int(str(channel_cell)), int(str(expert_cell))))
        if pairs:
            pairs_by_ratio[ratio] = pairs
    rows = [_row(comparison, claim, ratio, [pairs]) for ratio, pairs in pairs_by_ratio.items()]
    if len(rows) > 1:
        rows.append(_row(comparison, claim, ALL, list(pairs_by_ratio.values())))
    return rows


def _row(
    comparison: Comparison, claim: str, ratio: float | str, pairs_of_ratios: Sequence[Pairs]
) -> dict[str, object]:
    """A row of `claims` for pairs of cells; a list of pairs for each ratio, with equal weights."""
    cells = sorted({cell for pairs in pairs_of_ratios for pair in pairs for cell in pair})
    mean = overall(comparison, cells)
    targets = group_targets(comparison, cells)
    targets.pop(comparison.quantity(mean).mean, None)
    sign = comparison.quantity(mean).sign
    parts = {}
    for name, target in targets.items():
        _, estimate = pooled_difference(comparison, target, pairs_of_ratios)
        parts[name] = estimate.value
    compared, estimate = pooled_difference(comparison, mean, pairs_of_ratios)
    numbers = _numbers(replace(estimate, value=sign * estimate.value))
    if not comparison.have_several_seeds(cells):
        numbers["p"] = np.nan
    return {
        "claim": claim,
        "model": comparison.model,
        "ratio": ratio,
        "compared": compared,
        "parts": parts,
        **numbers,
    }


def _numbers(estimate: Estimate) -> dict[str, float]:
    """The columns ESTIMATES of a row."""
    numbers = (estimate.value, *estimate.interval, estimate.detectable, estimate.p)
    return dict(zip(ESTIMATES, numbers, strict=True))


def _invariant(
    family: pd.DataFrame, ratios: Mapping[str, Sequence[float]]
) -> list[dict[str, object]]:
    """Rows that compare the overlap across calibration sets of S(1, alpha, beta) with that of
    S(0, alpha, beta): mean over layers of the difference.

    ratios: model -> the ratios of its plans."""
    rows: list[dict[str, object]] = []
    for key, scores in groups(family, ["model"]):
        if scores["calibration"].nunique() < 2:
            continue
        layers = [overlap.scores_by_variant(layer) for _, layer in scores.groupby("layer")]
        differences: dict[object, np.ndarray] = {
            ratio: layer_differences(layers, ratio)
            for ratio in ratios.get(key["model"], overlap.RATIOS)
        }
        if len(differences) > 1:
            differences |= {ALL: np.mean(list(differences.values()), axis=0)}
        for ratio, shares in differences.items():
            estimate = Estimate(float(np.mean(shares)))
            if np.ptp(shares) > 0:
                estimate = uncertainty.mean_estimate(shares)
            labels = {"claim": INVARIANT, **key, "ratio": ratio, "parts": {}}
            rows.append({**labels, **_numbers(estimate), "compared": len(_EXPONENTS)})
    return rows


_EXPONENTS = [
    (alpha, beta)
    for alpha in (0, 1, 2)
    for beta in (0, 1, 2)
    if (1, alpha, beta) != overlap.DEGENERATE
]
"""(alpha, beta) of the compared pairs S(1, alpha, beta) and S(0, alpha, beta)."""


def layer_differences(
    layers: Sequence[Mapping[tuple[int, ...], np.ndarray]], ratio: float
) -> np.ndarray:
    """For each layer (layers,), the share of lowest-scored experts that all calibration sets have
    in common: the share of S(1, alpha, beta) minus that of S(0, alpha, beta), the mean over (alpha,
    beta).

    layers: `overlap.scores_by_variant` of each layer."""
    differences = []
    for layer in layers:
        shares = {
            variant: overlap.agreement(overlap.bottom(scores, ratio)[:, None, :])["triple"]
            for variant, scores in layer.items()
        }
        of_pairs = [
            shares[1, alpha, beta] - shares[0, alpha, beta]
            for alpha, beta in _EXPONENTS
            if {(1, alpha, beta), (0, alpha, beta)} <= set(shares)
        ]
        differences.append(np.mean(of_pairs) if of_pairs else np.nan)
    return np.asarray(differences, float)


STATEMENTS = {
    SEARCHED: "Searched allocations beat uniform ones",
    CHANNELS: "Removing channels beats removing whole experts at equal routed parameters",
    BY_CHANCE: "Removing channels beats removing whole experts even at random",
    INVARIANT: "Scores divided by the token count depend less on the calibration set than sums",
}


def _of_losses(results: Results) -> str:
    """A sentence for the caption on the sign of differences of losses; "" when Avg is of scores."""
    quantities = means(results.comparisons).values()
    units = dict.fromkeys(quantity.unit for quantity in quantities if quantity.lower_is_better)
    if not units:
        return ""
    listed = f" ({names.listing(filter(None, units))})" if any(units) else ""
    return f"Differences of losses{listed}, also those of perplexities, are falls of the loss. "


@output("claims", chapter="claims", needs="methods that a claim of a paper compares")
def claim_table(results: Results, name: str) -> Table | None:
    """The papers' claims, tested on this study: paired differences for each ratio and over all
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
    removed = cells.groupby(["model", "ratio"])["removed_words"].last().to_dict()
    pruned = []
    for model, ratio in zip(rows["model"], rows["ratio"], strict=True):
        if ratio == ALL:
            pruned.append(ALL)
        else:
            pruned.append(removed.get((model, ratio), names.ratio(ratio)))
    texts = rows.assign(statement=rows["claim"].map(STATEMENTS), pruned=pruned)
    frame = pd.concat([spelled(texts, {**text, **numbers, "Verdict": "verdict"}), parts], axis=1)
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
