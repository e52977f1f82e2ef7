"""Overlap of the experts to prune between calibration sets, and between proxy scores and exact
damage: Figures 3 to 5 of Unified Expert Pruning."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moe_lab.analysis.load.passes import KEYS, PASS
from moe_lab.analysis.load.reader import groups

RATIOS = (0.25, 0.5)
"""Ratios of the published figures."""

VARIANT = ["b", "alpha", "beta"]
"""Parameters of a member S(b, alpha, beta) of the S family."""
DEGENERATE_VARIANT = (1, 0, 0)
"""The variant (b, alpha, beta) whose score N^-1 N is the same for every expert."""


def _overlaps(scores: pd.DataFrame, layer: list[str], ratio: float) -> pd.DataFrame:
    """For each layer, `overlap`: share of a bottom set that is in the bottom sets of all columns,
    and `chance`: expectation of this share if bottom sets were drawn at random. Both are NaN if the
    bottom sets are empty.

    The bottom set of n experts is the int(n x ratio) experts with the lowest scores. Of experts
    with equal scores, the first counts as the lowest.

    scores: a row per expert, sorted by expert. layer: levels of the index that identify a layer.
    """
    by_layer = scores.groupby(level=layer)
    sizes = (by_layer.transform("size") * ratio).astype(int)
    is_common = by_layer.rank(method="first").le(sizes, axis=0).all(axis=1)
    common = is_common.groupby(level=layer).agg(["sum", "size"])
    size = (common["size"] * ratio).astype(int)
    size = size.where(size > 0)
    # a random bottom set has an expert with the probability size / experts
    chance = (size / common["size"]) ** (scores.shape[1] - 1)
    return pd.DataFrame({"overlap": common["sum"] / size, "chance": chance})


def calibration_overlap(family: pd.DataFrame) -> pd.DataFrame:
    """Overlap between calibration sets, one row per model, variant and ratio. Columns: `model`,
    `b`, `alpha`, `beta`, `ratio` and

    - overlap: share of a bottom set that is in the bottom sets of all calibration sets, averaged
      over layers; NaN for DEGENERATE_VARIANT
    - chance: expectation of this share if bottom sets were drawn at random

    family: see `Study.family`.
    """
    frames = []
    layer = [*VARIANT, "layer"]
    for key, group in groups(family, ["model"]):
        scores = group.pivot(index=[*layer, "expert"], columns="calibration", values="score")
        if scores.shape[1] < 2:
            continue
        means = {
            ratio: _overlaps(scores, layer, ratio).groupby(level=VARIANT).mean() for ratio in RATIOS
        }
        overlaps = pd.concat(means, names=["ratio"]).reset_index().assign(**key)
        frames.append(overlaps.sort_values([*VARIANT, "ratio"]))
    if not frames:
        return pd.DataFrame()
    overlaps = pd.concat(frames, ignore_index=True)
    # all experts have equal scores, so their indices alone decide the bottom sets
    is_degenerate = (overlaps[VARIANT] == DEGENERATE_VARIANT).all(axis=1)
    overlaps.loc[is_degenerate, "overlap"] = np.nan
    return overlaps


def mean_over_models(overlaps: pd.DataFrame) -> pd.DataFrame:
    """Means over models of the values of `calibration_overlap` (Fig. 4), one row per ratio and
    variant."""
    return overlaps.drop(columns="model").groupby(["ratio", *VARIANT], as_index=False).mean()


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
    proxy = family[(family["b"] == 0) & (family["alpha"] == 1) & (family["beta"] == 1)]
    pairs = proxy.merge(damage, on=KEYS, suffixes=("_proxy", "_exact"))
    rows = []
    for key, group in groups(pairs, PASS):
        scores = group.set_index(["layer", "expert"])[["score_proxy", "score_exact"]].sort_index()
        for ratio in RATIOS:
            shares = _overlaps(scores, ["layer"], ratio)
            overlap, chance = shares.mean()
            lowest = shares["overlap"].min()
            rows.append(
                {**key, "ratio": ratio, "overlap": overlap, "lowest": lowest, "chance": chance}
            )
    return pd.DataFrame(rows)


def variant_names(overlaps: pd.DataFrame) -> list[str]:
    """The papers' name of the member of the S family of each row, by default S(b,α,β)."""
    return [
        _VARIANT_NAMES.get((b, alpha, beta), f"S({b},{alpha},{beta})")
        for b, alpha, beta in overlaps[VARIANT].to_numpy(int)
    ]


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
