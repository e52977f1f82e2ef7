"""Overlap of the experts to prune across calibration sets, and between proxy scores and exact
damage.

Figures 3 to 5 of Unified Expert Pruning.

The bottom set of a layer is the r = int(n x ratio) experts with the lowest scores, ties by expert
index, as in plans. Three definitions of overlap are reported, each with the value expected for
random sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from analysis.load.reader import groups

RATIOS = (0.25, 0.5)
"""Ratios of the published figures."""

VARIANT = ["b", "alpha", "beta"]
"""Parameters of a member S(b, alpha, beta) of the S family."""
DEGENERATE = (1, 0, 0)
"""The variant N^-1 times N, which has the same score for every expert and is displayed as N/A."""

MEASURES = {
    "triple": "in all sets",
    "pairwise": "in pairs of sets",
    "jaccard": "intersection over union",
}
"""Definition of overlap -> its description; see `agreement`."""


def bottom(scores: np.ndarray, ratio: float) -> np.ndarray:
    """Mark the int(n x ratio) lowest scores (..., experts) as booleans (..., experts), ties by
    index."""
    count = int(scores.shape[-1] * ratio)
    order = np.argsort(scores, axis=-1, kind="stable")[..., :count]
    lowest = np.zeros(scores.shape, bool)
    np.put_along_axis(lowest, order, True, axis=-1)
    return lowest


def agreement(sets: np.ndarray) -> dict[str, float]:
    """Overlap of bottom sets of equal size (calibration sets, layers, experts), averaged over
    layers.

    triple: share of a bottom set that is in the bottom sets of all calibration sets; pairwise:
    share that two calibration sets have in common, the mean over pairs; jaccard: intersection over
    union of all. `chance_*`: expectation for random sets (Jaccard: ratio of expectations). NaN when
    the sets are empty."""
    size = int(sets[0, 0].sum())
    experts = sets.shape[-1]
    if size == 0:
        return {key: float("nan") for name in MEASURES for key in (name, f"chance_{name}")}
    common = sets.all(axis=0).sum(axis=-1)
    pairs = [(first & second).sum(axis=-1) for first, second in combinations(sets, 2)]
    share = size / experts
    count = len(sets)
    return {
        "triple": float(np.mean(common / size)),
        "pairwise": float(np.mean(pairs) / size),
        "jaccard": float(np.mean(common / sets.any(axis=0).sum(axis=-1))),
        "chance_triple": share ** (count - 1),
        "chance_pairwise": share,
        "chance_jaccard": share**count / (1 - (1 - share) ** count),
    }


def calibration_overlap(family: pd.DataFrame, ratios: Sequence[float] = RATIOS) -> pd.DataFrame:
    """Overlap across calibration sets of every S(b, alpha, beta): one row per model, ratio and
    variant.

    family: model, calibration, layer, expert, b, alpha, beta, score. (1, 0, 0) has NaN. Models with
    fewer than two calibration sets have no rows.
    """
    rows = []
    for model, scores in groups(family, ["model"]):
        if scores["calibration"].nunique() < 2:
            continue
        layers = [scores_by_variant(layer) for _, layer in scores.groupby("layer")]
        for variant in sorted(set().union(*layers)):
            for ratio in ratios:
                by_layer = _mean_agreement(
                    [layer[variant] for layer in layers if variant in layer], ratio
                )
                if variant == DEGENERATE:
                    by_layer |= {name: float("nan") for name in MEASURES}
                rows.append(
                    {
                        **model,
                        "ratio": ratio,
                        **dict(zip(VARIANT, variant, strict=True)),
                        **by_layer,
                    }
                )
    return pd.DataFrame(rows)


def scores_by_variant(layer: pd.DataFrame) -> dict[tuple[int, ...], np.ndarray]:
    """(b, alpha, beta) -> scores of one layer (calibration sets, experts)."""
    wide = layer.pivot(index=[*VARIANT, "calibration"], columns="expert", values="score")
    variants: Any = wide.groupby(level=VARIANT)
    return {tuple(map(int, variant)): scores.to_numpy(float) for variant, scores in variants}


def _mean_agreement(layers: Sequence[np.ndarray], ratio: float) -> dict[str, float]:
    """Agreement averaged over layers, which may have different numbers of experts."""
    measured = [agreement(bottom(scores, ratio)[:, None, :]) for scores in layers]
    return {name: float(np.mean([layer[name] for layer in measured])) for name in measured[0]}


def pooled(overlaps: pd.DataFrame) -> pd.DataFrame:
    """Mean over models (Fig. 4): one row per ratio and variant."""
    return (
        overlaps.drop(columns="model")
        .groupby(["ratio", *VARIANT], as_index=False, sort=True)
        .mean()
    )


def component_effects(overlaps: pd.DataFrame) -> pd.DataFrame:
    """Mean overlap of all variants with the same level of one component: component, level, ratio,
    overlap.

    Variants without an overlap are left out."""
    levels = overlaps.dropna(subset=["triple"]).melt(
        id_vars=["ratio", "triple"], value_vars=VARIANT, var_name="component", value_name="level"
    )
    means = levels.groupby(["component", "ratio", "level"], sort=True)["triple"].mean()
    return means.rename("overlap").reset_index()[["component", "level", "ratio", "overlap"]]


def proxy_overlap(
    family: pd.DataFrame, damage: pd.DataFrame, ratios: Sequence[float] = RATIOS
) -> pd.DataFrame:
    """Fig. 3: share of the experts in the bottom set of exact damage that are also in the bottom
    set of the proxy S(0,1,1).

    Columns: model, calibration, ratio, overlap (mean over layers), lowest (of all layers), chance
    (expectation for random sets).
    """
    keys = ["model", "calibration", "layer", "expert"]
    proxy = family[(family["b"] == 0) & (family["alpha"] == 1) & (family["beta"] == 1)]
    pairs = proxy[[*keys, "score"]].merge(
        damage[[*keys, "score"]], on=keys, suffixes=("_proxy", "_exact")
    )
    rows = []
    models = {name: position for position, name in enumerate(pairs["model"].unique())}
    pairs = pairs.assign(position=pairs["model"].map(models)).sort_values(
        ["position", "layer", "expert"], kind="stable"
    )
    for key, frame in groups(pairs, ["model", "calibration"]):
        layers = [layer for _, layer in groups(frame, ["layer"])]
        for ratio in ratios:
            shares = []
            chance = []
            for layer in layers:
                sets = bottom(layer[["score_proxy", "score_exact"]].to_numpy(float).T, ratio)
                size = int(sets[0].sum())
                shares.append((sets[0] & sets[1]).sum() / size if size else np.nan)
                chance.append(size / len(layer))
            rows.append(
                {
                    **key,
                    "ratio": ratio,
                    "overlap": float(np.mean(shares)),
                    "lowest": float(np.min(shares)),
                    "chance": float(np.mean(chance)),
                }
            )
    return pd.DataFrame(rows)


def variant_name(b: int, alpha: int, beta: int) -> str:
    """The papers' name of a member of the S family; S(b,α,β) for a member without a name."""
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
