"""Which experts a calibration set reaches: tokens per expert, and those that saw none."""

from __future__ import annotations

import pandas as pd

from analysis.frames import groups

RARE = 0.1
"""An expert below this share of an even load is called rare."""


def coverage_summary(coverage: pd.DataFrame) -> pd.DataFrame:
    """One row per model and calibration set: experts, unseen (no token), rare (under a tenth of an even load), tokens.

    `routed` counts token-expert pairs; `least` and `most` are tokens of the least and most used expert.
    """
    rows = []
    for key, frame in groups(coverage, ["model", "calibration"]):
        even = frame.groupby("layer")["tokens"].transform("mean")
        rows.append(
            {
                **key,
                "layers": frame["layer"].nunique(),
                "experts": len(frame),
                "unseen": int((frame["tokens"] == 0).sum()),
                "rare": int((frame["tokens"] < RARE * even).sum()),
                "least": int(frame["tokens"].min()),
                "median": float(frame["tokens"].median()),
                "most": int(frame["tokens"].max()),
                "routed": int(frame["tokens"].sum()),
            }
        )
    return pd.DataFrame(rows)


def unseen(coverage: pd.DataFrame) -> pd.DataFrame:
    """Experts that saw no token: model, calibration, layer and the experts' ids as a list."""
    silent = coverage[coverage["tokens"] == 0]
    return (
        silent.groupby(["model", "calibration", "layer"], sort=False)["expert"]
        .apply(list)
        .rename("experts")
        .reset_index()
    )
