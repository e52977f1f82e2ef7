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
from analysis.load.settings import has_replacement
from analysis.outputs.captions import score_setup
from analysis.outputs.score_rows import cells_by_ratio
from analysis.outputs.search import searched_pairs
from analysis.registry import Results, output
from analysis.render.table import SCORE, Columns, Table, frame_and_formats
from analysis.stats import overlap, uncertainty
from analysis.stats.cell_scores import pooled_difference
from analysis.stats.comparison import Comparison, group_targets, mean_quantities, overall_columns
from analysis.stats.uncertainty import LEVEL, Estimate
from moe_lab.results import RANDOM

SEARCHED_ALLOCATION = "searched allocation"
CHANNELS = "channels"
INVARIANT_SCORES = "invariant scores"
"""The three claims, named by the side that should be better."""
CHANNELS_BY_CHANCE = "channels by chance"
"""Control of the second claim, without any criterion: random channels against random experts."""
ALL_RATIOS = "all"
"""Value of the column ratio for the mean over all ratios."""
TOLERANCE = 0.035
"""Two retained shares of routed parameters count as equal when they differ by less than TOLERANCE.
A number of whole experts cannot match a share more closely."""

ESTIMATE_COLUMNS = ["difference", "low", "high", "detectable", "p"]
"""Columns of numbers of an `uncertainty.Estimate`."""
COLUMNS = ["claim", "model", "ratio", "compared", *ESTIMATE_COLUMNS, "p_holm", "verdict", "parts"]

Pairs = Sequence[tuple[int, int]]
"""Pairs of compared cells; the first cell of a pair is the one that should be better."""


def claims(
    comparisons: Sequence[Comparison], costs: pd.DataFrame, family: pd.DataFrame
) -> pd.DataFrame:
    """Test the claims: a row per claim, model and ratio. Rows with the ratio ALL_RATIOS have the
    mean over ratios.

    costs: the columns `cell` and `routed_kept` (retained share of routed parameters); family: see
    `Study.family`. Returned columns:

    - claim, model, ratio; compared: number of pairs
    - difference: between the two sides of the claim, above 0 if the claim holds. It is a difference
    of Avg; for INVARIANT_SCORES, of the share of experts on which all calibration sets agree
    - low, high: the difference's 95 % interval
    - detectable: the difference that this study would find in 80 % of cases
    - p: NaN for methods with one seed; p_holm: p after Holm's correction over all rows
    - verdict: see `verdict`
    - parts: name of a group average -> difference of this average; {} for INVARIANT_SCORES
    """
    rows = [
        row
        for comparison in comparisons
        for row in (*_searched_rows(comparison), *_channel_rows(comparison, costs))
    ]
    ratios = {
        comparison.model: sorted({float(ratio) for ratio in comparison.cells["ratio"] if ratio > 0})
        for comparison in comparisons
    }
    frame = pd.DataFrame([*rows, *_invariant_rows(family, ratios)], columns=COLUMNS)
    frame["p_holm"] = uncertainty.holm(frame["p"].to_numpy(float))
    frame["verdict"] = [verdict(row["low"], row["high"], row["p_holm"]) for row in records(frame)]
    return frame


def verdict(low: float, high: float, p_holm: float) -> str:
    """Verdict on the claim that a difference is above 0. low, high: interval of the difference."""
    if np.isnan(low + high + p_holm):  # at least one of the three is NaN
        return "not tested"
    if p_holm >= LEVEL or low <= 0 <= high:
        return "undecided"
    return "holds" if low > 0 else "does not hold"


def _searched_rows(comparison: Comparison) -> list[dict[str, object]]:
    """Rows of the claim SEARCHED_ALLOCATION, one per ratio."""
    pairs = searched_pairs(comparison)
    rows = []
    for ratio, cells in cells_by_ratio(comparison.cells.loc[list(pairs)]):
        ratio_pairs = [pair for pair in pairs.items() if pair[0] in cells.index]
        rows.append(_row(comparison, SEARCHED_ALLOCATION, ratio, [ratio_pairs]))
    return rows


def _channel_rows(comparison: Comparison, costs: pd.DataFrame) -> list[dict[str, object]]:
    """Rows of the claims CHANNELS and CHANNELS_BY_CHANCE. costs: see `claims`."""
    retained = costs.set_index("cell")["routed_kept"].astype(float).reindex(comparison.cells.index)
    cells = comparison.cells.assign(kept=retained)
    cells = cells[(cells["recovery"] == "none") & (cells["ratio"] > 0)]
    is_random = cells["criterion"].isin(RANDOM)
    return [
        *_granularity_rows(comparison, CHANNELS, cells[~is_random]),
        *_granularity_rows(comparison, CHANNELS_BY_CHANCE, cells[is_random]),
    ]


