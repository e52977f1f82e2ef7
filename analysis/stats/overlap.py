"""Overlap of the experts to prune between calibration sets, and between proxy scores and exact
damage: Figures 3 to 5 of Unified Expert Pruning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.analysis.load.reader import groups

RATIOS = (0.25, 0.5)
"""Ratios of the published figures."""

VARIANT = ["b", "alpha", "beta"]
"""Parameters of a member S(b, alpha, beta) of the S family."""
DEGENERATE_VARIANT = (1, 0, 0)
"""The variant (b, alpha, beta) whose score N^-1 N is the same for every expert."""


def bottom_sets(scores: np.ndarray, ratio: float) -> np.ndarray:
    """For `scores` (..., experts), booleans of the same shape: whether each expert is in the bottom
    set. The bottom set of n experts is the int(n x ratio) experts with the lowest scores. Among
    experts with equal scores, a lower index counts as a lower score."""
    count = int(scores.shape[-1] * ratio)
    lowest_indices = np.argsort(scores, axis=-1, kind="stable")[..., :count]
    is_lowest = np.zeros(scores.shape, bool)
    np.put_along_axis(is_lowest, lowest_indices, True, axis=-1)
    return is_lowest


def agreement(sets: np.ndarray) -> dict[str, float]:
    """Agreement of bottom sets. Keys, whose values are NaN if the bottom sets are empty:

    - overlap: share of a bottom set that is in the bottom sets of all calibration sets, averaged
      over layers
    - chance: expectation of this share if bottom sets were drawn at random

    sets: booleans (calibration sets, layers, experts): whether an expert is in the bottom set of
    its layer. All bottom sets have the same number of experts.
    """
    size = int(sets[0, 0].sum())
    if size == 0:
        return {"overlap": np.nan, "chance": np.nan}
    common_sizes = sets.all(axis=0).sum(axis=-1)
    return {
        "overlap": float(np.mean(common_sizes / size)),
        # a random bottom set has an expert with the probability size / experts
        "chance": (size / sets.shape[-1]) ** (len(sets) - 1),
    }


def calibration_overlap(family: pd.DataFrame) -> pd.DataFrame:
    """Overlap between calibration sets, one row per model,
    variant and ratio; columns `model`, `ratio`, `b`, `alpha`, `beta`, and the keys of `agreement`.

    For DEGENERATE_VARIANT, the column `overlap` is NaN.

    family: see `Study.family`.
    """
    rows = []
    for key, scores in groups(family, ["model"]):
        if scores["calibration"].nunique() < 2:
            continue
        # for each layer: variant -> scores (calibration sets, experts)
        layers = [scores_by_variant(layer) for _, layer in scores.groupby("layer")]
        for variant in sorted(set().union(*layers)):
            for ratio in RATIOS:
                overlap = _mean_agreement(
                    [layer[variant] for layer in layers if variant in layer], ratio
                )
                # all experts have equal scores, so their indices alone decide the bottom sets
                if variant == DEGENERATE_VARIANT:
                    overlap["overlap"] = np.nan
                parameters = dict(zip(VARIANT, variant, strict=True))
                rows.append({**key, "ratio": ratio, **parameters, **overlap})
    return pd.DataFrame(rows)


def scores_by_variant(layer: pd.DataFrame) -> dict[tuple[int, ...], np.ndarray]:
    """Variant (b, alpha, beta) -> scores (calibration sets, experts) of one layer.

    layer: the rows of `Study.family` for one model and layer.
    """
    score_matrix = layer.pivot(index=[*VARIANT, "calibration"], columns="expert", values="score")
    variants: Any = score_matrix.groupby(level=VARIANT)
    return {tuple(map(int, variant)): scores.to_numpy(float) for variant, scores in variants}


def _mean_agreement(layers: Sequence[np.ndarray], ratio: float) -> dict[str, float]:
    """`agreement` of the bottom sets at `ratio`, averaged over layers. The layers can have
    different numbers of experts.

    layers: for each layer, scores (calibration sets, experts).
    """
    # None adds the axis of layers
    agreements = [agreement(bottom_sets(scores, ratio)[:, None, :]) for scores in layers]
    return {name: float(np.mean([values[name] for values in agreements])) for name in agreements[0]}


def mean_over_models(overlaps: pd.DataFrame) -> pd.DataFrame:
    """Means over models of the values of `calibration_overlap` (Fig. 4), one row per ratio and
    variant."""
    return (
        overlaps.drop(columns="model")
        .groupby(["ratio", *VARIANT], as_index=False, sort=True)
        .mean()
    )


def component_effects(overlaps: pd.DataFrame) -> pd.DataFrame:
    """Mean overlap of all variants with the same value of one parameter; one row per ratio,
    parameter and value.

    Columns: ratio, component (a parameter in VARIANT), level (the parameter's value), and overlap
    (mean of the overlaps that are not NaN).
    """
    levels = overlaps.dropna(subset=["overlap"]).melt(
        ["ratio", "overlap"], VARIANT, var_name="component", value_name="level"
    )
    means = levels.groupby(["ratio", "component", "level"])["overlap"].mean()
    return means.reset_index()


def proxy_overlap(family: pd.DataFrame, damage: pd.DataFrame) -> pd.DataFrame:
    """Share of the bottom set of exact damage that is also in the bottom set of the proxy S(0,1,1)
    (Fig. 3), one row per model, calibration set and ratio.

    Columns: model, calibration, ratio, overlap (mean of the share over layers), lowest (smallest
    share of a layer), chance (expected share for random sets).

    family, damage: see `Study`.
    """
    keys = ["model", "calibration", "layer", "expert"]
    proxy = family[(family["b"] == 0) & (family["alpha"] == 1) & (family["beta"] == 1)]
    pairs = proxy[[*keys, "score"]].merge(
        damage[[*keys, "score"]], on=keys, suffixes=("_proxy", "_exact")
    )
    rows = []
    for key, frame in groups(pairs, ["model", "calibration"]):
        layers = [layer for _, layer in groups(frame.sort_values("expert"), ["layer"])]
        for ratio in RATIOS:
            shares = []
            expected_shares = []
            for layer in layers:
                proxy_set, exact_set = bottom_sets(
                    layer[["score_proxy", "score_exact"]].to_numpy(float).T, ratio
                )
                size = int(proxy_set.sum())
                shares.append((proxy_set & exact_set).sum() / size if size else np.nan)
                expected_shares.append(size / len(layer))
            rows.append(
                {
                    **key,
                    "ratio": ratio,
                    "overlap": float(np.mean(shares)),
                    "lowest": float(np.min(shares)),
                    "chance": float(np.mean(expected_shares)),
                }
            )
    return pd.DataFrame(rows)


def variant_name(b: int, alpha: int, beta: int) -> str:
    """The papers' name of a member of the S family, by default S(b,α,β)."""
    return _VARIANT_NAMES.get((b, alpha, beta), f"S({b},{alpha},{beta})")


_VARIANT_NAMES = {
    (0, 0, 0): "Frequency",
    (0, 1, 0): "SEER",
    (0, 0, 1): "EAN",
    (1, 1, 1): "REAP",
    (1, 0, 1): "MAN",
    (1, 0, 2): "MSAN",
    (0, 1, 1): "Gate-EAN",
    (0, 2, 2): "Gate energy",
}