def _granularity_rows(
    comparison: Comparison, claim: str, cells: pd.DataFrame
) -> list[dict[str, object]]:
    """Rows of `claim`: one per ratio, and one for ALL_RATIOS if there are several ratios. A pair is
    a cell of channels and a cell of whole experts.

    cells: pruned cells, with the column "kept" (retained share of routed parameters)."""
    # the claim is about removing experts, not about replacing them
    cells = cells[~cells["allocation"].map(has_replacement).astype(bool)]
    pairs_by_ratio = {}
    for ratio, ratio_cells in cells_by_ratio(cells):
        channels = ratio_cells.loc[ratio_cells["granularity"] == "channel", "kept"]
        experts = ratio_cells.loc[ratio_cells["granularity"] == "expert", "kept"]
        pairs = []
        for channel_cell, channel_share in channels.items():
            for expert_cell, expert_share in experts.items():
                if abs(channel_share - expert_share) < TOLERANCE:
                    # through str, because pandas' types allow any label in an index
                    pairs.append((int(str(channel_cell)), int(str(expert_cell))))
        if pairs:
            pairs_by_ratio[ratio] = pairs
    rows = [_row(comparison, claim, ratio, [pairs]) for ratio, pairs in pairs_by_ratio.items()]
    if len(rows) > 1:
        rows.append(_row(comparison, claim, ALL_RATIOS, list(pairs_by_ratio.values())))
    return rows


def _row(
    comparison: Comparison, claim: str, ratio: float | str, pairs_of_ratios: Sequence[Pairs]
) -> dict[str, object]:
    """A row of `claims`. A difference is the mean over the pairs of each ratio, then over ratios.

    pairs_of_ratios: for each ratio, its pairs of cells."""
    cells = sorted({cell for pairs in pairs_of_ratios for pair in pairs for cell in pair})
    avg_columns = overall_columns(comparison, cells)  # Avg is the mean over these columns
    quantity = comparison.quantity(avg_columns)
    targets = group_targets(comparison, cells)
    targets.pop(quantity.mean_name, None)  # Avg is not a group average
    parts = {}
    for name, target in targets.items():
        _, part_estimate = pooled_difference(comparison, target, pairs_of_ratios)
        parts[name] = part_estimate.value
    count, estimate = pooled_difference(comparison, avg_columns, pairs_of_ratios)
    numbers = _estimate_columns(replace(estimate, value=quantity.sign * estimate.value))
    if not comparison.all_have_several_seeds(cells):
        numbers["p"] = np.nan
    return {
        "claim": claim,
        "model": comparison.model,
        "ratio": ratio,
        "compared": count,
        "parts": parts,
        **numbers,
    }


def _estimate_columns(estimate: Estimate) -> dict[str, float]:
    """Each of ESTIMATE_COLUMNS -> its number from `estimate`."""
    numbers = (estimate.value, *estimate.interval, estimate.detectable_difference, estimate.p)
    return dict(zip(ESTIMATE_COLUMNS, numbers, strict=True))


def _invariant_rows(
    family: pd.DataFrame, ratios: Mapping[str, Sequence[float]]
) -> list[dict[str, object]]:
    """Rows of the claim INVARIANT_SCORES, whose difference is the mean of `layer_differences` over
    layers.

    family: see `Study.family`. ratios: model -> ratios of the model's plans."""
    rows: list[dict[str, object]] = []
    for key, scores in groups(family, ["model"]):
        if scores["calibration"].nunique() < 2:
            continue
        scores_by_layer = [overlap.scores_by_variant(layer) for _, layer in scores.groupby("layer")]
        # ratio or ALL_RATIOS -> differences (layers,)
        differences: dict[object, np.ndarray] = {
            ratio: layer_differences(scores_by_layer, ratio)
            for ratio in ratios.get(key["model"], overlap.RATIOS)
        }
        if len(differences) > 1:
            differences |= {ALL_RATIOS: np.mean(list(differences.values()), axis=0)}
        for ratio, values in differences.items():
            estimate = Estimate(float(np.mean(values)))
            if np.ptp(values) > 0:  # without variance between layers there is no interval
                estimate = uncertainty.mean_estimate(values)
            labels = {"claim": INVARIANT_SCORES, **key, "ratio": ratio, "parts": {}}
            rows.append({**labels, **_estimate_columns(estimate), "compared": len(_EXPONENTS)})
    return rows


_EXPONENTS = [
    (alpha, beta)
    for alpha in (0, 1, 2)
    for beta in (0, 1, 2)
    if (1, alpha, beta) != overlap.DEGENERATE_VARIANT
]
"""(alpha, beta) of the compared pairs S(1, alpha, beta) and S(0, alpha, beta)."""


def layer_differences(
    layers: Sequence[Mapping[tuple[int, ...], np.ndarray]], ratio: float
) -> np.ndarray:
    """Returns an array (layers,). The number of a layer is the agreement of S(1, alpha, beta) minus
    the agreement of S(0, alpha, beta), averaged over (alpha, beta).

    The agreement of a score: of the experts that the score prunes at `ratio`, the share that all
    calibration sets prune.

    layers: for each layer, (b, alpha, beta) -> scores (calibration sets, experts)."""
    differences = []
    for layer in layers:
        # [:, None, :] gives (calibration sets, 1 layer, experts)
        shares = {
            variant: overlap.agreement(overlap.bottom_sets(scores, ratio)[:, None, :])["triple"]
            for variant, scores in layer.items()
        }
        pair_differences = [
            shares[1, alpha, beta] - shares[0, alpha, beta]
            for alpha, beta in _EXPONENTS
            if {(1, alpha, beta), (0, alpha, beta)} <= set(shares)
        ]
        differences.append(np.mean(pair_differences) if pair_differences else np.nan)
    return np.asarray(differences, float)


STATEMENTS = {
    SEARCHED_ALLOCATION: "Searched allocations beat uniform ones",
    CHANNELS: "Removing channels beats removing whole experts at equal routed parameters",
    CHANNELS_BY_CHANCE: "Removing channels beats removing whole experts even at random",
    INVARIANT_SCORES: "Scores divided by the token count depend less on the calibration set than "
    "sums",
}


def _sign_of_losses(results: Results) -> str:
    """A sentence for the caption that explains the sign of differences of losses."""
    quantities = mean_quantities(results.comparisons).values()
    units = dict.fromkeys(quantity.unit for quantity in quantities if quantity.lower_is_better)
    if not units:
        return ""
    unit_names = f" ({names.enumeration(filter(None, units))})" if any(units) else ""
    return f"Differences of losses{unit_names}, also those of perplexities, are falls of the loss. "


@output("claims", chapter="claims", needs="methods that a claim of a paper compares")
def claim_table(results: Results, name: str) -> Table | None:
    """The papers' claims, tested on this study by paired differences, for each and all ratios."""
    rows = claims(results.comparisons, results.study.costs, results.study.family)
    if rows.empty:
        return None
    parts = pd.DataFrame(list(rows["parts"]), index=rows.index, dtype=float)
    columns: Columns = {
        "Model": "model",
        "Claim": "statement",
        "Pruned": "pruned",
        "Pairs": ("compared", "{:.0f}"),
        "Difference": ("difference", SCORE),
        "Detectable": ("detectable", SCORE),
        "p": ("p", "{:.4f}"),
        "p (Holm)": ("p_holm", "{:.4f}"),
        "Verdict": "verdict",
        **{column: (column, SCORE) for column in map(str, parts)},
    }
    cells = results.study.cells
    # all cells of a model and ratio have the same text
    removed_text = cells.groupby(["model", "ratio"])["removed_text"].last().to_dict()
    pruned = []
    for model, ratio in zip(rows["model"], rows["ratio"], strict=True):
        if ratio == ALL_RATIOS:
            pruned.append(ALL_RATIOS)
        else:
            pruned.append(removed_text.get((model, ratio), names.ratio(ratio)))
    rows_with_texts = rows.assign(statement=rows["claim"].map(STATEMENTS), pruned=pruned)
    return Table(
        name=name,
        title="What the papers claim",
        caption="Difference: for the first two claims, of the average, the mean over pairs of "
        "plans, paired by seed and item; channels and whole experts are paired when the shares of "
        f"routed parameters that they keep differ by less than {TOLERANCE:g}. For calibration "
        "sets, of the share of the lowest-scored experts that all sets have in common, the mean "
        "over layers. A claim is decided where the 95 % interval is on one side of 0 and p is "
        f"below {LEVEL} after Holm's correction over all rows; methods with one seed are not "
        "tested. "
        "Detectable: the difference that this study would find in 80 % of cases. The last columns "
        "are differences of group averages. "
        f"{_sign_of_losses(results)}{score_setup(results.study)}",
        **frame_and_formats(rows_with_texts.join(parts), columns),
        optional=tuple(map(str, parts)),
        # the ends of an interval have the name of the column that shows it
        low=rows[["low"]].set_axis(["Difference"], axis=1),
        high=rows[["high"]].set_axis(["Difference"], axis=1),
    )
